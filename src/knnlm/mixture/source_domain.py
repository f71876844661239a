"""Whether a source is like the sources of a store of pairs, by logistic regression over mean encoder states.

Of a translation no token is given, so that the text itself holds no evidence of its domain. Its source does: it is
compared before the first token is written. A source outside the domain is translated by the model alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.mixture.gate import stored_tensor

FEWEST = 50  # sources of either kind
FOLDS = 5
_RIDGE = 0.01  # per squared weight of a standardised dimension, beside a mean loss
_ITERATIONS = 100


@dataclass(frozen=True)
class SourceDomain:
    """A linear classifier of mean encoder states."""

    mean: Tensor  # (D,)
    weight: Tensor  # (D,)
    bias: Tensor  # ()
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the sources it was fitted to, and its figures

    @classmethod
    def fit(cls, own: Tensor, other: Tensor) -> SourceDomain | None:
        """Fit (N, D) mean states of sources of the domain against (M, D) others; None: too few, or not separable.

        The figures are those of folds that the classifier was not fitted to.
        """
        if own.ndim != 2 or other.ndim != 2 or own.shape[1] != other.shape[1]:
            raise ParameterError(f"States must be matrices of one width, not {own.shape} and {other.shape}.")
        if min(len(own), len(other)) < FEWEST:
            return None
        states = torch.cat([own, other]).double().cpu()
        labels = torch.cat([torch.ones(len(own)), torch.zeros(len(other))]).double()
        folds = torch.cat([torch.arange(len(own)), torch.arange(len(other))]) % FOLDS
        held_out = torch.empty_like(labels)
        for fold in range(FOLDS):
            outside = folds == fold
            held_out[outside] = _logits(states[outside], *_fit(states[~outside], labels[~outside]))
        figures = {
            "own": float((held_out[labels == 1] >= 0).double().mean()),
            "other": float((held_out[labels == 0] >= 0).double().mean()),
        }
        if figures["own"] <= figures["other"]:
            return None
        sizes = {"sources": len(own), "other_sources": len(other)}
        mean, weight, bias = _fit(states, labels)
        return cls(mean.float(), weight.float(), bias.float(), {**sizes, **figures})

    def in_domain(self, states: Tensor) -> Tensor:
        """Mark the (N,) sources with (N, D) mean states that are in the domain."""
        tensors = (tensor.to(states.device) for tensor in (self.mean, self.weight, self.bias))
        return _logits(states.float(), *tensors) >= 0

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the classifier as named tensors and JSON types."""
        return {"mean": self.mean, "weight": self.weight, "bias": self.bias}, dict(self.metadata)

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> SourceDomain:
        """Validate and load what `state` returned."""
        mean = tensors.get("mean")
        if mean is None or mean.ndim != 1:
            raise DatastoreCorrupt("The stored domain of sources has no mean state. Tune again.")
        weight, bias = stored_tensor(tensors, "weight", (len(mean),)), stored_tensor(tensors, "bias", ())
        return cls(stored_tensor(tensors, "mean", (len(mean),)), weight, bias, dict(metadata))


def _logits(states: Tensor, mean: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (states - mean) @ weight + bias


def _fit(states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, weight and bias of a regression with a ridge, in which both kinds of sources count the same."""
    mean, deviation = states.mean(0), states.std(0, correction=0)
    scale = (1 / deviation).masked_fill(deviation <= 1e-6 * (1 + mean.abs()), 0)
    inputs = (states - mean) * scale
    balance = torch.where(labels == 1, 0.5 / labels.sum(), 0.5 / (1 - labels).sum())
    values = torch.zeros(states.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([values], max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            inputs @ values[:-1] + values[-1], labels, reduction="none"
        )
        total: Tensor = (balance * losses).sum() + _RIDGE * values[:-1].square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        found = float(optimiser.step(loss).detach())
    if not math.isfinite(found):
        raise ParameterError("The states of the sources are not finite.")
    fitted = values.detach()
    return mean, fitted[:-1] * scale, fitted[-1]
