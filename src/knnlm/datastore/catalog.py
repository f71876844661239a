"""The catalog of a memory: one SQLite file that says what exists. Knows nothing about arrays or models.

A segment exists when its row is committed. Anything else on disk is garbage that the next writer removes. Format 1 is a
memory as it was built: every row has a key, and keys are what the model gave. Where that is not so, because rows were
pruned or keys were mapped, the format is 2, so that a program that knows only the first refuses it. Where keys are
stored as bytes or codes, it is 4.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnlm.errors import DatastoreCorrupt, DatastoreError

BUILT, DERIVED, CODED = 1, 2, 4  # formats
LANGUAGE_MODEL = "language_model"  # the fact that names the model that a memory is for, if that is not its reader
FILE = "catalog.db"

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE segments (
    id INTEGER PRIMARY KEY,
    first_row INTEGER NOT NULL,
    rows INTEGER NOT NULL,
    scale REAL NOT NULL,
    keys_sha256 TEXT NOT NULL,
    values_sha256 TEXT NOT NULL
);
CREATE TABLE documents (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    source TEXT NOT NULL,
    segment INTEGER NOT NULL REFERENCES segments(id),
    first_row INTEGER NOT NULL,
    rows INTEGER NOT NULL,
    sha256 TEXT NOT NULL
);
CREATE INDEX documents_by_row ON documents(first_row);
CREATE INDEX documents_by_hash ON documents(sha256);
CREATE TABLE indexes (
    id INTEGER PRIMARY KEY,
    spec TEXT NOT NULL,
    metric TEXT NOT NULL,
    rows INTEGER NOT NULL,
    sha256 TEXT NOT NULL
);
"""
_SCHEMA_DERIVED = """
ALTER TABLE segments ADD COLUMN kept INTEGER;
ALTER TABLE segments ADD COLUMN kept_sha256 TEXT;
ALTER TABLE segments ADD COLUMN counts_sha256 TEXT;
"""


@dataclass(frozen=True)
class SegmentRow:
    """One segment: rows first_row … first_row + rows - 1 of the memory; keys are stored divided by `scale`."""

    id: int
    first_row: int
    rows: int
    scale: float
    keys_sha256: str
    values_sha256: str
    kept: int | None = None  # how many of the rows have a key; None: all
    kept_sha256: str | None = None
    counts_sha256: str | None = None  # None: each key counts once

    @property
    def keys(self) -> int:
        """The number of keys."""
        return self.rows if self.kept is None else self.kept


@dataclass(frozen=True)
class StoredDocument:
    """One document and the rows that hold its tokens."""

    number: int
    id: str
    source: str
    segment: int
    first_row: int
    rows: int
    sha256: str


@dataclass(frozen=True)
class IndexRow:
    """One index over the first `rows` keys."""

    id: int
    spec: str
    metric: str
    rows: int
    sha256: str


class Catalog:
    """Typed access to the catalog file."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path

    @classmethod
    def create(cls, path: Path, meta: dict[str, Any], *, derived: bool = False, coded: bool = False) -> Catalog:
        """Make a new catalog that already holds `meta`; it appears complete or not at all."""
        partial = path.with_suffix(".partial")
        # A journal that outlived its catalog would be played back into the new one.
        for leftover in (partial, path.with_suffix(".partial-journal")):
            leftover.unlink(missing_ok=True)
        with _reporting(path):
            catalog = cls(sqlite3.connect(partial, isolation_level=None), partial)
            catalog._connection.executescript(_SCHEMA + _SCHEMA_DERIVED if derived or coded else _SCHEMA)
            catalog.put(format=CODED if coded else DERIVED if derived else BUILT, **meta)
            catalog.close()
        partial.rename(path)
        return cls.open(path, write=True, copying=True)

    @classmethod
    def open(cls, path: Path, *, write: bool = False, copying: bool = False) -> Catalog:
        """Open an existing catalog, for reading unless told otherwise.

        An unfinished copy of another memory is written to by those only who say that they are `copying`.
        """
        if not path.parent.exists():
            raise DatastoreError(f"There is no folder {path.parent}. Make a memory with: knnlm build")
        if not path.is_file():
            raise DatastoreError(f"{path.parent} is not a memory: it has no {path.name}. Make one with: knnlm build")
        with _reporting(path):
            # Readers too, where they may: only so can SQLite take back what a killed writer left half done.
            may_write = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
            uri = f"{path.resolve().as_uri()}?mode={'rw' if write or may_write else 'ro'}"
            connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA synchronous=FULL" if write else "PRAGMA query_only=ON")
            catalog = cls(connection, path)
            found = catalog.get("format")
        if found is None:
            raise DatastoreCorrupt(f"{path} is not a knnlm catalog. Build the memory again.")
        if found not in (BUILT, DERIVED, CODED):
            raise DatastoreError(
                f"{path.parent} has format version {found}, this knnlm reads version {BUILT}, {DERIVED} or {CODED}. "
                "Install the knnlm that made it, or build the memory again."
            )
        if write and not copying and catalog.get("derived") is not None and catalog.get("state") != "complete":
            catalog.close()
            raise DatastoreError(
                f"{path.parent} is an unfinished copy of another memory, as knnlm prune and knnlm distill --into keys "
                "make them. Finish it with the command that began it, choose another --out, or remove it."
            )
        return catalog

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def get(self, key: str) -> Any:
        """Read one fact about the memory; None where it is not known."""
        with _reporting(self.path):
            row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
            return None if row is None else json.loads(row[0])

    def put(self, **facts: Any) -> None:
        """Write facts about the memory, all or none."""
        with self._transaction():
            for key, value in facts.items():
                self._put(key, value)

    def segments(self) -> list[SegmentRow]:
        """List the segments in the order of their rows."""
        return [SegmentRow(*row) for row in self._all("SELECT * FROM segments ORDER BY id")]

    def indexes(self) -> list[IndexRow]:
        """List the indexes, oldest first."""
        return [IndexRow(*row) for row in self._all("SELECT * FROM indexes ORDER BY id")]

    def documents(self) -> Iterator[StoredDocument]:
        """Give the documents in the order of their rows, without holding them all in memory."""
        with _reporting(self.path):
            for row in self._connection.execute("SELECT * FROM documents ORDER BY number"):
                yield StoredDocument(*row)

    def documents_of(self, segment: int) -> list[StoredDocument]:
        """List the documents of one segment."""
        return [
            StoredDocument(*row)
            for row in self._all("SELECT * FROM documents WHERE segment = ? ORDER BY number", segment)
        ]

    def document_count(self) -> int:
        """Count the documents."""
        return int(self._all("SELECT COUNT(*) FROM documents")[0][0])

    def holds(self, sha256: str) -> bool:
        """Say whether a document with this hash of its text is stored."""
        return bool(self._all("SELECT 1 FROM documents WHERE sha256 = ? LIMIT 1", sha256))

    def document_at(self, row: int) -> StoredDocument:
        """Find the document that holds a row."""
        found = self._all(
            "SELECT * FROM documents WHERE first_row <= ? AND rows > 0 ORDER BY first_row DESC LIMIT 1", row
        )
        if not found:
            raise DatastoreCorrupt(f"{self.path} has no document for row {row}. Build the memory again.")
        return StoredDocument(*found[0])

    def add_segment(self, segment: SegmentRow, documents: Iterable[StoredDocument], **facts: Any) -> None:
        """Commit a segment, its documents and facts that hold from now on, all or none."""
        with self._transaction():
            # A memory as it was built has no columns for what only derived ones have.
            if self.get("format") == BUILT:
                self._connection.execute("INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?)", _values(segment)[:6])
            else:
                self._connection.execute("INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", _values(segment))
            self._connection.executemany(
                "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?)",
                (_values(document) for document in documents),
            )
            for key, value in facts.items():
                self._put(key, value)

    def replace_keys(self, segments: Iterable[SegmentRow], **facts: Any) -> None:
        """Say that segments have other files of keys now, and facts that hold from now on, all or none."""
        with self._transaction():
            self._connection.executemany(
                "UPDATE segments SET scale = ?, keys_sha256 = ? WHERE id = ?",
                ((segment.scale, segment.keys_sha256, segment.id) for segment in segments),
            )
            for key, value in facts.items():
                self._put(key, value)

    def replace_indexes(self, index: IndexRow | None) -> None:
        """Make this the only index, or let there be none."""
        with self._transaction():
            self._connection.execute("DELETE FROM indexes")
            if index is not None:
                self._connection.execute("INSERT INTO indexes VALUES (?, ?, ?, ?, ?)", _values(index))

    def _put(self, key: str, value: Any) -> None:
        self._connection.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (key, json.dumps(value, sort_keys=True)),
        )

    def _all(self, query: str, *values: Any) -> list[Any]:
        with _reporting(self.path):
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _reporting(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Turn an error of SQLite into one of ours that names the file."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise DatastoreError(f"{path} is in use by another process. Try again when it has finished.") from None
        if "malformed" in str(error) or "no such table" in str(error) or "no such column" in str(error):
            raise DatastoreCorrupt(f"{path} is damaged ({error}). Build the memory again.") from None
        raise DatastoreError(f"Cannot use {path}: {error}. Check the disk and the permissions.") from None
    except sqlite3.DatabaseError as error:
        raise DatastoreCorrupt(f"{path} is damaged ({error}). Build the memory again.") from None
    except (json.JSONDecodeError, TypeError) as error:
        raise DatastoreCorrupt(f"{path} holds a fact that cannot be read ({error}). Build it again.") from None


def _values(row: Any) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in row.__dataclass_fields__)
