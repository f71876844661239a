"""The tables of a catalog, by what a memory needs, and their rows. Knows nothing about who reads them."""

from __future__ import annotations

from dataclasses import dataclass, field

from knnlm.records import Fields

BUILT = """
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
DERIVED = """
ALTER TABLE segments ADD COLUMN kept INTEGER;
ALTER TABLE segments ADD COLUMN kept_sha256 TEXT;
ALTER TABLE segments ADD COLUMN counts_sha256 TEXT;
"""
LIVING = """
CREATE TABLE removed (
    number INTEGER PRIMARY KEY,
    segment INTEGER NOT NULL,
    first_row INTEGER NOT NULL,
    rows INTEGER NOT NULL
)
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
    fields: Fields = field(default_factory=dict, hash=False)  # of the user's record; in a table of their own


@dataclass(frozen=True)
class RemovedRow:
    """The rows of a document that is no longer there; their bytes go with the next compaction."""

    number: int
    segment: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class IndexRow:
    """One index over the first `rows` keys; those that were removed before it was made are not counted."""

    id: int
    spec: str
    metric: str
    rows: int
    sha256: str
