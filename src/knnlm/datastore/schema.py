"""The tables of a catalog, as its format grew, and their rows. Knows nothing about who reads them.

Open the file of a catalog with SQLite, and say in our words what goes wrong. Knows nothing about what it holds.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from knnlm.corpus import Fields
from knnlm.datastore.frozen import open_frozen
from knnlm.datastore.paths import COUNTS_FILE, KEPT_FILE, KEYS_FILE, VALUES_FILE
from knnlm.errors import DatastoreCorrupt, DatastoreError, KnnlmError

VERSION = 5  # the format that is written, which has sums; those below are read

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
);
"""

FIELDED = """
CREATE TABLE fields (number INTEGER PRIMARY KEY, record TEXT NOT NULL);
"""

SUMMED = """
CREATE TABLE digests (part TEXT PRIMARY KEY, sum TEXT NOT NULL) WITHOUT ROWID;
"""

NEWEST = BUILT + DERIVED + LIVING + FIELDED + SUMMED


def check_format(path: Path, get: Callable[[str], object], *, summed: bool, copying: bool) -> None:
    """Refuse a catalog that this knnlm does not know, and an unfinished copy unless one is `copying`."""
    found, folder = get("format"), path.parent
    if found is None:
        raise DatastoreCorrupt(f"{path} is not a knnlm catalog. Build the memory again.")
    if type(found) is not int or not 1 <= found <= VERSION:
        newer = isinstance(found, int) and found > VERSION
        raise DatastoreError(
            f"{folder} has format version {found}, this knnlm reads versions up to {VERSION}. "
            + ("Upgrade knnlm: pip install -U knnlm" if newer else "Build the memory again.")
        )
    if found == VERSION and not summed:
        raise DatastoreCorrupt(f"{path} is damaged (it has no sums). Restore it, or build the memory again.")
    if not copying and get("derived") is not None and get("state") != "complete":
        raise DatastoreError(
            f"{folder} is an unfinished copy of another memory, as knnlm prune and knnlm distill --into keys make "
            "them. Finish it with the command that began it, choose another --out, or remove it."
        )


def upgrade(connection: sqlite3.Connection) -> None:
    """Give the tables of an older format what those of the newest have, within a transaction."""
    columns = {row[1] for row in connection.execute("SELECT * FROM pragma_table_info('segments')")}
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    wanted = {LIVING: "removed" in tables, FIELDED: "fields" in tables, SUMMED: "digests" in tables}
    for script, there in {DERIVED: "kept" in columns, **wanted}.items():
        for statement in [] if there else script.split(";")[:-1]:
            connection.execute(statement)


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


_BROKEN = ("malformed", "no such table", "no such column", "decode to UTF-8")  # what SQLite says of other bytes


@contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Turn an error of SQLite into one of ours that names the file."""
    try:
        yield
    except KnnlmError:  # some are errors of Python's too
        raise
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise DatastoreError(f"{path} is in use by another process. Try again when it has finished.") from None
        if any(words in str(error) for words in _BROKEN):
            raise DatastoreCorrupt(f"{path} is damaged ({error}). Build the memory again.") from None
        raise DatastoreError(f"Cannot use {path}: {error}. Check the disk and the permissions.") from None
    except sqlite3.DatabaseError as error:
        raise DatastoreCorrupt(f"{path} is damaged ({error}). Build the memory again.") from None
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise DatastoreCorrupt(f"{path} holds a fact that cannot be read ({error}). Build it again.") from None


def connect(path: Path, *, write: bool) -> sqlite3.Connection:
    """Open the file for SQLite."""
    # Readers too may write, where they can: only so can SQLite take back what a killed writer left half done.
    if write or (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        uri = f"{path.resolve().as_uri()}?mode=rw"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    return open_frozen(path)  # its owner may write though we may not


def prepare_to_write(connection: sqlite3.Connection) -> None:
    """Promise durability and leave nothing of what is deleted; let readers hold snapshots from now on."""
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute("PRAGMA temp_store=MEMORY")  # what watches writes is of no use to others
    # Somebody may be reading just now a catalog that an older knnlm made; then the next writer does it.
    with suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA journal_mode=WAL")


def empty_log(connection: sqlite3.Connection) -> bool:
    """Bring what the log of changes holds into the file itself; False where a reader still needs the log."""
    connection.execute("PRAGMA busy_timeout=0")
    busy: int = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    connection.execute("PRAGMA busy_timeout=5000")
    return not busy


def array_sums(segment: SegmentRow) -> dict[str, str | None]:
    """Say which SHA-256 the arrays have that a segment has."""
    sums = (segment.keys_sha256, segment.values_sha256, segment.kept_sha256, segment.counts_sha256)
    return dict(zip((KEYS_FILE, VALUES_FILE, KEPT_FILE, COUNTS_FILE), sums, strict=True))
