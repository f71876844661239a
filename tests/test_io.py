"""Mapped keys do not fill the memory of whoever reads them."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from helpers.stores import documents
from knnlm import io as mapping
from knnlm.datastore.store import Datastore
from knnlm.ingest.build import build
from knnlm.io import Resident, mapped_bytes

SIZE = 96 << 20


@pytest.fixture
def array(tmp_path):
    np.memmap(tmp_path / "array", np.uint8, "w+", shape=(SIZE // 4096, 4096))[:] = np.arange(256, dtype=np.uint8)[3]
    return np.asarray(np.memmap(tmp_path / "array", np.uint8, "r", shape=(SIZE // 4096, 4096)))


def read_all(array, watch):
    """Touch every page, a megabyte at a time; give the most that was resident meanwhile, beyond what was before."""
    before, most = mapped_bytes(), 0
    for part in np.split(array, SIZE >> 20):
        assert int(part.sum(dtype=np.int64)) == 3 * part.size
        watch(part)
        most = max(most, mapped_bytes() - before)
    return most


def test_pages_that_were_read_are_let_go_where_there_are_too_many(array, monkeypatch):
    monkeypatch.setattr(mapping, "MOST", 8 << 20)
    watching = Resident()
    watching.touched(array)
    gc.collect()
    assert read_all(array, watching.touched) < SIZE // 2
    # And that is because of it: the same without it leaves everything resident.
    assert read_all(array, lambda _: None) > 3 * SIZE // 4


def test_arrays_in_memory_are_no_business_of_it(monkeypatch):
    monkeypatch.setattr(mapping, "MOST", -1)  # always too many
    watching = Resident()
    for _ in range(64):
        watching.touched(np.empty((0, 4)))
        watching.touched(np.ones(3))


def test_what_was_there_first_stays(array, tmp_path, monkeypatch):
    monkeypatch.setattr(mapping, "MOST", SIZE // 2)
    first = np.asarray(np.memmap(tmp_path / "first", np.uint8, "w+", shape=(8 << 20,)))
    first[:] = 1
    watching = Resident()
    read_all(array, watching.touched)
    before = mapped_bytes()
    assert int(first.sum(dtype=np.int64)) == first.size  # its pages are there: reading them brings no more
    assert mapped_bytes() - before < first.size // 2


def test_a_memory_gives_the_same_keys_however_often_pages_are_let_go(lm, tmp_path, monkeypatch):
    build(documents(6), tmp_path / "memory", lm=lm, segment_rows=100)
    ids = torch.randint(0, 400, (1024, 8), generator=torch.Generator().manual_seed(0)).sort(0).values
    store = Datastore.open(tmp_path / "memory")
    ids %= store.key_count
    right = store.take(ids)
    calls = []
    monkeypatch.setattr(mapping, "MOST", -1)  # always too many
    monkeypatch.setattr(mapping, "mapped_bytes", lambda: calls.append(0) or 5)
    for _ in range(40):
        torch.testing.assert_close(store.take(ids), right, rtol=0, atol=0)
    assert calls
