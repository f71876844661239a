"""Next-token distributions at N positions, dense or sparse. Knows nothing about where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

ROWS = 128  # of a (N, V) tensor at a time, so that no second tensor of that size is made


class Prediction(Protocol):
    """What every part of a mixture gives. A row may abstain: it has no opinion, and its weight goes to the others."""

    def of(self, targets: Tensor) -> Tensor:
        """Give the (N,) log-probabilities of one token a row, without building (N, V)."""

    def log_dense(self) -> Tensor:
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

    def of(self, targets: Tensor) -> Tensor:
        """Give the (N,) log-probabilities of one token a row."""
        return self.of_each(targets[:, None])[:, 0]

    def of_each(self, tokens: Tensor) -> Tensor:
        """Give the log-probabilities of some tokens a row, (N, n) → (N, n)."""
        return self.logits.gather(1, tokens).float() - self._totals[:, None]

    def log_dense(self) -> Tensor:
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

    def of(self, targets: Tensor) -> Tensor:
        """Give the (N,) log-probabilities of one token a row: -inf where no neighbour voted for it."""
        voted = self.values == targets[:, None]
        return self.log_weights.masked_fill(~voted, -torch.inf).logsumexp(1)

    def log_dense(self) -> Tensor:
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
