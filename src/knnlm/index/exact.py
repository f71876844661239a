"""Exact search: the fused kernels on a GPU, brute force with torch elsewhere.

On a GPU, keys that are stored in float16 stay on the device. Where they do not fit, they are kept in host memory and
streamed over the device in chunks; the next chunk is copied while one is searched.

Brute force is the reference for every other index. Keys are read in blocks, once for all queries. The distances of a
block are one matrix product; most of them are farther than the k-th best so far, so only those that pass this
comparison are sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.index.base import (
    Neighbours,
    Searcher,
    Vectors,
    check_finite,
    check_metric,
    check_search,
    no_neighbours,
    order_ties,
    pad_neighbours,
)

DEVICE_KEY_DTYPES = ("float16", "int8")

_MIN_CAPABILITY = (8, 0)  # GPUs whose tensor cores multiply int8
_BLOCK = 8192  # keys at a time
QUERY_BATCH = 512  # (512, 8192) float32 distances are 16 MB
_ROUNDING = 1e-6  # relative error of a float32 sum of some hundred squares
_MAX_CPU_RESIDENT = 1 << 29  # bytes of float32 keys that stay in RAM


def check_key_dtype(key_dtype: str) -> None:
    """Raise ParameterError for a type that keys cannot have on a device."""
    if key_dtype not in DEVICE_KEY_DTYPES:
        raise ParameterError(f"Unknown device keys {key_dtype!r}: use {' or '.join(DEVICE_KEY_DTYPES)}.")


def has_kernels(device: torch.device | str) -> bool:
    """Whether the GPU kernels run on a device."""
    device = torch.device(device)
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY


def fits_on_device(vectors: Vectors, device: torch.device | str, key_dtype: str) -> bool:
    """Whether all vectors fit on a device on which the kernels run."""
    from knnlm.index.gpu import streaming  # needs Triton

    return streaming.fits_on_device(vectors, torch.device(device), key_dtype)


class ExactIndex:
    """An index that compares every query with every vector.

    `key_dtype` is the type of the keys on a GPU; with int8, distances are those to keys rounded to 8 bits. `kernels`
    selects the GPU kernels or brute force; None: the kernels on a GPU, if Triton is installed. `max_bytes` limits what
    keys take on the device; None: what is free.
    """

    def __init__(
        self,
        vectors: Vectors,
        *,
        metric: str = "l2",
        device: torch.device | str = "cpu",
        key_dtype: str = "float16",
        kernels: bool | None = None,
        max_bytes: int | None = None,
    ) -> None:
        check_metric(metric)
        check_key_dtype(key_dtype)
        self.metric = metric
        self._vectors = vectors
        self._device = torch.device(device)
        self.searcher = self._choose_searcher(key_dtype, kernels, max_bytes)

    def _choose_searcher(self, key_dtype: str, kernels: bool | None, max_bytes: int | None) -> Searcher:
        if kernels is None:
            kernels = has_kernels(self._device)
        if kernels and self._vectors.rows:
            if find_spec("triton") is None:
                raise ParameterError("The kernels of exact search need Triton: pip install triton")
            from knnlm.index.gpu.streaming import open_device_search  # needs Triton

            searcher = open_device_search(
                self._vectors, self.metric, device=self._device, key_dtype=key_dtype, max_bytes=max_bytes
            )
            if searcher is not None:
                return searcher
        return BruteForceSearch(self._vectors, metric=self.metric, device=self._device)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can contain a search."""
        return self._device.type == "cuda" and bool(getattr(self.searcher, "capturable", False))

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest vectors of each of (N, D) queries."""
        check_search(queries, k, self._vectors.width)
        available = min(k, self._vectors.rows)
        if not available or not len(queries):
            return no_neighbours(len(queries), k, self._device)
        return pad_neighbours(self.searcher.search(queries.to(self._device, torch.float32), available), k)


@dataclass(frozen=True)
class Whole:
    """What the vectors of one shard are a part of: all vectors, in which they begin at `first`."""

    first: int
    rows: int
    centre: Tensor  # (D,) of all vectors, see `find_centre`


class BruteForceSearch:
    """Compares every query with every vector.

    Distances of float32 depend in their last bits on the matrix product that they are computed in. A shard, whose
    `whole` is given, therefore computes the products of all vectors, with zeros in place of those of other shards.
    """

    def __init__(
        self,
        vectors: Vectors,
        *,
        metric: str = "l2",
        device: torch.device | str = "cpu",
        keep: bool = True,
        whole: Whole | None = None,
    ) -> None:
        check_metric(metric)
        self.metric = metric
        self._vectors = vectors
        self._device = torch.device(device)
        self._whole = Whole(0, vectors.rows, find_centre(vectors, metric)) if whole is None else whole
        self._centre = self._whole.centre.to(self._device)
        self.max_square = torch.zeros((), device=self._device)  # largest |k|² read so far
        self._resident: list[_Block] | None = None
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
        return search_precisely(
            lambda own, dtype: (self.nearest(own, k, dtype), self.max_square), queries, self._centre, metric=self.metric
        )

    def nearest(self, queries: Tensor, k: int, dtype: torch.dtype) -> Neighbours:
        """Return the k nearest of all vectors by (distance, id), with distances of `dtype` less the query's square.

        Equal distances are in any order.
        """
        queries = queries.to(self._device, dtype) - self._centre
        distances = torch.full((len(queries), k), torch.inf, dtype=dtype, device=self._device)
        ids = torch.full((len(queries), k), -1, device=self._device)
        for block in self._resident if self._resident is not None else self._blocks():
            keys, squares = block.keys, block.squares
            if keys.dtype != dtype:
                keys = keys.to(dtype)
                squares = keys.square().sum(1)
            for begin in range(0, len(queries), QUERY_BATCH):
                batch = slice(begin, begin + QUERY_BATCH)
                compared = self._compare(queries[batch], keys, squares)
                compared[:, : block.begin] = torch.inf
                compared[:, block.end :] = torch.inf
                _merge(distances[batch], ids[batch], compared, block.first)
        ids[distances == torch.inf] = -1
        return Neighbours(ids, distances)

    def _compare(self, queries: Tensor, keys: Tensor, squares: Tensor) -> Tensor:
        """Return (n, R) distances less the query's own square, which does not change the order."""
        if self.metric == "ip":
            return -(queries @ keys.T)
        return torch.addmm(squares, queries, keys.T, alpha=-2)

    def _blocks(self) -> Iterator[_Block]:
        for first, begin, block in _aligned(self._vectors, self._whole):
            end = min(self._whole.first + self._vectors.rows - first, len(block))
            keys = block.to(self._device) - self._centre
            squares = keys.square().sum(1)
            check_finite(squares[begin:end], first + begin - self._whole.first)
            self.max_square = torch.maximum(self.max_square, squares[begin:end].max())
            yield _Block(first, keys, squares, begin, end)


@dataclass(frozen=True)
class _Block:
    """Vectors that are compared in one matrix product; those from `begin` to `end` are the searched ones."""

    first: int  # id of the first one
    keys: Tensor  # (R, D)
    squares: Tensor  # (R,)
    begin: int
    end: int


def _aligned(vectors: Vectors, whole: Whole) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the blocks of all vectors that contain some of these: (first id, place of the first of these, (R, D))."""
    if (whole.first, whole.rows) == (0, vectors.rows):
        yield from ((first, 0, block) for first, block in vectors.chunks(_BLOCK))
        return
    block, number = torch.empty(0), -1
    for first, chunk in vectors.chunks(_BLOCK):
        done = 0
        while done < len(chunk):
            place = whole.first + first + done
            if place // _BLOCK != number:
                if number >= 0:
                    yield number * _BLOCK, max(0, whole.first - number * _BLOCK), block
                number = place // _BLOCK
                block = torch.zeros(min(_BLOCK, whole.rows - number * _BLOCK), vectors.width)
            begin = place % _BLOCK
            count = min(len(chunk) - done, _BLOCK - begin)
            block[begin : begin + count] = chunk[done : done + count]
            done += count
    if number >= 0:
        yield number * _BLOCK, max(0, whole.first - number * _BLOCK), block


# Returns the nearest of some queries with distances of a dtype less the query's square, and the largest |k|².
Nearest = Callable[[Tensor, torch.dtype], tuple[Neighbours, Tensor]]


def search_precisely(nearest: Nearest, queries: Tensor, centre: Tensor, *, metric: str) -> Neighbours:
    """Search in float32, and again in float64 for those queries whose distances are imprecise."""
    found, max_square = nearest(queries, torch.float32)
    neighbours = _finished(found, queries, centre, metric=metric)
    if metric == "ip" or not len(queries):
        return neighbours
    unsure = imprecise((queries - centre).square().sum(1), max_square, neighbours.distances)
    if unsure.any():
        precise = _finished(nearest(queries[unsure], torch.float64)[0], queries[unsure], centre, metric=metric)
        neighbours.ids[unsure], neighbours.distances[unsure] = precise.ids, precise.distances
    return neighbours


def _finished(nearest: Neighbours, queries: Tensor, centre: Tensor, *, metric: str) -> Neighbours:
    """Add the squares of the queries to the distances, and round these to float32."""
    distances = nearest.distances
    if metric == "l2":
        distances = distances + (queries.to(distances.dtype) - centre).square().sum(1, keepdim=True)
        distances.clamp_(min=0)  # a key that equals its query may be a rounding error below
    return order_ties(Neighbours(nearest.ids, distances.float() + 0.0))  # no -0.0, as in merged neighbours


def find_centre(vectors: Vectors, metric: str) -> Tensor:
    """Return the (D,) vector that is subtracted from keys and queries: |q|² + |k|² - 2q·k loses digits far from zero.

    Inner products change under a shift, so their centre is zero.
    """
    if metric == "l2":
        for _, block in vectors.chunks(_BLOCK):
            return block.mean(0)
    return torch.zeros(vectors.width)


def imprecise(squares: Tensor, max_square: Tensor, distances: Tensor) -> Tensor:
    """Mark the (N,) queries for which rounding exceeds a thousandth of their median distance.

    |q|² + |k|² - 2q·k has an error proportional to its terms, and these can be a million times the distance where
    groups of keys share some enormous value. Then both distances and neighbours would be wrong. `squares` are the |q|²,
    `max_square` the largest |k|².
    """
    median = distances.masked_fill(distances == torch.inf, torch.nan).nanmedian(1).values
    return _ROUNDING * (squares + max_square) > 1e-3 * median.nan_to_num(posinf=0)


def _merge(best: Tensor, ids: Tensor, distances: Tensor, first: int) -> None:
    """Merge the (n, R) distances of a block into `best` and `ids`, (n, k) each, in place.

    Of distances that equal the k-th, those with the lowest ids are kept.
    """
    k = best.shape[1]
    nearer = distances < best[:, -1:]
    max_nearer = int(nearer.sum(1).max())
    if max_nearer == 0:
        return
    if max_nearer > distances.shape[1] // 4:
        columns = smallest_columns(distances, min(k, distances.shape[1]))
        candidates = distances.gather(1, columns)
    else:
        candidates, columns = _pack(distances, nearer, max_nearer)
    merged = torch.cat([best, candidates], 1)
    merged_ids = torch.cat([ids, columns + first], 1)
    order = smallest_columns(merged, k, merged_ids)
    best.copy_(merged.gather(1, order))
    ids.copy_(merged_ids.gather(1, order))


def smallest_columns(values: Tensor, k: int, ids: Tensor | None = None) -> Tensor:
    """Return the columns of the k smallest values of each row, ascending, those of equal values in any order.

    Of several that equal the k-th, those with the lowest ids are returned; None: the ids ascend with the columns.
    """
    smallest = values.topk(k, largest=False, sorted=True)
    columns, last = smallest.indices, smallest.values[:, -1:]
    tied = ((values <= last).sum(1) > k) & (last[:, 0] < torch.inf)  # top-k takes any of them
    if tied.any():
        by_id = None if ids is None else ids[tied].argsort(dim=1)
        own = values[tied] if by_id is None else values[tied].gather(1, by_id)
        chosen = own.sort(dim=1, stable=True).indices[:, :k]
        columns[tied] = chosen if by_id is None else by_id.gather(1, chosen)
    return columns


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
