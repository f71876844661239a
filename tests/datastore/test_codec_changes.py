"""Memories whose keys are bytes or codes live as others do: what is added is encoded as the rest, what goes is gone."""

from __future__ import annotations

import shutil
from contextlib import closing

import numpy as np
import pytest
import torch

from helpers import oracle
from helpers.damage import flip
from helpers.stores import KEY_FORMATS as WAYS
from helpers.stores import coded_keys, documents
from helpers.stores import documents_by_hash as contents
from knnlm.datastore.compact import compact
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.remove import remove
from knnlm.datastore.rewrite import compress
from knnlm.datastore.store import Datastore
from knnlm.ingest.build import add, build
from knnlm.maintenance.export import export
from knnlm.maintenance.merge import merge
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify

NEW = documents(3, start=20)


@pytest.fixture(scope="module", params=WAYS)
def built(request, lm, tmp_path_factory):
    """Ten documents in five segments, with an index."""
    path = tmp_path_factory.mktemp("coded") / "store"
    with closing(build(documents(10), path, lm=lm, segment_entries=150, key_format=request.param)) as store:
        build_index(store, "IVF4,Flat")
    return path


@pytest.fixture
def store_path(built, tmp_path):
    """A copy of it that may be changed."""
    return shutil.copytree(built, tmp_path / "store")


@pytest.fixture(scope="module")
def plain(lm, tmp_path_factory):
    """The keys of all documents as the model gives them, by the hash of the text."""
    path = tmp_path_factory.mktemp("plain") / "store"
    build([*documents(10), *NEW], path, lm=lm, segment_entries=1, key_format="float32").close()
    return {name: keys for name, (_, keys) in contents(path).items()}


def raw(path) -> dict[str, bytes]:
    """The stored bytes of every document's keys, by the hash of its text."""
    found = {}
    with closing(Datastore.open(path)) as store:
        for document in list(store.catalog.documents()):
            segment = next(one for one in store.segments if one.id == document.segment)
            keys = np.load(path / "segments" / f"{segment.id:06d}" / "keys.npy")
            first = document.first_entry - segment.first_entry
            found[document.sha256] = keys[first : first + document.entries].tobytes()
    return found


def nearest_are_found(store: Datastore) -> None:
    """Search as brute force on what is stored does."""
    keys = store.take(torch.arange(store.key_count))
    queries = keys[::23] + 0.01
    found = open_index(store).search(queries, 6)
    for query, distances in zip(queries.numpy(), found.distances.numpy(), strict=True):
        right = np.sort(oracle.distances(query, keys.numpy(), "l2"))[:6]
        np.testing.assert_allclose(distances, right, rtol=1e-3, atol=1e-3)


def test_added_keys_are_encoded_by_the_stored_codec(store_path, lm, plain):
    before = raw(store_path)
    codec = (store_path / "codec.safetensors").read_bytes()
    done = add(NEW, store_path, lm=lm)
    assert (done.documents, done.skipped, done.generation) == (3, 0, 1)  # in two segments, but one change
    assert (store_path / "codec.safetensors").read_bytes() == codec
    after = raw(store_path)
    assert {name: after[name] for name in before} == before
    found = contents(store_path)
    with closing(Datastore.open(store_path)) as store:
        for name in set(found) - set(before):
            right = coded_keys(store, plain[name])
            assert found[name][1].shape == right.shape
            # A key may lie between two codes, and is read in another batch here.
            assert np.isclose(found[name][1], right, atol=1e-5).mean() > 0.97
    assert verify(store_path, deep=True).sound


def test_removed_keys_are_not_found_and_compaction_keeps_the_other_codes(store_path, lm):
    add(NEW, store_path, lm=lm)
    before = raw(store_path)
    gone = {one.sha256 for name in ("d3", "d21") for one in remove(store_path, document=name).documents}
    left = {name: data for name, data in before.items() if name not in gone}
    assert raw(store_path) == left
    with closing(Datastore.open(store_path)) as store:
        assert store.key_count == sum(map(len, left.values())) // store.codec.columns
        nearest_are_found(store)
    assert verify(store_path, deep=True).sound
    assert compact(store_path, segment_entries=400).purged
    assert raw(store_path) == left
    with closing(Datastore.open(store_path)) as store:
        assert store.catalog.removed() == []
        nearest_are_found(store)
    assert verify(store_path, deep=True).sound
    everything = b"".join(file.read_bytes() for file in (store_path / "segments").rglob("keys.npy"))
    assert all(before[name] not in everything for name in gone)
    add(documents(1, start=3), store_path, lm=lm)  # a removed document can be added again
    with closing(Datastore.open(store_path)) as store:
        nearest_are_found(store)


def test_changed_store_with_codes_is_merged_repaired_exported_and_compressed(store_path, built, lm, tmp_path):
    add(NEW, store_path, lm=lm)
    remove(store_path, document="d1")
    left = contents(store_path)
    export(store_path, tmp_path / "out")
    assert merge([store_path, built], tmp_path / "merged").documents == 13  # the other store still contains it
    merged = contents(tmp_path / "merged")
    assert all(np.array_equal(merged[name][1], keys) for name, (_, keys) in left.items())
    assert verify(tmp_path / "merged", deep=True).sound
    with closing(Datastore.open(store_path)) as store:
        compress(store, tmp_path / "numbers", key_format="float32").close()
    numbers = contents(tmp_path / "numbers")
    assert set(numbers) == set(left)
    assert all(np.array_equal(numbers[name][1], keys) for name, (_, keys) in left.items())
    with closing(Datastore.open(store_path)) as store:
        lost = {one.sha256 for one in store.catalog.documents_of(store.segments[-1].id)}
        number = store.segments[-1].id
    flip(store_path / "segments" / f"{number:06d}" / "keys.npy", -3)
    repair(store_path)
    assert set(contents(store_path)) == set(left) - lost
    assert verify(store_path, deep=True).sound
    add(NEW, store_path, lm=lm)
    assert set(contents(store_path)) == set(left)


def test_compressed_copy_can_be_changed(lm, tmp_path, plain):
    with closing(build(documents(10), tmp_path / "m", lm=lm, segment_entries=150)) as store:
        compress(store, tmp_path / "small", key_format="pca12-int8").close()
    add(NEW, tmp_path / "small", lm=lm)
    found = contents(tmp_path / "small")
    with closing(Datastore.open(tmp_path / "small")) as store:
        for name, keys in plain.items():
            right = coded_keys(store, keys)
            step = store.codec.step.numpy()
            # Those of the copy were rounded to float16 before.
            assert (np.abs(found[name][1] - right) <= 1.01 * step).all()
            assert np.isclose(found[name][1], right, atol=1e-5).mean() > 0.9
    assert verify(tmp_path / "small", deep=True).sound
