"""Training of a decoder whose learning rate and epochs are chosen on held-out text; see `knnlm.training.selection`."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    INTERPOLATIONS,
    Piece,
    Trial,
    constant_rates,
    falling_rates,
    next_piece,
    planned_epochs,
)
from knnlm.training.teacher import Teacher
from knnlm.training.trainer import Checkpoint, LossCurve, TrainingDiverged

Tensors = dict[str, Tensor]

_MAX_SHARE_OF_COPIES = 0.25  # of the free memory of a GPU; activations need the rest


@dataclass
class SelectionState(DecoderState):
    """Position in the pieces of a training; `batch` counts the steps of the present one."""

    trials: list[dict[str, Any]] = field(default_factory=list)  # the initial model first; finite ones are in `held_out`
    decays: bool = False  # whether the rate of the present piece falls
    piece_step: int = 0  # the step and the tokens at which the present piece began
    piece_tokens: int = 0


class SelectingTrainer(DecoderTrainer):
    """A model that is trained with several rates and numbers of epochs, at most those of the configuration.

    Besides the present weights and moments, it keeps those at a constant rate that the training may go on from, those
    before the present decay, the weights after the two best decays, and the initial ones: nine times the weights, in
    the memory of the CPU if that of the GPU has no room to spare.
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
            raise ParameterError(
                "The learning rate and the epochs are chosen on held-out text, but there is none. Give more text or a "
                "larger held_out, or train with the given rate and epochs: select=False (--no-select)."
            )
        self.state = SelectionState()
        self.averages: list[tuple[float, float]] = []  # share of the second best weights, loss on held-out text
        self.interpolations: list[tuple[float, float]] = []  # share of the trained weights, loss on held-out text
        self._rate = config.peak_rate
        self._counts = [len(batches.steps(epoch, self._batch_tokens)) for epoch in range(config.epochs + 1)]
        self._warm_up = math.ceil(config.warm_up * self._counts[0])
        self._present = self._tensors()
        weights = {name: weight.detach() for name, weight in self._trained.items()}
        kept = [self._present, self._present, weights, weights, weights]
        place = place_of_copies(device, sum(tensor.nbytes for tensors in kept for tensor in tensors.values()))
        copies = (_copies(tensors, place) for tensors in kept)
        self._before_decay, self._constant, self._initial, self._best, self._second = copies

    @property
    def _planned_epochs(self) -> float:
        return planned_epochs(self.config.epochs)

    @property
    def selection(self) -> dict[str, Any]:
        """The trials, the averages and shares of the trained weights that were compared, and what was chosen."""
        best = min((trial for trial in self._trials if trial.learning_rate is not None), key=lambda trial: trial.loss)
        chosen: dict[str, Any] = {"learning_rate": best.learning_rate, "epochs": best.epochs}
        chosen |= {"average": _best_share(self.averages), "interpolation": _best_share(self.interpolations)}
        compared = {"averages": self.averages, "interpolations": self.interpolations}
        return {"trials": self.state.trials, **compared, "chosen": chosen}

    def _checkpointed(self) -> Tensors:
        kept = {"constant": self._constant, "before": self._before_decay, "best": self._best, "second": self._second}
        others = {f"{name}.{key}": tensor for name, own in kept.items() for key, tensor in own.items()}
        return self._present | others

    def _steps(self, curve: LossCurve, advance: Advance) -> Generator[int]:
        """Take all remaining steps of all pieces, and set the weights to the best ones."""
        state = self.state
        self._report(advance)
        if not state.held_out:
            state.held_out = self._evaluate(0)
            state.trials = [Trial(None, 0.0, state.held_out[0]["ce"]).as_dict()]
        self.model.train()
        while (piece := next_piece(self._rate, self.config.epochs, self._trials)) is not None:
            if not state.decays:
                yield from self._train(piece, curve, advance)
                with self._no_checkpoint_inside():
                    _copy(self._before_decay, self._present)
                    state.decays, state.batch = True, 0
            yield from self._train(piece, curve, advance)
            with self._no_checkpoint_inside():
                self._finish(piece)
            yield state.step
        tried = {trial.learning_rate: trial.loss for trial in self._trials if trial.learning_rate is not None}
        if not any(map(math.isfinite, tried.values())):
            rates = [f"{rate:g}" for rate in tried]
            raise ParameterError(
                f"The training diverged with every learning rate that was tried ({', '.join(rates)}): "
                "the loss is not finite. Use a smaller learning_rate."
            )
        self._average()
        self._interpolate()

    @property
    def _trials(self) -> list[Trial]:
        return [Trial(**trial) for trial in self.state.trials]

    def _train(self, piece: Piece, curve: LossCurve, advance: Advance) -> Iterator[int]:
        """Take the remaining steps of a piece up to its decay, or those of the decay."""
        state, rate = self.state, piece.learning_rate
        begin, end = (piece.decay, piece.end) if state.decays else (piece.begin, piece.decay)
        before, count = self._place(begin), self._place(end) - self._place(begin)
        count = max(count, int(state.decays))  # the shortest decay is one step
        every = falling_rates(rate, count) if state.decays else constant_rates(rate, before, count, self._warm_up)
        rates = list(every)[state.batch :]
        groups = self._groups(before + state.batch, count - state.batch)
        for parts, rate in zip(prefetch(groups, self._read_taught), rates, strict=True):
            self._step(parts, curve, rate)
            self._report(advance)
            if curve.pending >= STEPS_PER_FLUSH or state.batch == count:
                with self._no_checkpoint_inside():
                    loss = curve.flush()
                note(advance, f"loss {loss:.3f}, rate {piece.learning_rate:g}")
            yield state.step

    def _recover(self, checkpoint: Checkpoint, curve: LossCurve, error: TrainingDiverged) -> None:  # noqa: ARG002
        """Record that the present piece diverged, and go on with the next one: other rates are tried anyway."""
        piece, state = next_piece(self._rate, self.config.epochs, self._trials), self.state
        if piece is None:
            raise error
        self._say(f"The training diverged with the learning rate {piece.learning_rate:g}.", once="diverged")
        with self._no_checkpoint_inside():
            self._pass.drop_gradients()
            state.step, state.tokens = state.piece_step, state.piece_tokens
            curve.rewind(state.step)
            self._record(piece, math.inf)

    def _finish(self, piece: Piece) -> None:
        """Record the loss after a decay, and return to the weights that the next piece begins with."""
        evaluation = self._evaluate(math.ceil(piece.end))
        loss = evaluation[0]["ce"]
        if not math.isfinite(loss):
            self._record(piece, math.inf)
            return
        self.state.held_out += evaluation
        self._record(piece, loss)

    def _record(self, piece: Piece, loss: float) -> None:
        state = self.state
        earlier = [trial for trial in self._trials if trial.learning_rate is not None]
        losses = sorted(trial.loss for trial in earlier)
        weights = {name: weight.detach() for name, weight in self._trained.items()}
        if loss < min(losses, default=math.inf):
            _copy(self._second, self._best)
            _copy(self._best, weights)
        elif len(losses) < 2 or loss < losses[1]:
            _copy(self._second, weights)
        if loss < min((trial.loss for trial in earlier if trial.epochs == piece.end), default=math.inf):
            _copy(self._constant, self._before_decay)  # more epochs go on from the best of as many
        state.trials.append(Trial(piece.learning_rate, piece.end, loss).as_dict())
        following = next_piece(self._rate, self.config.epochs, self._trials)
        if following is not None and not following.begin:
            _copy(self._present, {f"weight.{name}": tensor for name, tensor in self._initial.items()})
            for name, tensor in self._present.items():
                if not name.startswith("weight."):
                    tensor.zero_()
        else:
            _copy(self._present, self._constant)
        state.decays, state.batch, state.piece_step, state.piece_tokens = False, 0, state.step, state.tokens

    def _average(self) -> None:
        """Compare the best weights with their mean with the second best ones."""
        best, *others = sorted(trial.loss for trial in self._trials if trial.learning_rate is not None)
        self.averages = [(0.0, best)]
        if not others or not math.isfinite(others[0]):
            return
        self._set_between(1.0, average=0.5)
        self.averages.append((0.5, self._evaluate(0)[0]["ce"]))

    def _interpolate(self) -> None:
        """Set the weights to the point with the smallest loss between the initial and the trained ones."""
        average, between = _best_share(self.averages), []
        for share in INTERPOLATIONS:
            self._set_between(share, average=average)
            between.append((share, self._evaluate(0)[0]["ce"]))
        trained = min(loss for _, loss in self.averages)
        self.interpolations = [(0.0, self._trials[0].loss), *between, (1.0, trained)]
        self._set_between(_best_share(self.interpolations), average=average)

    @torch.no_grad()
    def _set_between(self, share: float, *, average: float) -> None:
        """Set the weights to a point between the initial ones and an average of the best and the second best ones.

        Those stay as they are, so that a training that was stopped afterwards resumes with the same result.
        """
        for name, weight in self._trained.items():
            trained = torch.lerp(self._best[name], self._second[name], average) if average else self._best[name]
            weight.copy_(trained if share == 1 else torch.lerp(self._initial[name], trained, share))  # 1: exactly

    def _place(self, epochs: float) -> int:
        """Return the number of steps of so many epochs."""
        whole = math.floor(epochs)
        return sum(self._counts[:whole]) + math.ceil(round((epochs - whole) * self._counts[whole], 6))

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


def _best_share(tried: Sequence[tuple[float, float]]) -> float:
    """Return the share with the smallest loss."""
    return min(tried, key=lambda each: each[1])[0]


def place_of_copies(device: torch.device, size: int) -> torch.device:
    """Return where so many bytes are kept that no step uses: on the CPU, if they would take much of a GPU's memory."""
    if device.type == "cuda" and size > _MAX_SHARE_OF_COPIES * torch.cuda.mem_get_info(device)[0]:
        return torch.device("cpu")
    return device


def _copies(tensors: Mapping[str, Tensor], place: torch.device) -> Tensors:
    return {name: tensor.to(place, copy=True) for name, tensor in tensors.items()}


def _copy(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            into[name].copy_(tensor)
