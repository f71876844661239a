"""Tables, progress bars and JSON. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from knnlm.progress import Advance

if TYPE_CHECKING:
    from knnlm.lm.causal import CausalLM

_EVENT_SECONDS = 1.0  # between two events of a progress

console = Console(highlight=False, emoji=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, emoji=False)

# Characters that move the cursor or change the direction of writing.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class _Bar:
    """A progress bar with its speed and a note."""

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
        """Show a note from the next step on."""
        self._note = text


@contextmanager
def bar(what: str, *, total: int | None = None, unit: str = "tokens") -> Iterator[Advance]:
    """Show one progress bar with speed and remaining time."""
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
        # A limit inside a document makes the total a little larger than what was done.
        progress.update(task, total=progress.tasks[0].completed)


class _Events:
    """Progress as JSON objects, one on each line of standard error."""

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._begin, self._shown = time.monotonic(), -math.inf
        self._done, self._note = 0, ""

    def __call__(self, count: int) -> None:
        self._done += count
        self._show_now_and_then()

    def note(self, text: str) -> None:
        """Show a note in the next event, and at once if the last one was some time ago."""
        self._note = text
        self._show_now_and_then()

    def show(self, event: str) -> None:
        """Write an event."""
        self._shown = time.monotonic()
        content = {"event": event, "what": self._what, "done": self._done, "total": self._total, "unit": self._unit}
        content |= {"note": self._note, "seconds": round(self._shown - self._begin, 3)}
        print(json.dumps(content, ensure_ascii=False), file=sys.stderr, flush=True)  # noqa: T201

    def _show_now_and_then(self) -> None:
        if time.monotonic() - self._shown >= _EVENT_SECONDS:
            self.show("progress")


@contextmanager
def events(what: str, *, total: int | None = None, unit: str = "tokens") -> Iterator[Advance]:
    """Write progress as JSON objects to standard error: at the begin, each second, and when it is complete."""
    shown = _Events(what, total, unit)
    shown.show("begin")
    yield shown
    shown.show("end")


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a spinner."""
    with err.status(what):
        yield


def open_model(name: str, **settings: Any) -> CausalLM:
    """Open a model with a spinner, and without the log messages of the libraries below."""
    from knnlm.lm.speech import open_lm

    quiet()
    with waiting(f"opening the model {name} (the first time takes longer)"):
        return open_lm(name, **settings)


def quiet() -> None:
    """Keep the messages of transformers out of the progress bars, and show warnings of knnlm as one line."""
    from transformers.utils import logging

    from knnlm.errors import KnnlmWarning

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", category=KnnlmWarning)
    warnings.showwarning = _show_warning  # type: ignore[assignment]


def _show_warning(message: Warning | str, *_: Any) -> None:
    err.print(f"WARNING  {message}", markup=False, soft_wrap=True)


def show(result: Mapping[str, Any], text: str | Sequence[tuple[str, str]], *, json: bool) -> None:
    """Print a result as JSON, or as a line or a table of two columns."""
    if json:
        print_json(result)
    elif isinstance(text, str):
        console.print(text, markup=False)
    else:
        print_table(text)


def print_json(value: Any) -> None:
    """Print one JSON object; an infinite or undefined number becomes null, a path its text."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, ensure_ascii=False, default=os.fspath) + "\n")


def print_table(rows: Sequence[tuple[str, str]], *, title: str | None = None) -> None:
    """Print names and values in two columns."""
    table = Table(title=title, show_header=False, box=None, pad_edge=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    console.print(table)


def neighbour_table(title: str | Text, rows: Sequence[tuple[float, str, str, str, bool, str]]) -> Table:
    """Build a table of neighbours: weight, text before, token, text after, whether it is the token, source."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 1, 0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", style="dim")
    for weight, before, token, after, agrees, source in rows:
        context = Text(f"…{visible(before)[-60:]}")
        # Quotation marks as well as colours: a pipe loses colours.
        context.append(f"«{visible(token)}»", style="bold green" if agrees else "bold red")
        context.append(f"{visible(after)[:30]}…", style="dim")
        table.add_row(f"{weight:.3f}", context, Text(source))
    return table


def leak_warning(leaked: int, documents: int, consequence: str) -> list[tuple[str, str]]:
    """Return a warning row where text that was measured on is in the store itself."""
    if not leaked:
        return []
    return [("WARNING", f"{leaked:,} of {count(documents, 'document')} are in the store itself: {consequence}")]


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where needed."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def visible(text: str) -> str:
    """Replace line breaks, tabs and control characters by visible signs."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
    return without_control(shown)


def without_control(text: str) -> str:
    """Replace control characters, so that a document cannot control the terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def safe(text: str) -> str:
    """Escape text for rich markup."""
    return escape(visible(text))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
