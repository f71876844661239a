"""Approximate search on a CPU in blocks of neighbouring keys, one byte per dimension.

Every block has a few hundred keys that are near one another. A query searches the blocks whose centroids are nearest.
Queries are batched: the keys of a block are multiplied with all queries that search it, block after block in the order
of the file, and each query then selects its nearest keys from the products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.index.base import Neighbours, check_search, shard_probes
from knnlm.index.blocks.file import Blocks, CheckBytes, read_blocks
from knnlm.index.blocks.kernels import Centroids, QuantisedRows, int8_matmul, parallel_for, quantise, smallest_k
from knnlm.io import release_pages, resident_limit

PROBES = 40  # blocks that a query searches in one store for many neighbours

_MANY, _FEW = 64, 16  # neighbours: for fewer than `_MANY`, a query searches fewer blocks, for `_FEW` half as many

_QUERY_BATCH = 8192  # queries: every block is read once for all of them
_MAX_PRODUCT_BYTES = 3 << 27
_BLOCK_BATCH = 64  # blocks whose queries are gathered at once
_CENTROID_BATCH = 1 << 20  # queries times centroids that are compared at once
_SELECT_BATCH = 1 << 20  # products that a thread selects from at once: with fewer, threads wait for the GIL

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass
class BlockFile:
    """A file of blocks, its centroids, and the checksums of its keys."""

    blocks: Blocks
    check_bytes: CheckBytes | None = None
    centroids: Centroids = field(init=False)

    def __post_init__(self) -> None:
        self.centroids = Centroids(self.blocks.centroids, metric=self.blocks.metric)

    def check(self, begins: Ints) -> None:
        """Compare the checksums of the blocks that begin at these keys."""
        if self.check_bytes is not None:
            width = self.blocks.code_width
            self.check_bytes(self.blocks.offset + begins * width, self.blocks.size * width)


@dataclass(frozen=True)
class _Queries:
    """Queries in the space of each file, and what the distances to all of its keys have in common."""

    quantised: list[QuantisedRows]
    constants: list[Tensor]  # (n, 1) each; inf for a query without neighbours


def _joined(parts: Sequence[Blocks]) -> tuple[NDArray[np.int32], Floats, Floats, NDArray[Any]]:
    """Return the sizes, scales and constants of all blocks, and the ids of all keys; uncopied if there is one file."""
    first = parts[0]
    if len(parts) == 1:
        return first.sizes, first.scales, first.constants, first.ids
    firsts = np.cumsum([0, *(len(part.ids) for part in parts)])
    ids = np.empty(firsts[-1], np.int32 if firsts[-1] <= np.iinfo(np.int32).max else np.int64)
    for part, (begin, end) in zip(parts, pairwise(firsts.tolist()), strict=True):
        np.add(part.ids, begin, out=ids[begin:end], casting="same_kind")
    sizes, scales, constants = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("sizes", "scales", "constants")
    )
    return sizes, scales, constants, ids


class BlockIndex:
    """A block index behind the `Index` protocol. Distances are those between rounded keys and rounded queries.

    It may consist of several files, one for each shard of a store, with ids behind those of the files before. A query
    searches the nearest blocks of all files.
    """

    def __init__(self, *files: BlockFile) -> None:
        self._files = files
        self._blocks = files[0].blocks  # what follows is equal in all files: metric, size, widths
        self.metric = self._blocks.metric
        parts = [file.blocks for file in files]
        # Of several files, 12 bytes for each key are copied; keys stay in the files.
        self._sizes, self._scales, self._constants, self._ids = _joined(parts)
        self._begins = np.cumsum(self._sizes) - self._sizes
        self._starts = np.cumsum([0, *(len(part.sizes) for part in parts)])  # first block of each file
        self._owners = np.repeat(np.arange(len(parts)), np.diff(self._starts))  # the file of each block
        # Sliced once: slicing a tensor takes as long as multiplying it with one query.
        self._block_keys = [
            part.keys[begin : begin + part.size]
            for part in parts
            for begin in (np.cumsum(part.sizes) - part.sizes).tolist()
        ]
        self._shared_projection = all(torch.equal(part.projection, parts[0].projection) for part in parts[1:])
        self._spare: list[NDArray[np.int32]] = []  # a product buffer for the next search: allocating one is slow

    @classmethod
    def load(cls, path: Path, *, check_bytes: CheckBytes | None = None) -> BlockIndex:
        """Map the file of an index."""
        return cls(BlockFile(read_blocks(path, check_bytes), check_bytes))

    @classmethod
    def join(cls, indexes: Sequence[BlockIndex]) -> BlockIndex | None:
        """Return the indexes of shards as one; None where their blocks have different sizes."""
        files = [file for index in indexes for file in index._files]
        shapes = {(file.blocks.metric, file.blocks.size, file.blocks.projection.shape) for file in files}
        return cls(*files) if len(shapes) == 1 else None

    @property
    def rows(self) -> int:
        """The number of keys."""
        return len(self._ids)

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
        """The size of the files."""
        return sum(file.blocks.offset + file.blocks.mapped_keys.nbytes for file in self._files)

    def search(self, queries: Tensor, k: int, *, effort: float = 1.0) -> Neighbours:
        """Return about the k nearest keys of each of (N, D) queries; `effort` multiplies the blocks searched."""
        check_search(queries, k, self.width)
        probes = min(len(self._begins), self.probes(k, effort=effort))
        queries_ = queries.detach().float().cpu()
        ids, distances = np.full((len(queries_), k), -1), np.full((len(queries_), k), np.inf, np.float32)
        for batch in self._batches(len(queries_), probes):
            prepared = self._prepare(queries_[batch])
            chosen = self._choose_blocks(prepared, probes).ids.numpy()
            self._search(prepared, chosen, ids=ids[batch], distances=distances[batch])
        return Neighbours(torch.from_numpy(ids).to(queries.device), torch.from_numpy(distances).to(queries.device))

    def probes(self, k: int, *, effort: float = 1.0) -> int:
        """Return how many blocks a query searches for its k nearest keys.

        Half of the blocks contain as large a share of the votes of 16 neighbours as all of them of 1,024.
        """
        share = math.sqrt(min(max(k, _FEW), _MANY) / _MANY)
        return max(shard_probes(PROBES * share * effort, len(self._files)), -(-k // self._blocks.size) + 1)

    def nearest_blocks(self, queries: Tensor, count: int) -> Neighbours:
        """Return the nearest blocks of each of (N, D) queries, unsorted, and the distances of their centroids.

        Such distances can be compared with those of the block index of another shard.
        """
        prepared = self._prepare(queries.detach().float().cpu())
        nearest = self._choose_blocks(prepared, min(count, len(self._begins)))
        return Neighbours(nearest.ids, nearest.distances + prepared.constants[0])

    def search_blocks(self, queries: Tensor, k: int, blocks: Tensor) -> Neighbours:
        """Return about the k nearest keys of each of (N, D) queries in its own of the (N, p) blocks, -1 for none.

        Where these blocks have fewer than k keys, ids are -1 and distances infinite.
        """
        check_search(queries, k, self.width)
        queries_ = queries.detach().float().cpu()
        ids, distances = np.full((len(queries_), k), -1), np.full((len(queries_), k), np.inf, np.float32)
        # Queries with about as many blocks are searched together, so that few products are padding.
        counts, order = (blocks >= 0).sum(1).sort(stable=True)
        chosen = blocks.sort(dim=1, descending=True).values[order]
        first = int(torch.searchsorted(counts, 1))
        for batch in self._batches(len(order) - first, blocks.shape[1]):
            rows = order[first:][batch]
            own, most = queries_[rows], int(counts[first:][batch].max())
            found = np.full((len(rows), k), -1), np.full((len(rows), k), np.inf, np.float32)
            blocks_ = chosen[first:][batch][:, :most].contiguous().numpy()
            self._search(self._prepare(own), blocks_, ids=found[0], distances=found[1])
            ids[rows.numpy()], distances[rows.numpy()] = found
        return Neighbours(torch.from_numpy(ids).to(queries.device), torch.from_numpy(distances).to(queries.device))

    def _batches(self, count: int, probes: int) -> Iterator[slice]:
        """Yield slices of so many queries whose products fit into memory."""
        step = max(1, min(_QUERY_BATCH, _MAX_PRODUCT_BYTES // (4 * self._blocks.size * max(1, probes))))
        for begin in range(0, count if probes else 0, step):
            yield slice(begin, min(begin + step, count))

    def _prepare(self, queries: Tensor) -> _Queries:
        """Quantise queries in the space of each file."""
        centred, first = self.metric == "l2", self._blocks
        rows: list[Tensor] = []
        for file in self._files:
            if not rows or not self._shared_projection:
                rows.append(file.blocks.project(queries, centre=centred))
            else:
                shift = (file.blocks.centre - first.centre) @ first.projection
                rows.append(rows[0] - shift if centred else rows[0])
        quantised = [quantise(row) for row in rows]
        constants = [
            own.squares() if centred else -(queries @ file.blocks.centre)[:, None]
            for own, file in zip(quantised, self._files, strict=True)
        ]
        return _Queries(quantised, [one.nan_to_num_(nan=torch.inf, posinf=torch.inf) for one in constants])

    def _search(self, queries: _Queries, chosen: Ints, *, ids: Ints, distances: Floats) -> None:
        """Fill the ids and distances of one batch of queries, given their blocks, (n, probes), -1 for none."""
        probes, size = chosen.shape[1], self._blocks.size
        products = self._take_buffer(chosen.size)
        places, counts = self._multiply(queries, chosen, products), (chosen >= 0).sum(1)
        factors, shifts = self._factors(queries, chosen)
        constant = queries.constants[0].numpy()
        invalid = np.isinf(constant[:, 0])  # a query that is not finite, or too large, has no neighbours

        def select(begin: int, end: int) -> None:
            step = max(1, _SELECT_BATCH // (probes * size))
            workspace = _Workspace(min(step, end - begin), probes, size)
            for first in range(begin, end, step):
                batch = slice(first, min(first + step, end))
                own = chosen[batch, : counts[batch].max()]
                values = workspace.distances(
                    self._scales,
                    self._constants,
                    products,
                    places=places[batch, : own.shape[1]],
                    factors=factors[batch, : own.shape[1]],
                    chosen=own,
                    shifts=None if shifts is None else shifts[batch, : own.shape[1]],
                )
                nearest, values = self._nearest(values, own, ids.shape[1])
                values += constant[batch]
                nearest[invalid[batch]] = -1
                ids[batch] = nearest
                distances[batch] = values if self.metric == "ip" else np.maximum(values, 0)

        parallel_for(len(chosen), select)
        self._spare[:] = [products]  # one, however many searches run concurrently

    def _factors(self, queries: _Queries, chosen: Ints) -> tuple[Floats, Floats | None]:
        """Return the factors of the products with each block, and by how much its distances exceed those of file 0."""
        sign = np.float32(-1 if self.metric == "ip" else -2)
        if len(self._files) == 1:
            return queries.quantised[0].scale.numpy() * sign, None
        owners = self._owners[np.maximum(chosen, 0)]
        factors = torch.cat([own.scale for own in queries.quantised], 1).numpy() * sign  # (n, files)
        with np.errstate(invalid="ignore"):
            shifts = torch.cat([own - queries.constants[0] for own in queries.constants], 1).numpy()
        return np.take_along_axis(factors, owners, axis=1), np.take_along_axis(shifts, owners, axis=1)

    def _choose_blocks(self, queries: _Queries, probes: int) -> Neighbours:
        """Return the blocks that each query searches, (n, probes), and distances of their centroids.

        These are less the constant of the first file.
        """
        total = len(queries.constants[0])
        step = max(1, _CENTROID_BATCH // max(1, len(self._begins)))
        ids, distances = torch.empty(total, probes, dtype=torch.int64), torch.empty(total, probes)
        for begin in range(0, total, step):
            batch = slice(begin, begin + step)
            own = [
                file.centroids.distances(one[batch]) for file, one in zip(self._files, queries.quantised, strict=True)
            ]
            for one, constant in zip(own[1:], queries.constants[1:], strict=True):
                one += constant[batch] - queries.constants[0][batch]
            nearest = (own[0] if len(own) == 1 else torch.cat(own, 1)).topk(probes, largest=False, sorted=False)
            ids[batch], distances[batch] = nearest.indices, nearest.values
        return Neighbours(ids, distances)

    def _take_buffer(self, count: int) -> NDArray[np.int32]:
        """Return a buffer for the products of `count` pairs of a query and a block."""
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = np.empty((0, self._blocks.size), np.int32)
        return buffer if len(buffer) >= count else np.empty((count, self._blocks.size), np.int32)

    def _multiply(self, queries: _Queries, chosen: Ints, products: NDArray[np.int32]) -> Ints:
        """Multiply queries with the keys of their blocks; return the row of `products` of each pair, (n, probes)."""
        probes = chosen.shape[1]
        order = torch.from_numpy(chosen).view(-1).sort(stable=True).indices
        counts = np.bincount(chosen.reshape(-1) + 1, minlength=len(self._begins) + 1)
        places = torch.zeros_like(order)
        order, counts = order[counts[0] :], counts[1:]  # without padding
        rows = order.div(probes, rounding_mode="floor")
        places.scatter_(0, order, torch.arange(len(order)))
        searched, done = np.flatnonzero(counts), 0
        for number, (file, own) in enumerate(zip(self._files, queries.quantised, strict=True)):
            begin, end = np.searchsorted(searched, self._starts[number : number + 2])
            blocks = searched[begin:end]
            file.check(self._begins[blocks] - self._begins[self._starts[number]] if len(blocks) else blocks)
            count = int(counts[blocks].sum())
            self._multiply_file(file, own.values, blocks, counts, rows[done : done + count], products[done:])
            done += count
        return places.view(chosen.shape).numpy()

    def _multiply_file(
        self, file: BlockFile, queries: Tensor, searched: Ints, counts: Ints, rows: Tensor, products: NDArray[np.int32]
    ) -> None:
        """Multiply the queries of some rows, block after block, with the blocks of one file."""
        done, limit = 0, resident_limit(len(queries))
        for first in range(0, len(searched), _BLOCK_BATCH):
            batch = searched[first : first + _BLOCK_BATCH]
            sizes = counts[batch].tolist()
            end = done + sum(sizes)
            block_queries = queries.index_select(0, rows[done:end]).split(sizes)
            out = torch.from_numpy(products[done:end]).split(sizes)
            for block, own, into in zip(batch.tolist(), block_queries, out, strict=True):
                int8_matmul(own, self._block_keys[block], out=into)
            release_pages(file.blocks.mapped_keys, limit=limit)
            done = end

    def _nearest(self, values: Floats, chosen: Ints, k: int) -> tuple[Ints, Floats]:
        """Return ids and distances of the k nearest keys, from the distances to all keys of the chosen blocks."""
        rows, probes = chosen.shape
        columns, distances = smallest_k(values, k)
        place = np.maximum(columns, 0)
        bits = self._blocks.size.bit_length() - 1
        block = place >> bits
        block += np.arange(0, rows * probes, probes)[:, None]
        place &= self._blocks.size - 1
        place += np.take(np.take(self._begins, chosen).reshape(-1), block)
        ids = np.take(self._ids, place, mode="clip").astype(np.int64)
        ids[columns < 0] = -1
        return ids, distances


class _Workspace:
    """Buffers of one thread: to allocate them for every few queries would take longer than the search."""

    def __init__(self, rows: int, probes: int, size: int) -> None:
        count, self._size = rows * probes * size, size
        self._products, self._values = np.empty(count, np.int32), np.empty(count, np.float32)
        self._per_key = np.empty(count, np.float32)

    def distances(
        self,
        scales: Floats,
        constants: Floats,
        products: NDArray[np.int32],
        *,
        places: Ints,
        factors: Floats,
        chosen: Ints,
        shifts: Floats | None,
    ) -> Floats:
        """Return the distances of some queries, less what is the same for all keys: (n, probes * size)."""
        shape = (*places.shape, self._size)
        own, values, per_key = (
            buffer[: math.prod(shape)].reshape(shape) for buffer in (self._products, self._values, self._per_key)
        )
        np.take(products, places, axis=0, out=own, mode="clip")
        values[...] = own
        with np.errstate(over="ignore", invalid="ignore"):  # a query may be too large for any distance
            values *= factors[:, :, None]
            values *= np.take(scales, chosen, axis=0, out=per_key, mode="clip")
            values += np.take(constants, chosen, axis=0, out=per_key, mode="clip")
            if shifts is not None:
                values += shifts[:, :, None]
        if chosen.min(initial=0) < 0:
            values[chosen < 0] = np.inf
        return values.reshape(len(places), -1)
