"""A writer that is killed at any write or moment, or whose disk fails, does not damage a store."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import concurrency as sharing
from helpers.crash import ROWS, Zygote, complaint
from helpers.stores import check_keys, documents
from knnlm.corpus import Document
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.compact import compact
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.remove import removal_report, remove
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError
from knnlm.index.exact import ExactIndex
from knnlm.ingest.build import add, build
from knnlm.io import checksum
from knnlm.maintenance.verify import verify

QUICK = 3  # points of each command that are tried in the quick tests
WAYS = ("float16", "int8", "codes8")  # to store keys
ALL = documents(20)
BEFORE = [ALL[number] for number in (0, 1, 3, 4, 5)]  # d2 was removed, d5 was added
# What there may be when a command was killed, and what there must be when it is through.
STATES = {
    "build": ([ALL[:5]], ALL[:5]),
    "add": ([BEFORE, [*BEFORE, *ALL[6:9]]], [*BEFORE, *ALL[6:9]]),
    "first": ([[], ALL[6:9]], ALL[6:9]),  # to a store without text
    "remove": ([BEFORE, [one for one in BEFORE if one.id != "d3"]], [one for one in BEFORE if one.id != "d3"]),
    "index": ([BEFORE], BEFORE),
    "compact": ([BEFORE], BEFORE),
}


@pytest.fixture(scope="module")
def templates(lm, tmp_path_factory):
    """Return, for each key format, a store with a removed document, an added one and an index built before both."""
    made = {}
    for way in WAYS:
        path = made[way] = tmp_path_factory.mktemp("template") / way
        with closing(build(ALL[:5], path, lm=lm, segment_entries=ROWS, key_format=way)) as store:
            build_index(store, "Flat")
        remove(path, document="d2")
        add(ALL[5:6], path, lm=lm)
        build([], path.with_name("empty"), lm=lm, segment_entries=ROWS, key_format=way).close()
    return made


@pytest.fixture(scope="module")
def template(templates):
    """The one that stores keys as they are."""
    return templates["float16"]


@pytest.fixture(scope="module")
def baseline(lm, tmp_path_factory):
    """The keys and tokens of each document, read baseline."""
    folder = tmp_path_factory.mktemp("baseline")
    found = {}
    for document in ALL[:12]:
        with closing(build([document], folder / document.id, lm=lm)) as store:
            rows = torch.arange(store.entry_count)
            found[f"keys {document.id}"] = store.take(rows).numpy()
            found[f"values {document.id}"] = store.values(rows).numpy()
    return found


def sound(path: Path, baseline: dict[str, np.ndarray]) -> list[str]:
    """Check all files and results of a store, and return the ids of its documents."""
    with closing(Datastore.open(path)) as store:
        with closing(sqlite3.connect(path / "catalog.db")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        for segment in store.segments:
            folder = path / "segments" / f"{segment.id:06d}"
            assert checksum(folder / "keys.npy") == segment.keys_sha256
            assert checksum(folder / "values.npy") == segment.values_sha256
        for row in store.catalog.indexes():
            assert checksum(path / "index" / f"{row.id:06d}" / "index.faiss") == row.sha256
        assert verify(path, deep=True).sound
        ids = [stored.id for stored in store.documents()]
        rows = torch.arange(store.entry_count)
        if not ids:
            assert store.entry_count == 0
            return ids
        keys = np.concatenate([baseline[f"keys {name}"] for name in ids])
        assert store.values(rows).tolist() == np.concatenate([baseline[f"values {name}"] for name in ids]).tolist()
        check_keys(store, keys)
        queries = store.take(rows[::23]) + 0.01
        found, right = open_index(store).search(queries, 3), ExactIndex(store.keys).search(queries, 3)
        np.testing.assert_allclose(found.distances[:, 0], right.distances[:, 0], atol=1e-3)
        return ids


def finished(path: Path) -> bool:
    """Whether a build came to its end."""
    if not (path / "catalog.db").exists():
        return False
    with closing(Catalog.open(path / "catalog.db")) as catalog:
        return catalog.get("state") == "complete"


def names(wanted: list[Document]) -> list[str]:
    return [document.id for document in wanted]


def finish(zygote: Zygote, do: str, path: Path, baseline: dict[str, np.ndarray], way: str = WAYS[0]) -> None:
    """Check after a crash that the store is sound, the same command finishes, and no unused files stay."""
    allowed, right = STATES[do]
    if do == "build" and not finished(path):
        with pytest.raises(DatastoreError, match=r"unfinished build|no catalog.db|no folder"):
            Datastore.open(path)
        ids = None
    else:
        ids = sound(path, baseline)
        assert ids in [names(state) for state in allowed]
    if ids != names(right) or do in ("index", "compact"):
        assert zygote.run(do, path, keys=way) == 0, complaint(path)
    assert sound(path, baseline) == names(right)
    if do == "compact":
        assert removal_report(path).bytes == ()
    if do != "build":  # any later writer removes what the dead one left
        assert zygote.run("add", path, add=[right_number(right)]) == 0, complaint(path)
        with closing(Catalog.open(path / "catalog.db")) as catalog:
            known = {f"{segment.id:06d}" for segment in catalog.segments()}
        assert {entry.name for entry in (path / "segments").iterdir()} == known
        assert not list((path / "index").glob("*.partial"))
        assert not (path / "staging.log").exists()
        assert not list(path.rglob("unencoded.npy"))


def right_number(right: list[Document]) -> int:
    """A document that is there already: to add it changes nothing."""
    return int(right[0].id[1:])


def prepare(do: str, template: Path, path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    if do != "build":
        shutil.copytree(template.with_name("empty") if do == "first" else template, path)
    return path


def spread(total: int, count: int, *, seed: int = 0) -> list[int]:
    """The first and the last point, and some from all over; one where none is asked for."""
    chosen = random.Random(seed).sample(range(1, total + 1), min(max(count, 1), total))
    return sorted({1, total, *chosen}) if count else chosen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("do", STATES)
def test_command_killed_at_some_write_points_loses_nothing_and_finishes(zygote, templates, baseline, tmp_path, do, way):
    path, template = tmp_path / "store", templates[way]
    total = zygote.count(do, prepare(do, template, path), keys=way)
    for point in spread(total, QUICK if way == WAYS[0] else 0, seed=len(way)):
        prepare(do, template, path)
        assert zygote.run(do, path, left=point, keys=way) == -signal.SIGKILL
        finish(zygote, do, path, baseline, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("do", STATES)
def test_command_killed_at_every_write_point_loses_nothing_and_finishes(zygote, templates, baseline, tmp_path, do, way):
    path, template = tmp_path / "store", templates[way]
    for point in range(1, zygote.count(do, prepare(do, template, path), keys=way) + 1):
        prepare(do, template, path)
        assert zygote.run(do, path, left=point, keys=way) == -signal.SIGKILL
        finish(zygote, do, path, baseline, way)


@pytest.mark.parametrize("fail", ["full", "broken", "short"])
@pytest.mark.parametrize("do", STATES)
def test_failing_disk_is_one_error_and_loses_nothing(zygote, template, baseline, tmp_path, do, fail):
    path = tmp_path / "store"
    total = zygote.count(do, prepare(do, template, path))
    for point in random.Random(len(fail)).sample(range(1, total + 1), 2):
        prepare(do, template, path)
        code = zygote.run(do, path, left=point, fail=fail)
        assert code in (0, 1)  # some writes only tidy up
        if code:
            last = complaint(path).strip().splitlines()[-1]
            assert last.startswith("knnlm.errors.Datastore"), complaint(path)
        finish(zygote, do, path, baseline)


def kill_later(zygote: Zygote, do: str, path: Path, way: str, chance: random.Random, longest: float) -> None:
    pid = zygote.start(do, path, keys=way)
    time.sleep(chance.random() * longest)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    zygote.wait(pid)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("do", STATES)
def test_command_killed_at_random_moments_loses_nothing_and_finishes(zygote, templates, baseline, tmp_path, do, way):
    path, template, chance = tmp_path / "store", templates[way], random.Random(1)
    begin = time.monotonic()
    assert zygote.run(do, prepare(do, template, path), keys=way) == 0
    longest = time.monotonic() - begin
    for _ in range(60 if way == WAYS[0] else 20):
        kill_later(zygote, do, prepare(do, template, path), way, chance, longest)
        finish(zygote, do, path, baseline, way)


def share(
    zygote: Zygote, template: Path, baseline: dict[str, np.ndarray], tmp_path: Path, readers: int, seconds: float
) -> None:
    """Let one process write and others read for so long; each checks all that it sees."""
    path = shutil.copytree(template, tmp_path / "store")
    np.savez(path.with_name(sharing.KEYS), **baseline)
    with closing(Datastore.open(path)) as store:
        sharing.note(path, store.generation, [stored.id for stored in store.documents()])
    pids = [zygote.start("write", path, seed=0, seconds=seconds)]
    pids += [zygote.start("read", path, seed=seed, seconds=seconds) for seed in range(1, readers + 1)]
    ended = [zygote.wait(pid) for pid in pids]
    assert ended == [0] * len(pids), complaint(path)
    checks = [path.with_name(f"reader-{seed}").read_text().split() for seed in range(1, readers + 1)]
    assert all(int(count) > 2 for count, _ in checks)
    assert int(path.with_name("writer").read_text()) > 2
    assert max(int(generations) for _, generations in checks) > 1


def test_compaction_waits_for_a_reader_of_old_files(zygote, template, tmp_path):
    path = shutil.copytree(template, tmp_path / "store")
    pid = zygote.start("hold", path)
    while not path.with_name("open").exists():
        time.sleep(0.01)
    remove(path, document="d0")
    assert not compact(path).purged
    path.with_name("go").touch()
    assert compact(path, wait=60).purged
    assert zygote.wait(pid) == 0, complaint(path)
    assert removal_report(path).bytes == ()


def test_readers_see_one_generation_each_while_a_writer_changes_the_store(zygote, template, baseline, tmp_path):
    share(zygote, template, baseline, tmp_path, readers=2, seconds=4)


@pytest.mark.slow
def test_eight_readers_see_one_generation_each_for_a_minute(zygote, template, baseline, tmp_path):
    share(zygote, template, baseline, tmp_path, readers=8, seconds=60)
