"""The format as the page describes it: memories read without our code, and old ones that must open for ever."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import documents as given_documents
from knnlm.datastore import Datastore, add, build, derive, open_index, remove
from knnlm.datastore.components import principal_components
from knnlm.errors import DatastoreError
from knnlm.guarding import verify
from sealing import sums_of, written_sums
from test_guarding import change, tree
from test_prune import random_store

GOLDEN = Path(__file__).parent / "golden"


def read_array(path):
    """A .npy file by its specification: magic, version, length of the header, header, numbers."""
    data = path.read_bytes()
    assert data[:8] == b"\x93NUMPY\x01\x00"
    size = int.from_bytes(data[8:10], "little")
    header = ast.literal_eval(data[10 : 10 + size].decode("latin1"))
    assert not header["fortran_order"]
    array = np.frombuffer(data[10 + size :], header["descr"])
    return array.reshape(header["shape"])


def read_tensors(path):
    """A safetensors file by its specification."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, about in header.items():
        assert about["dtype"] == "F32"
        begin, end = about["data_offsets"]
        tensors[name] = np.frombuffer(data[8 + size + begin : 8 + size + end], "<f4").reshape(about["shape"])
    return tensors


def version_of(path):
    with closing(sqlite3.connect(path / "catalog.db")) as connection:
        return json.loads(connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()[0])


def read_memory(path):
    """Everything in a memory, with sqlite3, json and NumPy, as docs/format.md says."""
    if version_of(path) == 5:
        assert written_sums(path / "catalog.db") == sums_of(path / "catalog.db")
    with closing(sqlite3.connect(path / "catalog.db")) as connection:
        facts = {key: json.loads(value) for key, value in connection.execute("SELECT key, value FROM meta")}
        assert facts["format"] in (1, 2, 3, 4, 5)
        assert facts["state"] == "complete"
        connection.row_factory = sqlite3.Row
        segments = [dict(row) for row in connection.execute("SELECT * FROM segments ORDER BY first_row")]
        documents = [dict(row) for row in connection.execute("SELECT * FROM documents ORDER BY number")]
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for one in documents if "fields" in tables else []:
            found = connection.execute("SELECT record FROM fields WHERE number = ?", (one["number"],)).fetchone()
            one["fields"] = json.loads(found["record"]) if found else {}
        removed = [dict(row) for row in connection.execute("SELECT * FROM removed")] if "removed" in tables else []
    width = facts["model"]["width"]
    if "map" in facts:
        assert hashlib.sha256((path / "map.safetensors").read_bytes()).hexdigest() == facts["map"]["sha256"]
        width = read_tensors(path / "map.safetensors")["matrix"].shape[1]
    codec = {}
    if "codec" in facts:
        assert hashlib.sha256((path / "codec.safetensors").read_bytes()).hexdigest() == facts["codec"]["sha256"]
        codec = read_tensors(path / "codec.safetensors")
    columns = len(codec["books"]) if "books" in codec else width
    keys, rows_of, counts, values, expected = [], [], [], [], 0
    for segment in segments:
        assert segment["first_row"] == expected
        folder = path / "segments" / f"{segment['id']:06d}"
        here = read_array(folder / "values.npy")
        assert (here.dtype, len(here)) == (np.int32, segment["rows"])
        stored = read_array(folder / "keys.npy")
        kept = np.arange(len(here))
        if segment.get("kept") is not None:
            kept = read_array(folder / "kept.npy")
        assert stored.shape == (len(kept), columns)
        assert stored.dtype == facts["key_dtype"]
        weights = np.ones(len(kept), np.float32)
        if segment.get("counts_sha256") is not None:
            weights = read_array(folder / "counts.npy")
        for name in ("keys", "values", "kept", "counts"):
            if segment.get(f"{name}_sha256") is not None:
                assert hashlib.sha256((folder / f"{name}.npy").read_bytes()).hexdigest() == segment[f"{name}_sha256"]
        keys.append(decode(stored, np.float32(segment["scale"]), codec))
        rows_of.append(kept + expected)
        counts.append(weights)
        values.append(here)
        expected += segment["rows"]
    gone = {row for one in removed for row in range(one["first_row"], one["first_row"] + one["rows"])}
    return facts, documents, *map(np.concatenate, (keys, rows_of, counts, values)), gone


def decode(stored, scale, codec):
    """What a key was stored from, by the tensors of the codec."""
    if "books" in codec:
        return np.concatenate([book[column] for book, column in zip(codec["books"], stored.T, strict=True)], 1)
    if "step" in codec:
        return codec["centre"] + codec["step"] * stored.astype(np.float32)
    return stored.astype(np.float32) * scale


def check_against_ours(path):
    facts, documents, keys, rows_of, counts, values, gone = read_memory(path)
    # Our numbers leave out what was removed.
    there = np.setdiff1d(np.arange(len(values)), sorted(gone))
    alive = np.isin(rows_of, there)
    keys, rows_of, counts = keys[alive], np.searchsorted(there, rows_of[alive]), counts[alive]
    values = values[there]
    documents = [{**one, "first_row": int(np.searchsorted(there, one["first_row"]))} for one in documents]
    with closing(Datastore.open(path)) as store:
        numbers = torch.arange(store.key_count)
        assert store.take(numbers).numpy() == pytest.approx(keys, rel=1e-6, abs=1e-6)
        assert np.array_equal(store.rows_of(numbers).numpy(), rows_of)
        found = store.counts(numbers)
        assert np.array_equal(np.ones(len(keys)) if found is None else found.numpy(), counts)
        assert np.array_equal(store.values(torch.arange(store.rows)).numpy(), values)
        ours = [(one.number, one.id, one.source, one.first_row, one.rows, one.sha256) for one in store.documents()]
        theirs = [tuple(one[name] for name in ("number", "id", "source", "first_row", "rows", "sha256"))
                  for one in documents]  # fmt: skip
        assert ours == theirs
        assert [dict(one.fields) for one in store.documents()] == [one.get("fields", {}) for one in documents]
        # A query goes the way of the keys: less the offset and the centre, then through the matrix.
        query = np.random.default_rng(0).normal(size=(2, facts["model"]["width"])).astype(np.float32)
        projected = query if facts["offset"] is None else query - np.array(facts["offset"], np.float32)
        if "map" in facts:
            tensors = read_tensors(path / "map.safetensors")
            projected = (projected - tensors["centre"]) @ tensors["matrix"]
        assert store.project(torch.from_numpy(query)).numpy() == pytest.approx(projected, rel=1e-4, abs=1e-4)


def test_a_memory_is_read_the_same_without_our_code(store):
    check_against_ours(store.path)


@pytest.mark.parametrize("way", ["int8", "pca12-int8", "codes8"])
def test_a_coded_memory_that_lives_is_read_the_same_without_our_code(way, lm, tmp_path):
    build(given_documents(6), tmp_path / "m", lm=lm, segment_rows=150, keys=way).close()
    check_against_ours(tmp_path / "m")
    add(given_documents(1, start=8), tmp_path / "m", lm=lm)
    remove(tmp_path / "m", document="d2")
    check_against_ours(tmp_path / "m")


@settings(max_examples=10)
@given(
    seed=st.integers(0, 99), dtype=st.sampled_from(["float16", "float32"]), offset=st.booleans(), mapped=st.booleans(),
    share=st.floats(0.05, 1),
)  # fmt: skip
def test_any_derived_memory_is_read_the_same_without_our_code(seed, dtype, offset, mapped, share, tmp_path_factory):
    folder = tmp_path_factory.mktemp("format")
    generator = np.random.default_rng(seed)
    given_offset = generator.normal(size=6) if offset else None
    with closing(random_store(folder / "m", rows=60, seed=seed, dtype=dtype, offset=given_offset)) as made:
        keep = torch.from_numpy(generator.random(60) < share)
        options = {"key_map": principal_components(made, 3)} if mapped else {}
        derive(made, folder / "d", keep=keep, counts=torch.full((60,), 1.5), **options).close()
    check_against_ours(folder / "m")
    check_against_ours(folder / "d")


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_the_golden_memories_are_read_without_our_code(version, tmp_path):
    shutil.copytree(GOLDEN / f"v{version}", tmp_path / "memory")
    check_against_ours(tmp_path / "memory")


TOKENS = [285, 271, 288, 290, 90, 268, 71, 259, 271, 291, 77, 298, 259, 299, 84, 85, 77, 74, 84, 85, 284, 84, 13, 222,
          70, 286, 73, 296, 78, 288, 67, 70, 83, 84, 260, 289, 70, 79, 266, 66, 78, 70, 275, 15, 263, 296, 66, 69, 84,
          292, 266, 66, 78, 70, 222, 56, 258, 79, 296, 66, 69, 84, 284, 13, 273, 290, 297, 85, 282, 222, 87, 80, 265,
          15, 268, 264, 84]  # fmt: skip


@pytest.mark.parametrize(
    ("version", "fingerprint", "keys", "l2", "distances", "ip", "products"),
    [
        (1, "e199bf4775e16a90", 77, [18, 64, 36, 28, 32], [30.1754, 34.0273, 36.0374, 36.3169, 37.8459],
         [18, 36, 25], [-9.50474, -5.55655, -4.40222]),
        (2, "530e711c97b83f98", 26, [54, 21, 60, 75, 27], [2.13053, 2.26433, 4.26811, 5.80905, 7.20991],
         [66, 51, 75], [-5.39518, -5.03292, -3.96407]),
        (3, "45360fa6e2bfceea", 77, [18, 64, 36, 28, 32], [30.1754, 34.0273, 36.0374, 36.3169, 37.8459],
         [18, 36, 25], [-9.50474, -5.55655, -4.40222]),
        (4, "3e680dc66132b14e", 77, [18, 64, 36, 28, 32], [30.2011, 31.3737, 36.1061, 36.3424, 37.7992],
         [18, 36, 25], [-9.48119, -5.53128, -4.38892]),
        (5, "45360fa6e2bfceea", 77, [18, 64, 36, 28, 32], [30.1754, 34.0273, 36.0374, 36.3169, 37.8459],
         [18, 36, 25], [-9.50474, -5.55655, -4.40222]),
    ],
)  # fmt: skip
def test_a_golden_memory_opens_and_answers_as_on_the_day_it_was_made(
    version, fingerprint, keys, l2, distances, ip, products, tmp_path
):
    """Never change these figures, and never make these memories again: they stand for those that people have."""
    path = tmp_path / "memory"
    shutil.copytree(GOLDEN / f"v{version}", path)
    before = tree(path)
    found = verify(path, deep=True)
    assert (found.problems, found.format, found.documents, found.tokens) == ((), version, 3, 77)
    with closing(Datastore.open(path)) as store:
        assert (store.fingerprint, store.key_count) == (fingerprint, keys)
        assert store.values(torch.arange(77)).tolist() == TOKENS
        query = torch.linspace(-1, 1, store.width)[None]
        near = open_index(store).search(query, 5)
        assert store.rows_of(near.ids)[0].tolist() == l2
        assert near.distances[0].tolist() == pytest.approx(distances, rel=1e-4)
        product = open_index(store, metric="ip").search(query, 3)
        assert store.rows_of(product.ids)[0].tolist() == ip
        assert product.distances[0].tolist() == pytest.approx(products, rel=1e-4)
        assert [store.document_at(row).id for row in (0, 16, 76)] == ["d0", "d1", "d2"]
        assert (store.counts(near.ids) is None) == (version != 2)
    assert before.items() <= tree(path).items()  # there may be more, such as locks


def test_a_newer_version_says_that_knnlm_must_be_upgraded(tmp_path):
    shutil.copytree(GOLDEN / "v1", tmp_path / "m")
    change(tmp_path / "m", "UPDATE meta SET value = '6' WHERE key = 'format'")
    with pytest.raises(DatastoreError, match=r"format version 6.*Upgrade knnlm"):
        Datastore.open(tmp_path / "m")
    change(tmp_path / "m", "UPDATE meta SET value = '0' WHERE key = 'format'")
    with pytest.raises(DatastoreError, match=r"format version 0.*Build the memory again"):
        Datastore.open(tmp_path / "m")
