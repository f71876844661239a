"""Training of a decoder: a model that learns a text and, with β, the predictions of retrieval from it.

OUT.partial/   during training: checkpoint.safetensors, losses.jsonl
OUT/           the finished model and tokenizer in the format of transformers; decoder.json, losses.jsonl, learning.png,
               and knnlm.sha256, the checksums of all files but the card, which tuning may change

What a step does depends only on the seed and its number, so a killed run resumes from its checkpoint. The host waits
for the device once per forward pass, in transformers' check for a mask, and every few steps for the losses.
"""

from __future__ import annotations

import copy
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from knnlm.datastore.locks import writer_lock
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError, MissingExtra, ParameterError
from knnlm.io import commit_folder, translate_os_errors
from knnlm.lm.causal import dynamic_shape_attention
from knnlm.lm.loading import choose_device, write_checksums
from knnlm.lm.windows import WindowShape
from knnlm.memories.decoder import CARD, DecoderCard, load_card, save_card
from knnlm.progress import Advance, Progress, note, silent
from knnlm.training.data import TokenStream, TrainingBatch, TrainingBatches, count_targets, join_groups
from knnlm.training.initial_model import InitialModel
from knnlm.training.teacher import SparseTargets, Teacher
from knnlm.training.trainer import (
    CHECKPOINT,
    CURVE,
    SCHEDULES,
    Checkpoint,
    LossCurve,
    Losses,
    Schedule,
    StepLosses,
    TrainState,
    check_choices,
    check_fraction,
    check_minimum,
    check_positive,
    check_same_settings,
    distillation_loss,
    draw_curve,
    make_adamw,
    mean_losses,
    optimiser_tensors,
    read_curve,
)

PLOT = "learning.png"
PRECISIONS = ("auto", "float32", "bfloat16")

_FINISHED = "finished"
_MIN_STEPS = 300  # if the text is long enough
_MIN_BATCH_TOKENS, _MAX_BATCH_TOKENS = 2_048, 16_384  # of the default batch size
_MAX_PADDED_POSITIONS = 4  # per token on a GPU, where fewer passes are worth more padding
_STEPS_PER_FLUSH = 20  # between two reads of the losses from the device
# Settings of targets that do not depend on when they are computed.
_TARGET_SETTINGS = ("teacher", "k", "knn_temperature", "exclude", "top", "mass")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Part = tuple[TrainingBatch, SparseTargets | None]


@dataclass(frozen=True)
class DecoderConfig:
    """Options of `train_decoder` that decide its result, besides the text, the initial model and the targets.

    The loss is β·KL to the targets + (1-β)·CE. A step has about `batch_tokens`, by default the number that gives 300
    steps, from 2,048 to 16,384, in at least `accumulate` forward passes. Windows have `context` tokens and advance by
    `stride`, by default the whole context.
    """

    beta: float = 0.0
    epochs: int = 3
    batch_tokens: int | None = None
    learning_rate: float = 2e-4
    warm_up: float = 0.05  # fraction of the steps
    schedule: str = "linear"
    weight_decay: float = 0.01
    clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    accumulate: int = 1
    precision: str = "auto"
    held_out: float = 0.0
    context: int | None = None
    stride: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self, {"schedule": SCHEDULES, "precision": PRECISIONS})
        check_minimum(self, {"epochs": 1, "batch_tokens": 1, "accumulate": 1, "seed": 0})
        check_fraction(self, {"beta": 1.0, "warm_up": 1.0, "held_out": 0.5})
        check_positive(self, ["learning_rate"])
        check_positive(self, ["weight_decay", "clip"], zero=True)

    def resolve(self, text: TokenStream, initial: InitialModel, device: torch.device) -> DecoderConfig:
        """Return the configuration with the defaults for this text, model and device filled in."""
        precision = self.precision
        if precision == "auto":  # on a GPU the weights stay in float32; float32 on a CPU is reproducible
            precision = "bfloat16" if device.type == "cuda" else "float32"
        context = initial.lm.window(self.context, None).context
        shape = WindowShape(context, self.stride if self.stride is not None else context)
        size = self.batch_tokens if self.batch_tokens is not None else default_batch_tokens(text, self.epochs)
        return replace(self, precision=precision, context=shape.context, stride=shape.stride, batch_tokens=size)

    @property
    def window(self) -> WindowShape:
        """The window of a resolved configuration."""
        assert self.context is not None
        assert self.stride is not None
        return WindowShape(self.context, self.stride)


def default_batch_tokens(text: TokenStream, epochs: int) -> int:
    """Return the largest power of two that gives 300 steps: many small steps learn more than few large ones."""
    per_step = len(text.tokens) * epochs // _MIN_STEPS
    return min(_MAX_BATCH_TOKENS, max(_MIN_BATCH_TOKENS, 1 << max(0, per_step.bit_length() - 1)))


def train_decoder(
    text: Datastore | Iterable[Sequence[int]],
    initial: InitialModel,
    out: str | Path,
    config: DecoderConfig | None = None,
    *,
    targets: Teacher | None = None,
    device: str = "auto",
    checkpoint_every: float = 120.0,
    tensorboard: bool = False,
    progress: Progress = silent,
) -> DecoderCard:
    """Train a copy of the initial model on a store's text, or on the tokens of documents, resuming an unfinished run.

    `targets` are needed if beta is above 0. `checkpoint_every` is in seconds.
    """
    if tensorboard and find_spec("tensorboard") is None:
        raise MissingExtra("tensorboard=True", "tensorboard", "tensorboard")
    where = choose_device(device)
    config = config or DecoderConfig()
    any_precision = config.precision == "auto"
    stream = TokenStream.from_store(text) if isinstance(text, Datastore) else TokenStream.from_documents(text)
    config = config.resolve(stream, initial, where)
    _check_teacher(targets, stream, config.beta)
    _check_tokens(text, stream, initial)
    settings = _settings(stream, initial, targets, config)
    folder = Path(out).absolute()
    work = folder.with_name(f"{folder.name}.partial")
    if _is_finished(folder, settings, any_precision) and not work.exists():
        return load_card(folder)
    with writer_lock(work, create=True):
        if not _is_finished(folder, settings, any_precision):
            trainer = _make_trainer(stream, initial, targets, config, where)
            checkpoint = Checkpoint(work / CHECKPOINT, settings, every=checkpoint_every)
            with _scalar_writer(work, tensorboard) as watch:
                trainer.run(checkpoint, work / CURVE, progress=progress, watch=watch)
            card = _card(initial, trainer, targets, settings, read_curve(work / CURVE))
            _publish(work, folder, trainer.model, initial, card)
        shutil.rmtree(work)
    return load_card(folder)


def _make_trainer(
    text: TokenStream, initial: InitialModel, targets: Teacher | None, config: DecoderConfig, device: torch.device
) -> DecoderTrainer:
    start = initial.lm.start_token
    batches = TrainingBatches(text, config.window, start_token=start, held_out=config.held_out, seed=config.seed)
    model = copy.deepcopy(initial.lm.model).float().to(device)
    return DecoderTrainer(model, batches, targets, config, device=device)


def _settings(
    text: TokenStream, initial: InitialModel, targets: Teacher | None, config: DecoderConfig
) -> dict[str, Any]:
    """Return everything the result depends on."""
    metadata = {} if targets is None else targets.metadata
    return {
        "text": text.fingerprint,
        "document_boundaries": text.boundaries_fingerprint,
        "initial_model": initial.lm.identity["weights"],
        "tokenizer": initial.lm.identity["tokenizer"],
        "targets": None if targets is None else {name: metadata.get(name) for name in _TARGET_SETTINGS},
        **asdict(config),
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
    if isinstance(source, Datastore) and source.model.get("tokenizer") not in (identity["tokenizer"], None):
        raise DatastoreError(
            f"{source.path}: built with another tokenizer ({source.model['tokenizer']}) than that of the initial model "
            f"{name} ({identity['tokenizer']}). Use a model with the same tokenizer."
        )
    if len(text.tokens) and not 0 <= int(text.tokens.min()) <= int(text.tokens.max()) < initial.lm.vocab_size:
        raise ParameterError(
            f"The text has tokens from {text.tokens.min()} to {text.tokens.max()}, but the initial model {name} has "
            f"only {initial.lm.vocab_size:,}."
        )


def _is_finished(folder: Path, settings: dict[str, Any], any_precision: bool) -> bool:
    """Whether the decoder exists. Raise if the folder holds anything else, or a decoder with other settings.

    With any precision, a decoder that was trained on a GPU is found on a machine without one.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if not (folder / CARD).exists():
        raise DatastoreError(f"{folder} is not empty and is not a decoder. Choose another --out.")
    wanted = {name: value for name, value in settings.items() if not any_precision or name != "precision"}
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


@dataclass
class _DecoderState(TrainState):
    held_out: list[dict[str, Any]] = field(default_factory=list)  # before training and after each epoch


class DecoderTrainer:
    """A model, its optimiser and the state of their training."""

    def __init__(
        self,
        model: PreTrainedModel,
        batches: TrainingBatches,
        teacher: Teacher | None,
        config: DecoderConfig,
        *,
        device: torch.device,
    ) -> None:
        self.model, self.batches, self.config, self.state = model, batches, config, _DecoderState()
        self._teacher, self._device = teacher, device
        assert config.batch_tokens is not None
        self._batch_tokens = config.batch_tokens
        self._trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        matrices = [weight for weight in self._trained.values() if weight.dim() > 1]
        vectors = [weight for weight in self._trained.values() if weight.dim() <= 1]  # norms and biases: no decay
        self._optimiser = make_adamw(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            device,
        )
        # Documents are cut at different places in each epoch, so the number of steps may differ too.
        self.steps = sum(len(batches.steps(epoch, self._batch_tokens)) for epoch in range(config.epochs))
        self._schedule = Schedule(config.learning_rate, math.ceil(config.warm_up * self.steps), config.schedule)
        self._max_positions = _max_positions(model, self._batch_tokens, device)
        self._is_torn = False

    def run(
        self, checkpoint: Checkpoint, curve_path: Path, *, progress: Progress, watch: Callable[[dict[str, Any]], None]
    ) -> None:
        """Train from the checkpoint to the end, or to Ctrl-C, which saves a checkpoint too."""
        self.state = state = checkpoint.restore(self._tensors(), self.state)
        begun = time.monotonic() - state.seconds
        curve = LossCurve(curve_path, state.step, watch)

        def save() -> None:
            with self._no_checkpoint_inside():
                curve.flush()
            state.seconds = time.monotonic() - begun
            checkpoint.save(self._tensors(), asdict(state))

        devices = [self._device] if self._device.type == "cuda" else []
        try:
            total = self.config.epochs * self.batches.tokens
            with torch.random.fork_rng(devices), progress("training", total=total) as advance:
                for _ in self._steps(curve, advance):
                    if checkpoint.is_due:
                        save()
            save()
        except KeyboardInterrupt:
            if not self._is_torn:
                save()
            raise

    def _steps(self, curve: LossCurve, advance: Advance) -> Iterator[int]:
        """Take all remaining steps, and evaluate on held-out text before the first and after each epoch."""
        state = self.state
        advance(state.tokens)
        if not state.held_out:
            state.held_out = self._evaluate(0)
        self.model.train()
        while state.epoch < self.config.epochs:
            groups = self.batches.steps(state.epoch, self._batch_tokens)[state.batch :]
            for parts in _prefetch(groups, self._read):
                advance(self._step(parts, curve))
                if curve.pending >= _STEPS_PER_FLUSH or state.step == self.steps:
                    with self._no_checkpoint_inside():
                        loss = curve.flush()
                    note(advance, f"loss {loss:.3f}")
                yield state.step
            evaluation = self._evaluate(state.epoch + 1)
            with self._no_checkpoint_inside():
                state.held_out += evaluation
                state.epoch, state.batch = state.epoch + 1, 0

    @contextmanager
    def _no_checkpoint_inside(self) -> Iterator[None]:
        """Mark the state as inconsistent, so that Ctrl-C inside saves no checkpoint."""
        self._is_torn = True
        yield
        self._is_torn = False

    def _step(self, parts: list[_Part], curve: LossCurve) -> int:
        """Update the weights from windows that are read in several parts, and return how many tokens they have."""
        state, config = self.state, self.config
        torch.manual_seed((config.seed * 1_000_003 + state.step) % (1 << 63))  # of dropout
        count = sum(int((batch.targets >= 0).sum()) for batch, _ in parts)
        sums = []
        for batch, sparse in parts:
            losses = self._losses(batch, sparse, count)
            losses.total.backward()
            sums.append(torch.stack([loss.detach().float() for loss in losses]))
        if config.clip:
            torch.nn.utils.clip_grad_norm_(self._trained.values(), config.clip)
        rate = self._schedule.rate_of_step(state.step, self.steps)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        with self._no_checkpoint_inside():
            self._optimiser.step()
            state.step, state.batch, state.tokens = state.step + 1, state.batch + 1, state.tokens + count
            curve.add(StepLosses(state.step, state.epoch, count, rate, torch.stack(sums).sum(0)))
        self._optimiser.zero_grad(set_to_none=True)
        return count

    def _losses(self, batch: TrainingBatch, sparse: SparseTargets | None, count: int) -> Losses:
        input_ids, targets = self._to_device(batch.ids), self._to_device(batch.targets)
        ids, probs = (None, None) if sparse is None else (self._to_device(sparse.ids), self._to_device(sparse.probs))
        half = self.config.precision == "bfloat16"
        with dynamic_shape_attention(self._device), torch.autocast(self._device.type, torch.bfloat16, enabled=half):
            # Padding is on the right, so no mask is needed, and attention can use its fastest kernel.
            logits = self.model(input_ids=input_ids, use_cache=False).logits  # (B, T, V)
        return distillation_loss(logits.flatten(0, 1), targets, ids, probs, beta=self.config.beta, positions=count)

    def _read(self, groups: Sequence[NDArray[np.int64]]) -> list[_Part]:
        """Return the windows of groups, in at least `accumulate` parts, and their targets."""
        groups = join_groups(groups, self._max_positions)
        parts_per_group = math.ceil(self.config.accumulate / len(groups))
        parts = []
        for group in groups:
            for windows in np.array_split(group, min(parts_per_group, len(group))):
                batch = self.batches.read(windows)
                parts.append((batch, None if self._teacher is None else self._teacher.lookup(batch.positions)))
        return parts

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cuda" and not tensor.is_cuda:
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    @torch.no_grad()
    def _evaluate(self, epoch: int) -> list[dict[str, Any]]:
        """Return the losses on held-out text after so many epochs; an empty list if nothing is held out."""
        windows = self.batches.held_out
        if not len(windows):
            return []
        count = count_targets(windows)
        groups = [[group] for group in self.batches.held_out_groups(self._batch_tokens)]
        self.model.eval()
        sums = [
            torch.stack([loss.float() for loss in self._losses(batch, sparse, count)])
            for parts in _prefetch(groups, self._read)
            for batch, sparse in parts
        ]
        self.model.train()
        means = mean_losses(torch.stack(sums).double().sum(0).tolist(), count)
        return [{"epoch": epoch, "step": self.state.step, **means}]

    def _tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint stores; dropout needs nothing, as it is seeded by the number of the step."""
        weights = {f"weight.{name}": weight.detach() for name, weight in self._trained.items()}
        return weights | optimiser_tensors(self._optimiser, self._trained)


def _max_positions(model: PreTrainedModel, batch_tokens: int, device: torch.device) -> int:
    """Return how many positions, padding included, are read at once: more only on a GPU, which waits for Python."""
    if device.type != "cuda":
        return 0
    config = model.config.get_text_config()
    bytes_per_position = 40 * config.num_hidden_layers * config.hidden_size + 8 * config.vocab_size  # about
    free = torch.cuda.mem_get_info(device)[0]
    return int(min(_MAX_PADDED_POSITIONS * batch_tokens, free // (2 * bytes_per_position)))


def _prefetch(items: Sequence[_Item], make: Callable[[_Item], _Result]) -> Iterator[_Result]:
    """Yield `make(item)` for each item, computing the next one in a thread while one is used."""
    with ThreadPoolExecutor(1) as pool:
        coming = [pool.submit(make, item) for item in items[:1]]
        for item in [*items[1:], None]:
            ready = coming.pop() if coming else None
            if item is not None:
                coming.append(pool.submit(make, item))
            if ready is not None:
                yield ready.result()


def _card(
    initial: InitialModel,
    trainer: DecoderTrainer,
    targets: Teacher | None,
    settings: dict[str, Any],
    curve: list[dict[str, Any]],
) -> DecoderCard:
    state, identity, config, batches = trainer.state, initial.lm.identity, trainer.config, trainer.batches
    metadata = None if targets is None else targets.metadata
    last_epoch = [line for line in curve if line["epoch"] == config.epochs - 1]
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
        notes=[],
    )


def _publish(work: Path, folder: Path, model: PreTrainedModel, initial: InitialModel, card: DecoderCard) -> None:
    """Write the finished decoder into the work folder and move it into place in one step."""
    finished = work / _FINISHED
    shutil.rmtree(finished, ignore_errors=True)
    with translate_os_errors(folder):
        finished.mkdir()
        try:
            model.eval().save_pretrained(finished)
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
