"""The gate: small networks that compute the weights at each position, their features, and where to skip a search.

    w(x) = (1 - t) · w_fitted + t · mean over the networks k of softmax(log w_k + network_k(x))

Network k is trained without one fold of the documents, and starts at weights w_k that were fitted to the other folds,
its last layer at 0. The trust t is fitted on the held-out folds, against a prior for the fitted weights. So the gate is
hardly worse than fitted weights where features are useless or rows are few.

Features are the same whether they come from the outputs of a text being read, or from a trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.memories.base import Context, MemoryOutput
from knnlm.memories.decoder import LM_FEATURES
from knnlm.mixture.em import check_logs, fit, fit_folds, folds_of, log_mixed, renormalise
from knnlm.mixture.networks import (
    DEFAULT_CONFIG,
    FEWEST,
    ROWS,
    NetworkConfig,
    NetworkEnsemble,
    check_features,
    fewer_folds,
    name_columns,
    stored,
    stored_names,
    train,
)
from knnlm.progress import Progress, silent

_MIN_LOG_PROB = -15.0  # features below are clamped

_INSIDE = 0.01  # share of even weights in a network's first weights: a weight of 0 could not grow

_PRIOR = 20.0  # pseudo-count of tokens for the fitted weights against the networks

_MIN_GAIN = 1.5  # standard errors over documents that the networks must gain to be used

_TAIL = 0.005  # of the gains at either end are clamped, so that outliers do not dominate

_LEVELS = 1001  # stored quantiles of the predicted gain

_OF_MEMORY = ("for the model's choice", "the model for its choice", "same choice", "abstains")

PLACE = ("position", "frequency of the last token")


@dataclass(frozen=True)
class MemoryFeatures:
    """Features of one memory's output, which do not depend on the target."""

    signals: Tensor  # (N, F)
    of_choice: Tensor  # (N,) its log-probability of the language model's most probable token
    choice: Tensor  # (N,) its own most probable token; -1 = none
    model_of_choice: Tensor  # (N,) the language model's log-probability of that token


@dataclass(frozen=True)
class Positions:
    """The positions of rows in their texts."""

    positions: Tensor  # (N,) number of tokens read before
    tokens: Tensor  # (N,) the last token read


def memory_features(output: MemoryOutput, lm: MemoryOutput) -> MemoryFeatures:
    """Return the features of an output, beside the language model's."""
    choice = output.top()
    log_p = lm.components[0].log_prob(choice.clamp(min=0))
    return MemoryFeatures(
        signals=output.features(),
        of_choice=output.components[0].log_prob(lm.top()),
        choice=choice,
        model_of_choice=log_p.masked_fill(choice < 0, -torch.inf),
    )


def place(context: Context) -> Positions:
    """Return the positions of a context in their texts."""
    positions = [torch.arange(span.start, len(span.tokens)) for span in context.spans]
    tokens = [span.tokens[span.start :] for span in context.spans]
    nowhere = torch.zeros(0, dtype=torch.long)
    return Positions(
        torch.cat([nowhere, *positions]), torch.cat([nowhere.to(tokens[0]) if tokens else nowhere, *tokens])
    )


def feature_names(memories: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return the names of the columns of `features`, from the kind and the feature names of each memory."""
    names = [*PLACE, *(f"model {name}" for name in LM_FEATURES)]
    for number, (kind, signals) in enumerate(memories):
        names += [f"{number} {kind} {name}" for name in (*signals, *_OF_MEMORY)]
    return names


def features(
    where: Positions, frequencies: Tensor, model: tuple[Tensor, Tensor], found: Sequence[MemoryFeatures]
) -> Tensor:
    """Return (N, F) features; `model` is the language model's own features and most probable tokens."""
    signals, choice = model
    device = signals.device
    position = where.positions.to(device).float().log1p()
    frequency = frequencies.to(device)[where.tokens.to(device).long()].log1p()
    columns = [torch.stack([position, frequency], 1), signals.float()]
    for one in found:
        beside = [
            one.of_choice.clamp(min=_MIN_LOG_PROB).nan_to_num(nan=_MIN_LOG_PROB),
            one.model_of_choice.clamp(min=_MIN_LOG_PROB),
            (one.choice == choice).float(),
            (one.choice < 0).float(),
        ]
        columns += [one.signals.float(), torch.stack(beside, 1).float()]
    return torch.cat(columns, 1)


@dataclass(frozen=True)
class Gate:
    """Trained networks, and the weights they start from."""

    nets: NetworkEnsemble  # their inputs are the features, then the mask of components that abstain
    starts: Tensor  # (K, M) the weights that each network starts from, all above 0
    fitted: Tensor  # (M,) the same weights everywhere
    trust: float  # weight of the networks against the fitted weights
    feature_names: tuple[str, ...]
    component_names: tuple[str, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)  # its training and its figures
    out_of_fold: Tensor | None = None  # (N,) held-out log-probabilities of the training rows

    @torch.no_grad()
    def weights(self, features: Tensor, abstains: Tensor) -> Tensor:
        """Return (N, M) weights for (N, F) features; rows sum to 1, and components that abstain, (N, M), have 0."""
        wide, count = len(self.feature_names), len(self.component_names)
        if features.shape != (len(abstains), wide) or abstains.shape != (len(abstains), count):
            given = f"{tuple(features.shape)} and {tuple(abstains.shape)}"
            raise ParameterError(f"This gate takes {wide} features and {count} components, but got {given}.")
        both = zip(features.split(ROWS), abstains.split(ROWS), strict=True)
        return torch.cat([self._some(*rows) for rows in both])

    def _some(self, features: Tensor, abstains: Tensor) -> Tensor:
        gone = abstains.to(self.starts.device, copy=True)
        gone[:, 0] = False  # the language model never abstains
        weights = renormalise(self.fitted, gone)
        if self.trust > 0:
            inputs = self.nets.standard(torch.cat([features.to(self.starts), gone.to(self.starts)], 1))
            each = _log_weights(self.nets.outputs(inputs), self.starts, gone.expand(self.nets.count, *gone.shape))
            weights = (1 - self.trust) * weights + self.trust * each.exp().mean(0)
        return (weights / weights.sum(1, keepdim=True)).to(features.device)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the gate as named tensors and JSON types."""
        names = {"features": [*self.feature_names], "parts": [*self.component_names]}
        metadata = {**self.metadata, "trust": self.trust, **names}
        return {**self.nets.tensors(), "starts": self.starts, "fitted": self.fitted}, metadata

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> Gate:
        """Validate and load what `state` returned."""
        features, parts = stored_names(metadata, "features"), stored_names(metadata, "parts")
        nets = NetworkEnsemble.load(tensors, len(features) + len(parts), len(parts))
        starts = stored(tensors, "starts", (nets.count, len(parts)))
        fitted = stored(tensors, "fitted", (len(parts),))
        trust = metadata.get("trust")
        if not isinstance(trust, float | int) or not 0 <= trust <= 1:
            raise DatastoreCorrupt(f"The stored gate has the trust {trust!r}, not one from 0 to 1. Tune again.")
        sums = torch.cat([starts.sum(1), fitted.sum(0, keepdim=True)])
        if bool((starts <= 0).any()) or bool((fitted < 0).any()) or bool(((sums - 1).abs() > 1e-3).any()):
            raise DatastoreCorrupt("The weights of the stored gate are not at least 0 with the sum 1. Tune again.")
        rest = {name: value for name, value in metadata.items() if name not in ("trust", "features", "parts")}
        return cls(nets, starts, fitted, float(trust), features, parts, rest)


def train_gate(
    features: Tensor,
    logs: Tensor,
    groups: Tensor,
    *,
    feature_names: Sequence[str] | None = None,
    component_names: Sequence[str] | None = None,
    config: NetworkConfig = DEFAULT_CONFIG,
    device: str | torch.device = "cpu",
    progress: Progress = silent,
) -> Gate:
    """Train a gate on (N, F) features, (N, M) log-probabilities and the (N,) numbers of their documents."""
    check_logs(logs)
    names = check_features(features, len(logs), feature_names), name_columns(component_names, logs.shape[1], "parts")
    config = fewer_folds(config, groups)
    fold, whole, others = fit_folds(logs, groups, folds=config.folds, seed=config.seed, fewest=FEWEST)
    fold, others = fold.to(device), others.to(device, torch.float32)
    starts = (1 - _INSIDE) * others + _INSIDE / logs.shape[1]  # (K, M)
    logs = logs.to(device, torch.float32)
    gone, log_p = logs.isnan(), logs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    inputs = torch.cat([features.to(device, torch.float32), gone.float()], 1)

    def loss(outputs: Tensor, rows: Tensor, nets: Sequence[int]) -> Tensor:
        return -(_log_weights(outputs, starts[nets], gone[rows]) + log_p[rows]).logsumexp(-1)

    nets, losses, epochs = train(
        NetworkEnsemble.new(inputs, logs.shape[1], config), inputs, fold, loss, config, progress
    )
    plain = log_mixed(logs, renormalise(others[fold.clamp(min=0)], gone))  # by weights that were fitted to other rows
    both = torch.stack([plain, -losses if epochs else plain], 1)
    if epochs and not _sure(both[:, 1] - both[:, 0], groups.to(device) if len(groups.unique()) > 1 else fold):
        epochs = 0
    chosen = fit(both, prior=torch.tensor([_PRIOR, 0.0])).weights.to(both) if epochs else both.new_tensor([1.0, 0.0])
    together = log_mixed(both, chosen.expand(both.shape))
    metadata: dict[str, Any] = {"config": asdict(config), "rows": len(logs), "epochs": epochs}
    for name, found in (("fitted_perplexity", plain), ("perplexity", together)):  # both of rows not seen in training
        metadata[name] = math.exp(-float(found.double().mean()))
    return Gate(nets, starts, whole.to(starts), float(chosen[1]), *names, metadata, together)


def _sure(gain: Tensor, units: Tensor) -> bool:
    """Whether (N,) gains are significant, given their variance over documents."""
    _, unit = units.unique(return_inverse=True)
    sums = torch.zeros(int(unit.max()) + 1, dtype=torch.float64, device=gain.device).index_add_(0, unit, gain.double())
    return float(sums.sum()) > _MIN_GAIN * float(sums.std()) * math.sqrt(len(sums))


def _log_weights(outputs: Tensor, starts: Tensor, abstains: Tensor) -> Tensor:
    """Return (K, n, M) log-weights: outputs added to the starting weights; -inf for components that abstain."""
    return (renormalise(starts[:, None], abstains).log() + outputs).log_softmax(-1)


@dataclass(frozen=True)
class SearchSkipper:
    """Predicts the gain of a search from the features before it, and so where to search."""

    nets: NetworkEnsemble
    unit: Tensor  # (2,) mean and standard deviation of the training gains, nats
    levels: Tensor  # (L,) quantiles of the predicted gains
    feature_names: tuple[str, ...]

    @torch.no_grad()
    def gain(self, features: Tensor) -> Tensor:
        """Return the (N,) predicted gains of a search, in nats, for (N, F) features."""
        if features.ndim != 2 or features.shape[1] != len(self.feature_names):
            raise ParameterError(
                f"Skipping searches takes {len(self.feature_names)} features, not {tuple(features.shape)}."
            )
        rows = [self.nets.outputs(self.nets.standard(some)).mean(0)[:, 0] for some in features.split(ROWS)]
        return (torch.cat(rows) * self.unit[1] + self.unit[0]).to(features.device)

    def search_mask(self, features: Tensor, fraction: float) -> Tensor:
        """Mark the (N,) rows to search for: all but this fraction of a text, with the least predicted gain."""
        if not 0 <= fraction <= 1:
            raise ParameterError(f"The fraction of positions to skip must be from 0 to 1, not {fraction}.")
        if fraction in (0, 1):
            return torch.full((len(features),), fraction == 0, device=features.device)
        if self.levels[0] == self.levels[-1]:  # constant predictions: skip pseudo-random rows, but always the same
            return (features.double().sum(1) * 1e4).sin().mul(1e4).frac().abs() >= fraction
        return self.gain(features) >= self.levels.quantile(fraction).to(features.device)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the networks as named tensors and JSON types."""
        return {**self.nets.tensors(), "unit": self.unit, "levels": self.levels}, {"features": [*self.feature_names]}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> SearchSkipper:
        """Validate and load what `state` returned."""
        features = stored_names(metadata, "features")
        nets, unit = NetworkEnsemble.load(tensors, len(features), 1), stored(tensors, "unit", (2,))
        return cls(nets, unit, stored(tensors, "levels", (_LEVELS,)), features)


def train_skip(
    features: Tensor,
    gain: Tensor,
    groups: Tensor,
    *,
    feature_names: Sequence[str] | None = None,
    config: NetworkConfig = DEFAULT_CONFIG,
    device: str | torch.device = "cpu",
    progress: Progress = silent,
) -> SearchSkipper:
    """Train on (N, F) features before a search, its (N,) gains in nats, and the (N,) numbers of the documents."""
    names = check_features(features, len(gain), feature_names)
    if gain.ndim != 1 or len(gain) < 2 or not gain.isfinite().all():
        raise ParameterError("Training needs at least two gains, all of them finite.")
    gain = gain.to(device, torch.float32)
    low, high = gain.sort().values[[int(len(gain) * _TAIL), -1 - int(len(gain) * _TAIL)]]
    wanted = gain.clamp(low, high)
    unit = torch.stack([wanted.mean(), wanted.std(correction=0).clamp(min=1e-6)])
    wanted = (wanted - unit[0]) / unit[1]
    config = fewer_folds(config, groups)
    fold = folds_of(groups, config.folds, seed=config.seed, fewest=FEWEST).to(device)
    inputs = features.to(device, torch.float32)

    def loss(outputs: Tensor, rows: Tensor, _: Sequence[int]) -> Tensor:
        return (outputs[..., 0] - wanted[rows]).square()  # the size of the gain matters, not its order alone

    # At least one epoch: even a poor prediction orders the positions, and a constant does not.
    nets, _, _ = train(NetworkEnsemble.new(inputs, 1, config), inputs, fold, loss, config, progress, eager=True)
    skip = SearchSkipper(nets, unit, unit, names)
    # Of all networks on all rows, as in use: held-out predictions of one network have a wider spread.
    predicted = skip.gain(inputs).sort().values
    places = torch.linspace(0, len(predicted) - 1, _LEVELS, dtype=torch.float64).round().long()
    return replace(skip, levels=predicted[places.to(device)])
