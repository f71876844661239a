"""Test perplexity of small decoders by what they learn from, beside a decoder of all blocks.

    python benchmarks/small_students.py CORPUS... --limit 60000 --device cuda
    python benchmarks/small_students.py CORPUS --store 3000 --limit 1000 --layers 4 --blocks 2 --ways model,full:0.5

CORPUS is a folder with train, valid and test .jsonl (also .gz, .xz, .zst), a document a line. A full decoder is trained
on train as `adapt` does it, and small ones of some blocks in each of the --ways: the weights that they begin with
(`model`, or `full` for those of the full decoder; `top7` trains the last 7 blocks of the model, which computes the
others), and where given, the share β of the loss from the predictions of the full decoder, the writer of additional
text (`model` or `full`), and how many tokens of it:

    model                    as they are trained without a teacher
    top7+32                  adapters of rank 32 in the last 7 blocks; all+64: in all
    full:0.5                 with the teacher, on the text
    full:0.5@2               with the store that the full decoder reads as the teacher, τ = 2
    full:0.9:full:1000000    also on a million tokens that the full decoder writes

λ is fitted on valid. `weights` are those that the model does not have already, over all of the model. `of full` is the
perplexity of model and small decoder over that of model and full decoder.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import knnlm
from knnlm.evaluation.evaluate import first_documents
from knnlm.evaluation.samples import sample_documents
from knnlm.lm.causal import CausalLM
from knnlm.lm.shared import share_blocks
from knnlm.mixture.loader import open_beside
from knnlm.training.data import TokenStream
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.initial_model import open_initial_model
from knnlm.training.model_teacher import make_model_targets
from knnlm.training.teacher import Targets, TeacherConfig, make_targets
from perplexity import add_store_options, measure_stores, parser_for, split, token_log_probs, tokens_of

WAYS = "all+16,all+64,all+64:0.5,all+64:0.5@2,top15+64,top6,model,full,full:0.5,full:0.9:full:1000000"
FULL = "all blocks"  # the row of the full decoder
LAMBDAS = torch.linspace(0.0, 1.0, 101)


def main() -> None:
    options = parse()
    lm = CausalLM.open(options.model, device=options.device, dtype=options.dtype)
    rows = measure_stores(options, lambda corpus, folder: Study(corpus, folder, lm, options).run())
    show(rows)


def parse() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.add_argument("--layers", type=int, help="blocks of the full decoder (default: all)")
    parser.add_argument("--blocks", type=int, default=9, help="blocks of the small decoders")
    parser.add_argument("--ways", default=WAYS, help="begin[:β[@τ][:writer:tokens]], with commas")
    parser.add_argument("--epochs", type=int, default=3, help="of the full decoder, at most")
    parser.add_argument("--small-epochs", type=int, default=6, help="of the small ones, at most")
    parser.add_argument("--small-rate", type=float, default=6e-4, help="the middle rate of the small ones")
    add_store_options(parser)
    return parser.parse_args()


@dataclass
class Study:
    """The decoders of one corpus."""

    corpus: Path
    folder: Path
    lm: CausalLM
    options: argparse.Namespace
    rows: list[dict[str, Any]] = field(default_factory=list)
    base: dict[str, Tensor] = field(default_factory=dict)  # log p of the model on valid and test
    samples: dict[tuple[str, int], list[list[int]]] = field(default_factory=dict)

    def run(self) -> list[dict[str, Any]]:
        """Train and measure every decoder, and return a row for each."""
        options, lm = self.options, self.lm
        self.texts = tokens_of(self.corpus, lm, options)
        self.base = {name: token_log_probs(lm, self.texts[name]) for name in ("valid", "test")}
        initial = open_initial_model(options.model, like=lm, layers=options.layers)
        config = DecoderConfig(select=True, epochs=options.epochs)
        place = self.folder / "full"
        begin = time.perf_counter()
        train_decoder(
            self.texts["train"], initial, place, config, held_out_text=self.texts["valid"], device=str(lm.device)
        )
        self.add(FULL, place, time.perf_counter() - begin)
        self.full = CausalLM.open(str(place), device=str(lm.device), dtype=options.dtype)
        for way in filter(None, options.ways.split(",")):
            self.train(way)
        return self.rows

    def train(self, way: str) -> None:
        """Train a small decoder in one way."""
        options, lm = self.options, self.lm
        begins, beta, writer, count = [*way.split(":"), *["0", "full", "0"][len(way.split(":")) - 1 :]]
        begins, _, rank = begins.partition("+")
        beta, _, temperature = beta.partition("@")
        text = [*self.texts["train"], *self.written(writer, int(count))]
        place = self.folder / f"small-{way.replace(':', '-')}"
        settings: dict[str, Any] = {"select": True, "epochs": options.small_epochs, "lora": int(rank or 0)}
        if begins == "all" or begins.startswith("top"):
            initial = open_initial_model(options.model, like=lm, layers=options.layers)
            settings |= {"top": int(begins[3:]) if begins != "all" else None, "epochs": options.epochs}
        else:
            spec = options.model if begins == "model" else str(self.folder / "full")
            initial = open_initial_model(spec, like=lm, layers=options.blocks)
            settings["learning_rate"] = options.small_rate
        begin = time.perf_counter()
        targets = self.targets(text, place, temperature) if float(beta) else None
        config = DecoderConfig(beta=float(beta), **settings)
        held_out = self.texts["valid"]
        train_decoder(text, initial, place, config, targets=targets, held_out_text=held_out, device=str(lm.device))
        self.add(way, place, time.perf_counter() - begin)

    def targets(self, text: list[list[int]], place: Path, temperature: str) -> Targets:
        """Return the predictions of the full decoder, or with a temperature those of the store that it reads."""
        folder = self.folder / f"{place.name}.targets"
        if not temperature:
            return make_model_targets(TokenStream.from_documents(text), folder, self.full)
        documents = first_documents(split(self.corpus, "train"), self.lm, self.options.store)
        store = knnlm.build(documents, self.folder / f"{place.name}.store", lm=self.full)
        config = TeacherConfig(knn_temperature=float(temperature))
        targets = make_targets(store, folder, config, device=str(self.lm.device))
        store.close()
        return targets

    def written(self, writer: str, count: int) -> list[list[int]]:
        """Return the tokens of text that the model or the full decoder writes."""
        if count and (writer, count) not in self.samples:
            author = self.lm if writer == "model" else self.full
            documents = sample_documents(author, count)
            self.samples[writer, count] = self.lm.encode_all([document.text for document in documents])
        return self.samples.get((writer, count), [])

    def add(self, name: str, place: Path, seconds: float) -> None:
        """Measure a decoder alone and with the model."""
        decoder = share_blocks(self.lm, open_beside(self.lm, str(place), dtype=self.options.dtype))
        whole = CausalLM.open(str(place), device=str(self.lm.device), dtype=self.options.dtype)
        own = {part: token_log_probs(whole, self.texts[part]) for part in ("valid", "test")}
        known = {weight.data_ptr() for weight in self.lm.model.parameters()}
        weights = sum(weight.numel() for weight in decoder.model.parameters() if weight.data_ptr() not in known)
        share = best_share(self.base["valid"], own["valid"])
        row = {
            "corpus": self.corpus.name,
            "way": name,
            "weights": weights / sum(weight.numel() for weight in self.lm.model.parameters()),
            "seconds": seconds,
            "model": perplexity(self.base["test"]),
            "alone": perplexity(own["test"]),
            "lambda": share,
            "mixed": perplexity(mixed(self.base["test"], own["test"], share)),
        }
        self.rows.append(row)
        print(row, file=sys.stderr, flush=True)


def mixed(one: Tensor, other: Tensor, share: float) -> Tensor:
    """Return log p of a mixture with this share of the other."""
    weights = torch.tensor([1 - share, share], dtype=torch.float64).log()
    return torch.logaddexp(one + weights[0], other + weights[1])


def best_share(one: Tensor, other: Tensor) -> float:
    """Return the share of the other with the smallest perplexity."""
    return max(LAMBDAS.tolist(), key=lambda share: float(mixed(one, other, share).mean()))


def perplexity(log_probs: Tensor) -> float:
    return math.exp(-float(log_probs.mean()))


def show(rows: list[dict[str, Any]]) -> None:
    print("| corpus | model | small from | weights | alone | with the model | λ | of full | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    full = {row["corpus"]: row["mixed"] for row in rows if row["way"] == FULL}
    for row in rows:
        print(f"| {row['corpus']} | {row['model']:.2f} | {row['way']} | {row['weights']:.2f} | {row['alone']:.2f} "
              f"| {row['mixed']:.2f} | {row['lambda']:.2f} | {row['mixed'] / full[row['corpus']]:.3f} "
              f"| {row['seconds']:.0f} |")  # fmt: skip


if __name__ == "__main__":
    main()
