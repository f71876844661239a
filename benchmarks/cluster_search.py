"""Search of several shards compared with one store of the same keys: milliseconds of a batch, and recall.

    python benchmarks/cluster_search.py FOLDER --keys 200000 --width 576            # synthetic clusters
    python benchmarks/cluster_search.py FOLDER --store STORE                        # the keys of a store
    python benchmarks/cluster_search.py FOLDER --store STORE --ray [ADDRESS]        # also in processes on Ray

Writes one store and its shards into FOLDER, unless they are there, and builds an index of each. All searches alternate.
`--exact` compares exact search instead, and whether neighbours are those of one store to the last bit. With `--device
cuda`, keys are searched on a GPU; with `--ray`, each process has `--gpus` of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import baselines
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.schema import CATALOG_FILE, SegmentRow, StoredDocument, segment_folder
from knnlm.datastore.segments import ArrayWriter
from knnlm.datastore.shards import join_shards
from knnlm.datastore.store import Datastore
from knnlm.index.base import Neighbours
from knnlm.index.exact import ExactIndex
from knnlm.io import checksum

_CLUSTERS_PER_ROOT = 8  # times √keys
_SPREAD = 0.5  # of a cluster, relative to the distance of clusters
_RECALL_QUERIES = 128


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    queries = prepare(options)
    one, sharded = Datastore.open(options.folder / "one"), Datastore.open(options.folder / "sharded")
    with ExitStack() as stack:
        searches: dict[str, Callable[[], Neighbours]] = {}
        for name, store in (("one store", one), (f"{options.shards} shards, one process", sharded)):
            index = open_index(store, device=options.device)
            searches[name] = lambda index=index: index.search(queries, options.k)  # type: ignore[misc]
        if options.ray is not None:
            from knnlm.cluster.search import RemoteSearchOptions, remote_search

            remote = stack.enter_context(remote_search(options.ray, RemoteSearchOptions(gpus=options.gpus)))
            index = remote.open_index(sharded, device=options.device)
            searches[f"{options.shards} shards on Ray"] = lambda index=index: index.search(queries, options.k)  # type: ignore[misc]
        report(searches, one, queries, options)


def report(
    searches: dict[str, Callable[[], Neighbours]], one: Datastore, queries: Tensor, options: argparse.Namespace
) -> None:
    """Run all searches in turns and print a table."""
    found = {name: search() for name, search in searches.items()}
    times: dict[str, list[float]] = {name: [] for name in searches}
    for _ in range(options.repeats):
        for name, search in searches.items():
            begin = time.perf_counter()
            search().ids.cpu()
            times[name].append(time.perf_counter() - begin)
    sample = queries[:_RECALL_QUERIES]
    true = ExactIndex(one.keys, device=options.device).search(sample, options.k).ids.cpu().numpy()
    first = next(iter(searches))
    print(f"{one.key_count:,} keys of width {one.width}, {len(queries):,} queries, k={options.k}, "
          f"{'exact' if options.exact else 'blocks'}, {baselines.machine(torch.get_num_threads())}")  # fmt: skip
    print("| search | ms | ratio (lowest to highest) | recall | equal to one store |\n|---|---|---|---|---|")
    for name, seconds in times.items():
        ratios = sorted(own / base for own, base in zip(seconds, times[first], strict=True))
        ids = found[name].ids.cpu()
        share = np.mean([len(np.intersect1d(a, b)) for a, b in zip(ids[: len(true)].numpy(), true, strict=True)])
        equal = torch.equal(ids, found[first].ids.cpu()) and torch.equal(
            found[name].distances.cpu(), found[first].distances.cpu()
        )
        print(f"| {name} | {statistics.median(seconds) * 1e3:.0f} | {statistics.median(ratios):.2f} "
              f"({ratios[0]:.2f} to {ratios[-1]:.2f}) | {share / options.k:.4f} | {equal} |")  # fmt: skip


def prepare(options: argparse.Namespace) -> Tensor:
    """Write the stores and their indexes, unless they are there, and return the queries."""
    folder: Path = options.folder
    if not (folder / "queries.npy").exists():
        folder.mkdir(parents=True, exist_ok=True)
        keys, queries = read_keys(options) if options.store else synthetic_keys(options)
        write_store(folder / "one", keys, 0)
        cuts = [len(keys) * number // options.shards for number in range(options.shards + 1)]
        parts = [folder / f"part-{number}" for number in range(options.shards)]
        for number, (begin, end) in enumerate(pairwise(cuts)):
            write_store(parts[number], keys[begin:end], number)
        join_shards(parts, folder / "sharded")
        np.save(folder / "queries.npy", queries)
    if not options.exact:
        for name in ("one", "sharded"):
            store = Datastore.open(folder / name)
            if not store.catalog.indexes():
                build_index(store, options.index)
            store.close()
    elif Datastore.open(folder / "one").catalog.indexes():
        sys.exit(f"{folder} has indexes: --exact needs a folder of its own.")
    return torch.from_numpy(np.load(folder / "queries.npy")).float()


def synthetic_keys(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and queries around the same random points."""
    generator = np.random.default_rng(0)
    count = options.keys + options.queries
    clusters = max(1, int(_CLUSTERS_PER_ROOT * count**0.5))
    centres = generator.normal(size=(clusters, options.width)).astype(np.float32)
    sizes = generator.exponential(size=clusters)
    which = generator.choice(clusters, count, p=sizes / sizes.sum())
    keys = centres[which]
    keys += generator.normal(scale=_SPREAD, size=keys.shape).astype(np.float32)
    return keys[: options.keys].astype(np.float16), keys[options.keys :]


def read_keys(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys of a store, less some at random, which are the queries."""
    store = Datastore.open(options.store)
    order = torch.randperm(store.key_count, generator=torch.Generator().manual_seed(0))
    queries = store.take(order[: options.queries]).numpy()
    kept = order[options.queries :][: options.keys].sort().values
    return store.take(kept).half().numpy(), queries


def write_store(path: Path, keys: np.ndarray, number: int) -> None:
    """Write a store of keys without a model: one document, one segment."""
    values = np.zeros(len(keys), np.int32)
    model = {"name": "none", "tokenizer": "none", "width": keys.shape[1], "vocab_size": 1}
    metadata = {"model": model, "window": {"context": 8, "stride": 4}, "key_dtype": "float16"}
    path.mkdir(parents=True)
    catalog = Catalog.create(path / CATALOG_FILE, {"state": "building", "offset": None, **metadata})
    folder = segment_folder(path, 0)
    folder.mkdir(parents=True)
    for name, array, dtype in (("keys", keys, "float16"), ("values", values, "int32")):
        with ArrayWriter(folder / f"{name}.npy", dtype, array.shape[1:]) as writer:
            writer.append(array)
    sums = [checksum(folder / f"{name}.npy") for name in ("keys", "values")]
    document = StoredDocument(0, f"d{number}", f"part:{number}", 0, 0, len(keys), str(number))
    catalog.add_segment(SegmentRow(0, 0, len(keys), 1.0, *sums), [document])
    catalog.put(state="complete")
    catalog.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--store", type=Path, help="take the keys of this store")
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=576, help="of synthetic keys")
    parser.add_argument("--queries", type=int, default=1024, help="in one batch")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--k", type=int, default=1024)
    parser.add_argument("--index", default="auto")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--ray", nargs="?", const="local", help="also on Ray: local, auto or HOST:PORT")
    parser.add_argument("--gpus", type=float, default=0.0, help="of each process on Ray")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--repeats", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
