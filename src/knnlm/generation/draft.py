"""Drafts of the tokens that come next: what followed the last tokens in the texts of a store, and in the text itself.

A draft costs little and is verified by one pass of the mixture over all its tokens, so that the text is the same as
without drafts. It pays where the text repeats what was written before, and costs time elsewhere. So its length follows
from what is expected of it: a token is drafted while the probability that it is accepted, together with all tokens
before it, is larger than its share in the time of a step. Both are estimated during the generation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

import numpy as np

from knnlm.datastore.suffix_array import DEPTH, Ints, SuffixArray

LONGEST_MATCH = 32  # tokens
MAX_DRAFT = 24  # tokens
_SAMPLE = 64  # rows of a match whose followers are counted
_PLACES = 8  # where two tokens occurred last in the text, that are compared
_EDGES = (1, 2, 3, 5, 9, 17)  # the shortest match of each class
_PRIOR = (0.15, 0.3, 0.45, 0.6, 0.75, 0.85)  # the share of drafted tokens that are accepted, by the class of the match
_PRIOR_TOKENS = 6.0  # that the prior counts as
_FORGETTING = 0.97  # of what was observed, at each token of its class
_FADING = 0.997  # of what was observed, at each step: a draft that was rejected is tried again later
_MARGIN = 1.05  # that a draft must be faster than a step without one


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next."""

    tokens: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()  # of the match before each token
    shares: tuple[float, ...] = ()  # of the occurrences of the match that each token followed
    place: int | None = None  # of the first token in the text of the suffix array; None: from the text itself

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> Draft:
        """Return the first tokens of the draft."""
        return Draft(self.tokens[:count], self.classes[:count], self.shares[:count], self.place)


@dataclass(frozen=True)
class CopiedSpan:
    """Tokens of a text that were drafted from the store and accepted."""

    start: int  # in the generated tokens
    count: int
    place: int  # of the first one in the text of the suffix array


class StoreMatch:
    """The longest end of a text that occurs in a store."""

    def __init__(self, suffixes: SuffixArray) -> None:
        self.suffixes = suffixes
        self.length = 0
        self.low, self.high = int(suffixes.first[1]), len(suffixes.order)  # rows of the suffix array

    def update(self, numbers: Ints) -> None:
        """Find the longest end of these numbers, of which some were added since the last call."""
        longest = min(LONGEST_MATCH, len(numbers))
        # Where an end occurs, all shorter ones do too.
        known, failed = 0, longest + 1
        rows = int(self.suffixes.first[1]), len(self.suffixes.order)
        trial = min(longest, self.length + 1)
        while known + 1 < failed:
            found = self._rows(numbers[len(numbers) - trial :])
            if found[0] < found[1]:
                known, rows = trial, found
                trial = (known + failed + 1) // 2 if failed <= longest else min(longest, 2 * known)
            else:
                failed = trial
                trial = (known + failed) // 2
            trial = max(known + 1, min(trial, failed - 1))
        self.length, (self.low, self.high) = known, rows

    def draft(self, count: int) -> Draft:
        """Return the most frequent continuation, of at most this many tokens."""
        tokens: list[int] = []
        shares: list[float] = []
        low, high, length = self.low, self.high, self.length
        text, order = self.suffixes.text, self.suffixes.order
        while self.length and len(tokens) < count and high - low > 1 and length < DEPTH - 1:
            rows = np.unique(np.linspace(low, high - 1, min(high - low, _SAMPLE)).astype(np.int64))
            number, votes = Counter(self.suffixes.following(rows, length).tolist()).most_common(1)[0]
            if not number:  # most of these documents end here
                break
            bounds = self.suffixes.extend_match(np.array([low]), np.array([high]), np.array([number]), length)
            low, high = int(bounds[0][0]), int(bounds[1][0])
            tokens.append(number - 1)
            shares.append(votes / len(rows))
            length += 1
        if self.length and high - low == 1 and len(tokens) < count:
            begin = int(order[low]) + length
            rest = text[begin : begin + count - len(tokens)]
            ends = np.flatnonzero(rest == 0)
            rest = rest[: ends[0]] if len(ends) else rest
            tokens += (rest - 1).tolist()
            shares += [1.0] * len(rest)
        classes = [_class(self.length + number) for number in range(len(tokens))]
        place = int(order[low]) + self.length if tokens else None
        return Draft(tuple(tokens), tuple(classes), tuple(shares), place)

    def _rows(self, numbers: Ints) -> tuple[int, int]:
        """Return the rows of the suffix array at which these numbers stand, followed by a token."""
        pattern, size = numbers.tolist(), len(numbers)
        text, order = self.suffixes.text, self.suffixes.order
        low, high = int(self.suffixes.first[pattern[0]]), int(self.suffixes.first[pattern[0] + 1])
        end = high
        while low < high:
            middle = (low + high) // 2
            place = int(order[middle])
            # A border after the numbers sorts first.
            if text[place : place + size + 1].tolist() < [*pattern, 1]:
                low = middle + 1
            else:
                high = middle
        begin, high = low, end
        while low < high:
            middle = (low + high) // 2
            place = int(order[middle])
            if text[place : place + size].tolist() <= pattern:
                low = middle + 1
            else:
                high = middle
        return begin, low


class TextMatch:
    """The longest end of a text that occurred in it before."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # after each two tokens

    def update(self, tokens: Sequence[int]) -> None:
        """Read the tokens that were added to the text since the last call; another text is read from its beginning."""
        if self._tokens != list(tokens[: len(self._tokens)]):
            self._tokens = []
            self._places.clear()
        for number in range(len(self._tokens), len(tokens)):
            if number > 1:  # what follows the two tokens before
                places = self._places[tokens[number - 2], tokens[number - 1]]
                places.append(number)
                del places[:-_PLACES]
        self._tokens = list(tokens)

    def draft(self, count: int) -> Draft:
        """Return what followed the longest end, the last time, of at most this many tokens."""
        if len(self._tokens) < 2:
            return Draft()
        best, length = None, 1
        for place in reversed(self._places.get((self._tokens[-2], self._tokens[-1]), [])):
            found = self._common(place)
            if found > length:
                best, length = place, found
        if best is None:
            return Draft()
        tokens = self._tokens[best : best + count]
        while len(tokens) < count:  # the text repeats itself
            tokens.append((self._tokens + tokens)[best + len(tokens)])
        classes = [_class(length + number) for number in range(count)]
        return Draft(tuple(tokens), tuple(classes), (1.0,) * count)

    def _common(self, place: int) -> int:
        """Return how many tokens before a place equal the last ones of the text."""
        length = 0
        while length < min(place, LONGEST_MATCH) and self._tokens[place - 1 - length] == self._tokens[-1 - length]:
            length += 1
        return length


class StepTimes:
    """The time of a step by the number of drafted tokens, relative to one without: 1 + extra + each · tokens."""

    def __init__(self, *, extra: float, each: float, weight: float = 4.0) -> None:
        """Take the initial estimates, and the number of steps that they count as."""
        self._alone: list[float] = []  # seconds of the last steps without a draft
        self._sums = np.zeros((2, 2))
        self._products = np.zeros(2)
        self._line = extra, each
        for tokens in (1.0, MAX_DRAFT):
            self._add(tokens, extra + each * tokens, weight)

    def observe(self, tokens: int, seconds: float) -> None:
        """Add a step."""
        if not tokens:
            self._alone = [*self._alone[-8:], seconds]
        elif self._alone:
            self._sums *= _FORGETTING
            self._products *= _FORGETTING
            self._add(tokens, seconds / float(np.median(self._alone)) - 1, 1.0)
            extra, each = np.linalg.solve(self._sums + 1e-6 * np.eye(2), self._products)
            self._line = float(extra), float(each)

    def relative(self, tokens: int) -> float:
        """Return the expected time of a step, relative to one without a draft."""
        if not tokens:
            return 1.0
        return max(1.0, 1 + self._line[0] + self._line[1] * tokens)

    def _add(self, tokens: float, more: float, weight: float) -> None:
        row = np.array([1.0, tokens])
        self._sums += weight * np.outer(row, row)
        self._products += weight * more * row


@dataclass
class Acceptance:
    """The share of drafted tokens that are accepted, by the class of the match."""

    accepted: list[float] = field(default_factory=lambda: [0.0] * len(_EDGES))
    tried: list[float] = field(default_factory=lambda: [0.0] * len(_EDGES))

    def probability(self, number: int, share: float) -> float:
        """Return the probability that a token is accepted after a match of a class."""
        known = (self.accepted[number] + _PRIOR_TOKENS * _PRIOR[number]) / (self.tried[number] + _PRIOR_TOKENS)
        return known * share

    def fade(self) -> None:
        """Forget a little of all that was observed."""
        self.accepted = [_FADING * each for each in self.accepted]
        self.tried = [_FADING * each for each in self.tried]

    def observe(self, draft: Draft, accepted: int) -> None:
        """Count the tokens of a draft up to the first one that was not accepted."""
        for place in range(min(len(draft), accepted + 1)):
            number = draft.classes[place]
            self.tried[number] = _FORGETTING * self.tried[number] + 1
            self.accepted[number] = _FORGETTING * self.accepted[number] + (place < accepted)


class Drafter:
    """Drafts for one text after another, from a store and from the text itself."""

    def __init__(
        self,
        suffixes: SuffixArray | None,
        times: StepTimes,
        *,
        identity: Hashable = None,
    ) -> None:
        """Take the suffix array of a store, and the `identity` of that store."""
        self._store = None if suffixes is None else StoreMatch(suffixes)
        self._text = TextMatch()
        self._times = times
        self._acceptance = (Acceptance(), Acceptance())  # from the store, and from the text
        self.identity = identity
        self.begin()

    def begin(self, prompt: int | None = None) -> None:
        """Begin another text, with a prompt of this length; None: the first one that is drafted after is the prompt.

        What was learnt is kept.
        """
        self.drafted = self.accepted = 0  # tokens of this text
        self.copied: list[CopiedSpan] = []  # into this text
        self._prompt = prompt
        self._last, self._length = Draft(), 0  # the draft, and the tokens before it

    def draft(self, tokens: Sequence[int], room: int) -> Draft:
        """Return a draft of at most `room` tokens after a text, the start token first; empty where none pays."""
        found = [(draft, self.expected_tokens(draft)) for draft in self.candidates(tokens, room)]
        (chosen,) = choose_drafts([found], self._times)
        return self.take(chosen)

    def candidates(self, tokens: Sequence[int], room: int) -> list[Draft]:
        """Return drafts of at most `room` tokens after a text, the start token first."""
        count = min(room, MAX_DRAFT)
        self._prompt = len(tokens) if self._prompt is None else self._prompt
        self._last, self._length = Draft(), len(tokens)
        if count < 1:
            return []
        self._text.update(tokens)
        found = [self._text.draft(count)]
        if self._store is not None:
            tail = np.asarray(tokens[-LONGEST_MATCH:], np.int64)
            self._store.update(self._store.suffixes.encode(tail, begins=len(tokens) <= LONGEST_MATCH))
            found.append(self._store.draft(count))
        return found

    def expected_tokens(self, draft: Draft) -> list[float]:
        """Return how many tokens a step is expected to write, by the number of drafted tokens from 0 on."""
        acceptance = self._acceptance[draft.place is None]
        kinds = zip(draft.classes, draft.shares, strict=True)
        accepted = accumulate((acceptance.probability(kind, share) for kind, share in kinds), mul)
        return list(accumulate(accepted, initial=1.0))

    def take(self, draft: Draft) -> Draft:
        """Remember and return the draft that is verified after the text of the last candidates."""
        self._last = draft
        return draft

    def observe(self, accepted: int, seconds: float | None = None) -> None:
        """Learn from the verification of the last draft, and from the time of its step."""
        for each in self._acceptance:
            each.fade()
        self.drafted += len(self._last)
        self.accepted += accepted
        if accepted and self._last.place is not None:
            self.copied.append(CopiedSpan(self._length - (self._prompt or 0), accepted, self._last.place))
        self._acceptance[self._last.place is None].observe(self._last, accepted)
        if seconds is not None:
            self._times.observe(len(self._last), seconds)

    def copied_spans(self, tokens: Sequence[int]) -> list[CopiedSpan]:
        """Return what was copied into generated tokens; spans are joined if the token between is the store's too."""
        joined: list[CopiedSpan] = []
        for whole in self.copied:
            span = replace(whole, count=min(whole.count, len(tokens) - whole.start))  # a text may end inside a draft
            if span.count < 1:
                break
            last = joined[-1] if joined else None
            if last is not None and self._follows(last, span, tokens):
                joined[-1] = CopiedSpan(last.start, span.start + span.count - last.start, last.place)
            else:
                joined.append(span)
        return joined

    def entry_at(self, place: int) -> int:
        """Return the entry of the store whose token is at a place of the suffix array's text."""
        assert self._store is not None
        return place - int(np.count_nonzero(self._store.suffixes.text[:place] == 0))  # borders are no entries

    def _follows(self, last: CopiedSpan, span: CopiedSpan, tokens: Sequence[int]) -> bool:
        """Whether a span begins one token after the last one, in the text and in the store, and that token is equal."""
        assert self._store is not None
        between = last.count  # the pass that verifies a draft returns one more token
        if (span.start - last.start, span.place - last.place) != (between + 1, between + 1):
            return False
        return int(self._store.suffixes.text[last.place + between]) - 1 == tokens[last.start + between]


def choose_drafts(candidates: Sequence[Sequence[tuple[Draft, list[float]]]], times: StepTimes) -> list[Draft]:
    """Return a draft for each text, so that one step over all of them is expected to write most tokens a second.

    Each text has drafts with the tokens that are expected by their length. A step takes as long as its longest draft.
    """
    longest = max((len(draft) for own in candidates for draft, _ in own), default=0)
    best, chosen = _MARGIN * len(candidates), [Draft()] * len(candidates)
    for length in range(1, longest + 1):
        found = [
            max(((own[min(length, len(draft))], draft) for draft, own in each), key=_first, default=(1.0, Draft()))
            for each in candidates
        ]
        speed = sum(expected for expected, _ in found) / times.relative(length)
        if speed > best:
            best, chosen = speed, [draft.first(length) for _, draft in found]
    return chosen


def _first(pair: tuple[float, Draft]) -> float:
    return pair[0]


def _class(match: int) -> int:
    """Return the class of a match by its length."""
    return next((number for number in reversed(range(len(_EDGES))) if match >= _EDGES[number]), 0)
