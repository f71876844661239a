"""Additions, removals and compactions: what is retrieved afterwards, and what open readers see."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from helpers import oracle
from helpers.checksums import seal
from helpers.models import tiny, tiny_tokenizer
from helpers.stores import documents
from knnlm.cli.app import run
from knnlm.corpus import Document
from knnlm.datastore import suffix_array as suffixes
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.codecs import KeyMap
from knnlm.datastore.compact import compact
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.live_numbers import LiveNumbers
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.remove import Selection, list_documents, removal_report, remove
from knnlm.datastore.rewrite import derive, sample_keys
from knnlm.datastore.store import Datastore
from knnlm.datastore.suffix_array import open_suffix_array
from knnlm.errors import DatastoreBusy, DatastoreCorrupt, DatastoreError, ModelMismatch, ParameterError
from knnlm.evaluation.tune import token_frequencies
from knnlm.generation.causal import KnnForCausalLM
from knnlm.index.exact import ExactIndex
from knnlm.ingest.build import add, build
from knnlm.lm.causal import CausalLM
from knnlm.maintenance.merge import merge
from knnlm.maintenance.verify import verify
from knnlm.mixture.mixture import Mixture
from knnlm.training.data import TokenStream, mark_held_out_tokens
from knnlm.training.metric_learning import key_documents

DOCUMENTS = documents(16)
ALL = {"k": 5000, "knn_temperature": 1.0}  # so that no tie at the k-th place is broken one way or the other
SPECS = ("Flat", "IVF4,Flat", "IVF8,PQ8x4", "PQ8x4", "HNSW8", "PCA24,IVF4,Flat")


@pytest.fixture(scope="module")
def built(lm, tmp_path_factory):
    """The first twelve documents, in several segments."""
    path = tmp_path_factory.mktemp("living") / "store"
    build(DOCUMENTS[:12], path, lm=lm, segment_entries=250).close()
    return path


@pytest.fixture
def store_path(built, tmp_path):
    """A copy of it that may be changed."""
    return shutil.copytree(built, tmp_path / "store")


@pytest.fixture(scope="module")
def alone(lm, tmp_path_factory):
    """The keys of each document, read alone; by its id."""
    path = tmp_path_factory.mktemp("alone")
    found = {}
    for document in documents(16):
        with closing(build([document], path / document.id, lm=lm)) as store:
            found[document.id] = store.take(torch.arange(store.entry_count)).numpy()
    return found


def expect(store: Datastore, wanted: list[Document], lm: CausalLM, alone: dict[str, np.ndarray]) -> None:
    """Whatever can be asked of a store must be answered as if there had never been other documents."""
    tokens = [lm.encode(document.text) for document in wanted]
    flat = [token for each in tokens for token in each]
    assert (store.entry_count, store.key_count, store.catalog.document_count()) == (len(flat), len(flat), len(wanted))
    rows = torch.arange(store.entry_count)
    assert store.values(rows).tolist() == flat
    keys = np.concatenate([np.zeros((0, 32), np.float32), *(alone[document.id] for document in wanted)])
    np.testing.assert_allclose(store.take(rows).numpy(), keys, atol=4e-3, rtol=2e-3)
    given = [(first, block) for first, block in store.chunks(97)]
    assert [first for first, _ in given] == np.cumsum([0, *(len(block) for _, block in given)])[:-1].tolist()
    assert torch.equal(torch.cat([torch.zeros(0, 32), *(block for _, block in given)]), store.take(rows))
    first = 0
    for document, stored, each in zip(wanted, store.documents(), tokens, strict=True):
        assert (stored.id, stored.first_entry, stored.entries) == (document.id, first, len(each))
        assert store.holds(document.text)
        for row in (first, first + len(each) - 1):
            assert store.document_at(row) == stored
            before, after = store.around(row, before=5, after=5)
            assert [*before, *after] == each[max(0, row - first - 5) : row - first + 5]
        first += len(each)
    if store.entry_count > 120:
        out = torch.empty(100, 32, dtype=torch.float16)
        store.read(11, out)
        assert torch.equal(out.float(), store.take(torch.arange(11, 111)))


@given(total=st.integers(0, 40), data=st.data())
def test_live_numbers_match_a_list_without_the_gaps(total, data):
    gone = data.draw(st.sets(st.integers(0, max(0, total - 1)), max_size=total)) if total else set()
    gaps = [(number, 1) for number in sorted(gone)]
    numbers = LiveNumbers(total, gaps)
    live = [number for number in range(total) if number not in gone]
    assert numbers.live == len(live)
    everything = np.arange(-1, total + 1)
    right = [live.index(number) if number in live else -1 for number in everything.tolist()]
    assert numbers.to_live(everything).tolist() == right
    assert numbers.to_stored(np.arange(len(live))).tolist() == live
    assert numbers.to_stored(np.array([-1, len(live)])).tolist() == [-1, total]
    assert [numbers.before(number) for number in range(total + 1)] == [
        sum(other < number for other in live) for number in range(total + 1)
    ]
    begin, end = sorted((data.draw(st.integers(0, total)), data.draw(st.integers(0, total))))
    found = [number for first, count in numbers.stretches(begin, end) for number in range(first, first + count)]
    assert found == [number for number in live if begin <= number < end]


def test_added_document_is_found_by_the_next_query(lm, store_path, alone):
    added = add(DOCUMENTS, store_path, lm=lm)
    tokens = sum(len(lm.encode(document.text)) for document in DOCUMENTS[12:])
    assert (added.documents, added.tokens, added.skipped) == (4, tokens, 12)
    with closing(Datastore.open(store_path)) as store:
        expect(store, DOCUMENTS, lm, alone)
        assert store.generation == added.generation > 0
        last = alone["d15"][-5]
        found = open_index(store).search(torch.from_numpy(last)[None], 1)
        assert store.document_at(int(found.ids[0, 0])).id == "d15"


def test_duplicate_is_added_once_and_a_removed_document_can_be_added_again(lm, store_path, alone):
    twice = [DOCUMENTS[12], DOCUMENTS[0], Document("other name", "elsewhere", DOCUMENTS[12].text)]
    added = add(twice, store_path, lm=lm)
    assert (added.documents, added.skipped) == (1, 2)
    again = add(twice, store_path, lm=lm)
    assert (again.documents, again.tokens, again.skipped, again.generation) == (0, 0, 3, added.generation)
    remove(store_path, document="d0")
    assert add(twice, store_path, lm=lm).documents == 1
    with closing(Datastore.open(store_path)) as store:
        expect(store, [*DOCUMENTS[1:13], DOCUMENTS[0]], lm, alone)
        numbers = [stored.number for stored in store.documents()]
        assert numbers == [*range(1, 13), 13]  # no number is given twice


def test_add_refuses_another_model_another_layer_and_an_unfinished_build(lm, store_path, tmp_path):
    other = CausalLM(tiny("llama", seed=1), tiny_tokenizer(), name="other-llama")
    with pytest.raises(ModelMismatch, match=r"built with tiny-llama \(weights .*the loaded model is other-llama"):
        add(DOCUMENTS, store_path, lm=other)
    place = CausalLM(tiny("llama"), tiny_tokenizer(), name="tiny-llama", key_layer="output")
    with pytest.raises(ModelMismatch, match="key layer"):
        add(DOCUMENTS, store_path, lm=place)
    with closing(Catalog.open(store_path / "catalog.db", write=True)) as catalog:
        catalog.put(state="building")
    for change in (lambda: add(DOCUMENTS, store_path, lm=lm), lambda: remove(store_path, document="d1")):
        with pytest.raises(DatastoreError, match="unfinished build"):
            change()
    with pytest.raises(DatastoreError, match="not a store"):
        add(DOCUMENTS, tmp_path, lm=lm)
    assert not (tmp_path / "readers.lock").exists()


@pytest.mark.parametrize("gone", [["d0"], ["d11"], ["d3", "d4", "d5"], ["d1", "d10"], [f"d{n}" for n in range(12)]])
def test_removed_document_is_not_retrieved_before_or_after_a_compaction(lm, store_path, alone, gone):
    wanted = [document for document in DOCUMENTS[:12] if document.id not in gone]
    whole = Datastore.open(store_path).fingerprint
    for name in gone:
        removed = remove(store_path, document=name)
        assert [document.id for document in removed.documents] == [name]
    for _ in range(2):
        with closing(Datastore.open(store_path)) as store:
            expect(store, wanted, lm, alone)
            assert store.fingerprint != whole
            for name in gone:
                assert not store.holds(DOCUMENTS[int(name[1:])].text)
        done = compact(store_path)
        assert done.purged
    assert removal_report(store_path).bytes == ()
    add(DOCUMENTS[12:], store_path, lm=lm)
    with closing(Datastore.open(store_path)) as store:
        expect(store, [*wanted, *DOCUMENTS[12:]], lm, alone)


def test_compaction_erases_tokens_keys_and_name_of_a_removed_document(lm, store_path):
    secret = Document(
        "the-secret-id", "the-secret-source.txt", "Quartz sphinx, judge my vow: 80 black jugs of wax! " * 3
    )
    add([secret], store_path, lm=lm)
    store = Datastore.open(store_path)
    build_index(store, "IVF4,Flat")
    open_suffix_array(store)
    first = next(stored.first_entry for stored in store.documents() if stored.id == secret.id)
    tokens = np.array(lm.encode(secret.text), np.int32)
    needles = {
        "tokens": tokens[:6].tobytes(),
        "numbers": (tokens[:6] + 1).tobytes(),  # as sorted text has them
        "key": store.take(torch.tensor([first + 5])).numpy().astype(np.float16).tobytes(),
        "float32 key": store.take(torch.tensor([first + 5])).numpy().tobytes(),  # as an index has it
        "id": secret.id.encode(),
        "source": secret.source.encode(),
        "hash": bytes(list(store.documents())[-1].sha256, "ascii"),
    }
    store.close()

    def found() -> set[str]:
        files = [file for file in store_path.rglob("*") if file.is_file()]
        return {name for file in files for name, needle in needles.items() if needle in file.read_bytes()}

    assert found() == set(needles)
    remove(store_path, source="the-secret-*")
    assert {"tokens", "key", "float32 key"} <= found()
    assert {held.path for held in removal_report(store_path).bytes} >= {"index/000000"}
    assert compact(store_path).purged
    assert found() == set()
    assert removal_report(store_path).bytes == ()


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("spec", SPECS)
def test_every_index_returns_k_live_neighbours_after_removals_and_additions(lm, store_path, spec, metric):
    with closing(Datastore.open(store_path)) as store:
        build_index(store, spec, metric=metric)
    for name in ("d2", "d3", "d7"):
        remove(store_path, document=name)
    add(DOCUMENTS[12:14], store_path, lm=lm)
    with closing(Datastore.open(store_path)) as store:
        keys = store.take(torch.arange(store.entry_count))
        queries = keys[::37] + 0.01
        for rerank in (True, False):
            index = open_index(store, metric=metric, rerank=rerank)
            for k in (1, 20, store.entry_count, store.entry_count + 5):
                found = index.search(queries, k)
                there = min(k, store.entry_count)
                assert (found.ids[:, :there] >= 0).all()
                assert (found.ids[:, there:] == -1).all()
                assert all(len(set(row.tolist())) == there for row in found.ids[:, :there])
                assert (found.distances.nan_to_num(posinf=1e30).diff(dim=1) >= 0).all()
        nearest = open_index(store, metric=metric).search(queries, 10)
        for query, row in zip(queries.numpy(), nearest.distances.numpy(), strict=True):
            right = np.sort(oracle.distances(query, keys.numpy(), metric))[:10]
            assert (row >= right - 1e-3 - 1e-4 * np.abs(right)).all()
            if spec == "Flat":
                np.testing.assert_allclose(row, right, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("spec", ["HNSW4", "HNSW32", "IVF64,Flat"])
def test_every_index_returns_k_neighbours_without_removals(lm, store_path, spec):
    with closing(Datastore.open(store_path)) as store:
        build_index(store, spec)
    remove(store_path, document="d0")
    compact(store_path)
    with closing(Datastore.open(store_path)) as store:
        keys = store.take(torch.arange(store.entry_count))
        for rerank in (True, False):
            index = open_index(store, rerank=rerank)
            for k in (1, 300, store.entry_count - 5, store.entry_count, store.entry_count + 5):
                found, there = index.search(keys[::11], k), min(k, store.entry_count)
                assert (found.ids[:, there:] == -1).all()
                assert all(len(set(row) - {-1}) == there for row in found.ids.tolist())
                assert (found.distances.nan_to_num(posinf=1e30).diff(dim=1) >= 0).all()
                right = oracle.distances(keys[11].numpy(), keys.numpy(), "l2")[found.ids[1, :there].numpy()]
                np.testing.assert_allclose(found.distances[1, :there], right, atol=1e-3, rtol=1e-3)


def test_index_returns_k_neighbours_when_all_nearest_are_removed(lm, store_path):
    with closing(Datastore.open(store_path)) as store:
        build_index(store, "IVF12,Flat")
        queries = store.take(torch.arange(0, 60))
    for number in range(11):
        remove(store_path, document=f"d{number}")
    with closing(Datastore.open(store_path)) as store:
        found = open_index(store).search(queries, 50)
        right = ExactIndex(store.keys).search(queries, 50)
        assert torch.equal(found.ids.sort(1).values, right.ids.sort(1).values)


def test_index_built_after_a_removal_has_only_live_keys(lm, store_path):
    remove(store_path, document="d4")
    with closing(Datastore.open(store_path)) as store:
        build_index(store, "Flat")
        right = ExactIndex(store.keys).search(store.take(torch.arange(40)), 5)
        assert torch.equal(
            open_index(store).search(store.take(torch.arange(40)), 5).distances > 1e-4, right.distances > 1e-4
        )
    remove(store_path, document="d8")
    add(DOCUMENTS[12:13], store_path, lm=lm)
    with closing(Datastore.open(store_path)) as store:
        queries = store.take(torch.arange(0, store.entry_count, 11)) + 0.01
        right = ExactIndex(store.keys).search(queries, 5)
        found = open_index(store).search(queries, 5)
        np.testing.assert_allclose(found.distances, right.distances, atol=1e-3)


def test_index_is_on_disk_before_it_is_committed(store_path, monkeypatch):
    synced, really = list[tuple[int, int]](), os.fsync

    def noting(handle: int) -> None:
        really(handle)
        with closing(Catalog.open(store_path / "catalog.db")) as catalog:
            synced.append((os.fstat(handle).st_ino, len(catalog.indexes())))

    monkeypatch.setattr(os, "fsync", noting)
    with closing(Datastore.open(store_path)) as store:
        build_index(store, "Flat")
    file = next((store_path / "index").rglob("*.faiss"))
    assert (file.stat().st_ino, 0) in synced


@pytest.mark.parametrize("before", ["no index", "index"])
@pytest.mark.parametrize("case", ["added", "one removed", "half removed", "removed and added"])
def test_reader_finds_all_of_its_snapshot_after_a_newer_index(lm, store_path, case, before):
    if "half" in case:
        add(DOCUMENTS[12:13], store_path, lm=lm)  # a reader of a later generation than the first
    if before == "index":
        with closing(Datastore.open(store_path)) as store:
            build_index(store, "Flat")
    with closing(Datastore.open(store_path)) as reader:
        for name in {"one removed": ["d1"], "half removed": [f"d{n}" for n in range(6)]}.get(case, []):
            remove(store_path, document=name)
        if case == "removed and added":
            remove(store_path, document="d11")
        if "added" in case:
            add(DOCUMENTS[13:15], store_path, lm=lm)
        with closing(Datastore.open(store_path)) as other:
            build_index(other, "Flat")
            right = ExactIndex(other.keys).search(other.take(torch.arange(other.entry_count)), 5)
            found = open_index(other).search(other.take(torch.arange(other.entry_count)), 5)
            np.testing.assert_allclose(found.distances, right.distances, atol=1e-3)
        keys = reader.take(torch.arange(reader.entry_count)).numpy()
        index = open_index(reader)
        found = index.search(torch.from_numpy(keys), 5)
        assert (found.ids >= 0).all()
        for key, row in zip(keys[::7], found.distances.numpy()[::7], strict=True):
            np.testing.assert_allclose(row, np.sort(oracle.distances(key, keys, "l2"))[:5], atol=1e-3)
        if before == "index":  # its own index is still there for it
            assert type(index).__name__ == "RerankedIndex"


def test_reader_keeps_its_snapshot_until_it_reopens(lm, store_path, alone):
    with closing(Datastore.open(store_path)) as store:
        build_index(store, "IVF4,Flat")
    old = Datastore.open(store_path)
    index = open_index(old)
    remove(store_path, document="d5")
    add(DOCUMENTS[12:14], store_path, lm=lm)
    assert old.stale
    done = compact(store_path)
    assert not done.purged
    held = {holding.path for holding in removal_report(store_path).bytes}
    assert any(path.startswith("segments/") for path in held)
    for store in (old, old.reopen()):
        assert store.stale == (store is old)
        wanted = DOCUMENTS[:12] if store is old else [*DOCUMENTS[:5], *DOCUMENTS[6:14]]
        expect(store, wanted, lm, alone)
        found = (index if store is old else open_index(store)).search(store.take(torch.arange(20)) + 0.01, 7)
        right = ExactIndex(store.keys).search(store.take(torch.arange(20)) + 0.01, 7)
        np.testing.assert_allclose(found.distances[:, 0], right.distances[:, 0], atol=1e-4)
        assert type(open_index(store)).__name__ == "RerankedIndex"
        store.close()
    add(DOCUMENTS[14:15], store_path, lm=lm)  # any writer removes files without a reader
    assert removal_report(store_path).bytes == ()
    with closing(Datastore.open(store_path)) as store:
        expect(store, [*DOCUMENTS[:5], *DOCUMENTS[6:15]], lm, alone)


def test_figures_and_explanations_equal_those_of_a_store_without_the_document(lm, store_path, tmp_path):
    gone = ("d1", "d6")
    for name in gone:
        remove(store_path, document=name)
    fresh = build([one for one in DOCUMENTS[:12] if one.id not in gone], tmp_path / "fresh", lm=lm, segment_entries=250)
    held_out = documents(2, start=50)
    for memories in ("knn", "ngram", "knn,ngram"):
        figures = []
        for path in (store_path, fresh.path):
            mixture = Mixture.open(path, lm, memories=memories, **({} if memories == "ngram" else ALL))
            figures.append(mixture.evaluate(held_out).perplexity)
            if memories == "knn":
                told = mixture.explain(DOCUMENTS[1].text, top=8)
                assert not {voice.document for token in told for voice in token.neighbours} & set(gone)
        assert figures[0] == pytest.approx(figures[1], rel=2e-3)
    compact(store_path)
    again = Mixture.open(store_path, lm, memories="knn,ngram", **ALL).evaluate(held_out).perplexity
    assert again == pytest.approx(figures[1], rel=2e-3)


def test_everything_derived_equals_that_of_a_store_without_the_document(lm, store_path, tmp_path):
    gone = ("d0", "d6", "d11")
    for name in gone:
        remove(store_path, document=name)
    wanted = [one for one in DOCUMENTS[:12] if one.id not in gone]
    with (
        closing(Datastore.open(store_path)) as store,
        closing(build(wanted, tmp_path / "fresh", lm=lm, segment_entries=250)) as fresh,
    ):
        assert torch.equal(token_frequencies(store), token_frequencies(fresh))
        texts = TokenStream.from_store(store), TokenStream.from_store(fresh)
        assert texts[0].fingerprint == texts[1].fingerprint
        assert texts[0].boundaries_fingerprint == texts[1].boundaries_fingerprint
        np.testing.assert_array_equal(key_documents(store), key_documents(fresh))
        held_out = [mark_held_out_tokens(one, 0.2, seed=3) for one in (store, fresh)]
        np.testing.assert_array_equal(*held_out)
        for name in ("text", "order", "followers", "first"):
            np.testing.assert_array_equal(
                getattr(open_suffix_array(store), name), getattr(open_suffix_array(fresh), name)
            )
        assert torch.equal(sample_keys(store, 50, seed=1), sample_keys(fresh, 50, seed=1))
        queries = store.take(torch.arange(0, store.entry_count, 97)) + 0.01
        fused, plain = ExactIndex(store.keys, kernels=True), ExactIndex(fresh.keys, kernels=False)
        found, right = fused.search(queries, 9), plain.search(queries, 9)
        np.testing.assert_allclose(found.distances, right.distances, atol=2e-2, rtol=1e-2)
        assert (store.bytes, store.entry_count) == (fresh.bytes, fresh.entry_count)


def test_copy_of_a_store_has_no_removed_entries(lm, store_path, tmp_path, alone):
    for name in ("d0", "d7", "d8"):
        remove(store_path, document=name)
    wanted = [document for document in DOCUMENTS[:12] if document.id not in ("d0", "d7", "d8")]
    with closing(Datastore.open(store_path)) as store:
        with closing(derive(store, tmp_path / "copy")) as copy:
            expect(copy, wanted, lm, alone)
        kept = torch.arange(0, store.key_count, 3)
        with closing(derive(store, tmp_path / "pruned", keep=kept)) as pruned:
            assert torch.equal(pruned.entries_of(torch.arange(len(kept))), kept)
            assert torch.equal(pruned.take(torch.arange(len(kept))), store.take(kept))


@pytest.mark.parametrize("gone", [("d0",), ("d1",), ("d3",), ("d0", "d1"), ("d1", "d3"), ("d0", "d1", "d2", "d3")])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_document_without_entries_moves_to_an_existing_segment(lm, tmp_path, place, gone):
    empty = Document(id="empty", source="empty.txt", text="")
    given = [*DOCUMENTS[:place], empty, *DOCUMENTS[place:4]]
    build(given, tmp_path / "store", lm=lm, segment_entries=1).close()  # it shares a segment with the next one
    for name in gone:
        remove(tmp_path / "store", document=name)
    # Where nothing else is left there is no segment to be in, and a build of it alone is empty too.
    wanted = [one.id for one in given if one.id not in gone] if len(gone) < 4 else []
    with closing(Datastore.open(tmp_path / "store")) as store:
        derive(store, tmp_path / "copy").close()
        merged = merge([tmp_path / "store"], tmp_path / "merged")
    compact(tmp_path / "store", segment_entries=1)
    for name in ("store", "copy", "merged"):
        assert verify(tmp_path / name, deep=True).problems == ()
        with closing(Datastore.open(tmp_path / name)) as store:
            assert [one.id for one in store.documents()] == wanted
            tokens = [token for one in DOCUMENTS[:4] if one.id in wanted for token in lm.encode(one.text)]
            assert store.values(torch.arange(store.entry_count)).tolist() == tokens
    if wanted:
        assert (merged.documents, merged.duplicates) == (len(wanted), 0)


def test_pruned_and_mapped_store_can_be_changed(lm, store_path, tmp_path, alone):
    matrix = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0))).Q[:, :8]
    key_map = KeyMap(matrix, torch.full((32,), 0.1))
    with closing(Datastore.open(store_path)) as store:
        keep = torch.arange(0, store.key_count, 2)
        counts = torch.arange(store.key_count) % 3 + 1.0
        derive(store, tmp_path / "small", keep=keep, counts=counts, key_map=key_map).close()
        documents_there = list(store.documents())
    small = tmp_path / "small"
    add(DOCUMENTS[12:13], small, lm=lm)
    remove(small, document="d3")
    first, rows = documents_there[3].first_entry, documents_there[3].entries
    stays = keep[(keep < first) | (keep >= first + rows)]
    shift = torch.where(stays >= first + rows, stays - rows, stays)
    added = torch.from_numpy(alone["d12"])
    for _ in range(2):
        with closing(Datastore.open(small)) as store:
            keys = torch.arange(store.key_count)
            assert store.key_count == len(stays) + len(added)
            assert store.entries_of(keys[: len(stays)]).tolist() == shift.tolist()
            assert store.entries_of(keys[len(stays) :]).tolist() == list(
                range(store.entry_count - len(added), store.entry_count)
            )
            assert store.counts(keys[: len(stays)]).tolist() == counts[stays].tolist()
            assert store.counts(keys[len(stays) :]).tolist() == [1.0] * len(added)
            np.testing.assert_allclose(store.take(keys[len(stays) :]), key_map.apply(added), atol=2e-2)
            assert "d3" not in {stored.id for stored in store.documents()}
        assert compact(small).purged


def test_documents_are_selected_by_id_pattern_and_field(store_path):
    everything, total = list_documents(store_path)
    assert (len(everything), total) == (12, 12)
    page, total = list_documents(store_path, first=3, limit=2)
    assert ([one.id for one in page], total) == (["d3", "d4"], 12)
    for selection, right in (
        (Selection(document="d7"), ["d7"]),
        (Selection(source="text.jsonl:1*"), ["d0", "d9", "d10", "d11"]),
        (Selection(where=("number=4",)), ["d4"]),
        (Selection(where=(f"sha256={everything[2].sha256}", "id=d2")), ["d2"]),
        (Selection(source="*:1*", where=("id=d10",)), ["d10"]),
        (Selection(where=("source=text.jsonl:3",)), ["d2"]),
        (Selection(document="d1' OR '1'='1"), []),
    ):
        assert [one.id for one in list_documents(store_path, selection)[0]] == right, selection
    for wrong in ("colour=red", "number=four", "id", "rows; DROP TABLE documents=1"):
        with pytest.raises(ParameterError, match="Invalid condition"):
            list_documents(store_path, Selection(where=(wrong,)))
    with pytest.raises(ParameterError, match="No documents are selected"):
        remove(store_path)


@given(
    names=st.lists(st.text("ab[]?^-!1.\\", min_size=1, max_size=6), min_size=1, max_size=6, unique=True),
    pattern=st.text("ab[]?^-!1.\\*", max_size=6),
)
def test_star_is_the_only_wildcard_of_a_source_pattern(names, pattern):
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE documents (source TEXT)")
        connection.executemany("INSERT INTO documents VALUES (?)", ((name,) for name in names))

        def chosen(source: str) -> set[str]:
            condition, values = Selection(source=source).condition()
            return {row[0] for row in connection.execute(f"SELECT source FROM documents WHERE {condition}", values)}

        assert [chosen(name) for name in names] == [{name} for name in names]
        regular = re.compile(".*".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)
        assert chosen(pattern) == {name for name in names if regular.fullmatch(name)}


def test_number_beyond_the_catalogs_range_is_refused(store_path, capfd):
    for option in ("--limit", "--first"):
        code, _, err = knnlm(capfd, "documents", store_path, option, "99999999999999999999")
        assert code == 2
        assert "must be from 0 to" in err
        assert "damaged" not in err


def test_suffix_array_is_not_stored_if_a_document_is_removed_meanwhile(store_path, monkeypatch):
    @contextmanager
    def overtaken(folder, **options):
        remove(store_path, document="d1")  # by another process, at the last moment
        with writer_lock(folder, **options):
            yield

    monkeypatch.setattr(suffixes, "writer_lock", overtaken)
    with closing(Datastore.open(store_path)) as store:
        made = open_suffix_array(store)
        assert (len(made.text), made.kept) == (
            store.entry_count + 12 + 1,
            False,
        )  # all of the snapshot, for this reader alone
    assert not (store_path / "ngram").exists()
    assert "ngram" not in {held.path for held in removal_report(store_path).bytes}


def test_files_trained_on_a_removed_document_are_reported_until_trained_again(store_path):
    (store_path / "output").mkdir()
    (store_path / "output" / "output.safetensors").write_bytes(b"trained")
    assert removal_report(store_path).trained == ()
    remove(store_path, document="d1")
    compact(store_path)
    (found,) = removal_report(store_path).trained
    assert (found.path, found.erased_by) == ("output", "train again")
    (store_path / "output" / "output.safetensors").write_bytes(b"retrain")
    assert removal_report(store_path).trained == ()


def test_every_gate_trained_on_a_removed_document_is_reported(store_path):
    (store_path / "mixtures").mkdir()
    for name in ("one", "two"):
        (store_path / "mixtures" / f"{name}.safetensors").write_bytes(name.encode())
    remove(store_path, document="d1")
    (store_path / "mixtures" / "three.safetensors").write_bytes(b"three")
    (store_path / "mixtures" / "two.safetensors").unlink()
    assert [one.path for one in removal_report(store_path).trained] == ["mixtures/one.safetensors"]
    remove(store_path, document="d2")
    assert [one.path for one in removal_report(store_path).trained] == [
        "mixtures/one.safetensors",
        "mixtures/three.safetensors",
    ]


def test_offset_that_may_include_removed_keys_is_reported(lm, tmp_path):
    with closing(build(DOCUMENTS[:4], tmp_path / "m", lm=lm)) as store:
        keys = store.take(torch.arange(store.entry_count))
    with closing(Catalog.open(tmp_path / "m" / "catalog.db", write=True)) as catalog:
        catalog.put(offset=keys.mean(0).tolist())
    assert removal_report(tmp_path / "m").trained == ()
    remove(tmp_path / "m", document="d1")
    (found,) = removal_report(tmp_path / "m").trained
    assert (found.path, found.erased_by) == ("catalog.db", "build again")
    assert "offset" in found.what


def test_stale_suffix_array_is_reported_while_it_exists(store_path):
    def named() -> bool:
        return any(one.path == "ngram" for one in removal_report(store_path).bytes)

    reader = Datastore.open(store_path)
    open_suffix_array(reader)
    assert not named()
    remove(store_path, document="d1")
    assert named()
    assert not compact(store_path).purged
    assert (store_path / "ngram").exists()
    assert named()
    reader.close()
    assert compact(store_path).purged
    assert not named()
    remove(store_path, document="d2")
    with closing(Datastore.open(store_path)) as store:
        open_suffix_array(store)  # of what is there now
    assert (store_path / "ngram").exists()
    assert not named()


def test_second_writer_is_refused_or_waits_and_a_dead_writer_blocks_nothing(store_path):
    script = textwrap.dedent("""
        import sys, time
        from filelock import FileLock  # as a writer does it, without the seconds that torch takes to import
        with FileLock(sys.argv[1] + "/writer.lock", timeout=0):
            print("locked", flush=True)
            time.sleep(float(sys.argv[2]))
            print("done", flush=True)
    """)

    def start(seconds: float) -> subprocess.Popen:
        arguments = [sys.executable, "-c", script, str(store_path), str(seconds)]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "locked\n"
        return process

    process = start(600)
    with pytest.raises(DatastoreBusy, match="wait with --wait"):
        remove(store_path, document="d1")
    begin = time.monotonic()
    with pytest.raises(DatastoreBusy, match=r"after 0.3 s"):
        remove(store_path, document="d1", wait=0.3)
    assert time.monotonic() - begin >= 0.3
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    remove(store_path, document="d1")
    process = start(0.5)
    remove(store_path, document="d2", wait=30)
    assert process.wait() == 0


def test_read_only_folder_is_read(lm, store_path, alone, monkeypatch):
    remove(store_path, document="d1")
    compact(store_path)
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as one who may do everything
    with closing(Datastore.open(store_path)) as store:
        expect(store, [DOCUMENTS[0], *DOCUMENTS[2:12]], lm, alone)
        assert not store.stale


def test_reader_without_write_permission_keeps_its_snapshot(lm, store_path, alone, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        store = Datastore.open(store_path)
    with closing(store):
        add(DOCUMENTS[12:16], store_path, lm=lm)
        for number in range(6):
            remove(store_path, document=f"d{number}")
        assert not compact(store_path).purged
        expect(store, DOCUMENTS[:12], lm, alone)
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        assert store.stale
        with closing(Datastore.open(store_path)) as now:
            expect(now, DOCUMENTS[6:16], lm, alone)


def test_reader_without_write_permission_needs_a_store_at_rest(store_path, monkeypatch):
    with closing(sqlite3.connect(store_path / "catalog.db", isolation_level=None)) as writer:
        writer.execute("INSERT OR REPLACE INTO meta VALUES ('number', '1')")
        with monkeypatch.context() as patched:
            patched.setattr(os, "access", lambda *_: False)
            with pytest.raises(DatastoreBusy, match=r"is read-only for this process, and catalog\.db-wal shows"):
                Catalog.open(store_path / "catalog.db", hold=True, compare=False)
    monkeypatch.setattr(os, "access", lambda *_: False)  # closing the last connection has emptied the log
    with closing(Catalog.open(store_path / "catalog.db", hold=True, compare=False)) as catalog:
        assert catalog.get("number") == 1
        assert len(list(catalog.documents())) == 12
        assert catalog.integrity() == []


@contextmanager
def read_without_write_permission(store_path: Path, lm, alone, expected) -> Iterator[Connection]:
    """Open the store in a process without write permission, which reads all of it when it is told to."""
    near, far = multiprocessing.Pipe()
    child = os.fork()
    if not child:
        code = 1
        with suppress(BaseException):
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            assert not os.access(store_path, os.W_OK)
            with closing(Datastore.open(store_path)) as store:
                far.send("open")
                far.recv()
                expect(store, expected, lm, alone)
            far.send("read")
            code = 0
        os._exit(code)
    far.close()
    try:
        yield near
    finally:
        near.close()
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("lock", ["no lock", "a lock"])
def test_files_stay_while_a_reader_without_write_permission_uses_them(lm, store_path, alone, lock):
    """Not even the readers' lock: it holds the folder itself."""
    with tempfile.TemporaryDirectory(prefix="knnlm-stranger-") as folder:
        path = Path(folder) / "store"
        shutil.copytree(store_path, path)
        (path / "readers.lock").unlink(missing_ok=True)
        if lock == "a lock":
            Datastore.open(path).close()
        Path(folder).chmod(0o755)
        allowed = path.stat().st_mode
        if os.getuid():
            path.chmod(0o555)
        with read_without_write_permission(path, lm, alone, DOCUMENTS[:12]) as reader:
            assert reader.recv() == "open"
            assert (path / "readers.lock").exists() == (lock == "a lock")
            path.chmod(allowed)
            remove(path, document="d1")
            before = set((path / "segments").iterdir())
            assert not compact(path, segment_entries=10_000).purged
            assert before < set((path / "segments").iterdir())
            reader.send("read")
            assert reader.recv() == "read"
        assert compact(path).purged
        assert not before & set((path / "segments").iterdir())
        with closing(Datastore.open(path)) as store:
            expect(store, [DOCUMENTS[0], *DOCUMENTS[2:12]], lm, alone)


def test_compaction_refuses_to_copy_damaged_files(store_path):
    remove(store_path, document="d1")
    file = store_path / "segments" / "000000" / "keys.npy"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(DatastoreCorrupt, match=r"keys.npy: checksum mismatch"):
        compact(store_path)
    assert Datastore.open(store_path).catalog.document_count() == 11


def test_index_with_too_few_keys_left_becomes_exact_search(lm, store_path, alone):
    with closing(Datastore.open(store_path)) as store:
        build_index(store, "IVF300,Flat")
    for number in range(10):
        remove(store_path, document=f"d{number}")
    assert compact(store_path).index == "exact"
    with closing(Datastore.open(store_path)) as store:
        expect(store, DOCUMENTS[10:12], lm, alone)
        assert open_index(store).search(store.take(torch.arange(5)), 3).ids.min() >= 0


def test_invalid_removed_rows_are_corrupt(store_path):
    remove(store_path, document="d1")
    with closing(sqlite3.connect(store_path / "catalog.db", isolation_level=None)) as connection:
        connection.execute("UPDATE removed SET entries = 100000")
    seal(store_path / "catalog.db")
    with pytest.raises(DatastoreCorrupt, match=r"entries from .* on were removed, which are not in segment"):
        Datastore.open(store_path)


def knnlm(capfd, *arguments) -> tuple[int, str, str]:
    """Run a command in this process."""
    code = run([str(argument) for argument in arguments])
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def test_commands_match_the_functions(store_path, model_folder, tmp_path, capfd, lm):
    text = tmp_path / "new.txt"
    text.write_text(DOCUMENTS[13].text)
    command = ("add", store_path, text, "--model", model_folder, "--json")
    code, out, _ = knnlm(capfd, *command)
    metadata = json.loads(out)
    assert (code, metadata["documents"], metadata["skipped"]) == (0, 1, 0)
    assert metadata["tokens"] == len(lm.encode(DOCUMENTS[13].text))
    assert json.loads(knnlm(capfd, *command)[1])["skipped"] == 1
    listed = json.loads(knnlm(capfd, "documents", store_path, "--source", "*new.txt", "--json")[1])
    assert (listed["total"], listed["documents"][0]["tokens"]) == (1, metadata["tokens"])
    code, out, _ = knnlm(capfd, "documents", store_path, "--limit", 2)
    assert code == 0
    assert "2 of 13 documents; more with --first 2" in out
    code, out, _ = knnlm(capfd, "remove", store_path, "--source", "*new.txt", "--dry-run")
    assert "1 document" in out
    assert "would be removed" in out
    metadata = json.loads(knnlm(capfd, "remove", store_path, "--where", "id=d3", "--report", "--json")[1])
    assert [one["id"] for one in metadata["documents"]] == ["d3"]
    assert metadata["report"]["removed_tokens"] == metadata["tokens"]
    code, out, _ = knnlm(capfd, "remove", store_path, "--report")
    assert "segments/000001/keys.npy: " in out
    code, out, _ = knnlm(capfd, "compact", store_path, "--json")
    metadata = json.loads(out)
    assert (code, metadata["purged"], metadata["tokens_dropped"]) == (0, True, len(lm.encode(DOCUMENTS[3].text)))
    assert "No file contains bytes of removed documents." in knnlm(capfd, "remove", store_path, "--report")[1]
    for arguments, message in (
        (("remove", store_path, "--document", "d3"), "has no document for --document d3"),
        (("remove", store_path), "No documents are selected"),
        (("remove", store_path, "--where", "colour=red"), "Invalid condition"),
        (("compact", tmp_path / "nowhere"), "is not a store"),
    ):
        code, out, err = knnlm(capfd, *arguments)
        assert (code, out) == (2, "")
        assert message in err
    assert json.loads(knnlm(capfd, "info", store_path, "--json")[1])["removed_tokens"] == 0


def test_saved_model_has_no_byte_of_a_removed_document(lm, store_path, tmp_path):
    tokens = np.array(lm.encode(DOCUMENTS[4].text), np.int32)[:12].tobytes()
    remove(store_path, document="d4")
    mixture = Mixture.open(store_path, lm, memories="knn")
    assert not mixture.stale
    KnnForCausalLM(mixture).save_pretrained(tmp_path / "model", copy_store=True)
    files = [file for file in (tmp_path / "model").rglob("*") if file.is_file()]
    assert not [file for file in files if tokens in file.read_bytes()]
    assert any(tokens in file.read_bytes() for file in store_path.rglob("*.npy"))
    remove(store_path, document="d5")
    assert mixture.stale
    newer = mixture.reopen()
    assert not newer.stale
    assert newer.lm is lm
    assert newer.store.entry_count == mixture.store.entry_count - len(lm.encode(DOCUMENTS[5].text))
    told = newer.explain(DOCUMENTS[5].text, top=3)
    assert "d5" not in {voice.document for token in told for voice in token.neighbours}
    with pytest.raises(ParameterError, match="can be opened again"):
        Mixture(lm, mixture.memories).reopen()


def test_invalid_coverage_of_the_index_is_corrupt(store_path):
    with closing(Datastore.open(store_path)) as store:
        build_index(store, "Flat")
    for bad in ("nothing", [1], [[1]], [[0, -1]], [["0", 1]], [[0, 1 << 60]]):
        with closing(Catalog.open(store_path / "catalog.db", write=True)) as catalog:
            catalog.put(index_skipped=bad)
        with (
            closing(Datastore.open(store_path)) as store,
            pytest.raises(DatastoreCorrupt, match="keys that the index lacks"),
        ):
            open_index(store)


def test_saved_model_has_no_files_replaced_by_a_repair_or_a_compaction(lm, store_path, tmp_path):
    with closing(Datastore.open(store_path)):  # a reader, so that the old segments stay
        remove(store_path, document="d3")
        assert not compact(store_path).purged
        (store_path / "lost" / "001").mkdir(parents=True)
        known = {f"{segment.id:06d}" for segment in Datastore.open(store_path).segments}
        assert {entry.name for entry in (store_path / "segments").iterdir()} > known
        KnnForCausalLM(Mixture.open(store_path, lm)).save_pretrained(tmp_path / "model", copy_store=True)
    copied = tmp_path / "model" / "store"
    assert {entry.name for entry in (copied / "segments").iterdir()} == known
    assert not (copied / "lost").exists()
