"""Sum up what the tables of a catalog say, so that a cell that is not as it was written is noticed.

Knows nothing about what the cells mean. Every row has a SHA-256, and those of a part are added up: a change costs as
much as the rows that it touches, in whatever order they come. A part is a table, or 1,024 numbers of documents, of
which one can be looked up without reading all. The sums are rows of the table `digests`, and change with the rows they
are of, in one transaction. Which rows come and go is told by triggers that live in the writer's connection only; the
file has none.

A sum guards against damage, not against a stranger, who would make it right.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from knnlm.errors import DatastoreCorrupt

TABLE = "digests"
BLOCK = 1024  # numbers of documents in one part
_BLOCKS = ("documents", "fields")  # the tables that are cut into blocks, by the number of a document
END = 1 << 256  # where sums begin again
_NOTHING = f"{0:064x}"
_BY_HASH = "documents_by_hash"
_LACKING = f"""
SELECT 1 FROM documents AS one NOT INDEXED WHERE NOT EXISTS (
    SELECT 1 FROM documents AS other INDEXED BY {_BY_HASH}
    WHERE other.sha256 = one.sha256 AND other.number = one.number
) LIMIT 1
"""  # noqa: S608  (ours)


def row_sum(table: str, row: Iterable[object]) -> int:
    """Hash a row of a table."""
    return int.from_bytes(hashlib.sha256(json.dumps([table, *row]).encode()).digest(), "big")


def part_of(table: str, number: object) -> str:
    """Name the part that a row belongs to, by its first cell."""
    return f"{table} {number // BLOCK}" if table in _BLOCKS and isinstance(number, int) else table


def there(connection: sqlite3.Connection) -> bool:
    """Say whether a catalog has sums."""
    asked = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(asked, (TABLE,)).fetchone() is not None


def tables(connection: sqlite3.Connection) -> list[str]:
    """Name the tables that are summed up."""
    asked = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' AND name <> ?"
    names = (name for (name,) in connection.execute(asked, (TABLE,)))
    return sorted(name.decode() if isinstance(name, bytes) else name for name in names)


def found_sums(connection: sqlite3.Connection, table: str, block: int | None = None) -> dict[str, str]:
    """Sum up a table, or one block of its numbers, as it is now: the sums by part."""
    # Not from an index, whose copies of cells may be others.
    query = f"SELECT * FROM {_quoted(table)} NOT INDEXED"  # noqa: S608  (a table that is there)
    if block is not None:
        query += f" WHERE number >= {block * BLOCK} AND number < {(block + 1) * BLOCK}"
    sums: dict[str, int] = {}
    for row in connection.execute(query):
        part = part_of(table, row[0])
        sums[part] = sums.get(part, 0) + row_sum(table, row)
    return {part: f"{total % END:064x}" for part, total in sums.items()}


def kept_sums(connection: sqlite3.Connection) -> dict[str, str]:
    """Give the sums that were written down, by part."""
    pairs = connection.execute(f"SELECT part, sum FROM {TABLE} ORDER BY part")  # noqa: S608  (ours)
    return {str(part): str(total) for part, total in pairs}


def differing(connection: sqlite3.Connection, table: str | None = None, block: int | None = None) -> list[str]:
    """Name the parts of a table, of one block of it, or of all tables, whose sums are not those written down."""
    kept = kept_sums(connection)
    if table is None:
        found = {part: total for each in tables(connection) for part, total in found_sums(connection, each).items()}
    else:
        found = found_sums(connection, table, block)
        wanted = table if block is None else part_of(table, block * BLOCK)
        kept = {part: kept[part] for part in kept if wanted in (part, part.partition(" ")[0])}
    # A part of no rows need not be there.
    return sorted(part for part in found.keys() | kept.keys() if found.get(part, _NOTHING) != kept.get(part, _NOTHING))


def fill(connection: sqlite3.Connection) -> None:
    """Write the sums of all that is there now, whatever they were; within a transaction."""
    connection.execute(f"DELETE FROM {TABLE}")  # noqa: S608
    for table in tables(connection):
        sums = found_sums(connection, table)
        connection.executemany(f"INSERT INTO {TABLE} VALUES (?, ?)", sums.items())  # noqa: S608


class Compared:
    """What a reader has compared with its sums so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: set[str] = set()

    def lacks(self, table: str, number: int | None = None) -> bool:
        """Say whether a table, or the part of it that holds a document, is still to be compared."""
        return not {table, table if number is None else part_of(table, number)} & self._parts

    def check(self, connection: sqlite3.Connection, table: str, number: int | None = None) -> None:
        """Refuse what is not as it was written."""
        wrong = differing(connection, table, None if number is None else number // BLOCK)
        if wrong:
            raise DatastoreCorrupt(
                f"{self._path} is not as it was written: the SHA-256 of its {wrong[0]} is another. Restore it, or "
                f"run: knnlm repair {self._path.parent}"
            )
        self._parts.add(table if number is None else part_of(table, number))

    def check_hashes(self, connection: sqlite3.Connection) -> None:
        """Refuse, once, an index by hash that lacks a document: it alone is asked whether a text is stored."""
        asked = "SELECT 1 FROM sqlite_master WHERE type = 'index' AND name = ?"
        needed = _BY_HASH not in self._parts and connection.execute(asked, (_BY_HASH,)).fetchone()
        if needed and connection.execute(_LACKING).fetchone():
            raise DatastoreCorrupt(
                f"{self._path} is damaged (its index by hash lacks a document). Run: knnlm repair {self._path.parent}"
            )
        self._parts.add(_BY_HASH)


class Tally:
    """What a writer's transaction adds to the sums, and takes from them."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.running = False  # sums are behind, until they are settled
        self._changes: dict[str, int] = {}
        self._watched: int | None = None
        connection.create_function("knnlm_tally", -1, self._note)

    def begin(self, connection: sqlite3.Connection) -> None:
        """Watch what the transaction that has just begun does."""
        self._changes.clear()
        self.running = True
        if self._watched != (version := _version(connection)):
            for table in tables(connection):
                _watch(connection, table)
            self._watched = version

    def settle(self, connection: sqlite3.Connection) -> None:
        """Write the new sums, as the last act of the transaction."""
        if self._watched != _version(connection):
            fill(connection)  # tables have other columns now, or there are more of them
            self._watched = None
        else:
            kept = kept_sums(connection)
            new = {part: int(kept.get(part, "0"), 16) + change for part, change in self._changes.items()}
            connection.executemany(
                f"INSERT INTO {TABLE} VALUES (?, ?) ON CONFLICT (part) DO UPDATE SET sum = excluded.sum",  # noqa: S608
                ((part, f"{total % END:064x}") for part, total in new.items()),
            )
        self.running = False

    def forget(self) -> None:
        """The transaction was taken back, and what watched it with it."""
        self.running, self._watched = False, None

    def _note(self, table: str, sign: int, *row: object) -> None:
        assert self.running, "rows change within a transaction that settles their sums"
        part = part_of(table, row[0])
        self._changes[part] = self._changes.get(part, 0) + sign * row_sum(table, row)


def _watch(connection: sqlite3.Connection, table: str) -> None:
    """Have rows that come and go noted, by triggers of this connection."""
    columns = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))]

    def note(sign: int, which: str) -> str:
        return f"knnlm_tally({_text(table)}, {sign}, {', '.join(f'{which}.{_quoted(name)}' for name in columns)})"

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
