"""Test perplexity of a model with decoders trained on a corpus, compared with the alternatives.

    python benchmarks/decoders.py CORPUS --store 6000 --limit 1500 --layers 4 --blocks 2   # minutes on two cores
    python benchmarks/decoders.py CORPUS --limit 60000 --device cuda --teach 0.5:2:self,0.5:16:document
    python benchmarks/decoders.py CORPUS --limit 60000 --device cuda --select --lora 64 --more
    python benchmarks/decoders.py --speed 30,8,top6,lora64 --device cuda                   # alone on the machine

CORPUS is a folder with train, valid and test .jsonl (also .gz, .xz, .zst), a document a line. A student is trained on
train by cross entropy alone, a small one of some of the model's blocks too, and each reads a store of its own. k, τ,
weights and gates are fitted on valid; figures are those of test. With --select, learning rate and epochs are chosen on
valid, as `adapt` does it; with --top, the small student has the last blocks of the model, which computes the others;
with --lora, adapters of all blocks.
--more adds memories that `adapt` does not make: an output matrix and a key map trained on the student's keys, and a
store of its states in an earlier block. --teach trains more students, each with a share β of
its loss from the store that the first student reads: β:τ:what a position may not see, and, where given, :the most
tokens and :the mass that are kept of a target. --variants trains students otherwise: rate:tokens in a step:epochs.
--other trains a second model on another corpus, and helps it with the student of the first.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import knnlm
from knnlm.evaluation.evaluate import first_documents
from knnlm.evaluation.tune import (
    TraceTable,
    choose_settings,
    evaluate_table,
    fit_weights,
    sweep_all,
    tabulate,
    token_frequencies,
)
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.initial_model import open_initial_model
from knnlm.training.metric_learning import KeyMetricConfig, train_key_metric
from knnlm.training.output_matrix import OutputConfig, train_output
from knnlm.training.teacher import Targets, TeacherConfig, make_targets
from perplexity import parser_for, split

STUDENT, SMALL = "decoder=student", "decoder=small"
BASE_KNN, STUDENT_KNN, SMALL_KNN = "knn=base.store", "knn", "knn=small.store"
ROWS: list[tuple[str, list[str], str]] = [
    ("model + kNN, one λ", [BASE_KNN], "fixed"),
    ("model + student, one λ", [STUDENT], "fixed"),
    ("model + student + kNN, gated", [STUDENT, BASE_KNN], "gated"),
    ("model + student + kNN of the student, gated", [STUDENT, STUDENT_KNN], "gated"),
    ("and cache, n-grams: all, gated", [STUDENT, STUDENT_KNN, "cache", "ngram"], "gated"),
    ("and the n-gram cache, gated", [STUDENT, STUDENT_KNN, "cache", "ngram", "ngram-cache"], "gated"),
    ("model + small, one λ", [SMALL], "fixed"),
    ("model + small + kNN, gated", [SMALL, BASE_KNN], "gated"),
    ("model + small + kNN of the small one, gated", [SMALL, SMALL_KNN], "gated"),
    ("and cache, n-grams: all with the small one, gated", [SMALL, SMALL_KNN, "cache", "ngram"], "gated"),
]
ALL = [STUDENT, STUDENT_KNN, "cache", "ngram"]
OUTPUT, MAPPED, EARLIER = "output=output", "knn=mapped.store", "knn=earlier.store"
MORE: list[tuple[str, list[str], str]] = [
    ("all but the student itself, gated", [STUDENT_KNN, "cache", "ngram"], "gated"),
    ("all but the student's store, gated", [STUDENT, "cache", "ngram"], "gated"),
    ("all but the cache, gated", [STUDENT, STUDENT_KNN, "ngram"], "gated"),
    ("all but n-grams, gated", [STUDENT, STUDENT_KNN, "cache"], "gated"),
    ("all and kNN of the model, gated", [*ALL, BASE_KNN], "gated"),
    ("all and kNN of an earlier block of the student, gated", [*ALL, EARLIER], "gated"),
    ("all and kNN of a trained map of the student's keys, gated", [*ALL, MAPPED], "gated"),
    ("all and an output matrix of the student's keys, gated", [*ALL, OUTPUT], "gated"),
    ("all of these, gated", [*ALL, BASE_KNN, EARLIER, MAPPED, OUTPUT], "gated"),
]


def main() -> None:
    options = parse()
    lm = CausalLM.open(options.model, device=options.device, dtype=options.dtype)
    if options.speed:
        speed(lm, options.speed.split(","), options)
    for corpus in options.corpus:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found = Study(corpus, Path(folder), lm, options).run()
        print(f"| {corpus.name} | test perplexity | valid |\n|---|---|---|")
        for name, (valid, test) in found.items():
            print(f"| {name} | {test:.2f} | {valid:.2f} |", flush=True)


def parse() -> argparse.Namespace:
    parser = parser_for(__doc__, "*")
    parser.add_argument("--layers", type=int, help="blocks of the model that the student has (default: all)")
    parser.add_argument("--blocks", type=int, default=6, help="blocks that the small student has")
    parser.add_argument("--top", type=int, help="the small student: so many of the model's last blocks are trained")
    parser.add_argument("--lora", type=int, default=0, help="the small student: the rank of adapters of all blocks")
    parser.add_argument("--select", action="store_true", help="choose learning rates and epochs on valid")
    parser.add_argument("--more", action="store_true", help="also measure memories that adapt does not make")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--small-rate", type=float, default=6e-4, help="learning rate of the small student")
    parser.add_argument("--small-epochs", type=int, default=3)
    parser.add_argument("--table", action=argparse.BooleanOptionalAction, default=True, help="mix everything")
    parser.add_argument("--teach", default="", help="β:τ:self or document[:top[:mass]], with commas")
    parser.add_argument("--teach-small", action="store_true", help="teach the small student as well")
    parser.add_argument("--variants", default="", help="learning rate:tokens in a step:epochs, with commas")
    parser.add_argument("--other", type=Path, help="a corpus that a second model is fine-tuned on")
    parser.add_argument("--other-store", type=int, default=500_000, help="tokens of its train to use")
    parser.add_argument("--speed", help="only time generation: blocks of the student, with commas")
    parser.add_argument("--folder", type=Path, help="where models and stores are made (default: a temporary folder)")
    return parser.parse_args()


class Study:
    """All measurements of one corpus."""

    def __init__(self, corpus: Path, folder: Path, lm: CausalLM, options: argparse.Namespace) -> None:
        self.corpus, self.folder, self.lm, self.options = corpus, folder, lm, options
        self.begin = time.perf_counter()
        self.found: dict[str, tuple[float, float]] = {}

    def log(self, *words: object) -> None:
        print(f"{self.corpus.name} {time.perf_counter() - self.begin:6.1f} s ", *words, file=sys.stderr, flush=True)

    def run(self) -> dict[str, tuple[float, float]]:
        options = self.options
        documents = list(first_documents(split(self.corpus, "train"), self.lm, options.store))
        self.tokens = self.lm.encode_all([document.text for document in documents])
        self.train("student", options.layers, options.learning_rate, options.epochs)
        if options.table and (options.top or options.lora):
            kind = {"top": options.top, "lora": options.lora}
            self.train("small", options.layers, None if options.lora else options.learning_rate, options.epochs, **kind)
        elif options.table:
            self.train("small", options.blocks, options.small_rate, options.small_epochs)
        for name in ("student", "small") if options.table else ("student",):
            reader = CausalLM.open(str(self.folder / name), device=options.device, dtype=options.dtype)
            knnlm.build(documents, self.folder / f"{name}.store", lm=reader).close()
        self.log("the students have read their stores")
        if options.table:
            self.compare(documents)
        if options.other:
            self.plug_in()
        for variant in filter(None, options.variants.split(",")):
            self.vary(*variant.split(":"))
        for teaching in filter(None, options.teach.split(",")):
            self.teach(*teaching.split(":"))
        return self.found

    def compare(self, documents: list[knnlm.Document]) -> None:
        """Measure all combinations of memories."""
        knnlm.build(documents, self.folder / "base.store", lm=self.lm).close()
        others = [("knn", "base.store"), ("knn", "small.store"), ("decoder", "student"), ("decoder", "small")]
        if self.options.more:
            others += self.train_more(documents)
        memories = ["knn", *(f"{kind}={self.folder}/{name}" for kind, name in others)]
        seen = self.tabulate([*memories, "cache", "ngram", "ngram-cache"])
        self.table(seen)
        self.compare_frequencies(seen[1])

    def train_more(self, documents: list[knnlm.Document]) -> list[tuple[str, str]]:
        """Make further memories of the student's states, and return their kinds and names."""
        options, store = self.options, knnlm.Datastore.open(self.folder / "student.store")
        device = str(self.lm.device)
        train_output(store, self.folder / "output", OutputConfig(rows=3), device=device)
        self.log("the output matrix is trained")
        train_key_metric(store, self.folder / "mapped.store", KeyMetricConfig(), device=device).close()
        self.log("the key map is trained")
        student = str(self.folder / "student")
        blocks = store.model["layer"] + 1
        store.close()
        reader = CausalLM.open(student, layer=blocks * 3 // 4 - 1, device=options.device, dtype=options.dtype)
        knnlm.build(documents, self.folder / "earlier.store", lm=reader).close()
        return [("output", "output"), ("knn", "mapped.store"), ("knn", "earlier.store")]

    def train(
        self,
        name: str,
        layers: int | None,
        rate: float | None,
        epochs: int,
        targets: Targets | None = None,
        **settings: Any,
    ) -> None:
        initial = open_initial_model(self.options.model, like=self.lm, layers=layers)
        config = DecoderConfig(epochs=epochs, learning_rate=rate, select=self.options.select, **settings)
        run: dict[str, Any] = {"targets": targets, "device": self.options.device}
        if config.select:
            valid = first_documents(split(self.corpus, "valid"), self.lm, self.options.limit)
            run["held_out_text"] = self.lm.encode_all([document.text for document in valid])
        card = train_decoder(self.tokens, initial, self.folder / name, config, **run)
        weights = card.initial_model["parameters"] / 1e6
        self.log(f"{name}: {weights:.0f}M weights, {card.losses}, {card.seconds:.1f} s", card.selection or "")

    def tabulate(self, memories: list[str]) -> list[TraceTable]:
        """Read valid and test once with everything; settings of votes are chosen on valid."""
        device = str(self.lm.device)
        home = self.folder / "student.store"
        mixture = Mixture.open(home, self.lm, memories=",".join(memories), use_tuned=False)
        self.frequencies = token_frequencies(mixture.store)
        traces = []
        for part in ("valid", "test"):
            place = Path(tempfile.mkdtemp(dir=self.folder)) / part
            text = split(self.corpus, part)
            traces.append(mixture.record(text, place, k=1024, limit=self.options.limit))
        settings = choose_settings(traces[0], sweep_all(traces[0], device=device), several=True)
        self.log("valid and test are read")
        return [self.named(tabulate(trace, settings, device=device)) for trace in traces]

    def named(self, seen: TraceTable) -> TraceTable:
        from dataclasses import replace

        short = [replace(one, label=one.label.replace(f"{self.folder}/", "")) for one in seen.memories]
        return replace(seen, memories=short)

    def table(self, seen: list[TraceTable]) -> None:
        self.add("model", *(perplexity(one.lm_log_probs) for one in seen))
        for name, label in (("the student alone: fine-tuned", STUDENT), ("the small student alone", SMALL)):
            self.add(name, *(perplexity(one.select(label).memories[0].log_probs[:, 0]) for one in seen))
        for name, memories, kind in [*ROWS, *(MORE if self.options.more else [])]:
            self.add(name, *self.fitted(seen, memories, kind))

    def fitted(self, seen: list[TraceTable], memories: list[str], kind: str) -> tuple[float, float]:
        device = str(self.lm.device)
        valid, test = (one.select(*memories) for one in seen)
        fitted = fit_weights(valid, kind, frequencies=self.frequencies, device=device)
        return fitted.perplexity, evaluate_table(test, fitted.weights).perplexity

    def add(self, name: str, valid: float, test: float) -> None:
        self.found[name] = (valid, test)
        self.log(f"{name:<50} valid {valid:8.3f}  test {test:8.3f}")

    def vary(self, rate: str, size: str, epochs: str) -> None:
        """Train a student with other settings."""
        name = f"varied-{rate}-{size}-{epochs}"
        self.train(name, self.options.layers, float(rate), int(epochs), batch_tokens=int(size))
        self.measure(name, f"student at {rate}, {size} tokens a step, {epochs} epochs")

    def measure(self, name: str, what: str) -> None:
        """Measure a student alone and with the model."""
        seen = self.tabulate([f"decoder={self.folder}/{name}"])
        self.add(f"{what}, alone", *(perplexity(one.memories[0].log_probs[:, 0]) for one in seen))
        self.add(f"model + {what}, one λ", *self.fitted(seen, [f"decoder={name}"], "fixed"))

    def plug_in(self) -> None:
        """Combine a second model, fine-tuned on another text, with the same student."""
        options = self.options
        documents = first_documents(split(options.other, "train"), self.lm, options.other_store)
        tokens = self.lm.encode_all([document.text for document in documents])
        train_decoder(
            tokens,
            open_initial_model(options.model, like=self.lm),
            self.folder / "other",
            DecoderConfig(epochs=1, learning_rate=options.learning_rate),
            device=options.device,
        )
        own = self.lm
        self.lm = CausalLM.open(str(self.folder / "other"), device=options.device, dtype=options.dtype)
        seen = self.tabulate([f"decoder={self.folder}/student"])
        name = f"a model fine-tuned on {options.other.name}"
        self.add(name, *(perplexity(one.lm_log_probs) for one in seen))
        self.add(f"{name} + student, one λ", *self.fitted(seen, [STUDENT], "fixed"))
        self.lm = own

    def teach(self, beta: str, temperature: str, exclude: str, top: str = "64", mass: str = "0.99") -> None:
        """Train a student on the text and on the store that the first student reads, as long as the first."""
        store = knnlm.Datastore.open(self.folder / "student.store")
        place = self.folder / f"targets-{temperature}-{exclude}-{top}-{mass}"
        config = TeacherConfig(knn_temperature=float(temperature), exclude=exclude, top=int(top), mass=float(mass))
        targets = make_targets(store, place, config, device=self.options.device)
        self.log("targets:", targets.metadata)
        options = self.options
        sizes = {"student": (options.layers, options.learning_rate, options.epochs)}
        if options.teach_small:
            sizes["small"] = (options.blocks, options.small_rate, options.small_epochs)
        for size, how in sizes.items():
            name = f"{size}-{beta}-{temperature}-{exclude}-{top}-{mass}"
            self.train(name, *how, beta=float(beta), targets=targets)
            self.measure(name, f"{size} taught β={beta} τ={temperature} without {exclude}, {top} tokens of {mass}")
        store.close()

    def compare_frequencies(self, seen: TraceTable) -> None:
        """Compare the student with the model on rare and on frequent words."""
        targets = self.targets(seen)
        (student,) = seen.select(STUDENT).memories
        gain = student.log_probs[:, 0] - seen.lm_log_probs
        counts = self.frequencies[targets]
        common = self.frequencies.argsort(descending=True)[:50]
        frequent = torch.isin(targets, common)
        rare = (counts > 0) & (counts <= 20)
        for name, rows in (("the 50 most frequent tokens", frequent), ("tokens seen 1 to 20 times", rare)):
            self.log(
                f"{name}: {int(rows.sum())} of {len(rows)}, p of the model {seen.lm_log_probs[rows].exp().mean():.3f}, "
                f"of the student {student.log_probs[rows, 0].exp().mean():.3f}, log ratio {gain[rows].mean():+.3f}"
            )
        draw = torch.Generator().manual_seed(0)
        for name, rows in (("seen 1 to 20 times", rare), ("frequent", frequent)):
            places = rows.nonzero()[:, 0]
            for place in places[torch.randperm(len(places), generator=draw)[:8]].tolist():  # drawn, not chosen
                before = self.lm.tokenizer.decode(targets[max(0, place - 12) : place].tolist())
                told = f"p of the model {seen.lm_log_probs[place].exp():.3f}"
                told += f", of the student {student.log_probs[place, 0].exp():.3f}"
                self.log(f"{name}: …{before!r} → {self.lm.tokenizer.decode([int(targets[place])])!r}: {told}")

    def targets(self, seen: TraceTable) -> torch.Tensor:
        """The tokens that were predicted, in the order of the trace."""
        found: list[int] = []
        for document in split(self.corpus, "test"):
            found += self.lm.encode(document.text)
            if len(found) >= len(seen.lm_log_probs):
                break
        assert len(found) == len(seen.lm_log_probs)
        return torch.tensor(found)


def perplexity(logs: torch.Tensor) -> float:
    return float((-logs.double().mean()).exp())


def speed(lm: CausalLM, sizes: list[str], options: argparse.Namespace) -> None:
    """Milliseconds a token of generation, batch 1, with untrained students, which take as long."""
    ids = torch.randint(100, 40_000, (1, 32), device=lm.device)
    print("| blocks | weights | ms a token | ÷ the model alone |\n|---|---|---|---|")
    milliseconds(lm.model, ids)
    for size in sizes:
        top, lora = (int(size[len(kind) :]) if size.startswith(kind) else 0 for kind in ("top", "lora"))
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            initial = open_initial_model(options.model, like=lm, layers=None if top or lora else int(size))
            place = Path(folder) / "decoder"
            config = DecoderConfig(epochs=1, top=top or None, lora=lora)
            card = train_decoder([[5] * 64] * 4, initial, place, config, device=options.device)
            mixed = knnlm.KnnForCausalLM(Mixture.open(place, lm))
        # Alternating, because the speed of a shared machine varies.
        times = [(milliseconds(lm.model, ids), milliseconds(mixed, ids)) for _ in range(3)]
        base, with_it = (sorted(column)[1] for column in zip(*times, strict=True))
        weights = card.initial_model["parameters"] / 1e6
        print(f"| {size} | {weights:.0f}M | {with_it:.1f} | {with_it / base:.2f} |", flush=True)


def milliseconds(model: Any, ids: torch.Tensor, tokens: int = 64) -> float:
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        times.append(time.perf_counter() - begin)
    return 1e3 * sorted(times)[1] / tokens


if __name__ == "__main__":
    main()
