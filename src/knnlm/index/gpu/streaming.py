"""Bring keys to a device and choose how they are searched there. Knows nothing about how the search works."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from knnlm.index.base import HalfVectors, Neighbours, Vectors
from knnlm.index.exact import Finder
from knnlm.index.gpu import kernels
from knnlm.index.gpu.keys import DEPTH, TILE, ByteKeys, DeviceKeys, HalfKeys, padded
from knnlm.index.gpu.search import FusedSearch

_CHUNK = 1 << 16  # rows that are read at once

_READERS = 4  # threads

_SAMPLE = 1 << 14  # rows that a centre and scales are taken from, in pieces from all over

_PIECES = 64

_SCORES = 1 << 33  # bytes for the scores of a batch of queries, at most

_LEAST = 1 << 26  # and at least

_QUERIES = 128  # in the smallest batch that is worth while

_SHARE = 0.8  # of the memory that is free on a device

_HOST_SHARE = 0.7  # of that which is available to the host


def load(vectors: Vectors, metric: str, device: torch.device, *, keys: str, room: int | None) -> Finder | None:
    """Hold keys on a device, or in host memory where they do not fit; None where the kernels cannot search them."""
    if not kernels.runs_on(device):
        return None
    source = _source(vectors)
    if source is None:
        return None
    needed = _needed(vectors, keys)
    given, room = room, _free(device) if room is None else room
    if isinstance(source, _Resident) and needed > room:
        # No room for them twice: let those go that the build left here, and read them from their files.
        cast(Any, vectors).release()
        source = _Source(vectors)
        room = _free(device) if given is None else given
    if needed <= room:
        held = _hold(vectors, source, metric, device, keys)
        return FusedSearch(held, workspace=max(_LEAST, min(_SCORES, (room - needed) // 2)))
    if vectors.rows * vectors.width * 2 > _host_memory() * _HOST_SHARE:
        return None
    return StreamedSearch(vectors, source, metric=metric, device=device, room=room)


def fits_on(vectors: Vectors, device: torch.device, keys: str) -> bool:
    """Say whether all keys can be on a device, as they are stored or in int8, with room to search them."""
    pieces: list[Tensor] = getattr(vectors, "resident_keys", None) or []
    room = _free(device) + sum(piece.nbytes for piece in pieces)
    return bool(getattr(vectors, "half", False)) and _needed(vectors, keys) <= room


def _needed(vectors: Vectors, keys: str) -> int:
    """Give the bytes that keys take, and the scores of the smallest batch that is worth while."""
    rows = padded(vectors.rows, TILE)
    return rows * (padded(vectors.width, DEPTH) * (1 if keys == "int8" else 2) + 4) + _QUERIES * 4 * rows // 16


def _free(device: torch.device) -> int:
    """Give the bytes that keys and scores may take: most of what is free, the rest is for models."""
    if device.type != "cuda":
        return 1 << 40
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0] * _SHARE)


def _host_memory() -> int:
    """Give the bytes of memory that the host could give; where that cannot be known, all that one may wish."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 50


class _Source:
    """Reads keys as float16 host tensors."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors

    def blocks(self, begin: int, end: int, *, pin: bool) -> Iterator[tuple[int, Tensor]]:
        """Give (first row, (n, D) float16) from one row to another; some threads read ahead."""
        vectors = cast(HalfVectors, self.vectors)

        def read(first: int) -> Tensor:
            out = torch.empty(min(_CHUNK, end - first), vectors.width, dtype=torch.float16, pin_memory=pin)
            vectors.read(first, out)
            return out

        firsts = range(begin, end, _CHUNK)
        if len(firsts) == 1:
            yield begin, read(begin)
            return
        with ThreadPoolExecutor(_READERS) as pool:
            ahead: list[tuple[int, Future[Tensor]]] = []
            for first in firsts:
                ahead.append((first, pool.submit(read, first)))
                if len(ahead) > _READERS:
                    number, block = ahead.pop(0)
                    yield number, block.result()
            for number, block in ahead:
                yield number, block.result()


class _Resident(_Source):
    """Keys that are on the device already, in pieces one after another."""

    def __init__(self, vectors: Vectors, pieces: list[Tensor]) -> None:
        super().__init__(vectors)
        self.pieces = pieces

    def blocks(self, begin: int, end: int, *, pin: bool) -> Iterator[tuple[int, Tensor]]:  # noqa: ARG002
        """Give (first row, (n, D) float16) from one row to another."""
        first = 0
        for piece in self.pieces:
            for part in piece.split(_CHUNK):
                low, high = max(begin, first), min(end, first + len(part))
                if low < high:
                    yield low, part[low - first : high - first]
                first += len(part)


class _Converted(_Source):
    """Keys that are given in float32 but are float16 in truth."""

    def __init__(self, vectors: Vectors, halves: Tensor) -> None:
        super().__init__(vectors)
        self.halves = halves

    def blocks(self, begin: int, end: int, *, pin: bool) -> Iterator[tuple[int, Tensor]]:  # noqa: ARG002
        """Give (first row, (n, D) float16) from one row to another."""
        for first in range(begin, end, _CHUNK):
            yield first, self.halves[first : min(first + _CHUNK, end)]


def _source(vectors: Vectors) -> _Source | None:
    """Find out how to read keys in float16 without losing anything; None where that cannot be."""
    pieces: Any = getattr(vectors, "resident_keys", None)
    if pieces is not None:
        return _Resident(vectors, pieces)
    if hasattr(vectors, "half"):
        return _Source(vectors) if cast(HalfVectors, vectors).half else None
    halves = torch.empty(vectors.rows, vectors.width, dtype=torch.float16)
    for first, block in vectors.chunks(_CHUNK):
        part = halves[first : first + len(block)]
        part.copy_(block)
        if not torch.equal(part.to(block), block):  # what is no number is not equal either
            return None
    return _Converted(vectors, halves)


def _hold(vectors: Vectors, source: _Source, metric: str, device: torch.device, keys: str) -> DeviceKeys:
    sample = _sampled(vectors.rows, source).to(device)
    held: DeviceKeys
    if keys == "int8":
        held = ByteKeys(vectors.rows, vectors.width, metric=metric, device=device, sample=sample)
    else:
        held = HalfKeys(vectors.rows, vectors.width, metric=metric, device=device, centre=sample.float().mean(0))
    for first, block in source.blocks(0, vectors.rows, pin=device.type == "cuda"):
        held.fill(first, block.to(device, non_blocking=True))
    return held


def _sampled(rows: int, source: _Source) -> Tensor:
    """Give some keys from all over."""
    size = min(rows, max(1, _SAMPLE // _PIECES))
    begins = {round(step * (rows - size) / max(1, _PIECES - 1)) for step in range(_PIECES)}
    blocks = [block for begin in sorted(begins) for _, block in source.blocks(begin, begin + size, pin=False)]
    return torch.cat(blocks)


class StreamedSearch:
    """Searches keys that wait in host memory, chunk by chunk."""

    def __init__(self, vectors: Vectors, source: _Source, *, metric: str, device: torch.device, room: int) -> None:
        self._device = device
        self._metric = metric
        self._width = vectors.width
        # Two chunks being copied and one being searched, and the scores.
        fitting = room // 2 // (6 * padded(vectors.width, DEPTH) + 4)
        # Torch pins memory in powers of two.
        size = 1 << max(0, (fitting * vectors.width * 2).bit_length() - 1)
        self.chunk = max(1 << 10, min(size // (2 * vectors.width), vectors.rows))
        self._side: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._workspace = max(_LEAST, min(_SCORES, room // 4))
        self._centre = _sampled(vectors.rows, source).float().mean(0)
        pin = device.type == "cuda"
        self._host: list[tuple[int, Tensor]] = []
        for begin in range(0, vectors.rows, self.chunk):
            end = min(begin + self.chunk, vectors.rows)
            whole = torch.empty(end - begin, vectors.width, dtype=torch.float16, pin_memory=pin)
            for first, block in source.blocks(begin, end, pin=False):
                whole[first - begin : first - begin + len(block)] = block
            self._host.append((begin, whole))

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest of each of (B, D) float32 queries."""
        best: Neighbours | None = None
        for first, held in self._chunks():
            found = FusedSearch(held, workspace=self._workspace).search(queries, min(k, held.rows))
            found = Neighbours(found.ids.where(found.ids < 0, found.ids + first), found.distances)
            best = found if best is None else _nearer(best, found, k)
            del held  # before the next one is made
        assert best is not None
        return best

    def _chunks(self) -> Iterator[tuple[int, HalfKeys]]:
        """Give (first row, keys on the device), copying one chunk while another is searched."""
        side, gpu = self._side, self._side is not None
        main: Any = torch.cuda.current_stream(self._device) if gpu else None
        staged: list[Any] = [None, None]

        def copy(number: int) -> None:
            if gpu:
                side.wait_stream(main)  # what is there has been taken
            with torch.cuda.stream(side) if gpu else nullcontext():
                staged[number % 2] = self._host[number][1].to(self._device, non_blocking=True)

        copy(0)
        for number, (first, host) in enumerate(self._host):
            if gpu:
                main.wait_stream(side)
            held = HalfKeys(len(host), self._width, metric=self._metric, device=self._device, centre=self._centre)
            for begin in range(0, len(host), _CHUNK):
                held.fill(begin, staged[number % 2][begin : begin + _CHUNK])
            if gpu:
                staged[number % 2].record_stream(main)
            staged[number % 2] = None
            if number + 1 < len(self._host):
                copy(number + 1)
            yield first, held
            del held


def _nearer(one: Neighbours, other: Neighbours, k: int) -> Neighbours:
    """Take the k nearest of two answers."""
    ids, distances = torch.cat([one.ids, other.ids], 1), torch.cat([one.distances, other.distances], 1)
    best = distances.topk(min(k, ids.shape[1]), dim=1, largest=False, sorted=True)
    return Neighbours(ids.gather(1, best.indices), best.values)
