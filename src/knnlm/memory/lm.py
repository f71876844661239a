"""What a language model says: the one that is given a memory, or a second one that is a memory itself.

A second model (a memorising LM, a domain LM) must have the same tokenizer. Knows nothing about how models are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from knnlm.memory.context import LOGITS, Context, Source
from knnlm.memory.prediction import ROWS, Logits

SIGNALS = ("top", "second", "entropy")


@dataclass(frozen=True)
class Spoken:
    """The answer of a language model."""

    logits: Tensor  # (N, V)

    @cached_property
    def parts(self) -> Sequence[Logits]:
        """The one prediction."""
        return (Logits(self.logits),)

    def signals(self) -> Tensor:
        """Give (N, 3): the log-probabilities of the first and second choice, and the entropy."""
        return self._look[0]

    def top(self) -> Tensor:
        """Give the most probable tokens."""
        return self._look[1]

    @cached_property
    def _look(self) -> tuple[Tensor, Tensor]:
        signals, top = [], []
        for rows in self.logits.split(ROWS):
            log_p = rows.float().log_softmax(1)
            best, tokens = log_p.topk(min(2, log_p.shape[1]), 1)
            entropy = -(log_p.exp() * log_p.clamp(min=-1e9)).sum(1)
            signals.append(torch.stack([best[:, 0], best[:, -1], entropy], 1))
            top.append(tokens[:, 0])
        if not signals:
            return self.logits.new_zeros(0, len(SIGNALS)), self.logits.new_zeros(0, dtype=torch.long)
        return torch.cat(signals).clamp(-100, 100), torch.cat(top)


class LMMemory:
    """A second language model with the same tokenizer."""

    name = "lm"
    horizon = 0
    signal_names = SIGNALS

    def __init__(self, reader: int) -> None:
        self.source = Source(reader, LOGITS)

    @property
    def part_names(self) -> Sequence[str]:
        """The one prediction."""
        return (self.name,)

    def predict(self, context: Context) -> Spoken:
        """Say what the model said."""
        return Spoken(context.seen[self.source])
