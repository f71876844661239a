"""Digests of the catalog's rows, which detect damage of the database.

Every row has a SHA-256, and those of a part are added up, so a change costs as much as the rows that it touches. A part
is a table, or 1,024 consecutive documents, of which one can be checked without reading all. The digests are rows of the
table `digests` and change with the rows in one transaction; temporary triggers of the writer's connection report which
rows change. Digests detect damage, not forgery.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from knnlm.errors import DatastoreCorrupt

DIGESTS_TABLE = "digests"
ROWS_PER_BLOCK = 1024  # document numbers in one part
DIGEST_MODULUS = 1 << 256

_PARTITIONED_TABLES = ("documents", "fields", "sources")  # divided into parts by the number of a document
_ZERO_DIGEST = f"{0:064x}"
_HASH_INDEX = "documents_by_hash"
_NOT_INDEXED = f"""
SELECT 1 FROM documents AS one NOT INDEXED WHERE NOT EXISTS (
    SELECT 1 FROM documents AS other INDEXED BY {_HASH_INDEX}
    WHERE other.sha256 = one.sha256 AND other.number = one.number
) LIMIT 1
"""  # noqa: S608  (constant)


def row_digest(table: str, row: Iterable[object]) -> int:
    """Return the SHA-256 of a row of a table."""
    return int.from_bytes(hashlib.sha256(json.dumps([table, *row]).encode()).digest(), "big")


def part_of(table: str, number: object) -> str:
    """Return the name of the part of a row, by the row's first column."""
    return f"{table} {number // ROWS_PER_BLOCK}" if table in _PARTITIONED_TABLES and isinstance(number, int) else table


def table_names(connection: sqlite3.Connection) -> list[str]:
    """List the tables of a catalog."""
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    names = (name for (name,) in connection.execute(query))
    return sorted(name.decode() if isinstance(name, bytes) else name for name in names)


def digested_tables(connection: sqlite3.Connection) -> list[str]:
    """List the tables that have digests."""
    return [name for name in table_names(connection) if name != DIGESTS_TABLE]


def compute_digests(connection: sqlite3.Connection, table: str, block: int | None = None) -> dict[str, str]:
    """Return the digests of a table as it is now, or of one block of document numbers, by part."""
    # NOT INDEXED: an index has its own copies of values, which may differ.
    query = f"SELECT * FROM {_quoted(table)} NOT INDEXED"  # noqa: S608  (the name of an existing table)
    if block is not None:
        query += f" WHERE number >= {block * ROWS_PER_BLOCK} AND number < {(block + 1) * ROWS_PER_BLOCK}"
    digests: dict[str, int] = {}
    for row in connection.execute(query):
        part = part_of(table, row[0])
        digests[part] = digests.get(part, 0) + row_digest(table, row)
    return {part: f"{total % DIGEST_MODULUS:064x}" for part, total in digests.items()}


def stored_digests(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the digests in the catalog, by part."""
    pairs = connection.execute(f"SELECT part, digest FROM {DIGESTS_TABLE} ORDER BY part")  # noqa: S608  (constant)
    return {str(part): str(total) for part, total in pairs}


def mismatched_parts(connection: sqlite3.Connection, table: str | None = None, block: int | None = None) -> list[str]:
    """Return the parts of a table, of one block of it, or of all tables, that do not match their digests."""
    kept = stored_digests(connection)
    if table is None:
        found = {
            part: total
            for each in digested_tables(connection)
            for part, total in compute_digests(connection, each).items()
        }
    else:
        found = compute_digests(connection, table, block)
        wanted = table if block is None else part_of(table, block * ROWS_PER_BLOCK)
        kept = {part: kept[part] for part in kept if wanted in (part, part.partition(" ")[0])}
    # A part without rows may have no digest.
    return sorted(
        part for part in found.keys() | kept.keys() if found.get(part, _ZERO_DIGEST) != kept.get(part, _ZERO_DIGEST)
    )


def recompute_digests(connection: sqlite3.Connection) -> None:
    """Write the digests of all tables as they are now, within the caller's transaction."""
    connection.execute(f"DELETE FROM {DIGESTS_TABLE}")  # noqa: S608
    for table in digested_tables(connection):
        digests = compute_digests(connection, table)
        connection.executemany(f"INSERT INTO {DIGESTS_TABLE} VALUES (?, ?)", digests.items())  # noqa: S608


class VerifiedTables:
    """The parts of a catalog that a reader has compared with their digests."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: set[str] = set()

    def needs_check(self, table: str, number: int | None = None) -> bool:
        """Whether a table, or its part with a document, has not been compared yet."""
        return not {table, table if number is None else part_of(table, number)} & self._parts

    def check(self, connection: sqlite3.Connection, table: str, number: int | None = None) -> None:
        """Raise on a checksum mismatch in a table, or in its part with a document."""
        wrong = mismatched_parts(connection, table, None if number is None else number // ROWS_PER_BLOCK)
        if wrong:
            raise DatastoreCorrupt(
                f"{self._path} is corrupt: checksum mismatch (SHA-256) in {wrong[0]}. Restore it, or "
                f"run: knnlm repair {self._path.parent}"
            )
        self._parts.add(table if number is None else part_of(table, number))

    def check_hashes(self, connection: sqlite3.Connection) -> None:
        """Raise, once, if the index by hash lacks a document: `Catalog.has_text` reads only this index."""
        exists = "SELECT 1 FROM sqlite_master WHERE type = 'index' AND name = ?"
        needed = _HASH_INDEX not in self._parts and connection.execute(exists, (_HASH_INDEX,)).fetchone()
        if needed and connection.execute(_NOT_INDEXED).fetchone():
            raise DatastoreCorrupt(
                f"{self._path} is corrupt (its index by hash lacks a document). Run: knnlm repair {self._path.parent}"
            )
        self._parts.add(_HASH_INDEX)


class DigestUpdates:
    """The changes of digests in a writer's transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.running = False  # in a transaction, before `write`: the stored digests are stale
        self._changes: dict[str, int] = {}
        self._watched: int | None = None
        connection.create_function("knnlm_digest", -1, self._note)

    def begin(self, connection: sqlite3.Connection) -> None:
        """Record the changes of the transaction that has just begun."""
        self._changes.clear()
        self.running = True
        if self._watched != (version := _version(connection)):
            for table in digested_tables(connection):
                _watch(connection, table)
            self._watched = version

    def write(self, connection: sqlite3.Connection) -> None:
        """Write the new digests, as the last statement of the transaction."""
        if self._watched != _version(connection):
            recompute_digests(connection)  # tables or columns were added
            self._watched = None
        else:
            kept = stored_digests(connection)
            new = {part: int(kept.get(part, "0"), 16) + change for part, change in self._changes.items()}
            connection.executemany(
                f"INSERT INTO {DIGESTS_TABLE} VALUES (?, ?) ON CONFLICT (part) DO UPDATE SET digest = excluded.digest",  # noqa: S608
                ((part, f"{total % DIGEST_MODULUS:064x}") for part, total in new.items()),
            )
        self.running = False

    def discard(self) -> None:
        """Forget the changes and triggers of a transaction that was rolled back."""
        self.running, self._watched = False, None

    def _note(self, table: str, sign: int, *row: object) -> None:
        assert self.running, "rows change only in a transaction that updates their digests"
        part = part_of(table, row[0])
        self._changes[part] = self._changes.get(part, 0) + sign * row_digest(table, row)


def _watch(connection: sqlite3.Connection, table: str) -> None:
    """Create triggers of this connection that record inserted, updated and deleted rows."""
    columns = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))]

    def note(sign: int, which: str) -> str:
        return f"knnlm_digest({_text(table)}, {sign}, {', '.join(f'{which}.{_quoted(name)}' for name in columns)})"

    new, old = note(1, "NEW"), note(-1, "OLD")
    for event, notes in (("INSERT", new), ("DELETE", old), ("UPDATE", f"{old}, {new}")):
        name = _quoted(f"knnlm_{table}_{event.lower()}")
        connection.execute(f"DROP TRIGGER IF EXISTS temp.{name}")
        connection.execute(
            f"CREATE TEMP TRIGGER {name} AFTER {event} ON main.{_quoted(table)} BEGIN SELECT {notes}; END"
        )


def _version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("SELECT schema_version FROM pragma_schema_version").fetchone()[0]
    return version


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"
