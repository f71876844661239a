"""Learn from a memory alone which contexts are alike: a linear map of its keys. Knows nothing about language models.

Contexts with the same next token should be near. For some keys (anchors) and their nearest keys from other documents,
the map A maximises the leave-one-out likelihood of the vote,

    log Σ over j with value_j = value_i of softmax_j(-|(key_i - key_j) A|² / τ + log count_j)

with τ fixed at what is best before training, so that a temperature that was right for the old keys stays about right.
In a memory whose keys were merged, count_j is how many contexts a key stands for, and anchors weigh as much; else 1.

Make a memory whose similarity was trained: learn the map, keep it, copy. Knows nothing about how either is done.

Learning takes minutes, and so may copying. What was learnt is kept beside the new memory, in OUT.map.safetensors, until
the copy is finished, so that a run that was stopped while it copied goes on there and need not come to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore.codecs import KeyMap
from knnlm.datastore.indexes import open_index, stored_indexes
from knnlm.datastore.rewrite import check_out, derive, principal_components, sample_keys
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.index.base import Index, Neighbours
from knnlm.index.exact import ExactIndex
from knnlm.io import translate_os_errors
from knnlm.memories.output import load_tensors, save_tensors
from knnlm.progress import Progress, silent
from knnlm.training.output_config import check_same

_BATCH = 128  # anchors at a time

_BLOCK = 1024  # queries at a time

_POOL = {"cpu": 200_000, "cuda": 4_000_000}  # keys that are compared with exactly

_RESIDENT = 1 << 30  # bytes of keys that stay in memory

_HELD_OUT = 0.1  # of the anchors

_FEW = 16  # documents: where there are fewer, they are cut into pieces

_PIECE = 1024  # tokens

_WIDEN = 4  # times that the temperatures to try are widened; each time by a factor of 1024

_FLAT = 0.01  # nats: what is better by less is not worth an extreme temperature


@dataclass(frozen=True)
class Mined:
    """Anchors and their nearest keys from other documents."""

    anchors: Tensor  # (n,) numbers of keys
    near: Tensor  # (n, K) numbers of keys; -1 = none
    same: Tensor  # (n, K) whether the neighbour has the anchor's token
    weights: Tensor  # (n,) how many contexts the anchor stands for
    log_counts: Tensor  # (n, K) the logarithm of how many the neighbour stands for

    def __len__(self) -> int:
        return len(self.anchors)

    def select(self, rows: Tensor) -> Mined:
        """Keep some anchors."""
        return Mined(self.anchors[rows], self.near[rows], self.same[rows], self.weights[rows], self.log_counts[rows])

    def mean(self, values: Tensor) -> Tensor:
        """Give the mean of (n,) values of the anchors, by how many contexts each stands for."""
        weights = self.weights.to(values)
        return (values * weights).sum() / weights.sum()


def train_key_map(
    store: Datastore,
    *,
    width: int | None = None,
    anchors: int = 40_000,
    neighbours: int = 128,
    rounds: int = 1,
    epochs: int = 3,
    learning_rate: float = 5e-4,
    knn_temperature: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress = silent,
) -> KeyMap:
    """Learn the map of a memory's keys, to `width` dimensions or as many as they have; the same for the same seed.

    Each round after the first finds the neighbours anew with the map that there is.
    """
    width = width if width is not None else store.width
    _check(store, width, anchors, neighbours, rounds, epochs, learning_rate, knn_temperature)
    groups = key_groups(store)
    chosen = sample_keys(store, anchors, seed=seed)
    held_out = _held_out(groups, chosen, seed)
    start = principal_components(store, width, seed=seed)
    matrix = torch.eye(store.width) if width == store.width else start.matrix
    history: list[dict[str, Any]] = []
    for number in range(rounds):
        found = KeyMap(matrix, start.centre) if number else None
        mined = mine(
            store, chosen, groups, count=neighbours, key_map=found, seed=seed, device=device, progress=progress
        )
        fit = _Fit(store, *_split(mined, held_out), device=torch.device(device), seed=seed + number)
        if knn_temperature is None:
            knn_temperature = fit.best_temperature()
        matrix, figures = fit.run(
            matrix, knn_temperature, epochs=epochs, learning_rate=learning_rate, progress=progress
        )
        history.append(figures)
    facts: dict[str, Any] = {
        "kind": "trained similarity",
        "knn_temperature": knn_temperature,
        "anchors": len(chosen),
        "neighbours": neighbours,
    }
    facts |= {"seed": seed, "learning_rate": learning_rate, "rounds": history}
    return KeyMap(matrix, start.centre, facts)


def _split(mined: Mined, held_out: Tensor) -> tuple[Mined, Mined]:
    """Part what to train on from what to stop by, and leave out anchors whose neighbours are all alike."""
    useful = mined.same.any(1) & ((mined.near >= 0) & ~mined.same).any(1)
    training, testing = mined.select(useful & ~held_out), mined.select(useful & held_out)
    if not len(training) or not len(testing):
        raise ParameterError(
            f"The memory is too small to learn from: of {len(mined):,} keys, {int(useful.sum()):,} have neighbours in "
            "other documents, some with their token and some with another."
        )
    return training, testing


def _check(
    store: Datastore,
    width: int,
    anchors: int,
    neighbours: int,
    rounds: int,
    epochs: int,
    learning_rate: float,
    knn_temperature: float | None,
) -> None:
    """Refuse what cannot be done."""
    if not 1 <= width <= store.width:
        raise ParameterError(
            f"width must be from 1 to {store.width}, the width of the keys of {store.path}, not {width}."
        )
    numbers = {"anchors": anchors, "neighbours": neighbours, "rounds": rounds, "epochs": epochs}
    for name, number in numbers.items():
        if number < 1:
            raise ParameterError(f"{name} must be at least 1, not {number}.")
    for name, value in (
        ("learning rate", learning_rate),
        ("knn_temperature", 1.0 if knn_temperature is None else knn_temperature),
    ):
        if not (value > 0 and math.isfinite(value)):
            raise ParameterError(f"{name} must be above 0, not {value}.")


def key_groups(store: Datastore) -> NDArray[np.int64]:
    """Give the (K,) number of the document that each key is from; copies of a text are one document.

    Where there are few documents, of the piece of it: a memory of one book should learn, too, only not from contexts
    that are almost the same text.
    """
    documents = [document for document in store.documents() if document.rows]
    few = len({document.sha256 for document in documents}) < _FEW
    numbers: dict[tuple[str, int], int] = {}
    starts, groups = list[int](), list[int]()
    for document in documents:
        for begin in range(0, document.rows, _PIECE if few else document.rows):
            starts.append(document.first_row + begin)
            groups.append(numbers.setdefault((document.sha256, begin), len(numbers)))
    rows = store.rows_of(torch.arange(store.key_count)).numpy()
    found: NDArray[np.int64] = np.searchsorted(np.array(starts, dtype=np.int64), rows, side="right") - 1
    return np.array(groups, dtype=np.int64)[found]


def _held_out(groups: NDArray[np.int64], chosen: Tensor, seed: int) -> Tensor:
    """Mark about a tenth of the (n,) anchors, by whole documents, that the map is not trained on."""
    own = groups[chosen.numpy()]
    names, sizes = np.unique(own, return_counts=True)
    order = np.random.default_rng(seed + 1).permutation(len(names))
    before = np.cumsum(sizes[order]) - sizes[order]
    return torch.from_numpy(np.isin(own, names[order[before < _HELD_OUT * len(own)]]))


class _Pool:
    """Some keys of a memory, mapped, as an index sees them."""

    def __init__(self, store: Datastore, ids: Tensor, key_map: KeyMap | None) -> None:
        self.ids = ids
        self._store = store
        self._map = key_map

    @property
    def rows(self) -> int:
        """The number of keys."""
        return len(self.ids)

    @property
    def width(self) -> int:
        """The number of dimensions."""
        return self._store.width if self._map is None else self._map.width

    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Give (number of the first key, keys) from first to last."""
        for begin in range(0, self.rows, size):
            yield begin, self.map(self._store.take(self.ids[begin : begin + size]))

    def take(self, ids: Tensor) -> Tensor:
        """Give these keys; an id below 0 gives zeros."""
        keys = self.map(self._store.take(self.ids[ids.clamp(min=0)]))
        return keys.masked_fill_((ids < 0)[..., None], 0)

    def map(self, keys: Tensor) -> Tensor:
        """Bring keys of the memory to where these are."""
        return keys if self._map is None else self._map.apply(keys)


def mine(
    store: Datastore,
    anchors: Tensor,
    groups: NDArray[np.int64],
    *,
    count: int,
    key_map: KeyMap | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress = silent,
) -> Mined:
    """Find the nearest keys from other documents of each anchor, after `key_map` where one is given.

    On a CPU they come from the memory's FAISS index where it has one, else exactly from a sample of the keys.
    """
    limit = _POOL["cpu" if device == "cpu" else "cuda"]
    indexed = key_map is None and device == "cpu" and any(row.metric == "l2" for row, _ in stored_indexes(store))
    pool = _Pool(store, sample_keys(store, store.key_count if indexed else limit, seed=seed + 2), key_map)
    index: Index = open_index(store) if indexed else ExactIndex(pool, device=device)
    near = torch.full((len(anchors), count), -1)
    # The anchor's own document has many of its nearest keys; ask for more than are wanted.
    wanted = min(2 * count + 1, max(1, pool.rows))
    with progress("finding neighbours", total=len(anchors), unit="keys") as advance:
        for begin in range(0, len(anchors), _BLOCK):
            part = slice(begin, begin + _BLOCK)
            found: Neighbours = index.search(pool.map(store.take(anchors[part])), wanted)
            near[part] = _others(pool.ids, found.ids.cpu(), groups, groups[anchors[part].numpy()], count)
            advance(len(anchors[part]))
    values = store.values(store.rows_of(torch.where(near < 0, -1, near)))
    own = store.values(store.rows_of(anchors))
    same = (values == own[:, None]) & (near >= 0)
    weights, counts = store.counts(anchors), store.counts(near)
    if weights is None or counts is None:
        return Mined(anchors, near, same, torch.ones(len(anchors)), torch.zeros(near.shape))
    return Mined(anchors, near, same, weights, counts.clamp(min=1e-30).log())


def _others(ids: Tensor, found: Tensor, groups: NDArray[np.int64], own: NDArray[np.int64], count: int) -> Tensor:
    """Keep the first `count` (n, count) that are from other documents, as numbers of the memory's keys."""
    keys = torch.where(found < 0, -1, ids[found.clamp(min=0)])
    other = (keys >= 0) & torch.from_numpy(groups[keys.clamp(min=0).numpy()] != own[:, None])
    # A stable sort moves those that are kept to the left and leaves them in their order.
    order = (~other).to(torch.int8).sort(dim=1, stable=True).indices[:, :count]
    kept = torch.where(other, keys, -1).gather(1, order)
    return torch.nn.functional.pad(kept, (0, count - kept.shape[1]), value=-1)


def vote_log_p(mined: Mined, distances: Tensor, knn_temperature: float) -> Tensor:
    """Give the (n,) log-likelihoods of the anchors' tokens by the vote of neighbours at these (n, K) distances."""
    near, same, log_counts = (part.to(distances.device) for part in (mined.near, mined.same, mined.log_counts))
    scores = (-distances / knn_temperature + log_counts.to(distances)).masked_fill(near < 0, -torch.inf)  # (n, K)
    return scores.masked_fill(~same, -torch.inf).logsumexp(1) - scores.logsumexp(1)


class _Fit:
    """One round of training."""

    def __init__(self, store: Datastore, training: Mined, testing: Mined, *, device: torch.device, seed: int) -> None:
        self._store = store
        self._training = training
        self._testing = testing
        self._device = device
        self._seed = seed
        self._places, self._resident = self._load()

    def _load(self) -> tuple[Tensor, Tensor | None]:
        """Bring the keys of all anchors and neighbours into memory, where there is room: (u,) numbers, (u, D) keys."""
        parts = [part.flatten() for one in (self._training, self._testing) for part in (one.anchors, one.near)]
        ids = torch.cat(parts).unique()
        cuda = self._device.type == "cuda"
        room = torch.cuda.mem_get_info(self._device)[0] // 2 if cuda else _RESIDENT
        if 4 * len(ids) * self._store.width > room:
            return ids, None
        keys = torch.empty(len(ids), self._store.width, device=self._device)
        for begin in range(0, len(ids), _BLOCK):
            keys[begin : begin + _BLOCK] = self._store.take(ids[begin : begin + _BLOCK]).to(self._device)
        return ids, keys

    def _take(self, ids: Tensor) -> Tensor:
        """Give these keys, where training is."""
        if self._resident is None:
            return self._store.take(ids).to(self._device)
        return self._resident[torch.searchsorted(self._places, ids).to(self._device)]

    def best_temperature(self) -> float:
        """Find the temperature that explains the held-out anchors best before training."""
        testing = self._testing
        distances = torch.cat([part.square().sum(2) for _, part in self._batches(testing)])
        usual = float(distances[(testing.near >= 0).to(self._device)].median().clamp(min=1e-12))
        scores: dict[int, float] = {}
        steps, best, before = range(-20, 11), 0, -math.inf
        for _ in range(1 + _WIDEN):
            for step in steps:
                scores[step] = float(testing.mean(vote_log_p(testing, distances, usual * 2.0 ** (step / 2)).double()))
            best = max(scores, key=lambda step: (scores[step], -abs(step)))
            at_edge = best in (min(scores), max(scores))
            if not at_edge or scores[best] - before < _FLAT:
                break
            before = scores[best]
            steps = range(best - 20, best) if best < 0 else range(best + 1, best + 21)
        if at_edge:
            # Ever better, but hardly: the nearest alone decide, or all are alike. From there nothing could be learned.
            best = min((step for step in scores if scores[step] >= scores[best] - _FLAT), key=abs)
        return usual * math.pow(2.0, best / 2)

    def run(
        self, matrix: Tensor, knn_temperature: float, *, epochs: int, learning_rate: float, progress: Progress
    ) -> tuple[Tensor, dict[str, Any]]:
        """Train, and give the matrix that was best on the held-out anchors, and how good."""
        current = matrix.to(self._device, torch.float32).clone().requires_grad_()
        optimiser = torch.optim.Adam([current], lr=learning_rate)
        steps = epochs * math.ceil(len(self._training) / _BATCH)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, learning_rate, total_steps=steps, pct_start=0.1)
        generator = torch.Generator().manual_seed(self._seed)
        best, scores = matrix, [self._score(current, knn_temperature)]
        with progress("training the similarity", total=epochs * len(self._training), unit="anchors") as advance:
            for _ in range(epochs):
                shuffled = self._training.select(torch.randperm(len(self._training), generator=generator))
                for batch, differences in self._batches(shuffled):
                    loss = -batch.mean(vote_log_p(batch, (differences @ current).square().sum(2), knn_temperature))
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
                    schedule.step()
                    advance(len(batch))
                scores.append(self._score(current, knn_temperature))
                if scores[-1] > max(scores[:-1]):
                    best = current.detach().cpu().clone()
        figures = {"before": scores[0], "after": max(scores), "each": scores, "trained_on": len(self._training)}
        return best, figures

    @torch.no_grad()
    def _score(self, matrix: Tensor, knn_temperature: float) -> float:
        """Give the mean log-likelihood of the held-out anchors."""
        parts = [
            vote_log_p(batch, (part @ matrix).square().sum(2), knn_temperature)
            for batch, part in self._batches(self._testing)
        ]
        return float(self._testing.mean(torch.cat(parts).double()))

    def _batches(self, mined: Mined) -> Iterator[tuple[Mined, Tensor]]:
        """Give a few anchors at a time, and how their keys differ from their neighbours', (n, K, D)."""
        for rows in torch.arange(len(mined)).split(_BATCH):
            batch = mined.select(rows)
            yield batch, self._take(batch.near) - self._take(batch.anchors)[:, None]


def train_key_metric(
    store: Datastore,
    out: str | Path,
    *,
    width: int | None = None,
    anchors: int = 40_000,
    neighbours: int = 128,
    rounds: int = 1,
    epochs: int = 3,
    learning_rate: float = 5e-4,
    knn_temperature: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress = silent,
) -> Datastore:
    """Write the memory with the keys that `learn_map` maps, going on with an unfinished run of the same call.

    A run may go on on another device, or with another number of threads.
    """
    check_out(store, out)
    settings: dict[str, Any] = {
        "width": width,
        "anchors": anchors,
        "neighbours": neighbours,
        "rounds": rounds,
        "epochs": epochs,
        "learning_rate": learning_rate,
        "knn_temperature": knn_temperature,
        "seed": seed,
    }
    learnt = learnt_file(out)
    wanted = {"store": store.fingerprint, **settings}
    if learnt.exists():
        key_map = _load(learnt, wanted)
    else:
        key_map = train_key_map(store, **settings, device=device, progress=progress)
        with translate_os_errors(learnt):
            learnt.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"matrix": key_map.matrix.float(), "centre": key_map.centre.float()}
        save_tensors(learnt, tensors, {"settings": wanted, "facts": key_map.facts})
    made = derive(store, out, key_map=key_map, facts={"settings": settings}, progress=progress)
    learnt.unlink(missing_ok=True)
    return made


def learnt_file(out: str | Path) -> Path:
    """Say where the map is kept while the memory is written: beside it, because a memory's folder has only its own."""
    place = Path(out).resolve()
    return place.with_name(f"{place.name}.map.safetensors")


def _load(path: Path, wanted: dict[str, Any]) -> KeyMap:
    """Read what an earlier run has learnt with these settings."""
    tensors, facts = load_tensors(path)
    check_same(path, facts.get("settings"), wanted)
    try:
        return KeyMap(tensors["matrix"].float(), tensors["centre"].float(), dict(facts["facts"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DatastoreCorrupt(f"{path} is not a readable map of keys ({error}). Remove it.") from None
