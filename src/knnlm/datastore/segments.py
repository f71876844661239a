"""Segments and their arrays on disk: written atomically, then immutable.

The rows of an array may be written in any order and are not kept in memory; the .npy header, whose length does not
depend on the number of rows, is rewritten at the end. Checksums are compared before an array is used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from knnlm.datastore.codecs import Codec, Plain, row_bytes
from knnlm.datastore.integrity import BlockChecksums, checksum_mismatch
from knnlm.datastore.schema import (
    COUNTS_FILE,
    KEPT_FILE,
    KEYS_FILE,
    VALUES_FILE,
    IndexRow,
    SegmentRow,
    array_checksums,
    index_folder,
    segment_folder,
)
from knnlm.datastore.validation import check_regular_file
from knnlm.errors import DatastoreCorrupt, DatastoreError
from knnlm.index.blocks import is_blocks
from knnlm.io import (
    checksum,
    commit_folder,
    create_partial_folder,
    read_array_header,
    release_pages,
    translate_os_errors,
)

KEY_DTYPES = ("float16", "float32")
FAISS_INDEX_FILE, BLOCK_INDEX_FILE = "index.faiss", "index.blocks"
MAX_VOCAB_SIZE = 1 << 22  # tables of this length are allocated for an untrusted catalog too
BULK_READ_KEYS = 256  # keys of a segment; from here on a read releases its pages and uses all cores

_MAX_VALUES = {"float16": 65504.0, "float32": 3.4e38}
_SMALL_KEY = 2.0**-4  # where all keys are below it, their small values would lose digits in float16
_MIN_DIVISOR = 2.0**-100  # so that float32 can undo the division
_SCALED_BYTES = 1 << 24  # scaled at a time
_COPIED_BYTES = 1 << 22  # copied at a time
_MAX_MAPPINGS = 256  # files that are mapped at the same time

# From the number of a segment to the folder of the store that contains it, and its number there.
Locate = Callable[[int], tuple[Path, int]]

_Writer = TypeVar("_Writer", bound="ArrayWriter")


class ArrayWriter:
    """Writes one .npy file row by row, in any order."""

    def __init__(self, path: Path, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self.path = path
        self.rows = 0
        self._dtype = np.dtype(dtype)
        self._row_shape = row_shape
        with translate_os_errors(path):
            self._file = path.open("wb+")
            self._write_header()
        self._begin = self._file.tell()

    def append(self, array: NDArray[Any]) -> None:
        """Write rows after the last one."""
        self.write(self.rows, array)

    def write(self, row: int, array: NDArray[Any]) -> None:
        """Write consecutive rows, beginning at `row`."""
        data = np.ascontiguousarray(array, dtype=self._dtype)
        assert data.shape[1:] == self._row_shape, (data.shape, self._row_shape)
        with translate_os_errors(self.path):
            self._file.seek(self._begin + row * self._row_bytes)
            self._file.write(data.data if data.size else b"")
        self.rows = max(self.rows, row + len(data))

    def put(self, rows: NDArray[np.int64], array: NDArray[Any]) -> None:
        """Write rows at these numbers, with one write for each consecutive stretch."""
        cuts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        for begin, end in pairwise(cuts):
            self.write(int(rows[begin]), array[begin:end])

    def scale(self, factor: float) -> None:
        """Multiply everything that has been written by a factor."""
        step = max(1, _SCALED_BYTES // self._row_bytes)
        for row in range(0, self.rows, step):
            count = min(step, self.rows - row)
            self._file.seek(self._begin + row * self._row_bytes)
            data = np.frombuffer(self._file.read(count * self._row_bytes), self._dtype)
            self.write(row, (data.astype(np.float32) * factor).reshape(count, *self._row_shape))

    def close(self) -> None:
        """Write the header and flush the file to disk."""
        with translate_os_errors(self.path):
            self._file.seek(0)
            self._write_header()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Close an incomplete file."""
        # On a full disk, flushing the buffer fails again.
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
        self.divisor = divisor  # of all keys written so far
        self.largest = 0.0  # absolute value written so far, before the division
        self._max_value = _MAX_VALUES[dtype]

    @property
    def finer_divisor(self) -> float:
        """The divisor below 1 with which small keys should be written; 1 where keys are not small."""
        if self._dtype != np.float16 or not 0 < self.largest < _SMALL_KEY:
            return 1.0
        return max(_divisor(self.largest, self._max_value), _MIN_DIVISOR)

    def put_keys(self, rows: NDArray[np.int64], keys: NDArray[np.float32]) -> None:
        """Write finite keys to these rows."""
        largest = float(np.abs(keys).max(initial=0.0))
        self.largest = max(self.largest, largest)
        if largest / self.divisor > self._max_value / 2:
            wider = _divisor(largest, self._max_value)
            self.scale(self.divisor / wider)
            self.divisor = wider
        self.put(rows, keys / np.float32(self.divisor) if self.divisor != 1.0 else keys)


def _divisor(largest: float, max_value: float) -> float:
    """Return the power of two that brings the largest number to an eighth of the maximum; it loses no digits."""
    return 2.0 ** math.ceil(math.log2(largest / (max_value / 8)))


def open_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map an array after checking that dtype, shape and size are those of the catalog."""
    expected = np.dtype(dtype)
    try:
        with path.open("rb") as file:
            found_dtype, found_shape = read_array_header(file)
            begin = file.tell()
    except FileNotFoundError:
        raise DatastoreCorrupt(f"{path} is missing. Build the store again, or restore the file.") from None
    except PermissionError as error:
        raise DatastoreError(f"Cannot read {path}: {error.strerror}.") from None
    except (OSError, ValueError) as error:
        raise DatastoreCorrupt(f"{path} is not a readable array ({error}). Build the store again.") from None
    if found_shape != shape or found_dtype != expected:
        raise DatastoreCorrupt(
            f"{path} contains {found_dtype} {found_shape}, but the catalog has {expected} {shape}. "
            "Build the store again, or restore the file."
        )
    size = begin + expected.itemsize * math.prod(shape)
    if path.stat().st_size != size:
        raise DatastoreCorrupt(
            f"{path}: wrong size ({path.stat().st_size:,} bytes instead of {size:,}). "
            "Build the store again, or restore the file."
        )
    if 0 in shape:
        return np.empty(shape, expected)
    return np.memmap(path, expected, "r", begin, shape)


def write_header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Write the header of an array; its size does not depend on the number of rows."""
    metadata = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, metadata)


def skip_header(file: BinaryIO) -> int:
    """Seek to the first row of an array, whose header was checked when it was opened, and return its offset."""
    np.lib.format.read_magic(file)
    np.lib.format.read_array_header_1_0(file)
    return file.tell()


def index_file(path: Path, row: IndexRow) -> Path:
    """Return the file of an index."""
    return index_folder(path, row.id) / (BLOCK_INDEX_FILE if is_blocks(row.spec) else FAISS_INDEX_FILE)


def array_shapes(segment: SegmentRow, codec: Codec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each array of a segment, by file name."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        KEYS_FILE: (codec.dtype, (segment.keys, codec.columns)),
        VALUES_FILE: ("int32", (segment.entries,)),
    }
    if segment.kept is not None:
        shapes[KEPT_FILE] = ("int32", (segment.keys,))
    if segment.counts_sha256 is not None:
        shapes[COUNTS_FILE] = ("float32", (segment.keys,))
    return shapes


def segment_faults(segments: Sequence[SegmentRow]) -> Iterator[tuple[SegmentRow, str, bool]]:
    """Return (segment, problem, whether it concerns that segment only): entries are numbered without gaps."""
    expected = 0
    for segment in segments:
        if segment.first_entry != expected or segment.entries < 1:
            what = f"begins at entry {segment.first_entry:,} with {segment.entries:,} entries, not at {expected:,}"
            yield segment, f"segment {segment.id} {what}", False
        if not 0 <= segment.keys <= segment.entries:
            yield segment, f"segment {segment.id} has {segment.keys:,} keys for {segment.entries:,} entries", False
        if not (isinstance(segment.scale, float) and 0 < segment.scale < math.inf):
            yield segment, f"the keys of segment {segment.id} have the scale {repr(segment.scale)[:60]}", True
        expected = segment.first_entry + segment.entries


def check_segments(path: Path, segments: Sequence[SegmentRow]) -> None:
    """Raise for segments whose numbers are inconsistent."""
    for _, what, _ in segment_faults(segments):
        raise DatastoreCorrupt(f"{path}: {what}. Run knnlm repair {path.parent}, or build the store again.")


def check_metadata(path: Path, model: dict[str, Any], window: dict[str, Any], codec: Codec) -> None:
    """Raise for metadata that would cause an error later."""
    checks = {
        "model's name": isinstance(model.get("name"), str),
        "model's vocabulary": isinstance(size := model.get("vocab_size"), int) and 0 < size <= MAX_VOCAB_SIZE,
        "window": all(isinstance(window.get(name), int) and window[name] > 0 for name in ("context", "stride")),
        "precision of the keys": not isinstance(codec, Plain) or codec.dtype in KEY_DTYPES,
    }
    if wrong := [name for name, valid in checks.items() if not valid]:
        raise DatastoreCorrupt(f"{path} has no valid {wrong[0]}. Build the store again.")


class NewSegment:
    """A segment that is written to a temporary folder until it is sealed."""

    def __init__(self, folder: Path, number: int) -> None:
        self._final = segment_folder(folder, number)
        self._partial = create_partial_folder(self._final)

    def place(self, name: str) -> Path:
        """Return the path at which a file of the segment is written."""
        return self._partial / name

    def array(self, name: str, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> ArrayWriter:
        """Open an array for writing; it must be closed before the segment is sealed."""
        return ArrayWriter(self.place(name), dtype, row_shape)

    def keys(self, dtype: str, width: int) -> KeyWriter:
        """Open the file of the keys, which are divided where they do not fit into their dtype."""
        return KeyWriter(self.place(KEYS_FILE), dtype, width)

    def seal(self) -> dict[str, str]:
        """Rename the folder to its final name and return the SHA-256 of each file."""
        sums = {file.name: checksum(file) for file in self._partial.iterdir()}
        commit_folder(self._partial, self._final)
        return sums


class Arrays:
    """The arrays of a store, at the places that `locate` returns; with `check` False checksums are not compared."""

    def __init__(self, locate: Locate, codec: Codec, *, check: bool = True) -> None:
        self._locate, self._codec = locate, codec
        self._row_bytes = row_bytes(codec)
        self.sums = BlockChecksums(enabled=check)
        self._keys_file = lru_cache(maxsize=_MAX_MAPPINGS)(partial(_keys_file, locate))  # building a path is slow
        # Each mapping holds a file handle, and their number is limited. The cache has no reference to this object, so
        # that the files are closed as soon as the store is garbage-collected.
        self.mapped = lru_cache(maxsize=_MAX_MAPPINGS)(partial(_open_checked, locate, codec, self.sums))

    def folder(self, segment: SegmentRow) -> Path:
        """Return the folder of a segment."""
        return segment_folder(*self._locate(segment.id))

    def check(self, segment: SegmentRow) -> None:
        """Raise unless all arrays of a segment exist, with the dtype, shape and size of the catalog."""
        for name in array_shapes(segment, self._codec):
            _open(self._locate, self._codec, segment, name)

    def open(self, segment: SegmentRow, name: str) -> NDArray[Any]:
        """Map an array without caching the mapping."""
        return _open_checked(self._locate, self._codec, self.sums, segment, name)

    def keys(self, segment: SegmentRow, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Map the keys of a segment, after comparing the checksums of those with these numbers."""
        self._compare(segment, numbers)
        mapped = self.mapped(segment, KEYS_FILE)
        if len(numbers) >= BULK_READ_KEYS:  # for a few keys, page faults would cost more than the memory is worth
            release_pages(mapped)
        return mapped

    def read(self, segment: SegmentRow, first: int, out: NDArray[Any]) -> None:
        """Fill (n, W) with the stored keys of a segment, beginning at key `first`."""
        self._compare(segment, np.arange(first, first + len(out)))
        # Plain reads rather than the mapping: mapped pages would count as memory of this process.
        with self._keys_file(segment.id).open("rb") as file:
            file.seek(skip_header(file) + first * self._row_bytes)
            if file.readinto(out.view(np.uint8).data) < len(out) * self._row_bytes:
                raise DatastoreCorrupt(f"{file.name}: truncated. Build the store again.")

    def copy(self, segment: SegmentRow, name: str, stretches: Iterable[tuple[int, int]]) -> Iterator[NDArray[Any]]:
        """Return stretches of an array's rows, (first, count) each, as they are stored, some megabytes at a time.

        The checksum of the whole file is compared first, as the copy gets a checksum of its own.
        """
        store, number = self._locate(segment.id)
        path = segment_folder(store, number) / name
        check_regular_file(store, path)
        if checksum(path) != array_checksums(segment)[name]:
            raise checksum_mismatch(path)
        dtype, shape = array_shapes(segment, self._codec)[name]
        size = np.dtype(dtype).itemsize * math.prod(shape[1:])
        with path.open("rb") as file:
            begin = skip_header(file)
            for first, count in _pieces(stretches, max(1, _COPIED_BYTES // size)):
                file.seek(begin + first * size)
                data = np.fromfile(file, dtype, count * math.prod(shape[1:]))
                yield data.reshape(count, *shape[1:])

    def _compare(self, segment: SegmentRow, keys: NDArray[np.int64]) -> None:
        """Compare the checksums of these keys of a segment, unless that was done before."""
        if not self.sums.is_checked(segment):
            self.sums.check_keys(self._keys_file(segment.id), segment, keys, self._row_bytes)


def _keys_file(locate: Locate, number: int) -> Path:
    return segment_folder(*locate(number)) / KEYS_FILE


def _pieces(stretches: Iterable[tuple[int, int]], step: int) -> Iterator[tuple[int, int]]:
    for first, count in stretches:
        for begin in range(first, first + count, step):
            yield begin, min(step, first + count - begin)


def _open(locate: Locate, codec: Codec, segment: SegmentRow, name: str) -> NDArray[Any]:
    store, number = locate(segment.id)
    file = segment_folder(store, number) / name
    check_regular_file(store, file)
    # As a plain array: np.memmap makes every small look-up slower.
    return np.asarray(open_array(file, *array_shapes(segment, codec)[name]))


def _open_checked(locate: Locate, codec: Codec, sums: BlockChecksums, segment: SegmentRow, name: str) -> NDArray[Any]:
    """Map an array after comparing its checksum; keys are compared when they are read."""
    sums.check_array(segment_folder(*locate(segment.id)), segment, name)
    return _open(locate, codec, segment, name)
