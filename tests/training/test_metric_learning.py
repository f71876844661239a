"""The trained metric_learning: its objective is the formula's, and it learns what is there to learn."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import oracle
from helpers.stores import all_keys, contents, made_store
from helpers.training import fit_key_map, fit_key_metric
from knnlm.datastore.codecs import KeyMap
from knnlm.datastore.indexes import build_index
from knnlm.datastore.rewrite import derive
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, DatastoreError, ParameterError
from knnlm.memories.output import load_tensors, save_tensors
from knnlm.training import metric_learning
from knnlm.training.metric_learning import AnchorNeighbours, find_neighbours, key_documents, map_file, vote_log_p

WORDS, SIGNAL, NOISE = 8, 6, 6


def noisy_store(path, *, rows=2000, seed=0, documents=40, loud=1.5, copies=1):
    """Half of the dimensions determine which word follows; the other half are noise of a larger scale."""
    generator = np.random.default_rng(seed)
    values = generator.integers(0, WORDS, rows)
    signal = 1.2 * np.random.default_rng(99).normal(size=(WORDS, SIGNAL))[values] + generator.normal(
        size=(rows, SIGNAL)
    )
    keys = np.concatenate([signal, loud * generator.normal(size=(rows, NOISE))], 1)
    sizes, texts = [rows // documents] * documents * copies, list(range(documents)) * copies
    return made_store(path, np.tile(keys, (copies, 1)), np.tile(values, copies), sizes=sizes, texts=texts)


def likelihood_by_hand(keys, values, groups, anchors, count, matrix, temperature, counts=None):
    """The log Σ softmax over the nearest keys of other documents, anchor by anchor, in float64.

    With counts, an anchor is there as often as it counts, and so are its neighbours.
    """
    logs = []
    counts = np.ones(len(keys), int) if counts is None else counts
    for anchor in anchors:
        others = np.flatnonzero(groups != groups[anchor])
        near = others[np.argsort(oracle.distances(keys[anchor], keys[others]), kind="stable")[:count]]
        same = values[near] == values[anchor]
        if same.any() and not same.all():
            again = np.repeat(np.arange(len(near)), counts[near])
            moved = oracle.distances(keys[anchor] @ matrix, keys[near[again]] @ matrix)
            logs += [np.log(oracle.softmax(-moved / temperature)[same[again]].sum())] * counts[anchor]
    return np.array(logs)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), missing=st.integers(0, 3), merged=st.booleans())
def test_objective_and_its_gradient_match_the_formula(seed, missing, merged):
    generator = np.random.default_rng(seed)
    keys, anchor, matrix = generator.normal(size=(7, 4)), generator.normal(size=4), generator.normal(size=(4, 3))
    same = generator.random(7) < 0.5
    same[0] = True
    near = np.arange(7)
    near[7 - missing :] = -1
    same &= near >= 0

    counts = generator.integers(1, 5, 7) if merged else np.ones(7, int)
    again = np.repeat(np.arange(7 - missing), counts[: 7 - missing])  # a key that counts twice is there twice

    def right(one):
        moved = ((keys[again] - anchor) @ one) ** 2
        return np.log(oracle.softmax(-moved.sum(1) / 1.7)[same[again]].sum())

    given_matrix = torch.from_numpy(matrix).requires_grad_()
    arrays = (np.zeros(1, np.int64), near[None], same[None], np.ones(1), np.log(counts)[None])
    distances = (torch.from_numpy(keys - anchor)[None] @ given_matrix).square().sum(2)
    found = vote_log_p(AnchorNeighbours(*map(torch.from_numpy, arrays)), distances, 1.7)
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
    groups = key_documents(store)
    assert groups.tolist() == [row // 10 for row in range(400)]
    anchors = torch.arange(0, 400, 9)
    mined = find_neighbours(store, anchors, groups, count=12)
    keys, values = all_keys(store).numpy(), store.values(torch.arange(400)).numpy()
    for anchor, near, same in zip(anchors.tolist(), mined.near, mined.same, strict=True):
        others = np.flatnonzero(groups != groups[anchor])
        right = others[np.argsort(oracle.distances(keys[anchor], keys[others]))[:12]]
        assert near.tolist() == right.tolist()
        assert same.tolist() == (values[right] == values[anchor]).tolist()


def test_store_of_one_long_document_is_cut_into_pieces(tmp_path):
    keys = np.random.default_rng(0).normal(size=(3000, 2))
    store = made_store(tmp_path / "a", keys, np.arange(3000) % 3)
    assert key_documents(store).tolist() == [row // 1024 for row in range(3000)]


def test_copies_of_a_text_are_one_document(tmp_path):
    many = noisy_store(tmp_path / "many", rows=400, copies=3)
    assert key_documents(many).tolist() == [row // 10 for row in range(400)] * 3
    mined = find_neighbours(many, torch.arange(0, 1200, 7), key_documents(many), count=12)
    assert ((mined.near < 0) | (mined.near % 400 // 10 != mined.anchors[:, None] % 400 // 10)).all()
    # Twenty documents, but five texts: too few to hold some out, so these are cut.
    keys = np.random.default_rng(0).normal(size=(24_000, 2))
    few = made_store(tmp_path / "few", keys, np.arange(24_000) % 3, sizes=[1200] * 20, texts=[*range(5)] * 4)
    right = [2 * text + (row >= 1024) for _ in range(4) for text in range(5) for row in range(1200)]
    assert key_documents(few).tolist() == right


def test_copies_do_not_prevent_learning(tmp_path):
    options = {"epochs": 4, "learning_rate": 3e-2}
    plain = fit_key_map(noisy_store(tmp_path / "a", rows=1000), neighbours=16, **options)
    twice = fit_key_map(noisy_store(tmp_path / "b", rows=1000, copies=2), neighbours=32, **options)
    # Every anchor and every neighbour is there twice, so that the likelihood is the same.
    assert twice.metadata["knn_temperature"] == pytest.approx(plain.metadata["knn_temperature"])
    [figures], [right] = twice.metadata["rounds"], plain.metadata["rounds"]
    assert figures["before"] == pytest.approx(right["before"], abs=1e-5)
    assert figures["after"] > figures["before"]
    size = twice.matrix.square().sum(1).sqrt()
    assert size[SIGNAL:].mean() < 0.8 * size[:SIGNAL].mean()


def clustered_store(path, *, sure):
    """Twenty places far apart with twenty keys each. Within a place, a side has its token; with noise unless `sure`."""
    generator = np.random.default_rng(1)
    places = np.tile(np.arange(20), 20)
    near = generator.normal(size=(400, 2))
    side = (near[:, 0] > 0) ^ (generator.random(400) < 0.2)
    keys = 2000 * generator.normal(size=(20, 2))[places] + near
    return made_store(path, keys, places if sure else side.astype(int), sizes=[10] * 40)


def test_temperature_far_from_the_median_distance_is_found(tmp_path):
    store = clustered_store(tmp_path / "a", sure=False)
    found = fit_key_map(store, neighbours=64, epochs=1)
    keys, values, groups = (
        all_keys(store).double().numpy(),
        store.values(torch.arange(400)).numpy(),
        key_documents(store),
    )
    held_out = metric_learning._mark_held_out(groups, torch.arange(400), 0).nonzero()[:, 0].tolist()
    temperature = found.metadata["knn_temperature"]
    scores = {
        factor: likelihood_by_hand(keys, values, groups, held_out, 64, np.eye(2), factor * temperature).mean()
        for factor in (0.1, 0.7, 1, 1.5, 10, 1e3)
    }
    assert max(scores, key=scores.get) == 1
    usual = np.median([np.sort(oracle.distances(keys[one], keys))[1:65] for one in held_out])
    assert temperature < usual * 2.0**-10


def test_of_equally_good_temperatures_the_one_nearest_to_the_median_is_chosen(tmp_path):
    store = clustered_store(tmp_path / "a", sure=True)
    found = fit_key_map(store, neighbours=64, epochs=1)
    keys = all_keys(store).double().numpy()
    usual = np.median([np.sort(oracle.distances(key, keys))[1:65] for key in keys])
    # Whatever is below explains everything as well.
    assert usual * 2.0**-10 < found.metadata["knn_temperature"] < usual


def test_nearly_uniform_vote_does_not_make_the_temperature_extreme(tmp_path):
    generator = np.random.default_rng(3)
    # Of pairs that are near each other, the two have different tokens: the nearer a key, the less informative it is.
    keys = np.repeat(generator.normal(size=(200, 3)), 2, axis=0) + 0.1 * generator.normal(size=(400, 3))
    values = generator.integers(0, 2, 200).repeat(2)
    values[1::2] = 1 - values[::2]
    order = np.arange(400).reshape(200, 2).T.reshape(-1)  # the two of a pair are in different documents
    store = made_store(tmp_path / "a", keys[order], values[order], sizes=[10] * 40)
    temperature = fit_key_map(store, neighbours=32, epochs=1).metadata["knn_temperature"]
    stored, tokens, groups = keys[order].astype(np.float32).astype(float), values[order], key_documents(store)
    held_out = metric_learning._mark_held_out(groups, torch.arange(400), 0).nonzero()[:, 0].tolist()

    def score(tried):
        return likelihood_by_hand(stored, tokens, groups, held_out, 32, np.eye(3), tried).mean()

    tried = [temperature * 2.0 ** (step / 2) for step in range(-2, 40)]
    assert score(tried[-1]) >= max(map(score, tried)) - 1e-4  # there is no best one but infinity
    # It is as good as that to within a hundredth, and the next lower one is not.
    assert score(temperature) >= score(tried[-1]) - 0.0101
    assert score(temperature / 2**0.5) < score(tried[-1]) - 0.0099


def test_merged_keys_are_weighted_by_the_contexts_they_stand_for(tmp_path):
    store = noisy_store(tmp_path / "a", rows=400)
    counts = np.random.default_rng(5).integers(1, 6, 400)
    merged = derive(store, tmp_path / "b", counts=torch.from_numpy(counts))
    found = fit_key_map(merged, neighbours=20, epochs=2, learning_rate=1e-2)
    keys, values = all_keys(store).double().numpy(), store.values(torch.arange(400)).numpy()
    groups = key_documents(merged)
    held_out = metric_learning._mark_held_out(groups, torch.arange(400), 0).nonzero()[:, 0].tolist()
    temperature, [figures] = found.metadata["knn_temperature"], found.metadata["rounds"]
    for name, matrix in (("before", np.eye(12)), ("after", found.matrix.double().numpy())):
        right = likelihood_by_hand(keys, values, groups, held_out, 20, matrix, temperature, counts)
        assert figures[name] == pytest.approx(right.mean(), abs=1e-4)
    plain = fit_key_map(store, neighbours=20, epochs=2, learning_rate=1e-2)
    assert not torch.equal(plain.matrix, found.matrix)


class Watch:
    """Progress that remembers what was begun, and stops when something has come so far."""

    def __init__(self, what=None, after=0):
        self.what, self.after, self.begun = what, after, []

    @contextmanager
    def __call__(self, what, **_):
        self.begun.append(what)
        left = [self.after]

        def advance(count):
            left[0] -= count
            if what == self.what and left[0] < 0:
                raise KeyboardInterrupt

        yield advance


@pytest.mark.parametrize("mapped", [False, True])
def test_run_stopped_while_writing_does_not_train_again(tmp_path, mapped):
    store = noisy_store(tmp_path / "a", rows=400)
    if mapped:  # the map of the result is then another than what was learnt
        store = derive(store, tmp_path / "m", key_map=KeyMap(2 * torch.eye(12), torch.ones(12)))
    options = {"neighbours": 20, "epochs": 2, "learning_rate": 1e-2}
    whole = fit_key_metric(store, tmp_path / "whole", **options)
    assert not map_file(tmp_path / "whole").exists()
    key_map = fit_key_map(store, **options)
    assert not torch.equal(key_map.matrix, torch.eye(12))
    torch.testing.assert_close(all_keys(whole), key_map.apply(all_keys(store)))
    out = tmp_path / "new" / "out"
    with pytest.raises(KeyboardInterrupt):
        fit_key_metric(store, out, progress=Watch("training the similarity"), **options)
    assert not map_file(out).exists()
    assert not out.exists()
    with pytest.raises(KeyboardInterrupt):
        fit_key_metric(store, out, progress=Watch("writing keys", after=200), **options)
    assert (out / "segments" / "000000").exists()
    for other, match in (({"seed": 1}, r"another seed \(0, now 1\)"), ({"epochs": 3}, r"another epochs \(2, now 3\)")):
        with pytest.raises(DatastoreError, match=match):
            fit_key_metric(store, out, **{**options, **other})
    again = Watch()
    fit_key_metric(store, out, progress=again, **options)
    assert again.begun == ["writing keys"]
    assert contents(out) == contents(tmp_path / "whole")
    assert not map_file(out).exists()
    with pytest.raises(DatastoreError, match="finished store already"):
        fit_key_metric(store, out, progress=again, **options)
    assert again.begun == ["writing keys"]


def test_damaged_map_of_a_stopped_run_is_named(tmp_path):
    store = noisy_store(tmp_path / "a", rows=400)
    options = {"neighbours": 20, "epochs": 1}
    with pytest.raises(KeyboardInterrupt):
        fit_key_metric(store, tmp_path / "b", progress=Watch("writing keys"), **options)
    file = map_file(tmp_path / "b")
    tensors, metadata = load_tensors(file)
    for bad in ({"matrix": tensors["matrix"]}, {**tensors, "centre": torch.full((12,), torch.nan)}):
        save_tensors(file, bad, metadata)
        with pytest.raises(DatastoreCorrupt, match=r"b\.map\.safetensors: not a readable key map"):
            fit_key_metric(store, tmp_path / "b", **options)
    file.write_bytes(b"nonsense")
    with pytest.raises(DatastoreCorrupt, match=r"b\.map\.safetensors: corrupt"):
        fit_key_metric(store, tmp_path / "b", **options)


def test_uninformative_dimensions_shrink_and_new_contexts_gain(tmp_path):
    store = noisy_store(tmp_path / "a")
    found = fit_key_map(store, neighbours=64, epochs=8, learning_rate=1e-1, rounds=2)
    size = found.matrix.square().sum(1).sqrt()  # what becomes of each dimension
    assert size[SIGNAL:].max() < 0.6 * size[:SIGNAL].min()
    assert all(one["after"] > one["before"] for one in found.metadata["rounds"])
    # Contexts that training has not seen, by the votes of a NumPy oracle over all keys.
    new = noisy_store(tmp_path / "new", rows=200, seed=1)
    mapped = derive(store, tmp_path / "b", key_map=found)
    queries, targets = all_keys(new), new.values(torch.arange(200)).numpy()
    values = store.values(torch.arange(store.entry_count)).numpy()

    def score(moved, keys, temperature):
        probs = [oracle.knn_distribution(one, keys, values, WORDS, k=100, knn_temperature=temperature) for one in moved]
        return np.mean([np.log(prob[target] + 1e-9) for prob, target in zip(probs, targets, strict=True)])

    tried = [found.metadata["knn_temperature"] * scale for scale in (0.25, 0.5, 1, 2, 4)]
    plain = [score(queries.numpy(), all_keys(store).numpy(), one) for one in tried]
    learned = [score(mapped.project(queries).numpy(), all_keys(mapped).numpy(), one) for one in tried]
    # The best result if the uninformative dimensions were known.
    knowing = [score(queries.numpy()[:, :SIGNAL], all_keys(store).numpy()[:, :SIGNAL], one) for one in tried]
    assert max(knowing) > max(plain)
    assert max(learned) - max(plain) > 0.7 * (max(knowing) - max(plain))
    # The temperature that was best before is still about right.
    assert learned[2] > max(learned) - 0.05


def test_reported_likelihood_matches_an_independent_computation(tmp_path):
    store = noisy_store(tmp_path / "a", rows=400)
    found = fit_key_map(store, neighbours=20, epochs=2, learning_rate=1e-2)
    keys, values = all_keys(store).double().numpy(), store.values(torch.arange(400)).numpy()
    groups = key_documents(store)
    held_out = metric_learning._mark_held_out(groups, torch.arange(400), 0).nonzero()[:, 0].tolist()
    assert 30 <= len(held_out) <= 60
    figures = found.metadata["rounds"][0]
    temperature = found.metadata["knn_temperature"]
    before = likelihood_by_hand(keys, values, groups, held_out, 20, np.eye(12), temperature)
    after = likelihood_by_hand(keys, values, groups, held_out, 20, found.matrix.double().numpy(), temperature)
    assert figures["before"] == pytest.approx(before.mean(), abs=1e-4)
    assert figures["after"] == pytest.approx(after.mean(), abs=1e-4)
    for other in (temperature * 0.7, temperature * 1.5):
        assert before.mean() >= likelihood_by_hand(keys, values, groups, held_out, 20, np.eye(12), other).mean()


def test_narrow_map_a_second_round_and_the_same_seed(tmp_path):
    store = noisy_store(tmp_path / "a", rows=1000)
    options = {"width": 5, "neighbours": 32, "epochs": 4, "learning_rate": 2e-2, "rounds": 2, "seed": 3}
    found = fit_key_map(store, **options)
    assert found.matrix.shape == (12, 5)
    again = fit_key_map(store, **options)
    assert torch.equal(found.matrix, again.matrix)
    assert torch.equal(found.centre, again.centre)
    assert all(one["after"] >= one["before"] for one in found.metadata["rounds"])
    size = found.matrix.square().sum(1).sqrt()
    assert size[SIGNAL:].mean() < 0.6 * size[:SIGNAL].mean()
    other = fit_key_map(store, **{**options, "seed": 4})
    assert not torch.equal(found.matrix, other.matrix)


def test_training_that_does_not_help_leaves_keys_as_they_are(tmp_path):
    store = noisy_store(tmp_path / "a", rows=400)
    # A rate at which nothing is learned: early stopping must give back the start.
    found = fit_key_map(store, neighbours=20, epochs=2, learning_rate=1e3)
    assert torch.equal(found.matrix, torch.eye(12))


def test_invalid_options_and_too_small_stores_are_refused(tmp_path):
    store = noisy_store(tmp_path / "a", rows=400)
    for options in (
        {"width": 13},
        {"anchors": 0},
        {"neighbours": 0},
        {"learning_rate": 0.0},
        {"knn_temperature": -1.0},
    ):
        with pytest.raises(ParameterError, match=next(iter(options))):
            fit_key_map(store, **options)
    lonely = made_store(tmp_path / "b", np.eye(6), np.arange(6), sizes=[3, 3])
    with pytest.raises(ParameterError, match="too small to learn from"):
        fit_key_map(lonely)


def test_keys_read_from_disk_give_the_same_map(tmp_path, monkeypatch):
    store = noisy_store(tmp_path / "a", rows=400)
    options = {"neighbours": 20, "epochs": 2, "learning_rate": 1e-2}
    found = fit_key_map(store, **options)
    monkeypatch.setattr(metric_learning, "_MAX_RESIDENT_BYTES", 0)
    assert torch.equal(fit_key_map(store, **options).matrix, found.matrix)
