"""The baselines of search: the usual FAISS index of kNN-LM implementations, and FAISS flat. Written from the papers.

The usual index: `IVF4096,PQ64`, trained on up to a million keys, 32 lists searched, k = 1024, probabilities from the
distances of the codes, scattered into a dense (positions, vocabulary) matrix for each forward call.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

USUAL_SPEC, PROBES, TRAINED_ON = "IVF4096,PQ64", 32, 1_000_000
BLOCK = 65_536


class MappedKeys:
    """Keys in a memory-mapped file as `Vectors`."""

    def __init__(self, keys: NDArray[Any]) -> None:
        self.keys = keys

    @property
    def rows(self) -> int:
        return len(self.keys)

    @property
    def width(self) -> int:
        return int(self.keys.shape[1])

    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        for first in range(0, self.rows, size):
            yield first, torch.from_numpy(np.array(self.keys[first : first + size])).float()

    def take(self, ids: Tensor) -> Tensor:
        found = torch.from_numpy(np.take(self.keys, ids.clamp(min=0).numpy(), axis=0)).float()
        return found * (ids >= 0)[..., None] if (ids < 0).any() else found


@dataclass(frozen=True)
class BuiltIndex:
    """An index, and the seconds of building it."""

    index: Any
    train: float
    add: float
    bytes_per_key: float


def usual_index(keys: NDArray[Any], spec: str = USUAL_SPEC) -> BuiltIndex:
    """Build the usual index; with fewer lists where these would have fewer than 39 keys to train on."""
    if len(keys) < 39 * 4096 and spec == USUAL_SPEC:
        spec = f"IVF{1 << int(np.log2(len(keys) / 39))},PQ64"
    index = faiss.index_factory(keys.shape[1], spec)
    picked = np.unique(np.linspace(0, len(keys) - 1, min(len(keys), TRAINED_ON)).astype(np.int64))
    sample = keys[picked].astype(np.float32)
    begin = time.perf_counter()
    index.train(sample)
    trained = time.perf_counter()
    for first in range(0, len(keys), BLOCK):
        index.add(keys[first : first + BLOCK].astype(np.float32))
    added = time.perf_counter()
    faiss.extract_index_ivf(index).nprobe = PROBES
    return BuiltIndex(index, trained - begin, added - trained, size_of(index) / len(keys))


def flat(keys: NDArray[Any]) -> Any:
    """Build an index that compares with every key in float32."""
    index = faiss.IndexFlatL2(keys.shape[1])
    for first in range(0, len(keys), BLOCK):
        index.add(keys[first : first + BLOCK].astype(np.float32))
    return index


def scatter(distances: NDArray[Any], values: Tensor, *, vocab_size: int, knn_temperature: float = 1.0) -> Tensor:
    """Return probabilities as a dense (n, V) matrix, as other implementations do for every forward call."""
    weights = torch.from_numpy(-distances / knn_temperature).log_softmax(1).exp()
    return torch.zeros(len(values), vocab_size).scatter_add_(1, values, weights)


def size_of(index: Any) -> int:
    """Return the bytes of an index."""
    return len(faiss.serialize_index(index))


def median(times: list[float]) -> float:
    """Return the median."""
    return statistics.median(times)


def machine(threads: int) -> dict[str, object]:
    """Describe the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return {
        "processor": name,
        "cores": os.cpu_count(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "faiss": faiss.__version__,
        "numpy": np.__version__,
    }
