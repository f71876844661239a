"""Let one process write to a folder at a time. Knows nothing about what is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from knnlm.datastore.catalog import FILE
from knnlm.datastore.segment import writing
from knnlm.datastore.strangers import check_links
from knnlm.errors import DatastoreBusy, DatastoreError


@contextmanager
def writer_lock(folder: Path, *, create: bool = False) -> Iterator[None]:
    """Let one process write at a time; the lock of a dead process is free."""
    if create:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    elif not (folder / FILE).is_file():
        raise DatastoreError(f"{folder} is not a memory: it has no {FILE}. Make one with: knnlm build")
    check_links(folder)
    lock = FileLock(folder / "writer.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise DatastoreBusy(f"Another process is writing to {folder}. Try again when it has finished.") from None
    except OSError as error:
        raise DatastoreError(f"Cannot write to {folder}: {error.strerror or error}.") from None
    try:
        yield
    finally:
        lock.release()
