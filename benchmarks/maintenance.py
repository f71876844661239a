"""Time of checksums, verify, merge and repair, on a store of random keys.

python benchmarks/maintenance.py --keys 200000 --width 576      # a minute; takes three times the size of the keys
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from knnlm.datastore.catalog import Catalog
from knnlm.datastore.schema import CATALOG_FILE, SegmentRow, StoredDocument
from knnlm.datastore.segments import NewSegment
from knnlm.datastore.store import Datastore
from knnlm.maintenance.merge import merge
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify

SEGMENT = 16_384


def make(path: Path, keys: int, width: int, *, name: str) -> None:
    """Write a store of random float16 keys, in segments as a CPU build makes them, a document each."""
    path.mkdir()
    model = {"name": "none", "tokenizer": "none", "width": width, "vocab_size": 1000, "start_token": 0}
    metadata = {"model": model, "window": {"context": 8, "stride": 4}, "key_dtype": "float16", "offset": None}
    generator = np.random.default_rng(0)
    with closing(Catalog.create(path / CATALOG_FILE, {"state": "building", **metadata})) as catalog:
        for number, first in enumerate(range(0, keys, SEGMENT)):
            rows = min(SEGMENT, keys - first)
            made = NewSegment(path, number)
            with made.array("keys.npy", "float16", (width,)) as writer:
                writer.append(generator.normal(size=(rows, width)).astype(np.float16))
            with made.array("values.npy", "int32") as writer:
                writer.append(np.arange(rows) % 1000)
            sums = made.seal()
            document = StoredDocument(number, f"{name}{number}", name, number, first, rows, f"{name}{number}")
            row = SegmentRow(number, first, rows, 1.0, sums["keys.npy"], sums["values.npy"])
            catalog.add_segment(row, [document])
        catalog.put(state="complete")


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def read_all(store: Datastore) -> None:
    for _ in store.chunks(16_384):
        pass


def read_some(store: Datastore, *, queries: int = 8, k: int = 1024) -> None:
    """Take keys as reranking does."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(queries):
        store.take(torch.randint(store.key_count, (1, k), generator=generator))


def measure(folder: Path, keys: int, width: int) -> dict[str, float]:
    """Return the seconds of each operation."""
    path = folder / "store"
    make(path, keys, width, name="a")
    found: dict[str, float] = {}
    with closing(Datastore.open(path, check=False)) as store:
        found["read all, no checks"] = seconds(lambda: read_all(store))
        found["8 × 1024 random keys, no checks"] = seconds(lambda: read_some(store))
    with closing(Datastore.open(path)) as store:
        found["read all, first time (checksums are written)"] = seconds(lambda: read_all(store))
    with closing(Datastore.open(path)) as store:
        found["8 × 1024 random keys, first in a process"] = seconds(lambda: read_some(store))
        found["8 × 1024 random keys, again"] = seconds(lambda: read_some(store))
    with closing(Datastore.open(path)) as store:
        found["read all, first in a process"] = seconds(lambda: read_all(store))
        found["read all, again"] = seconds(lambda: read_all(store))
    found["verify"] = seconds(lambda: verify(path))
    found["verify --deep"] = seconds(lambda: verify(path, deep=True))
    found["merge"] = seconds(lambda: merge([path], folder / "merged"))
    with (folder / "merged/segments/000001/keys.npy").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    found["repair of one segment"] = seconds(lambda: repair(folder / "merged"))
    return found


def measure_catalog(folder: Path, count: int) -> dict[str, float]:
    """Return the seconds of catalog queries over `count` documents, with and without its checksums."""
    folder.mkdir()
    file = folder / CATALOG_FILE
    listed = [StoredDocument(n, f"d{n}", f"texts.jsonl:{n}", 0, 100 * n, 100, f"{n:064x}") for n in range(count)]
    found: dict[str, float] = {}
    with closing(Catalog.create(file, {"state": "complete", "offset": [0.123456789] * 576})) as catalog:
        segment = SegmentRow(0, 0, 100 * count, 1.0, "0" * 64, "0" * 64)
        found[f"catalog: write {count:,} documents"] = seconds(lambda: catalog.add_segment(segment, listed))
    for compare, what in ((False, "no checks"), (True, "checked")):
        found[f"catalog: open, {what}"] = seconds(lambda: Catalog.open(file, compare=compare).close())  # noqa: B023
        with closing(Catalog.open(file, compare=compare)) as catalog:
            found[f"catalog: one document, {what}"] = seconds(lambda: catalog.document_at(77 * count))
            found[f"catalog: another, {what}"] = seconds(lambda: catalog.document_at(77 * count + 999))
            found[f"catalog: all documents, {what}"] = seconds(lambda: list(catalog.documents()))
    with closing(Catalog.open(file, write=True)) as catalog:
        catalog.put(warm="up")

        def change() -> None:
            with catalog.change() as connection:
                connection.execute("DELETE FROM documents WHERE number = 7")

        found["catalog: remove one document"] = seconds(change)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.keys, options.width)
        found |= measure_catalog(Path(folder) / "catalog", options.documents)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{options.keys:,} keys × {options.width} float16, {options.keys * options.width * 2 / 1e6:,.0f} MB")
    for name, figure in found.items():
        print(f"{name:<42} {figure:8.3f}")


if __name__ == "__main__":
    main()
