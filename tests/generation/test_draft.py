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
    Draft,
    Drafter,
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
    acceptance = made._acceptance[0]
    whole = Draft((1,) * 9, (1, 2, 2, 3, 3, 3, 4, 4, 4), (0.9,) * 9, place=1)
    speeds, probability, expected = [1.0], 1.0, 1.0
    for number in range(9):
        probability *= acceptance.probability(whole.classes[number], 0.9)
        expected += probability
        speeds.append(expected / (1 + 0.3 + 0.12 * (number + 1)))
    (cut,) = choose_drafts([[(whole, made.expected_tokens(whole))]], made._times)
    assert len(cut) == int(np.argmax(speeds))


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
    chosen = choose_drafts(candidates, times)
    expected = [1.0 + sum(math.prod(draft.shares[: number + 1]) for number in range(len(draft))) for draft in chosen]
    speed = sum(expected) / times.relative(max(map(len, chosen)))
    if any(map(len, chosen)):
        assert speed == pytest.approx(best)
        assert speed > 1.05 * len(shares)
    else:
        assert best <= 1.05 * len(shares) * (1 + 1e-9)
