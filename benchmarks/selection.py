"""Test perplexity of decoders whose learning rate and epochs are chosen on valid, beside a grid of fixed ones.

    python benchmarks/selection.py CORPUS... --limit 60000 --device cuda
    python benchmarks/selection.py CORPUS --store 4000 --limit 1500 --layers 2 --grid 1:1e-3 --epochs 1   # minutes

CORPUS is a folder with train, valid and test .jsonl (also .gz, .xz, .zst), a document a line. Every decoder is trained
on train: with each number of epochs and rate of --grid, and once as `adapt` does it, with `select` and valid as
held-out text. Perplexities are those of the decoders alone. `of best` is the selected decoder's perplexity on test
over the smallest of the model's and the grid's; `time` that of its training over the longest of the grid.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knnlm.lm.causal import CausalLM
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.initial_model import InitialModel, open_initial_model
from perplexity import parser_for, token_log_probs, tokens_of

GRID = "1:1e-4,3:1e-4,1:2e-4,3:2e-4"


def main() -> None:
    options = parse()
    lm = CausalLM.open(options.model, device=options.device, dtype=options.dtype)
    rows = []
    for corpus in options.corpus:
        rows += Study(corpus, lm, options).run()
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    show(rows)


def parse() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.add_argument("--layers", type=int, help="blocks of the decoders (default: all)")
    parser.add_argument("--grid", default=GRID, help="epochs:learning rate, with commas; empty: none")
    parser.add_argument("--epochs", type=int, default=3, help="of the selection, at most")
    parser.add_argument("--json", type=Path, help="also write the rows into this file")
    return parser.parse_args()


@dataclass
class Study:
    """The decoders of one corpus."""

    corpus: Path
    lm: CausalLM
    options: argparse.Namespace
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> list[dict[str, Any]]:
        """Train and measure every decoder, and return a row for each."""
        options, lm = self.options, self.lm
        self.texts = tokens_of(self.corpus, lm, options)
        self.add("model", lm)
        initial = open_initial_model(options.model, like=lm, layers=options.layers)
        for point in filter(None, options.grid.split(",")):
            epochs, rate = point.split(":")
            self.train(initial, f"{epochs} × {float(rate):g}", epochs=int(epochs), learning_rate=float(rate))
        self.train(initial, "selected", epochs=options.epochs, select=True)
        return self.rows

    def train(self, initial: InitialModel, name: str, **settings: Any) -> None:
        """Train one decoder and measure it."""
        held_out = {"held_out_text": self.texts["valid"]} if settings.get("select") else {}
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "decoder"
            config = DecoderConfig(**settings)
            card = train_decoder(self.texts["train"], initial, out, config, device=str(self.lm.device), **held_out)
            trained = CausalLM.open(str(out), device=str(self.lm.device), dtype=self.lm.dtype)
        more = {"seconds": card.seconds, "steps": card.steps, "notes": card.notes}
        if card.selection is not None:
            more["chosen"] = card.selection["chosen"]
            more["trials"] = card.selection["trials"]
            more["interpolations"] = card.selection["interpolations"]
        self.add(name, trained, **more)

    def add(self, name: str, lm: CausalLM, **more: Any) -> None:
        """Measure a model on valid and test, and print and keep the row."""
        figures = {part: perplexity(lm, self.texts[part]) for part in ("valid", "test")}
        tokens = sum(map(len, self.texts["train"]))
        self.rows.append({"corpus": self.corpus.name, "tokens": tokens, "decoder": name, **figures, **more})
        print(json.dumps(self.rows[-1]), flush=True)


def perplexity(lm: CausalLM, documents: list[list[int]]) -> float:
    """Return the perplexity of documents by a model alone."""
    return math.exp(-float(token_log_probs(lm, documents).mean()))


def show(rows: list[dict[str, Any]]) -> None:
    """Print one line for each corpus."""
    names = list(dict.fromkeys(row["decoder"] for row in rows))
    print(f"\n| corpus | tokens | {' | '.join(names)} | of best | chosen | time |")
    print("|---|---|" + "---|" * (len(names) + 3))
    for corpus in dict.fromkeys(row["corpus"] for row in rows):
        own = {row["decoder"]: row for row in rows if row["corpus"] == corpus}
        others = [row for name, row in own.items() if name != "selected"]
        selected, tokens = own["selected"], own["selected"]["tokens"]
        ratio = selected["test"] / min(row["test"] for row in others)
        slower = selected["seconds"] / (max(row.get("seconds", 0.0) for row in others) or math.nan)
        chosen = selected["chosen"]
        what = f"{chosen['epochs']:g} × {chosen['learning_rate']:g}, {chosen['interpolation']:g}"
        figures = " | ".join(f"{row['test']:.3f}" for row in own.values())
        print(f"| {corpus} | {tokens:,} | {figures} | {ratio:.4f} | {what} | {slower:.2f} |")


if __name__ == "__main__":
    main()
