"""Exact search on a GPU at the speed of a matrix product.

1. One kernel multiplies and keeps only the largest score of every group of 16 or 32 keys.
2. The groups with the largest scores are selected: among few by a plain top-k, among many by a threshold estimated from
   a sample. A query with too few survivors gets a lower threshold, one with more than fit a higher one.
3. The keys of these groups are measured in float32, and the k nearest are taken.
4. The k-th distance gives a bound on the score of anything as near (`DeviceKeys.score_bound`). Where no other group
   reaches it, the result is proven. Where one does, all groups that reach it are measured, which proves it too.

Neighbours are the k smallest by (distance, id). A measured distance depends on its query and its key alone, so the
neighbours in parts of the keys merge to those of all keys, to the last bit. A plain top-k takes any of several keys at
the k-th distance; where there are several, or where the proof is deferred, the keys that were measured are selected by
both numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from knnlm.index.base import Neighbours
from knnlm.index.gpu.deferred import check_flag, is_capturing, is_deferred
from knnlm.index.gpu.kernels import group_distances, group_maxima, key_ids, shape_for, survivors
from knnlm.index.gpu.keys import DeviceKeys
from knnlm.index.packed import pack, smallest_packed, unpack

DEFAULT_WORKSPACE = 1 << 33  # bytes for the scores of a batch of queries

_MAX_TOPK_GROUPS = 1 << 16  # groups up to which a plain top-k is fast
_MAX_TOPK_QUERIES = 64  # queries up to which a plain top-k is fast
_THRESHOLD_SAMPLE = 1 << 15  # groups that a threshold is estimated from
_THRESHOLD_ROUNDS = 3
_MAX_PROOF_GROUPS = 1 << 16  # groups that are measured at once to prove the result of a query
_PROOF_BATCH = 1 << 25  # distances that are measured at once in a proof, each with 20 bytes more to sort them
_MAX_BATCH = 4096  # queries
_MIN_EXTRA_GROUPS = 32


class FusedSearch:
    """Searches keys on a device with the fused kernels."""

    capturable = True

    def __init__(self, device_keys: DeviceKeys, *, workspace: int = DEFAULT_WORKSPACE) -> None:
        self.device_keys = device_keys
        self.workspace = workspace  # bytes for the group maxima
        self.proofs = 0  # queries whose result needed more groups to be proven
        self.divided = 0  # of these, queries whose groups were measured in several parts
        self.unproven: Tensor | None = None  # (B,) of a search that was captured into a CUDA graph

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest of each of (B, D) float32 queries; k is at most the number of keys."""
        size = self._batch_size(len(queries), k)
        if is_capturing(queries):
            size = min(size, _MAX_TOPK_QUERIES)  # more are selected by a threshold, which is read from the device
        captured: list[Tensor] = []
        batches = [self._search(batch, k, captured) for batch in queries.split(size)]
        if captured:
            self.unproven = torch.cat(captured)
        return Neighbours(
            torch.cat([batch.ids for batch in batches]), torch.cat([batch.distances for batch in batches])
        )

    def _batch_size(self, count: int, k: int) -> int:
        """Return how many queries are searched at once."""
        shape = shape_for(count, self.device_keys.keys.dtype)
        per_query = max(len(self.device_keys.keys) // (2 * shape.pairs), 2 * self._group_count(k) * 2 * shape.pairs)
        fitting = self.workspace // (4 * per_query) // shape.queries * shape.queries
        return min(max(fitting, shape.queries), _MAX_BATCH)

    def _search(self, queries: Tensor, k: int, captured: list[Tensor]) -> Neighbours:
        keys = self.device_keys
        shape = shape_for(len(queries), keys.keys.dtype)
        prepared = keys.prepare(queries, shape.queries)
        maxima = torch.empty(len(prepared.exact), len(keys.keys) // (2 * shape.pairs), device=queries.device)
        group_maxima(
            prepared.rounded,
            keys.keys,
            scales=prepared.scales,
            half_squares=keys.half_squares,
            out=maxima,
            shape=shape,
        )
        maxima = maxima[: len(queries)]
        # Where the proof is deferred, measure more groups, which costs next to nothing, so that it rarely fails.
        deferred = len(queries) <= _MAX_TOPK_QUERIES and is_deferred(queries)
        groups, limit = nearest_groups(maxima, self._group_count(k) * (2 if deferred else 1))
        exact = prepared.exact[: len(queries)]
        if deferred:
            nearest = unpack(self._smallest(exact, groups, k, pairs=shape.pairs))
            tied = torch.zeros_like(limit, dtype=torch.bool)
        else:
            nearest, tied = self._nearest(exact, groups, k, pairs=shape.pairs)
        bound = keys.score_bound(prepared, nearest.distances[:, -1])
        unproven = limit >= bound
        if is_capturing(queries):
            captured.append(unproven)  # can be read after the graph is replayed
        if check_flag(unproven | tied):
            if (rows := (tied & ~unproven).nonzero()[:, 0]).numel():  # no other group has a key as near
                self._replace(nearest, rows, self._smallest(exact[rows], groups[rows], k, pairs=shape.pairs))
            if (rows := unproven.nonzero()[:, 0]).numel():
                self._prove(nearest, rows, queries=exact, maxima=maxima, bound=bound, pairs=shape.pairs)
        # A query that is not finite, or whose distances overflow, has no neighbours.
        present = nearest.distances < torch.inf
        distances = nearest.distances + keys.distance_offset(queries)[:, None]
        return Neighbours(nearest.ids.where(present, -1), distances.where(present, torch.inf))

    def _group_count(self, k: int) -> int:
        """Return how many groups to measure: the k nearest are in at most k groups, but scores are rounded."""
        return k + int(k * self.device_keys.extra_groups) + _MIN_EXTRA_GROUPS

    def _measure(self, queries: Tensor, groups: Tensor, *, pairs: int) -> Tensor:
        """Return the distances of all keys of some groups."""
        keys = self.device_keys
        return group_distances(
            queries, keys.keys, scales=keys.scales, groups=groups, rows=keys.rows, pairs=pairs, metric=keys.metric
        )

    def _nearest(self, queries: Tensor, groups: Tensor, k: int, *, pairs: int) -> tuple[Neighbours, Tensor]:
        """Return the k nearest keys of some groups, and whether others are as far as the last of them, (B,)."""
        distances = self._measure(queries, groups, pairs=pairs)
        one_more = min(k + 1, distances.shape[1])
        nearest = distances.topk(one_more, dim=1, largest=False, sorted=False)
        packed = pack(Neighbours(key_ids(groups, nearest.indices, pairs=pairs), nearest.values))
        found = unpack(packed.sort(dim=1).values)
        last = found.distances[:, k - 1]
        tied = last.isfinite() & (found.distances[:, k:] == last[:, None]).any(1)
        return Neighbours(found.ids[:, :k], found.distances[:, :k]), tied

    def _prove(
        self, nearest: Neighbours, rows: Tensor, *, queries: Tensor, maxima: Tensor, bound: Tensor, pairs: int
    ) -> None:
        """Measure every group that could contain something as near, for some queries, and replace their neighbours."""
        self.proofs += len(rows)
        k = nearest.ids.shape[1]
        for batch in rows.split(_MAX_TOPK_QUERIES):
            reaching = survivors(maxima[batch], bound[batch], _MAX_PROOF_GROUPS)
            fits = reaching.counts <= _MAX_PROOF_GROUPS
            if (own := batch[fits]).numel():
                groups = reaching.kept_columns()[fits]
                self._replace(nearest, own, self._smallest(queries[own], groups, k, pairs=pairs))
            if (others := batch[~fits]).numel():
                self.divided += len(others)
                found = self._smallest_of_parts(queries[others], maxima[others], bound[others], k, pairs=pairs)
                self._replace(nearest, others, found)

    def _smallest_of_parts(self, queries: Tensor, maxima: Tensor, bound: Tensor, k: int, *, pairs: int) -> Tensor:
        """Return the k nearest keys of all groups that reach the bound as packed numbers, part after part."""
        best = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
        for first in range(0, maxima.shape[1], _MAX_PROOF_GROUPS):
            part = maxima[:, first : first + _MAX_PROOF_GROUPS].contiguous()
            groups = survivors(part, bound, part.shape[1]).kept_columns()
            if groups.shape[1]:
                groups = torch.where(groups < 0, -1, groups + first)
                best = torch.cat([best, self._smallest(queries, groups, k, pairs=pairs)], 1)
                best = smallest_packed(best, min(k, best.shape[1]))
        return best

    @staticmethod
    def _replace(neighbours: Neighbours, rows: Tensor, packed: Tensor) -> None:
        by = unpack(packed)
        neighbours.ids[rows], neighbours.distances[rows] = by.ids, by.distances

    def _smallest(self, queries: Tensor, groups: Tensor, k: int, *, pairs: int) -> Tensor:
        """Return the k nearest keys of some groups as packed numbers, or fewer; of a negative group, none."""
        width = groups.shape[1] * 2 * pairs
        columns = torch.arange(width, device=groups.device)
        found: list[Tensor] = []
        step = max(1, _PROOF_BATCH // width)
        for own_queries, own in zip(queries.split(step), groups.split(step), strict=True):
            distances = self._measure(own_queries, own.contiguous(), pairs=pairs)
            ids = key_ids(own, columns.expand(len(own), -1), pairs=pairs)
            packed = pack(Neighbours(ids.masked_fill_(distances == torch.inf, -1), distances))
            found.append(smallest_packed(packed, min(k, width)))
        return torch.cat(found)


def nearest_groups(maxima: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """Return the groups with the largest scores, (B, wanted), and the (B,) score that no other group exceeds."""
    rows, groups = maxima.shape
    if groups <= wanted:
        everything = torch.arange(groups, device=maxima.device).repeat(rows, 1)
        return everything, maxima.new_full((rows,), -torch.inf)
    if groups <= _MAX_TOPK_GROUPS or rows <= _MAX_TOPK_QUERIES:
        return _top(maxima, wanted)
    return _above_threshold(maxima, wanted)


def _top(maxima: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    best = maxima.topk(wanted + 1, dim=1)
    return best.indices[:, :wanted].int(), best.values[:, wanted]


def _above_threshold(maxima: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """Select by a threshold for each row: one pass over all scores instead of a sort."""
    rows, groups = maxima.shape
    sample = maxima[:, :: max(1, groups // _THRESHOLD_SAMPLE)].contiguous()
    rank = min(sample.shape[1], math.ceil(2 * wanted * sample.shape[1] / groups))
    thresholds = sample.topk(rank, dim=1).values[:, -1].contiguous()
    capacity = 4 * wanted
    chosen = torch.empty(rows, wanted, dtype=torch.int32, device=maxima.device)
    limits = torch.empty(rows, device=maxima.device)
    left = torch.arange(rows, device=maxima.device)
    for round_ in range(_THRESHOLD_ROUNDS):
        reaching = survivors(maxima if len(left) == rows else maxima[left], thresholds, capacity)
        few, many = reaching.counts <= wanted, reaching.counts > capacity
        best = reaching.values.topk(wanted + 1, dim=1)
        # Groups of padding alone score -inf, like columns without a survivor.
        good = ~(few | many) & (best.values[:, wanted] > -torch.inf)
        chosen[left[good]] = reaching.columns.gather(1, best.indices[:, :wanted])[good]
        limits[left[good]] = torch.maximum(best.values[:, wanted], thresholds)[good]
        left = left[~good]
        if not len(left):
            return chosen, limits
        # The kept ones of too many give a higher threshold; a deeper rank of the sample gives a lower one.
        deeper = sample[left].topk(min(sample.shape[1], rank * 4 ** (round_ + 1)), dim=1).values[:, -1]
        thresholds = torch.where(many[~good], best.values[~good][:, wanted], deeper).contiguous()
    chosen[left], limits[left] = _top(maxima[left], wanted)
    return chosen, limits
