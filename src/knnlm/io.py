"""Hash files. Knows nothing about what they hold.

Look at mapped files, and bound how much of them is resident in a process. Knows nothing about what they hold.

Pages of a mapped file that were read stay with the process for as long as nobody else needs the room. A search touches
keys all over a memory, so in time all of it would count as this process's. Letting pages go costs a page fault when
they are touched again, though the system still has them. Keys are read from first to last for each batch, so those
just read are the ones that are needed last: they go, and what was there first stays.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from knnlm.errors import DatastoreCorrupt, DatastoreError

if TYPE_CHECKING:
    from torch import Tensor

_PIECE = 1 << 24  # bytes at a time


def checksum(path: Path) -> str:
    """Give the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


MOST = 384 << 20  # bytes of mapped files that may become resident, whoever reads them

_STATM = Path("/proc/self/statm")  # where there is none, the system is left to itself


class Resident:
    """Looks after what is read; all owners in a process share what may be resident."""

    _least: int | None = None  # bytes that were resident when there were fewest

    def touched(self, array: NDArray[Any]) -> None:
        """Note that an array was read, and let its pages go where too many have become resident."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        now = mapped_bytes()
        Resident._least = now if Resident._least is None else min(Resident._least, now)
        if now - Resident._least > MOST and (mapping := _mapping(array)) is not None:
            mapping.madvise(mmap.MADV_DONTNEED)


def mapped_bytes() -> int:
    """Count the bytes of mapped files, libraries too, that are resident in this process; 0 where nobody says."""
    try:
        return int(_STATM.read_text().split()[2]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0


def _mapping(array: Any) -> mmap.mmap | None:
    """Find the mapping that an array looks at; None where it is in memory, as an empty one is."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, mmap.mmap) else None


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Return a tensor over a read-only array, without torch's warning."""
    import torch  # commands that list or remove documents need no torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def read_array_header(file: BinaryIO) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Read the header of a .npy array; raise ValueError unless it is of version 1.0 and in C order."""
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"format version {version}")
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    except OSError:
        raise
    except Exception as error:  # the parser of Python literals raises errors of many types
        raise ValueError(str(error)) from None
    if fortran_order or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"shape {shape}, {'Fortran' if fortran_order else 'C'} order")
    return dtype, shape


class translate_os_errors:  # noqa: N801  (used like a function)
    """Turn an error of the disk into one of ours that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError):
            raise DatastoreError(
                f"Cannot write {self._path}: {error.strerror or error}. What was finished is kept; make room and run "
                "the same command again."
            ) from error


def remove_others(folder: Path, known: Iterable[Path]) -> None:
    """Remove what a killed process left in a folder: all that the catalog does not know."""
    if folder.is_symlink():
        raise DatastoreCorrupt(f"{folder} is a link to {folder.resolve()}. Nothing is removed there: copy it instead.")
    for entry in set(folder.glob("*")) - set(known):
        if entry.is_symlink() or not entry.is_dir():
            entry.unlink()
        else:
            shutil.rmtree(entry)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a place to write a file to; once that is done it is on disk and stands at `path`, complete or not at all."""
    partial = path.with_suffix(".partial")
    with translate_os_errors(path):
        yield partial
        sync_file(partial)
        partial.replace(path)
        sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Make sure that what another library wrote to a file is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make sure that the names in a folder are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
