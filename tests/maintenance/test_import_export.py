"""Import from and export to other programs."""

from __future__ import annotations

import json
import os
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import oracle
from helpers.cli import failure
from helpers.cli import knnlm as command
from helpers.models import tiny, tiny_tokenizer
from helpers.stores import documents, random_store
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.compact import compact
from knnlm.datastore.indexes import open_index
from knnlm.datastore.remove import remove
from knnlm.datastore.rewrite import derive
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError, ModelMismatch, ParameterError
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.maintenance.export import export
from knnlm.maintenance.import_ import import_arrays, open_arrays
from knnlm.maintenance.verify import verify


@pytest.fixture(scope="module")
def peer(lm, tmp_path_factory):
    """Raw keys and tokens of one long text, as another program writes them, computed token by token."""
    folder = tmp_path_factory.mktemp("peer")
    tokens = [token for document in documents(6) for token in lm.encode(document.text)][:120]
    module = lm.model.get_submodule(lm.key_layer.module)
    keys, _ = oracle.read_token_by_token(lm.model, module, tokens, start_token=lm.start_token, context=128, stride=64)
    return folder, keys, np.array(tokens)


def write(folder, keys, values, *, key="float16", value="int32"):
    paths = folder / f"keys-{key}-{value}.npy", folder / f"vals-{key}-{value}.npy"
    keys.astype(key).tofile(paths[0])
    values.astype(value).reshape(-1, 1).tofile(paths[1])
    return paths


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("knn-transformers", "float16", "int32"),
        ("knn-transformers", "float32", "int32"),
        ("fairseq", "float16", "int64"),
        ("fairseq", "float16", "int16"),
        ("fairseq", "float32", "int32"),
    ],
)
def test_raw_arrays_become_a_store_with_the_same_numbers(peer, lm, tmp_path, name, key, value):
    folder, keys, values = peer
    paths = write(folder, keys, values, key=key, value=value)
    # Where two pairs of types fit the lengths, they must be given.
    types = {"key_dtype": key, "value_dtype": value} if value in ("int16", "int32") and name == "fairseq" else {}
    done = import_arrays(*paths, out=tmp_path / "m", lm=lm, format=name, segment_entries=50, **types)
    assert (done.tokens, done.key_dtype, done.value_dtype) == (120, key, value)
    assert done.agreement > 0.9
    with closing(Datastore.open(tmp_path / "m")) as store:
        assert store.values(torch.arange(120)).tolist() == values.tolist()
        assert np.array_equal(store.take(torch.arange(120)).numpy(), keys.astype(key).astype(np.float32))
        assert [document.entries for document in store.catalog.documents()] == [50, 50, 20]
        assert store.model == lm.identity
        query = torch.from_numpy(keys[77:78].astype(np.float32))
        assert int(store.entries_of(open_index(store).search(query, 1).ids)) == 77
    assert verify(tmp_path / "m", deep=True).sound


def test_import_of_one_segment_is_one_document(peer, lm, tmp_path):
    folder, keys, values = peer
    import_arrays(*write(folder, keys, values), out=tmp_path / "m", lm=lm)
    with closing(Datastore.open(tmp_path / "m")) as store:
        assert [(d.id, d.entries) for d in store.catalog.documents()] == [("keys-float16-int32.npy", 120)]


def test_arrays_of_another_model_or_layer_are_refused(peer, lm, tmp_path):
    folder, keys, values = peer
    paths = write(folder, keys, values)
    other = CausalLM(tiny("llama", seed=5), tiny_tokenizer(), name="another")
    wrong_layer = CausalLM(lm.model, lm.tokenizer, name="tiny", layer=0)
    for model in (other, wrong_layer):
        with pytest.raises(ModelMismatch, match="does not hold the states of"):
            import_arrays(*paths, out=tmp_path / "m", lm=model)
    shuffled = write(tmp_path, keys, np.roll(values, 40))  # tokens of other rows
    with pytest.raises(ModelMismatch, match="are nearest to their own key"):
        import_arrays(*shuffled, out=tmp_path / "m", lm=lm)
    large = values.copy()
    large[100] = 320
    for check in (True, False):
        with pytest.raises(ModelMismatch, match="entry 100 has the token 320, but the model has 320"):
            import_arrays(*write(tmp_path, keys, large), out=tmp_path / f"m{check}", lm=lm, check=check)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40), width=st.integers(1, 9), key=st.sampled_from(["float16", "float32"]),
    value=st.sampled_from(["int64", "int32", "int16"]), cut=st.integers(0, 7),
)  # fmt: skip
def test_types_are_derived_from_the_lengths_or_refused(rows, width, key, value, cut, tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    keys, values = np.arange(rows * width).reshape(rows, width) % 100, np.arange(rows)
    paths = write(folder, keys, values, key=key, value=value)
    if cut:
        data = paths[0].read_bytes()
        paths[0].write_bytes(data[: len(data) - cut])
    fits = [
        (first, second)
        for first in ("float16", "float32")
        for second in ("int64", "int32", "int16")
        if paths[0].stat().st_size == np.dtype(first).itemsize * width * (count := len(values.astype(value).tobytes())
            // np.dtype(second).itemsize) and count * np.dtype(second).itemsize == paths[1].stat().st_size
    ]  # fmt: skip
    if len(fits) == 1:
        arrays = open_arrays(*paths, width=width, format="fairseq")
        assert (arrays.keys.dtype.name, arrays.values.dtype.name) == fits[0]
    else:
        with pytest.raises((DatastoreError, ParameterError), match="Choose with" if fits else "do not hold"):
            open_arrays(*paths, width=width, format="fairseq")
    if not cut:
        assert (key, value) in fits
        exact = open_arrays(*paths, width=width, format="fairseq", key_dtype=key, value_dtype=value)
        assert np.array_equal(exact.keys, keys)
        assert np.array_equal(exact.values, values)


def test_lengths_are_checked_before_anything_is_allocated(peer, lm, tmp_path):
    folder, keys, values = peer
    paths = write(folder, keys, values)
    with pytest.raises(DatastoreError, match=r"do not hold 1000000000000000 keys of width 32"):
        import_arrays(*paths, out=tmp_path / "m", lm=lm, entries=10**15)
    short = import_arrays(*paths, out=tmp_path / "short", lm=lm, entries=100)
    assert short.tokens == 100
    with pytest.raises(DatastoreError, match="no such file"):
        import_arrays(tmp_path / "none", paths[1], out=tmp_path / "m", lm=lm)
    np.save(tmp_path / "real.npy", keys)
    with pytest.raises(DatastoreError, match="has a NumPy header"):
        import_arrays(tmp_path / "real.npy", paths[1], out=tmp_path / "m", lm=lm)
    infinite = keys.copy()
    infinite[60, 3] = 1e6  # more than float16 holds
    with pytest.raises(DatastoreError, match="the key of entry 60 is not finite"), np.errstate(over="ignore"):
        import_arrays(*write(tmp_path, infinite, values), out=tmp_path / "m", lm=lm, check=False)
    with pytest.raises(ParameterError, match="Unknown format 'pickle'"):
        import_arrays(*paths, out=tmp_path / "m", lm=lm, format="pickle")
    with pytest.raises(ParameterError, match="Unknown type 'object' of values"):
        import_arrays(*paths, out=tmp_path / "m", lm=lm, value_dtype="object")


def test_interrupted_import_resumes(peer, lm, tmp_path, monkeypatch):
    folder, keys, values = peer
    paths = write(folder, keys, values)
    import_arrays(*paths, out=tmp_path / "whole", lm=lm, segment_entries=30)
    original, calls = Catalog.add_segment, []

    def stopped(self, *args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, *args, **options)

    monkeypatch.setattr(Catalog, "add_segment", stopped)
    with pytest.raises(KeyboardInterrupt):
        import_arrays(*paths, out=tmp_path / "m", lm=lm, segment_entries=30)
    with pytest.raises(DatastoreError, match="unfinished"):
        Datastore.open(tmp_path / "m")
    import_arrays(*paths, out=tmp_path / "m", lm=lm, segment_entries=30)
    with closing(Datastore.open(tmp_path / "m")) as one, closing(Datastore.open(tmp_path / "whole")) as two:
        assert one.fingerprint == two.fingerprint
    with pytest.raises(DatastoreError, match="already a finished store"):
        import_arrays(*paths, out=tmp_path / "m", lm=lm, segment_entries=30)


def test_file_name_of_an_import_is_erased_with_its_document(peer, lm, tmp_path):
    _, keys, values = peer
    secret = tmp_path / "secret"
    secret.mkdir()
    paths = [path.rename(secret / f"CUSTOMER_{path.name}") for path in write(tmp_path, keys, values)]
    import_arrays(*paths, out=tmp_path / "m", lm=lm, segment_entries=60)
    with closing(Catalog.open(tmp_path / "m" / "catalog.db", write=True)) as catalog:
        about = catalog.get("derived")["import"]
        assert about == {"format": "knn-transformers", "entries": 120}
        # As an earlier version wrote it.
        catalog.put(derived={"import": {**about, "keys": "CUSTOMER_keys.npy", "values": "CUSTOMER_vals.npy"}})
    remove(tmp_path / "m", source="*")
    assert compact(tmp_path / "m").purged
    for file in (tmp_path / "m").rglob("*"):
        assert file.is_dir() or b"CUSTOMER" not in file.read_bytes(), file


def read_back(folder):
    """Return all exported columns, with pyarrow alone."""
    return pq.ParquetDataset(folder).read()


def test_export_has_every_entry_of_the_store(lm, tmp_path):
    store = build(documents(7), tmp_path / "m", lm=lm, segment_entries=100)
    done = export(tmp_path / "m", tmp_path / "out", file_entries=64)
    table = read_back(tmp_path / "out")
    assert (len(table), done.entries, done.files) == (store.entry_count, store.entry_count, -(-store.entry_count // 64))
    assert table["entry"].to_pylist() == list(range(store.entry_count))
    assert table["token"].to_pylist() == store.values(torch.arange(store.entry_count)).tolist()
    keys = np.array(table["key"].to_pylist(), np.float32)
    assert np.array_equal(keys, store.take(torch.arange(store.entry_count)).numpy())
    at = 0
    for document in documents(7):
        tokens = lm.encode(document.text)
        part = table.slice(at, len(tokens))
        assert part["token"].to_pylist() == tokens
        assert set(part["document"].to_pylist()) == {document.id}
        assert set(part["source"].to_pylist()) == {document.source}
        assert part["position"].to_pylist() == list(range(len(tokens)))
        at += len(tokens)
    metadata = json.loads(table.schema.metadata[b"knnlm"])
    assert metadata["model"] == store.model
    assert metadata["fingerprint"] == store.fingerprint
    with pytest.raises(ParameterError, match="already exists"):
        export(tmp_path / "m", tmp_path / "out")


@settings(max_examples=15)
@given(seed=st.integers(0, 50), share=st.floats(0, 1), file_entries=st.integers(1, 60))
def test_export_of_a_pruned_store_has_the_remaining_keys_with_their_counts(seed, share, file_entries, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pruned")
    generator = np.random.default_rng(seed)
    with closing(random_store(folder / "m", rows=40, seed=seed)) as store:
        keep = generator.random(40) < share
        counts = torch.from_numpy(1 + generator.integers(1, 5, 40)).float()
        derive(store, folder / "p", keep=torch.from_numpy(keep), counts=counts).close()
        keys = store.take(torch.arange(40)).numpy()
    export(folder / "p", folder / "out", file_entries=file_entries)
    table = read_back(folder / "out")
    for row, (key, count) in enumerate(zip(table["key"].to_pylist(), table["count"].to_pylist(), strict=True)
                                       if "count" in table.column_names else []):  # fmt: skip
        assert (key is not None) == keep[row]
        if key is not None:
            assert key == keys[row].tolist()
            assert count == counts[row]
    assert table["entry"].to_pylist() == list(range(40))
    assert ("count" in table.column_names) == bool(keep.any())


def test_export_deletes_only_files_of_an_interrupted_export(lm, tmp_path, monkeypatch):
    build(documents(4), tmp_path / "m", lm=lm).close()
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("years of work")
    own = tmp_path / "out.knnlm-export"
    own.mkdir()
    for name in ("part-00000.parquet", "thesis.txt"):  # the first is named like an exported file, but has no marker
        (own / name).write_text("years of work")
        with pytest.raises(ParameterError, match="contains files that no export wrote"):
            export(tmp_path / "m", tmp_path / "out")
        assert (own / name).read_text() == "years of work"
        (own / name).unlink()

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", lambda *_: os._exit(7))
        if (child := os.fork()) == 0:
            with suppress(BaseException):
                export(tmp_path / "m", tmp_path / "out", file_entries=20)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(list(own.glob("part-*"))) > 2
    done = export(tmp_path / "m", tmp_path / "out")
    assert len(read_back(tmp_path / "out")) == done.entries
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["part-00000.parquet"]
    assert not own.exists()
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "years of work"


def test_commands_import_and_export(peer, model_folder, tmp_path, capfd):
    folder, keys, values = peer
    paths = write(folder, keys, values)
    options = ("--model", model_folder, "--out", tmp_path / "m")
    code, out, err = command(capfd, "import", *paths, *options, "--json")
    assert code == 0, err
    assert json.loads(out)["tokens"] == 120
    code, out, err = command(capfd, "export", tmp_path / "m", "--out", tmp_path / "out")
    assert code == 0, err
    assert "120 entries in 1 file" in out
    assert len(read_back(tmp_path / "out")) == 120
    line = failure(capfd, "import", *paths, "--format", "npz", "--model", model_folder, "--out", tmp_path / "n")
    assert "Unknown format 'npz'" in line
    assert "already exists" in failure(capfd, "export", tmp_path / "m", "--out", tmp_path / "out")
