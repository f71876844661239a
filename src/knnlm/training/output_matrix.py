"""Train an output matrix on the pairs of a store, without the model. Knows nothing about mixing what comes of it.

Full softmax over the words that the store holds; AdamW with a short warm-up and a linear decay. Some documents are held
out, and the matrix that did best on them is kept. A run that was killed goes on from its checkpoint and, on a CPU, ends
with the same numbers.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from knnlm.datastore.locks import writer_lock
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError, ParameterError
from knnlm.memories.output import OUTPUT_FILE, OutputCard, OutputMatrix, load_output, save_output, save_tensors
from knnlm.progress import Progress, silent
from knnlm.training.output_config import MOST_ROWS, OutputConfig, check, check_given, check_same, facts_of, hash_of
from knnlm.training.pairs import Pairs
from knnlm.training.trainer import restore

CHECKPOINT = "checkpoint.safetensors"

_EVALUATIONS = 2  # in each epoch

_WARM_UP = 20  # steps

_NOISE = 0.1  # in the first scores of words with several rows


def train_output(
    store: Datastore,
    out: str | Path,
    *,
    rows: int = 1,
    rows_by: str = "uniform",
    vocabulary: str = "store",
    init: Tensor | None = None,
    bias: bool = True,
    epochs: int = 6,
    batch_size: int | None = None,
    learning_rate: float = 0.5,
    weight_decay: float = 0.1,
    held_out: float = 0.02,
    patience: int = 3,
    interpolate: float | None = None,
    log_p_lm: Tensor | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    checkpoint_every: float = 60.0,
    progress: Progress = silent,
) -> OutputCard:
    """Train W_ds from a store into OUT/output.safetensors, going on with an unfinished run of the same call.

    `learning_rate` is how far a step may move a score, whatever the width and the scale of the keys. `init` is (V, D):
    an output embedding to begin with. `interpolate` is λ of a loss on (1-λ)·p_LM + λ·p_output, and needs `log_p_lm`,
    the model's (rows,) log-probabilities of the stored tokens. `checkpoint_every` is in seconds.
    """
    where = _device(device)
    batch_size = batch_size if batch_size is not None else _batch_size(store.key_count)
    precision = {"auto": "bfloat16" if where.type == "cuda" else "float32"}.get(dtype, dtype)
    settings = OutputConfig(
        rows, rows_by, vocabulary, bias, epochs, batch_size, learning_rate, weight_decay, held_out, patience,
        interpolate, seed, precision, hash_of(init), hash_of(log_p_lm),
    )  # fmt: skip
    check(settings, store)
    check_given(store, init=init, interpolate=interpolate, log_p_lm=log_p_lm)
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise DatastoreError(f"{folder} is a file. Choose another --out.")
    with writer_lock(folder, create=True):
        if (folder / OUTPUT_FILE).exists():
            card = load_output(folder)[1]
            check_same(folder / OUTPUT_FILE, {"store": card.store, **card.settings}, facts_of(store, settings))
            return card
        pairs = Pairs(
            store,
            held_out=held_out,
            seed=seed,
            every_word=vocabulary == "all",
            device=where,
            dtype=getattr(torch, precision),
        )
        training = _OutputTrainer(pairs, settings, init, log_p_lm)
        training.resume(folder / CHECKPOINT)
        card = training.run(folder / CHECKPOINT, checkpoint_every, progress)
        save_output(folder, training.matrix(), card)
        (folder / CHECKPOINT).unlink(missing_ok=True)
    return card


@dataclass
class _TrainingState:
    """How far a training is."""

    epoch: int = 0
    batch: int = 0  # within the epoch
    step: int = 0
    seen: int = 0  # pairs, in all epochs
    loss: float = 0.0  # summed over the steps since the last evaluation
    steps: int = 0
    best_step: int = 0
    history: list[list[float | None]] = field(default_factory=list)  # as in the card
    seconds: float = 0.0


class _OutputTrainer:
    """A matrix, its optimiser, and how far they are."""

    def __init__(self, pairs: Pairs, settings: OutputConfig, init: Tensor | None, log_p_lm: Tensor | None) -> None:
        self.pairs, self.settings, self.log_p_lm = pairs, settings, log_p_lm
        self.course = _TrainingState()
        self.rows = share_rows(torch.from_numpy(pairs.counts)[pairs.words], settings.rows, settings.rows_by)  # (W,)
        begun = _begin(pairs, self.rows, settings, init)
        self.now = {name: tensor.to(pairs.device) for name, tensor in begun.items()}
        self.best = {name: tensor.clone() for name, tensor in self.now.items()}
        self.first = (self.rows.cumsum(0) - self.rows).to(pairs.device)
        self.counts = self.rows.to(pairs.device)
        self.trained = ("weight", "bias") if settings.bias else ("weight",)
        decay = {"weight": settings.weight_decay, "bias": 0.0}
        groups = [{"params": [self.now[name]], "weight_decay": decay[name]} for name in self.trained]
        self.optimiser = torch.optim.AdamW(groups, fused=pairs.device.type in ("cpu", "cuda"))
        for name in self.trained:  # here rather than at the first step, so that a checkpoint can be put there
            tensor = self.now[name]
            self.optimiser.state[tensor] = {
                "step": torch.zeros((), device=pairs.device),
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.zeros_like(tensor),
            }

    def run(self, checkpoint: Path, every: float, progress: Progress) -> OutputCard:
        """Train to the end, or until the held-out loss no longer falls."""
        course, settings = self.course, self.settings
        begun, saved = time.monotonic() - course.seconds, time.monotonic()
        if not course.history:
            self._evaluate()
        while course.epoch < settings.epochs and not self._stalled():
            loss = course.history[-1][2]
            name = f"epoch {course.epoch + 1} of {settings.epochs}" + ("" if loss is None else f", loss {loss:.3f}")
            with progress(name, total=self.pairs.count, unit="tokens") as advance:
                advance(course.seen - course.epoch * self.pairs.count)
                for ids, keys, columns in self.pairs.batches(course.epoch, settings.batch_size, skip=course.batch):
                    self._step(ids, keys, columns)
                    advance(len(ids))
                    if course.seen * _EVALUATIONS // self.pairs.count >= len(course.history):
                        self._evaluate()
                    if self._stalled():
                        break
                    if time.monotonic() - saved >= every:
                        course.seconds = time.monotonic() - begun
                        facts = {"settings": facts_of(self.pairs.store, settings), "course": asdict(course)}
                        save_tensors(checkpoint, self._tensors(), facts)
                        saved = time.monotonic()
                else:
                    course.epoch, course.batch = course.epoch + 1, 0
        course.seconds = time.monotonic() - begun
        return self._card()

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint, where there is one."""
        settings = facts_of(self.pairs.store, self.settings)
        self.course = restore(path, settings, self._tensors(), _TrainingState) or self.course

    def matrix(self) -> OutputMatrix:
        """Give the best matrix as one that reads the model's hidden states: all that was done to keys is folded in."""
        store, pairs = self.pairs.store, self.pairs
        weight, bias = self.best["weight"].cpu() / pairs.spread, self.best["bias"].cpu()
        centre = torch.zeros(store.model["width"]) if store.offset is None else store.offset
        if store.map is None:
            centre = centre + pairs.mean
        else:
            bias = bias - (weight @ pairs.mean)
            centre, weight = centre + store.map.centre, weight @ store.map.matrix.T
        return OutputMatrix(weight, bias, centre, pairs.words.repeat_interleave(self.rows))

    def _step(self, ids: Tensor, keys: Tensor, columns: Tensor) -> None:
        course, settings = self.course, self.settings
        losses, shares, gradient = self._losses(ids, keys, columns)
        self.now["weight"].grad = (gradient.to(keys.dtype).T @ keys).float()
        self.now["bias"].grad = gradient.sum(0)
        left = 1 - course.seen / (settings.epochs * self.pairs.count)
        pace = settings.learning_rate * min(1.0, (course.step + 1) / _WARM_UP) * left
        for group, name in zip(self.optimiser.param_groups, self.trained, strict=True):
            # A step of Adam moves each number by about the rate, and a score is a sum of D of them.
            group["lr"] = pace / (keys.shape[1] if name == "weight" else math.sqrt(keys.shape[1]))
        self.optimiser.step()
        course.step, course.batch, course.seen = course.step + 1, course.batch + 1, course.seen + len(ids)
        course.loss, course.steps = course.loss + float(losses @ shares), course.steps + 1

    def _losses(self, ids: Tensor, keys: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give (n,) losses, the (n,) shares they have in their mean, and the gradient of that by the (n, R) scores."""
        scores = (keys @ self.now["weight"].to(keys.dtype).T).float() + self.now["bias"]
        log_p, own = None, self.settings.interpolate
        if self.log_p_lm is not None and own is not None:
            log_p = self.log_p_lm[self.pairs.store.rows_of(ids)].to(scores)
        counts = self._counts(ids)
        shares = (counts / counts.sum()).to(scores)
        first, rows = self.first[columns], self.counts[columns]
        losses = weigh_losses(scores, first, rows, shares=shares, log_p_lm=log_p, interpolate=own)
        return losses, shares, scores

    def _evaluate(self) -> None:
        """Look at the held-out pairs, and keep the matrix if it is the best so far."""
        course = self.course
        trained = course.loss / course.steps if course.steps else None
        loss = None
        if len(self.pairs.held_out):
            total = weight = 0.0
            for ids in self.pairs.held_out.split(self.settings.batch_size):
                losses, shares, _ = self._losses(ids, self.pairs.keys(ids), self.pairs.columns(ids))
                counts = self._counts(ids)
                total, weight = total + float(losses @ shares) * float(counts.sum()), weight + float(counts.sum())
            loss = total / weight
        if not all(math.isfinite(found) for found in (trained, loss) if found is not None):
            raise ParameterError(
                f"The training diverged at step {course.step}: the loss is no number any more. Use a smaller "
                f"learning_rate than {self.settings.learning_rate:g}."
            )
        before = [entry[2] for entry in course.history if entry[2] is not None]
        if loss is None or not before or loss < min(before):
            course.best_step = course.step
            for name, tensor in self.now.items():
                self.best[name].copy_(tensor)
        course.history.append([course.step, trained, loss])
        course.loss, course.steps = 0.0, 0

    def _counts(self, ids: Tensor) -> Tensor:
        """Say how many contexts each key stands for: more than one where keys were merged."""
        counts = self.pairs.store.counts(ids)
        return torch.ones(len(ids)) if counts is None else counts

    def _stalled(self) -> bool:
        """Say whether the held-out loss has not fallen for as long as we are patient."""
        since = [entry for entry in self.course.history if (entry[0] or 0) > self.course.best_step]
        return len(since) >= self.settings.patience

    def _tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds."""
        made = {f"{kind}.{name}": tensor for kind in ("now", "best") for name, tensor in getattr(self, kind).items()}
        for name in self.trained:
            made |= {f"{what}.{name}": tensor for what, tensor in self.optimiser.state[self.now[name]].items()}
        return made

    def _card(self) -> OutputCard:
        course, pairs = self.course, self.pairs
        found = [entry[2] for entry in course.history if entry[2] is not None]
        return OutputCard(
            store=pairs.store.fingerprint,
            model=pairs.store.model,
            settings=asdict(self.settings),
            words=len(pairs.words),
            rows=int(self.rows.sum()),
            trained_pairs=pairs.count,
            held_out_pairs=len(pairs.held_out),
            steps=course.step,
            best_step=course.best_step,
            held_out_before=found[0] if found else None,
            held_out_after=min(found) if found else None,
            history=course.history,
            seconds=course.seconds,
        )


def weigh_losses(
    scores: Tensor,
    first: Tensor,
    counts: Tensor,
    *,
    shares: Tensor,
    log_p_lm: Tensor | None = None,
    interpolate: float | None = None,
) -> Tensor:
    """Give the (n,) losses, and turn the (n, R) scores in place into the gradient of their weighted mean.

    The rows of a target are first … first + counts - 1, and p its part of the softmax. The loss is -log p, and its
    gradient softmax less the softmax within those rows. Where it is -log((1-λ)·p_LM + λ·p), the gradient is that
    times λ·p over the sum.
    """
    normaliser = scores.logsumexp(1)
    step = torch.arange(int(counts.max()), device=scores.device)
    rows = (first[:, None] + step).clamp(max=scores.shape[1] - 1)  # (n, r)
    own = scores.gather(1, rows).masked_fill(step >= counts[:, None], -torch.inf)
    whole = own.logsumexp(1)
    log_p = whole - normaliser
    pull = shares
    if log_p_lm is not None and interpolate is not None:
        part = log_p + math.log(interpolate)
        log_p = torch.logaddexp(log_p_lm + math.log1p(-interpolate), part) if interpolate < 1 else part
        pull = shares * (part - log_p).exp()
    scores.sub_(normaliser[:, None]).exp_().mul_(pull[:, None])
    scores.scatter_add_(1, rows, -(own - whole[:, None]).exp() * pull[:, None])
    return -log_p


def share_rows(counts: Tensor, rows: int, rows_by: str) -> Tensor:
    """Say how many rows each word has, (W,): all the same, or more for the frequent ones and as many in all."""
    if rows_by == "uniform":
        return torch.full_like(counts, rows)
    # By the root: a word that is a hundred times as frequent is not asked for in a hundred times as many ways. Words
    # that are not in training get more than one only when all others have the most.
    roots = counts.double().clamp(min=1e-18).sqrt()
    total, most = (rows - 1) * len(counts), MOST_ROWS - 1
    extra = torch.zeros_like(roots)
    full = torch.zeros(len(counts), dtype=torch.bool)
    while not full.all():
        # What those who have the most leave goes to the others.
        left = total - most * int(full.sum())
        extra = torch.where(full, float(most), left * roots / roots[~full].sum())
        if not (over := ~full & (extra > most)).any():
            break
        full |= over
    extra = extra.clamp(max=most)  # a sum may be rounded up
    given = extra.floor()
    # The rows that are left over go to those who are nearest to one more.
    rest = (extra - given).argsort(descending=True, stable=True)[: total - int(given.sum())]
    given[rest] += 1
    return 1 + given.long()


def _begin(pairs: Pairs, rows: Tensor, settings: OutputConfig, init: Tensor | None) -> dict[str, Tensor]:
    """Make the first matrix: the frequencies of words, or what was given."""
    width = pairs.store.width
    random = torch.Generator().manual_seed(settings.seed)
    if init is None:
        frequency = torch.from_numpy(pairs.counts)[pairs.words].double() + 0.5
        bias = (frequency / frequency.sum()).log() if settings.bias else torch.zeros(len(rows), dtype=torch.float64)
        weight = torch.zeros(len(rows), width)
    else:
        chosen = init[pairs.words].float().cpu()
        weight = chosen * pairs.spread
        offset = pairs.mean if pairs.store.offset is None else pairs.mean + pairs.store.offset
        bias = chosen.double() @ offset.double()
    # Rows of one word must differ, or they would stay the same for ever.
    weight, bias = weight.repeat_interleave(rows, 0), (bias - rows.double().log()).repeat_interleave(rows)
    if int(rows.max()) > 1:
        weight = weight + torch.randn(weight.shape, generator=random) * (_NOISE / math.sqrt(width))
    return {"weight": weight, "bias": bias.float()}


def _device(name: str) -> torch.device:
    """Find the device; `auto` is a GPU where there is one."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise ParameterError(f"There is no device {name!r} here. Use device='cpu'.") from None
    return device


def _batch_size(pairs: int) -> int:
    """Choose: a hundred steps an epoch where there is little to learn from, large batches where there is much."""
    return min(1024, max(64, 1 << round(math.log2(max(1, pairs / 100)))))
