"""Commands that train a model: adapt, and the decoder of distill."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnlm.cli import options, screen
from knnlm.cli.showing import adaptation_rows, warning
from knnlm.errors import DatastoreError, ParameterError

if TYPE_CHECKING:
    from knnlm.datastore import Datastore
    from knnlm.distill.training import Teacher
    from knnlm.lm import CausalLM

_TEACHING = ("teacher", "k", "temperature", "exclude")  # what only β above 0 has a use for


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(short_help="Train a student on a text, build its memory, tune all of it.")(adapt)


def adapt(
    text: options.Text,
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
    text_field: options.TextField = "text",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    json: options.Json = False,
) -> None:
    """knnlm adapt docs/ --out adapted --layers 2 --epochs 1

    Train a student on the text, build a memory that the student reads, and tune model, student and memory together on
    held-out text. The model itself stays as it is. eval, generate and explain take the folder like any other memory;
    what was stopped goes on when the same command is given again.
    """
    from knnlm import corpus
    from knnlm.adaptation import adapt as adapt_to

    check_rate(learning_rate)
    for some in filter(None, (text, valid)):
        screen.survey(some, text_field)
    lm = screen.open_model(model, device=device, dtype=dtype)
    result = adapt_to(
        corpus.read(*text, text_field=text_field),
        out,
        lm=lm,
        held_out=corpus.read(*valid, text_field=text_field) if valid else None,
        student=student,
        layers=layers,
        limit=limit,
        seed=seed,
        device=device,
        progress=screen.bar,
        epochs=epochs,
        learning_rate=learning_rate,
        batch_tokens=batch_tokens,
        accumulate=accumulate,
    )
    if json:
        screen.print_json({"out": str(out), **asdict(result)})
        return
    title = f"perplexity of {screen.count(result.held_out_tokens, 'held-out token')}"
    rows = adaptation_rows(result)
    rows += warning(result.remembered, result.held_out_documents, "their figures are too good")
    rows.append(("next", f"knnlm eval {out} TEXT, or without any store: knnlm eval {out}/student TEXT"))
    screen.print_facts(rows, title=title)


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
    from knnlm.distill.decoder import train_decoder
    from knnlm.distill.student import open_student

    teaching = {name: settings.pop(name) for name in _TEACHING if name in settings}
    _check(out, beta, teaching, settings)
    total = screen.survey(valid, "text") if valid else None
    lm = open_helped(store, model, device, dtype)
    own = open_student(student or lm.name, like=lm, layers=layers, seed=seed)
    own.lm.window(settings.get("context"), None)  # refuses one that is too long
    targets = _targets(store, out, device, **teaching) if beta else None
    settings |= {"beta": beta, "seed": seed, "device": device}
    card = train_decoder(store, own, out, targets=targets, progress=screen.bar, **settings)
    if valid and card.weight is None:  # one that was tuned since stays so
        card = _tune(out, lm, valid, total)
    facts = asdict(card)
    facts |= {"lambda": facts.pop("weight"), "lambda_facts": facts.pop("weight_facts")}
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
    from knnlm.mixture.plugin import is_decoder

    check_rate(settings.get("learning_rate"))
    if teaching and not beta:
        wrong = " and ".join(f"--{name}" for name in teaching)
        raise ParameterError(f"{wrong} say how a store teaches, but without --beta above 0 only the text does.")
    if out.exists() and not is_decoder(out) and not (out.is_dir() and not any(out.iterdir())):
        raise DatastoreError(f"{out} is not empty and is no decoder. Choose another --out.")


def _targets(store: Datastore, out: Path, device: str, *, teacher: Path | None = None, **votes: Any) -> Teacher:
    """Ask the memory, or another of the same text, what it would have said at each position."""
    from knnlm.datastore import Datastore
    from knnlm.distill.retrieval import Ballot, Planned
    from knnlm.distill.targets import make_targets
    from knnlm.distill.text import Text
    from knnlm.mixture.plugin import is_decoder

    taught_by = store if teacher is None else Datastore.open(teacher)
    if Text.of_store(taught_by).fingerprint != Text.of_store(store).fingerprint:
        raise DatastoreError(
            f"{taught_by.path} is a memory of another text than {store.path}, or with another tokenizer, so it cannot "
            "teach it. Build one of the same text with: knnlm build --model FINE-TUNED"
        )
    if is_decoder(out):  # finished: it is enough to know what would be asked
        return Planned(taught_by, Ballot(**votes))
    place = out.absolute()
    return make_targets(
        taught_by, place.with_name(f"{place.name}.targets"), device=device, progress=screen.bar, **votes
    )


def open_helped(store: Datastore, model: str | None, device: str, dtype: str) -> CausalLM:
    """Open the model that a memory helps: the one that is named, else the memory's own."""
    from knnlm.mixture import open_reader
    from knnlm.mixture.opening import language_model

    name = model or language_model(store)
    screen.quiet()
    with screen.waiting(f"opening {name or store.model['name']}"):
        return open_reader(store, name=name, device=device, dtype=dtype)


def _tune(decoder: Path, lm: CausalLM, text: list[str], total: int | None) -> Any:
    from knnlm import corpus
    from knnlm.mixture import Mixture
    from knnlm.tuning import tune_decoder

    mixture = Mixture.open(decoder, lm)
    return tune_decoder(mixture, corpus.read(*text), sources=text, total=total, progress=screen.bar)
