"""Damaged bytes of a store are an error when they are read, also if only a few keys are read."""

from __future__ import annotations

import os
import secrets
import shutil
import zlib
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.damage import flip, tree
from helpers.stores import made_store
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.integrity import BLOCK_BYTES, BlockChecksums
from knnlm.datastore.rewrite import derive
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt
from knnlm.io import checksum

ROWS, WIDTH = 6000, 16  # keys of 384,128 bytes: six blocks


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("sums") / "store"
    keys = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    made_store(path, keys, np.arange(ROWS) % 9, sizes=[100] * 60, segments=1).close()
    return path


@pytest.fixture
def store_path(original, tmp_path):
    shutil.copytree(original, tmp_path / "store")
    return tmp_path / "store"


def used(path) -> None:
    """Let every block be summed up."""
    with closing(Datastore.open(path)) as store:
        store.take(torch.arange(3))


def test_flipped_bit_is_detected_by_every_way_of_reading_keys(store_path):
    used(store_path)
    flip(store_path / "segments/000000/keys.npy", -1)
    ways = {
        "take": lambda store: store.take(torch.tensor([ROWS - 1])),
        "chunks": lambda store: list(store.chunks(1000)),
        "read": lambda store: store.read(ROWS - 10, torch.empty(10, WIDTH, dtype=torch.float32)),
        "search": lambda store: open_index(store).search(torch.zeros(1, WIDTH), 3),
        "index": lambda store: build_index(store, "Flat"),
        "derive": lambda store: derive(store, store_path.parent / "copy", keep=torch.arange(0, ROWS, 2)),
    }
    for name, way in ways.items():
        with (
            closing(Datastore.open(store_path)) as store,
            pytest.raises(DatastoreCorrupt, match="checksum mismatch"),
        ):
            pytest.fail(f"{name}: {way(store)}")
        with closing(Datastore.open(store_path, check=False)) as store:
            store.take(torch.tensor([ROWS - 1]))  # whoever does not want to know


@pytest.mark.parametrize("name", ["values", "kept", "counts"])
def test_flipped_bit_in_a_small_array_is_detected_at_first_use(store_path, tmp_path, name):
    with closing(Datastore.open(store_path)) as store:
        derive(store, tmp_path / "pruned", keep=torch.arange(0, ROWS, 2), counts=torch.full((ROWS,), 2.0)).close()
    flip(tmp_path / f"pruned/segments/000000/{name}.npy", -4)
    with closing(Datastore.open(tmp_path / "pruned")) as store, pytest.raises(DatastoreCorrupt, match=f"{name}.npy"):
        pytest.fail(str([way(torch.arange(3)) for way in (store.values, store.entries_of, store.counts)]))


@settings(max_examples=40)
@given(rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=8), place=st.integers(0, ROWS * WIDTH * 4 - 1))
def test_damage_is_reported_exactly_where_a_corrupt_block_is_read(rows, place, original, tmp_path_factory):
    """Rows in sound blocks are read on; the block of the damage is named."""
    path = tmp_path_factory.mktemp("touch") / "store"
    shutil.copytree(original, path)
    used(path)
    file = path / "segments/000000/keys.npy"
    header = file.stat().st_size - ROWS * WIDTH * 4
    flip(file, header + place)
    bad = (header + place) // BLOCK_BYTES
    touched = {
        byte // BLOCK_BYTES for row in rows for byte in (header + row * WIDTH * 4, header + row * WIDTH * 4 + 63)
    }
    with closing(Datastore.open(path)) as store:
        if bad in touched:
            with pytest.raises(DatastoreCorrupt, match=f"in bytes {bad * BLOCK_BYTES:,} to"):
                store.take(torch.tensor(rows))
        else:
            store.take(torch.tensor(rows))


def test_first_use_compares_the_whole_file(store_path):
    flip(store_path / "segments/000000/keys.npy", -1)
    with closing(Datastore.open(store_path)) as store, pytest.raises(DatastoreCorrupt, match="checksum mismatch"):
        store.take(torch.tensor([0]))
    assert not (store_path / "segments/000000/keys.sums").exists()


def test_written_checksums_are_those_of_the_blocks(store_path):
    used(store_path)
    data = (store_path / "segments/000000/keys.npy").read_bytes()
    kept = (store_path / "segments/000000/keys.sums").read_bytes()
    assert kept[:72] == b"KNNLMSUM" + checksum(store_path / "segments/000000/keys.npy").encode()
    sums = [zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    assert np.frombuffer(kept[72:-32], "<u4").tolist() == sums
    assert len(sums) == 6


def test_damaged_or_foreign_block_checksums_are_computed_again(store_path):
    used(store_path)
    file = store_path / "segments/000000/keys.sums"
    sound = file.read_bytes()
    for place in (0, 20, 80, -1):
        flip(file, place)
        used(store_path)
        assert file.read_bytes() == sound
    os.truncate(file, 50)
    used(store_path)
    assert file.read_bytes() == sound


def test_file_that_a_killed_process_left_is_removed_by_the_next(store_path):
    folder = store_path / "segments/000000"
    for name in ("keys.0123456789abcdef.partial", "keys.fedcba9876543210.partial"):
        (folder / name).write_bytes(b"KNNLMSUM")
    used(store_path)
    assert (folder / "keys.sums").is_file()
    assert not list(folder.glob("*.partial"))


def test_reading_does_not_write_through_a_link(store_path, tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    for name in (str(os.getpid()), "guessed"):
        (store_path / f"segments/000000/keys.{name}.partial").symlink_to(victim)
    used(store_path)
    assert victim.read_bytes() == b"precious"
    assert not (store_path / "segments/000000/keys.sums").exists()  # the name was taken
    monkeypatch.undo()
    used(store_path)
    assert victim.read_bytes() == b"precious"
    file = store_path / "segments/000000/keys.sums"
    assert file.is_file()
    assert not file.is_symlink()


def test_every_block_is_compared_once(store_path, monkeypatch):
    used(store_path)
    calls = []
    monkeypatch.setattr(zlib, "crc32", lambda data, real=zlib.crc32: (calls.append(len(data)), real(data))[1])
    with closing(Datastore.open(store_path)) as store:
        for _ in range(3):
            store.take(torch.tensor([0, 1, 2]))
        assert calls == [BLOCK_BYTES]
        for _ in range(3):
            list(store.chunks(512))
        assert len(calls) == 6


def test_read_only_store_is_compared_too(store_path, monkeypatch):
    def refused(path, flags, *rest, real=os.open, **options):
        if flags & os.O_CREAT and str(path).endswith(".partial"):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refused)
    before = tree(store_path)
    used(store_path)
    assert tree(store_path) == before
    monkeypatch.undo()
    flip(store_path / "segments/000000/keys.npy", -1)
    with pytest.raises(DatastoreCorrupt):
        used(store_path)


@settings(max_examples=30)
@given(data=st.data())
def test_rows_longer_than_a_block_are_compared_completely(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "keys.npy"
    row_bytes, count = data.draw(st.integers(1, 3 * BLOCK_BYTES)), data.draw(st.integers(1, 5))
    header = data.draw(st.integers(0, 200))
    content = bytearray(np.random.default_rng(0).bytes(header + count * row_bytes))
    path.write_bytes(content)
    sha256 = checksum(path)
    rows = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3)))
    BlockChecksums().check_rows(path, sha256, rows, row_bytes, total=count)
    row = int(rows[0])
    flip(path, data.draw(st.integers(header + row * row_bytes, header + (row + 1) * row_bytes - 1)))
    with pytest.raises(DatastoreCorrupt):
        BlockChecksums().check_rows(path, sha256, rows, row_bytes, total=count)
