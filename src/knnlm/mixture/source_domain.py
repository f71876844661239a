"""Whether a source is like the sources of a store of pairs, by its mean encoder state and its tokens.

Of a translation no token is given, so that the text itself holds no evidence of its domain. Its source does: it is
compared before the first token is written. A source outside the domain is translated by the model alone.

Two classifiers of sources, a logistic regression over mean encoder states and naive Bayes over tokens, are combined by
a second logistic regression, which is fitted to what both find in folds that they were not fitted to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.memories.base import SourceTokens
from knnlm.mixture.gate import stored_tensor

FEWEST_SOURCES = 50  # of either kind
MAX_SOURCES = 4000  # of each kind, that are read
FOLDS = 5
_RIDGE = 0.01  # per squared weight of a standardised dimension, beside a mean loss
_COMBINING_RIDGE = 1e-6
_PRIOR_TOKENS = 100.0  # that either kind of sources is smoothed with, distributed as the tokens of both
_BIAS_RIDGE = 1e-4
_ITERATIONS = 100
_CUT = 16  # tokens of the texts that biases of a router are fitted to
_FEWEST_TOKENS = 2 * FOLDS * _CUT  # of the sources of each store; with fewer of any, there are no biases
_MAX_CHANGE = 0.2  # of the number of entries of a store, with which a router is kept


@dataclass(frozen=True)
class Sources:
    """Some sources, as a classifier sees them."""

    states: Tensor  # (N, D) mean encoder states
    tokens: Sequence[SourceTokens]  # N

    def __post_init__(self) -> None:
        if self.states.ndim != 2 or len(self.states) != len(self.tokens):
            raise ParameterError(f"{len(self.tokens)} sources need a matrix of mean states, not {self.states.shape}.")

    @classmethod
    def read(cls, lm: Seq2SeqLM, texts: Sequence[str]) -> Sources:
        """Read texts with the encoder of a model."""
        tokens = [tuple(row) for row in lm.encode_sources(texts)]
        return cls(lm.mean_source_states(tokens), tokens)


@dataclass(frozen=True)
class SourceDomain:
    """A linear classifier of mean encoder states and counts of tokens."""

    mean: Tensor  # (D,)
    weight: Tensor  # (D,)
    bias: Tensor  # ()
    token_weights: Tensor  # (V,)
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the sources it was fitted to, and its figures

    @classmethod
    def fit(cls, own: Sources, other: Sources) -> SourceDomain | None:
        """Fit sources of the domain against others; None: there are too few, or they cannot be separated.

        The figures are those of folds that no part of the classifier was fitted to.
        """
        if own.states.shape[1] != other.states.shape[1]:
            raise ParameterError(f"States must have one width, not {own.states.shape[1]} and {other.states.shape[1]}.")
        if min(len(own.tokens), len(other.tokens)) < FEWEST_SOURCES:
            return None
        states = torch.cat([own.states, other.states]).double().cpu()
        tokens = [*own.tokens, *other.tokens]
        labels = torch.cat([torch.ones(len(own.tokens)), torch.zeros(len(other.tokens))]).double()
        folds = torch.cat([torch.arange(len(own.tokens)), torch.arange(len(other.tokens))]) % FOLDS
        found, passes = _out_of_fold(states, tokens, labels, folds)
        shares = [float(passes[labels == label].double().mean()) for label in (1, 0)]
        if shares[0] <= shares[1]:
            return None
        metadata = {
            "sources": len(own.tokens),
            "other_sources": len(other.tokens),
            "own": shares[0],
            "other": shares[1],
        }
        parts = _Parts.fit(states, tokens, labels, torch.ones_like(passes))
        centre, (by_states, by_tokens), bias = _fit(found, labels, _COMBINING_RIDGE)
        constant = bias + by_states * (parts.bias - centre[0]) - by_tokens * centre[1]
        weight, token_weights = by_states * parts.weight, by_tokens * parts.token_weights
        return cls(parts.mean.float(), weight.float(), constant.float(), token_weights.float(), metadata)

    def in_domain(self, states: Tensor, tokens: Sequence[SourceTokens] | None) -> Tensor:
        """Mark the (N,) sources with (N, D) mean states and N rows of tokens that are in the domain; None: unknown."""
        mean, weight, bias = (tensor.to(states.device) for tensor in (self.mean, self.weight, self.bias))
        logits = _logits(states.float(), mean, weight, bias)
        if tokens is not None:
            logits = logits + _sum_weights(self.token_weights, tokens).to(states.device)
        return logits >= 0

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the classifier as named tensors and JSON types."""
        names = ("mean", "weight", "bias", "token_weights")
        return {name: getattr(self, name) for name in names}, dict(self.metadata)

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> SourceDomain:
        """Validate and load what `state` returned."""
        mean, token_weights = tensors.get("mean"), tensors.get("token_weights")
        if mean is None or mean.ndim != 1 or token_weights is None or token_weights.ndim != 1:
            raise DatastoreCorrupt("The stored domain of sources has no mean state or no tokens. Tune again.")
        weight, bias = stored_tensor(tensors, "weight", (len(mean),)), stored_tensor(tensors, "bias", ())
        by_token = stored_tensor(tensors, "token_weights", (len(token_weights),))
        return cls(stored_tensor(tensors, "mean", (len(mean),)), weight, bias, by_token, dict(metadata))


@dataclass(frozen=True)
class SourceRouter:
    """Naive Bayes over the tokens of sources: which of several stores of pairs a source is most like.

    Of stores with few or short sources, more tokens are unknown, and an unknown token is the most probable in the
    smallest store. So a bias of each token is fitted to what naive Bayes finds of stored sources that it was not fitted
    to, and a scale.
    """

    token_logs: Tensor  # (S, V) log p(token | store); a token beyond V counts 0
    scale: float
    biases: Tensor  # (S,) of each token
    entries: tuple[int, ...]  # of each store, when this was fitted

    @classmethod
    def fit(cls, lm: Seq2SeqLM, stores: Sequence[Datastore]) -> SourceRouter:
        """Fit to a sample of the sources of each store."""
        samples = [store.catalog.sample_sources(MAX_SOURCES) for store in stores]
        rows = [[tuple(row) for row in lm.encode_sources(texts)] if texts else [] for texts in samples]
        size = 1 + max((max(row) for own in rows for row in own if row), default=0)
        counts = torch.stack(  # (folds, S, V)
            [torch.stack([_count_tokens(own[fold::FOLDS], size) for own in rows]) for fold in range(FOLDS)]
        )
        scale, biases = 1.0, torch.zeros(len(stores), dtype=torch.float64)
        if min(sum(map(len, own)) for own in rows) >= _FEWEST_TOKENS:
            scale, biases = _fit_biases(counts, rows)
        return cls(_smoothed_logs(counts.sum(0)), scale, biases, tuple(store.entry_count for store in stores))

    def scores(self, tokens: Sequence[SourceTokens]) -> Tensor:
        """Return the (N, S) log-odds with which N sources are those of each store, up to a constant of each source."""
        found = torch.stack([_sum_weights(own, tokens) for own in self.token_logs], 1)
        lengths = torch.tensor([len(row) for row in tokens], dtype=torch.float64)
        return self.scale * (found + lengths[:, None] * self.biases)

    def select(self, places: Sequence[int]) -> SourceRouter:
        """Return the choice among some of the stores."""
        entries = tuple(self.entries[place] for place in places)
        return SourceRouter(self.token_logs[list(places)], self.scale, self.biases[list(places)], entries)

    def fits(self, stores: Sequence[Datastore]) -> bool:
        """Whether stores that have changed since are still about as large."""
        return len(stores) == len(self.entries) and all(
            abs(store.entry_count - before) <= _MAX_CHANGE * before
            for store, before in zip(stores, self.entries, strict=True)
        )


@dataclass(frozen=True)
class _Parts:
    """The two classifiers, in float64."""

    mean: Tensor  # (D,)
    weight: Tensor  # (D,)
    bias: Tensor  # ()
    token_weights: Tensor  # (V,)

    @classmethod
    def fit(cls, states: Tensor, tokens: Sequence[SourceTokens], labels: Tensor, mask: Tensor) -> _Parts:
        """Fit both to the sources that the (N,) mask marks."""
        by_token = _log_ratios(tokens, labels, mask)
        return cls(*_fit(states[mask], labels[mask], _RIDGE), by_token)

    def logits(self, states: Tensor, tokens: Sequence[SourceTokens], mask: Tensor) -> Tensor:
        """Return (M, 2): what either finds of the M sources that the (N,) mask marks."""
        by_states = _logits(states[mask], self.mean, self.weight, self.bias)
        own = [row for row, marked in zip(tokens, mask.tolist(), strict=True) if marked]
        return torch.stack([by_states, _sum_weights(self.token_weights, own)], 1)


def _out_of_fold(
    states: Tensor, tokens: Sequence[SourceTokens], labels: Tensor, folds: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what both classifiers find of each source (N, 2), and whether it passes (N,), fitted to other folds."""
    found = torch.empty(len(labels), 2, dtype=torch.float64)
    passes = torch.empty(len(labels), dtype=torch.bool)
    for fold in range(FOLDS):
        outside = folds == fold
        found[outside] = _Parts.fit(states, tokens, labels, ~outside).logits(states, tokens, outside)
    for fold in range(FOLDS):
        outside = folds == fold
        combined = _fit(found[~outside], labels[~outside], _COMBINING_RIDGE)
        passes[outside] = _logits(found[outside], *combined) >= 0
    return found, passes


def _fit_biases(counts: Tensor, rows: Sequence[Sequence[SourceTokens]]) -> tuple[float, Tensor]:
    """Return a scale and the (S,) biases of a token, given the (folds, S, V) counts of tokens in the sources of stores.

    The sources of a fold are joined and cut into texts of equal length: which store has longer sources depends little
    on their domains. Every store counts the same, whatever its number of sources.
    """
    found, labels = list[Tensor](), list[int]()
    for fold in range(FOLDS):
        logs = _smoothed_logs(counts.sum(0) - counts[fold])
        texts = [_cut(own[fold::FOLDS]) for own in rows]
        some = [text for own in texts for text in own]
        found.append(torch.stack([_sum_weights(own, some) for own in logs], 1))
        labels += [place for place, own in enumerate(texts) for _ in own]
    scores, target = torch.cat(found), torch.tensor(labels)
    scores = scores - scores.mean(1, keepdim=True)
    balance = 1 / torch.bincount(target, minlength=len(rows)).double()[target] / len(rows)
    values = torch.zeros(1 + len(rows), dtype=torch.float64, requires_grad=True)  # the logarithm of the scale first

    def loss() -> Tensor:
        logits = values[0].exp() * (scores + _CUT * values[1:])
        losses = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        return (balance * losses).sum() + _BIAS_RIDGE * values.square().sum()

    _minimise(values, loss)
    fitted = values.detach()
    return float(fitted[0].exp()), fitted[1:]


def _cut(rows: Sequence[SourceTokens]) -> list[SourceTokens]:
    """Join some sources, and cut them into texts of equal length; what is left over is dropped."""
    joined = [token for row in rows for token in row]
    return [tuple(joined[begin : begin + _CUT]) for begin in range(0, len(joined) - _CUT + 1, _CUT)]


def _log_ratios(tokens: Sequence[SourceTokens], labels: Tensor, mask: Tensor) -> Tensor:
    """Return (V,) log p(token | own) / p(token | other) over the sources that the (N,) mask marks, smoothed."""
    size = 1 + max((max(row) for row in tokens if row), default=0)
    marked = [(label, row) for label, row, own in zip(labels.tolist(), tokens, mask.tolist(), strict=True) if own]
    counts = torch.stack([_count_tokens([row for own, row in marked if own == label], size) for label in (0, 1)])
    logs = _smoothed_logs(counts)
    return logs[1] - logs[0]


def _count_tokens(rows: Sequence[Sequence[int]], size: int) -> Tensor:
    """Return the (V,) counts of tokens in some sources."""
    ids = torch.tensor([token for row in rows for token in row], dtype=torch.long)
    return torch.bincount(ids, minlength=size).double()


def _smoothed_logs(counts: Tensor) -> Tensor:
    """Return log p(token | kind) from (kinds, V) counts; each kind is smoothed with the tokens of all."""
    shared = counts.sum(0) + 0.1
    smoothed = counts + _PRIOR_TOKENS * shared / shared.sum()
    return (smoothed / smoothed.sum(1, keepdim=True)).log()


def _sum_weights(weights: Tensor, tokens: Sequence[SourceTokens]) -> Tensor:
    """Return the (N,) sums of the (V,) weights of tokens; a token that has none counts 0."""
    sums = torch.zeros(len(tokens), dtype=weights.dtype)
    rows = torch.arange(len(tokens)).repeat_interleave(torch.tensor([len(row) for row in tokens], dtype=torch.long))
    ids = torch.tensor([token for row in tokens for token in row], dtype=torch.long)
    known = ids < len(weights)
    return sums.index_add_(0, rows[known], weights[ids[known]])


def _logits(states: Tensor, mean: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (states - mean) @ weight + bias


def _fit(states: Tensor, labels: Tensor, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, weight and bias of a regression with a ridge, in which both kinds of sources count the same."""
    mean, deviation = states.mean(0), states.std(0, correction=0)
    scale = (1 / deviation).masked_fill(deviation <= 1e-6 * (1 + mean.abs()), 0)
    inputs = (states - mean) * scale
    balance = torch.where(labels == 1, 0.5 / labels.sum(), 0.5 / (1 - labels).sum())
    values = torch.zeros(states.shape[1] + 1, dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            inputs @ values[:-1] + values[-1], labels, reduction="none"
        )
        return (balance * losses).sum() + ridge * values[:-1].square().sum()

    if not math.isfinite(_minimise(values, loss)):
        raise ParameterError("The states of the sources are not finite.")
    fitted = values.detach()
    return mean, fitted[:-1] * scale, fitted[-1]


def _minimise(values: Tensor, loss: Callable[[], Tensor]) -> float:
    """Change values so that a loss becomes smallest, and return it as it was at first."""
    optimiser = torch.optim.LBFGS([values], max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimiser.zero_grad()
        total = loss()
        total.backward()
        return total

    with torch.enable_grad():
        return float(optimiser.step(step).detach())
