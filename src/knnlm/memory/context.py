"""What a memory may look at, and what it answers. Knows nothing about what memories make of it.

A text is its start token and then its tokens. Position t has read tokens[: t + 1] and predicts what follows; the key
of a position is the hidden state of some model there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from knnlm.memory.prediction import Prediction

LOGITS = "logits"  # the place of a source that is no hidden state, but what the model predicts


@dataclass(frozen=True)
class Source:
    """What is read at a position: the states of which model, at which place of which layer."""

    reader: int = 0  # 0 is the language model itself; others have numbers of their own
    place: str = "ffn_input"
    layer: int = -1


@dataclass(frozen=True)
class Run:
    """Consecutive positions of one text that are being predicted, and what came before them."""

    tokens: Tensor  # (T,) all that has been read, the start token first
    start: int  # positions start … T - 1 are being predicted
    past: Mapping[Source, Tensor] = field(default_factory=dict)  # (P, D) keys of the P positions before `start`

    def __len__(self) -> int:
        return len(self.tokens) - self.start


@dataclass(frozen=True)
class Context:
    """N positions of some texts; immutable, so forks of a text cannot disturb each other."""

    seen: Mapping[Source, Tensor]  # (N, D) keys, or (N, V) logits, at the positions of all runs, one after another
    runs: Sequence[Run] = ()
    asked: Tensor | None = None  # (N,) False where an expensive memory need not answer; None: answer everywhere

    def each_run(self) -> Iterator[tuple[slice, Run]]:
        """Give each run with the rows that its positions have."""
        row = 0
        for run in self.runs:
            yield slice(row, row + len(run)), run
            row += len(run)


class Answer(Protocol):
    """What one memory says of N positions."""

    @property
    def parts(self) -> Sequence[Prediction]:
        """Its predictions; the first is the one it stands for, others are the same evidence counted in other ways."""

    def signals(self) -> Tensor:
        """Give (N, F) finite numbers that tell how far it may be trusted; their names are the memory's."""

    def top(self) -> Tensor:
        """Give the (N,) tokens that its first part finds most probable; -1 where it abstains."""


class Memory(Protocol):
    """Anything besides the language model that predicts the next token."""

    @property
    def name(self) -> str:
        """The kind: knn, cache, …"""

    @property
    def source(self) -> Source | None:
        """What it reads of each position; None: the tokens are enough."""

    @property
    def horizon(self) -> int:
        """How many earlier positions' keys it looks back on."""

    @property
    def signal_names(self) -> Sequence[str]:
        """Name the signals of its answers."""

    @property
    def part_names(self) -> Sequence[str]:
        """Name the predictions of its answers."""

    def predict(self, context: Context) -> Answer:
        """Predict the token that follows each position."""


@dataclass(frozen=True)
class Said:
    """The answer of a memory that has one prediction and knows its signals already."""

    prediction: Prediction
    signal: Tensor  # (N, F)
    best: Tensor  # (N,)

    @property
    def parts(self) -> Sequence[Prediction]:
        """The one prediction."""
        return (self.prediction,)

    def signals(self) -> Tensor:
        """Give the signals."""
        return self.signal

    def top(self) -> Tensor:
        """Give the most probable tokens."""
        return self.best
