"""Shards return fewer neighbours than they find, and the result is that of all neighbours."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.search_ray import FakeRay
from helpers.stores import made_store
from knnlm.cluster import search as module
from knnlm.cluster.search import RemoteSearchOptions, RemoteShards, ReturnedNeighbours, whole_groups
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.shards import join_shards
from knnlm.datastore.store import Datastore
from knnlm.index.base import Neighbours
from knnlm.index.composite import ShardedIndex

QUERIES = torch.from_numpy(np.random.default_rng(1).normal(size=(700, 4)).astype(np.float32))  # more than one product


class Lists:
    """The sorted neighbours of some queries in shards, which are drawn from few distances."""

    def __init__(self, seed, counts, rows, k):
        generator = np.random.default_rng(seed)
        skew = generator.integers(0, 9, len(counts))  # some shards are farther
        first, self.found, self.k, self.asked = 0, [], k, []
        for count, more in zip(counts, skew, strict=True):
            distances = (generator.integers(0, 12, (rows, count)) + more).astype(np.float32)
            order = np.argsort(distances, axis=1, kind="stable")[:, :k]
            distances = np.take_along_axis(distances, order, 1)
            self.found.append(Neighbours(torch.from_numpy(order + first), torch.from_numpy(distances)))
            first += count

    def ask(self, rows, kept):
        self.asked.append((rows, kept))
        rows = slice(None) if rows is None else rows
        return [Neighbours(one.ids[rows][:, :kept], one.distances[rows][:, :kept]) for one in self.found]

    def nearest(self):
        """The k nearest by (distance, id), with NumPy."""
        ids = torch.cat([one.ids for one in self.found], 1).numpy()
        distances = torch.cat([one.distances for one in self.found], 1).numpy()
        order = np.lexsort((ids, distances))[:, : self.k]
        return np.take_along_axis(ids, order, 1), np.take_along_axis(distances, order, 1)


@given(
    seed=st.integers(0, 2**32),
    counts=st.lists(st.integers(1, 90), min_size=2, max_size=6),
    rows=st.integers(0, 150),
    k=st.integers(1, 80),
    together=st.sampled_from([1, 4, 64]),
)
def test_result_is_that_of_all_neighbours(seed, counts, rows, k, together):
    lists = Lists(seed, counts, rows, k)
    found = ReturnedNeighbours(len(counts), together=together).nearest(lists.ask, k)
    ids, distances = lists.nearest()
    there = ids.shape[1]
    assert np.array_equal(found.ids[:, :there], ids)
    assert np.array_equal(found.distances[:, :there], distances)
    assert (found.ids[:, there:] == -1).all()
    assert (found.distances[:, there:] == torch.inf).all()
    assert len(lists.asked) <= 2


def test_shards_are_asked_again_about_queries_that_could_change():
    distances = torch.arange(40.0).repeat(3, 1)
    near, far = distances, distances + torch.tensor([[100.0], [0.5], [100.0]])  # only of query 1, both have some
    asked = []

    def ask(rows, kept):
        asked.append((rows, kept))
        rows = torch.arange(3) if rows is None else rows
        ids = torch.arange(kept).expand(len(rows), -1)
        return [Neighbours(ids, near[rows, :kept]), Neighbours(ids + 40, far[rows, :kept])] + [
            Neighbours(torch.full_like(ids, -1), torch.full(ids.shape, torch.inf)) for _ in range(2)
        ]

    returned = ReturnedNeighbours(4)
    found = returned.nearest(ask, 38)
    assert [(rows is None, kept) for rows, kept in asked] == [(True, 35), (False, 38)]
    assert asked[1][0].tolist() == [0, 2]
    assert torch.equal(found.ids[0], torch.arange(38))
    assert found.ids[1, :4].tolist() == [0, 40, 1, 41]
    returned.nearest(ask, 38)  # more than a tenth was asked again: all are returned at once
    assert [kept for _, kept in asked[2:]] == [38]


@given(st.sets(st.integers(0, 40)), st.integers(1, 9), st.integers(0, 41))
def test_whole_groups_are_those_of_the_rows(rows, size, count):
    rows = {row for row in rows if row < count}
    expected = [row for row in range(count) if any(row // size == other // size for other in rows)]
    assert whole_groups(torch.tensor(sorted(rows), dtype=torch.int64), size, count).tolist() == expected


@pytest.fixture(params=["exact", "Lists8,Blocks8"])
def store(request, tmp_path):
    """Five shards, most of whose keys are near different queries."""
    generator = np.random.default_rng(0)
    parts = []
    for number in range(5):
        keys = generator.normal(size=(400, 4)).astype(np.float32) * 0.5 + generator.normal(size=4).astype(np.float32)
        parts.append(tmp_path / f"part-{number}")
        made_store(parts[-1], keys, generator.integers(0, 9, 400), vocab_size=9, first_id=number).close()
    join_shards(parts, tmp_path / "whole")
    if request.param != "exact":
        with closing(Datastore.open(tmp_path / "whole")) as opened:
            build_index(opened, request.param)
    with closing(Datastore.open(tmp_path / "whole")) as opened:
        yield opened


@pytest.mark.parametrize("rows", [1, 3, 700])
def test_remote_search_is_that_of_one_process(store, rows, monkeypatch):
    monkeypatch.setattr(module, "_MORE_RETURNED", 0)
    monkeypatch.setattr(module, "_FIRST_SHARE", 1.0)
    ray = FakeRay()
    index = RemoteShards(ray, RemoteSearchOptions(timeout=20.0)).open_index(store)
    asked = []
    ray.before = lambda _path, method: asked.append(method)
    if store.catalog.indexes():
        firsts = np.cumsum([0, *(shard.key_count for shard in store.shards[:-1])]).tolist()
        local = ShardedIndex([open_index(shard) for shard in store.shards], firsts, rows=store.key_count)
    else:
        local = open_index(store)
    expected = local.search(QUERIES[:rows], 50)
    for _ in range(4):
        asked.clear()
        found = index.search(QUERIES[:rows], 50)
        assert torch.equal(found.ids, expected.ids)
        assert torch.equal(found.distances, expected.distances)
    # Shards that are asked again too often return all at once.
    searches = [method for method in asked if method in ("nearest", "search", "search_blocks")]
    assert len(searches) == 5
