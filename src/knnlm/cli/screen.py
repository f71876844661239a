"""Tables, bars and JSON on a terminal. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from knnlm.progress import Advance

if TYPE_CHECKING:
    from knnlm.lm import CausalLM

out = Console(highlight=False, emoji=False, soft_wrap=True)
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
        yield _Bar(progress, task, unit)
        # What was expected and what came differ a little where a limit falls inside a document.
        progress.update(task, total=progress.tasks[0].completed)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a spinner while something of unknown length goes on."""
    with err.status(what):
        yield


def survey(text: Sequence[str], text_field: str, *, limit: int | None = None) -> int | None:
    """Look through all text before anything slow begins, so that its errors come first; give its characters."""
    from knnlm import corpus

    if limit is not None:  # most of it may not be read at all
        return None
    with waiting("looking through the text"):
        found = corpus.survey(*text, text_field=text_field)
    return found.characters if found.complete else None


def open_model(name: str, **settings: Any) -> CausalLM:
    """Open a model without the chatter of the libraries below."""
    from knnlm.lm import CausalLM

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
    out.print(table)


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
