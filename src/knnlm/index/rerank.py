"""Measure a shortlist again on the vectors themselves. Knows nothing about how the shortlist came about.

Approximate indexes compare with compressed codes. Votes weigh neighbours by exp(-distance), so an error of the codes
would enter them directly. But a vote is decided by the nearest ones, so only these are measured on the stored vectors;
what the codes were off by there, on average, is what the rest of the shortlist is moved by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knnlm.index.base import Index, Neighbours, Vectors

MEASURED = 128  # of the nearest by their codes
_ROWS = 1024  # vectors at a time: few enough to stay near the processor between one step and the next


class Reranked:
    """Ask an index for a shortlist, measure its nearest exactly, keep the k nearest.

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
        measured = remeasure(self._vectors, queries.float(), shortlist.ids[:, : self._measured], metric=self.metric)
        if measured.ids.shape == shortlist.ids.shape:
            return Neighbours(measured.ids[:, :k], measured.distances[:, :k])
        rest = self._move(shortlist, measured)
        return merge(measured, rest, k)

    def _move(self, shortlist: Neighbours, measured: Neighbours) -> Neighbours:
        """Give what was not measured, its distances moved by what the codes of the measured were off by."""
        count = measured.ids.shape[1]
        there = measured.distances < torch.inf
        # All of the same ids, so that the sums may be taken in any order.
        gained = measured.distances.where(there, 0).sum(1) - shortlist.distances[:, :count].where(
            shortlist.ids[:, :count] >= 0, 0
        ).sum(1)
        moved = shortlist.distances[:, count:] + (gained / there.sum(1).clamp(min=1))[:, None]
        if self.metric == "l2":
            moved.clamp_(min=0)
        return Neighbours(shortlist.ids[:, count:], moved)


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

    Vectors are read in the order of their numbers, whichever query asks for them: they lie in a file that is mapped
    into memory, and neighbours of neighbouring positions are often the same.
    """
    numbers, order = ids.reshape(-1).cpu().sort()
    owners = order.div(max(1, ids.shape[1]), rounding_mode="floor")
    asked = queries.detach().float().cpu()
    found = torch.empty(len(numbers))
    for begin in range(0, len(numbers), _ROWS):
        part = slice(begin, begin + _ROWS)
        keys, theirs = vectors.take(numbers[part]), asked.index_select(0, owners[part])  # (n, D), (n, D)
        if metric == "ip":
            found[part] = theirs.mul_(keys).sum(1).neg_()
        else:
            found[part] = theirs.sub_(keys).square_().sum(1)
    found.masked_fill_(numbers < 0, torch.inf)
    return torch.empty(len(numbers)).scatter_(0, order, found).view(ids.shape).to(queries.device)
