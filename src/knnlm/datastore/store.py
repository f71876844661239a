"""Open a memory and read it. Knows nothing about language models or search.

memory/
  catalog.db                 what exists
  map.safetensors            the linear map that keys went through, where there is one
  codec.safetensors          how keys are stored, where that is not as plain numbers
  segments/000000/keys.npy   (N, W) context vectors, less `offset`, mapped, divided by the segment's scale or encoded
  segments/000000/values.npy (N,) the token that followed each context
  segments/000000/kept.npy   (n,) which rows of the segment the n keys belong to, where not every row has one
  segments/000000/counts.npy (n,) how much each key counts in a vote, where that is not 1
  index/<id>/index.faiss     derived data, can always be made again

A row is a token of the stored text, and all of the text is here. A key is one of the vectors. In a memory as it was
built, row i has key i; in a pruned one, keys have numbers of their own, and `rows_of` says which rows they belong to.
"""

from __future__ import annotations

import hashlib
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
from knnlm.datastore.codec import Plain, row_bytes
from knnlm.datastore.keys import Keys
from knnlm.datastore.segment import open_array, skip_header
from knnlm.datastore.stored import fact, reader_width, stored_codec, stored_map, stored_offset
from knnlm.errors import DatastoreCorrupt, DatastoreError
from knnlm.index.looking import seen

KEYS, VALUES, KEPT, COUNTS = "keys.npy", "values.npy", "kept.npy", "counts.npy"
_MAPPINGS = 256
_RESIDENT = 1 << 26  # tokens that are kept in memory: four bytes each
_MOST = 1 << 31  # and on a GPU, beside their keys, which are hundreds of times larger


class Datastore:
    """The (context vector → next token) pairs of a text collection.

    `chunks` and `take` give keys less the store's `offset` and mapped by its `map`; `project` brings a query there.
    """

    def __init__(self, path: Path, catalog: Catalog) -> None:
        self.path = path
        self.catalog = catalog
        self.model: dict[str, Any] = fact(catalog, "model", dict)
        self.window: dict[str, int] = fact(catalog, "window", dict)
        self.key_dtype: str = fact(catalog, "key_dtype", str)
        self._segments = catalog.segments()
        self.offset = stored_offset(catalog)
        self.map = stored_map(catalog, reader_width(catalog))
        self.codec = stored_codec(catalog, self.width)
        self._check_rows()
        self._starts = _starts([segment.rows for segment in self._segments])
        self._key_starts = _starts([segment.keys for segment in self._segments])
        self._pruned = any(segment.kept is not None for segment in self._segments)
        self._counted = any(segment.counts_sha256 is not None for segment in self._segments)
        for segment in self._segments:
            for name in _files(segment):
                self._open(segment, name)
        # Mapped when needed and let go again: each mapping holds a file handle, and a system has few.
        self._mapped = lru_cache(maxsize=_MAPPINGS)(self._open)
        self._values: dict[torch.device, Tensor] = {}
        # (n, D) float16 keys of each segment, where a build has left them on its device.
        self.resident_keys: list[Tensor] | None = None

    @classmethod
    def open(cls, path: str | Path) -> Datastore:
        """Open a finished memory for reading."""
        folder = Path(path)
        catalog = Catalog.open(folder / FILE)
        if catalog.get("state") != "complete":
            what = "copy of another memory" if catalog.get("derived") else "build"
            raise DatastoreError(
                f"{folder} is an unfinished {what} ({catalog.document_count():,} documents are in). "
                "Run the same command again to finish it."
            )
        return cls(folder, catalog)

    @property
    def rows(self) -> int:
        """The number of tokens."""
        return int(self._starts[-1])

    @property
    def key_count(self) -> int:
        """The number of keys: as many as tokens, unless the memory was pruned."""
        return int(self._key_starts[-1])

    @property
    def keys(self) -> Keys:
        """The keys, for an index."""
        return Keys(self)

    @property
    def width(self) -> int:
        """The number of dimensions of a key; the reader's hidden states have `model["width"]`."""
        return int(self.model["width"]) if self.map is None else self.map.width

    @property
    def segments(self) -> list[SegmentRow]:
        """The segments in the order of their rows."""
        return list(self._segments)

    @property
    def bytes(self) -> int:
        """The size of keys and values, and of what says which keys there are, on disk."""
        extra = 4 * self._pruned + 4 * self._counted
        return self.key_count * (row_bytes(self.codec) + extra) + 4 * self.rows

    @property
    def index_bytes(self) -> int:
        """The size of the index on disk."""
        folders = [index_folder(self.path, row.id) for row in self.catalog.indexes()]
        return sum(file.stat().st_size for folder in folders for file in folder.glob("*"))

    @property
    def storage(self) -> str:
        """How keys are stored, as `knnlm build --keys` names it."""
        return self.key_dtype if isinstance(self.codec, Plain) else str(self.catalog.get("keys") or self.key_dtype)

    @property
    def fingerprint(self) -> str:
        """What tells this memory from any other: a hash over the hashes of its files."""
        sums = [f"{segment.keys_sha256} {segment.values_sha256}" for segment in self._segments]
        if self._pruned:
            sums += [f"{segment.kept_sha256} {segment.counts_sha256}" for segment in self._segments]
        if self.map is not None:
            sums.append(self.catalog.get("map")["sha256"])
        if not isinstance(self.codec, Plain):
            sums.append(self.catalog.get("codec")["sha256"])
        return hashlib.sha256("\n".join(sums).encode()).hexdigest()[:16]

    @property
    def origin(self) -> Tensor | None:
        """What `project` takes away, in the space of the stored keys: (D,); None where that is nothing.

        The inner product with a stored key, plus that with the origin, is the inner product with the whole key.
        """
        if self.map is None:
            return self.offset
        matrix, centre = self.map.on(torch.device("cpu"))
        return (centre if self.offset is None else centre + self.offset) @ matrix

    def project(self, queries: Tensor, *, metric: str = "l2") -> Tensor:
        """Bring hidden states of the reader to where the stored keys are, (N, model width) → (N, D).

        Distances do not change when keys and queries move by the same; inner products do, and `origin` says by what.
        """
        if metric == "ip":
            return queries if self.map is None else queries.float() @ self.map.on(queries.device)[0]
        shifted = queries if self.offset is None else queries - self.offset.to(queries.device)
        return shifted if self.map is None else self.map.apply(shifted)

    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Give (number of the first key, (n, D) float32 keys) from first to last."""
        columns = self.codec.columns
        for segment, first in zip(self._segments, self._key_starts.tolist(), strict=False):
            # Plain reads rather than the mapping: mapped pages would count as memory of this process.
            with (self._folder(segment) / KEYS).open("rb") as file:
                skip_header(file)
                for begin in range(0, segment.keys, size):
                    count = min(size, segment.keys - begin)
                    flat = np.fromfile(file, self.codec.dtype, count * columns)
                    if len(flat) < count * columns:
                        raise DatastoreCorrupt(f"{file.name} was cut short. Build the memory again.")
                    yield first + begin, self._decode(flat.reshape(count, columns), segment.scale)

    def read(self, first: int, out: Tensor) -> None:
        """Fill a (n, W) tensor of the codec's dtype with the keys from this one on, as they are stored."""
        size = row_bytes(self.codec)
        done = 0
        while done < len(out):
            number = int(np.searchsorted(self._key_starts, first + done, side="right")) - 1
            segment = self._segments[number]
            local = first + done - int(self._key_starts[number])
            count = min(len(out) - done, segment.keys - local)
            with (self._folder(segment) / KEYS).open("rb") as file:
                file.seek(skip_header(file) + local * size)
                place = out[done : done + count].numpy()
                if file.readinto(place.view(np.uint8).data) < count * size:
                    raise DatastoreCorrupt(f"{file.name} was cut short. Build the memory again.")
            done += count

    def take(self, ids: Tensor) -> Tensor:
        """Give these keys, (…) → (…, D) float32; an id below 0 gives zeros."""
        flat = ids.reshape(-1).cpu().numpy()
        # Gathered as they are stored, and decoded all at once: one token's neighbours are in as many segments.
        stored = np.empty((len(flat), self.codec.columns), self.codec.dtype)
        scales = np.ones((len(flat), 1), np.float32)
        for number, places, local in self._by_segment(flat, self._key_starts):
            mapped = self._mapped(self._segments[number], KEYS)
            if places[-1] - places[0] == len(places) - 1:  # ids that come in order lie side by side
                np.take(mapped, local, axis=0, out=stored[places[0] : places[-1] + 1], mode="clip")
            else:
                stored[places] = mapped[local]
            scales[places] = self._segments[number].scale
        keys = self.codec.decode(torch.from_numpy(stored), 1.0)
        if (scales != 1).any() and isinstance(self.codec, Plain):
            keys.mul_(torch.from_numpy(scales))
        if (nobody := flat < 0).any():
            keys[torch.from_numpy(nobody)] = 0.0
        return keys.reshape(*ids.shape, self.width)

    def rows_of(self, ids: Tensor) -> Tensor:
        """Say which rows these keys belong to; an id below 0 stays."""
        if not self._pruned:
            return ids
        flat = ids.reshape(-1).cpu().numpy()
        rows = np.full(len(flat), -1, dtype=np.int64)
        for number, places, local in self._by_segment(flat, self._key_starts):
            segment = self._segments[number]
            kept = local if segment.kept is None else self._mapped(segment, KEPT)[local].astype(np.int64)
            if kept.min(initial=0) < 0 or kept.max(initial=0) >= segment.rows:
                raise DatastoreCorrupt(
                    f"{self._folder(segment) / KEPT} names a row beyond the {segment.rows:,} of the segment. "
                    "Make the memory again."
                )
            rows[places] = kept + segment.first_row
        return torch.from_numpy(rows).reshape(ids.shape).to(ids.device)

    def counts(self, ids: Tensor) -> Tensor | None:
        """Say how much these keys count in a vote, (…) float32, 0 for an id below 0; None where each counts once."""
        if not self._counted:
            return None
        flat = ids.reshape(-1).cpu().numpy()
        counts = np.zeros(len(flat), dtype=np.float32)
        for number, places, local in self._by_segment(flat, self._key_starts):
            segment = self._segments[number]
            found = np.ones(1) if segment.counts_sha256 is None else self._mapped(segment, COUNTS)[local]
            if not (np.isfinite(found) & (found > 0)).all():
                raise DatastoreCorrupt(
                    f"{self._folder(segment) / COUNTS} holds counts that are not finite and above 0. "
                    "Make the memory again, or restore the file."
                )
            counts[places] = found
        return torch.from_numpy(counts).reshape(ids.shape).to(ids.device)

    def values(self, rows: Tensor) -> Tensor:
        """Give the tokens of these rows, where the rows are; a row below 0 gives -1."""
        if self.rows <= (_RESIDENT if rows.device.type == "cpu" else _MOST):
            return self._resident(rows)
        flat = rows.reshape(-1).cpu().numpy()
        values = np.full(len(flat), -1, dtype=np.int64)
        for number, places, local in self._by_segment(flat, self._starts):
            values[places] = self._mapped(self._segments[number], VALUES)[local]
        self._check_values(values)
        return torch.from_numpy(values).reshape(rows.shape).to(rows.device)

    def _resident(self, rows: Tensor) -> Tensor:
        """Look tokens up in one array on the device that asks: a thousand neighbours a query are many lookups."""
        if rows.numel() and seen(rows.amax() >= self.rows):
            raise IndexError(f"row {int(rows.max())} of {self.rows}")
        if rows.device not in self._values:
            values = np.empty(self.rows, np.int32)
            for segment in self._segments:  # one after another: each mapping holds a file handle
                values[segment.first_row : segment.first_row + segment.rows] = self._open(segment, VALUES)
            self._check_values(values)
            self._values[rows.device] = torch.from_numpy(values).to(rows.device)
        values_here = self._values[rows.device]
        if not len(values_here):
            return torch.full_like(rows, -1)
        return values_here[rows.clamp(0, self.rows - 1)].long().masked_fill_(rows < 0, -1)

    def _check_values(self, values: NDArray[Any]) -> None:
        if values.max(initial=-1) >= self.model["vocab_size"] or values.min(initial=0) < -1:
            raise DatastoreCorrupt(f"{self.path} holds a token that its model does not have. Build the memory again.")

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

    def _by_segment(
        self, numbers: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Give (segment, places in `numbers` that lie in it, their numbers counted from its first)."""
        if len(numbers) and numbers.max() >= starts[-1]:
            raise IndexError(f"row {numbers.max()} of {starts[-1]}")
        segments = np.searchsorted(starts[:-1], numbers, side="right") - 1
        segments[numbers < 0] = -1
        order = np.argsort(segments, kind="stable")
        cuts = np.flatnonzero(np.diff(segments[order], prepend=-2)).tolist()
        for begin, end in pairwise([*cuts, len(order)]):
            if (segment := int(segments[order[begin]])) >= 0:
                places = order[begin:end]
                yield segment, places, numbers[places] - starts[segment]

    def _decode(self, stored: NDArray[Any], scale: float) -> Tensor:
        return self.codec.decode(torch.from_numpy(np.ascontiguousarray(stored)), scale)

    def _folder(self, segment: SegmentRow) -> Path:
        return segment_folder(self.path, segment.id)

    def _open(self, segment: SegmentRow, name: str) -> NDArray[Any]:
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            KEYS: (self.codec.dtype, (segment.keys, self.codec.columns)),
            VALUES: ("int32", (segment.rows,)),
            KEPT: ("int32", (segment.keys,)),
            COUNTS: ("float32", (segment.keys,)),
        }
        # As a plain array: what numpy adds to a mapping makes every small look-up slower.
        return np.asarray(open_array(self._folder(segment) / name, *shapes[name]))

    def _check_rows(self) -> None:
        """The catalog must number segments and rows without gaps."""
        expected = 0
        for number, segment in enumerate(self._segments):
            if segment.id != number or segment.first_row != expected or segment.rows < 1:
                raise DatastoreCorrupt(
                    f"{self.catalog.path}: segment {segment.id} begins at row {segment.first_row} with "
                    f"{segment.rows} rows; row {expected} was expected. Build the memory again."
                )
            if not 0 <= segment.keys <= segment.rows:
                raise DatastoreCorrupt(
                    f"{self.catalog.path}: segment {segment.id} has {segment.keys} keys for {segment.rows} rows. "
                    "Make the memory again."
                )
            if not (isinstance(segment.scale, float) and 0 < segment.scale < np.inf):
                raise DatastoreCorrupt(
                    f"{self.catalog.path}: the keys of segment {segment.id} have the scale {segment.scale!r}. "
                    "Make the memory again."
                )
            expected += segment.rows


def _files(segment: SegmentRow) -> list[str]:
    """Name the arrays that a segment has."""
    has = {KEYS: True, VALUES: True, KEPT: segment.kept is not None, COUNTS: segment.counts_sha256 is not None}
    return [name for name, there in has.items() if there]


def _starts(sizes: list[int]) -> NDArray[np.int64]:
    """Give where each segment begins, and at the end where the last one ends."""
    return np.cumsum([0, *sizes], dtype=np.int64)


def text_hash(text: str) -> str:
    """Hash the text of a document, to know it again."""
    return hashlib.sha256(text.encode()).hexdigest()


def index_folder(path: Path, number: int) -> Path:
    """Say where an index lies."""
    return path / "index" / f"{number:06d}"


def segment_folder(path: Path, number: int) -> Path:
    """Say where a segment lies."""
    return path / "segments" / f"{number:06d}"
