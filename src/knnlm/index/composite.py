"""Indexes over a store that has changed since its index was built: entries were removed, or added.

An approximate index is built once and cannot drop vectors. `FilteredIndex` searches for more neighbours than needed
and leaves removed ones out, widening the search until there are enough; where the index does not reach enough, it falls
back to exact search. `ConcatenatedIndex` searches two indexes, one over the first vectors and one over the rest;
`ShardedIndex` searches one index for each shard of a store.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.index.base import (
    BlockSearch,
    Index,
    Neighbours,
    Vectors,
    check_search,
    no_neighbours,
    pad_neighbours,
    probes,
    shard_probes,
)
from knnlm.index.exact import ExactIndex
from knnlm.index.packed import merge_shards
from knnlm.index.rerank import merge

_EXTRA = 16  # neighbours searched for beside the share that is expected to be removed
_WIDENING = 4  # times as many neighbours when there were not enough


class AdjustableIndex(Index, Protocol):
    """An approximate index that can search more thoroughly."""

    @property
    def rows(self) -> int:
        """The number of vectors."""

    @property
    def width(self) -> int:
        """The number of dimensions."""

    def search(self, queries: Tensor, k: int, *, effort: float = 1.0) -> Neighbours:
        """Return the k nearest; `effort` multiplies how many of the vectors are compared."""


class FilteredIndex:
    """An index of which some vectors are removed, and the others have new ids."""

    def __init__(self, index: AdjustableIndex, new_ids: NDArray[np.int64] | None, vectors: Vectors) -> None:
        """Map the index's vector i to `new_ids[i]`, -1 if it is removed; `vectors` are the remaining ones.

        None: no vector is removed, and ids stay as they are.
        """
        self.metric = index.metric
        self._index = index
        self._vectors = vectors
        self._exact: ExactIndex | None = None
        self._new_ids = None if new_ids is None else torch.from_numpy(new_ids)
        self.rows = index.rows if new_ids is None else int((new_ids >= 0).sum())

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest of each of (N, D) queries, or all where there are fewer."""
        check_search(queries, k, self._index.width)
        total, enough = self._index.rows, min(k, self.rows)
        if not enough:
            return no_neighbours(len(queries), k, queries.device)
        wanted = self._wanted(enough)
        best = self._search(queries, wanted, k, effort=1.0)
        short = short_queries(best, enough)
        effort = 1.0
        while len(short) and wanted < total:  # rarely entered
            wanted, effort = wanted * _WIDENING, effort * _WIDENING
            short = self._replace(best, short, self._search(queries[short], wanted, k, effort=effort), enough)
        if len(short):
            self._replace(best, short, self._search_exactly(queries[short], k), enough)
        return best

    def probes(self, k: int) -> int | None:
        """Return how many blocks a query searches; None where the index has no blocks."""
        return probes(self._index, k)

    def nearest_blocks(self, queries: Tensor, count: int) -> Neighbours:
        """Return the nearest blocks of each of (N, D) queries, and the distances of their centroids."""
        return cast(BlockSearch, self._index).nearest_blocks(queries, count)

    def search_blocks(self, queries: Tensor, k: int, blocks: Tensor) -> Neighbours:
        """Return the k nearest remaining vectors of each query in its own of the (N, p) blocks, or fewer."""
        neighbours = cast(BlockSearch, self._index).search_blocks(queries, self._wanted(min(k, self.rows)), blocks)
        return self._without_removed(neighbours, k)

    def _wanted(self, enough: int) -> int:
        """Return how many neighbours to search for, so that most probably this many of them are not removed."""
        if self._new_ids is None:
            return max(1, enough)
        return max(1, min(self._index.rows, math.ceil(enough * self._index.rows / max(1, self.rows)) + _EXTRA))

    def _search(self, queries: Tensor, wanted: int, k: int, *, effort: float) -> Neighbours:
        """Search for `wanted` neighbours and keep at most k of the remaining vectors."""
        total = self._index.rows
        neighbours = self._index.search(
            queries, max(1, min(wanted, total)), effort=total if wanted >= total else effort
        )
        return self._without_removed(neighbours, k)

    def _replace(self, best: Neighbours, queries: Tensor, by: Neighbours, enough: int) -> Tensor:
        """Replace the neighbours of some queries, and return which of these are still short."""
        best.ids[queries], best.distances[queries] = by.ids, by.distances
        return queries[short_queries(by, enough)]

    def _search_exactly(self, queries: Tensor, k: int) -> Neighbours:
        """Compare with every vector: lists may be short, and a graph need not reach all vectors."""
        self._exact = self._exact or ExactIndex(self._vectors, metric=self.metric)
        neighbours = self._exact.search(queries, k)
        return Neighbours(neighbours.ids.to(queries.device), neighbours.distances.to(queries.device))

    def _without_removed(self, neighbours: Neighbours, k: int) -> Neighbours:
        """Keep the first k that are not removed, with their new ids."""
        ids, distances = neighbours.ids[:, :k], neighbours.distances[:, :k]
        if self._new_ids is not None:
            new_ids = self._new_ids.to(neighbours.ids.device)
            # An untrusted index may return ids that it does not have.
            valid = (neighbours.ids >= 0) & (neighbours.ids < len(new_ids))
            ids = new_ids[neighbours.ids.where(valid, 0)].where(valid, -1)
            order = (ids < 0).to(torch.int8).sort(dim=1, stable=True).indices[:, :k]
            ids, distances = ids.gather(1, order), neighbours.distances.gather(1, order)
        return pad_neighbours(Neighbours(ids, distances.masked_fill(ids < 0, torch.inf)), k)


class ConcatenatedIndex:
    """Two indexes side by side: the ids of the second one begin at `first`."""

    def __init__(self, index: Index, newer: Index, *, first: int) -> None:
        self.metric = index.metric
        self.index, self.newer, self._first = index, newer, first

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest vectors of each of (N, D) queries."""
        return self._merge(self.index.search(queries, k), self.newer.search(queries, k), k)

    def probes(self, k: int) -> int | None:
        """Return how many blocks a query searches; None where the first index has no blocks."""
        return probes(self.index, k)

    def nearest_blocks(self, queries: Tensor, count: int) -> Neighbours:
        """Return the nearest blocks of the first index."""
        return cast(BlockSearch, self.index).nearest_blocks(queries, count)

    def search_blocks(self, queries: Tensor, k: int, blocks: Tensor) -> Neighbours:
        """Return the k nearest of each query in its own of the (N, p) blocks, and in all of the second index."""
        old = cast(BlockSearch, self.index).search_blocks(queries, k, blocks)
        return self._merge(old, self.newer.search(queries, k), k)

    def _merge(self, old: Neighbours, new: Neighbours, k: int) -> Neighbours:
        new_ids = torch.where(new.ids < 0, new.ids, new.ids + self._first).to(old.ids.device)
        return merge(old, Neighbours(new_ids, new.distances.to(old.distances.device)), k)


class ShardedIndex:
    """The indexes of shards: the ids of each begin at its number in `firsts`.

    Where shards have blocks, a query searches the nearest blocks of all shards, a few more than in one store.
    """

    def __init__(self, indexes: Sequence[Index], firsts: Sequence[int], *, rows: int) -> None:
        self.metric = indexes[0].metric
        self.indexes, self._firsts, self._rows = list(indexes), list(firsts), rows

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest vectors of each of (N, D) queries."""
        counts = {number: count for number, count in enumerate(self._probes(k)) if count}
        if not len(queries) or len(counts) < 2:
            return self._search_each(queries, k)
        count = shard_probes(max(counts.values()), len(counts))
        nearest = self._scatter("nearest_blocks", dict.fromkeys(counts, (queries, count)))
        chosen = dict(zip(counts, choose_blocks(list(nearest.values()), count), strict=True))
        others = [number for number in range(len(self._firsts)) if number not in counts]
        searched = {number: (queries, k, blocks) for number, blocks in chosen.items()}
        best = self._nearest({"search_blocks": searched, "search": dict.fromkeys(others, (queries, k))}, k)
        short = short_queries(best, min(k, self.rows))
        if len(short):  # blocks with few vectors, or with many removed ones
            more = self._search_each(queries[short], k)
            best.ids[short], best.distances[short] = more.ids, more.distances
        return best

    @property
    def rows(self) -> int:
        """The number of vectors."""
        return self._rows

    def _probes(self, k: int) -> list[int | None]:
        """Return how many blocks of each shard a query would search if it were alone; None where it has none."""
        return [probes(index, k) for index in self.indexes]

    def _scatter(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Neighbours]:
        """Call a method of the indexes of some shards with arguments of their own."""
        return {number: getattr(self.indexes[number], method)(*args) for number, args in calls.items()}

    def _search_each(self, queries: Tensor, k: int) -> Neighbours:
        """Search every shard as thoroughly as if it were alone."""
        return self._nearest({"search": dict.fromkeys(range(len(self._firsts)), (queries, k))}, k)

    def _nearest(self, calls: Mapping[str, Mapping[int, tuple[Any, ...]]], k: int) -> Neighbours:
        """Return the k nearest of what methods find in some shards each."""
        found: dict[int, Neighbours] = {}
        for method, own in calls.items():
            found |= self._scatter(method, own)
        return self._merge(found, k)

    def _merge(self, found: Mapping[int, Neighbours], k: int) -> Neighbours:
        return merge_shards([found[number] for number in sorted(found)], [self._firsts[n] for n in sorted(found)], k)


def short_queries(neighbours: Neighbours, enough: int) -> Tensor:
    """Return the queries that have fewer neighbours than there are."""
    return ((neighbours.ids >= 0).sum(1) < enough).nonzero()[:, 0]


def choose_blocks(nearest: Sequence[Neighbours], count: int) -> list[Tensor]:
    """Return the blocks of each shard, (N, p) with -1 for none, that are among the `count` nearest of all shards.

    `nearest` are the nearest blocks of each shard with the distances of their centroids.
    """
    distances = torch.cat([one.distances for one in nearest], 1)
    chosen = torch.zeros_like(distances, dtype=torch.bool)
    chosen.scatter_(1, distances.topk(min(count, distances.shape[1]), largest=False, sorted=False).indices, True)
    parts = chosen.split([one.ids.shape[1] for one in nearest], 1)
    return [one.ids.where(part, -1) for one, part in zip(nearest, parts, strict=True)]
