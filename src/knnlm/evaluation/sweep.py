"""Perplexity of a trace for every k, τ and λ of one memory.

For every k and τ, p_kNN of the target is a sum over the neighbours with that token; for every λ, the likelihood is one
logarithm per token:

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
from knnlm.evaluation.evaluate import Evaluation, Totals, score_sums, summarise
from knnlm.evaluation.trace import MemoryTrace, Trace, to_tensor
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
    leaked_documents: int  # documents of the text that are in the store: settings chosen on them suit no other text
    seconds: float

    @property
    def best(self) -> tuple[int, float, float, float]:
        """k, τ and λ of the lowest perplexity, and that perplexity."""
        k, knn_temperature, lmbda = np.unravel_index(self.perplexity.argmin(), self.perplexity.shape)
        return (
            self.ks[k],
            self.knn_temperatures[knn_temperature],
            self.lambdas[lmbda],
            float(self.perplexity[k, knn_temperature, lmbda]),
        )

    @property
    def setting(self) -> tuple[int, float]:
        """The best k and τ among the settings with λ above 0."""
        mixed = self.perplexity[:, :, np.array(self.lambdas) > 0]
        if not mixed.size:
            return self.best[:2]
        k, knn_temperature, _ = np.unravel_index(mixed.argmin(), mixed.shape)
        return self.ks[k], self.knn_temperatures[knn_temperature]

    def at_edge(self) -> list[str]:
        """Return the settings whose best value is at an edge of the grid: a wider sweep may find a better one."""
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
    """The settings to try, ascending; None: chosen from the trace."""

    ks: tuple[int, ...] | None
    knn_temperatures: tuple[float, ...] | None
    lambdas: tuple[float, ...]

    @classmethod
    def of(
        cls,
        ks: Sequence[int] | None = None,
        knn_temperatures: Sequence[float] | None = None,
        lambdas: Sequence[float] | None = None,
    ) -> Grid:
        """Return a grid of the sorted values; raise ParameterError for one out of range."""
        for k in ks or ():
            check_vote(k, 1.0)
        for knn_temperature in knn_temperatures or ():
            check_vote(1, knn_temperature)
        for lmbda in lambdas or ():
            check_lambda(lmbda)
        return cls(
            tuple(sorted(set(ks))) if ks else None,
            tuple(sorted(set(knn_temperatures))) if knn_temperatures else None,
            tuple(sorted(set(lambdas or LAMBDAS))),
        )


def sweep(
    trace: Trace,
    *,
    memory: int = 0,
    ks: Sequence[int] | None = None,
    knn_temperatures: Sequence[float] | None = None,
    lambdas: Sequence[float] | None = None,
    device: str = "cpu",
) -> Sweep:
    """Mix one memory with the language model by every combination of settings; k is at most that of the trace."""
    begin = time.perf_counter()
    grid = Grid.of(ks, knn_temperatures, lambdas)
    memory_trace = trace.memories[memory]
    if not memory_trace.has_neighbours:
        raise ParameterError(f"The memory {memory_trace.label} has no neighbours, so it has no k and τ to sweep.")
    max_k = memory_trace.distances.shape[1]
    tried_ks = tuple(sorted({min(k, max_k) for k in grid.ks or (*KS, max_k)}))
    tried_temperatures = grid.knn_temperatures or temperature_grid(memory_trace)
    lmbda = torch.tensor(grid.lambdas, dtype=torch.float32)
    sums = torch.zeros(len(tried_ks), len(tried_temperatures), len(lmbda), dtype=torch.float64)
    base = 0.0
    for block in _blocks(trace, memory_trace, device):
        base += float(block.lm_log_probs.double().sum())
        for number, knn_temperature in enumerate(tried_temperatures):
            knn_log_probs = target_log_probs(
                block.distances, block.hits, tried_ks, knn_temperature=knn_temperature, counts=block.counts
            )
            sums[:, number] += _mixed_sums(block.lm_log_probs, knn_log_probs, lmbda).cpu()
    return Sweep(
        ks=tried_ks,
        knn_temperatures=tried_temperatures,
        lambdas=grid.lambdas,
        perplexity=(-sums / max(1, len(trace))).exp().numpy(),
        base_perplexity=math.exp(-base / max(1, len(trace))),
        tokens=len(trace),
        documents=trace.metadata["documents"],
        leaked_documents=trace.metadata["leaked_documents"],
        seconds=time.perf_counter() - begin,
    )


def replay(trace: Trace, *, k: int, knn_temperature: float, lmbda: float, memory: int = 0) -> Evaluation:
    """Return what `Mixture.evaluate` returns for one memory with one setting, computed from the trace."""
    begin = time.perf_counter()
    check_vote(k, knn_temperature)
    check_lambda(lmbda)
    memory_trace = trace.memories[memory]
    log_weights = torch.tensor([1 - lmbda, lmbda], dtype=torch.float64).log()
    sums = torch.zeros(6, dtype=torch.float64)
    for block in _blocks(trace, memory_trace, "cpu"):
        ks = [min(k, block.distances.shape[1])]
        knn_log_probs = target_log_probs(
            block.distances, block.hits, ks, knn_temperature=knn_temperature, counts=block.counts
        )
        lm, knn = block.lm_log_probs.double(), knn_log_probs[0].double()
        vote = torch.where(knn.isnan(), lm, knn)  # a memory that abstains: p_LM
        sums += score_sums(lm, torch.logaddexp(lm + log_weights[0], vote + log_weights[1]), torch.fmax(lm, knn))
    settings = {"k": k, "knn_temperature": knn_temperature, "metric": memory_trace.metadata["metric"]}
    summary = {"name": memory_trace.label, "kind": memory_trace.metadata["kind"], "weight": lmbda, **settings}
    return summarise(
        totals_of(trace), sums.tolist(), [summary], "fixed", online=None, seconds=time.perf_counter() - begin
    )


def target_log_probs(
    distances: Tensor, hits: Tensor, ks: Sequence[int], *, knn_temperature: float, counts: Tensor | None = None
) -> Tensor:
    """Return (len(ks), N) log p_kNN of the targets; `hits` marks the (N, K) neighbours whose token is the target."""
    # Relative to the nearest: weights do not change, and the largest exponent is 0.
    weights = ((distances[:, :1] - distances) / knn_temperature).exp_()  # (N, K)
    if counts is not None:
        weights *= counts
    weights.nan_to_num_(nan=0.0)  # a row without any neighbour: inf - inf
    total = weights.new_zeros(len(ks), len(distances))
    hit = torch.zeros_like(total)
    last = 0
    for number, k in enumerate(ks):
        columns = slice(last, k)
        total[number] = weights[:, columns].sum(1)
        hit[number] = (weights[:, columns] * hits[:, columns]).sum(1)
        last = k
    total, hit = total.cumsum(0), hit.cumsum(0)
    return (hit / total).log().masked_fill(total == 0, torch.nan)  # NaN: no neighbour, the memory abstains


def _mixed_sums(lm_log_probs: Tensor, knn_log_probs: Tensor, lambdas: Tensor) -> Tensor:
    """Return (len(ks), len(lambdas)) sums over the tokens of log((1-λ)·p_LM + λ·p_kNN)."""
    knn_log_probs = torch.where(knn_log_probs.isnan(), lm_log_probs, knn_log_probs)  # a memory that abstains: p_LM
    largest = torch.maximum(lm_log_probs, knn_log_probs).clamp(min=-1e30)  # (K, N); both may be -inf
    p_lm, p_knn = (lm_log_probs - largest).exp(), (knn_log_probs - largest).exp()
    sums = torch.empty(len(knn_log_probs), len(lambdas), dtype=torch.float64, device=knn_log_probs.device)
    for number, lmbda in enumerate(lambdas.tolist()):
        sums[:, number] = torch.lerp(p_lm, p_knn, lmbda).log_().sum(1).double()
    sums += largest.double().sum(1)[:, None]
    # At λ = 0 and λ = 1 the other term is no lower bound against underflow, so take the logarithms as they are.
    sums[:, lambdas == 0] = lm_log_probs.double().sum()
    sums[:, lambdas == 1] = knn_log_probs.double().sum(1)[:, None]
    return sums


def totals_of(trace: Trace) -> Totals:
    """Return the size of the text of a trace."""
    names = ("documents", "tokens", "words", "characters", "bytes", "leaked_documents")
    return Totals(**{name: trace.metadata[name] for name in names})


@dataclass(frozen=True)
class _Block:
    """Some consecutive tokens of a trace, with the neighbours of one memory."""

    lm_log_probs: Tensor  # (N,)
    distances: Tensor  # (N, K)
    hits: Tensor  # (N, K) whether the neighbour's token is the target
    counts: Tensor | None  # (N, K)


def _blocks(trace: Trace, memory: MemoryTrace, device: str) -> Iterator[_Block]:
    for rows in trace.blocks(device):
        neighbours = memory.neighbours(rows, device=device)
        targets = to_tensor(trace.targets[rows]).to(device)
        lm_log_probs = to_tensor(trace.lm_log_probs[rows]).to(device)
        yield _Block(lm_log_probs, neighbours.distances, neighbours.values == targets[:, None], neighbours.counts)


def temperature_grid(memory: MemoryTrace, count: int = 20) -> tuple[float, ...]:
    """Return temperatures on the scale of the distances, which differs a thousandfold between models."""
    sample = np.array(memory.distances[:: max(1, len(memory.distances) // 2000)])
    last = np.where(np.isfinite(sample), sample, -np.inf).max(1, initial=-np.inf)
    spread = (last - sample[:, 0])[np.isfinite(last) & np.isfinite(sample[:, 0])]
    typical = float(np.median(spread)) if len(spread) else 1.0
    typical = typical if typical > 0 else 1.0
    grid = np.geomspace(typical / 300, typical * 3, count)
    return tuple(sorted({float(f"{value:.3g}") for value in grid}))
