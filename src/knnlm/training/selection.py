"""The learning rate and the epochs of a training, chosen on held-out text in about twice the time of one training.

A training of so many epochs has a constant rate, after a warm-up, for two thirds of its steps; then the rate falls to 0
(Hägele et al. 2024). One with more epochs goes on from where the rate began to fall: only the decay is repeated. The
loss on held-out text at the end of a decay is what is compared.

1. Rates are tried for half an epoch each: the given one, then twice or half the best one so far, until both were tried.
2. The best one goes on to one epoch, and so does the second one, from the beginning, if the two were nearly equal.
3. The better one goes on, epoch by epoch, until one more hardly helps.
4. The weights of the best two trials are averaged if that helps, and moved towards those of the initial model as far as
   that helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SELECTION_RULES = 2  # their number: a selection goes on by the rules that it began with
FIRST = 0.5  # epochs for which each rate is tried
DECAY = 1 / 3  # of a training, in which its rate falls
MAX_RATES = 5
NEARLY = 0.005  # nats per token by which two rates differ that are nearly equal
WORTHWHILE = 0.01  # nats per token by which an epoch helps after which another one is trained
INTERPOLATIONS = (0.25, 0.5, 0.7, 0.85)  # shares of the trained weights beside the initial ones, besides 0 and 1


@dataclass(frozen=True)
class Piece:
    """A part of the training: a constant rate from `begin` on, which falls from `decay` to `end`; all in epochs."""

    learning_rate: float
    begin: float  # 0, or where the rate of an earlier piece began to fall
    decay: float
    end: float

    @classmethod
    def until(cls, learning_rate: float, end: float, after: float = 0.0) -> Piece:
        """Return the piece that ends a training of so many epochs, after one of fewer."""
        return cls(learning_rate, decay_begin(after), decay_begin(end), end)


@dataclass(frozen=True)
class Trial:
    """The loss on held-out text after some epochs, or of the initial model, which has no rate."""

    learning_rate: float | None
    epochs: float
    loss: float  # nats per token

    def as_dict(self) -> dict[str, Any]:
        """Return the trial as JSON types."""
        return asdict(self)


def decay_begin(epochs: float) -> float:
    """Return where the rate of a training of so many epochs begins to fall."""
    return (1 - DECAY) * epochs


def next_piece(rate: float, max_epochs: int, trials: Sequence[Trial]) -> Piece | None:
    """Return what is trained next, beginning with this rate; None: the training is finished."""
    tried = [trial for trial in trials if trial.learning_rate is not None]
    first = [trial for trial in tried if trial.epochs == FIRST]
    if (following := _next_rate(rate, first)) is not None:
        return Piece.until(following, FIRST)
    best, *others = sorted(first, key=lambda trial: trial.loss)
    assert best.learning_rate is not None
    if not math.isfinite(best.loss):
        return None
    once = {trial.learning_rate: trial for trial in tried if trial.epochs == 1}
    if best.learning_rate not in once:
        return Piece.until(best.learning_rate, 1, after=FIRST)
    if others and others[0].learning_rate not in once and others[0].loss - best.loss <= NEARLY:
        assert others[0].learning_rate is not None
        return Piece.until(others[0].learning_rate, 1)
    winner = min(once.values(), key=lambda trial: trial.loss)
    *_, before, last = [best, winner, *(trial for trial in tried if trial.epochs > 1)]
    same = last.epochs == 1 and last.loss == before.loss  # half an epoch has as many steps: one
    if not (same or before.loss - last.loss > WORTHWHILE) or last.epochs >= max_epochs:
        return None
    assert winner.learning_rate is not None
    return Piece.until(winner.learning_rate, last.epochs + 1, after=last.epochs)


def _next_rate(rate: float, first: Sequence[Trial]) -> float | None:
    """Return the next rate to try for half an epoch; None: those in `first` are enough."""
    losses = {trial.learning_rate: trial.loss for trial in first if trial.learning_rate is not None}
    if not losses:
        return rate
    if len(losses) >= MAX_RATES:
        return None
    best = min(losses, key=lambda each: losses[each])
    if not math.isfinite(losses[best]):
        return min(losses) / 2
    return next((other for other in (2 * best, best / 2) if other not in losses), None)


def planned_epochs(max_epochs: int, *, rates: int = 4) -> float:
    """Return how many passes over the text a selection takes if every epoch helps and no two rates are nearly equal."""
    pieces = [
        Piece.until(1.0, 1, after=FIRST),
        *(Piece.until(1.0, end, after=end - 1) for end in range(2, max_epochs + 1)),
    ]
    return rates * FIRST + sum(piece.end - piece.begin for piece in pieces)


def constant_rates(rate: float, before: int, count: int, warm_up: int) -> Iterator[float]:
    """Yield the rate of each of `count` steps, after so many others at the same rate."""
    for step in range(before, before + count):
        yield rate * (min(1.0, (step + 1) / warm_up) if warm_up else 1.0)


def falling_rates(rate: float, count: int) -> Iterator[float]:
    """Yield the rate of each of `count` steps of a decay."""
    return (rate * (count - step) / (count + 1) for step in range(count))
