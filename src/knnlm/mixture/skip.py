"""Where a search is worth its time: nets that say before it what it will gain. Knows nothing about how to search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.mixture.fitted import folds_of
from knnlm.mixture.nets import (
    FEWEST,
    ROWS,
    USUAL,
    Nets,
    Recipe,
    check_features,
    fewer_folds,
    stored,
    stored_names,
    train,
)
from knnlm.progress import Progress, silent

_TAIL = 0.005  # of the gains at either end are drawn in, so that a few of them do not decide everything
_LEVELS = 1001  # quantiles of the predicted gain that `Skip` keeps


@dataclass(frozen=True)
class Skip:
    """Says from what is known before a search what it will gain, and so where to search."""

    nets: Nets
    unit: Tensor  # (2,) mean and deviation of the gains it was trained on, nats
    levels: Tensor  # (L,) quantiles of the gains it predicts
    feature_names: tuple[str, ...]

    @torch.no_grad()
    def gain(self, features: Tensor) -> Tensor:
        """Predict for (N, F) features how many nats a search will gain, (N,)."""
        if features.ndim != 2 or features.shape[1] != len(self.feature_names):
            raise ParameterError(f"Skipping looks at {len(self.feature_names)} features, not {tuple(features.shape)}.")
        rows = [self.nets.outputs(self.nets.standard(some)).mean(0)[:, 0] for some in features.split(ROWS)]
        return (torch.cat(rows) * self.unit[1] + self.unit[0]).to(features.device)

    def asked(self, features: Tensor, fraction: float) -> Tensor:
        """Mark the (N,) rows to search for: all but this fraction of a text, of which least gain is predicted."""
        if not 0 <= fraction <= 1:
            raise ParameterError(f"The fraction of positions to skip must be from 0 to 1, not {fraction}.")
        if fraction in (0, 1):
            return torch.full((len(features),), fraction == 0, device=features.device)
        if self.levels[0] == self.levels[-1]:  # nothing was learnt: skip anywhere, but always the same
            return (features.double().sum(1) * 1e4).sin().mul(1e4).frac().abs() >= fraction
        return self.gain(features) >= self.levels.quantile(fraction).to(features.device)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Give all of it as named tensors and plain facts."""
        return {**self.nets.tensors(), "unit": self.unit, "levels": self.levels}, {"features": [*self.feature_names]}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Skip:
        """Make of what `state` gave, and trust none of it."""
        features = stored_names(facts, "features")
        nets, unit = Nets.load(tensors, len(features), 1), stored(tensors, "unit", (2,))
        return cls(nets, unit, stored(tensors, "levels", (_LEVELS,)), features)


def train_skip(
    features: Tensor,
    gain: Tensor,
    groups: Tensor,
    *,
    feature_names: Sequence[str] | None = None,
    recipe: Recipe = USUAL,
    device: str | torch.device = "cpu",
    progress: Progress = silent,
) -> Skip:
    """Learn from (N, F) features known before a search the (N,) nats that it gained, by whole documents, (N,)."""
    names = check_features(features, len(gain), feature_names)
    if gain.ndim != 1 or len(gain) < 2 or not gain.isfinite().all():
        raise ParameterError("Skipping is learnt from at least two gains, all of them finite.")
    gain = gain.to(device, torch.float32)
    low, high = gain.sort().values[[int(len(gain) * _TAIL), -1 - int(len(gain) * _TAIL)]]
    wanted = gain.clamp(low, high)
    unit = torch.stack([wanted.mean(), wanted.std(correction=0).clamp(min=1e-6)])
    wanted = (wanted - unit[0]) / unit[1]
    recipe = fewer_folds(recipe, groups)
    fold = folds_of(groups, recipe.folds, seed=recipe.seed, fewest=FEWEST).to(device)
    inputs = features.to(device, torch.float32)

    def loss(outputs: Tensor, rows: Tensor, _: Sequence[int]) -> Tensor:
        return (outputs[..., 0] - wanted[rows]).square()  # the mean is what counts, not the order alone

    # At least one epoch: even a poor guess of the gain puts positions into an order, and a constant does not.
    nets, _, _ = train(Nets.new(inputs, 1, recipe), inputs, fold, loss, recipe, progress, eager=True)
    skip = Skip(nets, unit, unit, names)
    # Of all nets on all rows, as they will be used: one net's own predictions on what it has not seen are spread wider.
    predicted = skip.gain(inputs).sort().values
    places = torch.linspace(0, len(predicted) - 1, _LEVELS, dtype=torch.float64).round().long()
    return replace(skip, levels=predicted[places.to(device)])
