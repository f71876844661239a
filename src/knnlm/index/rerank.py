"""Measure a shortlist again on the vectors themselves. Knows nothing about how the shortlist came about.

Approximate indexes compare with compressed codes. Votes weigh neighbours by exp(-distance), so an error of the codes
would enter them directly. But a vote is decided by the nearest ones, so only these are measured on the stored vectors,
and a few of the others, spread over the rest of the list: what their codes are off by, on average, moves the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knnlm.index.base import Index, Neighbours, Vectors
from knnlm.index.faiss import pair_distances

MEASURED = 128  # of a query's shortlist

_SPREAD = 8  # one in so many of them is from the rest of the list, not from its beginning

_ROWS = 8192  # vectors at a time: torch reads them and FAISS measures them, and the threads of one wait for the other


class Reranked:
    """Ask an index for a shortlist, measure some of it exactly, keep the k nearest.

    `measured` is how many of a query's shortlist are measured; None: all. `depth` is how long the shortlist is, in
    multiples of k; it is never shorter than what is measured.
    """

    def __init__(self, index: Index, vectors: Vectors, *, depth: float = 1.0, measured: int | None = MEASURED) -> None:
        self.metric = index.metric
        self._index = index
        self._vectors = vectors
        self._depth = depth
        self._measured = measured

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest rows of each of (N, D) queries."""
        wanted = max(int(k * self._depth), self._measured or 0)
        shortlist = self._index.search(queries, max(k, min(wanted, self._vectors.rows)))
        length = shortlist.ids.shape[1]
        if self._measured is None or self._measured >= length:
            measured = remeasure(self._vectors, queries, shortlist.ids, metric=self.metric)
            return Neighbours(measured.ids[:, :k], measured.distances[:, :k])
        chosen, others = choose(length, self._measured)
        chosen, others = chosen.to(shortlist.ids.device), others.to(shortlist.ids.device)
        ids = shortlist.ids[:, chosen]
        exact = measure(self._vectors, queries, ids, metric=self.metric)
        moved = shortlist.distances[:, others] + self._off(shortlist, exact, chosen)
        if self.metric == "l2":
            moved.clamp_(min=0)
        exact, order = exact.sort(dim=1)
        return merge(Neighbours(ids.gather(1, order), exact), Neighbours(shortlist.ids[:, others], moved), k)

    def _off(self, shortlist: Neighbours, exact: Tensor, chosen: Tensor) -> Tensor:
        """Say what codes are off by, (N, 1). The nearest by their codes are those that codes flatter: not by them."""
        few = spread_of(exact.shape[1])
        there = shortlist.ids[:, chosen] >= 0
        off = (exact - shortlist.distances[:, chosen]).where(there, 0)
        # A list that ends before the spread ones begin has nothing to move.
        return off[:, -few:].sum(1, keepdim=True) / there[:, -few:].sum(1, keepdim=True).clamp(min=1)


def spread_of(measured: int) -> int:
    """Say how many of those that are measured are spread over the rest of the list."""
    return max(1, measured // _SPREAD)


def choose(length: int, measured: int) -> tuple[Tensor, Tensor]:
    """Choose the places of a list that are measured, its beginning and some spread over the rest; and the others."""
    few = spread_of(measured)
    begin = measured - few
    spread = torch.linspace(begin, length - 1, few, dtype=torch.float64).round().long()
    rest = torch.ones(length, dtype=torch.bool)
    rest[:begin] = False
    rest[spread] = False
    return torch.cat([torch.arange(begin), spread]), rest.nonzero()[:, 0]


def merge(one: Neighbours, other: Neighbours, k: int) -> Neighbours:
    """Put two ascending lists into one and keep its k nearest. Both are in order, so nothing is sorted."""
    rows, count = one.ids.shape
    total = count + other.ids.shape[1]
    places = torch.searchsorted(other.distances.contiguous(), one.distances.contiguous(), right=False)
    places += torch.arange(count, device=places.device)
    others = torch.ones(rows, total, dtype=torch.bool, device=places.device).scatter_(1, places, False)
    ids = one.ids.new_empty(rows, total).scatter_(1, places, one.ids).masked_scatter_(others, other.ids)
    distances = one.distances.new_empty(rows, total).scatter_(1, places, one.distances)
    distances.masked_scatter_(others, other.distances)
    return Neighbours(ids[:, :k], distances[:, :k])


def remeasure(vectors: Vectors, queries: Tensor, ids: Tensor, *, metric: str) -> Neighbours:
    """Put ids (N, k) into the order of their exact distances, computed as differences in float32."""
    distances, order = measure(vectors, queries, ids, metric=metric).sort(dim=1, stable=True)
    return Neighbours(ids.gather(1, order), distances)


def measure(vectors: Vectors, queries: Tensor, ids: Tensor, *, metric: str) -> Tensor:
    """Give the exact distances of ids (N, k), inf where there is none.

    Vectors are read once each, in the order of their numbers, whichever queries ask for them: they lie in a file that
    is mapped into memory, and neighbours of neighbouring positions are often the same.
    """
    numbers, order = ids.reshape(-1).cpu().sort()
    owners = order.div(max(1, ids.shape[1]), rounding_mode="floor")
    different, places = torch.unique_consecutive(numbers, return_inverse=True)
    asked = queries.detach().float().cpu().contiguous()
    found = torch.empty(len(numbers))
    begin = 0
    for first in range(0, len(different), _ROWS):
        end = int(torch.searchsorted(places, first + _ROWS))
        keys = vectors.take(different[first : first + _ROWS])  # (n, D)
        found[begin:end] = pair_distances(asked, owners[begin:end], keys, places[begin:end] - first, metric=metric)
        begin = end
    found.masked_fill_(numbers < 0, torch.inf)
    return torch.empty(len(numbers)).scatter_(0, order, found).view(ids.shape).to(queries.device)
