"""Speed of generation with drafts, beside the mixture without them and the model alone.

    python benchmarks/drafts.py CORPUS... --store 60000 --limit 3000 --prompts 8     # half an hour on two cores
    python benchmarks/drafts.py CORPUS... --limit 20000 --prompts 32 --device cuda
    python benchmarks/drafts.py CORPUS... --student lora64 --memories decoder,knn,cache --limit 20000 --device cuda

CORPUS is a folder with train, valid and test .jsonl (also .gz, .xz, .zst), a document a line. The store is built from
train, with an index on a CPU, and the weights are chosen on valid. Prompts are parts of test documents or, with --from
train, of stored ones. Each is continued by the model alone, by the mixture, and by the mixture with drafts, in turn, so
that the load of the machine is the same for all. `tokens a step` counts the tokens that one pass generates; `same` the
texts that are equal with drafts and without. `decoder=DIR` among the memories is a trained decoder, and `decoder` one
that is trained here on the tokens of the store: with --student of so many of the model's blocks, or loraR, of adapters
of rank R.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import knnlm
from knnlm.evaluation.evaluate import first_documents
from knnlm.generation.causal import KnnForCausalLM
from knnlm.generation.draft import Drafter
from knnlm.generation.speculation import make_drafter
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.initial_model import open_initial_model
from perplexity import parser_for, split

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 0},
}


def main() -> None:
    options = parse()
    lm = CausalLM.open(options.model, device=options.device, dtype=options.dtype)
    rows: list[dict[str, Any]] = []
    for corpus in options.corpus:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(corpus, Path(folder), lm, options)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    show(rows)


def parse() -> argparse.Namespace:
    return options_for(__doc__).parse_args()


def options_for(text: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options of stores, memories and prompts."""
    parser = parser_for(text)
    parser.add_argument("--memories", default="knn,ngram")
    parser.add_argument("--student", help="train a decoder: its number of blocks, or loraR")
    parser.add_argument("--epochs", type=int, default=3, help="of the student")
    parser.add_argument("--learning-rate", type=float, help="of the student (default: that of the trainer)")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--from", dest="texts", choices=["test", "train"], default="test", help="texts of the prompts")
    parser.add_argument("--json", type=Path, help="also write the rows into this file")
    return parser


@dataclass
class Figures:
    """Sums over the prompts of one mode."""

    seconds: dict[str, float] = field(default_factory=lambda: {"model": 0.0, "mixture": 0.0, "drafts": 0.0})
    tokens: dict[str, int] = field(default_factory=lambda: {"model": 0, "mixture": 0, "drafts": 0})
    passes: int = 0  # with drafts
    drafted: Counter[str] = field(default_factory=Counter)  # tokens by their source
    accepted: Counter[str] = field(default_factory=Counter)
    same: int = 0

    def speed(self, system: str) -> float:
        """Return the tokens per second."""
        return self.tokens[system] / self.seconds[system]


def tuned_mixture(corpus: Path, folder: Path, lm: CausalLM, options: argparse.Namespace) -> Mixture:
    """Build and tune a store."""
    train = list(first_documents(split(corpus, "train"), lm, options.store))
    store = knnlm.build(train, folder / "store", lm=lm)
    if lm.device.type == "cpu":
        store.build_index()
    memories = options.memories
    if options.student:
        train_student(folder / "student", [document.text for document in train], lm, options)
        named = {"decoder": f"decoder={folder / 'student'}"}
        memories = ",".join(named.get(name, name) for name in memories.split(","))
    mixture = Mixture.open(folder / "store", lm, memories=memories, use_tuned=False)
    mixture.tune(split(corpus, "valid"), limit=options.limit, samples=0)
    return mixture


def measure(corpus: Path, folder: Path, lm: CausalLM, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Build and tune a store, and return a row for each mode."""
    mixture = tuned_mixture(corpus, folder, lm, options)
    model, rows = KnnForCausalLM(mixture), []
    for mode, settings in MODES.items():
        figures, drafter = Figures(), make_drafter(mixture)
        for number, ids in enumerate(prompts(corpus, lm, options)):
            if not number:  # a warm-up, of which nothing is kept
                compare(model, ids, make_drafter(mixture), Figures(), options.new_tokens, seed=0, **settings)
            compare(model, ids, drafter, figures, options.new_tokens, seed=number, **settings)
        rows.append(row_of(corpus, mode, figures))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def train_student(folder: Path, texts: list[str], lm: CausalLM, options: argparse.Namespace) -> None:
    """Train a decoder on some texts."""
    rank = int(options.student[4:]) if options.student.startswith("lora") else 0
    initial = open_initial_model(options.model, like=lm, layers=None if rank else int(options.student))
    config = DecoderConfig(epochs=options.epochs, learning_rate=options.learning_rate, lora=rank)
    card = train_decoder(lm.encode_all(texts), initial, folder, config, device=options.device)
    print(f"student: {card.steps} steps in {card.seconds:.1f} s, {card.losses}", flush=True)


def prompts(corpus: Path, lm: CausalLM, options: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield (1, T) prompts from the middle of documents."""
    documents = first_documents(split(corpus, options.texts), lm, options.store if options.texts == "train" else None)
    count = 0
    for document in documents:
        tokens = lm.encode(document.text)
        begin = len(tokens) // 3
        if len(tokens) - begin < options.prompt_tokens + options.new_tokens:
            continue
        ids = torch.tensor([[lm.start_token, *tokens[begin : begin + options.prompt_tokens]]], device=lm.device)
        yield ids
        count += 1
        if count == options.prompts:
            return
    if not count:
        raise SystemExit(f"{corpus}: no document of {options.texts} is long enough.")


def compare(
    model: KnnForCausalLM, ids: torch.Tensor, drafter: Drafter, figures: Figures, count: int, seed: int, **settings: Any
) -> None:
    """Continue one prompt in every way, and add times and counts."""
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": count, "pad_token_id": 0, **settings}
    written = {}
    for system in figures.seconds:
        torch.manual_seed(seed)
        begin = time.perf_counter()
        if system == "model":
            output = model.base.generate(ids, **given)
        else:
            output = model.generate(ids, **given, seed=seed, draft=drafter if system == "drafts" else False)
        tokens = output[0, ids.shape[1] :].tolist()  # waits for the device
        figures.seconds[system] += time.perf_counter() - begin
        figures.tokens[system] += len(tokens)
        written[system] = tokens
    figures.passes += len(written["drafts"]) - drafter.accepted
    figures.drafted.update(drafter.drafted_from)
    figures.accepted.update(drafter.accepted_from)
    figures.same += written["drafts"] == written["mixture"]


def row_of(corpus: Path, mode: str, figures: Figures) -> dict[str, Any]:
    """Return the figures as JSON types."""
    speeds = {system: figures.speed(system) for system in figures.seconds}
    return {
        "corpus": corpus.name,
        "mode": mode,
        **{f"{system}_tokens_per_second": round(speed, 1) for system, speed in speeds.items()},
        "drafts_of_model": round(speeds["drafts"] / speeds["model"], 3),
        "drafts_of_mixture": round(speeds["drafts"] / speeds["mixture"], 3),
        "tokens_per_step": round(figures.tokens["drafts"] / figures.passes, 2),
        "accepted": round(figures.accepted.total() / max(1, figures.drafted.total()), 3),
        "accepted_from": {
            source: f"{figures.accepted[source]} of {count}" for source, count in figures.drafted.items()
        },
        "same": figures.same,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    print("| corpus | mode | model tok/s | mixture | drafts | drafts/model | drafts/mixture | tokens a step | same |")
    print("|---|---|---|---|---|---|---|---|---|")
    names = ("model_tokens_per_second", "mixture_tokens_per_second", "drafts_tokens_per_second", "drafts_of_model")
    for row in rows:
        cells = [row["corpus"], row["mode"], *(row[name] for name in names)]
        cells += [row["drafts_of_mixture"], row["tokens_per_step"], row["same"]]
        print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()
