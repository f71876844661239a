"""Votes and mixtures against NumPy, on whatever hypothesis can think of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers import oracle
from knnlm.errors import ParameterError
from knnlm.memories.base import Logits
from knnlm.memories.voting import Retrieved, check_vote, vote
from knnlm.mixture.weights import check_lambda, mix

VOCABULARY = 11


@st.composite
def cases(draw):
    """Logits, neighbours with ties and gaps, targets."""
    rows, k = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    logits = draw(hnp.arrays(np.float32, (rows, VOCABULARY), elements=st.floats(-80, 80, width=32)))
    distances = draw(hnp.arrays(np.float32, (rows, k), elements=st.sampled_from([0.0, 1.0, 1.5, 7.0, 400.0, 9000.0])))
    distances.sort(1)
    values = draw(hnp.arrays(np.int64, (rows, k), elements=st.integers(0, VOCABULARY - 1)))
    present = draw(hnp.arrays(np.int64, (rows,), elements=st.integers(0, k)))
    ids = np.where(np.arange(k) < present[:, None], 3, -1)
    targets = draw(hnp.arrays(np.int64, (rows,), elements=st.integers(0, VOCABULARY - 1)))
    found = Retrieved(
        torch.from_numpy(ids),
        torch.from_numpy(np.where(ids < 0, np.inf, distances).astype(np.float32)),
        torch.from_numpy(np.where(ids < 0, -1, values)),
    )
    return torch.from_numpy(logits), found, torch.from_numpy(targets)


def expected(logits, found, row, temperature, weight):
    """The mixture of one row by the formulas."""
    p_lm = oracle.softmax(logits[row])
    there = found.ids[row].numpy() >= 0
    if not there.any():
        return p_lm
    weights = oracle.softmax(-found.distances[row].double().numpy()[there] / temperature)
    p_knn = np.zeros(VOCABULARY)
    np.add.at(p_knn, found.values[row].numpy()[there], weights)
    return (1 - weight) * p_lm + weight * p_knn


@settings(max_examples=300, deadline=None)
@given(cases(), st.sampled_from([0.01, 0.5, 1.0, 30.0, 1e6]), st.sampled_from([0.0, 0.1, 0.5, 0.999, 1.0]))
def test_a_mixture_is_the_weighted_sum_dense_and_for_one_target(case, temperature, weight):
    logits, found, targets = case
    votes = vote(found, knn_temperature=temperature, vocab_size=VOCABULARY)
    mixed = mix([Logits(logits), votes], [1 - weight, weight])
    dense, of = mixed.log_probs().exp(), mixed.log_prob(targets)
    for row in range(len(logits)):
        right = expected(logits, found, row, temperature, weight)
        np.testing.assert_allclose(dense[row], right, rtol=1e-4, atol=1e-7)
        # Votes are summed in float32, which ends at 1e-38; what the model says goes far below.
        votes_alone = expected(logits, found, row, temperature, 1.0)
        heard = ~((votes_alone > 0) & (votes_alone < 1e-36))
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(mixed.log_probs()[row][heard], np.log(right[heard]), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(dense[row].sum(), 1, rtol=1e-5)
        # In the log domain nothing underflows, unlike in the oracle, whose float64 ends at e^-745.
        if right[targets[row]] > 0:
            np.testing.assert_allclose(of[row], np.log(right[targets[row]]), rtol=1e-4, atol=1e-4)
        else:
            assert of[row] < -700


@settings(max_examples=100, deadline=None)
@given(cases())
def test_lambda_zero_is_the_model_itself_bit_for_bit(case):
    logits, found, targets = case
    votes = vote(found, knn_temperature=1.0, vocab_size=VOCABULARY)
    mixed = mix([Logits(logits), votes], [1.0, 0.0])
    assert torch.equal(mixed.log_prob(targets), Logits(logits).log_prob(targets))
    assert torch.equal(mixed.log_probs(), Logits(logits).log_probs())


def test_a_row_without_neighbours_leaves_the_word_to_the_model():
    found = Retrieved(torch.tensor([[-1, -1]]), torch.full((1, 2), torch.inf), torch.tensor([[-1, -1]]))
    votes = vote(found, knn_temperature=1.0, vocab_size=VOCABULARY)
    logits = torch.arange(VOCABULARY, dtype=torch.float32)[None]
    mixed = mix([Logits(logits), votes], [0.0, 1.0])
    assert votes.abstains().tolist() == [True]
    torch.testing.assert_close(mixed.log_probs().exp(), logits.softmax(1))
    assert (votes.log_probs() == -torch.inf).all()


def test_many_rows_are_scored_in_pieces_as_if_at_once():
    logits = torch.randn(300, VOCABULARY, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(300) % VOCABULARY
    right = np.log([oracle.softmax(row)[target] for row, target in zip(logits.numpy(), targets, strict=True)])
    np.testing.assert_allclose(Logits(logits).log_prob(targets), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weight", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_lambda_outside_zero_to_one_is_refused(weight):
    with pytest.raises(ParameterError, match="lambda must be from 0 to 1"):
        check_lambda(weight)


@pytest.mark.parametrize(("k", "knn_temperature"), [(0, 1.0), (-3, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))])
def test_a_vote_of_nobody_or_without_temperature_is_refused(k, temperature):
    with pytest.raises(ParameterError, match="must be"):
        check_vote(k, temperature)
