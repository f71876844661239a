"""What a mixture is asked to be made of, and what came of it. Opens nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnlm.datastore.store import Datastore
from knnlm.errors import ParameterError
from knnlm.index.base import check_metric
from knnlm.index.exact import check_keys
from knnlm.memories.base import Memory
from knnlm.memories.voting import check_vote
from knnlm.mixture.readers import Readers
from knnlm.mixture.spec import MemorySpec
from knnlm.mixture.weights import Weights, check_lambda

# What a memory is used with until it is tuned.
DEFAULTS: dict[str, Any] = {"k": 1024, "knn_temperature": 2.0, "lambda": 0.25}


@dataclass(frozen=True)
class SavedMixture:
    """A mixture as it was written down."""

    specs: list[MemorySpec]
    weights: dict[str, Any]
    folder: Path  # that holds what the weights need


@dataclass(frozen=True)
class MixtureOptions:
    """What is asked for; None is what was tuned."""

    memories: str | None = None
    k: int | None = None
    knn_temperature: float | None = None
    lmbda: float | None = None
    metric: str | None = None
    skip: float | None = None
    rerank: bool = True
    fresh: bool = False  # nothing that was tuned is used
    written: SavedMixture | None = None  # just this
    device_keys: str = "float16"  # what a GPU holds them in

    def check(self) -> None:
        """Refuse wrong settings before anything large is opened."""
        check_vote(
            DEFAULTS["k"] if self.k is None else self.k,
            DEFAULTS["knn_temperature"] if self.knn_temperature is None else self.knn_temperature,
        )
        check_lambda(DEFAULTS["lambda"] if self.lmbda is None else self.lmbda)
        check_metric(self.metric or "l2")
        check_keys(self.device_keys)
        if self.skip is not None and not 0 <= self.skip <= 1:
            raise ParameterError(f"skip must be a fraction from 0 to 1, not {self.skip}.")


@dataclass(frozen=True)
class LoadedMixture:
    """All that a mixture is made of."""

    readers: Readers
    memories: list[Memory]
    labels: list[str]
    weights: Weights
    home: Datastore | None  # whose windows are read, where choices are kept
    folder: Path  # that all of it was opened from
