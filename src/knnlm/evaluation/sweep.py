"""Try every k, τ and λ of one memory on a trace. Knows nothing about models or how neighbours are found.

For every k and τ, the vote for the target is a sum over its hits; for every λ, the likelihood is one logarithm a token:

    log p = m + log((1-λ)·e^(log p_LM - m) + λ·e^(log p_kNN - m)),   m = max(log p_LM, log p_kNN)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.evaluation.evaluate import Evaluation, Totals, summary
from knnlm.evaluation.trace import MemoryTrace, Trace, tensor_of
from knnlm.memories.voting import check_vote
from knnlm.mixture.weights import check_lambda

KS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

LAMBDAS = tuple(round(0.01 * step, 2) for step in range(100))


@dataclass(frozen=True)
class Sweep:
    """The perplexity of a trace for every setting."""

    ks: tuple[int, ...]
    knn_temperatures: tuple[float, ...]
    lambdas: tuple[float, ...]
    perplexity: NDArray[np.float64]  # (len(ks), len(knn_temperatures), len(lambdas))
    base_perplexity: float
    tokens: int
    documents: int
    remembered: int  # documents that are in the memory themselves: what is chosen on them suits no other text
    seconds: float

    @property
    def best(self) -> tuple[int, float, float, float]:
        """Give k, τ, λ and their perplexity."""
        k, knn_temperature, lmbda = np.unravel_index(self.perplexity.argmin(), self.perplexity.shape)
        return (
            self.ks[k],
            self.knn_temperatures[knn_temperature],
            self.lambdas[lmbda],
            float(self.perplexity[k, knn_temperature, lmbda]),
        )

    @property
    def setting(self) -> tuple[int, float]:
        """Give the best k and τ of those where the memory has a say at all."""
        heard = self.perplexity[:, :, np.array(self.lambdas) > 0]
        if not heard.size:
            return self.best[:2]
        k, knn_temperature, _ = np.unravel_index(heard.argmin(), heard.shape)
        return self.ks[k], self.knn_temperatures[knn_temperature]

    @property
    def _ends(self) -> tuple[float, float]:
        return self.knn_temperatures[0], self.knn_temperatures[-1]

    def at_edge(self) -> list[str]:
        """Name the settings whose best value is the last one tried, so that a wider sweep may find a better one."""
        k, knn_temperature, lmbda = self.best[:3]
        edges = {
            "knn_temperature": knn_temperature in (self.knn_temperatures[0], self.knn_temperatures[-1])
            and len(self.knn_temperatures) > 1,
            "lambda": lmbda == self.lambdas[-1] and len(self.lambdas) > 1,
            "k": k == self.ks[-1] and len(self.ks) > 1,
        }
        return [name for name, edge in edges.items() if edge and lmbda > 0]


@dataclass(frozen=True)
class Grid:
    """The settings to try, in order; None is chosen by what was seen."""

    ks: tuple[int, ...] | None
    knn_temperatures: tuple[float, ...] | None
    lambdas: tuple[float, ...]

    @classmethod
    def of(cls, ks: Sequence[int] | None, knn_temperatures: Sequence[float] | None, lambdas: Sequence[float]) -> Grid:
        """Sort the values and refuse those out of range."""
        for k in ks or ():
            check_vote(k, 1.0)
        for knn_temperature in knn_temperatures or ():
            check_vote(1, knn_temperature)
        for lmbda in lambdas:
            check_lambda(lmbda)
        return cls(
            tuple(sorted(set(ks))) if ks else None,
            tuple(sorted(set(knn_temperatures))) if knn_temperatures else None,
            tuple(sorted(set(lambdas))),
        )


def sweep(
    trace: Trace,
    *,
    memory: int = 0,
    ks: Sequence[int] | None = None,
    knn_temperatures: Sequence[float] | None = None,
    lambdas: Sequence[float] = LAMBDAS,
    device: str = "cpu",
) -> Sweep:
    """Mix one memory with the model by every combination of settings; a k beyond the trace's is the trace's."""
    begin = time.perf_counter()
    grid = Grid.of(ks, knn_temperatures, lambdas)
    seen = trace.memories[memory]
    if not seen.polls:
        raise ParameterError(f"{seen.label} has no neighbours, so there is no k and τ to choose.")
    max_k = seen.distances.shape[1]
    chosen_ks = tuple(sorted({min(k, max_k) for k in grid.ks or (*KS, max_k)}))
    chosen = grid.knn_temperatures or temperature_grid(seen)
    weights = torch.tensor(grid.lambdas, dtype=torch.float32)
    sums = torch.zeros(len(chosen_ks), len(chosen), len(weights), dtype=torch.float64)
    base = 0.0
    for log_p, distances, hits, counts in _blocks(trace, seen, device):
        base += float(log_p.double().sum())
        for number, knn_temperature in enumerate(chosen):
            votes = target_votes(distances, hits, chosen_ks, knn_temperature, counts=counts)
            sums[:, number] += _mixed_sums(log_p, votes, weights).cpu()
    return Sweep(
        ks=chosen_ks,
        knn_temperatures=chosen,
        lambdas=grid.lambdas,
        perplexity=(-sums / max(1, len(trace))).exp().numpy(),
        base_perplexity=math.exp(-base / max(1, len(trace))),
        tokens=len(trace),
        documents=trace.facts["documents"],
        remembered=trace.facts["remembered"],
        seconds=time.perf_counter() - begin,
    )


def target_votes(
    distances: Tensor, hits: Tensor, ks: Sequence[int], knn_temperature: float, *, counts: Tensor | None = None
) -> Tensor:
    """Give (len(ks), n) log p_kNN of the target: the share of the weight of the k nearest that hits have."""
    # Relative to the nearest: weights do not change, and the largest exponent is 0.
    weights = ((distances[:, :1] - distances) / knn_temperature).exp_()  # (n, K)
    if counts is not None:
        weights *= counts
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
    largest = torch.maximum(log_p, votes).clamp(min=-1e30)  # (K, n); what nobody thinks possible stays impossible
    model, memory = (log_p - largest).exp(), (votes - largest).exp()
    sums = torch.empty(len(votes), len(weights), dtype=torch.float64, device=votes.device)
    for number, weight in enumerate(weights.tolist()):
        sums[:, number] = torch.lerp(model, memory, weight).log_().sum(1).double()
    sums += largest.double().sum(1)[:, None]
    # With all the weight on one side, the other side's exponential is no floor against underflow.
    sums[:, weights == 0] = log_p.double().sum()
    sums[:, weights == 1] = votes.double().sum(1)[:, None]
    return sums


def replay(trace: Trace, *, k: int, knn_temperature: float, lmbda: float, memory: int = 0) -> Evaluation:
    """Evaluate one memory of a trace with one setting: what `evaluate` gives, without the model."""
    begin = time.perf_counter()
    check_vote(k, knn_temperature)
    check_lambda(lmbda)
    sums = torch.zeros(3, dtype=torch.float64)
    seen = trace.memories[memory]
    for log_p, distances, hits, counts in _blocks(trace, seen, "cpu"):
        votes = target_votes(distances, hits, [min(k, distances.shape[1])], knn_temperature, counts=counts)
        mixed = _mixed_sums(log_p, votes, torch.tensor([lmbda]))
        best = torch.fmax(log_p, votes[0])
        sums += torch.stack([log_p.double().sum(), mixed[0, 0], best.double().sum()])
    facts = {"name": seen.label, "kind": seen.facts["kind"], "weight": lmbda}
    facts |= {"k": k, "knn_temperature": knn_temperature, "metric": seen.facts["metric"]}
    return summary(tally(trace), sums.tolist(), [facts], "fixed", seconds=time.perf_counter() - begin)


def tally(trace: Trace) -> Totals:
    """Say how much text a trace is of."""
    names = ("documents", "tokens", "words", "characters", "bytes", "remembered")
    return Totals(**{name: trace.facts[name] for name in names})


def _blocks(trace: Trace, seen: MemoryTrace, device: str) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Give (log p_LM, distances, hits, counts) of some tokens at a time."""
    for rows in trace.blocks(device):
        found = seen.found(rows, device=device)
        targets = tensor_of(trace.targets[rows]).to(device)
        log_p = tensor_of(trace.log_p[rows]).to(device)
        yield log_p, found.distances, found.values == targets[:, None], found.counts


def temperature_grid(seen: MemoryTrace, count: int = 20) -> tuple[float, ...]:
    """Choose temperatures by how far apart neighbours are, which differs a thousandfold between models."""
    sample = np.array(seen.distances[:: max(1, len(seen.distances) // 2000)])
    last = np.where(np.isfinite(sample), sample, -np.inf).max(1, initial=-np.inf)
    spread = (last - sample[:, 0])[np.isfinite(last) & np.isfinite(sample[:, 0])]
    typical = float(np.median(spread)) if len(spread) else 1.0
    typical = typical if typical > 0 else 1.0
    grid = np.geomspace(typical / 300, typical * 3, count)
    return tuple(sorted({float(f"{value:.3g}") for value in grid}))
