"""Training of a similarity: a linear map of a store's keys, learned from the store alone.

Contexts with the same next token should be near. For some keys (anchors) and their nearest keys from other documents,
the map A maximises the leave-one-out likelihood of the vote,

    log Σ over j with value_j = value_i of softmax_j(-|(key_i - key_j) A|² / τ + log count_j)

with τ fixed at its best value before training, so that a temperature that suited the old keys stays about right. In a
store with merged keys, count_j is the number of contexts a key stands for, and anchors are weighted likewise; else 1.

Training and copying the store may each take minutes. The learned map is kept beside the new store, in
OUT.map.safetensors, until the copy is finished, so that a run that was stopped while copying does not train again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
from knnlm.progress import Progress, silent
from knnlm.training.trainer import (
    MIN_DOCUMENTS,
    BestParameters,
    Checkpoint,
    check_minimum,
    check_positive,
    select_held_out,
)

_BATCH_ANCHORS = 128
_QUERIES_PER_SEARCH = 1024
_MAX_EXACT_KEYS = {"cpu": 200_000, "cuda": 4_000_000}  # sampled for the exact search of neighbours
_MAX_RESIDENT_BYTES = 1 << 30
_HELD_OUT = 0.1  # of the anchors
_PIECE_TOKENS = 1024  # documents are cut into pieces of this size if there are few
_MAX_WIDENINGS = 4  # of the range of temperatures; each by a factor of 1024
_MIN_GAIN = 0.01  # nats: a smaller gain does not justify an extreme temperature


@dataclass(frozen=True)
class KeyMetricConfig:
    """Options of `train_key_metric` that decide its result.

    Each round after the first searches the neighbours with the map learned so far.
    """

    width: int | None = None  # dimensions after the map; None: as many as before
    anchors: int = 40_000
    neighbours: int = 128
    rounds: int = 1
    epochs: int = 3
    learning_rate: float = 5e-4
    knn_temperature: float | None = None  # None: the best one before training
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimum(self, {"width": 1, "anchors": 1, "neighbours": 1, "rounds": 1, "epochs": 1})
        check_positive(self, ["learning_rate", "knn_temperature"])


@dataclass(frozen=True)
class AnchorNeighbours:
    """Anchors and their nearest keys from other documents."""

    anchors: Tensor  # (n,) key numbers
    near: Tensor  # (n, K) key numbers; -1 = none
    same: Tensor  # (n, K) whether the neighbour has the anchor's token
    weights: Tensor  # (n,) the number of contexts the anchor stands for
    log_counts: Tensor  # (n, K) the logarithm of the number of contexts the neighbour stands for

    def __len__(self) -> int:
        return len(self.anchors)

    def select(self, chosen: Tensor) -> AnchorNeighbours:
        """Return these anchors only."""
        return AnchorNeighbours(
            self.anchors[chosen], self.near[chosen], self.same[chosen], self.weights[chosen], self.log_counts[chosen]
        )

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of (n,) values, weighted by the contexts each anchor stands for."""
        weights = self.weights.to(values)
        return (values * weights).sum() / weights.sum()


def train_key_metric(
    store: Datastore,
    out: str | Path,
    config: KeyMetricConfig | None = None,
    *,
    device: str = "cpu",
    progress: Progress = silent,
) -> Datastore:
    """Write a copy of the store with the keys that `train_key_map` maps, resuming an unfinished run of the same call.

    A run may resume on another device, or with another number of threads.
    """
    check_out(store, out)
    config = config or KeyMetricConfig()
    settings = asdict(config)
    checkpoint = Checkpoint(map_file(out), {"store": store.fingerprint, **settings})
    saved = checkpoint.load()
    if saved is not None:
        key_map = _saved_map(checkpoint.path, *saved)
    else:
        key_map = train_key_map(store, config, device=device, progress=progress)
        with translate_os_errors(checkpoint.path):
            checkpoint.path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"matrix": key_map.matrix.float(), "centre": key_map.centre.float()}
        checkpoint.save(tensors, key_map.metadata)
    copy = derive(store, out, key_map=key_map, metadata={"settings": settings}, progress=progress)
    checkpoint.path.unlink(missing_ok=True)
    return copy


def map_file(out: str | Path) -> Path:
    """Return where the map is kept while the store is written: beside the store's folder."""
    folder = Path(out).resolve()
    return folder.with_name(f"{folder.name}.map.safetensors")


def _saved_map(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> KeyMap:
    try:
        return KeyMap(tensors["matrix"].float(), tensors["centre"].float(), metadata)
    except (KeyError, TypeError, ValueError) as error:
        raise DatastoreCorrupt(f"{path}: not a readable key map ({error}). Remove it.") from None


def train_key_map(
    store: Datastore, config: KeyMetricConfig | None = None, *, device: str = "cpu", progress: Progress = silent
) -> KeyMap:
    """Return the map learned from a store's keys; the same for the same seed."""
    config = config or KeyMetricConfig()
    width = _checked_width(store, config)
    groups = key_documents(store)
    anchors = sample_keys(store, config.anchors, seed=config.seed)
    held_out = _mark_held_out(groups, anchors, config.seed)
    start = principal_components(store, width, seed=config.seed)
    matrix = torch.eye(store.width) if width == store.width else start.matrix
    knn_temperature = config.knn_temperature
    rounds: list[dict[str, Any]] = []
    for number in range(config.rounds):
        neighbours = find_neighbours(
            store,
            anchors,
            groups,
            count=config.neighbours,
            key_map=KeyMap(matrix, start.centre) if number else None,
            seed=config.seed,
            device=device,
            progress=progress,
        )
        split = _split(neighbours, held_out)
        trainer = _MapTrainer(store, *split, device=torch.device(device), seed=config.seed + number)
        if knn_temperature is None:
            knn_temperature = trainer.best_temperature()
        matrix, scores = trainer.run(matrix, knn_temperature, config, progress)
        rounds.append(scores)
    metadata = {
        "kind": "trained similarity",
        "knn_temperature": knn_temperature,
        "anchors": len(anchors),
        "neighbours": config.neighbours,
        "seed": config.seed,
        "learning_rate": config.learning_rate,
        "rounds": rounds,
    }
    return KeyMap(matrix, start.centre, metadata)


def _checked_width(store: Datastore, config: KeyMetricConfig) -> int:
    width = config.width if config.width is not None else store.width
    if width > store.width:
        raise ParameterError(
            f"width must be from 1 to {store.width}, the width of the keys of {store.path}, not {width}."
        )
    return width


def _split(neighbours: AnchorNeighbours, held_out: Tensor) -> tuple[AnchorNeighbours, AnchorNeighbours]:
    """Return the anchors for training and those for evaluation, without anchors whose neighbours are all alike."""
    useful = neighbours.same.any(1) & ((neighbours.near >= 0) & ~neighbours.same).any(1)
    training, testing = neighbours.select(useful & ~held_out), neighbours.select(useful & held_out)
    if not len(training) or not len(testing):
        raise ParameterError(
            f"The store is too small to learn from: of {len(neighbours):,} keys, {int(useful.sum()):,} have neighbours "
            "in other documents, some with their token and some with another."
        )
    return training, testing


def key_documents(store: Datastore) -> NDArray[np.int64]:
    """Return the (K,) document number of each key; copies of a text count as one document.

    If there are few documents, they are cut into pieces: a store of one book can be learned from too, only not from
    contexts that are almost the same text.
    """
    documents = [document for document in store.documents() if document.entries]
    few = len({document.sha256 for document in documents}) < MIN_DOCUMENTS
    numbers: dict[tuple[str, int], int] = {}
    starts, groups = list[int](), list[int]()
    for document in documents:
        for begin in range(0, document.entries, _PIECE_TOKENS if few else document.entries):
            starts.append(document.first_entry + begin)
            groups.append(numbers.setdefault((document.sha256, begin), len(numbers)))
    rows = store.entries_of(torch.arange(store.key_count)).numpy()
    pieces: NDArray[np.int64] = np.searchsorted(np.array(starts, dtype=np.int64), rows, side="right") - 1
    return np.array(groups, dtype=np.int64)[pieces]


def _mark_held_out(groups: NDArray[np.int64], anchors: Tensor, seed: int) -> Tensor:
    """Return which of the (n,) anchors are held out: about a tenth, in whole documents."""
    own = groups[anchors.numpy()]
    names, sizes = np.unique(own, return_counts=True)
    order = np.random.default_rng(seed + 1).permutation(len(names))
    chosen = select_held_out(sizes[order].tolist(), _HELD_OUT * len(own))
    return torch.from_numpy(np.isin(own, names[order[chosen]]))


class _MappedKeys:
    """Some keys of a store, mapped, as vectors for an index."""

    def __init__(self, store: Datastore, ids: Tensor, key_map: KeyMap | None) -> None:
        self.ids, self._store, self._map = ids, store, key_map

    @property
    def rows(self) -> int:
        """The number of keys."""
        return len(self.ids)

    @property
    def width(self) -> int:
        """The number of dimensions."""
        return self._store.width if self._map is None else self._map.width

    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (number of the first key, keys) in order."""
        for begin in range(0, self.rows, size):
            yield begin, self.map(self._store.take(self.ids[begin : begin + size]))

    def take(self, ids: Tensor) -> Tensor:
        """Return these keys; zeros for an id below 0."""
        keys = self.map(self._store.take(self.ids[ids.clamp(min=0)]))
        return keys.masked_fill_((ids < 0)[..., None], 0)

    def map(self, keys: Tensor) -> Tensor:
        """Return keys of the store after the map."""
        return keys if self._map is None else self._map.apply(keys)


def find_neighbours(
    store: Datastore,
    anchors: Tensor,
    groups: NDArray[np.int64],
    *,
    count: int,
    key_map: KeyMap | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress = silent,
) -> AnchorNeighbours:
    """Return the nearest keys from other documents of each anchor, after `key_map` if there is one.

    On a CPU the store's FAISS index is searched if it has one, else a sample of the keys exactly.
    """
    limit = _MAX_EXACT_KEYS["cpu" if device == "cpu" else "cuda"]
    indexed = key_map is None and device == "cpu" and any(row.metric == "l2" for row, _ in stored_indexes(store))
    keys = _MappedKeys(store, sample_keys(store, store.key_count if indexed else limit, seed=seed + 2), key_map)
    index: Index = open_index(store) if indexed else ExactIndex(keys, device=device)
    near = torch.full((len(anchors), count), -1)
    # Many of the nearest keys are from the anchor's own document, so search for more than are needed.
    k = min(2 * count + 1, max(1, keys.rows))
    with progress("finding neighbours", total=len(anchors), unit="keys") as advance:
        for begin in range(0, len(anchors), _QUERIES_PER_SEARCH):
            part = slice(begin, begin + _QUERIES_PER_SEARCH)
            neighbours: Neighbours = index.search(keys.map(store.take(anchors[part])), k)
            own = groups[anchors[part].numpy()]
            near[part] = _from_other_documents(keys.ids, neighbours.ids.cpu(), groups, own, count)
            advance(len(anchors[part]))
    values = store.values(store.entries_of(torch.where(near < 0, -1, near)))
    same = (values == store.values(store.entries_of(anchors))[:, None]) & (near >= 0)
    weights, counts = store.counts(anchors), store.counts(near)
    if weights is None or counts is None:
        return AnchorNeighbours(anchors, near, same, torch.ones(len(anchors)), torch.zeros(near.shape))
    return AnchorNeighbours(anchors, near, same, weights, counts.clamp(min=1e-30).log())


def _from_other_documents(
    ids: Tensor, neighbours: Tensor, groups: NDArray[np.int64], own: NDArray[np.int64], count: int
) -> Tensor:
    """Return the first `count` neighbours from other documents, (n, count), as key numbers of the store."""
    keys = torch.where(neighbours < 0, -1, ids[neighbours.clamp(min=0)])
    other = (keys >= 0) & torch.from_numpy(groups[keys.clamp(min=0).numpy()] != own[:, None])
    # A stable sort moves the kept ones to the left in their order.
    order = (~other).to(torch.int8).sort(dim=1, stable=True).indices[:, :count]
    kept = torch.where(other, keys, -1).gather(1, order)
    return torch.nn.functional.pad(kept, (0, count - kept.shape[1]), value=-1)


def vote_log_p(neighbours: AnchorNeighbours, distances: Tensor, knn_temperature: float) -> Tensor:
    """Return the (n,) log-likelihoods of the anchors' tokens by the vote of neighbours at these (n, K) distances."""
    near, same = neighbours.near.to(distances.device), neighbours.same.to(distances.device)
    log_counts = neighbours.log_counts.to(distances)
    scores = (-distances / knn_temperature + log_counts).masked_fill(near < 0, -torch.inf)  # (n, K)
    return scores.masked_fill(~same, -torch.inf).logsumexp(1) - scores.logsumexp(1)


class _MapTrainer:
    """One round of training."""

    def __init__(
        self,
        store: Datastore,
        training: AnchorNeighbours,
        testing: AnchorNeighbours,
        *,
        device: torch.device,
        seed: int,
    ) -> None:
        self._store, self._training, self._testing = store, training, testing
        self._device, self._seed = device, seed
        self._ids, self._resident = self._load_keys()

    def _load_keys(self) -> tuple[Tensor, Tensor | None]:
        """Return the (u,) numbers of all keys in use and their (u, D) keys, None if they do not fit in memory."""
        both = self._training, self._testing
        ids = torch.cat([keys.flatten() for one in both for keys in (one.anchors, one.near)]).unique()
        cuda = self._device.type == "cuda"
        limit = torch.cuda.mem_get_info(self._device)[0] // 2 if cuda else _MAX_RESIDENT_BYTES
        if 4 * len(ids) * self._store.width > limit:
            return ids, None
        keys = torch.empty(len(ids), self._store.width, device=self._device)
        for begin in range(0, len(ids), _QUERIES_PER_SEARCH):
            chunk = ids[begin : begin + _QUERIES_PER_SEARCH]
            keys[begin : begin + len(chunk)] = self._store.take(chunk).to(self._device)
        return ids, keys

    def _take(self, ids: Tensor) -> Tensor:
        if self._resident is None:
            return self._store.take(ids).to(self._device)
        return self._resident[torch.searchsorted(self._ids, ids).to(self._device)]

    def best_temperature(self) -> float:
        """Return the temperature with the highest likelihood of the held-out anchors before training."""
        testing = self._testing
        distances = torch.cat([part.square().sum(2) for _, part in self._batches(testing)])
        median = float(distances[(testing.near >= 0).to(self._device)].median().clamp(min=1e-12))
        scores: dict[int, float] = {}
        steps, best, before = range(-20, 11), 0, -math.inf
        for _ in range(1 + _MAX_WIDENINGS):
            for step in steps:
                scores[step] = float(testing.mean(vote_log_p(testing, distances, median * 2.0 ** (step / 2)).double()))
            best = max(scores, key=lambda step: (scores[step], -abs(step)))
            at_edge = best in (min(scores), max(scores))
            if not at_edge or scores[best] - before < _MIN_GAIN:
                break
            before = scores[best]
            steps = range(best - 20, best) if best < 0 else range(best + 1, best + 21)
        if at_edge:
            # An extreme temperature gains next to nothing: either the nearest neighbour alone decides or all count
            # alike, and nothing could be learned from there.
            best = min((step for step in scores if scores[step] >= scores[best] - _MIN_GAIN), key=abs)
        return median * math.pow(2.0, best / 2)

    def run(
        self, matrix: Tensor, knn_temperature: float, config: KeyMetricConfig, progress: Progress
    ) -> tuple[Tensor, dict[str, Any]]:
        """Train, and return the matrix with the best score on the held-out anchors, and the scores."""
        current = matrix.to(self._device, torch.float32).clone().requires_grad_()
        optimiser = torch.optim.Adam([current], lr=config.learning_rate)
        steps = config.epochs * math.ceil(len(self._training) / _BATCH_ANCHORS)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, config.learning_rate, total_steps=steps, pct_start=0.1
        )
        generator = torch.Generator().manual_seed(self._seed)
        best, scores = BestParameters({"matrix": matrix}), [self._score(current, knn_temperature)]
        total = config.epochs * len(self._training)
        with progress("training the similarity", total=total, unit="anchors") as advance:
            for _ in range(config.epochs):
                shuffled = self._training.select(torch.randperm(len(self._training), generator=generator))
                for batch, differences in self._batches(shuffled):
                    loss = -batch.mean(vote_log_p(batch, (differences @ current).square().sum(2), knn_temperature))
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
                    schedule.step()
                    advance(len(batch))
                score = self._score(current, knn_temperature)
                best.update({"matrix": current}, -score, -max(scores))
                scores.append(score)
        summary = {"before": scores[0], "after": max(scores), "each": scores, "trained_on": len(self._training)}
        return best.tensors["matrix"], summary

    @torch.no_grad()
    def _score(self, matrix: Tensor, knn_temperature: float) -> float:
        """Return the mean log-likelihood of the held-out anchors."""
        parts = [
            vote_log_p(batch, (part @ matrix).square().sum(2), knn_temperature)
            for batch, part in self._batches(self._testing)
        ]
        return float(self._testing.mean(torch.cat(parts).double()))

    def _batches(self, neighbours: AnchorNeighbours) -> Iterator[tuple[AnchorNeighbours, Tensor]]:
        """Yield some anchors at a time and the differences of their keys to their neighbours', (n, K, D)."""
        for chosen in torch.arange(len(neighbours)).split(_BATCH_ANCHORS):
            batch = neighbours.select(chosen)
            yield batch, self._take(batch.near) - self._take(batch.anchors)[:, None]
