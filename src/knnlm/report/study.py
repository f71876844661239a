"""The contents of a study: a finding, tables, plots, examples and a command.

All of it is plain numbers and text, so that a finished study is saved as JSON and loaded again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from knnlm.errors import KnnlmError

Cell = str | int | float | None

_FIGURES = {"τ": ".3g", "λ": ".2f", "tuning": ".3f", "held-out": ".3f"}  # columns: chosen settings and perplexities


class StudyUnavailable(KnnlmError):
    """A study that cannot be made of this store and this text. The report lists it as skipped, with the message."""


@dataclass(frozen=True)
class Outcome:
    """Settings chosen on the tuning text, and the perplexities of both texts."""

    k: int
    knn_temperature: float
    lmbda: float
    valid: float  # perplexity
    test: float

    def figures(self) -> tuple[float, float, float, float]:
        """Return τ, λ and both perplexities, for a table."""
        return self.knn_temperature, self.lmbda, self.valid, self.test

    def options(self) -> tuple[object, ...]:
        """Return the options of `knnlm eval` for these settings."""
        return ("--k", self.k, "--knn-temperature", self.knn_temperature, "--lambda", self.lmbda)


@dataclass(frozen=True)
class Table:
    """Rows of cells; each column has a name and a number format."""

    columns: list[str]
    formats: list[str]
    rows: list[list[Cell]]
    caption: str = ""
    best: int | None = None  # the highlighted row

    @classmethod
    def build(
        cls, columns: dict[str, str], rows: list[list[Cell]], *, caption: str = "", best: int | None = None
    ) -> Table:
        """Build a table from column names with their formats."""
        return cls(list(columns), list(columns.values()), rows, caption, best)

    @classmethod
    def of_outcomes(
        cls, columns: dict[str, str], cells: Sequence[Sequence[Cell]], tried: Sequence[Outcome], *, caption: str = ""
    ) -> Table:
        """Build a table of outcomes with cells before each; the best on the tuning text is highlighted."""
        rows = [[*first, *one.figures()] for first, one in zip(cells, tried, strict=True)]
        return cls.build({**columns, **_FIGURES}, rows, caption=caption, best=lowest([one.valid for one in tried]))


@dataclass(frozen=True)
class Line:
    """One curve, or one set of bars; x may be names."""

    name: str
    x: list[Any]
    y: list[float | None]

    @classmethod
    def of_outcomes(cls, x: Sequence[float], tried: Sequence[Outcome]) -> list[Line]:
        """Return the curves of the perplexities of both texts."""
        tuning, held_out = [one.valid for one in tried], [one.test for one in tried]
        return [cls("tuning text", list(x), [*tuning]), cls("held-out text", list(x), [*held_out])]


@dataclass(frozen=True)
class Plot:
    """A plot of lines, bars or points."""

    kind: str
    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    log_x: bool = False
    levels: dict[str, float] = field(default_factory=dict)  # reference lines
    mark: list[float] | None = None  # the chosen point: x, y

    @classmethod
    def bars(cls, title: str, names: Sequence[str], figures: Sequence[float], **levels: float) -> Plot:
        """Build a bar plot of perplexities of the held-out text."""
        line = Line("held-out text", list(names), list(figures))
        return cls("bars", title, "", "perplexity", [line], levels=_spaced(levels))

    @classmethod
    def curves(cls, title: str, x_label: str, lines: list[Line], *, log_x: bool = False, **levels: float) -> Plot:
        """Build a line plot of perplexities."""
        return cls("lines", title, x_label, "perplexity", lines, log_x=log_x, levels=_spaced(levels))

    @classmethod
    def points(cls, title: str, x_label: str, lines: list[Line], **levels: float) -> Plot:
        """Build a plot of perplexities as points over a logarithmic axis."""
        return cls("points", title, x_label, "perplexity", lines, log_x=True, levels=_spaced(levels))


def _spaced(levels: dict[str, float]) -> dict[str, float]:
    return {name.replace("_", " "): level for name, level in levels.items()}


@dataclass(frozen=True)
class ExampleNeighbour:
    """One neighbour of an example."""

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
    """One token of the text, its probabilities and its neighbours."""

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
    """One study: a finding in one sentence and the numbers behind it."""

    name: str
    title: str
    paper: str
    finding: str
    command: str
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    examples: dict[str, list[Example]] = field(default_factory=dict)  # by kind
    notes: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; a number that is not finite becomes None."""
        values = finite(asdict(self))
        assert isinstance(values, dict)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Study:
        """Build a study from what `as_dict` returned."""
        study = dict(values)
        study["tables"] = [Table(**table) for table in values["tables"]]
        study["plots"] = [
            Plot(**{**plot, "lines": [Line(**line) for line in plot["lines"]]}) for plot in values["plots"]
        ]
        study["examples"] = {
            kind: [
                Example(**{**example, "neighbours": [ExampleNeighbour(**item) for item in example["neighbours"]]})
                for example in examples
            ]
            for kind, examples in values["examples"].items()
        }
        return cls(**study)


def finite(value: Any) -> Any:
    """Return a value with None for every number that is not finite, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def lowest(values: Sequence[float | None]) -> int:
    """Return the position of the smallest number; None counts as infinite."""
    return min(range(len(values)), key=lambda place: math.inf if (value := values[place]) is None else value)


def percent_lower(new: float, old: float) -> str:
    """Return by how many percent a perplexity is lower or higher than another, in words."""
    change = 1 - new / old
    return f"{abs(change):.1%} {'lower' if change >= 0 else 'higher'}"
