"""Arrays on disk: written once, then immutable; segments that appear complete or not at all.

Rows of an array may be written in any order and in pieces, and nothing is kept in memory; the .npy header, whose length
does not depend on the number of rows, is written again at the end. Arrays are compared with their checksums before they
are used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from knnlm.datastore.codecs import Codec, Plain, row_bytes
from knnlm.datastore.integrity import BlockChecksums, damaged
from knnlm.datastore.paths import COUNTS_FILE, KEPT_FILE, KEYS_FILE, VALUES_FILE, index_folder, segment_folder
from knnlm.datastore.schema import IndexRow, SegmentRow, array_sums
from knnlm.datastore.validation import check_place
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
        with translate_os_errors(path):
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
        with translate_os_errors(self.path):
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
        with translate_os_errors(self.path):
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
        """Return the divisor below 1 that small keys should be written with; 1 where keys are not small."""
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
    """Return the power of two, which loses nothing, that brings the largest number near the most and leaves room."""
    return 2.0 ** math.ceil(math.log2(largest / (most / 8)))


def open_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map an array into memory after checking that the file is exactly what the catalog says."""
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
            f"{path} holds {found_dtype} {found_shape}, but the catalog says {expected} {shape}. "
            "Build the store again, or restore the file."
        )
    size = begin + expected.itemsize * math.prod(shape)
    if path.stat().st_size != size:
        raise DatastoreCorrupt(
            f"{path} has {path.stat().st_size:,} bytes instead of {size:,}: it was cut short. "
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
    """Go to the first row of an array that was checked when it was opened, and say where that is."""
    np.lib.format.read_magic(file)
    np.lib.format.read_array_header_1_0(file)
    return file.tell()


INDEX, BLOCKS = "index.faiss", "index.blocks"

VOCABULARY = 1 << 22  # tokens of a model: tables of that length are allocated for an untrusted catalog too


def index_file(path: Path, row: IndexRow) -> Path:
    """Return where the file of an index lies."""
    return index_folder(path, row.id) / (BLOCKS if is_blocks(row.spec) else INDEX)


def array_shapes(segment: SegmentRow, codec: Codec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return of which type and shape the arrays are that a segment has."""
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
    """Return what is wrong with the numbers of segments, and whether it is with that one only: rows go without gaps."""
    expected = 0
    for segment in segments:
        if segment.first_entry != expected or segment.entries < 1:
            what = f"begins at row {segment.first_entry:,} with {segment.entries:,} rows; row {expected:,} was expected"
            yield segment, f"segment {segment.id} {what}", False
        if not 0 <= segment.keys <= segment.entries:
            yield segment, f"segment {segment.id} has {segment.keys:,} keys for {segment.entries:,} rows", False
        if not (isinstance(segment.scale, float) and 0 < segment.scale < math.inf):
            yield segment, f"the keys of segment {segment.id} have the scale {repr(segment.scale)[:60]}", True
        expected = segment.first_entry + segment.entries


def check_segments(path: Path, segments: Sequence[SegmentRow]) -> None:
    """Reject segments whose numbers cannot be."""
    for _, what, _ in segment_faults(segments):
        raise DatastoreCorrupt(f"{path}: {what}. Make the store again, or run: knnlm repair {path.parent}")


def check_metadata(path: Path, model: dict[str, Any], window: dict[str, Any], codec: Codec) -> None:
    """Reject metadata that would be stumbled over later."""
    sound = {
        "model's name": isinstance(model.get("name"), str),
        "model's vocabulary": isinstance(size := model.get("vocab_size"), int) and 0 < size <= VOCABULARY,
        "window": all(isinstance(window.get(name), int) and window[name] > 0 for name in ("context", "stride")),
        "precision of the keys": not isinstance(codec, Plain) or codec.dtype in KEY_DTYPES,
    }
    if wrong := [name for name, fine in sound.items() if not fine]:
        raise DatastoreCorrupt(f"{path} does not say the {wrong[0]} properly. Build the store again.")


class NewSegment:
    """A folder under a temporary name, until it is sealed."""

    def __init__(self, folder: Path, number: int) -> None:
        self._final = segment_folder(folder, number)
        self._partial = create_partial_folder(self._final)

    def place(self, name: str) -> Path:
        """Return where a file of it is to be written."""
        return self._partial / name

    def array(self, name: str, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> ArrayWriter:
        """Begin an array; close it before the segment is sealed."""
        return ArrayWriter(self.place(name), dtype, row_shape)

    def keys(self, dtype: str, width: int) -> KeyWriter:
        """Begin keys that may have to be divided to fit into their type."""
        return KeyWriter(self.place(KEYS_FILE), dtype, width)

    def seal(self) -> dict[str, str]:
        """Return the folder its name, so that it is on disk, and the SHA-256 of each file."""
        sums = {file.name: checksum(file) for file in self._partial.iterdir()}
        commit_folder(self._partial, self._final)
        return sums


_MAPPINGS = 256

MANY = 256  # keys of a segment that are asked for together

_READ_PIECE = 1 << 22  # bytes that are copied at a time


class Arrays:
    """The arrays of a store; with `check` False they are not compared with their checksums."""

    def __init__(self, path: Path, codec: Codec, *, check: bool = True) -> None:
        self._path, self._codec = path, codec
        self._row_bytes = row_bytes(codec)
        self.sums = BlockChecksums(on=check)
        self._keys_file = lru_cache(maxsize=_MAPPINGS)(partial(_keys_file, path))  # one token asks for many
        # Mapped when needed and let go again: each mapping holds a file handle, and a system has few. The cache knows
        # nothing of its owner, so that a store that is forgotten lets go of its files at once.
        self.mapped = lru_cache(maxsize=_MAPPINGS)(partial(_open_sound, path, codec, self.sums))

    def check(self, segment: SegmentRow) -> None:
        """Check that all arrays of a segment are there, and of the type, shape and size that the catalog says."""
        for name in array_shapes(segment, self._codec):
            _open(self._path, self._codec, segment, name)

    def open(self, segment: SegmentRow, name: str) -> NDArray[Any]:
        """Map an array for this once."""
        return _open_sound(self._path, self._codec, self.sums, segment, name)

    def keys(self, segment: SegmentRow, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Map the keys of a segment, after comparing those with these numbers."""
        self._compare(segment, numbers)
        mapped = self.mapped(segment, KEYS_FILE)
        if len(numbers) >= MANY:  # a token's few would pay more for coming back than they take
            release_pages(mapped)
        return mapped

    def read(self, segment: SegmentRow, first: int, out: NDArray[Any]) -> None:
        """Fill (n, W) with the keys of a segment from this one on, as they are stored."""
        self._compare(segment, np.arange(first, first + len(out)))
        # Plain reads rather than the mapping: mapped pages would count as memory of this process.
        with self._keys_file(segment.id).open("rb") as file:
            file.seek(skip_header(file) + first * self._row_bytes)
            if file.readinto(out.view(np.uint8).data) < len(out) * self._row_bytes:
                raise DatastoreCorrupt(f"{file.name} was cut short. Build the store again.")

    def copy(self, segment: SegmentRow, name: str, stretches: Iterable[tuple[int, int]]) -> Iterator[NDArray[Any]]:
        """Return stretches of an array's rows, (first, count) each, as they are stored, some megabytes at a time.

        All of the file is compared before: what is copied gets a checksum of its own.
        """
        path = segment_folder(self._path, segment.id) / name
        check_place(self._path, path)
        if checksum(path) != array_sums(segment)[name]:
            raise damaged(path)
        dtype, shape = array_shapes(segment, self._codec)[name]
        size = np.dtype(dtype).itemsize * math.prod(shape[1:])
        with path.open("rb") as file:
            begin = skip_header(file)
            for first, count in _pieces(stretches, max(1, _READ_PIECE // size)):
                file.seek(begin + first * size)
                data = np.fromfile(file, dtype, count * math.prod(shape[1:]))
                yield data.reshape(count, *shape[1:])

    def _compare(self, segment: SegmentRow, keys: NDArray[np.int64]) -> None:
        """Check that these keys of a segment are as they were written, where that was not seen yet."""
        if not self.sums.done(segment):
            self.sums.keys(self._keys_file(segment.id), segment, keys, self._row_bytes)


def _keys_file(path: Path, number: int) -> Path:
    return segment_folder(path, number) / KEYS_FILE


def _pieces(stretches: Iterable[tuple[int, int]], step: int) -> Iterator[tuple[int, int]]:
    for first, count in stretches:
        for begin in range(first, first + count, step):
            yield begin, min(step, first + count - begin)


def _open(path: Path, codec: Codec, segment: SegmentRow, name: str) -> NDArray[Any]:
    file = segment_folder(path, segment.id) / name
    check_place(path, file)
    # As a plain array: what numpy adds to a mapping makes every small look-up slower.
    return np.asarray(open_array(file, *array_shapes(segment, codec)[name]))


def _open_sound(path: Path, codec: Codec, sums: BlockChecksums, segment: SegmentRow, name: str) -> NDArray[Any]:
    """Map an array, and compare it with its checksum; keys are compared when they are read."""
    sums.array(segment_folder(path, segment.id), segment, name)
    return _open(path, codec, segment, name)
