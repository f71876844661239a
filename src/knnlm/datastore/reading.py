"""Read the arrays of segments, each compared with its checksum before it is used. Knows nothing about numbering."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnlm.checksums import checksum
from knnlm.datastore.arrays import KEYS, array_shapes, array_sums, segment_folder
from knnlm.datastore.catalog import SegmentRow
from knnlm.datastore.codec import Codec, row_bytes
from knnlm.datastore.segment import open_array, skip_header
from knnlm.datastore.strangers import check_place
from knnlm.datastore.sums import Sums, damaged
from knnlm.errors import DatastoreCorrupt
from knnlm.mapping import Resident

_MAPPINGS = 256
MANY = 256  # keys of a segment that are asked for together
_PIECE = 1 << 22  # bytes that are copied at a time


class Arrays:
    """The arrays of a memory; with `check` False they are not compared with their checksums."""

    def __init__(self, path: Path, codec: Codec, *, check: bool = True) -> None:
        self._path, self._codec = path, codec
        self._row_bytes = row_bytes(codec)
        self.sums = Sums(on=check)
        self._resident = Resident()
        self._keys_file = lru_cache(maxsize=_MAPPINGS)(partial(_keys_file, path))  # one token asks for many
        # Mapped when needed and let go again: each mapping holds a file handle, and a system has few. The cache knows
        # nothing of its owner, so that a memory that is forgotten lets go of its files at once.
        self.mapped = lru_cache(maxsize=_MAPPINGS)(partial(_open_sound, path, codec, self.sums))

    def check(self, segment: SegmentRow) -> None:
        """See that all arrays of a segment are there, and of the type, shape and size that the catalog says."""
        for name in array_shapes(segment, self._codec):
            _open(self._path, self._codec, segment, name)

    def open(self, segment: SegmentRow, name: str) -> NDArray[Any]:
        """Map an array for this once."""
        return _open_sound(self._path, self._codec, self.sums, segment, name)

    def keys(self, segment: SegmentRow, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Map the keys of a segment, after comparing those with these numbers."""
        self._compare(segment, numbers)
        mapped = self.mapped(segment, KEYS)
        if len(numbers) >= MANY:  # a token's few would pay more for coming back than they take
            self._resident.touched(mapped)
        return mapped

    def read(self, segment: SegmentRow, first: int, out: NDArray[Any]) -> None:
        """Fill (n, W) with the keys of a segment from this one on, as they are stored."""
        self._compare(segment, np.arange(first, first + len(out)))
        # Plain reads rather than the mapping: mapped pages would count as memory of this process.
        with self._keys_file(segment.id).open("rb") as file:
            file.seek(skip_header(file) + first * self._row_bytes)
            if file.readinto(out.view(np.uint8).data) < len(out) * self._row_bytes:
                raise DatastoreCorrupt(f"{file.name} was cut short. Build the memory again.")

    def copy(self, segment: SegmentRow, name: str, stretches: Iterable[tuple[int, int]]) -> Iterator[NDArray[Any]]:
        """Give stretches of an array's rows, (first, count) each, as they are stored, some megabytes at a time.

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
            for first, count in _pieces(stretches, max(1, _PIECE // size)):
                file.seek(begin + first * size)
                data = np.fromfile(file, dtype, count * math.prod(shape[1:]))
                yield data.reshape(count, *shape[1:])

    def _compare(self, segment: SegmentRow, keys: NDArray[np.int64]) -> None:
        """See that these keys of a segment are as they were written, where that was not seen yet."""
        if not self.sums.done(segment):
            self.sums.keys(self._keys_file(segment.id), segment, keys, self._row_bytes)


def _keys_file(path: Path, number: int) -> Path:
    return segment_folder(path, number) / KEYS


def _pieces(stretches: Iterable[tuple[int, int]], step: int) -> Iterator[tuple[int, int]]:
    for first, count in stretches:
        for begin in range(first, first + count, step):
            yield begin, min(step, first + count - begin)


def _open(path: Path, codec: Codec, segment: SegmentRow, name: str) -> NDArray[Any]:
    file = segment_folder(path, segment.id) / name
    check_place(path, file)
    # As a plain array: what numpy adds to a mapping makes every small look-up slower.
    return np.asarray(open_array(file, *array_shapes(segment, codec)[name]))


def _open_sound(path: Path, codec: Codec, sums: Sums, segment: SegmentRow, name: str) -> NDArray[Any]:
    """Map an array, and compare it with its checksum; keys are compared when they are read."""
    sums.array(segment_folder(path, segment.id), segment, name)
    return _open(path, codec, segment, name)
