"""The format of a store: names of its files, tables and rows of its catalog, and the SQLite connection."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from knnlm.corpus import Fields
from knnlm.errors import DatastoreBusy, DatastoreCorrupt, DatastoreError, KnnlmError

CATALOG_FILE = "catalog.db"
SHARDS_FOLDER, RECORD_FILE = "shards", "build.json"  # of a build with workers, the latter until it is finished
SHARDED = "sharded"  # the state of the catalog of a sharded store
# The catalog before it is complete, and what SQLite writes beside it.
PARTIAL_CATALOG_FILES = ("catalog.partial", "catalog.partial-journal", "catalog.partial-wal", "catalog.partial-shm")
MAP_FILE, CODEC_FILE = "map.safetensors", "codec.safetensors"
STAGING_FILE = "staging.log"
KEYS_FILE, VALUES_FILE, KEPT_FILE, COUNTS_FILE = "keys.npy", "values.npy", "kept.npy", "counts.npy"
UNENCODED_FILE = "unencoded.npy"  # float16 keys of a segment whose codec is not chosen yet
NGRAM_FOLDER = "ngram"
LOST_FOLDER = "lost"  # what a repair has taken out
GATES_FOLDER = "mixtures"
DECODER_FOLDER = "decoder"
ADAPTED_FILE = "adapted.json"
REMOTE_FILE = "remote.json"  # of a copy of a store at a URL, which is read-only

VERSION = 1

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE segments (
    id INTEGER PRIMARY KEY,
    first_entry INTEGER NOT NULL,
    entries INTEGER NOT NULL,
    scale REAL NOT NULL,
    keys_sha256 TEXT NOT NULL,
    values_sha256 TEXT NOT NULL,
    kept INTEGER,
    kept_sha256 TEXT,
    counts_sha256 TEXT
);
CREATE TABLE documents (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    source TEXT NOT NULL,
    segment INTEGER NOT NULL REFERENCES segments(id),
    first_entry INTEGER NOT NULL,
    entries INTEGER NOT NULL,
    sha256 TEXT NOT NULL
);
CREATE INDEX documents_by_entry ON documents(first_entry);
CREATE INDEX documents_by_hash ON documents(sha256);
CREATE TABLE indexes (
    id INTEGER PRIMARY KEY,
    spec TEXT NOT NULL,
    metric TEXT NOT NULL,
    entries INTEGER NOT NULL,
    sha256 TEXT NOT NULL
);
CREATE TABLE removed (
    number INTEGER PRIMARY KEY,
    segment INTEGER NOT NULL,
    first_entry INTEGER NOT NULL,
    entries INTEGER NOT NULL
);
CREATE TABLE fields (number INTEGER PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE digests (part TEXT PRIMARY KEY, digest TEXT NOT NULL) WITHOUT ROWID;
"""
TABLES = frozenset(re.findall(r"CREATE TABLE (\w+)", SCHEMA))
# In a store of an encoder-decoder model only: the source texts of its documents.
SOURCES_TABLE = "sources"
SOURCES_SCHEMA = f"CREATE TABLE {SOURCES_TABLE} (number INTEGER PRIMARY KEY, text TEXT NOT NULL);"


def segment_folder(path: Path, number: int) -> Path:
    """Return the folder of a segment."""
    return path / "segments" / f"{number:06d}"


def index_folder(path: Path, number: int) -> Path:
    """Return the folder of an index."""
    return path / "index" / f"{number:06d}"


def check_format(path: Path, get: Callable[[str], object], tables: Collection[str], *, copying: bool) -> None:
    """Raise unless this version of knnlm reads the catalog; only `copying` opens an unfinished copy of a store."""
    found, folder = get("format"), path.parent
    if found is None:
        raise DatastoreCorrupt(f"{path} is not a knnlm catalog. Build the store again.")
    if type(found) is not int or found != VERSION:
        newer = isinstance(found, int) and found > VERSION
        raise DatastoreError(
            f"{folder} has format version {found}, this knnlm reads version {VERSION}. "
            + ("Upgrade knnlm: pip install -U knnlm" if newer else "Build the store again.")
        )
    if missing := sorted(TABLES - set(tables)):
        raise DatastoreCorrupt(f"{path} is corrupt (no table {missing[0]}). Restore it, or build the store again.")
    if not copying and get("derived") is not None and get("state") != "complete":
        raise DatastoreError(
            f"{folder} is an unfinished copy of another store, as knnlm prune and knnlm distill --into keys make "
            "them. Resume it with the command that started it, choose another --out, or remove it."
        )


@dataclass(frozen=True)
class SegmentRow:
    """One segment: entries first_entry … first_entry + entries - 1 of the store; keys are stored divided by `scale`."""

    id: int
    first_entry: int
    entries: int
    scale: float
    keys_sha256: str
    values_sha256: str
    kept: int | None = None  # number of entries with a key; None: all
    kept_sha256: str | None = None
    counts_sha256: str | None = None  # None: each key counts once

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.entries if self.kept is None else self.kept


@dataclass(frozen=True)
class StoredDocument:
    """One document and the entries that hold its tokens."""

    number: int
    id: str
    source: str
    segment: int
    first_entry: int
    entries: int
    sha256: str
    fields: Fields = field(default_factory=dict, hash=False)  # of the user's record, in the table `fields`
    source_text: str | None = None  # of a pair, in the table `sources`


@dataclass(frozen=True)
class RemovedRow:
    """The entries of a removed document, until a compaction erases their bytes."""

    number: int
    segment: int
    first_entry: int
    entries: int


@dataclass(frozen=True)
class IndexRow:
    """One index over the first `entries` keys, not counting keys removed before it was built."""

    id: int
    spec: str
    metric: str
    entries: int
    sha256: str


_CORRUPTION_MESSAGES = ("malformed", "no such table", "no such column", "decode to UTF-8")  # of SQLite


@contextmanager
def translate_sqlite_errors(path: Path) -> Iterator[None]:
    """Turn errors of SQLite, and of reading values, into errors of knnlm that name the file."""
    try:
        yield
    except KnnlmError:  # some are also a ValueError
        raise
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise DatastoreError(f"{path} is in use by another process. Try again when it has finished.") from None
        if any(words in str(error) for words in _CORRUPTION_MESSAGES):
            raise DatastoreCorrupt(f"{path} is corrupt ({error}). Build the store again.") from None
        raise DatastoreError(f"Cannot use {path}: {error}. Check the disk and the permissions.") from None
    except sqlite3.DatabaseError as error:
        raise DatastoreCorrupt(f"{path} is corrupt ({error}). Build the store again.") from None
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise DatastoreCorrupt(f"{path} is corrupt: invalid metadata ({error}). Build the store again.") from None


def connect(path: Path, *, write: bool) -> sqlite3.Connection:
    """Open the database.

    Without write permission, SQLite cannot lock the file, so the store must be at rest: no writer, and an empty
    write-ahead log. The database is then copied to RAM.
    """
    if not write and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        logs = [path.with_name(path.name + suffix) for suffix in ("-wal", "-journal")]
        if unfinished := [log.name for log in logs if log.exists() and log.stat().st_size]:
            raise DatastoreBusy(
                f"{path.parent} is read-only for this process, and {unfinished[0]} shows that a writer is running or "
                "was interrupted. Wait until it has finished, open the store once with write permission, or copy it."
            )
        with closing(_connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1")) as source:
            copy = _connect(":memory:")
            source.backup(copy)
            return copy
    # Readers need write access too: SQLite rolls back the unfinished transaction of a killed writer.
    return _connect(f"{path.resolve().as_uri()}?mode=rw")


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)


def prepare_to_write(connection: sqlite3.Connection) -> None:
    """Make writes durable, and overwrite deleted rows with zeros."""
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute("PRAGMA temp_store=MEMORY")  # for the triggers of `DigestUpdates`


def checkpoint(connection: sqlite3.Connection) -> bool:
    """Move the write-ahead log into the database; return False while a reader needs the log."""
    connection.execute("PRAGMA busy_timeout=0")
    busy: int = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    connection.execute("PRAGMA busy_timeout=5000")
    return not busy


def array_checksums(segment: SegmentRow) -> dict[str, str | None]:
    """Return the SHA-256 of each array file of a segment; None where it has no such file."""
    sums = (segment.keys_sha256, segment.values_sha256, segment.kept_sha256, segment.counts_sha256)
    return dict(zip((KEYS_FILE, VALUES_FILE, KEPT_FILE, COUNTS_FILE), sums, strict=True))
