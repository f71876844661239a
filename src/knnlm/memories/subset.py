"""Search only the stored pairs whose sources are most like the source that is being translated.

The nearest stored sources are found once for each source, by BM25 over the tokens that the encoder reads, and the keys
of their targets are gathered once. Every position and every beam of that source is then searched exactly among these
keys: one matrix product for each source, and one selection for all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, IndexInvalid, ModelError, ParameterError
from knnlm.index.base import Neighbours, check_metric, check_search, no_neighbours
from knnlm.index.bm25 import BM25
from knnlm.index.exact import ExactIndex, find_centre, imprecise
from knnlm.memories.base import SourceTokens

_MAX_DISTANCES = 1 << 24  # that are computed at a time
_MAX_KEPT = 1 << 31  # bytes of gathered keys that are kept for the next positions of their sources
_ENCODED = 1024  # source texts that are tokenised at a time

Ints = NDArray[np.int64]
_Encode: TypeAlias = Callable[[Sequence[str]], Sequence[Sequence[int]]]
_Pair: TypeAlias = tuple[int, int, int, str]  # number, first entry, entries, source text


def check_subset(sentences: int | None) -> None:
    """Raise ParameterError for a number of sentences that cannot be searched."""
    if sentences is not None and sentences < 1:
        raise ParameterError(f"subset must be at least 1 sentence, not {sentences}.")


@dataclass(frozen=True)
class _Subset:
    """The keys that are searched for one source."""

    ids: Tensor  # (M,) ascending
    keys: Tensor  # (M, D) float32, less the centre
    squares: Tensor  # (M,)

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.squares.nbytes + self.ids.nbytes


@dataclass(frozen=True)
class _Piece:
    """Queries of one source."""

    subset: _Subset
    rows: Sequence[int]


class PairSubsetIndex:
    """Exact search among the stored pairs with the sources nearest to that of each query; all of them if there are few.

    `encode` returns the tokens of source texts; `special_tokens` are those of every source, which are not compared.
    `previous` is the index of the store before documents were added or removed: only added sources are tokenised.
    """

    def __init__(
        self,
        store: Datastore,
        sentences: int,
        *,
        encode: _Encode,
        special_tokens: Sequence[int] = (),
        metric: str = "l2",
        device: torch.device | str = "cpu",
        key_dtype: str = "float16",
        previous: PairSubsetIndex | None = None,
    ) -> None:
        check_subset(sentences)
        check_metric(metric)
        store.pinned = True
        self.metric = metric
        self.sentences = sentences
        self._store = store
        self._device = torch.device(device)
        self._key_dtype = key_dtype
        self._special = frozenset(special_tokens)
        pairs = store.catalog.source_texts()
        self._ranges = _key_ranges(store, pairs)  # (2, documents): first key, and the one behind the last
        self._documents = np.array([hash((number, text)) for number, _, _, text in pairs], np.int64)
        self._bm25 = self._index_sources(pairs, encode, previous) if sentences < len(pairs) else None
        self._kept: dict[SourceTokens, _Subset] = {}  # the least recently used first
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def _index_sources(self, pairs: Sequence[_Pair], encode: _Encode, previous: PairSubsetIndex | None) -> BM25:
        """Index all sources, or change the previous index where new documents follow those that are kept."""
        if previous is not None and previous._bm25 is not None:
            kept = np.isin(previous._documents, self._documents)
            count = int(kept.sum())
            if np.array_equal(previous._documents[kept], self._documents[:count]):
                return previous._bm25.changed(kept, self._words(pairs[count:], encode))
        return BM25(self._words(pairs, encode))

    def _words(self, pairs: Sequence[_Pair], encode: _Encode) -> Iterator[list[int]]:
        """Tokenise sources."""
        for begin in range(0, len(pairs), _ENCODED):
            for tokens in encode([text for *_, text in pairs[begin : begin + _ENCODED]]):
                yield [token for token in tokens if token not in self._special]

    def documents(self, source: SourceTokens) -> Ints:
        """Return the places, among all documents, of those that are searched for a source."""
        if self._bm25 is None:
            return np.arange(self._ranges.shape[1])
        return self._bm25.nearest([token for token in source if token not in self._special], self.sentences)

    def search(self, queries: Tensor, k: int, source_tokens: Sequence[SourceTokens] | None = None) -> Neighbours:
        """Return the k nearest of the keys that are searched for the source of each of (N, D) queries."""
        check_search(queries, k, self._store.width)
        if self._bm25 is None:
            return self._whole.search(queries, k)
        if source_tokens is None:
            raise ModelError(
                "A subset search needs the sources: give their tokens as input_ids, not encoder_outputs or "
                "inputs_embeds."
            )
        queries = queries.to(self._device, torch.float32)
        found = no_neighbours(len(queries), k, self._device)
        self._search_into(found, queries, source_tokens, torch.float32)
        return found

    @cached_property
    def _whole(self) -> ExactIndex:
        return ExactIndex(self._store.keys, metric=self.metric, device=self._device, key_dtype=self._key_dtype)

    @cached_property
    def _centre(self) -> Tensor:
        return find_centre(self._store.keys, self.metric).to(self._device)

    def _search_into(
        self, found: Neighbours, queries: Tensor, sources: Sequence[SourceTokens], dtype: torch.dtype
    ) -> None:
        """Write the neighbours of all queries; those whose float32 distances are imprecise are searched in float64."""
        again: list[Tensor] = []
        for part in self._parts(sources):
            rows = torch.tensor([row for piece in part for row in piece.rows], device=self._device)
            own = queries[rows].to(dtype) - self._centre
            nearest = self._nearest(part, own, found.ids.shape[1])
            width = nearest.ids.shape[1]
            found.ids[rows, :width], found.distances[rows, :width] = nearest.ids, nearest.distances.float()
            if self.metric == "l2" and dtype == torch.float32 and width:
                largest = torch.stack([piece.subset.squares.amax() for piece in part if len(piece.subset.ids)]).amax()
                again.append(rows[imprecise(own.square().sum(1), largest, nearest.distances)])
        if again and len(rows := torch.cat(again)):
            precise = no_neighbours(len(rows), found.ids.shape[1], self._device)
            self._search_into(precise, queries[rows], [sources[row] for row in rows.tolist()], torch.float64)
            found.ids[rows], found.distances[rows] = precise.ids, precise.distances

    def _nearest(self, part: Sequence[_Piece], queries: Tensor, k: int) -> Neighbours:
        """Return the neighbours of queries less the centre; they are in the order of the pieces' rows."""
        width = max(len(piece.subset.ids) for piece in part)
        distances = queries.new_full((len(queries), width), torch.inf)
        cuts = [len(piece.rows) for piece in part]
        for piece, own, into in zip(part, queries.split(cuts), distances.split(cuts), strict=True):
            keys = piece.subset.keys.to(queries.dtype)
            if self.metric == "ip":
                into[:, : len(keys)] = -(own @ keys.T)
            else:
                squares = piece.subset.squares if keys.dtype == torch.float32 else keys.square().sum(1)
                into[:, : len(keys)] = torch.addmm(squares, own, keys.T, alpha=-2)
        best, columns = distances.topk(min(k, width), largest=False, sorted=True)
        ids = [
            piece.subset.ids[own.clamp(max=len(piece.subset.ids) - 1)] if len(piece.subset.ids) else own
            for piece, own in zip(part, columns.split(cuts), strict=True)
        ]
        if self.metric == "l2":
            best = (best + queries.square().sum(1, keepdim=True)).clamp_(min=0)
        return Neighbours(torch.cat(ids).masked_fill(best == torch.inf, -1), best)

    def _parts(self, sources: Sequence[SourceTokens]) -> Iterator[list[_Piece]]:
        """Group queries by their sources, so that the distances of each group fit into memory."""
        groups: dict[SourceTokens, list[int]] = {}
        for row, source in enumerate(sources):
            groups.setdefault(source, []).append(row)
        with self._lock:
            for source in groups.keys() & self._kept.keys():
                self._kept[source] = self._kept.pop(source)  # the last to be dropped
        part: list[_Piece] = []
        rows = width = 0
        for source, own in groups.items():
            subset = self._subset(source, groups)
            size = max(1, _MAX_DISTANCES // max(1, len(subset.ids)))
            for begin in range(0, len(own), size):
                piece = _Piece(subset, own[begin : begin + size])
                wider = max(width, len(subset.ids))
                if part and (rows + len(piece.rows)) * wider > _MAX_DISTANCES:
                    yield part
                    part, rows, wider = [], 0, len(subset.ids)
                part.append(piece)
                rows, width = rows + len(piece.rows), wider
        if part:
            yield part

    def _subset(self, source: SourceTokens, current: dict[SourceTokens, list[int]]) -> _Subset:
        """Return the keys of a source, gathered before or now; those of `current` sources are not dropped."""
        with self._lock:
            if (known := self._kept.get(source)) is not None:
                return known
            subset = self._gather(source)
            while self._kept and self._kept_bytes + subset.bytes > _MAX_KEPT:
                oldest = next(iter(self._kept))
                if oldest in current:
                    return subset
                self._kept_bytes -= self._kept.pop(oldest).bytes
            self._kept[source] = subset
            self._kept_bytes += subset.bytes
            return subset

    def _gather(self, source: SourceTokens) -> _Subset:
        """Read the keys of the nearest documents."""
        first, end = self._ranges[:, self.documents(source)]
        counts = end - first
        # Each range counted on from its first key: the running number less that of the range's begin.
        ids = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        numbers = torch.from_numpy(ids)
        keys = self._store.take(numbers).to(self._device) - self._centre
        squares = keys.square().sum(1)
        if not squares.isfinite().all():
            raise IndexInvalid(
                f"{self._store.path}: stored keys contain numbers that are not finite: their file is corrupt. Build "
                "the store again."
            )
        return _Subset(numbers.to(self._device), keys, squares)


def _key_ranges(store: Datastore, pairs: Sequence[_Pair]) -> Ints:
    """Return the (2, documents) numbers of the first key of each document and of the key behind its last."""
    stored = np.array([(first, count) for _, first, count, _ in pairs], np.int64).reshape(-1, 2)
    counts = stored[:, 1]
    first = store.entry_numbers.to_live(stored[:, 0])
    if ((counts > 0) & ((first < 0) | (counts < 0) | (first + counts > store.entry_count))).any():
        raise DatastoreCorrupt(f"{store.path} has documents beyond its entries. Run knnlm repair {store.path}")
    first = np.where(counts > 0, first, 0)
    ranges = np.stack([first, first + counts])
    if store.key_count == store.entry_count:
        return ranges
    entries = store.entries_of(torch.arange(store.key_count)).numpy()  # a pruned store: not every entry has a key
    return np.searchsorted(entries, ranges)
