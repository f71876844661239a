"""A trained output matrix reads the next token off a position's key. Knows nothing about how it was trained.

p_output(y | h) = Σ over the rows j of word y of softmax((W·(h - centre) + b) / τ)_j

A word has one row or several, so that contexts of several kinds may ask for it. Words that the store never held have
no row and no probability, like words that no neighbour votes for. The matrix reads the hidden states of the model as
they are: all that was done to keys for storing and training is folded into it.

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

_POSITIONS = 128  # read at a time, so that no (N, R) tensor is made where words have many rows

_AGAIN = "Make it again with: knnlm distill --into output"

_RUN_AGAIN = "Make it again with the command that made it: knnlm distill or knnlm adapt"


@dataclass(frozen=True)
class OutputCard:
    """What is known of a trained matrix: whence it is, how it was trained, and what that brought."""

    store: str  # fingerprint of the store whose pairs it learnt
    model: dict[str, Any]  # identity of the model whose hidden states it reads
    settings: dict[str, Any]
    words: int
    rows: int
    trained_pairs: int
    held_out_pairs: int
    steps: int
    best_step: int
    held_out_before: float | None  # mean loss in nats; None where nothing was held out
    held_out_after: float | None
    history: list[list[float | None]]  # step, mean loss in training since the last one, held-out loss
    seconds: float


@dataclass(frozen=True)
class OutputMatrix:
    """The numbers: row j speaks for word `words[j]`; the rows of a word stand together, words ascend."""

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
        """Give the (N,) log-probabilities of one token a row: -inf for a word without a column."""
        columns = torch.searchsorted(self.words, targets).clamp(max=len(self.words) - 1)
        found = self.word_log_probs.gather(1, columns[:, None])[:, 0]
        return found.masked_fill(self.words[columns] != targets, -torch.inf)

    def log_probs(self) -> Tensor:
        """Give the (N, V) log-probabilities."""
        dense = self.word_log_probs.new_full((len(self.word_log_probs), self.vocab_size), -torch.inf)
        dense[:, self.words] = self.word_log_probs
        return dense

    def abstains(self) -> Tensor:
        """A matrix always has an opinion."""
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
        """Open what `distill_output` wrote: its folder, or the file in it."""
        matrix, card = load_output(path)
        return cls(matrix, card, softmax_temperature=softmax_temperature, device=device, source=source)

    @property
    def width(self) -> int:
        """The number of dimensions of a hidden state that it reads."""
        return self._weight.shape[1]

    def predict(self, context: Context) -> SimpleOutput:
        """Read the next token off each position's key."""
        assert self.source is not None
        keys = context.states[self.source]  # (N, D)
        if keys.shape[-1] != self.width:
            raise ModelError(
                f"The output matrix reads states of width {self.width}, but those of {self.source.place} have "
                f"{keys.shape[-1]}. {_AGAIN}"
            )
        if not keys.isfinite().all():
            raise ModelError("The model gives infinite or undefined hidden states. Try float32.")
        log_probs = self._weight.new_empty(len(keys), len(self._words))
        signals = self._weight.new_empty(len(keys), len(self.feature_names))
        for begin in range(0, len(keys), _POSITIONS):
            part = slice(begin, begin + _POSITIONS)
            log_probs[part] = self._read(keys[part])
            signals[part] = _signals(log_probs[part])
        best = self._words[log_probs.argmax(1)]
        prediction = WordScores(log_probs.to(keys.device), self._words.to(keys.device), self.vocab_size)
        return SimpleOutput(prediction, signals.to(keys.device), best.to(keys.device))

    def _read(self, keys: Tensor) -> Tensor:
        """Turn (n, D) keys into (n, W) log-probabilities of words."""
        centred = keys.to(self._weight) - self._centre
        scores = torch.addmm(self._bias, centred, self._weight.T) / self.softmax_temperature  # (n, R)
        return add_rows(scores, self._first, self._counts).log_softmax(1)


def add_rows(scores: Tensor, first: Tensor, counts: Tensor) -> Tensor:
    """Sum the rows of each word in the log domain: (n, R) → (n, W)."""
    if len(counts) == scores.shape[1]:  # one row a word
        return scores
    total = scores[:, first]
    for number in range(1, int(counts.max())):
        more = (counts > number).nonzero()[:, 0]
        total[:, more] = torch.logaddexp(total[:, more], scores[:, first[more] + number])
    return total


def _signals(log_probs: Tensor) -> Tensor:
    """Give (n, 3): the entropy in nats, the log-probability of the first word, and how far the second is behind."""
    entropy = -(log_probs.exp() * log_probs).sum(1)
    top = log_probs.topk(min(2, log_probs.shape[1]), dim=1).values
    return torch.stack([entropy, top[:, 0], top[:, 0] - top[:, -1]], 1)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a safetensors file that appears complete or not at all; the facts are its metadata, as JSON."""
    metadata = {"format": str(OUTPUT_FORMAT), "facts": json.dumps(facts)}
    metadata["sha256"] = _digest(tensors, metadata["facts"])
    with atomic_write(path) as partial:
        try:
            save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial, metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from None


def _digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    """Hash everything that a file of tensors says."""
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote; whatever else the file holds is an error that names it."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    except FileNotFoundError:
        raise DatastoreError(f"There is no {path}. {_RUN_AGAIN}") from None
    except OSError as error:
        raise DatastoreError(f"Cannot read {path}: {error.strerror or error}.") from None
    except SafetensorError as error:
        raise DatastoreCorrupt(f"{path} is damaged ({error}). Remove it. {_RUN_AGAIN}") from None
    if metadata.get("format") != str(OUTPUT_FORMAT):
        raise DatastoreError(
            f"{path} has format version {metadata.get('format')}, this knnlm reads {OUTPUT_FORMAT}. {_RUN_AGAIN}"
        )
    # Files from before have none.
    if "sha256" in metadata and metadata["sha256"] != _digest(tensors, metadata.get("facts", "")):
        raise DatastoreCorrupt(f"{path} is not as it was written: its SHA-256 is another. Remove it. {_RUN_AGAIN}")
    try:
        facts = json.loads(metadata["facts"])
    except (KeyError, ValueError, RecursionError):
        raise DatastoreCorrupt(f"{path} does not say what it is. Remove it. {_RUN_AGAIN}") from None
    if not isinstance(facts, dict):
        raise DatastoreCorrupt(f"{path} does not say what it is. Remove it. {_RUN_AGAIN}")
    return tensors, facts


def save_output(folder: Path, matrix: OutputMatrix, card: OutputCard) -> None:
    """Write a trained matrix with its card."""
    tensors = {field.name: getattr(matrix, field.name) for field in fields(matrix)}
    save_tensors(folder / OUTPUT_FILE, tensors, asdict(card))


def load_output(path: str | Path) -> tuple[OutputMatrix, OutputCard]:
    """Read a trained matrix and its card, and check that they belong together."""
    file = Path(path) / OUTPUT_FILE if Path(path).is_dir() else Path(path)
    tensors, facts = load_tensors(file)
    card = _card(file, facts)
    shapes = {"weight": (card.rows, card.model["width"]), "bias": (card.rows,), "words": (card.rows,)}
    shapes["centre"] = (card.model["width"],)
    for name, shape in shapes.items():
        dtype = torch.int64 if name == "words" else torch.float32
        found = tensors.get(name)
        if found is None or found.dtype != dtype or tuple(found.shape) != shape:
            what = "nothing" if found is None else f"{found.dtype} {tuple(found.shape)}"
            raise DatastoreCorrupt(f"{file} holds {what} as {name}, but its card says {dtype} {shape}. {_AGAIN}")
        if not found.isfinite().all():
            raise DatastoreCorrupt(f"{file} holds infinite or undefined numbers as {name}. {_AGAIN}")
    words = tensors["words"]
    if (words.diff() < 0).any() or words[0] < 0 or words[-1] >= card.model["vocab_size"]:
        raise DatastoreCorrupt(f"{file} holds words that its model does not have, or in no order. {_AGAIN}")
    if len(words.unique()) != card.words:
        raise DatastoreCorrupt(f"{file} holds {len(words.unique())} words, but its card says {card.words}. {_AGAIN}")
    return OutputMatrix(**{name: tensors[name] for name in shapes}), card


def _card(file: Path, facts: dict[str, Any]) -> OutputCard:
    """Read the card as far as the memory needs it."""
    kinds: dict[str, tuple[type, ...]] = {"store": (str,), "model": (dict,), "settings": (dict,)}
    kinds |= {"words": (int,), "rows": (int,), "history": (list,), "seconds": (int, float)}
    missing = {field.name for field in fields(OutputCard)} ^ set(facts)
    wrong = missing or {name for name, kind in kinds.items() if not isinstance(facts[name], kind)}
    if wrong:
        raise DatastoreCorrupt(f"The card of {file} has no proper {sorted(wrong)[0]}. {_AGAIN}")
    model = facts["model"]
    for name, kind in {"width": int, "vocab_size": int, "layer": int, "key_layer": str}.items():
        if not isinstance(model.get(name), kind) or isinstance(model.get(name), bool):
            raise DatastoreCorrupt(f"The card of {file} does not say the model's {name}. {_AGAIN}")
    if not 0 < facts["words"] <= facts["rows"]:
        raise DatastoreCorrupt(f"The card of {file} has {facts['rows']} rows for {facts['words']} words. {_AGAIN}")
    return OutputCard(**facts)
