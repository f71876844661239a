"""Guarding a memory that documents were added to and removed from."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pyarrow.parquet as pq
import pytest
import torch

import knnlm
from helpers.checksums import seal
from helpers.damage import flip, named
from helpers.format import read_store as read_memory
from helpers.stores import documents
from helpers.stores import documents_by_hash as contents
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.remove import evidence
from knnlm.datastore.store import Datastore
from knnlm.datastore.suffix_array import open_suffixes
from knnlm.ingest.build import build
from knnlm.maintenance.export import export
from knnlm.maintenance.merge import merge
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify


@pytest.fixture
def living(lm, tmp_path):
    """Ten documents, of which two were removed, and two that were added."""
    path = tmp_path / "memory"
    store = build(documents(10), path, lm=lm, segment_rows=150)
    build_index(store, "Flat")
    open_suffixes(store)
    store.close()
    knnlm.add(documents(2, start=20), path, lm=lm)
    for name in ("d3", "d7"):
        knnlm.remove(path, document=name)
    return path


LEFT = {f"d{number}" for number in (0, 1, 2, 4, 5, 6, 8, 9, 20, 21)}


def test_it_verifies_and_is_read_without_our_code(living):
    found = verify(living, deep=True)
    assert found.sound, found.problems
    facts, listed, *_, values, gone = read_memory(living)
    assert facts["format"] == 5
    assert {one["id"] for one in listed} == LEFT
    assert found.documents == 10
    assert found.tokens == len(values) - len(gone)
    flip(living / "segments/000001/keys.npy", -1)
    assert named(verify(living, deep=True)) == {"segments/000001/keys.npy"}


def test_what_was_removed_overlapping_a_document_is_a_problem(living):
    with closing(sqlite3.connect(living / "catalog.db", isolation_level=None)) as connection:
        connection.execute("UPDATE removed SET rows = rows + 1 WHERE number = (SELECT MIN(number) FROM removed)")
    seal(living / "catalog.db")
    assert any("was expected" in problem.what for problem in verify(living).problems)


def test_a_repair_keeps_the_rest_and_what_was_removed_stays_so(living, lm):
    flip(living / "segments/000000/values.npy", -1)
    done = repair(living)
    assert verify(living, deep=True).sound
    with closing(Datastore.open(living)) as store:
        listed = list(store.documents())
        assert {one.id for one in listed} == LEFT - {one.id for one in done.lost}
        texts = {one.id: one.text for one in [*documents(10), *documents(2, start=20)]}
        for one in listed:
            rows = torch.arange(one.first_row, one.first_row + one.rows)
            assert store.values(rows).tolist() == lm.encode(texts[one.id])
        keys = store.take(torch.arange(store.key_count))
        assert open_index(store).search(keys[::19], 1).distances.max() < 1e-5
    knnlm.add([one for one in documents(10) if one.id in {lost.id for lost in done.lost}], living, lm=lm)
    with closing(Datastore.open(living)) as store:
        assert {one.id for one in store.documents()} == LEFT
    assert verify(living, deep=True).sound


def test_a_merge_and_an_export_leave_out_what_was_removed(living, lm, tmp_path):
    build(documents(2, start=30), tmp_path / "other", lm=lm).close()
    merge([living, tmp_path / "other"], tmp_path / "merged")
    assert verify(tmp_path / "merged", deep=True).sound
    with closing(Datastore.open(tmp_path / "merged")) as store:
        assert {one.id for one in store.documents()} == LEFT | {"d30", "d31"}
        texts = {one.id: one.text for start, count in ((0, 10), (20, 2), (30, 2)) for one in
                 documents(count, start=start)}  # fmt: skip
        for one in store.documents():
            assert contents(tmp_path / "merged")[one.sha256][0] == lm.encode(texts[one.id])
    export(living, tmp_path / "out", file_rows=70)
    table = pq.ParquetDataset(tmp_path / "out").read()
    assert set(table["document"].to_pylist()) == LEFT
    tokens: dict[str, list[int]] = {}
    for name, token in zip(table["document"].to_pylist(), table["token"].to_pylist(), strict=True):
        tokens.setdefault(name, []).append(token)
    assert tokens == {name: lm.encode(texts[name]) for name in LEFT}


def test_a_repair_lets_readers_go_on_and_the_next_writer_clears_up(living, lm):
    with closing(Datastore.open(living)) as reader:
        keys = reader.take(torch.arange(reader.key_count))
        generation = reader.generation
        flip(living / "segments/000001/values.npy", -1)
        done = repair(living)
        assert done.segments == (1,)
        assert (living / "segments/000001").exists()
        assert torch.equal(reader.take(torch.arange(reader.key_count)), keys)
        assert reader.stale
        assert reader.reopen().generation > generation
        assert any(holding.path == "lost" for holding in evidence(living).bytes)
    assert verify(living, deep=True).sound
    knnlm.add(documents(1, start=40), living, lm=lm)
    assert not (living / "segments/000001").exists()
    assert verify(living, deep=True).sound
