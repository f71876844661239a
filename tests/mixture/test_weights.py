"""Weights of a mixture: fitted, by distance and gated, against NumPy and against what was planted in the data."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.mixture.em import fit, fit_folds, folds_of, log_mixed, renormalise
from knnlm.mixture.gate import Gate, NetworkConfig, SearchSkipper, train_gate, train_skip
from knnlm.mixture.weights import Buckets, multiply_end_odds

QUICK = NetworkConfig(hidden=32, batch=512)


def columns(seed, rows, parts, *, silent=0.2, abstaining=0.1):
    """Log-probabilities of some parts, some -inf and some NaN, with a finite first column."""
    random = np.random.default_rng(seed)
    logs = random.normal(-3, 2, (rows, 1)) + random.normal(-1, random.uniform(0.1, 3, parts), (rows, parts))
    logs[:, 1:][random.random((rows, parts - 1)) < silent] = -np.inf
    logs[:, 1:][random.random((rows, parts - 1)) < abstaining] = np.nan
    return torch.tensor(logs)


def probabilities(logs):
    """Return probabilities, with that of the first component where another abstains."""
    logs = np.asarray(logs, dtype=np.float64)
    return np.exp(np.where(np.isnan(logs), logs[:, :1], logs))


def loss_of(logs, weights):
    """Mean of -log Σ w p, plainly."""
    return -np.mean(np.log(probabilities(logs) @ np.asarray(weights, dtype=np.float64)))


def onto_simplex(point):
    """The nearest weights of sum 1, by the sorting method."""
    falling = np.sort(point)[::-1]
    shift = (np.cumsum(falling) - 1) / np.arange(1, len(point) + 1)
    return np.maximum(point - shift[np.nonzero(falling > shift)[0][-1]], 0)


def descend(logs, steps=4000):
    """The least loss by projected gradient descent with backtracking."""
    probs = probabilities(logs)
    weights, size = np.full(probs.shape[1], 1 / probs.shape[1]), 1.0
    now = -np.mean(np.log(probs @ weights))
    for _ in range(steps):
        slope = -np.mean(probs / (probs @ weights)[:, None], 0)
        tried = onto_simplex(weights - size * slope)
        with np.errstate(divide="ignore"):
            after = -np.mean(np.log(probs @ tried))
        if after < now:
            weights, now, size = tried, after, size * 1.5
        else:
            size /= 2
        if size < 1e-14:
            break
    return now


# Fitted weights


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 60), parts=st.integers(1, 6), data=st.data())
def test_fitted_weights_are_as_good_from_any_start(seed, rows, parts, data):
    logs = columns(seed, rows, parts)
    start = torch.tensor(data.draw(st.lists(st.floats(1e-6, 1), min_size=parts, max_size=parts)))
    plain, moved = fit(logs), fit(logs, start=start)
    for found in (plain, moved):
        assert found.gap <= 1e-7
        assert float(found.weights.sum()) == pytest.approx(1, abs=1e-12)
        assert float(found.weights.min()) >= 0
        assert found.loss == pytest.approx(loss_of(logs, found.weights), abs=1e-9)
    assert moved.loss == pytest.approx(plain.loss, abs=2.1e-7)


def test_fitted_weights_are_one_point_where_the_likelihood_is_strictly_concave():
    logs = columns(3, 2000, 5, silent=0, abstaining=0)
    starts = torch.eye(5, dtype=torch.float64) + 1e-6
    found = [fit(logs, start=start, tolerance=1e-11).weights for start in starts]
    for weights in found[1:]:
        torch.testing.assert_close(weights, found[0], atol=1e-5, rtol=0)


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 80))
def test_two_fitted_weights_are_the_best_of_a_fine_grid(seed, rows):
    logs = columns(seed, rows, 2)
    probs = probabilities(logs)
    grid = np.linspace(0, 1, 20_001)
    with np.errstate(divide="ignore"):
        losses = -np.mean(np.log(probs[:, :1] * (1 - grid) + probs[:, 1:] * grid), 0)
    found = fit(logs)
    assert found.loss <= losses.min() + 1e-7
    assert found.loss >= losses.min() - 1e-4 * (1 + abs(losses.min()))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("parts", [3, 6])
def test_fitted_weights_are_what_projected_gradient_descent_finds(seed, parts):
    logs = columns(seed, 300, parts)
    assert fit(logs).loss == pytest.approx(descend(logs), abs=1e-6)


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 60), parts=st.integers(2, 6))
def test_fitted_weights_meet_the_conditions_of_an_optimum(seed, rows, parts):
    logs = columns(seed, rows, parts, abstaining=0)
    weights = fit(logs, tolerance=1e-10).weights.numpy()
    probs = probabilities(logs)
    ratio = np.mean(probs / (probs @ weights)[:, None], 0)
    assert ratio.max() <= 1 + 1e-9
    assert np.all((ratio > 1 - 1e-4) | (weights < 1e-4))


@given(seed=st.integers(0, 10_000), limit=st.integers(1, 4))
def test_gap_bounds_what_is_left_to_gain(seed, limit):
    logs = columns(seed, 50, 4)
    early, best = fit(logs, limit=limit, tolerance=1e-12), fit(logs, tolerance=1e-10)
    assert early.iterations <= limit
    assert early.loss - best.loss <= early.gap + 1e-9


def test_fitting_needs_few_steps_where_em_needs_many():
    """Parts that are all but alike, and useless ones: EM needs thousands of steps to be as sure."""
    logs = columns(1, 20_000, 15)
    logs[:, 7] = logs[:, 6]
    logs[:, 9] = logs[:, 8] + 1e-3 * torch.randn(len(logs), generator=torch.Generator().manual_seed(0))
    found = fit(logs)
    assert found.gap <= 1e-7
    assert found.iterations <= 40


def test_weight_of_an_abstaining_component_goes_to_the_first():
    logs = columns(5, 400, 3)
    copied = logs.where(~logs.isnan(), logs[:, :1])
    assert logs.isnan().any()
    assert fit(logs).loss == pytest.approx(fit(copied).loss, abs=1e-9)
    always = torch.cat([logs, torch.full((400, 1), torch.nan)], 1)
    assert fit(always).weights[3] == 0
    assert fit(always).loss == pytest.approx(fit(logs).loss, abs=2e-7)


def test_prior_counts_as_that_many_tokens():
    """Where each token was surely one part's, the weights are shares of counts."""
    owner = torch.tensor([0] * 5 + [1] * 2 + [2] * 1)
    logs = torch.full((8, 3), -torch.inf).scatter_(1, owner[:, None], -2.0)
    logs[:, 0] = logs[:, 0].clamp(min=-700)  # the first part is finite, if hardly
    found = fit(logs, prior=torch.tensor([1.0, 0.0, 3.0]), tolerance=1e-12)
    torch.testing.assert_close(found.weights, torch.tensor([6, 2, 4], dtype=torch.float64) / 12, atol=1e-9, rtol=0)
    same = fit(torch.full((10, 3), -1.0), prior=torch.tensor([2.0, 3.0, 5.0]), tolerance=1e-12)
    torch.testing.assert_close(same.weights, torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), atol=1e-6, rtol=0)


def test_tiny_probabilities_do_not_underflow():
    logs = columns(9, 200, 3) - 5000
    assert math.isfinite(fit(logs).loss)
    assert fit(logs).loss == pytest.approx(fit(logs + 5000).loss + 5000, abs=1e-6)


def test_renormalised_weights_and_mixture_match_numpy():
    logs = columns(4, 50, 4)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    given_out = renormalise(weights, logs.isnan())
    for row, abstains, found in zip(logs.tolist(), logs.isnan().tolist(), given_out.tolist(), strict=True):
        lost = sum(weight for weight, gone in zip(weights.tolist(), abstains, strict=True) if gone)
        expected = [0.0 if gone else weight for weight, gone in zip(weights.tolist(), abstains, strict=True)]
        expected[0] += lost
        assert found == pytest.approx(expected)
        assert not any(math.isnan(value) for value in row[:1])
    mixed = np.sum(given_out.numpy() * np.exp(np.nan_to_num(logs.numpy(), nan=-np.inf)), 1)
    np.testing.assert_allclose(log_mixed(logs, given_out).numpy(), np.log(mixed), rtol=1e-12)


@pytest.mark.parametrize(
    ("logs", "options", "message"),
    [
        (torch.zeros(0, 2), {}, "log-probabilities"),
        (torch.zeros(3), {}, "log-probabilities"),
        (torch.zeros(3, 2, dtype=torch.int64), {}, "log-probabilities"),
        (torch.tensor([[0.0, 0.0], [-torch.inf, 0.0]]), {}, "row 1"),
        (torch.tensor([[0.0, torch.inf]]), {}, "at most 0"),
        (torch.zeros(3, 2), {"start": torch.tensor([1.0])}, "start"),
        (torch.zeros(3, 2), {"start": torch.tensor([-1.0, 2.0])}, "start"),
        (torch.zeros(3, 2), {"prior": torch.tensor([-1.0, 2.0])}, "prior"),
        (torch.zeros(3, 2), {"tolerance": 0.0}, "tolerance"),
        (torch.zeros(3, 2), {"limit": 0}, "limit"),
    ],
)
def test_invalid_log_probabilities_are_refused(logs, options, message):
    with pytest.raises(ParameterError, match=message):
        fit(logs, **options)


# Folds


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=40), seed=st.integers(0, 5))
def test_folds_keep_documents_whole_and_have_similar_sizes(sizes, seed):
    groups = torch.repeat_interleave(torch.arange(len(sizes)) * 7, torch.tensor(sizes))
    fold = folds_of(groups, 5, seed=seed)
    rows = len(groups)
    if rows < 10:
        assert (fold == -1).all()
        return
    counts = torch.bincount(fold, minlength=5)
    assert counts.sum() == rows
    if len(sizes) >= 2 and max(sizes) <= 0.9 * rows:
        for group in groups.unique():
            assert len(fold[groups == group].unique()) == 1
        assert counts.max() - counts.min() <= max(sizes)
    else:
        assert (fold.diff() >= 0).all()
        assert counts.max() - counts.min() <= 1


def test_gate_trained_on_few_documents_is_not_worse_on_others():
    """Documents with different features and different best weights: what is learned from one is wrong for another."""

    def text(documents, seed):
        generator = torch.Generator().manual_seed(seed)
        groups = torch.arange(documents).repeat_interleave(120)
        style = torch.randn(documents, 6, generator=generator)[groups]
        features = style + 0.3 * torch.randn(len(groups), 6, generator=generator)
        better = torch.rand(documents, generator=generator)[groups] < 0.5
        gain = torch.where(better, 1.5, -1.5) + torch.randn(len(groups), generator=generator)
        base = -2 + 0.3 * torch.randn(len(groups), generator=generator)
        return features, torch.stack([base, base + gain], 1).clamp(max=-0.01), groups

    for documents in (2, 3, 4):
        ratios = []
        for seed in range(4):
            features, logs, groups = text(documents, seed)
            gate = train_gate(features, logs, groups, config=QUICK)
            new, wanted, _ = text(60, 100 + seed)
            none = torch.zeros(wanted.shape, dtype=torch.bool)
            mixed = log_mixed(wanted, gate.weights(new, none)).mean()
            plain = log_mixed(wanted, gate.fitted.expand(wanted.shape)).mean()
            ratios.append(float((plain - mixed).exp()))
        assert max(ratios) < 1.02, (documents, ratios)


def test_weights_of_a_fold_are_fitted_to_the_other_folds():
    logs, groups = columns(2, 500, 3), torch.arange(500) // 10
    fold, whole, others = fit_folds(logs, groups, folds=4)
    one = torch.ones(3)
    torch.testing.assert_close(whole, fit(logs, prior=one).weights)
    for number in range(4):
        alone = fit(logs[fold != number], prior=one, tolerance=1e-10).weights
        torch.testing.assert_close(others[number], alone, atol=1e-3, rtol=0)


def test_weights_of_marked_rows_are_fitted_to_these_alone():
    logs, groups = columns(2, 500, 3), torch.arange(500) // 10
    marked = torch.arange(500) < 300
    fold, whole, others = fit_folds(logs, groups, folds=4, fitted=marked)
    one = torch.ones(3)
    torch.testing.assert_close(whole, fit(logs[marked], prior=one).weights)
    for number in range(4):
        alone = fit(logs[(fold != number) & marked], prior=one, tolerance=1e-10).weights
        torch.testing.assert_close(others[number], alone, atol=1e-3, rtol=0)
    gate = train_gate(torch.zeros(500, 1), logs, groups, fitted=marked, config=QUICK)
    torch.testing.assert_close(gate.fitted.double(), whole, atol=1e-6, rtol=0)
    # Where one fold has all of the marked rows, their weights are used there too.
    _, whole, others = fit_folds(
        logs, torch.cat([torch.zeros(250), torch.arange(250) + 1]), folds=2, fitted=torch.arange(500) < 250
    )
    torch.testing.assert_close(others, whole.expand(2, -1), atol=1e-3, rtol=0)


# Buckets


def by_distance(seed, rows=6000):
    """A second part that is the better the nearer its neighbour; some rows have none."""
    random = np.random.default_rng(seed)
    nearest = random.uniform(0, 10, rows)
    right = random.random(rows) < np.exp(-nearest / 3)
    logs = np.stack([np.full(rows, np.log(0.1)), np.where(right, np.log(0.9), np.log(1e-3))], 1)
    none = random.random(rows) < 0.05
    nearest[none] = np.where(random.random(none.sum()) < 0.5, np.inf, np.nan)
    logs[none, 1] = np.nan
    return torch.tensor(logs), torch.tensor(nearest)


def test_without_a_prior_each_bucket_has_its_own_fitted_weights():
    logs, nearest = by_distance(0)
    buckets = Buckets.fit(logs, nearest, count=8, prior=0)
    there = np.sort(nearest.numpy()[np.isfinite(nearest.numpy())])
    bounds = [-np.inf, *[there[len(there) * cut // 8] for cut in range(1, 8)], np.inf]
    weights = buckets.weights(nearest, logs.isnan()).double()
    for low, high in pairwise(bounds):
        rows = (nearest >= low) & (nearest < high)
        assert rows.sum() == pytest.approx(len(there) / 8, abs=1)
        assert loss_of(logs[rows], weights[rows][0]) == pytest.approx(fit(logs[rows]).loss, abs=1e-5)
    none = ~nearest.isfinite()
    torch.testing.assert_close(
        weights[none], torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(int(none.sum()), 2)
    )


def test_buckets_beat_weights_that_are_the_same_everywhere_on_new_text():
    (logs, nearest), (new, far) = by_distance(0), by_distance(1)
    same = fit(logs).weights
    buckets = Buckets.fit(logs, nearest)
    gain = log_mixed(new, buckets.weights(far, new.isnan()).double()) - log_mixed(new, renormalise(same, new.isnan()))
    # The least that can be lost at each distance is known: λ(d) by the rate at which the second part is right.
    rate = np.exp(-far.nan_to_num(posinf=0).numpy() / 3)
    grid = np.linspace(0, 1, 501)[:, None]
    expected = rate * np.log(0.1 * (1 - grid) + 0.9 * grid) + (1 - rate) * np.log(0.1 * (1 - grid) + 1e-3 * grid)
    best = torch.tensor(np.linspace(0, 1, 501)[expected.argmax(0)])
    ideal = log_mixed(new, renormalise(torch.stack([1 - best, best], 1), new.isnan())) - log_mixed(
        new, renormalise(same, new.isnan())
    )
    assert float(gain.mean()) > 0.9 * float(ideal.mean()) > 0.05


def test_prior_moves_bucket_weights_towards_those_of_the_whole_text():
    logs, nearest = by_distance(0, rows=400)
    whole = fit(logs).weights
    fitted = [Buckets.fit(logs, nearest, prior=prior).table[:-1] for prior in (0, 20, 200, 2000, 1e9)]
    away = [float((table - whole).abs().sum()) for table in fitted]
    assert away == sorted(away, reverse=True)
    assert away[-1] < 1e-3


def test_distance_that_is_an_edge_belongs_to_the_farther_bucket():
    nearest = torch.tensor([1.0, 2.0, 3.0]).repeat(100)
    logs, _ = by_distance(0, rows=300)
    logs = logs.nan_to_num(nan=-1.0)
    buckets = Buckets.fit(logs, nearest, count=3, prior=0)
    weights = buckets.weights(nearest, logs.isnan())
    for value in (1.0, 2.0, 3.0):
        alone = fit(logs[nearest == value]).weights.float()
        torch.testing.assert_close(weights[nearest == value], alone.expand(100, 2), atol=1e-3, rtol=0)


def test_equal_distances_share_a_bucket_and_empty_buckets_have_global_weights():
    logs, _ = by_distance(0, rows=300)
    logs = logs.nan_to_num(nan=-1.0)
    same = Buckets.fit(logs, torch.full((300,), 2.0))
    assert len(same.edges) == 0
    whole = fit(logs).weights.float()
    asked = same.weights(torch.tensor([-1e30, 2.0, torch.inf, torch.nan]), torch.zeros(4, 2, dtype=torch.bool))
    torch.testing.assert_close(asked, whole.expand(4, 2), atol=1e-3, rtol=0)
    empty = Buckets.fit(logs, torch.full((300,), torch.nan))
    torch.testing.assert_close(empty.weights(torch.tensor([3.0]), torch.zeros(1, 2, dtype=torch.bool))[0], whole)


def test_buckets_are_unchanged_after_a_json_round_trip():
    logs, nearest = by_distance(0)
    buckets = Buckets.fit(logs, nearest)
    again = Buckets.from_dict(json.loads(json.dumps(buckets.as_dict())))
    torch.testing.assert_close(again.weights(nearest, logs.isnan()), buckets.weights(nearest, logs.isnan()))


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [],
        {},
        {"edges": [1.0]},
        {"edges": [1.0], "weights": [[1.0]]},
        {"edges": [1.0], "weights": [[1.0], [1.0, 0.0], [1.0]]},
        {"edges": [2.0, 1.0], "weights": [[1.0]] * 4},
        {"edges": [math.nan], "weights": [[1.0]] * 3},
        {"edges": ["a"], "weights": [[1.0]] * 3},
        {"edges": [1.0], "weights": [[0.5, 0.4], [0.5, 0.5], [0.5, 0.5]]},
        {"edges": [1.0], "weights": [[1.5, -0.5], [0.5, 0.5], [0.5, 0.5]]},
        {"edges": [], "weights": [[], []]},
        {"edges": [], "weights": 3},
        {"edges": [10**400], "weights": [[1.0]] * 3},
    ],
)
def test_invalid_stored_buckets_are_refused(stored):
    with pytest.raises(DatastoreCorrupt, match="Tune again"):
        Buckets.from_dict(stored)


def test_buckets_refuse_inputs_of_the_wrong_shape():
    logs, nearest = by_distance(0, rows=50)
    with pytest.raises(ParameterError, match="one distance"):
        Buckets.fit(logs, nearest[:10])
    with pytest.raises(ParameterError, match="at least 1 bucket"):
        Buckets.fit(logs, nearest, count=0)
    with pytest.raises(ParameterError, match="2 components"):
        Buckets.fit(logs, nearest).weights(nearest, torch.zeros(50, 3, dtype=torch.bool))


# The gate


def planted(seed, rows=6000, *, noise=False):
    """Three parts of which one is right by a known rule of two features; documents of 30 rows.

    Gives features, logs, groups, and the (N,) log-probabilities that the best possible gate gives.
    """
    random = np.random.default_rng(seed)
    features = random.normal(size=(rows, 6)) * [1, 10, 0.1, 1, 1, 100] + [0, 5, 0, 0, 0, -30]
    scores = np.stack([np.zeros(rows), 2 * features[:, 0], (features[:, 1] - 5) / 5 - 1], 1)
    share_of = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    chosen = (random.random((rows, 1)) > share_of.cumsum(1)).sum(1)
    # The token is surely of one part, which gives it 0.5; the others give it next to nothing. Then the weights that
    # gain most are the chances themselves.
    logs = np.where(np.arange(3) == chosen[:, None], np.log(0.5), np.log(1e-4))
    ideal = np.log((share_of * np.exp(logs)).sum(1))
    if noise:
        features = random.normal(size=features.shape)
    groups = np.arange(rows) // 30
    return tuple(torch.tensor(part) for part in (features.astype(np.float32), logs.astype(np.float32), groups, ideal))


def numpy_weights(gate, features, abstains):
    """The formula of the module, in float64, net by net."""
    tensors, metadata = gate.state()
    tensors = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    abstains = abstains.numpy().copy()
    abstains[:, 0] = False

    def handed(weights):
        kept = np.where(abstains, 0, weights)
        kept[:, 0] += np.where(abstains, weights, 0).sum(1)
        return kept

    seen = np.concatenate([features.double().numpy(), abstains], 1)
    seen = np.clip(np.nan_to_num((seen - tensors["mean"]) * tensors["scale"], posinf=5, neginf=-5), -5, 5)
    each = []
    for net in range(len(tensors["starts"])):
        hidden = np.maximum(seen @ tensors["weight.0"][net] + tensors["bias.0"][net], 0)
        out = np.exp(hidden @ tensors["weight.1"][net] + tensors["bias.1"][net]) * handed(tensors["starts"][net])
        each.append(out / out.sum(1, keepdims=True))
    return (1 - metadata["trust"]) * handed(tensors["fitted"]) + metadata["trust"] * np.array(each), np.array(each)


@pytest.fixture(scope="module")
def gate():
    """A gate trained where some parts abstain at times."""
    features, logs, groups, _ = planted(0)
    logs[:, 2][torch.rand(len(logs), generator=torch.Generator().manual_seed(1)) < 0.2] = torch.nan
    names = [f"f{number}" for number in range(6)]
    return train_gate(features, logs, groups, config=QUICK, feature_names=names, component_names=["lm", "a", "b"])


def test_gate_gains_nearly_as_much_as_the_best_gate():
    features, logs, groups, _ = planted(0)
    new, said, _, ideal = planted(1)
    gate = train_gate(features, logs, groups, config=QUICK)
    plain = log_mixed(said, renormalise(fit(logs).weights.float(), said.isnan())).mean()
    gained = log_mixed(said, gate.weights(new, said.isnan())).mean() - plain
    assert float(gained) >= 0.9 * float(ideal.mean() - plain) > 0.1
    # Its own figure agrees with that of new text.
    told = gate.metadata["perplexity"], gate.metadata["fitted_perplexity"]
    assert math.log(told[0]) == pytest.approx(-float(log_mixed(said, gate.weights(new, said.isnan())).mean()), abs=0.03)
    assert math.log(told[1]) == pytest.approx(-float(plain), abs=0.03)


@pytest.mark.parametrize("seed", range(3))
def test_gate_on_noise_is_not_worse_than_fitted_weights(seed):
    features, logs, groups, _ = planted(seed, noise=True)
    new, said, _, _ = planted(seed + 10, noise=True)
    gate = train_gate(features, logs, groups, config=QUICK)
    plain = log_mixed(said, renormalise(fit(logs).weights.float(), said.isnan())).double().mean()
    gated = log_mixed(said, gate.weights(new, said.isnan())).double().mean()
    assert math.exp(float(plain - gated)) <= 1.002


def test_gate_weights_match_numpy(gate):
    features, _, _, _ = planted(2, rows=200)
    abstains = torch.rand(200, 3, generator=torch.Generator().manual_seed(0)) < 0.4
    features[0], features[1], features[2, 0] = torch.nan, torch.inf, -torch.inf
    expected, _ = numpy_weights(gate, features, abstains)
    found = gate.weights(features, abstains)
    np.testing.assert_allclose(found.numpy(), expected.mean(0), atol=2e-6)
    np.testing.assert_allclose(found.sum(1).numpy(), 1, atol=1e-6)
    assert (found[:, 1:][abstains[:, 1:]] == 0).all()
    assert (found[:, 0] > 0).all()
    assert gate.weights(features[:0], abstains[:0]).shape == (0, 3)
    assert 0 < gate.trust <= 1
    # One row at a time is the same as all at once.
    alone = torch.cat([gate.weights(features[row : row + 1], abstains[row : row + 1]) for row in range(20)])
    torch.testing.assert_close(alone, found[:20], atol=1e-6, rtol=0)


def test_out_of_fold_log_probabilities_use_networks_of_other_folds(gate):
    features, logs, groups, _ = planted(0)
    logs[:, 2][torch.rand(len(logs), generator=torch.Generator().manual_seed(1)) < 0.2] = torch.nan
    fold, _, others = fit_folds(logs, groups, folds=5, seed=0)
    _, each = numpy_weights(gate, features, logs.isnan())
    probs = np.exp(np.nan_to_num(logs.double().numpy(), nan=-np.inf))
    by_net = (each[fold.numpy(), np.arange(len(logs))] * probs).sum(1)
    plain = (renormalise(others[fold], logs.isnan()).numpy() * probs).sum(1)
    expected = np.log((1 - gate.trust) * plain + gate.trust * by_net)
    np.testing.assert_allclose(gate.out_of_fold.numpy(), expected, atol=1e-4)
    assert gate.metadata["perplexity"] == pytest.approx(math.exp(-expected.mean()), rel=1e-4)
    # The trust is the likeliest, with twenty tokens more that are surely the fitted weights'.
    grid = np.linspace(0, 0.9999, 10_000)[:, None]
    likelihood = np.log(plain + grid * (by_net - plain)).sum(1) + 20 * np.log1p(-grid[:, 0])
    assert gate.trust == pytest.approx(grid[likelihood.argmax(), 0], abs=2e-3)


def test_networks_that_overfit_are_evaluated_on_held_out_rows():
    """So many features that a net can tell every row: it must not claim to foretell noise."""
    random = torch.Generator().manual_seed(0)
    features = torch.randn(400, 80, generator=random)
    _, logs, groups, _ = planted(0, rows=400, noise=True)
    gate = train_gate(features, logs, groups, config=NetworkConfig(epochs=40, patience=40))
    assert gate.metadata["perplexity"] >= 0.98 * gate.metadata["fitted_perplexity"]
    new, said = torch.randn(4000, 80, generator=random), planted(1, rows=4000)[1]
    plain = log_mixed(said, renormalise(gate.fitted, said.isnan())).mean()
    gated = log_mixed(said, gate.weights(new, said.isnan())).mean()
    assert math.exp(float(plain - gated)) <= 1.002


def test_training_is_deterministic_and_keeps_the_global_seed():
    features, logs, groups, _ = planted(0, rows=1500)
    before = torch.random.get_rng_state()
    config = NetworkConfig(hidden=16, epochs=3, batch=256, dropout=0.2)
    first, second = (train_gate(features, logs, groups, config=config) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, tensor in first.state()[0].items():
        assert torch.equal(tensor, second.state()[0][name]), name
    other = train_gate(features, logs, groups, config=NetworkConfig(hidden=16, epochs=3, batch=256, seed=1))
    assert not torch.equal(other.nets.layers[0][0], first.nets.layers[0][0])


@pytest.mark.parametrize("rows", [1, 2, 9, 63])
def test_gate_trained_on_few_rows_equals_fitted_weights(rows):
    features, logs, groups, _ = planted(0, rows=rows)
    gate = train_gate(features, logs, groups, config=QUICK)
    expected = fit(logs, prior=torch.ones(3)).weights.float()
    found = gate.weights(features, logs.isnan())
    torch.testing.assert_close(found, expected.expand(rows, 3), atol=1e-4, rtol=0)
    assert gate.out_of_fold.shape == (rows,)


def test_gate_of_some_hundred_rows_or_one_document_is_not_worse():
    new, said, _, _ = planted(10)
    for rows, one in ((100, False), (300, False), (300, True), (3000, True)):
        features, logs, groups, _ = planted(0, rows=rows)
        gate = train_gate(features, logs, groups * 0 if one else groups, config=QUICK)
        plain = log_mixed(said, renormalise(gate.fitted, said.isnan())).mean()
        gated = log_mixed(said, gate.weights(new, said.isnan())).mean()
        assert math.exp(float(plain - gated)) <= 1.002, rows


def test_component_that_always_abstains_and_constant_feature_have_no_effect():
    features, logs, groups, _ = planted(0, rows=1500)
    logs[:, 1] = torch.nan
    features[:, 3] = 7.0
    gate = train_gate(features, logs, groups, config=QUICK)
    assert gate.fitted[1] < 1e-6
    changed = features.clone()
    changed[:, 3] = 1e9
    torch.testing.assert_close(gate.weights(changed, logs.isnan()), gate.weights(features, logs.isnan()))


def stored(gate_or_skip):
    """What was written, read again."""
    tensors, metadata = gate_or_skip.state()
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return load_tensors(save_tensors(contiguous)), json.loads(json.dumps(metadata))


def test_gate_is_unchanged_after_a_round_trip(gate):
    features, logs, _, _ = planted(2, rows=100)
    again = Gate.load(*stored(gate))
    assert torch.equal(again.weights(features, logs.isnan()), gate.weights(features, logs.isnan()))
    assert again.feature_names == gate.feature_names == ("f0", "f1", "f2", "f3", "f4", "f5")
    assert again.component_names == gate.component_names == ("lm", "a", "b")
    assert again.metadata == json.loads(json.dumps(gate.metadata))


@pytest.mark.parametrize(
    "harm",
    [
        {"weight.1": None},
        {"mean": None},
        {"weight.0": None},
        {"weight.0": torch.ones(3)},
        {"bias.0": torch.full((5, 1, 32), math.nan)},
        {"scale": torch.ones(2)},
        {"fitted": torch.tensor([1, 0, 0])},
        {"fitted": torch.tensor([1.0, 1.0, 0.0])},
        {"starts": torch.zeros(5, 3)},
        {"trust": None},
        {"trust": 2},
        {"trust": math.nan},
        {"trust": "1"},
        {"components": ["lm"]},
        {"components": []},
        {"features": "abc"},
        {"features": [1, 2, 3, 4, 5, 6]},
    ],
    ids=str,
)
def test_invalid_stored_gate_is_refused(gate, harm):
    tensors, metadata = stored(gate)
    for name, value in harm.items():
        where = tensors if name in tensors else metadata
        where.pop(name)
        if value is not None:
            where[name] = value
    with pytest.raises(DatastoreCorrupt, match="Tune again"):
        Gate.load(tensors, metadata)


def test_gate_refuses_invalid_training_data_and_features(gate):
    features, logs, groups, _ = planted(0, rows=100)
    with pytest.raises(ParameterError, match="as many rows"):
        train_gate(features[:50], logs, groups)
    with pytest.raises(ParameterError, match="document"):
        train_gate(features, logs, groups[:50])
    with pytest.raises(ParameterError, match="names"):
        train_gate(features, logs, groups, feature_names=["one"])
    with pytest.raises(ParameterError, match="names"):
        train_gate(features, logs, groups, component_names=["one"])
    features[7, 2] = torch.nan
    with pytest.raises(ParameterError, match="'2' is nan in row 7"):
        train_gate(features, logs, groups)
    with pytest.raises(ParameterError, match="folds at least 2"):
        NetworkConfig(folds=1)
    with pytest.raises(ParameterError, match="6 features and 3 components"):
        gate.weights(features[:, :2], logs.isnan())
    with pytest.raises(ParameterError, match="6 features and 3 components"):
        gate.weights(features, logs.isnan()[:, :2])


# Skipping searches


def gains(seed, rows=8000):
    """Nats that a search gains: by a rule of two features, and far more by chance."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(rows, 5))
    mean = 0.5 * np.log1p(np.exp(2 * features[:, 0])) * (features[:, 1] > -1)
    gain = mean + random.standard_t(3, size=rows) * 0.7
    return torch.tensor(features.astype(np.float32)), torch.tensor(gain), torch.arange(rows) // 40, torch.tensor(mean)


@pytest.fixture(scope="module")
def skip():
    """Trained on one text."""
    features, gain, groups, _ = gains(0)
    return train_skip(features, gain, groups, config=QUICK)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
def test_fraction_skipped_holds_on_new_text(skip, fraction):
    features, _, _, _ = gains(1, rows=20_000)
    skipped = 1 - float(skip.search_mask(features, fraction).double().mean())
    assert skipped == pytest.approx(fraction, abs=0.03 if 0 < fraction < 1 else 0)


def test_skipping_searches_with_little_gain_costs_little(skip):
    features, _, _, mean = gains(1)
    asked = skip.search_mask(features, 0.5)
    skipped = int((~asked).sum())
    lost, at_random = float((mean * ~asked).sum()), float(mean.mean()) * skipped
    least = float(mean.sort().values[:skipped].sum())  # the loss if the rule were known
    assert least <= lost < 0.3 * at_random


def test_predicted_gain_is_near_the_expected_one(skip):
    features, _, _, mean = gains(1)
    predicted = skip.gain(features).double()
    assert float((predicted - mean).square().mean()) < 0.25 * float((mean - mean.mean()).square().mean())


def test_skipped_fraction_holds_for_constant_predictions():
    features, gain, groups, _ = gains(0, rows=2000)
    same = train_skip(torch.zeros_like(features), gain, groups, config=QUICK)
    few = train_skip(features[:20], gain[:20], groups[:20], config=QUICK)
    for skip in (same, few):
        asked = skip.search_mask(features, 0.3)
        assert float(asked.float().mean()) == pytest.approx(0.7, abs=0.05)
        alone = torch.cat([skip.search_mask(row[None], 0.3) for row in features[:50]])
        assert torch.equal(alone, asked[:50])  # whatever else is in the batch
    assert float(few.gain(features)[0]) == pytest.approx(float(gain[:20].mean()), abs=1e-5)


def test_search_skipper_is_unchanged_after_a_round_trip(skip):
    features, _, _, _ = gains(1, rows=500)
    again = SearchSkipper.load(*stored(skip))
    assert torch.equal(again.search_mask(features, 0.3), skip.search_mask(features, 0.3))
    tensors, metadata = stored(skip)
    tensors["levels"] = tensors["levels"][:5]
    with pytest.raises(DatastoreCorrupt, match="levels"):
        SearchSkipper.load(tensors, metadata)


def test_search_skipper_refuses_invalid_training_data_and_features(skip):
    features, gain, groups, _ = gains(0, rows=100)
    with pytest.raises(ParameterError, match="from 0 to 1"):
        skip.search_mask(features, 1.5)
    with pytest.raises(ParameterError, match="5 features"):
        skip.search_mask(features[:, :2], 0.5)
    with pytest.raises(ParameterError, match="finite"):
        train_skip(features, gain * math.nan, groups)
    with pytest.raises(ParameterError, match="as many rows"):
        train_skip(features[:10], gain, groups)


@given(st.integers(0, 99), st.one_of(st.floats(0.05, 8), st.just(1e-9)), st.booleans())
def test_odds_of_the_end_are_multiplied_at_the_marked_rows(seed, factor, some):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(4, 6, generator=generator, dtype=torch.float64).pow(3)
    probs[1, 2] = 0  # an impossible end stays impossible
    probs /= probs.sum(1, keepdim=True)
    probs[3] = torch.nn.functional.one_hot(torch.tensor(2), 6)  # and a certain one certain
    rows = torch.tensor([True, True, False, True]) if some else None
    after = multiply_end_odds(probs.log(), 2, factor, rows).exp()
    torch.testing.assert_close(after.sum(1), torch.ones(4, dtype=torch.float64))
    for row in range(3):
        by = 1.0 if some and row == 2 else factor
        odds = [one[row, 2] / (1 - one[row, 2]) for one in (probs, after)]
        torch.testing.assert_close(odds[1], by * odds[0])
        rest = torch.tensor([0, 1, 3, 4, 5])
        torch.testing.assert_close(after[row, rest] / (1 - after[row, 2]), probs[row, rest] / (1 - probs[row, 2]))
    torch.testing.assert_close(after[3], probs[3])
    if some:
        assert torch.equal(multiply_end_odds(probs.float().log(), 2, factor, rows)[2], probs[2].float().log())


@pytest.mark.parametrize("factor", [0, -1.0, math.nan, math.inf])
def test_odds_of_the_end_are_multiplied_by_a_positive_number_only(factor):
    with pytest.raises(ParameterError, match="above 0"):
        multiply_end_odds(torch.zeros(1, 1), 0, factor)
