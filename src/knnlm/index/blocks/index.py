"""Approximate search on a CPU in blocks of neighbouring keys, one byte per dimension.

Every block has a few hundred keys that are near one another. A query searches the blocks whose centroids are nearest.
Queries are batched: the keys of a block are multiplied with all queries that search it, block after block in the order
of the file, and each query then selects its nearest keys from the products.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.index.base import Neighbours, check_search
from knnlm.index.blocks.file import Blocks, CheckBytes, read_blocks
from knnlm.index.blocks.kernels import Centroids, QuantisedRows, int8_matmul, parallel_for, quantise, smallest_k
from knnlm.io import release_pages

PROBES = 40  # blocks that a query searches

_QUERY_BATCH = 8192  # queries: every block is read once for all of them
_MAX_PRODUCT_BYTES = 3 << 27
_BLOCK_BATCH = 64  # blocks whose queries are gathered at once
_CENTROID_BATCH = 1 << 20  # queries times centroids that are compared at once
_SELECT_BATCH = 1 << 20  # products that a thread selects from at once: with fewer, threads wait for the GIL

Ints = NDArray[np.int64]


class BlockIndex:
    """A block index behind the `Index` protocol. Distances are those between rounded keys and rounded queries."""

    def __init__(self, blocks: Blocks, *, check_bytes: CheckBytes | None = None) -> None:
        self.metric = blocks.metric
        self._blocks, self._check_bytes = blocks, check_bytes
        self._centroids = Centroids(blocks.centroids, metric=blocks.metric)
        self._begins = np.cumsum(blocks.sizes) - blocks.sizes
        # Sliced once: slicing a tensor takes as long as multiplying it with one query.
        self._block_keys = [blocks.keys[begin : begin + blocks.size] for begin in self._begins.tolist()]
        self._spare: list[NDArray[np.int32]] = []  # a product buffer for the next search: allocating one is slow

    @classmethod
    def load(cls, path: Path, *, check_bytes: CheckBytes | None = None) -> BlockIndex:
        """Map the file of an index."""
        return cls(read_blocks(path, check_bytes), check_bytes=check_bytes)

    @property
    def rows(self) -> int:
        """The number of keys."""
        return len(self._blocks.ids)

    @property
    def width(self) -> int:
        """The number of dimensions of a key."""
        return len(self._blocks.centre)

    @property
    def keeps_all_dimensions(self) -> bool:
        """Whether distances are over all dimensions; of wide keys, some dimensions are dropped."""
        return self._blocks.code_width == self.width

    @property
    def stored_bytes(self) -> int:
        """The size of the file."""
        return self._blocks.offset + self._blocks.mapped_keys.nbytes

    def search(self, queries: Tensor, k: int, *, effort: float = 1.0) -> Neighbours:
        """Return about the k nearest keys of each of (N, D) queries; `effort` multiplies the blocks searched."""
        check_search(queries, k, self.width)
        count, size = len(self._begins), self._blocks.size
        probes = min(count, max(math.ceil(PROBES * effort), -(-k // size) + 1))
        queries_ = queries.detach().float().cpu()
        ids, distances = np.full((len(queries_), k), -1), np.full((len(queries_), k), np.inf, np.float32)
        step = max(1, min(_QUERY_BATCH, _MAX_PRODUCT_BYTES // (4 * size * max(1, probes))))
        for begin in range(0, len(queries_) if probes else 0, step):
            batch = slice(begin, begin + step)
            self._search(queries_[batch], probes, ids[batch], distances[batch])
        return Neighbours(torch.from_numpy(ids).to(queries.device), torch.from_numpy(distances).to(queries.device))

    def _search(self, queries: Tensor, probes: int, ids: Ints, distances: NDArray[np.float32]) -> None:
        """Fill the ids and distances of one batch of queries."""
        blocks = self._blocks
        quantised = quantise(blocks.project(queries, centre=self.metric == "l2"))
        chosen = self._choose_blocks(quantised, probes)  # (n, probes)
        products = self._take_buffer(chosen.size)
        places = self._multiply(quantised.values, chosen, products)
        factors = quantised.scale.numpy() * np.float32(-1 if self.metric == "ip" else -2)
        constant = -(queries @ blocks.centre)[:, None] if self.metric == "ip" else quantised.squares()
        constant.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        invalid = constant[:, 0].isinf().numpy()  # a query that is not finite, or too large, has no neighbours

        def select(begin: int, end: int) -> None:
            step = max(1, _SELECT_BATCH // (probes * blocks.size))
            workspace = _Workspace(min(step, end - begin), probes, blocks.size)
            for first in range(begin, end, step):
                batch = slice(first, min(first + step, end))
                values = workspace.distances(
                    blocks, products, places=places[batch], factors=factors[batch], chosen=chosen[batch]
                )
                nearest, values = self._nearest(values, chosen[batch], ids.shape[1])
                values += constant[batch].numpy()
                nearest[invalid[batch]] = -1
                ids[batch] = nearest
                distances[batch] = values if self.metric == "ip" else np.maximum(values, 0)

        parallel_for(len(chosen), select)
        self._spare[:] = [products]  # one, however many searches run concurrently

    def _choose_blocks(self, queries: QuantisedRows, probes: int) -> Ints:
        """Return the blocks that each query searches, (n, probes)."""
        step = max(1, _CENTROID_BATCH // len(self._centroids))
        batches = (self._centroids.distances(queries[at : at + step]) for at in range(0, len(queries), step))
        return torch.cat([batch.topk(probes, largest=False, sorted=False).indices for batch in batches]).numpy()

    def _take_buffer(self, count: int) -> NDArray[np.int32]:
        """Return a buffer for the products of `count` pairs of a query and a block."""
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = np.empty((0, self._blocks.size), np.int32)
        return buffer if len(buffer) >= count else np.empty((count, self._blocks.size), np.int32)

    def _multiply(self, queries: Tensor, chosen: Ints, products: NDArray[np.int32]) -> Ints:
        """Multiply queries with the keys of their blocks; return the row of `products` of each pair, (n, probes)."""
        blocks, probes = self._blocks, chosen.shape[1]
        order = torch.from_numpy(chosen).view(-1).sort(stable=True).indices
        owners = order.div(probes, rounding_mode="floor")
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        counts = np.bincount(chosen.reshape(-1), minlength=len(self._begins))
        searched = np.flatnonzero(counts)
        if self._check_bytes is not None:
            offsets = blocks.offset + self._begins[searched] * blocks.code_width
            self._check_bytes(offsets, blocks.size * blocks.code_width)
        done = 0
        for first in range(0, len(searched), _BLOCK_BATCH):
            batch = searched[first : first + _BLOCK_BATCH]
            sizes = counts[batch].tolist()
            end = done + sum(sizes)
            block_queries = queries.index_select(0, owners[done:end]).split(sizes)
            out = torch.from_numpy(products[done:end]).split(sizes)
            for block, rows, into in zip(batch.tolist(), block_queries, out, strict=True):
                int8_matmul(rows, self._block_keys[block], out=into)
            release_pages(blocks.mapped_keys)
            done = end
        return places.view(chosen.shape).numpy()

    def _nearest(self, values: NDArray[np.float32], chosen: Ints, k: int) -> tuple[Ints, NDArray[np.float32]]:
        """Return ids and distances of the k nearest keys, from the distances to all keys of the chosen blocks."""
        rows, probes = chosen.shape
        columns, distances = smallest_k(values, k)
        place = np.maximum(columns, 0)
        bits = self._blocks.size.bit_length() - 1
        block = place >> bits
        block += np.arange(0, rows * probes, probes)[:, None]
        place &= self._blocks.size - 1
        place += np.take(np.take(self._begins, chosen).reshape(-1), block)
        ids = np.take(self._blocks.ids, place, mode="clip").astype(np.int64)
        ids[columns < 0] = -1
        return ids, distances


class _Workspace:
    """Buffers of one thread: to allocate them for every few queries would take longer than the search."""

    def __init__(self, rows: int, probes: int, size: int) -> None:
        shape = (rows, probes, size)
        self._products, self._values = np.empty(shape, np.int32), np.empty(shape, np.float32)
        self._per_key = np.empty(shape, np.float32)

    def distances(
        self, blocks: Blocks, products: NDArray[np.int32], *, places: Ints, factors: NDArray[np.float32], chosen: Ints
    ) -> NDArray[np.float32]:
        """Return the distances of some queries, less what is the same for all keys: (n, probes * size)."""
        count = len(places)
        own, values, per_key = self._products[:count], self._values[:count], self._per_key[:count]
        np.take(products, places, axis=0, out=own, mode="clip")
        values[...] = own
        with np.errstate(over="ignore", invalid="ignore"):  # a query may be too large for any distance
            values *= factors[:, :, None]
            values *= np.take(blocks.scales, chosen, axis=0, out=per_key, mode="clip")
            values += np.take(blocks.constants, chosen, axis=0, out=per_key, mode="clip")
        return values.reshape(count, -1)
