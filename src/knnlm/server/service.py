"""The operations of the server, independent of HTTP: requests are validated, tokenised and given to the scheduler."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from knnlm.corpus import Document
from knnlm.datastore.manifest import is_sharded, read_manifest
from knnlm.datastore.remote import fetch_shards
from knnlm.errors import KnnlmError, ParameterError
from knnlm.generation.chat import has_template, render_chat
from knnlm.lm.causal import token_offsets
from knnlm.mixture.mixture import Mixture
from knnlm.server.documents import DocumentService
from knnlm.server.engine.history import TraceCache, rescore
from knnlm.server.engine.requests import (
    ErrorEvent,
    Event,
    FinishEvent,
    GenerationRequest,
    MemoryOverrides,
    OutputEvent,
    Penalties,
    RequestFailed,
    RequestHandle,
    ScoredToken,
    TokensEvent,
)
from knnlm.server.engine.scheduler import TIMEOUT_MESSAGE, Scheduler, deliver_events, open_stores
from knnlm.server.limits import Limits
from knnlm.server.metrics import Metrics
from knnlm.server.responses import TokenTexts, missing_body
from knnlm.server.schemas import (
    AddRequest,
    ChatRequest,
    CompletionRequest,
    MemorySettings,
    NeighboursRequest,
    NewDocument,
    RescoreRequest,
    SamplingRequest,
    ScoreRequest,
    TranslateRequest,
)

REFRESH_SECONDS = 30.0  # between two looks for changed shards at URLs
DEFAULT_MAX_TOKENS = 16  # of completions, as in OpenAI's API
DEFAULT_MAX_CHAT_TOKENS = 512

_GRACE_SECONDS = 1.0  # after the deadline, before a request fails without the scheduler
_MAX_EVENTS = 64  # handled at once, so that the event loop serves other requests in between
_READ_THREADS, _WRITE_THREADS = 4, 1

# A text of more characters than this for each allowed token is first tokenised in part.
_PREVIEW_CHARACTERS = 16
_PREVIEW_SLACK = 64  # tokens that may depend on where the text is cut

T = TypeVar("T")

_log = logging.getLogger(__name__)


class UnknownModel(KnnlmError):
    """The request names a model that is not served."""


class UnknownTrace(KnnlmError):
    """The trace does not exist, or was evicted."""


class Unsupported(ParameterError):
    """A field of OpenAI's API has an unsupported value."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


@dataclass(frozen=True)
class PreparedRequest:
    """A validated request for completions."""

    requests: list[GenerationRequest]  # one for each prompt
    prompt_tokens: int
    alternatives: int | None  # None: no log-probabilities
    max_k: int  # neighbours that rescoring can use

    @property
    def choices(self) -> int:
        """Number of continuations."""
        return sum(request.copies for request in self.requests)


@dataclass(frozen=True)
class ScoredText:
    """The tokens of a text, and the trace to rescore them."""

    trace_id: str
    max_k: int  # neighbours that rescoring can use
    tokens: list[ScoredToken]
    missing_shards: tuple[str, ...] = ()


class Service:
    """A served mixture with its scheduler, documents and limits."""

    scheduler_class: type[Scheduler] = Scheduler

    def __init__(
        self,
        mixture: Mixture,
        *,
        name: str,
        limits: Limits | None = None,
        refresh: float = REFRESH_SECONDS,
        draft: bool = False,
    ) -> None:
        self.limits = limits or Limits()
        self.name = name
        traces = TraceCache(max_bytes=self.limits.trace_bytes)
        self.scheduler = self.scheduler_class(
            mixture, slots=self.limits.slots, queue=self.limits.queue, traces=traces, draft=draft
        )
        self.documents = None if mixture.store is None else DocumentService(mixture.store.path, mixture.lm)
        self.metrics = Metrics(self.scheduler)
        self.started = int(time.time())
        # Tokenizers are not thread-safe: one for request threads, one for the event loop.
        self._tokenizer = copy.deepcopy(mixture.lm.tokenizer)
        self._tokenizer_lock = threading.Lock()
        self.token_texts = TokenTexts(copy.deepcopy(mixture.lm.tokenizer))
        self._refresh_seconds, self._stopped = refresh, threading.Event()
        self._read_slots, self._write_slots = asyncio.Semaphore(_READ_THREADS), asyncio.Semaphore(_WRITE_THREADS)

    @property
    def mixture(self) -> Mixture:
        """The mixture in use."""
        return self.scheduler.mixture

    @property
    def ready(self) -> bool:
        """Whether a request would be processed now."""
        return self.scheduler.ready.is_set() and self.scheduler.alive

    @property
    def failed(self) -> bool:
        """Whether the scheduler's thread has ended with an error."""
        return self.scheduler.failed is not None

    def start(self) -> None:
        """Start the scheduler; its events are delivered in the running event loop."""
        call_soon: Any = asyncio.get_running_loop().call_soon_threadsafe
        self.scheduler.events.deliver = partial(call_soon, deliver_events)
        self.scheduler.start()
        folders = [store.path for store in open_stores(self.mixture) if is_sharded(store.path)]
        if any(read_manifest(folder).urls for folder in folders):
            # A daemon: a copy that is interrupted by the end of the server is continued by the next one.
            threading.Thread(target=self._refresh_shards, args=(folders,), daemon=True).start()

    def _refresh_shards(self, folders: Sequence[Path]) -> None:
        """Fetch shards that were changed at their URLs, so that the scheduler finds the new copies."""
        while not self._stopped.wait(self._refresh_seconds):
            try:
                for folder in folders:
                    fetch_shards(folder)
            except (KnnlmError, OSError) as error:
                _log.warning("the copies of shards at URLs are kept: %s", error)

    def stop(self) -> None:
        """Stop the scheduler, and close the documents."""
        self._stopped.set()
        self.scheduler.events.deliver = lambda _: None
        self.scheduler.stop()
        if self.documents is not None:
            self.documents.close()

    def retry_after(self) -> int:
        """Return an estimate of the seconds until a slot is free."""
        waiting = self.scheduler.waiting + 1
        return max(1, math.ceil(self.scheduler.mean_seconds * waiting / self.limits.slots))

    def model_metadata(self, name: str | None = None) -> dict[str, Any]:
        """Return the settings of the served model; raise UnknownModel for another name."""
        self._check_model(name)
        mixture, knn = self.mixture, self.mixture.knn
        return {
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "knnlm",
            "knnlm": {
                "language_model": mixture.lm.name,
                "memories": mixture.labels,
                "lambda": mixture.lmbda,
                "weights": mixture.weights_kind,
                "support": mixture.has_support,
                "k": None if knn is None else knn.k,
                "knn_temperature": None if knn is None else knn.knn_temperature,
                "keys": None if knn is None else knn.store.key_count,
                "max_length": mixture.max_length,
                "batched": self.scheduler.batched,
                "max_prompt_tokens": self.limits.prompt_tokens,
                "max_output_tokens": self.limits.output_tokens,
                "max_body_bytes": self.limits.body_bytes,
                "pairs": mixture.lm.has_encoder,
            },
        }

    def prepare_completion(self, body: CompletionRequest) -> PreparedRequest:
        """Validate and tokenise a request for completions."""
        self._check_model(body.model)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise Unsupported("best_of", "only the same value as n is supported.")
        prompt: Any = body.prompt
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        prompts = [self._encode_prompt(each) for each in (prompt if several else [prompt])]
        requests = [
            self._generation_request(
                tokens,
                body,
                max_tokens=self._max_new_tokens(len(tokens), body.max_tokens, default=DEFAULT_MAX_TOKENS),
                start_added=start_added,
                alternatives=body.logprobs or 0,
                echo=bool(body.echo),
                first_choice=index * (body.n or 1),
            )
            for index, (tokens, start_added) in enumerate(prompts)
        ]
        prompt_tokens = sum(len(tokens) - start_added for tokens, start_added in prompts)
        return self._prepared(requests, prompt_tokens, body.logprobs)

    def prepare_chat(self, body: ChatRequest) -> PreparedRequest:
        """Validate and tokenise a conversation."""
        self._check_model(body.model)
        if body.top_logprobs and not body.logprobs:
            raise Unsupported("top_logprobs", "needs logprobs: true.")
        tokens, origins = self._encode_messages([message.model_dump(exclude_none=True) for message in body.messages])
        max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        request = self._generation_request(
            tokens,
            body,
            max_tokens=self._max_new_tokens(len(tokens), max_tokens, default=DEFAULT_MAX_CHAT_TOKENS),
            start_added=False,
            alternatives=body.top_logprobs or 0,
            origins=tuple(origins),
        )
        return self._prepared([request], len(tokens), (body.top_logprobs or 0) if body.logprobs else None)

    def prepare_translation(self, body: TranslateRequest) -> PreparedRequest:  # noqa: ARG002  (see TranslationService)
        """Raise an error: a decoder-only model does not translate."""
        raise ParameterError("/v1/translate needs a store of pairs, but this one has texts. Use /v1/completions.")

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[list[OutputEvent], None]:
        """Run requests, and yield their events as they arrive, in groups; raise RequestFailed for an ErrorEvent.

        Closing the iterator cancels the requests.
        """
        queue: asyncio.Queue[Event] = asyncio.Queue()
        # The scheduler fails late requests between two steps; the timer is for a step that does not end.
        wait = min(request.deadline or math.inf for request in requests) - time.monotonic() + _GRACE_SECONDS
        timeout = ErrorEvent(504, TIMEOUT_MESSAGE)
        timer = asyncio.get_running_loop().call_later(wait, queue.put_nowait, timeout) if wait < math.inf else None
        handles: list[RequestHandle] = []
        try:
            handles = self.scheduler.submit_all(requests, queue.put_nowait)
            left = sum(request.copies for request in requests)
            while left:
                events: list[OutputEvent] = []
                event = await queue.get()
                while not isinstance(event, ErrorEvent):
                    events.append(event)
                    left -= isinstance(event, FinishEvent)
                    if len(events) == _MAX_EVENTS or queue.empty():
                        break
                    event = queue.get_nowait()
                if events:
                    yield events
                if isinstance(event, ErrorEvent):
                    raise RequestFailed(event)
        finally:
            if timer is not None:
                timer.cancel()
            for handle in handles:
                handle.cancelled = True

    async def score(self, body: ScoreRequest) -> ScoredText:
        """Score a text."""
        request = await run_in_threadpool(self._score_request, body)
        return await self._generate_one(request)

    async def rescore(self, body: RescoreRequest) -> ScoredText:
        """Weigh the components of an earlier text with other settings, without the model and without a search."""
        trace = self.scheduler.traces.find(body.id)
        if trace is None:
            raise UnknownTrace("There is no such trace, or it was evicted. Send the text again.")
        max_k = self._max_k(trace.overrides)
        if body.k is not None and body.k > max_k:
            raise ParameterError(f"k can be {max_k:,} at most: no more neighbours were retrieved.")
        changes = MemoryOverrides(lmbda=body.lmbda, k=body.k, knn_temperature=body.knn_temperature)
        mixtures = self.scheduler.mixtures.of_store(trace.overrides.memories)
        rescored = await self._run_limited(self._read_slots, rescore, mixtures, trace, changes)
        return ScoredText(body.id, max_k, rescored, tuple(sorted(trace.missing_shards)))

    async def neighbours(self, body: NeighboursRequest) -> dict[str, Any]:
        """Return the neighbours of a context, the largest weight first, and the shards that were missing."""
        self._check_model(body.model)
        tokens, start_added = await run_in_threadpool(self._encode_prompt, body.prompt)
        self._max_new_tokens(len(tokens), 1, default=1)
        request = GenerationRequest(
            tuple(tokens),
            1,
            sources=body.k,
            overrides=overrides_of(body.memory),
            deadline=self._deadline(),
            start_added=start_added,
            ignore_eos=True,
        )
        scored = await self._generate_one(request)
        sources = scored.tokens[0].sources if scored.tokens else []
        return {"neighbours": sources, **missing_body(scored.missing_shards)}

    async def list_documents(self, **options: Any) -> dict[str, Any]:
        """Return a page of the list of documents."""
        assert self.documents is not None
        return await self._run_limited(self._read_slots, self.documents.list, **options)

    async def read_document(self, number: int, **options: Any) -> dict[str, Any]:
        """Return a passage of a document."""
        assert self.documents is not None
        return await self._run_limited(self._read_slots, self.documents.read, number, **options)

    async def add_documents(self, body: AddRequest) -> dict[str, Any]:
        """Add documents to the store."""
        assert self.documents is not None
        new = [self._new_document(number, each) for number, each in enumerate(body.documents)]
        return await self._run_limited(self._write_slots, self.documents.add, new)

    def _new_document(self, number: int, body: NewDocument) -> Document:
        """Return a document to add; raise for a source text with a store of texts, and for a pair without one."""
        pairs = self.mixture.lm.has_encoder
        if pairs != (body.source_text is not None):
            problem = "missing: this store has pairs of a source and its translation." if pairs else "only for pairs."
            raise Unsupported(f"documents.{number}.source_text", problem)
        return Document(body.id, body.source or body.id, body.text, body.fields or {}, source_text=body.source_text)

    async def remove_document(self, number: int) -> dict[str, Any]:
        """Remove a document from the store."""
        assert self.documents is not None
        removed = await self._run_limited(self._write_slots, self.documents.remove, number)
        self.scheduler.traces.clear()  # they may contain text of the document
        return removed

    async def _run_limited(self, slots: asyncio.Semaphore, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run a slow function in a thread; few at a time, so that threads stay free for prompts."""
        try:
            await asyncio.wait_for(slots.acquire(), self.limits.seconds)
        except asyncio.TimeoutError:
            raise RequestFailed(ErrorEvent(504, TIMEOUT_MESSAGE)) from None
        try:
            return await run_in_threadpool(function, *args, **options)
        finally:
            slots.release()

    async def _generate_one(self, request: GenerationRequest) -> ScoredText:
        """Return all tokens of a request with one continuation."""
        trace_id, tokens, missing = "", list[ScoredToken](), tuple[str, ...]()
        async for events in self.generate([request]):
            for event in events:
                trace_id = event.trace_id
                if isinstance(event, TokensEvent):
                    tokens += event.tokens
                else:
                    missing = event.missing_shards
        return ScoredText(trace_id, self._max_k(request.overrides), tokens, missing)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise UnknownModel(f"There is no model {name!r}. There is: {self.name}.")

    def _generation_request(
        self,
        tokens: list[int],
        body: SamplingRequest,
        kind: type[GenerationRequest] = GenerationRequest,
        **options: Any,
    ) -> GenerationRequest:
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        copies = body.n or 1
        if copies > self.limits.slots:
            raise ParameterError(f"n is {copies}, but this server has {self.limits.slots} slots.")
        return kind(
            tokens=tuple(tokens),
            copies=copies,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            penalties=self._penalties(body),
            seed=body.seed,
            stop=tuple(stop),
            sources=body.sources,
            overrides=overrides_of(body.memory),
            deadline=self._deadline(),
            support=self._wants_support(body),
            min_support=body.min_support,
            end_on_low_support=body.on_low_support == "end",
            **options,
        )

    def _wants_support(self, body: SamplingRequest) -> bool:
        """Whether support is to be computed; raise if it is requested and the mixture has none."""
        asked = body.support or body.min_support is not None
        logprobs = getattr(body, "logprobs", None)  # 0 is a number of alternatives
        shown = body.sources > 0 or not (logprobs is None or logprobs is False)
        if asked:
            mixture = self.scheduler.mixtures.get(overrides_of(body.memory))
            if mixture is None or not mixture.has_support:
                name = "min_support" if body.min_support is not None else "support"
                raise Unsupported(name, "the store was not tuned with support, or memory settings are not as tuned.")
        return bool(asked or (shown and body.support is not False))

    def _prepared(
        self, requests: list[GenerationRequest], prompt_tokens: int, alternatives: int | None
    ) -> PreparedRequest:
        self._check_sources(requests)
        return PreparedRequest(requests, prompt_tokens, alternatives, self._max_k(requests[0].overrides))

    def _penalties(self, body: SamplingRequest) -> Penalties:
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        vocab_size = self.mixture.lm.vocab_size
        if bias and max(bias) >= vocab_size:
            raise Unsupported("logit_bias", f"token {max(bias):,} is not one of the {vocab_size:,} of the model.")
        return Penalties(body.presence_penalty or 0.0, body.frequency_penalty or 0.0, bias)

    def _score_request(self, body: ScoreRequest) -> GenerationRequest:
        """Validate a request for a score; a text longer than the store's window is read in windows."""
        self._check_model(body.model)
        tokens, start_added = self._encode_prompt(body.text)
        length = len(tokens) - 1
        self._check_prompt(length)
        window, max_length = self.mixture.window.context, self.mixture.max_length
        if max_length is not None and min(window, length) > max_length:
            raise ParameterError(
                f"The text has {length:,} tokens and the store's window {window:,}, but the models can read only "
                f"{max_length:,} at once. Shorten the text."
            )
        request = GenerationRequest(
            tuple(tokens),
            0,
            echo=True,
            sources=body.sources,
            overrides=overrides_of(body.memory),
            deadline=self._deadline(),
            start_added=start_added,
            windowed=length > window,
            support=True,
        )
        self._check_sources([request])
        return request

    def _check_prompt(self, length: int) -> None:
        limit = self.limits.prompt_tokens
        if length > limit:
            raise ParameterError(
                f"The prompt has {length:,} tokens, but this server takes {limit:,} at most. Shorten it."
            )

    def _max_new_tokens(self, prompt: int, wanted: int | None, *, default: int) -> int:
        """Return how many tokens may follow a prompt of this length; raise if it is too long."""
        self._check_prompt(prompt)
        limit, max_length = self.limits.output_tokens, self.mixture.max_length
        free = limit if max_length is None else min(limit, max_length - prompt)
        if wanted is None:
            wanted = min(default, max(free, 0))
        if max_length is not None and prompt + wanted > max_length:
            raise ParameterError(
                f"The prompt has {prompt:,} tokens and {wanted:,} more are requested, but the model can read only "
                f"{max_length:,}. Shorten the prompt, or request fewer tokens."
            )
        if wanted > limit:
            raise ParameterError(f"{wanted:,} tokens are requested, but this server generates {limit:,} at most.")
        return wanted

    def _check_sources(self, requests: Sequence[GenerationRequest]) -> None:
        """Raise if the response could contain too many sources."""
        sources, limit = 0, self.limits.sources
        for request in requests:
            tokens = request.max_tokens + (len(request.tokens) if request.echo else 0)
            sources += request.sources * request.copies * tokens
        if sources > limit:
            raise ParameterError(
                f"The response could contain {sources:,} sources, but this server returns {limit:,} at most. "
                "Request fewer sources or fewer tokens."
            )

    def _deadline(self) -> float:
        return time.monotonic() + self.limits.seconds

    def _max_k(self, overrides: MemoryOverrides) -> int:
        """Return the number of neighbours that rescoring a text with these overrides can use."""
        return self.scheduler.mixtures.of_store(overrides.memories).max_k(overrides)

    def _encode_prompt(self, prompt: str | Sequence[int]) -> tuple[list[int], bool]:
        """Return the tokens of a prompt after the start token, and whether the start token was added."""
        lm = self.mixture.lm
        if isinstance(prompt, str):
            return [lm.start_token, *self._encode(prompt)], True
        if max(prompt) >= lm.vocab_size:
            raise ParameterError(f"Token {max(prompt):,} is not one of the {lm.vocab_size:,} of the model.")
        start_added = prompt[0] != lm.start_token
        return ([lm.start_token, *prompt] if start_added else list(prompt)), start_added

    def _encode_messages(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Return the tokens of a conversation in the model's chat template, and their origins."""
        if not has_template(self._tokenizer):
            raise ParameterError(
                f"{self.mixture.lm.name} has no chat template: it was not trained to converse. Use /v1/completions."
            )
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = "".join(part["text"] for part in message["content"])
        rendered = render_chat(self._tokenizer, messages)
        tokens, offsets = self._encode_with_offsets(rendered.text)
        return tokens, rendered.origins(offsets)

    def _encode(self, text: str) -> list[int]:
        return self._encode_with_offsets(text)[0]

    def _encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a text and the characters of each; raise if there are too many."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ParameterError(f"The text is not valid Unicode at character {error.start}. Send UTF-8.") from None
        max_tokens = self.limits.prompt_tokens
        preview = _PREVIEW_CHARACTERS * max_tokens
        # Tokenising a megabyte takes seconds and blocks other prompts, so reject it by its beginning.
        if len(text) > 2 * preview and len(self._tokenize(text[:preview])[0]) > max_tokens + _PREVIEW_SLACK:
            raise ParameterError(
                f"The prompt has far more than {max_tokens:,} tokens, but this server takes {max_tokens:,} at most. "
                "Shorten it."
            )
        tokens, offsets = self._tokenize(text)
        if tokens and max(tokens) >= self.mixture.lm.vocab_size:
            raise ParameterError("The text contains a token that is not in the model's vocabulary.")
        return tokens, offsets

    def _tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        with self._tokenizer_lock:
            return token_offsets(self._tokenizer, text)


def overrides_of(settings: MemorySettings | None) -> MemoryOverrides:
    if settings is None:
        return MemoryOverrides()
    memories = None if settings.memories is None else tuple(sorted(set(settings.memories)))
    own = (settings.off, settings.lmbda, settings.k, settings.knn_temperature)
    return MemoryOverrides(*own, memories, settings.domain_check)
