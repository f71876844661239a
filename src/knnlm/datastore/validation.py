"""Checks of untrusted files before they are used.

The catalog of a store from elsewhere could contain a view that never ends, a row of the wrong types, or a journal that
makes SQLite delete a file; its files could be links to other places, or pipes.
"""

from __future__ import annotations

import re
import sqlite3
import stat
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from knnlm.errors import DatastoreCorrupt

LARGEST = 1 << 62  # of any number in a catalog: sums of two of them still fit

_BESIDE = ("", "-journal", "-wal", "-shm")  # what SQLite keeps beside a database, and itself

_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")  # ends a journal that names another file, which SQLite may delete

_PLAIN_INDEX = re.compile(r"CREATE (UNIQUE )?INDEX \w+ ON \w+ ?\( ?\w+( ?, ?\w+)* ?\)", re.IGNORECASE)

_COMPUTES = re.compile(r"\b(CHECK|GENERATED|AS|VIRTUAL|TRIGGER|COLLATE)\b|DEFAULT\s*\(", re.IGNORECASE)

_Row = TypeVar("_Row")

_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
}


def check_place(folder: Path, path: Path) -> None:
    """Reject a path within a folder that leads out of it over a link, or to something that is no file."""
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(folder.resolve()):
            raise DatastoreCorrupt(
                f"{path} is a link to {real}, outside of the store. It is not followed: copy the file there instead."
            )
        if not stat.S_ISREG(real.stat().st_mode):
            raise DatastoreCorrupt(f"{path} is not a plain file. Restore it, or make the store again.")
    except FileNotFoundError:
        return  # opening it raises the error
    except (OSError, RuntimeError, ValueError) as error:  # loops of links, names that are too long
        raise DatastoreCorrupt(f"{path} cannot be reached ({error}). Restore it, or make the store again.") from None


def check_links(folder: Path) -> None:
    """Reject to write where an entry of the folder leads out of it, since writers also remove what they do not know."""
    for entry in folder.iterdir():
        # The file of a lock is emptied when it is opened, wherever it is.
        if entry.is_symlink() and (entry.suffix == ".lock" or not entry.resolve().is_relative_to(folder.resolve())):
            raise DatastoreCorrupt(
                f"{entry} is a link to {entry.resolve()}. Nothing is written here: remove it, or copy what it leads to."
            )


def check_database(path: Path) -> None:
    """Reject a database whose files are not plain, or whose journal would have SQLite touch another file."""
    for suffix in _BESIDE:
        file = path.with_name(path.name + suffix)
        check_place(path.parent, file)
        if suffix and file.is_symlink():
            raise DatastoreCorrupt(f"{file} is a link, which SQLite never makes. Remove it.")
    journal = path.with_name(path.name + "-journal")
    if journal.is_file() and journal.stat().st_size >= len(_SUPER_JOURNAL):
        with journal.open("rb") as file_:
            file_.seek(-len(_SUPER_JOURNAL), 2)
            if file_.read() == _SUPER_JOURNAL:
                raise DatastoreCorrupt(f"{journal} names another file, which no journal of a store does. Remove it.")


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Reject a catalog that has more than plain tables and indexes: anything else could compute when it is read."""
    connection.execute("PRAGMA trusted_schema=OFF")
    connection.execute("PRAGMA cell_size_check=ON")
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall():
        text = " ".join(str(sql or "").split())
        plain = kind == "table" and not _COMPUTES.search(text)
        # An index without a statement is the one that SQLite makes itself for a primary key.
        if not plain and not (kind == "index" and (sql is None or _PLAIN_INDEX.fullmatch(text))):
            raise DatastoreCorrupt(
                f"{path} holds the {kind} {str(name)[:80]!r}, which is no part of a catalog. Do not use this store, "
                "or build it again."
            )


def typed(kind: type[_Row], row: tuple[Any, ...], path: Path) -> _Row:
    """Make a dataclass of a row of a table after checking its numbers, none of them negative, and its texts."""
    columns = fields(kind)  # type: ignore[arg-type]
    table = kind.__name__
    if len(row) > len(columns):
        raise DatastoreCorrupt(f"{path}: a {table} has {len(row)} columns instead of {len(columns)}. Build it again.")
    for column, value in zip(columns, row, strict=False):
        allowed = _KINDS.get(str(column.type), (object,))
        outside = isinstance(value, int) and not 0 <= value < LARGEST
        if not isinstance(value, allowed) or outside:
            shown = repr(value)[:80]
            raise DatastoreCorrupt(
                f"{path}: a {table} has {shown} as {column.name}. The catalog is damaged: run knnlm verify on it."
            )
    try:
        return kind(*row)
    except TypeError:
        raise DatastoreCorrupt(f"{path}: a {table} has {len(row)} columns, which is too few. Build it again.") from None
