"""What the driver of a search decides when processes die, hang or are slow; with threads in place of Ray's actors."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
import torch

from helpers.search_ray import ActorDiedError, FakeRay, RayTaskError
from helpers.stores import made_store
from knnlm.cluster import search as module
from knnlm.cluster.search import RemoteSearchOptions, RemoteShards
from knnlm.cluster.search_actor import ShardBehind
from knnlm.datastore.indexes import open_index
from knnlm.datastore.shards import join_shards
from knnlm.datastore.store import Datastore
from knnlm.errors import ClusterError, DatastoreCorrupt


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    generator = np.random.default_rng(0)
    keys, values = generator.normal(size=(60, 4)).astype(np.float32), generator.integers(0, 9, 60)
    for number in range(2):
        own = slice(30 * number, 30 * number + 30)
        made_store(folder / f"part-{number}", keys[own], values[own], vocab_size=9, first_id=number).close()
    join_shards([folder / "part-0", folder / "part-1"], folder / "whole")
    with closing(Datastore.open(folder / "whole")) as opened:
        yield opened


QUERIES = torch.from_numpy(np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32))


@pytest.fixture
def start(store, monkeypatch):
    """Returns a function that opens the store, and returns the fake Ray, the actors and the index."""
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(module, "_PING_SECONDS", 0.1)

    def opened(**options):
        ray = FakeRay()
        shards = RemoteShards(ray, RemoteSearchOptions(**{"timeout": 1.0, **options}))
        return ray, shards, shards.open_index(store)

    return opened


def check(index, store):
    found, expected = index.search(QUERIES, 7), open_index(store).search(QUERIES, 7)
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.distances, expected.distances)


def test_replicas_take_turns(start, store):
    ray, _, index = start(replicas=3)
    for _ in range(9):
        check(index, store)
    assert len(ray.actors) == 6
    assert {actor.calls for actor in ray.actors} <= {3, 4}


def test_lost_call_is_repeated_by_another_replica(start, store):
    ray, shards, index = start(replicas=2)
    broken = ray.actors[0]

    def fail(actor, _):
        if actor is broken:
            raise ActorDiedError

    ray.fail = fail
    for _ in range(4):
        check(index, store)
    assert shards.status.retries


def test_actor_that_never_returns_is_replaced(start, store):
    ray, shards, index = start(timeout=5.0)
    broken = ray.actors[1]

    def fail(actor, _):
        if actor is broken:
            raise ActorDiedError

    ray.fail = fail
    check(index, store)
    assert len(ray.actors) == 3
    assert shards.status.retries == 5


def test_shard_that_is_behind_is_asked_again(start, store):
    ray, _, index = start()
    asked = Counter()

    def fail(actor, _):
        asked[id(actor)] += 1
        if asked[id(actor)] < 4:
            raise RayTaskError(ShardBehind("not yet"))

    ray.fail = fail
    check(index, store)


def test_errors_of_a_shard_are_raised_as_they_are(start):
    ray, _, index = start()
    for error, expected, message in (
        (DatastoreCorrupt("keys.npy: checksum mismatch"), DatastoreCorrupt, "checksum mismatch"),
        (ZeroDivisionError("a bug"), ClusterError, "part-0 failed: ZeroDivisionError: a bug"),
    ):

        def fail(actor, _, error=error):
            if actor is ray.actors[0]:
                raise RayTaskError(error)

        ray.fail = fail
        with pytest.raises(expected, match=message):
            index.search(QUERIES, 7)


def test_slow_shard_is_not_restarted_and_returns_by_itself(start, store):
    """It answers whether it works, as a process does that opens a large shard."""
    ray, shards, index = start(timeout=0.2)
    slow, ready = ray.actors[1], threading.Event()

    def fail(actor, _):
        if actor is slow:
            ready.wait(10)

    ray.fail = fail
    for _ in range(3):
        begin = time.monotonic()
        with pytest.raises(ClusterError, match="part-1 cannot be reached"):
            index.search(QUERIES, 7)
    assert time.monotonic() - begin < 0.1  # only the first search waits for it
    assert not ray.killed
    assert [*shards.status.unreachable] == [str(store.shards[1].path)]
    ready.set()
    slow.pool.submit(int).result()
    time.sleep(0.05)
    check(index, store)
    assert not shards.status.unreachable


def test_hanging_shard_is_restarted(start, store):
    ray, shards, index = start(timeout=0.2)
    hanging, ready = ray.actors[0], threading.Event()
    hanging.stopped.set()

    def fail(actor, _):
        if actor is hanging:
            ready.wait(10)

    ray.fail = fail
    with pytest.raises(ClusterError, match=r"part-0 cannot be reached: it has not answered within 0\.2 seconds"):
        index.search(QUERIES, 7)
    assert ray.killed == [(hanging, False)]
    assert shards.status.timeouts == 1
    ready.set()
    time.sleep(0.05)
    check(index, store)


def test_states_that_no_index_uses_are_closed(start, store):
    ray, shards, index = start()
    other = shards.open_index(store, metric="ip")
    del index
    check_open(ray, 1)
    other.search(QUERIES, 3)
    check_open(ray, 1)
    del other
    last = shards.open_index(store)
    del last
    shards._release()
    for actor in ray.actors:
        actor.pool.shutdown()
    check_open(ray, 0)


def check_open(ray, count):
    assert [len(actor.inner._shards) for actor in ray.actors] == [count, count]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 0.5}, "has 0 GPUs, which are too few for 2 processes that search with 0.5 each"),
        ({"replicas": 11}, "has 2 cores, which are too few for 22 processes that search"),
    ],
)
def test_more_processes_than_the_cluster_has_room_for_are_an_error_at_once(store, options, message):
    ray = FakeRay()
    with pytest.raises(ClusterError, match=message):
        RemoteShards(ray, RemoteSearchOptions(**options)).open_index(store)
    assert not ray.actors
