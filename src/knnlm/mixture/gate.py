"""Weights by small networks that look at each position. Knows nothing about what their features mean.

    w(x) = (1 - t) · w_fitted + t · mean over the nets k of softmax(log w_k + net_k(x))

Every net is held back from one fold of the documents and starts at weights w_k that were fitted to the others, its last
layer at 0. How long to train is decided on what was held back, all folds together; so is the trust t, against a prior
for the fitted weights. Where features tell nothing, or rows are few, little is lost against fitted weights.

The same nets, with one output, say before a search whether it is worth its time: `Skip`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.mixture.fitted import check_logs, fit, fit_folds, folds_of, log_mixed, share
from knnlm.progress import Progress, silent

_FARTHEST = 5.0  # standard deviations: what lies beyond was hardly seen, and a net must not run away with it
_ROWS = 8192  # at a time where nothing is trained
_INSIDE = 0.01  # of a net's first weights are spread evenly, for a weight of 0 could not grow
_FEWEST = 64  # rows; of fewer, nothing is held back and no net is trained
_PRIOR = 20.0  # tokens that speak for the fitted weights against the nets
_TAIL = 0.005  # of the gains at either end are drawn in, so that a few of them do not decide everything
_LEVELS = 1001  # quantiles of the predicted gain that `Skip` keeps


@dataclass(frozen=True)
class Recipe:
    """How nets are trained."""

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
            raise ParameterError(f"A gate cannot be trained by {self}. Counts are at least 1, folds at least 2.")


USUAL = Recipe()


@dataclass(frozen=True)
class Nets:
    """K networks of one shape, side by side in stacked tensors."""

    mean: Tensor  # (F,)
    scale: Tensor  # (F,) one over the deviation; 0 for a feature that never changed
    layers: tuple[tuple[Tensor, Tensor], ...]  # (K, in, out) weights and (K, 1, out) biases

    @classmethod
    def new(cls, inputs: Tensor, outputs: int, recipe: Recipe) -> Nets:
        """Make nets that answer 0 to everything."""
        generator = torch.Generator().manual_seed(recipe.seed)
        mean, deviation = inputs.double().mean(0), inputs.double().std(0, correction=0)
        same = deviation <= 1e-6 * (1 + mean.abs())
        scale = (1 / deviation).masked_fill(same, 0)
        widths = [inputs.shape[1], *[recipe.hidden] * (recipe.layers - 1), outputs]
        layers = []
        for number, (width, wide) in enumerate(pairwise(widths)):
            reach = 0.0 if number == recipe.layers - 1 else math.sqrt(6 / max(1, width))
            weight = (torch.rand(recipe.folds, width, wide, generator=generator) * 2 - 1) * reach
            layers.append((weight.to(inputs.device), torch.zeros(recipe.folds, 1, wide, device=inputs.device)))
        return cls(mean.float(), scale.float(), tuple(layers))

    def standard(self, features: Tensor) -> Tensor:
        """Give features in deviations from their mean, none far out; undefined ones are taken as the mean."""
        # A feature that never changed says nothing, also where it is infinite now.
        moved = ((features.to(self.mean) - self.mean) * self.scale).masked_fill(self.scale == 0, 0)
        return moved.nan_to_num_(nan=0.0, posinf=_FARTHEST, neginf=-_FARTHEST).clamp_(-_FARTHEST, _FARTHEST)

    def outputs(self, inputs: Tensor, *, dropout: float = 0.0, generator: torch.Generator | None = None) -> Tensor:
        """Give (K, N, O) outputs for standardised (N, F) inputs, or for each net's own (K, N, F)."""
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
        """K."""
        return len(self.layers[0][0])

    def each(self, change: Callable[[Tensor], Tensor]) -> Nets:
        """Give nets whose layers' tensors are changed."""
        return replace(self, layers=tuple((change(weight), change(bias)) for weight, bias in self.layers))

    def tensors(self) -> dict[str, Tensor]:
        """Give all of it as named tensors."""
        named = {"mean": self.mean, "scale": self.scale}
        for number, (weight, bias) in enumerate(self.layers):
            named |= {f"weight.{number}": weight, f"bias.{number}": bias}
        return named

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> Nets:
        """Make nets of what `tensors` gave, and trust none of it."""
        depth = sum(name.startswith("weight.") for name in tensors)
        first = tensors.get("weight.0")
        if first is None or first.ndim != 3 or 0 in first.shape[::2]:
            raise DatastoreCorrupt("The stored gate has no nets. Tune again.")
        count, hidden = first.shape[0], first.shape[2]
        widths = [inputs, *[hidden] * (depth - 1), outputs]
        layers = []
        for number, (width, wide) in enumerate(pairwise(widths)):
            weight = _stored(tensors, f"weight.{number}", (count, width, wide))
            layers.append((weight, _stored(tensors, f"bias.{number}", (count, 1, wide))))
        return cls(_stored(tensors, "mean", (inputs,)), _stored(tensors, "scale", (inputs,)), tuple(layers))


def _stored(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """Take one tensor that was stored, of just this shape and finite."""
    found = tensors.get(name)
    if found is None or tuple(found.shape) != shape or not found.is_floating_point() or not found.isfinite().all():
        what = "missing" if found is None else f"{tuple(found.shape)} {found.dtype}, or not finite"
        raise DatastoreCorrupt(f"{name} of the stored gate is {what}; it should be {shape}. Tune again.")
    return found.float()


def _stored_names(facts: Mapping[str, Any], what: str) -> tuple[str, ...]:
    """Take a list of names that was stored."""
    names = facts.get(what)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DatastoreCorrupt(f"The stored gate has no names of its {what}. Tune again.")
    return tuple(names)


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
        both = zip(features.split(_ROWS), abstains.split(_ROWS), strict=True)
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
        features, parts = _stored_names(facts, "features"), _stored_names(facts, "parts")
        nets = Nets.load(tensors, len(features) + len(parts), len(parts))
        starts = _stored(tensors, "starts", (nets.count, len(parts)))
        fitted = _stored(tensors, "fitted", (len(parts),))
        trust = facts.get("trust")
        if not isinstance(trust, float | int) or not 0 <= trust <= 1:
            raise DatastoreCorrupt(f"The stored gate has the trust {trust!r}, not one from 0 to 1. Tune again.")
        sums = torch.cat([starts.sum(1), fitted.sum(0, keepdim=True)])
        if bool((starts <= 0).any()) or bool((fitted < 0).any()) or bool(((sums - 1).abs() > 1e-3).any()):
            raise DatastoreCorrupt("The weights of the stored gate are not at least 0 with the sum 1. Tune again.")
        rest = {name: value for name, value in facts.items() if name not in ("trust", "features", "parts")}
        return cls(nets, starts, fitted, float(trust), features, parts, rest)


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
        rows = [self.nets.outputs(self.nets.standard(some)).mean(0)[:, 0] for some in features.split(_ROWS)]
        return (torch.cat(rows) * self.unit[1] + self.unit[0]).to(features.device)

    def asked(self, features: Tensor, fraction: float) -> Tensor:
        """Mark the (N,) rows to search for: all but this fraction of a text, of which least gain is predicted."""
        if not 0 <= fraction <= 1:
            raise ParameterError(f"The fraction of positions to skip must be from 0 to 1, not {fraction}.")
        if fraction in (0, 1):
            return torch.full((len(features),), fraction == 0, device=features.device)
        return self.gain(features) >= self.levels.quantile(fraction).to(features.device)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Give all of it as named tensors and plain facts."""
        return {**self.nets.tensors(), "unit": self.unit, "levels": self.levels}, {"features": [*self.feature_names]}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Skip:
        """Make of what `state` gave, and trust none of it."""
        features = _stored_names(facts, "features")
        nets, unit = Nets.load(tensors, len(features), 1), _stored(tensors, "unit", (2,))
        return cls(nets, unit, _stored(tensors, "levels", (_LEVELS,)), features)


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
    names = _check(features, len(logs), feature_names), _name(part_names, logs.shape[1], "parts")
    fold, whole, others = fit_folds(logs, groups, folds=recipe.folds, seed=recipe.seed, fewest=_FEWEST)
    fold, others = fold.to(device), others.to(device, torch.float32)
    starts = (1 - _INSIDE) * others + _INSIDE / logs.shape[1]  # (K, M)
    logs = logs.to(device, torch.float32)
    gone, said = logs.isnan(), logs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    inputs = torch.cat([features.to(device, torch.float32), gone.float()], 1)

    def loss(outputs: Tensor, rows: Tensor, nets: Sequence[int]) -> Tensor:
        return -(_log_weights(outputs, starts[nets], gone[rows]) + said[rows]).logsumexp(-1)

    nets, losses, epochs = _train(Nets.new(inputs, logs.shape[1], recipe), inputs, fold, loss, recipe, progress)
    plain = log_mixed(logs, share(others[fold.clamp(min=0)], gone))  # by weights that were fitted to other rows
    both = torch.stack([plain, -losses if epochs else plain], 1)
    chosen = fit(both, prior=torch.tensor([_PRIOR, 0.0])).weights.to(both) if epochs else both.new_tensor([1.0, 0.0])
    together = log_mixed(both, chosen.expand(both.shape))
    facts: dict[str, Any] = {"recipe": asdict(recipe), "rows": len(logs), "epochs": epochs}
    for name, found in (("fitted_perplexity", plain), ("perplexity", together)):  # both of rows not seen in training
        facts[name] = math.exp(-float(found.double().mean()))
    return Gate(nets, starts, whole.to(starts), float(chosen[1]), *names, facts, together)


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
    names = _check(features, len(gain), feature_names)
    if gain.ndim != 1 or len(gain) < 2 or not gain.isfinite().all():
        raise ParameterError("Skipping is learnt from at least two gains, all of them finite.")
    gain = gain.to(device, torch.float32)
    low, high = gain.sort().values[[int(len(gain) * _TAIL), -1 - int(len(gain) * _TAIL)]]
    wanted = gain.clamp(low, high)
    unit = torch.stack([wanted.mean(), wanted.std(correction=0).clamp(min=1e-6)])
    wanted = (wanted - unit[0]) / unit[1]
    fold = folds_of(groups, recipe.folds, seed=recipe.seed, fewest=_FEWEST).to(device)
    inputs = features.to(device, torch.float32)

    def loss(outputs: Tensor, rows: Tensor, _: Sequence[int]) -> Tensor:
        return (outputs[..., 0] - wanted[rows]).square()  # the mean is what counts, not the order alone

    # At least one epoch: even a poor guess of the gain puts positions into an order, and a constant does not.
    nets, _, _ = _train(Nets.new(inputs, 1, recipe), inputs, fold, loss, recipe, progress, eager=True)
    skip = Skip(nets, unit, unit, names)
    # Of all nets on all rows, as they will be used: one net's own predictions on what it has not seen are spread wider.
    predicted = skip.gain(inputs).sort().values
    places = torch.linspace(0, len(predicted) - 1, _LEVELS, dtype=torch.float64).round().long()
    return replace(skip, levels=predicted[places.to(device)])


def _log_weights(outputs: Tensor, starts: Tensor, abstains: Tensor) -> Tensor:
    """Give (K, n, M) log-weights: the outputs move the starting weights; who abstains has none."""
    return (share(starts[:, None], abstains).log() + outputs).log_softmax(-1)


def _check(features: Tensor, rows: int, names: Sequence[str] | None) -> tuple[str, ...]:
    """Refuse features that nothing can be learnt from; give their names."""
    if features.ndim != 2 or len(features) != rows:
        raise ParameterError(f"{rows} rows need as many rows of features, not {tuple(features.shape)}.")
    called = _name(names, features.shape[1], "features")
    if not features.isfinite().all():
        row, column = (~features.isfinite()).nonzero()[0].tolist()
        raise ParameterError(f"Feature {called[column]!r} is {float(features[row, column])} in row {row}.")
    return called


def _name(names: Sequence[str] | None, count: int, what: str) -> tuple[str, ...]:
    """Give names, numbers where there are none."""
    if len(called := tuple(map(str, range(count) if names is None else names))) != count:
        raise ParameterError(f"{count} {what} have {len(called)} names.")
    return called


# The (K, n) losses of outputs (K, n, O) at rows (K, n) of the data, by the nets of these numbers.
Loss = Callable[[Tensor, Tensor, Sequence[int]], Tensor]


def _train(
    first: Nets, inputs: Tensor, fold: Tensor, loss: Loss, recipe: Recipe, progress: Progress, *, eager: bool = False
) -> tuple[Nets, Tensor, int]:
    """Train each net on all folds but its own, as long as they gain (`eager`: an epoch at least); give them, losses."""
    inputs = first.standard(inputs)
    nets, slow = first.each(Tensor.clone), first.each(Tensor.clone)
    best, least, useful = first, _held_out(first, inputs, fold, loss), 0
    if int(fold[0]) < 0:  # too few rows to hold any back
        return best, least, useful
    fast = [tensor.requires_grad_() for layer in nets.layers for tensor in layer]
    still = [tensor.detach() for tensor in fast]  # the same memory, out of reach of gradients
    groups = [{"params": fast[0::2], "weight_decay": recipe.weight_decay}, {"params": fast[1::2], "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups)
    generator, everyone, step = torch.Generator(fold.device).manual_seed(recipe.seed), range(recipe.folds), 0
    with progress("training the gate", total=recipe.epochs, unit="epochs") as advance:
        for epoch in range(1, recipe.epochs + 1):
            batches = _batches(fold, recipe, generator)
            for rows in batches:
                step += 1
                for group in optimiser.param_groups:
                    group["lr"] = recipe.learning_rate * _pace(step / (recipe.epochs * len(batches)))
                outputs = nets.outputs(inputs[rows], dropout=recipe.dropout, generator=generator)
                optimiser.zero_grad()
                loss(outputs, rows, everyone).mean(1).sum().backward()
                optimiser.step()
                # The average over about an epoch is better than any one step, and can be stopped at any time.
                rate = max(1 / len(batches), 9 / (10 + step))
                torch._foreach_lerp_([tensor for layer in slow.layers for tensor in layer], still, rate)
            now = _held_out(slow, inputs, fold, loss)
            if (eager and epoch == 1) or float(now.mean()) < float(least.mean()):
                best, least, useful = slow.each(Tensor.clone), now, epoch
            advance(1)
            if epoch - useful >= recipe.patience:
                break
    return best, least, useful


def _pace(done: float) -> float:
    """Give the share of the learning rate: up in the first tenth, then down along a cosine."""
    return done * 10 if done < 0.1 else 0.51 + 0.49 * math.cos(math.pi * (done - 0.1) / 0.9)


def _batches(fold: Tensor, recipe: Recipe, generator: torch.Generator) -> Sequence[Tensor]:
    """Give an epoch of (K, B) rows, for each net from the folds that are not its own."""
    own = [(fold != net).nonzero()[:, 0] for net in range(recipe.folds)]
    most = max(len(rows) for rows in own)
    mixed, batch = [], -(-most // -(-most // recipe.batch))  # all batches are of about one size
    for rows in own:
        order = torch.randperm(len(rows), generator=generator, device=rows.device)
        # A net with fewer rows than another sees some of them once more.
        mixed.append(rows[order].repeat(-(-most // len(rows)))[:most])
    return tuple(torch.stack(mixed).split(batch, 1))


@torch.no_grad()
def _held_out(nets: Nets, inputs: Tensor, fold: Tensor, loss: Loss) -> Tensor:
    """Give the (N,) losses of standardised rows by the nets that have not seen them."""
    found = torch.zeros(len(inputs), device=inputs.device)
    for net in range(nets.count):
        alone = nets.each(itemgetter(slice(net, net + 1)))
        for rows in (fold == net).nonzero()[:, 0].split(_ROWS):
            found[rows] = loss(alone.outputs(inputs[rows]), rows[None], [net])[0]
    return found
