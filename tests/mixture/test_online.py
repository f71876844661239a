"""Online weights: against one token at a time, and the bound of the log loss."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.online import prior_by_hand
from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.mixture.online import (
    OnlineConfig,
    expert_log_probs,
    expert_weights,
    mixed_log_probs,
    posterior,
    update,
)

RATES = (0.0, 0.003, 0.2)


def one_at_a_time(log_probs, begins, prior, rate, *, starts=None, evident=None):
    """Return (weights before each token, probability of each token), token by token in plain arithmetic."""
    weights, mixed, now = [], [], prior
    for number, (row, begin) in enumerate(zip(np.exp(log_probs), begins, strict=True)):
        if begin:
            now = prior if starts is None else np.exp(starts[number])
        weights.append(now)
        mixed.append(now @ row)
        if evident is None or evident[number]:
            now = (1 - rate) * now * row / (now @ row) + rate * prior
    return np.array(weights), np.array(mixed)


def first_row(rows):
    return np.arange(rows) == 0


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
    chosen = np.array([prior, *[(1 - prior) / (experts - 1)] * (experts - 1)])
    log_weights = posterior(log_probs, begins, np.log(chosen), rate)
    weights, mixed = one_at_a_time(log_probs, begins, chosen, rate)
    np.testing.assert_allclose(np.exp(log_weights), weights, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(mixed_log_probs(log_weights, log_probs), np.log(mixed), rtol=1e-9, atol=1e-12)
    # Texts that began earlier, and tokens that are no evidence.
    starts = np.log(random.dirichlet(np.ones(experts), rows))
    evident = random.random(rows) < 0.7
    log_weights = posterior(log_probs, begins, np.log(chosen), rate, starts=starts, evident=evident)
    weights, _ = one_at_a_time(log_probs, begins, chosen, rate, starts=starts, evident=evident)
    np.testing.assert_allclose(np.exp(log_weights), weights, rtol=1e-9, atol=1e-12)


@given(seed=st.integers(0, 10_000), rows=st.integers(2, 60), rate=st.sampled_from(RATES))
@settings(max_examples=60, deadline=None)
def test_update_continues_the_posterior(seed, rows, rate):
    random = np.random.default_rng(seed)
    log_probs = np.log(random.uniform(1e-3, 1, (rows, 3)))
    log_prior = OnlineConfig(0.2, rate).log_prior(stores=1, caches=1)
    log_probs = np.concatenate([log_probs, log_probs[:, :1]], 1)
    log_weights = posterior(log_probs, first_row(rows), log_prior, rate)
    after = update(*map(torch.from_numpy, (log_weights, log_probs, log_prior)), rate).numpy()
    np.testing.assert_allclose(np.exp(after[:-1]), np.exp(log_weights[1:]), rtol=1e-9, atol=1e-12)


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
    config = OnlineConfig(prior, rate)
    mixed = mixed_log_probs(posterior(log_probs, first_row(len(text)), config.log_prior(), rate), log_probs)
    excess = log_probs[:, 0].sum() - mixed.sum()
    bound = config.bound - len(text) * math.log1p(-rate)
    assert excess <= bound + 1e-9 * (1 + abs(mixed.sum()))


def test_bound_holds_where_the_store_is_right_for_long_and_then_impossible():
    """Weights in the log domain do not underflow: the model's weight is far below the smallest float64 at the end."""
    rows = 2_000
    log_probs = np.stack([np.full(rows, -5.0), np.full(rows, -0.01)], 1)
    log_probs[-1] = (-5.0, -np.inf)
    config = OnlineConfig(0.1, 0.0)
    mixed = mixed_log_probs(posterior(log_probs, first_row(rows), config.log_prior(), 0.0), log_probs)
    assert mixed[-1] < -9_000
    assert np.isfinite(mixed).all()
    assert log_probs[:, 0].sum() - mixed.sum() <= config.bound + 1e-9


@pytest.mark.parametrize("impossible", [1, 5])
def test_bound_holds_where_a_leading_expert_gives_several_tokens_the_probability_zero(impossible):
    rows = 5_000
    log_probs = np.stack([np.full(rows, -5.0), np.full(rows, -1e-3)], 1)
    log_probs[-impossible:, 1] = -np.inf
    config = OnlineConfig(0.5, 0.0)
    log_weights = posterior(log_probs, first_row(rows), config.log_prior(), 0.0)
    mixed = mixed_log_probs(log_weights, log_probs)
    assert log_probs[:, 0].sum() - mixed.sum() == pytest.approx(config.bound, abs=1e-6)
    after = update(*map(torch.from_numpy, (log_weights[-1:], log_probs[-1:], config.log_prior())), 0.0)
    assert after[0].tolist() == [0.0, -math.inf]


@pytest.mark.parametrize("rate", RATES)
def test_token_that_every_expert_gives_the_probability_zero_changes_nothing(rate):
    log_probs = np.log([[0.5, 0.1], [0.2, 0.3], [0.4, 0.6]])
    log_prior = OnlineConfig(0.2, rate).log_prior()
    expected = posterior(log_probs, first_row(3), log_prior, rate)
    inserted = np.insert(log_probs, 1, -np.inf, 0)
    found = posterior(inserted, first_row(4), log_prior, rate)
    np.testing.assert_allclose(found[[0, 2, 3]], expected, rtol=1e-9)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-9)
    after = update(*map(torch.from_numpy, (found[1:2], inserted[1:2], log_prior)), rate)
    np.testing.assert_allclose(after.numpy(), found[2:3], rtol=1e-9)


@pytest.mark.parametrize("caches", [0, 1, 3])
@pytest.mark.parametrize("stores", [0, 1, 2, 5])
@pytest.mark.parametrize("prior", [0.01, 0.2, 0.5, 0.9])
def test_prior_is_that_of_the_model_and_most_of_the_rest_is_the_mixtures(prior, stores, caches):
    config = OnlineConfig(prior, 0)
    found = np.exp(config.log_prior(stores, caches))
    np.testing.assert_allclose(found, prior_by_hand(config, stores, caches))
    assert found.sum() == pytest.approx(1)
    assert found[0] == pytest.approx(prior)
    assert (found > 0).all()


def test_right_store_wins_within_a_few_dozen_tokens():
    random = np.random.default_rng(0)
    log_probs = np.log(random.uniform(0.05, 0.15, (60, 4)))
    log_probs[:, 3] += 0.4  # the second store is better by 0.4 nats
    log_weights = posterior(log_probs, first_row(60), OnlineConfig(0.1, 0.003).log_prior(stores=2), 0.003)
    assert np.exp(log_weights[40, 3]) > 0.95


def test_experts_are_the_model_the_mixture_and_each_store():
    weights = torch.tensor([[0.4, 0.1, 0.1, 0.3, 0.1]], dtype=torch.float64)
    abstains = torch.zeros(1, 5, dtype=torch.bool)
    single = expert_weights(weights, [slice(1, 3)], [], abstains)
    torch.testing.assert_close(
        single[0], torch.tensor([[1.0, 0, 0, 0, 0], [0.4, 0.1, 0.1, 0.3, 0.1]], dtype=torch.float64)
    )
    several = expert_weights(weights, [slice(1, 3), slice(3, 4)], [], abstains)
    torch.testing.assert_close(
        several[0, 2:], torch.tensor([[0.4, 0.5, 0, 0, 0.1], [0.4, 0, 0, 0.5, 0.1]], dtype=torch.float64)
    )
    assert several.shape[1] == 4
    abstains[0, 3] = True
    several = expert_weights(weights, [slice(1, 3), slice(3, 4)], [], abstains)
    torch.testing.assert_close(several[0, 3], torch.tensor([0.9, 0, 0, 0, 0.1], dtype=torch.float64))


def test_cache_is_an_expert_beside_the_model_alone():
    weights = torch.tensor([[0.4, 0.2, 0.3, 0.1]], dtype=torch.float64).repeat(2, 1)
    abstains = torch.tensor([[False, False, False, False], [False, False, True, False]])
    found = expert_weights(weights, [slice(1, 2)], [slice(2, 4)], abstains)
    torch.testing.assert_close(
        found[0, 2:], torch.tensor([[0.98, 0, 0.01, 0.01], [0.8, 0, 0.1, 0.1]], dtype=torch.float64)
    )
    torch.testing.assert_close(found[1, 2:], torch.tensor([[0.99, 0, 0, 0.01], [0.9, 0, 0, 0.1]], dtype=torch.float64))


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


@given(seed=st.integers(0, 10_000), spread=st.sampled_from((1.0, 100.0, 1e4)))
@settings(max_examples=100, deadline=None)
def test_expert_log_probs_equal_sums_in_the_log_domain(seed, spread):
    random = np.random.default_rng(seed)
    logs = -random.exponential(spread, (6, 4))
    logs[random.random((6, 4)) < 0.2] = -np.inf
    logs[random.random((6, 4)) < 0.1] = np.nan
    weights = random.dirichlet(np.ones(4), (6, 3)) * (random.random((6, 3, 4)) < 0.7)
    with np.errstate(divide="ignore"):
        terms = np.nan_to_num(logs, nan=-np.inf, neginf=-np.inf)[:, None] + np.log(weights)
    expected = np.logaddexp.reduce(terms, -1)
    found = expert_log_probs(torch.from_numpy(weights), torch.from_numpy(logs)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_token_that_is_impossible_for_all_experts_has_no_probability():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = mixed_log_probs(np.log(np.full((2, 3), 1 / 3)), np.array([[-np.inf] * 3, [-1.0, -1.0, -1.0]]))
    assert found[0] == -np.inf
    assert found[1] == pytest.approx(-1.0)
