"""Commands that measure a memory: tune, eval."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from knnlm.cli import options, screen
from knnlm.errors import ParameterError


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(short_help="Choose k, τ and λ on held-out text.")(tune)
    app.command("eval", short_help="Measure perplexity without and with the memory.")(evaluate)


def tune(
    memory: options.Memory,
    text: Annotated[list[str] | None, typer.Argument(help="Held-out text, as for build.", show_default=False)] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Choose on a trace of eval --save-trace instead.", show_default=False)
    ] = None,
    k: Annotated[str | None, typer.Option("--k", help="Values to try: 1,8,64.", show_default="1 … 1024")] = None,
    temperature: Annotated[
        str | None, typer.Option(help="Values to try.", show_default="20, by the distances seen")
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--lambda", help="Values to try.", show_default="0, 0.01 … 0.99")
    ] = None,
    metric: options.Metric = None,
    limit: options.Limit = None,
    no_rerank: options.NoRerank = False,
    text_field: options.TextField = "text",
    model: options.Reader = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    json: options.Json = False,
) -> None:
    """knnlm tune memory held-out.txt

    Read the text once, then try every k × τ × λ by arithmetic on what was seen. The best is stored in the memory, and
    every other command uses it. Tune on text that is neither in the memory nor in your test.
    """
    from knnlm import corpus
    from knnlm.trace import Trace
    from knnlm.tuning import LAMBDAS, choose, sweep
    from knnlm.tuning import tune as tune_on_text

    if (trace is None) == (not text):
        raise ParameterError("Give either TEXT or --trace to tune on.")
    if trace is not None and not (metric is None and limit is None and model is None):
        raise ParameterError("--metric, --limit and --model are those of the trace; leave them out with --trace.")
    grid: dict[str, Any] = {
        "ks": _numbers("k", k, int),
        "temperatures": _numbers("temperature", temperature, float),
        "lambdas": _numbers("lambda", weights, float) or LAMBDAS,
    }
    if trace is not None:
        seen = Trace.open(trace)
        result = sweep(seen, **grid)
        choose(memory, result, seen)
        chosen_on = seen.facts["text"]
    else:
        chosen_on = list(text or [])
        total = screen.survey(chosen_on, text_field, limit=limit)
        mixture = open_mixture(memory, model=model, metric=metric, rerank=not no_rerank, device=device, dtype=dtype)
        documents = corpus.read(*chosen_on, text_field=text_field)
        result = tune_on_text(
            mixture, documents, sources=chosen_on, limit=limit, total=total, progress=screen.bar, **grid
        )
    best_k, best_temperature, best_weight, perplexity = result.best
    facts = {
        "memory": str(memory),
        "chosen_on": chosen_on,
        "tokens": result.tokens,
        "k": best_k,
        "temperature": best_temperature,
        "lambda": best_weight,
        "base_perplexity": result.base_perplexity,
        "perplexity": perplexity,
        "settings_tried": int(result.perplexity.size),
        "sweep_seconds": result.seconds,
        "at_edge": result.at_edge(),
        "documents": result.documents,
        "remembered_documents": result.remembered,
    }
    if json:
        screen.print_json(facts)
        return
    rows = [
        ("chosen on", f"{result.tokens:,} tokens of {', '.join(chosen_on)}"),
        ("k, τ, λ", f"{best_k}, {best_temperature:g}, {best_weight:g}"),
        ("perplexity", f"{result.base_perplexity:.3f} → {perplexity:.3f} on that text; report it on another"),
        ("sweep", f"{facts['settings_tried']:,} settings in {result.seconds:.1f} s"),
    ]
    if facts["at_edge"]:
        rows.append(("note", f"best value is the last one tried of: {', '.join(result.at_edge())}"))
    rows += _warning(result.remembered, result.documents, "what was chosen on them suits no other text")
    screen.print_facts(rows)


def evaluate(
    memory: options.Memory,
    text: options.Text,
    k: options.K = None,
    temperature: options.Temperature = None,
    weight: options.Lambda = None,
    metric: options.Metric = None,
    limit: options.Limit = None,
    no_rerank: options.NoRerank = False,
    save_trace: Annotated[
        Path | None, typer.Option(help="Also keep what was seen, for tune --trace.", show_default=False)
    ] = None,
    text_field: options.TextField = "text",
    model: options.Reader = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    json: options.Json = False,
) -> None:
    """knnlm eval memory held-out.txt

    Score every token of the text with the model alone and with the memory.
    """
    from knnlm import corpus
    from knnlm.evaluation import evaluate as evaluate_text
    from knnlm.mixture.model import check_settings
    from knnlm.trace import record
    from knnlm.tuning import replay

    check_settings(k=k, temperature=temperature, weight=weight, metric=metric)
    total = screen.survey(text, text_field, limit=limit)
    mixture = open_mixture(
        memory,
        model=model,
        k=k,
        temperature=temperature,
        weight=weight,
        metric=metric,
        rerank=not no_rerank,
        device=device,
        dtype=dtype,
    )
    documents = corpus.read(*text, text_field=text_field)
    if save_trace is None:
        found = evaluate_text(mixture, documents, limit=limit, total=total, progress=screen.bar)
    else:
        begin = time.perf_counter()
        trace = record(mixture, documents, save_trace, sources=text, limit=limit, total=total, progress=screen.bar)
        found = replay(trace, k=mixture.memory.k, temperature=mixture.memory.temperature, weight=mixture.weight)
        found = replace(found, seconds=time.perf_counter() - begin)
    figures = found.as_dict()
    if json:
        screen.print_json(figures)
        return
    rows = [
        (
            "text",
            f"{figures['tokens']:,} tokens, {figures['words']:,} words of {screen.count(found.documents, 'document')}",
        ),
        (
            "perplexity",
            f"{figures['base_perplexity']:.3f} → {figures['perplexity']:.3f}  ({figures['gain']:.1%} lower)",
        ),
        (
            "  best of both",
            f"{figures['oracle_perplexity']:.3f}, choosing the better of model and memory at each token",
        ),
        ("  per word", f"{figures['base_word_perplexity']:.2f} → {figures['word_perplexity']:.2f}"),
        ("bits per byte", f"{figures['base_bits_per_byte']:.4f} → {figures['bits_per_byte']:.4f}"),
        ("k, τ, λ", f"{figures['k']}, {figures['temperature']:g}, {figures['lambda']:g} ({figures['metric']})"),
        ("time", f"{figures['seconds']:.1f} s, {figures['tokens_per_second']:,.0f} tokens/s"),
        *_warning(found.remembered, found.documents, "their figures are too good"),
    ]
    screen.print_facts(rows)


def _warning(remembered: int, documents: int, so: str) -> list[tuple[str, str]]:
    """Tell a person who measures on text that is in the memory."""
    if not remembered:
        return []
    return [("WARNING", f"{remembered:,} of {screen.count(documents, 'document')} are in the memory itself: {so}")]


def open_mixture(
    memory: Path, *, model: str | None = None, device: str = "auto", dtype: str = "auto", **settings: Any
) -> Any:
    """Open a memory and its model, checking the settings before the model is loaded."""
    from knnlm.datastore import Datastore
    from knnlm.mixture import Mixture, open_reader
    from knnlm.mixture.model import check_settings

    check_settings(**{name: settings.get(name) for name in ("k", "temperature", "weight", "metric")})
    store = Datastore.open(memory)
    screen.quiet()
    with screen.waiting(f"opening {memory}"):
        lm = open_reader(store, name=model, device=device, dtype=dtype)
        return Mixture.open(memory, lm, **settings)


def _numbers(name: str, given: str | None, kind: type) -> list[Any] | None:
    """Read a list such as 1,8,64."""
    if given is None:
        return None
    try:
        return [kind(part) for part in given.split(",")]
    except ValueError:
        raise ParameterError(f"--{name} takes numbers with commas between them, not {given!r}.") from None
