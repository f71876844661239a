"""Write a report as one HTML file that needs nothing else. Knows nothing about how its numbers were found.

Everything that comes from a text, a file name or a token is escaped: a stored document may hold any markup.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from knnlm.io import atomic_write
from knnlm.report.study import Cell, Example, ExampleNeighbour, Plot, Study, Table, percent_lower

_SIGNS = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


def write_html(
    path: Path,
    *,
    facts: dict[str, Any],
    studies: Sequence[Study],
    left_out: dict[str, str],
    drawings: dict[str, list[bytes]],
) -> None:
    """Write the page with the PNG pictures of each study's plots; it appears complete or not at all."""
    style = files("knnlm.report").joinpath("report.css").read_text(encoding="utf-8")
    title = f"{Path(facts['memory']).name}: a report on a memory"
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{style}</style>",
        "</head>",
        "<body>",
        *_header(facts, studies),
        *_contents(studies, left_out),
        "<main>",
        *(line for study in studies for line in _section(study, drawings.get(study.name, []))),
        *_left_out(left_out),
        "</main>",
        *_footer(studies),
        "</body>",
        "</html>",
    ]
    with atomic_write(path) as partial:
        partial.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _header(facts: dict[str, Any], studies: Sequence[Study]) -> Iterator[str]:
    """Say what was studied, and the one number that matters."""
    yield "<header>"
    yield f"<h1>A report on <em>{escape(Path(facts['memory']).name)}</em></h1>"
    best = _best(studies)
    if best is not None:
        change = percent_lower(best[1], facts["base_perplexity"])
        yield (
            f'<p class="headline"><span class="big">{facts["base_perplexity"]:.2f}</span> → '
            f'<span class="big good">{best[1]:.2f}</span> perplexity of the held-out text, {change} with '
            f"{escape(best[0])}</p>"
        )
    rows = [
        ("memory", f"{facts['memory']}: {facts['stored_tokens']:,} tokens of {count(facts['stored_documents'])}"),
        ("model", str(facts["model"])),
        ("mixed in", ", ".join(facts["memories"])),
        (
            "held-out text",
            f"{facts['test_tokens']:,} tokens of {count(facts['test_documents'])}; all is reported on it",
        ),
        (
            "tuning text",
            f"{facts['valid_tokens']:,} tokens of {count(facts['valid_documents'])}: {facts['chosen_on']}. k, τ, λ "
            "and all weights are chosen on it",
        ),
        (
            "chosen",
            f"k = {facts['k']:,}, τ = {facts['knn_temperature']:.3g}, λ = {facts['lambda']:.2f} for the store alone",
        ),
    ]
    yield '<dl class="facts">'
    for name, value in rows:
        yield f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
    yield "</dl>"
    yield from _reservations(facts)
    yield "</header>"


def _reservations(facts: dict[str, Any]) -> Iterator[str]:
    """Say what makes figures less than they seem."""
    for warning in facts["warnings"]:
        yield f'<p class="warning">{escape(warning)}</p>'
    if facts["at_edge"]:
        yield f'<p class="note">The best value is the last one tried of: {escape(", ".join(facts["at_edge"]))}.</p>'
    if facts["quick"]:
        yield '<p class="note">Made with --quick: samples are small, and so are differences worth believing.</p>'


def _best(studies: Sequence[Study]) -> tuple[str, float] | None:
    """Find the best mixture among those that are compared."""
    for study in studies:
        if study.name == "memories" and study.tables[0].best is not None:
            row = study.tables[0].rows[study.tables[0].best]
            if isinstance(row[5], float) and row[1]:
                return f"{row[0]} ({row[1]})", row[5]
    return None


def _contents(studies: Sequence[Study], left_out: dict[str, str]) -> Iterator[str]:
    yield '<nav aria-label="Studies"><ol>'
    for study in studies:
        yield f'<li><a href="#{escape(study.name)}">{escape(study.title)}</a></li>'
    yield "</ol>"
    if left_out:
        yield f'<p><a href="#left-out">Left out: {len(left_out)}</a></p>'
    yield "</nav>"


def _section(study: Study, drawings: Sequence[bytes]) -> Iterator[str]:
    """Lay out one study: the sentence, the picture, the table, the command."""
    yield f'<section id="{escape(study.name)}">'
    yield f"<h2>{escape(study.title)}</h2>"
    yield f'<p class="paper">{escape(study.paper)}</p>'
    yield f'<p class="finding">{escape(study.finding)}</p>'
    # A study with a picture for each table shows them in pairs.
    paired = len(drawings) == len(study.tables)
    for number, table in enumerate(study.tables):
        if paired:
            yield _figure(study.plots[number], drawings[number])
        yield from _table(table)
    if not paired:
        yield from map(_figure, study.plots, drawings)
    for kind, examples in study.examples.items():
        yield f"<h3>{escape(kind.capitalize())}</h3>"
        yield from (line for example in examples for line in _example(example))
    for note in study.notes:
        yield f'<p class="note">{escape(note)}</p>'
    yield f'<p class="label">The same figure by hand</p><pre><code>{escape(study.command)}</code></pre>'
    yield "</section>"


def _figure(plot: Plot, data: bytes) -> str:
    picture = base64.b64encode(data).decode()
    return f'<figure><img alt="{escape(plot.title)}" src="data:image/png;base64,{picture}"></figure>'


def _table(table: Table) -> Iterator[str]:
    numeric = [bool(form) for form in table.formats]
    yield '<div class="scroll"><table>'
    if table.caption:
        yield f"<caption>{escape(table.caption)}</caption>"
    heads = (f'<th scope="col"{_right(right)}>{escape(name)}</th>' for name, right in _zip(table.columns, numeric))
    yield f"<thead><tr>{''.join(heads)}</tr></thead><tbody>"
    for number, row in enumerate(table.rows):
        cells = (
            f"<td{_right(right)}>{escape(show(cell, form))}</td>"
            for cell, form, right in zip(row, table.formats, numeric, strict=True)
        )
        kind = ' class="best"' if number == table.best else ""
        yield f"<tr{kind}>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _zip(names: Sequence[str], numeric: Sequence[bool]) -> Iterator[tuple[str, bool]]:
    return zip(names, numeric, strict=True)


def _right(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


def show(cell: Cell, form: str) -> str:
    """Write one cell: a number in its format, words as they are, a dash for nothing."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    # Three digits of a large number would be shown with an exponent.
    return f"{cell:,.0f}" if form == ".3g" and abs(cell) >= 1000 else format(cell, form)


def _example(example: Example) -> Iterator[str]:
    """Show one token with what was said of it."""
    yield "<article>"
    yield f'<p class="text">{_text(example.context)}<mark>{_text(example.target)}</mark></p>'
    figures = (("model", example.p_lm), ("store", example.p_knn), ("both", example.p))
    shown = "".join(f"<span>{name} <b>{value:.3g}</b></span>" for name, value in figures)
    yield (
        f'<p class="figures">{shown}<span>gain <b>{example.gain:+.2f}</b> nats</span>'
        f"<span>{escape(example.document)}</span></p>"
    )
    yield '<ul class="neighbours">'
    yield from map(_neighbour, example.neighbours)
    yield "</ul></article>"


def _neighbour(one: ExampleNeighbour) -> str:
    kind = "agrees" if one.agrees else "differs"
    return (
        f'<li><span class="weight">{one.weight:.0%}</span><span class="text">{_text(one.before)}'
        f'<mark class="{kind}">{_text(one.token)}</mark>{_text(one.after)}</span>'
        f'<span class="source">{escape(one.source)}</span></li>'
    )


def _text(text: str) -> str:
    """Show a piece of text as it is, with signs for line breaks and tabs."""
    for char, sign in _SIGNS.items():
        text = text.replace(char, sign)
    return escape(text)


def _left_out(left_out: dict[str, str]) -> Iterator[str]:
    if not left_out:
        return
    yield '<section id="left-out"><h2>Left out</h2><dl class="facts">'
    for name, reason in left_out.items():
        yield f"<dt>{escape(name)}</dt><dd>{escape(reason)}</dd>"
    yield "</dl></section>"


def _footer(studies: Sequence[Study]) -> Iterator[str]:
    seconds = sum(study.seconds for study in studies)
    yield (
        f"<footer><p>{len(studies)} studies in {seconds:,.0f} s, made by knnlm report. All numbers are in report.json, "
        "and the plots lie beside this page.</p></footer>"
    )


def count(documents: int) -> str:
    """Say how many documents there are."""
    return f"{documents:,} document{'' if documents == 1 else 's'}"
