"""Commands that train: adapt, distill."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnlm.cli.make import open_language_model, token_log_p
from knnlm.cli.options import (
    TRAIN,
    Json,
    MachineFlags,
    Model,
    Out,
    Seed,
    Store,
    StoreModel,
    Text,
    TextField,
    TextFlags,
    command,
)
from knnlm.cli.output import bar, count, leak_warning, open_model, print_json, print_table, show
from knnlm.errors import DatastoreError, ModelMismatch, ParameterError

if TYPE_CHECKING:
    from knnlm.datastore.store import Datastore
    from knnlm.lm.causal import CausalLM
    from knnlm.training.adapt import Adaptation
    from knnlm.training.teacher import Teacher

_SELECTION_SHARE = 0.1  # of the text that is held out by `distill --select`
_TEACHER_OPTIONS = ("teacher", "k", "knn_temperature", "exclude")  # they apply only with --beta above 0

BatchTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of a training step.", show_default="for 300 steps, 16384 at most"),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    command(app, TRAIN, "Train a decoder on a text, build its store and tune both.")(adapt)
    command(app, TRAIN, "Train an output matrix, a key map or a decoder on a store.")(distill)


@dataclass(frozen=True)
class TrainingFlags:
    """How a decoder is trained by `adapt`."""

    epochs: Annotated[int, typer.Option(min=1, help="Passes over the text; with --select at most.")] = 3
    learning_rate: Annotated[
        float | None,
        typer.Option(help="The peak learning rate, after a warm-up.", show_default="2e-4, with --lora 1e-3"),
    ] = None
    lora: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Train adapters of this rank instead of all weights; 0: all weights.",
            show_default="16 on a CPU, for all blocks of a model, with the package peft, else 0",
        ),
    ] = None
    select: Annotated[
        bool,
        typer.Option(
            "--select/--no-select",
            help="Choose the learning rate, around the given one, and the epochs on held-out text.",
        ),
    ] = True
    top: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train only so many of the last blocks; the model computes the others, which they share, once.",
            show_default="all",
        ),
    ] = None
    batch_tokens: BatchTokens = None
    accumulate: Annotated[int, typer.Option(min=1, help="Gradient-accumulation steps.")] = 1


def adapt(
    text: Text,
    out: Out,
    valid: Annotated[
        list[str] | None,
        typer.Option(help="Text to tune on.", show_default="a tenth of TEXT, at most 60,000 tokens, not trained on"),
    ] = None,
    model: Model = "bundled",
    init: Annotated[
        str | None,
        typer.Option(
            help="Initial weights of the decoder: a model, or a .json configuration.", show_default="the model"
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks to keep.", show_default="all")] = None,
    training: TrainingFlags = TrainingFlags(),
    store_first: Annotated[
        bool,
        typer.Option("--store-first", help="First build OUT.first, a store that can be used during the training."),
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to tune on.")] = 60_000,
    seed: Seed = 0,
    text_field: TextField = "text",
    machine: MachineFlags = MachineFlags(),
    json: Json = False,
) -> None:
    """knnlm adapt docs/ --out docs.adapted --layers 2 --epochs 1

    Train a decoder on the text, build a store that the decoder reads, and tune model, decoder and store together on
    held-out text. The model itself is not changed. eval, generate, explain and serve take the folder like any store. A
    run that was interrupted resumes when the same command is run again.
    """
    from knnlm.corpus import read_documents
    from knnlm.training.adapt import adapt
    from knnlm.training.decoder_trainer import DecoderConfig

    check_learning_rate(training.learning_rate)
    documents = read_documents(*text, text_field=text_field)
    held_out = read_documents(*valid, text_field=text_field) if valid else None
    lm = open_model(model, **asdict(machine))
    options: dict[str, Any] = {"initial_model": init, "layers": layers, "limit": limit, "device": machine.device}
    options["store_first"] = store_first
    config = DecoderConfig(seed=seed, **asdict(training))
    result = adapt(documents, out, lm=lm, held_out=held_out, config=config, progress=bar, **options)
    _show_adapted(out, result, json=json)


def _show_adapted(out: Path, result: Adaptation, *, json: bool) -> None:
    from knnlm.datastore.schema import DECODER_FOLDER
    from knnlm.memories.decoder import load_card

    card = load_card(out / DECODER_FOLDER)
    selection, rank = card.selection, card.settings.get("lora")
    if json:
        print_json({"out": str(out), **asdict(result), "selection": selection})
        return
    rows = [*adaptation_rows(result), *selection_rows(selection)]
    if rank:
        rows.append(("decoder", f"adapters of rank {rank}; all weights: --lora 0"))
    rows += leak_warning(result.leaked_documents, result.held_out_documents, "their figures are too good")
    rows.append(("next", f"knnlm eval {out} TEXT, or the decoder without a store: knnlm eval {out}/decoder TEXT"))
    print_table(rows, title=f"perplexity of {count(result.held_out_tokens, 'held-out token')}")


def adaptation_rows(result: Adaptation) -> list[tuple[str, str]]:
    """Return the perplexity of each part of an adapted model."""
    return [
        ("model", perplexity(result.base)),
        ("decoder alone", perplexity(result.fine_tuned)),
        ("model + store", perplexity(result.knn)),
        ("model + decoder", f"{perplexity(result.decoder)}  (λ = {result.decoder_lambda:.2f})"),
        ("all, gated", perplexity(result.everything)),
    ]


def selection_rows(selection: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return a row for each training that was tried, and what was chosen."""
    if selection is None:
        return []
    rows = [
        (f"rate {trial['learning_rate']:g}, {trial['epochs']:g} epochs", perplexity(math.exp(min(trial["loss"], 100))))
        for trial in selection["trials"]
        if trial["learning_rate"] is not None
    ]
    chosen = selection["chosen"]
    found = f"rate {chosen['learning_rate']:g}, {chosen['epochs']:g} epochs, {chosen['interpolation']:g} of the change"
    averaged = ", averaged with the second best" if chosen.get("average") else ""  # older cards have no averages
    return [*rows, ("chosen", found + averaged)]


def perplexity(value: float) -> str:
    """Format a perplexity; that of an untrained decoder has digits without meaning."""
    return f"{value:.3f}" if value < 1e6 else f"{value:.2g}"


def check_learning_rate(rate: float | None) -> None:
    """Raise ParameterError unless a learning rate is positive and finite."""
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise ParameterError(f"learning rate must be above 0, not {rate}.")


@dataclass(frozen=True)
class OutputFlags:
    """Options of `distill --into output`."""

    rows: Annotated[int | None, typer.Option(min=1, max=9, help="output: matrix rows per word.", show_default="1")] = (
        None
    )
    rows_by: Annotated[
        str | None,
        typer.Option(help="output: uniform, or frequency (more rows for frequent words).", show_default="uniform"),
    ] = None
    held_out: Annotated[
        float | None,
        typer.Option(
            min=0, max=0.5, help="output: fraction of the documents that is held out for early stopping.",
            show_default="0.02",
        ),
    ] = None  # fmt: skip
    interpolate: Annotated[
        float | None,
        typer.Option(
            help="output: train on (1-λ)·p_LM + λ·p_output with this λ; reads the stored text once more.",
            show_default="off",
        ),
    ] = None


@dataclass(frozen=True)
class KeyMapFlags:
    """Options of `distill --into keys`."""

    width: Annotated[
        int | None, typer.Option(min=1, help="keys: dimensions after the map.", show_default="as before")
    ] = None
    anchors: Annotated[int | None, typer.Option(min=1, help="keys: contexts to train on.", show_default="40000")] = None
    neighbours: Annotated[
        int | None, typer.Option(min=2, help="keys: neighbours of each, from other documents.", show_default="128")
    ] = None
    rounds: Annotated[
        int | None, typer.Option(min=1, help="keys: how often neighbours are searched.", show_default="1")
    ] = None


@dataclass(frozen=True)
class DecoderFlags:
    """Options of `distill --into decoder`."""

    init: Annotated[
        str | None,
        typer.Option(help="decoder: initial weights, a model or a .json configuration.", show_default="the model"),
    ] = None
    layers: Annotated[int | None, typer.Option(min=1, help="decoder: blocks to keep.", show_default="all")] = None
    teacher: Annotated[
        Path | None,
        typer.Option(
            help="decoder: a store of the same text, or another decoder, to learn from.", show_default="STORE"
        ),
    ] = None
    beta: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="decoder: weight of the KL loss to the teacher.", show_default="0"),
    ] = None
    k: Annotated[int | None, typer.Option("--k", min=1, help="decoder: k of the teacher.", show_default="1024")] = None
    knn_temperature: Annotated[float | None, typer.Option(help="decoder: τ of the teacher.", show_default="2")] = None
    exclude: Annotated[
        str | None,
        typer.Option(help="decoder: entries hidden from a position: self, or its document.", show_default="self"),
    ] = None
    learning_rate: Annotated[
        float | None, typer.Option(help="decoder: the peak, after a warm-up.", show_default="2e-4, with --lora 1e-3")
    ] = None
    select: Annotated[
        bool | None,
        typer.Option(
            "--select/--no-select",
            help="decoder: choose the learning rate and the epochs on a tenth of the text, which is held out.",
            show_default="select",
        ),
    ] = None
    lora: Annotated[
        int | None,
        typer.Option(
            min=0, help="decoder: train adapters of this rank instead of all weights.", show_default="0, all weights"
        ),
    ] = None
    top: Annotated[
        int | None,
        typer.Option(min=1, help="decoder: train only so many of the last blocks.", show_default="all"),
    ] = None
    batch_tokens: BatchTokens = None
    accumulate: Annotated[
        int | None, typer.Option(min=1, help="decoder: gradient-accumulation steps.", show_default="1")
    ] = None
    context: Annotated[
        int | None, typer.Option(min=1, help="decoder: tokens of a window.", show_default="1024, or the maximum")
    ] = None
    valid: Annotated[list[str] | None, typer.Option(help="decoder: text to tune λ on.", show_default=False)] = None


_KINDS: dict[str, Any] = {"output": OutputFlags, "keys": KeyMapFlags, "decoder": DecoderFlags}


def distill(
    store: Store,
    into: Annotated[
        str,
        typer.Option(
            help="output (a matrix with rows for every word, mixed in with --memories output), keys (a store with a "
            "trained key map, mixed in with --memories knn=OUT) or decoder (a model that replaces the store, mixed in "
            "with --memories decoder=OUT)."
        ),
    ] = "output",
    out: Annotated[
        Path | None, typer.Option(help="The folder to create.", show_default="STORE/output; required for the others")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Passes over the entries; for keys, over the anchors.", show_default="6; 3 for the others"
        ),
    ] = None,
    output: OutputFlags = OutputFlags(),
    keys: KeyMapFlags = KeyMapFlags(),
    decoder: DecoderFlags = DecoderFlags(),
    seed: Seed = 0,
    model: StoreModel = None,
    machine: MachineFlags = MachineFlags(),
    json: Json = False,
) -> None:
    """knnlm distill docs.store --into output

    Train on the stored entries: no text is read again, and the model is not run (except with --interpolate, and for a
    decoder, which is trained on the stored text). A run that was interrupted resumes when the same command is run
    again.
    """
    settings = _settings(into, {"output": output, "keys": keys, "decoder": decoder})
    settings |= {"seed": seed} | ({} if epochs is None else {"epochs": epochs})
    result, text = _distill(store, into, out, settings, model, machine)
    show({"store": str(store), **result}, text, json=json)


def _settings(into: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given; raise ParameterError for an option of another kind."""
    if into not in _KINDS:
        raise ParameterError(f"--into takes {', '.join(_KINDS)}, not {into!r}.")
    given = {kind: {one.name: getattr(own, one.name) for one in fields(own)} for kind, own in flags.items()}
    given = {kind: {name: value for name, value in own.items() if value is not None} for kind, own in given.items()}
    for kind, own in given.items():
        if kind != into and own:
            wrong = [f"--{name.replace('_', '-')}" for name in own]
            raise ParameterError(
                f"{' and '.join(wrong)} {'applies' if len(wrong) == 1 else 'apply'} to --into {kind}, not to --into "
                f"{into}. Remove {'it' if len(wrong) == 1 else 'them'}, or use --into {kind}."
            )
    return given[into]


def _distill(
    path: Path, into: str, out: Path | None, settings: dict[str, Any], model: str | None, machine: MachineFlags
) -> tuple[dict[str, Any], str]:
    """Train, and return the result and its description."""
    from knnlm.datastore.store import Datastore
    from knnlm.lm.loading import choose_device

    device = str(choose_device(machine.device))
    store = Datastore.open(path)
    if into == "output":
        return _train_output(store, out or path / "output", settings, model, device, machine.dtype)
    if out is None:
        raise ParameterError(f"--into {into} creates a new folder: give --out.")
    if into == "keys":
        return _train_keys(store, out, settings, device)
    return _train_decoder(store, out, settings, model, device, machine.dtype)


def _train_output(
    store: Datastore, out: Path, settings: dict[str, Any], model: str | None, device: str, dtype: str
) -> tuple[dict[str, Any], str]:
    from knnlm.training.output_matrix import OutputConfig, train_output

    log_p = token_log_p(store, model, device, dtype) if "interpolate" in settings else None
    card = train_output(store, out, OutputConfig(**settings), log_p_lm=log_p, device=device, progress=bar)
    losses = "nothing was held out"
    if card.held_out_after is not None:
        losses = f"loss on held-out documents {card.held_out_before:.3f} → {card.held_out_after:.3f}"
    text = f"{out}: {losses} in {card.seconds:.0f} s. Next: knnlm tune {store.path} TEXT --memories knn,output"
    return {"into": "output", "out": str(out), **asdict(card)}, text


def _train_keys(store: Datastore, out: Path, settings: dict[str, Any], device: str) -> tuple[dict[str, Any], str]:
    from knnlm.training.metric_learning import KeyMetricConfig, train_key_metric

    begin = time.perf_counter()
    made = train_key_metric(store, out, KeyMetricConfig(**settings), device=device, progress=bar)
    result = {"into": "keys", "out": str(out), "width": made.width, "seconds": time.perf_counter() - begin}
    result["learned"] = {} if made.map is None else made.map.metadata
    return result, f"{out}: a store with trained keys. Next: knnlm tune {store.path} TEXT --memories knn,knn={out}"


def _train_decoder(
    store: Datastore, out: Path, settings: dict[str, Any], model: str | None, device: str, dtype: str
) -> tuple[dict[str, Any], str]:
    """Train a decoder on a store's text and, with β, on the predictions of a store."""
    from knnlm.evaluation.tune import tune_decoder
    from knnlm.mixture.mixture import Mixture
    from knnlm.training.decoder import train_decoder
    from knnlm.training.decoder_trainer import DecoderConfig
    from knnlm.training.initial_model import open_initial_model

    beta, seed, valid = settings.pop("beta", 0.0), settings.pop("seed"), settings.pop("valid", None)
    held_out = list(TextFlags().reader_for(store.path)(valid)) if valid else []  # unreadable: before the training
    init, layers = settings.pop("init", None), settings.pop("layers", None)
    teaching = {name: settings.pop(name) for name in _TEACHER_OPTIONS if name in settings}
    _check_decoder(out, beta, teaching, settings)
    lm = open_language_model(store, model, device, dtype)
    initial = open_initial_model(init or lm.name, like=lm, layers=layers, seed=seed)
    initial.lm.window(settings.get("context"), None)  # raises if the window is too long
    targets = _targets(store, out, lm, **teaching) if beta else None
    if settings.setdefault("select", True):
        settings["held_out"] = _SELECTION_SHARE
    config = DecoderConfig(beta=beta, seed=seed, **settings)
    card = train_decoder(store, initial, out, config, targets=targets, device=device, progress=bar)
    if held_out and card.lmbda is None:  # a decoder that was tuned before keeps its λ
        card = tune_decoder(Mixture.open(out, lm), held_out, sources=valid, progress=bar)
    result = asdict(card)
    result |= {"lambda": result.pop("lmbda"), "lambda_metadata": result.pop("lmbda_metadata")}
    result = {"into": "decoder", "out": str(out), "model": lm.name, **result}
    return result, _describe_decoder(result, store.path)


def _describe_decoder(result: dict[str, Any], store: Path) -> str:
    text = f"{result['out']}: a decoder, {_describe_losses(result)} in {result['seconds']:.0f} s"
    tuned = result["lambda_metadata"]
    if tuned is None:
        with_store = f"knnlm tune {store} TEXT --memories knn,ngram,decoder={result['out']}"
        alone = f"knnlm tune {result['out']} TEXT --model {result['model']}"
        return f"{text}. Next, with the store: {with_store}; without it: {alone}"
    figures = f"{tuned['base_perplexity']:.3f} → {tuned['perplexity']:.3f}"
    return f"{text}; λ = {result['lambda']:.2f}, perplexity {figures}. Next: knnlm eval {result['out']} TEXT"


def _describe_losses(result: dict[str, Any]) -> str:
    """Return the perplexity of held-out text before and after a training and what was chosen on it, or the loss."""
    selection = result["selection"]
    if selection is None:
        return f"loss {result['losses']['loss']:.3f}"
    before, after = result["held_out"][0]["loss"], min(loss for _, loss in selection["interpolations"])
    chosen = selection["chosen"]
    found = f"rate {chosen['learning_rate']:g}, {chosen['epochs']:g} epochs"
    return f"held-out perplexity {perplexity(math.exp(before))} → {perplexity(math.exp(after))} ({found})"


def _check_decoder(out: Path, beta: float, teaching: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise for wrong options before anything slow begins."""
    from knnlm.mixture.loader import is_decoder

    check_learning_rate(settings.get("learning_rate"))
    if teaching and not beta:
        wrong = " and ".join(f"--{name.replace('_', '-')}" for name in teaching)
        raise ParameterError(f"{wrong} need a teacher: give --beta above 0.")
    if out.exists() and not is_decoder(out) and not (out.is_dir() and not any(out.iterdir())):
        raise DatastoreError(f"{out} is not empty and is not a decoder. Choose another --out.")


def _targets(store: Datastore, out: Path, lm: CausalLM, *, teacher: Path | None = None, **votes: Any) -> Teacher:
    """Return the predictions of the store, of another store of the same text, or of a decoder, at each position."""
    from knnlm.datastore.store import Datastore
    from knnlm.mixture.loader import is_decoder
    from knnlm.training.data import TokenStream
    from knnlm.training.teacher import PlannedTeacher, TeacherConfig, make_targets

    if teacher is not None and is_decoder(teacher):
        if votes:
            wrong = " and ".join(f"--{name.replace('_', '-')}" for name in votes)
            raise ParameterError(f"{teacher} is a decoder, which predicts without neighbours: leave out {wrong}.")
        return _model_targets(store, out, lm, teacher)
    source = store if teacher is None else Datastore.open(teacher)
    if TokenStream.from_store(source).fingerprint != TokenStream.from_store(store).fingerprint:
        raise DatastoreError(
            f"{source.path} contains another text than {store.path}, or was built with another tokenizer. Build a "
            "store of the same text with: knnlm build --model FINE-TUNED"
        )
    config = TeacherConfig(**votes)
    if is_decoder(out):  # training is complete: only its settings are compared
        return PlannedTeacher(source, config)
    place = _targets_place(out)
    return make_targets(source, place, config, device=str(lm.device), progress=bar)


def _model_targets(store: Datastore, out: Path, lm: CausalLM, teacher: Path) -> Teacher:
    """Return the predictions of a decoder at each position of a store."""
    from knnlm.lm.causal import CausalLM
    from knnlm.mixture.loader import is_decoder
    from knnlm.training.data import TokenStream
    from knnlm.training.model_teacher import ModelTeacherConfig, PlannedModelTeacher, make_model_targets

    teaching = CausalLM.open(str(teacher), device=str(lm.device), dtype=lm.dtype)
    own, wanted = teaching.identity["tokenizer"], lm.identity["tokenizer"]
    if own != wanted:
        raise ModelMismatch(f"{teacher} has another tokenizer ({own}) than {lm.name} ({wanted}): it cannot teach it.")
    text = TokenStream.from_store(store)
    if is_decoder(out):
        return PlannedModelTeacher(text, teaching, ModelTeacherConfig())
    return make_model_targets(text, _targets_place(out), teaching, progress=bar)


def _targets_place(out: Path) -> Path:
    place = out.absolute()
    return place.with_name(f"{place.name}.targets")
