"""What a memory may look at. Knows nothing about what memories make of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from knnlm.memory.prediction import Prediction


@dataclass(frozen=True)
class Context:
    """Keys of the positions that are being predicted; immutable, so forks of a sequence cannot disturb each other."""

    keys: Tensor  # (N, D)


class Memory(Protocol):
    """Anything besides the language model that predicts the next token."""

    name: str

    def predict(self, context: Context) -> Prediction:
        """Predict the token that follows each position of the context."""
