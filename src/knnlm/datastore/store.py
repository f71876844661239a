"""Open a memory and read it. Knows nothing about language models or search.

memory/
  catalog.db                 what exists
  segments/000000/keys.npy   (N, D) context vectors, less `offset`, divided by the segment's scale
  segments/000000/values.npy (N,) the token that followed each context
  index/<id>/index.faiss     derived data, can always be made again
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore.catalog import FILE, Catalog, SegmentRow, StoredDocument
from knnlm.datastore.segment import open_array
from knnlm.errors import DatastoreCorrupt, DatastoreError

KEYS, VALUES = "keys.npy", "values.npy"
_MAPPINGS = 256


class Datastore:
    """The (context vector → next token) pairs of a text collection. It is also the `Vectors` of an index.

    `chunks` and `take` give keys less the store's `offset`; `shift` brings a query there. Squared distances do not
    change under a shift, and inner products change by the same amount for all keys of a query.
    """

    def __init__(self, path: Path, catalog: Catalog) -> None:
        self.path = path
        self.catalog = catalog
        self.model: dict[str, Any] = _fact(catalog, "model", dict)
        self.window: dict[str, int] = _fact(catalog, "window", dict)
        self.key_dtype: str = _fact(catalog, "key_dtype", str)
        self._segments = catalog.segments()
        self.offset = stored_offset(catalog)
        self._starts = np.array([segment.first_row for segment in self._segments], dtype=np.int64)
        self._check_rows()
        for segment in self._segments:
            self._open(segment, KEYS)
            self._open(segment, VALUES)
        # Mapped when needed and let go again: each mapping holds a file handle, and a system has few.
        self._mapped = lru_cache(maxsize=_MAPPINGS)(self._open)

    @classmethod
    def open(cls, path: str | Path) -> Datastore:
        """Open a finished memory for reading."""
        folder = Path(path)
        catalog = Catalog.open(folder / FILE)
        if catalog.get("state") != "complete":
            raise DatastoreError(
                f"{folder} is an unfinished build ({catalog.document_count():,} documents are in). "
                "Run the same knnlm build again to finish it."
            )
        return cls(folder, catalog)

    @property
    def rows(self) -> int:
        """The number of stored pairs."""
        return self._segments[-1].first_row + self._segments[-1].rows if self._segments else 0

    @property
    def width(self) -> int:
        """The number of dimensions of a key."""
        return int(self.model["width"])

    @property
    def segments(self) -> list[SegmentRow]:
        """The segments in the order of their rows."""
        return list(self._segments)

    @property
    def bytes(self) -> int:
        """The size of keys and values on disk."""
        return self.rows * (self.width * np.dtype(self.key_dtype).itemsize + 4)

    @property
    def fingerprint(self) -> str:
        """What tells this memory from any other: a hash over the hashes of its files."""
        sums = [f"{segment.keys_sha256} {segment.values_sha256}" for segment in self._segments]
        return hashlib.sha256("\n".join(sums).encode()).hexdigest()[:16]

    def shift(self, queries: Tensor) -> Tensor:
        """Bring queries to where the stored keys are."""
        return queries if self.offset is None else queries - self.offset.to(queries.device)

    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Give (number of the first row, (n, D) float32 keys) from first to last."""
        for segment in self._segments:
            # Plain reads rather than the mapping: mapped pages would count as memory of this process.
            with (self._folder(segment) / KEYS).open("rb") as file:
                file.seek(file.seek(0, os.SEEK_END) - segment.rows * self.width * np.dtype(self.key_dtype).itemsize)
                for begin in range(0, segment.rows, size):
                    count = min(size, segment.rows - begin)
                    flat = np.fromfile(file, self.key_dtype, count * self.width)
                    if len(flat) < count * self.width:
                        raise DatastoreCorrupt(f"{file.name} was cut short. Build the memory again.")
                    yield (
                        segment.first_row + begin,
                        self._decode(flat.reshape(count, self.width), segment.scale),
                    )

    def take(self, ids: Tensor) -> Tensor:
        """Give the keys of these rows, (…) → (…, D) float32; an id below 0 gives zeros."""
        flat = ids.reshape(-1).cpu().numpy()
        keys = torch.zeros(len(flat), self.width)
        for number, places in self._by_segment(flat):
            segment = self._segments[number]
            rows = self._mapped(segment, KEYS)[flat[places] - segment.first_row]
            keys[torch.from_numpy(places)] = self._decode(rows, segment.scale)
        return keys.reshape(*ids.shape, self.width)

    def values(self, ids: Tensor) -> Tensor:
        """Give the tokens of these rows; an id below 0 gives -1."""
        flat = ids.reshape(-1).cpu().numpy()
        values = np.full(len(flat), -1, dtype=np.int64)
        for number, places in self._by_segment(flat):
            segment = self._segments[number]
            values[places] = self._mapped(segment, VALUES)[flat[places] - segment.first_row]
        if values.max(initial=-1) >= self.model["vocab_size"]:
            raise DatastoreCorrupt(f"{self.path} holds a token that its model does not have. Build the memory again.")
        return torch.from_numpy(values).reshape(ids.shape)

    def holds(self, text: str) -> bool:
        """Say whether a document with exactly this text is stored."""
        return self.catalog.holds(text_hash(text))

    def document_at(self, row: int) -> StoredDocument:
        """Find the document that holds a row."""
        return self.catalog.document_at(row)

    def around(self, row: int, *, before: int = 20, after: int = 20) -> tuple[list[int], list[int]]:
        """Give the tokens of the row's document before it, and from it on."""
        document = self.document_at(row)
        begin = max(document.first_row, row - before)
        end = min(document.first_row + document.rows, row + after)
        return self.values(torch.arange(begin, row)).tolist(), self.values(torch.arange(row, end)).tolist()

    def close(self) -> None:
        """Let go of the files."""
        self.catalog.close()

    def _by_segment(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Give (segment number, places in `rows` that lie in it)."""
        if len(rows) and rows.max() >= self.rows:
            raise IndexError(f"row {rows.max()} of {self.rows}")
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        numbers[rows < 0] = -1
        order = np.argsort(numbers, kind="stable")
        cuts = np.flatnonzero(np.diff(numbers[order], prepend=-2)).tolist()
        for begin, end in pairwise([*cuts, len(order)]):
            if (number := int(numbers[order[begin]])) >= 0:
                yield number, order[begin:end]

    def _decode(self, stored: NDArray[Any], scale: float) -> Tensor:
        keys = torch.from_numpy(np.ascontiguousarray(stored).astype(np.float32))
        return keys if scale == 1.0 else keys.mul_(scale)

    def _folder(self, segment: SegmentRow) -> Path:
        return segment_folder(self.path, segment.id)

    def _open(self, segment: SegmentRow, name: str) -> NDArray[Any]:
        if name == KEYS:
            return open_array(self._folder(segment) / name, self.key_dtype, (segment.rows, self.width))
        return open_array(self._folder(segment) / name, np.int32, (segment.rows,))

    def _check_rows(self) -> None:
        """The catalog must number segments and rows without gaps."""
        expected = 0
        for number, segment in enumerate(self._segments):
            if segment.id != number or segment.first_row != expected or segment.rows < 1:
                raise DatastoreCorrupt(
                    f"{self.catalog.path}: segment {segment.id} begins at row {segment.first_row} with "
                    f"{segment.rows} rows; row {expected} was expected. Build the memory again."
                )
            expected += segment.rows


def stored_offset(catalog: Catalog) -> Tensor | None:
    """Give what was taken from every key before it was stored, None where nothing was."""
    offset = catalog.get("offset")
    return None if offset is None else torch.tensor(offset, dtype=torch.float32)


def text_hash(text: str) -> str:
    """Hash the text of a document, to know it again."""
    return hashlib.sha256(text.encode()).hexdigest()


def segment_folder(path: Path, number: int) -> Path:
    """Say where a segment lies."""
    return path / "segments" / f"{number:06d}"


def _fact(catalog: Catalog, key: str, kind: type) -> Any:
    """Read a fact that every memory has."""
    value = catalog.get(key)
    if not isinstance(value, kind):
        raise DatastoreCorrupt(f"{catalog.path} does not say the memory's {key}. Build the memory again.")
    return value
