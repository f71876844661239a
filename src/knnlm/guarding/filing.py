"""Look through the files of a segment. Knows nothing about catalogs beyond the row of the segment."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnlm.datastore.arrays import COUNTS, KEPT, KEYS, VALUES, array_shapes, array_sums, segment_folder
from knnlm.datastore.catalog import SegmentRow
from knnlm.datastore.codec import Codec
from knnlm.datastore.segment import open_array, skip_header
from knnlm.datastore.strangers import check_place
from knnlm.datastore.waiting import WAITING
from knnlm.errors import DatastoreError
from knnlm.guarding.findings import SEGMENT, Problem
from knnlm.progress import Advance

_PIECE = 1 << 24  # bytes at a time
Look = Callable[[NDArray[Any]], str | None]


class SegmentFiles:
    """The arrays of one segment, and what must be true of them."""

    def __init__(
        self, folder: Path, segment: SegmentRow, codec: Codec, *, vocab_size: int, waiting: bool = False
    ) -> None:
        """Keys that are `waiting` for their codec lie in a file of another name, as the codec that is given says."""
        self._folder, self._segment, self._vocab_size = folder, segment, vocab_size
        self._shapes = array_shapes(segment, codec)
        if waiting:
            self._shapes[WAITING] = self._shapes.pop(KEYS)
        self._sums = {**array_sums(segment), WAITING: segment.keys_sha256}

    def paths(self) -> list[Path]:
        """Name the files."""
        return [segment_folder(self._folder, self._segment.id) / name for name in self._shapes]

    def check(self, *, deep: bool, advance: Advance) -> list[Problem]:
        """Say what is wrong: type, shape and size; if `deep`, also checksums and contents."""
        found = []
        for path in self.paths():
            what = self._look(path, deep, advance)
            if what is not None:
                name = path.relative_to(self._folder).as_posix()
                found.append(Problem(name, what, SEGMENT, self._segment.id))
        return found

    def _look(self, path: Path, deep: bool, advance: Advance) -> str | None:
        try:
            check_place(self._folder, path)
            dtype, shape = self._shapes[path.name]
            open_array(path, dtype, shape)
            return self._read(path, dtype, shape, advance) if deep else None
        except DatastoreError as error:
            return _less_path(str(error), path)
        except OSError as error:
            return f"cannot be read ({error.strerror or error})"

    def _read(self, path: Path, dtype: str, shape: tuple[int, ...], advance: Advance) -> str | None:
        """Hash the file and look at its numbers, in one pass."""
        looks: dict[str, Look] = {
            KEYS: _look_at_keys,
            WAITING: _look_at_keys,
            VALUES: self._look_at_values,
            KEPT: _Ascending(self._segment.rows),
            COUNTS: _look_at_counts,
        }
        wrong: str | None = None
        row_bytes = np.dtype(dtype).itemsize * int(np.prod(shape[1:], dtype=np.int64))
        piece_bytes = max(1, _PIECE // row_bytes) * row_bytes
        with path.open("rb") as file:
            begin = skip_header(file)
            file.seek(0)
            digest = hashlib.sha256(file.read(begin))
            while piece := file.read(piece_bytes):
                digest.update(piece)
                whole = len(piece) // row_bytes * row_bytes
                wrong = wrong or looks[path.name](np.frombuffer(piece[:whole], dtype))
                advance(len(piece))
        if digest.hexdigest() != self._sums[path.name]:
            return "is not as it was written: its SHA-256 is not the catalog's"
        return wrong

    def _look_at_values(self, values: NDArray[Any]) -> str | None:
        if values.min(initial=0) < 0 or values.max(initial=0) >= self._vocab_size:
            return f"holds tokens that are not from 0 to {self._vocab_size - 1:,}"
        return None


class _Ascending:
    """Rows that have keys ascend, within their segment; pieces come one after another."""

    def __init__(self, rows: int) -> None:
        self._rows, self._last = rows, -1

    def __call__(self, kept: NDArray[Any]) -> str | None:
        steps = np.diff(kept.astype(np.int64), prepend=self._last)
        self._last = int(kept[-1]) if len(kept) else self._last
        if (steps <= 0).any() or self._last >= self._rows:
            return f"does not name ascending rows of the {self._rows:,} of the segment"
        return None


def _look_at_keys(keys: NDArray[Any]) -> str | None:
    if keys.dtype.kind == "f" and not np.isfinite(keys).all():
        return "holds keys that are no finite numbers"
    return None


def _look_at_counts(counts: NDArray[Any]) -> str | None:
    if not (np.isfinite(counts) & (counts > 0)).all():
        return "holds counts that are not finite and above 0"
    return None


def _less_path(message: str, path: Path) -> str:
    """Leave out the path that an error begins with, and its advice: both are said elsewhere."""
    text = message.removeprefix(str(path)).lstrip(": ")
    return text.partition(". ")[0].rstrip(".")
