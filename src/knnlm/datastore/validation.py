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

MAX_INTEGER = 1 << 62  # in a catalog: the sum of two still fits into 64 bits

_DATABASE_SUFFIXES = ("", "-journal", "-wal", "-shm")  # of a database and SQLite's files beside it
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")  # ends a journal that names another file, which SQLite may delete
_PLAIN_INDEX = re.compile(r"CREATE (UNIQUE )?INDEX \w+ ON \w+ ?\( ?\w+( ?, ?\w+)* ?\)", re.IGNORECASE)
_COMPUTED = re.compile(r"\b(CHECK|GENERATED|AS|VIRTUAL|TRIGGER|COLLATE)\b|DEFAULT\s*\(", re.IGNORECASE)
_COLUMN_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
}

_Row = TypeVar("_Row")


def check_regular_file(folder: Path, path: Path) -> None:
    """Raise if a path inside a folder is a link to outside of it, or not a regular file."""
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(folder.resolve()):
            raise DatastoreCorrupt(
                f"{path} is a link to {real}, outside of the store. Links are not followed: copy the file here instead."
            )
        if not stat.S_ISREG(real.stat().st_mode):
            raise DatastoreCorrupt(f"{path} is not a regular file. Restore it, or build the store again.")
    except FileNotFoundError:
        return  # opening it raises the error
    except (OSError, RuntimeError, ValueError) as error:  # link loops, too long names
        raise DatastoreCorrupt(f"{path} cannot be opened ({error}). Restore it, or build the store again.") from None


def check_links(folder: Path) -> None:
    """Raise if an entry of a folder is a link to outside of it: writers also remove files they do not recognise."""
    for entry in folder.iterdir():
        # Opening a lock file truncates it, wherever a link points.
        if entry.is_symlink() and (entry.suffix == ".lock" or not entry.resolve().is_relative_to(folder.resolve())):
            raise DatastoreCorrupt(
                f"{entry} is a link to {entry.resolve()}. Nothing was written: remove the link, or copy its target."
            )


def check_database(path: Path) -> None:
    """Raise if a database's files are not regular, or if its journal names another file."""
    for suffix in _DATABASE_SUFFIXES:
        file = path.with_name(path.name + suffix)
        check_regular_file(path.parent, file)
        if suffix and file.is_symlink():
            raise DatastoreCorrupt(f"{file} is a link, which SQLite never creates. Remove it.")
    journal = path.with_name(path.name + "-journal")
    if journal.is_file() and journal.stat().st_size >= len(_SUPER_JOURNAL):
        with journal.open("rb") as file_:
            file_.seek(-len(_SUPER_JOURNAL), 2)
            if file_.read() == _SUPER_JOURNAL:
                raise DatastoreCorrupt(f"{journal} names another file, unlike any journal of a store. Remove it.")


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raise if a catalog has more than plain tables and indexes: reading anything else could run code."""
    connection.execute("PRAGMA trusted_schema=OFF")
    connection.execute("PRAGMA cell_size_check=ON")
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall():
        text = " ".join(str(sql or "").split())
        plain = kind == "table" and not _COMPUTED.search(text)
        # SQLite's own index of a primary key has no statement.
        if not plain and not (kind == "index" and (sql is None or _PLAIN_INDEX.fullmatch(text))):
            raise DatastoreCorrupt(
                f"{path} contains the {kind} {str(name)[:80]!r}, which does not belong into a catalog. Do not use this "
                "store, or build it again."
            )


def parse_row(kind: type[_Row], row: tuple[Any, ...], path: Path) -> _Row:
    """Return a row of a table as a dataclass, after checking the types of its values and the range of its integers."""
    columns = fields(kind)  # type: ignore[arg-type]
    table = kind.__name__
    if len(row) > len(columns):
        raise DatastoreCorrupt(
            f"{path}: a {table} has {len(row)} columns instead of {len(columns)}. Build the store again."
        )
    for column, value in zip(columns, row, strict=False):
        allowed = _COLUMN_TYPES.get(str(column.type), (object,))
        outside = isinstance(value, int) and not 0 <= value < MAX_INTEGER
        if not isinstance(value, allowed) or outside:
            shown = repr(value)[:80]
            raise DatastoreCorrupt(
                f"{path}: a {table} has {shown} as {column.name}. The catalog is corrupt: run knnlm verify."
            )
    try:
        return kind(*row)
    except TypeError:
        raise DatastoreCorrupt(
            f"{path}: a {table} has {len(row)} columns, which is too few. Build the store again."
        ) from None
