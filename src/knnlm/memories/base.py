"""Next-token distributions at N positions, dense or sparse. Knows nothing about where they come from.

What a memory may look at, and what it answers. Knows nothing about what memories make of it.

A text is its start token and then its tokens. Position t has read tokens[: t + 1] and predicts what follows; the key
of a position is the hidden state of some model there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

ROWS = 128  # of a (N, V) tensor at a time, so that no second tensor of that size is made


class Prediction(Protocol):
    """What every part of a mixture gives. A row may abstain: it has no opinion, and its weight goes to the others."""

    def log_prob(self, targets: Tensor) -> Tensor:
        """Give the (N,) log-probabilities of one token a row, without building (N, V)."""

    def log_probs(self) -> Tensor:
        """Give the (N, V) log-probabilities; a row that abstains is all -inf."""

    def abstains(self) -> Tensor:
        """Mark the (N,) rows without an opinion."""


@dataclass(frozen=True)
class Logits:
    """What a language model says: softmax over the whole vocabulary."""

    logits: Tensor  # (N, V)

    @cached_property
    def _totals(self) -> Tensor:
        """What is to be taken from the logits of each row, (N,); it costs a look at all of them."""
        if len(self.logits) <= ROWS:
            return self.logits.float().logsumexp(1)
        return torch.cat([rows.float().logsumexp(1) for rows in self.logits.split(ROWS)])

    def log_prob(self, targets: Tensor) -> Tensor:
        """Give the (N,) log-probabilities of one token a row."""
        return self.log_prob_each(targets[:, None])[:, 0]

    def log_prob_each(self, tokens: Tensor) -> Tensor:
        """Give the log-probabilities of some tokens a row, (N, n) → (N, n)."""
        return self.logits.gather(1, tokens).float() - self._totals[:, None]

    def log_probs(self) -> Tensor:
        """Give the (N, V) log-probabilities."""
        return self.logits.float().log_softmax(1)

    def abstains(self) -> Tensor:
        """A language model always has an opinion."""
        return torch.zeros(len(self.logits), dtype=torch.bool, device=self.logits.device)


@dataclass(frozen=True)
class Votes:
    """What neighbours say: k tokens and their weights, which sum to 1 in each row that does not abstain."""

    values: Tensor  # (N, k); -1 where there is no neighbour
    log_weights: Tensor  # (N, k) float32; -inf where there is no neighbour
    vocab_size: int

    def log_prob(self, targets: Tensor) -> Tensor:
        """Give the (N,) log-probabilities of one token a row: -inf where no neighbour voted for it."""
        voted = self.values == targets[:, None]
        return self.log_weights.masked_fill(~voted, -torch.inf).logsumexp(1)

    def log_probs(self) -> Tensor:
        """Give the (N, V) log-probabilities: -inf where no neighbour voted."""
        probs = self.log_weights.new_zeros(len(self.values), self.vocab_size)
        return self.add_to(probs, probs.new_ones(len(probs))).log_()

    def add_to(self, probs: Tensor, weights: Tensor) -> Tensor:
        """Add these votes, each row by its weight, to (N, V) probabilities."""
        # Neighbours often share a token, so add rather than assign; a missing one adds nothing to token 0.
        return probs.scatter_add_(1, self.values.clamp(min=0), self.log_weights.exp() * weights[:, None])

    def abstains(self) -> Tensor:
        """Mark the (N,) rows that have no neighbour."""
        return (self.values < 0).all(1)


LOGITS = "logits"  # the place of a source that is no hidden state, but what the model predicts


@dataclass(frozen=True)
class Source:
    """What is read at a position: the states of which model, at which place of which layer."""

    reader: int = 0  # 0 is the language model itself; others have numbers of their own
    place: str = "ffn_input"
    layer: int = -1


LM_LOGITS = Source(0, LOGITS)  # the (N, V) logits of the language model itself


@dataclass(frozen=True)
class Span:
    """Consecutive positions of one text that are being predicted, and what came before them."""

    tokens: Tensor  # (T,) all that has been read, the start token first
    start: int  # positions start … T - 1 are being predicted
    past: Mapping[Source, Tensor] = field(default_factory=dict)  # (P, D) keys of the P positions before `start`

    def __len__(self) -> int:
        return len(self.tokens) - self.start


@dataclass(frozen=True)
class Context:
    """N positions of some texts; immutable, so forks of a text cannot disturb each other."""

    states: Mapping[Source, Tensor]  # (N, D) keys, or (N, V) logits, at the positions of all runs, one after another
    spans: Sequence[Span] = ()
    search_mask: Tensor | None = None  # (N,) False where an expensive memory need not answer; None: answer everywhere

    def each_span(self) -> Iterator[tuple[slice, Span]]:
        """Give each run with the rows that its positions have."""
        row = 0
        for run in self.spans:
            yield slice(row, row + len(run)), run
            row += len(run)


class MemoryOutput(Protocol):
    """What one memory says of N positions."""

    @property
    def components(self) -> Sequence[Prediction]:
        """Its predictions; the first is the one it stands for, others are the same evidence counted in other ways."""

    def features(self) -> Tensor:
        """Give (N, F) finite numbers that tell how far it may be trusted; their names are the memory's."""

    def top(self) -> Tensor:
        """Give the (N,) tokens that its first part finds most probable; -1 where it abstains."""


class Memory(Protocol):
    """A component besides the language model that predicts the next token."""

    @property
    def expensive(self) -> bool:
        """Whether `predict` searches so much that searches are shared, delayed, or skipped; see `SearchMemory`."""

    @property
    def name(self) -> str:
        """The kind: knn, cache, …"""

    @property
    def source(self) -> Source | None:
        """What it reads of each position; None: the tokens are enough."""

    @property
    def history_length(self) -> int:
        """How many earlier positions' keys it looks back on."""

    @property
    def feature_names(self) -> Sequence[str]:
        """Name the signals of its answers."""

    @property
    def component_names(self) -> Sequence[str]:
        """Name the predictions of its answers."""

    def predict(self, context: Context) -> MemoryOutput:
        """Predict the token that follows each position."""


@dataclass(frozen=True)
class SimpleOutput:
    """The answer of a memory that has one prediction and knows its signals already."""

    prediction: Prediction
    feature_values: Tensor  # (N, F)
    best: Tensor  # (N,)

    @property
    def components(self) -> Sequence[Prediction]:
        """The one prediction."""
        return (self.prediction,)

    def features(self) -> Tensor:
        """Give the signals."""
        return self.feature_values

    def top(self) -> Tensor:
        """Give the most probable tokens."""
        return self.best
