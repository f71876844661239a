"""Training of an output matrix W_ds on the entries of a store, without running the model.

Full softmax over the words of the store; AdamW with a short warm-up and a linear decay. Some documents are held out,
and the matrix with the lowest loss on them is kept.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knnlm.datastore.locks import writer_lock
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError, ParameterError
from knnlm.lm.loading import choose_device
from knnlm.memories.output import OUTPUT_FILE, OutputCard, OutputMatrix, load_output, save_output
from knnlm.progress import Progress, silent
from knnlm.training.data import EntryBatches
from knnlm.training.trainer import (
    CHECKPOINT,
    BestParameters,
    Checkpoint,
    Schedule,
    TrainState,
    check_choices,
    check_finite,
    check_fraction,
    check_minimum,
    check_positive,
    check_same_settings,
    make_adamw,
    optimiser_tensors,
    output_folder,
)

ROW_ALLOCATIONS = ("uniform", "frequency")
VOCABULARIES = ("store", "all")
DTYPES = ("auto", "float32", "bfloat16")
MAX_ROWS = 64  # of one word

_EVALUATIONS_PER_EPOCH = 2
_WARM_UP_STEPS = 20
_INITIAL_NOISE = 0.1  # standard deviation of the initial scores of words with several rows


@dataclass(frozen=True)
class OutputConfig:
    """Options of `train_output` that decide its result.

    `learning_rate` is how far a step may move a score, whatever the width and the scale of the keys. `interpolate` is λ
    of a loss on (1-λ)·p_LM + λ·p_output.
    """

    rows: int = 1
    rows_by: str = "uniform"
    vocabulary: str = "store"
    bias: bool = True
    epochs: int = 6
    batch_size: int | None = None  # None: about a hundred steps per epoch, from 64 to 1,024 entries
    learning_rate: float = 0.5
    weight_decay: float = 0.1
    held_out: float = 0.02
    patience: int = 3  # evaluations without improvement before training stops
    interpolate: float | None = None
    seed: int = 0
    dtype: str = "auto"  # bfloat16 on a GPU, else float32

    def __post_init__(self) -> None:
        check_choices(self, {"rows_by": ROW_ALLOCATIONS, "vocabulary": VOCABULARIES, "dtype": DTYPES})
        check_minimum(self, {"rows": 1, "epochs": 1, "batch_size": 1, "patience": 1, "seed": 0})
        check_positive(self, ["learning_rate"])
        check_positive(self, ["weight_decay"], zero=True)
        check_fraction(self, {"held_out": 0.5})
        if self.rows > MAX_ROWS:
            raise ParameterError(f"rows must be at most {MAX_ROWS}, not {self.rows}.")
        if self.interpolate is not None and not 0 < self.interpolate <= 1:
            raise ParameterError(f"interpolate must be above 0 and at most 1, not {self.interpolate}.")

    def resolve(self, entries: int, device: torch.device) -> OutputConfig:
        """Return the configuration with the defaults for this many entries and this device filled in."""
        size = self.batch_size
        if size is None:
            size = min(1024, max(64, 1 << round(math.log2(max(1, entries / 100)))))
        dtype = self.dtype
        if dtype == "auto":
            dtype = "bfloat16" if device.type == "cuda" else "float32"
        return replace(self, batch_size=size, dtype=dtype)


def train_output(
    store: Datastore,
    out: str | Path,
    config: OutputConfig | None = None,
    *,
    init: Tensor | None = None,
    log_p_lm: Tensor | None = None,
    device: str = "auto",
    checkpoint_every: float = 60.0,
    progress: Progress = silent,
) -> OutputCard:
    """Train W_ds from a store into OUT/output.safetensors, resuming an unfinished run of the same call.

    `init` is a (V, D) output embedding to start from. `log_p_lm`, which `interpolate` needs, is the model's (N,)
    log-probabilities of the stored tokens. `checkpoint_every` is in seconds.
    """
    where = choose_device(device)
    config = (config or OutputConfig()).resolve(store.key_count, where)
    _check_inputs(store, config, init, log_p_lm)
    folder = output_folder(out)
    settings = {**asdict(config), "init": _array_hash(init), "log_p_lm": _array_hash(log_p_lm)}
    wanted = {"store": store.fingerprint, **settings}
    with writer_lock(folder, create=True):
        if (folder / OUTPUT_FILE).exists():
            card = load_output(folder)[1]
            check_same_settings(folder / OUTPUT_FILE, {"store": card.store, **card.settings}, wanted)
            return card
        entries = _entry_batches(store, config, where)
        trainer = _OutputTrainer(entries, config, init, log_p_lm)
        trainer.run(Checkpoint(folder / CHECKPOINT, wanted, every=checkpoint_every), progress)
        card = trainer.card(settings)
        save_output(folder, trainer.matrix(), card)
        (folder / CHECKPOINT).unlink(missing_ok=True)
    return card


def _entry_batches(store: Datastore, config: OutputConfig, device: torch.device) -> EntryBatches:
    return EntryBatches(
        store,
        held_out=config.held_out,
        seed=config.seed,
        whole_vocabulary=config.vocabulary == "all",
        device=device,
        dtype=getattr(torch, config.dtype),
    )


def _check_inputs(store: Datastore, config: OutputConfig, init: Tensor | None, log_p_lm: Tensor | None) -> None:
    """Raise if there is nothing to train on, or if arrays do not belong to the store."""
    if not store.key_count:
        raise DatastoreError(f"{store.path} has no keys: there is nothing to learn.")
    if init is not None:
        shape = (store.model["vocab_size"], store.model["width"])
        if store.map is not None:
            raise ParameterError(f"{store.path}: its keys were mapped, so init does not fit them. Leave init out.")
        if tuple(init.shape) != shape or not init.isfinite().all():
            raise ParameterError(f"init must be {shape} finite numbers, not {tuple(init.shape)}.")
    if config.interpolate is None:
        if log_p_lm is not None:
            raise ParameterError("log_p_lm is used only with interpolate, the weight of the matrix in the loss.")
        return
    if log_p_lm is None:
        raise ParameterError(
            "interpolate needs log_p_lm, the model's log-probabilities of the stored tokens, which are not in the "
            "store. Compute them with the model, or train without interpolate."
        )
    if tuple(log_p_lm.shape) != (store.entry_count,) or not (log_p_lm <= 0).all():
        raise ParameterError(f"log_p_lm must be ({store.entry_count},) numbers up to 0, not {tuple(log_p_lm.shape)}.")


def _array_hash(array: Tensor | None) -> str | None:
    if array is None:
        return None
    data = array.detach().float().cpu().contiguous().numpy()
    return hashlib.sha256(f"{data.shape}".encode() + data.tobytes()).hexdigest()[:16]


@dataclass
class _OutputState(TrainState):
    loss: float = 0.0  # summed over the steps since the last evaluation
    loss_steps: int = 0
    best_step: int = 0
    history: list[list[float | None]] = field(default_factory=list)  # as in the card

    @property
    def held_out_losses(self) -> list[float]:
        return [entry[2] for entry in self.history if entry[2] is not None]


class _OutputTrainer:
    """A matrix, its optimiser and the state of their training."""

    def __init__(
        self, entries: EntryBatches, config: OutputConfig, init: Tensor | None, log_p_lm: Tensor | None
    ) -> None:
        self.entries, self.config, self.log_p_lm = entries, config, log_p_lm
        self.state = _OutputState()
        self.rows = allocate_rows(torch.from_numpy(entries.counts)[entries.words], config.rows, config.rows_by)  # (W,)
        initial = _initial_matrix(entries, self.rows, config, init)
        self.parameters = {name: tensor.to(entries.device) for name, tensor in initial.items()}
        self.best = BestParameters(self.parameters)
        self.first = (self.rows.cumsum(0) - self.rows).to(entries.device)
        self.counts = self.rows.to(entries.device)
        self.trained = {name: self.parameters[name] for name in (("weight", "bias") if config.bias else ("weight",))}
        decay = {"weight": config.weight_decay, "bias": 0.0}
        groups = [{"params": [tensor], "weight_decay": decay[name]} for name, tensor in self.trained.items()]
        self.optimiser = make_adamw(groups, entries.device)
        self.schedule = Schedule(config.learning_rate, _WARM_UP_STEPS)
        assert config.batch_size is not None
        self.batch_size = config.batch_size

    def run(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Train from the checkpoint to the end, or until the held-out loss stops falling."""
        self.state = state = checkpoint.restore(self._tensors(), self.state)
        begun = time.monotonic() - state.seconds
        if not state.history:
            self._evaluate()
        while state.epoch < self.config.epochs and not self._has_stalled():
            loss = state.history[-1][2]
            name = f"epoch {state.epoch + 1} of {self.config.epochs}" + ("" if loss is None else f", loss {loss:.3f}")
            with progress(name, total=self.entries.count, unit="tokens") as advance:
                advance(state.tokens - state.epoch * self.entries.count)
                for ids, keys, columns in self.entries.batches(state.epoch, self.batch_size, skip=state.batch):
                    self._step(ids, keys, columns)
                    advance(len(ids))
                    if state.tokens * _EVALUATIONS_PER_EPOCH // self.entries.count >= len(state.history):
                        self._evaluate()
                    if self._has_stalled():
                        break
                    if checkpoint.is_due:
                        state.seconds = time.monotonic() - begun
                        checkpoint.save(self._tensors(), asdict(state))
                else:
                    state.epoch, state.batch = state.epoch + 1, 0
        state.seconds = time.monotonic() - begun

    def matrix(self) -> OutputMatrix:
        """Return the best matrix for the model's own hidden states: every transformation of the keys is folded in."""
        store, entries = self.entries.store, self.entries
        weight, bias = self.best.tensors["weight"].cpu() / entries.std, self.best.tensors["bias"].cpu()
        centre = torch.zeros(store.model["width"]) if store.offset is None else store.offset
        if store.map is None:
            centre = centre + entries.mean
        else:
            bias = bias - (weight @ entries.mean)
            centre, weight = centre + store.map.centre, weight @ store.map.matrix.T
        return OutputMatrix(weight, bias, centre, entries.words.repeat_interleave(self.rows))

    def card(self, settings: dict[str, Any]) -> OutputCard:
        """Return the description of the trained matrix."""
        state, entries = self.state, self.entries
        losses = state.held_out_losses
        return OutputCard(
            store=entries.store.fingerprint,
            model=entries.store.model,
            settings=settings,
            words=len(entries.words),
            rows=int(self.rows.sum()),
            trained_pairs=entries.count,
            held_out_pairs=len(entries.held_out),
            steps=state.step,
            best_step=state.best_step,
            held_out_before=losses[0] if losses else None,
            held_out_after=min(losses) if losses else None,
            history=state.history,
            seconds=state.seconds,
        )

    def _step(self, ids: Tensor, keys: Tensor, columns: Tensor) -> None:
        state = self.state
        losses, shares, gradient = self._losses(ids, keys, columns)
        self.parameters["weight"].grad = (gradient.to(keys.dtype).T @ keys).float()
        self.parameters["bias"].grad = gradient.sum(0)
        rate = self.schedule.rate(state.step, 1 - state.tokens / (self.config.epochs * self.entries.count))
        for group, name in zip(self.optimiser.param_groups, self.trained, strict=True):
            # Adam moves each number by about the rate, and a score is a sum of D of them.
            group["lr"] = rate / (keys.shape[1] if name == "weight" else math.sqrt(keys.shape[1]))
        self.optimiser.step()
        state.step, state.batch, state.tokens = state.step + 1, state.batch + 1, state.tokens + len(ids)
        state.loss, state.loss_steps = state.loss + float(losses @ shares), state.loss_steps + 1

    def _losses(self, ids: Tensor, keys: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (n,) losses, their (n,) weights in the mean, and the gradient of that mean by the (n, R) scores."""
        scores = (keys @ self.parameters["weight"].to(keys.dtype).T).float() + self.parameters["bias"]
        log_p_lm, interpolate = None, self.config.interpolate
        if self.log_p_lm is not None and interpolate is not None:
            log_p_lm = self.log_p_lm[self.entries.store.entries_of(ids)].to(scores)
        counts = self._context_counts(ids)
        shares = (counts / counts.sum()).to(scores)
        first, rows = self.first[columns], self.counts[columns]
        losses = output_losses(scores, first, rows, shares=shares, log_p_lm=log_p_lm, interpolate=interpolate)
        return losses, shares, scores

    def _evaluate(self) -> None:
        """Measure the held-out loss and keep the matrix if it is the best so far."""
        state = self.state
        training_loss = state.loss / state.loss_steps if state.loss_steps else None
        loss = None
        if len(self.entries.held_out):
            total = weight = 0.0
            for ids in self.entries.held_out.split(self.batch_size):
                losses, shares, _ = self._losses(ids, self.entries.keys(ids), self.entries.columns(ids))
                contexts = float(self._context_counts(ids).sum())
                total, weight = total + float(losses @ shares) * contexts, weight + contexts
            loss = total / weight
        for value in (training_loss, loss):
            check_finite(value, step=state.step, learning_rate=self.config.learning_rate)
        if self.best.update(self.parameters, loss, min(state.held_out_losses, default=None)):
            state.best_step = state.step
        state.history.append([state.step, training_loss, loss])
        state.loss, state.loss_steps = 0.0, 0

    def _context_counts(self, ids: Tensor) -> Tensor:
        """Return how many contexts each key stands for: more than one for merged keys."""
        counts = self.entries.store.counts(ids)
        return torch.ones(len(ids)) if counts is None else counts

    def _has_stalled(self) -> bool:
        """Whether the last `patience` evaluations did not improve the held-out loss."""
        since = [entry for entry in self.state.history if (entry[0] or 0) > self.state.best_step]
        return len(since) >= self.config.patience

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"parameters.{name}": tensor for name, tensor in self.parameters.items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.tensors.items()}
        return tensors | optimiser_tensors(self.optimiser, self.trained)


def output_losses(
    scores: Tensor,
    first: Tensor,
    counts: Tensor,
    *,
    shares: Tensor,
    log_p_lm: Tensor | None = None,
    interpolate: float | None = None,
) -> Tensor:
    """Return the (n,) losses, and replace the (n, R) scores by the gradient of their weighted mean.

    The rows of a target are first … first + counts - 1, and p is their share of the softmax. The loss is -log p, with
    the gradient softmax minus the softmax within those rows. For -log((1-λ)·p_LM + λ·p), the gradient is that times
    λ·p over the sum.
    """
    normaliser = scores.logsumexp(1)
    step = torch.arange(int(counts.max()), device=scores.device)
    rows = (first[:, None] + step).clamp(max=scores.shape[1] - 1)  # (n, r)
    own = scores.gather(1, rows).masked_fill(step >= counts[:, None], -torch.inf)
    own_sum = own.logsumexp(1)
    log_p = own_sum - normaliser
    scale = shares
    if log_p_lm is not None and interpolate is not None:
        weighted = log_p + math.log(interpolate)
        log_p = torch.logaddexp(log_p_lm + math.log1p(-interpolate), weighted) if interpolate < 1 else weighted
        scale = shares * (weighted - log_p).exp()
    scores.sub_(normaliser[:, None]).exp_().mul_(scale[:, None])
    scores.scatter_add_(1, rows, -(own - own_sum[:, None]).exp() * scale[:, None])
    return -log_p


def allocate_rows(counts: Tensor, rows: int, rows_by: str) -> Tensor:
    """Return the (W,) number of rows of each word: `rows` for all, or more for frequent words with the same total."""
    if rows_by == "uniform":
        return torch.full_like(counts, rows)
    # By the square root: a word that is a hundred times as frequent does not occur in a hundred times as many kinds of
    # contexts. Words without training entries get more than one row only when all others have the maximum.
    roots = counts.double().clamp(min=1e-18).sqrt()
    total, max_extra = (rows - 1) * len(counts), MAX_ROWS - 1
    extra = torch.zeros_like(roots)
    full = torch.zeros(len(counts), dtype=torch.bool)
    while not full.all():
        # The rows that words at the maximum leave over go to the other words.
        remaining = total - max_extra * int(full.sum())
        extra = torch.where(full, float(max_extra), remaining * roots / roots[~full].sum())
        if not (over := ~full & (extra > max_extra)).any():
            break
        full |= over
    extra = extra.clamp(max=max_extra)  # a sum may be rounded up
    allocated = extra.floor()
    # The rows lost by rounding go to the words with the largest remainders.
    remainders = (extra - allocated).argsort(descending=True, stable=True)
    allocated[remainders[: total - int(allocated.sum())]] += 1
    return 1 + allocated.long()


def _initial_matrix(
    entries: EntryBatches, rows: Tensor, config: OutputConfig, init: Tensor | None
) -> dict[str, Tensor]:
    """Return the matrix that training starts from: unigram frequencies, or the embedding `init`."""
    width = entries.store.width
    random = torch.Generator().manual_seed(config.seed)
    if init is None:
        frequency = torch.from_numpy(entries.counts)[entries.words].double() + 0.5
        bias = (frequency / frequency.sum()).log() if config.bias else torch.zeros(len(rows), dtype=torch.float64)
        weight = torch.zeros(len(rows), width)
    else:
        chosen = init[entries.words].float().cpu()
        weight = chosen * entries.std
        offset = entries.mean if entries.store.offset is None else entries.mean + entries.store.offset
        bias = chosen.double() @ offset.double()
    weight, bias = weight.repeat_interleave(rows, 0), (bias - rows.double().log()).repeat_interleave(rows)
    if int(rows.max()) > 1:
        # Equal rows of one word would have equal gradients and never differ.
        weight = weight + torch.randn(weight.shape, generator=random) * (_INITIAL_NOISE / math.sqrt(width))
    return {"weight": weight, "bias": bias.float()}
