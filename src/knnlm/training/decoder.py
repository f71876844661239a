"""Training of a decoder: a model that learns a text and, with β, the predictions of retrieval from it.

OUT.partial/   during training: checkpoint.safetensors, losses.jsonl
OUT/           the finished model and tokenizer in the format of transformers, with `lora` the adapters in that of peft;
               decoder.json, losses.jsonl, learning.png, and knnlm.sha256, the checksums of all files but the card,
               which tuning may change

A killed run resumes from its checkpoint.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from knnlm.datastore.locks import writer_lock
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError, MissingExtra, ParameterError
from knnlm.io import commit_folder, translate_os_errors
from knnlm.lm.causal import CausalLM
from knnlm.lm.fingerprint import PAIR_FIELDS
from knnlm.lm.loading import choose_device, write_checksums
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.memories.decoder import CARD, DecoderCard, load_card, save_card
from knnlm.progress import Progress, silent
from knnlm.training.data import TokenStream, TrainingBatches, count_targets
from knnlm.training.decoder_trainer import DecoderConfig, DecoderTrainer
from knnlm.training.initial_model import InitialModel, freeze_first_blocks
from knnlm.training.lora import Adapters, require_peft
from knnlm.training.selecting_trainer import SelectingTrainer
from knnlm.training.selection import SELECTION_RULES
from knnlm.training.teacher import Teacher
from knnlm.training.trainer import (
    CHECKPOINT,
    CURVE,
    Checkpoint,
    check_same_settings,
    draw_curve,
    read_curve,
)

PLOT = "learning.png"

_FINISHED = "finished"
_OPTIONAL = ("select", "packed", "lora", "top")  # null in the settings, where they are not set
# Settings of targets that do not depend on when they are computed.
_TARGET_SETTINGS = ("kind", "teacher", "k", "knn_temperature", "exclude", "top", "mass")


def train_decoder(
    text: Datastore | Iterable[Sequence[int]],
    initial: InitialModel,
    out: str | Path,
    config: DecoderConfig | None = None,
    *,
    targets: Teacher | None = None,
    held_out_text: Iterable[Sequence[int]] | None = None,
    device: str = "auto",
    checkpoint_every: float = 120.0,
    tensorboard: bool = False,
    progress: Progress = silent,
) -> DecoderCard:
    """Train a copy of the initial model on a store's text, or on the tokens of documents, resuming an unfinished run.

    `targets` are needed if beta is above 0. `held_out_text`, the tokens of other documents, takes the place of a share
    of the text; it is compared by the cross-entropy alone. `checkpoint_every` is in seconds.
    """
    if tensorboard and find_spec("tensorboard") is None:
        raise MissingExtra("tensorboard=True", "tensorboard", "tensorboard")
    if config is not None and config.lora:
        require_peft()
    where = choose_device(device)
    config = config or DecoderConfig()
    names = ["precision", "packed", "batch_tokens", "lora", *(["learning_rate"] if config.lora is None else [])]
    chosen = {name: getattr(config, name) for name in names}
    automatic = {"selection_rules", *(name for name, value in chosen.items() if value in ("auto", None))}
    stream = _read_stream(text, initial.lm)
    _check_pairs(stream, initial, config)
    config = config.resolve(stream, initial, where)
    _check_teacher(targets, stream, config.beta)
    _check_tokens(text, stream, initial)
    held_out = None if held_out_text is None else TokenStream.from_documents(held_out_text)
    if held_out is not None:
        _check_pairs(held_out, initial, config)
    settings = _settings(stream, initial, targets, config)
    settings["held_out_text"] = None if held_out is None else held_out.fingerprint
    settings["held_out_sources"] = None if held_out is None else held_out.sources_fingerprint
    folder = Path(out).absolute()
    work = folder.with_name(f"{folder.name}.partial")
    if _is_finished(folder, settings, automatic) and not work.exists():
        return load_card(folder)
    with writer_lock(work, create=True):
        if not _is_finished(folder, settings, automatic):
            trainer, adapters = _make_trainer(stream, held_out, initial, targets, config, where)
            checkpoint = Checkpoint(work / CHECKPOINT, settings, every=checkpoint_every)
            with _scalar_writer(work, tensorboard) as watch:
                trainer.run(checkpoint, work / CURVE, progress=progress, watch=watch)
            with trainer.saved_on_failure(checkpoint):
                card = _card(initial, trainer, targets, settings, read_curve(work / CURVE))
                _publish(work, folder, trainer.finish(), initial, card, adapters)
        shutil.rmtree(work)
    return load_card(folder)


def _read_stream(text: Datastore | Iterable[Sequence[int]], lm: CausalLM) -> TokenStream:
    """Return the tokens to train on; those of pairs with their sources."""
    if not isinstance(text, Datastore):
        return TokenStream.from_documents(text)
    return TokenStream.from_store(text, lm.encode_sources if isinstance(lm, Seq2SeqLM) else None)


def _check_pairs(text: TokenStream, initial: InitialModel, config: DecoderConfig) -> None:
    """Raise for texts without sources where an encoder reads some, and for options that pairs do not have."""
    if not initial.lm.has_encoder:
        if text.sources is not None:
            raise ParameterError(f"{initial.spec} is a decoder-only model, but the texts are pairs with a source.")
        return
    if text.sources is None:
        raise ParameterError(
            f"{initial.spec} is an encoder-decoder model, which is trained on pairs, but the texts have no sources."
        )
    if config.top is not None or config.packed:
        name = "packed" if config.packed else "top"
        raise ParameterError(f"{name} is for decoder-only models; a decoder of pairs is trained without it.")


def _make_trainer(
    text: TokenStream,
    held_out: TokenStream | None,
    initial: InitialModel,
    targets: Teacher | None,
    config: DecoderConfig,
    device: torch.device,
) -> tuple[DecoderTrainer, Adapters | None]:
    batches = TrainingBatches(
        text,
        config.window,
        start_token=initial.lm.start_token,
        held_out=config.held_out,
        held_out_text=held_out,
        seed=config.seed,
        packed=bool(config.packed),
        prefix=initial.lm.prefix_tokens,
    )
    model = copy.deepcopy(initial.lm.model).float().to(device)
    kind = SelectingTrainer if config.select else DecoderTrainer
    if config.top is not None:
        freeze_first_blocks(model, config.top)
    if config.lora:
        adapters = Adapters(model, rank=config.lora, seed=config.seed, top=config.top)
        return kind(model, batches, targets, config, device=device), adapters
    weights = {name: weight.detach() for name, weight in initial.lm.model.named_parameters()}
    return kind(model, batches, targets, config, device=device, initial=weights), None


def _settings(
    text: TokenStream, initial: InitialModel, targets: Teacher | None, config: DecoderConfig
) -> dict[str, Any]:
    """Return everything the result depends on."""
    metadata = {} if targets is None else targets.metadata
    options = {name: (value or None) if name in _OPTIONAL else value for name, value in asdict(config).items()}
    del options["compile"]  # changes the result by rounding only
    if config.select:
        options["selection_rules"] = SELECTION_RULES
    return {
        "text": text.fingerprint,
        "document_boundaries": text.boundaries_fingerprint,
        "sources": text.sources_fingerprint,
        "start_tokens": [*initial.lm.prefix_tokens, initial.lm.start_token] if initial.lm.has_encoder else None,
        "initial_model": initial.lm.identity["weights"],
        "tokenizer": initial.lm.identity["tokenizer"],
        "targets": None if targets is None else {name: metadata.get(name) for name in _TARGET_SETTINGS},
        **options,
    }


def _check_teacher(targets: Teacher | None, text: TokenStream, beta: float) -> None:
    """Raise if the targets are missing, unused, or of another text."""
    if not beta:
        if targets is not None:
            raise ParameterError("With beta=0 the targets would not be used. Give a beta above 0, or no targets.")
        return
    if targets is None:
        raise ParameterError(
            f"beta {beta:g} needs targets, the predictions of retrieval for the text. Make them, or use beta=0."
        )
    found = targets.metadata.get("text", text.fingerprint)
    if targets.token_count != len(text.tokens) or found != text.fingerprint:
        raise DatastoreError(
            f"The targets are of another text ({targets.token_count:,} tokens, {found}) than the one to train on "
            f"({len(text.tokens):,} tokens, {text.fingerprint}). Make them from a store of the same text."
        )


def _check_tokens(source: Datastore | Iterable[Sequence[int]], text: TokenStream, initial: InitialModel) -> None:
    """Raise if the tokens are not those of the initial model's vocabulary."""
    name, identity = initial.spec, initial.lm.identity
    stored = source.model if isinstance(source, Datastore) else {}
    for field in ("tokenizer", *(PAIR_FIELDS if stored.get("encoder_decoder") else ())):
        if stored.get(field) not in (identity.get(field), None):
            assert isinstance(source, Datastore)
            what = field.replace("_", " ")
            raise DatastoreError(
                f"{source.path}: built with another {what} ({stored[field]}) than that of the initial model {name} "
                f"({identity.get(field)}). Use a model with the same {what}."
            )
    if len(text.tokens) and not 0 <= int(text.tokens.min()) <= int(text.tokens.max()) < initial.lm.vocab_size:
        raise ParameterError(
            f"The text has tokens from {text.tokens.min()} to {text.tokens.max()}, but the initial model {name} has "
            f"only {initial.lm.vocab_size:,}."
        )


def _is_finished(folder: Path, settings: dict[str, Any], automatic: Set[str]) -> bool:
    """Whether the decoder exists. Raise if the folder holds anything else, or a decoder with other settings.

    Automatic settings may differ, so that a decoder that was trained on a GPU is found on a machine without one.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if not (folder / CARD).exists():
        raise DatastoreError(f"{folder} is not empty and is not a decoder. Choose another --out.")
    wanted = {name: value for name, value in settings.items() if name not in automatic}
    check_same_settings(folder, load_card(folder).settings, wanted)
    return True


@contextmanager
def _scalar_writer(work: Path, tensorboard: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield what is called with each line of the loss curve: a TensorBoard writer, or nothing."""
    if not tensorboard:
        yield lambda _: None
        return
    from torch.utils.tensorboard import SummaryWriter

    # A resumed run writes all lines so far again; keeping the old events would duplicate them.
    shutil.rmtree(work / "tensorboard", ignore_errors=True)
    writer = SummaryWriter(str(work / "tensorboard"), flush_secs=10)

    def watch(line: dict[str, Any]) -> None:
        for name in ("loss", "kl", "ce", "learning_rate", "tokens_per_second"):
            if line[name] is not None:
                writer.add_scalar(name, line[name], line["step"])

    try:
        yield watch
    finally:
        writer.close()


def _card(
    initial: InitialModel,
    trainer: DecoderTrainer,
    targets: Teacher | None,
    settings: dict[str, Any],
    curve: list[dict[str, Any]],
) -> DecoderCard:
    state, identity, config, batches = trainer.state, initial.lm.identity, trainer.config, trainer.batches
    metadata = None if targets is None else targets.metadata
    last_epoch = [line for line in curve if line["epoch"] == curve[-1]["epoch"]]
    losses: dict[str, float | None] = {}
    for name in ("loss", "kl", "ce"):
        values = [line[name] for line in last_epoch if line[name] is not None]
        losses[name] = sum(values) / len(values) if values else None
    return DecoderCard(
        initial_model=initial.metadata,
        tokenizer=identity["tokenizer"],
        vocab_size=identity["vocab_size"],
        start_token=identity["start_token"],
        window={"context": config.window.context, "stride": config.window.stride},
        teacher=None if metadata is None else metadata["teacher"],
        targets=metadata,
        beta=config.beta,
        settings=settings,
        text=batches.text.fingerprint,
        tokens=batches.tokens,
        held_out_tokens=count_targets(batches.held_out),
        steps=state.step,
        seconds=state.seconds,
        losses=losses,
        held_out=state.held_out,
        selection=trainer.selection,
        notes=list(trainer.notes),
    )


def _save_weights(
    folder: Path, model: PreTrainedModel, initial: InitialModel, card: DecoderCard, adapters: Adapters | None
) -> None:
    """Write a trained model, or its adapters alone where those belong to a model that is stored elsewhere."""
    if adapters is not None and initial.is_pretrained:
        if adapters.save(folder, initial.spec, initial.lm.identity):
            return
        card.notes.append("Adapters of such layers cannot be stored alone: the model is stored as a whole.")
    model = model if adapters is None else adapters.merge()
    model.eval().save_pretrained(folder)


def _publish(
    work: Path,
    folder: Path,
    model: PreTrainedModel,
    initial: InitialModel,
    card: DecoderCard,
    adapters: Adapters | None,
) -> None:
    """Write the finished decoder into the work folder and move it into place in one step."""
    finished = work / _FINISHED
    shutil.rmtree(finished, ignore_errors=True)
    with translate_os_errors(folder):
        finished.mkdir()
        try:
            _save_weights(finished, model, initial, card, adapters)
        except SafetensorError as error:
            raise OSError(str(error)) from None
        initial.lm.tokenizer.save_pretrained(finished)
        shutil.copy(work / CURVE, finished / CURVE)
        if (work / "tensorboard").exists():
            shutil.copytree(work / "tensorboard", finished / "tensorboard")
        try:
            (finished / PLOT).write_bytes(draw_curve(read_curve(work / CURVE), card.held_out))
        except MissingExtra as error:
            card.notes.append(str(error))
        write_checksums(finished, without=CARD)
        save_card(finished, card)
        commit_folder(finished, folder)
