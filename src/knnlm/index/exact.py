"""Exact search: the fused kernels on a GPU, brute force with torch elsewhere.

On a GPU, keys that are stored in float16 stay on the device. Where they do not fit, they are kept in host memory and
streamed over the device in chunks; the next chunk is copied while one is searched.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.index.base import (
    Neighbours,
    Searcher,
    Vectors,
    check_metric,
    check_search,
    no_neighbours,
    pad_neighbours,
)
from knnlm.index.brute_force import BruteForceSearch

DEVICE_KEY_DTYPES = ("float16", "int8")

_MIN_CAPABILITY = (8, 0)  # GPUs whose tensor cores multiply int8


def check_key_dtype(key_dtype: str) -> None:
    """Raise ParameterError for a type that keys cannot have on a device."""
    if key_dtype not in DEVICE_KEY_DTYPES:
        raise ParameterError(f"Unknown device keys {key_dtype!r}: use {' or '.join(DEVICE_KEY_DTYPES)}.")


def has_kernels(device: torch.device | str) -> bool:
    """Whether the GPU kernels run on a device."""
    device = torch.device(device)
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY


def fits_on_device(vectors: Vectors, device: torch.device | str, key_dtype: str) -> bool:
    """Whether all vectors fit on a device on which the kernels run."""
    from knnlm.index.gpu import streaming  # needs Triton

    return streaming.fits_on_device(vectors, torch.device(device), key_dtype)


class ExactIndex:
    """An index that compares every query with every vector.

    `key_dtype` is the type of the keys on a GPU; with int8, distances are those to keys rounded to 8 bits. `kernels`
    selects the GPU kernels or brute force; None: the kernels on a GPU, if Triton is installed. `max_bytes` limits what
    keys take on the device; None: what is free.
    """

    def __init__(
        self,
        vectors: Vectors,
        *,
        metric: str = "l2",
        device: torch.device | str = "cpu",
        key_dtype: str = "float16",
        kernels: bool | None = None,
        max_bytes: int | None = None,
    ) -> None:
        check_metric(metric)
        check_key_dtype(key_dtype)
        self.metric = metric
        self._vectors = vectors
        self._device = torch.device(device)
        self.searcher = self._choose_searcher(key_dtype, kernels, max_bytes)

    def _choose_searcher(self, key_dtype: str, kernels: bool | None, max_bytes: int | None) -> Searcher:
        if kernels is None:
            kernels = has_kernels(self._device)
        if kernels and self._vectors.rows:
            if find_spec("triton") is None:
                raise ParameterError("The kernels of exact search need Triton: pip install triton")
            from knnlm.index.gpu.streaming import open_device_search  # needs Triton

            searcher = open_device_search(
                self._vectors, self.metric, device=self._device, key_dtype=key_dtype, max_bytes=max_bytes
            )
            if searcher is not None:
                return searcher
        return BruteForceSearch(self._vectors, metric=self.metric, device=self._device)

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest vectors of each of (N, D) queries."""
        check_search(queries, k, self._vectors.width)
        available = min(k, self._vectors.rows)
        if not available or not len(queries):
            return no_neighbours(len(queries), k, self._device)
        return pad_neighbours(self.searcher.search(queries.to(self._device, torch.float32), available), k)
