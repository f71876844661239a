"""Drafts of the tokens that come next: what followed the last tokens in the texts of a store, and in the text itself.

A draft costs little and is verified by one pass of the mixture over all its tokens, so that the text is the same as
without drafts. It pays where the text repeats what was written before, and costs time elsewhere. So its length follows
from what is expected of it: a token is drafted while the probability that it is accepted, together with all tokens
before it, is larger than its share in the time of a step. Both are estimated during the generation.

A decoder of the mixture, a student, drafts too. Each of its tokens takes a pass of the student, which the mixture needs
anyway if the token is accepted. Whether another token is drafted is decided after each pass, by how much more probable
it is to the student than the next one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from operator import mul
from typing import NamedTuple

import numpy as np

from knnlm.datastore.suffix_array import DEPTH, Ints, SuffixArray

LONGEST_MATCH = 32  # tokens
MAX_DRAFT = 24  # tokens
_SAMPLE = 64  # rows of a match whose followers are counted
_PLACES = 8  # where two tokens occurred last in the text, that are compared
_EDGES = (1, 2, 3, 5, 9, 17)  # the shortest match of each class
_PRIOR = (0.15, 0.3, 0.45, 0.6, 0.75, 0.85)  # the share of drafted tokens that are accepted, by the class of the match
_LEADS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # of a student's token in log-probability, the smallest of each class
_LEAD_PRIOR = (0.5, 0.55, 0.65, 0.75, 0.85, 0.95)  # the same share, by the class of the lead
_PRIOR_TOKENS = 6.0  # that the prior counts as
_PRIOR_REJECTED = 3.0  # rejected tokens, that it counts as in the comparison with all classes
_FORGETTING = 0.97  # of what was observed, at each token of its class
_FADING = 0.997  # of what was observed, at each step: a draft that was rejected is tried again later
_MARGIN = 1.05  # that a draft must be faster than a step without one
_COMPARED = 64  # steps with drafts, after which one without measures the time of a step again
_MAX_SURPRISE = 2.0  # times the expected time, that a step counts as at most: the machine may have done something else

STORE, TEXT, STUDENT = "store", "text", "student"


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next."""

    tokens: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()  # of the match before each token, or of its lead
    shares: tuple[float, ...] = ()  # of the occurrences of the match that each token followed
    place: int | None = None  # of the first token in the text of the suffix array; None: not from the store
    source: str = TEXT

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> Draft:
        """Return the first tokens of the draft."""
        return replace(self, tokens=self.tokens[:count], classes=self.classes[:count], shares=self.shares[:count])


Candidate = tuple[Draft, list[float]]  # with the tokens that a step is expected to write, by the number of drafted ones


class Proposal(NamedTuple):
    """The token that a student would choose next."""

    token: int
    lead: float  # in the log-probability, with the noise of a sample, before the next token


# Returns the proposal after a text with some drafted tokens, each call with one token more.
Propose = Callable[[Sequence[int]], Proposal]


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

    def draft(self, count: int, pays: Callable[[int, float], bool] = lambda *_: True) -> Draft:
        """Return the most frequent continuation, of at most this many tokens.

        `pays` is called with the class and the share of each token of a frequent match, and is true if it is drafted.
        """
        tokens: list[int] = []
        shares: list[float] = []
        low, high, length = self.low, self.high, self.length
        text, order = self.suffixes.text, self.suffixes.order
        while self.length and len(tokens) < count and high - low > 1 and length < DEPTH - 1:
            rows = np.unique(np.linspace(low, high - 1, min(high - low, _SAMPLE)).astype(np.int64))
            number, votes = Counter(self.suffixes.following(rows, length).tolist()).most_common(1)[0]
            if not number or not pays(_class(length), votes / len(rows)):  # 0: most of these documents end here
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
        return Draft(tuple(tokens), tuple(classes), tuple(shares), place, STORE)

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

    @property
    def length(self) -> int:
        """The number of tokens that were read."""
        return len(self._tokens)

    def update(self, tokens: Sequence[int], most: int | None = None) -> None:
        """Read the tokens that were added to the text since the last call; another text is read from its beginning.

        At most this many tokens are read.
        """
        if self._tokens != list(tokens[: len(self._tokens)]):
            self._tokens = []
            self._places.clear()
        end = len(tokens) if most is None else min(len(tokens), len(self._tokens) + most)
        for number in range(len(self._tokens), end):
            if number > 1:  # what follows the two tokens before
                places = self._places[tokens[number - 2], tokens[number - 1]]
                places.append(number)
                del places[:-_PLACES]
        self._tokens += tokens[len(self._tokens) : end]

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
        self._drafts = 0  # steps with drafts since the last one without
        self._sums = np.zeros((2, 2))
        self._products = np.zeros(2)
        self._line = extra, each
        for tokens in (1.0, MAX_DRAFT):
            self._add(tokens, extra + each * tokens, weight)
        self._initial = self._sums.copy(), self._products.copy()

    @property
    def needs_comparison(self) -> bool:
        """Whether the time of a step without a draft is not known, or not known any more."""
        return self._drafts >= (_COMPARED if self._alone else 2)

    def observe(self, tokens: int, seconds: float) -> None:
        """Add a step."""
        if not tokens:
            if not self._drafts:  # nothing is drafted at present: what was observed is forgotten
                self._sums += (1 - _FADING) * (self._initial[0] - self._sums)
                self._products += (1 - _FADING) * (self._initial[1] - self._products)
                self._fit()
            self._alone, self._drafts = [*self._alone[-8:], seconds], 0
            return
        self._drafts += 1
        if self._alone:
            self._sums *= _FORGETTING
            self._products *= _FORGETTING
            relative = min(seconds / float(np.median(self._alone)), _MAX_SURPRISE * self.relative(tokens))
            self._add(tokens, relative - 1, 1.0)
            self._fit()

    @property
    def each(self) -> float:
        """The expected time of one more drafted token."""
        return max(0.0, self._line[1])

    def relative(self, tokens: int) -> float:
        """Return the expected time of a step, relative to one without a draft."""
        if not tokens:
            return 1.0
        return max(1.0, 1 + self._line[0] + self._line[1] * tokens)

    def _fit(self) -> None:
        extra, each = np.linalg.solve(self._sums + 1e-6 * np.eye(2), self._products)
        self._line = float(extra), float(each)

    def _add(self, tokens: float, more: float, weight: float) -> None:
        row = np.array([1.0, tokens])
        self._sums += weight * np.outer(row, row)
        self._products += weight * more * row


class Acceptance:
    """The share of drafted tokens that are accepted, by their class."""

    def __init__(self, prior: Sequence[float] = _PRIOR) -> None:
        self._rejected_before = 1 - np.array(prior)
        self._accepted, self._tried = np.zeros(len(prior)), np.zeros(len(prior))
        self._all = np.zeros(3)  # accepted, rejected, and rejected by the initial estimates

    @property
    def mean(self) -> float:
        """The share of all tokens."""
        before = _PRIOR_TOKENS * (1 - self._rejected_before.mean())
        return float((self._all[0] + before) / (self._all[:2].sum() + _PRIOR_TOKENS))

    def probability(self, number: int, share: float = 1.0) -> float:
        """Return the probability that a token of a class is accepted."""
        # Few tokens are of one class, so the initial estimate follows those of all classes.
        ratio = (self._all[1] + _PRIOR_REJECTED) / (self._all[2] + _PRIOR_REJECTED)
        prior = 1 - min(1.0, ratio * self._rejected_before[number])
        return float(share * (self._accepted[number] + _PRIOR_TOKENS * prior) / (self._tried[number] + _PRIOR_TOKENS))

    def fade(self) -> None:
        """Forget a little of all that was observed."""
        for counts in (self._accepted, self._tried, self._all):
            counts *= _FADING

    def observe(self, number: int, *, accepted: bool) -> None:
        """Count a token of a class."""
        self._tried[number] = _FORGETTING * self._tried[number] + 1
        self._accepted[number] = _FORGETTING * self._accepted[number] + accepted
        self._all = _FORGETTING * self._all + [accepted, not accepted, self._rejected_before[number]]


class Drafter:
    """Drafts for one text after another, from a store, from the text itself, and from a student."""

    def __init__(
        self,
        suffixes: SuffixArray | None,
        times: StepTimes,
        *,
        student_times: StepTimes | None = None,
        identity: Hashable = None,
        like: Drafter | None = None,
    ) -> None:
        """Take the suffix array of a store and the `identity` of that store; `like` another one, learn with it.

        The times of steps are those with tokens that were copied, and those with tokens of a student, of which None
        are drafted without `student_times`.
        """
        self._store = None if suffixes is None else StoreMatch(suffixes)
        self._text = TextMatch()
        self._times, self._student_times = times, student_times
        own = {STORE: Acceptance(), TEXT: Acceptance(), STUDENT: Acceptance(_LEAD_PRIOR)}
        self._acceptance: dict[str, Acceptance] = own if like is None else like._acceptance
        self.identity = identity
        self.begin()

    def begin(self, prompt: int | None = None) -> None:
        """Begin another text, with a prompt of this length; None: the first text that is drafted after is the prompt.

        What was learnt is kept.
        """
        # Tokens of this text by their source.
        self.drafted_from, self.accepted_from = (dict.fromkeys((STORE, TEXT, STUDENT), 0) for _ in range(2))
        self.copied: list[CopiedSpan] = []  # into this text
        self._prompt = prompt
        self._last, self._length = Draft(), 0  # the draft, and the tokens before it
        self._proposed: list[Proposal] = []  # after the same tokens; of these, the draft may have the first ones

    @property
    def drafted(self) -> int:
        """The tokens of this text that were drafted."""
        return sum(self.drafted_from.values())

    @property
    def accepted(self) -> int:
        """The tokens of this text that were drafted and accepted."""
        return sum(self.accepted_from.values())

    def draft(self, tokens: Sequence[int], room: int, propose: Propose | None = None) -> Draft:
        """Return a draft of at most `room` tokens after a text, the start token first; empty where none pays.

        `propose` returns what a student proposes; None: it cannot.
        """
        # The student may agree with a token that is improbable else.
        found = self.candidates(tokens, room, self._times.each if propose is None else 0.0)
        times, count = self._student_times, min(room, MAX_DRAFT)
        if self._times.needs_comparison or (times is not None and times.needs_comparison):
            return self._last
        gain, (self._last,) = choose_drafts([found], self._times)
        if propose is None or times is None or count < 1:
            return self._last
        surest = max(self._acceptance[STUDENT].probability(number) for number in range(len(_LEADS)))
        if not self._last and self._reachable(1.0, surest, 1, count, times) <= gain:
            return self._last  # the student reads the text with the language model
        self._proposed.append(propose([]))
        if self._last:
            found = [self._expect(draft, self._times.each) for draft, _ in found]
            gain, (self._last,) = choose_drafts([found], self._times)
        self._last = self._ask(propose, count, gain, times) or self._last
        return self._last

    def candidates(
        self, tokens: Sequence[int], room: int, least: float, *, most_read: int | None = None
    ) -> list[Candidate]:
        """Return what may be copied after a text, the start token first, at most `room` tokens.

        Tokens that are accepted with a probability below `least` are left out. At most `most_read` tokens of the text
        are read at a time; until all are, nothing is copied from the text itself.
        """
        count = min(room, MAX_DRAFT)
        self._prompt = len(tokens) if self._prompt is None else self._prompt
        self._last, self._length, self._proposed = Draft(), len(tokens), []
        if count < 1:
            return []
        self._text.update(tokens, most_read)
        found = [self._text.draft(count)] if self._text.length == len(tokens) else []
        if self._store is not None:
            tail = np.asarray(tokens[-LONGEST_MATCH:], np.int64)
            self._store.update(self._store.suffixes.encode(tail, begins=len(tokens) <= LONGEST_MATCH))
            left, acceptance = 1.0, self._acceptance[STORE]

            def pays(kind: int, share: float) -> bool:
                nonlocal left
                left *= acceptance.probability(kind, share)
                return left >= least

            found.append(self._store.draft(count, pays))
        return [self._expect(draft, least) for draft in found]

    def _expect(self, draft: Draft, least: float) -> Candidate:
        """Return a draft without the tokens that are too improbable, and the tokens that are expected with it."""
        acceptance, kinds = self._acceptance[draft.source], zip(draft.classes, draft.shares, strict=True)
        each = [acceptance.probability(kind, share) for kind, share in kinds]
        if each and self._proposed:
            sure = self._probability(self._proposed[0])
            each[0] = max(each[0], sure) if draft.tokens[0] == self._proposed[0].token else each[0] * (1 - sure)
        accepted = takewhile(lambda probability: probability >= least, accumulate(each, mul))
        expected = list(accumulate(accepted, initial=1.0))
        return draft.first(len(expected) - 1), expected

    def take(self, draft: Draft) -> None:
        """Set the draft that is verified after the text of the last candidates."""
        self._last = draft

    def observe(self, accepted: int, seconds: float | None = None, following: int | None = None) -> None:
        """Learn from the verification of the last draft, from the token after it, and from the time of its step."""
        last = self._last
        for each in self._acceptance.values():
            each.fade()
        self.drafted_from[last.source] += len(last)
        self.accepted_from[last.source] += accepted
        if accepted and last.place is not None:
            self.copied.append(CopiedSpan(self._length - (self._prompt or 0), accepted, last.place))
        if last.source != STUDENT:
            for place, number in enumerate(last.classes[: accepted + 1]):
                self._acceptance[last.source].observe(number, accepted=place < accepted)
        chosen = [*last.tokens[:accepted], following]
        for proposal, token in zip(self._proposed, chosen, strict=False):
            if token is None:
                break
            self._acceptance[STUDENT].observe(_class(proposal.lead, _LEADS), accepted=proposal.token == token)
            if proposal.token != token:  # those after it are proposals for another text
                break
        if seconds is not None:
            if last.source != STUDENT:
                self._times.observe(len(last), seconds)
            if self._student_times is not None and (not last or last.source == STUDENT):
                self._student_times.observe(len(last), seconds)

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

    def _ask(self, propose: Propose, count: int, gain: float, times: StepTimes) -> Draft:
        """Return what a student drafts; empty where that is not expected to be faster than `gain`."""
        probability, expected = 1.0, 1.0
        tokens: list[int] = []
        while len(tokens) < count:
            if tokens:
                self._proposed.append(propose(tokens))
            probability *= self._probability(self._proposed[-1])
            if self._reachable(expected, probability, len(tokens) + 1, count, times) <= gain:
                break
            tokens.append(self._proposed[-1].token)
            expected += probability
            gain = expected / times.relative(len(tokens))
        classes = tuple(_class(each.lead, _LEADS) for each in self._proposed[: len(tokens)])
        return Draft(tuple(tokens), classes, (1.0,) * len(tokens), None, STUDENT) if tokens else Draft()

    def _probability(self, proposal: Proposal) -> float:
        """Return the probability that a proposal is accepted."""
        return self._acceptance[STUDENT].probability(_class(proposal.lead, _LEADS))

    def _reachable(self, expected: float, probability: float, length: int, count: int, times: StepTimes) -> float:
        """Return the best expected speed with `length` or more tokens of a student.

        `probability` is that all of the first `length` are accepted, and `expected` the tokens of the step without the
        last of them. Those after it are accepted as often as the student's tokens on average.
        """
        best, mean = 0.0, self._acceptance[STUDENT].mean
        for number in range(length, count + 1):
            expected += probability
            probability *= mean
            best = max(best, expected / times.relative(number))
        return best


def choose_drafts(candidates: Sequence[Sequence[Candidate]], times: StepTimes) -> tuple[float, list[Draft]]:
    """Return a draft for each text, so that one step over all of them is expected to write most tokens a second.

    The number is how much faster than without drafts that is; where too little is expected, the drafts are empty, and
    it is what would be needed. A step takes as long as its longest draft.
    """
    longest = max((len(draft) for own in candidates for draft, _ in own), default=0)
    best, chosen = _MARGIN, [Draft()] * len(candidates)
    for length in range(1, longest + 1):
        found = [_best(own, length) for own in candidates]
        speed = sum(expected for expected, _ in found) / len(found) / times.relative(length)
        if speed > best:
            best, chosen = speed, [draft.first(length) for _, draft in found]
    return best, chosen


def _best(candidates: Sequence[Candidate], length: int) -> tuple[float, Draft]:
    """Return the draft of a text that is expected to write most tokens with at most `length` drafted ones."""
    found = [(expected[min(length, len(draft))], draft) for draft, expected in candidates]
    return max(found, key=lambda each: each[0], default=(1.0, Draft()))


def _class(value: float, edges: Sequence[float] = _EDGES) -> int:
    """Return the class of the length of a match, or of a lead."""
    return next((number for number in reversed(range(len(edges))) if value >= edges[number]), 0)
