"""Locks of a store's folder: one writer at a time, any number of readers.

A writer holds `writer.lock` exclusively. Readers share `readers.lock`, or the folder itself where they may not create
that file. A file that was part of the store is removed only while holding both exclusively, so what a reader has
opened stays until it is closed. The operating system releases the locks of a process that dies.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from knnlm.datastore.paths import CATALOG_FILE
from knnlm.datastore.validation import check_links
from knnlm.errors import DatastoreBusy, DatastoreError
from knnlm.io import translate_os_errors

try:
    import fcntl
except ImportError:  # where a file that is open cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

WRITER, READERS = "writer.lock", "readers.lock"

_AGAIN = 0.05  # seconds between two tries


@contextmanager
def writer_lock(folder: Path, *, create: bool = False, wait: float = 0.0) -> Iterator[None]:
    """Let one process write at a time, after waiting for another so many seconds; the lock of a dead one is free."""
    if create:
        with translate_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    elif not (folder / CATALOG_FILE).is_file():
        raise DatastoreError(f"{folder} is not a store: it has no {CATALOG_FILE}. Make one with: knnlm build")
    check_links(folder)
    lock = FileLock(folder / WRITER, timeout=max(0.0, wait))
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


class Lease:
    """A reader's share of a folder; given back when it is closed, or forgotten, or the process dies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle = _open(folder)
        if self._handle is None:
            self._handle = _open_folder(folder)
        if self._handle is not None:
            self._closing = weakref.finalize(self, os.close, self._handle)
            self._closing.atexit = False  # not before the process has let go of all else
            # Where locks do not work, no process ever has the folder alone, so nothing is removed.
            with suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_SH)

    def close(self) -> None:
        """Return it back."""
        if self._handle is not None:
            self._closing()
            self._handle = None

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Return whether this is the only reader, and keep others from starting; the caller holds the writer lock."""
        if self._handle is None:
            yield fcntl is None
            return
        try:
            with _folder_alone(self._folder) as sole:
                yield sole and _try(self._handle)
        finally:
            with suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_SH)


@contextmanager
def without_readers(folder: Path, *, wait: float = 0.0) -> Iterator[bool]:
    """Return whether no process reads the folder, and let none begin meanwhile; waits for them so many seconds."""
    handle = _open(folder)
    if handle is None:
        yield fcntl is None
        return
    try:
        until = time.monotonic() + wait
        while True:
            with _folder_alone(folder) as alone:
                if (sole := alone and _try(handle)) or time.monotonic() >= until:
                    yield sole
                    return
            time.sleep(_AGAIN)
    finally:
        os.close(handle)


@contextmanager
def _folder_alone(folder: Path) -> Iterator[bool]:
    """Return whether no process reads the folder without the readers' lock, and keep others from starting."""
    handle = _open_folder(folder)
    if handle is None:
        yield True
        return
    try:
        yield _try(handle, where_impossible=True)
    finally:
        os.close(handle)


def _try(handle: int, *, where_impossible: bool = False) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return where_impossible
    return True


def _open_folder(folder: Path) -> int | None:
    """Open the folder itself, which every reader can; None where there can be no lock."""
    if fcntl is None or not (folder / CATALOG_FILE).is_file():
        return None
    with suppress(OSError):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return None


def _open(folder: Path) -> int | None:
    """Open the readers' lock; None where there can be none."""
    if fcntl is None or not (folder / CATALOG_FILE).is_file():
        return None
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
        try:
            return os.open(folder / READERS, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError:  # a read-only folder that had no reader yet
            continue
    return None
