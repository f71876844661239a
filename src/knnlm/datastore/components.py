"""The principal components of a memory's keys. Knows nothing about what they are used for."""

from __future__ import annotations

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
    """Find the map to the directions in which a sample of the keys varies most, in float64."""
    ids = sample_keys(store, _SAMPLE, seed=seed)
    if not len(ids):
        raise ParameterError(f"{store.path} has no keys, so they have no principal components.")
    total = torch.zeros(store.width, dtype=torch.float64)
    squares = torch.zeros(store.width, store.width, dtype=torch.float64)
    # Less the first block's mean from the start: sums of squares lose digits where keys are far from zero.
    origin = store.take(ids[:_BLOCK]).double().mean(0)
    with progress("finding principal components", total=len(ids), unit="keys") as advance:
        for part in ids.split(_BLOCK):
            keys = store.take(part).double() - origin
            total += keys.sum(0)
            squares.addmm_(keys.T, keys)
            advance(len(part))
    mean = total / len(ids)
    variances, vectors = torch.linalg.eigh(squares / len(ids) - torch.outer(mean, mean))  # ascending
    variances = variances.clamp(min=0)
    matrix = vectors[:, -width:].flip(1)
    # A direction has no sign of its own; choose one, so that the same keys give the same bytes.
    matrix = matrix * matrix.gather(0, matrix.abs().argmax(0, keepdim=True)).sign()
    explained = float(variances[-width:].sum() / variances.sum().clamp(min=1e-300))
    facts = {"kind": "principal components", "explained_variance": explained, "sample": len(ids), "seed": seed}
    return KeyMap(matrix.float(), (mean + origin).float(), facts)


def sample_keys(store: Datastore, size: int, *, seed: int) -> Tensor:
    """Choose so many keys at random, in ascending order; all where there are no more."""
    if store.key_count <= size:
        return torch.arange(store.key_count)
    chosen = np.random.default_rng(seed).choice(store.key_count, size, replace=False)
    return torch.from_numpy(np.sort(chosen))
