"""A second language model with the same tokenizer as a memory, and the card of a trained decoder.

The card is DIR/decoder.json beside the files of an ordinary transformers model, which does not need it: where the
decoder comes from, how it was trained, and its λ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knnlm.datastore.integrity import load_metadata, with_checksum
from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.io import atomic_write
from knnlm.memories.base import LOGITS, ROWS, Context, Logits, Source

CARD = "decoder.json"

CARD_FORMAT = 1

LM_FEATURES = ("top", "second", "entropy")

TUNING_KEYS = {"model", "text", "tokens", "base_perplexity", "perplexity"}  # metadata of the text that λ was tuned on

_AGAIN = "Make it again with: knnlm distill --into decoder"

_NONE = type(None)

_NAMES = {"lmbda": "lambda", "lmbda_metadata": "lambda_metadata"}  # of attributes in the file


@dataclass(frozen=True)
class LMOutput:
    """The output of a language model."""

    logits: Tensor  # (N, V)

    @cached_property
    def components(self) -> Sequence[Logits]:
        """The one prediction."""
        return (Logits(self.logits),)

    def features(self) -> Tensor:
        """Return (N, 3): the log-probabilities of the two most probable tokens, and the entropy."""
        return self._summary[0]

    def top(self) -> Tensor:
        """Return the most probable tokens."""
        return self._summary[1]

    @cached_property
    def _summary(self) -> tuple[Tensor, Tensor]:
        features, top = [], []
        for rows in self.logits.split(ROWS):
            log_p = rows.float().log_softmax(1)
            best, token = log_p.max(1, keepdim=True)
            # Not `topk`, which launches some dozen kernels on a GPU; the first one is put back after it.
            second = log_p.scatter_(1, token, -torch.inf).amax(1, keepdim=True) if log_p.shape[1] > 1 else best
            log_p.scatter_(1, token, best)
            # In place: a new tensor of this size takes longer than the arithmetic, on a CPU.
            entropy = -log_p.exp().mul_(log_p.clamp_(min=-1e9)).sum(1)
            features.append(torch.cat([best, second, entropy[:, None]], 1))
            top.append(token[:, 0])
        if not features:
            return self.logits.new_zeros(0, len(LM_FEATURES)), self.logits.new_zeros(0, dtype=torch.long)
        return torch.cat(features).clamp(-100, 100), torch.cat(top)


class DecoderMemory:
    """A second language model with the same tokenizer."""

    name = "decoder"
    expensive = False
    capturable = True  # its prediction depends on nothing but the logits of the pass
    history_length = 0
    feature_names = LM_FEATURES

    def __init__(self, reader: int) -> None:
        self.source = Source(reader, LOGITS)

    @property
    def component_names(self) -> Sequence[str]:
        """The one prediction."""
        return (self.name,)

    def predict(self, context: Context) -> LMOutput:
        """Return the model's output, which the readers have computed."""
        return LMOutput(context.states[self.source])


@dataclass(frozen=True)
class DecoderCard:
    """The metadata of a decoder. In the file, `lmbda` and `lmbda_metadata` are called lambda and lambda_metadata."""

    initial_model: dict[str, Any]  # spec, layers, class, parameters, and the fingerprint of the weights before training
    tokenizer: str  # fingerprint; with the next two, must be those of the language model that it is mixed with
    vocab_size: int
    start_token: int
    window: dict[str, int]  # context and stride of training
    teacher: str | None  # fingerprint of the store that taught it; None: trained on the text alone
    targets: dict[str, Any] | None  # metadata of the targets
    beta: float
    settings: dict[str, Any]
    text: str  # fingerprint of the tokens
    tokens: int  # in training, each once
    held_out_tokens: int
    steps: int
    seconds: float
    losses: dict[str, float | None]  # the means of the last epoch: loss, kl, ce
    held_out: list[dict[str, Any]]  # the same on held-out text, before training and after each epoch
    notes: list[str]
    selection: dict[str, Any] | None = None  # trials on held-out text, and what was chosen; None: nothing was
    lmbda: float | None = None  # λ, once it is tuned
    lmbda_metadata: dict[str, Any] | None = None


def save_card(folder: Path, card: DecoderCard) -> None:
    """Write a card atomically."""
    metadata = {_NAMES.get(name, name): value for name, value in asdict(card).items()}
    with atomic_write(folder / CARD) as partial:
        written = with_checksum({"format": CARD_FORMAT, **metadata})
        partial.write_text(json.dumps(written, indent=2, ensure_ascii=False), encoding="utf-8")


def load_card(folder: str | Path) -> DecoderCard:
    """Read and validate the card of a decoder."""
    file = Path(folder) / CARD
    missing = f"{folder} is not a decoder: it has no {CARD}. {_AGAIN}"
    metadata = load_metadata(file, version=CARD_FORMAT, missing=missing, advice=_AGAIN)
    given: dict[str, Any] = {
        name: metadata.get(_NAMES.get(name, name)) for name in (field.name for field in fields(DecoderCard))
    }
    for name, kinds in _KINDS.items():
        if not isinstance(given[name], kinds) or isinstance(given[name], bool):
            raise DatastoreCorrupt(f"{file}: {_NAMES.get(name, name)} is missing or has the wrong type. {_AGAIN}")
    wrong = next((name for name, sound in _ranges(given).items() if not sound), None)
    if wrong is not None:
        raise DatastoreCorrupt(f"{file}: invalid {wrong}: {given[wrong]}. {_AGAIN}")
    return DecoderCard(**given)


def set_lambda(folder: str | Path, value: float, metadata: Mapping[str, Any] | None = None) -> DecoderCard:
    """Write λ, and the metadata of its tuning, into a decoder's card."""
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise ParameterError(f"lambda must be from 0 to 1, not {value}.")
    if metadata is not None and (missing := TUNING_KEYS - metadata.keys()):
        raise ParameterError(f"The metadata of λ lacks the {min(missing).replace('_', ' ')} of its text.")
    card = replace(load_card(folder), lmbda=float(value), lmbda_metadata=None if metadata is None else dict(metadata))
    save_card(Path(folder), card)
    return card


_KINDS: dict[str, tuple[type, ...]] = {
    "selection": (dict, _NONE),
    "initial_model": (dict,),
    "tokenizer": (str,),
    "vocab_size": (int,),
    "start_token": (int,),
    "window": (dict,),
    "teacher": (str, _NONE),
    "targets": (dict, _NONE),
    "beta": (int, float),
    "settings": (dict,),
    "text": (str,),
    "tokens": (int,),
    "held_out_tokens": (int,),
    "steps": (int,),
    "seconds": (int, float),
    "losses": (dict,),
    "held_out": (list,),
    "notes": (list,),
    "lmbda": (int, float, _NONE),
    "lmbda_metadata": (dict, _NONE),
}


def _ranges(given: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether each restricted value is within its range."""
    window, lmbda = given["window"], given["lmbda"]
    whole = all(type(window.get(name)) is int for name in ("context", "stride"))
    return {
        "vocab_size": given["vocab_size"] > 0,
        "start_token": 0 <= given["start_token"] < given["vocab_size"],
        "window": whole and 1 <= window["stride"] <= window["context"],
        "beta": 0 <= given["beta"] <= 1,
        "lmbda": lmbda is None or 0 <= lmbda <= 1,
        "initial_model": given["initial_model"].keys() >= {"spec", "layers", "class", "parameters"},
        "losses": all(value is None or type(value) in (int, float) for value in given["losses"].values()),
        "lmbda_metadata": given["lmbda_metadata"] is None or given["lmbda_metadata"].keys() >= TUNING_KEYS,
    }
