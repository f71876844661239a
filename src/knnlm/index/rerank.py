"""Exact distances for the shortlist of an approximate index.

Approximate indexes compare with compressed codes. kNN probabilities weigh neighbours by exp(-distance), so an error of
the codes would enter them directly. The nearest neighbours decide a vote, so only these are measured on the stored
vectors, and a few others that are spread over the rest of the list: their mean error corrects the rest.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from knnlm.index.base import BlockSearch, Index, Neighbours, Vectors, probes
from knnlm.index.faiss import pair_distances

MEASURED = 128  # neighbours of a query that are measured

_SPREAD_SHARE = 8  # one in this many measured neighbours is from the rest of the list, not from its beginning
_BATCH = 8192  # vectors at a time: torch reads them and FAISS measures them, and their thread pools alternate


class RerankedIndex:
    """An index whose shortlist is measured on the vectors, in part or completely, and cut to the k nearest.

    `measured` is how many of a query's shortlist are measured; None: all. `depth` is the length of the shortlist in
    multiples of k; it is never shorter than what is measured.
    """

    def __init__(self, index: Index, vectors: Vectors, *, depth: float = 1.0, measured: int | None = MEASURED) -> None:
        self.metric = index.metric
        self._index = index
        self._vectors = vectors
        self._depth = depth
        self._measured = measured

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest vectors of each of (N, D) queries."""
        return self._rerank(queries, self._index.search(queries, self._wanted(k)), k)

    def probes(self, k: int) -> int | None:
        """Return how many blocks a query searches; None where the index has no blocks."""
        return probes(self._index, self._wanted(k))

    def nearest_blocks(self, queries: Tensor, count: int) -> Neighbours:
        """Return the nearest blocks of each of (N, D) queries, and the distances of their centroids."""
        return cast(BlockSearch, self._index).nearest_blocks(queries, count)

    def search_blocks(self, queries: Tensor, k: int, blocks: Tensor) -> Neighbours:
        """Return the k nearest vectors of each query in its own of the (N, p) blocks, or fewer."""
        shortlist = cast(BlockSearch, self._index).search_blocks(queries, self._wanted(k), blocks)
        return self._rerank(queries, shortlist, k)

    def _wanted(self, k: int) -> int:
        """Return the length of the shortlist."""
        return max(k, min(max(int(k * self._depth), self._measured or 0), self._vectors.rows))

    def _rerank(self, queries: Tensor, shortlist: Neighbours, k: int) -> Neighbours:
        """Measure a shortlist, in part or completely, and return the k nearest."""
        length = shortlist.ids.shape[1]
        if self._measured is None or self._measured >= length:
            reranked = rerank(self._vectors, queries, shortlist.ids, metric=self.metric)
            return Neighbours(reranked.ids[:, :k], reranked.distances[:, :k])
        measured, rest = _choose_columns(length, self._measured)
        measured, rest = measured.to(shortlist.ids.device), rest.to(shortlist.ids.device)
        ids = shortlist.ids[:, measured]
        exact = exact_distances(self._vectors, queries, ids, metric=self.metric)
        corrected = shortlist.distances[:, rest] + self._mean_error(shortlist, exact, measured)
        if self.metric == "l2":
            corrected.clamp_(min=0)
        exact, order = exact.sort(dim=1)
        return merge(Neighbours(ids.gather(1, order), exact), Neighbours(shortlist.ids[:, rest], corrected), k)

    def _mean_error(self, shortlist: Neighbours, exact: Tensor, measured: Tensor) -> Tensor:
        """Return the mean error of the codes, (N, 1), from the spread columns.

        The nearest by their codes are those whose codes underestimate the distance, so they are left out.
        """
        spread = _spread_count(exact.shape[1])
        present = shortlist.ids[:, measured] >= 0
        errors = (exact - shortlist.distances[:, measured]).where(present, 0)
        # A list that ends before the spread columns begin has nothing to correct.
        return errors[:, -spread:].sum(1, keepdim=True) / present[:, -spread:].sum(1, keepdim=True).clamp(min=1)


def merge(first: Neighbours, second: Neighbours, k: int) -> Neighbours:
    """Merge two ascending lists of each query and keep the k nearest, without sorting."""
    rows, count = first.ids.shape
    total = count + second.ids.shape[1]
    places = torch.searchsorted(second.distances.contiguous(), first.distances.contiguous(), right=False)
    places += torch.arange(count, device=places.device)
    free = torch.ones(rows, total, dtype=torch.bool, device=places.device).scatter_(1, places, False)
    ids = first.ids.new_empty(rows, total).scatter_(1, places, first.ids).masked_scatter_(free, second.ids)
    distances = first.distances.new_empty(rows, total).scatter_(1, places, first.distances)
    distances.masked_scatter_(free, second.distances)
    return Neighbours(ids[:, :k], distances[:, :k])


def rerank(vectors: Vectors, queries: Tensor, ids: Tensor, *, metric: str) -> Neighbours:
    """Sort ids (N, k) by their exact distances, computed as differences in float32."""
    distances, order = exact_distances(vectors, queries, ids, metric=metric).sort(dim=1, stable=True)
    return Neighbours(ids.gather(1, order), distances)


def exact_distances(vectors: Vectors, queries: Tensor, ids: Tensor, *, metric: str) -> Tensor:
    """Return the exact distances of ids (N, k); inf for a negative id.

    Each vector is read once for all queries, in ascending order of the ids: the vectors are in a memory-mapped file,
    and consecutive positions of a text often share neighbours.
    """
    sorted_ids, order = ids.reshape(-1).cpu().sort()
    owners = order.div(max(1, ids.shape[1]), rounding_mode="floor")
    unique, places = torch.unique_consecutive(sorted_ids, return_inverse=True)
    queries_ = queries.detach().float().cpu().contiguous()
    distances = torch.empty(len(sorted_ids))
    begin = 0
    for first in range(0, len(unique), _BATCH):
        end = int(torch.searchsorted(places, first + _BATCH))
        keys = vectors.take(unique[first : first + _BATCH])  # (n, D)
        distances[begin:end] = pair_distances(
            queries_, owners[begin:end], keys, places[begin:end] - first, metric=metric
        )
        begin = end
    distances.masked_fill_(sorted_ids < 0, torch.inf)
    return torch.empty(len(sorted_ids)).scatter_(0, order, distances).view(ids.shape).to(queries.device)


def _spread_count(measured: int) -> int:
    """Return how many of the measured columns are spread over the rest of the list."""
    return max(1, measured // _SPREAD_SHARE)


def _choose_columns(length: int, measured: int) -> tuple[Tensor, Tensor]:
    """Return the columns that are measured, the first ones and some spread over the rest; and the other columns."""
    count = _spread_count(measured)
    begin = measured - count
    spread = torch.linspace(begin, length - 1, count, dtype=torch.float64).round().long()
    rest = torch.ones(length, dtype=torch.bool)
    rest[:begin] = False
    rest[spread] = False
    return torch.cat([torch.arange(begin), spread]), rest.nonzero()[:, 0]
