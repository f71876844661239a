"""Maintenance of a store that documents were added to and removed from."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pyarrow.parquet as pq
import pytest
import torch

from helpers.checksums import seal
from helpers.damage import flip, named
from helpers.format import read_store
from helpers.stores import documents, documents_by_hash
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.remove import removal_report, remove
from knnlm.datastore.store import Datastore
from knnlm.datastore.suffix_array import open_suffix_array
from knnlm.ingest.build import add, build
from knnlm.maintenance.export import export
from knnlm.maintenance.merge import merge
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify


@pytest.fixture
def changed(lm, tmp_path):
    """A store of ten documents, of which two were removed, and two that were added."""
    path = tmp_path / "store"
    store = build(documents(10), path, lm=lm, segment_entries=150)
    build_index(store, "Flat")
    open_suffix_array(store)
    store.close()
    add(documents(2, start=20), path, lm=lm)
    for name in ("d3", "d7"):
        remove(path, document=name)
    return path


REMAINING = {f"d{number}" for number in (0, 1, 2, 4, 5, 6, 8, 9, 20, 21)}


def test_changed_store_verifies_and_is_readable_without_the_library(changed):
    found = verify(changed, deep=True)
    assert found.sound, found.problems
    metadata, remaining, *_, values, removed = read_store(changed)
    assert metadata["format"] == 1
    assert {document["id"] for document in remaining} == REMAINING
    assert found.documents == 10
    assert found.tokens == len(values) - len(removed)
    flip(changed / "segments/000001/keys.npy", -1)
    assert named(verify(changed, deep=True)) == {"segments/000001/keys.npy"}


def test_removed_range_that_overlaps_a_document_is_a_problem(changed):
    with closing(sqlite3.connect(changed / "catalog.db", isolation_level=None)) as connection:
        connection.execute("UPDATE removed SET entries = entries + 1 WHERE number = (SELECT MIN(number) FROM removed)")
    seal(changed / "catalog.db")
    assert any("was expected" in problem.message for problem in verify(changed).problems)


def test_repair_keeps_the_rest_and_removed_documents_stay_removed(changed, lm):
    flip(changed / "segments/000000/values.npy", -1)
    done = repair(changed)
    assert verify(changed, deep=True).sound
    with closing(Datastore.open(changed)) as store:
        remaining = list(store.documents())
        assert {document.id for document in remaining} == REMAINING - {document.id for document in done.lost}
        texts = {document.id: document.text for document in [*documents(10), *documents(2, start=20)]}
        for document in remaining:
            rows = torch.arange(document.first_entry, document.first_entry + document.entries)
            assert store.values(rows).tolist() == lm.encode(texts[document.id])
        keys = store.take(torch.arange(store.key_count))
        assert open_index(store).search(keys[::19], 1).distances.max() < 1e-5
    add([document for document in documents(10) if document.id in {lost.id for lost in done.lost}], changed, lm=lm)
    with closing(Datastore.open(changed)) as store:
        assert {document.id for document in store.documents()} == REMAINING
    assert verify(changed, deep=True).sound


def test_merge_and_export_leave_out_removed_documents(changed, lm, tmp_path):
    build(documents(2, start=30), tmp_path / "other", lm=lm).close()
    merge([changed, tmp_path / "other"], tmp_path / "merged")
    assert verify(tmp_path / "merged", deep=True).sound
    with closing(Datastore.open(tmp_path / "merged")) as store:
        assert {document.id for document in store.documents()} == REMAINING | {"d30", "d31"}
        texts = {document.id: document.text for start, count in ((0, 10), (20, 2), (30, 2)) for document in
                 documents(count, start=start)}  # fmt: skip
        for document in store.documents():
            assert documents_by_hash(tmp_path / "merged")[document.sha256][0] == lm.encode(texts[document.id])
    export(changed, tmp_path / "out", file_entries=70)
    table = pq.ParquetDataset(tmp_path / "out").read()
    assert set(table["document"].to_pylist()) == REMAINING
    tokens: dict[str, list[int]] = {}
    for name, token in zip(table["document"].to_pylist(), table["token"].to_pylist(), strict=True):
        tokens.setdefault(name, []).append(token)
    assert tokens == {name: lm.encode(texts[name]) for name in REMAINING}


def test_readers_survive_a_repair_and_the_next_writer_deletes_old_files(changed, lm):
    with closing(Datastore.open(changed)) as reader:
        keys = reader.take(torch.arange(reader.key_count))
        generation = reader.generation
        flip(changed / "segments/000001/values.npy", -1)
        done = repair(changed)
        assert done.segments == (1,)
        assert (changed / "segments/000001").exists()
        assert torch.equal(reader.take(torch.arange(reader.key_count)), keys)
        assert reader.stale
        assert reader.reopen().generation > generation
        assert any(holding.path == "lost" for holding in removal_report(changed).bytes)
    assert verify(changed, deep=True).sound
    add(documents(1, start=40), changed, lm=lm)
    assert not (changed / "segments/000001").exists()
    assert verify(changed, deep=True).sound
