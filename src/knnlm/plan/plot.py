"""A plot of a plan for 1M to 1T tokens: disk, time to build, and latency, on logarithmic axes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knnlm.errors import MissingExtra
from knnlm.io import atomic_write
from knnlm.plan.layout import Plan, make_plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EXPONENTS = [6 + step / 4 for step in range(25)]  # 1M to 1T
_DPI = 120
_COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#b08500", "#0b7285")


def plot_plan(plan: Plan, path: Path) -> None:
    """Write a PNG image of the plan for other numbers of tokens on the same hardware."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("A plot", "matplotlib", "report") from None
    plans = [_scaled(plan, 10.0**exponent) for exponent in _EXPONENTS]
    figure = Figure(figsize=(12.5, 4.4), dpi=_DPI, layout="constrained")
    disk, build, latency = figure.subplots(1, 3)
    for number, row in enumerate(plan.formats):
        own = [each.formats[number] for each in plans]
        sizes = [each.store_bytes + each.index_bytes for each in own]
        _line(disk, plans, sizes, number, row.storage)
        hours = [(each.build.seconds + each.index_time.seconds) / 3600 for each in own]
        _line(build, plans, hours, number, row.storage)
    names = [f"{layout.storage}, {layout.search.split(',')[0]}" for layout in plan.layouts]
    for number, (layout, name) in enumerate(zip(plan.layouts, names, strict=True)):
        fits = [each.layouts[number].latency_p99 * 1e3 if each.layouts[number].fits else None for each in plans]
        label = f"{name}, {layout.search.split(', ')[-1]}" if layout.search.startswith("GPU") else name
        _line(latency, plans, fits, number, label)
    _finish(disk, "Store and index on disk, bytes", "bytes")
    _finish(build, "Build and index, hours", "hours")
    _finish(latency, "99 % of queries within, ms", "ms, where the hardware is enough")
    for axes in (disk, build, latency):
        axes.axvline(plan.text.tokens, color="#667085", linewidth=0.8, linestyle=":")
    figure.suptitle(f"{plan.model.name} on {plan.hardware}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        figure.savefig(partial, format="png", metadata={"Software": None})


def _scaled(plan: Plan, tokens: float) -> Plan:
    text = replace(plan.text, tokens=tokens)
    return make_plan(
        text, plan.model, plan.hardware, plan.constants, queries_per_second=plan.queries_per_second, origin=plan.origin
    )


def _line(axes: Axes, plans: list[Plan], values: list[Any], number: int, label: str) -> None:
    tokens = [each.text.tokens for each in plans]
    heights = [float("nan") if value is None else value for value in values]
    style = "--" if number % 2 else "-"  # some lines coincide
    axes.plot(tokens, heights, style, color=_COLOURS[number % len(_COLOURS)], label=label, linewidth=1.6)


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=unit, xlim=(1e6, 1e12))
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
