"""Search while what is searched changes: some vectors are gone, others are newer than the index. Knows no files.

An approximate index is made once and cannot forget. `Surviving` asks it for more than is wanted and leaves out what is
gone, again and for more, until there are enough; where it does not reach enough, they are found exactly. So it does
where nothing is gone: lists may be short, and a graph need not reach all. `Joined` asks two indexes, one over the first
vectors and one over those behind them.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.index.base import Index, Neighbours, Vectors, check_search
from knnlm.index.exact import ExactIndex
from knnlm.index.rerank import merge

_MORE = 16  # asked for beside the share that is expected to be gone

_WIDER = 4  # times as many when that was not enough


class AdjustableIndex(Index, Protocol):
    """An index that can be told to look further than it would."""

    @property
    def rows(self) -> int:
        """The number of vectors in it."""

    @property
    def width(self) -> int:
        """The number of their dimensions."""

    def search(self, queries: Tensor, k: int, *, effort: float = 1.0) -> Neighbours:
        """Find the k nearest; `effort` multiplies how many of the vectors are looked at."""


class FilteredIndex:
    """An index some of whose vectors are gone, and whose others have new numbers."""

    def __init__(self, index: AdjustableIndex, numbers: NDArray[np.int64] | None, vectors: Vectors) -> None:
        """`numbers` (n,) are those that the index's vectors have now, -1 for one that is gone; `vectors` are those.

        None: all are there, with the numbers that they have in the index.
        """
        self.metric = index.metric
        self._index = index
        self._vectors = vectors
        self._exact: ExactIndex | None = None
        self._numbers = None if numbers is None else torch.from_numpy(numbers)
        self.rows = index.rows if numbers is None else int((numbers >= 0).sum())

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest of each of (N, D) queries; all that there are, where these are fewer."""
        check_search(queries, k, self._index.width)
        total, enough = self._index.rows, min(k, self.rows)
        if not enough:
            nobody = torch.full((len(queries), k), -1, device=queries.device)
            return Neighbours(nobody, torch.full(nobody.shape, torch.inf, device=queries.device))
        wanted = enough if self._numbers is None else math.ceil(enough * total / max(1, self.rows)) + _MORE
        best = self._ask(queries, wanted, k, effort=1.0)
        left = self._short(best, enough)
        effort = 1.0
        while len(left) and wanted < total:  # rarely: an answer that is long enough is given as it came
            wanted, effort = wanted * _WIDER, effort * _WIDER
            left = self._replace(best, left, self._ask(queries[left], wanted, k, effort=effort), enough)
        if len(left):
            self._replace(best, left, self._exactly(queries[left], k), enough)
        return best

    def _ask(self, queries: Tensor, wanted: int, k: int, *, effort: float) -> Neighbours:
        """Ask for so many, and keep those that are there; whoever asks for all lets all be looked at."""
        total = self._index.rows
        asked = self._index.search(queries, max(1, min(wanted, total)), effort=total if wanted >= total else effort)
        return self._alive(asked, k)

    @staticmethod
    def _short(found: Neighbours, enough: int) -> Tensor:
        """Say which answers have fewer than there are."""
        return ((found.ids >= 0).sum(1) < enough).nonzero()[:, 0]

    def _replace(self, best: Neighbours, rows: Tensor, by: Neighbours, enough: int) -> Tensor:
        """Put better answers in their places, and say which rows are still short."""
        best.ids[rows], best.distances[rows] = by.ids, by.distances
        return rows[self._short(by, enough)]

    def _exactly(self, queries: Tensor, k: int) -> Neighbours:
        """Compare with every vector: a graph need not reach all of them."""
        self._exact = self._exact or ExactIndex(self._vectors, metric=self.metric)
        found = self._exact.search(queries, k)
        return Neighbours(found.ids.to(queries.device), found.distances.to(queries.device))

    def _alive(self, found: Neighbours, k: int) -> Neighbours:
        """Keep the first k that are there, with the numbers that they have now."""
        ids, distances = found.ids[:, :k], found.distances[:, :k]
        if self._numbers is not None:
            numbers = self._numbers.to(found.ids.device)
            # An index from elsewhere may name what it does not have.
            known = (found.ids >= 0) & (found.ids < len(numbers))
            ids = numbers[found.ids.where(known, 0)].where(known, -1)
            order = (ids < 0).to(torch.int8).sort(dim=1, stable=True).indices[:, :k]
            ids, distances = ids.gather(1, order), found.distances.gather(1, order)
        distances = distances.masked_fill(ids < 0, torch.inf)
        if (missing := k - ids.shape[1]) > 0:
            ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
            distances = torch.nn.functional.pad(distances, (0, missing), value=torch.inf)
        return Neighbours(ids, distances)


class ConcatenatedIndex:
    """Two indexes side by side: the second one's vectors come behind the `first` of the other."""

    def __init__(self, index: Index, newer: Index, *, first: int) -> None:
        self.metric = index.metric
        self.index, self.newer, self._first = index, newer, first

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest rows of each of (N, D) queries."""
        old, new = self.index.search(queries, k), self.newer.search(queries, k)
        added = torch.where(new.ids < 0, new.ids, new.ids + self._first).to(old.ids.device)
        return merge(old, Neighbours(added, new.distances.to(old.distances.device)), k)
