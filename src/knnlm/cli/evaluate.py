"""Commands that measure a memory: tune, eval."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnlm.cli.options import (
    Device,
    DeviceKeys,
    Dtype,
    Json,
    K,
    KnnTemperature,
    Lambda,
    Limit,
    Memories,
    Memory,
    Metric,
    NoRerank,
    Reader,
    Skip,
    Text,
    TextField,
)
from knnlm.cli.output import bar, console, print_json, quiet, show_evaluation, show_tuning, waiting
from knnlm.datastore.paths import STUDENT_FOLDER
from knnlm.errors import ParameterError

if TYPE_CHECKING:
    from knnlm.corpus import Document
    from knnlm.evaluation.evaluate import Evaluation
    from knnlm.mixture.mixture import Mixture


TUNED = "knn,cache,ngram"  # what tune mixes unless it is told otherwise


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(short_help="Choose settings and weights on held-out text.")(tune)
    app.command("eval", short_help="Measure perplexity without and with the memory.")(evaluate)


def tune(
    memory: Memory,
    text: Annotated[list[str] | None, typer.Argument(help="Held-out text, as for build.", show_default=False)] = None,
    memories: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="What is mixed: knn, cache, ngram, output, knn=FOLDER, decoder=FOLDER, cache=POSITIONS, with commas.",
            show_default=f"{TUNED}, and the student of adapt; with --trace, all it has",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="fixed (the same everywhere), fitted (the same, over several k and τ), buckets (by distance), gated "
            "(by a small network, for each token).",
            show_default="gated; of a decoder, fixed",
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Choose on a trace of eval --save-trace instead.", show_default=False)
    ] = None,
    k: Annotated[str | None, typer.Option("--k", help="Values to try: 1,8,64.", show_default="1 … 1024")] = None,
    knn_temperature: Annotated[
        str | None, typer.Option(help="Values to try.", show_default="20, by the distances seen")
    ] = None,
    lambdas: Annotated[
        str | None, typer.Option("--lambda", help="Values to try.", show_default="0, 0.01 … 0.99")
    ] = None,
    metric: Metric = None,
    limit: Limit = None,
    no_rerank: NoRerank = False,
    device_keys: DeviceKeys = "float16",
    text_field: TextField = "text",
    model: Reader = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """knnlm tune memory held-out.txt

    Read the text once, then choose by arithmetic on what was seen: k and τ of each memory, and the weights. The choice
    is stored in the memory, and every other command uses it. Tune on text that is neither in the memory nor in your
    test. The paper's kNN-LM is --memory knn --weights fixed. Of a decoder there is only λ to choose, which is kept in
    the decoder.
    """
    from knnlm.corpus import read_documents
    from knnlm.datastore.store import Datastore
    from knnlm.evaluation.fit import check_weights
    from knnlm.evaluation.sweep import LAMBDAS, Grid
    from knnlm.evaluation.trace import Trace
    from knnlm.evaluation.tune import check_trace, choose_from, tune, tune_trace
    from knnlm.mixture.loader import is_decoder
    from knnlm.mixture.spec import parse_memories, resolve

    if is_decoder(memory):
        given = (memories, trace, k, knn_temperature, lambdas, metric)
        searching = no_rerank or device_keys != "float16"
        if any(value is not None for value in given) or weights not in (None, "fixed") or searching:
            raise ParameterError(
                f"{memory} is a decoder, which has no store: only its λ is chosen, so give TEXT, --model and --limit."
            )
        _tune_decoder(memory, list(text or []), text_field, limit, model=model, device=device, dtype=dtype, json=json)
        return
    weights = weights or "gated"
    check_weights(weights)
    if (trace is None) == (not text):
        raise ParameterError("Give either TEXT or --trace to tune on.")
    if trace is not None and not (metric is None and limit is None and model is None):
        raise ParameterError("--metric, --limit and --model are those of the trace; leave them out with --trace.")
    if memories is None and trace is None:
        memories = f"{TUNED},decoder={STUDENT_FOLDER}" if is_decoder(memory / STUDENT_FOLDER) else TUNED
    only_one = "," not in (memories or "")
    if lambdas is not None and (weights != "fixed" or not only_one):
        raise ParameterError("--lambda is a grid for one memory: --memory knn --weights fixed. Others need none.")
    grid: dict[str, Any] = {
        "ks": _numbers("k", k, int),
        "knn_temperatures": _numbers("knn_temperature", knn_temperature, float),
        "lambdas": _numbers("lambda", lambdas, float) or LAMBDAS,
    }
    if trace is not None:
        seen = Trace.open(trace)
        check_trace(memory, seen)
        if memories is not None:
            seen = seen.only(*(spec.label for spec in resolve(parse_memories(memories), memory)))
        chosen_on = seen.facts["text"]
        result = tune_trace(seen, Datastore.open(memory), weights=weights, grid=Grid.of(**grid), progress=bar)
        choose_from(memory, result, seen)
    else:
        chosen_on = list(text or [])
        documents = read_documents(*chosen_on, text_field=text_field)
        mixture = open_mixture(
            memory,
            memories=memories,
            use_tuned=False,
            model=model,
            metric=metric,
            rerank=not no_rerank,
            key_dtype=device_keys,
            device=device,
            dtype=dtype,
        )
        result = tune(
            mixture,
            documents,
            weights=weights,
            sources=chosen_on,
            limit=limit,
            progress=bar,
            **grid,
        )
    show_tuning(memory, chosen_on, result, json=json)


def evaluate(
    memory: Memory,
    text: Text,
    memories: Memories = None,
    k: K = None,
    knn_temperature: KnnTemperature = None,
    lmbda: Lambda = None,
    metric: Metric = None,
    skip: Skip = None,
    limit: Limit = None,
    no_rerank: NoRerank = False,
    device_keys: DeviceKeys = "float16",
    save_trace: Annotated[
        Path | None, typer.Option(help="Also keep what was seen, for tune --trace.", show_default=False)
    ] = None,
    text_field: TextField = "text",
    model: Reader = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """knnlm eval memory held-out.txt

    Score every token of the text with the model alone and with its memories.
    """
    from knnlm.corpus import read_documents
    from knnlm.evaluation.evaluate import evaluate

    documents = read_documents(*text, text_field=text_field)
    mixture = open_mixture(
        memory,
        memories=memories,
        model=model,
        k=k,
        knn_temperature=knn_temperature,
        lmbda=lmbda,
        metric=metric,
        skip_fraction=skip,
        rerank=not no_rerank,
        key_dtype=device_keys,
        device=device,
        dtype=dtype,
    )
    if save_trace is None:
        found = evaluate(mixture, documents, limit=limit, progress=bar)
    else:
        found = _trace(mixture, documents, save_trace, sources=text, limit=limit)
    show_evaluation(found, json=json)


def _trace(mixture: Mixture, documents: Iterable[Document], path: Path, **reading: Any) -> Evaluation:
    """Write a trace, and evaluate from it."""
    from knnlm.evaluation.fit import evaluate_trace
    from knnlm.evaluation.trace import record

    begin = time.perf_counter()
    trace = record(mixture, documents, path, progress=bar, **reading)
    settings = [getattr(memory, "settings", ()) for memory in mixture.memories]
    found = evaluate_trace(trace, settings, mixture.weights)
    return replace(found, seconds=time.perf_counter() - begin)


def _tune_decoder(
    folder: Path, text: list[str], text_field: str, limit: int | None, *, json: bool, **opening: Any
) -> None:
    """Choose how loud a decoder may be, which is all that there is to choose."""
    from knnlm.corpus import read_documents
    from knnlm.evaluation.tune import tune_decoder

    if not text:
        raise ParameterError("Give TEXT to tune the decoder on.")
    documents = read_documents(*text, text_field=text_field)
    mixture = open_mixture(folder, **opening)
    card = tune_decoder(mixture, documents, sources=text, limit=limit, progress=bar)
    facts = {"decoder": str(folder), "lambda": card.lmbda, **(card.lmbda_facts or {})}
    if json:
        print_json(facts)
        return
    figures = f"{facts['base_perplexity']:.3f} → {facts['perplexity']:.3f}"
    console.print(f"{folder}: λ = {card.lmbda:.2f} with {facts['model']}, perplexity {figures}", markup=False)


def open_mixture(
    memory: Path, *, model: str | None = None, device: str = "auto", dtype: str = "auto", **settings: Any
) -> Mixture:
    """Open a memory and its models, without the chatter of the libraries below."""
    from knnlm.mixture.mixture import Mixture
    from knnlm.mixture.spec import MixtureOptions

    quiet()
    with waiting(f"opening {memory}"):
        names = [field.name for field in fields(MixtureOptions)]
        options = {name: settings.pop(name) for name in names if name in settings}
        return Mixture.open(
            memory, options=MixtureOptions(model=model, device=device, dtype=dtype, **options), **settings
        )


def _numbers(name: str, given: str | None, kind: type) -> list[Any] | None:
    """Read a list such as 1,8,64."""
    if given is None:
        return None
    try:
        return [kind(part) for part in given.split(",")]
    except ValueError:
        raise ParameterError(f"--{name} takes numbers with commas between them, not {given!r}.") from None
