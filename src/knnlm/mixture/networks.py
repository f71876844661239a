"""Ensembles of small networks over the features of a position, and their training.

K networks of one shape are stacked. Each is trained on all folds of the documents but its own, and the number of epochs
is chosen on the held-out folds together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.progress import Progress

_MAX_DEVIATION = 5.0  # in standard deviations: features are clamped, so that networks need not extrapolate

ROWS = 8192  # at a time in inference

FEWEST = 64  # rows: with fewer, nothing is held out and no network is trained


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
            weight = stored(tensors, f"weight.{number}", (count, width, wide))
            layers.append((weight, stored(tensors, f"bias.{number}", (count, 1, wide))))
        return cls(stored(tensors, "mean", (inputs,)), stored(tensors, "scale", (inputs,)), tuple(layers))


def fewer_folds(config: NetworkConfig, groups: Tensor) -> NetworkConfig:
    """Return a config with no more folds than documents; with one document, folds are blocks of its rows."""
    documents = len(groups.unique())
    return replace(config, folds=min(config.folds, documents)) if documents > 1 else config


def stored(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
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


def check_features(features: Tensor, rows: int, names: Sequence[str] | None) -> tuple[str, ...]:
    """Raise ParameterError for features of the wrong shape or not finite; return their names."""
    if features.ndim != 2 or len(features) != rows:
        raise ParameterError(f"{rows} rows need as many rows of features, not {tuple(features.shape)}.")
    called = name_columns(names, features.shape[1], "features")
    if not features.isfinite().all():
        row, column = (~features.isfinite()).nonzero()[0].tolist()
        raise ParameterError(f"Feature {called[column]!r} is {float(features[row, column])} in row {row}.")
    return called


def name_columns(names: Sequence[str] | None, count: int, what: str) -> tuple[str, ...]:
    """Return the names of columns; numbers if there are none."""
    if len(called := tuple(map(str, range(count) if names is None else names))) != count:
        raise ParameterError(f"{count} {what} have {len(called)} names.")
    return called


# Returns the (K, n) losses of outputs (K, n, O) at rows (K, n) of the data, by the networks of these numbers.
Loss = Callable[[Tensor, Tensor, Sequence[int]], Tensor]


def train(
    first: NetworkEnsemble,
    inputs: Tensor,
    fold: Tensor,
    loss: Loss,
    config: NetworkConfig,
    progress: Progress,
    *,
    eager: bool = False,
) -> tuple[NetworkEnsemble, Tensor, int]:
    """Train each network on all folds but its own while the held-out loss falls; `eager`: at least one epoch.

    Returns the networks, their (N,) held-out losses, and the number of epochs that were useful.
    """
    inputs = first.standard(inputs)
    nets, slow = first.each(Tensor.clone), first.each(Tensor.clone)
    best, least, useful = first, _held_out(first, inputs, fold, loss), 0
    if int(fold[0]) < 0:  # too few rows to hold any out
        return best, least, useful
    fast = [tensor.requires_grad_() for layer in nets.layers for tensor in layer]
    still = [tensor.detach() for tensor in fast]  # the same storage, without gradients
    groups = [{"params": fast[0::2], "weight_decay": config.weight_decay}, {"params": fast[1::2], "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups)
    generator, numbers, step = torch.Generator(fold.device).manual_seed(config.seed), range(config.folds), 0
    with progress("training the gate", total=config.epochs, unit="epochs") as advance:
        for epoch in range(1, config.epochs + 1):
            batches = _batches(fold, config, generator)
            for rows in batches:
                step += 1
                for group in optimiser.param_groups:
                    group["lr"] = config.learning_rate * _pace(step / (config.epochs * len(batches)))
                outputs = nets.outputs(inputs[rows], dropout=config.dropout, generator=generator)
                optimiser.zero_grad()
                loss(outputs, rows, numbers).mean(1).sum().backward()
                optimiser.step()
                # The average over about an epoch is better than any one step, and can be stopped at any time.
                rate = max(1 / len(batches), 9 / (10 + step))
                torch._foreach_lerp_([tensor for layer in slow.layers for tensor in layer], still, rate)
            now = _held_out(slow, inputs, fold, loss)
            if (eager and epoch == 1) or float(now.mean()) < float(least.mean()):
                best, least, useful = slow.each(Tensor.clone), now, epoch
            advance(1)
            if epoch - useful >= config.patience:
                break
    return best, least, useful


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
def _held_out(nets: NetworkEnsemble, inputs: Tensor, fold: Tensor, loss: Loss) -> Tensor:
    """Return the (N,) losses of standardised rows by the networks that were not trained on them."""
    found = torch.zeros(len(inputs), device=inputs.device)
    for net in range(nets.count):
        alone = nets.each(itemgetter(slice(net, net + 1)))
        for rows in (fold == net).nonzero()[:, 0].split(ROWS):
            found[rows] = loss(alone.outputs(inputs[rows]), rows[None], [net])[0]
    return found
