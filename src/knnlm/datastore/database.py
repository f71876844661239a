"""Open the file of a catalog with SQLite, and say in our words what goes wrong. Knows nothing about what it holds."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from knnlm.datastore.frozen import open_frozen
from knnlm.errors import DatastoreCorrupt, DatastoreError, KnnlmError

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
