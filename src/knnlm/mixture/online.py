"""Online weights: a Bayesian mixture of experts, updated by the tokens of the text so far.

An expert is a choice of component weights: the language model alone, the mixture with its own weights and, where there
are several stores, the mixture with the weight of all stores on one of them. v_t are the experts' weights before token
t, q_e(y_t) is the probability of that token by expert e, and α is the rate of switching between experts:

    v_0 = prior        u = v_t · q(y_t) / Σ_e v_t(e) · q_e(y_t)        v_{t+1} = (1 - α) · u + α · prior

The prediction Σ_e v_t(e) · q_e(y) is again a mixture of the components. With α = 0 it is Bayes' rule: the probability
of a text is Σ_e prior(e) · Π_t q_e(y_t), so its log loss exceeds that of expert e by at most -log prior(e), whatever
the stores contain. With α > 0 (fixed share, Herbster & Warmuth 1998) T tokens add at most -T · log(1 - α) to that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.memories.base import Origin, Span
from knnlm.mixture.em import renormalise

_MIXTURE_SHARE = 0.9  # of the prior that is not the model's; the stores share the rest, if they are experts

# What `choose_config` tries.
_PRIORS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
_RATES = (0.0, 0.001, 0.003, 0.01, 0.03)
_MAX_COST = math.log(1.002)  # nats per token of the text it is chosen on, for a larger prior of the model alone

Array = NDArray[np.float64]


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

    def log_prior(self, experts: int) -> Array:
        """Return the (E,) logarithms of the prior: of the model alone, of the mixture, and of each store."""
        rest, stores = 1 - self.prior, experts - 2
        mixture = rest * _MIXTURE_SHARE if stores else rest
        return np.asarray(np.log([self.prior, mixture, *[(rest - mixture) / max(1, stores)] * stores]))

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


def expert_weights(weights: Tensor, stores: Sequence[slice], abstains: Tensor) -> Tensor:
    """Return the (N, E, M) component weights of each expert, from the (N, M) weights of the mixture.

    `stores` are the components of each store. With several, each is an expert whose first component has the weight of
    all stores; where it abstains, the weight goes to the language model.
    """
    alone = torch.zeros_like(weights)
    alone[:, 0] = 1
    experts = [alone, weights]
    if len(stores) > 1:
        without, total = weights.clone(), weights.new_zeros(len(weights))
        for own in stores:
            total = total + weights[:, own].sum(1)
            without[:, own] = 0
        for own in stores:
            one = without.clone()
            one[:, own.start] = total
            experts.append(renormalise(one, abstains))
    return torch.stack(experts, 1)


def expert_count(stores: int) -> int:
    """Return the number of experts of a mixture with this many stores."""
    return 2 + (stores if stores > 1 else 0)


def expert_log_probs(weights: Tensor, component_log_probs: Tensor) -> Tensor:
    """Return the (N, E) log-probabilities of tokens by each expert, in float64, from the (N, M) of the components."""
    logs = component_log_probs.double().nan_to_num(nan=-torch.inf, neginf=-torch.inf)[:, None, :]
    return (logs + weights.double().log()).logsumexp(-1)


def update(log_weights: Tensor, log_probs: Tensor, config: OnlineConfig) -> Tensor:
    """Return the (N, E) log-weights of experts after tokens, from those before and their (N, E) log-probabilities."""
    after = (log_weights.double() + log_probs.double()).log_softmax(-1)
    if not config.switch_rate:
        return after
    log_prior = prior_on(config, after.shape[-1], after.device)
    return torch.logaddexp(after + math.log1p(-config.switch_rate), log_prior + math.log(config.switch_rate))


def posterior(
    log_probs: Array, begins: NDArray[np.bool_], config: OnlineConfig, *, first: Array | None = None
) -> Array:
    """Return the (N, E) log-weights of the experts before each of N tokens, in the order of the texts.

    `log_probs` are the (N, E) log-probabilities of the tokens by each expert; `begins` marks the first tokens of texts.
    `first` are the (E,) log-weights before the first token, if its text began earlier.
    """
    if not len(log_probs):
        return np.zeros_like(log_probs)
    log_prior = config.log_prior(log_probs.shape[1])
    starts = np.repeat(log_prior[None], int(begins[1:].sum()) + 1, 0)  # (texts, E)
    if first is not None:
        starts[0] = first
    if not config.switch_rate:
        return _bayes(log_probs, begins, starts)
    return np.log(_fixed_share(log_probs, begins, starts, np.exp(log_prior), config.switch_rate))


def _bayes(log_probs: Array, begins: NDArray[np.bool_], starts: Array) -> Array:
    """Return log-weights without switching: sums of logarithms, in which no weight underflows."""
    impossible = np.isneginf(log_probs)
    before, dead = np.zeros_like(log_probs), np.zeros(log_probs.shape, np.int64)
    np.cumsum(np.where(impossible, 0, log_probs)[:-1], axis=0, out=before[1:])
    np.cumsum(impossible[:-1], axis=0, out=dead[1:])
    text = np.cumsum(begins[1:], dtype=np.int64)  # of each token but the first, which belongs to text 0
    text = np.concatenate([[0], text])
    rows = np.concatenate([[0], np.flatnonzero(begins[1:]) + 1])  # of the first token of each text
    weights = starts[text] + before - before[rows[text]]
    weights[dead > dead[rows[text]]] = -np.inf  # an expert that gave a token of the text the probability 0
    return np.asarray(weights - _logsumexp(weights)[:, None])


def _fixed_share(log_probs: Array, begins: NDArray[np.bool_], starts: Array, prior: Array, rate: float) -> Array:
    """Return weights with switching, as products of the matrices that update them.

    An update is linear up to normalisation, so rows are processed in blocks: products of matrices inside all blocks at
    once, then the weights from block to block. Weights are at least rate · prior, so none underflows.
    """
    rows, experts = log_probs.shape
    probs = np.exp(log_probs - log_probs.max(1, keepdims=True))
    matrices = rate * prior[:, None] * probs[:, None, :]  # (N, E, E)
    matrices[:, range(experts), range(experts)] += (1 - rate) * probs
    matrices[:-1][begins[1:]] = np.repeat(prior[:, None], experts, 1)  # a new text begins with the prior
    size = math.isqrt(rows - 1) + 1
    blocks = -(-rows // size)
    padded = np.broadcast_to(np.eye(experts), (blocks * size, experts, experts)).copy()
    padded[:rows] = matrices
    products = padded.reshape(blocks, size, experts, experts)
    for column in range(1, size):
        product = products[:, column] @ products[:, column - 1]
        products[:, column] = product / product.max((1, 2), keepdims=True)
    first = np.empty((blocks, experts))
    first[0] = np.exp(starts[0] - starts[0].max())
    first[0] /= first[0].sum()
    for block in range(1, blocks):
        weights = products[block - 1, -1] @ first[block - 1]
        first[block] = weights / weights.sum()
    result = np.empty((blocks, size, experts))
    result[:, 0] = first
    result[:, 1:] = np.einsum("bsij,bj->bsi", products[:, :-1], first)
    flat = result.reshape(-1, experts)[:rows]
    return np.asarray(flat / flat.sum(1, keepdims=True))


def _logsumexp(values: Array) -> Array:
    top = values.max(1)
    return np.asarray(top + np.log(np.exp(values - top[:, None]).sum(1)))


@dataclass(frozen=True)
class Experts:
    """The experts at N positions: their weights, and those of the components for each of them."""

    states: Tensor  # (N, E) float64: log-weights of the experts before the token that follows each position
    component_weights: Tensor  # (N, E, M)

    def select(self, rows: slice | Tensor) -> Experts:
        """Return the experts at some positions."""
        return Experts(self.states[rows], self.component_weights[rows])

    def mixed(self) -> Tensor:
        """Return the (N, M) weights of the components for all experts together, in float64."""
        return (self.states.exp()[:, :, None] * self.component_weights.double()).sum(1)

    def log_probs(self, component_log_probs: Tensor) -> Tensor:
        """Return the (N, E) log-probabilities of tokens by each expert, in float64."""
        return expert_log_probs(self.component_weights, component_log_probs)

    def after(self, component_log_probs: Tensor, config: OnlineConfig) -> Tensor:
        """Return the (N, E) states after tokens with these (N, M) log-probabilities."""
        return update(self.states, self.log_probs(component_log_probs), config)


def span_states(
    spans: Sequence[Span], log_probs: Tensor | None, config: OnlineConfig, experts: int, device: torch.device
) -> Tensor:
    """Return the (N, E) states at the positions of some spans.

    `log_probs` are the (N, E) log-probabilities by each expert of the tokens that `next_tokens` returns. None: none of
    the tokens is evidence.
    """
    if log_probs is None:
        prior = prior_on(config, experts, device)
        given = [prior if span.state is None else span.state.to(device) for span in spans]
        return torch.stack([each for each, span in zip(given, spans, strict=True) for _ in range(len(span))])
    result, begin = np.empty(log_probs.shape), 0
    values = log_probs.detach().cpu().numpy()
    for text in _texts(spans):
        span, length = text[0], sum(map(len, text))
        first = config.log_prior(experts) if span.state is None else span.state.double().cpu().numpy()
        evidence = np.append(_evidence(text), True)  # the last row is that of the state after all evidence
        own = values[begin : begin + length][evidence]  # (tokens of evidence + 1, E)
        updated = posterior(own, np.zeros(len(own), bool), config, first=first)
        result[begin : begin + length] = updated[np.cumsum(evidence) - evidence]
        begin += length
    return torch.from_numpy(result).to(device)


def has_evidence(spans: Sequence[Span]) -> bool:
    """Whether a token of some spans updates the states of later positions."""
    return any(_evidence(text).any() for text in _texts(spans))


def next_tokens(spans: Sequence[Span], device: torch.device) -> Tensor:
    """Return the (N,) tokens that follow the positions of spans, 0 where that is not known."""
    tokens = []
    for text in _texts(spans):
        known = text[-1].tokens[text[0].start + 1 :].to(device).long()
        tokens += [known, torch.zeros(1, dtype=torch.long, device=device)]
    return torch.cat(tokens)


def _texts(spans: Sequence[Span]) -> list[list[Span]]:
    """Join spans that continue the span before them: windows of one text."""
    texts: list[list[Span]] = []
    for span in spans:
        before = texts[-1][-1] if texts else None
        if before is not None and span.state is None and span.start == len(before.tokens):
            same = span.tokens.data_ptr() == before.tokens.data_ptr()  # views of one tensor
            if same and len(before.tokens):
                texts[-1].append(span)
                continue
        texts.append([span])
    return texts


def _evidence(text: Sequence[Span]) -> NDArray[np.bool_]:
    """Mark the positions of a text, except its last one, whose next token is evidence."""
    first, last = text[0], text[-1]
    count = max(0, len(last.tokens) - first.start - 1)
    if last.origins is None or not count:  # at one position, the device need not be waited for
        return np.ones(count, bool)
    return np.asarray((last.origins[first.start + 1 :] == Origin.GIVEN).cpu().numpy())


@lru_cache(maxsize=64)
def prior_on(config: OnlineConfig, experts: int, device: torch.device) -> Tensor:
    """Return the (E,) logarithms of the prior on a device; cached, since the host would wait for the copy."""
    return torch.from_numpy(config.log_prior(experts)).to(device)


def choose_config(log_probs: Array, begins: NDArray[np.bool_]) -> tuple[OnlineConfig | None, float]:
    """Choose the prior and the switch rate for (N, E) log-probabilities of tokens; return them and the mean log loss.

    Text of the stores' own domain does not show what a larger prior of the model alone is good for. So the largest
    prior is chosen whose perplexity is within 0.2 % of the smallest perplexity, with or without online weights. None:
    no prior is, because texts are too short.
    """
    loss_without = -float(log_probs[:, 1].mean())  # of the mixture without online weights
    losses = {
        config: -float(mixed_log_probs(posterior(log_probs, begins, config), log_probs).mean())
        for config in (OnlineConfig(prior, rate) for prior in _PRIORS for rate in _RATES)
    }
    limit = min(loss_without, *losses.values()) + _MAX_COST
    within = [config for config, loss in losses.items() if loss <= limit]
    if not within:
        return None, loss_without
    best = min(within, key=lambda config: (-config.prior, losses[config]))
    return best, losses[best]


def mixed_log_probs(log_weights: Array, log_probs: Array) -> Array:
    """Return the (N,) log-probabilities of tokens by all experts together."""
    return _logsumexp(log_weights + log_probs)
