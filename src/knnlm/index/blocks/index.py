"""Search in blocks of keys that lie side by side. Knows nothing about how blocks are made, or about tokens.

Every block has a few hundred keys that are near one another, a byte for each number. A query looks into the blocks
whose centres are nearest. Many queries are asked at once, so the keys of a block are multiplied with all queries that
look into it, block after block as they lie in the file, and each query then takes its nearest from what came out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.index.base import Neighbours, check_search
from knnlm.index.blocks.file import Blocks, read_blocks
from knnlm.index.blocks.kernels import QuantisedRows, products, quantise, share, smallest_k
from knnlm.index.blocks.kmeans import Centroids
from knnlm.index.spec import BLOCKS
from knnlm.io import Resident

_QUERIES = 8192  # at a time: every block is read once for all of them

_ROOM = 3 << 27  # bytes for products, at most

_GROUP = 64  # blocks whose queries are brought together at once

_COMPARED = 1 << 20  # queries times centres that are compared at once

_AT_ONCE = 1 << 20  # numbers that are looked through at once: with fewer, threads wait for the interpreter

Ints = NDArray[np.int64]


class BlockIndex:
    """Blocks behind the `Index` protocol. Distances are those between rounded keys and rounded queries."""

    def __init__(self, blocks: Blocks, *, compare: Callable[[Ints, int], None] | None = None) -> None:
        """`compare` is called before the bytes from each of these on, as many as are given, are read from the file."""
        self.metric = blocks.metric
        self._blocks, self._compare = blocks, compare
        self._centres = Centroids(blocks.centres, metric=blocks.metric)
        self._begins = np.cumsum(blocks.sizes) - blocks.sizes
        self._resident = Resident()
        begins, size = self._begins.tolist(), blocks.size
        self._keys = [blocks.keys[begin : begin + size] for begin in begins]  # to cut them out takes as long as to ask
        self._spare: list[NDArray[np.int32]] = []  # room for products: to get it anew takes as long as to fill it

    @classmethod
    def load(cls, path: Path, *, compare: Callable[[Ints, int], None] | None = None) -> BlockIndex:
        """Map the file of an index."""
        return cls(read_blocks(path, compare), compare=compare)

    @property
    def rows(self) -> int:
        """The number of keys."""
        return len(self._blocks.numbers)

    @property
    def width(self) -> int:
        """The number of dimensions of a key."""
        return len(self._blocks.centre)

    @property
    def whole(self) -> bool:
        """Whether distances are those of whole keys; of wide ones, some dimensions are left out."""
        return self._blocks.kept == self.width

    @property
    def stored_bytes(self) -> int:
        """How large the file is."""
        return self._blocks.offset + self._blocks.mapped.nbytes

    def search(self, queries: Tensor, k: int, *, effort: float = 1.0) -> Neighbours:
        """Find about the k nearest rows of each of (N, D) queries; with more `effort` in so many times more blocks."""
        check_search(queries, k, self.width)
        count, size = len(self._begins), self._blocks.size
        looked = min(count, max(math.ceil(BLOCKS * effort), -(-k // size) + 1))
        asked = queries.detach().float().cpu()
        ids, distances = np.full((len(asked), k), -1), np.full((len(asked), k), np.inf, np.float32)
        step = max(1, min(_QUERIES, _ROOM // (4 * size * max(1, looked))))
        for begin in range(0, len(asked) if looked else 0, step):
            part = slice(begin, begin + step)
            self._search(asked[part], looked, ids[part], distances[part])
        return Neighbours(torch.from_numpy(ids).to(queries.device), torch.from_numpy(distances).to(queries.device))

    def _search(self, queries: Tensor, looked: int, ids: Ints, distances: NDArray[np.float32]) -> None:
        """Find the nearest of some queries, as many as there is room for."""
        blocks = self._blocks
        near = quantise(blocks.turned(queries, moved=self.metric == "l2"))
        chosen = self._choose(near, looked)  # (n, looked)
        room = self._take_room(chosen.size)
        places = self._multiply(near.values, chosen, room)
        factors = near.scale.numpy() * np.float32(-1 if self.metric == "ip" else -2)
        constant = -(queries @ blocks.centre)[:, None] if self.metric == "ip" else near.squares()
        constant.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        nowhere = constant[:, 0].isinf().numpy()  # whoever asks for what is no number, or too large, finds nothing

        def collect(begin: int, end: int) -> None:
            step = max(1, _AT_ONCE // (looked * blocks.size))
            desk = _Workspace(min(step, end - begin), looked, blocks.size)
            for at in range(begin, end, step):
                part = slice(at, min(at + step, end))
                values = desk.distances(blocks, room, places[part], factors[part], chosen[part])
                found, values = self._nearest(values, chosen[part], ids.shape[1])
                values += constant[part].numpy()
                found[nowhere[part]] = -1
                ids[part] = found
                distances[part] = values if self.metric == "ip" else np.maximum(values, 0)

        share(len(chosen), collect)
        self._spare[:] = [room]  # one, however many ask at the same time

    def _choose(self, near: QuantisedRows, looked: int) -> Ints:
        """Choose the blocks that each query looks into, (n, looked)."""
        step = max(1, _COMPARED // len(self._centres))
        parts = (self._centres.distances(near[at : at + step]) for at in range(0, len(near), step))
        return torch.cat([part.topk(looked, largest=False, sorted=False).indices for part in parts]).numpy()

    def _take_room(self, count: int) -> NDArray[np.int32]:
        """Find room for the products of so many queries with a block each."""
        try:
            room = self._spare.pop()
        except IndexError:
            room = np.empty((0, self._blocks.size), np.int32)
        return room if len(room) >= count else np.empty((count, self._blocks.size), np.int32)

    def _multiply(self, queries: Tensor, chosen: Ints, room: NDArray[np.int32]) -> Ints:
        """Multiply queries with the keys of the blocks they look into; say where in the room that is, (n, looked)."""
        blocks, looked = self._blocks, chosen.shape[1]
        order = torch.from_numpy(chosen).view(-1).sort(stable=True).indices
        owners = order.div(looked, rounding_mode="floor")
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        counts = np.bincount(chosen.reshape(-1), minlength=len(self._begins))
        asked = np.flatnonzero(counts)
        if self._compare is not None:
            self._compare(blocks.offset + self._begins[asked] * blocks.kept, blocks.size * blocks.kept)
        done = 0
        for first in range(0, len(asked), _GROUP):
            numbers = asked[first : first + _GROUP]
            parts = counts[numbers].tolist()
            end = done + sum(parts)
            asking = queries.index_select(0, owners[done:end]).split(parts)
            out = torch.from_numpy(room[done:end]).split(parts)
            for number, rows, into in zip(numbers.tolist(), asking, out, strict=True):
                products(rows, self._keys[number], out=into)
            self._resident.touched(blocks.mapped)
            done = end
        return places.view(chosen.shape).numpy()

    def _nearest(self, values: NDArray[np.float32], chosen: Ints, k: int) -> tuple[Ints, NDArray[np.float32]]:
        """Take the k nearest of some queries from their distances to all keys they look at: numbers and distances."""
        rows, looked = chosen.shape
        found, distances = smallest_k(values, k)
        place = np.maximum(found, 0)
        bits = self._blocks.size.bit_length() - 1
        block = place >> bits
        block += np.arange(0, rows * looked, looked)[:, None]
        place &= self._blocks.size - 1
        place += np.take(np.take(self._begins, chosen).reshape(-1), block)
        numbers = np.take(self._blocks.numbers, place, mode="clip").astype(np.int64)
        numbers[found < 0] = -1
        return numbers, distances


class _Workspace:
    """Room to work in: to get it anew for every few queries would take longer than the work."""

    def __init__(self, rows: int, looked: int, size: int) -> None:
        shape = (rows, looked, size)
        self._whole, self._values = np.empty(shape, np.int32), np.empty(shape, np.float32)
        self._taken = np.empty(shape, np.float32)

    def distances(
        self, blocks: Blocks, room: NDArray[np.int32], places: Ints, factors: NDArray[np.float32], chosen: Ints
    ) -> NDArray[np.float32]:
        """Make distances, less what is the same for all keys, of the products of some queries; (n, looked * size)."""
        count = len(places)
        whole, values, taken = self._whole[:count], self._values[:count], self._taken[:count]
        np.take(room, places, axis=0, out=whole, mode="clip")
        values[...] = whole
        with np.errstate(over="ignore", invalid="ignore"):  # a query may be too large for any distance
            values *= factors[:, :, None]
            values *= np.take(blocks.scales, chosen, axis=0, out=taken, mode="clip")
            values += np.take(blocks.constants, chosen, axis=0, out=taken, mode="clip")
        return values.reshape(count, -1)
