"""Predictions of `knnlm plan` against real runs: build time, disk, memory and search time.

    python benchmarks/plan.py --sizes 10000 100000 1000000 --threads 2          # minutes; two idle cores
    python benchmarks/plan.py --sizes 1000000 15700000 --device cuda --model bundled --text FOLDER --characters 0
    python benchmarks/plan.py --sizes 10000 --formats float16 int8 codes --clock cpu --threads 1   # a busy machine

The constants are measured first (`measure`), then every size is built, indexed and searched, each in a process of its
own, so that its peak memory is its own. By default the model is a small one from a configuration (one layer of width
576) with the tokenizer of the bundled model, since the forward pass is a constant of its own; --model names another.
The text is that of Python's standard library, in documents of 3,000 characters, or of the files of --text, cut
likewise; with --characters 0, documents as they are. Queries are stored keys, each moved by half the difference of two
others. `--clock cpu` counts processor time, which other work on the machine changes less; it misses waiting for the
disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from knnlm.corpus import Document, read_documents
from knnlm.datastore.codecs import parse_storage
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.store import Datastore
from knnlm.plan.constants import Constants, load_constants
from knnlm.plan.cost import (
    BATCH,
    K,
    build_memory,
    build_on_cpu,
    build_on_gpu,
    gpu_build_memory,
    gpu_search_memory,
    index_cost,
    index_memory,
    search_memory,
    search_on_cpu,
    search_on_gpu,
)
from knnlm.plan.sizes import ModelShape, TextShape, automatic_index, store_bytes
from knnlm.plan.system import peak_memory, reset_peak

FIGURES = {
    "build_s": "build, s",
    "build_mb": "its memory, MB",
    "disk_mb": "disk, MB",
    "index_s": "index, s",
    "index_mb": "its memory, MB",
    "index_disk_mb": "index on disk, MB",
    "batch_ms": "search, ms per query",
    "one_ms": "one query, ms",
    "search_mb": "memory of batches, MB",
    "one_mb": "memory of single queries, MB",
    "gpu_mb": "GPU memory of the build, MB",
    "search_gpu_mb": "GPU memory of the search, MB",
}


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    if options.phase:
        print(json.dumps(PHASES[options.phase](options)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.work = Path(folder)
        if options.model is None:
            options.model = str(small_model(options.work / "model"))
        constants = measured(options)
        rows = [compare(size, name, constants, options) for size in options.sizes for name in options.formats]
    show(rows, constants, options)
    if options.json:
        options.json.write_text(json.dumps({"constants": dataclasses.asdict(constants), "rows": rows}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000], help="tokens")
    parser.add_argument("--formats", nargs="+", default=["float16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--model", help="default: a small one from a configuration")
    parser.add_argument("--text", nargs="*", help="files and folders")
    parser.add_argument("--characters", type=int, default=3000, help="of a document; 0: documents as they are")
    parser.add_argument("--constants", type=Path, help="use these instead of measuring first")
    parser.add_argument("--folder", type=Path, help="where stores are written (default: the temporary folder)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--phase", choices=["build", "index", "search", "measure"], help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--format", help=argparse.SUPPRESS)
    return parser.parse_args()


def small_model(folder: Path) -> Path:
    """Write a model of one layer and width 576 with random weights and the tokenizer of the bundled model."""
    import transformers as hf

    from knnlm.lm.loading import bundled_folder

    torch.manual_seed(0)
    tokenizer = hf.AutoTokenizer.from_pretrained(bundled_folder())
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def documents(options: argparse.Namespace) -> Iterator[Document]:
    """Yield the text, in documents of the same length."""
    if options.text:
        texts = ((document.id, document.text) for document in read_documents(*options.text))
    else:
        files = sorted(Path(json.__file__).parent.parent.rglob("*.py"))
        texts = ((str(path), path.read_text(encoding="utf-8", errors="ignore")) for path in files)
    for name, text in texts:
        step = options.characters or max(1, len(text))
        for at in range(0, len(text) - step + 1, step):
            yield Document(f"{name}:{at}", name, text[at : at + step])


def clock_of(options: argparse.Namespace) -> Any:
    return time.process_time if options.clock == "cpu" else time.perf_counter


def measured(options: argparse.Namespace) -> Constants:
    """Return the constants, measured in a process of their own."""
    path = options.constants
    if path is None:
        path = options.work / "constants.json"
        phase(options, "measure", path, "float16", 0)
    return load_constants(path)[0]


def measure_phase(options: argparse.Namespace) -> dict[str, Any]:
    from knnlm.plan.measure import measure

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=options.store.parent) as folder:
        measure(open_lm(options), Path(folder), clock=clock_of(options)).save(options.store)
    return {"seconds": time.perf_counter() - begin}


def open_lm(options: argparse.Namespace) -> Any:
    from knnlm.cli.output import quiet
    from knnlm.lm.causal import CausalLM

    quiet()
    return CausalLM.open(options.model, device=options.device)


def build_phase(options: argparse.Namespace) -> dict[str, Any]:
    from knnlm.evaluation.evaluate import first_documents
    from knnlm.ingest.build import build
    from knnlm.plan.model import shape_of

    lm, clock = open_lm(options), clock_of(options)
    tokens, some = 0, list[Document]()
    for document in first_documents(documents(options), lm, options.sizes[0]):
        some.append(document)
    begin = clock()
    with closing(build(some, options.store, lm=lm, key_format=options.format)) as store:
        tokens = store.entry_count
    seconds = clock() - begin
    found = {"build_s": seconds, "build_mb": peak_memory() / 1e6, "tokens": tokens, "documents": len(some)}
    if options.device == "cuda":
        found["gpu_mb"] = torch.cuda.max_memory_allocated() / 1e6
    found["disk_mb"] = sum(file.stat().st_size for file in options.store.rglob("*") if file.is_file()) / 1e6
    return found | {"shape": vars(shape_of(lm.model, lm.name)) | {"window": None}}


def index_phase(options: argparse.Namespace) -> dict[str, Any]:
    clock = clock_of(options)
    with closing(Datastore.open(options.store)) as store:
        begin = clock()
        build_index(store)
        seconds = clock() - begin
    with closing(Datastore.open(options.store)) as store:
        return {"index_s": seconds, "index_mb": peak_memory() / 1e6, "index_disk_mb": store.index_bytes / 1e6}


def search_phase(options: argparse.Namespace) -> dict[str, Any]:
    """Time searches by the index, or on the GPU."""
    clock, rounds = clock_of(options), 4
    with closing(Datastore.open(options.store)) as store:
        queries = moved_keys(store, rounds * BATCH).to(options.device)
    with closing(Datastore.open(options.store)) as store:
        index = open_index(store, device=options.device)
        reset_peak()
        index.search(queries[:BATCH], K)
        batches = [timed(clock, index, queries[at : at + BATCH]) for at in range(0, len(queries), BATCH)]
        found = {"batch_ms": sorted(batches)[rounds // 2] / BATCH * 1e3, "search_mb": peak_memory() / 1e6}
        reset_peak()
        singles = [timed(clock, index, queries[at : at + 1]) for at in range(200)]
        found |= {"one_ms": sorted(singles)[100] * 1e3, "one_mb": peak_memory() / 1e6}
    if options.device == "cuda":
        found["search_gpu_mb"] = torch.cuda.max_memory_allocated() / 1e6
        found["proofs"] = index.searcher.proofs  # type: ignore[attr-defined]
    return found


def moved_keys(store: Datastore, count: int) -> torch.Tensor:
    """Return stored keys, each moved by half the difference of two others, (n, D)."""
    numbers = torch.randint(store.key_count, (3, count), generator=torch.Generator().manual_seed(1))
    base, plus, minus = (store.take(each) for each in numbers)
    return base + 0.5 * (plus - minus)


def timed(clock: Any, index: Any, queries: torch.Tensor) -> float:
    begin = clock()
    found = index.search(queries, K)
    if found.ids.is_cuda:
        torch.cuda.synchronize()
    return clock() - begin


PHASES = {"build": build_phase, "index": index_phase, "search": search_phase, "measure": measure_phase}


def phase(options: argparse.Namespace, name: str, store: Path, storage: str, size: int) -> dict[str, Any]:
    """Run one phase in a process of its own."""
    command = [sys.executable, __file__, "--phase", name, "--store", str(store), "--format", storage]
    command += ["--sizes", str(size), "--device", options.device, "--threads", str(options.threads)]
    command += ["--clock", options.clock, "--model", options.model, "--characters", str(options.characters)]
    command += ["--text", *options.text] if options.text else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(name, storage, f"{size:,}", {key: value for key, value in found.items() if key != "shape"}, file=sys.stderr)
    return found


def compare(size: int, storage: str, constants: Constants, options: argparse.Namespace) -> dict[str, Any]:
    """Build, index and search one store, and predict the same."""
    store = options.work / f"{size}-{storage}"
    real: dict[str, Any] = {}
    names = ["build", "search"] if options.device == "cuda" else ["build", "index", "search"]
    for name in names:
        real |= phase(options, name, store, storage, size)
    subprocess.run(["rm", "-r", str(store)], check=True)
    shape = ModelShape(**{key: value for key, value in real.pop("shape").items() if key != "window"})
    text = TextShape(real["tokens"], real["tokens"] / real["documents"], equal=options.characters > 0)
    found = predict(text, shape, storage, constants, options.device)
    return {
        "tokens": real["tokens"],
        "format": storage,
        **{name: {"predicted": found[name], "real": real[name]} for name in FIGURES if name in real and name in found},
    }


def predict(text: TextShape, model: ModelShape, name: str, constants: Constants, device: str) -> dict[str, float]:
    """Return the predictions for one store."""
    storage = parse_storage(name, width=model.width)
    index = automatic_index(text.tokens, model.width, storage)
    found = {
        "disk_mb": store_bytes(text, model, storage, device=device) / 1e6,
        "index_s": index_cost(index, constants).seconds,
        "index_mb": index_memory(index, storage, constants) / 1e6,
        "index_disk_mb": index.bytes / 1e6,
        "search_mb": search_memory(index, storage, constants) / 1e6,
        "one_mb": search_memory(index, storage, constants, queries=1) / 1e6,
    }
    if device == "cuda":
        found["build_s"] = build_on_gpu(text, model, storage, constants).seconds
        found["gpu_mb"] = gpu_build_memory(text, model, constants) / 1e6
        found["search_gpu_mb"] = gpu_search_memory(text.tokens, model.width, key_dtype="float16") / 1e6
        del found["search_mb"], found["one_mb"]
        one, many = (
            search_on_gpu(text.tokens, model.width, constants, queries=count, key_dtype="float16").seconds
            for count in (1, BATCH)
        )
    else:
        found["build_s"] = build_on_cpu(text, model, storage, constants).seconds
        found["build_mb"] = build_memory(text, model, storage, constants) / 1e6
        one, many = (search_on_cpu(index, constants, queries=count).seconds for count in (1, BATCH))
    return found | {"batch_ms": many / BATCH * 1e3, "one_ms": one * 1e3}


def show(rows: list[dict[str, Any]], constants: Constants, options: argparse.Namespace) -> None:
    print(f"{constants.name}; {options.clock} clock; predicted, real, ratio")
    print("| tokens | format |", " | ".join(FIGURES.values()), "|")
    print("|---|---|" + "---|" * len(FIGURES))
    for row in rows:
        cells = []
        for name in FIGURES:
            pair = row.get(name)
            if pair is None or not pair["real"]:
                cells.append("-")
                continue
            ratio = pair["predicted"] / pair["real"]
            cells.append(f"{pair['predicted']:.4g}, {pair['real']:.4g}, **{ratio:.2f}**")
        print(f"| {row['tokens']:,} | {row['format']} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
