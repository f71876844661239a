"""Builds on a real Ray cluster with separate raylets, whose processes are killed with SIGKILL."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import psutil
import pytest

import knnlm
from helpers.stores import contents, documents
from knnlm.cluster.build import build_on_ray
from knnlm.datastore.manifest import remote_url
from knnlm.datastore.shards import shard_part

DOCUMENTS, SEGMENT, SHARDS = 400, 500, 4
KILLS = int(os.environ.get("KNNLM_KILLS", "100"))  # of the random ones
DRIVER = """
import json
import sys
from functools import partial
import knnlm
address, text, out, model, shards, segment, places = sys.argv[1:]
options = {"model": model, "workers": 2, "shards": int(shards), "segment_entries": int(segment), "index": "Flat"}
options |= json.loads(places)
knnlm.build_on_ray(partial(knnlm.read_documents, text), out, address=address, **options)
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [json.dumps({"id": one.id, "text": f"{one.text} {one.id}"}) for one in documents(DOCUMENTS)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def expected(text, model_folder, tmp_path_factory):
    """The shards of a build without Ray."""
    folder, lm = tmp_path_factory.mktemp("one-machine"), knnlm.open_lm(str(model_folder))
    for number in range(1, SHARDS + 1):
        place, shard = folder / f"{number:04}", f"{number}/{SHARDS}"
        knnlm.build_shard(partial(knnlm.read_documents, str(text)), place, shard=shard, lm=lm, segment_entries=SEGMENT)
    return folder


@pytest.fixture
def start(cluster, text, model_folder):
    """Returns a function that starts the process of a driver."""
    started = []

    def start_driver(out, places=None):
        arguments = [cluster.address, text, out, model_folder, SHARDS, SEGMENT, json.dumps(places or {})]
        command = [sys.executable, "-c", DRIVER, *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start_driver
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def raylet_of(node):
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def workers_of(cluster):
    """The processes that build, of all machines of a cluster."""
    found = []
    for node in cluster.list_all_nodes():
        try:
            children = raylet_of(node).children(recursive=True)
        except (psutil.NoSuchProcess, KeyError):
            continue
        for process in children:
            try:
                title = process.cmdline()
            except psutil.Error:
                continue
            if title and title[0].startswith("ray::BuildWorker"):
                found.append(process)
    return found


def wait_for_segments(out, count, has_ended, *, seconds=120):
    """Wait until the shards of a build have so many segments, or the build has ended."""
    until = time.monotonic() + seconds
    while len(list(out.glob("shards/*/segments/*[0-9]"))) < count and not has_ended():
        assert time.monotonic() < until
        time.sleep(0.02)


def check(store, expected, *, index=None):
    """Compare a store with the shards of a build without Ray: every byte, except those of indexes."""
    names = [(remote_url(shard.path) or shard.path.as_posix()).rpartition("/")[2] for shard in store.shards]
    assert names == sorted(place.name for place in expected.iterdir())
    for name, shard in zip(names, store.shards, strict=True):
        assert {row.spec for row in shard.catalog.indexes()} == (set() if index is None else {index})
        assert {row.entries for row in shard.catalog.indexes()} <= {shard.entry_count}
        assert described(shard.path) == described(expected / name)
    ids = [document.id for document in store.documents()]
    assert ids == [f"d{number}" for number in range(DOCUMENTS)]
    assert knnlm.verify(store.path, deep=True).problems == ()


def described(path):
    """Every file of a store but its index and catalog, and what the catalog lists."""
    with closing(knnlm.Datastore.open(path)) as store:
        catalog = store.catalog
        files = {name: content for name, content in contents(path).items() if not name.startswith("index/")}
        files.pop("catalog.db")
        files.pop("remote.json", None)
        return files, catalog.segments(), list(catalog.documents()), store.fingerprint, shard_part(catalog)


@pytest.mark.slow
def test_a_killed_worker_loses_nothing_and_repeats_nothing(cluster, text, model_folder, expected, tmp_path, capfd):
    capfd.readouterr()
    read, options = partial(knnlm.read_documents, str(text)), {"workers": 2, "shards": SHARDS}
    options |= {"model": str(model_folder), "segment_entries": SEGMENT, "address": cluster.address}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(build_on_ray, read, tmp_path / "out", **options)
        wait_for_segments(tmp_path / "out", 4, running.done)
        workers_of(cluster)[0].kill()
        store = running.result(timeout=120)
    assert capfd.readouterr() == ("", "")
    check(store, expected)


def finish(process, seconds=120):
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, output


@pytest.mark.slow
def test_a_killed_machine_loses_nothing_and_repeats_nothing(cluster, start, expected, tmp_path):
    driver = start(tmp_path / "out")
    wait_for_segments(tmp_path / "out", 4, lambda: driver.poll() is not None)
    kill_machine(cluster)
    finish(driver)
    check(knnlm.Datastore.open(tmp_path / "out"), expected, index="Flat")


@pytest.mark.slow
def test_a_killed_driver_is_continued_by_the_same_command(cluster, start, expected, tmp_path):
    driver = start(tmp_path / "out")
    wait_for_segments(tmp_path / "out", 4, lambda: driver.poll() is not None)
    driver.kill()
    before = {
        file: file.stat().st_mtime_ns
        for file in (tmp_path / "out").glob("shards/*/segments/*[0-9]/*")
        if file.is_file()
    }
    finish(start(tmp_path / "out"))
    assert before
    assert {file: file.stat().st_mtime_ns for file in before} == before
    check(knnlm.Datastore.open(tmp_path / "out"), expected, index="Flat")


def kill_machine(cluster):
    """Kill the raylet of a machine, with which its workers die, and add another machine."""
    nodes = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    cluster.remove_node(random.choice(nodes), allow_graceful=False)
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes(timeout=60)  # a new driver counts the machines


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KNNLM_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_kills_at_random_moments_lose_nothing_and_repeat_nothing(cluster, start, expected, tmp_path):
    seed = int(os.environ.get("KNNLM_SEED", random.randrange(1 << 32)))
    random.seed(seed)
    left, builds, made = KILLS, 0, Counter()
    while left > 0:
        out = tmp_path / f"out{builds}"
        builds += 1
        where = random.choice(["shared", "work folder", "url"])
        places = {"shared": {}, "work folder": {"work_folder": str(tmp_path / "disk")}}
        places["url"] = {"push": f"file://{out}-bucket", **random.choice(list(places.values()))}
        made[where] += 1
        left -= build_with_kills(
            cluster, partial(start, places=places[where]), out, min(left, random.randint(1, 3)), made
        )
        try:
            check(knnlm.Datastore.open(out), expected, index="Flat")
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, build {builds}") from error
        assert not list(out.glob("shards/*.partial"))
        for place in (out, tmp_path / f"{out.name}-bucket", tmp_path / "cache", tmp_path / "disk"):
            shutil.rmtree(place, ignore_errors=True)
    print(f"{dict(made)} in {builds} builds")  # noqa: T201


def replace_dead_machines(cluster):
    """Add a machine for each that has ended by itself, as raylets do that get no processor for seconds."""
    for node in [node for node in cluster.list_all_nodes() if node is not cluster.head_node]:
        if "raylet" not in node.all_processes or not raylet_of(node).is_running():
            cluster.remove_node(node, allow_graceful=False)
            cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes(timeout=60)


def build_with_kills(cluster, start, out, kills, made):
    """Build, and kill so many processes on the way; return how many there were."""
    replace_dead_machines(cluster)
    done, driver = 0, start(out)
    while done < kills:
        until = time.monotonic() + random.uniform(0.0, 9.0)
        while time.monotonic() < until and driver.poll() is None:
            time.sleep(0.01)
        if driver.poll() is not None:
            break
        target = random.choice(["worker", "machine", "driver"])
        if target == "worker":
            if not (workers := workers_of(cluster)):
                continue
            random.choice(workers).kill()
        elif target == "machine":
            kill_machine(cluster)
        else:
            driver.kill()
            driver.communicate()
            replace_dead_machines(cluster)
            driver = start(out)
        done, made[target] = done + 1, made[target] + 1
    output, _ = driver.communicate(timeout=300)
    if driver.returncode and "cores, which are too few for 2 workers" in output:
        # It counted the machines when one was dead.
        replace_dead_machines(cluster)
        made["started again"] += 1
        finish(start(out), seconds=300)
    elif driver.returncode and made["driver"] and "is a finished store already" in output:
        made["finished"] += 1  # the driver before it was killed after its last write
    else:
        assert driver.returncode == 0, output
    return done
