"""Search by comparing with every vector: the fused kernels on a GPU, plain torch elsewhere. Knows nothing about tokens.

On a GPU, keys that were stored in float16 stay on the device as they are. Where they do not fit, they wait in host
memory and pass over the device in chunks, the next one being copied while one is searched.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from knnlm.errors import ParameterError
from knnlm.index.base import Neighbours, Vectors, check_metric, check_search
from knnlm.index.plain import PlainIndex

KEY_DTYPES = ("float16", "int8")
_CAPABILITY = (8, 0)  # of a GPU whose tensor cores multiply int8 as the kernels want it


class Finder(Protocol):
    """What does the work."""

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest of each of (B, D) float32 queries."""


def check_keys(keys: str) -> None:
    """Refuse what no device holds keys in."""
    if keys not in KEY_DTYPES:
        raise ParameterError(f"Unknown device keys {keys!r}: use {' or '.join(KEY_DTYPES)}.")


def fast(device: torch.device | str) -> bool:
    """Say whether the kernels run there."""
    where = torch.device(device)
    if where.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(where) >= _CAPABILITY


def fits(vectors: Vectors, device: torch.device | str, keys: str) -> bool:
    """Say whether all vectors can be held on a device where the kernels run."""
    from knnlm.index.loading import fits_on  # needs Triton

    return fits_on(vectors, torch.device(device), keys)


class ExactIndex:
    """Compare with every vector.

    `keys` is what a GPU holds them in: with int8, distances are those to keys that were rounded to 8 bits. `fused` asks
    for the kernels or against them; None: on a GPU, if Triton is there. `room` is how many bytes keys may take on the
    device; None: what is free.
    """

    def __init__(
        self,
        vectors: Vectors,
        *,
        metric: str = "l2",
        device: torch.device | str = "cpu",
        keys: str = "float16",
        fused: bool | None = None,
        room: int | None = None,
    ) -> None:
        check_metric(metric)
        check_keys(keys)
        self.metric = metric
        self._vectors = vectors
        self._device = torch.device(device)
        self.finder = self._choose(keys, fused, room)

    def _choose(self, keys: str, fused: bool | None, room: int | None) -> Finder:
        if fused is None:
            fused = fast(self._device)
        if fused and self._vectors.rows:
            if find_spec("triton") is None:
                raise ParameterError("The kernels of exact search need Triton: pip install triton")
            from knnlm.index.loading import load  # needs Triton

            if (finder := load(self._vectors, self.metric, self._device, keys=keys, room=room)) is not None:
                return finder
        return PlainIndex(self._vectors, metric=self.metric, device=self._device)

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest rows of each of (N, D) queries."""
        check_search(queries, k, self._vectors.width)
        most = min(k, self._vectors.rows)
        if not most or not len(queries):
            shape = len(queries), k
            ids = torch.full(shape, -1, device=self._device)
            return Neighbours(ids, torch.full(shape, torch.inf, device=self._device))
        found = self.finder.search(queries.to(self._device, torch.float32), most)
        if most == k:
            return found
        missing = 0, k - most
        return Neighbours(F.pad(found.ids, missing, value=-1), F.pad(found.distances, missing, value=torch.inf))
