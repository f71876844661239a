"""Commands that train a model: adapt, and the decoder of distill.

Commands that make something else out of a memory: distill, prune.
"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnlm.cli import options
from knnlm.cli.options import Device, Dtype, Json, Text, TextField
from knnlm.cli.output import (
    adaptation_rows,
    bar,
    console,
    count,
    open_model,
    print_facts,
    print_json,
    quiet,
    waiting,
    warning,
)
from knnlm.errors import DatastoreError, ParameterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from knnlm.corpus import Document
    from knnlm.datastore.store import Datastore
    from knnlm.lm.causal import CausalLM
    from knnlm.training.trainer import Teacher


_TEACHING = ("teacher", "k", "knn_temperature", "exclude")  # what only β above 0 has a use for


def register_adapt(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(short_help="Train a student on a text, build its memory, tune all of it.")(adapt)


def adapt(
    text: Text,
    out: Annotated[Path, typer.Option(help="The folder to make: a memory, and the student in it.", show_default=False)],
    valid: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to tune on.", show_default="a tenth of TEXT, at most 60,000 tokens, which are not learnt"
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="The model to help: bundled, a folder, a .gguf file, or a hub name.")
    ] = "bundled",
    student: Annotated[
        str | None,
        typer.Option(
            help="What the student begins as: a model, or the .json file of a configuration.", show_default="the model"
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Blocks of it that the student keeps.", show_default="all")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the text.")] = 3,
    learning_rate: Annotated[float, typer.Option(help="The highest, after a warm-up.")] = 2e-4,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a step.", show_default="what gives 300 steps, 16384 at most")
    ] = None,
    accumulate: Annotated[
        int, typer.Option(min=1, help="Parts that a step is read in, where it does not fit at once.")
    ] = 1,
    limit: Annotated[int, typer.Option(min=1, help="Tokens to tune on at most.")] = 60_000,
    seed: Annotated[int, typer.Option(min=0, help="Makes training repeatable.")] = 0,
    text_field: TextField = "text",
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """knnlm adapt docs/ --out adapted --layers 2 --epochs 1

    Train a student on the text, build a memory that the student reads, and tune model, student and memory together on
    held-out text. The model itself stays as it is. eval, generate and explain take the folder like any other memory;
    what was stopped goes on when the same command is given again.
    """
    from knnlm.corpus import read_documents
    from knnlm.training.adapt import adapt

    check_rate(learning_rate)
    documents = read_documents(*text, text_field=text_field)
    held_out = read_documents(*valid, text_field=text_field) if valid else None
    lm = open_model(model, device=device, dtype=dtype)
    result = adapt(
        documents,
        out,
        lm=lm,
        held_out=held_out,
        student=student,
        layers=layers,
        limit=limit,
        seed=seed,
        device=device,
        progress=bar,
        epochs=epochs,
        learning_rate=learning_rate,
        batch_tokens=batch_tokens,
        accumulate=accumulate,
    )
    if json:
        print_json({"out": str(out), **asdict(result)})
        return
    title = f"perplexity of {count(result.held_out_tokens, 'held-out token')}"
    rows = adaptation_rows(result)
    rows += warning(result.remembered, result.held_out_documents, "their figures are too good")
    rows.append(("next", f"knnlm eval {out} TEXT, or without any store: knnlm eval {out}/student TEXT"))
    print_facts(rows, title=title)


def check_rate(rate: float | None) -> None:
    """Refuse a learning rate that cannot be, before anything slow begins."""
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise ParameterError(f"learning rate must be above 0, not {rate}.")


def distill_decoder(
    store: Datastore,
    out: Path,
    *,
    student: str | None = None,
    layers: int | None = None,
    valid: list[str] | None = None,
    model: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    beta: float = 0.0,
    seed: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """Train a decoder on a memory's text and, with β, on what its store or another would have said."""
    from knnlm.corpus import read_documents
    from knnlm.training.decoder import train_decoder
    from knnlm.training.student import open_student

    teaching = {name: settings.pop(name) for name in _TEACHING if name in settings}
    _check(out, beta, teaching, settings)
    held_out = list(read_documents(*valid)) if valid else None
    lm = open_helped(store, model, device, dtype)
    own = open_student(student or lm.name, like=lm, layers=layers, seed=seed)
    own.lm.window(settings.get("context"), None)  # refuses one that is too long
    targets = _targets(store, out, device, **teaching) if beta else None
    settings |= {"beta": beta, "seed": seed, "device": device}
    card = train_decoder(store, own, out, targets=targets, progress=bar, **settings)
    if held_out and card.lmbda is None:  # one that was tuned since stays so
        card = _tune(out, lm, held_out, valid or [])
    facts = asdict(card)
    facts |= {"lambda": facts.pop("lmbda"), "lambda_facts": facts.pop("lmbda_facts")}
    return {"into": "decoder", "out": str(out), "model": lm.name, **facts}


def describe_decoder(facts: dict[str, Any]) -> str:
    """Say what came of a decoder, and what to do with it."""
    said = f"{facts['out']}: a decoder, loss {facts['losses']['loss']:.3f} in {facts['seconds']:.0f} s"
    chosen = facts["lambda_facts"]
    if chosen is None:
        return f"{said}. Next: knnlm tune {facts['out']} TEXT --model {facts['model']}"
    figures = f"{chosen['base_perplexity']:.3f} → {chosen['perplexity']:.3f}"
    return f"{said}; λ = {facts['lambda']:.2f}, perplexity {figures}. Next: knnlm eval {facts['out']} TEXT"


def _check(out: Path, beta: float, teaching: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse what cannot be, before a teacher is asked for hours."""
    from knnlm.mixture.loader import is_decoder

    check_rate(settings.get("learning_rate"))
    if teaching and not beta:
        wrong = " and ".join(f"--{name}" for name in teaching)
        raise ParameterError(f"{wrong} say how a store teaches, but without --beta above 0 only the text does.")
    if out.exists() and not is_decoder(out) and not (out.is_dir() and not any(out.iterdir())):
        raise DatastoreError(f"{out} is not empty and is no decoder. Choose another --out.")


def _targets(store: Datastore, out: Path, device: str, *, teacher: Path | None = None, **votes: Any) -> Teacher:
    """Ask the memory, or another of the same text, what it would have said at each position."""
    from knnlm.datastore.store import Datastore
    from knnlm.mixture.loader import is_decoder
    from knnlm.training.data import TokenStream
    from knnlm.training.teacher import PlannedTeacher, TeacherConfig, make_targets

    taught_by = store if teacher is None else Datastore.open(teacher)
    if TokenStream.of_store(taught_by).fingerprint != TokenStream.of_store(store).fingerprint:
        raise DatastoreError(
            f"{taught_by.path} is a memory of another text than {store.path}, or with another tokenizer, so it cannot "
            "teach it. Build one of the same text with: knnlm build --model FINE-TUNED"
        )
    if is_decoder(out):  # finished: it is enough to know what would be asked
        return PlannedTeacher(taught_by, TeacherConfig(**votes))
    place = out.absolute()
    return make_targets(taught_by, place.with_name(f"{place.name}.targets"), device=device, progress=bar, **votes)


def open_helped(store: Datastore, model: str | None, device: str, dtype: str) -> CausalLM:
    """Open the model that a memory helps: the one that is named, else the memory's own."""
    from knnlm.mixture.loader import language_model, open_reader

    name = model or language_model(store)
    quiet()
    with waiting(f"opening {name or store.model['name']}"):
        return open_reader(store, name=name, device=device, dtype=dtype)


def _tune(decoder: Path, lm: CausalLM, documents: Iterable[Document], sources: Sequence[str]) -> Any:
    from knnlm.evaluation.tune import tune_decoder
    from knnlm.mixture.mixture import Mixture

    mixture = Mixture.open(decoder, lm)
    return tune_decoder(mixture, documents, sources=sources, progress=bar)


_DECODER = (
    "student",
    "layers",
    "teacher",
    "beta",
    "k",
    "knn_temperature",
    "exclude",
    "learning_rate",
    "batch_tokens",
    "accumulate",
    "context",
    "valid",
)

# Which options are for which kind of --into; the others are for all.
_OWN: dict[str, tuple[str, ...]] = {
    "output": ("rows", "rows_by", "held_out", "interpolate"),
    "keys": ("width", "anchors", "neighbours", "rounds"),
    "decoder": _DECODER,
}


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(short_help="Train an output matrix, a better similarity or a decoder on a memory.")(distill)
    app.command(short_help="Make a memory smaller.")(prune)
    register_adapt(app)


def distill(
    memory: options.Memory,
    into: Annotated[
        str,
        typer.Option(
            help="output (a matrix with rows for every word, mixed in as --memory output), keys (a memory whose "
            "similarity was trained, mixed in as --memory knn=OUT) or decoder (a model that says what the memory "
            "would, mixed in as --memory decoder=OUT, or used in its place)."
        ),
    ] = "output",
    out: Annotated[
        Path | None,
        typer.Option(help="The folder to make.", show_default="MEMORY/output; for others, it must be given"),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, max=9, help="output: rows for each word.", show_default="1")
    ] = None,
    rows_by: Annotated[
        str | None,
        typer.Option(help="output: uniform, or frequency (more rows for frequent words).", show_default="uniform"),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Passes over the pairs at most; of keys, over the anchors in each round.",
            show_default="6; for keys and a decoder, 3",
        ),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.5,
            help="output: fraction of the text, in whole documents, that tells when to stop; 0 holds nothing out.",
            show_default="0.02",
        ),
    ] = None,
    interpolate: Annotated[
        float | None,
        typer.Option(
            help="output: train on (1-λ)·p_LM + λ·p_output with this λ; reads the memory's text once more.",
            show_default="off",
        ),
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=1, help="keys: dimensions after the map.", show_default="as many as before")
    ] = None,
    anchors: Annotated[
        int | None, typer.Option(min=1, help="keys: contexts to learn from.", show_default="40000")
    ] = None,
    neighbours: Annotated[
        int | None, typer.Option(min=2, help="keys: neighbours of each, of other documents.", show_default="128")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="keys: how often neighbours are looked for anew.", show_default="1")
    ] = None,
    student: Annotated[
        str | None,
        typer.Option(
            help="decoder: what it begins as, a model or the .json file of a configuration.",
            show_default="the memory's model",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="decoder: blocks of it to keep.", show_default="all")
    ] = None,
    teacher: Annotated[
        Path | None,
        typer.Option(
            help="decoder: a memory of the same text to learn from, read by a fine-tuned model say.",
            show_default="MEMORY",
        ),
    ] = None,
    beta: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="decoder: share of the loss that is the teacher's; 0 is the text alone.",
            show_default="0",
        ),
    ] = None,
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="decoder: neighbours that teach.", show_default="1024")
    ] = None,
    knn_temperature: Annotated[float | None, typer.Option(help="decoder: τ of their vote.", show_default="2")] = None,
    exclude: Annotated[
        str | None,
        typer.Option(
            help="decoder: what of the memory a position may not see: self, or its document.", show_default="self"
        ),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="decoder: the highest, after a warm-up.", show_default="0.0002")
    ] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="decoder: tokens in a step.", show_default="what gives 300 steps, 16384 at most"),
    ] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(
            min=1, help="decoder: parts that a step is read in, where it does not fit at once.", show_default="1"
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="decoder: tokens read at once.", show_default="1024, or what the student can read"),
    ] = None,
    valid: Annotated[
        list[str] | None, typer.Option(help="decoder: text to choose its λ on.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Makes training repeatable.")] = 0,
    model: options.Reader = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    json: options.Json = False,
) -> None:
    """knnlm distill memory --into output

    Learn from the stored pairs alone: no text is read again, and the model is not run (but for --interpolate, and for a
    decoder, which is trained on the stored text). A run that was stopped goes on when the same command is given again;
    of keys, once they are learned and being written.
    """
    from knnlm.datastore.store import Datastore
    from knnlm.lm.loading import choose_device

    if into not in _OWN:
        raise ParameterError(f"--into takes {', '.join(_OWN)}, not {into!r}.")
    given: dict[str, Any] = {"rows": rows, "rows_by": rows_by, "held_out": held_out, "interpolate": interpolate}
    given |= {"width": width, "anchors": anchors, "neighbours": neighbours, "rounds": rounds, "epochs": epochs}
    given |= {"student": student, "layers": layers, "teacher": teacher, "beta": beta, "k": k, "exclude": exclude}
    given |= {"knn_temperature": knn_temperature, "learning_rate": learning_rate, "batch_tokens": batch_tokens}
    given |= {"accumulate": accumulate, "context": context, "valid": valid}
    settings = _settings(into, given)
    where = str(choose_device(device))
    store = Datastore.open(memory)
    if into != "output" and out is None:
        raise ParameterError(f"--into {into} makes a new folder: say where with --out.")
    if into == "decoder":
        assert out is not None
        facts = distill_decoder(store, out, seed=seed, model=model, device=where, dtype=dtype, **settings)
        summary = describe_decoder(facts)
    elif into == "keys":
        assert out is not None
        facts = _distill_keys(store, out, seed=seed, device=where, **settings)
        summary = f"{out}: a memory with trained keys. Next: knnlm tune {memory} TEXT --memory knn,knn={out}"
    else:
        place = out or memory / "output"
        log_p = None if interpolate is None else _log_p(store, model, where, dtype)
        facts = _distill_output(store, place, seed=seed, device=where, log_p_lm=log_p, **settings)
        summary = f"{place}: {_gain(facts)} in {facts['seconds']:.0f} s. "
        summary += f"Next: knnlm tune {memory} TEXT --memory knn,output"
    if json:
        print_json({"memory": str(memory), **facts})
        return
    console.print(summary, markup=False)


def _settings(into: str, given: dict[str, Any]) -> dict[str, Any]:
    """Take the options that were given, and refuse those that are for the other kind."""
    chosen = {name: value for name, value in given.items() if value is not None}
    others = [kind for kind in _OWN if kind != into]
    other = next((kind for kind in others if any(name in chosen for name in _OWN[kind])), None)
    if other is not None:
        wrong = [f"--{name.replace('_', '-')}" for name in _OWN[other] if name in chosen]
        raise ParameterError(
            f"{' and '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} for --into {other}, not for --into {into}. "
            f"Leave {'it' if len(wrong) == 1 else 'them'} out, or say --into {other}."
        )
    return chosen


def _distill_output(store: Datastore, place: Path, **settings: Any) -> dict[str, Any]:
    from knnlm.training.output_matrix import train_output

    card = train_output(store, place, progress=bar, **settings)
    return {"into": "output", "out": str(place), **asdict(card)}


def _distill_keys(store: Datastore, out: Path, **settings: Any) -> dict[str, Any]:
    from knnlm.training.metric_learning import train_key_metric

    begin = time.perf_counter()
    made = train_key_metric(store, out, progress=bar, **settings)
    return {
        "into": "keys",
        "out": str(out),
        "width": made.width,
        "learned": {} if made.map is None else made.map.facts,
        "seconds": time.perf_counter() - begin,
    }


def prune(
    memory: options.Memory,
    out: Annotated[Path, typer.Option(help="The folder of the smaller memory.", show_default=False)],
    width: Annotated[
        int | None, typer.Option(min=1, help="Keep this many principal components.", show_default="all")
    ] = None,
    merge: Annotated[
        int | None,
        typer.Option(min=1, help="Merge keys into one of this many neighbours with their token.", show_default="off"),
    ] = None,
    drop_known: Annotated[
        float | None,
        typer.Option(
            help="Drop keys whose token --model gives at least this probability; reads the memory's text once more.",
            show_default="off",
        ),
    ] = None,
    held_out: Annotated[
        list[str] | None,
        typer.Option("--text", help="Held-out text: say what pruning costs on it.", show_default=False),
    ] = None,
    limit: options.Limit = None,
    seed: Annotated[int, typer.Option(min=0, help="The order of merging.")] = 0,
    model: options.Reader = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    json: options.Json = False,
) -> None:
    """knnlm prune memory --out smaller --merge 8 --text held-out.txt

    Write a smaller memory beside the old one. Its text stays whole, so neighbours are still shown where they stand.
    With --text, both are measured on it, each with its own best k, τ and λ.
    """
    from knnlm.datastore.rewrite import check_out
    from knnlm.datastore.store import Datastore
    from knnlm.lm.loading import choose_device
    from knnlm.training.prune import prune

    if width is None and merge is None and drop_known is None:
        raise ParameterError("Say how to prune: --width, --merge, --drop-known, or several of them.")
    begin = time.perf_counter()
    where = str(choose_device(device))
    store = Datastore.open(memory)
    check_out(store, out)
    log_p = None if drop_known is None else _log_p(store, model, where, dtype)
    facts = prune(
        store,
        out,
        width=width,
        merge=merge,
        drop_known=drop_known,
        log_p=log_p,
        device=where,
        seed=seed,
        progress=bar,
    )
    facts |= {"memory": str(memory), "out": str(out), "seconds": time.perf_counter() - begin}
    if held_out:
        opening = {"model": model, "device": device, "dtype": dtype}
        facts["perplexity_before"] = _perplexity(memory, held_out, limit, opening)
        facts["perplexity_after"] = _perplexity(out, held_out, limit, opening)
    if json:
        print_json(facts)
        return
    rows = [
        ("keys", f"{facts['keys_before']:,} → {facts['keys_after']:,}"),
        ("  dropped", f"{facts['dropped']:,} that the model knows"),
        ("  merged", f"{facts['merged']:,} into others"),
        ("bytes", f"{facts['bytes_before']:,} → {facts['bytes_after']:,}"),
    ]
    if held_out:
        figures = f"{facts['perplexity_before']:.3f} → {facts['perplexity_after']:.3f}"
        rows.append(("perplexity", f"{figures}, each with its best k, τ and λ for that text"))
    rows.append(("next", f"knnlm tune {out} TEXT"))
    if facts["explained_variance"] is not None:
        rows.insert(3, ("variance kept", f"{facts['explained_variance']:.1%}"))
    print_facts(rows)


def _perplexity(memory: Path, text: list[str], limit: int | None, opening: dict[str, Any]) -> float:
    """Give the best perplexity that one λ over the memory's neighbours has on a text."""
    from knnlm.cli.evaluate import open_mixture
    from knnlm.corpus import read_documents
    from knnlm.evaluation.sweep import KS, sweep
    from knnlm.evaluation.trace import record

    mixture = open_mixture(memory, memories="knn", use_tuned=False, **opening)
    with tempfile.TemporaryDirectory(prefix="knnlm-prune-") as folder:
        place = Path(folder) / "trace"
        trace = record(mixture, read_documents(*text), place, k=max(KS), limit=limit, progress=bar)
        return sweep(trace, device=str(mixture.lm.device)).best[3]


def _log_p(store: Datastore, model: str | None, device: str, dtype: str) -> Any:
    """Read the memory's text again with the language model: the one that is named, else the memory's own."""
    from knnlm.mixture.loader import check_model, language_model
    from knnlm.training.prune import store_log_p

    lm = open_helped(store, model, device, dtype)
    if model is None and language_model(store) is None:  # one that is named may be another than made the keys
        check_model(store, lm)
    return store_log_p(store, lm, progress=bar)


def _gain(facts: dict[str, Any]) -> str:
    if facts["held_out_after"] is None:
        return "nothing was held out"
    return f"loss on held-out documents {facts['held_out_before']:.3f} → {facts['held_out_after']:.3f}"
