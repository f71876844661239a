"""What the training of output matrices, key maps and decoders shares.

The learning-rate schedule, the choice of held-out text, the best parameters so far, checkpoints, the loss curve and the
distillation loss. A run that was killed resumes from its checkpoint and, on a CPU, ends with the same numbers.
"""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from knnlm.errors import DatastoreCorrupt, DatastoreError, MissingExtra, ParameterError
from knnlm.io import translate_os_errors
from knnlm.memories.output import load_tensors, save_tensors

CHECKPOINT, CURVE = "checkpoint.safetensors", "losses.jsonl"
SCHEDULES = ("linear", "cosine")
MIN_DOCUMENTS = 16  # with fewer distinct documents, parts of documents are held out instead of whole ones
_CURVE_COLOURS = {"loss": "#1f6feb", "kl": "#d9480f", "ce": "#2b8a3e"}
MAX_LOGITS = 1 << 26  # processed at a time: 256 MB in float32


@dataclass
class TrainState:
    """Position of a training run, as its checkpoint stores it."""

    epoch: int = 0
    batch: int = 0  # within the epoch
    step: int = 0
    tokens: int = 0  # trained on so far, over all epochs
    seconds: float = 0.0


_State = TypeVar("_State", bound=TrainState)


@dataclass(frozen=True)
class Schedule:
    """Learning rate of each step: a linear warm-up, then a linear or cosine decay to nearly 0."""

    learning_rate: float
    warm_up: int  # steps
    decay: str = "linear"

    def rate(self, step: int, remaining: float) -> float:
        """Return the learning rate of a step, counted from 0, with this fraction of the decay remaining."""
        warm = min(1.0, (step + 1) / self.warm_up) if self.warm_up else 1.0
        shape = remaining if self.decay == "linear" else (1 - math.cos(math.pi * remaining)) / 2
        return self.learning_rate * warm * shape

    def rate_of_step(self, step: int, steps: int) -> float:
        """Return the learning rate of a step when the decay begins after the warm-up and ends after `steps` steps."""
        if step < self.warm_up:
            return self.rate(step, 1.0)
        return self.rate(step, (steps - step) / (steps - max(1, self.warm_up) + 1))


def select_held_out(
    sizes: Iterable[int], wanted: float, *, max_size: float = math.inf, max_total: float = math.inf
) -> list[int]:
    """Return the numbers of the first groups that together have at least `wanted` tokens.

    Groups larger than `max_size`, and those that would raise the total above `max_total`, are skipped. The caller
    orders the groups by a hash or a seeded permutation, with all copies of a text in one group.
    """
    chosen: list[int] = []
    total = 0
    for number, size in enumerate(sizes):
        if total >= wanted:
            break
        if size <= max_size and total + size <= max_total:
            chosen.append(number)
            total += size
    return chosen


class BestParameters:
    """Copies of the parameters with the lowest held-out loss so far."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.tensors = {name: tensor.detach().clone() for name, tensor in parameters.items()}

    def update(self, parameters: Mapping[str, Tensor], loss: float | None, best: float | None) -> bool:
        """Copy the parameters if their loss is below the best one, and return whether it is.

        A loss of None means that nothing is held out: the latest parameters are the best.
        """
        if loss is not None and best is not None and not loss < best:
            return False
        for name, tensor in parameters.items():
            self.tensors[name].copy_(tensor.detach())
        return True


class Checkpoint:
    """A file with the tensors and the state of an unfinished run, written atomically, valid for the same settings."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, every: float = math.inf) -> None:
        self.path, self._settings, self._every = path, settings, every
        self._saved = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether `every` seconds have passed since the last save."""
        return time.monotonic() - self._saved >= self._every

    def save(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Replace the file."""
        save_tensors(self.path, tensors, {"settings": dict(self._settings), "state": dict(state)})
        self._saved = time.monotonic()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the saved tensors and state, None if there is no file. Raise if the settings differ."""
        if not self.path.exists():
            return None
        tensors, metadata = load_tensors(self.path)
        check_same_settings(self.path, metadata.get("settings"), self._settings)
        state = metadata.get("state")
        return tensors, state if isinstance(state, dict) else {}

    def restore(self, tensors: Mapping[str, Tensor], state: _State) -> _State:
        """Copy the saved tensors into these and return the saved state; without a file, return `state` unchanged."""
        saved = self.load()
        if saved is None:
            return state
        try:
            restored = type(state)(**saved[1])
            for name, tensor in tensors.items():
                if saved[0][name].shape != tensor.shape:
                    raise ValueError(f"{name} is {tuple(saved[0][name].shape)} instead of {tuple(tensor.shape)}")
                tensor.copy_(saved[0][name])
        except (KeyError, TypeError, ValueError) as error:
            raise DatastoreCorrupt(f"{self.path}: not a checkpoint of this training ({error}). Remove it.") from None
        return restored


def output_folder(out: str | Path) -> Path:
    """Return the folder to train into. Raise if it is a file."""
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise DatastoreError(f"{folder} is a file. Choose another --out.")
    return folder


def check_same_settings(path: Path, found: Any, wanted: Mapping[str, Any]) -> None:
    """Raise if what is stored at `path` was trained with other settings."""
    found = found if isinstance(found, dict) else {}
    for name, value in wanted.items():
        if found.get(name) != value:
            raise DatastoreError(
                f"{path}: trained with another {name.replace('_', ' ')} ({found.get(name)}, now {value}). Use the same "
                "text and settings, choose another --out, or remove it."
            )


def make_adamw(groups: Sequence[dict[str, Any]], device: torch.device) -> torch.optim.AdamW:
    """Return AdamW whose moments exist before the first step, so that a checkpoint can be copied into them."""
    fused = device.type in ("cpu", "cuda")
    optimiser = torch.optim.AdamW([group for group in groups if group["params"]], fused=fused)
    for group in optimiser.param_groups:
        for tensor in group["params"]:
            optimiser.state[tensor] = {
                "step": torch.zeros((), device=device if fused else "cpu"),
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.zeros_like(tensor),
            }
    return optimiser


def optimiser_tensors(optimiser: torch.optim.AdamW, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimiser's moments under the names of the parameters."""
    return {
        f"{kind}.{name}": tensor
        for name, parameter in parameters.items()
        for kind, tensor in optimiser.state[parameter].items()
    }


class TrainingDiverged(ParameterError):
    """A loss is not finite."""

    def __init__(self, step: int, learning_rate: float) -> None:
        super().__init__(
            f"The training diverged at step {step}: the loss is not finite. Use a smaller learning_rate than "
            f"{learning_rate:g}."
        )
        self.step = step


def check_finite(loss: float | None, *, step: int, learning_rate: float) -> None:
    """Raise if the training diverged."""
    if loss is not None and not math.isfinite(loss):
        raise TrainingDiverged(step, learning_rate)


def check_choices(config: Any, choices: Mapping[str, Sequence[str]]) -> None:
    """Raise if an attribute has none of the values it may have."""
    for name, known in choices.items():
        if getattr(config, name) not in known:
            raise ParameterError(f"Unknown {name} {getattr(config, name)!r}: use {' or '.join(known)}.")


def check_minimum(config: Any, minima: Mapping[str, int]) -> None:
    """Raise if a number is below its minimum; None is allowed."""
    for name, minimum in minima.items():
        value = getattr(config, name)
        if value is not None and value < minimum:
            raise ParameterError(f"{name} must be at least {minimum}, not {value}.")


def check_fraction(config: Any, maxima: Mapping[str, float]) -> None:
    """Raise if a number is not between 0 and its maximum."""
    for name, maximum in maxima.items():
        if not 0 <= getattr(config, name) <= maximum:
            raise ParameterError(f"{name} must be from 0 to {maximum:g}, not {getattr(config, name)}.")


def check_positive(config: Any, names: Sequence[str], *, zero: bool = False) -> None:
    """Raise if a number is not finite and above 0, or not at least 0 where zero is allowed; None is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is None or (math.isfinite(value) and (value > 0 or (zero and value == 0))):
            continue
        raise ParameterError(f"{name} must be {'at least 0' if zero else 'above 0'}, not {value}.")


@dataclass(frozen=True)
class StepLosses:
    """Losses of one step, still on the device."""

    step: int
    epoch: int
    tokens: int
    learning_rate: float
    sums: Tensor  # (4,) total, KL, CE, and the number of positions with a target


class LossCurve:
    """The losses of every step, one JSON line each. They are read from the device every few steps only."""

    def __init__(self, path: Path, step: int, watch: Callable[[dict[str, Any]], None]) -> None:
        """Open the curve of a run that is at `step`: later lines are cut, earlier ones passed to `watch` again."""
        self._path, self._watch = path, watch
        self._pending: list[StepLosses] = []
        self._since = time.monotonic()
        self._loss = math.nan
        for line in self.rewind(step):
            watch(line)

    @property
    def pending(self) -> int:
        """The number of steps that are not written yet."""
        return len(self._pending)

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Cut the lines after `step`, drop the pending ones, and return the remaining ones."""
        known = [line for line in read_curve(self._path) if line["step"] <= step]
        self._append(known, mode="w")
        self._pending, self._since = [], time.monotonic()
        return known

    def add(self, losses: StepLosses) -> None:
        """Keep the losses of a step until the next `flush`."""
        self._pending.append(losses)

    def flush(self) -> float:
        """Write the pending losses and return their mean."""
        if not self._pending:
            return self._loss
        sums = torch.stack([losses.sums for losses in self._pending]).double().tolist()
        speed = sum(losses.tokens for losses in self._pending) / max(1e-9, time.monotonic() - self._since)
        lines = []
        for losses, values in zip(self._pending, sums, strict=True):
            means = mean_losses(values, losses.tokens)
            check_finite(means["loss"], step=losses.step, learning_rate=losses.learning_rate)
            lines.append(
                {"step": losses.step, "epoch": losses.epoch, **means}
                | {"learning_rate": losses.learning_rate, "tokens_per_second": speed}
            )
        self._append(lines)
        for line in lines:
            self._watch(line)
        self._pending, self._since = [], time.monotonic()
        self._loss = sum(line["loss"] for line in lines) / len(lines)
        return self._loss

    def _append(self, lines: Sequence[dict[str, Any]], *, mode: str = "a") -> None:
        with translate_os_errors(self._path), self._path.open(mode, encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())


def mean_losses(sums: Sequence[float], tokens: int) -> dict[str, Any]:
    """Return the means of summed losses; that of KL is over the positions with a target."""
    total, kl, ce, with_target = sums
    return {"loss": total, "kl": kl / with_target if with_target else None, "ce": ce / tokens}


def read_curve(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a loss curve up to the first truncated one."""
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            break
        lines.append(line)
    return lines


def draw_curve(lines: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]] = ()) -> bytes:
    """Return a PNG of the losses of every step, with those on held-out text as dots."""
    if find_spec("matplotlib") is None:
        raise MissingExtra("A learning curve", "matplotlib", "report")
    from matplotlib.figure import Figure

    # Without pyplot, the caller's figures stay untouched and no window opens.
    figure = Figure(figsize=(6.4, 3.5), dpi=160, layout="constrained", facecolor="#ffffff")
    axes = figure.add_subplot()
    for kind, colour in _CURVE_COLOURS.items():
        known = [line for line in lines if line.get(kind) is not None]
        if known and (kind == "loss" or any(line[kind] != line["loss"] for line in known)):
            axes.plot([line["step"] for line in known], [line[kind] for line in known], color=colour, lw=1, label=kind)
        dots = [line for line in held_out if line.get(kind) is not None]
        if known and dots:
            label = "held out" if kind == "loss" else None
            axes.plot([line["step"] for line in dots], [line[kind] for line in dots], "o", color=colour, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.grid(color="#e4e7ec")
    axes.legend(frameon=False)
    file = io.BytesIO()
    # Without the date and the version, the same numbers give the same bytes.
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


class Losses(NamedTuple):
    """Losses of a batch, in nats."""

    total: Tensor  # the sum over all positions, divided by `positions`; the only one with a gradient
    kl: Tensor  # the sum over positions with a target distribution
    ce: Tensor  # the sum over all positions that count
    with_target: Tensor  # the number of positions with a target distribution


def distillation_loss(
    logits: Tensor,
    targets: Tensor,
    ids: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    beta: float = 0.0,
    positions: Tensor | int | None = None,
    rows: int | None = None,
) -> Losses:
    """Compare (N, V) logits with (N,) next tokens and with (N, m) tokens and probabilities from retrieval.

    A target below 0 does not count. A row without probabilities has the cross-entropy alone. `positions` is the divisor
    of the sum, for a batch that is part of a larger one; `rows` is how many rows are processed at a time.
    """
    ids, probs, beta = sparse_targets(targets, ids, probs, beta)
    divisor = (targets >= 0).sum().clamp(min=1) if positions is None else torch.as_tensor(positions)
    rows = rows or max(1, MAX_LOGITS // max(1, logits.shape[1]))
    losses = _Distillation.apply(logits, targets, ids, probs, beta, divisor, rows)  # type: ignore[no-untyped-call]
    return Losses(*losses)


def sparse_targets(
    targets: Tensor, ids: Tensor | None, probs: Tensor | None, beta: float
) -> tuple[Tensor, Tensor, float]:
    """Return target distributions of no tokens, and β = 0, where there are none or they do not count."""
    if ids is None or probs is None or not beta:
        nothing = targets.new_zeros(len(targets), 0)
        return nothing, nothing.float(), 0.0
    return ids, probs, beta


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ids: Tensor, probs: Tensor, beta: float, divisor: Tensor, rows: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        goal = Goal.build(targets, ids, probs, beta, divisor, logits.dtype)
        normaliser = torch.empty(len(logits), dtype=goal.probs.dtype, device=logits.device)
        kl, ce = torch.zeros_like(normaliser), torch.zeros_like(normaliser)
        for part in slices(len(logits), rows):
            normaliser[part], kl[part], ce[part] = row_losses(logits[part], goal.rows(part))
        ctx.save_for_backward(logits, normaliser, *goal)
        ctx.rows = rows
        out = goal.sum(kl, ce, divisor)
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        logits, normaliser, *saved = ctx.saved_tensors
        goal = Goal(*saved)
        goal = goal._replace(weight=goal.weight * outer.to(goal.weight.dtype))
        gradient = torch.empty_like(logits)
        for part in slices(len(logits), ctx.rows):
            gradient[part] = row_gradient(logits[part], normaliser[part], goal.rows(part))
        return gradient, None, None, None, None, None, None


class Goal(NamedTuple):
    """What the logits of N positions are compared with."""

    targets: Tensor  # (N,) next tokens; 0 where the position does not count
    ids: Tensor  # (N, m) tokens of the target distributions
    probs: Tensor  # (N, m) their probabilities, in float32 or float64
    with_target: Tensor  # (N,) whether the position counts and has a target distribution
    counted: Tensor  # (N,) whether the position counts
    share: Tensor  # (N,) the weight of the KL beside the cross-entropy
    weight: Tensor  # (N,) of the position in the total; 0 where it does not count

    @classmethod
    def build(
        cls, targets: Tensor, ids: Tensor, probs: Tensor, beta: float, divisor: Tensor, logits: torch.dtype
    ) -> Goal:
        """Return the goal of logits of this dtype; the total is divided by `divisor`."""
        dtype = torch.float64 if logits == torch.float64 else torch.float32
        counted = targets >= 0
        with_target = counted & (probs > 0).any(1)
        weight = counted.to(dtype) / divisor
        return cls(
            targets.clamp(min=0), ids, probs.to(dtype), with_target, counted, beta * with_target.to(dtype), weight
        )

    def rows(self, part: slice) -> Goal:
        """Return the goal of some positions."""
        return Goal(*(tensor[part] for tensor in self))

    def sum(self, kl: Tensor, ce: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the total, the sums of (N,) KL and cross-entropy, and the number of positions with a target."""
        total = (self.share * kl + (1 - self.share) * ce).sum() / divisor
        return total, kl.sum(), ce.sum(), self.with_target.sum()


def row_losses(logits: Tensor, goal: Goal) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log normaliser, the KL and the cross-entropy of (n, V) logits, each (n,)."""
    scores = logits.to(goal.probs.dtype)
    normaliser = scores.logsumexp(1)
    ce = normaliser - scores.gather(1, goal.targets[:, None])[:, 0]
    log_q = scores.gather(1, goal.ids) - normaliser[:, None]
    # Where p is 0 the product is 0, even if log q is -inf.
    cross = (goal.probs * log_q).masked_fill(goal.probs == 0, 0.0)
    kl = (torch.xlogy(goal.probs, goal.probs) - cross).sum(1)
    return normaliser, kl.masked_fill(~goal.with_target, 0.0), ce.masked_fill(~goal.counted, 0.0)


def row_gradient(logits: Tensor, normaliser: Tensor, goal: Goal) -> Tensor:
    """Return the gradient of the total with respect to (n, V) logits, in the dtype of the probabilities."""
    kl, ce = goal.share * goal.weight, (1 - goal.share) * goal.weight
    gradient = (logits.to(goal.probs.dtype) - normaliser[:, None]).exp_()
    gradient *= (goal.weight + kl * (goal.probs.sum(1) - 1))[:, None]
    gradient.scatter_add_(1, goal.ids, -kl[:, None] * goal.probs)
    return gradient.scatter_add_(1, goal.targets[:, None], -ce[:, None])


def slices(count: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `size` of `count` rows."""
    return (slice(begin, begin + size) for begin in range(0, count, size))
