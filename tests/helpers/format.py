"""Read a store with sqlite3, json and NumPy alone, as docs/reference/format.md specifies."""

from __future__ import annotations

import ast
import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.checksums import sums_of, written_sums
from knnlm.datastore.store import Datastore

GOLDEN = Path(__file__).parent.parent / "golden"


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


def read_store(path):
    """Everything in a store, with sqlite3, json and NumPy, as docs/reference/format.md says."""
    assert written_sums(path / "catalog.db") == sums_of(path / "catalog.db")
    with closing(sqlite3.connect(path / "catalog.db")) as connection:
        metadata = {key: json.loads(value) for key, value in connection.execute("SELECT key, value FROM meta")}
        assert metadata["format"] == 1
        assert metadata["state"] == "complete"
        connection.row_factory = sqlite3.Row
        segments = [dict(row) for row in connection.execute("SELECT * FROM segments ORDER BY first_entry")]
        documents = [dict(row) for row in connection.execute("SELECT * FROM documents ORDER BY number")]
        for one in documents:
            found = connection.execute("SELECT record FROM fields WHERE number = ?", (one["number"],)).fetchone()
            one["fields"] = json.loads(found["record"]) if found else {}
        removed = [dict(row) for row in connection.execute("SELECT * FROM removed")]
    width = metadata["model"]["width"]
    if "map" in metadata:
        assert hashlib.sha256((path / "map.safetensors").read_bytes()).hexdigest() == metadata["map"]["sha256"]
        width = read_tensors(path / "map.safetensors")["matrix"].shape[1]
    codec = {}
    if "codec" in metadata:
        assert hashlib.sha256((path / "codec.safetensors").read_bytes()).hexdigest() == metadata["codec"]["sha256"]
        codec = read_tensors(path / "codec.safetensors")
    columns = len(codec["books"]) if "books" in codec else width
    keys, rows_of, counts, values, expected = [], [], [], [], 0
    for segment in segments:
        assert segment["first_entry"] == expected
        folder = path / "segments" / f"{segment['id']:06d}"
        here = read_array(folder / "values.npy")
        assert (here.dtype, len(here)) == (np.int32, segment["entries"])
        stored = read_array(folder / "keys.npy")
        kept = np.arange(len(here))
        if segment.get("kept") is not None:
            kept = read_array(folder / "kept.npy")
        assert stored.shape == (len(kept), columns)
        assert stored.dtype == metadata["key_dtype"]
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
        expected += segment["entries"]
    gone = {row for one in removed for row in range(one["first_entry"], one["first_entry"] + one["entries"])}
    return metadata, documents, *map(np.concatenate, (keys, rows_of, counts, values)), gone


def decode(stored, scale, codec):
    """What a key was stored from, by the tensors of the codec."""
    if "books" in codec:
        return np.concatenate([book[column] for book, column in zip(codec["books"], stored.T, strict=True)], 1)
    if "step" in codec:
        return codec["centre"] + codec["step"] * stored.astype(np.float32)
    return stored.astype(np.float32) * scale


def check_against_ours(path):
    metadata, documents, keys, rows_of, counts, values, gone = read_store(path)
    # Our numbers leave out what was removed.
    there = np.setdiff1d(np.arange(len(values)), sorted(gone))
    alive = np.isin(rows_of, there)
    keys, rows_of, counts = keys[alive], np.searchsorted(there, rows_of[alive]), counts[alive]
    values = values[there]
    documents = [{**one, "first_entry": int(np.searchsorted(there, one["first_entry"]))} for one in documents]
    with closing(Datastore.open(path)) as store:
        numbers = torch.arange(store.key_count)
        assert store.take(numbers).numpy() == pytest.approx(keys, rel=1e-6, abs=1e-6)
        assert np.array_equal(store.entries_of(numbers).numpy(), rows_of)
        found = store.counts(numbers)
        assert np.array_equal(np.ones(len(keys)) if found is None else found.numpy(), counts)
        assert np.array_equal(store.values(torch.arange(store.entry_count)).numpy(), values)
        ours = [(one.number, one.id, one.source, one.first_entry, one.entries, one.sha256) for one in store.documents()]
        theirs = [tuple(one[name] for name in ("number", "id", "source", "first_entry", "entries", "sha256"))
                  for one in documents]  # fmt: skip
        assert ours == theirs
        assert [dict(one.fields) for one in store.documents()] == [one.get("fields", {}) for one in documents]
        # A query goes the way of the keys: less the offset and the centre, then through the matrix.
        query = np.random.default_rng(0).normal(size=(2, metadata["model"]["width"])).astype(np.float32)
        projected = query if metadata["offset"] is None else query - np.array(metadata["offset"], np.float32)
        if "map" in metadata:
            tensors = read_tensors(path / "map.safetensors")
            projected = (projected - tensors["centre"]) @ tensors["matrix"]
        assert store.project(torch.from_numpy(query)).numpy() == pytest.approx(projected, rel=1e-4, abs=1e-4)
