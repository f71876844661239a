"""An addition is there as a whole or not at all, and one that was stopped goes on where it was."""

from __future__ import annotations

import os
import shutil
from contextlib import closing

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from helpers.damage import mutate
from helpers.stores import contents, documents
from knnlm.cli.app import run
from knnlm.corpus import Document
from knnlm.datastore.compact import compact
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.remove import removal_report, remove
from knnlm.datastore.schema import STAGING_FILE
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError
from knnlm.ingest import build as build_module
from knnlm.ingest.build import add, build
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify

OLD, NEW = documents(3), documents(6, start=10)
ROWS = 100  # so that one or two documents make a segment
fuzzing = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module", params=["float16", "int8", "codes8"])
def way(request):
    return request.param


@pytest.fixture(scope="module")
def built(lm, way, tmp_path_factory):
    """Three documents and an index."""
    path = tmp_path_factory.mktemp("pending") / "store"
    with closing(build(OLD, path, lm=lm, segment_entries=ROWS, key_format=way)) as store:
        build_index(store, "Flat")
    return path


@pytest.fixture
def store_path(built, tmp_path):
    return shutil.copytree(built, tmp_path / "store")


@pytest.fixture(scope="module")
def stopped(lm, built, tmp_path_factory):
    """Return a store in which an addition failed before its last two documents."""
    path = shutil.copytree(built, tmp_path_factory.mktemp("stopped") / "store")
    stop(path, lm, NEW)
    return path


class Stop(Exception):
    """What stops an addition."""


def stop(path, lm, wanted, *, before: int = 2) -> None:
    """Add documents until so many are left, and fail."""

    def some():
        yield from wanted[: len(wanted) - before]
        raise Stop

    with pytest.raises(Stop):
        add(some(), path, lm=lm)


def names(path) -> list[str]:
    with closing(Datastore.open(path)) as store:
        return [document.id for document in store.documents()]


def count_read(monkeypatch, lm) -> list[int]:
    """The number of tokens in each document that the model reads from now on."""
    seen, read = [], lm.read

    def counting(tokens, *args, **options):
        seen.extend(map(len, tokens))
        return read(tokens, *args, **options)

    monkeypatch.setattr(lm, "read", counting)
    return seen


def test_interrupted_addition_is_invisible_and_resumes_without_reading_again(lm, built, stopped, tmp_path, monkeypatch):
    path = shutil.copytree(stopped, tmp_path / "store")
    assert names(path) == ["d0", "d1", "d2"]
    found = verify(path, deep=True)
    assert found.sound
    assert any(note.startswith(f"{STAGING_FILE}: ") and "The same command resumes it" in note for note in found.notes)
    whole = shutil.copytree(built, tmp_path / "whole")
    add(NEW, whole, lm=lm)
    before = len(list((path / "segments").iterdir()))
    seen = count_read(monkeypatch, lm)
    done = add(NEW, path, lm=lm)
    tokens = [len(lm.encode(document.text)) for document in NEW]
    assert (done.documents, done.tokens, done.skipped, done.generation) == (6, sum(tokens), 0, 1)
    assert done.resumed > 0
    assert before > len(OLD) // 2
    assert seen == tokens[done.resumed :]
    # Not a byte is other than if nothing had happened.
    assert contents(path) == contents(whole)
    assert not (path / STAGING_FILE).exists()
    with closing(Datastore.open(path)) as store:
        last = store.take(torch.tensor([store.entry_count - 5]))
        assert int(open_index(store).search(last, 1).ids[0, 0]) == store.entry_count - 5


def test_staged_document_that_is_missing_now_is_dropped(lm, stopped, tmp_path, monkeypatch):
    path = shutil.copytree(stopped, tmp_path / "store")
    seen = count_read(monkeypatch, lm)
    done = add([NEW[5]], path, lm=lm)
    assert (done.documents, done.resumed) == (1, 0)
    assert seen == [len(lm.encode(NEW[5].text))]
    assert names(path) == ["d0", "d1", "d2", "d15"]
    with closing(Datastore.open(path)) as store:
        known = {f"{segment.id:06d}" for segment in store.segments}
        assert {entry.name for entry in (path / "segments").iterdir()} == known
        assert store.entry_numbers.whole
    assert verify(path, deep=True).notes == ()


def test_missing_documents_of_a_staged_segment_are_masked_and_erased_by_compaction(lm, built, tmp_path):
    short = [Document(f"s{number}", f"s:{number}", f"{number} " * 6 + NEW[number].text[:25]) for number in range(6)]
    path = shutil.copytree(built, tmp_path / "store")
    stop(path, lm, [*short, *NEW[4:]])
    renamed = [Document("other", "elsewhere", short[1].text, {"year": 3}), short[0]]
    done = add(renamed, path, lm=lm)
    assert (done.documents, done.resumed) == (2, 2)
    assert done.tokens == sum(len(lm.encode(document.text)) for document in renamed)
    # In the order in which they were read, under the names that they have now.
    with closing(Datastore.open(path)) as store:
        last = list(store.documents())[3:]
        assert [(one.id, one.source, dict(one.fields)) for one in last] == [
            ("s0", "s:0", {}),
            ("other", "elsewhere", {"year": 3}),
        ]
        tokens = [token for one in (short[0], short[1]) for token in lm.encode(one.text)]
        assert store.values(torch.arange(store.entry_count - len(tokens), store.entry_count)).tolist() == tokens
        assert not store.entry_numbers.whole
    assert verify(path, deep=True).sound
    gone = np.array(lm.encode(short[2].text), np.int32)[:8].tobytes()
    assert any(gone in file.read_bytes() for file in path.rglob("values.npy"))
    assert compact(path).purged
    assert not any(gone in file.read_bytes() for file in path.rglob("*") if file.is_file())
    assert names(path) == ["d0", "d1", "d2", "s0", "other"]


def test_other_writers_keep_the_staging_log_and_a_compaction_drops_it(lm, stopped, tmp_path):
    path = shutil.copytree(stopped, tmp_path / "store")
    assert remove(path, document="d1").tokens > 0
    with closing(Datastore.open(path)) as store:
        build_index(store, "Flat")
    repair(path)
    held = [one.path for one in removal_report(path).bytes]
    assert STAGING_FILE in held
    again = shutil.copytree(path, tmp_path / "again")
    done = add(NEW, again, lm=lm)
    assert done.resumed > 0
    assert names(again) == ["d0", "d2", *(document.id for document in NEW)]
    tokens = np.array(lm.encode(NEW[0].text), np.int32)[:8].tobytes()
    assert any(tokens in file.read_bytes() for file in path.rglob("values.npy"))
    assert compact(path).purged
    assert removal_report(path).bytes == ()
    for needle in (tokens, NEW[0].source.encode(), b"pending"):
        assert not any(needle in file.read_bytes() for file in path.rglob("*") if file.is_file())
    assert names(path) == ["d0", "d2"]
    assert add(NEW, path, lm=lm).resumed == 0


def test_log_left_after_its_commit_is_ignored(lm, stopped, tmp_path):
    path = shutil.copytree(stopped, tmp_path / "store")
    log = (path / STAGING_FILE).read_bytes()
    add(NEW, path, lm=lm)
    (path / STAGING_FILE).write_bytes(log)  # as if the process had been killed just then
    assert verify(path, deep=True).notes == ()
    remove(path, document="d10")
    assert not (path / STAGING_FILE).exists()
    assert names(path) == ["d0", "d1", "d2", *(document.id for document in NEW[1:])]


@fuzzing
@given(data=st.data())
def test_damaged_staged_files_are_only_read_again(data, lm, stopped, tmp_path):
    path = tmp_path / "fuzzed"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(stopped, path)
    known = {"000000", "000001", "000002"}
    pending = [file for file in sorted(path.rglob("segments/*/*.npy")) if file.parent.name not in known]
    file = data.draw(st.sampled_from([path / STAGING_FILE, *pending]))
    file.write_bytes(mutate(file.read_bytes(), data.draw))
    assert verify(path, deep=True).sound
    assert add(NEW, path, lm=lm).documents == len(NEW)
    assert names(path) == [*(one.id for one in OLD), *(one.id for one in NEW)] or sorted(names(path)) == sorted(
        one.id for one in [*OLD, *NEW]
    )
    with closing(Datastore.open(path)) as store:
        texts = {one.id: lm.encode(one.text) for one in [*OLD, *NEW]}
        right = [token for one in store.documents() for token in texts[one.id]]
        assert store.values(torch.arange(store.entry_count)).tolist() == right
    assert verify(path, deep=True).sound


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_log_that_is_not_a_file_is_one_error(lm, store_path, tmp_path, kind):
    place = store_path / STAGING_FILE
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(tmp_path / "elsewhere")
    assert names(store_path) == ["d0", "d1", "d2"]
    with pytest.raises(DatastoreError, match=r"staging\.log"):
        add(NEW, store_path, lm=lm)
    assert names(store_path) == ["d0", "d1", "d2"]
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("before", [0, 2, 6])
def test_addition_to_an_empty_store_equals_a_build(lm, way, tmp_path, before):
    build([], tmp_path / "m", lm=lm, segment_entries=ROWS, key_format=way).close()
    if before:
        stop(tmp_path / "m", lm, NEW, before=before)
        assert names(tmp_path / "m") == []
        assert verify(tmp_path / "m", deep=True).sound
    assert add(NEW, tmp_path / "m", lm=lm).documents == 6
    build(NEW, tmp_path / "right", lm=lm, segment_entries=ROWS, key_format=way).close()
    mine, right = contents(tmp_path / "m"), contents(tmp_path / "right")
    assert {name: data for name, data in mine.items() if name != "catalog.db"} == {
        name: data for name, data in right.items() if name != "catalog.db"
    }
    assert verify(tmp_path / "m", deep=True).sound
    add(OLD, tmp_path / "m", lm=lm)
    assert len(names(tmp_path / "m")) == 9
    assert verify(tmp_path / "m", deep=True).sound


def test_codec_of_a_dropped_addition_is_dropped(lm, tmp_path, monkeypatch):
    build([], tmp_path / "m", lm=lm, segment_entries=ROWS, key_format="pca8-int8").close()

    def fail(_):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(build_module.StagedAddition, "commit", fail)
        with pytest.raises(Stop):
            add(NEW, tmp_path / "m", lm=lm)
    assert (tmp_path / "m" / "codec.safetensors").exists()
    again = shutil.copytree(tmp_path / "m", tmp_path / "again")
    compact(tmp_path / "m")
    assert not [file for file in (tmp_path / "m").iterdir() if file.suffix == ".safetensors"]
    assert add(NEW, again, lm=lm).resumed == 6
    assert verify(again, deep=True).sound
    (again / "codec.safetensors").write_bytes(b"x")
    assert not verify(again, deep=True).sound


def test_interrupted_add_command_names_how_to_resume_and_resumes(
    lm, store_path, model_folder, tmp_path, capfd, monkeypatch
):
    texts = [tmp_path / f"{document.id}.txt" for document in NEW]
    for text, document in zip(texts, NEW, strict=True):
        text.write_text(document.text)
    command = ["add", str(store_path), *map(str, texts), "--model", str(model_folder)]
    batch_documents = build_module.batch_documents

    def pressed(*args):
        batches = batch_documents(*args)
        yield next(batches)
        yield next(batches)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "batch_documents", pressed)
        assert run(command) == 130
    assert (
        "Run the same command again: builds and additions resume at the last complete segment" in capfd.readouterr().err
    )
    assert names(store_path) == ["d0", "d1", "d2"]
    assert run(["verify", str(store_path)]) == 0
    assert "documents in 2 segments belong to an add that was interrupted" in " ".join(capfd.readouterr().err.split())
    assert run(command) == 0
    assert "6 documents added" in (out := capfd.readouterr().out)
    assert "had been read before" in out
