"""Choose k, τ and λ from a trace. Knows nothing about models or how neighbours are found.

For every k and τ, the vote for the target is a sum over its hits; for every λ, the likelihood is one logarithm a token:

    log p = m + log((1-λ)·e^(log p_LM - m) + λ·e^(log p_kNN - m)),   m = max(log p_LM, log p_kNN)
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.corpus import Document
from knnlm.datastore import Datastore
from knnlm.datastore.builder import writer_lock
from knnlm.datastore.catalog import FILE, Catalog
from knnlm.datastore.segment import writing
from knnlm.errors import DatastoreError
from knnlm.evaluation import Evaluation, Tally, summary
from knnlm.memory import check_vote
from knnlm.mixture import Mixture, check_lambda
from knnlm.progress import Progress, silent
from knnlm.trace import Trace, record

_BLOCK = 1024  # tokens at a time
KS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LAMBDAS = tuple(round(0.01 * step, 2) for step in range(100))


@dataclass(frozen=True)
class Sweep:
    """The perplexity of a trace for every setting."""

    ks: tuple[int, ...]
    temperatures: tuple[float, ...]
    lambdas: tuple[float, ...]
    perplexity: NDArray[np.float64]  # (len(ks), len(temperatures), len(lambdas))
    base_perplexity: float
    tokens: int
    documents: int
    remembered: int  # documents that are in the memory themselves: what is chosen on them suits no other text
    seconds: float

    @property
    def best(self) -> tuple[int, float, float, float]:
        """Give k, τ, λ and their perplexity."""
        k, temperature, weight = np.unravel_index(self.perplexity.argmin(), self.perplexity.shape)
        return (
            self.ks[k],
            self.temperatures[temperature],
            self.lambdas[weight],
            float(self.perplexity[k, temperature, weight]),
        )

    def at_edge(self) -> list[str]:
        """Name the settings whose best value is the last one tried, so that a wider sweep may find a better one."""
        k, temperature, weight = self.best[:3]
        edges = {
            "temperature": temperature in (self.temperatures[0], self.temperatures[-1]) and len(self.temperatures) > 1,
            "lambda": weight == self.lambdas[-1] and len(self.lambdas) > 1,
            "k": k == self.ks[-1] and len(self.ks) > 1,
        }
        return [name for name, edge in edges.items() if edge and weight > 0]


@dataclass(frozen=True)
class Grid:
    """The settings to try, in order; None is chosen by what was seen."""

    ks: tuple[int, ...] | None
    temperatures: tuple[float, ...] | None
    lambdas: tuple[float, ...]

    @classmethod
    def of(cls, ks: Sequence[int] | None, temperatures: Sequence[float] | None, lambdas: Sequence[float]) -> Grid:
        """Sort the values and refuse those out of range."""
        for k in ks or ():
            check_vote(k, 1.0)
        for temperature in temperatures or ():
            check_vote(1, temperature)
        for weight in lambdas:
            check_lambda(weight)
        return cls(
            tuple(sorted(set(ks))) if ks else None,
            tuple(sorted(set(temperatures))) if temperatures else None,
            tuple(sorted(set(lambdas))),
        )


def sweep(
    trace: Trace,
    *,
    ks: Sequence[int] | None = None,
    temperatures: Sequence[float] | None = None,
    lambdas: Sequence[float] = LAMBDAS,
) -> Sweep:
    """Compute the perplexity of every combination of settings; a k beyond the trace's is the trace's."""
    begin = time.perf_counter()
    grid = Grid.of(ks, temperatures, lambdas)
    widest = trace.distances.shape[1]
    chosen_ks = tuple(sorted({min(k, widest) for k in grid.ks or (*KS, widest)}))
    chosen = grid.temperatures or temperature_grid(trace)
    weights = torch.tensor(grid.lambdas, dtype=torch.float32)
    sums = torch.zeros(len(chosen_ks), len(chosen), len(weights), dtype=torch.float64)
    base = 0.0
    for log_p, distances, hits in _blocks(trace):
        base += float(log_p.double().sum())
        for number, temperature in enumerate(chosen):
            votes = target_votes(distances, hits, chosen_ks, temperature)
            sums[:, number] += _mixed_sums(log_p, votes, weights)
    return Sweep(
        ks=chosen_ks,
        temperatures=chosen,
        lambdas=grid.lambdas,
        perplexity=(-sums / max(1, len(trace))).exp().numpy(),
        base_perplexity=math.exp(-base / max(1, len(trace))),
        tokens=len(trace),
        documents=trace.facts["documents"],
        remembered=trace.facts["remembered"],
        seconds=time.perf_counter() - begin,
    )


def target_votes(distances: Tensor, hits: Tensor, ks: Sequence[int], temperature: float) -> Tensor:
    """Give (len(ks), n) log p_kNN of the target: the share of the weight of the k nearest that hits have."""
    # Relative to the nearest: weights do not change, and the largest exponent is 0.
    weights = ((distances[:, :1] - distances) / temperature).exp_()  # (n, K)
    weights.nan_to_num_(nan=0.0)  # a row without any neighbour: inf - inf
    total = weights.new_zeros(len(ks), len(distances))
    hit = torch.zeros_like(total)
    last = 0
    for number, k in enumerate(ks):
        piece = slice(last, k)
        total[number] = weights[:, piece].sum(1)
        hit[number] = (weights[:, piece] * hits[:, piece]).sum(1)
        last = k
    total, hit = total.cumsum(0), hit.cumsum(0)
    votes = (hit / total).log()
    return votes.masked_fill(total == 0, torch.nan)  # no neighbour at all: no opinion


def _mixed_sums(log_p: Tensor, votes: Tensor, weights: Tensor) -> Tensor:
    """Give (len(ks), len(weights)) sums over the tokens of log((1-λ)p_LM + λp_kNN)."""
    votes = torch.where(votes.isnan(), log_p, votes)  # who has no opinion leaves the word to the model
    largest = torch.maximum(log_p, votes)  # (K, n)
    model, memory = (log_p - largest).exp(), (votes - largest).exp()
    sums = torch.empty(len(votes), len(weights), dtype=torch.float64)
    for number, weight in enumerate(weights.tolist()):
        sums[:, number] = torch.lerp(model, memory, weight).log_().sum(1).double()
    sums += largest.double().sum(1)[:, None]
    # With all the weight on one side, the other side's exponential is no floor against underflow.
    sums[:, weights == 0] = log_p.double().sum()
    sums[:, weights == 1] = votes.double().sum(1)[:, None]
    return sums


def replay(trace: Trace, *, k: int, temperature: float, weight: float) -> Evaluation:
    """Evaluate a trace with one setting: what `evaluate` gives, without the model."""
    begin = time.perf_counter()
    check_vote(k, temperature)
    check_lambda(weight)
    sums = torch.zeros(3, dtype=torch.float64)
    for log_p, distances, hits in _blocks(trace):
        votes = target_votes(distances, hits, [min(k, distances.shape[1])], temperature)
        mixed = _mixed_sums(log_p, votes, torch.tensor([weight]))
        best = torch.fmax(log_p, votes[0])
        sums += torch.stack([log_p.double().sum(), mixed[0, 0], best.double().sum()])
    counts = {name: trace.facts[name] for name in ("documents", "tokens", "words", "characters", "bytes", "remembered")}
    settings = (k, temperature, weight, trace.facts["metric"])
    return summary(Tally(**counts), sums.tolist(), settings, seconds=time.perf_counter() - begin)


def _blocks(trace: Trace) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Give (log p_LM, distances, hits) of some tokens at a time."""
    for start in range(0, len(trace), _BLOCK):
        part = slice(start, start + _BLOCK)
        yield (
            torch.from_numpy(np.array(trace.log_p[part])),
            torch.from_numpy(np.array(trace.distances[part])),
            torch.from_numpy(trace.values[part] == trace.targets[part, None]),
        )


def temperature_grid(trace: Trace, count: int = 20) -> tuple[float, ...]:
    """Choose temperatures by how far apart neighbours are, which differs a thousandfold between models."""
    sample = np.array(trace.distances[:: max(1, len(trace) // 2000)])
    last = np.where(np.isfinite(sample), sample, -np.inf).max(1, initial=-np.inf)
    spread = (last - sample[:, 0])[np.isfinite(last) & np.isfinite(sample[:, 0])]
    typical = float(np.median(spread)) if len(spread) else 1.0
    typical = typical if typical > 0 else 1.0
    grid = np.geomspace(typical / 300, typical * 3, count)
    return tuple(sorted({float(f"{value:.3g}") for value in grid}))


def tune(
    mixture: Mixture,
    documents: Iterable[Document],
    *,
    sources: Sequence[str] = (),
    limit: int | None = None,
    ks: Sequence[int] | None = None,
    temperatures: Sequence[float] | None = None,
    lambdas: Sequence[float] = LAMBDAS,
    total: int | None = None,
    progress: Progress = silent,
) -> Sweep:
    """Read a text, choose k, τ and λ on it, and store the choice in the memory; `total` is its characters."""
    path = mixture.memory.store.path
    grid = Grid.of(ks, temperatures, lambdas)
    # Locked from the beginning, so that nobody waits for a choice that cannot be stored.
    with writer_lock(path), _scratch(path) as folder:
        trace = record(
            mixture,
            documents,
            folder / "trace",
            k=max(grid.ks or KS),
            sources=sources,
            limit=limit,
            total=total,
            progress=progress,
        )
        result = sweep(trace, ks=grid.ks, temperatures=grid.temperatures, lambdas=grid.lambdas)
        _store_choice(path, result, trace)
    return result


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """Make room for a trace on the memory's own disk, and remove what a killed process left there."""
    for leftover in path.glob(".trace-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with writing(path):
        scratch = tempfile.TemporaryDirectory(prefix=".trace-", dir=path)
    with scratch as folder:
        yield Path(folder)


def choose(path: Path, result: Sweep, trace: Trace) -> None:
    """Store the best settings of a sweep in the memory that the trace was made with."""
    fingerprint = Datastore.open(path).fingerprint
    if fingerprint != trace.facts["fingerprint"]:
        raise DatastoreError(
            f"The trace was made with another memory ({trace.facts['memory']}, {trace.facts['fingerprint']}) than "
            f"{path} ({fingerprint}). Make one with: knnlm eval {path} TEXT --save-trace"
        )
    with writer_lock(path):
        _store_choice(path, result, trace)


def _store_choice(path: Path, result: Sweep, trace: Trace) -> None:
    k, temperature, weight, perplexity = result.best
    catalog = Catalog.open(path / FILE, write=True)
    try:
        catalog.put(
            choice={
                "k": k,
                "temperature": temperature,
                "lambda": weight,
                "metric": trace.facts["metric"],
                "chosen_on": trace.facts["text"],
                "tokens": result.tokens,
                "base_perplexity": result.base_perplexity,
                "perplexity": perplexity,
            }
        )
    finally:
        catalog.close()
