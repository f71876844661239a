"""The bench command."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from knnlm.cli.options import Device, Dtype, Json
from knnlm.cli.output import bar, console, open_model, print_json


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(short_help="Measure what a memory costs on this machine.")(bench)


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything: under a minute on two cores.")] = False,
    model: Annotated[str, typer.Option(help="bundled, a local folder, a .gguf file, or a hub name.")] = "bundled",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """knnlm bench --quick

    Build, evaluate, generate and search, each next to the model alone or to exact search, and print the ratios.
    """
    from knnlm.benchmark import FULL, QUICK, bench

    begin = time.perf_counter()
    lm = open_model(model, device=device, dtype=dtype)
    with tempfile.TemporaryDirectory(prefix="knnlm-bench-") as folder:
        found = bench(lm, Path(folder) / "memory", size=QUICK if quick else FULL, progress=bar)
    found["seconds"] = time.perf_counter() - begin
    if json:
        print_json(found)
        return
    table = Table(
        "", "figure", "next to", "ratio", title=f"{found['machine']['threads']} threads", title_justify="left"
    )
    built, read, written, searched = (found[name] for name in ("build", "evaluation", "generation", "search"))
    rate, bare = built["tokens_per_second"], built["without_head_tokens_per_second"]
    table.add_row("build", f"{rate:,.0f} tokens/s", f"forward pass {bare:,.0f}", f"{rate / bare:.2f}")
    for name, row in (("evaluate", read), ("generate", written)):
        own, alone = row["ms_per_token"], row["model_ms_per_token"]
        table.add_row(name, f"{own:.2f} ms/token", f"model {alone:.2f}", f"{row['ratio_to_model']:.2f}")
    own, slow = searched["ms_per_query"], searched["exact_ms_per_query"]
    table.add_row(
        f"search {searched['keys']:,}", f"{own:.3f} ms/query", f"exact {slow:.3f}", f"{searched['recall']:.2f} found"
    )
    console.print(table)
