"""Weights that depend on the tokens of the text so far: evidence for a gate, and a posterior over experts.

The state of a text is one vector in float64, which evaluation, generation and the server carry along: the log-weights
of the E experts, the gain of the mixture and the number of tokens, then the evidence of each memory, if the gate uses
it. All depend only on tokens that came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from knnlm.memories.base import Origin, Span, on_device
from knnlm.mixture.evidence import (
    EVIDENCE,
    evidence_features,
    gains,
    in_domain,
    mixture_gains,
    sums_before,
    text_evidence,
    update_evidence,
)
from knnlm.mixture.online import OnlineConfig, expert_log_probs, expert_weights, mixed_log_probs, posterior, update
from knnlm.mixture.weights import Weights

_TOTALS = 2  # values of a state that are summed over a text: the gain of the mixture, the number of tokens


@dataclass(frozen=True)
class PositionInputs:
    """What the weights of N positions are computed from, besides the state of the text."""

    inputs: Tensor  # (N, F) of the weights; see `Weights.inputs`
    abstains: Tensor  # (N, M) marks components that abstain

    def select(self, rows: slice) -> PositionInputs:
        """Return those of some positions."""
        return PositionInputs(self.inputs[rows], self.abstains[rows])


@dataclass(frozen=True)
class SpanTexts:
    """The texts that some spans are parts of, and which of their tokens are evidence."""

    texts: Sequence[Sequence[Span]]  # consecutive spans of each text
    evident: Tensor  # (N,) marks the positions whose next token is evidence

    @classmethod
    def of(cls, spans: Sequence[Span]) -> SpanTexts:
        """Group spans by their texts; the origins of tokens are copied from the device here, and once."""
        texts = _texts(spans)
        if all(len(text[-1].tokens) - text[0].start == 1 for text in texts):  # a step of generation
            return cls(texts, torch.zeros(len(texts), dtype=torch.bool))
        return cls(texts, torch.cat([torch.zeros(0, dtype=torch.bool), *map(_evident, texts)]))

    @property
    def has_evidence(self) -> bool:
        """Whether a token updates the states of later positions."""
        return bool(self.evident.any())

    def next_tokens(self, device: torch.device) -> Tensor:
        """Return the (N,) tokens that follow the positions, 0 where that is not known."""
        tokens = []
        for text in self.texts:
            known = text[-1].tokens[text[0].start + 1 :].to(device).long()
            tokens += [known, torch.zeros(1, dtype=torch.long, device=device)]
        return torch.cat(tokens)


@dataclass(frozen=True)
class OnlineLayer:
    """The weights of a mixture, and how the tokens of a text change them."""

    weights: Weights
    config: OnlineConfig | None  # None: the mixture is the only expert
    kinds: tuple[str, ...]  # of the memories
    slices: tuple[slice, ...]  # the components of each memory

    @property
    def stateful(self) -> bool:
        """Whether weights depend on the text so far."""
        return self.config is not None or self.weights.uses_evidence

    @property
    def stores(self) -> list[slice]:
        """The components of each store."""
        return self._of_kind("knn")

    @property
    def caches(self) -> list[slice]:
        """The components of each cache."""
        return self._of_kind("cache")

    def _of_kind(self, kind: str) -> list[slice]:
        return [own for name, own in zip(self.kinds, self.slices, strict=True) if name == kind]

    @cached_property
    def log_prior(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The (E,) logarithms of the experts' prior."""
        if self.config is None:
            return np.zeros(1)
        return self.config.log_prior(len(self.stores), len(self.caches))

    @cached_property
    def experts(self) -> int:
        """The number E of experts."""
        return len(self.log_prior)

    @property
    def switch_rate(self) -> float:
        """The rate of switching between experts."""
        return 0.0 if self.config is None else self.config.switch_rate

    @cached_property
    def first(self) -> tuple[float, ...]:
        """The (S,) state at the beginning of a text."""
        evidence = len(EVIDENCE) * len(self.slices) if self.weights.uses_evidence else 0
        return (*self.log_prior.tolist(), *[0.0] * (_TOTALS + evidence))

    @property
    def _totals(self) -> slice:
        """The places of the totals in a state."""
        return slice(self.experts, self.experts + _TOTALS)

    @property
    def _evidence(self) -> slice:
        """The places of the evidence in a state."""
        return slice(self.experts + _TOTALS, None)

    def in_domain(self, states: Tensor) -> Tensor:
        """Whether texts with these (N, S) states are in the domain of the memories; see `knnlm.mixture.evidence`."""
        gain, tokens = states[:, self._totals].T
        return in_domain(gain, tokens)

    def by_expert(self, states: Tensor, given: PositionInputs) -> Tensor:
        """Return the (N, E, M) component weights of each expert at positions with these (N, S) states."""
        evidence = evidence_features(states[:, self._evidence]) if self.weights.uses_evidence else None
        weights = self.weights.compute(given.inputs, given.abstains, evidence)
        if self.config is None:
            return weights[:, None]
        return expert_weights(weights, self.stores, self.caches, given.abstains)

    def mixed(self, states: Tensor, by_expert: Tensor) -> Tensor:
        """Return the (N, M) weights of the components for all experts together, in float64 if there are several."""
        if by_expert.shape[1] == 1:
            return by_expert[:, 0]
        return (states[:, None, : by_expert.shape[1]].exp() @ by_expert)[:, 0]

    def after(self, states: Tensor, by_expert: Tensor, log_probs: Tensor, abstains: Tensor) -> Tensor:
        """Return the (N, S) states after tokens with these (N, M) log-probabilities by each component."""
        count = by_expert.shape[1]
        log_prior, log_weights = on_device(self.first, states.device, torch.float64)[:count], states[:, :count]
        by_token = expert_log_probs(by_expert, log_probs)
        gain = mixture_gains((log_weights + by_token).logsumexp(1), log_probs[:, 0])
        after = [
            update(log_weights, by_token, log_prior, self.switch_rate),
            states[:, self._totals] + torch.stack([gain, torch.ones_like(gain)], 1),
        ]
        if self.weights.uses_evidence:
            gained = gains(log_probs, abstains, self._first_components)
            after.append(update_evidence(states[:, self._evidence], gained))
        return torch.cat(after, 1)

    @property
    def _first_components(self) -> list[int]:
        return [own.start for own in self.slices]

    def states_before(
        self,
        given: PositionInputs,
        log_probs: Tensor,
        begins: Tensor,
        *,
        starts: Tensor | None = None,
        evident: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the (N, S) states before each of N tokens, in the order of the texts, and the weights by expert.

        `log_probs` are the (N, M) log-probabilities of the tokens by each component; `begins` marks the first tokens of
        texts, whose (N, S) states are in `starts`. Tokens that are not `evident` change nothing.
        """
        log_probs = log_probs.detach()
        begins_, evident_ = begins.cpu().numpy(), None if evident is None else evident.cpu().numpy()
        count, device = self.experts, log_probs.device
        if starts is None:
            starts = on_device(self.first, torch.device("cpu"), torch.float64).expand(len(begins), -1)
        starts_ = starts.double().cpu().numpy()
        states = torch.empty(starts_.shape, dtype=torch.float64, device=device)
        if self.weights.uses_evidence:
            rest = {"starts": starts_[:, self._evidence], "evident": evident_}
            before = text_evidence(log_probs, given.abstains, self._first_components, begins_, **rest)
            states[:, self._evidence] = torch.from_numpy(before).to(device)
        by_expert = self.by_expert(states, given)
        by_token = expert_log_probs(by_expert, log_probs).cpu().numpy()
        log_weights = posterior(
            by_token, begins_, self.log_prior, self.switch_rate, starts=starts_[:, :count], evident=evident_
        )
        states[:, :count] = torch.from_numpy(log_weights).to(device)
        gain = mixture_gains(torch.from_numpy(mixed_log_probs(log_weights, by_token)), log_probs[:, 0].cpu()).numpy()
        both = np.stack([gain, np.ones_like(gain)], 1)
        if evident_ is not None:
            both[~evident_] = 0.0
        states[:, self._totals] = torch.from_numpy(sums_before(both, begins_, starts_[:, self._totals])).to(device)
        return states, by_expert

    def given_states(self, spans: Sequence[Span], rows: int, device: torch.device) -> Tensor:
        """Return the (N, S) states at the positions of spans in which no token changes the state.

        Without spans, all of the N rows are the beginnings of texts.
        """
        first = on_device(self.first, device, torch.float64)
        if not spans:
            return first.expand(rows, -1)
        given = [first if span.state is None else span.state.to(device) for span in spans]
        return torch.stack([state for state, span in zip(given, spans, strict=True) for _ in range(len(span))])

    def span_states(self, texts: SpanTexts, given: PositionInputs, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (N, S) states at the positions of spans, and the weights by expert.

        `log_probs` are the (N, M) log-probabilities by each component of the tokens that `next_tokens` returns.
        """
        begins, starts = [], []
        cpu = torch.device("cpu")
        for text in texts.texts:
            first, length = text[0], sum(map(len, text))
            begins.append(torch.arange(length) == 0)
            start = on_device(self.first, cpu, torch.float64) if first.state is None else first.state.double().cpu()
            starts.append(start.expand(length, -1))
        return self.states_before(given, log_probs, torch.cat(begins), starts=torch.cat(starts), evident=texts.evident)


def _texts(spans: Sequence[Span]) -> list[list[Span]]:
    """Join spans that continue the span before them: windows of one text."""
    texts: list[list[Span]] = []
    for span in spans:
        before = texts[-1][-1] if texts and span.state is None else None
        if before is not None and span.start == len(before.tokens):
            same = span.tokens.data_ptr() == before.tokens.data_ptr()  # views of one tensor
            if same and len(before.tokens):
                texts[-1].append(span)
                continue
        texts.append([span])
    return texts


def _evident(text: Sequence[Span]) -> Tensor:
    """Mark the positions of a text whose next token is evidence; that of the last position is not known."""
    first, last = text[0], text[-1]
    known = torch.zeros(len(last.tokens) - first.start, dtype=torch.bool)
    if len(known) > 1:  # at one position, the device need not be waited for
        given = True if last.origins is None else (last.origins[first.start + 1 :] == Origin.GIVEN).cpu()
        known[:-1] = given
    return known
