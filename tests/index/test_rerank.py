"""Reranking: which neighbours are measured, in which order vectors are read, and how the rest is corrected."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import oracle
from helpers.vectors import Array
from knnlm.index.base import Neighbours
from knnlm.index.faiss import FaissIndex
from knnlm.index.packed import merge_shards
from knnlm.index.rerank import RerankedIndex, exact_distances, merge, rerank


class RecordingArray(Array):
    """Vectors that record what is read."""

    def __init__(self, data):
        super().__init__(data)
        self.reads = []

    def take(self, ids):
        self.reads.append(ids.clone())
        return super().take(ids)


class FixedIndex:
    """An index that always returns the same neighbours, and records how many were requested."""

    def __init__(self, answer, metric="l2"):
        self.answer, self.metric, self.lengths = answer, metric, []

    def search(self, queries, k):
        self.lengths.append(k)
        rows = len(queries)
        return Neighbours(self.answer.ids[:rows, :k], self.answer.distances[:rows, :k])


def random_data(rows=500, width=12, queries=9, *, seed=0):
    generator = np.random.default_rng(seed)
    keys = generator.normal(size=(rows, width)).astype(np.float32)
    return keys, generator.normal(size=(queries, width)).astype(np.float32)


def blurred(keys, queries, length, *, metric="l2", seed=1, off=3.0):
    """A shortlist as codes would give it: distances with a mean error of 3, in ascending order."""
    generator = np.random.default_rng(seed)
    exact = np.stack([oracle.distances(query, keys, metric) for query in queries])
    approximate = exact - off + generator.normal(size=exact.shape) * 0.5
    order = np.argsort(approximate, axis=1)[:, :length]
    return Neighbours(
        torch.from_numpy(order), torch.from_numpy(np.take_along_axis(approximate, order, 1)).float()
    ), exact


def corrected(approximate, true, measured):
    """The expected distances: the first exact, the rest corrected by the mean error of a few spread ones."""
    few = max(1, measured // 8)
    spread = np.round(np.linspace(measured - few, len(approximate) - 1, few)).astype(int)
    expected = approximate + np.nanmean((true - approximate)[spread[spread < np.isfinite(approximate).sum()]])
    exact = [*range(measured - few), *spread]
    expected[exact] = true[exact]
    return expected


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("measured", [1, 5, 20, 48])
def test_some_are_measured_and_the_rest_is_corrected_by_the_mean_error_of_the_spread_ones(metric, measured):
    keys, queries = random_data()
    shortlist, exact = blurred(keys, queries, 60, metric=metric, off=0.5)
    vectors = RecordingArray(keys)
    answer = RerankedIndex(FixedIndex(shortlist, metric), vectors, measured=measured).search(
        torch.from_numpy(queries), 50
    )
    for row in range(len(queries)):
        ids, approximate = shortlist.ids[row].numpy()[:50], shortlist.distances[row].numpy()[:50]
        expected = corrected(approximate, exact[row][ids], measured)
        if metric == "l2":
            expected = np.maximum(expected, 0)
        np.testing.assert_allclose(answer.distances[row], np.sort(expected), rtol=1e-4, atol=1e-4)
        given = dict(zip(ids.tolist(), expected.tolist(), strict=True))
        claimed = [given[number] for number in answer.ids[row].tolist()]
        np.testing.assert_allclose(claimed, answer.distances[row], rtol=1e-4, atol=1e-4)
    assert (answer.distances.diff(dim=1) >= 0).all()
    few = max(1, measured // 8)
    measured_places = [*range(measured - few), *np.round(np.linspace(measured - few, 49, few)).astype(int)]
    # No other vector was read, and none twice.
    assert torch.cat(vectors.reads).tolist() == sorted(set(shortlist.ids[:, measured_places].flatten().tolist()))


def test_corrected_distances_are_more_precise_than_those_of_codes():
    keys, queries = random_data(rows=3000)
    codes = FaissIndex.build(Array(keys), "PQ3x4")
    lengths = torch.from_numpy(queries)
    truth = np.stack([oracle.distances(query, keys) for query in queries])

    def error(index):
        found = index.search(lengths, 200)
        return np.abs(np.take_along_axis(truth, found.ids.numpy(), 1) - found.distances.numpy())[:, 40:].mean()

    assert error(RerankedIndex(codes, Array(keys), measured=40)) < 0.8 * error(codes)


def test_short_result_is_measured_completely_and_chosen_from_a_longer_list():
    keys, queries = random_data()
    shortlist, exact = blurred(keys, queries, 400)
    index = FixedIndex(shortlist)
    answer = RerankedIndex(index, Array(keys), measured=64).search(torch.from_numpy(queries), 10)
    assert index.lengths == [64]
    best = np.sort(np.take_along_axis(exact, shortlist.ids.numpy()[:, :64], 1), axis=1)[:, :10]
    np.testing.assert_allclose(answer.distances, best, rtol=1e-4)


def test_with_everything_measured_distances_are_those_of_the_vectors():
    keys, queries = random_data()
    shortlist, exact = blurred(keys, queries, 300)
    index = FixedIndex(shortlist)
    answer = RerankedIndex(index, Array(keys), depth=3, measured=None).search(torch.from_numpy(queries), 100)
    assert index.lengths == [300]
    best = np.sort(np.take_along_axis(exact, shortlist.ids.numpy(), 1), axis=1)[:, :100]
    np.testing.assert_allclose(answer.distances, best, rtol=1e-4)


@pytest.mark.parametrize("there", [0, 3, 7, 8, 9, 11])
def test_missing_neighbours_stay_missing(there):
    keys, queries = random_data()
    shortlist, exact = blurred(keys, queries, 12)
    shortlist.ids[:, there:], shortlist.distances[:, there:] = -1, torch.inf
    answer = RerankedIndex(FixedIndex(shortlist), Array(keys), measured=8).search(torch.from_numpy(queries), 12)
    assert (answer.ids[:, there:] == -1).all()
    assert (answer.distances[:, there:] == torch.inf).all()
    for row in range(len(queries)):
        ids, approximate = shortlist.ids[row].numpy(), shortlist.distances[row].numpy()
        true = np.where(ids < 0, np.inf, exact[row][ids])
        # Seven places and the eighth, the only one that is spread, are measured.
        off = true[7] - approximate[7] if there > 7 else 0
        expected = np.concatenate([true[:8], np.maximum(approximate[8:] + off, 0)])
        np.testing.assert_allclose(answer.distances[row], np.sort(expected), rtol=1e-4, atol=1e-4)


def test_vectors_are_read_once_in_ascending_order_and_in_batches(monkeypatch):
    monkeypatch.setattr("knnlm.index.rerank._BATCH", 50)
    keys, queries = random_data(queries=20)
    vectors = RecordingArray(keys)
    ids = torch.from_numpy(np.random.default_rng(2).integers(-1, 500, size=(20, 17)))
    found = exact_distances(vectors, torch.from_numpy(queries), ids, metric="l2")
    read = torch.cat(vectors.reads)
    assert read.tolist() == sorted(set(ids.flatten().tolist()))  # each once for all queries
    assert max(len(one) for one in vectors.reads) == 50
    exact = np.stack([oracle.distances(query, keys) for query in queries])
    expected = np.where(ids.numpy() < 0, np.inf, np.take_along_axis(exact, ids.clamp(min=0).numpy(), 1))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_empty_shortlist_is_reranked_to_nothing():
    keys, queries = random_data()
    for shape in ((0, 4), (len(queries), 0)):
        lengths = torch.from_numpy(queries[: shape[0]])
        found = rerank(Array(keys), lengths, torch.zeros(shape, dtype=torch.int64), metric="l2")
        assert found.ids.shape == found.distances.shape == shape


numbers = st.one_of(st.integers(-3, 3).map(float), st.just(float("inf")))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_merge_equals_sorting(data):
    rows, k = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    lists = []
    for _ in range(2):
        count = data.draw(st.integers(0, 8))
        one = [sorted(data.draw(st.lists(numbers, min_size=count, max_size=count))) for _ in range(rows)]
        lists.append(torch.tensor(one).reshape(rows, count))
    ids = [torch.arange(lists[0].numel()).view_as(lists[0]), torch.arange(lists[1].numel()).view_as(lists[1]) + 100]
    merged = merge(Neighbours(ids[0], lists[0]), Neighbours(ids[1], lists[1]), k)
    both, names = torch.cat(lists, 1), torch.cat(ids, 1)
    assert torch.equal(merged.distances, both.sort(dim=1).values[:, :k])
    for row in range(rows):
        approximate = dict(zip(names[row].tolist(), both[row].tolist(), strict=True))
        assert [approximate[name] for name in merged.ids[row].tolist()] == merged.distances[row].tolist()
        assert len(set(merged.ids[row].tolist())) == merged.ids.shape[1]


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.lists(st.integers(0, 12), min_size=1, max_size=4))
def test_shards_are_merged_by_distance_and_number(seed, k, sizes):
    """Few different distances, so that most are ties; against a sort of all in NumPy."""
    generator = np.random.default_rng(seed)
    firsts = [0, *np.cumsum(sizes).tolist()][:-1]
    all_distances = [generator.integers(0, 4, (3, size)).astype(np.float32) for size in sizes]
    found = []
    for distances in all_distances:
        # An index may return equal distances in any order.
        order = np.lexsort((generator.random(distances.shape), distances), axis=1)[:, :k]
        kept = np.sort(distances, 1)[:, :k]
        allowed = np.stack([_first_of_ties(row, order_row) for row, order_row in zip(distances, order, strict=True)])
        missing = ((0, 0), (0, k - kept.shape[1]))
        ids = torch.from_numpy(np.pad(allowed, missing, constant_values=-1))
        found.append(Neighbours(ids, torch.from_numpy(np.pad(kept, missing, constant_values=np.inf))))
    merged = merge_shards(found, firsts, k)
    whole = np.concatenate(all_distances, 1)
    expected = np.argsort(whole, axis=1, kind="stable")[:, :k]
    count = expected.shape[1]
    np.testing.assert_array_equal(merged.ids[:, :count], expected)
    np.testing.assert_array_equal(merged.distances[:, :count], np.take_along_axis(whole, expected, 1))
    assert (merged.ids[:, count:] == -1).all()


def _first_of_ties(distances, order):
    """Return the ids of an order with those of equal distances replaced by the first ones, in the given order."""
    chosen = order.copy()
    for value in np.unique(distances[order]):
        places = np.flatnonzero(distances[order] == value)
        first = np.flatnonzero(distances == value)[: len(places)]
        chosen[places] = first[np.argsort(np.argsort(order[places]))]
    return chosen
