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
from knnlm.cluster import search_actor
from knnlm.cluster.search import RemoteSearchOptions, RemoteShards, ReturnedNeighbours
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.shards import join_shards
from knnlm.datastore.store import Datastore
from knnlm.index.base import Neighbours
from knnlm.index.blocks.index import BlockIndex
from knnlm.index.composite import ShardedIndex
from knnlm.index.exact import BruteForceSearch

WIDTH = 64  # of int8 keys, whose rounding depends on the queries of a batch
QUERIES = torch.from_numpy(
    np.random.default_rng(1).normal(size=(700, WIDTH)).astype(np.float32)
)  # more than one product


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

    def ask(self, returned):
        self.asked.append(returned)
        rows = slice(None) if returned.rows is None else torch.from_numpy(returned.rows)
        own = [
            Neighbours(one.ids[rows][:, : returned.kept], one.distances[rows][:, : returned.kept]) for one in self.found
        ]
        return dict(enumerate(own))

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
)
def test_result_is_that_of_all_neighbours(seed, counts, rows, k):
    lists = Lists(seed, counts, rows, k)
    found = ReturnedNeighbours(dict.fromkeys(range(len(counts)), 0)).nearest(lists.ask, k, rows)
    ids, distances = lists.nearest()
    there = ids.shape[1]
    assert np.array_equal(found.ids[:, :there], ids)
    assert np.array_equal(found.distances[:, :there], distances)
    assert (found.ids[:, there:] == -1).all()
    assert (found.distances[:, there:] == torch.inf).all()
    assert len(lists.asked) <= 2


def near_and_far(queries):
    """What answers for two shards with neighbours and two without; of query 1, both have some of the nearest."""
    distances = torch.arange(40.0).repeat(queries, 1)
    shift = torch.full((queries, 1), 100.0)
    shift[1] = 0.5
    near, far, asked = distances, distances + shift, []

    def ask(returned):
        asked.append(returned)
        rows = torch.arange(queries) if returned.rows is None else torch.from_numpy(returned.rows)
        ids = torch.arange(returned.kept).expand(len(rows), -1)
        nothing = Neighbours(torch.full_like(ids, -1), torch.full(ids.shape, torch.inf))
        found = [(ids, near[rows, : returned.kept]), (ids + 40, far[rows, : returned.kept])]
        return dict(enumerate([*(Neighbours(*one) for one in found), nothing, nothing]))

    return ask, asked


def test_shards_return_all_neighbours_of_queries_that_could_change():
    ask, asked = near_and_far(3)
    found = ReturnedNeighbours(dict.fromkeys(range(4), 0)).nearest(ask, 38, 3)
    assert [(None if one.rows is None else one.rows.tolist(), one.kept) for one in asked] == [(None, 35), ([0, 2], 38)]
    assert torch.equal(found.ids[0], torch.arange(38))
    assert found.ids[1, :4].tolist() == [0, 40, 1, 41]


def test_shard_that_is_missing_when_it_is_asked_again_counts_with_what_it_has_returned():
    ask, asked = near_and_far(3)

    def lose(returned):
        found = ask(returned)
        if len(asked) > 1:
            del found[0]
        return found

    found = ReturnedNeighbours(dict.fromkeys(range(4), 0)).nearest(lose, 38, 3)
    assert found.ids[0, :38].tolist() == [*range(35), 40, 41, 42]  # the last three of shard 0 were not returned
    whole = ReturnedNeighbours(dict.fromkeys(range(4), 0)).nearest(ask, 38, 3)
    assert torch.equal(found.ids[1], whole.ids[1])


def test_more_is_returned_while_calls_are_repeated_and_less_when_they_are_not(monkeypatch):
    monkeypatch.setattr(module, "_CALLS_TO_FORGET", 10)
    ask, asked = near_and_far(3)
    returned = ReturnedNeighbours(dict.fromkeys(range(8), 0))

    def kept(queries, times):
        asked.clear()
        for _ in range(times):
            returned.nearest(ask, 38, queries)
        return [one.kept for one in asked if one.rows is None]

    assert kept(3, 5) == [26, 26, 26, 35, 35]  # two of three queries each time
    assert set(kept(3, 60)) == {35, 38}
    assert kept(3, 2) == [38, 38]  # all: nothing is asked twice
    seldom = ReturnedNeighbours(dict.fromkeys(range(8), 0))
    for number in range(40):
        seldom.nearest(ask if number % 8 == 0 else lambda _: {}, 38, 3)
    asked.clear()
    seldom.nearest(ask, 38, 3)
    assert asked[0].kept == 26


def test_less_is_returned_again_after_many_calls_that_were_not_repeated(monkeypatch):
    monkeypatch.setattr(module, "_CALLS_TO_FORGET", 10)
    ask, _ = near_and_far(3)
    returned, kept = ReturnedNeighbours(dict.fromkeys(range(8), 0)), []
    for _ in range(5):
        returned.nearest(ask, 38, 3)

    def nothing(given):
        kept.append(given.kept)
        return {}

    for _ in range(12):
        returned.nearest(nothing, 38, 3)
    assert kept == [35] * 10 + [26, 26]


@pytest.fixture(params=["exact", "Lists8,Blocks8"])
def store(request, tmp_path):
    """Five shards, most of whose keys are near different queries."""
    generator = np.random.default_rng(0)
    parts = []
    for number in range(5):
        keys = generator.normal(size=(400, WIDTH)).astype(np.float32) + generator.normal(size=WIDTH).astype(np.float32)
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
    for _ in range(17):
        asked.clear()
        found = index.search(QUERIES[:rows], 50)
        assert torch.equal(found.ids, expected.ids)
        assert torch.equal(found.distances, expected.distances)
    # Shards whose calls are repeated too often return more at once.
    searches = [method for method in asked if method in ("nearest", "search", "search_blocks")]
    assert len(searches) == 5


def test_processes_keep_what_they_found_and_find_it_again_after_a_restart(store, monkeypatch):
    monkeypatch.setattr(module, "_MORE_RETURNED", 0)
    monkeypatch.setattr(module, "_FIRST_SHARE", 1.0)
    ray, searched = FakeRay(), []
    index = RemoteShards(ray, RemoteSearchOptions(timeout=20.0)).open_index(store)
    for kind, name in ((BlockIndex, "search_blocks"), (BruteForceSearch, "nearest")):
        monkeypatch.setattr(kind, name, counted(getattr(kind, name), searched))
    whole = index.search(QUERIES, 50)
    assert len(searched) == 5
    assert not any(actor.inner._found for actor in ray.actors)
    asked = []

    def restart(path, method):
        asked.append((path, method))
        if asked.count((path, method)) == 2:
            next(actor for actor in ray.actors if any(state.path == path for state in actor.inner._shards)).restart()

    ray.before = restart
    searched.clear()
    again = index.search(QUERIES, 50)
    assert len(searched) == 10
    assert torch.equal(whole.ids, again.ids)
    assert torch.equal(whole.distances, again.distances)
    for _ in range(40):  # searches whose results nothing more is asked of
        index.search(QUERIES[:1] * 1e-3, 1)
    assert all(len(actor.inner._found) <= 5 for actor in ray.actors)


def counted(method, calls):
    def call(self, *args, **options):
        calls.append(method.__name__)
        return method(self, *args, **options)

    return call


@pytest.mark.parametrize("store", ["Lists8,Blocks8"], indirect=True)
def test_index_is_opened_once_with_as_many_threads_as_there_are_cores_for_each(store, monkeypatch):
    ray, resources = FakeRay(), {"CPU": 1.0}
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    shards, threads = RemoteShards(ray, RemoteSearchOptions(timeout=20.0, replicas=2)), []
    monkeypatch.setattr(search_actor.torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for cores, expected in ((1.0, 1), (19.0, 1), (25.0, 2), (600.0, 3)):
        threads.clear()
        resources["CPU"] = cores
        shards.open_index(store).search(QUERIES[:3], 5)
        assert set(threads) == ({expected} if expected != 3 else set())
    open_indexes = [len(shard.indexes) for actor in ray.actors for shard in actor.inner._shards.values()]
    assert set(open_indexes) == {1}


def test_distances_of_zero_are_equal_to_the_last_bit(tmp_path):
    """-0.0 equals 0.0, but its bits are others."""
    generator = np.random.default_rng(0)
    parts = []
    for number in range(2):
        keys = generator.normal(size=(40, 4)).astype(np.float32)
        keys[:, 0] = 0
        parts.append(tmp_path / f"part-{number}")
        made_store(parts[-1], keys, generator.integers(0, 9, 40), vocab_size=9, first_id=number).close()
    join_shards(parts, tmp_path / "whole")
    queries = torch.zeros(2, 4)
    queries[:, 0] = torch.tensor([1.0, -1.0])
    with closing(Datastore.open(tmp_path / "whole")) as opened:
        own = open_index(opened, metric="ip").search(queries, 30)
        remote = RemoteShards(FakeRay(), RemoteSearchOptions(timeout=20.0)).open_index(opened, metric="ip")
        found = remote.search(queries, 30)
    assert torch.equal(own.ids, found.ids)
    assert torch.equal(own.distances.view(torch.int32), found.distances.view(torch.int32))
