"""Measure the constants of a GPU: the forward pass, tokenising and writing beside it, and exact search."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
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


@dataclass(frozen=True)
class GpuEffort:
    """How much is measured."""

    windows: int = 256  # of a forward pass
    text_copies: int = 40  # of the demo's text, to tokenise
    segments: int = 3  # that are written at the same time
    segment_keys: int = 1 << 18
    keys: tuple[int, int] = (1 << 20, 1 << 22)  # that are searched
    queries: int = 1024
    repeats: int = 5


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
    call, query, half_read, half = _search(lm.width, lm.device, "float16", effort)
    _, _, int8_read, int8 = _search(lm.width, lm.device, "int8", effort)
    return models, GpuConstants(
        flop=forward.plain / flops,
        compiled_flop=forward.fast / flops,
        compile=forward.compilation,
        tokenise=tokenise,
        store=_store(lm, folder, effort),
        start=start,
        search=call,
        query=query,
        half_read=half_read,
        half=half,
        int8_read=int8_read,
        int8=int8,
        work_bytes=forward.work_bytes,
    )


@dataclass(frozen=True)
class _Forward:
    plain: float  # seconds for a token
    fast: float  # the same, compiled
    compilation: float  # seconds
    work_bytes: float


def _forward(lm: CausalLM, tokens: np.ndarray, effort: GpuEffort) -> _Forward:
    """Measure the forward pass over full windows, as it is and compiled."""
    window, batch_tokens = lm.window(), default_batch_tokens(lm)
    tokens = np.resize(tokens, effort.windows * window.context)
    documents = [part.tolist() for part in np.split(tokens, effort.windows)]

    def read() -> None:
        collect_keys(lm, documents, window, batch_tokens=batch_tokens, offset=None, advance=lambda _: None)

    _reset_peak(lm.device)
    before = _allocated(lm.device)
    plain = _shortest(read, lm.device, effort.repeats)
    keys = len(tokens) * lm.width * 2
    work_bytes = max(0.0, _peak(lm.device) - before - keys)
    shape = (max(1, batch_tokens // window.context), window.context)
    with compiled(lm.model, lm.key_layer, shape):
        first = _shortest(read, lm.device, 0)
        fast = _shortest(read, lm.device, effort.repeats)
    count = len(tokens)
    return _Forward(plain / count, min(plain, fast) / count, max(0.0, first - fast), work_bytes)


def _store(lm: CausalLM, folder: Path, effort: GpuEffort) -> float:
    """Measure what copying a byte of keys from the device, hashing and writing it takes."""
    keys = torch.randn(effort.segment_keys, lm.width, device=lm.device).half()
    values = np.zeros(len(keys), np.int32)
    collected = CollectedKeys(keys, keys.abs().amax().float(), None)
    _synchronise(lm.device)  # threads copy on streams of their own
    taken = []
    for _ in range(2):
        begin = time.perf_counter()
        with SegmentWriter() as writer:
            places = [folder / f"segment-{number}" for number in range(effort.segments)]
            for written in [writer.submit(place, collected, values) for place in places]:
                written.result()
        taken.append(time.perf_counter() - begin)
        for number in range(effort.segments):
            shutil.rmtree(folder / f"segment-{number}")
    return min(taken) / (effort.segments * keys.nbytes)


def _search(width: int, device: torch.device, dtype: str, effort: GpuEffort) -> tuple[float, float, float, float]:
    """Return the seconds of a call, of a query, of a number that is read, and of a number that is compared."""
    queries = torch.randn(effort.queries, width, device=device)
    small, large = (_search_times(count, queries, dtype, effort) for count in effort.keys)
    more = large.numbers - small.numbers
    read = max(0.0, large.one - small.one) / more
    product = max(0.0, large.many - small.many) / (effort.queries * more)
    call = max(0.0, small.one - small.numbers * read)
    query = max(0.0, (small.many - call) / effort.queries - small.numbers * product)
    return call, query, read, product


@dataclass(frozen=True)
class _SearchTimes:
    numbers: int  # of all keys
    one: float
    many: float


def _search_times(count: int, queries: Tensor, dtype: str, effort: GpuEffort) -> _SearchTimes:
    """Measure one query, and all, over so many keys."""
    from knnlm.index.gpu.search import FusedSearch  # needs Triton

    device_keys = _device_keys(count, queries.shape[1], queries.device, dtype)
    searcher, k = FusedSearch(device_keys), min(K, count)

    def seconds(some: Tensor) -> float:
        return _shortest(lambda: searcher.search(some, k), queries.device, effort.repeats)

    return _SearchTimes(device_keys.keys.numel(), seconds(queries[:1]), seconds(queries))


def _device_keys(count: int, width: int, device: torch.device, dtype: str) -> HalfKeys | Int8Keys:
    generator = torch.Generator(device=device).manual_seed(0)

    def block(size: int) -> Tensor:
        return torch.randn(size, width, device=device, generator=generator)

    sample = block(min(count, 1 << 14))
    keys: HalfKeys | Int8Keys
    if dtype == "int8":
        keys = Int8Keys(count, width, metric="l2", device=device, sample=sample)
    else:
        keys = HalfKeys(count, width, metric="l2", device=device, centre=sample.mean(0))
    for first in range(0, count, _BLOCK):
        keys.fill(first, block(min(_BLOCK, count - first)).half())
    return keys


def _shortest(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the shortest time of some repeats after a warm-up; that of the warm-up without repeats."""
    taken = []
    for _ in range(repeats + 1):
        _synchronise(device)
        begin = time.perf_counter()
        work()
        _synchronise(device)
        taken.append(time.perf_counter() - begin)
    return min(taken[1:] or taken)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _allocated(device: torch.device) -> float:
    return float(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0.0


def _peak(device: torch.device) -> float:
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0.0
