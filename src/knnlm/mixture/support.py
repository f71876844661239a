"""Support: the calibrated probability that a token is right, from all that the mixture sees at its position.

    support(y | x) = sigmoid(a · (logit p(y | x) + mean over the networks k of network_k(x, y)) + b)

The inputs of the networks are the features of the language model and of the memories (those of a gate, without the
position), and what each of them predicts for the token y itself. The networks start at 0, so that training begins with
the probability p of the mixture. Network k is trained on all folds of the documents but its own; a and b are fitted on
the held-out folds. Nothing here depends on the kind of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.memories.base import MemoryOutput
from knnlm.mixture.em import folds_of
from knnlm.mixture.gate import (
    MemoryFeatures,
    NetworkConfig,
    NetworkEnsemble,
    component_feature_names,
    component_features,
    fewer_folds,
    held_out,
    memory_features,
    stored_names,
    stored_tensor,
    train_networks,
)
from knnlm.mixture.weights import MixturePrediction
from knnlm.progress import Progress, silent

SUPPORTED = 0.5  # a token with at least this support counts as supported

_MIN_LOG_PROB, _MAX_LOG_PROB = -15.0, -1e-4  # log-probabilities of tokens are clamped
_MIN_SCALE = 0.05  # of the calibration: the order of the logits stays
_STEPS = 50  # of Newton's method, at most; it takes about five
_RIDGE = 1.0  # weight of the prior a = 1, b = 0, in tokens

_MIN_STEPS, _MAX_EPOCHS = 500, 60  # of training; few rows are read more often

SUPPORT_CONFIG = NetworkConfig(hidden=64, epochs=8, batch=1024)


@dataclass(frozen=True)
class SupportModel:
    """Trained networks, and the calibration of their mean."""

    nets: NetworkEnsemble
    calibration: Tensor  # (2,) a and b
    feature_names: tuple[str, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)  # its training and its figures
    out_of_fold: Tensor | None = None  # (R,) held-out supports of the training rows

    @torch.no_grad()
    def probabilities(self, inputs: Tensor, log_p: Tensor) -> Tensor:
        """Return (N,) supports from (N, F) inputs and the (N,) log-probabilities of the tokens by the mixture."""
        if inputs.shape != (len(log_p), len(self.feature_names)):
            raise ParameterError(f"Support takes {len(self.feature_names)} features, not {tuple(inputs.shape)}.")
        own = inputs.to(self.calibration.device)
        logits = _logit(log_p.to(own)) + self.nets.outputs(self.nets.standard(own)).mean(0)[:, 0]
        return (self.calibration[0] * logits + self.calibration[1]).sigmoid().to(log_p.device)

    def of(self, prediction: MixturePrediction, tokens: Tensor) -> Tensor:
        """Return the (N,) supports of one token per row of a mixture's prediction."""
        assert prediction.lm is not None, "the prediction of a mixture without its language model"
        log_probs = prediction.component_log_probs(tokens)  # (N, M)
        return self.of_log_probs(prediction.lm, prediction.outputs, tokens, log_probs, prediction.combine(log_probs))

    def of_log_probs(
        self, lm: MemoryOutput, outputs: Sequence[MemoryOutput], tokens: Tensor, log_probs: Tensor, log_p: Tensor
    ) -> Tensor:
        """Return supports where the (N, M) log-probabilities of the components and the mixture's are known."""
        by_memory = [memory_features(output, lm) for output in outputs]
        firsts = [0, *accumulate((len(output.components) for output in outputs[:-1]), initial=1)]
        inputs = support_inputs((lm.features(), lm.top()), by_memory, tokens, log_probs[:, firsts])
        return self.probabilities(inputs, log_p.to(inputs))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the model as named tensors and JSON types."""
        metadata = {**self.metadata, "features": [*self.feature_names]}
        return {**self.nets.tensors(), "calibration": self.calibration}, metadata

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> SupportModel:
        """Validate and load what `state` returned."""
        names = stored_names(metadata, "features")
        nets = NetworkEnsemble.load(tensors, len(names), 1)
        calibration = stored_tensor(tensors, "calibration", (2,))
        if float(calibration[0]) <= 0:
            raise DatastoreCorrupt("The calibration of the stored support is not increasing. Tune again.")
        return cls(nets, calibration, names, {name: metadata[name] for name in metadata if name != "features"})


def support_names(memories: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return the names of the columns of `support_inputs`, from the kind and the feature names of each memory."""
    memories = list(memories)
    components = ["model", *(f"{number} {kind}" for number, (kind, _) in enumerate(memories))]
    tokens = [f"{name} {what}" for what in ("log p of the token", "top is the token") for name in components]
    return [*component_feature_names(memories), *tokens]


def support_inputs(
    model: tuple[Tensor, Tensor], memories: Sequence[MemoryFeatures], tokens: Tensor, log_probs: Tensor
) -> Tensor:
    """Return (N, F) inputs for one token per row.

    `model` is the language model's own features and most probable tokens; `log_probs` are the (N, 1 + memories)
    log-probabilities of the tokens by the model and by the first component of each memory; NaN: it abstains.
    """
    positions = component_features(model, memories)
    tops = torch.stack([model[1], *(memory.top.to(model[1]) for memory in memories)], 1)
    return torch.cat([positions, _token_columns(tokens.to(tops), log_probs.to(positions), tops)], 1)


def _token_columns(tokens: Tensor, log_probs: Tensor, tops: Tensor) -> Tensor:
    clamped = log_probs.nan_to_num(nan=_MIN_LOG_PROB, neginf=_MIN_LOG_PROB).clamp(_MIN_LOG_PROB, 0)
    return torch.cat([clamped, (tops == tokens[:, None]).to(clamped)], 1)


def _logit(log_p: Tensor) -> Tensor:
    clamped = log_p.nan_to_num(nan=_MIN_LOG_PROB, neginf=_MIN_LOG_PROB).clamp(_MIN_LOG_PROB, _MAX_LOG_PROB)
    return clamped - (-clamped.expm1()).log()


def train_support(
    inputs: Tensor,
    log_p: Tensor,
    right: Tensor,
    groups: Tensor,
    *,
    feature_names: Sequence[str],
    config: NetworkConfig = SUPPORT_CONFIG,
    device: str | torch.device = "cpu",
    progress: Progress = silent,
) -> SupportModel:
    """Train on (R, F) inputs of tokens, their log-probabilities by the mixture, and whether each of them is right.

    `groups` are the (R,) numbers of the documents.
    """
    epochs = -(-_MIN_STEPS * config.batch // max(1, len(right)))
    config = replace(fewer_folds(config, groups), epochs=max(config.epochs, min(_MAX_EPOCHS, epochs)))
    fold = folds_of(groups, config.folds, seed=config.seed).to(device)
    inputs, labels = inputs.to(device, torch.float32), right.to(device, torch.float32)
    base = _logit(log_p.to(device, torch.float32))

    def logits(outputs: Tensor, rows: Tensor, _: Sequence[int]) -> Tensor:
        return base[rows] + outputs[..., 0]

    def loss(outputs: Tensor, rows: Tensor, nets: Sequence[int]) -> Tensor:
        found = logits(outputs, rows, nets)
        return torch.nn.functional.binary_cross_entropy_with_logits(found, labels[rows], reduction="none")

    first = NetworkEnsemble.new(inputs, 1, config)
    nets, _, useful = train_networks(first, inputs, fold, loss, config, progress, what="training support")
    apart = held_out(nets, nets.standard(inputs), fold, logits)
    calibration = _calibrate(apart, labels).to(inputs)
    metadata = {"config": asdict(config), "rows": len(labels), "epochs": useful}
    out_of_fold = (calibration[0] * apart + calibration[1]).sigmoid()
    return SupportModel(nets, calibration, tuple(feature_names), metadata, out_of_fold)


def _calibrate(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the (2,) a and b for which sigmoid(a · logit + b) is most likely, by Newton's method."""
    columns = torch.stack([logits.double().cpu(), torch.ones(len(logits), dtype=torch.float64)], 1)  # (R, 2)
    wanted, prior = labels.double().cpu(), torch.tensor([1.0, 0.0], dtype=torch.float64)
    found = prior.clone()
    for _ in range(_STEPS):
        probs = (columns @ found).sigmoid()
        slope = columns.T @ (probs - wanted) + _RIDGE * (found - prior)
        curvature = (columns * (probs * (1 - probs))[:, None]).T @ columns
        step = torch.linalg.solve(curvature + _RIDGE * torch.eye(2, dtype=torch.float64), slope)
        found = found - step.clamp(-1, 1)  # far from the optimum, a whole step can overshoot
        if float(step.abs().max()) < 1e-9:
            break
    return torch.stack([found[0].clamp(min=_MIN_SCALE), found[1]])
