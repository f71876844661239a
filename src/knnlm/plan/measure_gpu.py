"""Measure the constants of a GPU: the forward pass, tokenising and writing beside it, and exact search."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from knnlm.corpus import Document
from knnlm.demo import split_topics
from knnlm.index.gpu.keys import HalfKeys, Int8Keys
from knnlm.ingest.build import build
from knnlm.ingest.pipeline import CollectedKeys, SegmentWriter, collect_keys, tokenise_ahead
from knnlm.ingest.segment_builder import default_batch_tokens
from knnlm.lm.causal import CausalLM
from knnlm.lm.compile import compiled
from knnlm.plan.constants import GpuConstants
from knnlm.plan.cost import K
from knnlm.plan.model import shape_of

_BLOCK = 1 << 18  # keys that are made at once
_CLUSTERS = 4096


@dataclass(frozen=True)
class GpuEffort:
    """How much is measured."""

    windows: int = 256  # of a forward pass
    text_copies: int = 40  # of the demo's text, to tokenise
    segments: int = 3  # that are written at the same time
    segment_keys: int = 1 << 18
    few_keys: int = 1 << 16  # of a search that waits for the host
    keys: int = 1 << 24  # of a search that reads them, and half as many
    queries: int = 1024
    repeats: int = 5
    singles: int = 101  # single queries


FULL_GPU = GpuEffort()


def measure_gpu(lm: CausalLM, folder: Path, *, effort: GpuEffort = FULL_GPU) -> tuple[dict[str, float], GpuConstants]:
    """Return the seconds of this model for each token, and the constants of its GPU."""
    text = [document.text for document in split_topics().store]
    documents = [
        Document(f"{copy}-{number}", "plan", f"{copy} {one}")
        for copy in range(effort.text_copies)
        for number, one in enumerate(text)
    ]
    # Before any other pass: the first one of a process loads the kernels, which takes seconds.
    begin = time.perf_counter()
    build(documents[:1], folder / "start", lm=lm, compile=False).close()
    start = time.perf_counter() - begin
    shutil.rmtree(folder / "start")
    begin = time.perf_counter()
    tokenised = [tokens for _, tokens in tokenise_ahead(documents, lm)]
    total = sum(map(len, tokenised))
    tokenise = (time.perf_counter() - begin) / total
    forward = _forward(lm, np.concatenate([np.asarray(tokens) for tokens in tokenised]), effort)
    flops = shape_of(lm.model, lm.name).flops(lm.window().context)
    models = {"cuda": forward.plain, "cuda-compiled": forward.fast}
    halves = _search(lm.width, lm.device, "float16", effort)
    bytes_ = _search(lm.width, lm.device, "int8", effort)
    store, store_one = _store(lm, folder, effort)
    return models, GpuConstants(
        flop=forward.plain / flops,
        compiled_flop=forward.fast / flops,
        compile=forward.compilation,
        tokenise=tokenise,
        store=store,
        store_one=store_one,
        start=start,
        launch=halves.launch,
        search=halves.call,
        query=halves.query,
        half_read=halves.read,
        half=halves.product,
        int8_read=bytes_.read,
        int8=bytes_.product,
        work_bytes=forward.work_bytes,
        compiled_work_bytes=forward.compiled_work_bytes,
    )


@dataclass(frozen=True)
class _Forward:
    plain: float  # seconds for a token
    fast: float  # the same, compiled
    compilation: float  # seconds
    work_bytes: float
    compiled_work_bytes: float


def _forward(lm: CausalLM, tokens: np.ndarray, effort: GpuEffort) -> _Forward:
    """Measure the forward pass over full windows, as it is and compiled."""
    window, batch_tokens = lm.window(), default_batch_tokens(lm)
    tokens = np.resize(tokens, effort.windows * window.context)
    documents = [part.tolist() for part in np.split(tokens, effort.windows)]

    def read() -> None:
        collect_keys(lm, documents, window, batch_tokens=batch_tokens, offset=None, advance=lambda _: None)

    before, count = _allocated(lm.device), len(tokens)

    def work_bytes() -> float:
        return max(0.0, _peak(lm.device) - before - count * lm.width * 2)

    _reset_peak(lm.device)
    plain, plain_bytes = _shortest(read, lm.device, effort.repeats), work_bytes()
    _reset_peak(lm.device)
    shape = (max(1, batch_tokens // window.context), window.context)
    with compiled(lm.model, lm.key_layer, shape):
        first = _shortest(read, lm.device, 0)
        fast = _shortest(read, lm.device, effort.repeats)
        fast_bytes = work_bytes()
    compilation = max(0.0, first - fast)
    return _Forward(plain / count, min(plain, fast) / count, compilation, plain_bytes, fast_bytes)


def _store(lm: CausalLM, folder: Path, effort: GpuEffort) -> tuple[float, float]:
    """Measure what copying a byte of keys from the device, hashing and writing it takes: beside others, and alone."""
    keys = torch.randn(effort.segment_keys, lm.width, device=lm.device).half()
    values = np.zeros(len(keys), np.int32)
    collected = CollectedKeys(keys, keys.abs().amax().float(), None)
    _synchronise(lm.device)  # threads copy on streams of their own

    def seconds(segments: int) -> float:
        begin = time.perf_counter()
        with SegmentWriter() as writer:
            places = [folder / f"segment-{number}" for number in range(segments)]
            for written in [writer.submit(place, collected, values) for place in places]:
                written.result()
        taken = time.perf_counter() - begin
        for place in places:
            shutil.rmtree(place)
        return taken / (segments * keys.nbytes)

    together, alone = ([seconds(segments) for _ in range(2)] for segments in (effort.segments, 1))
    return min(together), min(alone)


@dataclass(frozen=True)
class _Search:
    """Seconds of a search."""

    launch: float  # of a call that waits for the host
    call: float  # of a call on the device
    query: float
    read: float  # of a number that is read
    product: float  # of a number that is compared


def _search(width: int, device: torch.device, dtype: str, effort: GpuEffort) -> _Search:
    """Measure one query and many, over few keys and over so many that the device is slower than the host."""
    room = _free_memory(device) // (4 * width * 2)
    keys = min(effort.keys, max(2, room))
    queries = _clustered(effort.queries, width, device, seed=2)
    few = _search_times(min(effort.few_keys, keys), queries[:1], dtype, effort)
    small, large = (_search_times(count, queries, dtype, effort) for count in (keys // 2, keys))
    more = large.numbers - small.numbers
    read = max(0.0, large.one - small.one) / more
    product = max(0.0, large.many - small.many) / (effort.queries * more)
    call = max(0.0, small.one - small.numbers * read)
    query = max(0.0, (small.many - call) / effort.queries - small.numbers * product)
    return _Search(few.one, call, query, read, product)


@dataclass(frozen=True)
class _SearchTimes:
    numbers: int  # of all keys
    one: float
    many: float


def _search_times(count: int, queries: Tensor, dtype: str, effort: GpuEffort) -> _SearchTimes:
    """Measure single queries, and all at once, over so many keys."""
    from knnlm.index.gpu.search import FusedSearch  # needs Triton

    device_keys = _device_keys(count, queries.shape[1], queries.device, dtype)
    searcher, k = FusedSearch(device_keys), min(K, count)

    def times(batches: Sequence[Tensor]) -> list[float]:
        return _times(lambda number: searcher.search(batches[number], k), queries.device, len(batches))

    one = statistics.median(times([queries[number % len(queries)][None] for number in range(effort.singles)]))
    return _SearchTimes(device_keys.keys.numel(), one, min(times([queries] * effort.repeats)))


def _clustered(count: int, width: int, device: torch.device, *, seed: int) -> Tensor:
    """Return vectors in clusters, whose variances fall with the rank, like those of a model."""
    generator = torch.Generator(device=device).manual_seed(7)
    spread = torch.arange(1, width + 1, device=device).float().rsqrt()
    centres = torch.randn(_CLUSTERS, width, device=device, generator=generator) * spread * 3
    generator.manual_seed(seed)
    which = torch.randint(_CLUSTERS, (count,), device=device, generator=generator)
    return centres[which] + torch.randn(count, width, device=device, generator=generator) * spread


def _device_keys(count: int, width: int, device: torch.device, dtype: str) -> HalfKeys | Int8Keys:
    sample = _clustered(min(count, 1 << 14), width, device, seed=1)
    keys: HalfKeys | Int8Keys
    if dtype == "int8":
        keys = Int8Keys(count, width, metric="l2", device=device, sample=sample)
    else:
        keys = HalfKeys(count, width, metric="l2", device=device, centre=sample.mean(0))
    for first in range(0, count, _BLOCK):
        keys.fill(first, _clustered(min(_BLOCK, count - first), width, device, seed=3 + first).half())
    return keys


def _shortest(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the shortest time of some repeats after a warm-up; that of the warm-up without repeats."""
    taken = _times(lambda _: work(), device, repeats, warm_up=repeats > 0)
    return min(taken)


def _times(work: Callable[[int], object], device: torch.device, repeats: int, *, warm_up: bool = True) -> list[float]:
    """Return the time of each repeat, to which its number is passed."""
    taken = []
    for number in [0] * warm_up + list(range(max(1, repeats))):
        _synchronise(device)
        begin = time.perf_counter()
        work(number)
        _synchronise(device)
        taken.append(time.perf_counter() - begin)
    return taken[warm_up:]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _free_memory(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 1 << 40


def _allocated(device: torch.device) -> float:
    return float(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0.0


def _peak(device: torch.device) -> float:
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0.0
