"""Predictions of retrieval at the positions of its own store, as targets for the training of a decoder.

p(y | position) = Σ over the k nearest other entries i with value y of softmax(-distance_i / τ)

A position is excluded by its number, not by being the nearest: an equal context may come before it.

targets/
  targets.json   the store, the options, and how many positions are done
  offsets.npy    (N + 1,) where the tokens of each position begin
  tokens.npy     the tokens of all positions, the most probable of each first
  probs.npy      their probabilities in float16

The arrays grow batch by batch, and targets.json records how much of them is valid. What a killed process wrote beyond
that is truncated by the next one, so it ends with the same bytes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore.indexes import open_index
from knnlm.datastore.integrity import load_metadata
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.segments import open_array, write_header
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, DatastoreError, ParameterError
from knnlm.io import atomic_write, translate_os_errors
from knnlm.lm.loading import choose_device
from knnlm.memories.voting import by_token, check_vote
from knnlm.progress import Progress, silent
from knnlm.training.data import stored_tokens, tokens_hash
from knnlm.training.trainer import check_choices, check_minimum, check_same_settings, output_folder

EXCLUSIONS = ("self", "document")
TARGETS_FILE = "targets.json"
TARGETS_FORMAT = 1
OFFSETS, TOKENS, PROBS = "offsets.npy", "tokens.npy", "probs.npy"

MODEL_TEACHER = "model"  # the kind of targets that a model predicts

_MIN_PROBABILITY = 2.0**-24  # the smallest number above 0 in float16
_REMAKE = "Remove the folder and make the targets again."
_DENSE_BYTES = 4 + 2  # of the id and the probability of each of k neighbours, if all were stored


class SparseTargets(NamedTuple):
    """Some tokens of each of n positions and their probabilities, most probable first, padded with 0."""

    ids: Tensor  # (n, m) int64
    probs: Tensor  # (n, m) float32; a row sums to 1, or to 0 for a position without a target
    lengths: Tensor  # (n,) int64


class Teacher(Protocol):
    """A source of target distributions: `Targets` from disk, or `RetrievalTeacher` on the fly."""

    @property
    def token_count(self) -> int: ...
    @property
    def metadata(self) -> dict[str, Any]: ...
    def lookup(self, positions: Tensor) -> SparseTargets:
        """Return the targets of (n,) positions; a position below 0 has none."""


@dataclass(frozen=True)
class TeacherConfig:
    """How the neighbours vote, what is excluded, and how much of the vote is kept.

    The most probable tokens are kept until they cover `mass`, at most `top`. `exclude` is what a position may not
    retrieve: itself, or its whole document.
    """

    k: int = 1024
    knn_temperature: float = 2.0
    exclude: str = "self"
    top: int = 64
    mass: float = 0.99

    def __post_init__(self) -> None:
        check_vote(self.k, self.knn_temperature)
        check_choices(self, {"exclude": EXCLUSIONS})
        check_kept(self, self.mass)


def check_kept(config: object, mass: float) -> None:
    """Raise if no token of a target would be kept."""
    check_minimum(config, {"top": 1})
    if not 0 < mass <= 1:
        raise ParameterError(f"mass must be above 0 and at most 1, not {mass}.")


class PlannedTeacher:
    """The metadata of a store's targets without the targets: enough to recognise what was trained from them."""

    def __init__(self, store: Datastore, config: TeacherConfig) -> None:
        self.store, self.config = store, config

    @property
    def token_count(self) -> int:
        """The number of positions."""
        return self.store.entry_count

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """What the targets depend on; reads all tokens."""
        text = tokens_hash(stored_tokens(self.store))
        return {"teacher": self.store.fingerprint, "text": text, **asdict(self.config)}

    def lookup(self, positions: Tensor) -> SparseTargets:
        """Raise: there are no targets."""
        raise NotImplementedError


class RetrievalTeacher(PlannedTeacher):
    """Retrieves the targets of a store's own positions on the fly.

    With exclude="document", all entries of a position's document are excluded, and copies of it: equal texts are one
    document.
    """

    def __init__(self, store: Datastore, config: TeacherConfig, *, device: str = "cpu") -> None:
        check_unpruned(store)
        super().__init__(store, config)
        self._index = open_index(store, device=device)
        self._documents = _document_numbers(store) if config.exclude == "document" else None
        # A position's document may contain many of its nearest entries: search for at most k more.
        excluded = 1
        if self._documents is not None:
            excluded = min(int(self._documents.bincount().max()), config.k) if store.entry_count else 0
        self._search_k = max(1, min(config.k + excluded, store.entry_count))

    def lookup(self, positions: Tensor) -> SparseTargets:
        """Return the targets of (n,) positions; a position below 0 has none."""
        return self.retrieve(positions)[0]

    def retrieve(self, positions: Tensor) -> tuple[SparseTargets, Tensor]:
        """Return the targets of (n,) positions and the (n,) kept probability; 0 without any neighbour."""
        neighbours = self._index.search(self.store.take(positions), self._search_k)
        own = positions.to(neighbours.ids.device)
        other = (neighbours.ids >= 0) & (own >= 0)[:, None]
        if self._documents is None:
            other &= neighbours.ids != own[:, None]
        else:
            self._documents = documents = self._documents.to(neighbours.ids.device)  # stays there
            other &= documents[neighbours.ids.clamp(min=0)] != documents[own.clamp(min=0)][:, None]
        # One more than k is searched for: if ties kept the position itself out of the result, drop the last one.
        other &= other.cumsum(1) <= self.config.k
        values = self.store.values(torch.where(other, neighbours.ids, -1))
        tokens, probs = token_probabilities(values, neighbours.distances, self.config.knn_temperature)
        return sparsify(tokens, probs, top=self.config.top, mass=self.config.mass)


def check_unpruned(store: Datastore) -> None:
    """Raise if not every token of the store has a key of its own."""
    if store.key_count != store.entry_count or store.counts(torch.zeros(0, dtype=torch.int64)) is not None:
        raise DatastoreError(
            f"{store.path} was pruned: it has {store.key_count:,} keys for {store.entry_count:,} tokens, and a teacher "
            "needs one for each. Use the store as it was built."
        )


def token_probabilities(values: Tensor, distances: Tensor, knn_temperature: float) -> tuple[Tensor, Tensor]:
    """Return the tokens that (n, k) neighbours vote for, ascending and padded with -1, and their probabilities."""
    scores = (-distances.double() / knn_temperature).masked_fill(values < 0, -torch.inf)
    weights = scores.softmax(1).nan_to_num(nan=0.0)  # no neighbours: no weights
    ordered, order, group = by_token(values)
    probs = torch.zeros_like(weights).scatter_add_(1, group, weights.gather(1, order))
    return torch.full_like(ordered, -1).scatter_(1, group, ordered), probs


def sparsify(tokens: Tensor, probs: Tensor, *, top: int, mass: float) -> tuple[SparseTargets, Tensor]:
    """Keep the most probable tokens until they cover the mass, at most `top`; ties are broken by token number."""
    probs, order = probs.sort(dim=1, descending=True, stable=True)
    probs, order = probs[:, :top], order[:, :top]
    kept = (probs.cumsum(1) - probs < mass) & (probs >= _MIN_PROBABILITY)
    lengths = kept.sum(1)
    width = int(lengths.max()) if len(lengths) else 0
    probs = (probs * kept)[:, :width]
    total = probs.sum(1)
    normalised = (probs / total.clamp(min=_MIN_PROBABILITY)[:, None]).float()
    ids = tokens.gather(1, order[:, :width]).masked_fill(~kept[:, :width], 0)
    return SparseTargets(ids, normalised, lengths), total


def _document_numbers(store: Datastore) -> Tensor:
    """Return the (N,) number of the document of each token; equal texts have one number."""
    numbers: dict[str, int] = {}
    documents = np.empty(store.entry_count, dtype=np.int64)
    for document in store.documents():
        number = numbers.setdefault(document.sha256, len(numbers))
        documents[document.first_entry : document.first_entry + document.entries] = number
    return torch.from_numpy(documents)


@dataclass
class _Done:
    """How much of the arrays is valid."""

    positions: int = 0
    tokens: int = 0  # of all targets together
    answered: int = 0  # positions with a target
    mass: float = 0.0  # summed over them
    seconds: float = 0.0


class Targets:
    """Finished targets, memory-mapped."""

    def __init__(self, path: Path, settings: dict[str, Any], done: _Done) -> None:
        self.path = path
        self.settings = settings  # teacher, text, entries, vocab_size, and the fields of the teacher's configuration
        self.token_count, self._done = done.positions, done
        self._offsets = open_array(path / OFFSETS, np.int64, (done.positions + 1,))
        self._tokens = open_array(path / TOKENS, _token_dtype(settings["vocab_size"]), (done.tokens,))
        self._probs = open_array(path / PROBS, np.float16, (done.tokens,))

    @classmethod
    def open(cls, path: str | Path) -> Targets:
        """Open what `make_targets` finished."""
        folder = Path(path)
        settings, done = _load(folder)
        if done.positions != settings["entries"]:
            raise DatastoreError(
                f"{folder}: the targets are unfinished ({done.positions:,} of {settings['entries']:,} tokens are "
                "done). Run the same command again to finish them."
            )
        return cls(folder, settings, done)

    @property
    def metadata(self) -> dict[str, Any]:
        """The settings, and figures on the result."""
        size = sum((self.path / name).stat().st_size for name in (OFFSETS, TOKENS, PROBS))
        bytes_per_token = size / max(1, self.token_count)
        dense_bytes = _DENSE_BYTES * self.settings.get("k", self.settings["vocab_size"])
        return {
            **self.settings,
            "tokens_per_position": self._done.tokens / max(1, self.token_count),
            "without_target": self.token_count - self._done.answered,
            "kept_mass": self._done.mass / max(1, self._done.answered),
            "bytes_per_token": bytes_per_token,
            "dense_bytes_per_token": dense_bytes,
            "share_of_dense": bytes_per_token / dense_bytes,
            "seconds": self._done.seconds,
        }

    def lookup(self, positions: Tensor) -> SparseTargets:
        """Return the targets of (n,) positions; a position below 0 has none."""
        wanted = positions.cpu().numpy()
        if wanted.max(initial=-1) >= self.token_count:
            raise IndexError(f"position {wanted.max()} of {self.token_count}")
        starts, lengths = np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.int64)
        valid = wanted >= 0
        starts[valid] = self._offsets[wanted[valid]]
        lengths[valid] = self._offsets[wanted[valid] + 1] - starts[valid]
        end = (starts + lengths).max(initial=0)
        if starts.min(initial=0) < 0 or lengths.min(initial=0) < 0 or end > len(self._tokens):
            raise DatastoreCorrupt(f"{self.path / OFFSETS}: offsets out of order or range. {_REMAKE}")
        step = np.arange(int(lengths.max(initial=0)))
        used = step < lengths[:, None]  # (n, m)
        places = np.where(used, starts[:, None] + step, 0)
        ids, probs = np.zeros(places.shape, np.int64), np.zeros(places.shape, np.float32)
        ids[used], probs[used] = self._tokens[places[used]], self._probs[places[used]]
        sound = np.isfinite(probs).all() and probs.min(initial=0) >= 0
        if not sound or ids.min(initial=0) < 0 or ids.max(initial=0) >= self.settings["vocab_size"]:
            raise DatastoreCorrupt(f"{self.path}: tokens or probabilities out of range. {_REMAKE}")
        # Rounding to float16 changed their sum a little.
        probs /= np.maximum(probs.sum(1, keepdims=True), 1e-12)
        return SparseTargets(torch.from_numpy(ids), torch.from_numpy(probs), torch.from_numpy(lengths))


def make_targets(
    store: Datastore,
    out: str | Path,
    config: TeacherConfig | None = None,
    *,
    device: str = "auto",
    batch: int | None = None,
    checkpoint_every: float = 20.0,
    progress: Progress = silent,
) -> Targets:
    """Retrieve the targets of all positions of a store, resuming unfinished targets of the same call.

    `batch` is the number of positions per search; `checkpoint_every` is in seconds.
    """
    where = choose_device(device)
    config = config or TeacherConfig()
    batch = batch if batch is not None else (4096 if where.type == "cuda" else 512)
    if batch < 1:
        raise ParameterError(f"batch must be at least 1, not {batch}.")
    check_unpruned(store)
    folder = output_folder(out)

    def retrieved(first: int) -> Iterator[tuple[SparseTargets, Tensor]]:
        teacher = RetrievalTeacher(store, config, device=str(where))
        for begin in range(first, store.entry_count, batch):
            yield teacher.retrieve(torch.arange(begin, min(begin + batch, store.entry_count)))

    shape = {"entries": store.entry_count, "vocab_size": int(store.model["vocab_size"])}
    settings = {**PlannedTeacher(store, config).metadata, **shape}
    return write_targets(
        folder, settings, retrieved, what="retrieving targets", every=checkpoint_every, progress=progress
    )


def write_targets(
    folder: Path,
    settings: dict[str, Any],
    make: Callable[[int], Iterator[tuple[SparseTargets, Tensor]]],
    *,
    what: str,
    every: float,
    progress: Progress,
) -> Targets:
    """Write the targets of all positions, resuming unfinished ones with the same settings.

    `make` yields the targets of consecutive positions from the given one on, and the (n,) probability that they kept.
    """
    entries: int = settings["entries"]
    with writer_lock(folder, create=True):
        done = _Done()
        if (folder / TARGETS_FILE).exists():
            found, done = _load(folder)
            check_same_settings(folder, found, settings)
        if done.positions < entries or not (folder / OFFSETS).exists():
            writer = _TargetsWriter(folder, settings, done, every=every)
            with progress(what, total=entries, unit="tokens") as advance:
                advance(done.positions)
                for targets, masses in make(done.positions):
                    writer.add(targets, masses)
                    advance(len(masses))
            writer.close()
    return Targets.open(folder)


class _TargetsWriter:
    """Appends targets to the arrays and records now and then how much of them is valid."""

    def __init__(self, folder: Path, settings: dict[str, Any], done: _Done, *, every: float) -> None:
        self._folder, self._settings, self._done, self._every = folder, settings, done, every
        self._offsets = _GrowingArray(folder / OFFSETS, np.int64, done.positions + 1 if done.positions else 0)
        self._tokens = _GrowingArray(folder / TOKENS, _token_dtype(settings["vocab_size"]), done.tokens)
        self._probs = _GrowingArray(folder / PROBS, np.float16, done.tokens)
        if not done.positions:
            self._offsets.append(np.zeros(1))
        self._saved = time.monotonic()
        self._begun = self._saved - done.seconds

    def add(self, targets: SparseTargets, masses: Tensor) -> None:
        """Append the targets of the next positions."""
        done = self._done
        lengths = targets.lengths.cpu().numpy()
        used = np.arange(targets.ids.shape[1]) < lengths[:, None]
        self._offsets.append(done.tokens + lengths.cumsum())
        self._tokens.append(targets.ids.cpu().numpy()[used])
        self._probs.append(targets.probs.cpu().numpy()[used])
        done.positions, done.tokens = done.positions + len(lengths), done.tokens + int(lengths.sum())
        done.answered, done.mass = done.answered + int((lengths > 0).sum()), done.mass + float(masses.sum())
        if time.monotonic() - self._saved >= self._every and done.positions < self._settings["entries"]:
            self._save()

    def close(self) -> None:
        """Record all of it and close the files."""
        self._save()
        for array in (self._offsets, self._tokens, self._probs):
            array.close()

    def _save(self) -> None:
        self._done.seconds = time.monotonic() - self._begun
        for array in (self._offsets, self._tokens, self._probs):
            array.sync()
        content = {"format": TARGETS_FORMAT, "settings": self._settings, "done": asdict(self._done)}
        with atomic_write(self._folder / TARGETS_FILE) as partial:
            partial.write_text(json.dumps(content, indent=2))
        self._saved = time.monotonic()


def _load(folder: Path) -> tuple[dict[str, Any], _Done]:
    """Read and validate targets.json."""
    file = folder / TARGETS_FILE
    missing = f"There are no targets in {folder}: it has no {TARGETS_FILE}."
    content = load_metadata(file, version=TARGETS_FORMAT, missing=missing, advice=_REMAKE)
    settings, done = (part if isinstance(part, dict) else {} for part in (content.get("settings"), content.get("done")))
    kinds = {"teacher": str, "text": str, "entries": int, "vocab_size": int, "top": int}
    if settings.get("kind") != MODEL_TEACHER:
        kinds |= {"k": int, "exclude": str}
    for name, kind in kinds.items():
        value = settings.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
            raise DatastoreCorrupt(f"{file}: the setting {name} is missing or invalid. {_REMAKE}")
    try:
        loaded = _Done(**done)
    except TypeError:
        loaded = _Done(positions=-1)
    counts = (loaded.positions, loaded.tokens, loaded.answered)
    if not all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in counts):
        raise DatastoreCorrupt(f"{file}: the number of finished positions is missing or invalid. {_REMAKE}")
    if not all(isinstance(value, (int, float)) for value in (loaded.mass, loaded.seconds)) or settings.get("k", 1) < 1:
        raise DatastoreCorrupt(f"{file}: a figure is not a number. {_REMAKE}")
    return settings, loaded


class _GrowingArray:
    """A one-dimensional .npy file that is truncated to its valid length and appended to."""

    def __init__(self, path: Path, dtype: Any, length: int) -> None:
        self._path, self._dtype, self._length = path, np.dtype(dtype), length
        with translate_os_errors(path):
            self._file = path.open("r+b" if length and path.exists() else "w+b")
            self._write_header()
            end = self._file.tell() + length * self._dtype.itemsize
            if self._file.seek(0, os.SEEK_END) < end:
                self._file.close()
                raise DatastoreCorrupt(f"{path}: shorter than recorded in {TARGETS_FILE}. {_REMAKE}")
            self._file.truncate(end)
            self._file.seek(end)

    def append(self, array: NDArray[Any]) -> None:
        """Write an array at the end."""
        with translate_os_errors(self._path):
            self._file.write(np.ascontiguousarray(array, dtype=self._dtype).tobytes())
        self._length += len(array)

    def sync(self) -> None:
        """Flush the file to disk with a header that has the current length."""
        with translate_os_errors(self._path):
            self._write_header()
            self._file.seek(0, os.SEEK_END)
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_header(self) -> None:
        # The size of the header does not depend on the length: numpy pads it.
        self._file.seek(0)
        write_header(self._file, self._dtype, (self._length,))


def _token_dtype(vocab_size: int) -> type[np.generic]:
    return np.uint16 if vocab_size <= 1 << 16 else np.int32
