"""Damage files and catalogs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import torch
from hypothesis import strategies as st

from helpers.checksums import seal
from helpers.stores import BESIDE
from knnlm.datastore.indexes import open_index
from knnlm.datastore.store import Datastore
from knnlm.datastore.suffix_array import open_suffix_array


def flip(path: Path, place: int) -> None:
    """Turn one bit over; a negative place is counted from the end."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def change(path: Path, statement: str, *values: object) -> None:
    """Write to the catalog behind the library's back, and make its sums right, as a stranger would."""
    with closing(sqlite3.connect(path / "catalog.db", isolation_level=None)) as connection:
        connection.execute(statement, values)
    seal(path / "catalog.db")


def named(found) -> set[str]:
    return {problem.file for problem in found.problems}


def tree(path: Path) -> dict[str, bytes]:
    files = [file for file in path.rglob("*") if file.is_file() and file.name not in BESIDE]
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def mutate(data: bytes, draw) -> bytes:
    """Damage bytes as disks and people do."""
    changed = bytearray(data)
    kind = draw(st.sampled_from(["flip", "overwrite", "cut", "insert", "zero", "number"]))
    place = draw(st.integers(0, max(0, len(changed) - 1)))
    if kind == "flip":
        changed[place] ^= 1 << draw(st.integers(0, 7))
    elif kind == "overwrite":
        piece = draw(st.binary(min_size=1, max_size=64))
        changed[place : place + len(piece)] = piece
    elif kind == "cut":
        del changed[place:]
    elif kind == "insert":
        changed[place:place] = draw(st.binary(min_size=1, max_size=32))
    elif kind == "zero":
        changed[place : place + 512] = bytes(len(changed[place : place + 512]))
    else:
        number = draw(st.sampled_from([0, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1]))
        changed[place : place + 8] = number.to_bytes(8, draw(st.sampled_from(["big", "little"])))
    return bytes(changed)


def use(path: Path, *, faiss: bool = True) -> None:
    """Read all content of a store, in every way."""
    with closing(Datastore.open(path, trust_index=faiss)) as store:
        every = torch.arange(store.entry_count)
        store.values(every)
        store.entries_of(torch.arange(store.key_count))
        store.counts(torch.arange(store.key_count))
        keys = store.take(torch.arange(store.key_count))
        for _ in store.chunks(64):
            pass
        open_index(store).search(keys[:3], 4)
        for row in range(0, store.entry_count, 40):
            store.around(row)
        open_suffix_array(store)
        list(store.catalog.documents())
