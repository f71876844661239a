"""Online weights: a Bayesian mixture of experts, updated by the tokens of the text so far.

An expert is a choice of component weights: the language model alone; the mixture with its own weights; where there are
several stores, the mixture with the weight of all stores on one of them; and the language model with a small or a large
weight of the cache, which needs no store. v_t are the experts' weights before token t, q_e(y_t) is the probability of
that token by expert e, and α is the rate of switching between experts:

    v_0 = prior        u = v_t · q(y_t) / Σ_e v_t(e) · q_e(y_t)        v_{t+1} = (1 - α) · u + α · prior

The prediction Σ_e v_t(e) · q_e(y) is again a mixture of the components. With α = 0 it is Bayes' rule: the probability
of a text is Σ_e prior(e) · Π_t q_e(y_t), so its log loss exceeds that of expert e by at most -log prior(e), whatever
the stores contain. With α > 0 (fixed share, Herbster & Warmuth 1998) T tokens add at most -T · log(1 - α) to that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.mixture.em import renormalise
from knnlm.mixture.evidence import first_rows, sums_before

_MIXTURE_SHARE = 0.9  # of the prior of stores and mixture together; the stores share the rest, if they are experts
_CACHE_WEIGHTS = (0.02, 0.2)  # of a cache beside the language model alone, one expert for each
_CACHE_PRIOR = 0.5  # of the prior of the model alone, for each of these experts

# What `choose_config` tries.
_PRIORS = (0.5, 0.3, 0.2, 0.14, 0.1, 0.07, 0.05, 0.035, 0.02, 0.01, 0.005, 0.002)
_RATES = (0.0, 0.001, 0.003, 0.01, 0.03)
# What a larger prior of the model alone may cost on the text it is chosen on, nats per token: more where nothing else
# protects text of another domain.
_MAX_COST = math.log(1.002)
_MAX_COST_WITH_OTHER_TEXT = math.log(1.001)

_LOWEST = -1e300  # stands for log 0
_UNDERFLOW = 1e-280  # below, probabilities in float64 lose digits

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class OnlineConfig:
    """The prior of the language model alone, and the rate of switching between experts."""

    prior: float = 0.1
    switch_rate: float = 0.003

    def __post_init__(self) -> None:
        if not 0 < self.prior < 1:
            raise ParameterError(f"the prior of the model alone must be between 0 and 1, not {self.prior}.")
        if not 0 <= self.switch_rate < 1:
            raise ParameterError(f"the switch rate must be at least 0 and below 1, not {self.switch_rate}.")

    @property
    def bound(self) -> float:
        """The nats by which a text's log loss can exceed the model's, without switching."""
        return -math.log(self.prior)

    def log_prior(self, stores: int = 1, caches: int = 0) -> Array:
        """Return the (E,) logarithms of the prior of each expert, in the order of `expert_weights`."""
        alone = [self.prior * _CACHE_PRIOR] * (caches * len(_CACHE_WEIGHTS))
        # So that all weights are positive, whatever the prior of the model alone is.
        scale = min(1.0, 0.5 * (1 - self.prior) / max(1e-12, sum(alone)))
        alone = [each * scale for each in alone]
        rest = 1 - self.prior - sum(alone)
        own = rest * (1 - _MIXTURE_SHARE) / stores if stores > 1 else 0.0
        by_store = [own] * (stores if stores > 1 else 0)
        return np.asarray(np.log([self.prior, rest - sum(by_store), *by_store, *alone]))

    def as_dict(self) -> dict[str, float]:
        """Return the configuration as JSON types."""
        return {"prior": self.prior, "switch_rate": self.switch_rate}

    @classmethod
    def from_dict(cls, stored: Any) -> OnlineConfig:
        """Validate and read what `as_dict` returned."""
        try:
            return cls(float(stored["prior"]), float(stored["switch_rate"]))
        except (KeyError, TypeError, ValueError, ParameterError) as error:
            raise DatastoreCorrupt(f"The stored online weights cannot be read ({error}). Tune again.") from None


def expert_weights(weights: Tensor, stores: Sequence[slice], caches: Sequence[slice], abstains: Tensor) -> Tensor:
    """Return the (N, E, M) component weights of each expert in float64, from the (N, M) weights of the mixture.

    `stores` and `caches` are the components of each store and cache. With several stores, each is an expert whose first
    component has the weight of all stores. Where a component abstains, its weight goes to the language model.
    """
    several = stores if len(stores) > 1 else ()
    count = 2 + len(several) + len(caches) * len(_CACHE_WEIGHTS)
    experts = weights.new_zeros(len(weights), count, weights.shape[1], dtype=torch.float64)
    experts[:, 0, 0] = 1
    experts[:, 1] = weights
    for number, own in enumerate(several, 2):
        one = weights.to(torch.float64, copy=True)
        for other in several:
            one[:, other] = 0
        one[:, own.start] = sum(weights[:, other].sum(1).double() for other in several)
        experts[:, number] = renormalise(one, abstains)
    beside = [(own, weight) for own in caches for weight in _CACHE_WEIGHTS]
    for number, (own, weight) in enumerate(beside, 2 + len(several)):
        votes = (~abstains[:, own]).double() * (weight / (own.stop - own.start))
        experts[:, number, own] = votes
        experts[:, number, 0] = 1 - votes.sum(1)
    return experts


def expert_log_probs(weights: Tensor, component_log_probs: Tensor) -> Tensor:
    """Return the (N, E) log-probabilities of tokens by each expert, in float64, from the (N, M) of the components."""
    logs = component_log_probs.double().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    if logs.device.type != "cpu":  # where a check would wait for the device, and logarithms cost little
        return _log_mixed_each(logs, weights)
    top = logs.amax(1, keepdim=True).clamp(min=_LOWEST)
    mixed = (weights.double() @ (logs - top).exp()[:, :, None])[..., 0]  # (N, E)
    result = mixed.log() + top
    lost = (mixed < _UNDERFLOW).any(1)  # an expert without the most probable component: in the log domain
    if bool(lost.any()):
        result[lost] = _log_mixed_each(logs[lost], weights[lost])
    return result


def _log_mixed_each(logs: Tensor, weights: Tensor) -> Tensor:
    """Return the (N, E) logarithms of weighted sums, from (N, M) logarithms and (N, E, M) weights."""
    return (logs[:, None, :] + weights.double().log()).logsumexp(-1)


def update(log_weights: Tensor, log_probs: Tensor, log_prior: Tensor, switch_rate: float) -> Tensor:
    """Return the (N, E) log-weights of experts after tokens, from those before and their (N, E) log-probabilities."""
    impossible = log_probs.isneginf().all(-1, keepdim=True)  # by every expert: no evidence
    after = (log_weights.double() + log_probs.double().masked_fill(impossible, 0.0)).log_softmax(-1)
    if not switch_rate:
        return after
    switched = torch.logaddexp(after + math.log1p(-switch_rate), log_prior + math.log(switch_rate))
    return torch.where(impossible, log_weights.double(), switched)


def posterior(
    log_probs: Array,
    begins: Mask,
    log_prior: Array,
    switch_rate: float,
    *,
    starts: Array | None = None,
    evident: Mask | None = None,
) -> Array:
    """Return the (N, E) log-weights of the experts before each of N tokens, in the order of the texts.

    `log_probs` are the (N, E) log-probabilities of the tokens by each expert; `begins` marks the first tokens of texts,
    whose log-weights are the prior or the rows of `starts`, (N, E). Tokens that are not `evident` change nothing.
    """
    if not len(log_probs):
        return np.zeros_like(log_probs)
    impossible = np.asarray(np.isneginf(log_probs).all(1))  # by every expert: no evidence
    if impossible.any():
        evident = ~impossible if evident is None else evident & ~impossible
        log_probs = np.where(impossible[:, None], 0.0, log_probs)
    if starts is None:
        starts = np.broadcast_to(log_prior, log_probs.shape)
    if not switch_rate:
        return _bayes(log_probs if evident is None else np.where(evident[:, None], log_probs, 0.0), begins, starts)
    first = first_rows(begins)
    return np.log(_fixed_share(log_probs, first, starts[first], np.exp(log_prior), switch_rate, evident))


def _bayes(log_probs: Array, begins: Mask, starts: Array) -> Array:
    """Return log-weights without switching: sums of logarithms, in which no weight underflows."""
    impossible = np.isneginf(log_probs)
    some = bool(impossible.any())
    weights = sums_before(np.where(impossible, 0.0, log_probs) if some else log_probs, begins, starts)
    if some:  # an expert that gave a token of the text the probability 0
        dead = sums_before(impossible.astype(np.float64), begins, np.zeros_like(log_probs))
        weights[dead > 0] = -np.inf
    return np.asarray(weights - _logsumexp(weights)[:, None])


def _fixed_share(
    log_probs: Array, first: Rows, starts: Array, prior: Array, rate: float, evident: Mask | None
) -> Array:
    """Return weights with switching, as products of the matrices that update them.

    An update is linear up to normalisation, so rows are processed in blocks: products of matrices inside all blocks at
    once, then the weights from block to block. Weights are at least rate · prior, so none underflows.
    """
    rows, experts = log_probs.shape
    probs = np.exp(log_probs - log_probs.max(1, keepdims=True))
    matrices = rate * prior[:, None] * probs[:, None, :]  # (N, E, E)
    matrices[:, range(experts), range(experts)] += (1 - rate) * probs
    if evident is not None:
        matrices[~evident] = np.eye(experts)
    starts = np.exp(starts - starts.max(1, keepdims=True))
    matrices[first[1:] - 1] = starts[1:, :, None]  # a new text begins with its own weights
    size = math.isqrt(rows - 1) + 1
    blocks = -(-rows // size)
    padded = np.broadcast_to(np.eye(experts), (blocks * size, experts, experts)).copy()
    padded[:rows] = matrices
    products = padded.reshape(blocks, size, experts, experts)
    for column in range(1, size):
        product = products[:, column] @ products[:, column - 1]
        products[:, column] = product / product.max((1, 2), keepdims=True)
    before = np.empty((blocks, experts))
    before[0] = starts[0] / starts[0].sum()
    for block in range(1, blocks):
        weights = products[block - 1, -1] @ before[block - 1]
        before[block] = weights / weights.sum()
    result = np.empty((blocks, size, experts))
    result[:, 0] = before
    result[:, 1:] = np.einsum("bsij,bj->bsi", products[:, :-1], before)
    flat = result.reshape(-1, experts)[:rows]
    return np.asarray(flat / flat.sum(1, keepdims=True))


def _logsumexp(values: Array) -> Array:
    columns = np.ascontiguousarray(values.T)  # reductions of contiguous columns are much faster than of short rows
    top = np.maximum(columns.max(0), _LOWEST)
    columns = np.exp(columns - top)
    with np.errstate(divide="ignore"):
        return np.asarray(top + np.log(columns.sum(0)))  # -inf: all values are


@dataclass(frozen=True)
class ExpertScores:
    """Log-probabilities of the tokens of some texts by each expert."""

    log_probs: Array  # (N, E)
    begins: Mask  # (N,) marks the first tokens of texts

    def mean_loss(self, log_prior: Array, switch_rate: float) -> float:
        """Return the mean log loss of the tokens with online weights."""
        log_weights = posterior(self.log_probs, self.begins, log_prior, switch_rate)
        return -float(mixed_log_probs(log_weights, self.log_probs).mean())


def choose_config(
    own: ExpertScores, other: ExpertScores | None = None, *, stores: int = 1, caches: int = 0
) -> tuple[OnlineConfig | None, float]:
    """Choose the prior and the switch rate on text of the stores' own domain; return them and the mean log loss.

    Such text does not show what a larger prior of the model alone is good for. So the largest prior is chosen whose
    perplexity is within 0.2 % of the smallest one, with or without online weights. With `other` text, on which the
    memories should not be used, the choice is that with the smallest loss there among those within 0.1 %. None: no
    configuration is within the limit, because texts are too short.
    """
    without = -float(own.log_probs[:, 1].mean())  # the loss of the mixture without online weights
    configs = [OnlineConfig(prior, rate) for prior in _PRIORS for rate in _RATES]
    losses = {config: own.mean_loss(config.log_prior(stores, caches), config.switch_rate) for config in configs}
    limit = min(without, *losses.values()) + (_MAX_COST if other is None else _MAX_COST_WITH_OTHER_TEXT)
    within = [config for config, loss in losses.items() if loss <= limit]
    if not within:
        return None, without
    if other is None:
        best = min(within, key=lambda config: (-config.prior, losses[config]))
    else:
        best = min(within, key=lambda config: other.mean_loss(config.log_prior(stores, caches), config.switch_rate))
    return best, losses[best]


def mixed_log_probs(log_weights: Array, log_probs: Array) -> Array:
    """Return the (N,) log-probabilities of tokens by all experts together."""
    return _logsumexp(log_weights + log_probs)
