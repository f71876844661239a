"""Shards at URLs: on a local S3 server, in memory and in folders."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

import knnlm
from helpers.cli import failure
from helpers.cli import knnlm as command
from helpers.s3 import BUCKET, s3_server
from helpers.stores import documents
from knnlm.datastore import remote
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.manifest import read_current, read_manifest, remote_url, shard_cache
from knnlm.datastore.remote import fetch_shard, push_shard
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, DatastoreError, MissingExtra, ParameterError
from knnlm.ingest.build import add
from knnlm.maintenance.verify import verify


@pytest.fixture(scope="module")
def parts(lm, tmp_path_factory):
    """Two shards with an index, whose keys are encoded, and the same documents as one store."""
    folder = tmp_path_factory.mktemp("parts")
    text = documents(12)
    for number in (1, 2):
        like = Datastore.open(folder / "part-1.store") if number == 2 else None
        options = {"lm": lm, "key_format": "int8", "segment_entries": 300}
        store = knnlm.build_shard(
            lambda: text, folder / f"part-{number}.store", shard=f"{number}/2", like=like, **options
        )
        build_index(store, "Flat")
        store.close()
        if like is not None:
            like.close()
    return folder


@pytest.fixture(scope="module")
def s3():
    """A local S3 server with a bucket."""
    with s3_server():
        yield BUCKET


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KNNLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=["s3", "memory", "file"])
def place(request, tmp_path):
    """A folder of a file system, as a URL."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    return f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/remote"


def push_both(parts: Path, place: str) -> list[str]:
    urls = [f"{place}/part-{number}.store" for number in (1, 2)]
    for number, url in enumerate(urls, 1):
        push_shard(parts / f"part-{number}.store", url)
    return urls


def keys_of(store: Datastore) -> torch.Tensor:
    return store.take(torch.arange(store.key_count))


def test_store_of_shards_at_urls_is_that_of_the_folders(parts, place, tmp_path):
    urls = push_both(parts, place)
    local = knnlm.join_shards([parts / "part-1.store", parts / "part-2.store"], tmp_path / "local.store")
    joined = knnlm.join_shards(list(reversed(urls)), tmp_path / "docs.store")
    assert (joined.documents, joined.tokens) == (local.documents, local.tokens) == (12, joined.tokens)
    assert [shard.path for shard in read_manifest(tmp_path / "docs.store").shards] == urls
    with closing(Datastore.open(tmp_path / "docs.store")) as store, closing(Datastore.open(local.store)) as other:
        assert torch.equal(keys_of(store), keys_of(other))
        assert [each.id for each in store.documents()] == [each.id for each in other.documents()]
        assert store.index_bytes == other.index_bytes > 0
        queries = keys_of(store)[::37] + 0.01
        found, expected = open_index(store).search(queries, 8), open_index(other).search(queries, 8)
        assert torch.equal(found.ids, expected.ids)
        assert not store.stale
    assert verify(tmp_path / "docs.store", deep=True).sound


def test_one_store_is_opened_by_its_url(parts, place):
    url = push_both(parts, place)[0]
    with closing(Datastore.open(url)) as store, closing(Datastore.open(parts / "part-1.store")) as other:
        assert torch.equal(keys_of(store), keys_of(other))
        assert remote_url(store.path) == url


class Counter:
    """Counts downloads, and may fail at one of them."""

    def __init__(self, monkeypatch, fail_at: int | None = None):
        self.names: list[str] = []
        self.fail_at = fail_at
        whole = remote._Remote.download

        def download(this, name, target):
            self.names.append(name)
            if len(self.names) == self.fail_at:
                target.write_bytes(b"half")
                raise DatastoreError("the connection was lost")
            return whole(this, name, target)

        monkeypatch.setattr(remote._Remote, "download", download)


def test_unchanged_store_is_not_fetched_again(parts, place, monkeypatch):
    url = push_both(parts, place)[0]
    counter = Counter(monkeypatch)
    first = fetch_shard(url)
    fetched = len(counter.names)
    assert fetched == 1 + len(remote.listed_files(parts / "part-1.store"))
    assert fetch_shard(url) == fetch_shard(f"{url}/") == first
    assert len(counter.names) == fetched


def test_interrupted_copy_continues_at_the_next_file(parts, monkeypatch, tmp_path):
    url = push_both(parts, f"file://{tmp_path}/remote")[0]
    total = 1 + len(remote.listed_files(parts / "part-1.store"))
    with monkeypatch.context() as patch:
        counter = Counter(patch, fail_at=4)
        with pytest.raises(DatastoreError, match="connection was lost"):
            fetch_shard(url)
    assert read_current(url) is None
    counter = Counter(monkeypatch)
    folder = fetch_shard(url)
    assert len(counter.names) == 1 + total - 3  # the catalog again, and all but the two files that were complete
    assert verify(folder, deep=True).sound
    assert not list(folder.rglob("*.download"))


def test_damaged_file_is_refused(parts, place):
    url = push_both(parts, place)[0]
    fs, root = fsspec.core.url_to_fs(url)
    name = f"{root}/segments/000000/keys.npy"
    content = bytearray(fs.cat_file(name))
    content[-1] ^= 1
    fs.pipe_file(name, bytes(content))
    with pytest.raises(DatastoreCorrupt, match=r"keys\.npy: checksum mismatch"):
        fetch_shard(url)
    fs.rm_file(name)
    with pytest.raises(DatastoreError, match="incomplete"):
        fetch_shard(url)
    fs.pipe_file(f"{root}/catalog.db", b"no database")
    with pytest.raises(DatastoreCorrupt):
        fetch_shard(url)
    fs.rm_file(f"{root}/catalog.db")
    with pytest.raises(DatastoreError, match="is not a store"):
        fetch_shard(url)
    push_shard(parts / "part-1.store", url, replace=True)
    assert verify(fetch_shard(url), deep=True).sound


def test_changed_shard_is_fetched_in_part_and_old_readers_keep_theirs(lm, parts, place, tmp_path, monkeypatch):
    shutil.copytree(parts / "part-1.store", tmp_path / "one.store")
    urls = push_both(parts, place)
    url = urls[0]
    knnlm.join_shards(urls, tmp_path / "docs.store")
    with closing(Datastore.open(tmp_path / "docs.store")) as before:
        keys = keys_of(before)
        add(documents(1, start=90), tmp_path / "one.store", lm=lm)
        with pytest.raises(DatastoreError, match="--replace"):
            push_shard(tmp_path / "one.store", url)
        pushed = push_shard(tmp_path / "one.store", url, replace=True)
        assert pushed.unchanged > pushed.files
        counter = Counter(monkeypatch)
        with closing(Datastore.open(tmp_path / "docs.store")) as after:
            assert after.entry_count > before.entry_count
            assert len(counter.names) == 3  # catalog, keys and values of the new segment
            assert torch.equal(keys_of(after)[: before.shards[0].key_count], keys[: before.shards[0].key_count])
        assert before.stale
        assert torch.equal(keys_of(before), keys)
    again = knnlm.join_shards(urls, tmp_path / "docs.store", replace_manifest=True)
    assert again.documents == 13


def test_old_versions_are_removed_when_no_process_reads_them(lm, parts, tmp_path):
    shutil.copytree(parts / "part-1.store", tmp_path / "one.store")
    url, kept = f"file://{tmp_path}/remote/one.store", None
    for number in range(4):
        push_shard(tmp_path / "one.store", url, replace=True)
        folder = fetch_shard(url)
        kept = kept or Datastore.open(folder)
        add(documents(1, words=20, start=90 + number), tmp_path / "one.store", lm=lm)
    versions = [entry for entry in shard_cache(url).iterdir() if entry.is_dir()]
    assert len(versions) == 3  # the present one, the one before it, and the one that is open
    assert kept.path in versions
    kept.close()


def test_changes_are_refused_in_one_line(lm, parts, place, tmp_path, capfd, model_folder):
    urls = push_both(parts, place)
    knnlm.join_shards(urls, tmp_path / "docs.store")
    (tmp_path / "new.txt").write_text("A new text.")
    copy = fetch_shard(urls[0])
    before = {file: file.read_bytes() for file in copy.rglob("*.npy")}
    for arguments in (
        ("add", tmp_path / "docs.store", tmp_path / "new.txt", "--model", model_folder),
        ("remove", tmp_path / "docs.store", "--where", "number=1"),
        ("compact", tmp_path / "docs.store"),
        ("index", tmp_path / "docs.store"),
        ("remove", copy, "--where", "number=1"),
    ):
        message = failure(capfd, *arguments)
        assert "read-only" in message, arguments
        assert "knnlm shards push" in message
    assert before == {file: file.read_bytes() for file in copy.rglob("*.npy")}
    code, out, _ = command(capfd, "info", tmp_path / "docs.store", "--json")
    assert code == 0
    assert [shard["path"] for shard in json.loads(out)["shards"]] == urls
    code, out, _ = command(capfd, "remove", tmp_path / "docs.store", "--where", "number=1", "--dry-run", "--json")
    assert code == 0


def test_store_of_shards_at_urls_is_tuned_and_merged(lm, parts, tmp_path, capfd, model_folder):
    urls = push_both(parts, f"file://{tmp_path}/remote")
    knnlm.join_shards(urls, tmp_path / "docs.store")
    (tmp_path / "valid.txt").write_text(documents(1, words=60, start=70)[0].text)
    options = ("--memories", "knn", "--weights", "fixed", "--k", "4", "--model", model_folder)
    assert command(capfd, "tune", tmp_path / "docs.store", tmp_path / "valid.txt", *options)[0] == 0
    assert command(capfd, "merge", tmp_path / "docs.store", "--out", tmp_path / "one.store")[0] == 0
    with closing(Datastore.open(tmp_path / "one.store")) as one:
        assert one.catalog.document_count() == 12


def test_commands_push_and_join(parts, place, tmp_path, capfd):
    shards = [parts / "part-1.store", parts / "part-2.store"]
    code, out, _ = command(capfd, "shards", "push", *shards, "--out", place, "--json")
    assert code == 0
    urls = [one["url"] for one in json.loads(out)["pushed"]]
    assert urls == [f"{place}/part-1.store", f"{place}/part-2.store"]
    assert command(capfd, "shards", "join", *urls, "--out", tmp_path / "docs.store")[0] == 0
    assert "--replace" in failure(capfd, "shards", "push", shards[0], "--out", place)
    assert "only its shards" in failure(capfd, "shards", "join", *urls, "--out", "s3://bucket/docs.store")
    assert "same name" in failure(capfd, "shards", "push", shards[0], shards[0], "--out", place)
    assert "push its shards" in failure(capfd, "shards", "push", tmp_path / "docs.store", "--out", place).lower()
    assert "no URL" in failure(capfd, "shards", "push", shards[0], "--out", tmp_path / "folder")


def test_push_of_a_store_that_changes_is_one_generation(lm, parts, tmp_path, monkeypatch):
    shutil.copytree(parts / "part-1.store", tmp_path / "one.store")
    url = f"memory://{tmp_path.name}/one.store"
    whole = remote._Remote.upload
    grown = []

    def upload(this, name, source):
        if not grown:
            grown.append(add(documents(1, words=20, start=90), tmp_path / "one.store", lm=lm))
        return whole(this, name, source)

    monkeypatch.setattr(remote._Remote, "upload", upload)
    push_shard(tmp_path / "one.store", url)
    with closing(Datastore.open(url)) as store, closing(Datastore.open(parts / "part-1.store")) as before:
        assert store.generation == before.generation
    assert verify(fetch_shard(url), deep=True).sound


def test_two_processes_fetch_once(parts, tmp_path):
    url = push_both(parts, f"file://{tmp_path}/remote")[0]
    script = f"from knnlm.datastore.remote import fetch_shard; print(fetch_shard({url!r}))"
    running = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert len({process.communicate()[0].strip() for process in running}) == 1
    assert verify(fetch_shard(url), deep=True).sound


def test_missing_packages_and_wrong_urls_are_named(monkeypatch, tmp_path):
    with pytest.raises(ParameterError, match="no URL of a shard"):
        fetch_shard("part-1.store")
    with pytest.raises(ParameterError, match="no URL of a shard"):
        fetch_shard("simplecache::memory://a")
    with pytest.raises(ParameterError, match="nothing"):
        fetch_shard("nothing://bucket/a.store")
    with pytest.raises(DatastoreError, match="is not a store"):
        fetch_shard(f"memory://{tmp_path.name}/none")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "s3fs", None)
        patch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
        with pytest.raises(MissingExtra, match=r"knnlm\[remote\]' && pip install s3fs"):
            fetch_shard("s3://bucket/a.store")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtra, match=r"knnlm\[remote\]"):
        fetch_shard("s3://bucket/a.store")


def test_server_that_does_not_answer_is_one_line(s3, monkeypatch, tmp_path):
    fsspec.filesystem("s3").clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(DatastoreError, match="Check the URL and the credentials"):
        fetch_shard(f"{s3}/{tmp_path.name}/a.store")
    fsspec.filesystem("s3").clear_instance_cache()


def test_copy_without_its_catalog_is_fetched_again(parts, tmp_path):
    url = push_both(parts, f"file://{tmp_path}/remote")[0]
    folder = fetch_shard(url)
    (folder / "catalog.db").unlink()
    assert fetch_shard(url) == folder
    assert verify(folder, deep=True).sound


def test_forged_pointer_does_not_leave_the_cache(parts, tmp_path, cache):
    url = push_both(parts, f"file://{tmp_path}/remote")[0]
    folder = fetch_shard(url)
    pointer = shard_cache(url) / "current.json"
    record = json.loads(pointer.read_text())
    pointer.write_text(json.dumps({**record, "version": "../../elsewhere"}))
    assert fetch_shard(url) == folder
    assert np.array([path.is_relative_to(cache) for path in folder.iterdir()]).all()
