"""Cost of a store on this machine, compared with the model alone.

Both sides of every ratio run in this process, one after the other. A store of some thousand tokens is built, evaluated
and generated with. Searches are timed over more keys than the model could compute in that time: stored keys, each moved
by a part of the difference between two others, so that they keep the spectrum of real keys.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knnlm.corpus import Document
from knnlm.datastore.store import Datastore
from knnlm.demo import split_topics
from knnlm.generation.causal import KnnForCausalLM
from knnlm.index.base import Index
from knnlm.index.exact import ExactIndex
from knnlm.index.factory import build_approximate, default_spec
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.memories.knn import KnnMemory
from knnlm.mixture.mixture import Mixture
from knnlm.progress import Progress, silent

_DOCUMENT_CHARACTERS = 2000
_NOISE_SCALE = 0.5  # of the difference of two stored keys that is added to a third one


@dataclass(frozen=True)
class Size:
    """Amount of work that is measured."""

    characters: int  # of stored text; a quarter as many are evaluated
    keys: int  # to search
    queries: int
    generated: int  # tokens
    repeats: int


QUICK = Size(characters=5_000, keys=30_000, queries=256, generated=8, repeats=2)
FULL = Size(characters=60_000, keys=300_000, queries=1024, generated=48, repeats=5)


def bench(lm: CausalLM, folder: Path, *, size: Size = QUICK, progress: Progress = silent) -> dict[str, Any]:
    """Measure a model with and without a store, which is built in this folder."""
    lm.require_text("The benchmark")
    parts = split_topics(size.characters, max(2000, size.characters // 4))
    figures: dict[str, Any] = {"machine": machine()}
    with progress("measuring", total=4, unit="parts") as advance:
        figures["build"], store = _measure_build(lm, _cut(parts.store), folder)
        advance(1)
        mixture = Mixture(lm, KnnMemory(store, ExactIndex(store.keys), k=1024, knn_temperature=2.0), lmbda=0.25)
        steps: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            ("evaluation", lambda: _measure_evaluation(mixture, _cut(parts.test), size)),
            ("generation", lambda: _measure_generation(mixture, size)),
            ("search", lambda: _measure_search(store, size)),
        ]
        for name, work in steps:
            figures[name] = work()
            advance(1)
    store.close()
    return figures


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _measure_build(lm: CausalLM, documents: list[Document], folder: Path) -> tuple[dict[str, Any], Datastore]:
    """Build a store, and run the same forward passes without storing anything."""
    tokens = [lm.encode(document.text) for document in documents]

    def forward(*, logits: bool) -> float:
        begin = time.perf_counter()
        for _ in lm.read(tokens, lm.window(), logits=logits):
            pass
        return time.perf_counter() - begin

    forward(logits=False)  # the first pass of a process is slower
    without_head, with_head = forward(logits=False), forward(logits=True)
    begin = time.perf_counter()
    store = build(documents, folder, lm=lm)
    built = time.perf_counter() - begin
    figures = {
        "tokens": store.entry_count,
        "tokens_per_second": store.entry_count / built,
        "forward_tokens_per_second": store.entry_count / with_head,
        "without_head_tokens_per_second": store.entry_count / without_head,
        "ratio_to_forward_without_head": without_head / built,
        "bytes_per_token": store.bytes / max(1, store.entry_count),
    }
    return figures, store


def _measure_evaluation(mixture: Mixture, documents: list[Document], size: Size) -> dict[str, Any]:
    """Evaluate a text with and without the store."""
    tokens = [mixture.lm.encode(document.text) for document in documents]
    count = sum(map(len, tokens))

    def plain() -> None:
        for reading in mixture.lm.read(tokens, mixture.lm.window(), batch_tokens=1024):
            assert reading.logits is not None
            reading.logits.float().logsumexp(1)

    with_memory = times_of(lambda: mixture.evaluate(documents), size.repeats)
    without = times_of(plain, size.repeats)
    return {
        "tokens": count,
        "ms_per_token": statistics.median(with_memory) / count * 1e3,
        "model_ms_per_token": statistics.median(without) / count * 1e3,
        "ratio_to_model": statistics.median(with_memory) / statistics.median(without),
        "spread": spread(with_memory),
    }


def _measure_generation(mixture: Mixture, size: Size) -> dict[str, Any]:
    """Generate some tokens with and without the store, one text at a time."""
    ids = torch.tensor([mixture.lm.prompt("The expression is evaluated once, when")], device=mixture.lm.device)
    settings = {"max_new_tokens": size.generated, "min_new_tokens": size.generated, "do_sample": False}
    mixed = KnnForCausalLM(mixture)

    def generate(model: Any) -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)

    with_memory = times_of(lambda: generate(mixed), size.repeats)
    without = times_of(lambda: generate(mixture.lm.model), size.repeats)
    return {
        "tokens": size.generated,
        "ms_per_token": statistics.median(with_memory) / size.generated * 1e3,
        "model_ms_per_token": statistics.median(without) / size.generated * 1e3,
        "ratio_to_model": statistics.median(with_memory) / statistics.median(without),
        "spread": spread(with_memory),
    }


def _measure_search(store: Datastore, size: Size) -> dict[str, Any]:
    """Search synthetic keys exactly, and with the index that `auto` would build."""
    keys = SyntheticVectors(store, size.keys, seed=0)
    queries = SyntheticVectors(store, size.queries, seed=1).take(torch.arange(size.queries))
    exact = ExactIndex(keys)
    figures: dict[str, Any] = {"keys": keys.rows, "synthetic": True, "k": 1024, "index": default_spec(keys.rows)}
    slow = times_of(lambda: exact.search(queries, 1024), size.repeats)
    figures["exact_ms_per_query"] = statistics.median(slow) / size.queries * 1e3
    begin = time.perf_counter()
    # With so few keys that an index would not pay, both sides are exact.
    spec = figures["index"]
    index: Index = exact if spec == "exact" else build_approximate(keys, spec)
    figures["index_seconds"] = time.perf_counter() - begin
    fast = times_of(lambda: index.search(queries, 1024), size.repeats)
    figures["ms_per_query"] = statistics.median(fast) / size.queries * 1e3
    figures["ratio_exact_to_index"] = statistics.median(slow) / statistics.median(fast)
    figures["spread"] = spread(fast)
    expected, ids = exact.search(queries, 1024).ids, index.search(queries, 1024).ids
    hits = [torch.isin(one, other).float().mean().item() for one, other in zip(expected, ids, strict=True)]
    figures["recall"] = statistics.fmean(hits)
    return figures


class SyntheticVectors:
    """Any number of keys derived from those of a store, held in memory."""

    def __init__(self, store: Datastore, rows: int, *, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        real = store.take(torch.arange(min(store.key_count, 8192)))
        base, plus, minus = torch.randint(len(real), (3, rows), generator=generator)
        self.keys = (real[base] + _NOISE_SCALE * (real[plus] - real[minus])).half()
        self.rows = rows
        self.width = real.shape[1]

    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Iterate over (number of the first key, (n, D) float32) in order."""
        for first in range(0, self.rows, size):
            yield first, self.keys[first : min(first + size, self.rows)].float()

    def take(self, ids: Tensor) -> Tensor:
        """Return these keys, (…) → (…, D) float32; zeros for an id below 0."""
        return self.keys[ids.clamp(min=0)].float() * (ids >= 0)[..., None]


def _cut(documents: list[Document]) -> list[Document]:
    """Cut long documents, so that windows have similar lengths."""
    return [
        Document(f"{document.id}:{at}", document.source, document.text[at : at + _DOCUMENT_CHARACTERS])
        for document in documents
        for at in range(0, len(document.text), _DOCUMENT_CHARACTERS)
    ]


def times_of(work: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each repeat, after a warm-up."""
    work()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return seconds


def spread(seconds: list[float]) -> float:
    """Return the difference of the slowest and the fastest, relative to the median."""
    return (max(seconds) - min(seconds)) / statistics.median(seconds)
