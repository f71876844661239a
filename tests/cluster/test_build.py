"""Builds with workers: what the driver decides, with threads in place of Ray's actors."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import knnlm
from helpers.s3 import BUCKET, s3_server
from helpers.stores import contents, documents
from helpers.thread_ray import ThreadRay
from knnlm.cluster import build as driver
from knnlm.cluster.build import build_on_ray, plan_workers
from knnlm.cluster.build_places import ShardPlaces
from knnlm.cluster.build_worker import BuildWorker, Failure, prepare_process
from knnlm.datastore import remote
from knnlm.datastore.manifest import remote_url
from knnlm.datastore.remote import push_shard
from knnlm.errors import ClusterError, CorpusError, DatastoreBusy, DatastoreError, MissingExtra, ParameterError

OPTIONS = {"segment_entries": 200, "workers": 2, "shards": 3}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.jsonl", documents(30))


def write_text(path, texts):
    lines = [json.dumps({"id": document.id, "text": document.text}) for document in texts]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def one_machine(text, model_folder, tmp_path_factory):
    """The shards of a build without Ray, by key format."""

    def built(key_format):
        folder = tmp_path_factory.mktemp("one-machine")
        lm, like = knnlm.open_lm(str(model_folder)), None
        for number in (1, 2, 3):
            store = knnlm.build_shard(
                partial(knnlm.read_documents, str(text)),
                folder / f"{number:04}",
                shard=f"{number}/3",
                lm=lm,
                like=like,
                key_format=key_format,
                segment_entries=200,
            )
            like = like or (store if key_format != "float16" else None)
        return folder

    return {key_format: built(key_format) for key_format in ("float16", "pca16-int8")}


@pytest.fixture
def start(text, model_folder, tmp_path, monkeypatch):
    """Returns a function that builds with threads; `make` makes a worker."""
    monkeypatch.setattr(driver, "_POLL_SECONDS", 0.01)

    def build(make=BuildWorker, *, text=text, out=tmp_path / "out", model=model_folder, **options):
        ray = ThreadRay(make)
        monkeypatch.setattr(driver, "connected", ray.connected)
        read = partial(knnlm.read_documents, str(text))
        return build_on_ray(read, out, model=str(model), **{**OPTIONS, **options})

    return build


def shards_of(store):
    return {shard.path.name: contents(shard.path) for shard in store.shards}


class Dying(BuildWorker):
    """Dies when it has read so many bytes of a shard, `times` times in all."""

    times = 0
    after = 600
    units = None  # all

    def _progress(self, *args, **options):
        if (self.units is None or self._unit in self.units) and type(self).times:
            return dying(self, super()._progress(*args, **options))
        return super()._progress(*args, **options)


class dying:  # noqa: N801  (a context manager)
    def __init__(self, worker, progress):
        self.worker, self.progress = worker, progress

    def __enter__(self):
        advance = self.progress.__enter__()

        def advance_and_die(count):
            advance(count)
            if self.worker._bytes > self.worker.after and type(self.worker).times:
                type(self.worker).times -= 1
                raise SystemError("killed")

        return advance_and_die

    def __exit__(self, *args):
        return self.progress.__exit__(*args)


@pytest.mark.parametrize("key_format", ["float16", "pca16-int8"])
def test_shards_have_the_bytes_of_a_build_without_ray(start, one_machine, key_format, tmp_path):
    store = start(key_format=key_format)
    expected = {folder.name: contents(folder) for folder in one_machine[key_format].iterdir()}
    assert shards_of(store) == expected
    assert [shard.path for shard in store.shards] == [tmp_path / "out" / "shards" / f"000{n}" for n in (1, 2, 3)]
    assert not (tmp_path / "out" / "shards" / "build.json").exists()
    assert knnlm.verify(tmp_path / "out", deep=True).problems == ()


def test_shards_of_dead_workers_are_continued(start, one_machine):
    made = []

    class Counted(Dying):
        times = 3

        def __init__(self, job):
            super().__init__(job)
            made.append(self)

    store = start(Counted)
    assert Counted.times == 0
    assert len(made) == 2 + 3  # a new worker for each dead one
    assert shards_of(store) == {folder.name: contents(folder) for folder in one_machine["float16"].iterdir()}


def test_finished_shards_are_not_built_again(start, tmp_path, one_machine):
    class OnlyFirst(Dying):
        times, after, units = 1000, -1, {2, 3}

    with pytest.raises(ClusterError, match=r"5 workers in succession died at shard \d of 3: .*killed.*continues"):
        start(OnlyFirst)
    record = json.loads((tmp_path / "out" / "shards" / "build.json").read_text())
    assert record["done"] == [1]
    with pytest.raises(DatastoreError, match=r"out is an unfinished build with workers\. Run the same command again"):
        knnlm.Datastore.open(tmp_path / "out")
    first = {
        file: file.stat().st_mtime_ns
        for file in (tmp_path / "out" / "shards" / "0001").rglob("*")
        if file.name not in ("writer.lock", "readers.lock")
    }
    built = []

    class Recorded(BuildWorker):
        def build(self, unit, *args):
            built.append(unit)
            return super().build(unit, *args)

    store = start(Recorded, workers=1, shards=None)  # as many as the unfinished build has
    assert built == [2, 3]
    assert {file: file.stat().st_mtime_ns for file in first} == first
    assert shards_of(store) == {folder.name: contents(folder) for folder in one_machine["float16"].iterdir()}


def test_other_options_or_another_text_do_not_continue_a_build(start, text, tmp_path):
    class Stopped(Dying):
        times, after, units = 1000, -1, {2, 3}

    with pytest.raises(ClusterError):
        start(Stopped)
    with pytest.raises(DatastoreError, match=r"another key format \(float16, now float32\)"):
        start(key_format="float32")
    with pytest.raises(DatastoreError, match=r"another shards \(3, now 4\)"):
        start(shards=4)
    with pytest.raises(DatastoreError, match="another text, or the text has changed"):
        start(text=write_text(tmp_path / "changed.jsonl", documents(31)))
    with pytest.raises(DatastoreError, match="is an unfinished build with another model"):
        start(model=tmp_path / "elsewhere")
    (tmp_path / "out" / "shards" / "build.json").write_text("{}")
    with pytest.raises(DatastoreError, match=r"build\.json is corrupt"):
        start()


def test_a_build_continues_with_another_index(start, one_machine):
    with pytest.raises(ParameterError, match="does not understand the index"):
        start(index="nonsense")
    store = start(index="Flat")
    assert [[row.spec for row in shard.catalog.indexes()] for shard in store.shards] == [["Flat"]] * 3
    expected = [knnlm.Datastore.open(folder).fingerprint for folder in sorted(one_machine["float16"].iterdir())]
    assert [shard.fingerprint for shard in store.shards] == expected


def test_a_driver_that_died_before_the_shards_were_joined_joins_them(start, monkeypatch):
    monkeypatch.setattr(driver, "join_shards", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        start()
    monkeypatch.undo()

    class Unwanted(BuildWorker):
        def open(self):
            raise AssertionError("no worker is needed")

    assert len(start(Unwanted).shards) == 3


def test_a_worker_that_died_after_its_shard_was_complete_is_not_repeated(start, one_machine):
    class Unreported(BuildWorker):
        times = 2

        def build(self, *args):
            result = super().build(*args)
            if type(self).times:
                type(self).times -= 1
                raise SystemError("killed")
            assert self._bytes == 0 or args[0] == 3  # nothing was read a second time
            return result

    store = start(Unreported)
    assert shards_of(store) == {folder.name: contents(folder) for folder in one_machine["float16"].iterdir()}


def test_a_finished_store_and_other_folders_are_not_overwritten(start, tmp_path):
    start(shards=2, index="Flat")
    with pytest.raises(DatastoreError, match="is a finished store already"):
        start()
    assert [row.spec for shard in knnlm.Datastore.open(tmp_path / "out").shards for row in shard.catalog.indexes()] == [
        "Flat",
        "Flat",
    ]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(DatastoreError, match="not empty"):
        start(out=tmp_path / "photos")
    with pytest.raises(DatastoreError, match="begun without --ray"):
        start(out=tmp_path / "out" / "shards" / "0001")
    with pytest.raises(DatastoreError, match="is a file"):
        start(out=tmp_path / "photos" / "cat.jpg")


def test_index_that_cannot_be_built_is_an_error_before_anything_is_read(start, tmp_path, monkeypatch):
    monkeypatch.setattr(BuildWorker, "_read", None)
    for options, width in (({}, r"\d+"), ({"key_format": "pca8-int8"}, "8")):
        with pytest.raises(
            ParameterError, match=rf"index 'IVF2,PQ7' for vectors of width {width}: .*\(on the machine "
        ):
            start(index="IVF2,PQ7", **options)
        assert not (tmp_path / "out").exists()


def test_errors_of_workers_name_the_machine_and_leave_nothing(start, tmp_path):
    with pytest.raises(knnlm.ModelError, match=r"nowhere.* \(on the machine "):
        start(model=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CorpusError, match="30 documents, which are too few for 31 shards"):
        start(shards=31)
    assert not (tmp_path / "out").exists()

    class Elsewhere(BuildWorker):
        def open(self):
            self._job.__dict__["places"] = replace(self._job.places, build="another")
            return super().open()

    with pytest.raises(ClusterError, match="Use a shared folder as --out"):
        start(Elsewhere)
    assert not (tmp_path / "out").exists()


def test_an_error_of_any_class_can_be_sent():
    failure = Failure.of(MissingExtra("Reading", "pyarrow", "parquet"))
    error = failure.error()
    assert isinstance(error, MissingExtra)
    assert str(error) == failure.message


def test_workers_that_die_while_they_open_the_model_end_the_build(start, tmp_path):
    class Unopened(BuildWorker):
        def open(self):
            raise MemoryError

    with pytest.raises(ClusterError, match="5 workers in succession died at the opening of the model"):
        start(Unopened)
    assert not (tmp_path / "out").exists()


def test_a_short_text_has_one_shard_for_each_document(start, tmp_path):
    store = start(text=write_text(tmp_path / "short.jsonl", documents(2)), shards=None, workers=2)
    assert len(store.shards) == 2
    single = start(text=write_text(tmp_path / "one.jsonl", documents(1)), shards=None, out=tmp_path / "single")
    assert len(single.shards) == 1


def test_shards_without_tokens(start, tmp_path, monkeypatch):
    encode = knnlm.CausalLM.encode_document
    monkeypatch.setattr(
        knnlm.CausalLM, "encode_document", lambda lm, document: encode(lm, document) if document.id == "d1" else []
    )
    text = write_text(tmp_path / "short.jsonl", documents(3))
    store = start(text=text, index="auto")
    assert [shard.entry_count > 0 for shard in store.shards] == [False, True, False]
    with pytest.raises(DatastoreError, match="no tokens that a codec could be fitted to"):
        start(text=text, key_format="int8", out=tmp_path / "small")


def test_two_drivers_do_not_build_the_same_store(start, tmp_path):
    class Second(BuildWorker):
        def open(self):
            with pytest.raises(DatastoreBusy):
                start()
            return super().open()

    assert len(start(Second, workers=1).shards) == 3


def test_progress_never_moves_back(start):
    class Twice(Dying):
        times = 2

    advanced, totals = [], []

    @contextmanager
    def progress(what, *, total, unit):
        totals.append((what, total, unit))
        yield advanced.append

    start(Twice, progress=progress)
    assert min(advanced) > 0
    assert [("reading", sum(advanced), "bytes")] == totals


@pytest.mark.parametrize(
    ("nodes", "device", "workers", "cores", "expected"),
    [
        ([{"CPU": 8}], "auto", None, None, (1, 8, 0, "cpu")),
        ([{"CPU": 8}], "auto", 3, None, (3, 2, 0, "cpu")),
        ([{"CPU": 8}, {"CPU": 4}], "auto", None, None, (2, 4, 0, "cpu")),
        ([{"CPU": 8}, {"CPU": 4}], "auto", 3, None, (3, 4, 0, "cpu")),
        ([{"CPU": 8}, {"CPU": 0}, {}], "auto", None, None, (1, 8, 0, "cpu")),
        ([{"CPU": 8}], "cpu", 2, 1, (2, 1, 0, "cpu")),
        ([{"CPU": 8, "GPU": 4}, {"CPU": 2, "GPU": 2}], "auto", None, None, (6, 1, 1, "cuda")),
        ([{"CPU": 8, "GPU": 4}, {"CPU": 8}], "cuda", 2, None, (2, 2, 1, "cuda")),
        ([{"CPU": 8, "GPU": 4}], "cpu", None, None, (1, 8, 0, "cpu")),
    ],
)
def test_workers_get_their_share_of_the_cluster(nodes, device, workers, cores, expected):
    plan = plan_workers(nodes, device, workers, cores)
    assert (plan.count, plan.cores, plan.gpus, plan.device) == expected


@pytest.mark.parametrize(
    ("nodes", "device", "workers", "cores", "message"),
    [
        ([{"CPU": 2}], "auto", 3, None, "2 cores, which are too few for 3 workers"),
        ([{"CPU": 2}, {"CPU": 2}], "auto", 2, 3, "4 cores, which are too few for 2 workers with 3 cores each"),
        ([{"CPU": 2, "GPU": 1}], "auto", 2, None, "1 GPUs, which are too few for 2 workers"),
        ([{"CPU": 2}], "cuda", None, None, "0 GPUs, which are too few for 1 worker"),
        ([], "auto", None, None, "0 cores"),
        ([{"CPU": 4, "GPU": 2}], "auto", None, 3, "2 cores for each GPU"),
        ([{"GPU": 2}], "cuda:1", None, None, "Ray chooses a GPU"),
    ],
)
def test_a_cluster_that_is_too_small_is_an_error(nodes, device, workers, cores, message):
    with pytest.raises((ClusterError, ParameterError), match=message):
        plan_workers(nodes, device, workers, cores)


def test_options_that_every_worker_would_refuse(start):
    with pytest.raises(ParameterError, match="Unknown key format"):
        start(key_format="float8")
    with pytest.raises(ParameterError, match="metric"):
        start(metric="cosine")
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        start(window=None)


@pytest.mark.parametrize("name", ["workers", "cores", "shards"])
def test_numbers_below_one_are_refused(start, name):
    with pytest.raises(ParameterError, match=f"{name} is 0"):
        start(**{name: 0})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KNNLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def places_of(tmp_path, where):
    """The options of a build whose shards are copied to a folder or a URL."""
    return {"work_folder": tmp_path / "disk"} if where == "folder" else {"push": f"file://{tmp_path}/bucket"}


def check_copied(store, expected, tmp_path, where):
    """Compare copied shards with those of a build without Ray; nothing else is left of them."""
    found = [contents(shard.path) for shard in store.shards]
    for content in found:
        content.pop("remote.json", None)
    assert found == [contents(folder) for folder in sorted(expected.iterdir())]
    places = [tmp_path / ("out/shards" if where == "folder" else "bucket") / f"000{number}" for number in (1, 2, 3)]
    assert [Path(remote_url(shard.path)[7:]) if where == "url" else shard.path for shard in store.shards] == places
    left = [path for path in (tmp_path / "disk", tmp_path / "cache" / "builds") for path in path.rglob("*")]
    assert [path for path in left if path.is_file()] == []
    names = {path.name for path in (tmp_path / "out" / "shards").iterdir()} - {"writer.lock"}
    assert names == ({"0001", "0002", "0003"} if where == "folder" else set())
    assert knnlm.verify(store.path, deep=True).problems == ()


@pytest.mark.parametrize("where", ["folder", "url"])
def test_shards_are_built_on_the_disk_of_a_worker_and_copied(start, one_machine, cache, tmp_path, where):
    places, folders = places_of(tmp_path, where), set()

    class Watched(BuildWorker):
        def _read(self, part, folder, calibration):
            folders.add(folder)
            super()._read(part, folder, calibration)

    store = start(Watched, key_format="pca16-int8", **places)
    work = tmp_path / "disk" if where == "folder" else cache / "builds"
    assert len(folders) == 3
    assert all(folder.is_relative_to(work) for folder in folders)
    check_copied(store, one_machine["pca16-int8"], tmp_path, where)
    with pytest.raises(DatastoreError, match="is a finished store already"):
        start(**places)


@pytest.mark.slow  # the start of the S3 server
def test_shards_are_pushed_to_s3(start, one_machine, cache, tmp_path):
    with s3_server():
        store = start(push=f"{BUCKET}/{tmp_path.name}")
        urls = [remote_url(shard.path) for shard in store.shards]
        assert urls == [f"{BUCKET}/{tmp_path.name}/000{number}" for number in (1, 2, 3)]
        expected = [knnlm.Datastore.open(folder).fingerprint for folder in sorted(one_machine["float16"].iterdir())]
        assert [shard.fingerprint for shard in store.shards] == expected
        assert knnlm.verify(store.path, deep=True).problems == ()


class Interrupted(BuildWorker):
    """Dies before, while and after it copies a shard."""

    deaths = ()
    read: ClassVar = Counter()

    def _read(self, part, folder, calibration):
        type(self).read[part.part.number] += 1
        super()._read(part, folder, calibration)

    def build(self, unit, *args):
        with pytest.MonkeyPatch.context() as patch:
            if self.deaths and self.deaths[0] != "after":
                patch.setattr(*self._fault())
            result = super().build(unit, *args)
        if self.deaths:
            self._die()
        return result

    def _fault(self):
        whole, files = remote._Remote.upload, []
        if self.deaths[0] == "before":
            return ShardPlaces, "copy", lambda *_: self._die()

        def upload(this, name, source):
            files.append(name)
            return self._die() if len(files) == 3 else whole(this, name, source)

        def copy(source, target):
            files.append(source)
            return self._die() if len(files) == 3 else target.write_bytes(source.read_bytes())

        return (remote._Remote, "upload", upload) if self._job.places.url else (remote.shutil, "copyfile", copy)

    def _die(self):
        type(self).deaths = type(self).deaths[1:]
        raise SystemError("killed")


@pytest.mark.parametrize("where", ["folder", "url"])
def test_shard_whose_worker_dies_while_it_copies_is_copied_again(start, one_machine, cache, tmp_path, where):
    class Dying(Interrupted):
        deaths = ("before", "while", "after")
        read: ClassVar = Counter()

    store = start(Dying, workers=1, **places_of(tmp_path, where))
    assert Dying.deaths == ()
    assert Dying.read == {1: 1, 2: 1, 3: 1}  # no text was read a second time
    check_copied(store, one_machine["float16"], tmp_path, where)


@pytest.mark.parametrize("where", ["folder", "url"])
def test_killed_driver_continues_a_build_whose_shards_are_copied(start, one_machine, cache, tmp_path, where):
    places = places_of(tmp_path, where)

    class Stopped(Dying):
        times, after, units = 1000, 600, {2}

    with pytest.raises(ClusterError, match="5 workers in succession died at shard 2 of 3"):
        start(Stopped, workers=1, **places)
    with pytest.raises(DatastoreError, match="another key format"):
        start(key_format="float32", **places)
    built = Counter()

    class Watched(BuildWorker):
        def _read(self, part, folder, calibration):
            built[part.part.number, (folder / "catalog.db").exists()] += 1
            super()._read(part, folder, calibration)

    store = start(Watched, workers=1, **places)
    assert built == {(2, True): 1, (3, False): 1}  # the first is done, and the second is continued
    check_copied(store, one_machine["float16"], tmp_path, where)


def test_first_shard_that_is_lost_with_its_machine_gets_the_calibration_of_the_others(start, tmp_path):
    """A machine of another kind would fit another codec."""
    given = []

    class Lost(BuildWorker):
        def _read(self, part, folder, calibration):
            if part.part.number == 1:
                given.append(calibration)
            super()._read(part, folder, calibration)
            if part.part.number == 1 and len(given) == 1:
                while not list((tmp_path / "out" / "shards").glob("0002/catalog.db")):
                    time.sleep(0.01)
                shutil.rmtree(folder)
                raise SystemError("killed")

    start(Lost, key_format="pca16-int8", work_folder=tmp_path / "disk")
    first, second = given
    assert first is None
    assert second is not None
    assert second.metadata["codec"] is not None


def test_first_shard_gets_the_calibration_of_any_finished_one(start, tmp_path):
    class Later(Dying):
        times, after, units = 1000, 600, {3}

    with pytest.raises(ClusterError):
        start(Later, key_format="pca16-int8", workers=1)
    shutil.rmtree(tmp_path / "out" / "shards" / "0001")
    given = {}

    class Watched(BuildWorker):
        def _read(self, part, folder, calibration):
            given[part.part.number] = calibration
            super()._read(part, folder, calibration)

    start(Watched, key_format="pca16-int8", workers=1)
    assert given[1] is not None
    assert given[1] == given[3]


def test_urls_of_other_stores_are_not_overwritten(start, one_machine, cache, tmp_path):
    push_shard(one_machine["float16"] / "0001", f"file://{tmp_path}/bucket/0002")
    with pytest.raises(DatastoreError, match="bucket/0002 is a store already"):
        start(push=f"file://{tmp_path}/bucket")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ParameterError, match="bucket is no URL"):
        start(push="bucket")


def test_unfinished_builds_of_the_same_store_are_removed_from_work_folders(start, tmp_path):
    class Stopped(Dying):
        times, after = 1000, 600

    with pytest.raises(ClusterError):
        start(Stopped, work_folder=tmp_path / "disk")
    (left,) = (tmp_path / "disk").glob("*/*")
    shutil.rmtree(tmp_path / "out")
    start(work_folder=tmp_path / "disk")
    assert not left.exists()


def test_process_takes_over_threads_and_folder_of_the_driver_but_no_other_version(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    threads = torch.get_num_threads()
    try:
        for folder in ("there", "nowhere"):  # a folder that this machine does not have changes nothing
            prepare_process(threads=1, working_folder=str(tmp_path / folder), version=knnlm.__version__)
            assert (Path.cwd(), torch.get_num_threads()) == (tmp_path / "there", 1)
        with pytest.raises(ClusterError, match=r"that of the driver 0\.0\.0\. Install the same"):
            prepare_process(threads=1, working_folder=str(tmp_path), version="0.0.0")
    finally:
        torch.set_num_threads(threads)
