"""Targets: retrieval from the store itself against brute force in NumPy, and the targets on disk."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import oracle
from helpers.stores import made_store, random_store
from helpers.training import retrieve_targets
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, DatastoreError, ParameterError
from knnlm.training.prune import prune
from knnlm.training.teacher import (
    OFFSETS,
    PROBS,
    TARGETS_FILE,
    TOKENS,
    RetrievalTeacher,
    Targets,
    TeacherConfig,
    sparsify,
    token_probabilities,
)

HERE = Path(__file__).parent.parent
ARRAYS = (OFFSETS, TOKENS, PROBS)


def dense(sparse, vocab_size):
    """Sparse answers as (n, V), added up number by number."""
    found = np.zeros((len(sparse.ids), vocab_size))
    for row, (ids, probs, length) in enumerate(zip(*map(np.asarray, sparse), strict=True)):
        assert len(set(ids[:length])) == length
        assert (probs[:length] > 0).all()
        assert (probs[length:] == 0).all()
        for token, prob in zip(ids[:length], probs[:length], strict=True):
            found[row, token] += prob
    return found


def left_out(keys, values, row, allowed, vocab_size, *, k, knn_temperature):
    """p_kNN of a row among the rows that it may see; zeros where there is none."""
    some = np.flatnonzero(allowed)
    found = oracle.knn_distribution(
        keys[row], keys[some], values[some], vocab_size, k=k, knn_temperature=knn_temperature
    )
    return np.zeros(vocab_size) if found is None else found


def everything(store, path, **options):
    """All targets of a store, nothing of the vote dropped."""
    targets = retrieve_targets(store, path, top=10**6, mass=1.0, device="cpu", **options)
    return targets.lookup(torch.arange(store.entry_count))


@pytest.mark.parametrize("k", [1, 7, 63, 500])
def test_position_never_retrieves_itself_even_with_equal_contexts(tmp_path, k):
    """Each context is there twice, with another token: dropping the first result instead would drop the wrong one."""
    random = np.random.default_rng(0)
    keys = np.tile(random.normal(size=(40, 6)), (2, 1)).astype(np.float32)
    values = random.integers(0, 9, 80)
    store = made_store(tmp_path / "s", keys, values, sizes=[20, 20, 20, 20])
    found = dense(everything(store, tmp_path / "t", k=k, knn_temperature=3.0, batch=33), 9)
    for row in range(80):
        right = left_out(keys, values, row, np.arange(80) != row, 9, k=k, knn_temperature=3.0)
        # k is odd or all: the copy of the row itself, and then pairs of equal contexts.
        np.testing.assert_allclose(found[row], right, atol=2e-3)
    first = [oracle.knn_distribution(keys[r], keys, values, 9, k=1, knn_temperature=3.0) for r in range(80)]
    if k == 1:
        assert sum(np.argmax(found, 1) != np.argmax(first, 1)) > 20


def test_last_neighbour_is_dropped_if_ties_hide_the_position_itself(tmp_path):
    store = made_store(tmp_path / "s", np.ones((30, 4)), np.arange(30), sizes=[30])
    found = everything(store, tmp_path / "t", k=3, knn_temperature=1.0)
    assert found.lengths.tolist() == [3] * 30
    np.testing.assert_allclose(found.probs, 1 / 3, atol=1e-3)
    assert not (found.ids == torch.arange(30)[:, None]).any()


@pytest.mark.parametrize("exclude", ["self", "document"])
@pytest.mark.parametrize("k", [4, 30])
def test_whole_document_and_its_copies_can_be_excluded(tmp_path, exclude, k):
    random = np.random.default_rng(1)
    sizes, texts = [6, 9, 6, 12, 1], ["a", "b", "a", "c", "d"]
    keys = random.normal(size=(34, 5)).astype(np.float32)
    values = random.integers(0, 7, 34)
    keys[15:21], values[15:21] = keys[:6], values[:6]  # the third document is the first
    store = made_store(tmp_path / "s", keys, values, sizes=sizes, texts=texts)
    found = dense(everything(store, tmp_path / "t", k=k, knn_temperature=2.0, exclude=exclude), 7)
    text = np.repeat(texts, sizes)
    for row in range(34):
        allowed = np.arange(34) != row if exclude == "self" else text != text[row]
        wanted = [row_k for row_k in (k,) if row_k <= allowed.sum()] or [int(allowed.sum())]
        # At most twice k are asked for; where its own text took more than half of those, fewer are left.
        if exclude == "document":
            order = np.argsort(oracle.distances(keys[row], keys), kind="stable")[: min(34, k + min(12, k))]
            allowed &= np.isin(np.arange(34), order)
        right = left_out(keys, values, row, allowed, 7, k=wanted[0], knn_temperature=2.0)
        np.testing.assert_allclose(found[row], right, atol=2e-3)


def test_position_without_neighbours_has_no_target(tmp_path):
    store = made_store(tmp_path / "s", np.random.default_rng(0).normal(size=(10, 3)), np.arange(10), sizes=[10])
    targets = retrieve_targets(store, tmp_path / "t", exclude="document", k=4, knn_temperature=1.0)
    assert targets.lookup(torch.arange(10)).lengths.tolist() == [0] * 10
    assert targets.metadata["without_target"] == 10
    alone = made_store(tmp_path / "one", np.ones((1, 3)), np.array([2]), sizes=[1])
    assert retrieve_targets(alone, tmp_path / "u").lookup(torch.tensor([0, -1])).lengths.tolist() == [0, 0]


@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, 20),
    words=st.integers(1, 12),
    top=st.integers(1, 15),
    mass=st.floats(0.05, 1.0),
    knn_temperature=st.floats(0.05, 50),
)
def test_most_probable_tokens_are_kept_until_they_cover_the_mass(seed, k, words, top, mass, knn_temperature):
    random = np.random.default_rng(seed)
    values = random.integers(-1, words, size=(5, k))
    distances = random.exponential(size=(5, k)) * 3
    tokens, shares = token_probabilities(torch.from_numpy(values), torch.from_numpy(distances), knn_temperature)
    sparse, kept = sparsify(tokens, shares, top=top, mass=mass)
    found = dense(sparse, words)
    for row in range(5):
        there = values[row] >= 0
        full = np.zeros(words)
        if there.any():
            np.add.at(full, values[row][there], oracle.softmax(-distances[row][there] / knn_temperature))
        right, covered = np.zeros(words), 0.0
        for token in sorted(range(words), key=lambda t: (-full[t], t))[:top]:
            if covered < mass - 1e-12 and full[token] > 1e-7:
                right[token] = full[token]
                covered += full[token]
        if abs(covered - mass) < 1e-9 or np.isclose(full[full > 0], 2.0**-24, rtol=2).any():
            continue  # one more or less, by rounding
        np.testing.assert_allclose(found[row], right / max(covered, 1e-9), atol=1e-5)
        assert float(kept[row]) == pytest.approx(covered, abs=1e-6)


def test_stored_targets_are_the_dense_ones_cut_to_their_mass_in_a_tenth_of_the_size(tmp_path):
    store = random_store(tmp_path / "s", rows=600, words=40, seed=3)
    keys, values = store.take(torch.arange(600)).numpy(), store.values(torch.arange(600)).numpy()
    targets = retrieve_targets(store, tmp_path / "t", k=256, knn_temperature=4.0, top=12, mass=0.9)
    found = dense(targets.lookup(torch.arange(600)), 40)
    masses = []
    for row in range(600):
        full = left_out(keys, values, row, np.arange(600) != row, 40, k=256, knn_temperature=4.0)
        order = np.argsort(-full)
        count = min(12, int(np.searchsorted(full[order].cumsum(), 0.9)) + 1)
        right = np.zeros(40)
        right[order[:count]] = full[order[:count]] / full[order[:count]].sum()
        masses.append(full[order[:count]].sum())
        np.testing.assert_allclose(found[row], right, atol=1e-3)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)
    metadata = targets.metadata
    size = sum((tmp_path / "t" / name).stat().st_size for name in ARRAYS)
    entries = len(np.load(tmp_path / "t" / TOKENS))
    assert metadata["kept_mass"] == pytest.approx(np.mean(masses), abs=1e-4)
    assert metadata["bytes_per_token"] == pytest.approx(size / 600)
    assert size == 3 * 128 + 8 * 601 + (2 + 2) * entries
    assert metadata["share_of_dense"] == pytest.approx(size / 600 / (256 * 6))
    assert metadata["share_of_dense"] < 0.1
    assert metadata["tokens_per_position"] == pytest.approx(entries / 600)


def test_targets_of_any_positions_in_any_order_match_those_on_the_fly(tmp_path):
    store = random_store(tmp_path / "s", rows=200, words=20)
    targets = retrieve_targets(store, tmp_path / "t", k=32, knn_temperature=2.0, top=8)
    retrieval = RetrievalTeacher(store, TeacherConfig(32, 2.0, "self", 8, 0.99))
    rows = torch.tensor([17, -1, 3, 199, 3, 0])
    stored, live = targets.lookup(rows), retrieval.lookup(rows)
    assert torch.equal(stored.lengths, live.lengths)
    assert stored.lengths[1] == 0
    assert torch.equal(stored.ids, live.ids)
    torch.testing.assert_close(stored.probs, live.probs, atol=1e-3, rtol=1e-3)
    assert targets.lookup(torch.zeros(0, dtype=torch.long)).ids.shape == (0, 0)
    with pytest.raises(IndexError, match="200"):
        targets.lookup(torch.tensor([200]))
    assert {name: targets.metadata[name] for name in retrieval.metadata} == retrieval.metadata


def test_large_vocabulary_takes_four_bytes_per_token(tmp_path):
    values = np.array([70_000, 3, 70_000, 5] * 5)
    store = made_store(tmp_path / "s", np.random.default_rng(0).normal(size=(20, 3)), values)
    sparse = retrieve_targets(store, tmp_path / "t", k=19, knn_temperature=1e9).lookup(torch.tensor([0]))
    assert sparse.ids.tolist() == [[70_000, 3, 5]]
    np.testing.assert_allclose(sparse.probs, [[9 / 19, 5 / 19, 5 / 19]], atol=1e-3)
    assert np.load(tmp_path / "t" / TOKENS).dtype == np.int32


def same_arrays(one, other):
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in ARRAYS)


def test_targets_that_were_interrupted_end_with_the_same_bytes(tmp_path):
    store = random_store(tmp_path / "s", rows=300, words=20)
    options = {"k": 16, "knn_temperature": 2.0, "batch": 23}
    whole = retrieve_targets(store, tmp_path / "whole", **options)
    for stop in (1, 5, 13):
        out, seen = tmp_path / f"stopped {stop}", []

        @contextmanager
        def deadly(what, *, total, unit, seen=seen, stop=stop):
            def advance(count):
                seen.append(count)
                if len(seen) == 1 + stop:
                    raise KeyboardInterrupt

            yield advance

        with pytest.raises(KeyboardInterrupt):
            retrieve_targets(store, out, checkpoint_every=0, progress=deadly, **options)
        if stop < 13:
            with pytest.raises(DatastoreError, match="unfinished"):
                Targets.open(out)
        with (out / TOKENS).open("ab") as file:
            file.write(b"what was not finished")
        seen.clear()
        seen.extend([0] * 100)
        again = retrieve_targets(store, out, progress=deadly, **options)
        assert sum(seen) == 300
        assert same_arrays(tmp_path / "whole", out)
        metadata = [{name: value for name, value in t.metadata.items() if name != "seconds"} for t in (whole, again)]
        assert metadata[0] == pytest.approx(metadata[1])
        with pytest.raises(DatastoreError, match=r"another knn temperature \(2.0, now 3.0\)"):
            retrieve_targets(store, out, k=16, knn_temperature=3.0)
    other = random_store(tmp_path / "other", rows=300, words=20, seed=9)
    with pytest.raises(DatastoreError, match="another teacher"):
        retrieve_targets(other, tmp_path / "whole", **options)


def test_targets_that_were_killed_end_with_the_same_bytes(tmp_path):
    store = random_store(tmp_path / "s", rows=300, words=20)
    code = f"""
        import os, signal, torch
        torch.set_num_threads(1)
        from contextlib import contextmanager
        from knnlm import Datastore
        from knnlm.training.teacher import TeacherConfig, make_targets

        @contextmanager
        def deadly(what, *, total=None, unit="tokens"):
            counts = []
            def advance(count):
                counts.append(count)
                if sum(counts) >= 150:
                    os.kill(os.getpid(), signal.SIGKILL)
            yield advance

        config = TeacherConfig(k=16, knn_temperature=2.0)
        make_targets(Datastore.open({str(tmp_path / "s")!r}), {str(tmp_path / "killed")!r}, config, batch=23,
                     checkpoint_every=0, progress=deadly)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert result.returncode == -signal.SIGKILL
    done = json.loads((tmp_path / "killed" / TARGETS_FILE).read_text())["done"]["positions"]
    assert 100 < done < 300
    retrieve_targets(store, tmp_path / "killed", k=16, knn_temperature=2.0, batch=23)
    retrieve_targets(store, tmp_path / "whole", k=16, knn_temperature=2.0, batch=23)
    assert same_arrays(tmp_path / "whole", tmp_path / "killed")


def test_pruned_store_cannot_be_a_teacher(tmp_path):
    store = random_store(tmp_path / "s")
    prune(store, tmp_path / "p", merge=8)
    with pytest.raises(DatastoreError, match="pruned"):
        retrieve_targets(Datastore.open(tmp_path / "p"), tmp_path / "t")
    assert not (tmp_path / "t").exists()
    # Fewer dimensions are another matter: every token still has its key.
    prune(store, tmp_path / "q", width=3)
    assert retrieve_targets(Datastore.open(tmp_path / "q"), tmp_path / "t").token_count == store.entry_count


def test_settings_out_of_range_are_refused(tmp_path):
    store = random_store(tmp_path / "s")
    for options, message in [
        ({"k": 0}, "k must"),
        ({"knn_temperature": 0.0}, "knn_temperature"),
        ({"exclude": "nobody"}, "self or document"),
        ({"top": 0}, "top must"),
        ({"mass": 0.0}, "mass must"),
        ({"mass": 1.5}, "mass must"),
        ({"batch": 0}, "batch must"),
    ]:
        with pytest.raises(ParameterError, match=message):
            retrieve_targets(store, tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(DatastoreError, match="is a file"):
        retrieve_targets(store, tmp_path / "file")


def test_damaged_targets_are_refused_in_one_line(tmp_path):
    store = random_store(tmp_path / "s")
    targets = retrieve_targets(store, tmp_path / "t", k=8, knn_temperature=1.0)
    file = tmp_path / "t" / TARGETS_FILE
    good = file.read_text()
    saved = json.loads(good)

    def changed(part, **values):
        return json.dumps({**saved, part: {**saved[part], **values}})

    for text in [
        "{", "[]", "[" * 100_000, '"a"', "{}", json.dumps({**saved, "format": 7}), json.dumps({**saved, "settings": 1}),
        json.dumps({**saved, "done": None}), changed("settings", k=True), changed("settings", entries="many"),
        changed("settings", vocab_size=-1), changed("settings", k=0), changed("done", positions=-1),
        changed("done", positions=1.5), changed("done", mass="x"), changed("done", more=1),
        changed("done", tokens=10**9), changed("done", positions=7), changed("settings", vocab_size=10**6),
        "\ufeff\udcff",
    ]:  # fmt: skip
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(DatastoreError) as caught:
            Targets.open(tmp_path / "t")
        assert "\n" not in str(caught.value)
        assert str(tmp_path / "t") in str(caught.value)
    file.write_text(good)
    with pytest.raises(DatastoreError, match=r"no targets in .*nowhere"):
        Targets.open(tmp_path / "nowhere")
    for name, value in ((OFFSETS, -5), (OFFSETS, 10**9), (TOKENS, 65_000), (PROBS, np.nan), (PROBS, -1.0)):
        array = np.load(tmp_path / "t" / name)
        broken = array.copy()
        broken[len(broken) // 2] = value
        np.save(tmp_path / "t" / name, broken)
        with pytest.raises(DatastoreCorrupt):
            Targets.open(tmp_path / "t").lookup(torch.arange(store.entry_count))
        np.save(tmp_path / "t" / name, array)
    np.save(tmp_path / "t" / PROBS, np.load(tmp_path / "t" / PROBS)[:-1])
    with pytest.raises(DatastoreCorrupt, match="probs"):
        Targets.open(tmp_path / "t")
    assert targets.token_count == store.entry_count
