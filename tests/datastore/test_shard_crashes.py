"""A writer of a sharded store that is killed at any write or moment: each document is wholly there or wholly absent."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import replace

import pytest
import torch

from helpers.crash import ROWS, complaint
from helpers.stores import documents
from knnlm.datastore.remove import remove
from knnlm.datastore.shards import join_shards
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError
from knnlm.ingest.build import add, build, build_shard
from knnlm.maintenance.verify import verify

KILLS = int(os.environ.get("KNNLM_KILLS", "100"))  # of each command, at random moments
ALL = documents(20)
STORED = ["d0", "d2", "d3", "d4", "d5", "d6"]  # d1 was removed, d6 was added
REMOVED = ("d0", "d2", "d3")  # from two shards
DOES = ("add", "remove", "compact", "merge")


@pytest.fixture(scope="module")
def template(lm, tmp_path_factory):
    """Three shards with a removed document and an added one."""
    path = tmp_path_factory.mktemp("template") / "whole"
    places = [path / f"part-{number}" for number in (1, 2, 3)]
    first = [replace(one, source="old.txt") if one.id in REMOVED else one for one in ALL[:6]]
    for number, place in enumerate(places, 1):
        build_shard(lambda: iter(first), place, shard=f"{number}/3", lm=lm, segment_entries=ROWS // 2).close()
    join_shards(places, path)
    remove(path, document="d1")
    add(ALL[6:7], path, lm=lm)
    return path


@pytest.fixture(scope="module")
def tokens(lm, tmp_path_factory):
    """The tokens of each document."""
    with closing(build(ALL[:9], tmp_path_factory.mktemp("tokens") / "store", lm=lm)) as store:
        return {stored.id: values_of(store, stored) for stored in store.documents()}


def values_of(store, stored):
    return store.values(torch.arange(stored.first_entry, stored.first_entry + stored.entries)).tolist()


def check(path, tokens):
    """Verify a store, and return the ids of its documents, each of which is whole, and their numbers."""
    assert verify(path, deep=True).problems == (), path
    with closing(Datastore.open(path)) as store:
        found = {stored.id: values_of(store, stored) for stored in store.documents()}
        assert found == {name: tokens[name] for name in found}
        assert store.entry_count == sum(map(len, found.values()))
        numbers = [stored.number for stored in store.documents()]
        assert len(set(numbers)) == len(numbers)
        return sorted(found), {stored.id: stored.number for stored in store.documents()}


def allowed(do):
    """Return what may be stored after a kill, and what must be stored in the end."""
    if do == "add":
        return [STORED, sorted([*STORED, "d7", "d8"])], sorted([*STORED, "d7", "d8"])
    if do == "remove":  # one shard after another
        left = [one for one in STORED if one not in REMOVED]
        return [STORED, ["d2", "d3", *left], left], left
    return [STORED], STORED


def options(do, path):
    found = {"add": {"add": [7, 8]}, "merge": {"out": str(path.with_name("merged"))}}
    return found.get(do, {"source": "old*"} if do == "remove" else {})


def prepare(template, path):
    for place in (path, path.with_name("merged")):
        shutil.rmtree(place, ignore_errors=True)
    return shutil.copytree(template, path)


def finish(zygote, do, path, tokens, before):
    """Check a store after a kill, run the command again, and check the result."""
    states, right = allowed(do)
    found, numbers = check(path, tokens)
    assert found in states
    assert all(numbers[name] == before[name] for name in found if name in before)
    if found != right or do == "compact" or (do == "merge" and not is_complete(path.with_name("merged"))):
        assert zygote.run(do, path, **options(do, path)) == 0, complaint(path)
    found, now = check(path, tokens)
    assert found == right
    assert all(now[name] == before[name] for name in found if name in before)
    assert all(now[name] == numbers[name] for name in found if name in numbers)
    if do == "merge":
        assert check(path.with_name("merged"), tokens)[0] == right


def is_complete(path):
    """Whether there is a store, and not an unfinished one."""
    try:
        Datastore.open(path).close()
    except DatastoreError:
        return False
    return True


def kill_at(zygote, do, path, point, tokens, before):
    assert zygote.run(do, path, left=point, **options(do, path)) == -signal.SIGKILL
    finish(zygote, do, path, tokens, before)


@pytest.mark.parametrize(("do", "share"), [("add", 0.95), ("remove", 0.5)])
def test_change_of_shards_killed_at_a_write_point_loses_nothing_and_finishes(
    zygote, template, tokens, tmp_path, do, share
):
    path, (_, before) = tmp_path / "whole", check(template, tokens)
    total = zygote.count(do, prepare(template, path), **options(do, path))
    kill_at(zygote, do, prepare(template, path), int(share * total), tokens, before)


@pytest.mark.slow
@pytest.mark.parametrize("do", DOES)
def test_change_of_shards_killed_at_every_write_point_loses_nothing_and_finishes(
    zygote, template, tokens, tmp_path, do
):
    path, (_, before) = tmp_path / "whole", check(template, tokens)
    for point in range(1, 1 + zygote.count(do, prepare(template, path), **options(do, path))):
        kill_at(zygote, do, prepare(template, path), point, tokens, before)


def seconds_of(zygote, do, path):
    begin = time.monotonic()
    assert zygote.run(do, path, **options(do, path)) == 0
    return time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("do", DOES)
def test_change_of_shards_killed_at_random_moments_loses_nothing_and_finishes(zygote, template, tokens, tmp_path, do):
    seed = int(os.environ.get("KNNLM_SEED", random.randrange(1 << 32)))
    chance, path, (_, before) = random.Random(seed), tmp_path / "whole", check(template, tokens)
    longest, ended = min(seconds_of(zygote, do, prepare(template, path)) for _ in range(3)), Counter()
    for number in range(KILLS):
        pid = zygote.start(do, prepare(template, path), **options(do, path))
        time.sleep(chance.random() * longest)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        ended[zygote.wait(pid)] += 1
        try:
            finish(zygote, do, path, tokens, before)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, kill {number}") from error
    print(f"{do}: {dict(ended)}")  # noqa: T201
