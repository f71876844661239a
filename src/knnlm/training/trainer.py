"""Go on with a training from what was last saved of it. Knows nothing about what is trained.

Draw how the losses of a training fell, as a PNG picture. Knows nothing about the training.

The loss of a student: β·KL(p_kNN ‖ p_student) + (1-β)·CE. Knows nothing about models or stores.

Both gradients are the student's softmax less what it should be, so one pass over the logits gives both. It goes over a
few rows at a time: beside the logits and their gradient, no (N, V) tensor is made.

Train a student: steps, checkpoints, the curve of losses. Knows nothing about folders of models, or how it is used.

What a step does follows from the seed and its number, so a run that was killed goes on from its checkpoint and, on a
CPU, ends with the same numbers. The host waits for the device once a forward pass, where transformers looks whether a
mask is needed, and where the curve looks at the losses, every few steps.
"""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from knnlm.errors import DatastoreCorrupt, MissingExtra, ParameterError
from knnlm.io import translate_os_errors
from knnlm.lm.causal import dynamic_shape_attention
from knnlm.memories.output import load_tensors, save_tensors
from knnlm.progress import Progress, note
from knnlm.training.data import TrainingBatch, TrainingBatches, join_groups, positions
from knnlm.training.output_config import check_same
from knnlm.training.teacher import Sparse

_Restorable = TypeVar("_Restorable")


def restore(
    path: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], course: Callable[..., _Restorable]
) -> _Restorable | None:
    """Put what was saved into these tensors and give how far it was, None where nothing was saved."""
    if not path.exists():
        return None
    saved, facts = load_tensors(path)
    check_same(path, facts.get("settings"), settings)
    try:
        found = course(**facts["course"])
        for name, tensor in tensors.items():
            if saved[name].shape != tensor.shape:
                raise ValueError(f"{name} is {tuple(saved[name].shape)} instead of {tuple(tensor.shape)}")
            tensor.copy_(saved[name])
    except (KeyError, TypeError, ValueError) as error:
        raise DatastoreCorrupt(f"{path} is no checkpoint of this training ({error}). Remove it.") from None
    return found


_KINDS = {"loss": "#1f6feb", "kl": "#d9480f", "ce": "#2b8a3e"}


def draw_curve(lines: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]] = ()) -> bytes:
    """Draw the losses of every step, and as dots those of what is held out."""
    if find_spec("matplotlib") is None:
        raise MissingExtra("A learning curve", "matplotlib", "report")
    from matplotlib.figure import Figure

    # By hand and not through pyplot, so nothing of a caller's own plots is touched and no window opens.
    figure = Figure(figsize=(6.4, 3.5), dpi=160, layout="constrained", facecolor="#ffffff")
    axes = figure.add_subplot()
    for kind, colour in _KINDS.items():
        some = [line for line in lines if line.get(kind) is not None]
        if some and (kind == "loss" or any(line[kind] != line["loss"] for line in some)):
            axes.plot([line["step"] for line in some], [line[kind] for line in some], color=colour, lw=1, label=kind)
        dots = [line for line in held_out if line.get(kind) is not None]
        if some and dots:
            label = "held out" if kind == "loss" else None
            axes.plot([line["step"] for line in dots], [line[kind] for line in dots], "o", color=colour, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("nats a token")
    axes.grid(color="#e4e7ec")
    axes.legend(frameon=False)
    file = io.BytesIO()
    # Without the date and the version, the same numbers give the same bytes.
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


_ELEMENTS = 1 << 26  # logits that are looked at together: 256 MB in float32


class Losses(NamedTuple):
    """What a batch lost, in nats."""

    total: Tensor  # the sum over its positions, divided by `positions`; the only one with a gradient
    kl: Tensor  # the sum over positions with a target
    ce: Tensor  # the sum over all positions that count
    answered: Tensor  # how many positions have a target


def distillation_loss(
    logits: Tensor,
    targets: Tensor,
    ids: Tensor | None = None,
    probs: Tensor | None = None,
    beta: float = 0.0,
    *,
    positions: int | None = None,
    rows: int | None = None,
) -> Losses:
    """Compare (N, V) logits with (N,) next tokens and the (N, m) tokens and probabilities that retrieval gives.

    A target below 0 does not count. A row without probabilities has the cross-entropy alone. `positions` is what the
    sum is divided by, where the batch is part of a larger one; `rows` is how many are looked at together.
    """
    if ids is None or probs is None or not beta:
        ids, probs, beta = targets.new_zeros(len(targets), 0), logits.new_zeros(len(targets), 0), 0.0
    divisor = (targets >= 0).sum().clamp(min=1) if positions is None else torch.tensor(positions)
    rows = rows or max(1, _ELEMENTS // max(1, logits.shape[1]))
    parts = _Distillation.apply(logits, targets, ids, probs, beta, divisor, rows)  # type: ignore[no-untyped-call]
    return Losses(*parts)


class _Distillation(torch.autograd.Function):
    """The sum and its gradient, some rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ids: Tensor, probs: Tensor, beta: float, divisor: Tensor, rows: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exact = _exact(logits)
        normaliser = torch.empty(len(logits), dtype=exact, device=logits.device)
        kl, ce = torch.zeros_like(normaliser), torch.zeros_like(normaliser)
        wanted = probs.to(exact)
        for part in _parts(len(logits), rows):
            scores = logits[part].to(exact)  # (n, V)
            normaliser[part] = scores.logsumexp(1)
            ce[part] = normaliser[part] - scores.gather(1, targets[part].clamp(min=0)[:, None])[:, 0]
            log_q = scores.gather(1, ids[part]) - normaliser[part][:, None]
            # Where p is 0 the product is 0, also where q is.
            cross = (wanted[part] * log_q).masked_fill(wanted[part] == 0, 0.0)
            kl[part] = (torch.xlogy(wanted[part], wanted[part]) - cross).sum(1)
        counted = targets >= 0
        answered = counted & (probs > 0).any(1)
        kl, ce = kl.masked_fill(~answered, 0.0), ce.masked_fill(~counted, 0.0)
        share = beta * answered.to(exact)
        total = (share * kl + (1 - share) * ce).sum() / divisor
        ctx.save_for_backward(logits, targets, ids, wanted, normaliser, share, divisor)
        ctx.rows = rows
        out = total, kl.sum(), ce.sum(), answered.sum()
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, ids, wanted, normaliser, share, divisor = ctx.saved_tensors
        weight = (targets >= 0) * (outer.to(wanted.dtype) / divisor)  # (N,)
        gradient = torch.empty_like(logits)
        for part in _parts(len(logits), ctx.rows):
            own, kl, ce = weight[part], share[part] * weight[part], (1 - share[part]) * weight[part]
            scores = (logits[part].to(wanted.dtype) - normaliser[part][:, None]).exp_()
            scores *= (own + kl * (wanted[part].sum(1) - 1))[:, None]
            scores.scatter_add_(1, ids[part], -kl[:, None] * wanted[part])
            scores.scatter_add_(1, targets[part].clamp(min=0)[:, None], -ce[:, None])
            gradient[part] = scores
        return gradient, None, None, None, None, None, None


def _parts(count: int, rows: int) -> Iterator[slice]:
    return (slice(begin, begin + rows) for begin in range(0, count, rows))


def _exact(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


CHECKPOINT, CURVE = "checkpoint.safetensors", "losses.jsonl"

SCHEDULES = ("linear", "cosine")

PRECISIONS = ("float32", "bfloat16")

_PADDING = 4  # positions that a GPU reads at most for each token, if that makes fewer passes

_LOOK = 20  # steps between two looks at the losses

_Given = TypeVar("_Given")

_Made = TypeVar("_Made")


class Teacher(Protocol):
    """Whoever says what retrieval would: `Targets` from disk, or `Retrieval` on the fly."""

    @property
    def rows(self) -> int: ...
    @property
    def facts(self) -> dict[str, Any]: ...
    def of(self, rows: Tensor) -> Sparse:
        """Give the targets of (n,) rows; a row below 0 has none."""


@dataclass(frozen=True)
class TrainerConfig:
    """All that the result depends on besides the text, the student and the targets."""

    beta: float
    epochs: int
    batch_tokens: int
    learning_rate: float
    warm_up: float
    schedule: str
    weight_decay: float
    clip: float
    accumulate: int
    precision: str
    held_out: float
    context: int
    stride: int
    seed: int

    def __post_init__(self) -> None:
        for name, known in {"schedule": SCHEDULES, "precision": PRECISIONS}.items():
            if getattr(self, name) not in known:
                raise ParameterError(f"Unknown {name} {getattr(self, name)!r}: use {' or '.join(known)}.")
        for name, least in {"epochs": 1, "batch_tokens": 1, "accumulate": 1, "seed": 0}.items():
            if getattr(self, name) < least:
                raise ParameterError(f"{name} must be at least {least}, not {getattr(self, name)}.")
        for name, most in {"beta": 1.0, "warm_up": 1.0, "held_out": 0.5}.items():
            if not 0 <= getattr(self, name) <= most:
                raise ParameterError(f"{name} must be from 0 to {most:g}, not {getattr(self, name)}.")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ParameterError(f"learning_rate must be above 0, not {self.learning_rate}.")
        for name in ("weight_decay", "clip"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ParameterError(f"{name} must not be below 0, and not {getattr(self, name)}.")

    def pace(self, step: int, steps: int) -> float:
        """Give the learning rate of a step, counted from 0: up to the full one, then down to nearly 0."""
        warm = math.ceil(self.warm_up * steps)
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        left = (steps - step) / (steps - max(1, warm) + 1)  # the last step of the warm-up has had the full one
        return self.learning_rate * (left if self.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)


@dataclass
class TrainState:
    """How far a training is."""

    epoch: int = 0
    batch: int = 0  # within the epoch
    step: int = 0
    tokens: int = 0  # that were trained on, in all epochs
    seconds: float = 0.0
    held_out: list[dict[str, Any]] = field(default_factory=list)  # before, and after each epoch


class DecoderTrainer:
    """A student, its optimiser, and how far they are."""

    def __init__(
        self,
        model: PreTrainedModel,
        lessons: TrainingBatches,
        teacher: Teacher | None,
        settings: TrainerConfig,
        *,
        facts: dict[str, Any],
        device: torch.device,
    ) -> None:
        self.model, self.settings, self.course = model, settings, TrainState()
        self._lessons, self._teacher, self.facts, self._device = lessons, teacher, facts, device
        self._trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        matrices = [weight for weight in self._trained.values() if weight.dim() > 1]
        others = [weight for weight in self._trained.values() if weight.dim() <= 1]
        # Norms and biases are not drawn towards 0.
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
        fused = device.type in ("cpu", "cuda")
        self._optimiser = torch.optim.AdamW([group for group in groups if group["params"]], fused=fused)
        # Here rather than at the first step, so that a checkpoint can be put there.
        for weight in self._trained.values():
            self._optimiser.state[weight] = {
                "step": torch.zeros((), device=device if fused else "cpu"),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
        # Where documents are cut is another in each epoch, and so may be the number of steps.
        self.steps = sum(len(lessons.steps(epoch, settings.batch_tokens)) for epoch in range(settings.epochs))
        self._room = _room(model, settings.batch_tokens, device)
        self._torn = False

    def run(self, folder: Path, *, every: float, progress: Progress, watch: Callable[[dict[str, Any]], None]) -> None:
        """Train to the end, or to Ctrl-C, and keep a checkpoint of it; `watch` is told each line of the curve."""
        course, path = self.course, folder / CHECKPOINT
        begun = time.monotonic() - course.seconds
        curve = _Curve(folder / CURVE, course, watch)
        saved = time.monotonic()

        def save() -> None:
            nonlocal saved
            with self._unbroken():
                curve.write()
            course.seconds = time.monotonic() - begun
            save_tensors(path, self._tensors(), {"settings": self.facts, "course": asdict(course)})
            saved = time.monotonic()

        devices = [self._device] if self._device.type == "cuda" else []
        try:
            total = self.settings.epochs * self._lessons.tokens
            with torch.random.fork_rng(devices), progress("training", total=total) as advance:
                for _ in self._steps(curve, advance):
                    if time.monotonic() - saved >= every:
                        save()
            save()
        except KeyboardInterrupt:
            if not self._torn:
                save()
            raise

    def _steps(self, curve: _Curve, advance: Callable[[int], None]) -> Iterator[int]:
        """Take one step after another, and look at what is held out before the first and after each epoch."""
        course, settings = self.course, self.settings
        advance(course.tokens)
        if not course.held_out:
            course.held_out = self._look(0)
        self.model.train()
        while course.epoch < settings.epochs:
            groups = self._lessons.steps(course.epoch, settings.batch_tokens)[course.batch :]
            for parts in _ahead(groups, self._read):
                self._step(parts, curve)
                advance(curve.tokens)
                if curve.waiting >= _LOOK or course.step == self.steps:
                    with self._unbroken():
                        loss = curve.write()
                    note(advance, f"loss {loss:.3f}")
                yield course.step
            seen = self._look(course.epoch + 1)
            with self._unbroken():
                course.held_out += seen
                course.epoch, course.batch = course.epoch + 1, 0

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint, where there is one."""
        self.course = restore(folder / CHECKPOINT, self.facts, self._tensors(), TrainState) or self.course

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Do what leaves nothing to go on from where Ctrl-C breaks it."""
        self._torn = True
        yield
        self._torn = False

    def _step(self, parts: list[tuple[TrainingBatch, Sparse | None]], curve: _Curve) -> None:
        """Move the weights once by windows that are read in several parts, and tell the curve."""
        course, settings = self.course, self.settings
        torch.manual_seed((settings.seed * 1_000_003 + course.step) % (1 << 63))  # dropout
        count = sum(int((batch.targets >= 0).sum()) for batch, _ in parts)
        found = []
        for batch, sparse in parts:
            losses = self._losses(batch, sparse, count)
            losses.total.backward()
            found.append(torch.stack([part.detach().float() for part in losses]))
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(self._trained.values(), settings.clip)
        pace = settings.pace(course.step, self.steps)
        for group in self._optimiser.param_groups:
            group["lr"] = pace
        with self._unbroken():
            self._optimiser.step()
            course.step, course.batch, course.tokens = course.step + 1, course.batch + 1, course.tokens + count
            curve.add((course.step, course.epoch, count, pace, torch.stack(found).sum(0)))
        self._optimiser.zero_grad(set_to_none=True)

    def _losses(self, batch: TrainingBatch, sparse: Sparse | None, count: int) -> Losses:
        """Read windows, and compare what is said with what was to be said."""
        read, targets = self._bring(batch.ids), self._bring(batch.targets)
        ids, probs = (None, None) if sparse is None else (self._bring(sparse.ids), self._bring(sparse.probs))
        half = self.settings.precision == "bfloat16"
        with dynamic_shape_attention(self._device), torch.autocast(self._device.type, torch.bfloat16, enabled=half):
            # Padding is on the right, so no mask is needed, and attention may take its fastest way.
            logits = self.model(input_ids=read, use_cache=False).logits  # (B, T, V)
        beta = self.settings.beta
        return distillation_loss(logits.flatten(0, 1), targets, ids, probs, beta, positions=count)

    def _read(self, groups: Sequence[NDArray[np.int64]]) -> list[tuple[TrainingBatch, Sparse | None]]:
        """Read groups of windows, cut into parts where more are wanted, and what retrieval says there."""
        groups = join_groups(groups, self._room)
        each = math.ceil(self.settings.accumulate / len(groups))
        made = []
        for group in groups:
            for part in np.array_split(group, min(each, len(group))):
                batch = self._lessons.read(part)
                made.append((batch, None if self._teacher is None else self._teacher.of(batch.rows)))
        return made

    def _bring(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cuda" and not tensor.is_cuda:
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    @torch.no_grad()
    def _look(self, epoch: int) -> list[dict[str, Any]]:
        """Measure the student, after so many epochs, on what is held out, if anything is."""
        windows = self._lessons.held_out
        if not len(windows):
            return []
        count = positions(windows)
        groups = [[group] for group in self._lessons.held_out_groups(self.settings.batch_tokens)]
        self.model.eval()
        found = [
            torch.stack([loss.float() for loss in self._losses(batch, sparse, count)])
            for parts in _ahead(groups, self._read)
            for batch, sparse in parts
        ]
        self.model.train()
        figures = _figures(torch.stack(found).double().sum(0).tolist(), count)
        return [{"epoch": epoch, "step": self.course.step, **figures}]

    def _tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds; what dropout draws follows from the number of the step."""
        made = {f"weight.{name}": weight.detach() for name, weight in self._trained.items()}
        for name, weight in self._trained.items():
            made |= {f"{what}.{name}": tensor for what, tensor in self._optimiser.state[weight].items()}
        return made


class _Curve:
    """The losses of every step, read from the device now and then and written as lines of JSON."""

    def __init__(self, path: Path, course: TrainState, watch: Callable[[dict[str, Any]], None]) -> None:
        self._path, self._watch = path, watch
        known = [line for line in read_curve(path) if line["step"] <= course.step]
        self._put(known, mode="w")
        for line in known:
            watch(line)
        self._waiting: list[tuple[Any, ...]] = []
        self._since = time.monotonic()
        self._loss = math.nan
        self.tokens = 0  # of the last step

    @property
    def waiting(self) -> int:
        """How many steps are not yet written."""
        return len(self._waiting)

    def add(self, step: tuple[Any, ...]) -> None:
        """Take what a step gave."""
        self._waiting.append(step)
        self.tokens = step[2]

    def write(self) -> float:
        """Look at the losses since the last look, write them down, and give their mean."""
        if not self._waiting:
            return self._loss
        seen = torch.stack([step[4] for step in self._waiting]).double().tolist()
        speed = sum(step[2] for step in self._waiting) / max(1e-9, time.monotonic() - self._since)
        lines = []
        for (step, epoch, count, pace, _), sums in zip(self._waiting, seen, strict=True):
            figures = _figures(sums, count)
            lines.append({"step": step, "epoch": epoch, **figures, "learning_rate": pace, "tokens_per_second": speed})
            if not math.isfinite(figures["loss"] or 0.0):
                raise ParameterError(
                    f"The training diverged at step {step}: the loss is no number any more. Use a smaller "
                    f"learning_rate, which was {pace:g} there."
                )
        self._put(lines)
        for line in lines:
            self._watch(line)
        self._waiting, self._since = [], time.monotonic()
        self._loss = sum(line["loss"] for line in lines) / len(lines)
        return self._loss

    def _put(self, lines: Sequence[dict[str, Any]], *, mode: str = "a") -> None:
        with translate_os_errors(self._path), self._path.open(mode, encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())


def read_curve(path: Path) -> list[dict[str, Any]]:
    """Read the losses of every step; a line that was cut short, and what is behind it, is left out."""
    found: list[dict[str, Any]] = []
    if not path.exists():
        return found
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            facts = json.loads(line)
        except ValueError:
            break
        if not isinstance(facts, dict) or not isinstance(facts.get("step"), int):
            break
        found.append(facts)
    return found


def _room(model: PreTrainedModel, batch_tokens: int, device: torch.device) -> int:
    """Say how many positions are read together, padding too: a GPU waits for Python, a CPU for its arithmetic."""
    if device.type != "cuda":
        return 0
    config = model.config.get_text_config()
    kept = 40 * config.num_hidden_layers * config.hidden_size + 8 * config.vocab_size  # bytes a position, about
    return int(min(_PADDING * batch_tokens, torch.cuda.mem_get_info(device)[0] // (2 * kept)))


def _figures(sums: Sequence[float], count: int) -> dict[str, Any]:
    """Turn sums into means: over all positions, for KL over those with a target."""
    total, kl, ce, answered = sums
    return {"loss": total, "kl": kl / answered if answered else None, "ce": ce / count}


def _ahead(given: Sequence[_Given], make: Callable[[_Given], _Made]) -> Iterator[_Made]:
    """Make one after another, the next one while one is used."""
    with ThreadPoolExecutor(1) as pool:
        coming = [pool.submit(make, item) for item in given[:1]]
        for item in [*given[1:], None]:
            ready = coming.pop() if coming else None
            if item is not None:
                coming.append(pool.submit(make, item))
            if ready is not None:
                yield ready.result()
