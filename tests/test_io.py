"""Resident pages of mapped keys are bounded; folders are written atomically."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from helpers.stores import documents
from knnlm import io
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError
from knnlm.ingest.build import build
from knnlm.io import atomic_write, commit_folder, read_array_header, release_pages, resident_bytes

SIZE = 96 << 20


@pytest.fixture
def array(tmp_path):
    np.memmap(tmp_path / "array", np.uint8, "w+", shape=(SIZE // 4096, 4096))[:] = np.arange(256, dtype=np.uint8)[3]
    return np.asarray(np.memmap(tmp_path / "array", np.uint8, "r", shape=(SIZE // 4096, 4096)))


def read_all(array, after):
    """Touch every page, a megabyte at a time, and return the largest growth of the resident bytes meanwhile."""
    before, most = resident_bytes(), 0
    for part in np.split(array, SIZE >> 20):
        assert int(part.sum(dtype=np.int64)) == 3 * part.size
        after(part)
        most = max(most, resident_bytes() - before)
    return most


def test_pages_are_released_where_too_many_are_resident(array, monkeypatch):
    monkeypatch.setattr(io, "MAX_RESIDENT_BYTES", 8 << 20)
    release_pages(array)
    gc.collect()
    assert read_all(array, release_pages) < SIZE // 2
    # Without it, everything stays resident.
    assert read_all(array, lambda _: None) > 3 * SIZE // 4


def test_arrays_in_ram_are_not_released(monkeypatch):
    monkeypatch.setattr(io, "MAX_RESIDENT_BYTES", -1)  # always too many
    for _ in range(64):
        release_pages(np.empty((0, 4)))
        release_pages(np.ones(3))


def test_pages_read_first_stay(array, tmp_path, monkeypatch):
    monkeypatch.setattr(io, "MAX_RESIDENT_BYTES", SIZE // 2)
    first = np.asarray(np.memmap(tmp_path / "first", np.uint8, "w+", shape=(8 << 20,)))
    first[:] = 1
    read_all(array, release_pages)
    before = resident_bytes()
    assert int(first.sum(dtype=np.int64)) == first.size  # its pages are there: reading them brings no more
    assert resident_bytes() - before < first.size // 2


def test_store_returns_the_same_keys_when_pages_are_released(lm, tmp_path, monkeypatch):
    build(documents(6), tmp_path / "store", lm=lm, segment_entries=100)
    ids = torch.randint(0, 400, (1024, 8), generator=torch.Generator().manual_seed(0)).sort(0).values
    store = Datastore.open(tmp_path / "store")
    ids %= store.key_count
    right = store.take(ids)
    calls = []
    monkeypatch.setattr(io, "MAX_RESIDENT_BYTES", -1)  # always too many
    monkeypatch.setattr(io, "resident_bytes", lambda: calls.append(0) or 5)
    for _ in range(40):
        torch.testing.assert_close(store.take(ids), right, rtol=0, atol=0)
    assert calls


def test_atomic_folder_appears_complete_or_not_at_all(tmp_path):
    final = tmp_path / "a" / "folder"
    with io.atomic_folder(final) as partial:
        assert not final.exists()
        (partial / "inner").mkdir()
        (partial / "inner" / "file").write_text("new")
    assert (final / "inner" / "file").read_text() == "new"
    assert list(final.parent.iterdir()) == [final]
    with pytest.raises(ZeroDivisionError), io.atomic_folder(final, replace=True) as partial:
        (partial / "file").write_text(str(1 // 0))
    assert list(final.parent.iterdir()) == [final]
    assert (final / "inner" / "file").exists()


def test_atomic_folder_replaces_a_folder_only_if_asked_to(tmp_path):
    final = tmp_path / "folder"
    final.mkdir()
    (final / "old").write_text("old")
    with pytest.raises(DatastoreError, match="Cannot write"), io.atomic_folder(final) as partial:
        (partial / "new").write_text("new")
    assert [file.name for file in final.iterdir()] == ["old"]
    (tmp_path / "folder.partial").mkdir()  # as a killed process leaves it
    (tmp_path / "folder.partial" / "leftover").write_text("half")
    with io.atomic_folder(final, replace=True) as partial:
        (partial / "new").write_text("new")
    assert [file.name for file in final.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [final]


def test_files_of_other_libraries_can_be_read_by_other_users(tmp_path):
    """As any new file: safetensors creates its files for their owner alone."""
    (tmp_path / "usual").touch()
    usual = (tmp_path / "usual").stat().st_mode
    with atomic_write(tmp_path / "tensors") as partial:
        save_file({"a": torch.zeros(2)}, partial)
        partial.chmod(0o600)
    (tmp_path / "folder.partial").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "folder.partial" / "tensors")
    (tmp_path / "folder.partial" / "tensors").chmod(0o600)
    commit_folder(tmp_path / "folder.partial", tmp_path / "folder")
    for file in (tmp_path / "tensors", tmp_path / "folder" / "tensors"):
        assert file.stat().st_mode == usual


@pytest.mark.parametrize("failures", [1, 4, 5])
def test_header_is_parsed_again_where_the_parser_is_disturbed(failures, tmp_path, monkeypatch):
    """Python 3.11 raises SystemError where several threads parse literals at once."""
    np.save(tmp_path / "array.npy", np.zeros((3, 2), np.float16))
    parse, left = np.lib.format.read_array_header_1_0, failures

    def disturbed(file):
        nonlocal left
        found = parse(file)  # which moves on in the file
        left -= 1
        if left >= 0:
            raise SystemError("AST constructor recursion depth mismatch (before=60, after=59)")
        return found

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", disturbed)
    with (tmp_path / "array.npy").open("rb") as file:
        if failures == 5:
            with pytest.raises(ValueError, match="recursion depth"):
                read_array_header(file)
        else:
            assert read_array_header(file) == (np.dtype(np.float16), (3, 2))
