"""Arrays on disk: written once, then immutable. Knows nothing about models or catalogs.

Rows may be written in any order and in pieces, and nothing is kept in memory; the .npy header, whose length does not
depend on the number of rows, is written again at the end with the true one.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from knnlm.errors import DatastoreCorrupt, DatastoreError

KEY_DTYPES = ("float16", "float32")
_LARGEST = {"float16": 65504.0, "float32": 3.4e38}
_SMALL = 2.0**-4  # where all keys are below it, the small parts of them would lose digits in float16
_FINEST = 2.0**-100  # what keys are divided by at the least, so that float32 can undo it
_PIECE = 1 << 24
_Writer = TypeVar("_Writer", bound="ArrayWriter")


class ArrayWriter:
    """Writes one .npy file row by row, in any order."""

    def __init__(self, path: Path, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self.path = path
        self.rows = 0
        self._dtype = np.dtype(dtype)
        self._row_shape = row_shape
        with writing(path):
            self._file = path.open("wb+")
            self._write_header()
        self._begin = self._file.tell()

    def append(self, array: NDArray[Any]) -> None:
        """Write rows behind the last one."""
        self.write(self.rows, array)

    def write(self, row: int, array: NDArray[Any]) -> None:
        """Write rows from this number on."""
        data = np.ascontiguousarray(array, dtype=self._dtype)
        assert data.shape[1:] == self._row_shape, (data.shape, self._row_shape)
        with writing(self.path):
            self._file.seek(self._begin + row * self._row_bytes)
            self._file.write(data.data if data.size else b"")
        self.rows = max(self.rows, row + len(data))

    def put(self, rows: NDArray[np.int64], array: NDArray[Any]) -> None:
        """Write rows to these numbers, one write for each run of consecutive ones."""
        cuts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        for begin, end in pairwise(cuts):
            self.write(int(rows[begin]), array[begin:end])

    def scale(self, factor: float) -> None:
        """Multiply all that has been written, piece by piece."""
        step = max(1, _PIECE // self._row_bytes)
        for row in range(0, self.rows, step):
            count = min(step, self.rows - row)
            self._file.seek(self._begin + row * self._row_bytes)
            data = np.frombuffer(self._file.read(count * self._row_bytes), self._dtype)
            self.write(row, (data.astype(np.float32) * factor).reshape(count, *self._row_shape))

    def close(self) -> None:
        """Write the header and make sure that all of it is on disk."""
        with writing(self.path):
            self._file.seek(0)
            self._write_header()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Close without a promise: what was written is garbage."""
        # A full disk refuses the buffered rest once more; there is nothing left to save.
        with suppress(OSError):
            self._file.close()

    def __enter__(self: _Writer) -> _Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    @property
    def _row_bytes(self) -> int:
        return self._dtype.itemsize * int(np.prod(self._row_shape, dtype=np.int64))

    def _write_header(self) -> None:
        write_header(self._file, self._dtype, (self.rows, *self._row_shape))


class KeyWriter(ArrayWriter):
    """Writes keys, divided by a power of two where they would not fit into the range of their dtype."""

    def __init__(self, path: Path, dtype: str, width: int, *, divisor: float = 1.0) -> None:
        super().__init__(path, dtype, (width,))
        self.divisor = divisor  # of all that has been written
        self.largest = 0.0  # of all that has been written, before it was divided
        self._most = _LARGEST[dtype]

    @property
    def finer(self) -> float:
        """Give the divisor below 1 that small keys should be written with; 1 where keys are not small."""
        if self._dtype != np.float16 or not 0 < self.largest < _SMALL:
            return 1.0
        return max(_divisor(self.largest, self._most), _FINEST)

    def put_keys(self, rows: NDArray[np.int64], keys: NDArray[np.float32]) -> None:
        """Write finite keys to these rows."""
        largest = float(np.abs(keys).max(initial=0.0))
        self.largest = max(self.largest, largest)
        if largest / self.divisor > self._most / 2:
            wider = _divisor(largest, self._most)
            self.scale(self.divisor / wider)
            self.divisor = wider
        self.put(rows, keys / np.float32(self.divisor) if self.divisor != 1.0 else keys)


def _divisor(largest: float, most: float) -> float:
    """Give the power of two, which loses nothing, that brings the largest number near the most and leaves room."""
    return 2.0 ** math.ceil(math.log2(largest / (most / 8)))


class writing:  # noqa: N801  (used like a function)
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


def open_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map an array into memory after checking that the file is exactly what the catalog says."""
    expected = np.dtype(dtype)
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"format version {version}")
            found_shape, fortran, found_dtype = np.lib.format.read_array_header_1_0(file)
            begin = file.tell()
    except FileNotFoundError:
        raise DatastoreCorrupt(f"{path} is missing. Build the memory again, or restore the file.") from None
    except PermissionError as error:
        raise DatastoreError(f"Cannot read {path}: {error.strerror}.") from None
    except Exception as error:  # whatever a parser of Python literals may say of a header that is none
        raise DatastoreCorrupt(f"{path} is not a readable array ({error}). Build the memory again.") from None
    if found_shape != shape or found_dtype != expected or fortran:
        raise DatastoreCorrupt(
            f"{path} holds {found_dtype} {found_shape}, but the catalog says {expected} {shape}. "
            "Build the memory again, or restore the file."
        )
    size = begin + expected.itemsize * math.prod(shape)
    if path.stat().st_size != size:
        raise DatastoreCorrupt(
            f"{path} has {path.stat().st_size:,} bytes instead of {size:,}: it was cut short. "
            "Build the memory again, or restore the file."
        )
    if 0 in shape:
        return np.empty(shape, expected)
    return np.memmap(path, expected, "r", begin, shape)


def write_header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Write the header of an array; its size does not depend on the number of rows."""
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, facts)


def skip_header(file: BinaryIO) -> int:
    """Go to the first row of an array that was checked when it was opened, and say where that is."""
    np.lib.format.read_magic(file)
    np.lib.format.read_array_header_1_0(file)
    return file.tell()


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
    with writing(path):
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
