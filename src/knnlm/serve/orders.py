"""What the engine is asked for, and what it gives back. Knows nothing about HTTP, and runs nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnlm.serve.sampling import Penalties


@dataclass(frozen=True)
class Wish:
    """What one request asks of the memory; None is what the server was started with."""

    off: bool = False
    weight: float | None = None  # λ
    k: int | None = None
    temperature: float | None = None  # τ
    memories: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Order:
    """One prompt, and how it is to be continued."""

    tokens: tuple[int, ...]  # the start token first
    max_tokens: int
    copies: int = 1  # continuations of it, each drawn by itself
    temperature: float = 0.0  # of sampling; 0 takes the most probable token
    top_p: float = 1.0
    penalties: Penalties = field(default_factory=Penalties)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    echo: bool = False  # the prompt's own tokens are told of too
    alternatives: int = 0  # most probable tokens to name beside each
    sources: int = 0  # neighbours to name for each token
    wish: Wish = field(default_factory=Wish)
    deadline: float | None = None  # on time.monotonic's clock
    hidden: bool = True  # the first token is not the caller's
    endless: bool = False  # the model's own end is a token like any other
    windowed: bool = False  # read in the memory's windows, as evaluation does: a text that is only scored


@dataclass(frozen=True)
class Neighbours:
    """What scoring a token again needs of the store's neighbours: no text, and nothing as long as the vocabulary."""

    distances: NDArray[np.float32]  # (k,)
    hits: NDArray[np.int8]  # (k,) 1: it votes for the token; 0: for another; -1: there is none
    counts: NDArray[np.float32] | None  # (k,)

    @property
    def bytes(self) -> int:
        """How much memory that takes."""
        return self.distances.nbytes + self.hits.nbytes + (0 if self.counts is None else self.counts.nbytes)


@dataclass(frozen=True)
class Opinion:
    """What each part of the mixture said of the token, and what it weighed; enough to weigh it anew."""

    logs: tuple[float, ...]  # log-probabilities, the language model's first
    weights: tuple[float, ...]
    abstains: tuple[bool, ...]
    neighbours: Neighbours | None  # of the store whose k and τ a request may set


@dataclass
class Token:
    """One token of a text: how probable it was, and who said so."""

    id: int
    log_p: float
    p_lm: float
    p_knn: float | None  # by the memories together; None where none has an opinion
    p: float
    weight: float  # of the memories together: p = (1 - weight) · p_lm + weight · p_knn
    opinion: Opinion | None  # None: nothing was read before it
    sources: list[dict[str, Any]] = field(default_factory=list)
    shares: list[dict[str, Any]] = field(default_factory=list)  # memory by memory, where there are several
    top: list[tuple[int, float]] = field(default_factory=list)  # most probable tokens and their log-probabilities
    text: str = ""


def unread(token: int) -> Token:
    """Give the first token of a text, which nobody predicted."""
    return Token(token, math.nan, math.nan, None, math.nan, 0.0, None)


def without_neighbours(token: Token) -> Token:
    """Leave out what only scoring again needs: an answer of many tokens would be huge with it."""
    said = token.opinion
    if said is None or said.neighbours is None:
        return token
    light = Opinion(said.logs, said.weights, said.abstains, None)
    # Written out, since `dataclasses.replace` takes some times as long, for every token.
    return Token(
        token.id,
        token.log_p,
        token.p_lm,
        token.p_knn,
        token.p,
        token.weight,
        light,
        token.sources,
        token.shares,
        token.top,
        token.text,
    )


@dataclass(frozen=True)
class Said:
    """Tokens of one continuation whose text is settled."""

    copy: int
    tokens: list[Token]


@dataclass(frozen=True)
class Ended:
    """One continuation is complete: "stop" by a stop string or the model itself, "length" by max_tokens."""

    copy: int
    reason: str
    generated: int  # tokens drawn, whether or not their text is shown


@dataclass(frozen=True)
class Failed:
    """The order cannot be carried out."""

    status: int
    message: str


Event = Said | Ended | Failed
