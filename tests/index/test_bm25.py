"""BM25 scores and nearest documents against sums that are written out in Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knnlm.index.bm25 import BM25

tokens = st.lists(st.integers(0, 6), max_size=8)
corpora = st.lists(tokens, max_size=9)


def score(query: list[int], document: list[int], corpus: list[list[int]]) -> float:
    """The score of one document, term by term."""
    mean = sum(map(len, corpus)) / len(corpus)
    total = 0.0
    for token in query:
        containing = sum(token in other for other in corpus)
        frequency = document.count(token)
        if frequency:
            idf = math.log(1 + (len(corpus) - containing + 0.5) / (containing + 0.5))
            norm = 1.2 * (1 - 0.75 + 0.75 * len(document) / mean)
            total += idf * frequency * (1.2 + 1) / (frequency + norm)
    return total


@given(corpora, tokens)
def test_scores_are_those_of_the_formula(corpus, query):
    expected = [score(query, document, corpus) for document in corpus]
    np.testing.assert_allclose(BM25(corpus).scores(query), expected, rtol=1e-5, atol=1e-7)


@given(corpora, tokens, st.integers(1, 12))
def test_nearest_documents_have_the_largest_scores_and_of_equal_ones_the_smallest_numbers(corpus, query, count):
    bm25 = BM25(corpus)
    scores = bm25.scores(query)
    order = sorted(range(len(corpus)), key=lambda number: (-scores[number], number))
    assert bm25.nearest(query, count).tolist() == sorted(order[:count])


@given(corpora, st.lists(st.booleans(), max_size=9), corpora, tokens)
def test_changed_index_equals_one_that_is_built(corpus, kept, added, query):
    kept = [*kept, *[True] * len(corpus)][: len(corpus)]
    changed = BM25(corpus).changed(np.array(kept, bool), added)
    rest = [document for document, keeps in zip(corpus, kept, strict=True) if keeps]
    built = BM25([*rest, *added])
    assert changed.count == built.count
    assert changed.scores(query).tolist() == built.scores(query).tolist()
    # Once more: a server changes its index many times.
    again = changed.changed(np.arange(changed.count) % 2 == 0, corpus)
    built = BM25([*[*rest, *added][::2], *corpus])
    assert again.scores(query).tolist() == built.scores(query).tolist()


def test_rare_tokens_and_short_documents_count_more():
    corpus = [[1, 2], [1, 3], [1, 2, 4, 4, 4, 4], [5]]
    scores = BM25(corpus).scores([1, 2])
    assert scores[0] > scores[2] > scores[1] > scores[3] == 0
    assert BM25(corpus).scores([3])[1] > BM25(corpus).scores([2])[0]
    # Once in a document of mean length, of which every document is one: ln(1 + 0.5 / 1.5).
    assert BM25([[7]]).scores([7])[0] == pytest.approx(math.log(1 + 0.5 / 1.5))
    assert BM25([[7]]).scores([7, 7])[0] == pytest.approx(2 * math.log(1 + 0.5 / 1.5))
