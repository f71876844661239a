"""Peak memory of a build by the size of the corpus: it must not grow.

    python benchmarks/rss.py CORPUS --store 4000 16000      # a few minutes on two cores

CORPUS is a folder with train.jsonl (also .gz, .xz, .zst). Each size is built in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import knnlm
from figures import first, split
from knnlm import CausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--store", type=int, nargs="+", default=[4000, 16000], help="tokens, one build each")
    parser.add_argument("--segment-rows", type=int, default=2000, help="small, so that many segments are written")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        measure(options.corpus, options.store[0], options.segment_rows)
        return
    for tokens in options.store:
        rows = str(options.segment_rows)
        subprocess.run(
            [sys.executable, __file__, options.corpus, "--store", str(tokens), "--segment-rows", rows, "--here"],
            check=True,
        )


def measure(corpus: Path, tokens: int, segment_rows: int) -> None:
    """Build and print the peak before and after."""
    lm = CausalLM.open("bundled")
    list(lm.read([lm.encode("A few words, so that the model has run once. " * 200)], lm.window(), logits=False))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        documents = first(split(corpus, "train"), lm, tokens)
        store = knnlm.build(documents, Path(folder) / "memory", lm=lm, segment_rows=segment_rows)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row = {
        "tokens": store.rows,
        "stored_mb": store.bytes / 1e6,
        "peak_mb": after / 1024,
        "grown_mb": (after - before) / 1024,
    }
    print(json.dumps({name: round(value, 1) for name, value in row.items()}))


if __name__ == "__main__":
    main()
