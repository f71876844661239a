"""One contract for every index, against NumPy brute force."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers import oracle
from helpers.stores import made_store
from helpers.vectors import Array, assert_nearest
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.store import Datastore
from knnlm.errors import IndexInvalid, ParameterError
from knnlm.index import exact
from knnlm.index.exact import ExactIndex
from knnlm.index.faiss import FaissIndex
from knnlm.index.rerank import RerankedIndex
from knnlm.index.validation import check_index


def make_exact(vectors, metric):
    return ExactIndex(vectors, metric=metric)


def make_streaming(vectors, metric):
    index = ExactIndex(vectors, metric=metric)
    index.searcher._resident = None
    return index


def make_flat(vectors, metric):
    return FaissIndex.build(vectors, "Flat", metric=metric)


def make_inverted(vectors, metric):
    return FaissIndex.build(vectors, "IVF4,Flat", metric=metric, nprobe=4)


def make_reranked(vectors, metric):
    return RerankedIndex(FaissIndex.build(vectors, "PQ4x4", metric=metric), vectors, depth=1000, measured=None)


# All of these compare with every vector, so they must be exact.
MAKERS = {"exact": make_exact, "streaming": make_streaming, "flat": make_flat}
TRAINED = {"inverted": make_inverted, "reranked codes": make_reranked}


def assert_same_neighbours(index, data, queries, k, metric):
    answer = index.search(torch.as_tensor(queries, dtype=torch.float32), k)
    assert_nearest(
        answer, [oracle.distances(query, data, metric) if len(data) else np.zeros(0) for query in queries], k
    )


numbers = st.floats(-4, 4, width=32).map(lambda value: round(value, 1))  # rounding makes ties and duplicates common


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_exact_index_finds_what_brute_force_finds(kind, metric, data):
    width = data.draw(st.integers(1, 6))
    rows = data.draw(st.integers(0, 40))
    keys = data.draw(hnp.arrays(np.float32, (rows, width), elements=numbers))
    queries = data.draw(hnp.arrays(np.float32, (data.draw(st.integers(0, 5)), width), elements=numbers))
    k = data.draw(st.integers(1, 50))
    assert_same_neighbours(MAKERS[kind](Array(keys), metric), keys, queries, k, metric)


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("k", [1, 10, 500])
def test_trained_indexes_that_search_all_lists_find_what_brute_force_finds(kind, metric, k):
    generator = np.random.default_rng(0)
    keys = generator.normal(size=(400, 16)).astype(np.float32)
    keys[200:220] = keys[0]  # duplicates
    queries = np.concatenate([keys[:5], generator.normal(size=(5, 16)).astype(np.float32)])
    assert_same_neighbours(TRAINED[kind](Array(keys), metric), keys, queries, k, metric)


@pytest.mark.parametrize("kind", MAKERS)
def test_invalid_searches_are_refused(kind):
    index = MAKERS[kind](Array(np.ones((3, 4))), "l2")
    with pytest.raises(ParameterError, match="k must be at least 1, not 0"):
        index.search(torch.ones(1, 4), 0)
    with pytest.raises(ParameterError, match="width 4"):
        index.search(torch.ones(1, 5), 1)


def test_survivors_are_packed_over_many_blocks(monkeypatch):
    # Enough keys that most of a block is farther than the k-th best, so both ways of merging run.
    ways = []
    original = exact._pack
    monkeypatch.setattr(exact, "_pack", lambda *a: ways.append(1) or original(*a))
    generator = np.random.default_rng(1)
    keys, queries = generator.normal(size=(5000, 8)), generator.normal(size=(20, 8))

    class Blocks(Array):
        def chunks(self, size):
            for first in range(0, self.rows, min(size, 500)):
                yield first, self.data[first : first + min(size, 500)]

    assert_same_neighbours(ExactIndex(Blocks(keys)), keys.astype(np.float32), queries.astype(np.float32), 30, "l2")
    assert ways


def test_distances_stay_right_when_all_keys_are_far_from_zero():
    # |q|² + |k|² - 2q·k would lose every digit here: 3000² · 64 is 6e8, distances are about 1.
    generator = np.random.default_rng(2)
    keys = (3000 + generator.normal(size=(200, 64)) * 0.1).astype(np.float32)
    queries = (3000 + generator.normal(size=(4, 64)) * 0.1).astype(np.float32)
    answer = ExactIndex(Array(keys)).search(torch.from_numpy(queries), 200)
    for query, found in zip(queries, answer.distances.numpy(), strict=True):
        np.testing.assert_allclose(found, np.sort(oracle.distances(query, keys)), rtol=2e-3)


def test_neighbours_stay_right_when_groups_of_keys_share_an_enormous_value():
    generator = np.random.default_rng(3)
    keys = generator.normal(size=(300, 16)).astype(np.float32)
    keys[:, 0] = np.where(np.arange(300) % 2, 30000, -30000)
    queries = keys[:6] + generator.normal(size=(6, 16)).astype(np.float32) * 0.01
    answer = ExactIndex(Array(keys)).search(torch.from_numpy(queries), 20)
    for query, ids, found in zip(queries, answer.ids.numpy(), answer.distances.numpy(), strict=True):
        exact = oracle.distances(query, keys)
        np.testing.assert_allclose(found, exact[ids], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found, np.sort(exact)[:20], rtol=1e-4, atol=1e-4)


def test_keys_that_are_not_finite_are_an_error():
    keys = np.ones((20, 4), np.float32)
    keys[13, 2] = np.nan
    with pytest.raises(IndexInvalid, match="not finite"):
        ExactIndex(Array(keys)).search(torch.ones(1, 4), 3)


def test_rerank_returns_distances_of_the_vectors_rather_than_of_their_codes():
    generator = np.random.default_rng(4)
    keys = generator.normal(size=(600, 16)).astype(np.float32)
    queries = generator.normal(size=(8, 16)).astype(np.float32)
    codes = FaissIndex.build(Array(keys), "PQ4x4")
    coarse = codes.search(torch.from_numpy(queries), 10)
    fine = RerankedIndex(codes, Array(keys), depth=4).search(torch.from_numpy(queries), 10)
    true = np.stack([oracle.distances(query, keys) for query in queries])
    np.testing.assert_allclose(fine.distances, np.take_along_axis(true, fine.ids.numpy(), 1), rtol=1e-4)
    wrong = np.abs(coarse.distances.numpy() - np.take_along_axis(true, coarse.ids.numpy(), 1))
    assert wrong.mean() > 0.5
    # A deeper shortlist can only bring nearer neighbours.
    assert fine.distances.sum() <= np.take_along_axis(true, coarse.ids.numpy(), 1).sum() + 1e-3


@pytest.mark.parametrize("spec", ["nonsense", "IVF4,PQ5", "PQ"])
def test_invalid_factory_string_is_named(spec):
    with pytest.raises(ParameterError, match=spec):
        FaissIndex.build(Array(np.random.default_rng(0).normal(size=(300, 16))), spec)


def test_index_with_more_lists_than_keys_is_an_error():
    with pytest.raises(ParameterError, match=r"cannot be trained on 50 keys"):
        FaissIndex.build(Array(np.random.default_rng(0).normal(size=(50, 8))), "IVF512,Flat")


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_self_check_passes_sound_indexes_and_refuses_those_of_other_keys(metric):
    generator = np.random.default_rng(5)
    keys = generator.normal(size=(2000, 16)).astype(np.float32)
    for index in (ExactIndex(Array(keys), metric=metric), FaissIndex.build(Array(keys), "IVF16,PQ8", metric=metric)):
        check_index(index, Array(keys), what="it")
        shuffled = keys[generator.permutation(len(keys))]
        with pytest.raises(IndexInvalid, match=r"it belongs to other keys"):
            check_index(index, Array(shuffled), what="it")
        with pytest.raises(IndexInvalid, match="beyond the 500"):
            check_index(index, Array(keys[:500]), what="it")


@pytest.mark.parametrize(("far", "spec"), [(0.7, "Lists64,Blocks256"), (200.0, "IVF256,SQfp16")])
def test_auto_falls_back_where_int8_cannot_separate_neighbours(tmp_path, far, spec):
    # Keys in clusters that run into one another, or in narrow ones far apart; queries near them.
    generator = np.random.default_rng(7)
    centres = generator.normal(size=(100, 32)) * far
    keys = (centres[generator.integers(0, 100, 21_000)] + generator.normal(size=(21_000, 32))).astype(np.float32)
    queries = torch.from_numpy(keys[:50] + generator.normal(size=(50, 32)).astype(np.float32) * 0.3)
    store = made_store(tmp_path / "memory", keys, np.zeros(21_000, np.int64))
    assert build_index(store) == spec
    with closing(Datastore.open(store.path)) as again:
        found = open_index(again).search(queries, 100).ids
    right = ExactIndex(Array(keys)).search(queries, 100).ids
    recall = np.mean([len(set(a.tolist()) & set(b.tolist())) / 100 for a, b in zip(found, right, strict=True)])
    assert recall > 0.9
    # A spec given by name is not replaced.
    if "SQ" in spec:
        with pytest.raises(IndexInvalid, match="PQ4x4fs"):
            build_index(store, "PCAR8,IVF256,PQ4x4fs")


def test_self_check_refuses_distances_that_descend_or_disagree():
    keys = np.random.default_rng(6).normal(size=(300, 8)).astype(np.float32)

    class Wrong(ExactIndex):
        def search(self, queries, k):
            answer = super().search(queries, k)
            return type(answer)(answer.ids, self.change(answer.distances))

    backwards, scaled = Wrong(Array(keys)), Wrong(Array(keys))
    backwards.change = lambda distances: distances.flip(1)
    scaled.change = lambda distances: distances * 2 + 40
    with pytest.raises(IndexInvalid, match="do not ascend"):
        check_index(backwards, Array(keys), what="it")
    with pytest.raises(IndexInvalid, match="from those of the stored keys"):
        check_index(scaled, Array(keys), what="it")


def test_unreadable_faiss_file_is_named(tmp_path):
    file = tmp_path / "index.faiss"
    file.write_bytes(b"junk" * 100)
    with pytest.raises(IndexInvalid, match=r"index\.faiss is not a readable index"):
        FaissIndex.load(file)
