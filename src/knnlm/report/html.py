"""The report as one self-contained HTML file.

Text, file names and tokens may contain markup, so the template escapes every value.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from knnlm.io import atomic_write
from knnlm.report.study import Cell, Study, percent_lower

_TEMPLATE, _STYLE = "report.html.j2", "report.css"
_VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", "\r": "␍"})


def write_html(
    path: Path,
    *,
    metadata: dict[str, Any],
    studies: Sequence[Study],
    skipped: dict[str, str],
    drawings: dict[str, list[bytes]],
) -> None:
    """Write the page with the PNG drawings of each study's plots; it appears complete or not at all."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("knnlm.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "base64": lambda data: base64.b64encode(data).decode(),
        "capitalise": str.capitalize,
        "format_cell": format_cell,
        "visible": lambda text: text.translate(_VISIBLE),
    }
    page = environment.get_template(_TEMPLATE).render(
        name=Path(metadata["store"]).name,
        style=files("knnlm.report").joinpath(_STYLE).read_text(encoding="utf-8"),
        best=_best_mixture(studies, metadata["base_perplexity"]),
        header=_header(metadata),
        warnings=metadata["warnings"],
        notes=_notes(metadata),
        studies=studies,
        skipped=skipped,
        drawings=drawings,
    )
    with atomic_write(path) as partial:
        partial.write_text(page, encoding="utf-8")


def _header(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines that name the inputs and the chosen settings."""
    stored, test, valid = (count_documents(metadata[f"{name}_documents"]) for name in ("stored", "test", "valid"))
    return [
        ("store", f"{metadata['store']}: {metadata['stored_tokens']:,} tokens of {stored}"),
        ("model", str(metadata["model"])),
        ("memories", ", ".join(metadata["memories"])),
        ("held-out text", f"{metadata['test_tokens']:,} tokens of {test}; all results are on this text"),
        (
            "tuning text",
            f"{metadata['valid_tokens']:,} tokens of {valid}: {metadata['split']}. k, τ, λ and all weights are chosen "
            "on this text",
        ),
        (
            "chosen",
            f"k = {metadata['k']:,}, τ = {metadata['knn_temperature']:.3g}, λ = {metadata['lambda']:.2f} for knn alone",
        ),
    ]


def _notes(metadata: dict[str, Any]) -> list[str]:
    notes = []
    if metadata["at_edge"]:
        notes.append(f"The best value is the last one tried of: {', '.join(metadata['at_edge'])}.")
    if metadata["quick"]:
        notes.append("Made with --quick: samples are small, so small differences are not significant.")
    return notes


def _best_mixture(studies: Sequence[Study], base: float) -> dict[str, Any] | None:
    """Return the best mixture of the study of memories, for the headline."""
    for study in studies:
        if study.name == "memories" and study.tables[0].best is not None:
            name, weights, *_, perplexity = study.tables[0].rows[study.tables[0].best]
            if isinstance(perplexity, float) and weights:
                change = percent_lower(perplexity, base)
                return {"name": f"{name} ({weights})", "base": base, "perplexity": perplexity, "change": change}
    return None


def format_cell(cell: Cell, form: str) -> str:
    """Return a number in its format, text as it is, and a dash for None."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    # Three digits of a large number would be shown with an exponent.
    return f"{cell:,.0f}" if form == ".3g" and abs(cell) >= 1000 else format(cell, form)


def count_documents(documents: int) -> str:
    """Return a number of documents in words."""
    return f"{documents:,} document{'' if documents == 1 else 's'}"
