"""The configuration and the steps of a decoder's training, from a checkpoint to the end.

What a step does depends only on the seed and its number, so a killed run resumes from its checkpoint. The host waits
for the device every few steps for the losses, and without packed rows once per forward pass, in transformers' check for
a mask. A step that does not fit in the memory of the GPU is read in smaller parts, with the same gradient. A training
whose loss is not finite goes back to its last checkpoint and on with half the learning rate.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from knnlm.errors import DatastoreError, KnnlmWarning, ParameterError
from knnlm.lm.windows import WindowShape
from knnlm.progress import Advance, Progress, duration, note
from knnlm.training.data import TokenStream, TrainingBatch, TrainingBatches, count_targets
from knnlm.training.decoder_pass import DecoderPass, split_rows
from knnlm.training.initial_model import InitialModel
from knnlm.training.selection import planned_epochs
from knnlm.training.teacher import SparseTargets, Teacher
from knnlm.training.trainer import (
    SCHEDULES,
    Checkpoint,
    LossCurve,
    Losses,
    Schedule,
    StepLosses,
    TrainingDiverged,
    TrainState,
    check_choices,
    check_fraction,
    check_minimum,
    check_positive,
    make_adamw,
    mean_losses,
    optimiser_tensors,
)

PRECISIONS = ("auto", "float32", "bfloat16")
STEPS_PER_FLUSH = 20  # between two reads of the losses from the device

_MIN_STEPS = 300  # if the text is long enough
_MIN_BATCH_TOKENS, _MAX_BATCH_TOKENS = 512, 16_384  # of the default batch size
_MAX_PADDED_POSITIONS = 4  # per token on a GPU, where fewer passes are worth more padding
_MIN_TOKENS_TO_COMPILE = 4_000_000  # trained on in all; below, compilation takes longer than it saves
_EVALUATED_TOKENS = 16_384  # at once on a GPU, if the batches of the training are smaller
_PROBE = 128  # tokens of the pass that is timed
_MIN_PROBES = 100  # passes of that length from which a training is announced
_LONG = 600.0  # seconds
_RATE, _LORA_RATE = 2e-4, 1e-3
_CPU_RANK = 16  # of adapters
_MAX_DIVERGENCES = 3  # after which a training is given up

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Part = tuple[TrainingBatch, SparseTargets | None]


@dataclass(frozen=True)
class DecoderConfig:
    """Options of `train_decoder` that decide its result, besides the text, the initial model and the targets.

    The loss is β·KL to the targets + (1-β)·CE. A step has about `batch_tokens`, by default the number that gives 300
    steps, from 512 to 16,384, in at least `accumulate` forward passes. Windows have `context` tokens and advance by
    `stride`, by default the whole context. `packed` puts several windows in a row, by default on a GPU; `compile`
    compiles the blocks, by default on a GPU where at least 4 million tokens are trained on in all, and changes the
    result by rounding only.
    """

    beta: float = 0.0
    select: bool = False  # learning rate and epochs on held-out text, at most `epochs`
    epochs: int = 3
    batch_tokens: int | None = None
    learning_rate: float | None = None  # 2e-4, with lora 1e-3
    lora: int | None = 0  # the rank of adapters that are trained instead of all weights; None: as `automatic_rank`
    top: int | None = None  # train only so many of the last blocks; None: all weights
    warm_up: float = 0.05  # fraction of the steps
    schedule: str = "linear"
    weight_decay: float = 0.01
    clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    accumulate: int = 1
    precision: str = "auto"
    held_out: float = 0.0
    context: int | None = None
    stride: int | None = None
    packed: bool | None = None
    compile: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self, {"schedule": SCHEDULES, "precision": PRECISIONS})
        check_minimum(self, {"epochs": 1, "batch_tokens": 1, "accumulate": 1, "seed": 0, "lora": 0, "top": 1})
        check_fraction(self, {"beta": 1.0, "warm_up": 1.0, "held_out": 0.5})
        check_positive(self, ["learning_rate"])
        check_positive(self, ["weight_decay", "clip"], zero=True)

    def resolve(self, text: TokenStream, initial: InitialModel, device: torch.device) -> DecoderConfig:
        """Return the configuration with the defaults for this text, model and device filled in."""
        if self.lora is None:
            return replace(self, lora=automatic_rank(self, initial, device)).resolve(text, initial, device)
        precision = self.precision
        if precision == "auto":  # on a GPU the weights stay in float32; float32 on a CPU is reproducible
            precision = "bfloat16" if device.type == "cuda" else "float32"
        context = initial.lm.window(self.context, None).context
        shape = WindowShape(context, self.stride if self.stride is not None else context)
        size = self.batch_tokens if self.batch_tokens is not None else default_batch_tokens(text, self.epochs)
        on_gpu = device.type == "cuda"
        packed = self.packed if self.packed is not None else on_gpu and text.sources is None
        passes = planned_epochs(self.epochs) if self.select else self.epochs
        worth = on_gpu and packed and len(text.tokens) * passes >= _MIN_TOKENS_TO_COMPILE
        compile_ = on_gpu and packed and self.compile if self.compile is not None else worth
        options: dict[str, Any] = {"precision": precision, "batch_tokens": size, "packed": packed, "compile": compile_}
        options["learning_rate"] = self.peak_rate
        return replace(self, context=shape.context, stride=shape.stride, **options)

    @property
    def peak_rate(self) -> float:
        """The learning rate, or its default: adapters begin at zero and need larger steps."""
        if self.learning_rate is not None:
            return self.learning_rate
        return _LORA_RATE if self.lora else _RATE

    @property
    def window(self) -> WindowShape:
        """The window of a resolved configuration."""
        assert self.context is not None
        assert self.stride is not None
        return WindowShape(self.context, self.stride)


def automatic_rank(config: DecoderConfig, initial: InitialModel, device: torch.device) -> int:
    """Return 16 on a CPU, for all blocks of a pretrained decoder-only model where peft is installed, else 0."""
    whole = initial.is_pretrained and not initial.lm.has_encoder and config.top is None
    return _CPU_RANK if device.type == "cpu" and whole and find_spec("peft") is not None else 0


def default_batch_tokens(text: TokenStream, epochs: int) -> int:
    """Return the largest power of two that gives 300 steps: many small steps learn more than few large ones."""
    per_step = len(text.tokens) * epochs // _MIN_STEPS
    return min(_MAX_BATCH_TOKENS, max(_MIN_BATCH_TOKENS, 1 << max(0, per_step.bit_length() - 1)))


@dataclass
class DecoderState(TrainState):
    """Position of a training, and the losses on held-out text so far."""

    held_out: list[dict[str, Any]] = field(default_factory=list)  # before training and after each epoch
    halvings: int = 0  # of the rows that are read at once, for lack of memory
    divergences: int = 0  # each of which halved the learning rate
    notes: dict[str, str] = field(default_factory=dict)  # for the card, by what they are about


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
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Train a model in float32 on its device. `initial` are the weights that a training without a checkpoint that
        diverges begins with again, by default copies of those of the model."""
        self.batches, self.config, self.state = batches, config, DecoderState()
        self._notes: list[str] = []
        self._teacher, self._device = teacher, device
        assert config.batch_tokens is not None
        self._batch_tokens = config.batch_tokens
        row_length = batches.row_length(self._batch_tokens) if batches.packed else None
        self._pass = DecoderPass(model, precision=config.precision, row_length=row_length, longest=batches.longest)
        if batches.packed and not self._pass.is_packed:
            batches.packed = False
            self._notes.append(f"{type(model).__name__} cannot read packed rows, so windows were padded.")
        self._trained = self._pass.weights
        self._initial = initial or {name: weight.detach().clone() for name, weight in self._trained.items()}
        matrices = [weight for weight in self._trained.values() if weight.dim() > 1]
        vectors = [weight for weight in self._trained.values() if weight.dim() <= 1]  # norms and biases: no decay
        self._optimiser = make_adamw(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            device,
        )
        # Documents are cut at different places in each epoch, so the number of steps may differ too.
        self.steps = sum(len(batches.steps(epoch, self._batch_tokens)) for epoch in range(config.epochs))
        self._schedule = Schedule(config.peak_rate, math.ceil(config.warm_up * self.steps), config.schedule)
        self._max_positions = _max_positions(model, self._batch_tokens, device)
        self._is_torn = False
        self._reported = 0  # tokens of the progress bar

    @property
    def model(self) -> PreTrainedModel:
        """The model that is trained."""
        return self._pass.model

    def finish(self) -> PreTrainedModel:
        """Return the trained model in float32, after which it cannot be trained further."""
        return self._pass.finish()

    @property
    def notes(self) -> list[str]:
        """What the card notes about the training, before and after it was resumed."""
        return [*self._notes, *self.state.notes.values()]

    @property
    def selection(self) -> dict[str, Any] | None:
        """What was tried on held-out text, as JSON types; None: nothing was chosen."""
        return None

    def run(
        self, checkpoint: Checkpoint, curve_path: Path, *, progress: Progress, watch: Callable[[dict[str, Any]], None]
    ) -> None:
        """Train from the checkpoint to the end, or to Ctrl-C, which saves a checkpoint too."""
        self.state = checkpoint.restore(self._checkpointed(), self.state)
        begun = time.monotonic() - self.state.seconds
        curve = LossCurve(curve_path, self.state.step, watch)

        def settle() -> None:
            with self._no_checkpoint_inside():
                curve.flush()
                self._check_weights()
            self.state.seconds = time.monotonic() - begun

        def save() -> None:
            settle()
            checkpoint.save(self._checkpointed(), asdict(self.state))

        def train(advance: Advance) -> bool:
            try:
                with closing(self._steps(curve, advance)) as steps:
                    for _ in steps:
                        if checkpoint.is_due:
                            save()
                settle()  # without a checkpoint, which takes as long to write as many steps: the model is written next
            except TrainingDiverged as error:
                self._recover(checkpoint, curve, error)
                return False
            return True

        devices = [self._device] if self._device.type == "cuda" else []
        try:
            total = round(self._planned_epochs * self.batches.tokens)
            with torch.random.fork_rng(devices), self._compiled(), progress("training", total=total) as advance:
                self._announce(advance)
                while not train(advance):
                    pass
        except KeyboardInterrupt:
            if not self._is_torn:
                save()
            raise

    @contextmanager
    def saved_on_failure(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Save a checkpoint of the finished training if what follows it fails or is stopped."""
        try:
            yield
        except BaseException:
            with suppress(OSError, DatastoreError):  # the first error tells more
                checkpoint.save(self._checkpointed(), asdict(self.state))
            raise

    @property
    def _planned_epochs(self) -> float:
        """How many passes over the text are trained at most."""
        return self.config.epochs

    def estimate(self) -> float:
        """Return about how many seconds of training remain, from a pass over the beginning of one window."""
        batch, sparse = self._read(self.batches.steps(0, self._batch_tokens)[0], self._teacher)[0]
        begin = time.perf_counter()
        short = batch.columns(_PROBE)
        part = None if sparse is None else SparseTargets(*(tensor[: len(short.targets)] for tensor in sparse))
        self._losses(short, part, len(short.targets)).total.backward()
        seconds = time.perf_counter() - begin
        self._pass.drop_gradients()
        return seconds / short.ids.numel() * self._remaining_tokens

    @property
    def _remaining_tokens(self) -> float:
        return self._planned_epochs * self.batches.tokens - self.state.tokens

    def _announce(self, advance: Advance) -> None:
        """Show how long a training on a CPU takes about, and what would be faster."""
        if self._device.type != "cpu" or self._remaining_tokens < _MIN_PROBES * _PROBE:
            return
        with torch.random.fork_rng():
            seconds = self.estimate()
        note(advance, f"about {duration(seconds)}")
        if seconds > _LONG and not self.config.lora:
            self._say(
                f"Training all weights takes about {duration(seconds)} here. lora=16 (--lora 16) trains adapters in "
                "0.7 of the time.",
                once="long",
            )

    def _recover(self, checkpoint: Checkpoint, curve: LossCurve, error: TrainingDiverged) -> None:
        """Go back to the last checkpoint, or to the beginning, with half the learning rate; raise if it was in vain."""
        divergences, halvings = self.state.divergences + 1, self.state.halvings
        if divergences > _MAX_DIVERGENCES:
            raise error
        with self._no_checkpoint_inside():
            self._pass.drop_gradients()
            state = checkpoint.restore(self._checkpointed(), type(self.state)())
            if not checkpoint.path.exists():
                self._reset()
            state.divergences, state.halvings, state.notes = divergences, halvings, self.state.notes
            self.state = state
            curve.rewind(state.step)
        self._say(
            f"The loss was not finite at step {error.step}: the training went back to step {state.step} and on with "
            "half the learning rate.",
            once="diverged",
        )

    @torch.no_grad()
    def _reset(self) -> None:
        """Return to the initial weights, with an optimiser that has seen nothing."""
        for name, weight in self._trained.items():
            weight.copy_(self._initial[name])
        for tensor in optimiser_tensors(self._optimiser, self._trained).values():
            tensor.zero_()

    def _check_weights(self) -> None:
        """Raise if a weight is not finite, so that no checkpoint has it."""
        finite = torch.stack([weight.detach().isfinite().all() for weight in self._trained.values()]).all()
        if not finite:
            raise TrainingDiverged(self.state.step, self.config.peak_rate)

    def _say(self, text: str, *, once: str) -> None:
        """Warn of something the first time that it happens, and note it for the card."""
        if once not in self.state.notes:
            warnings.warn(text, KnnlmWarning, stacklevel=2)
            self.state.notes[once] = text

    def _compiled(self) -> AbstractContextManager[None]:
        if not (self.config.compile and self.batches.packed):
            return nullcontext()
        rows = math.ceil(self.batches.rows_per_step(self._batch_tokens) / self.config.accumulate)
        return self._pass.compiled((rows, self.batches.row_length(self._batch_tokens)))

    def _steps(self, curve: LossCurve, advance: Advance) -> Generator[int]:
        """Take all remaining steps, and evaluate on held-out text before the first and after each epoch."""
        state = self.state
        self._report(advance)
        if not state.held_out:
            state.held_out = self._evaluate(0)
        self.model.train()
        while state.epoch < self.config.epochs:
            groups = self.batches.steps(state.epoch, self._batch_tokens)[state.batch :]
            for parts in prefetch(groups, self._read_taught):
                self._step(parts, curve, self._schedule.rate_of_step(state.step, self.steps) / 2**state.divergences)
                self._report(advance)
                if curve.pending >= STEPS_PER_FLUSH or state.step == self.steps:
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

    def _report(self, advance: Advance) -> None:
        """Advance the progress bar, which does not go back where the training does."""
        advance(max(0, self.state.tokens - self._reported))
        self._reported = max(self._reported, self.state.tokens)

    def _step(self, parts: list[_Part], curve: LossCurve, rate: float) -> None:
        """Update the weights from windows that are read in several parts."""
        state = self.state
        count = sum(int((batch.targets >= 0).sum()) for batch, _ in parts)
        sums = self._in_memory(parts, lambda fitting: self._accumulate(fitting, count))
        with self._no_checkpoint_inside():
            self._update(rate)
            state.step, state.batch, state.tokens = state.step + 1, state.batch + 1, state.tokens + count
            curve.add(StepLosses(state.step, state.epoch, count, rate, sums))
        self._optimiser.zero_grad(set_to_none=True)

    def _accumulate(self, parts: Sequence[_Part], count: int) -> Tensor:
        """Compute the gradients of all parts, and return the sums of their losses."""
        torch.manual_seed((self.config.seed * 1_000_003 + self.state.step) % (1 << 63))  # of dropout
        return self._pass.gradients(parts, beta=self.config.beta, positions=count)

    def _update(self, rate: float) -> None:
        """Take a step of the optimiser."""
        if self.config.clip:
            torch.nn.utils.clip_grad_norm_(self._trained.values(), self.config.clip)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()

    def _in_memory(self, parts: Sequence[_Part], compute: Callable[[Sequence[_Part]], _Result]) -> _Result:
        """Return `compute(parts)`; where the memory is too small for that, of parts with half as many rows."""
        while True:
            try:
                return compute([own for part in parts for own in self._fitting(*part)])
            except torch.OutOfMemoryError:
                self._pass.drop_gradients()
            if not self._pass.drop_graphs():  # without their memory, it may be enough
                self._halve(parts)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _halve(self, parts: Sequence[_Part]) -> None:
        """Read half as many rows at once from now on; raise if that is less than one."""
        if max(len(batch.ids) for batch, _ in parts) <= 1 << self.state.halvings:
            batch = parts[0][0]
            sources = "" if batch.sources is None else f" with a source of {batch.sources.shape[1]:,}"
            shorter = "shorter sources" if sources else "a smaller context"
            raise ParameterError(
                f"The memory of {self._device} is too small to train on {batch.ids.shape[1]:,} tokens{sources} at "
                f"once. Use {shorter} or model."
            )
        self.state.halvings += 1
        self._say(
            f"The memory of {self._device} is too small for a step at once: it is read in smaller parts, with the "
            "same gradient.",
            once="memory",
        )

    def _fitting(self, batch: TrainingBatch, sparse: SparseTargets | None) -> Sequence[_Part]:
        rows = math.ceil(len(batch.ids) / (1 << self.state.halvings))
        return split_rows(batch, sparse, rows) if rows < len(batch.ids) else [(batch, sparse)]

    def _losses(self, batch: TrainingBatch, sparse: SparseTargets | None, count: int) -> Losses:
        return self._pass.losses(batch, sparse, beta=self.config.beta, positions=count)

    def _read(self, groups: Sequence[NDArray[np.int64]], teacher: Teacher | None) -> list[_Part]:
        """Return the windows of groups, in at least `accumulate` parts, and their targets."""
        parts = []
        for batch in self._read_rows(groups) if self.batches.packed else self._read_padded(groups):
            sparse = None if teacher is None else teacher.lookup(batch.positions)
            if self._device.type == "cuda":  # here, in the thread that reads ahead
                parts.append((batch.pin_memory(), None if sparse is None else _pinned(sparse)))
            else:
                parts.append((batch, sparse))
        return parts

    def _read_taught(self, groups: Sequence[NDArray[np.int64]]) -> list[_Part]:
        return self._read(groups, self._teacher)

    def _read_padded(self, groups: Sequence[NDArray[np.int64]]) -> list[TrainingBatch]:
        groups = self.batches.join_groups(groups, self._max_positions)
        parts_per_group = math.ceil(self.config.accumulate / len(groups))
        return [
            self.batches.read(windows)
            for group in groups
            for windows in np.array_split(group, min(parts_per_group, len(group)))
        ]

    def _read_rows(self, rows: Sequence[NDArray[np.int64]]) -> list[TrainingBatch]:
        length, whole = self.batches.row_length(self._batch_tokens), self.batches.rows_per_step(self._batch_tokens)
        # Compiled blocks and graphs are for one number of rows: what is missing is filled with rows that do not count.
        fixed = self.config.compile or self._pass.has_fixed_shape
        count = max(len(rows), whole if fixed else 0)  # more rows are evaluated at once
        batch = self.batches.read_rows(rows, length, count=count)
        size = math.ceil(count / self.config.accumulate)
        return [part for part, _ in split_rows(batch, None, size)]

    @torch.no_grad()
    def _evaluate(self, epoch: int) -> list[dict[str, Any]]:
        """Return the losses on held-out text after so many epochs; an empty list if nothing is held out."""
        windows = self.batches.held_out
        if not len(windows):
            return []
        count = count_targets(windows)
        size = self._batch_tokens
        if self.batches.packed and self._device.type == "cuda":  # many small passes would wait for Python
            size = max(size, _EVALUATED_TOKENS)
        groups = self.batches.held_out_steps(size)
        teacher = None if self.batches.is_held_out_apart else self._teacher
        self.model.eval()
        sums = [
            own
            for parts in prefetch(groups, lambda group: self._read(group, teacher))
            for own in self._in_memory(
                parts, lambda fitting: [self._sums(batch, sparse, count) for batch, sparse in fitting]
            )
        ]
        self.model.train()
        means = mean_losses(torch.stack(sums).double().sum(0).tolist(), count)
        return [{"epoch": epoch, "step": self.state.step, **means}]

    def _sums(self, batch: TrainingBatch, sparse: SparseTargets | None, count: int) -> Tensor:
        return torch.stack([loss.float() for loss in self._losses(batch, sparse, count)])

    def _checkpointed(self) -> dict[str, Tensor]:
        """Return what a checkpoint stores; dropout needs nothing, as it is seeded by the number of the step."""
        return self._tensors()

    def _tensors(self) -> dict[str, Tensor]:
        """Return the weights and the optimiser's moments."""
        weights = {f"weight.{name}": weight.detach() for name, weight in self._trained.items()}
        return weights | optimiser_tensors(self._optimiser, self._trained)


def _pinned(sparse: SparseTargets) -> SparseTargets:
    return SparseTargets(*(tensor if tensor.is_cuda else tensor.pin_memory() for tensor in sparse))


def _max_positions(model: PreTrainedModel, batch_tokens: int, device: torch.device) -> int:
    """Return how many positions, padding included, are read at once: more only on a GPU, which waits for Python."""
    if device.type != "cuda":
        return 0
    config = model.config.get_text_config()
    bytes_per_position = 40 * config.num_hidden_layers * config.hidden_size + 8 * config.vocab_size  # about
    free = torch.cuda.mem_get_info(device)[0]
    return int(min(_MAX_PADDED_POSITIONS * batch_tokens, free // (2 * bytes_per_position)))


def prefetch(items: Sequence[_Item], make: Callable[[_Item], _Result]) -> Iterator[_Result]:
    """Yield `make(item)` for each item, computing the next one in a thread while one is used."""
    with ThreadPoolExecutor(1) as pool:
        coming = [pool.submit(make, item) for item in items[:1]]
        for item in [*items[1:], None]:
            ready = coming.pop() if coming else None
            if item is not None:
                coming.append(pool.submit(make, item))
            if ready is not None:
                yield ready.result()
