"""Search of shards in actors of a real cluster: the neighbours of one store, and errors instead of wrong answers."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise

import fsspec
import httpx
import numpy as np
import pytest
import torch
from ray import cloudpickle

from helpers.cli import failure, knnlm
from helpers.s3 import BUCKET, s3_server
from helpers.server import serving
from helpers.stores import documents, made_store
from knnlm.cluster.connection import connected
from knnlm.cluster.search import RemoteExactIndex, RemoteIndex, RemoteSearchOptions, RemoteShards
from knnlm.corpus import Document
from knnlm.datastore.compact import compact
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.remote import push_shard
from knnlm.datastore.remove import remove
from knnlm.datastore.shards import join_shards
from knnlm.datastore.store import Datastore
from knnlm.errors import ClusterError, DatastoreCorrupt, KnnlmWarning, ParameterError, ShardChanged
from knnlm.index.composite import ShardedIndex
from knnlm.ingest.build import add, build_shard
from knnlm.maintenance.merge import merge
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions

DOCUMENTS = documents(10)
HELD_OUT = documents(2, words=30, start=50)
KILLS = int(os.environ.get("KNNLM_KILLS", "100"))
STORAGES = ("float16", "float32", "int8", "pca16-int8", "codes8")


@pytest.fixture(scope="module")
def ray(cluster):
    with connected(cluster.address) as connection:
        yield connection


@contextmanager
def started(ray, **options):
    shards = RemoteShards(ray, RemoteSearchOptions(**{"workers": 2, "timeout": 60.0, **options}))
    try:
        yield shards
    finally:
        shards.close()


@pytest.fixture(scope="module")
def shards(ray):
    """Two processes that hold the shards of all stores."""
    with started(ray) as made:
        yield made


@pytest.fixture
def quick(shards, monkeypatch):
    """The same processes with a short timeout."""
    monkeypatch.setattr(shards, "options", replace(shards.options, timeout=1.5))
    yield shards
    monkeypatch.setattr(shards, "options", replace(shards.options, timeout=60.0, allow_missing=False))
    shards.pids()  # the processes are there again


@pytest.fixture(scope="module")
def parts(lm, tmp_path_factory):
    """Five shards of float16 keys."""
    return build_shards(tmp_path_factory.mktemp("parts"), lm, "float16")


def build_shards(folder, lm, key_format):
    paths = [folder / f"part-{number}" for number in range(1, 6)]
    for number, path in enumerate(paths, 1):
        like = Datastore.open(paths[0]) if number > 1 else None
        options = {"key_format": key_format, "segment_entries": 200, "like": like}
        build_shard(lambda: iter(DOCUMENTS), path, shard=f"{number}/5", lm=lm, **options).close()
    return paths


@pytest.fixture
def store_path(parts, tmp_path):
    """Five shards in one folder, which may be changed."""
    copies = [shutil.copytree(part, tmp_path / "whole" / part.name) for part in parts]
    join_shards(copies, tmp_path / "whole")
    return tmp_path / "whole"


def queries_of(store):
    keys = store.take(torch.linspace(0, store.key_count - 1, 40).long())
    return keys + torch.tensor([0.0, 0.25]).repeat(len(keys))[: len(keys), None]


def check_equal(shards, path, one_path, lm=None):
    """Neighbours, distances and perplexity of a store whose shards are in actors are those of one store."""
    with closing(Datastore.open(path)) as store, closing(Datastore.open(one_path)) as one:
        queries = queries_of(one)
        for metric in ("l2", "ip"):
            index = shards.open_index(store, metric=metric)
            assert isinstance(index, RemoteExactIndex)
            for k in (1, 13, 5000):
                ours, theirs = index.search(queries, k), open_index(one, metric=metric).search(queries, k)
                assert torch.equal(ours.ids, theirs.ids)
                assert torch.equal(ours.distances, theirs.distances)
    if lm is not None:
        options = MixtureOptions(open_index=shards.open_index)
        ours = Mixture.open(path, lm, memories="knn,ngram", options=options).evaluate(HELD_OUT)
        assert ours.perplexity == Mixture.open(one_path, lm, memories="knn,ngram").evaluate(HELD_OUT).perplexity


@pytest.mark.parametrize("key_format", STORAGES)
def test_neighbours_and_perplexity_are_those_of_one_store(key_format, shards, parts, lm, tmp_path):
    five = parts if key_format == "float16" else build_shards(tmp_path, lm, key_format)
    for name, own in (("one", five), ("first", five[:2]), ("second", five[2:])):
        merge(own, tmp_path / name)
    for number, paths in enumerate(([tmp_path / "one"], [tmp_path / "first", tmp_path / "second"], five)):
        join_shards(paths, tmp_path / f"sharded-{number}")
        check_equal(shards, tmp_path / f"sharded-{number}", tmp_path / "one", lm if number == 2 else None)
    check_equal(shards, tmp_path / "one", tmp_path / "one")  # an ordinary store is one shard


def test_neighbours_are_those_of_one_store_after_changes(shards, store_path, lm, tmp_path):
    for name, change in (
        ("added", lambda: add(documents(2, start=30), store_path, lm=lm)),
        ("removed", lambda: remove(store_path, where="source=text.jsonl:3")),
        ("compacted", lambda: compact(store_path)),
    ):
        change()
        merge([store_path], tmp_path / name)
        check_equal(shards, store_path, tmp_path / name, lm)


@pytest.mark.parametrize("seed", range(3))
def test_ties_are_broken_by_entry_over_shards(seed, shards, tmp_path):
    """Keys of few values, more of them than are compared at once, and splits at any place."""
    generator = np.random.default_rng(seed)
    keys, values = generator.integers(-1, 2, (9000, 5)).astype(np.float32), generator.integers(0, 9, 9000)
    cuts = [0, *np.sort(generator.choice(np.arange(1, 9000), 3, replace=False)).tolist(), 9000]
    made_store(tmp_path / "one", keys, values, vocab_size=9).close()
    paths = [tmp_path / f"from-{begin}" for begin in cuts[:-1]]
    for number, (begin, end) in enumerate(pairwise(cuts)):
        options = {"vocab_size": 9, "first_id": number}
        made_store(paths[number], keys[begin:end], values[begin:end], **options).close()
    join_shards(paths, tmp_path / "whole")
    check_equal(shards, tmp_path / "whole", tmp_path / "one")


def test_indexes_of_shards_are_searched_in_their_actors(shards, store_path, lm):
    with closing(Datastore.open(store_path)) as store:
        build_index(store, "Lists2,Blocks16")
    add(documents(1, start=40), store_path, lm=lm)  # keys that the index of one shard lacks
    remove(store_path, document="d3")
    with closing(Datastore.open(store_path)) as store:
        firsts = np.cumsum([0, *(shard.key_count for shard in store.shards[:-1])]).tolist()
        local = ShardedIndex([open_index(shard) for shard in store.shards], firsts, rows=store.key_count)
        index, queries = shards.open_index(store), queries_of(store)
        assert isinstance(index, RemoteIndex)
        assert index.rows == store.key_count
        for k in (1, 20, 5000):
            ours, theirs = index.search(queries, k), local.search(queries, k)
            assert torch.equal(ours.ids, theirs.ids)
            assert torch.equal(ours.distances, theirs.distances)


def test_search_is_answered_from_the_generation_that_it_names(shards, store_path, lm):
    with closing(Datastore.open(store_path)) as before:
        index, queries = shards.open_index(before), queries_of(before)
        expected = index.search(queries, 20)
        add(documents(1, start=40), store_path, lm=lm)
        with closing(Datastore.open(store_path)) as after:
            newer = shards.open_index(after)
            assert newer.search(queries, 5000).ids.max() == after.key_count - 1
        assert torch.equal(index.search(queries, 20).ids, expected.ids)
        # A process that has not opened that generation before does not answer from another one.
        os.kill(shards.pids()[0][0], signal.SIGKILL)
        with pytest.raises(ShardChanged, match="was changed: it is in generation 1"):
            index.search(queries, 20)
        assert newer.search(queries, 5000).ids.max() == after.key_count - 1


def test_answer_is_repeated_where_a_shard_has_changed_and_its_process_was_killed(shards, store_path, lm):
    options = MixtureOptions(open_index=shards.open_index)
    mixture = Mixture.open(store_path, lm, memories="knn,ngram", options=options)
    before = mixture.evaluate(HELD_OUT).perplexity
    add(documents(2, start=40), store_path, lm=lm)
    assert mixture.evaluate(HELD_OUT).perplexity == before  # from the state that it has opened
    for pids in shards.pids():
        os.kill(pids[0], signal.SIGKILL)
    after = mixture.evaluate(HELD_OUT).perplexity
    assert after == Mixture.open(store_path, lm, memories="knn,ngram").evaluate(HELD_OUT).perplexity != before


def test_killed_process_is_restarted_and_the_search_repeated(shards, store_path):
    """SIGKILL while searches run: every answer is right."""
    with closing(Datastore.open(store_path)) as store:
        queries = queries_of(store)
        index, expected = shards.open_index(store), open_index(store).search(queries, 20)
        pids, retries = shards.pids(), shards.status.retries
        killer = threading.Timer(0.05, os.kill, (pids[0][0], signal.SIGKILL))
        killer.start()
        until = time.monotonic() + 60
        while shards.status.retries == retries:
            found = index.search(queries, 20)
            assert torch.equal(found.ids, expected.ids)
            assert torch.equal(found.distances, expected.distances)
            assert time.monotonic() < until
        killer.join()
        assert shards.pids()[1] == pids[1]
        assert shards.pids()[0] != pids[0]


def kill_machine(cluster):
    """Kill the raylet of a machine, with which its processes die, and add another machine."""
    nodes = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    cluster.remove_node(random.choice(nodes), allow_graceful=False)
    cluster.add_node(num_cpus=1)


@pytest.mark.slow
def test_kills_at_random_moments_leave_right_answers_or_errors(cluster, shards, store_path):
    """SIGKILL of processes and machines while searches run; none of their answers is wrong."""
    seed = int(os.environ.get("KNNLM_SEED", random.randrange(1 << 32)))
    random.seed(seed)
    made = Counter()
    with closing(Datastore.open(store_path)) as store:
        queries = queries_of(store)
        index, expected = shards.open_index(store), open_index(store).search(queries, 20)

        def search_until(ended):
            while not ended.is_set():
                try:
                    found = index.search(queries, 20)
                except ClusterError:
                    made["errors"] += 1
                    continue
                assert torch.equal(found.ids, expected.ids), f"seed {seed}"
                assert torch.equal(found.distances, expected.distances), f"seed {seed}"
                made["answers"] += 1

        for _ in range(KILLS):
            ended, pids = threading.Event(), [pid for group in shards.pids() for pid in group]
            with ThreadPoolExecutor(2) as pool:
                running = [pool.submit(search_until, ended) for _ in range(2)]
                time.sleep(random.uniform(0, 1))
                target = random.choice(["process", "process", "machine"])
                made[target] += 1
                if target == "process":
                    os.kill(random.choice(pids), signal.SIGKILL)
                else:
                    kill_machine(cluster)
                time.sleep(random.uniform(0, 2))
                ended.set()
                for one in running:
                    one.result(timeout=300)
        assert torch.equal(index.search(queries, 20).ids, expected.ids)
    print(dict(made))  # noqa: T201


@pytest.mark.slow  # twelve seconds, for the start of the process
def test_hanging_process_is_a_timeout_and_is_restarted(quick, store_path):
    with closing(Datastore.open(store_path)) as store:
        queries = queries_of(store)
        index, expected = quick.open_index(store), open_index(store).search(queries, 20)
        os.kill(quick.pids()[1][0], signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(ClusterError, match=r"part-\d cannot be reached: it has not answered within 1.5 seconds"):
            index.search(queries, 20)
        assert 1.4 < time.monotonic() - begin < 10
        assert quick.status.timeouts
        answered, until = None, time.monotonic() + 60
        while answered is None:  # errors at once until the process is there again
            begin = time.monotonic()
            assert begin < until
            try:
                answered = index.search(queries, 20)
            except ClusterError:
                assert time.monotonic() - begin < 10
                time.sleep(0.1)
        assert torch.equal(answered.ids, expected.ids)


def test_missing_shards_are_named_where_they_are_allowed(quick, store_path, lm, monkeypatch):
    """Without shards 2 and 4, neighbours are those of the other shards; the API and the metrics name them."""
    monkeypatch.setattr(quick, "options", replace(quick.options, allow_missing=True))
    options = MixtureOptions(open_index=quick.open_index)
    mixture = Mixture.open(store_path, lm, memories="knn", options=options)
    store, index = mixture.store, mixture.knn.index
    queries, stopped = queries_of(store), quick.pids()[1][0]
    expected = open_index(store).search(queries, store.key_count)
    firsts = np.cumsum([0, *(shard.key_count for shard in store.shards)])
    with serving(mixture) as server:
        body = {"prompt": "the", "max_tokens": 2, "sources": 3}
        assert "missing_shards" not in server.post("/v1/completions", **body)["choices"][0]["knnlm"]
        # Never restarted, so that it stays away.
        monkeypatch.setattr(quick, "check_late", lambda _: None)
        os.kill(stopped, signal.SIGSTOP)
        try:
            with pytest.warns(KnnlmWarning) as warned:
                found = index.search(queries, 10)
            assert [str(one.message).split(" cannot be reached")[0][-6:] for one in warned] == ["part-2", "part-4"]
            for row, ids in enumerate(expected.ids):
                shard = np.searchsorted(firsts, ids.numpy(), side="right") - 1
                kept = ids.numpy()[~np.isin(shard, (1, 3))][:10]
                assert found.ids[row].tolist() == kept.tolist()
            choice = server.post("/v1/completions", **body)["choices"][0]
            assert choice["knnlm"]["missing_shards"] == ["part-2", "part-4"]
            assert server.post("/v1/score", text="the cat sat")["knnlm"]["missing_shards"] == ["part-2", "part-4"]
            rescored = server.post("/v1/rescore", id=choice["knnlm"]["id"], k=1)
            assert rescored["knnlm"]["missing_shards"] == ["part-2", "part-4"]
            neighbours = server.post("/v1/neighbours", prompt="the cat", k=3)
            assert neighbours["missing_shards"] == ["part-2", "part-4"]
            metrics = httpx.get(f"{server.url}/metrics").text
            assert "knnlm_shards 5.0" in metrics
            assert "knnlm_shards_unreachable 2.0" in metrics
            assert "knnlm_degraded_searches_total 0.0" not in metrics
            monkeypatch.setattr(quick, "options", replace(quick.options, allow_missing=False))
            response = httpx.post(f"{server.url}/v1/completions", json=body)
            assert (response.status_code, "cannot be reached" in response.text) == (503, True)
            # Requests that need no search go on.
            server.post("/v1/completions", prompt="the", max_tokens=2, memory={"off": True})
        finally:
            os.kill(stopped, signal.SIGCONT)


def test_searches_beyond_the_limit_wait_and_then_fail(ray, quick, store_path, monkeypatch):
    monkeypatch.setattr(quick, "options", replace(quick.options, timeout=0.3))
    with closing(Datastore.open(store_path)) as store:
        taken = [quick._in_flight.acquire() for _ in range(quick.options.in_flight)]
        try:
            with pytest.raises(ClusterError, match="4 searches of the cluster take too long"):
                quick.open_index(store)
        finally:
            for _ in taken:
                quick._in_flight.release()


def test_document_added_through_a_server_is_found_in_the_next_request(shards, store_path, lm):
    mixture = Mixture.open(store_path, lm, memories="knn", options=MixtureOptions(open_index=shards.open_index))
    with serving(mixture) as server:
        before = server.post("/v1/neighbours", prompt="mat dog", k=5)["neighbours"]
        server.service.documents.add([Document("new", "new", "mat dog " * 20)])
        after = server.post("/v1/neighbours", prompt="mat dog", k=5)["neighbours"]
        assert "new" in {one["document"] for one in after} - {one["document"] for one in before}


def run_in_processes(shards, function, *args):
    """Call a function of this module in the processes that hold shards."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    for group in shards._groups:
        for replica in group:
            shards.ray.get(replica.actor.__ray_call__.remote(function, *args))


def set_environment(_, names):
    os.environ.update(names)


def close_shards(actor):
    actor._shards.clear()


def test_shards_at_urls_are_fetched_by_the_processes_that_hold_them(shards, parts, lm, tmp_path, monkeypatch):
    join_shards(parts, tmp_path / "local")
    with closing(Datastore.open(tmp_path / "local")) as store:
        shards.open_index(store)  # starts the processes
    monkeypatch.setenv("KNNLM_CACHE", str(tmp_path / "driver"))
    with s3_server() as names:
        run_in_processes(shards, set_environment, {**names, "KNNLM_CACHE": str(tmp_path / "machine")})
        urls = [push_shard(part, f"{BUCKET}/{tmp_path.name}/{part.name}").url for part in parts]
        join_shards(urls, tmp_path / "remote")
        assert not (tmp_path / "machine").exists()
        check_equal(shards, tmp_path / "remote", tmp_path / "local", lm)
        assert len(list((tmp_path / "machine" / "shards").iterdir())) == len(parts)
        # A file that is damaged at its URL is an error of the process that fetches it.
        shutil.rmtree(tmp_path / "machine")
        fsspec.filesystem("s3").pipe_file(f"{urls[3]}/segments/000000/keys.npy", b"damaged")
        run_in_processes(shards, close_shards)
        options = MixtureOptions(open_index=shards.open_index)
        with pytest.raises(DatastoreCorrupt, match=r"part-4/segments/000000/keys.npy: checksum mismatch \(SHA-256\)"):
            Mixture.open(tmp_path / "remote", lm, memories="knn", options=options)


def test_commands_search_on_ray(cluster, ray, parts, model_folder, tmp_path, capfd, monkeypatch):
    join_shards(parts, tmp_path / "whole")
    (tmp_path / "text.txt").write_text(HELD_OUT[0].text)
    command = ["eval", tmp_path / "whole", tmp_path / "text.txt", "--model", model_folder, "--json"]
    code, plain, _ = knnlm(capfd, *command)
    assert code == 0
    code, remote, _ = knnlm(capfd, *command, "--ray", cluster.address, "--shard-workers", "1")
    assert code == 0
    drop = [line for line in plain.splitlines() if "second" not in line]
    assert [line for line in remote.splitlines() if "second" not in line] == drop
    monkeypatch.setenv("KNNLM_CACHE", str(tmp_path / "cache"))
    urls = [push_shard(part, f"file://{tmp_path}/bucket/{part.name}").url for part in parts]
    join_shards(urls, tmp_path / "at-urls")
    command[1] = tmp_path / "at-urls"
    code, remote, _ = knnlm(capfd, *command, "--ray", cluster.address, "--shard-workers", "1")
    assert code == 0
    assert [line for line in remote.splitlines() if "second" not in line] == drop
    assert "--allow-missing-shards is for --ray only" in failure(capfd, *command, "--allow-missing-shards")


def test_invalid_options_are_errors():
    for options in ({"replicas": 0}, {"in_flight": 0}, {"timeout": 0.0}, {"gpus": -1.0}, {"workers": 0}):
        with pytest.raises(ParameterError):
            RemoteSearchOptions(**options)
    with pytest.raises(ParameterError, match="--subset"):
        MixtureOptions(subset=3, open_index=open_index)
