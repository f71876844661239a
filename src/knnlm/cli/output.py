"""Tables, bars and JSON on a terminal. Results go to standard output, everything else to standard error.

How figures are shown: those of tune and of eval.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from knnlm.progress import Advance

if TYPE_CHECKING:
    from knnlm.lm.causal import CausalLM
if TYPE_CHECKING:
    from knnlm.evaluation.evaluate import Evaluation
    from knnlm.evaluation.tune import Tuning
    from knnlm.training.adapt import Adaptation


console = Console(highlight=False, emoji=False, soft_wrap=True)

err = Console(stderr=True, highlight=False, emoji=False)


class _Bar:
    """One bar on the screen: how far, how fast, and what is to be said beside it."""

    def __init__(self, progress: Progress, task: TaskID, unit: str) -> None:
        self._progress, self._task, self._unit = progress, task, unit
        self._note = ""

    def __call__(self, count: int) -> None:
        self._progress.update(self._task, advance=count)
        state = self._progress.tasks[0]
        speed = state.completed / state.elapsed if state.elapsed else 0.0
        done = f"{state.completed:,.0f} {self._unit}, {speed:,.0f}/s"
        self._progress.update(self._task, done=f"{done}, {self._note}" if self._note else done)

    def note(self, text: str) -> None:
        """Show these words from the next step on."""
        self._note = text


@contextmanager
def bar(what: str, *, total: int | None = None, unit: str = "tokens") -> Iterator[Advance]:
    """Show one progress bar with speed and time left."""
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err) as progress:
        task = progress.add_task(what, total=total, done="")
        try:
            yield _Bar(progress, task, unit)
        except BaseException:
            progress.live.transient = True  # an error is one line, without the bar above it
            raise
        # What was expected and what came differ a little where a limit falls inside a document.
        progress.update(task, total=progress.tasks[0].completed)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a spinner while something of unknown length goes on."""
    with err.status(what):
        yield


def open_model(name: str, **settings: Any) -> CausalLM:
    """Open a model without the chatter of the libraries below."""
    from knnlm.lm.causal import CausalLM

    quiet()
    with waiting(f"opening the model {name} (the first time takes longer)"):
        return CausalLM.open(name, **settings)


def quiet() -> None:
    """Keep transformers from writing over our bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")


def print_json(value: Any) -> None:
    """Print one JSON object; a number that is infinite or undefined becomes null, a path its text."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, ensure_ascii=False, default=os.fspath) + "\n")


def print_facts(facts: Sequence[tuple[str, str]], *, title: str | None = None) -> None:
    """Print names and values in two columns."""
    table = Table(title=title, show_header=False, box=None, pad_edge=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(Text(name), Text(value))
    console.print(table)


def visible(text: str) -> str:
    """Show line breaks and tabs of a token as signs."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")


def count(number: int, noun: str) -> str:
    """Say how many there are of something."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def safe(text: str) -> str:
    """Show text of unknown content inside markup."""
    return escape(visible(text))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def show_tuning(memory: Path, chosen_on: list[str], result: Tuning, *, json: bool) -> None:
    """Say what was chosen, and what it gives."""
    sweep = result.sweep
    best = sweep.best if sweep is not None else None
    facts: dict[str, Any] = {
        "memory": str(memory),
        "chosen_on": chosen_on,
        "tokens": result.tokens,
        "memories": [spec.as_dict() for spec in result.specs],
        "weights": result.weights.kind,
        "k": best[0] if best else None,
        "knn_temperature": best[1] if best else None,
        "lambda": result.lambda_,
        "base_perplexity": result.base_perplexity,
        "perplexity": result.perplexity,
        "settings_tried": sum(int(found.perplexity.size) for found in result.sweeps if found is not None),
        "sweep_seconds": result.seconds,
        "at_edge": sweep.at_edge() if sweep is not None else [],
        "documents": result.documents,
        "remembered_documents": result.remembered,
    }
    if json:
        print_json(facts)
        return
    rows = [("chosen on", f"{result.tokens:,} tokens of {', '.join(chosen_on)}")]
    for spec in result.specs:
        votes = f"k {spec.settings[0].k}, τ {spec.settings[0].knn_temperature:g}" if spec.settings else ""
        others = f", and {len(spec.settings) - 1} other ways of counting" if len(spec.settings) > 1 else ""
        rows.append((spec.label, f"{votes}{others}"))
    rows += [
        ("weights", describe_weights(result)),
        ("perplexity", f"{result.base_perplexity:.3f} → {result.perplexity:.3f} on that text; report it on another"),
        ("time", f"{facts['settings_tried']:,} settings and the weights in {result.seconds:.1f} s"),
    ]
    if facts["at_edge"]:
        rows.append(("note", f"best value is the last one tried of: {', '.join(facts['at_edge'])}"))
    rows += warning(result.remembered, result.documents, "what was chosen on them suits no other text")
    print_facts(rows)


def describe_weights(result: Tuning) -> str:
    """Say how parts are weighed."""
    return result.weights.kind if result.lambda_ is None else f"{result.weights.kind}, λ {result.lambda_:.3g}"


def show_evaluation(found: Evaluation, *, json: bool) -> None:
    """Say how well a text was predicted."""
    figures = found.as_dict()
    if json:
        print_json(figures)
        return
    rows = [
        (
            "text",
            f"{figures['tokens']:,} tokens, {figures['words']:,} words of {count(found.documents, 'document')}",
        ),
        (
            "perplexity",
            f"{figures['base_perplexity']:.3f} → {figures['perplexity']:.3f}  ({figures['gain']:.1%} lower)",
        ),
        ("  best of all", f"{figures['oracle_perplexity']:.3f}, choosing the best of model and memories at each token"),
        ("  per word", f"{figures['base_word_perplexity']:.2f} → {figures['word_perplexity']:.2f}"),
        ("bits per byte", f"{figures['base_bits_per_byte']:.4f} → {figures['bits_per_byte']:.4f}"),
        ("weights", f"{found.weights}, λ {found.lambda_:.3g}"),
    ]
    for memory in found.memories:
        votes = f"k {memory['k']}, τ {memory['knn_temperature']:g}, {memory['metric']}, " if "k" in memory else ""
        rows.append((f"  {memory['name']}", f"{votes}weight {memory['weight']:.3g}"))
    rows += [
        ("time", f"{figures['seconds']:.1f} s, {figures['tokens_per_second']:,.0f} tokens/s"),
        *warning(found.remembered, found.documents, "their figures are too good"),
    ]
    print_facts(rows)


def warning(remembered: int, documents: int, so: str) -> list[tuple[str, str]]:
    """Tell a person who measures on text that is in the memory."""
    if not remembered:
        return []
    return [("WARNING", f"{remembered:,} of {count(documents, 'document')} are in the memory itself: {so}")]


def adaptation_rows(result: Adaptation) -> list[tuple[str, str]]:
    """Lay out what each part of an adapted memory is worth."""
    return [
        ("the model", perplexity(result.base)),
        ("the student alone", perplexity(result.fine_tuned)),
        ("the model and its memory", perplexity(result.knn)),
        ("the model and the student", f"{perplexity(result.decoder)}  (λ = {result.decoder_lambda:.2f})"),
        ("all, gated", perplexity(result.everything)),
    ]


def perplexity(value: float) -> str:
    """Write a perplexity; that of a student that has hardly learnt anything has many digits, none of which matters."""
    return f"{value:.3f}" if value < 1e6 else f"{value:.2g}"


def show_decoder(folder: Path, *, json: bool) -> None:
    """Say what a decoder is, how it was trained, and for which model it was tuned."""
    from knnlm.memories.decoder import load_card

    card = load_card(folder)
    if json:
        facts = asdict(card)
        print_json(
            {
                "decoder": str(folder),
                "lambda": facts.pop("lmbda"),
                "lambda_facts": facts.pop("lmbda_facts"),
                **facts,
            }
        )
        return
    student, chosen = card.student, card.lmbda_facts
    blocks = "" if student["blocks"] is None else f", blocks {', '.join(map(str, student['blocks']))}"
    losses = ", ".join(f"{name} {value:.3f}" for name, value in card.losses.items() if value is not None)
    taught = "" if card.teacher is None else f", {card.beta:g} of the loss by the store {card.teacher}"
    tuned = "not yet: knnlm tune DECODER TEXT --model MODEL"
    if card.lmbda is not None:
        tuned = f"λ {card.lmbda:.3g}"
        if chosen is not None:
            gain = f"{chosen['base_perplexity']:.2f} → {chosen['perplexity']:.2f}"
            tuned += f" for {chosen['model']}; chosen on {chosen['tokens']:,} tokens of {', '.join(chosen['text'])} "
            tuned += f"(perplexity {gain})"
    rows = [
        ("decoder", f"{folder}"),
        ("student", f"{student['spec']} ({student['class']}, {student['parameters'] / 1e6:,.1f}M weights{blocks})"),
        ("tokens", f"{card.vocab_size:,}, tokenizer {card.tokenizer}"),
        ("trained", f"{card.tokens:,} tokens of text, {card.steps:,} steps, {card.seconds:,.0f} s{taught}"),
        ("", f"at the end: {losses}"),
        ("window", f"{card.window['context']} tokens"),
        ("tuned", tuned),
        *(("note", note) for note in card.notes),
    ]
    print_facts(rows)
