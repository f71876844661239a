"""Exact search at the speed of a matrix product. Knows nothing about where keys come from.

1. One kernel multiplies and keeps the largest score of every group of 16 or 32 keys, and nothing else.
2. The groups with the largest scores are found: among few by a plain top-k, among many by a threshold that a sample of
   them suggests. A row with fewer survivors than wanted gets a lower threshold, one with more than fit a higher one.
3. The keys of these groups are measured in float32, and the k nearest are taken.
4. The k-th distance gives a bound on the score of anything as near (`HeldKeys.lower`). Where no other group reaches
   it, the answer is proven. Where one does, all groups that reach it are measured, which proves it too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.index.base import Neighbours
from knnlm.index.exact import BlockedSearch
from knnlm.index.gpu.deferred import check_flag, is_capturing, is_deferred
from knnlm.index.gpu.kernels import group_maxima, key_numbers, measure, shape_for, survivors
from knnlm.index.gpu.keys import DeviceKeys

_DIRECT = 1 << 16  # groups that a plain top-k is quick with

_FEW = 64  # queries that a plain top-k is quick with

_SAMPLE = 1 << 15  # groups that a threshold is taken from

_ROUNDS = 3  # thresholds that are tried

_WIDEST = 1 << 16  # groups of one query that are measured to prove an answer

_AT_ONCE = 1 << 27  # distances that are measured at once in such proofs

_LARGEST = 4096  # queries at once


class FusedSearch:
    """Finds the nearest of the keys on a device."""

    def __init__(self, held: DeviceKeys, *, workspace: int = 1 << 33) -> None:
        self.held = held
        self.workspace = workspace  # bytes for the largest scores
        self.proofs = 0  # queries that needed a second look
        self.plain = 0  # queries that were compared with every key in float32 or float64
        self.unproven: Tensor | None = None  # (B,) of a search that was captured into a CUDA graph

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest of each of (B, D) float32 queries; k is at most the number of keys."""
        size = self._batch(len(queries), k)
        if is_capturing(queries) and min(size, len(queries)) > _FEW:
            raise ParameterError(f"A CUDA graph can hold a search of up to {_FEW} queries, not {len(queries)}.")
        captured: list[Tensor] = []
        parts = [self._search(part, k, captured) for part in queries.split(size)]
        if captured:
            self.unproven = torch.cat(captured)
        return Neighbours(torch.cat([part.ids for part in parts]), torch.cat([part.distances for part in parts]))

    def _batch(self, count: int, k: int) -> int:
        """Say how many queries can be asked at once."""
        shape = shape_for(count, self.held.keys.dtype)
        largest = max(len(self.held.keys) // (2 * shape.pairs), 2 * self._wanted(k) * 2 * shape.pairs)
        fitting = self.workspace // (4 * largest) // shape.queries * shape.queries
        return min(max(fitting, shape.queries), _LARGEST)

    def _search(self, queries: Tensor, k: int, captured: list[Tensor]) -> Neighbours:
        held = self.held
        shape = shape_for(len(queries), held.keys.dtype)
        asked = held.ask(queries, shape.queries)
        maxima = torch.empty(len(asked.exact), len(held.keys) // (2 * shape.pairs), device=queries.device)
        group_maxima(asked.rounded, asked.scales, held.keys, held.halves, maxima, shape)
        maxima = maxima[: len(queries)]
        # Where nobody looks whether the answer is proven, leave less to chance: to measure more costs next to nothing.
        wanted = self._wanted(k) * (2 if len(queries) <= _FEW and is_deferred(queries) else 1)
        groups, limit = nearest_groups(maxima, wanted)
        found = self._measure(asked.exact[: len(queries)], groups, k, shape.pairs)
        lower = held.lower(asked, found.distances[:, -1])
        unproven = limit >= lower
        if is_capturing(queries):
            captured.append(unproven)  # nobody can look now; whoever replays the graph may
        elif check_flag(unproven):
            self._prove(found, unproven.nonzero()[:, 0], asked.exact, maxima, lower, shape.pairs)
        # A query that is no number, or farther from everything than numbers go, has no neighbours.
        there = found.distances < torch.inf
        distances = found.distances + held.shift(queries)[:, None]
        return Neighbours(found.ids.where(there, -1), distances.where(there, torch.inf))

    def _wanted(self, k: int) -> int:
        """Say how many groups to measure: the k nearest are in k groups at most, and rounding blurs which."""
        return k + int(k * self.held.blur) + 32

    def _measure(self, queries: Tensor, groups: Tensor, k: int, pairs: int) -> Neighbours:
        """Take the k nearest keys of some groups."""
        held = self.held
        distances = measure(queries, held.keys, held.scales, groups, held.rows, pairs=pairs, metric=held.metric)
        nearest = distances.topk(k, dim=1, largest=False, sorted=True)
        return Neighbours(key_numbers(groups, nearest.indices, pairs=pairs), nearest.values)

    def _prove(
        self, found: Neighbours, rows: Tensor, queries: Tensor, maxima: Tensor, lower: Tensor, pairs: int
    ) -> None:
        """Measure every group that could hold something nearer, for these rows of what was found."""
        self.proofs += len(rows)
        k = found.ids.shape[1]
        for part in rows.split(_FEW):
            reaching = survivors(maxima[part], lower[part], _WIDEST)
            counts = reaching.counts.clamp(max=_WIDEST)
            places = reaching.places[:, : int(counts.max())]
            groups = places.masked_fill(torch.arange(places.shape[1], device=places.device) >= counts[:, None], -1)
            fits = reaching.counts <= _WIDEST
            at_once = max(1, _AT_ONCE // (groups.shape[1] * 2 * pairs))
            for some, own in zip(part[fits].split(at_once), groups[fits].split(at_once), strict=True):
                if len(some):
                    self._replace(found, some, self._measure(queries[some], own.contiguous(), k, pairs))
            if (many := part[~fits]).numel():
                self.plain += len(many)
                plain = BlockedSearch(_Floats(self.held), metric=self.held.metric, device=queries.device, keep=False)
                self._replace(found, many, plain.search(queries[many][:, : self.held.width], k))

    @staticmethod
    def _replace(found: Neighbours, rows: Tensor, by: Neighbours) -> None:
        found.ids[rows], found.distances[rows] = by.ids, by.distances


def nearest_groups(maxima: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """Give the groups with the largest scores, (B, wanted), and the (B,) score that no other group exceeds."""
    rows, groups = maxima.shape
    if groups <= wanted:
        everything = torch.arange(groups, device=maxima.device).repeat(rows, 1)
        return everything, maxima.new_full((rows,), -torch.inf)
    if groups <= _DIRECT or rows <= _FEW:
        return _top(maxima, wanted)
    return _above_threshold(maxima, wanted)


def _top(maxima: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    best = maxima.topk(wanted + 1, dim=1)
    return best.indices[:, :wanted].int(), best.values[:, wanted]


def _above_threshold(maxima: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """Find them by a threshold for each row: one quick look at all scores instead of a sort."""
    rows, groups = maxima.shape
    sample = maxima[:, :: max(1, groups // _SAMPLE)].contiguous()
    rank = min(sample.shape[1], math.ceil(2 * wanted * sample.shape[1] / groups))
    thresholds = sample.topk(rank, dim=1).values[:, -1].contiguous()
    capacity = 4 * wanted
    chosen = torch.empty(rows, wanted, dtype=torch.int32, device=maxima.device)
    limits = torch.empty(rows, device=maxima.device)
    left = torch.arange(rows, device=maxima.device)
    for number in range(_ROUNDS):
        every = len(left) == rows
        reaching = survivors(maxima if every else maxima[left], thresholds, capacity)
        few, many = reaching.counts <= wanted, reaching.counts > capacity
        best = reaching.values.topk(wanted + 1, dim=1)
        # Groups of padding alone score -inf, like places where no survivor is.
        good = ~(few | many) & (best.values[:, wanted] > -torch.inf)
        chosen[left[good]] = reaching.places.gather(1, best.indices[:, :wanted])[good]
        limits[left[good]] = torch.maximum(best.values[:, wanted], thresholds)[good]
        left = left[~good]
        if not len(left):
            return chosen, limits
        # What was kept of too many has enough above this; a deeper rank of the sample lets more through.
        deeper = sample[left].topk(min(sample.shape[1], rank * 4 ** (number + 1)), dim=1).values[:, -1]
        thresholds = torch.where(many[~good], best.values[~good][:, wanted], deeper).contiguous()
    chosen[left], limits[left] = _top(maxima[left], wanted)
    return chosen, limits


class _Floats:
    """Keys on a device as `Vectors`."""

    def __init__(self, held: DeviceKeys) -> None:
        self._held = held

    @property
    def rows(self) -> int:
        """The number of keys."""
        return self._held.rows

    @property
    def width(self) -> int:
        """The number of their dimensions."""
        return self._held.width

    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Give (number of the first row, (n, D) float32) from first to last."""
        for begin in range(0, self.rows, size):
            yield begin, self._held.take(begin, min(begin + size, self.rows))

    def take(self, ids: Tensor) -> Tensor:
        """Give the rows of these ids."""
        raise NotImplementedError
