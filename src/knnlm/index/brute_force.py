"""Exact search with torch alone, on any device: the reference for every other index.

Keys are read in blocks, once for all queries. The distances of a block are one matrix product; most of them are farther
than the k-th best so far, so only those that pass this comparison are sorted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from knnlm.index.base import Neighbours, Vectors, check_finite, check_metric, check_search

_BLOCK = 8192  # keys at a time
_QUERY_BATCH = 512  # (512, 8192) float32 distances are 16 MB
_ROUNDING = 1e-6  # relative error of a float32 sum of some hundred squares
_MAX_CPU_RESIDENT = 1 << 29  # bytes of float32 keys that stay in RAM


class BruteForceSearch:
    """Compares every query with every vector."""

    def __init__(
        self, vectors: Vectors, *, metric: str = "l2", device: torch.device | str = "cpu", keep: bool = True
    ) -> None:
        check_metric(metric)
        self.metric = metric
        self._vectors = vectors
        self._device = torch.device(device)
        self._centre = self._find_centre()
        self._max_square = torch.zeros((), device=self._device)  # largest |k|² read so far
        self._resident: list[tuple[int, Tensor, Tensor]] | None = None
        if keep and vectors.rows * vectors.width * 4 <= self._max_resident():
            self._resident = list(self._blocks())

    def _max_resident(self) -> int:
        """Return how many bytes of keys may stay in memory: on a GPU, half of what is free."""
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)[0] // 2
        return _MAX_CPU_RESIDENT

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest vectors of each of (N, D) queries."""
        check_search(queries, k, self._vectors.width)
        queries = queries.to(self._device, torch.float32)
        neighbours = self._search(queries, k, torch.float32)
        imprecise = self._imprecise(neighbours.distances, queries)
        if imprecise.any():
            precise = self._search(queries[imprecise], k, torch.float64)
            neighbours.ids[imprecise], neighbours.distances[imprecise] = precise.ids, precise.distances
        return neighbours

    def _search(self, queries: Tensor, k: int, dtype: torch.dtype) -> Neighbours:
        queries = queries.to(dtype) - self._centre
        distances = torch.full((len(queries), k), torch.inf, dtype=dtype, device=self._device)
        ids = torch.full((len(queries), k), -1, device=self._device)
        for first, keys, squares in self._resident if self._resident is not None else self._blocks():
            if keys.dtype != dtype:
                keys = keys.to(dtype)
                squares = keys.square().sum(1)
            for begin in range(0, len(queries), _QUERY_BATCH):
                batch = slice(begin, begin + _QUERY_BATCH)
                _merge(distances[batch], ids[batch], self._compare(queries[batch], keys, squares), first)
        ids[distances == torch.inf] = -1
        if self.metric == "l2":
            distances += queries.square().sum(1, keepdim=True)
            distances.clamp_(min=0)  # a key that equals its query may be a rounding error below
        return Neighbours(ids, distances.float())

    def _imprecise(self, distances: Tensor, queries: Tensor) -> Tensor:
        """Mark the (N,) queries for which rounding exceeds a thousandth of their median distance.

        |q|² + |k|² - 2q·k has an error proportional to its terms, and these can be a million times the distance where
        groups of keys share some enormous value. Then both distances and neighbours would be wrong.
        """
        if self.metric == "ip" or not self._vectors.rows or not len(queries):
            return torch.zeros(len(queries), dtype=torch.bool, device=self._device)
        squares = (queries - self._centre).square().sum(1)
        median = distances.masked_fill(distances == torch.inf, torch.nan).nanmedian(1).values
        return _ROUNDING * (squares + self._max_square) > 1e-3 * median.nan_to_num(posinf=0)

    def _compare(self, queries: Tensor, keys: Tensor, squares: Tensor) -> Tensor:
        """Return (n, R) distances less the query's own square, which does not change the order."""
        if self.metric == "ip":
            return -(queries @ keys.T)
        return torch.addmm(squares, queries, keys.T, alpha=-2)

    def _blocks(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        for first, block in self._vectors.chunks(_BLOCK):
            keys = block.to(self._device) - self._centre
            squares = keys.square().sum(1)
            check_finite(squares, first)
            self._max_square = torch.maximum(self._max_square, squares.max())
            yield first, keys, squares

    def _find_centre(self) -> Tensor:
        """Return what is subtracted from keys and queries: |q|² + |k|² - 2q·k loses digits far from zero.

        Inner products change under a shift, so their centre is zero.
        """
        if self.metric == "l2":
            for _, block in self._vectors.chunks(_BLOCK):
                return block.mean(0).to(self._device)
        return torch.zeros(self._vectors.width, device=self._device)


def _merge(best: Tensor, ids: Tensor, distances: Tensor, first: int) -> None:
    """Merge the (n, R) distances of a block into `best` and `ids`, (n, k) each, in place."""
    k = best.shape[1]
    nearer = distances < best[:, -1:]
    max_nearer = int(nearer.sum(1).max())
    if max_nearer == 0:
        return
    if max_nearer > distances.shape[1] // 4:
        candidates, columns = distances.topk(min(k, distances.shape[1]), largest=False)
    else:
        candidates, columns = _pack(distances, nearer, max_nearer)
    merged = torch.cat([best, candidates], 1)
    merged_ids = torch.cat([ids, columns + first], 1)
    order = merged.topk(k, largest=False, sorted=True).indices
    best.copy_(merged.gather(1, order))
    ids.copy_(merged_ids.gather(1, order))


def _pack(distances: Tensor, nearer: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Move the marked entries of each row to the left: (n, R) → (n, count), padded with inf; also their columns."""
    rows, columns = nearer.nonzero(as_tuple=True)
    starts = nearer.sum(1).cumsum(0).roll(1)
    starts[0] = 0
    places = torch.arange(len(rows), device=rows.device) - starts[rows]
    packed = distances.new_full((len(distances), count), torch.inf)
    packed_columns = torch.zeros((len(distances), count), dtype=torch.int64, device=distances.device)
    packed[rows, places] = distances[rows, columns]
    packed_columns[rows, places] = columns
    return packed, packed_columns
