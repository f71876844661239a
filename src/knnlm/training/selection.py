"""The learning rate and the epochs of a training, chosen on held-out text in about twice the time of one training.

A training of so many epochs has a constant rate, after a warm-up, for two thirds of its steps; then the rate falls to 0
(Hägele et al. 2024). One with more epochs goes on from where the rate began to fall: only the decay is repeated. The
loss on held-out text at the end of a decay is what is compared.

1. Each rate is tried for half an epoch; while the lowest one is the best, half of it is tried too, and while the
   highest one is the best, twice as much.
2. The best one goes on to one epoch, and so does the second one, from the beginning, if the two were nearly equal.
3. The better one goes on, epoch by epoch, until one more does not help.
4. The weights of the best two trials are averaged if that helps, and moved towards those of the initial model as far as
   that helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FIRST = 0.5  # epochs for which all rates are tried
DECAY = 1 / 3  # of a training, in which its rate falls
MAX_FURTHER = 2  # rates that are tried below or above the given ones
NEARLY = 0.02  # nats per token by which two rates differ that are nearly equal
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


def next_piece(rates: Sequence[float], max_epochs: int, trials: Sequence[Trial]) -> Piece | None:
    """Return what is trained next; None: the training is finished."""
    tried = [trial for trial in trials if trial.learning_rate is not None]
    first = [trial for trial in tried if trial.epochs == FIRST]
    if (rate := _next_rate(rates, first, is_open=len(first) == len(tried))) is not None:
        return Piece.until(rate, FIRST)
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
    if not last.loss < before.loss or last.epochs >= max_epochs:
        return None
    assert winner.learning_rate is not None
    return Piece.until(winner.learning_rate, last.epochs + 1, after=last.epochs)


def _next_rate(rates: Sequence[float], first: Sequence[Trial], *, is_open: bool) -> float | None:
    """Return the next rate to try for half an epoch; None: those in `first` are enough."""
    if len(first) < len(rates):
        return rates[len(first)]
    if not is_open or len(first) >= len(rates) + MAX_FURTHER:
        return None
    ordered = sorted((trial.learning_rate or math.nan, trial.loss) for trial in first)
    (lowest, loss_of_lowest), (highest, loss_of_highest) = ordered[0], ordered[-1]
    best = min(loss for _, loss in ordered)
    if not math.isfinite(best) or best not in (loss_of_lowest, loss_of_highest):
        return None
    return lowest / 2 if best == loss_of_lowest else highest * 2


def planned_epochs(rates: int, max_epochs: int) -> float:
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
