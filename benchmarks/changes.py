"""Time to change a large store: add one document, remove one, compact.

    python benchmarks/changes.py --keys 100000 1000000      # some minutes, and 1.2 GB of disk for a million keys

Keys are random float16; the model has one layer and random weights, so that the store is measured and not the model.
The time to add is printed with and without the model's forward pass. The peak RAM of a compaction is measured in a
process of its own, above its RAM before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from knnlm.corpus import Document
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.compact import compact
from knnlm.datastore.remove import remove
from knnlm.datastore.schema import CATALOG_FILE, SegmentRow, StoredDocument, segment_folder
from knnlm.datastore.segments import ArrayWriter, checksum
from knnlm.datastore.store import Datastore
from knnlm.ingest.build import add, build
from knnlm.lm.causal import CausalLM

_DOCUMENT, _SEGMENT, _VOCABULARY = 1000, 16_000, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[100_000, 1_000_000], help="keys of each store")
    parser.add_argument("--width", type=int, default=576, help="of a key")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compact", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compact is not None:
        print(json.dumps(compact_here(options.compact)))
        return
    rows = []
    for keys in options.keys:
        with tempfile.TemporaryDirectory(dir=options.folder) as place:
            rows.append(measure(Path(place) / "store", keys, options.width))
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    for name in rows[0]:
        print(f"{name:<34}" + "".join(f"{row[name]:>14,.3f}" for row in rows))


def measure(path: Path, keys: int, width: int) -> dict[str, float]:
    """Make a store with this many keys and change it."""
    lm = make_model(width)
    fill(path, lm, keys)
    words = np.random.default_rng(1).integers(0, _VOCABULARY - 2, 3 * _DOCUMENT)
    figures: dict[str, float] = {"keys": keys}
    text = [" ".join(f"w{word}" for word in words[n * _DOCUMENT : (n + 1) * _DOCUMENT]) for n in range(3)]
    add([Document("warm up", "warm up", text[0])], path, lm=lm)
    figures["add, seconds"] = seconds(lambda: add([Document("new", "new", text[1])], path, lm=lm))
    figures["  of which the model, seconds"] = seconds(lambda: read(lm, text[1]))
    figures["add again (skipped), seconds"] = seconds(lambda: add([Document("new", "new", text[1])], path, lm=lm))
    figures["remove, seconds"] = seconds(lambda: remove(path, document="d7"))
    figures["remove by a pattern, seconds"] = seconds(lambda: remove(path, source="source-1*"))
    figures["open, seconds"] = seconds(lambda: Datastore.open(path).close())
    with closing(Datastore.open(path)) as store:
        figures["stale, seconds"] = seconds(lambda: store.stale)
    command = [sys.executable, __file__, "--compact", str(path)]
    compacted: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {**figures, **compacted}


def compact_here(path: Path) -> dict[str, float]:
    """Compact, and return time and peak RAM."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = peak()
    took = seconds(lambda: compact(path))
    return {"compact, seconds": took, "  peak RAM, MiB above": peak() - before}


def peak() -> float:
    """Return the peak RAM of the process in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def seconds(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def read(lm: CausalLM, text: str) -> None:
    """Run the forward passes of adding a text."""
    for _ in lm.read([lm.encode(text)], lm.window(), batch_tokens=1024, logits=False):
        pass


def make_model(width: int) -> CausalLM:
    """A model of one layer for a vocabulary of made-up words."""
    vocabulary = {"<eos>": 0, "<bos>": 1, **{f"w{number}": number + 2 for number in range(_VOCABULARY - 2)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    shape = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=_VOCABULARY, max_position_embeddings=1024, **shape)
    torch.manual_seed(0)
    return CausalLM(transformers.LlamaForCausalLM(config).eval(), fast, name="made-up")


def fill(path: Path, lm: CausalLM, keys: int) -> None:
    """Write random keys and tokens as a build would have left them."""
    build([], path, lm=lm, segment_entries=_SEGMENT).close()
    random = np.random.default_rng(0)
    with closing(Catalog.open(path / CATALOG_FILE, write=True)) as catalog:
        catalog.put(state="building")
        for number, first in enumerate(range(0, keys, _SEGMENT)):
            rows = min(_SEGMENT, keys - first)
            folder = segment_folder(path, number)
            folder.mkdir(parents=True)
            with ArrayWriter(folder / "keys.npy", "float16", (lm.width,)) as writer:
                writer.append(random.standard_normal((rows, lm.width), np.float32))
            with ArrayWriter(folder / "values.npy", "int32") as writer:
                writer.append(random.integers(2, _VOCABULARY, rows))
            sums = checksum(folder / "keys.npy"), checksum(folder / "values.npy")
            stored = []
            for start in range(0, rows, _DOCUMENT):
                name = (first + start) // _DOCUMENT
                size = min(_DOCUMENT, rows - start)
                stored.append(
                    StoredDocument(name, f"d{name}", f"source-{name}", number, first + start, size, f"{name:064d}")
                )
            catalog.add_segment(SegmentRow(number, first, rows, 1.0, *sums), stored)
        catalog.put(state="complete")


if __name__ == "__main__":
    main()
