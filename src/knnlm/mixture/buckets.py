"""Weights by how near the nearest neighbour is (Drozdov et al. 2022). Knows nothing about where distances come from.

Positions are put into buckets of about equal size by the distance of their nearest neighbour, and each bucket has
weights of its own. A small bucket knows little, so its weights are drawn to those of the whole text by a prior that is
worth some tokens. Positions without any neighbour have a bucket of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.mixture.fitted import check_logs, fit, share

_SUM = 1e-3  # how far from 1 the weights of a stored bucket may sum


@dataclass(frozen=True)
class Buckets:
    """Bounds on the nearest distance, and the weights between them."""

    edges: Tensor  # (B - 1,) float64, ascending; a distance that is an edge belongs to the farther bucket
    table: Tensor  # (B + 1, M) float64, rows sum to 1; the last row is for positions without a neighbour

    @classmethod
    def fit(cls, logs: Tensor, nearest: Tensor, *, count: int = 16, prior: float = 20.0) -> Buckets:
        """Fit the weights of `count` buckets to (N, M) log-probabilities and (N,) distances; inf or NaN is none."""
        check_logs(logs)
        if count < 1 or not (prior >= 0 and math.isfinite(prior)):
            raise ParameterError(f"There must be at least 1 bucket and a prior of 0 or more, not {count} and {prior}.")
        if nearest.shape != logs.shape[:1]:
            raise ParameterError(f"Each of the {len(logs)} rows needs one distance, not {tuple(nearest.shape)}.")
        edges = _edges(nearest, count)
        whole = fit(logs).weights
        own = _bucket(nearest, edges).to(logs.device)
        table = whole.repeat(len(edges) + 2, 1)
        for number in own.unique().tolist():
            table[number] = fit(logs[own == number], start=whole, prior=prior * whole).weights
        return cls(edges, table)

    def weights(self, nearest: Tensor, abstains: Tensor) -> Tensor:
        """Give (N, M) weights for (N,) distances; those of parts that abstain, (N, M), go to the first part."""
        if abstains.shape != (len(nearest), self.table.shape[1]):
            raise ParameterError(
                f"These buckets weigh {self.table.shape[1]} parts of {len(nearest)} rows, not {tuple(abstains.shape)}."
            )
        rows = self.table.float().to(nearest.device)[_bucket(nearest, self.edges)]
        return share(rows, abstains)

    def as_dict(self) -> dict[str, Any]:
        """Give plain numbers, for JSON."""
        return {"edges": self.edges.tolist(), "weights": self.table.tolist()}

    @classmethod
    def from_dict(cls, stored: Any) -> Buckets:
        """Make buckets of what `as_dict` gave, and trust none of it."""
        try:
            edges = torch.tensor([float(edge) for edge in stored["edges"]], dtype=torch.float64)
            rows = [[float(weight) for weight in row] for row in stored["weights"]]
            table = torch.tensor(rows, dtype=torch.float64)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DatastoreCorrupt(f"The stored buckets of weights cannot be read ({error}). Tune again.") from None
        wrong = _wrong(edges, table)
        if wrong:
            raise DatastoreCorrupt(f"The stored buckets of weights are wrong: {wrong}. Tune again.")
        return cls(edges, table / table.sum(1, keepdim=True))


def _edges(nearest: Tensor, count: int) -> Tensor:
    """Cut the distances there are into parts of equal size; equal distances are never cut apart."""
    there = nearest[nearest.isfinite()].double().cpu().sort().values
    if len(there) == 0:
        return there
    cuts = torch.arange(1, count) * len(there) // count
    edges: Tensor = there[cuts].unique()
    return edges[edges > there[0]]  # nothing would be nearer than such an edge


def _bucket(nearest: Tensor, edges: Tensor) -> Tensor:
    """Give the (N,) numbers of the buckets; the last is for no neighbour."""
    found = torch.bucketize(nearest.double(), edges.to(nearest.device), right=True)
    return found.masked_fill(~nearest.isfinite(), len(edges) + 1)


def _wrong(edges: Tensor, table: Tensor) -> str | None:
    """Say what is wrong with stored buckets."""
    if table.ndim != 2 or table.shape[0] != len(edges) + 2 or table.shape[1] == 0:
        return f"{len(edges)} edges need {len(edges) + 2} rows of weights, found {tuple(table.shape)}"
    if not edges.isfinite().all() or bool((edges.diff() <= 0).any()):
        return "the edges do not ascend"
    if not table.isfinite().all() or bool((table < 0).any()) or bool(((table.sum(1) - 1).abs() > _SUM).any()):
        return "the weights of a bucket are not at least 0 with the sum 1"
    return None
