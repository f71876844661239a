"""Plots as PNG images, on white.

Figures are created without pyplot, so the caller's own plots are not affected and no window opens.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from knnlm.report.study import Line, Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 160
_WIDTH, _HEIGHT = 6.4, 3.5  # inches
_BAR_HEIGHT = 0.36  # inches
_NAME_WIDTH = 30  # characters in a line of a bar's name
_MAX_TICKS = 7  # along a logarithmic axis
_MAX_MARKED_POINTS = 24  # of a curve whose points are marked

# The page's dark style inverts the lightness of these colours and keeps their hue.
_PAPER, _INK, _SOFT, _GRID = "#ffffff", "#1c2430", "#667085", "#e4e7ec"
_COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#b08500", "#0b7285")


def draw(plot: Plot) -> bytes:
    """Return a plot as the bytes of a PNG file."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    bars = plot.kind == "bars"
    height = max(1.7, 1.0 + _BAR_HEIGHT * len(plot.lines[0].x)) if bars else _HEIGHT
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained", facecolor=_PAPER)
    axes = figure.add_subplot()
    _style_axes(axes)
    if bars:
        _draw_bars(axes, plot)
    else:
        _draw_lines(axes, plot)
        # The legend is below the axes, where it hides nothing.
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5, labelcolor=_INK)
    axes.set_title(plot.title, loc="left", fontsize=11, fontweight="bold", color=_INK, pad=16 if plot.levels else 6)
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # file names may contain dollar signs
    return _png(figure)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    # Without the version, the same numbers give the same bytes.
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _style_axes(axes: Axes) -> None:
    axes.set_facecolor(_PAPER)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_SOFT)
    axes.tick_params(colors=_SOFT, labelcolor=_INK, labelsize=9)
    axes.set_axisbelow(True)


def _draw_lines(axes: Axes, plot: Plot) -> None:
    """Draw curves, or single points."""
    axes.grid(True, color=_GRID, linewidth=0.8)
    heights: list[float] = [*plot.levels.values()]
    for number, line in enumerate(plot.lines):
        colour = _COLOURS[number % len(_COLOURS)]
        x, y = _finite_points(line)
        heights += y
        if plot.kind == "points":
            axes.plot(x, y, "o", color=colour, markersize=7, label=line.name)
        else:
            marker = "o" if len(x) <= _MAX_MARKED_POINTS else None
            axes.plot(x, y, color=colour, linewidth=2, marker=marker, markersize=4, label=line.name)
    for name, level in plot.levels.items():
        axes.axhline(level, color=_SOFT, linewidth=1.2, linestyle=(0, (4, 3)), label=f"{name} {level:.2f}")
    if plot.mark is not None:
        size = {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.8}
        axes.plot(plot.mark[:1], plot.mark[1:], "o", color=_INK, **size, label="chosen")  # type: ignore[arg-type]
    if plot.log_x:
        _log_ticks(axes, [x for line in plot.lines for x in _finite_points(line)[0]])
    if plot.kind == "lines":
        _limit_height(axes, heights)
    axes.set_xlabel(plot.x_label, color=_INK, fontsize=9)
    axes.set_ylabel(plot.y_label, color=_INK, fontsize=9)


def _finite_points(line: Line) -> tuple[list[Any], list[float]]:
    """Return the points with a finite y."""
    points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None and math.isfinite(y)]
    return [x for x, _ in points], [y for _, y in points]


def _limit_height(axes: Axes, heights: Sequence[float]) -> None:
    """Cut off a curve that diverges, so that the others can be told apart."""
    if not heights:
        return
    ordered = sorted(heights)
    middle, low = ordered[len(ordered) // 2], ordered[0]
    most = max(middle + 3 * (middle - low), 1.6 * low)
    if ordered[-1] > most:
        axes.set_ylim(low - 0.05 * (most - low), most)


def _log_ticks(axes: Axes, x: Sequence[float]) -> None:
    """Put ticks at the values that were tried rather than at powers of ten."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log")
    values = sorted(set(x))
    shown = values[:: -(-len(values) // _MAX_TICKS)]
    axes.set_xticks(shown, [_shorten(value) for value in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def _shorten(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _wrap(name: str) -> str:
    """Break a long name into at most two lines."""
    return "\n".join(textwrap.wrap(name, _NAME_WIDTH, max_lines=2, placeholder=" …"))


def _draw_bars(axes: Axes, plot: Plot) -> None:
    """Draw horizontal bars, each with its number; a second line of negative values extends to the left."""
    names = [_wrap(str(name)) for name in plot.lines[0].x]
    bars = [(place, value or 0.0) for line in plot.lines for place, value in enumerate(line.y)]
    values = [value for _, value in bars]
    signed = min(values, default=0.0) < 0
    colours = [_COLOURS[1] if value < 0 else _COLOURS[0] for value in values]
    axes.barh([place for place, _ in bars], values, height=0.66, color=colours)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x", color=_GRID, linewidth=0.8)
    axes.spines["left"].set_visible(False)
    axes.axvline(0, color=_SOFT, linewidth=1)
    span = max([0.0, *values, *plot.levels.values()]) - min([0.0, *values])
    form = "+.3f" if plot.y_label.startswith("nats") else ".2f"
    for place, value in bars:
        if not value and len(plot.lines) > 1:
            continue  # the other bar of this place has a number
        side = "right" if value < 0 else "left"
        axes.text(value + (-0.01 if value < 0 else 0.01) * span, place, format(value, form), va="center", ha=side)
        axes.texts[-1].set(color=_INK, fontsize=8.5, bbox={"facecolor": _PAPER, "edgecolor": "none", "pad": 0.8})
    for name, level in plot.levels.items():
        axes.axvline(level, color=_SOFT, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.text(level, 1.01, f"{name} {level:.2f}", transform=axes.get_xaxis_transform(), ha="right", va="bottom")
        axes.texts[-1].set(color=_SOFT, fontsize=8.5)
    axes.set_xlabel(plot.y_label, color=_INK, fontsize=9)
    axes.margins(x=0.14 if signed else 0.1)
