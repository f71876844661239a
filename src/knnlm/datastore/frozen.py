"""Read a database that this process may not write, while its owner may. Knows nothing about what it holds.

SQLite guards a reader from a writer by files that the reader must be able to write. Where it cannot, the files of the
database are copied and looked at a second time: where they are the same then, no writer was in between that the copy
could have caught half-way, and SQLite takes back or completes in the copy what the log beside it says.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path

from knnlm.errors import DatastoreBusy, DatastoreError

_LOGS = ("-wal", "-journal")

_ATTEMPTS = 50

_AGAIN = 0.02  # seconds between two of them

_PIECE = 1 << 20  # bytes


def open_frozen(path: Path) -> sqlite3.Connection:
    """Open the database as it is now: it stays so, whatever is written meanwhile."""
    if _still(path):
        uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    try:
        with tempfile.TemporaryDirectory(prefix="knnlm-catalog-") as folder:
            copy = Path(folder) / path.name
            for _ in range(_ATTEMPTS):
                if _copy(path, copy):
                    return _in_memory(copy)
                time.sleep(_AGAIN)
    except OSError as error:
        raise DatastoreError(f"Cannot read {path}: {error.strerror or error}.") from None
    raise DatastoreBusy(f"{path} was changed each time it was read. Try again when the other process has finished.")


def _still(path: Path) -> bool:
    """Whether nobody at all can write the file, and no log beside it has more to say."""
    if not hasattr(os, "statvfs") or not os.statvfs(path).f_flag & os.ST_RDONLY:
        return False
    logs = [path.with_name(path.name + suffix) for suffix in _LOGS]
    return not any(log.exists() and log.stat().st_size for log in logs)


def _copy(path: Path, copy: Path) -> bool:
    """Copy the database and its logs; False where it was written to meanwhile."""
    _copy_file(path, copy)
    # A log is only ever appended to, or begun again after all of it has gone into the database, which would show there.
    for suffix in _LOGS:
        log = copy.with_name(copy.name + suffix)
        log.unlink(missing_ok=True)
        try:
            _copy_file(path.with_name(path.name + suffix), log)
        except FileNotFoundError:
            continue
    return _same(path, copy)


def _copy_file(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("wb") as written:
        while piece := read.read(_PIECE):
            written.write(piece)


def _same(one: Path, two: Path) -> bool:
    with one.open("rb") as first, two.open("rb") as second:
        while (piece := first.read(_PIECE)) == second.read(_PIECE):
            if not piece:
                return True
    return False


def _in_memory(copy: Path) -> sqlite3.Connection:
    """Let SQLite complete a copy of its files, and hold the result in memory."""
    held = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    try:
        with closing(sqlite3.connect(copy, isolation_level=None)) as source:
            source.backup(held)
    except BaseException:
        held.close()
        raise
    return held
