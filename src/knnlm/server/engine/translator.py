"""Translation: one thread that owns an encoder-decoder model and translates waiting requests in batches.

A batch has the requests with equal settings that wait when it begins, and is generated to its end, with one search for
all sentences and beams at each step. Requests that arrive later wait for the next batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from knnlm.errors import ModelError, ShardChanged
from knnlm.generation.seq2seq import KnnForSeq2SeqLM, generate_targets, target_texts
from knnlm.lm.detokenizer import token_texts
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.memories.base import Source
from knnlm.mixture.mixture import MAX_REPEATS, Mixture, group_rows
from knnlm.server.engine.predict import ForwardResult, PositionRequest, predict_batch
from knnlm.server.engine.requests import (
    FinishEvent,
    RequestHandle,
    ScoredToken,
    TokensEvent,
    TranslationRequest,
)
from knnlm.server.engine.scheduler import TIMEOUT_MESSAGE, Scheduler, failure_status, missing_shards, step_failed
from knnlm.server.engine.sequence import GREEDY_TEMPERATURE

WINDOW_SECONDS = 0.005  # from the first request that waits to the beginning of its batch

_UNKNOWN = float("nan")


class _Aborted(Exception):
    """No request waits for the running batch any more."""


class _AbortableModel(KnnForSeq2SeqLM):
    """A mixture whose generation ends with an exception at the next step after `aborted` returns True.

    A stopping criterion would switch off the deferred checks of `generate`.
    """

    aborted: Callable[[], bool]

    def _run_base(self, **inputs: Any) -> tuple[Any, dict[Source, Tensor]]:
        if self.aborted():
            raise _Aborted
        return super()._run_base(**inputs)


@dataclass(frozen=True)
class _Written:
    """The targets of a request, one for each copy, and the mixture that wrote them; None: the model alone did."""

    request: TranslationRequest
    targets: list[list[int]]
    mixture: Mixture | None

    def as_translated(self, *, by_store: bool) -> TranslationRequest:
        """Return the request with the settings of its translation: no memories or, `by_store`, those of one store."""
        overrides = self.request.overrides
        if self.mixture is None:
            overrides = replace(overrides, off=True)
        elif by_store:
            overrides = replace(overrides, memories=tuple(sorted(self.mixture.labels)))
        return replace(self.request, overrides=overrides)


class Translator(Scheduler):
    """Translates with one mixture of an encoder-decoder model."""

    def __init__(self, mixture: Mixture, **settings: Any) -> None:
        super().__init__(mixture, **settings)
        self._running: list[RequestHandle] = []
        self._answered: list[RequestHandle] = []  # of those, or in part
        self._missing: set[str] = set()  # shards that searches of this batch lacked

    def _make_model(self, mixture: Mixture) -> KnnForSeq2SeqLM:
        if mixture.lm.reads_audio:
            # The sources would be paths of files on the server.
            raise ModelError(f"{mixture.lm.name} reads sounds, which are not served. Use knnlm translate.")
        model = _AbortableModel(mixture)
        model.aborted = self._aborted
        return model

    @property
    def active(self) -> int:
        """Number of sequences in the running batch, one for each beam."""
        return sum(map(self._sequences_of, list(self._running)))

    @property
    def batched(self) -> bool:
        """Whether requests share forward passes."""
        return True

    def _sequences_of(self, handle: RequestHandle) -> int:
        request = cast(TranslationRequest, handle.request)
        return request.copies * self.beams(request)

    def beams(self, request: TranslationRequest) -> int:
        """Return the number of beams of a request."""
        if request.temperature > GREEDY_TEMPERATURE:
            return 1
        return int(request.beams or getattr(self.model.generation_config, "num_beams", None) or 1)

    # The methods below run in the scheduler's thread.

    def _prepare(self) -> None:
        """Prepare nothing: `generate` makes the caches."""

    def _wait(self) -> bool:
        """Wait for work and then for the other requests of the first batch, and return whether to continue."""
        if not super()._wait():
            return False
        with self._wake:
            end = self._waiting[0].submitted + WINDOW_SECONDS
            while not self._stopping and len(self._waiting) < self.slots and (left := end - time.monotonic()) > 0:
                self._wake.wait(left)
            return not self._stopping

    def _step(self) -> None:
        """Translate one batch of requests."""
        self._drop_cancelled()
        arrived = len(self._waiting)
        try:
            if arrived and self._reload():
                # A request that arrives during the reload may follow a later change: it waits for the next batch.
                self._running, self._answered, self._missing = self._take_batch(arrived), [], set()
                self._translate(self._running)
        except _Aborted:
            status, message = (503, "The server has stopped.") if self._stopping else (504, TIMEOUT_MESSAGE)
            self._fail([handle for handle in self._running if not handle.cancelled], status, message)
        except ShardChanged as error:
            self._repeat(error)
        except Exception as error:
            self._fail(self._running, failure_status(error), step_failed(error))
        finally:
            self._running = []
        self.steps += 1
        self.events.flush(force=True)

    def _repeat(self, error: ShardChanged) -> None:
        """Put requests without an answer back, for the next batch, which is searched in the reopened store."""
        left = [handle for handle in self._running if handle not in self._answered]
        again = [handle for handle in left if handle.repeats < MAX_REPEATS]
        if failed := [handle for handle in left if handle not in again]:
            self._fail(failed, failure_status(error), step_failed(error))
        for handle in again:
            handle.repeats += 1
        with self._wake:
            self._waiting.extendleft(reversed(again))

    def _take_batch(self, limit: int) -> list[RequestHandle]:
        """Return the first request and those with equal settings among the first `limit`, while there are slots."""
        batch: list[RequestHandle] = []
        left: deque[RequestHandle] = deque()
        sequences = 0
        with self._wake:
            for number, handle in enumerate(self._waiting):
                own = self._sequences_of(handle)
                joins = not batch or (_settings(handle) == _settings(batch[0]) and sequences + own <= self.slots)
                if number < limit and joins:
                    batch.append(handle)
                    sequences += own
                else:
                    left.append(handle)
            self._waiting = left
        return batch

    def _aborted(self) -> bool:
        """Whether the running batch is to end: no request waits for it, or the server stops."""
        now = time.monotonic()
        return self._stopping or all(
            handle.cancelled or (handle.request.deadline or now) < now for handle in self._running
        )

    def _translate(self, handles: Sequence[RequestHandle]) -> None:
        """Translate the sources of requests with equal settings together, and emit their tokens."""
        if not handles:
            return
        requests = [cast(TranslationRequest, handle.request) for handle in handles]
        began = time.perf_counter()
        written = self._generate_all(requests)
        self.forward_seconds += time.perf_counter() - began
        self.tokens_read += sum(len(request.source) for request in requests)
        for handle, own in zip(handles, written, strict=True):
            self.tokens_generated += sum(map(len, own.targets))
            if not handle.cancelled:
                for copy, target in enumerate(own.targets):
                    self._emit_translation(handle, own, copy, target)
                self.mean_seconds += 0.1 * (time.monotonic() - handle.submitted - self.mean_seconds)

    def _generate_all(self, requests: Sequence[TranslationRequest]) -> list[_Written]:
        """Return the targets of requests; the sources of one store are translated together."""
        mixture = self.mixtures.get(requests[0].overrides)
        if mixture is None:
            return self._generate(requests, None)
        found: dict[int, _Written] = {}
        for own, rows in group_rows(mixture.route_sources([tuple(request.source) for request in requests])):
            found |= zip(rows, self._generate([requests[row] for row in rows], own), strict=True)
        return [found[row] for row in range(len(requests))]

    def _generate(self, requests: Sequence[TranslationRequest], mixture: Mixture | None) -> list[_Written]:
        """Return the targets of all copies of requests by one mixture, each up to its end token."""
        first, lm = requests[0], self._lm
        settings: dict[str, Any] = {"num_beams": self.beams(first)}
        sources = [list(request.source) for request in requests for _ in range(request.copies)]
        if first.temperature > GREEDY_TEMPERATURE:
            settings |= {"do_sample": True, "temperature": first.temperature, "top_p": first.top_p, "top_k": 0}
        model = cast(KnnForSeq2SeqLM, self.model)
        if mixture is None:
            settings["stopping_criteria"] = [self._stop_rows]
        else:
            model = model.with_mixture(mixture)
        with torch.random.fork_rng([lm.device] if lm.device.type == "cuda" else [], enabled=first.seed is not None):
            if first.seed is not None:
                torch.manual_seed(first.seed)
            output = generate_targets(
                model, sources, max_new_tokens=first.max_tokens, use_memory=mixture is not None, **settings
            )
        if mixture is None and self._aborted():
            raise _Aborted
        targets = iter(_until_end(target, self._eos, lm.tokenizer.pad_token_id) for target in output)
        outside = iter([mixture is None] * len(sources) if model.outside is None else model.outside)
        return [
            _Written(
                request,
                [next(targets) for _ in range(request.copies)],
                None if any(list(islice(outside, request.copies))) else mixture,
            )
            for request in requests
        ]

    def _stop_rows(self, tokens: Tensor, _: Any, **__: Any) -> Tensor:
        """Return whether each row of the language model alone is to end."""
        return torch.full((len(tokens),), self._aborted(), device=tokens.device)

    @property
    def _lm(self) -> Seq2SeqLM:
        return cast(Seq2SeqLM, self.mixture.lm)

    def _emit_translation(self, handle: RequestHandle, written: _Written, copy: int, target: list[int]) -> None:
        """Emit the tokens and the end of one translation; a request whose tokens cannot be scored fails alone."""
        request = written.as_translated(by_store=self.mixture.router is not None)
        choice = request.first_choice + copy
        trace = self.traces.begin(request.overrides) if request.scored else None
        shown = target[:-1] if target and target[-1] in self._eos else target
        try:
            tokens = self._score(request, target)[: len(shown)] if request.scored and shown else _unscored(shown)
        except _Aborted:
            raise
        except Exception as error:
            if isinstance(error, ShardChanged) and handle not in self._answered:
                raise
            self._answered.append(handle)
            self._fail([handle], failure_status(error), step_failed(error))
            return
        for token, text in zip(tokens, piece_texts(self._lm, shown), strict=True):
            token.text = text
        self._answered.append(handle)
        self._missing |= missing_shards(self.mixture)
        if trace is not None:
            trace.missing_shards |= self._missing
            self.traces.add(trace, tokens)
        trace_id = "" if trace is None else trace.id
        if tokens:
            self.events.add(handle, TokensEvent(choice, trace_id, tokens), urgent=True)
        missing = tuple(sorted(self._missing))
        reason, memory = self._reason(request, target), written.mixture is not None
        event = FinishEvent(choice, trace_id, reason, len(target), missing_shards=missing, memory=memory)
        self.events.add(handle, event, urgent=True)
        if request.scored:  # scoring the next one takes time
            self.events.flush(force=True)

    def _reason(self, request: TranslationRequest, target: list[int]) -> str:
        """Return why a target ended; some models write the end token as the last one that is allowed."""
        forced = getattr(self.model.generation_config, "forced_eos_token_id", None) is not None
        ended = bool(target) and target[-1] in self._eos and not (forced and len(target) >= request.max_tokens)
        return "stop" if ended else "length"

    def _score(self, request: TranslationRequest, target: list[int]) -> list[ScoredToken]:
        """Return the tokens of a target with their probabilities and sources, as they were when each was generated.

        The odds of the end token are those of the mixture, before they are multiplied.
        """
        model, mixtures = cast(KnnForSeq2SeqLM, self.model), self.mixtures.of_store(request.overrides.memories)
        if (mixture := mixtures.get(request.overrides)) is not None:
            model = model.with_mixture(mixture)
        logits, context = model.read_target(self._lm.pad_sources([list(request.source)]), target)
        positions = [
            PositionRequest(request, [partial(_known, token)], generated=target[:place])
            for place, token in enumerate(target)
        ]
        predicted = predict_batch(mixtures, [ForwardResult(logits, context, positions, one_prompt=True)], self.times)
        return [position.tokens[0] for position in predicted]

    def _fail_all(self, status: int, message: str, *, waiting: bool = True) -> None:
        self._fail(self._running, status, message)
        self._running = []
        super()._fail_all(status, message, waiting=waiting)


def _settings(handle: RequestHandle) -> tuple[Any, ...]:
    """Return the settings that the requests of a batch share; a sampled request is a batch of its own."""
    request = cast(TranslationRequest, handle.request)
    alone = id(handle) if request.temperature > GREEDY_TEMPERATURE else None
    return request.overrides, request.beams, request.max_tokens, alone


def _known(token: int, _: Tensor) -> int:
    return token


def _until_end(target: list[int], eos: set[int], pad: Any) -> list[int]:
    """Return a target without padding, with its end token."""
    for place, token in enumerate(target):
        if token in eos:
            return target[: place + 1]
    while target and target[-1] == pad:
        target = target[:-1]
    return target


def _unscored(target: Sequence[int]) -> list[ScoredToken]:
    """Return tokens without probabilities."""
    return [ScoredToken(token, _UNKNOWN, _UNKNOWN, None, _UNKNOWN, _UNKNOWN, None) for token in target]


def piece_texts(lm: Seq2SeqLM, target: Sequence[int]) -> list[str]:
    """Return the text of each token of a target; joined, they are the translation."""
    if not target:
        return []
    (text,) = target_texts(lm, [target])
    decode: Any = partial(lm.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    pieces = token_texts(target, decode)
    if "".join(pieces).strip() != text:  # the tokenizer changes spaces of a whole text
        pieces = _prefix_pieces(text, [str(decode(list(target[: end + 1]))) for end in range(len(target))])
    whole = "".join(pieces)
    begin = len(whole) - len(whole.lstrip())
    end, place, trimmed = begin + len(text), 0, []
    for piece in pieces:
        trimmed.append(piece[max(0, begin - place) : max(0, end - place)])
        place += len(piece)
    return trimmed


def _prefix_pieces(text: str, prefixes: Sequence[str]) -> list[str]:
    """Return what each prefix adds to the beginning that it shares with a text; the last one adds the rest."""
    ends = [_common_length(text, prefix.lstrip()) for prefix in prefixes]
    pieces, done = [], 0
    for end in [*ends[:-1], len(text)]:
        pieces.append(text[done : max(done, end)])
        done = max(done, end)
    return pieces


def _common_length(one: str, other: str) -> int:
    """Return the number of characters that two texts begin with together."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
