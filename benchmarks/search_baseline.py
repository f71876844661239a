"""Search of a store compared with the usual FAISS index over the same real keys: milliseconds per query.

    python benchmarks/search_baseline.py STORE TEXT.jsonl                         # builds the usual index: minutes
    python benchmarks/search_baseline.py STORE TEXT.jsonl --usual usual.faiss     # writes it there, or reads it

STORE is a store of the bundled model with its index (`knnlm index`), TEXT held-out text whose positions are searched
in one batch, as in an evaluation. Both sides alternate. index_choice.py measures their perplexity.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

import baselines
from index_choice import read_text, use_threads
from knnlm.datastore.indexes import open_index
from knnlm.datastore.store import Datastore
from overhead import seconds

K = 1024


def main() -> None:
    options = parse()
    use_threads(options.threads)
    store = Datastore.open(options.store)
    usual = open_usual(store, options.usual)
    queries = read_text(store, options).queries[: options.limit].contiguous()
    ours = open_index(store)
    array = np.ascontiguousarray(queries.numpy())
    work: dict[str, Callable[[], Any]] = {
        "usual index": lambda: usual.search(array, K),
        "store": lambda: ours.search(queries, K),
    }
    for search in work.values():
        search()
    times = [
        {name: seconds(search) / len(queries) * 1e3 for name, search in work.items()} for _ in range(options.repeats)
    ]
    print(f"{store.key_count:,} keys, {len(queries):,} queries, k={K}, {baselines.machine(options.threads)}")
    for name in work:
        ratios = sorted(turn["usual index"] / turn[name] for turn in times)
        median = statistics.median(turn[name] for turn in times)
        print(f"{name}: {median:.3f} ms, usual ÷ this {statistics.median(ratios):.2f} "
              f"({ratios[0]:.2f} to {ratios[-1]:.2f})")  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("text")
    parser.add_argument("--usual", type=Path, help="a file for the usual index")
    parser.add_argument("--limit", type=int, default=8192, help="positions of TEXT")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def open_usual(store: Datastore, path: Path | None) -> Any:
    """Read the usual index from a file, or build it and write it there."""
    if path is not None and path.exists():
        index = faiss.read_index(str(path))
        assert index.ntotal == store.key_count, f"{path} belongs to other keys"
    else:
        keys = torch.cat([block.half() for _, block in store.chunks(baselines.BLOCK)]).numpy()
        index = baselines.usual_index(keys).index
        if path is not None:
            faiss.write_index(index, str(path))
    index.nprobe = baselines.PROBES
    return index


if __name__ == "__main__":
    main()
