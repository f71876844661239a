"""Write a segment that appears complete or not at all. Knows nothing about where its numbers come from."""

from __future__ import annotations

import shutil
from pathlib import Path

from numpy.typing import DTypeLike

from knnlm.checksums import checksum
from knnlm.datastore.arrays import KEYS, segment_folder
from knnlm.datastore.segment import ArrayWriter, KeyWriter, sync_folder, writing


class NewSegment:
    """A folder under a temporary name, until it is sealed."""

    def __init__(self, folder: Path, number: int) -> None:
        self._final = segment_folder(folder, number)
        self._partial = self._final.with_suffix(".partial")
        with writing(self._partial):
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)

    def place(self, name: str) -> Path:
        """Say where a file of it is to be written."""
        return self._partial / name

    def array(self, name: str, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> ArrayWriter:
        """Begin an array; close it before the segment is sealed."""
        return ArrayWriter(self.place(name), dtype, row_shape)

    def keys(self, dtype: str, width: int) -> KeyWriter:
        """Begin keys that may have to be divided to fit into their type."""
        return KeyWriter(self.place(KEYS), dtype, width)

    def seal(self) -> dict[str, str]:
        """Give the folder its name, so that it is on disk, and the SHA-256 of each file."""
        sums = {file.name: checksum(file) for file in self._partial.iterdir()}
        with writing(self._final):
            sync_folder(self._partial)
            self._partial.rename(self._final)
            sync_folder(self._final.parent)
        return sums
