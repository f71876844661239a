"""What retrieval says at every position of a store, kept sparsely on disk. Knows nothing about students.

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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore import Datastore
from knnlm.datastore.facts import load_facts
from knnlm.datastore.locking import writer_lock
from knnlm.datastore.segment import open_array, replacing, write_header, writing
from knnlm.distill.retrieval import Ballot, Planned, Retrieval, Sparse, check_whole
from knnlm.distill.settings import check_same
from knnlm.errors import DatastoreCorrupt, DatastoreError, ParameterError
from knnlm.lm.causal import choose_device
from knnlm.progress import Progress, silent

FILE = "targets.json"
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
    temperature: float = 2.0,
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
    ballot = Ballot(k, temperature, exclude, top, mass)
    check_whole(teacher)
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise DatastoreError(f"{folder} is a file. Choose another --out.")
    about = {"rows": teacher.rows, "vocab_size": int(teacher.model["vocab_size"])}
    settings = {**Planned(teacher, ballot).facts, **about}
    with writer_lock(folder, create=True):
        done = _Done()
        if (folder / FILE).exists():
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
    with replacing(folder / FILE) as partial:
        partial.write_text(json.dumps({"format": FORMAT, "settings": settings, "done": asdict(done)}, indent=2))


def _load(folder: Path) -> tuple[dict[str, Any], _Done]:
    """Read targets.json; whatever else it holds is an error that names it."""
    file = folder / FILE
    missing = f"There are no targets in {folder}: it has no {FILE}."
    facts = load_facts(file, version=FORMAT, missing=missing, again=_AGAIN)
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
        with writing(path):
            self._file = path.open("r+b" if length and path.exists() else "w+b")
            self._write_header()
            end = self._file.tell() + length * self._dtype.itemsize
            if self._file.seek(0, os.SEEK_END) < end:
                self._file.close()
                raise DatastoreCorrupt(f"{path} is shorter than {FILE} says: it was cut. {_AGAIN}")
            self._file.truncate(end)
            self._file.seek(end)

    def append(self, array: NDArray[Any]) -> None:
        """Write behind the last."""
        with writing(self._path):
            self._file.write(np.ascontiguousarray(array, dtype=self._dtype).tobytes())
        self._length += len(array)

    def sync(self) -> None:
        """Put all of it on disk, under a header that says how much there is."""
        with writing(self._path):
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
