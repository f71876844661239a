"""Exact search: ties in the order of ids, and shards that compute the bits of the whole."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.vectors import RecordingArray
from knnlm.index import exact
from knnlm.index.base import Neighbours, order_ties
from knnlm.index.exact import BruteForceSearch, ExactIndex, Whole, find_centre, search_precisely
from knnlm.index.packed import merge_shards


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("k", [1, 7, 400])
def test_equal_distances_are_in_the_order_of_ids(metric, k, monkeypatch):
    """Keys and queries of small integers, whose distances are exact, in several blocks."""
    monkeypatch.setattr(exact, "_BLOCK", 64)
    generator = np.random.default_rng(k)
    keys, queries = (generator.integers(-1, 2, (rows, 4)).astype(np.float32) for rows in (300, 20))
    keys[64:128] = keys[0]  # a block of one distance
    found = ExactIndex(RecordingArray(keys), metric=metric).search(torch.from_numpy(queries), k)
    distances = -queries @ keys.T if metric == "ip" else ((queries[:, None] - keys) ** 2).sum(2)
    for row, own in enumerate(distances):
        expected = np.lexsort((np.arange(300), np.round(own, 3)))[:k]
        assert found.ids[row, : len(expected)].tolist() == expected.tolist()


@pytest.mark.parametrize("metric", ["l2", "ip"])
@settings(max_examples=25)
@given(data=st.data())
def test_shards_compute_the_bits_of_the_whole(metric, data):
    """Any split, also where distances are imprecise in float32, and where most of them are ties."""
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows, kind, k = data.draw(st.integers(1, 300)), data.draw(st.sampled_from("rtf")), data.draw(st.integers(1, 50))
    keys = generator.normal(size=(rows, 9)).astype(np.float32)
    if kind == "t":
        keys = generator.integers(-1, 2, (rows, 9)).astype(np.float32)
    elif kind == "f":  # groups that are far apart
        keys += generator.integers(0, 3, (rows, 1)).astype(np.float32) * 3e4
    queries = torch.from_numpy(keys[generator.integers(0, rows, 11)] + np.float32(0.1))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, max(1, rows - 1)), max_size=4)) - {rows}), rows]
    before, exact._BLOCK = exact._BLOCK, 64
    try:
        one = ExactIndex(RecordingArray(keys), metric=metric).search(queries, k)
        centre, count = find_centre(RecordingArray(keys), metric), min(k, rows)
        parts = [
            BruteForceSearch(
                RecordingArray(keys[begin:end]), metric=metric, keep=bool(begin % 2), whole=Whole(begin, rows, centre)
            )
            for begin, end in pairwise(cuts)
        ]

        def nearest(own, dtype):
            own_cuts = zip(parts, pairwise(cuts), strict=True)
            found = [part.nearest(own, min(count, end - begin), dtype) for part, (begin, end) in own_cuts]
            return merge_shards(found, [0] * len(found), count), max(part.max_square for part in parts)

        found = search_precisely(nearest, queries, centre, metric=metric)
    finally:
        exact._BLOCK = before
    assert torch.equal(found.ids, one.ids[:, :count])
    assert torch.equal(found.distances, one.distances[:, :count])


def test_missing_neighbours_stay_last_when_ties_are_ordered():
    found = order_ties(
        Neighbours(torch.tensor([[5, 2, 9, -1, -1]]), torch.tensor([[1.0, 1.0, 1.0, torch.inf, torch.inf]]))
    )
    assert found.ids.tolist() == [[2, 5, 9, -1, -1]]
    same = Neighbours(torch.tensor([[2, 5, -1]]), torch.tensor([[1.0, 2.0, torch.inf]]))
    assert order_ties(same) is same


def test_ids_that_do_not_fit_into_32_bits_are_merged():
    first = Neighbours(torch.tensor([[0, 4, -1]]), torch.tensor([[1.0, 3.0, torch.inf]]))
    second = Neighbours(torch.tensor([[0, 7, 2]]), torch.tensor([[1.0, 2.0, 3.0]]))
    for begin in (2**32 - 8, 2**32 - 1, 2**33):
        merged = merge_shards([first, second], [0, begin], 5)
        assert merged.ids.tolist() == [[0, begin, begin + 7, 4, begin + 2]]
        assert merged.distances.tolist() == [[1.0, 1.0, 2.0, 3.0, 3.0]]
