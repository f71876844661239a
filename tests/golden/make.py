"""Make the golden memories. Run once for each format, by the code that wrote it; what it made is never made again.

PYTHONPATH=tests python tests/golden/make.py
"""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from helpers.models import tiny, tiny_tokenizer
from helpers.stores import documents
from knnlm.datastore.remove import remove
from knnlm.datastore.rewrite import derive, principal_components
from knnlm.datastore.store import Datastore
from knnlm.ingest.add import add
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM


def main(folder: Path) -> None:
    """Write those that are not there: the same three documents in each format."""
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="tiny-llama")
    for number, make in enumerate((built, pruned, living, coded, summed), 1):
        path = folder / f"v{number}"
        if not path.exists():
            make(folder, path, lm)
            for lock in (*path.rglob("*.lock"), *path.rglob("*.sums")):
                lock.unlink()


def built(_: Path, path: Path, lm: CausalLM) -> None:
    """Format 1, as it is built."""
    build(documents(3, words=8), path, lm=lm, segment_rows=30).close()


def pruned(folder: Path, path: Path, _: CausalLM) -> None:
    """Format 2, pruned to every third key and mapped to four dimensions."""
    with closing(Datastore.open(folder / "v1")) as store:
        keep = torch.arange(0, store.key_count, 3)
        counts = torch.arange(store.key_count) % 4 + 1.0
        derive(store, path, keep=keep, counts=counts, key_map=principal_components(store, 4)).close()


def living(_: Path, path: Path, lm: CausalLM, *, keys: str = "float16") -> None:
    """Format 3: a document was there and is not, and another came later."""
    first, second, third, other = documents(4, words=8)
    build([first, other, second], path, lm=lm, segment_rows=30, keys=keys).close()
    remove(path, document=other.id)
    add([third], path, lm=lm)


def coded(_: Path, path: Path, lm: CausalLM) -> None:
    """Format 4: bytes, and it lives."""
    living(_, path, lm, keys="int8")


def summed(_: Path, path: Path, lm: CausalLM) -> None:
    """Format 5: sums of what the catalog says, and fields of a record; it lives, and its keys are float16."""
    first, second, third, other = documents(4, words=8)
    told = [replace(first, fields={"year": 2024, "customer": "acme"}), other, second]
    build(told, path, lm=lm, segment_rows=30).close()
    remove(path, document=other.id)
    add([third], path, lm=lm)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
