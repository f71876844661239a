"""Online weights: against one token at a time, and the bound of the log loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.memories.base import Origin, Span
from knnlm.mixture.online import (
    OnlineConfig,
    expert_count,
    expert_log_probs,
    expert_weights,
    has_evidence,
    mixed_log_probs,
    posterior,
    span_states,
    update,
)

RATES = (0.0, 0.003, 0.2)


def one_at_a_time(log_probs, begins, config):
    """Return (weights before each token, probability of each token), token by token in plain arithmetic."""
    prior = np.exp(config.log_prior(log_probs.shape[1]))
    weights, mixed, now = [], [], prior
    for row, begin in zip(np.exp(log_probs), begins, strict=True):
        now = prior if begin else now
        weights.append(now)
        mixed.append(now @ row)
        after = now * row / (now @ row)
        now = (1 - config.switch_rate) * after + config.switch_rate * prior
    return np.array(weights), np.array(mixed)


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 90),
    experts=st.integers(2, 5),
    rate=st.sampled_from(RATES),
    prior=st.floats(0.01, 0.99),
)
@settings(max_examples=150, deadline=None)
def test_posterior_equals_one_token_at_a_time(seed, rows, experts, rate, prior):
    random = np.random.default_rng(seed)
    log_probs = np.log(random.uniform(1e-3, 1, (rows, experts)))
    log_probs[:, 1:][random.random((rows, experts - 1)) < 0.05] = -np.inf
    begins = random.random(rows) < 0.1
    begins[0] = True
    config = OnlineConfig(prior, rate)
    log_weights = posterior(log_probs, begins, config)
    weights, mixed = one_at_a_time(log_probs, begins, config)
    np.testing.assert_allclose(np.exp(log_weights), weights, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(mixed_log_probs(log_weights, log_probs), np.log(mixed), rtol=1e-9, atol=1e-12)


@given(seed=st.integers(0, 10_000), rows=st.integers(2, 60), rate=st.sampled_from(RATES))
@settings(max_examples=60, deadline=None)
def test_update_continues_the_posterior(seed, rows, rate):
    random = np.random.default_rng(seed)
    log_probs = np.log(random.uniform(1e-3, 1, (rows, 3)))
    begins = np.zeros(rows, bool)
    begins[0] = True
    config = OnlineConfig(0.2, rate)
    log_weights = posterior(log_probs, begins, config)
    after = update(torch.from_numpy(log_weights), torch.from_numpy(log_probs), config).numpy()
    np.testing.assert_allclose(np.exp(after[:-1]), np.exp(log_weights[1:]), rtol=1e-9, atol=1e-12)


def states_by_hand(log_probs, evidence, first, config):
    """Return the (T, E) weights before each token: only tokens of evidence update them."""
    prior = np.exp(config.log_prior(log_probs.shape[1]))
    weights, now = [], first
    for row, counts in zip(np.exp(log_probs), evidence, strict=True):
        weights.append(now)
        if counts:
            after = now * row / (now @ row)
            now = (1 - config.switch_rate) * after + config.switch_rate * prior
    return np.array(weights)


@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    experts=st.integers(2, 4),
    rate=st.sampled_from(RATES),
    share=st.sampled_from((0.0, 0.3, 0.8, 1.0)),
)
@settings(max_examples=150, deadline=None)
def test_only_given_tokens_update_the_states(seed, lengths, experts, rate, share):
    random = np.random.default_rng(seed)
    config = OnlineConfig(0.2, rate)
    prior = np.exp(config.log_prior(experts))
    log_probs = np.log(random.uniform(1e-3, 1, (sum(lengths), experts)))
    spans, expected, begin, any_evidence = [], [], 0, False
    for length in lengths:
        start = int(random.integers(0, 3))
        origins = np.where(
            random.random(start + length) < share, Origin.GIVEN, random.choice([Origin.GENERATED, Origin.HIDDEN])
        )
        state = random.dirichlet(np.ones(experts)) if random.random() < 0.5 else None
        tokens = torch.zeros(start + length, dtype=torch.long)
        known = None if state is None else torch.from_numpy(np.log(state))
        spans.append(Span(tokens, start, {}, state=known, origins=torch.from_numpy(origins)))
        evidence = np.append(origins[start + 1 :] == Origin.GIVEN, False)  # the token after the last is not known
        any_evidence |= evidence.any()
        first = prior if state is None else state
        expected.append(states_by_hand(log_probs[begin : begin + length], evidence, first, config))
        begin += length
    assert has_evidence(spans) == any_evidence
    states = span_states(spans, torch.from_numpy(log_probs), config, experts, torch.device("cpu"))
    np.testing.assert_allclose(states.exp().numpy(), np.concatenate(expected), rtol=1e-9, atol=1e-12)


def test_component_that_repeats_its_own_output_gains_no_weight():
    """It gives every token of its loop the probability 1; as given text, that would be decisive."""
    log_probs = torch.log(torch.tensor([[0.05, 1.0]], dtype=torch.float64)).expand(41, 2)
    tokens, config = torch.zeros(41, dtype=torch.long), OnlineConfig(0.5, 0.003)
    device = torch.device("cpu")
    origins = torch.full((41,), Origin.GENERATED)
    origins[:2] = Origin.GIVEN
    looping = span_states([Span(tokens, 0, origins=origins)], log_probs, config, 2, device).exp()
    read = span_states([Span(tokens, 0)], log_probs, config, 2, device).exp()
    assert (looping[1:] == looping[1]).all()
    assert read[-1, 1] > 0.99 > looping[-1, 1]


adversarial = st.lists(
    st.tuples(
        st.floats(-40, 0),  # the model's log-probability
        st.one_of(st.floats(-40, 0), st.just(-math.inf), st.floats(-1e-3, 0)),  # the mixture's
    ),
    min_size=1,
    max_size=300,
)


@given(text=adversarial, prior=st.floats(0.001, 0.999), rate=st.sampled_from((0.0, 0.001, 0.1)))
@settings(max_examples=200, deadline=None)
def test_log_loss_of_a_text_is_bounded_whatever_the_store_predicts(text, prior, rate):
    log_probs = np.array(text)
    begins = np.zeros(len(text), bool)
    begins[0] = True
    config = OnlineConfig(prior, rate)
    mixed = mixed_log_probs(posterior(log_probs, begins, config), log_probs)
    excess = log_probs[:, 0].sum() - mixed.sum()
    bound = config.bound - len(text) * math.log1p(-rate)
    assert excess <= bound + 1e-9 * (1 + abs(mixed.sum()))


def test_bound_holds_where_the_store_is_right_for_long_and_then_impossible():
    """Weights in the log domain do not underflow: the model's weight is far below the smallest float64 at the end."""
    rows = 2_000
    log_probs = np.stack([np.full(rows, -5.0), np.full(rows, -0.01)], 1)
    log_probs[-1] = (-5.0, -np.inf)
    begins = np.zeros(rows, bool)
    begins[0] = True
    config = OnlineConfig(0.1, 0.0)
    mixed = mixed_log_probs(posterior(log_probs, begins, config), log_probs)
    assert mixed[-1] < -9_000
    assert np.isfinite(mixed).all()
    assert log_probs[:, 0].sum() - mixed.sum() <= config.bound + 1e-9


@pytest.mark.parametrize("impossible", [1, 5])
def test_bound_holds_where_a_leading_expert_gives_several_tokens_the_probability_zero(impossible):
    rows = 5_000
    log_probs = np.stack([np.full(rows, -5.0), np.full(rows, -1e-3)], 1)
    log_probs[-impossible:, 1] = -np.inf
    config = OnlineConfig(0.5, 0.0)
    log_weights = posterior(log_probs, np.arange(rows) == 0, config)
    mixed = mixed_log_probs(log_weights, log_probs)
    assert log_probs[:, 0].sum() - mixed.sum() == pytest.approx(config.bound, abs=1e-6)
    after = update(torch.from_numpy(log_weights[-1:]), torch.from_numpy(log_probs[-1:]), config)
    assert after[0].tolist() == [0.0, -math.inf]


def test_prior_of_several_stores_leaves_most_to_the_mixture():
    np.testing.assert_allclose(np.exp(OnlineConfig(0.2, 0).log_prior(4)), [0.2, 0.72, 0.04, 0.04])
    np.testing.assert_allclose(np.exp(OnlineConfig(0.2, 0).log_prior(2)), [0.2, 0.8])


def test_right_store_wins_within_a_few_dozen_tokens():
    random = np.random.default_rng(0)
    log_probs = np.log(random.uniform(0.05, 0.15, (60, 4)))
    log_probs[:, 3] += 0.4  # the second store is better by 0.4 nats
    log_weights = posterior(log_probs, np.arange(60) == 0, OnlineConfig(0.1, 0.003))
    assert np.exp(log_weights[40, 3]) > 0.95


def test_experts_are_the_model_the_mixture_and_each_store():
    weights = torch.tensor([[0.4, 0.1, 0.1, 0.3, 0.1]])
    abstains = torch.zeros(1, 5, dtype=torch.bool)
    single = expert_weights(weights, [slice(1, 3)], abstains)
    torch.testing.assert_close(single[0], torch.tensor([[1.0, 0, 0, 0, 0], [0.4, 0.1, 0.1, 0.3, 0.1]]))
    assert expert_count(1) == 2
    several = expert_weights(weights, [slice(1, 3), slice(3, 4)], abstains)
    torch.testing.assert_close(several[0, 2:], torch.tensor([[0.4, 0.5, 0, 0, 0.1], [0.4, 0, 0, 0.5, 0.1]]))
    assert expert_count(2) == several.shape[1] == 4
    abstains[0, 3] = True
    several = expert_weights(weights, [slice(1, 3), slice(3, 4)], abstains)
    torch.testing.assert_close(several[0, 3], torch.tensor([0.9, 0, 0, 0, 0.1]))


def test_expert_log_probs_are_those_of_the_weighted_sum():
    torch.manual_seed(0)
    weights = torch.rand(7, 3, 4).softmax(-1)
    logs = torch.rand(7, 4).log()
    logs[2, 3] = torch.nan
    weights[2, :, 3] = 0
    expected = (weights.double() * logs.double().exp().nan_to_num(nan=0)[:, None]).sum(-1).log()
    torch.testing.assert_close(expert_log_probs(weights, logs), expected)


@pytest.mark.parametrize(("prior", "rate"), [(0, 0.1), (1, 0.1), (0.5, -0.1), (0.5, 1), (math.nan, 0)])
def test_invalid_configuration_is_refused(prior, rate):
    with pytest.raises(ParameterError):
        OnlineConfig(prior, rate)


def test_configuration_is_stored_and_read():
    config = OnlineConfig(0.05, 0.01)
    assert OnlineConfig.from_dict(config.as_dict()) == config
    for wrong in (None, {}, {"prior": 2, "switch_rate": 0}, {"prior": "x", "switch_rate": 0}):
        with pytest.raises(DatastoreCorrupt, match="Tune again"):
            OnlineConfig.from_dict(wrong)
