"""Requests to the scheduler and the events that answer them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnlm.errors import KnnlmError
from knnlm.server.engine.sampling import Penalties

FLUSH_SECONDS = 1 / 60  # between two deliveries of events that are not urgent: one frame of a screen


@dataclass(frozen=True)
class MemoryOverrides:
    """Memory settings of one request; None keeps the server's own setting."""

    off: bool = False
    lmbda: float | None = None  # λ
    k: int | None = None
    knn_temperature: float | None = None  # τ
    memories: tuple[str, ...] | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt, and how to continue or score it."""

    tokens: tuple[int, ...]  # the start token first
    max_tokens: int
    copies: int = 1  # continuations, sampled independently
    temperature: float = 0.0  # of sampling; 0 is greedy
    top_p: float = 1.0
    penalties: Penalties = field(default_factory=Penalties)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    echo: bool = False  # also return the prompt's tokens
    alternatives: int = 0  # most probable tokens to return at each position
    sources: int = 0  # neighbours to return for each token
    overrides: MemoryOverrides = field(default_factory=MemoryOverrides)
    deadline: float | None = None  # on time.monotonic's clock
    start_added: bool = True  # the start token was added by the server and is not echoed
    ignore_eos: bool = False  # continue after the end-of-sequence token
    windowed: bool = False  # score the text in the store's windows, as evaluation does
    first_choice: int = 0  # index of the first continuation in the response


@dataclass(frozen=True)
class KeptNeighbours:
    """The data that rescoring needs of a token's neighbours: no text, and nothing of the vocabulary's size."""

    distances: NDArray[np.float32]  # (k,)
    hits: NDArray[np.int8]  # (k,) 1: votes for the token; 0: votes for another; -1: padding
    counts: NDArray[np.float32] | None  # (k,)

    @property
    def bytes(self) -> int:
        """Bytes of the arrays."""
        return self.distances.nbytes + self.hits.nbytes + (0 if self.counts is None else self.counts.nbytes)


@dataclass(frozen=True)
class ComponentLogProbs:
    """The log-probability and the weight of each component for one token: the input of rescoring."""

    log_probs: tuple[float, ...]  # the language model's first
    weights: tuple[float, ...]
    abstains: tuple[bool, ...]
    neighbours: KeptNeighbours | None  # of the memory whose k and τ a request can set


@dataclass
class ScoredToken:
    """One token of a text with its probabilities and sources."""

    id: int
    log_p: float
    p_lm: float
    p_knn: float | None  # of all memories together; None where all abstain
    p: float
    weight: float  # of all memories together: p = (1 - weight) · p_lm + weight · p_knn
    components: ComponentLogProbs | None  # None: the first token of a text, which is not predicted
    sources: list[dict[str, Any]] = field(default_factory=list)
    shares: list[dict[str, Any]] = field(default_factory=list)  # by memory, where there are several
    top: list[tuple[int, float]] = field(default_factory=list)  # most probable tokens and their log-probabilities
    text: str = ""


def unscored(token: int) -> ScoredToken:
    """Return the first token of a text, which has no probability."""
    return ScoredToken(token, math.nan, math.nan, None, math.nan, 0.0, None)


def without_neighbours(token: ScoredToken) -> ScoredToken:
    """Return the token without the neighbours kept for rescoring, which would make long responses huge."""
    components = token.components
    if components is None or components.neighbours is None:
        return token
    components = ComponentLogProbs(components.log_probs, components.weights, components.abstains, None)
    # Written out, since `dataclasses.replace` takes several times as long, for every token.
    return ScoredToken(
        token.id,
        token.log_p,
        token.p_lm,
        token.p_knn,
        token.p,
        token.weight,
        components,
        token.sources,
        token.shares,
        token.top,
        token.text,
    )


@dataclass(frozen=True)
class TokensEvent:
    """Tokens of one continuation whose text is final."""

    choice: int  # index of the continuation in the response
    trace_id: str  # for rescoring
    tokens: list[ScoredToken]


@dataclass(frozen=True)
class FinishEvent:
    """The end of one continuation: "stop" at a stop string or end-of-sequence token, "length" at max_tokens."""

    choice: int
    trace_id: str
    reason: str
    generated: int  # sampled tokens, whether or not their text is shown


@dataclass(frozen=True)
class ErrorEvent:
    """The failure of a request; no event follows."""

    status: int
    message: str


Event = TokensEvent | FinishEvent | ErrorEvent


class Busy(KnnlmError):
    """The queue of requests is full."""


class Stopped(KnnlmError):
    """The scheduler does not run."""


class RequestFailed(KnnlmError):
    """A request failed with an HTTP status."""

    def __init__(self, event: ErrorEvent) -> None:
        super().__init__(event.message)
        self.status = event.status


class RequestHandle:
    """A submitted request: receives its events, and can be cancelled."""

    def __init__(self, request: GenerationRequest, put: Callable[[Event], None] | None = None) -> None:
        self.request = request
        self.cancelled = False
        self.submitted = time.monotonic()
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.put = put or self._events.put

    def cancel(self) -> None:
        """Stop the request at the next step of the scheduler."""
        self.cancelled = True

    def events(self) -> Iterator[Event]:
        """Yield events as they arrive, until the request ends; only without a `put` of the caller."""
        left = self.request.copies
        while left:
            event = self._events.get()
            left = 0 if isinstance(event, ErrorEvent) else left - isinstance(event, FinishEvent)
            yield event


AddressedEvents = list[tuple[RequestHandle, Event]]


def deliver_events(events: AddressedEvents) -> None:
    """Put each event into its request's handle."""
    for handle, event in events:
        handle.put(event)


class EventBuffer:
    """Events that are not delivered yet; for the scheduler's thread only.

    Waking the event loop makes the scheduler's thread wait for the GIL, so events are delivered in groups.
    """

    def __init__(self, deliver: Callable[[AddressedEvents], None] = deliver_events) -> None:
        self.deliver = deliver
        self.flushes = 0
        self._events: AddressedEvents = []
        self._urgent = False
        self._last_flush = -FLUSH_SECONDS

    def add(self, handle: RequestHandle, event: Event, *, urgent: bool) -> None:
        """Add an event; an urgent one is delivered with the next flush, with all events before it."""
        self._events.append((handle, event))
        self._urgent = self._urgent or urgent

    def flush(self, *, force: bool) -> None:
        """Deliver all events if forced, if one is urgent, or if the last flush is long enough ago."""
        if not self._events:
            return
        now = time.monotonic()
        if force or self._urgent or now - self._last_flush >= FLUSH_SECONDS:
            events, self._events = self._events, []
            self._urgent, self._last_flush = False, now
            self.flushes += 1
            self.deliver(events)
