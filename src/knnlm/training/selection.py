"""The learning rate and the epochs of a training, chosen on held-out text in less than twice the time of one training.

A training with a constant rate, after a warm-up, can end anywhere with a *cooldown*, in which the rate falls to 0
(Hägele et al. 2024); the loss on held-out text after it is what is compared. First each rate is tried for half an epoch
and a cooldown; while the lowest one is the best, half of it is tried too. The training with the best rate goes on from
where its cooldown began, with a cooldown after each epoch, until one is no better than the one before. The result is
the best point between the weights of the initial model and those after the best cooldown.

So a training of e epochs takes e epochs at a constant rate, a fifth of the steps so far for each cooldown, and half an
epoch for each other rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FIRST = 0.5  # epochs for which all rates are tried
COOLDOWN = 0.2  # of the steps before it
MAX_LOWER = 2  # rates that are tried below the given ones
INTERPOLATIONS = (0.25, 0.5, 0.7, 0.85)  # shares of the trained weights beside the initial ones, besides 0 and 1


@dataclass(frozen=True)
class Piece:
    """A part of the training: from one place to another at a constant rate, or the cooldown that begins there."""

    learning_rate: float
    begin: float  # epochs
    end: float  # epochs; of a cooldown, the same as `begin`

    @property
    def is_cooldown(self) -> bool:
        """Whether the rate falls to 0."""
        return self.begin == self.end


@dataclass(frozen=True)
class Trial:
    """The loss on held-out text after a cooldown, or of the initial model, which has no rate."""

    learning_rate: float | None
    epochs: float
    loss: float  # nats per token

    def as_dict(self) -> dict[str, Any]:
        """Return the trial as JSON types."""
        return asdict(self)


def next_piece(rates: Sequence[float], max_epochs: int, trials: Sequence[Trial]) -> Piece | None:
    """Return what is trained next, at a constant rate, before its cooldown; None: the training is finished."""
    tried = [trial for trial in trials if trial.learning_rate is not None]
    first = [trial for trial in tried if trial.epochs == FIRST]
    if len(first) < len(rates):
        return Piece(rates[len(first)], 0.0, FIRST)
    best = min(first, key=lambda trial: trial.loss)
    assert best.learning_rate is not None
    lowest = min(trial.learning_rate or math.inf for trial in first)
    if len(tried) == len(first) < len(rates) + MAX_LOWER and best.learning_rate == lowest and math.isfinite(best.loss):
        return Piece(lowest / 2, 0.0, FIRST)
    later = [best, *tried[len(first) :]]
    if not math.isfinite(best.loss) or later[-1].epochs >= max_epochs:
        return None
    if len(later) > 1 and not later[-1].loss < later[-2].loss:
        return None
    return Piece(best.learning_rate, later[-1].epochs, math.floor(later[-1].epochs) + 1.0)


def cooldown_steps(steps: int) -> int:
    """Return the number of steps of a cooldown after so many."""
    return max(1, math.ceil(COOLDOWN * steps))


def piece_rates(piece: Piece, before: int, count: int, warm_up: int) -> Iterator[float]:
    """Yield the rate of each step of a piece, which has so many steps before it, without those of cooldowns."""
    for step in range(count):
        if piece.is_cooldown:
            yield piece.learning_rate * (count - step) / (count + 1)
        else:
            yield piece.learning_rate * (min(1.0, (before + step + 1) / warm_up) if warm_up else 1.0)
