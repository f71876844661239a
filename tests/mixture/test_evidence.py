"""Evidence of the text so far: against one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnlm.mixture.evidence import (
    DECAYS,
    EVIDENCE,
    evidence_before,
    evidence_features,
    gains,
    in_domain,
    mixture_gains,
    sums_before,
    update_evidence,
)


def one_at_a_time(gained, begins, starts, evident):
    states, now = [], None
    for row, begin in enumerate(begins):
        now = starts[row].reshape(-1, 3).copy() if begin else now
        states.append(now.flatten())
        if evident[row]:
            new = gained[row][:, None] * np.array([1 - DECAYS[0], 1 - DECAYS[1], 1.0])
            now = now * np.array([*DECAYS, 1.0]) + new
    return np.array(states)


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 300), memories=st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_states_equal_one_token_at_a_time(seed, rows, memories):
    random = np.random.default_rng(seed)
    gained = random.normal(size=(rows, memories))
    begins = random.random(rows) < 0.05
    begins[0] = True
    starts = random.normal(size=(rows, 3 * memories))
    evident = random.random(rows) < 0.8
    expected = one_at_a_time(gained, begins, starts, evident)
    np.testing.assert_allclose(evidence_before(gained, begins, starts, evident), expected, rtol=1e-9, atol=1e-9)
    every = one_at_a_time(gained, begins, starts, np.ones(rows, bool))
    np.testing.assert_allclose(evidence_before(gained, begins, starts), every, rtol=1e-9, atol=1e-9)
    after = update_evidence(torch.from_numpy(every), torch.from_numpy(gained)).numpy()
    follows = ~begins[1:]
    np.testing.assert_allclose(after[:-1][follows], every[1:][follows], rtol=1e-9, atol=1e-9)


def test_gain_is_that_of_half_the_memory_and_half_the_model():
    probs = torch.tensor([[0.2, 0.1, 0.5], [0.2, 0.0, 0.2], [1e-9, 0.9, 0.3]])
    abstains = torch.tensor([[False, False, False], [False, False, True], [False, False, False]])
    found = gains(probs.log(), abstains, [1, 2])
    expected = [
        [math.log(0.5 + 0.5 * 0.5), math.log(0.5 + 0.5 * 2.5)],
        [math.log(0.5), 0.0],
        [3.0, 3.0],
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_gain_of_a_memory_that_abstains_is_zero_also_where_its_log_probability_is_nan():
    logs = torch.tensor([[-1.0, math.nan]])
    assert gains(logs, torch.tensor([[False, True]]), [1]).tolist() == [[0.0]]


def test_features_are_averages_and_the_logarithm_of_the_sum():
    states = torch.tensor([[0.1, -0.2, -7.0, 0.3, 0.4, 20.0]], dtype=torch.float64)
    expected = [[0.1, -0.2, -math.log(8), 0.3, 0.4, math.log(21)]]
    torch.testing.assert_close(evidence_features(states), torch.tensor(expected))
    assert len(EVIDENCE) == 3


def test_token_that_model_and_memory_give_the_probability_zero_is_no_evidence():
    logs = torch.tensor([[-math.inf, -math.inf, -1.0]])
    assert gains(logs, torch.zeros(1, 3, dtype=torch.bool), [1, 2]).tolist() == [[0.0, 3.0]]


@given(
    seed=st.integers(0, 10_000), lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), width=st.integers(1, 3)
)
@settings(max_examples=100, deadline=None)
def test_sums_before_equal_a_loop(seed, lengths, width):
    random = np.random.default_rng(seed)
    values = random.normal(size=(sum(lengths), width))
    begins = np.concatenate([np.arange(length) == 0 for length in lengths])
    starts = random.normal(size=values.shape)
    expected, total = [], np.zeros(width)
    for row, value in enumerate(values):
        total = starts[row] if begins[row] else total
        expected.append(total)
        total = total + value
    np.testing.assert_allclose(sums_before(values, begins, starts), expected, atol=1e-12)


def test_gain_of_the_mixture_is_limited_and_0_where_both_are_impossible():
    never = -torch.inf
    mixed, lm = torch.tensor([-1.0, -1.0, never, never, -0.5]), torch.tensor([-1.5, -9.0, never, -1.0, never])
    assert mixture_gains(mixed, lm).tolist() == [0.5, 2.0, 0.0, -100.0, 2.0]


@pytest.mark.parametrize(
    ("gain", "tokens", "expected"),
    [
        (0, 0, True),
        (-0.1, 0, False),
        (0.2, 1, False),
        (0.25, 1, True),
        (1.9, 8, False),
        (2.0, 8, True),
        (2.0, 900, True),
    ],
)
def test_short_texts_need_less_gain(gain, tokens, expected):
    assert in_domain(torch.tensor([gain]), torch.tensor([tokens])).item() is expected
