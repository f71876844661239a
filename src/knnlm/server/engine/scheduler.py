"""One thread that owns the model and carries out orders, many at once. Knows nothing about HTTP.

In each turn it reads a piece of a prompt that is new, then one token of every text that is being written; all of it is
searched for at once. Texts join and leave between turns, so a long one does not keep a short one waiting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from knnlm.errors import KnnlmError
from knnlm.generation.causal import KnnForCausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.server.engine.batching import BatchedCache, Prompt, RowCaches, WindowedPrompt, choose_rows, read_prompt
from knnlm.server.engine.detokenizer import Detokenizer, StopStringFilter
from knnlm.server.engine.history import TraceCache, TraceEntry
from knnlm.server.engine.overrides import MixtureCache
from knnlm.server.engine.predict import ForwardResult, PositionRequest, Times, predict_batch
from knnlm.server.engine.reload import Unavailable, reload_if_stale
from knnlm.server.engine.requests import (
    Busy,
    ErrorEvent,
    Event,
    EventBuffer,
    FinishEvent,
    GenerationRequest,
    RequestHandle,
    ScoredToken,
    Stopped,
    TokensEvent,
    unscored,
)
from knnlm.server.engine.sampling import Sampler

_log = logging.getLogger(__name__)

CHUNK = 256  # tokens of prompts that are read in one turn, so that texts being written go on

LATE = "The request took longer than the server allows."

NAMED = 8  # sources that take as long to name as a token takes to read, about


@dataclass
class _Sequence:
    """One continuation that is being written."""

    ticket: RequestHandle
    copy: int
    sampler: Sampler
    writer: StopStringFilter
    trace: TraceEntry
    last: int = -1
    made: int = 0
    ended: str | None = None


@dataclass(eq=False)
class _PendingPrompt:
    """An order whose prompt is being read."""

    ticket: RequestHandle
    prompt: Prompt
    texts: list[_Sequence] = field(default_factory=list)


class Scheduler:
    """Carries out orders with one model and its memories."""

    def __init__(
        self, mixture: Mixture, *, slots: int = 64, queue: int = 256, recall: TraceCache | None = None
    ) -> None:
        self.model = KnnForCausalLM(mixture)
        self.model.train(False)
        self.wishes = MixtureCache(mixture)
        self.recall = TraceCache() if recall is None else recall
        self.slots, self.queue = slots, queue
        self.ready = threading.Event()
        self.failed: BaseException | None = None
        self.times = Times()
        self.forward_seconds = 0.0
        self.tokens_read = self.tokens_made = self.turns = self.reopened = 0
        self.mean_seconds = 1.0  # that an order takes, the last ones counting most
        self.outbox = EventBuffer()
        self._waiting: deque[RequestHandle] = deque()
        self._entries: deque[_PendingPrompt] = deque()
        self._rows: RowCaches | None = None
        self._texts: list[_Sequence] = []  # one for each row
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="knnlm-engine", daemon=True)
        ends = self.model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])

    @property
    def mixture(self) -> Mixture:
        """What is served."""
        return self.wishes.mixture

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self) -> None:
        """Drop what is not finished, and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether orders are being carried out."""
        return self._thread.is_alive() and not self._stopping

    @property
    def waiting(self) -> int:
        """How many orders have not been begun."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """How many texts are being read or written."""
        return len(self._texts) + sum(entry.ticket.order.copies for entry in list(self._entries))

    @property
    def together(self) -> bool:
        """Whether texts share forward passes."""
        return isinstance(self._rows, BatchedCache)

    def submit(self, order: GenerationRequest, put: Callable[[Event], None] | None = None) -> RequestHandle:
        """Take an order; its events go to `put`, or to the ticket. Busy or Stopped where it cannot be taken."""
        self.wishes.grant(order.wish)  # refused here rather than in the engine's thread
        ticket = RequestHandle(order, put)
        with self._wake:
            if not self.alive:
                raise Stopped("The server is stopping.")
            if len(self._waiting) >= self.queue:
                raise Busy(f"{len(self._waiting):,} requests are waiting already.")
            self._waiting.append(ticket)
            self._wake.notify()
        return ticket

    # From here on, all is done by the engine's own thread.

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            self._rows = choose_rows(self.model)
            self.ready.set()
            while self._wait():
                self._turn()
        except BaseException as error:  # the thread must not end in silence
            self.failed = error
            _log.exception("the engine has stopped")
        finally:
            self._fail_all(503, "The server has stopped.")
            self.outbox.hand_over(at_once=True)

    def _wait(self) -> bool:
        """Wait until there is something to do; say whether to go on."""
        with self._wake:
            while not self._stopping and not (self._waiting or self._entries or self._texts):
                self._wake.wait()
            return not self._stopping

    def _turn(self) -> None:
        """Read a token of every text and a piece of new prompts, and tell what follows."""
        self._drop()
        came = len(self._waiting)
        if came or self._entries:
            self.outbox.hand_over(at_once=True)  # this turn may take longer than the last one
        try:
            if came and self._refresh():
                # Who comes while the memory is being opened may have added to it before: that is for the next turn.
                self._admit(came)
            began = time.perf_counter()
            heard = self._read_texts() + (read := self._read_prompts())[0]
            self.forward_seconds += time.perf_counter() - began
            answers = iter(predict_batch(self.wishes, heard, self.times) if heard else [])
            for text in self._texts:
                self._take(text, next(answers)[0])
            for entry, positions in read[1]:
                self._prompted(entry, [next(answers) for _ in range(positions)])
            self._keep([row for row, text in enumerate(self._texts) if text.ended is None])
        except Exception as error:
            _log.exception("a turn of the engine failed")
            why = str(error) if isinstance(error, KnnlmError) else "Something went wrong in the server."
            self._fail_all(500, why, waiting=False)
        self.turns += 1
        self.outbox.hand_over(at_once=not self._texts)

    def _refresh(self) -> bool:
        """Open the memory anew where it has changed, so that the next request finds what is there.

        Say whether that went well. Where it did not, nobody new is let in, but texts under way have what they need.
        """
        try:
            renewed = reload_if_stale(self.mixture)
        except Unavailable as error:
            self._fail_waiting(503, str(error))
            return False
        if renewed is not None:
            if renewed.removed:
                self.recall.clear()  # it may hold words of documents that are gone
            self.model.mixture = renewed.mixture
            self.wishes = MixtureCache(renewed.mixture)
            self.reopened += 1
            renewed.let_go()
        return True

    def _admit(self, most: int) -> None:
        """Begin orders, first come, first served, as long as there is room."""
        for _ in range(most):
            with self._wake:
                if not self._waiting or self.active + self._waiting[0].order.copies > self.slots:
                    return
                ticket = self._waiting.popleft()
            order = ticket.order
            entry = _PendingPrompt(ticket, _prompt(order))
            self._entries.append(entry)  # first, so that an error from here on is told to who asked
            ticket.texts = [self.recall.begin(order.wish) for _ in range(order.copies)]
            entry.texts = [self._new_text(ticket, copy) for copy in range(order.copies)]
            if order.echo and not order.hidden:
                for text in entry.texts:
                    self._say(text, [_spelt(text, unscored(order.tokens[0]))])

    def _new_text(self, ticket: RequestHandle, copy: int) -> _Sequence:
        order = ticket.order
        seed = None if order.seed is None else order.seed + copy
        before = order.tokens[: int(order.hidden)] if order.echo else order.tokens
        spelling = Detokenizer(self._decode, before)
        sampler = Sampler(order.temperature, order.top_p, seed, order.penalties)
        return _Sequence(ticket, copy, sampler, StopStringFilter(spelling, order.stop), ticket.texts[copy])

    def _decode(self, tokens: list[int]) -> str:
        return str(
            self.mixture.lm.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def _read_texts(self) -> list[ForwardResult]:
        """Read the last token of every text."""
        if not self._texts:
            return []
        assert self._rows is not None
        logits, context = self._rows.step([text.last for text in self._texts])
        self.tokens_read += len(self._texts)
        wants = [PositionRequest(text.ticket.order, [text.sampler.draw]) for text in self._texts]
        return [ForwardResult(logits, context, wants, whole=False)]

    def _read_prompts(self) -> tuple[list[ForwardResult], list[tuple[_PendingPrompt, int]]]:
        """Read pieces of prompts in turn, and say how many of its positions each is told of."""
        heard, owners = [], []
        room = CHUNK
        for entry in list(self._entries):
            if room <= 0:
                break
            order, first = entry.ticket.order, entry.prompt.done
            owners.append((entry, 0))
            if entry.prompt.left:
                cost = 1 + order.sources // NAMED if order.echo else 1
                most = max(1, room // cost)
                logits, context = read_prompt(self.model, entry.prompt, most=most, every=order.echo)
                read = entry.prompt.done - first
                room -= read * cost
                self.tokens_read += read
                if wants := _wants(entry, first):
                    heard.append(ForwardResult(logits, context, wants, whole=True))
                    owners[-1] = (entry, len(wants))
            self._entries.rotate(-1)  # who was read now comes last in the next turn
        return heard, owners

    def _prompted(self, entry: _PendingPrompt, answers: Sequence[list[ScoredToken]]) -> None:
        """Tell of a piece of a prompt; after the last one, its texts begin."""
        order = entry.ticket.order
        done = not entry.prompt.left
        draws = done and order.max_tokens > 0
        known = answers[: len(answers) - draws] if order.echo else []
        for text in entry.texts:
            shown = [_spelt(text, replace(tokens[0])) for tokens in known]
            if done and order.echo and shown:
                shown[-1].text += text.writer.spelling.rest()
            self._say(text, shown)
        if draws:
            assert self._rows is not None
            self._rows.join(entry.prompt, order.copies)
            for text, token in zip(entry.texts, answers[-1], strict=True):
                self._texts.append(text)
                self._take(text, token)
        elif done:
            for text in entry.texts:
                self._end(text, "length")
        if done:  # not before: until here, an error in this turn is an error of this order
            self._entries.remove(entry)

    def _take(self, text: _Sequence, token: ScoredToken) -> None:
        """Let a text go on by a token."""
        order = text.ticket.order
        text.made += 1
        text.last = token.id
        self.tokens_made += 1
        if token.id in self._ends and not order.endless:
            self._end(text, "stop")
            return
        self._say(text, text.writer.add(token))
        if text.writer.stopped:
            self._end(text, "stop")
        elif text.made >= order.max_tokens:
            self._end(text, "length")

    def _end(self, text: _Sequence, reason: str) -> None:
        text.ended = reason
        self._say(text, text.writer.finish())
        ended = FinishEvent(text.copy, "stop" if text.writer.stopped else reason, text.made)
        self.outbox.add(text.ticket, ended, urgent=True)
        self.mean_seconds += 0.1 * (time.monotonic() - text.ticket.taken - self.mean_seconds)

    def _say(self, text: _Sequence, tokens: Sequence[ScoredToken]) -> None:
        if tokens:
            self.recall.add(text.trace, tokens)
            self.outbox.add(text.ticket, TokensEvent(text.copy, list(tokens)), urgent=text.made <= 1)

    def _drop(self) -> None:
        """Let go of what nobody waits for, and of what has taken too long."""
        now = time.monotonic()

        def gone(ticket: RequestHandle) -> bool:
            late = ticket.order.deadline is not None and now > ticket.order.deadline
            if late and not ticket.cancelled:
                ticket.cancel()
                self.outbox.add(ticket, ErrorEvent(504, LATE), urgent=True)
            return ticket.cancelled

        with self._wake:
            self._waiting = deque(ticket for ticket in self._waiting if not gone(ticket))
        self._entries = deque(entry for entry in self._entries if not gone(entry.ticket))
        self._keep([row for row, text in enumerate(self._texts) if not gone(text.ticket)])

    def _keep(self, rows: list[int]) -> None:
        """Keep these texts only."""
        if len(rows) < len(self._texts):
            assert self._rows is not None
            self._rows.keep(rows)
            self._texts = [self._texts[row] for row in rows]

    def _fail_all(self, status: int, message: str, *, waiting: bool = True) -> None:
        """Give up all that is in flight."""
        self._fail(
            [*(entry.ticket for entry in self._entries), *(text.ticket for text in self._texts)], status, message
        )
        if waiting:
            self._fail_waiting(status, message)
        self._entries.clear()
        self._texts = []
        if self._rows is not None:
            self._rows.keep([])

    def _fail_waiting(self, status: int, message: str) -> None:
        """Give up all that has not been begun."""
        with self._wake:
            tickets = list(self._waiting)
            self._waiting.clear()
        self._fail(tickets, status, message)

    def _fail(self, tickets: Sequence[RequestHandle], status: int, message: str) -> None:
        for ticket in dict.fromkeys(tickets):
            ticket.cancel()
            self.outbox.add(ticket, ErrorEvent(status, message), urgent=True)


def _prompt(order: GenerationRequest) -> Prompt:
    """Say what is to be read; where nothing is to be drawn, nobody asks what follows the last token."""
    if order.windowed:
        return WindowedPrompt(list(order.tokens[:-1]), document=order.tokens[1:])
    return Prompt(list(order.tokens if order.max_tokens else order.tokens[:-1] if order.echo else ()))


def _spelt(text: _Sequence, token: ScoredToken) -> ScoredToken:
    """Give a token of the prompt its text."""
    token.text = text.writer.spelling.add(token.id)
    return token


def _wants(entry: _PendingPrompt, first: int) -> list[PositionRequest]:
    """Say which of the positions that were just read are told of, from the first one on."""
    order, prompt = entry.ticket.order, entry.prompt
    draws = [text.sampler.draw for text in entry.texts] if order.max_tokens and not prompt.left else []
    if not order.echo:
        return [PositionRequest(order, draws)] if draws else []
    known = [PositionRequest(order, (), order.tokens[place + 1]) for place in range(first, prompt.done - bool(draws))]
    return [*known, PositionRequest(order, draws)] if draws else known
