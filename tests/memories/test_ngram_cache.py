"""N-grams of the text being read: what followed earlier occurrences of the last tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import knnlm
from knnlm.errors import ParameterError
from knnlm.memories import ngram_cache
from knnlm.memories.base import Context, Origin, Span
from knnlm.memories.ngram_cache import NgramCacheMemory
from knnlm.mixture.mixture import Mixture

VOCABULARY = 5
TEXTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)


def levels(tokens, position, longest, shown):
    """What followed the last 1, 2, … tokens up to a position, where they occurred before and the follower is shown."""
    found = []
    for length in range(1, longest + 1):
        last = tokens[position - length + 1 : position + 1]
        ends = range(length - 1, position)
        followers = [tokens[end + 1] for end in ends if tokens[end - length + 1 : end + 1] == last and shown[end + 1]]
        if length > position + 1 or not followers:
            break
        found.append(followers)
    return found


def by_formula(found):
    """The smoothed probabilities of what followed matches of 1, 2, … tokens."""
    probs = None
    for followers in found:
        counts = Counter(followers)
        shorter = 0 if probs is None else len(counts)  # T, but there is nothing to smooth the shortest match with
        before = probs or dict.fromkeys(counts, 0.0)
        probs = {token: (counts[token] + shorter * p) / (len(followers) + shorter) for token, p in before.items()}
    return probs or {}


def assert_agree(output, rows):
    """Compare an output with the followers of the matches of each position."""
    (prediction,) = output.components
    log_probs, features, top = prediction.log_probs(), output.features(), output.top()
    assert len(log_probs) == len(features) == len(top) == len(rows)
    for row, found in enumerate(rows):
        probs = by_formula(found)
        expected = [probs.get(token, 0) for token in range(VOCABULARY)]
        assert log_probs[row].exp().tolist() == pytest.approx(expected, rel=1e-5, abs=1e-9)
        assert bool(prediction.abstains()[row]) == (not probs)
        if not probs:
            assert top[row] == -1
            assert features[row].tolist() == [0] * 6
            continue
        assert probs[int(top[row])] == pytest.approx(max(probs.values()), rel=1e-6)
        entropy = -sum(p * np.log(p) for p in probs.values())
        logs = [np.log1p(len(found[-1])), np.log1p(len(set(found[-1]))), np.log1p(len(found[0]))]
        assert features[row].tolist() == pytest.approx([len(found), *logs, max(probs.values()), entropy], rel=1e-5)
    for token in range(VOCABULARY):
        torch.testing.assert_close(prediction.log_prob(torch.full((len(rows),), token)), log_probs[:, token])


def rows_of(tokens, start, longest, shown=None):
    shown = shown or [True] * len(tokens)
    return [levels(tokens, position, longest, shown) for position in range(start, len(tokens))]


@given(st.lists(st.tuples(TEXTS, st.integers(0, 40)), max_size=4), st.integers(1, 6), st.integers(1, 300))
def test_every_position_is_smoothed_by_the_formula(drawn, longest, limit):
    drawn = [(tokens, min(start, len(tokens))) for tokens, start in drawn]
    context = Context({}, [Span(torch.tensor(tokens), start) for tokens, start in drawn])
    with pytest.MonkeyPatch.context() as patch:  # few at a time
        patch.setattr(ngram_cache, "_MAX_COMPARED", limit)
        patch.setattr(ngram_cache, "_MAX_MATCHES", limit)
        output = NgramCacheMemory(vocab_size=VOCABULARY, longest=longest).predict(context)
    assert_agree(output, [row for tokens, start in drawn for row in rows_of(tokens, start, longest)])


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(Origin)), min_size=1, max_size=30), st.booleans())
def test_followers_that_were_not_given_do_not_count(drawn, generated):
    tokens, origins = map(list, zip(*drawn, strict=True))
    spans = [Span(torch.tensor(tokens), 0, origins=torch.tensor(origins)), Span(torch.tensor(tokens), 0)]
    output = NgramCacheMemory(vocab_size=VOCABULARY, generated=generated).predict(Context({}, spans))
    shown = [origin == Origin.GIVEN or (generated and origin == Origin.GENERATED) for origin in origins]
    assert_agree(output, rows_of(tokens, 0, 32, shown) + rows_of(tokens, 0, 32))


@given(TEXTS)
@settings(max_examples=30)
def test_single_positions_equal_all_at_once(tokens):
    memory = NgramCacheMemory(vocab_size=VOCABULARY)
    whole = memory.predict(Context({}, [Span(torch.tensor(tokens), 0)]))
    steps = [Span(torch.tensor(tokens[: end + 1]), end) for end in range(len(tokens))]
    alone = memory.predict(Context({}, steps))
    torch.testing.assert_close(alone.components[0].log_probs(), whole.components[0].log_probs())
    torch.testing.assert_close(alone.features(), whole.features())
    assert torch.equal(alone.top(), whole.top())


def test_match_of_a_hand_worked_case():
    # Before the last "2 3", "2 3" was followed by 4, and "3" also twice by 1.
    tokens = [0, 2, 3, 4, 3, 1, 3, 1, 2, 3]
    output = NgramCacheMemory(vocab_size=VOCABULARY).predict(Context({}, [Span(torch.tensor(tokens), 9)]))
    expected = {4: (1 + 1 / 3) / 2, 1: (2 / 3) / 2}
    probs = output.components[0].log_probs().exp()[0]
    assert probs.tolist() == pytest.approx([expected.get(token, 0) for token in range(5)])
    assert output.top().tolist() == [4]


def test_longest_match_below_one_token_is_refused():
    with pytest.raises(ParameterError, match="at least 1"):
        NgramCacheMemory(vocab_size=5, longest=0)


def test_nothing_to_predict():
    for context in (Context({}), Context({}, [Span(torch.tensor([1, 2]), 2)])):
        output = NgramCacheMemory(vocab_size=5).predict(context)
        assert output.components[0].log_probs().shape == (0, 5)
        assert output.features().shape == (0, 6)
        assert output.top().shape == (0,)


def test_mixture_opens_it_with_its_options(lm, store):
    mixture = Mixture.open(store.path, lm, memories="ngram-cache", use_tuned=False)
    assert not mixture.options.cache_generated
    options = knnlm.MixtureOptions(cache_generated=True)
    (memory,) = Mixture.open(store.path, lm, memories="ngram-cache", use_tuned=False, options=options).memories
    assert memory.generated
    with pytest.raises(ParameterError, match="takes no value"):
        Mixture.open(store.path, lm, memories="ngram-cache=5", use_tuned=False)
