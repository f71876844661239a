"""Search of a memory next to the recipe that others copy, over the same real keys, by turns: milliseconds a query.

    python benchmarks/turns.py MEMORY TEXT.jsonl                         # makes the recipe's index first: minutes
    python benchmarks/turns.py MEMORY TEXT.jsonl --recipe recipe.faiss   # keeps it there, or takes it from there

MEMORY is a memory of the bundled model with its index (`knnlm index`), TEXT held-out text whose positions are searched
for at once, as in an evaluation. What the two sides do to perplexity is for ladder.py.
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

import sides
from knnlm.datastore.indexes import open_index
from knnlm.datastore.store import Datastore
from ladder import read_text, use_threads
from overhead import seconds

K = 1024


def main() -> None:
    options = parse()
    use_threads(options.threads)
    store = Datastore.open(options.memory)
    recipe = recipe_of(store, options.recipe)
    queries = read_text(store, options).queries[: options.limit].contiguous()
    ours = open_index(store)
    asked = np.ascontiguousarray(queries.numpy())
    work: dict[str, Callable[[], Any]] = {
        "recipe": lambda: recipe.search(asked, K),
        "memory": lambda: ours.search(queries, K),
    }
    for one in work.values():
        one()
    taken = [{name: seconds(one) / len(queries) * 1e3 for name, one in work.items()} for _ in range(options.repeats)]
    print(f"{store.key_count:,} keys, {len(queries):,} queries, k={K}, {sides.machine(options.threads)}")
    for name in work:
        ratios = sorted(turn["recipe"] / turn[name] for turn in taken)
        middle = statistics.median(turn[name] for turn in taken)
        print(f"{name}: {middle:.3f} ms, recipe ÷ this {statistics.median(ratios):.2f} "
              f"({ratios[0]:.2f} to {ratios[-1]:.2f})")  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("memory", type=Path)
    parser.add_argument("text")
    parser.add_argument("--recipe", type=Path, help="a file for the recipe's index")
    parser.add_argument("--limit", type=int, default=8192, help="positions of TEXT, searched for at once")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def recipe_of(store: Datastore, path: Path | None) -> Any:
    """Read the recipe's index from a file, or make it and keep it there."""
    if path is not None and path.exists():
        index = faiss.read_index(str(path))
        assert index.ntotal == store.key_count, f"{path} was made of other keys"
    else:
        keys = torch.cat([block.half() for _, block in store.chunks(sides.BLOCK)]).numpy()
        index = sides.recipe(keys).index
        if path is not None:
            faiss.write_index(index, str(path))
    index.nprobe = sides.PROBES
    return index


if __name__ == "__main__":
    main()
