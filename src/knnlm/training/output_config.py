"""What the training of an output matrix is told, and whether it makes sense. Knows nothing about the training."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError, ParameterError

ROWS_BY = ("uniform", "frequency")

VOCABULARIES = ("store", "all")

DTYPES = ("float32", "bfloat16")

MOST_ROWS = 64  # of one word


@dataclass(frozen=True)
class OutputConfig:
    """All that the result depends on besides the store."""

    rows: int
    rows_by: str
    vocabulary: str
    bias: bool
    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    held_out: float
    patience: int
    interpolate: float | None
    seed: int
    dtype: str
    init: str | None  # hashes of what was given
    log_p_lm: str | None


def hash_of(given: Tensor | None) -> str | None:
    """Hash an array, to know it again."""
    if given is None:
        return None
    data = given.detach().float().cpu().contiguous().numpy()
    return hashlib.sha256(f"{data.shape}".encode() + data.tobytes()).hexdigest()[:16]


def facts_of(store: Datastore, settings: OutputConfig) -> dict[str, Any]:
    """All that a result depends on."""
    return {"store": store.fingerprint, **asdict(settings)}


def check_same(path: Path, found: Any, wanted: Mapping[str, Any]) -> None:
    """Refuse to go on with, or to replace, what was trained in another way."""
    found = found if isinstance(found, dict) else {}
    for name, value in wanted.items():
        if found.get(name) != value:
            raise DatastoreError(
                f"{path} was trained with another {name.replace('_', ' ')} ({found.get(name)}, now {value}). "
                "Use the same settings, choose another --out, or remove it."
            )


def check(settings: OutputConfig, store: Datastore) -> None:
    """Refuse settings that are out of range."""
    choices = {"rows_by": ROWS_BY, "vocabulary": VOCABULARIES, "dtype": DTYPES}
    for name, known in choices.items():
        if getattr(settings, name) not in known:
            raise ParameterError(f"Unknown {name} {getattr(settings, name)!r}: use {' or '.join(known)}.")
    for name, least in {"rows": 1, "epochs": 1, "batch_size": 1, "patience": 1, "seed": 0}.items():
        if getattr(settings, name) < least:
            raise ParameterError(f"{name} must be at least {least}, not {getattr(settings, name)}.")
    if settings.rows > MOST_ROWS:
        raise ParameterError(f"rows must be at most {MOST_ROWS}, not {settings.rows}.")
    if not (math.isfinite(settings.learning_rate) and settings.learning_rate > 0):
        raise ParameterError(f"learning_rate must be above 0, not {settings.learning_rate}.")
    if not (math.isfinite(settings.weight_decay) and settings.weight_decay >= 0):
        raise ParameterError(f"weight_decay must not be below 0, and not {settings.weight_decay}.")
    if not 0 <= settings.held_out <= 0.5:
        raise ParameterError(f"held_out must be from 0 to 0.5, not {settings.held_out}.")
    if not store.key_count:
        raise DatastoreError(f"{store.path} holds no keys: there is nothing to learn.")


def check_given(store: Datastore, *, init: Tensor | None, interpolate: float | None, log_p_lm: Tensor | None) -> None:
    """Refuse arrays that do not belong to the store."""
    if init is not None:
        shape = (store.model["vocab_size"], store.model["width"])
        if store.map is not None:
            raise ParameterError(
                f"The keys of {store.path} went through a map, so that init does not fit. Leave it out."
            )
        if tuple(init.shape) != shape or not init.isfinite().all():
            raise ParameterError(f"init must be {shape} finite numbers, not {tuple(init.shape)}.")
    if interpolate is None:
        if log_p_lm is not None:
            raise ParameterError("log_p_lm is of use only with interpolate, the weight of the matrix in the loss.")
        return
    if not 0 < interpolate <= 1:
        raise ParameterError(f"interpolate must be above 0 and at most 1, not {interpolate}.")
    if log_p_lm is None:
        raise ParameterError(
            "interpolate needs log_p_lm, the model's log-probabilities of the stored tokens, which the store does not "
            "hold. Read the text with the model once more, or train without interpolate."
        )
    if tuple(log_p_lm.shape) != (store.rows,) or not (log_p_lm <= 0).all():
        raise ParameterError(f"log_p_lm must be ({store.rows},) numbers up to 0, not {tuple(log_p_lm.shape)}.")
