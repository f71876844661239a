"""Train a student: steps, checkpoints, the curve of losses. Knows nothing about folders of models, or how it is used.

What a step does follows from the seed and its number, so a run that was killed goes on from its checkpoint and, on a
CPU, ends with the same numbers. Nothing on the host waits for the device but the curve, which looks every few steps.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from knnlm.datastore.segment import writing
from knnlm.distill.loss import Losses, distillation_loss
from knnlm.distill.retrieval import Sparse
from knnlm.distill.settings import check_same
from knnlm.distill.text import Batch, Lessons
from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.memory.output import load_tensors, save_tensors
from knnlm.progress import Progress, note

CHECKPOINT, CURVE = "checkpoint.safetensors", "losses.jsonl"
SCHEDULES = ("linear", "cosine")
PRECISIONS = ("float32", "bfloat16")
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
class Settings:
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
        left = (steps - step) / max(1, steps - warm)
        return self.learning_rate * (left if self.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)


@dataclass
class Course:
    """How far a training is."""

    epoch: int = 0
    batch: int = 0  # within the epoch
    step: int = 0
    tokens: int = 0  # that were trained on, in all epochs
    seconds: float = 0.0
    held_out: list[dict[str, Any]] = field(default_factory=list)  # before, and after each epoch


class Training:
    """A student, its optimiser, and how far they are."""

    def __init__(
        self,
        model: PreTrainedModel,
        lessons: Lessons,
        teacher: Teacher | None,
        settings: Settings,
        *,
        facts: dict[str, Any],
        device: torch.device,
    ) -> None:
        self.model, self.settings, self.course = model, settings, Course()
        self._lessons, self._teacher, self.facts, self._device = lessons, teacher, facts, device
        self._trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        matrices = [weight for weight in self._trained.values() if weight.dim() > 1]
        others = [weight for weight in self._trained.values() if weight.dim() <= 1]
        # Norms and biases are not drawn towards 0.
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
        fused = device.type in ("cpu", "cuda")
        self._optimiser = torch.optim.AdamW([group for group in groups if group["params"]], fused=fused)
        for (
            weight
        ) in self._trained.values():  # here rather than at the first step, so that a checkpoint can be put there
            self._optimiser.state[weight] = {
                "step": torch.zeros((), device=device if fused else "cpu"),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
        self.steps = settings.epochs * len(lessons.batches(0, settings.batch_tokens))

    def run(self, folder: Path, *, every: float, progress: Progress, watch: Callable[[dict[str, Any]], None]) -> None:
        """Train to the end; `watch` is told each line of the curve."""
        course, settings = self.course, self.settings
        tokens = self._lessons.positions(self._lessons.training)
        begun, saved = time.monotonic() - course.seconds, time.monotonic()
        curve = _Curve(folder / CURVE, course, watch)
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), progress("training", total=settings.epochs * tokens) as advance:
            advance(course.tokens)
            if not course.held_out:
                self._look()
            while course.epoch < settings.epochs:
                packed = self._lessons.batches(course.epoch, settings.batch_tokens)[course.batch :]
                for numbers, parts in zip(packed, _ahead(packed, self._read), strict=True):
                    curve.add(self._step(numbers, parts))
                    advance(curve.tokens)
                    if curve.waiting >= _LOOK or course.step == self.steps:
                        note(advance, f"loss {curve.write():.3f}")
                    if time.monotonic() - saved >= every:
                        curve.write()
                        course.seconds = time.monotonic() - begun
                        self._save(folder / CHECKPOINT)
                        saved = time.monotonic()
                course.epoch, course.batch = course.epoch + 1, 0
                self._look()
        course.seconds = time.monotonic() - begun

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint, where there is one."""
        path = folder / CHECKPOINT
        if not path.exists():
            return
        tensors, facts = load_tensors(path)
        check_same(path, facts.get("settings"), self.facts)
        try:
            self.course = Course(**facts["course"])
            for name, tensor in self._tensors().items():
                if tensors[name].shape != tensor.shape:
                    raise ValueError(f"{name} is {tuple(tensors[name].shape)} instead of {tuple(tensor.shape)}")
                tensor.copy_(tensors[name])
        except (KeyError, TypeError, ValueError) as error:
            raise DatastoreCorrupt(f"{path} is no checkpoint of this training ({error}). Remove it.") from None

    def _step(self, numbers: NDArray[np.int64], parts: list[tuple[Batch, Sparse | None]]) -> tuple[Any, ...]:
        """Move the weights once by a batch, which is read in several parts; give what the curve is to tell."""
        course, settings = self.course, self.settings
        torch.manual_seed((settings.seed * 1_000_003 + course.step) % (1 << 63))  # dropout
        positions = self._lessons.positions(numbers)
        self.model.train()
        found = []
        for batch, sparse in parts:
            losses = self._losses(batch, sparse, positions)
            losses.total.backward()
            found.append(torch.stack([part.detach().float() for part in losses]))
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(self._trained.values(), settings.clip)
        pace = settings.pace(course.step, self.steps)
        for group in self._optimiser.param_groups:
            group["lr"] = pace
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        course.step, course.batch, course.tokens = course.step + 1, course.batch + 1, course.tokens + positions
        return course.step, course.epoch, positions, pace, torch.stack(found).sum(0)

    def _losses(self, batch: Batch, sparse: Sparse | None, positions: int) -> Losses:
        """Read windows, and compare what is said with what was to be said."""
        read, targets = self._bring(batch.ids), self._bring(batch.targets)
        ids, probs = (None, None) if sparse is None else (self._bring(sparse.ids), self._bring(sparse.probs))
        half = self.settings.precision == "bfloat16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=half):
            # Padding is on the right, so no mask is needed, and attention may take its fastest way.
            logits = self.model(input_ids=read, use_cache=False).logits  # (B, T, V)
        beta = self.settings.beta
        return distillation_loss(logits.flatten(0, 1), targets, ids, probs, beta, positions=positions)

    def _read(self, numbers: NDArray[np.int64]) -> list[tuple[Batch, Sparse | None]]:
        """Read a batch of windows in its parts, and what retrieval says there."""
        made = []
        for part in np.array_split(numbers, min(self.settings.accumulate, len(numbers))):
            batch = self._lessons.read(part)
            made.append((batch, None if self._teacher is None else self._teacher.of(batch.rows)))
        return made

    def _bring(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cuda" and not tensor.is_cuda:
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    @torch.no_grad()
    def _look(self) -> None:
        """Measure the student on what is held out."""
        numbers = self._lessons.held_out
        if not len(numbers):
            return
        self.model.eval()
        positions = self._lessons.positions(numbers)
        found = [
            torch.stack([loss.float() for loss in self._losses(batch, sparse, positions)])
            for batches in _ahead(self._lessons.held_out_batches(self.settings.batch_tokens), self._read)
            for batch, sparse in batches
        ]
        figures = _figures(torch.stack(found).double().sum(0).tolist(), positions)
        self.course.held_out.append({"epoch": self.course.epoch, "step": self.course.step, **figures})

    def _save(self, path: Path) -> None:
        save_tensors(path, self._tensors(), {"settings": self.facts, "course": asdict(self.course)})

    def _tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds; what dropout draws follows from the number of the step."""
        made = {f"weight.{name}": weight.detach() for name, weight in self._trained.items()}
        for name, weight in self._trained.items():
            made |= {f"{what}.{name}": tensor for what, tensor in self._optimiser.state[weight].items()}
        return made


class _Curve:
    """The losses of every step, read from the device now and then and written as lines of JSON."""

    def __init__(self, path: Path, course: Course, watch: Callable[[dict[str, Any]], None]) -> None:
        self._path, self._watch = path, watch
        self._put([line for line in read_curve(path) if line["step"] <= course.step], mode="w")
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
        for (step, epoch, positions, pace, _), sums in zip(self._waiting, seen, strict=True):
            figures = _figures(sums, positions)
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
        with writing(self._path), self._path.open(mode, encoding="utf-8") as file:
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


def _figures(sums: Sequence[float], positions: int) -> dict[str, Any]:
    """Turn sums into means: over all positions, for KL over those with a target."""
    total, kl, ce, answered = sums
    return {"loss": total, "kl": kl / answered if answered else None, "ce": ce / positions}


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
