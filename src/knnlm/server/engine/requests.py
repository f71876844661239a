"""Requests to the scheduler and the events that answer them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnlm.errors import KnnlmError


@dataclass(frozen=True)
class MemoryOverrides:
    """Memory settings of one request; None keeps the server's own setting."""

    off: bool = False
    lmbda: float | None = None  # λ
    k: int | None = None
    knn_temperature: float | None = None  # τ
    memories: tuple[str, ...] | None = None
    domain_check: bool | None = None


@dataclass(frozen=True)
class Penalties:
    """Changes to log-probabilities before sampling, as in OpenAI's API."""

    presence: float = 0.0  # subtracted for every token that the text contains
    frequency: float = 0.0  # subtracted once for each occurrence
    bias: Mapping[int, float] = field(default_factory=dict)  # added, by token


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
    support: bool = False  # return the support of each token, if the mixture has it
    min_support: float | None = None  # of the last tokens together; see `GeneratedSequence`
    end_on_low_support: bool = True  # end the answer there; False: only mark it
    origins: tuple[int, ...] | None = None  # of the tokens, see `Origin`; None: all are given


@dataclass(frozen=True)
class TranslationRequest(GenerationRequest):
    """One source, and how to translate it; `tokens` are empty."""

    source: tuple[int, ...] = ()  # its tokens, with special ones
    beams: int | None = None  # None: as the model's configuration says
    scored: bool = False  # return the probabilities of tokens, which needs another pass and another search


@dataclass(frozen=True)
class KeptNeighbours:
    """The data that rescoring needs of a token's neighbours: no text, and nothing of the vocabulary's size."""

    distances: NDArray[np.float32]  # (k,)
    hits: NDArray[np.int8]  # (k,) 1: votes for the token; 0: votes for another; -1: padding
    counts: NDArray[np.float32] | None  # (k,)


@dataclass(frozen=True)
class ComponentLogProbs:
    """The log-probability and the weight of each component for one token: the input of rescoring."""

    log_probs: tuple[float, ...]  # the language model's first
    weights: tuple[float, ...]
    abstains: tuple[bool, ...]


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
    support: float | None = None  # the calibrated probability that the token is right; None: not computed
    # Of the memory whose k and τ a request can set. The trace takes them: they would make long responses huge.
    neighbours: KeptNeighbours | None = None


@dataclass(frozen=True)
class TokensEvent:
    """Tokens of one continuation whose text is final."""

    choice: int  # index of the continuation in the response
    trace_id: str  # for rescoring
    tokens: list[ScoredToken]


@dataclass(frozen=True)
class FinishEvent:
    """The end of one continuation.

    The reason is "stop" at a stop string or end-of-sequence token, "length" at max_tokens, "support" below min_support.
    """

    choice: int
    trace_id: str
    reason: str
    generated: int  # sampled tokens, whether or not their text is shown
    low_support: bool | None = None  # whether support fell below the request's min_support; None: it has none
    missing_shards: tuple[str, ...] = ()  # shards of the store that some of its searches lacked
    memory: bool | None = None  # of a translation: whether the memories were used; None: of another text
    drafts: Mapping[str, Any] | None = None  # see `describe_drafts`; None: none are made


@dataclass(frozen=True)
class ErrorEvent:
    """The failure of a request; no event follows."""

    status: int
    message: str


OutputEvent = TokensEvent | FinishEvent
Event = OutputEvent | ErrorEvent


class Busy(KnnlmError):
    """The queue of requests is full."""


class Stopped(KnnlmError):
    """The scheduler does not run."""


class RequestFailed(KnnlmError):
    """A request failed with an HTTP status."""

    def __init__(self, event: ErrorEvent) -> None:
        super().__init__(event.message)
        self.status = event.status


@dataclass(eq=False)
class RequestHandle:
    """A submitted request, to which its events are delivered."""

    request: GenerationRequest
    put: Callable[[Event], None] | None = None  # None: `events` yields the events
    cancelled: bool = False  # whether the scheduler is to drop the request at its next step
    repeats: int = 0  # how often it began again, because the store had changed
    submitted: float = field(default_factory=time.monotonic)
    queue: SimpleQueue[Event] = field(default_factory=SimpleQueue)

    def cancel(self) -> None:
        """Drop the request at the next step of the scheduler."""
        self.cancelled = True

    def events(self) -> Iterator[Event]:
        """Yield events as they arrive, until the request ends; only without a `put` of the caller."""
        left = self.request.copies
        while left:
            event = self.queue.get()
            left = 0 if isinstance(event, ErrorEvent) else left - isinstance(event, FinishEvent)
            yield event
