"""Peak RAM of a build by the size of the corpus, and of an evaluation with a large store: it must not grow.

    python benchmarks/peak_memory.py build CORPUS --store 4000 16000      # a few minutes on two cores
    python benchmarks/peak_memory.py eval STORE TEXT.jsonl --limit 3000

CORPUS is a folder with train.jsonl (also .gz, .xz, .zst). Each size is built in a process of its own. The figure is
the peak beyond that of the model alone, after it has read some text.
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
from knnlm.datastore.store import Datastore
from knnlm.evaluation.evaluate import first_documents
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from perplexity import split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    building = kinds.add_parser("build")
    building.add_argument("corpus", type=Path)
    building.add_argument("--store", type=int, nargs="+", default=[4000, 16000], help="tokens, one build each")
    building.add_argument("--segment-entries", type=int, default=2000, help="small, so that many segments are written")
    reading = kinds.add_parser("eval")
    reading.add_argument("store_path", metavar="store", type=Path)
    reading.add_argument("text", type=Path)
    reading.add_argument("--limit", type=int, default=3000, help="tokens of TEXT")
    options = parser.parse_args()
    if options.kind == "eval":
        evaluate(options)
    elif len(options.store) == 1:
        build(options)
    else:
        for tokens in options.store:
            entries = str(options.segment_entries)
            command = [sys.executable, __file__, "build", options.corpus, "--store", str(tokens)]
            subprocess.run([*command, "--segment-entries", entries], check=True)


def build(options: argparse.Namespace) -> None:
    """Build, and print the growth of the peak."""
    lm = CausalLM.open("bundled")
    list(lm.read([lm.encode("A few words, so that the model has run once. " * 200)], lm.window(), logits=False))
    before = peak()
    with tempfile.TemporaryDirectory() as folder:
        documents = first_documents(split(options.corpus, "train"), lm, options.store[0])
        store = knnlm.build(documents, Path(folder) / "store", lm=lm, segment_entries=options.segment_entries)
        show(store, before)


def evaluate(options: argparse.Namespace) -> None:
    """Evaluate, and print the growth of the peak."""
    lm = CausalLM.open("bundled", device="cpu")
    documents = list(first_documents(knnlm.read_documents(options.text), lm, options.limit))
    for reading in lm.read([lm.encode(document.text) for document in documents], lm.window(), batch_tokens=1024):
        assert reading.logits is not None
        reading.logits.float().logsumexp(1)
    before = peak()
    store = Datastore.open(options.store_path)
    mixture = Mixture.open(store, lm, k=1024, knn_temperature=2.0, lmbda=0.4)
    mixture.evaluate(documents, batch_tokens=1024)
    show(store, before)


def show(store: Datastore, before: float) -> None:
    row = {"tokens": store.entry_count, "stored_mb": store.bytes / 1e6, "peak_mb": peak(), "grown_mb": peak() - before}
    print(json.dumps({name: round(value, 1) for name, value in row.items()}))


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
