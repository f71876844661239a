"""Make the golden memories. Run once for each format, by the code that wrote it; what it made is never made again.

PYTHONPATH=tests python tests/golden/make.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from conftest import documents
from knnlm import CausalLM, build
from knnlm.datastore import derive
from knnlm.datastore.components import principal_components
from models import tiny, tiny_tokenizer


def main(folder: Path) -> None:
    """Write format 1, as it is built, and format 2, pruned to every third key and mapped to four dimensions."""
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="tiny-llama")
    store = build(documents(3, words=8), folder / "v1", lm=lm, segment_rows=30)
    keep = torch.arange(0, store.key_count, 3)
    counts = torch.arange(store.key_count) % 4 + 1.0
    derive(store, folder / "v2", keep=keep, counts=counts, key_map=principal_components(store, 4)).close()
    for path in folder.rglob("writer.lock"):
        path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
