"""Measures of generated text against brute force and analytic cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knnlm.datastore.suffix_array import DEPTH, from_documents
from text_measures import distinct_ratio, divergence_score, frontier_area, kmeans, longest_copies


def test_distinct_ratio_counts_different_n_grams():
    assert distinct_ratio([1, 2, 3, 4, 5]) == 1.0
    assert distinct_ratio([7] * 10) == pytest.approx(1 / 7)
    assert distinct_ratio([1, 2] * 5, n=2) == pytest.approx(2 / 9)
    assert distinct_ratio([1, 2, 3]) == 1.0


def brute_force(documents, text):
    """The longest run of a text that a document contains, by trying all of them."""
    best = 0
    for document in documents:
        runs = {tuple(document[i:j]) for i in range(len(document)) for j in range(i + 1, len(document) + 1)}
        best = max(
            [best, *(j - i for i in range(len(text)) for j in range(i + 1, len(text) + 1) if tuple(text[i:j]) in runs)]
        )
    return best


tokens = st.lists(st.integers(0, 3), max_size=14)


@given(st.lists(tokens.filter(len), min_size=1, max_size=4), st.lists(tokens, min_size=1, max_size=3))
def test_longest_copy_is_that_of_brute_force(documents, texts):
    array = from_documents(documents, vocab_size=4, start_token=0)
    assert longest_copies(array, texts) == [brute_force(documents, text) for text in texts]


def test_copies_that_are_longer_than_the_sorted_depth_are_exact():
    generator = np.random.default_rng(0)
    shared = generator.integers(0, 50, DEPTH + 40).tolist()
    documents = [
        [*shared[: DEPTH + 10], 1, 2, 3],
        [9, *shared, 4],
        [8, *shared[: DEPTH + 25], 7],
        generator.integers(0, 50, 300).tolist(),
    ]
    array = from_documents(documents, vocab_size=60, start_token=0)
    texts = [[55, *shared, 55], [*shared[:DEPTH], 55], [*shared[: DEPTH + 25], 7, 55], [55], []]
    assert longest_copies(array, texts) == [DEPTH + 40, DEPTH, DEPTH + 26, 0, 0]


def test_copy_does_not_cross_documents():
    array = from_documents([[1, 2], [3, 4]], vocab_size=10, start_token=0)
    assert longest_copies(array, [[1, 2, 3, 4]]) == [2]
    assert longest_copies(array, []) == []


def test_clusters_of_separate_groups_are_found():
    generator = np.random.default_rng(0)
    groups = np.repeat(np.arange(4), 25)
    vectors = 10 * np.eye(4)[groups] + generator.normal(size=(100, 4))
    labels = kmeans(vectors, 4)
    assert len({(group, label) for group, label in zip(groups, labels, strict=True)}) == 4
    np.testing.assert_array_equal(labels, kmeans(vectors, 4))


def test_equal_vectors_have_clusters_too():
    assert len(kmeans(np.ones((5, 3)), 3)) == 5


def test_area_of_equal_distributions_is_one_and_of_separate_ones_near_zero():
    p = np.array([0.2, 0.3, 0.5, 0.0])
    assert frontier_area(p, p) == pytest.approx(1.0)
    apart = frontier_area(np.array([1.0, 0.0]), np.array([0.0, 1.0]))
    # The curve is x = (1-w)^5, y = w^5, and its area is 5·B(6, 5) = 5·5!·4!/10!.
    assert apart == pytest.approx(5 * 120 * 24 / 3628800, rel=0.02)


def test_area_agrees_with_an_integral_over_the_weight():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    weights = np.linspace(0, 1, 200_001)[1:-1, None]
    mixed = weights * p + (1 - weights) * q
    x = np.exp(-5 * (q * np.log(q / mixed)).sum(1))  # falls with the weight
    y = np.exp(-5 * (p * np.log(p / mixed)).sum(1))
    inside = float((-np.diff(x) * (y[1:] + y[:-1]) / 2).sum())
    # Between the ends of the curve and the axes, straight lines to (0, 1) and (1, 0).
    left, right = x[-1] * (1 + y[-1]) / 2, (1 - x[0]) * y[0] / 2
    assert frontier_area(p, q) == pytest.approx(inside + left + right, abs=1e-3)
    assert frontier_area(p, q) == pytest.approx(frontier_area(q, p), abs=1e-9)


def test_score_is_high_for_samples_of_one_distribution_and_low_for_another():
    generator = np.random.default_rng(0)
    centres = 5 * generator.normal(size=(6, 8))

    def sample(weights):
        return centres[generator.choice(6, 200, p=weights)] + generator.normal(size=(200, 8))

    even, skewed = np.full(6, 1 / 6), np.array([0.5, 0.5, 0, 0, 0, 0])
    real = sample(even)
    same, other = divergence_score(real, sample(even)), divergence_score(real, sample(skewed))
    assert same > 0.85
    assert other < 0.5
    assert divergence_score(real, real) == pytest.approx(1.0)
