"""Vectors in RAM, and a check of their nearest neighbours."""

from __future__ import annotations

import numpy as np
import torch


class Array:
    """Vectors in RAM, read in small blocks as those of a store."""

    def __init__(self, data):
        self.data = torch.as_tensor(data, dtype=torch.float32)

    @property
    def rows(self):
        return len(self.data)

    @property
    def width(self):
        return self.data.shape[1]

    def chunks(self, size):
        for first in range(0, self.rows, min(size, 7)):
            yield first, self.data[first : first + min(size, 7)]

    def take(self, ids):
        return self.data[ids.clamp(min=0)] * (ids >= 0)[..., None]


def assert_nearest(answer, distances, k, *, near=1e-4):
    """Check that an answer is the k nearest by these distances of each query."""
    assert answer.ids.shape == answer.distances.shape == (len(distances), k)
    for expected, ids, found in zip(distances, answer.ids.numpy(), answer.distances.numpy(), strict=True):
        count = min(k, len(expected))
        assert (ids[count:] == -1).all()
        assert np.isinf(found[count:]).all()
        assert len(set(ids[:count].tolist())) == count
        assert (np.diff(found[:count]) >= 0).all()
        scale = near * (1 + np.abs(expected).max(initial=0))
        np.testing.assert_allclose(found[:count], np.sort(expected)[:count], atol=scale)
        # Ties may come in any order, so compare the distances of the ids rather than the ids.
        np.testing.assert_allclose(expected[ids[:count]], found[:count], atol=scale)


class RecordingArray(Array):
    """Vectors in large blocks that record how many are taken at a time."""

    def __init__(self, data):
        super().__init__(data)
        self.taken = []

    def chunks(self, size):
        for first in range(0, self.rows, size):
            yield first, self.data[first : first + size]

    def take(self, ids):
        self.taken.append(ids.numel())
        return super().take(ids)


def clustered(rows, width, *, seed=0):
    """Keys in clusters whose dimensions matter less and less, as those of a language model do."""
    generator = np.random.default_rng(seed)
    spread = np.arange(1, width + 1) ** -0.5
    centres = generator.normal(size=(200, width)) * 3 * spread
    return (centres[generator.integers(0, 200, rows)] + generator.normal(size=(rows, width)) * spread).astype("float32")
