"""Keys on their way to a device: which searcher fits into its memory, and streaming where keys do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from knnlm.index.base import HalfVectors, Neighbours, Searcher, Vectors
from knnlm.index.gpu import kernels
from knnlm.index.gpu.keys import KEY_MULTIPLE, WIDTH_MULTIPLE, DeviceKeys, HalfKeys, Int8Keys, padded
from knnlm.index.gpu.search import DEFAULT_WORKSPACE, FusedSearch
from knnlm.index.packed import merge_shards

_READ_BATCH = 1 << 16  # keys
_READERS = 4  # threads
_SAMPLE = 1 << 14  # keys that a centre and scales are computed from
_SAMPLE_PIECES = 64  # places that the sample is taken from
_MIN_WORKSPACE = 1 << 26  # bytes for the scores of a batch of queries
_MIN_BATCH = 128  # queries: smaller batches waste the device
_MIN_CHUNK = 1 << 10  # keys that are streamed at once
_DEVICE_SHARE = 0.8  # of the free device memory
_HOST_SHARE = 0.7  # of the available host memory


def open_device_search(
    vectors: Vectors, metric: str, *, device: torch.device, key_dtype: str, max_bytes: int | None
) -> Searcher | None:
    """Copy keys to a device, or to host memory where they do not fit; None if the kernels cannot search them."""
    if not kernels.runs_on(device):
        return None
    source = _open_source(vectors)
    if source is None:
        return None
    needed = _needed_bytes(vectors, key_dtype)
    available = _free_bytes(device) if max_bytes is None else max_bytes
    if isinstance(source, _ResidentSource) and needed > available:
        # They do not fit twice: release those that the build left on the device, and read them from their files.
        cast(Any, vectors).release()
        source = _Source(vectors)
        available = _free_bytes(device) if max_bytes is None else max_bytes
    if needed <= available:
        device_keys = _copy_to_device(vectors, source, metric=metric, device=device, key_dtype=key_dtype)
        return FusedSearch(device_keys, workspace=_workspace((available - needed) // 2))
    if vectors.rows * vectors.width * 2 > _available_host_bytes() * _HOST_SHARE:
        return None
    return StreamedSearch(vectors, source, metric=metric, device=device, max_bytes=available)


def fits_on_device(vectors: Vectors, device: torch.device, key_dtype: str) -> bool:
    """Whether all keys fit on a device, in float16 or int8, with room to search them."""
    resident: list[Tensor] = getattr(vectors, "resident_keys", None) or []
    available = _free_bytes(device) + sum(piece.nbytes for piece in resident)
    return bool(getattr(vectors, "half", False)) and _needed_bytes(vectors, key_dtype) <= available


def _needed_bytes(vectors: Vectors, key_dtype: str) -> int:
    """Return the bytes of the keys and of the scores of the smallest batch."""
    rows = padded(vectors.rows, KEY_MULTIPLE)
    key_bytes = padded(vectors.width, WIDTH_MULTIPLE) * (1 if key_dtype == "int8" else 2)
    return rows * (key_bytes + 4) + _MIN_BATCH * 4 * rows // 16


def _workspace(available: int) -> int:
    return max(_MIN_WORKSPACE, min(DEFAULT_WORKSPACE, available))


def _free_bytes(device: torch.device) -> int:
    """Return the bytes that keys and scores may take: most of what is free; the rest is for models."""
    if device.type != "cuda":
        return 1 << 40
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0] * _DEVICE_SHARE)


def _available_host_bytes() -> int:
    """Return the available host memory; practically unlimited where it is unknown."""
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
        """Yield (id of the first key, (n, D) float16) for a range of ids; threads read ahead."""
        vectors = cast(HalfVectors, self.vectors)

        def read(first: int) -> Tensor:
            out = torch.empty(min(_READ_BATCH, end - first), vectors.width, dtype=torch.float16, pin_memory=pin)
            vectors.read(first, out)
            return out

        firsts = range(begin, end, _READ_BATCH)
        if len(firsts) == 1:
            yield begin, read(begin)
            return
        with ThreadPoolExecutor(_READERS) as pool:
            pending: list[tuple[int, Future[Tensor]]] = []
            for first in firsts:
                pending.append((first, pool.submit(read, first)))
                if len(pending) > _READERS:
                    done, block = pending.pop(0)
                    yield done, block.result()
            for done, block in pending:
                yield done, block.result()


class _ResidentSource(_Source):
    """Keys that are on the device already, in consecutive pieces."""

    def __init__(self, vectors: Vectors, pieces: list[Tensor]) -> None:
        super().__init__(vectors)
        self.pieces = pieces

    def blocks(self, begin: int, end: int, *, pin: bool) -> Iterator[tuple[int, Tensor]]:  # noqa: ARG002
        first = 0
        for piece in self.pieces:
            for block in piece.split(_READ_BATCH):
                low, high = max(begin, first), min(end, first + len(block))
                if low < high:
                    yield low, block[low - first : high - first]
                first += len(block)


class _ConvertedSource(_Source):
    """Keys that are given in float32 but represented exactly in float16."""

    def __init__(self, vectors: Vectors, halves: Tensor) -> None:
        super().__init__(vectors)
        self.halves = halves

    def blocks(self, begin: int, end: int, *, pin: bool) -> Iterator[tuple[int, Tensor]]:  # noqa: ARG002
        for first in range(begin, end, _READ_BATCH):
            yield first, self.halves[first : min(first + _READ_BATCH, end)]


def _open_source(vectors: Vectors) -> _Source | None:
    """Return a lossless float16 reader of the vectors; None where there is none."""
    pieces: Any = getattr(vectors, "resident_keys", None)
    if pieces is not None:
        return _ResidentSource(vectors, pieces)
    if hasattr(vectors, "half"):
        return _Source(vectors) if cast(HalfVectors, vectors).half else None
    halves = torch.empty(vectors.rows, vectors.width, dtype=torch.float16)
    for first, block in vectors.chunks(_READ_BATCH):
        converted = halves[first : first + len(block)]
        converted.copy_(block)
        if not torch.equal(converted.to(block), block):  # NaN is not equal either
            return None
    return _ConvertedSource(vectors, halves)


def _copy_to_device(
    vectors: Vectors, source: _Source, *, metric: str, device: torch.device, key_dtype: str
) -> DeviceKeys:
    sample = _sample(vectors.rows, source).to(device)
    device_keys: DeviceKeys
    if key_dtype == "int8":
        device_keys = Int8Keys(vectors.rows, vectors.width, metric=metric, device=device, sample=sample)
    else:
        centre = sample.float().mean(0)
        device_keys = HalfKeys(vectors.rows, vectors.width, metric=metric, device=device, centre=centre)
    for first, block in source.blocks(0, vectors.rows, pin=device.type == "cuda"):
        device_keys.fill(first, block.to(device, non_blocking=True))
    return device_keys


def _sample(rows: int, source: _Source) -> Tensor:
    """Return some keys from evenly spaced places."""
    size = min(rows, max(1, _SAMPLE // _SAMPLE_PIECES))
    begins = {round(step * (rows - size) / max(1, _SAMPLE_PIECES - 1)) for step in range(_SAMPLE_PIECES)}
    blocks = [block for begin in sorted(begins) for _, block in source.blocks(begin, begin + size, pin=False)]
    return torch.cat(blocks)


class StreamedSearch:
    """Searches keys in host memory, chunk by chunk."""

    def __init__(self, vectors: Vectors, source: _Source, *, metric: str, device: torch.device, max_bytes: int) -> None:
        self._device = device
        self._metric = metric
        self._width = vectors.width
        # Two chunks being copied and one being searched, and the scores.
        fitting = max_bytes // 2 // (6 * padded(vectors.width, WIDTH_MULTIPLE) + 4)
        # Torch pins memory in powers of two.
        size = 1 << max(0, (fitting * vectors.width * 2).bit_length() - 1)
        self.chunk = max(_MIN_CHUNK, min(size // (2 * vectors.width), vectors.rows))
        self._copy_stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._workspace = _workspace(max_bytes // 4)
        self._centre = _sample(vectors.rows, source).float().mean(0)
        pin = device.type == "cuda"
        self._host: list[tuple[int, Tensor]] = []
        for begin in range(0, vectors.rows, self.chunk):
            end = min(begin + self.chunk, vectors.rows)
            chunk = torch.empty(end - begin, vectors.width, dtype=torch.float16, pin_memory=pin)
            for first, block in source.blocks(begin, end, pin=False):
                chunk[first - begin : first - begin + len(block)] = block
            self._host.append((begin, chunk))

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest of each of (B, D) float32 queries."""
        best: Neighbours | None = None
        for first, keys in self._chunks():
            nearest = FusedSearch(keys, workspace=self._workspace).search(queries, min(k, keys.rows))
            nearest = Neighbours(nearest.ids.where(nearest.ids < 0, nearest.ids + first), nearest.distances)
            best = nearest if best is None else merge_shards([best, nearest], [0, 0], k)
            del keys  # before the next chunk is copied
        assert best is not None
        return best

    def _chunks(self) -> Iterator[tuple[int, HalfKeys]]:
        """Yield (id of the first key, keys on the device), copying one chunk while another is searched."""
        side, gpu = self._copy_stream, self._copy_stream is not None
        main: Any = torch.cuda.current_stream(self._device) if gpu else None
        staged: list[Any] = [None, None]

        def copy(number: int) -> None:
            if gpu:
                side.wait_stream(main)  # the buffer is no longer read
            with torch.cuda.stream(side) if gpu else nullcontext():
                staged[number % 2] = self._host[number][1].to(self._device, non_blocking=True)

        copy(0)
        for number, (first, host) in enumerate(self._host):
            if gpu:
                main.wait_stream(side)
            keys = HalfKeys(len(host), self._width, metric=self._metric, device=self._device, centre=self._centre)
            for begin in range(0, len(host), _READ_BATCH):
                keys.fill(begin, staged[number % 2][begin : begin + _READ_BATCH])
            if gpu:
                staged[number % 2].record_stream(main)
            staged[number % 2] = None
            if number + 1 < len(self._host):
                copy(number + 1)
            yield first, keys
            del keys
