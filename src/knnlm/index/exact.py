"""Search by comparing with every vector: the fused kernels on a GPU, plain torch elsewhere. Knows nothing about tokens.

On a GPU, keys that were stored in float16 stay on the device as they are. Where they do not fit, they wait in host
memory and pass over the device in chunks, the next one being copied while one is searched.

Exact search with torch alone, on any device. The oracle for other indexes. Knows nothing about tokens.

Keys are read in blocks and pass by once for all queries. A block's distances are one matrix product; most of them are
farther than the k-th best so far, so only the survivors of that comparison are sorted.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from knnlm.errors import ParameterError
from knnlm.index.base import Neighbours, Vectors, check_finite, check_metric, check_search

_BLOCK = 8192  # keys at a time

_QUERIES = 512  # queries at a time: (512, 8192) float32 distances are 16 MB

_ROUNDING = 1e-6  # of a float32 sum of some hundred squares, relative

_RESIDENT = 1 << 29  # keep keys in memory as float32 up to this many bytes


class BlockedSearch:
    """Compare with every vector, on any torch device."""

    def __init__(
        self, vectors: Vectors, *, metric: str = "l2", device: torch.device | str = "cpu", keep: bool = True
    ) -> None:
        check_metric(metric)
        self.metric = metric
        self._vectors = vectors
        self._device = torch.device(device)
        self._centre = self._find_centre()
        self._largest = torch.zeros((), device=self._device)  # largest |k|² met so far
        self._resident: list[tuple[int, Tensor, Tensor]] | None = None
        if keep and vectors.rows * vectors.width * 4 <= self._room():
            self._resident = list(self._blocks())

    def _room(self) -> int:
        """Say how many bytes of keys may stay in memory: on a GPU, half of what is free there."""
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)[0] // 2
        return _RESIDENT

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest rows of each of (N, D) queries."""
        check_search(queries, k, self._vectors.width)
        queries = queries.to(self._device, torch.float32)
        found = self._search(queries, k, torch.float32)
        coarse = self._coarse(found.distances, queries)
        if coarse.any():
            again = self._search(queries[coarse], k, torch.float64)
            found.ids[coarse], found.distances[coarse] = again.ids, again.distances
        return found

    def _search(self, queries: Tensor, k: int, dtype: torch.dtype) -> Neighbours:
        """Compare with every vector in this precision."""
        queries = queries.to(dtype) - self._centre
        distances = torch.full((len(queries), k), torch.inf, dtype=dtype, device=self._device)
        ids = torch.full((len(queries), k), -1, device=self._device)
        for first, keys, squares in self._resident if self._resident is not None else self._blocks():
            if keys.dtype != dtype:
                keys = keys.to(dtype)
                squares = keys.square().sum(1)
            for begin in range(0, len(queries), _QUERIES):
                part = slice(begin, begin + _QUERIES)
                found = self._compare(queries[part], keys, squares)
                _merge(distances[part], ids[part], found, first)
        ids[distances == torch.inf] = -1
        if self.metric == "l2":
            distances += queries.square().sum(1, keepdim=True)
            distances.clamp_(min=0)  # a key that is its own query can come out a rounding error below
        return Neighbours(ids, distances.float())

    def _coarse(self, distances: Tensor, queries: Tensor) -> Tensor:
        """Mark the (N,) queries for which rounding is more than a thousandth of a usual distance of theirs.

        |q|² + |k|² - 2q·k is off by a share of its terms, and they can be a million times the distance where groups of
        keys share some enormous value. Then not only the distances would be wrong, but also who is near.
        """
        if self.metric == "ip" or not self._vectors.rows or not len(queries):
            return torch.zeros(len(queries), dtype=torch.bool, device=self._device)
        squares = (queries - self._centre).square().sum(1)
        usual = distances.masked_fill(distances == torch.inf, torch.nan).nanmedian(1).values
        return _ROUNDING * (squares + self._largest) > 1e-3 * usual.nan_to_num(posinf=0)

    def _compare(self, queries: Tensor, keys: Tensor, squares: Tensor) -> Tensor:
        """Give (n, R) distances, less the query's own square, which does not change the order."""
        if self.metric == "ip":
            return -(queries @ keys.T)
        return torch.addmm(squares, queries, keys.T, alpha=-2)

    def _blocks(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        for first, block in self._vectors.chunks(_BLOCK):
            keys = block.to(self._device) - self._centre
            squares = keys.square().sum(1)
            check_finite(squares, first)
            self._largest = torch.maximum(self._largest, squares.max())
            yield first, keys, squares

    def _find_centre(self) -> Tensor:
        """Take a mean out of keys and queries: |q|² + |k|² - 2q·k loses digits when all of them are far from zero.

        Inner products are not the same after a shift, so there the centre is zero.
        """
        if self.metric == "l2":
            for _, block in self._vectors.chunks(_BLOCK):
                return block.mean(0).to(self._device)
        return torch.zeros(self._vectors.width, device=self._device)


def _merge(best: Tensor, ids: Tensor, found: Tensor, first: int) -> None:
    """Put what is nearer than the k-th best so far into `best` and `ids`, in place."""
    k = best.shape[1]
    nearer = found < best[:, -1:]
    most = int(nearer.sum(1).max())
    if most == 0:
        return
    if most > found.shape[1] // 4:
        candidates, columns = found.topk(min(k, found.shape[1]), largest=False)
    else:
        candidates, columns = _pack(found, nearer, most)
    distances = torch.cat([best, candidates], 1)
    numbers = torch.cat([ids, columns + first], 1)
    order = distances.topk(k, largest=False, sorted=True).indices
    best.copy_(distances.gather(1, order))
    ids.copy_(numbers.gather(1, order))


def _pack(found: Tensor, nearer: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Move the marked entries of each row to the left: (n, R) → (n, most), the rest inf."""
    rows, columns = nearer.nonzero(as_tuple=True)
    starts = nearer.sum(1).cumsum(0).roll(1)
    starts[0] = 0
    places = torch.arange(len(rows), device=rows.device) - starts[rows]
    candidates = found.new_full((len(found), most), torch.inf)
    numbers = torch.zeros((len(found), most), dtype=torch.int64, device=found.device)
    candidates[rows, places] = found[rows, columns]
    numbers[rows, places] = columns
    return candidates, numbers


KEY_DTYPES = ("float16", "int8")

_CAPABILITY = (8, 0)  # of a GPU whose tensor cores multiply int8 as the kernels want it


class Finder(Protocol):
    """What does the work."""

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest of each of (B, D) float32 queries."""


def check_keys(keys: str) -> None:
    """Refuse what no device holds keys in."""
    if keys not in KEY_DTYPES:
        raise ParameterError(f"Unknown device keys {keys!r}: use {' or '.join(KEY_DTYPES)}.")


def fast(device: torch.device | str) -> bool:
    """Say whether the kernels run there."""
    where = torch.device(device)
    if where.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(where) >= _CAPABILITY


def fits(vectors: Vectors, device: torch.device | str, keys: str) -> bool:
    """Say whether all vectors can be held on a device where the kernels run."""
    from knnlm.index.gpu.streaming import fits_on  # needs Triton

    return fits_on(vectors, torch.device(device), keys)


class ExactIndex:
    """Compare with every vector.

    `keys` is what a GPU holds them in: with int8, distances are those to keys that were rounded to 8 bits. `fused` asks
    for the kernels or against them; None: on a GPU, if Triton is there. `room` is how many bytes keys may take on the
    device; None: what is free.
    """

    def __init__(
        self,
        vectors: Vectors,
        *,
        metric: str = "l2",
        device: torch.device | str = "cpu",
        keys: str = "float16",
        fused: bool | None = None,
        room: int | None = None,
    ) -> None:
        check_metric(metric)
        check_keys(keys)
        self.metric = metric
        self._vectors = vectors
        self._device = torch.device(device)
        self.finder = self._choose(keys, fused, room)

    def _choose(self, keys: str, fused: bool | None, room: int | None) -> Finder:
        if fused is None:
            fused = fast(self._device)
        if fused and self._vectors.rows:
            if find_spec("triton") is None:
                raise ParameterError("The kernels of exact search need Triton: pip install triton")
            from knnlm.index.gpu.streaming import load  # needs Triton

            if (finder := load(self._vectors, self.metric, self._device, keys=keys, room=room)) is not None:
                return finder
        return BlockedSearch(self._vectors, metric=self.metric, device=self._device)

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest rows of each of (N, D) queries."""
        check_search(queries, k, self._vectors.width)
        most = min(k, self._vectors.rows)
        if not most or not len(queries):
            shape = len(queries), k
            ids = torch.full(shape, -1, device=self._device)
            return Neighbours(ids, torch.full(shape, torch.inf, device=self._device))
        found = self.finder.search(queries.to(self._device, torch.float32), most)
        if most == k:
            return found
        missing = 0, k - most
        return Neighbours(F.pad(found.ids, missing, value=-1), F.pad(found.distances, missing, value=torch.inf))
