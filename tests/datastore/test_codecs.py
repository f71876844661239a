"""Keys stored as bytes or codes are guarded, merged and exported as keys stored as numbers are."""

from __future__ import annotations

import shutil
from contextlib import closing

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.damage import change, flip, named, tree
from helpers.stores import KEY_FORMATS, documents
from helpers.stores import documents_by_hash as contents
from knnlm.datastore import encoder
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.indexes import build_index
from knnlm.datastore.rewrite import compress, derive
from knnlm.datastore.schema import CATALOG_FILE
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, ModelMismatch
from knnlm.ingest.build import build
from knnlm.io import checksum
from knnlm.maintenance.export import export
from knnlm.maintenance.merge import merge
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify


@pytest.fixture(scope="module", params=KEY_FORMATS)
def coded(request, lm, tmp_path_factory):
    """A store of ten documents in five segments, with an index."""
    path = tmp_path_factory.mktemp("coded") / "store"
    store = build(documents(10), path, lm=lm, segment_entries=150, key_format=request.param)
    build_index(store, "IVF4,Flat")
    store.close()
    return path


@pytest.fixture
def store_path(coded, tmp_path):
    """A copy that may be damaged."""
    shutil.copytree(coded, tmp_path / "store")
    return tmp_path / "store"


def test_sound_store_verifies_and_every_flipped_bit_is_found(store_path):
    found = verify(store_path, deep=True)
    assert found.sound, found.problems
    assert found.format == 1
    beside = sum((store_path / f"{name}.safetensors").exists() for name in ("map", "codec"))
    assert found.files == 1 + 5 * 2 + 1 + beside  # catalog, arrays, index, what the keys are read by
    for name in sorted(tree(store_path)):
        if name.endswith((".npy", ".safetensors", ".faiss")):
            flip(store_path / name, -3)
            assert named(verify(store_path, deep=True)) == {name}, name
            flip(store_path / name, -3)


def test_damaged_codes_are_detected_when_first_read(store_path):
    with closing(Datastore.open(store_path)) as store:
        store.take(torch.arange(store.key_count))  # writes the sums of blocks down
    flip(store_path / "segments" / "000001" / "keys.npy", -3)
    with closing(Datastore.open(store_path)) as store:
        first = store.segments[0].keys
        store.take(torch.arange(first))
        for read in (
            lambda: store.take(torch.arange(store.key_count)),
            lambda: store.take(torch.arange(store.key_count).flip(0)),
            lambda: list(store.chunks(64)),
            lambda: store.read(first, torch.empty(store.segments[1].keys, store.codec.columns, dtype=torch.int8)),
        ):
            with pytest.raises(DatastoreCorrupt, match=r"000001/keys\.npy: checksum mismatch"):
                read()


def test_repair_keeps_the_codes_of_sound_segments(store_path):
    before = contents(store_path)
    with closing(Datastore.open(store_path)) as store:
        lost = {document.sha256 for document in store.catalog.documents_of(2)}
    flip(store_path / "segments" / "000002" / "keys.npy", -3)
    done = repair(store_path)
    assert {document.segment for document in done.lost} == {2}
    after = contents(store_path)
    assert set(after) == set(before) - lost
    for name, (tokens, keys) in after.items():
        assert tokens == before[name][0]
        assert np.array_equal(keys, before[name][1])


@pytest.mark.parametrize("how", ["damaged", "missing", "other"])
def test_store_without_its_codec_is_refused_and_cannot_be_repaired(store_path, how):
    file = store_path / "codec.safetensors"
    if how == "missing":
        file.unlink()
    elif how == "damaged":
        flip(file, -3)
    else:
        change(store_path, "UPDATE meta SET value = '\"float16\"' WHERE key = 'key_dtype'")
    assert named(verify(store_path)) == {file.name}
    with pytest.raises(DatastoreCorrupt, match=r"codec"):
        Datastore.open(store_path)
    before = tree(store_path / "segments")
    with pytest.raises(DatastoreCorrupt, match=r"cannot be repaired: codec\.safetensors"):
        repair(store_path)
    assert tree(store_path / "segments") == before


@pytest.mark.parametrize("bad", ["names", "dtype", "infinite"])
def test_invalid_codec_is_refused(store_path, bad):
    file = store_path / "codec.safetensors"
    tensors = load_file(file)
    if bad == "names":
        tensors["_flat"] = torch.zeros(3)
    else:
        name = next(iter(tensors))
        tensors[name] = tensors[name].half() if bad == "dtype" else tensors[name].fill_(torch.inf)
    save_file(tensors, file)
    with closing(Catalog.open(store_path / CATALOG_FILE, write=True)) as catalog:
        catalog.put(codec={**catalog.get("codec"), "sha256": checksum(file)})
    with pytest.raises(DatastoreCorrupt, match="not a readable codec"):
        Datastore.open(store_path)


def test_codec_that_links_outside_the_store_is_not_followed(store_path, tmp_path):
    (store_path / "codec.safetensors").rename(tmp_path / "elsewhere")
    (store_path / "codec.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DatastoreCorrupt, match="outside of the store"):
        Datastore.open(store_path)


def test_stores_of_one_codec_are_merged_without_decoding(coded, tmp_path):
    with closing(Datastore.open(coded)) as store:
        halves = [torch.arange(0, store.key_count, 2), torch.arange(1, store.key_count, 2)]
        derive(store, tmp_path / "a", keep=halves[0]).close()
        before = contents(tmp_path / "a")
        done = merge([tmp_path / "a", coded], tmp_path / "all")
        assert (done.documents, done.duplicates) == (10, 10)
        after = contents(tmp_path / "all")
        assert set(after) == set(before)
        for name, (tokens, keys) in before.items():
            assert after[name][0] == tokens
            assert np.array_equal(after[name][1], keys)
        with closing(Datastore.open(tmp_path / "all")) as made:
            assert made.storage == store.storage
            assert made.codec.dtype == store.codec.dtype
    assert verify(tmp_path / "all", deep=True).sound


def test_stores_of_different_codecs_are_not_merged(coded, lm, tmp_path):
    with closing(Datastore.open(coded)) as store:
        way = store.storage
    build(documents(5, start=20), tmp_path / "other", lm=lm, segment_entries=150, key_format=way).close()
    with pytest.raises(ModelMismatch, match=r"cannot be merged: their (codec|key map) differs"):
        merge([coded, tmp_path / "other"], tmp_path / "all")
    build(documents(5, start=20), tmp_path / "plain", lm=lm, segment_entries=150).close()
    with pytest.raises(ModelMismatch, match="cannot be merged"):
        merge([coded, tmp_path / "plain"], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_keys_are_exported_decoded(coded, tmp_path):
    export(coded, tmp_path / "out")
    table = pq.read_table(tmp_path / "out")
    with closing(Datastore.open(coded)) as store:
        keys = np.stack(table["key"].to_numpy())
        assert np.array_equal(keys, store.take(torch.arange(store.key_count)).numpy())
        assert table["token"].to_pylist() == store.values(torch.arange(store.entry_count)).tolist()


def test_build_with_unencoded_keys_is_verified_and_repaired(lm, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(encoder.DeferredEncoder, "fit", stop)
        with pytest.raises(KeyboardInterrupt):
            build(documents(10), tmp_path / "m", lm=lm, segment_entries=150, key_format="int8")
    found = verify(tmp_path / "m", deep=True)
    assert found.sound, found.problems
    assert found.state == "building"
    flip(tmp_path / "m" / "segments" / "000001" / "unencoded.npy", -3)
    assert named(verify(tmp_path / "m", deep=True)) == {"segments/000001/unencoded.npy"}
    repair(tmp_path / "m")
    build(documents(10), tmp_path / "m", lm=lm, segment_entries=150, key_format="int8").close()
    build(documents(10), tmp_path / "whole", lm=lm, segment_entries=150, key_format="int8").close()
    assert tree(tmp_path / "m" / "segments") == tree(tmp_path / "whole" / "segments")


def test_compressing_and_merging_in_either_order_gives_the_same_documents(lm, tmp_path):
    for name, start in (("a", 0), ("b", 5)):
        build(documents(5, start=start), tmp_path / name, lm=lm, segment_entries=150).close()
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    with (
        closing(Datastore.open(tmp_path / "all")) as store,
        closing(compress(store, tmp_path / "small", key_format="int8")) as small,
    ):
        step = float(small.codec.step.max())
        every = torch.arange(store.key_count)
        assert float((small.take(every) - store.take(every)).abs().max()) <= step
    assert verify(tmp_path / "small", deep=True).sound
