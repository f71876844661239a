"""The gate: small networks that compute the weights at each position, their features, and where to skip a search.

    w(x) = (1 - t) · w_fitted + t · mean over the networks k of softmax(log w_k + network_k(x))

K networks of one shape are stacked. Network k is trained on all folds of the documents but its own, and the number of
epochs is chosen on the held-out folds together. It starts at weights w_k that were fitted to the other folds, its last
layer at 0. The trust t is fitted on the held-out folds, against a prior for the fitted weights. So the gate is hardly
worse than fitted weights where features are useless or rows are few.

Features are the same whether they come from the outputs of a text being read, or from a trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.memories.base import Context, MemoryOutput, Positions
from knnlm.memories.decoder import LM_FEATURES
from knnlm.mixture.em import check_logs, fit, fit_folds, folds_of, log_mixed, renormalise
from knnlm.mixture.evidence import EVIDENCE
from knnlm.progress import Progress, silent

_MAX_DEVIATION = 5.0  # in standard deviations: features are clamped, so that networks need not extrapolate
_ROWS = 8192  # at a time in inference
FEWEST = 64  # rows: with fewer, nothing is held out and no network is trained
_MIN_LOG_PROB = -15.0  # features below are clamped
_INSIDE = 0.01  # share of even weights in a network's first weights: a weight of 0 could not grow
_PRIOR = 20.0  # pseudo-count of tokens for the fitted weights against the networks
_MIN_GAIN = 1.5  # standard errors over documents that the networks must gain to be used
_TAIL = 0.005  # of the gains at either end are clamped, so that outliers do not dominate
_LEVELS = 1001  # stored quantiles of the predicted gain
_OF_MEMORY = ("log p of the model's top token", "the model's log p of its top token", "same top token", "abstains")
_OF_POSITION = ("position", "frequency of the last token")


@dataclass(frozen=True)
class NetworkConfig:
    """The shape of the networks and their training."""

    hidden: int = 128
    layers: int = 2  # of weights, with `hidden` units between them
    folds: int = 5
    epochs: int = 12  # at most
    patience: int = 3  # epochs without gain
    learning_rate: float = 1e-2
    weight_decay: float = 0.3
    dropout: float = 0.0
    batch: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        whole = (self.hidden, self.layers, self.epochs, self.patience, self.batch, self.folds - 1)
        if min(whole) < 1 or not (self.learning_rate > 0 and self.weight_decay >= 0 and 0 <= self.dropout < 1):
            raise ParameterError(f"A gate cannot be trained with {self}. Counts must be at least 1, folds at least 2.")


DEFAULT_CONFIG = NetworkConfig()


@dataclass(frozen=True)
class NetworkEnsemble:
    """K networks of one shape, in stacked tensors."""

    mean: Tensor  # (F,)
    scale: Tensor  # (F,) 1 / standard deviation; 0 for a constant feature
    layers: tuple[tuple[Tensor, Tensor], ...]  # (K, in, out) weights and (K, 1, out) biases

    @classmethod
    def new(cls, inputs: Tensor, outputs: int, config: NetworkConfig) -> NetworkEnsemble:
        """Return networks whose outputs are 0."""
        generator = torch.Generator().manual_seed(config.seed)
        mean, deviation = inputs.double().mean(0), inputs.double().std(0, correction=0)
        same = deviation <= 1e-6 * (1 + mean.abs())
        scale = (1 / deviation).masked_fill(same, 0)
        widths = [inputs.shape[1], *[config.hidden] * (config.layers - 1), outputs]
        layers = []
        for number, (width, wide) in enumerate(pairwise(widths)):
            reach = 0.0 if number == config.layers - 1 else math.sqrt(6 / max(1, width))
            weight = (torch.rand(config.folds, width, wide, generator=generator) * 2 - 1) * reach
            layers.append((weight.to(inputs.device), torch.zeros(config.folds, 1, wide, device=inputs.device)))
        return cls(mean.float(), scale.float(), tuple(layers))

    def standard(self, features: Tensor) -> Tensor:
        """Return standardised features, clamped; undefined ones become the mean."""
        # A constant feature is ignored, also where it is infinite.
        moved = ((features.to(self.mean) - self.mean) * self.scale).masked_fill(self.scale == 0, 0)
        return moved.nan_to_num_(nan=0.0, posinf=_MAX_DEVIATION, neginf=-_MAX_DEVIATION).clamp_(
            -_MAX_DEVIATION, _MAX_DEVIATION
        )

    def outputs(self, inputs: Tensor, *, dropout: float = 0.0, generator: torch.Generator | None = None) -> Tensor:
        """Return (K, N, O) outputs for standardised (N, F) inputs, or for (K, N, F), one input per network."""
        values = inputs.expand(self.count, *inputs.shape[-2:])
        for weight, bias in self.layers[:-1]:
            values = torch.baddbmm(bias, values, weight).relu()
            if dropout:
                kept = torch.rand(values.shape, generator=generator, device=values.device) >= dropout
                values = values * kept / (1 - dropout)
        weight, bias = self.layers[-1]
        return torch.baddbmm(bias, values, weight)

    @property
    def count(self) -> int:
        """The number of networks, K."""
        return len(self.layers[0][0])

    def each(self, change: Callable[[Tensor], Tensor]) -> NetworkEnsemble:
        """Return networks with a function applied to every tensor of the layers."""
        return replace(self, layers=tuple((change(weight), change(bias)) for weight, bias in self.layers))

    def to(self, device: torch.device) -> NetworkEnsemble:
        """Return the networks on a device."""
        return replace(
            self.each(lambda tensor: tensor.to(device)), mean=self.mean.to(device), scale=self.scale.to(device)
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the networks as named tensors."""
        named = {"mean": self.mean, "scale": self.scale}
        for number, (weight, bias) in enumerate(self.layers):
            named |= {f"weight.{number}": weight, f"bias.{number}": bias}
        return named

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> NetworkEnsemble:
        """Validate and load what `tensors` returned."""
        depth = sum(name.startswith("weight.") for name in tensors)
        first = tensors.get("weight.0")
        if first is None or first.ndim != 3 or 0 in first.shape[::2]:
            raise DatastoreCorrupt("The stored gate has no networks. Tune again.")
        count, hidden = first.shape[0], first.shape[2]
        widths = [inputs, *[hidden] * (depth - 1), outputs]
        layers = []
        for number, (width, wide) in enumerate(pairwise(widths)):
            weight = stored_tensor(tensors, f"weight.{number}", (count, width, wide))
            layers.append((weight, stored_tensor(tensors, f"bias.{number}", (count, 1, wide))))
        return cls(stored_tensor(tensors, "mean", (inputs,)), stored_tensor(tensors, "scale", (inputs,)), tuple(layers))


def fewer_folds(config: NetworkConfig, groups: Tensor) -> NetworkConfig:
    """Return a config with no more folds than documents; with one document, folds are blocks of its rows."""
    documents = len(groups.unique())
    return replace(config, folds=min(config.folds, documents)) if documents > 1 else config


def stored_tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """Return one stored tensor, if it has this shape and is finite."""
    found = tensors.get(name)
    if found is None or tuple(found.shape) != shape or not found.is_floating_point() or not found.isfinite().all():
        what = "missing" if found is None else f"{tuple(found.shape)} {found.dtype}, or not finite"
        raise DatastoreCorrupt(f"{name} of the stored gate is {what}; it should be {shape}. Tune again.")
    return found.float()


def stored_names(metadata: Mapping[str, Any], what: str) -> tuple[str, ...]:
    """Return a stored list of names."""
    names = metadata.get(what)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DatastoreCorrupt(f"The stored gate has no names of its {what}. Tune again.")
    return tuple(names)


def _check_features(features: Tensor, rows: int, names: Sequence[str] | None) -> tuple[str, ...]:
    """Raise ParameterError for features of the wrong shape or not finite; return their names."""
    if features.ndim != 2 or len(features) != rows:
        raise ParameterError(f"{rows} rows need as many rows of features, not {tuple(features.shape)}.")
    called = _name_columns(names, features.shape[1], "features")
    if not features.isfinite().all():
        row, column = (~features.isfinite()).nonzero()[0].tolist()
        raise ParameterError(f"Feature {called[column]!r} is {float(features[row, column])} in row {row}.")
    return called


def _name_columns(names: Sequence[str] | None, count: int, what: str) -> tuple[str, ...]:
    """Return the names of columns; numbers if there are none."""
    if len(called := tuple(map(str, range(count) if names is None else names))) != count:
        raise ParameterError(f"{count} {what} have {len(called)} names.")
    return called


# Returns the (K, n) losses of outputs (K, n, O) at rows (K, n) of the data, by the networks of these numbers.
NetworkLoss = Callable[[Tensor, Tensor, Sequence[int]], Tensor]


def train_networks(
    first: NetworkEnsemble,
    inputs: Tensor,
    fold: Tensor,
    loss: NetworkLoss,
    config: NetworkConfig,
    progress: Progress,
    *,
    eager: bool = False,
    what: str = "training the gate",
) -> tuple[NetworkEnsemble, Tensor, int]:
    """Train each network on all folds but its own while the held-out loss falls; `eager`: at least one epoch.

    Returns the networks, their (N,) held-out losses, and the number of epochs that were useful.
    """
    inputs = first.standard(inputs)
    best, least, useful = first, held_out(first, inputs, fold, loss), 0
    if int(fold[0]) < 0:  # too few rows to hold any out
        return best, least, useful
    with progress(what, total=config.epochs, unit="epochs") as advance:
        for epoch, nets in enumerate(_epochs(first, inputs, fold, loss, config), 1):
            now = held_out(nets, inputs, fold, loss)
            if (eager and epoch == 1) or float(now.mean()) < float(least.mean()):
                best, least, useful = nets.each(Tensor.clone), now, epoch
            advance(1)
            if epoch - useful >= config.patience:
                break
    return best, least, useful


def _epochs(
    first: NetworkEnsemble, inputs: Tensor, fold: Tensor, loss: NetworkLoss, config: NetworkConfig
) -> Iterator[NetworkEnsemble]:
    """Train on standardised inputs, and yield the moving average of the networks after each epoch.

    The average over about an epoch is better than any one step, and training can stop at any time.
    """
    nets, average = first.each(Tensor.clone), first.each(Tensor.clone)
    trained = [tensor.requires_grad_() for layer in nets.layers for tensor in layer]
    values = [tensor.detach() for tensor in trained]  # the same storage, without gradients
    averages = [tensor for layer in average.layers for tensor in layer]
    decay = {"params": trained[0::2], "weight_decay": config.weight_decay}
    optimiser = torch.optim.AdamW([decay, {"params": trained[1::2], "weight_decay": 0.0}])
    generator, numbers, step = torch.Generator(fold.device).manual_seed(config.seed), range(config.folds), 0
    for _ in range(config.epochs):
        batches = _batches(fold, config, generator)
        for rows in batches:
            step += 1
            for group in optimiser.param_groups:
                group["lr"] = config.learning_rate * _pace(step / (config.epochs * len(batches)))
            outputs = nets.outputs(inputs[rows], dropout=config.dropout, generator=generator)
            optimiser.zero_grad()
            loss(outputs, rows, numbers).mean(1).sum().backward()
            optimiser.step()
            torch._foreach_lerp_(averages, values, max(1 / len(batches), 9 / (10 + step)))
        yield average


def _pace(done: float) -> float:
    """Return the factor of the learning rate: linear warm-up in the first tenth, then a cosine decay."""
    return done * 10 if done < 0.1 else 0.51 + 0.49 * math.cos(math.pi * (done - 0.1) / 0.9)


def _batches(fold: Tensor, config: NetworkConfig, generator: torch.Generator) -> Sequence[Tensor]:
    """Return an epoch of (K, B) rows, for each network from the other folds."""
    own = [(fold != net).nonzero()[:, 0] for net in range(config.folds)]
    most = max(len(rows) for rows in own)
    mixed, batch = [], -(-most // -(-most // config.batch))  # all batches have about the same size
    for rows in own:
        order = torch.randperm(len(rows), generator=generator, device=rows.device)
        # A network with fewer rows than another repeats some of them.
        mixed.append(rows[order].repeat(-(-most // len(rows)))[:most])
    return tuple(torch.stack(mixed).split(batch, 1))


@torch.no_grad()
def held_out(nets: NetworkEnsemble, inputs: Tensor, fold: Tensor, loss: NetworkLoss) -> Tensor:
    """Return the (N,) losses of standardised rows by the networks that were not trained on them."""
    found = torch.zeros(len(inputs), device=inputs.device)
    for net in range(nets.count):
        alone = nets.each(itemgetter(slice(net, net + 1)))
        for rows in (fold == net).nonzero()[:, 0].split(_ROWS):
            found[rows] = loss(alone.outputs(inputs[rows]), rows[None], [net])[0]
    return found


@dataclass(frozen=True)
class MemoryFeatures:
    """Features of one memory's output, which do not depend on the target."""

    features: Tensor  # (N, F) those of the memory alone
    log_prob_of_lm_top: Tensor  # (N,) its log-probability of the language model's most probable token
    top: Tensor  # (N,) its own most probable token; -1 = none
    lm_log_prob_of_top: Tensor  # (N,) the language model's log-probability of that token


def memory_features(output: MemoryOutput, lm: MemoryOutput) -> MemoryFeatures:
    """Return the features of an output, beside the language model's."""
    top = output.top()
    log_p = lm.components[0].log_prob(top.clamp(min=0))
    return MemoryFeatures(
        features=output.features(),
        log_prob_of_lm_top=output.components[0].log_prob(lm.top()),
        top=top,
        lm_log_prob_of_top=log_p.masked_fill(top < 0, -torch.inf),
    )


def place(context: Context) -> Positions:
    """Return the positions of a context in their texts."""
    if context.where is not None:
        return context.where
    # In Python: a tensor for each span would take longer in generation, where most spans have one position.
    positions = [number for span in context.spans for number in range(span.start, len(span.tokens))]
    tokens = [span.tokens[span.start :] for span in context.spans]
    empty = torch.zeros(0, dtype=torch.long)
    return Positions(
        torch.tensor(positions, dtype=torch.long), torch.cat([empty.to(tokens[0]) if tokens else empty, *tokens])
    )


def feature_names(memories: Sequence[tuple[str, Sequence[str]]], *, evidence: bool = False) -> list[str]:
    """Return the names of the columns of `features`, from the kind and the feature names of each memory.

    With `evidence`, the columns of `evidence_features` follow.
    """
    names = [*_OF_POSITION, *component_feature_names(memories)]
    if evidence:
        names += [f"{number} {kind} {name}" for number, (kind, _) in enumerate(memories) for name in EVIDENCE]
    return names


def component_feature_names(memories: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return the names of the columns of `component_features`."""
    names = [f"model {name}" for name in LM_FEATURES]
    for number, (kind, own) in enumerate(memories):
        names += [f"{number} {kind} {name}" for name in (*own, *_OF_MEMORY)]
    return names


def features(
    where: Positions, frequencies: Tensor, model: tuple[Tensor, Tensor], memories: Sequence[MemoryFeatures]
) -> Tensor:
    """Return (N, F) features; `model` is the language model's own features and most probable tokens."""
    device = model[0].device
    position = where.positions.to(device).float().log1p()
    frequency = frequencies.to(device)[where.tokens.to(device).long()].log1p()
    return torch.cat([torch.stack([position, frequency], 1), component_features(model, memories)], 1)


def component_features(model: tuple[Tensor, Tensor], memories: Sequence[MemoryFeatures]) -> Tensor:
    """Return the (N, F) features that do not depend on the position."""
    lm_features, lm_top = model
    columns = [lm_features.float()]
    for memory in memories:
        beside = [
            memory.log_prob_of_lm_top.clamp(min=_MIN_LOG_PROB).nan_to_num(nan=_MIN_LOG_PROB),
            memory.lm_log_prob_of_top.clamp(min=_MIN_LOG_PROB),
            (memory.top == lm_top).float(),
            (memory.top < 0).float(),
        ]
        columns += [memory.features.float(), torch.stack(beside, 1).float()]
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
        both = zip(features.split(_ROWS), abstains.split(_ROWS), strict=True)
        return torch.cat([self._some(*rows) for rows in both])

    def _some(self, features: Tensor, abstains: Tensor) -> Tensor:
        masked = abstains.to(self.starts.device, copy=True)
        masked[:, 0] = False  # the language model never abstains
        weights = renormalise(self.fitted, masked)
        if self.trust > 0:
            inputs = self.nets.standard(torch.cat([features.to(self.starts), masked.to(self.starts)], 1))
            each = _log_weights(self.nets.outputs(inputs), self.starts, masked.expand(self.nets.count, *masked.shape))
            weights = (1 - self.trust) * weights + self.trust * each.exp().mean(0)
        return (weights / weights.sum(1, keepdim=True)).to(features.device)

    def to(self, device: torch.device) -> Gate:
        """Return the gate on a device."""
        starts, fitted = self.starts.to(device), self.fitted.to(device)
        return replace(self, nets=self.nets.to(device), starts=starts, fitted=fitted)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the gate as named tensors and JSON types."""
        names = {"features": [*self.feature_names], "components": [*self.component_names]}
        metadata = {**self.metadata, "trust": self.trust, **names}
        return {**self.nets.tensors(), "starts": self.starts, "fitted": self.fitted}, metadata

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> Gate:
        """Validate and load what `state` returned."""
        features, components = stored_names(metadata, "features"), stored_names(metadata, "components")
        nets = NetworkEnsemble.load(tensors, len(features) + len(components), len(components))
        starts = stored_tensor(tensors, "starts", (nets.count, len(components)))
        fitted = stored_tensor(tensors, "fitted", (len(components),))
        trust = metadata.get("trust")
        if not isinstance(trust, float | int) or not 0 <= trust <= 1:
            raise DatastoreCorrupt(f"The stored gate has the trust {trust!r}, not one from 0 to 1. Tune again.")
        sums = torch.cat([starts.sum(1), fitted.sum(0, keepdim=True)])
        if bool((starts <= 0).any()) or bool((fitted < 0).any()) or bool(((sums - 1).abs() > 1e-3).any()):
            raise DatastoreCorrupt("The weights of the stored gate are not at least 0 with the sum 1. Tune again.")
        rest = {name: value for name, value in metadata.items() if name not in ("trust", "features", "components")}
        return cls(nets, starts, fitted, float(trust), features, components, rest)


def train_gate(
    features: Tensor,
    logs: Tensor,
    groups: Tensor,
    *,
    feature_names: Sequence[str] | None = None,
    component_names: Sequence[str] | None = None,
    fitted: Tensor | None = None,
    config: NetworkConfig = DEFAULT_CONFIG,
    device: str | torch.device = "cpu",
    progress: Progress = silent,
) -> Gate:
    """Train a gate on (N, F) features, (N, M) log-probabilities and the (N,) numbers of their documents.

    `fitted` marks the (N,) rows that its weights are fitted to if the networks are not used; None: all of them.
    """
    check_logs(logs)
    names = (
        _check_features(features, len(logs), feature_names),
        _name_columns(component_names, logs.shape[1], "components"),
    )
    config = fewer_folds(config, groups)
    folds: dict[str, Any] = {"folds": config.folds, "seed": config.seed, "fewest": FEWEST}
    given = logs
    fold, whole, others = fit_folds(given, groups, **folds)
    fold, others = fold.to(device), others.to(device, torch.float32)
    starts = (1 - _INSIDE) * others + _INSIDE / logs.shape[1]  # (K, M)
    logs = logs.to(device, torch.float32)
    abstains, log_p = logs.isnan(), logs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    inputs = torch.cat([features.to(device, torch.float32), abstains.float()], 1)

    def loss(outputs: Tensor, rows: Tensor, nets: Sequence[int]) -> Tensor:
        return -(_log_weights(outputs, starts[nets], abstains[rows]) + log_p[rows]).logsumexp(-1)

    first = NetworkEnsemble.new(inputs, logs.shape[1], config)
    nets, losses, epochs = train_networks(first, inputs, fold, loss, config, progress)
    plain = log_mixed(logs, renormalise(others[fold.clamp(min=0)], abstains))  # by weights fitted to other rows
    both = torch.stack([plain, -losses if epochs else plain], 1)
    if epochs and not _sure(both[:, 1] - both[:, 0], groups.to(device) if len(groups.unique()) > 1 else fold):
        epochs = 0
    if not epochs and fitted is not None:
        _, whole, others = fit_folds(given, groups, fitted=fitted, **folds)
        both[:] = log_mixed(logs, renormalise(others.to(device, torch.float32)[fold.clamp(min=0)], abstains))[:, None]
    chosen = fit(both, prior=torch.tensor([_PRIOR, 0.0])).weights.to(both) if epochs else both.new_tensor([1.0, 0.0])
    together = log_mixed(both, chosen.expand(both.shape))
    metadata: dict[str, Any] = {"config": asdict(config), "rows": len(logs), "epochs": epochs}
    for name, found in (
        ("fitted_perplexity", both[:, 0]),
        ("perplexity", together),
    ):  # both of rows not seen in training
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
        rows = [self.nets.outputs(self.nets.standard(some)).mean(0)[:, 0] for some in features.split(_ROWS)]
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

    def to(self, device: torch.device) -> SearchSkipper:
        """Return the networks on a device."""
        return replace(self, nets=self.nets.to(device), unit=self.unit.to(device), levels=self.levels.to(device))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the networks as named tensors and JSON types."""
        return {**self.nets.tensors(), "unit": self.unit, "levels": self.levels}, {"features": [*self.feature_names]}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> SearchSkipper:
        """Validate and load what `state` returned."""
        features = stored_names(metadata, "features")
        nets, unit = NetworkEnsemble.load(tensors, len(features), 1), stored_tensor(tensors, "unit", (2,))
        return cls(nets, unit, stored_tensor(tensors, "levels", (_LEVELS,)), features)


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
    names = _check_features(features, len(gain), feature_names)
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
    nets, _, _ = train_networks(
        NetworkEnsemble.new(inputs, 1, config), inputs, fold, loss, config, progress, eager=True
    )
    skip = SearchSkipper(nets, unit, unit, names)
    # Of all networks on all rows, as in use: held-out predictions of one network have a wider spread.
    predicted = skip.gain(inputs).sort().values
    places = torch.linspace(0, len(predicted) - 1, _LEVELS, dtype=torch.float64).round().long()
    return replace(skip, levels=predicted[places.to(device)])
