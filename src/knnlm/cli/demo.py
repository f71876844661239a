"""The demo command."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from knnlm.cli.generate import continue_text, explanation_table
from knnlm.cli.options import Device, Dtype, Json
from knnlm.cli.output import bar, console, err, open_model, print_json, safe, waiting


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(short_help="Build, tune, measure and use a memory, in a few minutes.")(demo)


def demo(
    model: Annotated[str, typer.Option(help="bundled, a local folder, a .gguf file, or a hub name.")] = "bundled",
    out: Annotated[
        Path | None, typer.Option(help="Keep the memory in this folder.", show_default="a temporary one")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """knnlm demo

    Make a memory of a part of Python's language reference, choose its settings on a second part, and show on a third
    what it is worth: perplexity, three tokens with the passages that spoke for them, one continuation.
    """
    from knnlm.demo import demonstrate, split_topics
    from knnlm.mixture.mixture import Mixture

    begin = time.perf_counter()
    lm = open_model(model, device=device, dtype=dtype)
    parts = split_topics()
    err.print(
        f"Python's language reference: {len(parts.store)} topics to remember, {len(parts.valid)} to tune on, "
        f"{len(parts.test)} to test on."
    )
    with tempfile.TemporaryDirectory(prefix="knnlm-demo-") as temporary:
        shown = demonstrate(out or Path(temporary) / "memory", lm, parts=parts, progress=bar)
        # The best weights for perplexity are cautious; for one continuation the store may speak up.
        assert shown.mixture.knn is not None
        loud = Mixture(lm, shown.mixture.knn, lmbda=0.5)
        with waiting("writing"):
            without, remembered = (
                continue_text(loud, shown.prompt, memory=on, seed=0, stream=False, max_new_tokens=40)[0]
                for on in (False, True)
            )
        figures = shown.evaluation.as_dict() | {"total_seconds": time.perf_counter() - begin}
    if json:
        tokens = [asdict(token) for token in shown.telling]
        continuation = {"prompt": shown.prompt, "without": without, "with": remembered, "lambda": loud.lmbda}
        print_json(figures | {"explained": tokens, "continuation": continuation})
        return
    table = Table(title="Held-out topics", title_justify="left")
    for name in ("LM perplexity", "with memory", "gain", "mean λ", "seconds"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{figures['base_perplexity']:.2f}",
        f"{figures['perplexity']:.2f}",
        f"{figures['gain']:.1%}",
        f"{figures['lambda']:.2f}",
        f"{figures['total_seconds']:.0f}",
    )
    console.print(table)
    console.print("\n[bold]Three tokens, and who spoke for them[/bold] (weight, context, source)")
    for token in shown.telling:
        console.print(explanation_table(token))
    console.print(f"\n[bold]Prompt[/bold]          {safe(shown.prompt)}")
    console.print(f"[bold]without memory[/bold]  {safe(without)}")
    console.print(f"[bold]with, at λ {loud.lmbda:g}[/bold]  {safe(remembered)}")
    kept = out or "memory"
    console.print(
        f"\nNext, with your own text: knnlm build FOLDER --out {kept}, then knnlm tune, eval, generate, explain."
        if out is None
        else f'\nThe memory is kept: knnlm explain {kept} "Your text"',
        markup=False,
    )
