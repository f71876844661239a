"""Atomic writes, fsync, checksums, memory maps and the cache folder."""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from knnlm.errors import DatastoreCorrupt, DatastoreError

if TYPE_CHECKING:
    from torch import Tensor

MAX_RESIDENT_BYTES = 384 << 20  # of mapped files, beyond those resident at first; shared by all stores of a process

_FEW_QUERIES = 64  # of a search, at most, as in generation: page faults would take a large part of its time

_CHUNK_BYTES = 1 << 24
_PARSES = 5  # of a header
_STATM = Path("/proc/self/statm")  # Linux; elsewhere pages are left to the system

_least_resident: int | None = None  # the fewest bytes of mapped files that were resident so far


def cache_folder() -> Path:
    """Return the folder of unpacked models, fetched shards and measured constants."""
    home = os.environ.get("KNNLM_CACHE")
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "knnlm"


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def resident_limit(queries: float) -> float:
    """Return how many bytes of mapped files may stay resident beside searches for so many queries at once."""
    return math.inf if queries <= _FEW_QUERIES else MAX_RESIDENT_BYTES


def release_pages(array: NDArray[Any], *, limit: float | None = None) -> None:
    """Release the pages of a mapped array that was just read, if too many pages of mapped files are resident.

    A search touches keys all over a store, so that in time all of it would count as memory of this process. Releasing
    pages costs a page fault when they are touched again; the system usually still caches them. Keys are read from
    first to last for each batch, so the pages read last are needed last: they go, and the earlier ones stay.
    """
    global _least_resident
    if not hasattr(mmap, "MADV_DONTNEED") or limit == math.inf:
        return
    resident = resident_bytes()
    _least_resident = resident if _least_resident is None else min(_least_resident, resident)
    most = MAX_RESIDENT_BYTES if limit is None else limit
    if resident - _least_resident > most and (mapping := _mapping(array)) is not None:
        mapping.madvise(mmap.MADV_DONTNEED)


def resident_bytes() -> int:
    """Return the bytes of mapped files, libraries included, resident in this process; 0 where that is unknown."""
    try:
        return int(_STATM.read_text().split()[2]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0


def _mapping(array: Any) -> mmap.mmap | None:
    """Return the mapping below an array, None where its data is in memory."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, mmap.mmap) else None


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Return a tensor that shares a read-only array, without torch's warning about that."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def read_array_header(file: BinaryIO) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Read the header of a .npy array; raise ValueError unless it is of version 1.0 and in C order."""
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"format version {version}")
        shape, fortran_order, dtype = _parse_header(file)
    except OSError:
        raise
    except Exception as error:  # the parser of Python literals raises errors of many types
        raise ValueError(str(error)) from None
    if fortran_order or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"shape {shape}, {'Fortran' if fortran_order else 'C'} order")
    return dtype, shape


def _parse_header(file: BinaryIO) -> tuple[Any, Any, Any]:
    """Parse the literals of a header, again where Python's parser fails: threads that parse at once disturb it.

    Python 3.11 counts the recursion of all threads together, and raises SystemError where the count changes meanwhile.
    """
    begin = file.tell()
    for left in reversed(range(_PARSES)):
        try:
            return np.lib.format.read_array_header_1_0(file)
        except SystemError:
            if not left:
                raise
            file.seek(begin)
    raise AssertionError


@contextmanager
def translate_os_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `DatastoreError` that names the file."""
    try:
        yield
    except OSError as error:
        raise DatastoreError(
            f"Cannot write {path}: {error.strerror or error}. Finished work is kept: free some space and run the same "
            "command again."
        ) from error


def remove_unlisted(folder: Path, known: Iterable[Path]) -> None:
    """Remove the entries of a folder that are not listed: what a killed process left behind."""
    if folder.is_symlink():
        raise DatastoreCorrupt(
            f"{folder} is a link to {folder.resolve()}, where nothing is removed. Copy the folder here instead."
        )
    for entry in set(folder.glob("*")) - set(known):
        if entry.is_symlink() or not entry.is_dir():
            entry.unlink()
        else:
            shutil.rmtree(entry)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; afterwards the file is flushed and renamed to `path`."""
    partial = path.with_suffix(".partial")
    with translate_os_errors(path):
        yield partial
        sync_file(partial)
        partial.replace(path)
        sync_folder(path.parent)


@contextmanager
def atomic_folder(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder to write to; afterwards it is flushed and renamed to `final`.

    With `replace`, a folder of that name is removed first. After an error the temporary folder is removed.
    """
    partial = create_partial_folder(final)
    try:
        yield partial
        if replace and final.exists():
            with translate_os_errors(final):
                shutil.rmtree(final)
        commit_folder(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def create_partial_folder(final: Path) -> Path:
    """Create the empty folder in which the content of `final` is written; `commit_folder` renames it."""
    partial = final.with_name(f"{final.name}.partial")
    with translate_os_errors(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    return partial


def commit_folder(partial: Path, final: Path) -> None:
    """Flush the files of a folder and rename it, so that it appears complete or not at all."""
    with translate_os_errors(final):
        for entry in [*partial.rglob("*"), partial]:
            sync_folder(entry) if entry.is_dir() else sync_file(entry)
        partial.rename(final)
        sync_folder(final.parent)


def sync_file(path: Path) -> None:
    """Flush a file that another library wrote to disk, and give it the permissions of any new file.

    safetensors lets only the owner read what it writes, so that a server of another user could not open it.
    """
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if missing := _new_file_mode() & ~mode:
            path.chmod(stat.S_IMODE(mode) | missing)
        os.fsync(file.fileno())


@lru_cache(maxsize=1)
def _new_file_mode() -> int:
    """Return the permissions that a new file gets here; the mask of a process cannot be read without changing it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "new"
        file.touch(0o666)
        return stat.S_IMODE(file.stat().st_mode)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
