"""A shortlist is measured again: which of it, in what order it is read, and what happens to the rest."""

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
from knnlm.index.rerank import Reranked, measure, merge, remeasure


class Watched(Array):
    """Vectors that remember what was read of them."""

    def __init__(self, data):
        super().__init__(data)
        self.reads = []

    def take(self, ids):
        self.reads.append(ids.clone())
        return super().take(ids)


class Given:
    """An index that always gives the same answer, and remembers how much was asked for."""

    def __init__(self, answer, metric="l2"):
        self.answer, self.metric, self.asked = answer, metric, []

    def search(self, queries, k):
        self.asked.append(k)
        rows = len(queries)
        return Neighbours(self.answer.ids[:rows, :k], self.answer.distances[:rows, :k])


def made(rows=500, width=12, queries=9, *, seed=0):
    generator = np.random.default_rng(seed)
    keys = generator.normal(size=(rows, width)).astype(np.float32)
    return keys, generator.normal(size=(queries, width)).astype(np.float32)


def blurred(keys, queries, length, *, metric="l2", seed=1, off=3.0):
    """A shortlist as codes would give it: distances that are off by 3 on average, in the order of what they say."""
    generator = np.random.default_rng(seed)
    exact = np.stack([oracle.distances(query, keys, metric) for query in queries])
    said = exact - off + generator.normal(size=exact.shape) * 0.5
    order = np.argsort(said, axis=1)[:, :length]
    return Neighbours(torch.from_numpy(order), torch.from_numpy(np.take_along_axis(said, order, 1)).float()), exact


def corrected(said, true, measured):
    """What distances should become: the first exact, and the rest moved by what a few that are spread are off by."""
    few = max(1, measured // 8)
    spread = np.round(np.linspace(measured - few, len(said) - 1, few)).astype(int)
    expected = said + np.nanmean((true - said)[spread[spread < np.isfinite(said).sum()]])
    exact = [*range(measured - few), *spread]
    expected[exact] = true[exact]
    return expected


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("measured", [1, 5, 20, 48])
def test_some_are_measured_and_the_rest_is_moved_by_what_those_spread_over_it_are_off_by(metric, measured):
    keys, queries = made()
    shortlist, exact = blurred(keys, queries, 60, metric=metric, off=0.5)
    vectors = Watched(keys)
    answer = Reranked(Given(shortlist, metric), vectors, measured=measured).search(torch.from_numpy(queries), 50)
    for row in range(len(queries)):
        ids, said = shortlist.ids[row].numpy()[:50], shortlist.distances[row].numpy()[:50]
        expected = corrected(said, exact[row][ids], measured)
        if metric == "l2":
            expected = np.maximum(expected, 0)
        np.testing.assert_allclose(answer.distances[row], np.sort(expected), rtol=1e-4, atol=1e-4)
        given = dict(zip(ids.tolist(), expected.tolist(), strict=True))
        claimed = [given[number] for number in answer.ids[row].tolist()]
        np.testing.assert_allclose(claimed, answer.distances[row], rtol=1e-4, atol=1e-4)
    assert (answer.distances.diff(dim=1) >= 0).all()
    few = max(1, measured // 8)
    measured_places = [*range(measured - few), *np.round(np.linspace(measured - few, 49, few)).astype(int)]
    # Nobody else was read, and nobody twice.
    assert torch.cat(vectors.reads).tolist() == sorted(set(shortlist.ids[:, measured_places].flatten().tolist()))


def test_moved_distances_are_nearer_to_the_truth_than_those_of_codes():
    keys, queries = made(rows=3000)
    codes = FaissIndex.build(Array(keys), "PQ3x4")
    asked = torch.from_numpy(queries)
    truth = np.stack([oracle.distances(query, keys) for query in queries])

    def error(index):
        found = index.search(asked, 200)
        return np.abs(np.take_along_axis(truth, found.ids.numpy(), 1) - found.distances.numpy())[:, 40:].mean()

    assert error(Reranked(codes, Array(keys), measured=40)) < 0.8 * error(codes)


def test_a_short_answer_is_measured_completely_and_chosen_from_a_longer_list():
    keys, queries = made()
    shortlist, exact = blurred(keys, queries, 400)
    index = Given(shortlist)
    answer = Reranked(index, Array(keys), measured=64).search(torch.from_numpy(queries), 10)
    assert index.asked == [64]
    best = np.sort(np.take_along_axis(exact, shortlist.ids.numpy()[:, :64], 1), axis=1)[:, :10]
    np.testing.assert_allclose(answer.distances, best, rtol=1e-4)


def test_with_everything_measured_distances_are_those_of_the_vectors():
    keys, queries = made()
    shortlist, exact = blurred(keys, queries, 300)
    index = Given(shortlist)
    answer = Reranked(index, Array(keys), depth=3, measured=None).search(torch.from_numpy(queries), 100)
    assert index.asked == [300]
    best = np.sort(np.take_along_axis(exact, shortlist.ids.numpy(), 1), axis=1)[:, :100]
    np.testing.assert_allclose(answer.distances, best, rtol=1e-4)


@pytest.mark.parametrize("there", [0, 3, 7, 8, 9, 11])
def test_missing_neighbours_stay_missing_and_change_nothing(there):
    keys, queries = made()
    shortlist, exact = blurred(keys, queries, 12)
    shortlist.ids[:, there:], shortlist.distances[:, there:] = -1, torch.inf
    answer = Reranked(Given(shortlist), Array(keys), measured=8).search(torch.from_numpy(queries), 12)
    assert (answer.ids[:, there:] == -1).all()
    assert (answer.distances[:, there:] == torch.inf).all()
    for row in range(len(queries)):
        ids, said = shortlist.ids[row].numpy(), shortlist.distances[row].numpy()
        true = np.where(ids < 0, np.inf, exact[row][ids])
        # Seven places and the eighth, the only one that is spread, are measured.
        off = true[7] - said[7] if there > 7 else 0
        expected = np.concatenate([true[:8], np.maximum(said[8:] + off, 0)])
        np.testing.assert_allclose(answer.distances[row], np.sort(expected), rtol=1e-4, atol=1e-4)


def test_vectors_are_read_once_in_the_order_of_their_numbers_and_in_pieces(monkeypatch):
    monkeypatch.setattr("knnlm.index.rerank._ROWS", 50)
    keys, queries = made(queries=20)
    vectors = Watched(keys)
    ids = torch.from_numpy(np.random.default_rng(2).integers(-1, 500, size=(20, 17)))
    found = measure(vectors, torch.from_numpy(queries), ids, metric="l2")
    read = torch.cat(vectors.reads)
    assert read.tolist() == sorted(set(ids.flatten().tolist()))  # each once, whoever asks for it
    assert max(len(one) for one in vectors.reads) == 50
    exact = np.stack([oracle.distances(query, keys) for query in queries])
    expected = np.where(ids.numpy() < 0, np.inf, np.take_along_axis(exact, ids.clamp(min=0).numpy(), 1))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_measuring_nothing_gives_nothing():
    keys, queries = made()
    for shape in ((0, 4), (len(queries), 0)):
        asked = torch.from_numpy(queries[: shape[0]])
        found = remeasure(Array(keys), asked, torch.zeros(shape, dtype=torch.int64), metric="l2")
        assert found.ids.shape == found.distances.shape == shape


numbers = st.one_of(st.integers(-3, 3).map(float), st.just(float("inf")))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_merging_is_sorting(data):
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
        said = dict(zip(names[row].tolist(), both[row].tolist(), strict=True))
        assert [said[name] for name in merged.ids[row].tolist()] == merged.distances[row].tolist()
        assert len(set(merged.ids[row].tolist())) == merged.ids.shape[1]
