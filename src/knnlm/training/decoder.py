"""Train a small model to say what retrieval would have said, and keep it as an ordinary model with a card.

OUT.partial/   while it is trained: checkpoint.safetensors, losses.jsonl
OUT/           the finished model and tokenizer as transformers writes them; decoder.json, losses.jsonl, learning.png,
               and the checksums of all but the card, which may change: knnlm.sha256

Knows nothing about mixing what comes of it.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from knnlm.datastore.locks import writer_lock
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError, MissingExtra, ParameterError
from knnlm.io import sync_file, sync_folder, translate_os_errors
from knnlm.lm.loading import choose_device, write_checksums
from knnlm.lm.windows import WindowShape
from knnlm.memories.decoder import CARD, DecoderCard, load_card, save_card, set_lambda
from knnlm.progress import Progress, silent
from knnlm.training.data import TokenStream, TrainingBatches, positions
from knnlm.training.output_config import check_same
from knnlm.training.student import Student, open_student
from knnlm.training.trainer import CURVE, DecoderTrainer, Teacher, TrainerConfig, draw_curve, read_curve

__all__ = ["DecoderCard", "Student", "load_card", "open_student", "set_lambda", "train_decoder"]

PICTURE = "learning.png"

_FINISHED = "finished"

_STEPS = 300  # at least, where the text is long enough

_SMALLEST, _LARGEST = 2_048, 16_384  # tokens of a step


def train_decoder(
    text: Datastore | Iterable[Sequence[int]],
    student: Student,
    out: str | Path,
    *,
    targets: Teacher | None = None,
    beta: float = 0.0,
    epochs: int = 3,
    batch_tokens: int | None = None,
    learning_rate: float = 2e-4,
    warm_up: float = 0.05,
    schedule: str = "linear",
    weight_decay: float = 0.01,
    clip: float = 1.0,
    accumulate: int = 1,
    precision: str = "auto",
    held_out: float = 0.0,
    context: int | None = None,
    stride: int | None = None,
    seed: int = 0,
    checkpoint_every: float = 120.0,
    device: str = "auto",
    tensorboard: bool = False,
    progress: Progress = silent,
) -> DecoderCard:
    """Train a copy of the student on a memory's text, or on the tokens of documents, going on with an unfinished run.

    The loss is β·KL to the targets + (1-β)·CE; with beta=0 there are none. A step sees about `batch_tokens`, by default
    as many as leave 300 steps, from 2,048 to 16,384, in at least `accumulate` parts. `context` tokens are read at a
    time, moved on by `stride`, by default as many. `clip` 0 clips nothing. `checkpoint_every` is in seconds.
    """
    if tensorboard and find_spec("tensorboard") is None:
        raise MissingExtra("tensorboard=True", "tensorboard", "tensorboard")
    where = choose_device(device)
    shape = student.lm.window(context, None)
    shape = WindowShape(shape.context, stride if stride is not None else shape.context)
    words = TokenStream.of_store(text) if isinstance(text, Datastore) else TokenStream.of_documents(text)
    size = _batch_tokens(words, epochs) if batch_tokens is None else batch_tokens
    settings = TrainerConfig(
        beta, epochs, size, learning_rate, warm_up, schedule, weight_decay, clip, accumulate,
        _precision(precision, where), held_out, shape.context, shape.stride, seed,
    )  # fmt: skip
    teacher = _check_teacher(targets, words, beta)
    _check_tokens(text, words, student)
    facts = _facts(words, student, teacher, settings)
    folder = Path(out).absolute()
    work = folder.with_name(f"{folder.name}.partial")
    strict = precision != "auto"
    if _is_finished(folder, facts, strict) and not work.exists():
        return load_card(folder)
    with writer_lock(work, create=True):
        if not _is_finished(folder, facts, strict):
            lessons = TrainingBatches(words, shape, start_token=student.lm.start_token, held_out=held_out, seed=seed)
            model = copy.deepcopy(student.lm.model).float().to(where)
            training = DecoderTrainer(model, lessons, teacher, settings, facts=facts, device=where)
            training.resume(work)
            with _watcher(work, tensorboard) as watch:
                training.run(work, every=checkpoint_every, progress=progress, watch=watch)
            _publish(work, folder, training, student, _card(student, training, lessons, teacher, work))
        shutil.rmtree(work)
    return load_card(folder)


def _batch_tokens(text: TokenStream, epochs: int) -> int:
    """Choose the size of a step: few large ones teach less than many small ones, of which a short text has enough."""
    share = len(text.tokens) * epochs // _STEPS
    return min(_LARGEST, max(_SMALLEST, 1 << max(0, share.bit_length() - 1)))


def _facts(text: TokenStream, student: Student, teacher: Teacher | None, settings: TrainerConfig) -> dict[str, Any]:
    """All that the result depends on."""
    names = (
        "teacher",
        "k",
        "knn_temperature",
        "exclude",
        "top",
        "mass",
    )  # which are the same whenever targets are made
    told = {} if teacher is None else teacher.facts
    return {
        "text": text.fingerprint,
        "division_into_documents": text.division,
        "student": student.lm.identity["weights"],
        "tokenizer": student.lm.identity["tokenizer"],
        "targets": None if teacher is None else {name: told.get(name) for name in names},
        **asdict(settings),
    }


def _precision(name: str, device: torch.device) -> str:
    """Turn `auto` into bfloat16 on a GPU, with weights in float32, and float32 elsewhere, where it is repeatable."""
    return ("bfloat16" if device.type == "cuda" else "float32") if name == "auto" else name


def _check_teacher(targets: Teacher | None, text: TokenStream, beta: float) -> Teacher | None:
    """Refuse targets of another text, and those that nobody would ask."""
    if not beta:
        if targets is not None:
            raise ParameterError("With beta=0 the targets would not be used. Give a beta above 0, or no targets.")
        return None
    if targets is None:
        raise ParameterError(
            f"beta {beta:g} needs targets, what retrieval says of the text. Make them, or use beta=0: the text alone."
        )
    found = targets.facts.get("text", text.fingerprint)
    if targets.rows != len(text.tokens) or found != text.fingerprint:
        raise DatastoreError(
            f"The targets are of another text ({targets.rows:,} tokens, {found}) than the one to train on "
            f"({len(text.tokens):,} tokens, {text.fingerprint}). Make them from a memory of the same text."
        )
    return targets


def _check_tokens(given: Datastore | Iterable[Sequence[int]], text: TokenStream, student: Student) -> None:
    """Refuse text that the student cannot read."""
    name, identity = student.spec, student.lm.identity
    if isinstance(given, Datastore) and given.model.get("tokenizer") not in (identity["tokenizer"], None):
        raise DatastoreError(
            f"{given.path} was built with another tokenizer ({given.model['tokenizer']}) than that of the student "
            f"{name} ({identity['tokenizer']}). Use a student with the same tokenizer."
        )
    if len(text.tokens) and not 0 <= int(text.tokens.min()) <= int(text.tokens.max()) < student.lm.vocab_size:
        raise ParameterError(
            f"The text holds tokens from {text.tokens.min()} to {text.tokens.max()}, but the student {name} has only "
            f"{student.lm.vocab_size:,}."
        )


def _is_finished(folder: Path, facts: dict[str, Any], strict: bool) -> bool:
    """Say whether the decoder is there; refuse one that was made in another way, and whatever else is there.

    What a GPU has finished is not to be made again without one: unless strict, any precision will do.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if not (folder / CARD).exists():
        raise DatastoreError(f"{folder} is not empty and is no decoder. Choose another --out.")
    wanted = {name: value for name, value in facts.items() if strict or name != "precision"}
    check_same(folder, load_card(folder).settings, wanted)
    return True


@contextmanager
def _watcher(work: Path, tensorboard: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Give whom to tell each line of the curve: TensorBoard, if it is asked for."""
    if not tensorboard:
        yield lambda _: None
        return
    from torch.utils.tensorboard import SummaryWriter

    # Whoever goes on tells the lines so far once more, so what is there already would be there twice.
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
    student: Student, training: DecoderTrainer, lessons: TrainingBatches, teacher: Teacher | None, work: Path
) -> DecoderCard:
    course, identity, settings = training.course, student.lm.identity, training.settings
    told = None if teacher is None else teacher.facts
    last = [line for line in read_curve(work / CURVE) if line["epoch"] == settings.epochs - 1]
    losses: dict[str, float | None] = {}
    for name in ("loss", "kl", "ce"):
        found = [line[name] for line in last if line[name] is not None]
        losses[name] = sum(found) / len(found) if found else None
    return DecoderCard(
        student=student.facts,
        tokenizer=identity["tokenizer"],
        vocab_size=identity["vocab_size"],
        start_token=identity["start_token"],
        window={"context": settings.context, "stride": settings.stride},
        teacher=None if told is None else told["teacher"],
        targets=told,
        beta=settings.beta,
        settings=training.facts,
        text=lessons.text.fingerprint,
        tokens=lessons.tokens,
        held_out_tokens=positions(lessons.held_out),
        steps=course.step,
        seconds=course.seconds,
        losses=losses,
        held_out=course.held_out,
        notes=[],
    )


def _publish(work: Path, folder: Path, training: DecoderTrainer, student: Student, card: DecoderCard) -> None:
    """Write the finished decoder beside its work, and move it to its place at once."""
    made = work / _FINISHED
    shutil.rmtree(made, ignore_errors=True)
    lines = read_curve(work / CURVE)
    with translate_os_errors(folder):
        made.mkdir()
        try:
            training.model.eval().save_pretrained(made)
        except SafetensorError as error:
            raise OSError(str(error)) from None
        student.lm.tokenizer.save_pretrained(made)
        shutil.copy(work / CURVE, made / CURVE)
        if (work / "tensorboard").exists():
            shutil.copytree(work / "tensorboard", made / "tensorboard")
        try:
            (made / PICTURE).write_bytes(draw_curve(lines, card.held_out))
        except MissingExtra as error:
            card.notes.append(str(error))
        write_checksums(made, without=CARD)
        save_card(made, card)
        for file in made.rglob("*"):
            if file.is_file():
                sync_file(file)
        sync_folder(made)
        made.rename(folder)
        sync_folder(folder.parent)
