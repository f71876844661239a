"""Drafts from a store and from the text itself, against brute force; and how their length is chosen."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnlm.datastore.suffix_array import from_documents
from knnlm.generation.draft import (
    LONGEST_MATCH,
    MAX_DRAFT,
    STORE,
    STUDENT,
    Acceptance,
    Draft,
    Drafter,
    Proposal,
    StepTimes,
    StoreMatch,
    TextMatch,
    choose_drafts,
)

START, VOCAB = 5, 6
texts = st.lists(st.integers(0, 3), min_size=1, max_size=50)
collections = st.lists(texts, min_size=1, max_size=5)


def occurrences(documents, end):
    """(document, place after the end) of each occurrence that a token follows."""
    size = len(end)
    return [
        (number, place + size)
        for number, document in enumerate(documents)
        for place in range(len(document) - size)
        if document[place : place + size] == end
    ]


def longest_end(documents, text):
    found = [size for size in range(1, min(LONGEST_MATCH, len(text)) + 1) if occurrences(documents, text[-size:])]
    return max(found, default=0)


@settings(deadline=None, max_examples=150)
@given(collections, texts, st.lists(texts, max_size=3), st.data())
def test_longest_match_and_its_continuation(documents, text, additions, data):
    suffixes = from_documents(documents, vocab_size=VOCAB, start_token=START)
    match = StoreMatch(suffixes)
    copied = data.draw(st.sampled_from(documents))
    for more in ([], copied[: len(copied) // 2], *additions):  # the match of a text that grows
        text = [*text, *more]
        match.update(suffixes.encode(np.array(text), begins=False))
        assert match.length == longest_end(documents, text)
        draft = match.draft(8)
        if not match.length:
            assert not draft
            continue
        places = occurrences(documents, text[-match.length :])
        followers = Counter(documents[number][place] for number, place in places)
        if draft:  # else most of the documents may end here
            assert followers[draft.tokens[0]] == max(followers.values())
            assert draft.shares[0] == pytest.approx(followers[draft.tokens[0]] / len(places))
        tokens = list(draft.tokens)
        assert any(documents[number][place : place + len(tokens)] == tokens for number, place in places)
        stored = suffixes.text[draft.place : draft.place + len(tokens)] if draft else []
        assert [int(number) - 1 for number in stored] == tokens


def test_draft_ends_with_the_document():
    suffixes = from_documents([[0, 1, 2, 3], [3, 3]], vocab_size=VOCAB, start_token=START)
    match = StoreMatch(suffixes)
    match.update(suffixes.encode(np.array([0, 1]), begins=False))
    assert match.draft(8).tokens == (2, 3)


def test_begin_of_a_text_matches_the_begin_of_documents():
    suffixes = from_documents([[0, 1, 2, 3], [1, 3, 3]], vocab_size=VOCAB, start_token=START)
    match = StoreMatch(suffixes)
    match.update(suffixes.encode(np.array([START, 1]), begins=True))
    assert match.length == 2
    assert match.draft(8).tokens == (3, 3)


def brute_text(tokens, count):
    """What followed the longest end before, the last time; the continuation may reach into itself."""
    best, length = None, 1
    for place in range(len(tokens) - 1, 1, -1):
        common = 0
        while common < min(place, LONGEST_MATCH) and tokens[place - 1 - common] == tokens[-1 - common]:
            common += 1
        if common > length:
            best, length = place, common
    if best is None:
        return []
    every = list(tokens)
    while len(every) < len(tokens) + count:
        every.append(every[best + len(every) - len(tokens)])
    return every[len(tokens) :]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_continuation_of_the_text_itself(first, second):
    match = TextMatch()
    for tokens in (first, first + second, second):  # the last one is another text
        match.update(tokens)
        assert list(match.draft(5).tokens) == brute_text(tokens, 5)


def test_times_of_steps_are_learnt():
    times = StepTimes(extra=0.5, each=0.5)
    assert times.relative(0) == 1
    assert times.relative(4) == pytest.approx(1 + 0.5 + 4 * 0.5, rel=0.01)
    for number in range(400):
        times.observe(0, 0.02)
        count = 1 + number % 20
        times.observe(count, 0.02 * (1 + 0.1 + 0.03 * count))
    assert times.relative(8) == pytest.approx(1.34, rel=0.01)
    for _ in range(300):
        times.observe(5, 0.001)  # faster than without a draft: an error of measurement
    assert times.relative(5) == 1


def drafter(documents, *, extra=0.0, each=0.05):
    suffixes = from_documents(documents, vocab_size=VOCAB, start_token=START)
    return Drafter(suffixes, StepTimes(extra=extra, each=each, weight=1e6))


def test_long_matches_are_drafted_and_short_ones_are_not():
    document = [0, 1, 2, 3, 3, 2, 1, 0, 0, 2, 1, 3, 0, 3, 1, 1] * 2
    made = drafter([document, [3, 0, 1, 2]], each=0.2)
    assert len(made.draft([START, 2, 2, 0], 8)) < len(made.draft([START, *document[:12]], 8))
    assert made.draft([START, *document[:12]], 3).tokens == tuple(document[12:15])
    assert not made.draft([START, *document[:12]], 0)


def test_drafts_that_are_rejected_become_shorter_and_end():
    document = [0, 1, 2, 3, 3, 2, 1, 0, 0, 2, 1, 3, 0, 3, 1, 1]
    made = drafter([document], extra=0.1, each=0.1)
    text = [START, *document[:10]]
    lengths = []
    for _ in range(400):
        lengths.append(len(made.draft(text, MAX_DRAFT)))
        made.observe(0)
    assert lengths[0] > 3
    assert 0 < sum(each > 0 for each in lengths[100:]) < 24  # tried again from time to time
    assert sum(lengths[100:]) < 24
    assert made.drafted == sum(lengths)
    assert made.accepted == 0
    made.begin()
    assert made.drafted == 0


def test_accepted_drafts_become_longer():
    document = [number % 4 for number in range(3)] + [0, 2, 0, 3, 1, 3, 0, 0, 1, 1, 2, 2, 3, 3] * 3
    made = drafter([document], each=0.15)
    text, lengths = [START, *document[:4]], []
    for _ in range(30):
        found = made.draft(text, MAX_DRAFT)
        lengths.append(len(found))
        made.observe(len(found))
    assert lengths[-1] > lengths[0] > 0


def test_draft_is_that_with_the_best_expected_speed():
    """Against every length, by the definition: expected tokens over the relative time."""
    made = drafter([[0, 1, 2, 3] * 9], extra=0.3, each=0.12)
    acceptance = made._acceptance[STORE]
    whole = Draft((1,) * 9, (3, 3, 4, 4, 4, 5, 5, 5, 5), (0.9,) * 9, place=1, source=STORE)
    speeds, probability, expected = [1.0], 1.0, 1.0
    for number in range(9):
        probability *= acceptance.probability(whole.classes[number], 0.9)
        expected += probability
        speeds.append(expected / (1 + 0.3 + 0.12 * (number + 1)))
    for least in (0.0, made._times.each):  # tokens that are left out would not pay
        gain, (cut,) = choose_drafts([[made._expect(whole, least)]], made._times)
        assert gain == pytest.approx(max(1.05, *speeds), rel=1e-3)
        assert len(cut) == (int(np.argmax(speeds)) if max(speeds) > 1.05 else 0)


@given(
    st.lists(st.lists(st.lists(st.floats(0.05, 1), max_size=6), max_size=2), min_size=1, max_size=4),
    st.floats(0, 1), st.floats(0.01, 0.5),
)  # fmt: skip
def test_texts_of_a_batch_share_the_best_length(shares, extra, each):
    """Against all combinations of drafts of every length: most expected tokens over the time of the longest draft."""
    times = StepTimes(extra=extra, each=each, weight=1e9)
    candidates = []
    for number, text in enumerate(shares):
        own = [Draft((number,) * len(draft), (0,) * len(draft), tuple(draft)) for draft in text]
        candidates.append([(draft, [1.0 + sum(math.prod(draft.shares[: n + 1]) for n in range(count))
                                    for count in range(len(draft) + 1)]) for draft in own])  # fmt: skip
    best = 0.0
    for length in range(7):
        best_of_each = [max([1.0, *(e[min(length, len(d))] for d, e in own)]) for own in candidates]
        best = max(best, sum(best_of_each) / (times.relative(length)))
    gain, chosen = choose_drafts(candidates, times)
    expected = [1.0 + sum(math.prod(draft.shares[: number + 1]) for number in range(len(draft))) for draft in chosen]
    speed = sum(expected) / times.relative(max(map(len, chosen)))
    if any(map(len, chosen)):
        assert speed == pytest.approx(best)
        assert gain == pytest.approx(best / len(shares))
        assert speed > 1.05 * len(shares)
    else:
        assert best <= 1.05 * len(shares) * (1 + 1e-9)


def test_slow_step_counts_as_twice_the_expected_time_at_most():
    """A capture of a graph, or another process, does not end drafts for long."""
    times = StepTimes(extra=0.1, each=0.1, weight=1.0)
    for _ in range(40):
        times.observe(0, 0.02)
        times.observe(5, 0.02 * 1.6)
    times.observe(5, 20.0)
    assert 1.6 < times.relative(5) < 1.75
    for _ in range(200):  # but steps that are always as slow do
        times.observe(5, 0.2)
    assert times.relative(5) == pytest.approx(10, rel=0.01)


def test_times_return_to_the_estimate_while_nothing_is_drafted():
    times = StepTimes(extra=0.1, each=0.1)
    times.observe(0, 0.02)
    for _ in range(100):
        times.observe(5, 0.2)
    assert times.relative(5) > 8
    for _ in range(3000):
        times.observe(0, 0.02)
    assert times.relative(5) == pytest.approx(1.6, rel=0.01)


def test_step_without_a_draft_is_timed_from_time_to_time():
    made = drafter([[0, 1, 2, 3] * 9])
    text, undrafted = [START, 0, 1, 2, 3, 0, 1], []
    for number in range(200):
        found = made.draft(text, 4)
        if not found:
            undrafted.append(number)
        made.observe(len(found), 0.1 if found else 0.09)
    assert undrafted == [2, 67, 132, 197]


def student(made, proposals, *, count=8, tokens=(START, 1, 2)):
    """Draft what a student proposes, and return the draft and what the student had to read."""
    read = []

    def propose(drafted):
        read.append(list(drafted))
        return proposals[len(drafted)]

    return made.draft(list(tokens), count, propose), read


def of_student(*, extra=0.1, each=0.2):
    never = StepTimes(extra=1e3, each=1.0, weight=1e9)
    return Drafter(None, never, student_times=StepTimes(extra=extra, each=each, weight=1e9))


def test_student_drafts_while_it_is_sure():
    sure, unsure = Proposal(1, 9.0), Proposal(2, 0.0)
    made = of_student(each=0.4)
    found, read = student(made, [sure, sure, unsure])
    assert found.source == STUDENT
    assert found.tokens == (1, 1)
    assert read == [[], [1], [1, 1]]
    assert student(made, [sure] * 9, count=3)[0].tokens == (1, 1, 1)
    assert student(of_student(each=0.6), [unsure]) == (Draft(), [[]])
    assert student(of_student(each=0.95), [unsure]) == (Draft(), [])  # no proposal would be drafted


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.5, 3.0, 9.0]), min_size=8, max_size=8),
    st.floats(0, 2),
    st.floats(0.05, 0.9),
)
def test_length_of_a_student_draft_follows_the_expected_speed(leads, extra, each):
    """Against the rule by brute force: go on while some longer draft is expected to be faster than to stop here."""
    made = of_student(extra=extra, each=each)
    prior = dict(zip((0.0, 0.3, 0.7, 1.5, 3.0, 9.0), (0.5, 0.55, 0.65, 0.75, 0.85, 0.95), strict=True))
    mean = sum(prior.values()) / len(prior)

    def speed(probabilities):
        expected = 1 + sum(np.prod(probabilities[: number + 1]) for number in range(len(probabilities)))
        time = 1 + extra + each * len(probabilities) if probabilities else 1
        return expected / time

    length, known = 0, []
    while length < 8:
        known = [prior[lead] for lead in leads[: length + 1]]
        longer = max(speed(known + [mean] * more) for more in range(8 - length))
        present = speed(known[:-1]) if length else 1.05
        if abs(longer - present) < 1e-6:
            return  # equal up to rounding
        if longer < present:
            break
        length += 1
    found, _ = student(made, [Proposal(1, lead) for lead in leads])
    assert len(found) == length


def test_proposals_are_learnt_from_whether_they_were_drafted_or_not():
    made = of_student(each=0.3)
    wrong = []
    for _ in range(200):
        wrong.append(len(student(made, [Proposal(1, 9.0)] * 9)[0]))
        made.observe(0, following=2)
    assert wrong[0] > 1
    assert sum(wrong[100:]) == 0
    for _ in range(100):
        student(made, [Proposal(1, 9.0)] * 9)
        made.observe(0, following=1)  # would have been accepted
    assert len(student(made, [Proposal(1, 9.0)] * 9)[0]) > 1
    assert made.accepted_from[STUDENT] == 0
    right = of_student(each=0.3)
    lengths = []
    for _ in range(60):
        found, _ = student(right, [Proposal(1, 0.3)] * 9)
        lengths.append(len(found))
        right.observe(len(found), following=1)
    assert lengths[-1] > 5 > lengths[0]
    assert right.accepted_from[STUDENT] == sum(lengths)


def test_faster_draft_of_store_and_student_is_used():
    """A long match in the store is free, a token of the student costs a pass; a short match is less certain."""
    document = [0, 1, 2, 3, 3, 2, 1, 0, 0, 2, 1, 3, 0, 3, 1, 1] * 2
    suffixes = from_documents([document, [3, 0, 1, 2]], vocab_size=VOCAB, start_token=START)
    times = {"extra": 0.05, "weight": 1e9}
    made = Drafter(suffixes, StepTimes(each=0.1, **times), student_times=StepTimes(each=0.35, **times))
    sure = [Proposal(1, 9.0)] * 9
    assert student(made, sure, tokens=(START, *document[:14]))[0].source == STORE
    assert student(made, sure, tokens=(START, 2, 2, 0))[0].source == STUDENT
    assert student(made, [Proposal(1, 0.0)] * 9, tokens=(START, *document[:14]))[0].source == STORE


def test_copy_that_the_student_does_not_expect_is_left():
    """A student is asked before a copy is verified: its pass over the last token is part of the step."""
    document = [0, 1, 2, 3, 3, 2, 1, 0, 0, 2, 1, 3, 0, 3, 1, 1] * 2
    suffixes = from_documents([document], vocab_size=VOCAB, start_token=START)
    never = StepTimes(extra=1e3, each=1.0, weight=1e9)
    made = Drafter(suffixes, StepTimes(extra=0.3, each=0.1, weight=1e9), student_times=never)
    tokens = (START, *document[:6])
    expected = made.draft(list(tokens), 8)
    assert expected.source == STORE
    same, other = Proposal(expected.tokens[0], 9.0), Proposal((expected.tokens[0] + 1) % 4, 9.0)
    assert student(made, [other], tokens=tokens) == (Draft(), [[]])
    found, read = student(made, [same], tokens=tokens)
    assert read == [[]]
    assert found.source == STORE
    assert len(found) >= len(expected)


def test_all_classes_learn_from_one():
    """With the counts of a class, the initial estimate of others is moved by the share of rejections expected."""
    acceptance = Acceptance((0.5, 0.8))
    assert acceptance.probability(0) == pytest.approx(0.5)
    assert acceptance.mean == pytest.approx(0.65)
    counts = np.zeros(3)
    for number in range(30):
        acceptance.observe(1, accepted=number % 10 > 0)
        counts = 0.97 * counts + np.array([number % 10 > 0, number % 10 == 0, 0.2])
    ratio = (counts[1] + 3) / (counts[2] + 3)
    assert ratio < 0.8
    assert acceptance.probability(0) == pytest.approx(1 - 0.5 * ratio)
    tried = counts[0] + counts[1]
    assert acceptance.probability(1, 0.9) == pytest.approx(0.9 * (counts[0] + 6 * (1 - 0.2 * ratio)) / (tried + 6))
    assert acceptance.mean == pytest.approx((counts[0] + 6 * 0.65) / (tried + 6))
