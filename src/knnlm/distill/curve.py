"""Draw how the losses of a training fell, as a PNG picture. Knows nothing about the training."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from knnlm.errors import MissingExtra

_KINDS = {"loss": "#1f6feb", "kl": "#d9480f", "ce": "#2b8a3e"}


def draw_curve(lines: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]] = ()) -> bytes:
    """Draw the losses of every step, and as dots those of what is held out."""
    if find_spec("matplotlib") is None:
        raise MissingExtra("A learning curve", "matplotlib", "report")
    from matplotlib.figure import Figure

    # By hand and not through pyplot, so nothing of a caller's own plots is touched and no window opens.
    figure = Figure(figsize=(6.4, 3.5), dpi=160, layout="constrained", facecolor="#ffffff")
    axes = figure.add_subplot()
    for kind, colour in _KINDS.items():
        some = [line for line in lines if line.get(kind) is not None]
        if some and (kind == "loss" or any(line[kind] != line["loss"] for line in some)):
            axes.plot([line["step"] for line in some], [line[kind] for line in some], color=colour, lw=1, label=kind)
        dots = [line for line in held_out if line.get(kind) is not None]
        if some and dots:
            label = "held out" if kind == "loss" else None
            axes.plot([line["step"] for line in dots], [line[kind] for line in dots], "o", color=colour, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("nats a token")
    axes.grid(color="#e4e7ec")
    axes.legend(frameon=False)
    file = io.BytesIO()
    # Without the date and the version, the same numbers give the same bytes.
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
