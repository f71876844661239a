"""Locks of a store's folder, and the removal of files that are no longer part of the store.

There is one writer at a time, and any number of readers. A writer holds `writer.lock` exclusively. Readers share
`readers.lock`, or the folder itself where they may not create that file. The operating system releases the locks of a
process that dies.

`purge` removes files that a killed writer has left, or that a compaction or a newer index has replaced. A reader that
opened the store before may still use the latter, so `purge` needs both locks exclusively and removes nothing while
there is a reader; the next writer tries again. An interrupted addition is kept by default, as the same command
resumes it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from knnlm.datastore.catalog import Catalog
from knnlm.datastore.schema import (
    CATALOG_FILE,
    CODEC_FILE,
    MAP_FILE,
    NGRAM_FOLDER,
    REMOTE_FILE,
    index_folder,
    segment_folder,
)
from knnlm.datastore.staging import StagedAddition
from knnlm.datastore.validation import check_links
from knnlm.errors import DatastoreBusy, DatastoreError
from knnlm.io import remove_unlisted, translate_os_errors

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed
    fcntl = None  # type: ignore[assignment]

WRITER_LOCK, READERS_LOCK = "writer.lock", "readers.lock"

_RETRY_SECONDS = 0.05


@contextmanager
def writer_lock(folder: Path, *, create: bool = False, wait: float = 0.0) -> Iterator[None]:
    """Hold the writer lock of a folder, after waiting up to `wait` seconds for another process."""
    if create:
        with translate_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    elif not (folder / CATALOG_FILE).is_file():
        raise DatastoreError(f"{folder} is not a store: it has no {CATALOG_FILE}. Make one with: knnlm build")
    check_links(folder)
    if (folder / REMOTE_FILE).exists():
        raise DatastoreError(
            f"{folder} is a copy of a store at a URL, which is read-only. Change that store where it was built, and "
            "push it again: knnlm shards push"
        )
    lock = FileLock(folder / WRITER_LOCK, timeout=max(0.0, wait))
    try:
        lock.acquire()
    except Timeout:
        waited = f" after {wait:g} s" if wait > 0 else ""
        raise DatastoreBusy(
            f"Another process is writing to {folder}{waited}. Try again when it has finished, or wait with --wait."
        ) from None
    except OSError as error:
        raise DatastoreError(f"Cannot write to {folder}: {error.strerror or error}.") from None
    try:
        yield
    finally:
        lock.release()


class ReaderLock:
    """A reader's shared lock of a folder, released by `close`, by garbage collection or when the process ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle = _open_lock_file(folder)
        if self._handle is None:
            self._handle = _open_folder(folder)
        if self._handle is not None:
            self._closing = weakref.finalize(self, os.close, self._handle)
            self._closing.atexit = False  # at exit, the lock is released last
            # Without working locks, no process ever gets the exclusive lock, so no file is removed.
            with suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the lock."""
        if self._handle is not None:
            self._closing()
            self._handle = None

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Yield whether this is the only reader, and block new readers; the caller holds the writer lock."""
        if self._handle is None:
            yield fcntl is None
            return
        try:
            with _exclusive_folder(self._folder) as sole:
                yield sole and _try_exclusive(self._handle)
        finally:
            with suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_SH)


@contextmanager
def without_readers(folder: Path, *, wait: float = 0.0) -> Iterator[bool]:
    """Yield whether no process reads the folder, after waiting up to `wait` seconds, and block new readers."""
    handle = _open_lock_file(folder)
    if handle is None:
        yield fcntl is None
        return
    try:
        until = time.monotonic() + wait
        while True:
            with _exclusive_folder(folder) as alone:
                if (sole := alone and _try_exclusive(handle)) or time.monotonic() >= until:
                    yield sole
                    return
            time.sleep(_RETRY_SECONDS)
    finally:
        os.close(handle)


@contextmanager
def _exclusive_folder(folder: Path) -> Iterator[bool]:
    """Yield whether no process holds a shared lock of the folder itself, and block new ones."""
    handle = _open_folder(folder)
    if handle is None:
        yield True
        return
    try:
        yield _try_exclusive(handle, if_unsupported=True)
    finally:
        os.close(handle)


def _try_exclusive(handle: int, *, if_unsupported: bool = False) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return if_unsupported
    return True


def _open_folder(folder: Path) -> int | None:
    """Open the folder itself, which needs no write permission; None where locks are not supported."""
    if fcntl is None or not (folder / CATALOG_FILE).is_file():
        return None
    with suppress(OSError):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return None


def _open_lock_file(folder: Path) -> int | None:
    """Open the readers' lock file; None where it cannot be created or locks are not supported."""
    if fcntl is None or not (folder / CATALOG_FILE).is_file():
        return None
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
        try:
            return os.open(folder / READERS_LOCK, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError:  # a read-only folder without this file
            continue
    return None


def purge(
    folder: Path,
    catalog: Catalog,
    *,
    reader_lock: ReaderLock | None = None,
    wait: float = 0.0,
    keep_pending: bool = True,
) -> bool:
    """Remove files that the catalog does not name; return False while there is a reader.

    The caller holds the writer lock. `reader_lock` is the caller's own lock as a reader, if it has one.
    """
    pending = StagedAddition(folder, catalog)
    if keep_pending:
        pending.remove_if_empty()
    else:
        pending.drop()
    with reader_lock.exclusive() if reader_lock is not None else without_readers(folder, wait=wait) as sole:
        if not sole:
            return False
        with translate_os_errors(folder):
            known = [segment_folder(folder, row.id) for row in catalog.segments()]
            remove_unlisted(folder / "segments", [*known, *pending.folders])
            remove_unlisted(folder / "index", [index_folder(folder, row.id) for row in catalog.indexes()])
            if has_stale_suffix_array(folder, catalog):
                shutil.rmtree(folder / NGRAM_FOLDER)
            for key, name in (("codec", CODEC_FILE), ("map", MAP_FILE)):  # fitted to keys that were never committed
                if pending.get(key) is None and (folder / name).is_file():
                    (folder / name).unlink()
        return catalog.checkpoint()


def has_stale_suffix_array(folder: Path, catalog: Catalog) -> bool:
    """Whether there is a suffix array of another generation, which may contain text of removed documents."""
    metadata = folder / NGRAM_FOLDER / "metadata.json"
    try:
        generation = json.loads(metadata.read_bytes()).get("generation", 0)
    except (OSError, ValueError, AttributeError, RecursionError):
        generation = None
    return (folder / NGRAM_FOLDER).exists() and generation != catalog.generation
