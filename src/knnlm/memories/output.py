"""A trained output matrix predicts the next token from a position's hidden state.

p_output(y | h) = Σ over the rows j of word y of softmax((W·(h - centre) + b) / τ)_j

A word has one row or several, for several kinds of contexts. Words that do not occur in the store have no row and
probability 0, like words without a vote. The matrix reads the hidden states of the model as they are: every
transformation of keys for storing and training is folded into it.

The file is OUT/output.safetensors: weight (R, D), bias (R,), centre (D,), words (R,), and the card as metadata.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from knnlm.errors import DatastoreCorrupt, DatastoreError, ModelError, ParameterError
from knnlm.io import atomic_write
from knnlm.memories.base import Context, SimpleOutput, Source

OUTPUT_FILE = "output.safetensors"

OUTPUT_FORMAT = 1

_POSITIONS = 128  # at a time, so that no (N, R) tensor is made if words have many rows

_AGAIN = "Make it again with: knnlm distill --into output"

_RUN_AGAIN = "Make it again with the command that made it: knnlm distill or knnlm adapt"


@dataclass(frozen=True)
class OutputCard:
    """The metadata of a trained matrix: its store, its training and its losses."""

    store: str  # fingerprint of the store that it was trained on
    model: dict[str, Any]  # identity of the model whose hidden states it reads
    settings: dict[str, Any]
    words: int
    rows: int
    trained_pairs: int
    held_out_pairs: int
    steps: int
    best_step: int
    held_out_before: float | None  # mean loss in nats; None: nothing was held out
    held_out_after: float | None
    history: list[list[float | None]]  # step, mean loss in training since the last one, held-out loss
    seconds: float


@dataclass(frozen=True)
class OutputMatrix:
    """The tensors: row j belongs to word `words[j]`; rows are sorted by their words."""

    weight: Tensor  # (R, D) float32
    bias: Tensor  # (R,) float32
    centre: Tensor  # (D,) float32
    words: Tensor  # (R,) int64


@dataclass(frozen=True)
class WordScores:
    """Log-probabilities of some words; all others have probability 0."""

    word_log_probs: Tensor  # (N, W) float32, rows sum to 1
    words: Tensor  # (W,) the token of each column, ascending
    vocab_size: int

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the (N,) log-probabilities of one token per row: -inf for a word without a column."""
        columns = torch.searchsorted(self.words, targets).clamp(max=len(self.words) - 1)
        found = self.word_log_probs.gather(1, columns[:, None])[:, 0]
        return found.masked_fill(self.words[columns] != targets, -torch.inf)

    def log_probs(self) -> Tensor:
        """Return the (N, V) log-probabilities."""
        dense = self.word_log_probs.new_full((len(self.word_log_probs), self.vocab_size), -torch.inf)
        dense[:, self.words] = self.word_log_probs
        return dense

    def abstains(self) -> Tensor:
        """Return (N,) False: a matrix never abstains."""
        return torch.zeros(len(self.word_log_probs), dtype=torch.bool, device=self.word_log_probs.device)


class OutputMemory:
    """A trained output matrix over the hidden states of one source."""

    name = "output"
    expensive = False
    history_length = 0
    feature_names: Sequence[str] = ("output entropy", "output top", "output margin")
    component_names: Sequence[str] = ("output",)

    def __init__(
        self,
        matrix: OutputMatrix,
        card: OutputCard,
        *,
        softmax_temperature: float = 1.0,
        device: str = "cpu",
        source: Source | None = None,
    ) -> None:
        if not (math.isfinite(softmax_temperature) and softmax_temperature > 0):
            raise ParameterError(f"softmax_temperature must be above 0, not {softmax_temperature}.")
        self.card = card
        self.model = card.model
        self.softmax_temperature = softmax_temperature
        self.vocab_size = int(card.model["vocab_size"])
        self.source: Source | None = source or Source(0, card.model["key_layer"], card.model["layer"])
        self._weight, self._bias = matrix.weight.to(device), matrix.bias.to(device)
        self._centre = matrix.centre.to(device)
        words, counts = torch.unique_consecutive(matrix.words.to(device), return_counts=True)
        self._words, self._counts = words, counts
        self._first = counts.cumsum(0) - counts  # (W,) the first row of each word

    @classmethod
    def open(
        cls, path: str | Path, *, softmax_temperature: float = 1.0, device: str = "cpu", source: Source | None = None
    ) -> OutputMemory:
        """Open a trained matrix: its folder, or the file in it."""
        matrix, card = load_output(path)
        return cls(matrix, card, softmax_temperature=softmax_temperature, device=device, source=source)

    @property
    def width(self) -> int:
        """The width of the hidden states."""
        return self._weight.shape[1]

    def predict(self, context: Context) -> SimpleOutput:
        """Predict the next token from each position's hidden state."""
        assert self.source is not None
        keys = context.states[self.source]  # (N, D)
        if keys.shape[-1] != self.width:
            raise ModelError(
                f"The output matrix reads states of width {self.width}, but those of {self.source.place} have "
                f"{keys.shape[-1]}. {_AGAIN}"
            )
        if not keys.isfinite().all():
            raise ModelError("The model returns infinite or undefined hidden states. Try float32.")
        log_probs = self._weight.new_empty(len(keys), len(self._words))
        features = self._weight.new_empty(len(keys), len(self.feature_names))
        for begin in range(0, len(keys), _POSITIONS):
            part = slice(begin, begin + _POSITIONS)
            log_probs[part] = self._read(keys[part])
            features[part] = _features(log_probs[part])
        best = self._words[log_probs.argmax(1)]
        prediction = WordScores(log_probs.to(keys.device), self._words.to(keys.device), self.vocab_size)
        return SimpleOutput(prediction, features.to(keys.device), best.to(keys.device))

    def _read(self, keys: Tensor) -> Tensor:
        """Return the (n, W) log-probabilities of words for (n, D) keys."""
        centred = keys.to(self._weight) - self._centre
        scores = torch.addmm(self._bias, centred, self._weight.T) / self.softmax_temperature  # (n, R)
        return add_rows(scores, self._first, self._counts).log_softmax(1)


def add_rows(scores: Tensor, first: Tensor, counts: Tensor) -> Tensor:
    """Sum the rows of each word in the log domain: (n, R) → (n, W)."""
    if len(counts) == scores.shape[1]:  # one row per word
        return scores
    total = scores[:, first]
    for number in range(1, int(counts.max())):
        more = (counts > number).nonzero()[:, 0]
        total[:, more] = torch.logaddexp(total[:, more], scores[:, first[more] + number])
    return total


def _features(log_probs: Tensor) -> Tensor:
    """Return (n, 3): the entropy in nats, the log-probability of the first word, and its margin over the second."""
    entropy = -(log_probs.exp() * log_probs).sum(1)
    top = log_probs.topk(min(2, log_probs.shape[1]), dim=1).values
    return torch.stack([entropy, top[:, 0], top[:, 0] - top[:, -1]], 1)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write a safetensors file atomically; `metadata` is stored in its header, as JSON."""
    header = {"format": str(OUTPUT_FORMAT), "metadata": json.dumps(metadata)}
    header["sha256"] = _digest(tensors, header["metadata"])
    with atomic_write(path) as partial:
        try:
            save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial, header)
        except SafetensorError as error:
            raise OSError(str(error)) from None


def _digest(tensors: Mapping[str, Tensor], metadata: str) -> str:
    """Return the SHA-256 of tensors and metadata."""
    digest = hashlib.sha256(metadata.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read and validate what `save_tensors` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    except FileNotFoundError:
        raise DatastoreError(f"{path} does not exist. {_RUN_AGAIN}") from None
    except OSError as error:
        raise DatastoreError(f"{path}: cannot be read: {error.strerror or error}.") from None
    except SafetensorError as error:
        raise DatastoreCorrupt(f"{path}: corrupt ({error}). Remove it. {_RUN_AGAIN}") from None
    if header.get("format") != str(OUTPUT_FORMAT):
        raise DatastoreError(
            f"{path} has format version {header.get('format')}, this knnlm reads {OUTPUT_FORMAT}. {_RUN_AGAIN}"
        )
    if "sha256" in header and header["sha256"] != _digest(tensors, header.get("metadata", "")):
        raise DatastoreCorrupt(f"{path}: checksum mismatch (SHA-256). Remove it. {_RUN_AGAIN}")
    try:
        metadata = json.loads(header["metadata"])
    except (KeyError, ValueError, RecursionError):
        raise DatastoreCorrupt(f"{path}: its metadata cannot be read. Remove it. {_RUN_AGAIN}") from None
    if not isinstance(metadata, dict):
        raise DatastoreCorrupt(f"{path}: its metadata cannot be read. Remove it. {_RUN_AGAIN}")
    return tensors, metadata


def save_output(folder: Path, matrix: OutputMatrix, card: OutputCard) -> None:
    """Write a trained matrix with its card."""
    tensors = {field.name: getattr(matrix, field.name) for field in fields(matrix)}
    save_tensors(folder / OUTPUT_FILE, tensors, asdict(card))


def load_output(path: str | Path) -> tuple[OutputMatrix, OutputCard]:
    """Read a trained matrix and its card, and check that they belong together."""
    file = Path(path) / OUTPUT_FILE if Path(path).is_dir() else Path(path)
    tensors, metadata = load_tensors(file)
    card = _card(file, metadata)
    shapes = {"weight": (card.rows, card.model["width"]), "bias": (card.rows,), "words": (card.rows,)}
    shapes["centre"] = (card.model["width"],)
    for name, shape in shapes.items():
        dtype = torch.int64 if name == "words" else torch.float32
        found = tensors.get(name)
        if found is None or found.dtype != dtype or tuple(found.shape) != shape:
            what = "missing" if found is None else f"{found.dtype} {tuple(found.shape)}"
            raise DatastoreCorrupt(f"{file}: {name} is {what}, but its card has {dtype} {shape}. {_AGAIN}")
        if not found.isfinite().all():
            raise DatastoreCorrupt(f"{file}: {name} has infinite or undefined numbers. {_AGAIN}")
    words = tensors["words"]
    if (words.diff() < 0).any() or words[0] < 0 or words[-1] >= card.model["vocab_size"]:
        raise DatastoreCorrupt(f"{file}: its words are not sorted, or not in the vocabulary. {_AGAIN}")
    if len(words.unique()) != card.words:
        raise DatastoreCorrupt(f"{file}: it has {len(words.unique())} words, but its card has {card.words}. {_AGAIN}")
    return OutputMatrix(**{name: tensors[name] for name in shapes}), card


def _card(file: Path, metadata: dict[str, Any]) -> OutputCard:
    """Validate the fields of the card that the memory needs."""
    kinds: dict[str, tuple[type, ...]] = {"store": (str,), "model": (dict,), "settings": (dict,)}
    kinds |= {"words": (int,), "rows": (int,), "history": (list,), "seconds": (int, float)}
    missing = {field.name for field in fields(OutputCard)} ^ set(metadata)
    wrong = missing or {name for name, kind in kinds.items() if not isinstance(metadata[name], kind)}
    if wrong:
        raise DatastoreCorrupt(f"{file}: {sorted(wrong)[0]} of its card is missing or invalid. {_AGAIN}")
    model = metadata["model"]
    for name, kind in {"width": int, "vocab_size": int, "layer": int, "key_layer": str}.items():
        if not isinstance(model.get(name), kind) or isinstance(model.get(name), bool):
            raise DatastoreCorrupt(f"{file}: the model's {name} in its card is missing or invalid. {_AGAIN}")
    if not 0 < metadata["words"] <= metadata["rows"]:
        raise DatastoreCorrupt(f"{file}: its card has {metadata['rows']} rows for {metadata['words']} words. {_AGAIN}")
    return OutputCard(**metadata)
