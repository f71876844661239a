"""What the engine is asked for, and what it gives back. Knows nothing about HTTP, and runs nothing.

An order that was taken, and why one may not be. Knows nothing about how orders are carried out.

Hand events over to those who wait for them, those of a few milliseconds together. Knows nothing about texts.

Whoever is woken takes the interpreter from the one who computes, for as long as a small model takes for a layer. Tokens
that come more quickly than anybody can read need not wake anybody one by one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from knnlm.errors import KnnlmError
from knnlm.server.engine.sampling import Penalties

if TYPE_CHECKING:
    from knnlm.server.engine.history import TraceEntry


@dataclass(frozen=True)
class MemoryOverrides:
    """What one request asks of the memory; None is what the server was started with."""

    off: bool = False
    lmbda: float | None = None  # λ
    k: int | None = None
    knn_temperature: float | None = None  # τ
    memories: tuple[str, ...] | None = None


@dataclass(frozen=True)
class GenerationRequest:
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
    wish: MemoryOverrides = field(default_factory=MemoryOverrides)
    deadline: float | None = None  # on time.monotonic's clock
    hidden: bool = True  # the first token is not the caller's
    endless: bool = False  # the model's own end is a token like any other
    windowed: bool = False  # read in the memory's windows, as evaluation does: a text that is only scored


@dataclass(frozen=True)
class KeptNeighbours:
    """What scoring a token again needs of the store's neighbours: no text, and nothing as long as the vocabulary."""

    distances: NDArray[np.float32]  # (k,)
    hits: NDArray[np.int8]  # (k,) 1: it votes for the token; 0: for another; -1: there is none
    counts: NDArray[np.float32] | None  # (k,)

    @property
    def bytes(self) -> int:
        """How much memory that takes."""
        return self.distances.nbytes + self.hits.nbytes + (0 if self.counts is None else self.counts.nbytes)


@dataclass(frozen=True)
class ComponentLogProbs:
    """What each part of the mixture said of the token, and what it weighed; enough to weigh it anew."""

    logs: tuple[float, ...]  # log-probabilities, the language model's first
    weights: tuple[float, ...]
    abstains: tuple[bool, ...]
    neighbours: KeptNeighbours | None  # of the store whose k and τ a request may set


@dataclass
class ScoredToken:
    """One token of a text: how probable it was, and who said so."""

    id: int
    log_p: float
    p_lm: float
    p_knn: float | None  # by the memories together; None where none has an opinion
    p: float
    weight: float  # of the memories together: p = (1 - weight) · p_lm + weight · p_knn
    opinion: ComponentLogProbs | None  # None: nothing was read before it
    sources: list[dict[str, Any]] = field(default_factory=list)
    shares: list[dict[str, Any]] = field(default_factory=list)  # memory by memory, where there are several
    top: list[tuple[int, float]] = field(default_factory=list)  # most probable tokens and their log-probabilities
    text: str = ""


def unscored(token: int) -> ScoredToken:
    """Give the first token of a text, which nobody predicted."""
    return ScoredToken(token, math.nan, math.nan, None, math.nan, 0.0, None)


def without_neighbours(token: ScoredToken) -> ScoredToken:
    """Leave out what only scoring again needs: an answer of many tokens would be huge with it."""
    said = token.opinion
    if said is None or said.neighbours is None:
        return token
    light = ComponentLogProbs(said.logs, said.weights, said.abstains, None)
    # Written out, since `dataclasses.replace` takes some times as long, for every token.
    return ScoredToken(
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
class TokensEvent:
    """Tokens of one continuation whose text is settled."""

    copy: int
    tokens: list[ScoredToken]


@dataclass(frozen=True)
class FinishEvent:
    """One continuation is complete: "stop" by a stop string or the model itself, "length" by max_tokens."""

    copy: int
    reason: str
    generated: int  # tokens drawn, whether or not their text is shown


@dataclass(frozen=True)
class ErrorEvent:
    """The order cannot be carried out."""

    status: int
    message: str


Event = TokensEvent | FinishEvent | ErrorEvent


class Busy(KnnlmError):
    """There is no room for one more order."""


class Stopped(KnnlmError):
    """Orders are not carried out any more."""


class RequestHandle:
    """An order that was taken: its events come here, and it can be called off."""

    def __init__(self, order: GenerationRequest, put: Callable[[Event], None] | None = None) -> None:
        self.order = order
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.put = put or self.events.put
        self.cancelled = False
        self.taken = time.monotonic()
        self.texts: list[TraceEntry] = []  # one for each continuation

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.cancelled = True

    def wait(self) -> Iterator[Event]:
        """Give its events as they come, until it is done."""
        left = self.order.copies
        while left:
            event = self.events.get()
            left = 0 if isinstance(event, ErrorEvent) else left - isinstance(event, FinishEvent)
            yield event


# Seconds from one handing over to the next, where nothing is urgent: as long as a screen shows one picture.
PAUSE = 1 / 60

Post = Callable[[list[tuple[RequestHandle, Event]]], None]


def put_each(events: list[tuple[RequestHandle, Event]]) -> None:
    """Bring each event to its ticket."""
    for ticket, event in events:
        ticket.put(event)


class EventBuffer:
    """Events that nobody was told of yet; for one thread only."""

    def __init__(self, post: Post = put_each) -> None:
        self.post = post
        self.posted = 0  # times that something was handed over
        self._events: list[tuple[RequestHandle, Event]] = []
        self._urgent = False
        self._last = -PAUSE

    def add(self, ticket: RequestHandle, event: Event, *, urgent: bool) -> None:
        """Take an event; one that is urgent is handed over at the next occasion, with all that came before it."""
        self._events.append((ticket, event))
        self._urgent = self._urgent or urgent

    def hand_over(self, *, at_once: bool) -> None:
        """Hand over what is there, at once or where it is time."""
        if not self._events:
            return
        now = time.monotonic()
        if at_once or self._urgent or now - self._last >= PAUSE:
            events, self._events = self._events, []
            self._urgent, self._last = False, now
            self.posted += 1
            self.post(events)
