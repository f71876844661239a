"""The principal components of a memory's keys. Knows nothing about what they are used for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnlm.datastore.keymap import KeyMap
from knnlm.datastore.store import Datastore
from knnlm.errors import ParameterError
from knnlm.progress import Progress, silent

_SAMPLE = 100_000  # keys that are looked at
_BLOCK = 4096  # keys at a time


def principal_components(store: Datastore, width: int, *, seed: int = 0, progress: Progress = silent) -> KeyMap:
    """Find the map to the directions in which a sample of the keys varies most."""
    ids = sample_keys(store, _SAMPLE, seed=seed)
    if not len(ids):
        raise ParameterError(f"{store.path} has no keys, so they have no principal components.")

    def blocks() -> Iterator[Tensor]:
        with progress("finding principal components", total=len(ids), unit="keys") as advance:
            for part in ids.split(_BLOCK):
                yield store.take(part)
                advance(len(part))

    return components_of(blocks(), width, sample=len(ids), seed=seed)[0]


def components_of(blocks: Iterable[Tensor], width: int, **facts: Any) -> tuple[KeyMap, Tensor]:
    """Find the map to the directions in which (n, D) keys vary most, in float64, and their (width,) variances."""
    count = 0
    for block in blocks:
        keys = block.double()
        if not count:
            # Less the first block's mean from the start: sums of squares lose digits where keys are far from zero.
            origin = keys.mean(0)
            total, squares = torch.zeros_like(origin), origin.new_zeros(len(origin), len(origin))
        keys = keys - origin
        total += keys.sum(0)
        squares.addmm_(keys.T, keys)
        count += len(keys)
    mean = total / count
    variances, vectors = torch.linalg.eigh(squares / count - torch.outer(mean, mean))  # ascending
    variances = variances.clamp(min=0)
    matrix = vectors[:, -width:].flip(1)
    # A direction has no sign of its own; choose one, so that the same keys give the same bytes.
    matrix = matrix * matrix.gather(0, matrix.abs().argmax(0, keepdim=True)).sign()
    explained = float(variances[-width:].sum() / variances.sum().clamp(min=1e-300))
    about = {"kind": "principal components", "explained_variance": explained, **facts}
    return KeyMap(matrix.float(), (mean + origin).float(), about), variances[-width:].flip(0)


def sample_keys(store: Datastore, size: int, *, seed: int) -> Tensor:
    """Choose so many keys at random, in ascending order; all where there are no more."""
    if store.key_count <= size:
        return torch.arange(store.key_count)
    chosen = np.random.default_rng(seed).choice(store.key_count, size, replace=False)
    return torch.from_numpy(np.sort(chosen))
