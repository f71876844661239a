"""The trained similarity: its objective is the formula's, and it learns what is there to learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from knnlm.datastore import Datastore, build_index, derive
from knnlm.distill import similarity
from knnlm.distill.similarity import key_groups, learn_map, mine, vote_log_p
from knnlm.errors import ParameterError
from test_prune import all_keys, made_store

WORDS, SIGNAL, NOISE = 8, 6, 6


def noisy_store(path, *, rows=2000, seed=0, documents=40, loud=1.5):
    """Half of the dimensions say which word follows, the other half are louder and say nothing."""
    generator = np.random.default_rng(seed)
    values = generator.integers(0, WORDS, rows)
    signal = 1.2 * np.random.default_rng(99).normal(size=(WORDS, SIGNAL))[values] + generator.normal(
        size=(rows, SIGNAL)
    )
    keys = np.concatenate([signal, loud * generator.normal(size=(rows, NOISE))], 1)
    return made_store(path, keys, values, sizes=[rows // documents] * documents)


def likelihood_by_hand(keys, values, groups, anchors, count, matrix, temperature):
    """The mean of log Σ softmax over the nearest keys of other documents, anchor by anchor, in float64."""
    logs = []
    for anchor in anchors:
        others = np.flatnonzero(groups != groups[anchor])
        near = others[np.argsort(oracle.distances(keys[anchor], keys[others]), kind="stable")[:count]]
        same = values[near] == values[anchor]
        if same.any() and not same.all():
            moved = oracle.distances(keys[anchor] @ matrix, keys[near] @ matrix)
            logs.append(np.log(oracle.softmax(-moved / temperature)[same].sum()))
    return np.array(logs)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), missing=st.integers(0, 3))
def test_the_objective_and_its_gradient_are_those_of_the_formula(seed, missing):
    generator = np.random.default_rng(seed)
    keys, anchor, matrix = generator.normal(size=(7, 4)), generator.normal(size=4), generator.normal(size=(4, 3))
    same = generator.random(7) < 0.5
    same[0] = True
    near = np.arange(7)
    near[7 - missing :] = -1
    same &= near >= 0

    def right(one):
        moved = ((keys[: 7 - missing] - anchor) @ one) ** 2
        return np.log(oracle.softmax(-moved.sum(1) / 1.7)[same[: 7 - missing]].sum())

    given_matrix = torch.from_numpy(matrix).requires_grad_()
    found = vote_log_p(
        torch.from_numpy(keys - anchor)[None],
        torch.from_numpy(near)[None],
        torch.from_numpy(same)[None],
        matrix=given_matrix,
        temperature=1.7,
    )
    assert found.item() == pytest.approx(right(matrix), abs=1e-9)
    found.sum().backward()
    for place in np.ndindex(4, 3):
        step = np.zeros((4, 3))
        step[place] = 1e-6
        slope = (right(matrix + step) - right(matrix - step)) / 2e-6
        assert given_matrix.grad[place].item() == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("indexed", [False, True])
def test_neighbours_are_the_nearest_of_other_documents(tmp_path, indexed):
    store = noisy_store(tmp_path / "a", rows=400)
    if indexed:
        build_index(store, "Flat")
        store = Datastore.open(tmp_path / "a")
    groups = key_groups(store)
    assert groups.tolist() == [row // 10 for row in range(400)]
    anchors = torch.arange(0, 400, 9)
    mined = mine(store, anchors, groups, count=12)
    keys, values = all_keys(store).numpy(), store.values(torch.arange(400)).numpy()
    for anchor, near, same in zip(anchors.tolist(), mined.near, mined.same, strict=True):
        others = np.flatnonzero(groups != groups[anchor])
        right = others[np.argsort(oracle.distances(keys[anchor], keys[others]))[:12]]
        assert near.tolist() == right.tolist()
        assert same.tolist() == (values[right] == values[anchor]).tolist()


def test_a_memory_of_one_long_document_is_cut_into_pieces(tmp_path):
    keys = np.random.default_rng(0).normal(size=(3000, 2))
    store = made_store(tmp_path / "a", keys, np.arange(3000) % 3)
    assert key_groups(store).tolist() == [row // 1024 for row in range(3000)]


def test_it_learns_to_leave_out_what_says_nothing_and_new_contexts_gain(tmp_path):
    store = noisy_store(tmp_path / "a")
    found = learn_map(store, neighbours=64, epochs=8, learning_rate=1e-1, rounds=2)
    size = found.matrix.square().sum(1).sqrt()  # what becomes of each dimension
    assert size[SIGNAL:].max() < 0.6 * size[:SIGNAL].min()
    assert all(one["after"] > one["before"] for one in found.facts["rounds"])
    # Contexts that training has not seen, by the votes of a NumPy oracle over all keys.
    new = noisy_store(tmp_path / "new", rows=200, seed=1)
    mapped = derive(store, tmp_path / "b", key_map=found)
    queries, targets = all_keys(new), new.values(torch.arange(200)).numpy()
    values = store.values(torch.arange(store.rows)).numpy()

    def score(moved, keys, temperature):
        probs = [oracle.knn_distribution(one, keys, values, WORDS, k=100, temperature=temperature) for one in moved]
        return np.mean([np.log(prob[target] + 1e-9) for prob, target in zip(probs, targets, strict=True)])

    tried = [found.facts["temperature"] * scale for scale in (0.25, 0.5, 1, 2, 4)]
    plain = [score(queries.numpy(), all_keys(store).numpy(), one) for one in tried]
    learned = [score(mapped.project(queries).numpy(), all_keys(mapped).numpy(), one) for one in tried]
    # What could be had by one who knows which dimensions say nothing.
    knowing = [score(queries.numpy()[:, :SIGNAL], all_keys(store).numpy()[:, :SIGNAL], one) for one in tried]
    assert max(knowing) > max(plain)
    assert max(learned) - max(plain) > 0.7 * (max(knowing) - max(plain))
    # The temperature that was best before is still about right.
    assert learned[2] > max(learned) - 0.05


def test_the_reported_likelihood_is_that_of_an_independent_computation(tmp_path):
    store = noisy_store(tmp_path / "a", rows=400)
    found = learn_map(store, neighbours=20, epochs=2, learning_rate=1e-2)
    keys, values = all_keys(store).double().numpy(), store.values(torch.arange(400)).numpy()
    groups = key_groups(store)
    held_out = similarity._held_out(groups, torch.arange(400), 0).nonzero()[:, 0].tolist()
    assert 30 <= len(held_out) <= 60
    figures = found.facts["rounds"][0]
    temperature = found.facts["temperature"]
    before = likelihood_by_hand(keys, values, groups, held_out, 20, np.eye(12), temperature)
    after = likelihood_by_hand(keys, values, groups, held_out, 20, found.matrix.double().numpy(), temperature)
    assert figures["before"] == pytest.approx(before.mean(), abs=1e-4)
    assert figures["after"] == pytest.approx(after.mean(), abs=1e-4)
    for other in (temperature * 0.7, temperature * 1.5):
        assert before.mean() >= likelihood_by_hand(keys, values, groups, held_out, 20, np.eye(12), other).mean()


def test_a_narrow_map_a_second_round_and_the_same_seed(tmp_path):
    store = noisy_store(tmp_path / "a", rows=1000)
    options = {"width": 5, "neighbours": 32, "epochs": 4, "learning_rate": 2e-2, "rounds": 2, "seed": 3}
    found = learn_map(store, **options)
    assert found.matrix.shape == (12, 5)
    again = learn_map(store, **options)
    assert torch.equal(found.matrix, again.matrix)
    assert torch.equal(found.centre, again.centre)
    assert all(one["after"] >= one["before"] for one in found.facts["rounds"])
    size = found.matrix.square().sum(1).sqrt()
    assert size[SIGNAL:].mean() < 0.6 * size[:SIGNAL].mean()
    other = learn_map(store, **{**options, "seed": 4})
    assert not torch.equal(found.matrix, other.matrix)


def test_training_that_does_not_help_leaves_keys_as_they_are(tmp_path):
    store = noisy_store(tmp_path / "a", rows=400)
    # A rate at which nothing is learned: early stopping must give back the start.
    found = learn_map(store, neighbours=20, epochs=2, learning_rate=1e3)
    assert torch.equal(found.matrix, torch.eye(12))


def test_what_cannot_be_learned_from_is_refused(tmp_path):
    store = noisy_store(tmp_path / "a", rows=400)
    for options in ({"width": 13}, {"anchors": 0}, {"neighbours": 0}, {"learning_rate": 0.0}, {"temperature": -1.0}):
        with pytest.raises(ParameterError, match=next(iter(options)).replace("_", " ")):
            learn_map(store, **options)
    lonely = made_store(tmp_path / "b", np.eye(6), np.arange(6), sizes=[3, 3])
    with pytest.raises(ParameterError, match="too small to learn from"):
        learn_map(lonely)


def test_keys_that_do_not_stay_in_memory_give_the_same_map(tmp_path, monkeypatch):
    store = noisy_store(tmp_path / "a", rows=400)
    options = {"neighbours": 20, "epochs": 2, "learning_rate": 1e-2}
    found = learn_map(store, **options)
    monkeypatch.setattr(similarity, "_RESIDENT", 0)
    assert torch.equal(learn_map(store, **options).matrix, found.matrix)
