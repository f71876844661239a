"""From requests to orders: prompts become tokens, settings are checked, events are brought to the event loop.

Knows nothing about routes or the shape of answers.
"""

from __future__ import annotations

import asyncio
import copy
import math
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from knnlm.errors import DatastoreBusy, KnnlmError, ModelError, ParameterError
from knnlm.mixture.mixture import Mixture
from knnlm.server.documents import DocumentService
from knnlm.server.engine.history import TraceCache
from knnlm.server.engine.requests import (
    Busy,
    ErrorEvent,
    Event,
    FinishEvent,
    GenerationRequest,
    MemoryOverrides,
    RequestHandle,
    Stopped,
    TokensEvent,
    put_each,
    without_neighbours,
)
from knnlm.server.engine.sampling import Penalties
from knnlm.server.engine.scheduler import LATE, Scheduler
from knnlm.server.limits import Limits
from knnlm.server.metrics import Metrics
from knnlm.server.responses import TokenTexts
from knnlm.server.schemas import ChatRequest, CompletionRequest, MemorySettings, Sampling, ScoreRequest

USUAL = 16  # tokens, as OpenAI's completions have it

USUAL_CHAT = 512

_GRACE = 1.0  # seconds

_TOGETHER = 64  # events that are told of at once: others want the event loop too

_GLANCE, _SLACK = 16, 64  # characters for each token of the longest prompt; tokens that depend on where a text is cut


class UnknownModel(KnnlmError):
    """Another model is asked for than the one that is served."""


class Unsupported(ParameterError):
    """A field of OpenAI's API has a value that means nothing here."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class RequestFailed(KnnlmError):
    """An order could not be carried out."""

    def __init__(self, failed: ErrorEvent) -> None:
        super().__init__(failed.message)
        self.status = failed.status


@dataclass(frozen=True)
class PreparedRequest:
    """What a request comes to: an order for each prompt, and what is told of its tokens."""

    orders: list[GenerationRequest]
    prompt_tokens: int
    alternatives: int | None


class Service:
    """A mixture that is served: its engine, its documents, and the limits that hold."""

    def __init__(self, mixture: Mixture, *, name: str, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.name = name
        recall = TraceCache(most_bytes=self.limits.trace_bytes)
        self.engine = Scheduler(mixture, slots=self.limits.slots, queue=self.limits.queue, recall=recall)
        self.library = None if mixture.store is None else DocumentService(mixture.store.path, mixture.lm)
        self.metrics = Metrics(self.engine)
        self.started = int(time.time())
        # Some of their own: a tokenizer must not be used by two threads at once, and the event loop waits for nobody.
        self._tokenizer = copy.deepcopy(mixture.lm.tokenizer)
        self._tokenizing = threading.Lock()
        # What may take long beside the engine: looking into the memory, and changing it.
        self.looking, self.changing = asyncio.Semaphore(4), asyncio.Semaphore(1)
        self.pieces = TokenTexts(copy.deepcopy(mixture.lm.tokenizer))

    @property
    def mixture(self) -> Mixture:
        """What is served."""
        return self.engine.mixture

    @property
    def ready(self) -> bool:
        """Whether the first query would succeed."""
        return self.engine.ready.is_set() and self.engine.alive

    def begin(self) -> None:
        """Start the engine; its events are brought to the event loop that runs now."""
        loop = asyncio.get_running_loop()

        def post(events: list[tuple[RequestHandle, Event]]) -> None:
            loop.call_soon_threadsafe(put_each, events)

        self.engine.outbox.post = post
        self.engine.start()

    def end(self) -> None:
        """Stop the engine and let go of the files."""
        self.engine.outbox.post = lambda _: None
        self.engine.stop()
        if self.library is not None:
            self.library.close()

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model."""
        if name is not None and name != self.name:
            raise UnknownModel(f"There is no model {name!r} here. There is: {self.name}.")

    def completion(self, body: CompletionRequest) -> PreparedRequest:
        """Read a request for continuations."""
        self.check_model(body.model)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise Unsupported("best_of", "only the same as n is supported.")
        asked: Any = body.prompt
        several = isinstance(asked, list) and not isinstance(asked[0], int)
        texts = [self.prompt(each) for each in (asked if several else [asked])]
        orders = [
            self._order(
                tokens,
                body,
                hidden=hidden,
                max_tokens=body.max_tokens,
                alternatives=body.logprobs or 0,
                echo=bool(body.echo),
            )
            for tokens, hidden in texts
        ]
        self.limits.check_sources(sum(_sources(order) for order in orders))
        return PreparedRequest(orders, sum(len(tokens) - hidden for tokens, hidden in texts), body.logprobs)

    def chat(self, body: ChatRequest) -> PreparedRequest:
        """Read a request for an answer."""
        self.check_model(body.model)
        if body.top_logprobs and not body.logprobs:
            raise Unsupported("top_logprobs", "it needs logprobs: true.")
        tokens = self.conversation([message.model_dump(exclude_none=True) for message in body.messages])
        wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        order = self._order(
            tokens,
            body,
            hidden=False,
            max_tokens=wanted,
            alternatives=body.top_logprobs or 0,
            usual=USUAL_CHAT,
        )
        self.limits.check_sources(_sources(order))
        return PreparedRequest([order], len(tokens), (body.top_logprobs or 0) if body.logprobs else None)

    def score(self, body: ScoreRequest) -> GenerationRequest:
        """Read a request for a score; a text longer than the memory's window is read in windows, as evaluation does."""
        self.check_model(body.model)
        tokens, hidden = self.prompt(body.text)
        self.limits.room(len(tokens) - 1, 0, None, usual=0)
        window, longest = self.mixture.window.context, self.mixture.max_length
        windowed = len(tokens) - 1 > window
        if longest is not None and min(window, len(tokens) - 1) > longest:
            raise ParameterError(
                f"The text has {len(tokens) - 1:,} tokens and the memory's window {window:,}, but the models can read "
                f"only {longest:,} at once. Shorten the text."
            )
        order = GenerationRequest(
            tuple(tokens),
            0,
            echo=True,
            sources=body.sources,
            wish=read_wish(body.memory),
            deadline=self.deadline(),
            hidden=hidden,
            windowed=windowed,
        )
        self.limits.check_sources(_sources(order))
        return order

    def prompt(self, given: str | Sequence[int]) -> tuple[list[int], bool]:
        """Turn a prompt into tokens; a text begins with the start token, which is not the caller's."""
        lm = self.mixture.lm
        if isinstance(given, str):
            return [lm.start_token, *self.encode(given)], True
        if max(given) >= lm.vocab_size:
            raise ParameterError(f"Token {max(given):,} is not one of the {lm.vocab_size:,} that the model has.")
        tokens = list(given)
        hidden = tokens[0] != lm.start_token
        return ([lm.start_token, *tokens], True) if hidden else (tokens, False)

    def encode(self, text: str) -> list[int]:
        """Turn text into tokens."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ParameterError(f"The text is not Unicode at character {error.start}: give it as UTF-8.") from None
        most, some = self.limits.prompt_tokens, _GLANCE * self.limits.prompt_tokens
        # A megabyte takes seconds, in which others' prompts would wait; its beginning mostly says enough.
        if len(text) > 2 * some and len(self._tokens(text[:some])) > most + _SLACK:
            raise ParameterError(
                f"The prompt has far more than {most:,} tokens, but this server takes {most:,} at most. Shorten it."
            )
        tokens = self._tokens(text)
        if tokens and max(tokens) >= self.mixture.lm.vocab_size:
            raise ParameterError("The text has a token that the model does not know.")
        return tokens

    def _tokens(self, text: str) -> list[int]:
        with self._tokenizing:
            return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def conversation(self, messages: list[dict[str, Any]]) -> list[int]:
        """Write a conversation as the model was taught to read it."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ParameterError(
                f"{self.mixture.lm.name} has no chat template: it was not trained to converse. Use /v1/completions."
            )
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = "".join(part["text"] for part in message["content"])
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may refuse roles, and says so in its own ways
            raise ParameterError(f"The chat template of the model refuses the messages: {error}") from None
        return self.encode(str(text))

    def _order(
        self,
        tokens: list[int],
        body: Sampling,
        *,
        hidden: bool,
        max_tokens: int | None,
        alternatives: int,
        echo: bool = False,
        usual: int = USUAL,
    ) -> GenerationRequest:
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        wish = read_wish(body.memory)
        copies = body.n or 1
        if copies > self.limits.slots:
            raise ParameterError(f"n is {copies}, but this server writes {self.limits.slots} texts at once at most.")
        return GenerationRequest(
            tokens=tuple(tokens),
            max_tokens=self.room(len(tokens), max_tokens, usual=usual),
            copies=copies,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            penalties=self._penalties(body),
            seed=body.seed,
            stop=tuple(stop),
            echo=echo,
            alternatives=alternatives,
            sources=body.sources,
            wish=wish,
            deadline=self.deadline(),
            hidden=hidden,
        )

    def _penalties(self, body: Sampling) -> Penalties:
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        if bias and max(bias) >= self.mixture.lm.vocab_size:
            many = self.mixture.lm.vocab_size
            raise Unsupported("logit_bias", f"token {max(bias):,} is not one of the {many:,} that the model has.")
        return Penalties(body.presence_penalty or 0.0, body.frequency_penalty or 0.0, bias)

    def room(self, prompt: int, wanted: int | None, *, usual: int) -> int:
        """Say how many tokens may follow a prompt; the engine reads with all models, whatever a request wants."""
        return self.limits.room(prompt, wanted, self.mixture.max_length, usual=usual)

    def deadline(self) -> float:
        """Say until when a request may take."""
        return time.monotonic() + self.limits.seconds

    def neighbours_kept(self, wish: MemoryOverrides) -> int:
        """Say up to which k a text with this wish can be scored again."""
        mixture, own = self.engine.wishes.grant(wish), self.engine.wishes.own
        if mixture is None or own is None:
            return 0
        label = self.mixture.labels[own]
        if label not in mixture.labels:
            return 0
        here: Any = mixture.memories[mixture.labels.index(label)]
        base: Any = self.mixture.memories[own]
        return max(int(here.max_k), int(base.max_k))

    def retry_after(self) -> int:
        """Guess in how many seconds there is room again."""
        return max(1, math.ceil(self.engine.mean_seconds * (self.engine.waiting + 1) / self.limits.slots))

    async def events(
        self, orders: Sequence[GenerationRequest]
    ) -> AsyncIterator[list[tuple[int, RequestHandle, Event]]]:
        """Carry out orders, and give their events as they come: whose, and what; those that are there already together.

        Whoever stops listening calls off.
        """
        queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        tickets: list[RequestHandle] = []
        late = None
        if (end := min((order.deadline or math.inf for order in orders), default=math.inf)) < math.inf:
            # The engine ends what is late between two turns; this is for a turn that does not end.
            wait = end - time.monotonic() + _GRACE
            late = asyncio.get_running_loop().call_later(wait, _into, queue, 0, ErrorEvent(504, LATE))
        try:
            for number, order in enumerate(orders):
                tickets.append(self.engine.submit(order, partial(_into, queue, number)))
            left = sum(order.copies for order in orders)
            while left:
                came = [await queue.get()]
                while len(came) < _TOGETHER and not queue.empty():
                    came.append(queue.get_nowait())
                failed = next(
                    (place for place, (_, event) in enumerate(came) if isinstance(event, ErrorEvent)), len(came)
                )
                if told := [(number, tickets[number], event) for number, event in came[:failed]]:
                    left -= sum(isinstance(event, FinishEvent) for _, _, event in told)
                    yield told
                if failed < len(came) and isinstance(failure := came[failed][1], ErrorEvent):
                    raise RequestFailed(failure)
        finally:
            if late is not None:
                late.cancel()
            for ticket in tickets:
                ticket.cancel()


def _into(queue: asyncio.Queue[tuple[int, Event]], number: int, event: Event) -> None:
    if isinstance(event, TokensEvent):
        event = TokensEvent(event.copy, [without_neighbours(token) for token in event.tokens])
    queue.put_nowait((number, event))


def _sources(order: GenerationRequest) -> int:
    """Say how many sources the answer to an order may name."""
    return order.sources * order.copies * (order.max_tokens + (len(order.tokens) if order.echo else 0))


def read_wish(given: MemorySettings | None) -> MemoryOverrides:
    """Read what a request asks of the memory."""
    if given is None:
        return MemoryOverrides()
    memories = None if given.memories is None else tuple(sorted(set(given.memories)))
    return MemoryOverrides(given.off, given.lmbda, given.k, given.knn_temperature, memories)


def status_of(error: KnnlmError) -> int:
    """Say which HTTP status an error has."""
    if isinstance(error, RequestFailed):
        return error.status
    if isinstance(error, UnknownModel):
        return 404
    if isinstance(error, Busy | Stopped | DatastoreBusy):
        return 429 if isinstance(error, Busy) else 503
    return 400 if isinstance(error, ParameterError | ModelError) else 500
