"""What a study says: a sentence, tables, plots, examples, a command. Knows nothing about how it was found or is shown.

All of it is plain numbers and words, so that a finished study is kept as JSON and read again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from knnlm.errors import KnnlmError

Cell = str | int | float | None

FIGURES = {"τ": ".3g", "λ": ".2f", "tuning": ".3f", "held-out": ".3f"}  # columns of what was chosen, and what it gives


class CannotStudy(KnnlmError):
    """A study cannot be made of this memory and this text; the message says why. It never leaves the report."""


@dataclass(frozen=True)
class Table:
    """Rows of cells; each column has a name and the format its numbers are shown in."""

    columns: list[str]
    formats: list[str]
    rows: list[list[Cell]]
    caption: str = ""
    best: int | None = None  # the row that stands out

    @classmethod
    def of(
        cls, columns: dict[str, str], rows: list[list[Cell]], *, caption: str = "", best: int | None = None
    ) -> Table:
        """Make a table of columns, given as names with their formats."""
        return cls(list(columns), list(columns.values()), rows, caption, best)


@dataclass(frozen=True)
class Line:
    """One curve, or one row of bars; x may be names."""

    name: str
    x: list[Any]
    y: list[float | None]


@dataclass(frozen=True)
class Plot:
    """A drawing: lines, bars or points."""

    kind: str
    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    log_x: bool = False
    levels: dict[str, float] = field(default_factory=dict)  # horizontal lines to compare with
    mark: list[float] | None = None  # the point that was chosen: x, y

    @classmethod
    def bars(cls, title: str, names: Sequence[str], figures: Sequence[float], **levels: float) -> Plot:
        """Compare perplexities of the held-out text."""
        line = Line("held-out text", list(names), list(figures))
        return cls("bars", title, "", "perplexity", [line], levels=_spaced(levels))

    @classmethod
    def curves(cls, title: str, x_label: str, lines: list[Line], *, log_x: bool = False, **levels: float) -> Plot:
        """Draw perplexities as curves."""
        return cls("lines", title, x_label, "perplexity", lines, log_x=log_x, levels=_spaced(levels))


def _spaced(levels: dict[str, float]) -> dict[str, float]:
    return {name.replace("_", " "): level for name, level in levels.items()}


@dataclass(frozen=True)
class ExampleNeighbour:
    """One stored context that voted."""

    weight: float
    distance: float
    token: str
    agrees: bool
    document: str
    source: str
    before: str
    after: str


@dataclass(frozen=True)
class Example:
    """One token of the text, and what was said of it."""

    context: str
    target: str
    document: str
    p_lm: float
    p_knn: float
    p: float
    gain: float  # nats
    neighbours: list[ExampleNeighbour]


@dataclass(frozen=True)
class Study:
    """One study: what is seen in one sentence, and the numbers it is seen in."""

    name: str
    title: str
    paper: str
    finding: str
    command: str
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    examples: dict[str, list[Example]] = field(default_factory=dict)  # by what they are examples of
    notes: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Give plain values, for JSON: a number that is infinite or undefined is None."""
        found = finite(asdict(self))
        assert isinstance(found, dict)
        return found

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Study:
        """Read what `as_dict` gave."""
        made = dict(facts)
        made["tables"] = [Table(**table) for table in facts["tables"]]
        made["plots"] = [Plot(**{**plot, "lines": [Line(**line) for line in plot["lines"]]}) for plot in facts["plots"]]
        made["examples"] = {
            kind: [
                Example(**{**example, "neighbours": [ExampleNeighbour(**one) for one in example["neighbours"]]})
                for example in examples
            ]
            for kind, examples in facts["examples"].items()
        }
        return cls(**made)


def finite(value: Any) -> Any:
    """Turn numbers that JSON does not know into None, wherever they are."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def lowest(values: Sequence[float | None]) -> int:
    """Give the place of the smallest number; what is undefined is none."""
    return min(range(len(values)), key=lambda place: math.inf if (found := values[place]) is None else found)


def percent_lower(new: float, old: float) -> str:
    """Say how much lower, or higher, a perplexity is than another."""
    change = 1 - new / old
    return f"{abs(change):.1%} {'lower' if change >= 0 else 'higher'}"
