"""Latency of a query that waits for the slowest of many shards.

Each shard's latency is drawn from a measured sample; that of the query is the largest of them. With F the distribution
of one shard's latency, that of the slowest of S is F^S, so the p-quantile is the p^(1/S)-quantile of one shard. A
simulation draws instead, and adds what all shards share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knnlm.errors import ParameterError

SHARDS = (1, 8, 32, 128, 512)
QUANTILES = (0.5, 0.9, 0.99)

_SEED = 0
_ROUNDS = 4000  # simulated queries
_MAX_DRAWS = 1 << 22  # at a time


@dataclass(frozen=True)
class TailRow:
    """Quantiles of the latency of a query over so many shards, in units of the sample."""

    shards: int
    quantiles: tuple[float, ...]


def slowest_of(
    sample: Sequence[float], shards: int, *, rounds: int = _ROUNDS, replicas: int = 1, seed: int = _SEED
) -> NDArray[np.float64]:
    """Simulate queries: the largest latency over the shards, each the smallest of its replicas, (rounds,).

    With several replicas a query is sent to all of them, and the first answer counts.
    """
    latencies = np.asarray(sample, np.float64)
    if not latencies.size or shards < 1 or replicas < 1 or not np.isfinite(latencies).all():
        raise ParameterError("A simulation needs finite latencies, and at least one shard and one replica.")
    generator = np.random.default_rng(seed)
    slowest = np.empty(rounds)
    step = max(1, _MAX_DRAWS // (shards * replicas))
    for begin in range(0, rounds, step):
        count = min(step, rounds - begin)
        draws = latencies[generator.integers(len(latencies), size=(count, shards, replicas))]
        slowest[begin : begin + count] = draws.min(2).max(1)
    return slowest


def slowest_quantile(sample: Sequence[float], shards: int, quantile: float) -> float:
    """Return a quantile of the slowest of many shards without a simulation: P(max ≤ x) = P(one ≤ x)^shards."""
    ordered = np.sort(np.asarray(sample, np.float64))
    place = int(np.ceil(len(ordered) * quantile ** (1 / shards) - 1e-9)) - 1
    return float(ordered[max(0, place)])


def tail_table(sample: Sequence[float], shards: Sequence[int] = SHARDS, *, replicas: int = 1) -> list[TailRow]:
    """Return the quantiles of the slowest shard for several numbers of shards."""
    return [
        TailRow(count, tuple(np.quantile(slowest_of(sample, count, replicas=replicas), QUANTILES).tolist()))
        for count in shards
    ]
