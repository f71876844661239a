"""The process that holds shards of a store and searches them for others.

A call names the state of the shard that it is to be answered from. An actor opens that state when it is first named,
and keeps the state before it, as searches that began before a change end with it. Queries and results are arrays.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore.indexes import open_index
from knnlm.datastore.manifest import remote_url
from knnlm.datastore.store import Datastore
from knnlm.errors import ClusterError, ShardChanged
from knnlm.index.base import Index, Neighbours, probes
from knnlm.index.exact import BruteForceSearch, Whole

_KEPT_STATES = 2  # of each shard


class ShardBehind(ClusterError):
    """The shard is not yet in the state that a query names."""


@dataclass(frozen=True)
class ShardState:
    """A shard at one moment."""

    path: str  # or its URL, from which each machine fetches a copy
    generation: int
    fingerprint: str

    @classmethod
    def of(cls, store: Datastore) -> ShardState:
        """Return the state of an open store."""
        path = remote_url(store.path) or str(store.path.resolve())
        return cls(path, store.generation, store.fingerprint)


@dataclass(frozen=True)
class WholeStore:
    """The place of a shard in its store, for exact search."""

    first: int
    rows: int
    centre: bytes  # (D,) float32


@dataclass(frozen=True)
class SearchSettings:
    """How a shard is searched."""

    metric: str
    rerank: bool
    key_dtype: str
    trust_index: bool
    threads: int  # of torch; the last bits of exact distances depend on it
    whole: WholeStore | None = None  # exact search as a part of the whole store; None: by the shard's own index


@dataclass
class _OpenShard:
    """A shard in one state, and its indexes."""

    store: Datastore
    indexes: dict[SearchSettings, Any] = field(default_factory=dict)


class ShardActor:
    """Searches shards; several calls may run concurrently."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._shards: dict[ShardState, _OpenShard] = {}
        self._lock = threading.Lock()

    def ping(self) -> int:
        """Return the process id."""
        return os.getpid()

    def call(self, state: ShardState, settings: SearchSettings, method: str, kept: int | None, *args: Any) -> Any:
        """Call a method of the index of a shard; arrays are tensors for it. Of neighbours, return the first `kept`."""
        store, index = self._opened(state, settings)
        if method == "probes":
            return probes(index, *args)
        tensors: list[Any] = [torch.from_numpy(np.array(arg)) if isinstance(arg, np.ndarray) else arg for arg in args]
        if method == "nearest":
            queries, k, dtype = tensors
            found = index.nearest(queries, min(k, store.key_count), getattr(torch, dtype))
            return (*_arrays(found, kept), float(index.max_square))
        return _arrays(getattr(index, method)(*tensors), kept)

    def release(self, state: ShardState) -> None:
        """Close a state of a shard."""
        with self._lock:
            if (shard := self._shards.pop(state, None)) is not None:
                shard.store.close()

    def _opened(self, state: ShardState, settings: SearchSettings) -> tuple[Datastore, Any]:
        """Return a shard in one state, and its index."""
        with self._lock:
            if torch.get_num_threads() != settings.threads:
                torch.set_num_threads(settings.threads)
            shard = self._shards.get(state)
            if shard is None:
                shard = self._shards[state] = _OpenShard(_open(state, settings))
                older = [other for other in self._shards if other.path == state.path][:-_KEPT_STATES]
                for other in older:
                    self._shards.pop(other).store.close()
            if settings not in shard.indexes:
                shard.indexes[settings] = self._open_index(shard.store, settings)
            return shard.store, shard.indexes[settings]

    def _open_index(self, store: Datastore, settings: SearchSettings) -> Index | BruteForceSearch:
        if settings.whole is None:
            return open_index(
                store,
                metric=settings.metric,
                rerank=settings.rerank,
                device=self._device,
                key_dtype=settings.key_dtype,
            )
        store.pinned = True
        centre = torch.from_numpy(np.frombuffer(settings.whole.centre, np.float32).copy())
        whole = Whole(settings.whole.first, settings.whole.rows, centre)
        return BruteForceSearch(store.keys, metric=settings.metric, whole=whole)


def _open(state: ShardState, settings: SearchSettings) -> Datastore:
    """Open a shard in this state; raise where it is in another one."""
    store = Datastore.open(state.path, trust_index=settings.trust_index)
    if ShardState.of(store) == state:
        return store
    generation = store.generation
    store.close()
    if generation < state.generation:
        raise ShardBehind(f"{state.path} is in generation {generation}, not yet in {state.generation}.")
    raise ShardChanged(
        f"{state.path} was changed: it is in generation {generation}, and the search is one of generation "
        f"{state.generation}. Repeat it."
    )


def _arrays(found: Neighbours, kept: int | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the first neighbours of each query as arrays that are as small as possible."""
    ids: Tensor = found.ids[:, :kept]
    small = not ids.numel() or int(ids.max()) <= np.iinfo(np.int32).max
    distances = found.distances[:, :kept].contiguous()  # without the rest of a row, which would travel with it
    return ids.to(torch.int32 if small else torch.int64).contiguous().cpu().numpy(), distances.cpu().numpy()
