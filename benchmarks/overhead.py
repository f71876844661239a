"""Overhead of a store in evaluation and generation over the model alone, on the CPU.

    python benchmarks/overhead.py STORE TEXT.jsonl                # one process, both sides, ratios
    python benchmarks/overhead.py STORE TEXT.jsonl --limit 6000 --repeats 5

STORE is a store with its index (`knnlm index`); TEXT is held-out text. The model alone reads the same windows with its
head, and computes the probability of the same targets. Both sides alternate.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import knnlm
from knnlm.datastore.store import Datastore
from knnlm.evaluation.evaluate import Evaluation, first_documents
from knnlm.generation.causal import KnnForCausalLM
from knnlm.lm.causal import CausalLM
from knnlm.memories.base import Logits
from knnlm.mixture.mixture import Mixture


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    lm = CausalLM.open(options.model, device="cpu", dtype=options.dtype)
    store = Datastore.open(options.store)
    mixture = Mixture.open(store, lm, k=options.k, knn_temperature=options.knn_temperature, lmbda=options.lmbda)
    documents = list(first_documents(knnlm.read_documents(options.text), lm, options.limit))
    texts = [lm.encode(document.text) for document in documents]
    tokens = sum(map(len, texts))
    print(f"{store.key_count:,} keys, {tokens:,} tokens, k={options.k}, {options.threads} threads, {lm.model.dtype}")

    def alone() -> float:
        readings = lm.read(texts, mixture.window, batch_tokens=1024, logits=True)
        return float(sum(Logits(reading.logits).log_prob(reading.targets).double().sum() for reading in readings))

    def mixed() -> Evaluation:
        return mixture.evaluate(documents, batch_tokens=1024)

    found = mixed()
    assert abs(-alone() / tokens - math.log(found.base_perplexity)) < 1e-3, "the two sides read different text"
    print(f"perplexity {found.base_perplexity:.3f} → {found.perplexity:.3f}")
    show("evaluation", "ms a token", alternate(alone, mixed, options.repeats), tokens)
    model = KnnForCausalLM(mixture)
    for batch in (1, 8):
        ids = torch.randint(100, 40_000, (batch, 32))
        sides = (lambda: generate(lm.model, ids), lambda: generate(model, ids))  # noqa: B023
        show(f"generation, batch {batch}", "ms a step", alternate(*sides, options.repeats), 32)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--limit", type=int, default=4000, help="tokens of TEXT")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-k", type=int, default=1024)
    parser.add_argument("--knn-temperature", type=float, default=2.0)
    parser.add_argument("--lambda", dest="lmbda", type=float, default=0.4)
    return parser.parse_args()


def generate(model: Any, ids: torch.Tensor) -> None:
    settings = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
    model.generate(ids, attention_mask=torch.ones_like(ids), **settings)


def alternate(one: Callable[[], Any], other: Callable[[], Any], repeats: int) -> list[tuple[float, float]]:
    one(), other()
    return [(seconds(one), seconds(other)) for _ in range(repeats)]


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def show(what: str, unit: str, times: list[tuple[float, float]], count: int) -> None:
    alone, mixed = (statistics.median(column) * 1e3 / count for column in zip(*times, strict=True))
    ratios = sorted(b / a for a, b in times)
    middle = statistics.median(ratios)
    print(
        f"{what}: model alone {alone:.2f} {unit}, with the store {mixed:.2f}, "
        f"ratio {middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
