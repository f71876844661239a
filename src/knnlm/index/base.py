"""What every index is. Knows nothing about tokens or language models.

Distances are squared L2, or minus the inner product: in both, smaller is nearer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from knnlm.errors import IndexInvalid, ParameterError

METRICS = ("l2", "ip")


@dataclass(frozen=True)
class Neighbours:
    """The nearest rows of each query, nearest first."""

    ids: Tensor  # (N, k) int64; -1 where there are fewer than k
    distances: Tensor  # (N, k) float32, ascending; inf where the id is -1


class Vectors(Protocol):
    """Vectors that may be larger than memory."""

    @property
    def rows(self) -> int: ...
    @property
    def width(self) -> int: ...
    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Give (number of the first row, (n, D) float32) from first to last."""

    def take(self, ids: Tensor) -> Tensor:
        """Give the rows of these ids, (…) → (…, D) float32; an id below 0 gives zeros."""


class HalfVectors(Vectors, Protocol):
    """Vectors that may also be had just as they are stored, where that is in float16."""

    @property
    def half(self) -> bool:
        """Whether they are."""

    def read(self, first: int, out: Tensor) -> None:
        """Fill a (n, D) float16 tensor with the rows from this one on."""


class Index(Protocol):
    """Finds the nearest vectors."""

    metric: str

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest rows of each of (N, D) queries."""


def evenly(rows: int, count: int) -> Tensor:
    """Give the numbers of so many rows that are spread evenly over all, ascending and each once."""
    places: Tensor = torch.linspace(0, max(0, rows - 1), count, dtype=torch.float64).long().unique()
    return places


def check_search(queries: Tensor, k: int, width: int) -> None:
    """Refuse what no index can answer."""
    if k < 1:
        raise ParameterError(f"k must be at least 1, not {k}.")
    if queries.ndim != 2 or queries.shape[1] != width:
        raise ParameterError(f"queries have shape {tuple(queries.shape)}, but the keys have width {width}.")


def check_metric(metric: str) -> None:
    """Refuse an unknown metric."""
    if metric not in METRICS:
        raise ParameterError(f"Unknown metric {metric!r}: use {' or '.join(METRICS)}.")


def check_finite(squares: Tensor, first: int) -> None:
    """Refuse keys, given their (n,) squares, that are no numbers."""
    if not squares.isfinite().all():
        raise IndexInvalid(
            f"Among the stored keys {first:,} to {first + len(squares) - 1:,} are some that are no finite numbers: "
            "their file is damaged. Build the memory again."
        )
