"""The command that studies a memory: report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knnlm.cli.options import Device, Dtype, Json, Limit, Memory, Reader, Text, TextField
from knnlm.cli.output import bar, print_facts, print_json, quiet


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(short_help="Run the papers' studies on a memory, and write a page.")(report)


def report(
    memory: Memory,
    text: Text,
    out: Annotated[Path, typer.Option(help="The folder of the page.")] = Path("report"),
    valid: Annotated[
        list[str] | None,
        typer.Option(help="Text to choose settings on, as TEXT; may be repeated.", show_default="half of TEXT"),
    ] = None,
    memories: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="What is mixed, as for tune; knn must be there.",
            show_default="knn,cache,ngram, and output where it was trained",
        ),
    ] = None,
    lm: Annotated[
        str | None, typer.Option(help="A second language model to mix in, a folder.", show_default="none")
    ] = None,
    studies: Annotated[
        str, typer.Option(help="Which, with commas, as in k,lambda,size; a wrong name lists them.")
    ] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Small samples: minutes instead of an hour.")] = False,
    limit: Limit = None,
    text_field: TextField = "text",
    model: Reader = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """knnlm report memory held-out.txt --out report --quick

    Write OUT/index.html with tables and plots: how k, λ, τ, the size of the store, the key layer and the distance
    matter, what each memory adds, where the memory helps and hurts. What is chosen is chosen on one text and reported
    on another. A report that was stopped goes on when the same command is given again.
    """
    from knnlm.corpus import read_documents
    from knnlm.report.report import check_studies, report

    wanted = check_studies([name.strip() for name in studies.split(",")])
    quiet()
    found = report(
        memory,
        read_documents(*text, text_field=text_field),
        out,
        valid=read_documents(*valid, text_field=text_field) if valid else None,
        memories=memories,
        second_lm=lm,
        studies=wanted,
        limit=limit,
        quick=quick,
        model=model,
        device=device,
        dtype=dtype,
        progress=bar,
    )
    if json:
        print_json(found.as_dict())
        return
    rows = [(study.name, study.finding) for study in found.studies]
    rows += [(name, f"left out: {reason}") for name, reason in found.left_out.items()]
    if found.facts["at_edge"]:
        rows.append(("note", f"best value is the last one tried of: {', '.join(found.facts['at_edge'])}"))
    rows += [("WARNING", warning) for warning in found.facts["warnings"]]
    print_facts([*rows, ("page", str(found.page))])
