"""Continuous batching: one thread that owns the model and runs many requests at once.

Each step reads one token of every sequence, or several that are drafted, and a chunk of new prompts, with one search
for all of them. Sequences join and leave between steps, so a long request does not delay a short one.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from knnlm.datastore.store import Datastore
from knnlm.errors import ClusterError, KnnlmError, ShardChanged
from knnlm.generation.causal import EVIDENCE_TOKENS, KnnForCausalLM
from knnlm.index.base import remote_status
from knnlm.memories.base import Origin
from knnlm.memories.knn import KnnMemory
from knnlm.mixture.mixture import MAX_REPEATS, Mixture
from knnlm.server.engine.batch_drafts import BatchDrafts
from knnlm.server.engine.batching import (
    BatchedCache,
    Prompt,
    SequenceCache,
    WindowedPrompt,
    choose_cache,
    read_prompt,
    supports_cache,
)
from knnlm.server.engine.history import TraceCache
from knnlm.server.engine.predict import (
    ForwardResult,
    MixtureCache,
    PositionRequest,
    PredictedPosition,
    Times,
    predict_batch,
)
from knnlm.server.engine.requests import (
    Busy,
    ErrorEvent,
    Event,
    FinishEvent,
    GenerationRequest,
    RequestHandle,
    ScoredToken,
    Stopped,
    TokensEvent,
)
from knnlm.server.engine.sequence import DraftedTokens, GeneratedSequence

FLUSH_SECONDS = 1 / 60  # between two deliveries of events that are not urgent: one frame of a screen
MAX_PROMPT_CHUNK = 256  # prompt tokens read in one step, so that running sequences continue
TIMEOUT_MESSAGE = "The request took longer than the server allows."

_SOURCES_PER_TOKEN = 8  # describing this many sources takes about as long as reading a token

_log = logging.getLogger(__name__)


AddressedEvents = list[tuple[RequestHandle, Event]]


def deliver_events(events: AddressedEvents) -> None:
    """Put each event into its request's handle."""
    for handle, event in events:
        (handle.put or handle.queue.put)(event)


class EventBuffer:
    """Events that are not delivered yet; for the scheduler's thread only.

    Waking the event loop makes the scheduler's thread wait for the GIL, so events are delivered in groups.
    """

    def __init__(self, deliver: Callable[[AddressedEvents], object] = deliver_events) -> None:
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


@dataclass(eq=False)
class _PendingPrompt:
    """A request whose prompt is being read."""

    handle: RequestHandle
    prompt: Prompt
    sequences: list[GeneratedSequence] = field(default_factory=list)


class Scheduler:
    """Runs requests with one mixture."""

    def __init__(
        self,
        mixture: Mixture,
        *,
        slots: int = 64,
        queue: int = 256,
        traces: TraceCache | None = None,
        draft: bool = False,
    ) -> None:
        self.model = self._make_model(mixture)
        self.model.train(False)
        self.mixtures = MixtureCache(mixture)
        self.traces = TraceCache() if traces is None else traces
        self.slots, self.queue = slots, queue
        self.ready = threading.Event()
        self.failed: BaseException | None = None
        self.times = Times()
        self.forward_seconds = 0.0
        self.tokens_read = self.tokens_generated = self.steps = self.reloads = 0
        self.mean_seconds = 1.0  # moving average of a request's duration
        self.events = EventBuffer()
        self._waiting: deque[RequestHandle] = deque()
        self._prompts: deque[_PendingPrompt] = deque()
        self._cache: SequenceCache | None = None
        self._sequences: list[GeneratedSequence] = []  # one for each row of the cache
        self._read: list[DraftedTokens] = []  # of each sequence, in this step; empty without drafts
        self.drafts = BatchDrafts(mixture) if draft else None
        self._reopened: Mixture | None = None  # to be used when the running requests have ended
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="knnlm-engine", daemon=True)
        eos = self.model.generation_config.eos_token_id
        self._eos = set(eos if isinstance(eos, list) else [] if eos is None else [eos])

    def _make_model(self, mixture: Mixture) -> KnnForCausalLM:
        """Return the model that the thread runs."""
        return KnnForCausalLM(mixture)

    @property
    def mixture(self) -> Mixture:
        """The mixture in use."""
        return self.mixtures.mixture

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Fail unfinished requests, and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether requests are processed."""
        return self._thread.is_alive() and not self._stopping

    @property
    def waiting(self) -> int:
        """Number of requests that have not started."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Number of sequences whose prompt is read or that are being generated."""
        return len(self._sequences) + sum(pending.handle.request.copies for pending in list(self._prompts))

    @property
    def batched(self) -> bool:
        """Whether sequences share forward passes."""
        return isinstance(self._cache, BatchedCache)

    def submit(self, request: GenerationRequest, put: Callable[[Event], None] | None = None) -> RequestHandle:
        """Queue a request; its events go to `put`, or to the handle. Raise Busy or Stopped where that is impossible."""
        return self.submit_all([request], put)[0]

    def submit_all(
        self, requests: Sequence[GenerationRequest], put: Callable[[Event], None] | None = None
    ) -> list[RequestHandle]:
        """Queue requests together, all or none; see `submit`."""
        for request in requests:
            self.mixtures.get(request.overrides)  # raises for invalid overrides
        handles = [RequestHandle(request, put) for request in requests]
        with self._wake:
            if not self.alive:
                raise Stopped("The server is stopping.")
            if len(self._waiting) + len(handles) > self.queue:
                raise Busy(f"{len(self._waiting):,} requests are waiting already.")
            self._waiting.extend(handles)
            self._wake.notify()
        return handles

    # The methods below run in the scheduler's thread.

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            self._prepare()
            self.ready.set()
            while self._wait():
                self._step()
        except BaseException as error:
            self.failed = error
            _log.exception("the scheduler has stopped")
        finally:
            self._fail_all(503, "The server has stopped.")
            self.events.flush(force=True)

    def _prepare(self) -> None:
        """Prepare the model for the first step."""
        self._cache = choose_cache(self.model)
        if self.drafts is not None:
            self.drafts.open()

    def _wait(self) -> bool:
        """Wait for work, and return whether to continue."""
        with self._wake:
            while not self._stopping and not (self._waiting or self._prompts or self._sequences):
                self._wake.wait()
            return not self._stopping

    def _step(self) -> None:
        """Read one token of every sequence and a chunk of new prompts, and advance each by the result."""
        self._drop_cancelled()
        arrived = len(self._waiting)
        if arrived or self._prompts:
            self.events.flush(force=True)  # this step may take longer than the last one
        try:
            if arrived and self._reload():
                # A request that arrives during the reload may follow a later change: it waits for the next step.
                self._admit(arrived)
            began = time.perf_counter()
            results = self._read_sequences()
            prompt_results, prompts = self._read_prompts()
            results += prompt_results
            self.forward_seconds += time.perf_counter() - began
            predicted = iter(self._predict(results) if results else [])
            self._mark_missing([pending for pending, _ in prompts])
            self._advance_sequences(predicted, None if prompts else began)
            for pending, positions in prompts:
                self._advance_prompt(pending, [next(predicted) for _ in range(positions)])
            self._keep([row for row, sequence in enumerate(self._sequences) if sequence.reason is None])
        except Exception as error:
            self._fail_all(failure_status(error), step_failed(error), waiting=False)
        self.steps += 1
        self.events.flush(force=not self._sequences)

    def _predict(self, results: Sequence[ForwardResult]) -> list[PredictedPosition]:
        """Predict the next tokens; from the reopened store where a shard has changed and its former state is lost."""
        for repeats in range(MAX_REPEATS, -1, -1):
            try:
                return predict_batch(self.mixtures, results, self.times)
            except ShardChanged:
                if not repeats or not self._reload():
                    raise
        raise AssertionError

    def _mark_missing(self, prompts: Sequence[_PendingPrompt]) -> None:
        """Mark what was predicted in this step where searches lacked some shards."""
        if missing := missing_shards(self.mixture):
            read = (sequence for pending in prompts for sequence in pending.sequences)
            for sequence in (*self._sequences, *read):
                sequence.trace.missing_shards |= missing

    def _reload(self) -> bool:
        """Reopen the mixture if its store has changed, and return whether requests can be admitted.

        If the store cannot be opened, waiting requests fail; running ones keep the open store.
        """
        before = self.mixture
        try:
            after = self._reopened or reload_if_stale(before)
        except (KnnlmError, OSError, sqlite3.Error) as error:
            _log.exception("the store has changed and cannot be opened")
            self._fail_waiting(503, f"The store has changed and cannot be opened ({error}).")
            return False
        if after is not None and (self._sequences or self._prompts) and not _same_state(before, after):
            self._reopened = after  # running requests end with the state that they began with
            return False
        self._reopened = None
        if after is not None:
            if _removed_entries(before) != _removed_entries(after):
                self.traces.clear()  # they may contain text of removed documents
            self.model.mixture = after
            self.mixtures = MixtureCache(after)
            if self.drafts is not None:
                self.drafts.reload(after)
            self.reloads += 1
            for store in open_stores(before) - open_stores(after):
                store.close()
        return True

    def _admit(self, limit: int) -> None:
        """Start at most `limit` requests in their order, while there are free slots."""
        for _ in range(limit):
            with self._wake:
                if not self._waiting or self.active + self._waiting[0].request.copies > self.slots:
                    return
                handle = self._waiting.popleft()
            request = handle.request
            pending = _PendingPrompt(handle, _prompt(request))
            self._prompts.append(pending)  # first, so that the request fails with an error from here on
            decode: Any = partial(
                self.mixture.lm.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            for copy in range(request.copies):
                sequence = GeneratedSequence(handle, copy, self.traces.begin(request.overrides), decode)
                pending.sequences.append(sequence)
                if request.echo and not request.start_added:
                    self._emit(sequence, sequence.echo_first())

    def _read_sequences(self) -> list[ForwardResult]:
        """Read the last token of every sequence."""
        self._read = []
        if not self._sequences:
            return []
        assert self._cache is not None
        if self.drafts is not None and self.drafts.possible and self._cache.can_cut:
            self._read = self.drafts.propose(self._sequences)
            read = list(zip(self._sequences, self._read, strict=True))
            logits, context = self._cache.step([(sequence.last_token, *tokens.draft) for sequence, tokens in read])
            positions = [
                PositionRequest(sequence.handle.request, [tokens.sample], generated=generated)
                for sequence, tokens in read
                for generated in sequence.before(tokens.draft)
            ]
        else:
            logits, context = self._cache.step([(sequence.last_token,) for sequence in self._sequences])
            positions = [
                PositionRequest(
                    sequence.handle.request, [sequence.draw], generated=sequence.tokens if sequence.repeats else ()
                )
                for sequence in self._sequences
            ]
        self.tokens_read += len(positions)
        result = ForwardResult(logits, context, positions, one_prompt=False)
        if context.spans:
            # Generated tokens do not update the online weights: their state stays that of the prompt.
            states = [sequence.state for sequence in self._sequences]
            result = result.with_states(states, [sequence.entries for sequence in self._sequences])
        return [result]

    def _read_prompts(self) -> tuple[list[ForwardResult], list[tuple[_PendingPrompt, int]]]:
        """Read chunks of prompts, and return the results and the number of positions to predict of each prompt."""
        results, read = [], []
        room = MAX_PROMPT_CHUNK
        for pending in list(self._prompts):
            if room <= 0:
                break
            request, prompt = pending.handle.request, pending.prompt
            count = 0
            if prompt.remaining:
                cost = 1 + request.sources // _SOURCES_PER_TOKEN if request.echo else 1
                begin = self._evidence_begin(pending)
                max_tokens = self._chunk_tokens(pending, begin, max(1, room // cost))
                first = prompt.done
                evidence = begin is not None and first >= begin
                logits, context = read_prompt(
                    self.model, prompt, max_tokens=max_tokens, all_logits=request.echo or evidence
                )
                room -= (prompt.done - first) * cost
                self.tokens_read += prompt.done - first
                if positions := _positions(pending, first, evidence=evidence):
                    result = ForwardResult(logits, context, positions, one_prompt=True)
                    if context.spans:
                        others = len(context.spans) - 1
                        states = [None if first == begin else prompt.state, *[None] * others]
                        result = result.with_states(states, [prompt.entries, *[{}] * others])
                    results.append(result)
                    count = len(positions)
            read.append((pending, count))
            self._prompts.rotate(-1)  # round robin
        return results, read

    def _evidence_begin(self, pending: _PendingPrompt) -> int | None:
        """Return the first position of a prompt whose tokens update the online weights of its continuations, if any."""
        request = pending.handle.request
        mixture = self.mixtures.get(request.overrides)
        if mixture is None or not mixture.layer.stateful or not request.max_tokens:
            return None
        begin = max(0, len(pending.prompt.tokens) - EVIDENCE_TOKENS)
        if request.origins is None:
            return begin
        # Positions before the first token of evidence need no search.
        given = [place for place, origin in enumerate(request.origins) if origin == Origin.GIVEN and place > begin]
        return given[0] - 1 if given else None

    def _chunk_tokens(self, pending: _PendingPrompt, begin: int | None, room: int) -> int:
        """Return how many tokens of a prompt to read: at most up to `begin`, so that chunks do not change evidence.

        Without a cache, the tokens before `begin` are passed over if they are not scored.
        """
        prompt = pending.prompt
        cached = supports_cache(self.model)
        if begin is not None and prompt.done < begin:
            if cached or pending.handle.request.echo:
                return min(room, begin - prompt.done) if cached else begin - prompt.done
            prompt.done = begin  # a model without a cache reads them with those that follow
        return room if cached else prompt.remaining

    def _advance_prompt(self, pending: _PendingPrompt, predicted: Sequence[PredictedPosition]) -> None:
        """Emit the tokens of a chunk of a prompt; after the last chunk, its sequences start."""
        request = pending.handle.request
        done = not pending.prompt.remaining
        samples = done and request.max_tokens > 0
        if predicted:
            pending.prompt.state = predicted[-1].state
            if not request.windowed:  # every window begins by itself
                pending.prompt.entries = predicted[-1].entries
        if request.echo:
            echoed = [position.tokens[0] for position in predicted[: len(predicted) - samples]]
            for sequence in pending.sequences:
                self._emit(sequence, sequence.echo(echoed, last=done))
        if samples:
            assert self._cache is not None
            self._cache.join(pending.prompt, request.copies)
            for sequence, token in zip(pending.sequences, predicted[-1].tokens, strict=True):
                sequence.state, sequence.entries = pending.prompt.state, pending.prompt.entries
                self._sequences.append(sequence)
                self._advance(sequence, [token])
        elif done:
            for sequence in pending.sequences:
                sequence.reason = "length"
                self._finish(sequence)
        if done:  # not before: until here, an error in this step fails this request
            self._prompts.remove(pending)

    def _advance_sequences(self, predicted: Iterator[PredictedPosition], began: float | None) -> None:
        """Append the tokens of a step to every sequence; `began`: its time, if it did nothing else."""
        if not self._read:
            for sequence in self._sequences:
                position = next(predicted)
                sequence.entries = position.entries
                self._advance(sequence, position.tokens)
            return
        assert self._cache is not None
        assert self.drafts is not None
        steps = [[next(predicted) for _ in range(len(read))][: read.sampled] for read in self._read]
        if max(map(len, self._read)) > 1:
            self._cache.cut([read.sampled for read in self._read])
        for sequence, read, positions in zip(self._sequences, self._read, steps, strict=True):
            sequence.entries = positions[-1].entries
            before = sequence.generated
            self._append(sequence, [position.tokens[0] for position in positions])
            read.accepted = min(read.sampled - 1, sequence.generated - before)
        self.drafts.observe(self._sequences, self._read, None if began is None else time.perf_counter() - began)
        for sequence in self._sequences:
            if sequence.reason is not None:
                self._finish(sequence)

    def _advance(self, sequence: GeneratedSequence, tokens: Sequence[ScoredToken]) -> None:
        """Append sampled tokens to a sequence, and finish it where it ends."""
        self._append(sequence, tokens)
        if sequence.reason is not None:
            self._finish(sequence)

    def _append(self, sequence: GeneratedSequence, tokens: Sequence[ScoredToken]) -> None:
        """Append sampled tokens to a sequence, until it ends."""
        final: list[ScoredToken] = []
        for token in tokens:
            self.tokens_generated += 1
            final += sequence.add(token, eos=token.id in self._eos)
            if sequence.reason is not None:
                break
        self._emit(sequence, final)

    def _finish(self, sequence: GeneratedSequence) -> None:
        reason, low = sequence.reason or "", sequence.low_support
        missing = tuple(sorted(sequence.trace.missing_shards))
        drafts = None if self.drafts is None else self.drafts.describe(sequence)
        event = FinishEvent(sequence.choice, sequence.trace.id, reason, sequence.generated, low, missing, drafts=drafts)
        self.events.add(sequence.handle, event, urgent=True)
        self.mean_seconds += 0.1 * (time.monotonic() - sequence.handle.submitted - self.mean_seconds)

    def _emit(self, sequence: GeneratedSequence, tokens: list[ScoredToken]) -> None:
        if tokens:
            self.traces.add(sequence.trace, tokens)
            event = TokensEvent(sequence.choice, sequence.trace.id, tokens)
            self.events.add(sequence.handle, event, urgent=sequence.generated <= 1)

    def _drop_cancelled(self) -> None:
        """Drop requests that are cancelled or past their deadline."""
        now = time.monotonic()

        def dropped(handle: RequestHandle) -> bool:
            deadline = handle.request.deadline
            if deadline is not None and now > deadline and not handle.cancelled:
                self._fail([handle], 504, TIMEOUT_MESSAGE)
            return handle.cancelled

        with self._wake:
            self._waiting = deque(handle for handle in self._waiting if not dropped(handle))
        self._prompts = deque(pending for pending in self._prompts if not dropped(pending.handle))
        self._keep([row for row, sequence in enumerate(self._sequences) if not dropped(sequence.handle)])

    def _keep(self, rows: list[int]) -> None:
        """Keep only these sequences."""
        if len(rows) < len(self._sequences):
            assert self._cache is not None
            self._cache.keep(rows)
            self._sequences = [self._sequences[row] for row in rows]

    def _fail_all(self, status: int, message: str, *, waiting: bool = True) -> None:
        """Fail all running requests, and those that wait."""
        running = [pending.handle for pending in self._prompts] + [sequence.handle for sequence in self._sequences]
        self._fail(running, status, message)
        if waiting:
            self._fail_waiting(status, message)
        self._prompts.clear()
        self._sequences = []
        if self._cache is not None:
            self._cache.keep([])

    def _fail_waiting(self, status: int, message: str) -> None:
        """Fail all requests that have not started."""
        with self._wake:
            handles = list(self._waiting)
            self._waiting.clear()
        self._fail(handles, status, message)

    def _fail(self, handles: Sequence[RequestHandle], status: int, message: str) -> None:
        for handle in dict.fromkeys(handles):
            handle.cancel()
            self.events.add(handle, ErrorEvent(status, message), urgent=True)


def missing_shards(mixture: Mixture) -> set[str]:
    """Return the names of shards that the searches since the last call have lacked."""
    found = (remote_status(memory.index) for memory in mixture.memories if isinstance(memory, KnnMemory))
    return {Path(path).name for status in found if status is not None for path in status.take_missing()}


def failure_status(error: Exception) -> int:
    """Return the HTTP status of a step that failed."""
    return 503 if isinstance(error, ClusterError) else 500


def step_failed(error: Exception) -> str:
    """Log the error of a step, and return its message for clients."""
    _log.exception("a step of the scheduler failed")
    return str(error) if isinstance(error, KnnlmError) else "Internal server error. See the server's log."


def reload_if_stale(mixture: Mixture) -> Mixture | None:
    """Return the mixture reopened if its store has changed, else None; the given one stays open."""
    return mixture.reopen() if mixture.stale else None


def _same_state(before: Mixture, after: Mixture) -> bool:
    """Whether the state of running sequences fits a reopened mixture."""
    return _state_layout(before) == _state_layout(after)


def _state_layout(mixture: Mixture) -> tuple[Any, ...]:
    """Return what the numbers in the state of a sequence belong to: experts, memories and models."""
    layer, history = mixture.layer, mixture.history_lengths
    experts = layer.config is None, layer.weights.uses_evidence
    readers = [reading.model.identity for reading in mixture.readers.wanted(history)]
    return experts, mixture.labels, mixture.needs_history, history, readers


def open_stores(mixture: Mixture) -> set[Datastore]:
    """Return the stores that a mixture holds open."""
    stores = {store for memory in mixture.memories if isinstance(store := getattr(memory, "store", None), Datastore)}
    return stores | ({mixture.store} if mixture.store is not None else set())


def _removed_entries(mixture: Mixture) -> list[tuple[str, int, list[tuple[int, int]]]]:
    """Return the layout version and the removed entries of each store."""
    return sorted((str(store.path), store.layout, store.entry_numbers.gaps) for store in open_stores(mixture))


def _prompt(request: GenerationRequest) -> Prompt:
    """Return the tokens to read; without sampling, the prediction after the last token is not needed."""
    if request.windowed:
        return WindowedPrompt(list(request.tokens[:-1]), document=request.tokens[1:])
    tokens = list(request.tokens if request.max_tokens else request.tokens[:-1] if request.echo else ())
    return Prompt(tokens, origins=None if request.origins is None else list(request.origins[: len(tokens)]))


def _positions(pending: _PendingPrompt, first: int, *, evidence: bool) -> list[PositionRequest]:
    """Return the positions to predict of those that were just read, from `first` on; `evidence`: all of them."""
    request, prompt = pending.handle.request, pending.prompt
    samples = not prompt.remaining and request.max_tokens > 0
    draws = [sequence.draw for sequence in pending.sequences] if samples else []
    if not (request.echo or evidence):
        return [PositionRequest(request, draws)] if draws else []
    origins = request.origins
    known = [
        PositionRequest(
            request,
            (),
            request.tokens[place + 1],
            scored=request.echo,
            evidence=origins is None or origins[place + 1] == Origin.GIVEN,
        )
        for place in range(first, prompt.done - bool(draws))
    ]
    return [*known, PositionRequest(request, draws)] if draws else known
