"""What retrieval would say at the positions of its own store, each position left out. Knows nothing about training.

p(y | row) = Σ over the k nearest other rows i with value y of softmax(-distance_i / τ)

A row is left out by its number, not by coming first: where contexts are equal, another may come before it.

What retrieval says at every position of a store, kept sparsely on disk. Knows nothing about students.

targets/
  targets.json   from which store, how the neighbours voted, and how far the work is
  offsets.npy    (rows + 1,) where the tokens of each position begin
  tokens.npy     the tokens of all positions, the most probable of each first
  probs.npy      their probabilities in float16

The arrays grow from batch to batch, and targets.json says how much of them is good. What a killed process wrote beyond
that is cut off by the next, which so ends with the same bytes.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

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
from knnlm.training.output_config import check_same

EXCLUDED = ("self", "document")

_LEAST = 2.0**-24  # the smallest number above 0 in float16


class Sparse(NamedTuple):
    """Some tokens of each of n positions and their probabilities, most probable first; the rest is padding of 0."""

    ids: Tensor  # (n, m) int64
    probs: Tensor  # (n, m) float32; a row sums to 1, or to 0 where it has no target
    lengths: Tensor  # (n,) int64


@dataclass(frozen=True)
class TeacherConfig:
    """How neighbours vote, which of them may not, and how much of the vote is kept."""

    k: int = 1024
    knn_temperature: float = 2.0
    exclude: str = "self"
    top: int = 64
    mass: float = 0.99

    def __post_init__(self) -> None:
        check_vote(self.k, self.knn_temperature)
        if self.exclude not in EXCLUDED:
            raise ParameterError(f"Unknown exclude {self.exclude!r}: use {' or '.join(EXCLUDED)}.")
        if self.top < 1:
            raise ParameterError(f"top must be at least 1, not {self.top}.")
        if not 0 < self.mass <= 1:
            raise ParameterError(f"mass must be above 0 and at most 1, not {self.mass}.")


class PlannedTeacher:
    """What a store would be asked about its own positions: enough to know whether that was done."""

    def __init__(self, teacher: Datastore, ballot: TeacherConfig) -> None:
        self.teacher, self.ballot = teacher, ballot

    @property
    def rows(self) -> int:
        """The number of positions."""
        return self.teacher.rows

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the answers depend on; all tokens are read for it."""
        text = tokens_hash(stored_tokens(self.teacher))
        return {"teacher": self.teacher.fingerprint, "text": text, **asdict(self.ballot)}

    def of(self, rows: Tensor) -> Sparse:
        """Nobody is asked."""
        raise NotImplementedError


class Retrieval(PlannedTeacher):
    """A store that is asked about its own positions, on the fly.

    With exclude="document", a position's whole document is left out, and copies of it: equal texts are one document.
    """

    def __init__(self, teacher: Datastore, ballot: TeacherConfig, *, device: str = "cpu") -> None:
        check_whole(teacher)
        super().__init__(teacher, ballot)
        self._index = open_index(teacher, device=device)
        self._groups = _documents(teacher) if ballot.exclude == "document" else None
        # Its document may have many of a position's nearest; more than half are not waited for.
        own = 1 if self._groups is None else min(int(self._groups.bincount().max()), ballot.k) if teacher.rows else 0
        self._wanted = max(1, min(ballot.k + own, teacher.rows))

    def of(self, rows: Tensor) -> Sparse:
        """Ask about these (n,) rows; one below 0 has no target."""
        return self.ask(rows)[0]

    def ask(self, rows: Tensor) -> tuple[Sparse, Tensor]:
        """Ask about (n,) rows, and say how much of each vote was kept, (n,); 0 where nobody voted."""
        found = self._index.search(self.teacher.take(rows), self._wanted)
        own = rows.to(found.ids.device)
        other = (found.ids >= 0) & (own >= 0)[:, None]
        if self._groups is None:
            other &= found.ids != own[:, None]
        else:
            self._groups = groups = self._groups.to(found.ids.device)  # from now on it is there
            other &= groups[found.ids.clamp(min=0)] != groups[own.clamp(min=0)][:, None]
        # One too many were asked for: where the row itself did not come back, as ties may have it, drop the last.
        other &= other.cumsum(1) <= self.ballot.k
        values = self.teacher.values(torch.where(other, found.ids, -1))
        tokens, shares = add_up(values, found.distances, self.ballot.knn_temperature)
        return sparsify(tokens, shares, top=self.ballot.top, mass=self.ballot.mass)


def check_whole(teacher: Datastore) -> None:
    """Refuse a store in which not every token has a key of its own."""
    if teacher.key_count != teacher.rows or teacher.counts(torch.zeros(0, dtype=torch.int64)) is not None:
        raise DatastoreError(
            f"{teacher.path} was pruned: it has {teacher.key_count:,} keys for {teacher.rows:,} tokens, and a teacher "
            "must have one for each. Use the memory as it was built."
        )


def add_up(values: Tensor, distances: Tensor, knn_temperature: float) -> tuple[Tensor, Tensor]:
    """Let (n, k) neighbours vote: tokens (n, k), ascending, -1 behind the last, and their float64 shares."""
    scores = (-distances.double() / knn_temperature).masked_fill(values < 0, -torch.inf)
    weights = scores.softmax(1).nan_to_num(nan=0.0)  # nobody there: no weights
    ordered, order, group = by_token(values)
    shares = torch.zeros_like(weights).scatter_add_(1, group, weights.gather(1, order))
    return torch.full_like(ordered, -1).scatter_(1, group, ordered), shares


def sparsify(tokens: Tensor, shares: Tensor, *, top: int, mass: float) -> tuple[Sparse, Tensor]:
    """Keep the most probable tokens until they cover the mass, at most `top`; equal ones by their numbers."""
    shares, order = shares.sort(dim=1, descending=True, stable=True)
    shares, order = shares[:, :top], order[:, :top]
    kept = (shares.cumsum(1) - shares < mass) & (shares >= _LEAST)
    lengths = kept.sum(1)
    width = int(lengths.max()) if len(lengths) else 0
    shares = (shares * kept)[:, :width]
    total = shares.sum(1)
    probs = (shares / total.clamp(min=_LEAST)[:, None]).float()
    ids = tokens.gather(1, order[:, :width]).masked_fill(~kept[:, :width], 0)
    return Sparse(ids, probs, lengths), total


def _documents(store: Datastore) -> Tensor:
    """Give the (rows,) number of the text that each row is from."""
    numbers: dict[str, int] = {}
    groups = np.empty(store.rows, dtype=np.int64)
    for document in store.documents():
        number = numbers.setdefault(document.sha256, len(numbers))
        groups[document.first_row : document.first_row + document.rows] = number
    return torch.from_numpy(groups)


TARGETS_FILE = "targets.json"

FORMAT = 1

OFFSETS, TOKENS, PROBS = "offsets.npy", "tokens.npy", "probs.npy"

_AGAIN = "Remove the folder and make the targets again."

_DENSE = 4 + 2  # bytes that others keep for each of k neighbours: an id and a probability


@dataclass
class _Done:
    """How much of the arrays is good."""

    rows: int = 0
    entries: int = 0
    answered: int = 0  # rows that have a target
    mass: float = 0.0  # summed over them
    seconds: float = 0.0


class Targets:
    """Finished targets, mapped into memory."""

    def __init__(self, path: Path, settings: dict[str, Any], done: _Done) -> None:
        self.path = path
        self.settings = settings  # teacher, text, rows, vocab_size, and those of the ballot
        self.rows, self._done = done.rows, done
        self._offsets = open_array(path / OFFSETS, np.int64, (done.rows + 1,))
        self._tokens = open_array(path / TOKENS, _token_dtype(settings["vocab_size"]), (done.entries,))
        self._probs = open_array(path / PROBS, np.float16, (done.entries,))

    @classmethod
    def open(cls, path: str | Path) -> Targets:
        """Open what `make_targets` finished."""
        folder = Path(path)
        settings, done = _load(folder)
        if done.rows != settings["rows"]:
            raise DatastoreError(
                f"The targets in {folder} are unfinished ({done.rows:,} of {settings['rows']:,} tokens are done). "
                "Run the same command again to finish them."
            )
        return cls(folder, settings, done)

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of them: the settings, and what came of them."""
        size = sum((self.path / name).stat().st_size for name in (OFFSETS, TOKENS, PROBS))
        each = size / max(1, self.rows)
        return {
            **self.settings,
            "tokens_per_position": self._done.entries / max(1, self.rows),
            "without_target": self.rows - self._done.answered,
            "kept_mass": self._done.mass / max(1, self._done.answered),
            "bytes_per_token": each,
            "dense_bytes_per_token": _DENSE * self.settings["k"],
            "share_of_dense": each / (_DENSE * self.settings["k"]),
            "seconds": self._done.seconds,
        }

    def of(self, rows: Tensor) -> Sparse:
        """Give the targets of (n,) rows; a row below 0 has none."""
        asked = rows.cpu().numpy()
        if asked.max(initial=-1) >= self.rows:
            raise IndexError(f"row {asked.max()} of {self.rows}")
        starts, lengths = np.zeros(len(asked), np.int64), np.zeros(len(asked), np.int64)
        there = asked >= 0
        starts[there] = self._offsets[asked[there]]
        lengths[there] = self._offsets[asked[there] + 1] - starts[there]
        last = (starts + lengths).max(initial=0)
        if starts.min(initial=0) < 0 or lengths.min(initial=0) < 0 or last > len(self._tokens):
            raise DatastoreCorrupt(f"{self.path / OFFSETS} does not ascend, or beyond the end. {_AGAIN}")
        step = np.arange(int(lengths.max(initial=0)))
        used = step < lengths[:, None]  # (n, m)
        places = np.where(used, starts[:, None] + step, 0)
        ids, probs = np.zeros(places.shape, np.int64), np.zeros(places.shape, np.float32)
        ids[used], probs[used] = self._tokens[places[used]], self._probs[places[used]]
        sound = np.isfinite(probs).all() and probs.min(initial=0) >= 0
        if not sound or ids.min(initial=0) < 0 or ids.max(initial=0) >= self.settings["vocab_size"]:
            raise DatastoreCorrupt(f"{self.path} holds tokens or probabilities that cannot be. {_AGAIN}")
        # Rounding to float16 took a little from their sum.
        probs /= np.maximum(probs.sum(1, keepdims=True), 1e-12)
        return Sparse(torch.from_numpy(ids), torch.from_numpy(probs), torch.from_numpy(lengths))


def make_targets(
    teacher: Datastore,
    out: str | Path,
    *,
    k: int = 1024,
    knn_temperature: float = 2.0,
    exclude: str = "self",
    top: int = 64,
    mass: float = 0.99,
    device: str = "auto",
    batch: int | None = None,
    checkpoint_every: float = 20.0,
    progress: Progress = silent,
) -> Targets:
    """Ask a store about each of its own positions, going on with unfinished targets of the same call.

    Of each vote, the most probable tokens are kept until they cover `mass`, at most `top`. `exclude` is what of the
    store a position may not see: itself, or its whole document. `batch` is how many are asked about at a time;
    `checkpoint_every` is in seconds.
    """
    where = choose_device(device)
    batch = batch if batch is not None else (4096 if where.type == "cuda" else 512)
    if batch < 1:
        raise ParameterError(f"batch must be at least 1, not {batch}.")
    ballot = TeacherConfig(k, knn_temperature, exclude, top, mass)
    check_whole(teacher)
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise DatastoreError(f"{folder} is a file. Choose another --out.")
    about = {"rows": teacher.rows, "vocab_size": int(teacher.model["vocab_size"])}
    settings = {**PlannedTeacher(teacher, ballot).facts, **about}
    with writer_lock(folder, create=True):
        done = _Done()
        if (folder / TARGETS_FILE).exists():
            found, done = _load(folder)
            check_same(folder, found, settings)
        if done.rows < teacher.rows or not (folder / OFFSETS).exists():
            retrieval = Retrieval(teacher, ballot, device=str(where))
            _fill(folder, retrieval, settings, done, batch, checkpoint_every, progress)
    return Targets.open(folder)


def _fill(
    folder: Path,
    retrieval: Retrieval,
    settings: dict[str, Any],
    done: _Done,
    batch: int,
    every: float,
    progress: Progress,
) -> None:
    """Ask about all rows that are not done, and write down the answers."""
    offsets = _Growing(folder / OFFSETS, np.int64, done.rows + 1 if done.rows else 0)
    tokens = _Growing(folder / TOKENS, _token_dtype(settings["vocab_size"]), done.entries)
    probs = _Growing(folder / PROBS, np.float16, done.entries)
    arrays = (offsets, tokens, probs)
    if not done.rows:
        offsets.append(np.zeros(1))
    begun = saved = time.monotonic()
    before = done.seconds
    with progress("asking the teacher", total=retrieval.rows, unit="tokens") as advance:
        advance(done.rows)
        for begin in range(done.rows, retrieval.rows, batch):
            rows = torch.arange(begin, min(begin + batch, retrieval.rows))
            answer, masses = retrieval.ask(rows)
            lengths = answer.lengths.cpu().numpy()
            used = np.arange(answer.ids.shape[1]) < lengths[:, None]
            offsets.append(done.entries + lengths.cumsum())
            tokens.append(answer.ids.cpu().numpy()[used])
            probs.append(answer.probs.cpu().numpy()[used])
            done.rows, done.entries = done.rows + len(rows), done.entries + int(lengths.sum())
            done.answered, done.mass = done.answered + int((lengths > 0).sum()), done.mass + float(masses.sum())
            if time.monotonic() - saved >= every and done.rows < retrieval.rows:
                done.seconds = before + time.monotonic() - begun
                _save(folder, settings, done, arrays)
                saved = time.monotonic()
            advance(len(rows))
    done.seconds = before + time.monotonic() - begun
    _save(folder, settings, done, arrays)
    for array in arrays:
        array.close()


def _save(folder: Path, settings: dict[str, Any], done: _Done, arrays: tuple[_Growing, ...]) -> None:
    """Say how much is good, once it is on disk."""
    for array in arrays:
        array.sync()
    with atomic_write(folder / TARGETS_FILE) as partial:
        partial.write_text(json.dumps({"format": FORMAT, "settings": settings, "done": asdict(done)}, indent=2))


def _load(folder: Path) -> tuple[dict[str, Any], _Done]:
    """Read targets.json; whatever else it holds is an error that names it."""
    file = folder / TARGETS_FILE
    missing = f"There are no targets in {folder}: it has no {TARGETS_FILE}."
    facts = load_metadata(file, version=FORMAT, missing=missing, again=_AGAIN)
    settings, done = (part if isinstance(part, dict) else {} for part in (facts.get("settings"), facts.get("done")))
    kinds = {"teacher": str, "text": str, "rows": int, "vocab_size": int, "k": int, "exclude": str, "top": int}
    for name, kind in kinds.items():
        value = settings.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
            raise DatastoreCorrupt(f"{file} does not say the {name.replace('_', ' ')} of the targets. {_AGAIN}")
    try:
        made = _Done(**done)
    except TypeError:
        made = _Done(rows=-1)
    whole = (made.rows, made.entries, made.answered)
    if not all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in whole):
        raise DatastoreCorrupt(f"{file} does not say how much of the targets is done. {_AGAIN}")
    if not all(isinstance(value, (int, float)) for value in (made.mass, made.seconds)) or settings["k"] < 1:
        raise DatastoreCorrupt(f"{file} holds figures that are no numbers. {_AGAIN}")
    return settings, made


class _Growing:
    """A .npy file of one dimension that is cut back to what is known to be good, and written on."""

    def __init__(self, path: Path, dtype: Any, length: int) -> None:
        self._path, self._dtype, self._length = path, np.dtype(dtype), length
        with translate_os_errors(path):
            self._file = path.open("r+b" if length and path.exists() else "w+b")
            self._write_header()
            end = self._file.tell() + length * self._dtype.itemsize
            if self._file.seek(0, os.SEEK_END) < end:
                self._file.close()
                raise DatastoreCorrupt(f"{path} is shorter than {TARGETS_FILE} says: it was cut. {_AGAIN}")
            self._file.truncate(end)
            self._file.seek(end)

    def append(self, array: NDArray[Any]) -> None:
        """Write behind the last."""
        with translate_os_errors(self._path):
            self._file.write(np.ascontiguousarray(array, dtype=self._dtype).tobytes())
        self._length += len(array)

    def sync(self) -> None:
        """Put all of it on disk, under a header that says how much there is."""
        with translate_os_errors(self._path):
            self._write_header()
            self._file.seek(0, os.SEEK_END)
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _write_header(self) -> None:
        # Its size does not depend on the length: numpy leaves room for more digits.
        self._file.seek(0)
        write_header(self._file, self._dtype, (self._length,))


def _token_dtype(vocab_size: int) -> type[np.generic]:
    """Two bytes for a token where they are enough."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32
