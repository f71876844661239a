"""One continuation of a request: its sampling, its text, and its stop strings."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from knnlm.lm.detokenizer import Detokenizer
from knnlm.mixture.repetition import MIN_REPEAT
from knnlm.server.engine.history import TraceEntry
from knnlm.server.engine.requests import Penalties, RequestHandle, ScoredToken

SUPPORT_TOKENS = 8  # whose mean support is compared with a request's min_support

GREEDY_TEMPERATURE = 1e-4  # at and below it, the most probable token is taken


class DraftedTokens:
    """The tokens that are read after the last one of a sequence, and how many of them are sampled, too."""

    def __init__(self, draw: Callable[[Tensor], int], draft: Sequence[int]) -> None:
        self.draft = tuple(draft)
        self.sampled = 0  # tokens
        self.accepted = 0  # of the draft, that became part of the text
        self._draw, self._agrees = draw, True

    def __len__(self) -> int:
        """Return the number of positions: the last token, and those of the draft."""
        return 1 + len(self.draft)

    def sample(self, log_p: Tensor) -> int:
        """Return the token after the next position, or 0 if the token before it is not the drafted one."""
        if not self._agrees:
            return 0
        token = self._draw(log_p)
        self._agrees = self.sampled < len(self.draft) and token == self.draft[self.sampled]
        self.sampled += 1
        return token


class GeneratedSequence:
    """One continuation: samples tokens, sets their text, and holds them back while they may begin a stop string."""

    def __init__(self, handle: RequestHandle, copy: int, trace: TraceEntry, decode: Callable[[list[int]], str]) -> None:
        request = handle.request
        self.handle = handle
        self.choice = request.first_choice + copy  # index in the response
        self.trace = trace
        seed = None if request.seed is None else request.seed + copy
        self.draw = Sampler(request.temperature, request.top_p, seed, request.penalties).draw
        self.last_token = -1
        self.state: Tensor | None = None  # of the online weights after the prompt
        self.entries: Mapping[object, Tensor] = {}  # that were reached at the last position, see `Span.entries`
        self.tokens: list[int] = []  # that were sampled
        self.repeats = False  # whether the last tokens occurred before, so that memories may be damped
        self._passages: set[tuple[int, ...]] = set()  # of MIN_REPEAT tokens
        self.reason: str | None = None  # of its end; None: it continues
        before = request.tokens[: int(request.start_added)] if request.echo else request.tokens
        self._detokenizer = Detokenizer(decode, before)
        self._stop = tuple(string for string in request.stop if string)
        self._held: list[ScoredToken] = []
        self.low_support = None if request.min_support is None else False
        self._supports: deque[float] = deque(maxlen=SUPPORT_TOKENS)

    @property
    def generated(self) -> int:
        """Number of sampled tokens."""
        return len(self.tokens)

    def before(self, draft: Sequence[int]) -> list[Sequence[int]]:
        """Return the generated tokens before the next position, and after each token of a draft, if they repeat."""
        found: list[Sequence[int]] = [self.tokens if self.repeats else ()]
        if draft:
            tokens, passages = [*self.tokens], set(self._passages)
            for token in draft:
                tokens.append(token)
                passage = tuple(tokens[-MIN_REPEAT:])
                found.append(tuple(tokens) if passage in passages else ())
                passages.add(passage)
        return found

    def echo_first(self) -> list[ScoredToken]:
        """Return the first token of the prompt, which has no probability."""
        token = self.handle.request.tokens[0]
        text = self._detokenizer.add(token)
        return [ScoredToken(token, math.nan, math.nan, None, math.nan, 0.0, None, text=text)]

    def echo(self, tokens: list[ScoredToken], *, last: bool) -> list[ScoredToken]:
        """Return copies of the prompt's tokens with their text; `last`: the prompt ends with them."""
        echoed = [replace(token, text=self._detokenizer.add(token.id)) for token in tokens]
        if last and echoed:
            echoed[-1].text += self._detokenizer.finish()
        return echoed

    def add(self, token: ScoredToken, *, eos: bool) -> list[ScoredToken]:
        """Append a sampled token, set `reason` if it is the last one, and return the tokens whose text is final now."""
        request = self.handle.request
        self.last_token = token.id
        self.tokens.append(token.id)
        passage = tuple(self.tokens[-MIN_REPEAT:])
        self.repeats = passage in self._passages
        self._passages.add(passage)
        released = []
        if eos and not request.ignore_eos:
            self.reason = "stop"
        else:
            token.text = self._detokenizer.add(token.id)
            self._held.append(token)
            if not self._detokenizer.pending:
                released = self._release()
            if self._falls_below(token.support) and self.reason is None and request.end_on_low_support:
                self.reason = "support"
            if self.reason is None and self.generated >= request.max_tokens:
                self.reason = "length"
        return released if self.reason is None else released + self.finish()

    def _falls_below(self, support: float | None) -> bool:
        """Whether the mean support of the last tokens is below the request's minimum; from SUPPORT_TOKENS tokens on."""
        minimum = self.handle.request.min_support
        if minimum is None or support is None:
            return False
        self._supports.append(support)
        if len(self._supports) < SUPPORT_TOKENS or sum(self._supports) / SUPPORT_TOKENS >= minimum:
            return False
        self.low_support = True
        return True

    def finish(self) -> list[ScoredToken]:
        """Return the tokens that are held at the end of the text; `reason` is "stop" if they end in a stop string."""
        if self._held:
            self._held[-1].text += self._detokenizer.finish()
        released = self._release()
        released, self._held = [*released, *self._held], []
        return released

    def _release(self) -> list[ScoredToken]:
        """Return the held tokens before a stop string, or before the last characters that may begin one."""
        if not self._stop:
            released, self._held = self._held, []
            return released
        text = "".join(token.text for token in self._held)
        found = [place for string in self._stop if (place := text.find(string)) >= 0]
        if found:
            self.reason = "stop"
            return self._cut(min(found))
        end = len(text) - _possible_stop(text, self._stop)
        released, place = [], 0
        for token in self._held:
            if place + len(token.text) > end:
                break
            place += len(token.text)
            released.append(token)
        self._held = self._held[len(released) :]
        return released

    def _cut(self, end: int) -> list[ScoredToken]:
        """Return the held tokens before the stop string at `end`; the last of them is cut there."""
        released, place = [], 0
        for token in self._held:
            if place >= end:
                break
            token.text = token.text[: end - place]
            place += len(token.text)
            released.append(token)
        self._held = []
        return released


def _possible_stop(text: str, stop: tuple[str, ...]) -> int:
    """Return the number of last characters that may be the beginning of a stop string."""
    max_length = max(len(string) - 1 for string in stop)
    for length in range(min(max_length, len(text)), 0, -1):
        if any(string.startswith(text[-length:]) for string in stop):
            return length
    return 0


class Sampler:
    """Samples the tokens of one text, greedily or with its own random generator."""

    def __init__(self, temperature: float, top_p: float, seed: int | None, penalties: Penalties | None = None) -> None:
        self.temperature = temperature
        self.top_p = top_p
        self.penalties = penalties or Penalties()
        self.counts: Counter[int] = Counter()
        self.generator: torch.Generator | None = None
        self._penalised = bool(self.penalties.presence or self.penalties.frequency or self.penalties.bias)
        if temperature > GREEDY_TEMPERATURE:
            self.generator = torch.Generator()
            self.generator.manual_seed(seed) if seed is not None else self.generator.seed()

    def draw(self, log_p: Tensor) -> int:
        """Return a token sampled from (V,) log-probabilities."""
        if self._penalised:
            log_p = penalise(log_p, self.penalties, self.counts)
        if self.generator is None:
            token = int(log_p.argmax())
        else:
            # Subtract the maximum: a tiny temperature would make all scores -inf.
            probs = ((log_p.float() - log_p.max()) / self.temperature).cpu().softmax(0)
            if self.top_p < 1:
                probs = nucleus(probs, self.top_p)
            token = int(torch.multinomial(probs, 1, generator=self.generator))
        if self._penalised:
            self.counts[token] += 1
        return token


def penalise(log_p: Tensor, penalties: Penalties, counts: Mapping[int, int]) -> Tensor:
    """Return (V,) scores; `counts` are the occurrences of each token that was sampled in this text."""
    changes = {token: -penalties.presence - penalties.frequency * count for token, count in counts.items()}
    for token, bias in penalties.bias.items():
        changes[token] = changes.get(token, 0.0) + bias
    tokens = torch.tensor(list(changes), dtype=torch.long, device=log_p.device)
    return log_p.float().index_add(0, tokens, torch.tensor(list(changes.values()), device=log_p.device))


def nucleus(probs: Tensor, mass: float) -> Tensor:
    """Set all but the fewest most probable tokens that have this mass together to 0; at least one stays."""
    ordered, order = probs.sort(descending=True)
    before = ordered.cumsum(0) - ordered
    before[0] = -1.0  # stays, however small the mass
    return probs.masked_fill(torch.zeros_like(probs, dtype=torch.bool).scatter_(0, order, before >= mass), 0.0)
