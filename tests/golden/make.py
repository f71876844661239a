"""Write the golden store, which uses every feature of the format: PYTHONPATH=src:tests python tests/golden/make.py

Run it only when the format changes, which is only allowed before the first release, and then update the expected
values in tests/datastore/test_format.py.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from helpers.models import tiny, tiny_tokenizer
from helpers.stores import documents
from knnlm.datastore.remove import remove
from knnlm.datastore.rewrite import compress, derive
from knnlm.ingest.build import add, build
from knnlm.lm.causal import CausalLM


def make(path: Path, lm: CausalLM) -> None:
    """Write a store with fields, pruned and counted keys, a map, a codec, a removed and an added document."""
    first, second, third, other = documents(4, words=8)
    described = replace(first, fields={"year": 2024, "customer": "acme"})
    with tempfile.TemporaryDirectory() as folder:
        built = build([described, other, second], Path(folder) / "built", lm=lm, segment_entries=30)
        keep = torch.arange(0, built.key_count, 3)
        counts = torch.arange(built.key_count) % 4 + 1.0
        pruned = derive(built, Path(folder) / "pruned", keep=keep, counts=counts)
        compress(pruned, path, key_format="pca8-int8").close()
        pruned.close()
        built.close()
    remove(path, document=other.id)
    add([third], path, lm=lm)
    for file in (*path.rglob("*.lock"), *path.rglob("*.sums")):
        file.unlink()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "v1"
    shutil.rmtree(target, ignore_errors=True)
    make(target, CausalLM(tiny("llama"), tiny_tokenizer(), name="tiny-llama"))
