"""Commands to start with: demo, bench."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from knnlm.cli.options import START, Json, MachineFlags, Model, command
from knnlm.cli.output import bar, console, err, open_model, print_json, safe, waiting
from knnlm.cli.use import continue_text, explanation_table

if TYPE_CHECKING:
    from knnlm.demo import DemoResult
    from knnlm.lm.causal import CausalLM


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    command(app, START, "Build, tune, measure and use a store in a few minutes.")(demo)
    command(app, START, "Measure the cost of a memory on this machine.")(bench)


def demo(
    model: Model = "bundled",
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the store in this folder.", show_default="temporary")
    ] = None,
    machine: MachineFlags = MachineFlags(),
    json: Json = False,
) -> None:
    """knnlm demo

    Build a store of a part of Python's language reference, tune it on a second part, and measure on a third:
    perplexity, three tokens with the passages behind them, and one continuation.
    """
    from knnlm.demo import run_demo, split_topics

    begin = time.perf_counter()
    lm = open_model(model, **asdict(machine))
    parts = split_topics()
    err.print(
        f"Python's language reference: {len(parts.store)} topics in the store, {len(parts.valid)} to tune on, "
        f"{len(parts.test)} to test on."
    )
    with tempfile.TemporaryDirectory(prefix="knnlm-demo-") as temporary:
        result = run_demo(out or Path(temporary) / "demo.store", lm, parts=parts, progress=bar)
        continuation = _continue(lm, result)
    figures = result.evaluation.as_dict() | {"total_seconds": time.perf_counter() - begin}
    if json:
        tokens = [asdict(token) for token in result.explanations]
        print_json(figures | {"explained": tokens, "continuation": continuation})
    else:
        _show_demo(result, figures, continuation, out)


def _continue(lm: CausalLM, result: DemoResult) -> dict[str, Any]:
    """Continue the prompt without and with the store.

    The weights with the lowest perplexity are small; a λ of 0.5 makes the effect visible in one continuation.
    """
    from knnlm.mixture.mixture import Mixture

    assert result.mixture.knn is not None
    mixture = Mixture(lm, result.mixture.knn, lmbda=0.5)
    with waiting("generating"):
        without, mixed = (
            continue_text(mixture, result.prompt, memory=memory, seed=0, stream=False, max_new_tokens=40).text
            for memory in (False, True)
        )
    return {"prompt": result.prompt, "without": without, "with": mixed, "lambda": mixture.lmbda}


def _show_demo(result: DemoResult, figures: dict[str, Any], continuation: dict[str, Any], out: Path | None) -> None:
    table = Table(title="Held-out topics", title_justify="left")
    for name in ("LM perplexity", "with memory", "change", "mean λ", "seconds"):
        table.add_column(name, justify="right")
    before, after = figures["base_perplexity"], figures["perplexity"]
    mean, seconds = f"{figures['lambda']:.2f}", f"{figures['total_seconds']:.0f}"
    table.add_row(f"{before:.2f}", f"{after:.2f}", result.evaluation.change, mean, seconds)
    console.print(table)
    console.print("\n[bold]Three tokens and their nearest neighbours[/bold] (weight, context, source)")
    for token in result.explanations:
        console.print(explanation_table(token))
    console.print(f"\n[bold]Prompt[/bold]          {safe(continuation['prompt'])}")
    console.print(f"[bold]without memory[/bold]  {safe(continuation['without'])}")
    console.print(f"[bold]with, at λ {continuation['lambda']:g}[/bold]  {safe(continuation['with'])}")
    console.print(
        "\nNext, with your own text: knnlm build FOLDER --out my.store, then knnlm tune, eval, generate, explain."
        if out is None
        else f'\nThe store is kept: knnlm explain {out} "Your text"',
        markup=False,
    )


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: under a minute on two cores.")] = False,
    model: Model = "bundled",
    machine: MachineFlags = MachineFlags(device="cpu"),
    json: Json = False,
) -> None:
    """knnlm bench --quick

    Build, evaluate, generate and search, each beside the model alone or exact search, and print the ratios.
    """
    from knnlm.benchmark import FULL, QUICK, bench

    begin = time.perf_counter()
    lm = open_model(model, **asdict(machine))
    with tempfile.TemporaryDirectory(prefix="knnlm-bench-") as folder:
        result = bench(lm, Path(folder) / "bench.store", size=QUICK if quick else FULL, progress=bar)
    result["seconds"] = time.perf_counter() - begin
    if json:
        print_json(result)
    else:
        console.print(_bench_table(result))


def _bench_table(result: dict[str, Any]) -> Table:
    table = Table("", "figure", "compared with", "ratio", title=f"{result['machine']['threads']} threads")
    table.title_justify = "left"
    built, searched = result["build"], result["search"]
    rate, forward = built["tokens_per_second"], built["without_head_tokens_per_second"]
    table.add_row("build", f"{rate:,.0f} tokens/s", f"forward pass {forward:,.0f}", f"{rate / forward:.2f}")
    for name, figures in (("evaluate", result["evaluation"]), ("generate", result["generation"])):
        mixed, alone = figures["ms_per_token"], figures["model_ms_per_token"]
        table.add_row(name, f"{mixed:.2f} ms/token", f"model {alone:.2f}", f"{figures['ratio_to_model']:.2f}")
    fast, exact = searched["ms_per_query"], searched["exact_ms_per_query"]
    name = f"search {searched['keys']:,}"
    table.add_row(name, f"{fast:.3f} ms/query", f"exact {exact:.3f}", f"recall {searched['recall']:.2f}")
    return table
