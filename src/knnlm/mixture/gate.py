"""Weights by small networks that look at each position. Knows nothing about what their features mean.

    w(x) = (1 - t) · w_fitted + t · mean over the nets k of softmax(log w_k + net_k(x))

Every net is held back from one fold of the documents and starts at weights w_k that were fitted to the others, its last
layer at 0. The trust t is decided on what was held back, against a prior for the fitted weights. Where features tell
nothing, or rows are few, little is lost against fitted weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.mixture.fitted import check_logs, fit, fit_folds, log_mixed, share
from knnlm.mixture.nets import (
    FEWEST,
    ROWS,
    USUAL,
    Nets,
    Recipe,
    check_features,
    fewer_folds,
    name_columns,
    stored,
    stored_names,
    train,
)
from knnlm.progress import Progress, silent

_INSIDE = 0.01  # of a net's first weights are spread evenly, for a weight of 0 could not grow
_PRIOR = 20.0  # tokens speak for the fitted weights against the nets
_SURE = 1.5  # standard errors, over documents, that the nets must gain by: what suits one document may suit no other


@dataclass(frozen=True)
class Gate:
    """Trained nets, and the weights they start from."""

    nets: Nets  # their inputs are the features, then which parts abstain
    starts: Tensor  # (K, M) the weights that each net starts from, all above 0
    fitted: Tensor  # (M,) the same weights everywhere
    trust: float  # in the nets, against the fitted weights
    feature_names: tuple[str, ...]
    part_names: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)  # how it was trained, and what came of it
    out_of_fold: Tensor | None = None  # (N,) log-probabilities of the rows of its training, by what had not seen them

    @torch.no_grad()
    def weights(self, features: Tensor, abstains: Tensor) -> Tensor:
        """Give (N, M) weights for (N, F) features; rows sum to 1, and are 0 where a part abstains, (N, M)."""
        wide, parts = len(self.feature_names), len(self.part_names)
        if features.shape != (len(abstains), wide) or abstains.shape != (len(abstains), parts):
            given = f"{tuple(features.shape)} and {tuple(abstains.shape)}"
            raise ParameterError(f"This gate looks at {wide} features and weighs {parts} parts, but was given {given}.")
        both = zip(features.split(ROWS), abstains.split(ROWS), strict=True)
        return torch.cat([self._some(*rows) for rows in both])

    def _some(self, features: Tensor, abstains: Tensor) -> Tensor:
        gone = abstains.to(self.starts.device, copy=True)
        gone[:, 0] = False  # the language model always has an opinion
        weights = share(self.fitted, gone)
        if self.trust > 0:
            inputs = self.nets.standard(torch.cat([features.to(self.starts), gone.to(self.starts)], 1))
            each = _log_weights(self.nets.outputs(inputs), self.starts, gone.expand(self.nets.count, *gone.shape))
            weights = (1 - self.trust) * weights + self.trust * each.exp().mean(0)
        return (weights / weights.sum(1, keepdim=True)).to(features.device)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Give all of it as named tensors and plain facts."""
        facts = {**self.facts, "trust": self.trust, "features": [*self.feature_names], "parts": [*self.part_names]}
        return {**self.nets.tensors(), "starts": self.starts, "fitted": self.fitted}, facts

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Gate:
        """Make a gate of what `state` gave, and trust none of it."""
        features, parts = stored_names(facts, "features"), stored_names(facts, "parts")
        nets = Nets.load(tensors, len(features) + len(parts), len(parts))
        starts = stored(tensors, "starts", (nets.count, len(parts)))
        fitted = stored(tensors, "fitted", (len(parts),))
        trust = facts.get("trust")
        if not isinstance(trust, float | int) or not 0 <= trust <= 1:
            raise DatastoreCorrupt(f"The stored gate has the trust {trust!r}, not one from 0 to 1. Tune again.")
        sums = torch.cat([starts.sum(1), fitted.sum(0, keepdim=True)])
        if bool((starts <= 0).any()) or bool((fitted < 0).any()) or bool(((sums - 1).abs() > 1e-3).any()):
            raise DatastoreCorrupt("The weights of the stored gate are not at least 0 with the sum 1. Tune again.")
        rest = {name: value for name, value in facts.items() if name not in ("trust", "features", "parts")}
        return cls(nets, starts, fitted, float(trust), features, parts, rest)


def train_gate(
    features: Tensor,
    logs: Tensor,
    groups: Tensor,
    *,
    feature_names: Sequence[str] | None = None,
    part_names: Sequence[str] | None = None,
    recipe: Recipe = USUAL,
    device: str | torch.device = "cpu",
    progress: Progress = silent,
) -> Gate:
    """Train a gate on (N, F) features, (N, M) log-probabilities and the (N,) numbers of their documents."""
    check_logs(logs)
    names = check_features(features, len(logs), feature_names), name_columns(part_names, logs.shape[1], "parts")
    recipe = fewer_folds(recipe, groups)
    fold, whole, others = fit_folds(logs, groups, folds=recipe.folds, seed=recipe.seed, fewest=FEWEST)
    fold, others = fold.to(device), others.to(device, torch.float32)
    starts = (1 - _INSIDE) * others + _INSIDE / logs.shape[1]  # (K, M)
    logs = logs.to(device, torch.float32)
    gone, said = logs.isnan(), logs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    inputs = torch.cat([features.to(device, torch.float32), gone.float()], 1)

    def loss(outputs: Tensor, rows: Tensor, nets: Sequence[int]) -> Tensor:
        return -(_log_weights(outputs, starts[nets], gone[rows]) + said[rows]).logsumexp(-1)

    nets, losses, epochs = train(Nets.new(inputs, logs.shape[1], recipe), inputs, fold, loss, recipe, progress)
    plain = log_mixed(logs, share(others[fold.clamp(min=0)], gone))  # by weights that were fitted to other rows
    both = torch.stack([plain, -losses if epochs else plain], 1)
    if epochs and not _sure(both[:, 1] - both[:, 0], groups.to(device) if len(groups.unique()) > 1 else fold):
        epochs = 0
    chosen = fit(both, prior=torch.tensor([_PRIOR, 0.0])).weights.to(both) if epochs else both.new_tensor([1.0, 0.0])
    together = log_mixed(both, chosen.expand(both.shape))
    facts: dict[str, Any] = {"recipe": asdict(recipe), "rows": len(logs), "epochs": epochs}
    for name, found in (("fitted_perplexity", plain), ("perplexity", together)):  # both of rows not seen in training
        facts[name] = math.exp(-float(found.double().mean()))
    return Gate(nets, starts, whole.to(starts), float(chosen[1]), *names, facts, together)


def _sure(gain: Tensor, units: Tensor) -> bool:
    """Say whether (N,) gains are more than chance between documents makes of them."""
    _, unit = units.unique(return_inverse=True)
    sums = torch.zeros(int(unit.max()) + 1, dtype=torch.float64, device=gain.device).index_add_(0, unit, gain.double())
    return float(sums.sum()) > _SURE * float(sums.std()) * math.sqrt(len(sums))


def _log_weights(outputs: Tensor, starts: Tensor, abstains: Tensor) -> Tensor:
    """Give (K, n, M) log-weights: the outputs move the starting weights; who abstains has none."""
    return (share(starts[:, None], abstains).log() + outputs).log_softmax(-1)
