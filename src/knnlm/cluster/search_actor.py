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
_KEPT_RESULTS = 4  # of which more may be asked for, and one for each open shard


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
    # Of torch; the last bits of exact distances depend on it. Each call sets it, so an index is the same for others.
    threads: int = field(compare=False)
    whole: WholeStore | None = None  # exact search as a part of the whole store; None: by the shard's own index


@dataclass(frozen=True)
class Returned:
    """Which of the neighbours that a shard finds are returned."""

    kept: int | None = None  # the first of each query; None: all
    rows: NDArray[np.int64] | None = None  # of these queries; None: of all
    call: str = ""  # the name of a call, which may be followed by one for more of what it has found


EVERYTHING = Returned()


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
        self._found: dict[tuple[str, str], Neighbours] = {}  # by call and shard, the latest last
        self._lock = threading.Lock()

    def ping(self) -> int:
        """Return the process id."""
        return os.getpid()

    def call(self, state: ShardState, settings: SearchSettings, method: str, returned: Returned, *args: Any) -> Any:
        """Call a method of the index of a shard; arrays are tensors for it."""
        store, index = self._opened(state, settings)
        if method == "probes":
            return probes(index, *args)
        found = self._find(index, store, method, returned, args)
        if method == "nearest":
            return (*_arrays(found, returned), float(index.max_square))
        return _arrays(found, returned)

    def _find(self, index: Any, store: Datastore, method: str, returned: Returned, args: tuple[Any, ...]) -> Neighbours:
        """Return all that a method finds; where the same call has been made before, what it found."""
        place = (returned.call, str(store.path))
        with self._lock:
            before = self._found.pop(place, None)
        if before is not None:
            return before
        tensors: list[Any] = [torch.from_numpy(np.array(arg)) if isinstance(arg, np.ndarray) else arg for arg in args]
        if method == "nearest":
            queries, k, dtype = tensors
            found: Neighbours = index.nearest(queries, min(k, store.key_count), getattr(torch, dtype))
        else:
            found = getattr(index, method)(*tensors)
        if returned.call and returned.kept is not None and returned.kept < found.ids.shape[1]:
            with self._lock:
                self._found[place] = found
                while len(self._found) > _KEPT_RESULTS + len(self._shards):
                    del self._found[next(iter(self._found))]
        return found

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


def _arrays(found: Neighbours, returned: Returned) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return what is asked for of the neighbours, as arrays that are as small as possible."""
    rows = slice(None) if returned.rows is None else torch.from_numpy(np.array(returned.rows)).to(found.ids.device)
    ids: Tensor = found.ids[rows, : returned.kept]
    distances: Tensor = found.distances[rows, : returned.kept].contiguous()  # without the rest of a row
    small = not ids.numel() or int(ids.max()) <= np.iinfo(np.int32).max
    return ids.to(torch.int32 if small else torch.int64).contiguous().cpu().numpy(), distances.cpu().numpy()
