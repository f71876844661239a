"""The configuration and the steps of a decoder's training, from a checkpoint to the end.

What a step does depends only on the seed and its number, so a killed run resumes from its checkpoint. The host waits
for the device once per forward pass, in transformers' check for a mask, and every few steps for the losses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from knnlm.lm.causal import dynamic_shape_attention
from knnlm.lm.windows import WindowShape
from knnlm.progress import Advance, Progress, note
from knnlm.training.data import TokenStream, TrainingBatch, TrainingBatches, count_targets, join_groups
from knnlm.training.initial_model import InitialModel
from knnlm.training.teacher import SparseTargets, Teacher
from knnlm.training.trainer import (
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
    distillation_loss,
    make_adamw,
    mean_losses,
    optimiser_tensors,
)

PRECISIONS = ("auto", "float32", "bfloat16")
SELECTED_FACTORS = (1.0, 0.5, 2.0)
STEPS_PER_FLUSH = 20  # between two reads of the losses from the device

_MIN_STEPS = 300  # if the text is long enough
_MIN_BATCH_TOKENS, _MAX_BATCH_TOKENS = 2_048, 16_384  # of the default batch size
_MAX_PADDED_POSITIONS = 4  # per token on a GPU, where fewer passes are worth more padding

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
    select: bool = False  # learning rate and epochs on held-out text, at most `epochs`
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
    def learning_rates(self) -> list[float]:
        """The rates that a selection tries: half of the configured one, itself and twice."""
        return [factor * self.learning_rate for factor in SELECTED_FACTORS]

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


@dataclass
class DecoderState(TrainState):
    """Position of a training, and the losses on held-out text so far."""

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
        self.model, self.batches, self.config, self.state = model, batches, config, DecoderState()
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

    @property
    def selection(self) -> dict[str, Any] | None:
        """What was tried on held-out text, as JSON types; None: nothing was chosen."""
        return None

    def run(
        self, checkpoint: Checkpoint, curve_path: Path, *, progress: Progress, watch: Callable[[dict[str, Any]], None]
    ) -> None:
        """Train from the checkpoint to the end, or to Ctrl-C, which saves a checkpoint too."""
        self.state = state = checkpoint.restore(self._checkpointed(), self.state)
        begun = time.monotonic() - state.seconds
        curve = LossCurve(curve_path, state.step, watch)

        def save() -> None:
            with self._no_checkpoint_inside():
                curve.flush()
            state.seconds = time.monotonic() - begun
            checkpoint.save(self._checkpointed(), asdict(state))

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
            for parts in prefetch(groups, self._read):
                advance(self._step(parts, curve, self._schedule.rate_of_step(state.step, self.steps)))
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

    def _step(self, parts: list[_Part], curve: LossCurve, rate: float) -> int:
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
            for parts in prefetch(groups, self._read)
            for batch, sparse in parts
        ]
        self.model.train()
        means = mean_losses(torch.stack(sums).double().sum(0).tolist(), count)
        return [{"epoch": epoch, "step": self.state.step, **means}]

    def _checkpointed(self) -> dict[str, Tensor]:
        """Return what a checkpoint stores; dropout needs nothing, as it is seeded by the number of the step."""
        return self._tensors()

    def _tensors(self) -> dict[str, Tensor]:
        """Return the weights and the optimiser's moments."""
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
