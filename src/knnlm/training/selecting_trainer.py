"""Training of a decoder whose learning rate and epochs are chosen on held-out text; see `knnlm.training.selection`."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from knnlm.errors import ParameterError
from knnlm.progress import Advance, note
from knnlm.training.data import TrainingBatches
from knnlm.training.decoder_trainer import STEPS_PER_FLUSH, DecoderConfig, DecoderState, DecoderTrainer, prefetch
from knnlm.training.selection import (
    COOLDOWN,
    FIRST,
    INTERPOLATIONS,
    Piece,
    Trial,
    cooldown_steps,
    next_piece,
    piece_rates,
)
from knnlm.training.teacher import Teacher
from knnlm.training.trainer import Checkpoint, LossCurve, TrainingDiverged

Tensors = dict[str, Tensor]


@dataclass
class SelectionState(DecoderState):
    """Position in the pieces of a training; `batch` counts the steps of the present one."""

    trials: list[dict[str, Any]] = field(default_factory=list)  # the initial model first; finite ones are in `held_out`
    in_cooldown: bool = False
    piece_step: int = 0  # the step and the tokens at which the present piece began
    piece_tokens: int = 0


class SelectingTrainer(DecoderTrainer):
    """A model that is trained with several rates and numbers of epochs, at most those of the configuration.

    Besides the present weights and moments, it keeps those of the best training at a constant rate so far, those before
    the present cooldown, the weights after the best cooldown, and the initial ones.
    """

    state: SelectionState

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
        super().__init__(model, batches, teacher, config, device=device, initial=initial)
        if not len(batches.held_out):
            raise ParameterError("Settings are chosen on held-out text: give some, or hold some out.")
        self.state = SelectionState()
        self.interpolations: list[tuple[float, float]] = []  # share of the trained weights, loss on held-out text
        self._rates = config.learning_rates
        self._counts = [len(batches.steps(epoch, self._batch_tokens)) for epoch in range(config.epochs + 1)]
        self._warm_up = math.ceil(config.warm_up * self._counts[0])
        self._present = self._tensors()
        self._before_cooldown, self._best_constant = _copies(self._present), _copies(self._present)
        weights = {name: weight.detach() for name, weight in self._trained.items()}
        self._initial, self._best = _copies(weights), _copies(weights)

    @property
    def _planned_epochs(self) -> float:
        epochs, rates = self.config.epochs, len(self._rates)
        halves = FIRST * rates
        return epochs + halves - FIRST + COOLDOWN * (halves + epochs * (epochs + 1) / 2)

    @property
    def selection(self) -> dict[str, Any]:
        """The trials, the shares of the trained weights that were compared, and what was chosen."""
        best = min((trial for trial in self._trials if trial.learning_rate is not None), key=lambda trial: trial.loss)
        share = min(self.interpolations, key=lambda tried: tried[1])[0]
        chosen = {"learning_rate": best.learning_rate, "epochs": best.epochs, "interpolation": share}
        return {"trials": self.state.trials, "interpolations": self.interpolations, "chosen": chosen}

    def _checkpointed(self) -> Tensors:
        kept = {"constant": self._best_constant, "before": self._before_cooldown, "best": self._best}
        others = {f"{name}.{key}": tensor for name, own in kept.items() for key, tensor in own.items()}
        return self._present | others

    def _steps(self, curve: LossCurve, advance: Advance) -> Generator[int]:
        """Take all remaining steps of all pieces, and set the weights to the best ones."""
        state = self.state
        self._report(advance)
        if not state.held_out:
            state.held_out = self._evaluate(0)
            state.trials = [Trial(None, 0.0, state.held_out[0]["loss"]).as_dict()]
        self.model.train()
        while (piece := next_piece(self._rates, self.config.epochs, self._trials)) is not None:
            if not state.in_cooldown:
                yield from self._train(piece, curve, advance)
                with self._no_checkpoint_inside():
                    _copy(self._before_cooldown, self._present)
                    state.in_cooldown, state.batch = True, 0
            yield from self._train(replace(piece, begin=piece.end), curve, advance)
            with self._no_checkpoint_inside():
                self._finish(piece)
            yield state.step
        if not any(math.isfinite(trial.loss) for trial in self._trials if trial.learning_rate is not None):
            raise ParameterError(
                f"The training diverged with every learning rate that was tried ({', '.join(map(str, self._rates))}): "
                "the loss is not finite. Use a smaller learning_rate."
            )
        self._interpolate()

    @property
    def _trials(self) -> list[Trial]:
        return [Trial(**trial) for trial in self.state.trials]

    def _train(self, piece: Piece, curve: LossCurve, advance: Advance) -> Iterator[int]:
        """Take the remaining steps of a piece; one whose loss is not finite ends there."""
        state, before = self.state, self._place(piece.begin)
        count = cooldown_steps(before) if piece.is_cooldown else self._place(piece.end) - before
        rates = list(piece_rates(piece, before, count, self._warm_up))[state.batch :]
        groups = self._groups(before + state.batch, count - state.batch)
        for parts, rate in zip(prefetch(groups, self._read), rates, strict=True):
            self._step(parts, curve, rate)
            self._report(advance)
            if curve.pending >= STEPS_PER_FLUSH or state.batch == count:
                with self._no_checkpoint_inside():
                    loss = curve.flush()
                note(advance, f"loss {loss:.3f}, rate {piece.learning_rate:g}")
            yield state.step

    def _recover(self, checkpoint: Checkpoint, curve: LossCurve, error: TrainingDiverged) -> None:  # noqa: ARG002
        """Record that the present piece diverged, and go on with the next one: other rates are tried anyway."""
        piece, state = next_piece(self._rates, self.config.epochs, self._trials), self.state
        if piece is None:
            raise error
        self._say(f"The training diverged with the learning rate {piece.learning_rate:g}.", once="diverged")
        with self._no_checkpoint_inside():
            self._pass.drop_gradients()
            state.step, state.tokens = state.piece_step, state.piece_tokens
            curve.rewind(state.step)
            self._record(piece, math.inf)

    def _finish(self, piece: Piece) -> None:
        """Record the loss after a cooldown, and return to the weights that the next piece begins with."""
        evaluation = self._evaluate(math.ceil(piece.end))
        loss = evaluation[0]["loss"]
        if not math.isfinite(loss):
            self._record(piece, math.inf)
            return
        self.state.held_out += evaluation
        self._record(piece, loss)

    def _record(self, piece: Piece, loss: float) -> None:
        state = self.state
        earlier = [trial for trial in self._trials if trial.learning_rate is not None]
        is_best = loss < min([trial.loss for trial in earlier], default=math.inf)
        if is_best:
            _copy(self._best, {name: weight.detach() for name, weight in self._trained.items()})
        if is_best or (piece.begin and math.isfinite(loss)):  # the rate that goes on
            _copy(self._best_constant, self._before_cooldown)
        state.trials.append(Trial(piece.learning_rate, piece.end, loss).as_dict())
        following = next_piece(self._rates, self.config.epochs, self._trials)
        if following is not None and not following.begin:
            _copy(self._present, {f"weight.{name}": tensor for name, tensor in self._initial.items()})
            for name, tensor in self._present.items():
                if not name.startswith("weight."):
                    tensor.zero_()
        else:
            _copy(self._present, self._best_constant)
        state.in_cooldown, state.batch, state.piece_step, state.piece_tokens = False, 0, state.step, state.tokens

    @torch.no_grad()
    def _interpolate(self) -> None:
        """Set the weights to the point with the smallest loss between the initial and the best ones."""
        initial, *tried = self._trials
        between = []
        for share in INTERPOLATIONS:
            self._set_between(share)
            between.append((share, self._evaluate(0)[0]["loss"]))
        self.interpolations = [(0.0, initial.loss), *between, (1.0, min(trial.loss for trial in tried))]
        self._set_between(min(self.interpolations, key=lambda tried: tried[1])[0])

    @torch.no_grad()
    def _set_between(self, share: float) -> None:
        for name, weight in self._trained.items():
            if share == 1:  # exactly
                weight.copy_(self._best[name])
            else:
                weight.copy_(torch.lerp(self._initial[name], self._best[name], share))

    def _place(self, epochs: float) -> int:
        """Return the number of steps of so many epochs."""
        whole = math.floor(epochs)
        return sum(self._counts[:whole]) + math.ceil((epochs - whole) * self._counts[whole])

    def _groups(self, first: int, count: int) -> Sequence[Sequence[NDArray[np.int64]]]:
        """Return the windows of consecutive steps, over the ends of epochs."""
        found: list[Sequence[NDArray[np.int64]]] = []
        epoch, begin = 0, 0
        while len(found) < count:
            steps = self.batches.steps(epoch, self._batch_tokens)
            if begin + len(steps) > first + len(found):
                found += steps[first + len(found) - begin :]
            begin, epoch = begin + len(steps), epoch + 1
        return found[:count]


def _copies(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _copy(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            into[name].copy_(tensor)
