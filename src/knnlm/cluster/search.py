"""Search of shards that actors on Ray hold: queries are scattered, and the results are merged.

Each shard has one actor or several, which Ray restarts where their process or machine dies. A call that is lost with an
actor is repeated. A shard that does not answer in time is an error, or, where that is allowed, a search without it,
which is counted and named. It is asked in the background until it answers again, so that other searches do not wait for
it.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from knnlm.cluster.connection import LOCAL, connected
from knnlm.cluster.search_actor import (
    EVERYTHING,
    Returned,
    SearchSettings,
    ShardActor,
    ShardBehind,
    ShardState,
    WholeStore,
)
from knnlm.datastore.indexes import stored_indexes
from knnlm.datastore.store import Datastore
from knnlm.errors import ClusterError, KnnlmError, KnnlmWarning, ParameterError
from knnlm.index.base import Index, Neighbours, RemoteStatus, check_search, no_neighbours, pad_neighbours
from knnlm.index.composite import ShardedIndex
from knnlm.index.exact import QUERY_BATCH, find_centre, search_precisely
from knnlm.index.packed import cut_rows, merge_shards

_RETRY_SECONDS = 0.1  # before a call is repeated
_MAX_DEATHS = 5  # of one actor in a row, before another one takes its place
_QUERIES_PER_CALL = 4 * QUERY_BATCH  # a multiple, so that matrix products are the same as in one process
_PING_SECONDS = 2.0  # in which a process answers that works
_CORES = 0.1  # that an actor reserves: it waits most of the time, and must fit beside other work
_FIRST_SHARE = 2.0  # neighbours that a shard returns at first, times its share of them
_MORE_RETURNED = 16  # beside this
_MAX_REPEATED = 0.1  # of the queries; above it, more neighbours are returned at first
_CALLS_PER_RATE, _CALLS_TO_FORGET = 16, 1000
_START_SECONDS = 300.0  # for a process to start and to open its shards


@dataclass(frozen=True)
class RemoteSearchOptions:
    """How the shards of a store are searched on Ray."""

    workers: int | None = None  # groups of actors, which share the shards; None: one for each shard
    replicas: int = 1  # actors in a group: each holds the shards of the group
    timeout: float = 30.0  # seconds of one call to all shards, with its retries; a search takes one to four
    allow_missing: bool = False  # answer without shards that cannot be reached
    in_flight: int = 4  # searches at the same time; others wait
    gpus: float = 0.0  # of each actor; above 0, keys are searched on a GPU

    def __post_init__(self) -> None:
        if min(self.replicas, self.in_flight, 1 if self.workers is None else self.workers) < 1:
            raise ParameterError("A shard needs at least one worker and replica, and one search must run at a time.")
        if not self.timeout > 0 or not self.gpus >= 0:
            raise ParameterError("The timeout of a search must be above 0 seconds, and the number of GPUs at least 0.")


@contextmanager
def remote_search(address: str = LOCAL, options: RemoteSearchOptions | None = None) -> Iterator[RemoteShards]:
    """Connect to Ray and yield actors for shards; they end with the context."""
    with connected(address) as ray:
        shards = RemoteShards(ray, options or RemoteSearchOptions())
        try:
            yield shards
        finally:
            shards.close()


@dataclass
class _Replica:
    """One actor of a shard."""

    actor: Any
    deaths: int = 0  # in a row


class RemoteShards:
    """Groups of actors that hold the shards of stores: shard n of each store is in group n, modulo their number.

    `actors` are those of another process, with which they are shared: see `start`. Then they are not ended here, and
    close states of shards by themselves.
    """

    def __init__(self, ray: Any, options: RemoteSearchOptions, actors: Sequence[Sequence[Any]] | None = None) -> None:
        self.ray, self.options = ray, options
        self._shared = actors is not None
        self.status = RemoteStatus()
        self._groups = [[_Replica(actor) for actor in group] for group in actors or ()]
        self._turns: Counter[int] = Counter()  # of each group
        self._down: dict[ShardState, Any] = {}  # shards that have not answered in time, and the call that opens them
        self._lock = threading.Lock()
        self._in_flight = threading.BoundedSemaphore(options.in_flight)
        self._used: Counter[tuple[int, ShardState]] = Counter()  # by how many indexes
        self._unused: deque[tuple[int, ShardState]] = deque()  # by indexes that have ended
        self._warned: set[str] = set()

    def open_index(
        self,
        store: Datastore,
        *,
        metric: str = "l2",
        rerank: bool = True,
        device: str = "cpu",
        key_dtype: str = "float16",
    ) -> Index:
        """Open the shards of a store in their actors; an ordinary store is one shard."""
        store.pinned = True
        shards = store.shards or [store]
        self.status.shards = len(shards)
        groups = self.groups(len(shards))
        self._start(groups)
        own = SearchSettings(metric, rerank, key_dtype, store.trust_index, torch.get_num_threads())
        firsts = np.cumsum([0, *(shard.key_count for shard in shards[:-1])]).tolist()
        with_index = store.trust_index and any(row.metric == metric for row, _ in stored_indexes(store))
        index: RemoteIndex | RemoteExactIndex
        if with_index or self.options.gpus or not store.key_count:
            own = replace(own, threads=self._threads(groups))
            places = [_Place(number, number % groups, shard, own) for number, shard in enumerate(shards)]
            index = RemoteIndex(self, places, firsts, device=device)
        else:
            centre = find_centre(store.keys, metric)
            packed = centre.numpy().tobytes()
            wholes = [replace(own, whole=WholeStore(first, store.key_count, packed)) for first in firsts]
            places = [
                _Place(number, number % groups, shard, wholes[number])
                for number, shard in enumerate(shards)
                if shard.key_count
            ]
            index = RemoteExactIndex(self, places, centre, device=device)
        states = [(place.group, place.state) for place in places]
        with self._lock:
            self._used.update(states)
        # A finaliser may run anywhere, also within Ray, so it only notes what is to be released.
        weakref.finalize(index, self._unused.extend, states)
        # Opens all shards, and raises for one that cannot be opened.
        self.scatter(places, "probes", {place.number: (1,) for place in places}, opening=True)
        return index

    def scatter(
        self,
        places: Sequence[_Place],
        method: str,
        calls: Mapping[int, tuple[Any, ...]],
        *,
        returned: Returned = EVERYTHING,
        opening: bool = False,
    ) -> dict[int, Any]:
        """Call a method for some shards, each with arguments of its own, and return the results that arrive.

        A shard without a result was missing, which is possible only where that is allowed. `opening`: the processes may
        not have started yet.
        """
        options = self.options
        if not self._in_flight.acquire(timeout=options.timeout):
            raise ClusterError(f"{options.in_flight} searches of the cluster take too long. Try again later.")
        try:
            self._release()
            by_number = {place.number: place for place in places}
            seconds = max(options.timeout, _START_SECONDS) if opening else options.timeout
            return _Scatter(self, by_number, (method, returned), calls, seconds=seconds).run()
        finally:
            self._in_flight.release()

    def close(self) -> None:
        """End the actors that were started here."""
        if self._shared:
            return
        for replica in (replica for group in self._groups for replica in group):
            self.ray.kill(replica.actor)
        self._groups.clear()

    def pids(self) -> list[list[int]]:
        """Return the process ids of the actors of each group."""
        return [[self.ray.get(replica.actor.ping.remote()) for replica in group] for group in self._groups]

    def groups(self, shards: int) -> int:
        """Return the number of groups that hold so many shards."""
        return min(shards, self.options.workers or shards)

    def start(self, shards: int) -> list[list[Any]]:
        """Start actors for so many shards, and return them: all groups, for other processes."""
        self._start(self.groups(shards))
        return [[replica.actor for replica in group] for group in self._groups]

    def _threads(self, groups: int) -> int:
        """Return the threads of each actor: all actors search at the same time."""
        cores = int(self.ray.cluster_resources().get("CPU", 0))
        return max(1, min(torch.get_num_threads(), cores // (groups * self.options.replicas)))

    def _check_resources(self, groups: int) -> None:
        """Raise if the cluster cannot run so many actors: Ray would wait for more machines."""
        found, count = self.ray.cluster_resources(), groups * self.options.replicas
        gpus = float(found.get("GPU", 0.0))
        if count * self.options.gpus > gpus:
            raise ClusterError(
                f"The cluster has {gpus:g} GPUs, which are too few for {count} processes that search with "
                f"{self.options.gpus:g} each. Use fewer of a GPU for each, or fewer processes or copies of them."
            )
        if count * _CORES > (cores := float(found.get("CPU", 0.0))):
            raise ClusterError(
                f"The cluster has {cores:g} cores, which are too few for {count} processes that search. Use fewer "
                "processes or copies of them."
            )

    def _start(self, count: int) -> None:
        """Start actors until there are so many groups."""
        if count > len(self._groups):
            self._check_resources(count)
        with self._lock:
            while len(self._groups) < count:
                self._groups.append([_Replica(self._actor()) for _ in range(self.options.replicas)])

    def _actor(self) -> Any:
        return (
            self.ray.remote(ShardActor)
            .options(
                num_cpus=_CORES,
                num_gpus=self.options.gpus,
                max_restarts=-1,
                max_concurrency=self.options.in_flight + 1,
                scheduling_strategy="SPREAD",
            )
            .remote("cuda" if self.options.gpus else "cpu")
        )

    def choose(self, place: _Place, *, other_than: _Replica | None = None) -> _Replica:
        """Return the next actor that holds a shard; another one than the last, if there are several."""
        with self._lock:
            group = [replica for replica in self._groups[place.group] if replica is not other_than]
            self._turns[place.group] += 1
            return (group or self._groups[place.group])[self._turns[place.group] % max(1, len(group))]

    def died(self, replica: _Replica, *, dead: bool) -> None:
        """Count a call that was lost with its actor; one that is not restarted is replaced."""
        with self._lock:
            self.status.retries += 1
            replica.deaths += dead
            if replica.deaths >= _MAX_DEATHS:
                replica.actor, replica.deaths = self._actor(), 0

    def check_late(self, replica: _Replica) -> None:
        """Restart an actor that is late, unless it works: it may be opening a large shard."""
        self.status.timeouts += 1
        answer = replica.actor.ping.remote()
        if not self.ray.wait([answer], timeout=_PING_SECONDS)[0]:
            self.ray.kill(replica.actor, no_restart=False)

    def is_down(self, place: _Place) -> bool:
        """Whether a shard has not answered in time and is not open yet."""
        with self._lock:
            asked = self._down.get(place.state)
            if asked is None:
                return False
            if not self.ray.wait([asked], timeout=0)[0]:
                return True
            try:
                self.ray.get(asked)
            except self.ray.exceptions.RayTaskError:
                pass  # it answers, with an error that the search will raise
            except self.ray.exceptions.RayError:
                self._down[place.state] = self._ask(place)
                return True
            del self._down[place.state]
            self.status.unreachable.discard(place.state.path)
            self._warned.discard(place.state.path)
            return False

    def set_down(self, place: _Place) -> None:
        """Leave a shard out of searches until it is open again."""
        with self._lock:
            self._down[place.state] = self._ask(place)
            self.status.unreachable.add(place.state.path)

    def _ask(self, place: _Place) -> Any:
        """Call a shard in the background, which opens it."""
        replicas = self._groups[place.group]
        self._turns[place.group] += 1
        actor = replicas[self._turns[place.group] % len(replicas)].actor
        return actor.call.remote(place.state, place.settings, "probes", EVERYTHING, 1)

    def warn_missing(self, paths: set[str]) -> None:
        """Count a search without some shards, and warn of each shard once."""
        self.status.add_missing(paths)
        for path in sorted(paths - self._warned):
            self._warned.add(path)
            warnings.warn(f"{path} cannot be reached: searches do without its entries.", KnnlmWarning, stacklevel=2)

    def _release(self) -> None:
        """Close the states of shards that no index uses any more."""
        with self._lock:
            while self._unused:
                group, state = self._unused.popleft()
                self._used[group, state] -= 1
                if not self._used[group, state]:
                    del self._used[group, state]
                    for replica in () if self._shared else self._groups[group]:
                        replica.actor.release.remote(state)


class _Place:
    """A shard of an open store: its group of actors, its state, and how it is searched."""

    def __init__(self, number: int, group: int, shard: Datastore, settings: SearchSettings) -> None:
        self.number, self.group, self.rows, self.settings = number, group, shard.key_count, settings
        self.state = ShardState.of(shard)


@dataclass
class _Call:
    """A call that has not returned."""

    number: int
    replica: _Replica
    deadline: float


class _Scatter:
    """One call to some shards, until all of them have answered or are given up."""

    def __init__(
        self,
        shards: RemoteShards,
        places: Mapping[int, _Place],
        method: tuple[str, Returned],
        calls: Mapping[int, tuple[Any, ...]],
        *,
        seconds: float,
    ) -> None:
        self._shards, self._places, self._method = shards, places, method  # and what is returned
        self._seconds = seconds
        self._args = _stored_once(shards.ray, calls)
        self._end = time.monotonic() + seconds
        self._pending: dict[Any, _Call] = {}
        self._again: dict[int, float] = {}  # when to repeat the calls of shards whose actor has died
        self._results: dict[int, Any] = {}
        self._missing: set[str] = set()

    def run(self) -> dict[int, Any]:
        """Return the results by shard."""
        for number in self._args:
            if self._shards.is_down(self._places[number]):
                self._give_up(number)
            else:
                self._submit(number)
        while self._pending or self._again:
            self._wait()
            now = time.monotonic()
            for number in [number for number, at in self._again.items() if at <= now]:
                del self._again[number]
                self._submit(number)
            for reference, call in list(self._pending.items()):
                if now >= call.deadline:
                    del self._pending[reference]
                    self._late(call)
        if self._missing:
            self._shards.warn_missing(self._missing)
        return self._results

    def _submit(self, number: int, last: _Replica | None = None) -> None:
        place, now = self._places[number], time.monotonic()
        replica = self._shards.choose(place, other_than=last)
        if now >= self._end:
            self._shards.set_down(place)
            self._give_up(number)
            return
        each = self._seconds / self._shards.options.replicas
        reference = replica.actor.call.remote(place.state, place.settings, *self._method, *self._args[number])
        self._pending[reference] = _Call(number, replica, min(self._end, now + each))

    def _wait(self) -> None:
        """Wait for the next result, or for the next call that is late or is to be repeated."""
        moments = [*self._again.values(), *(call.deadline for call in self._pending.values())]
        seconds = max(0.0, min(moments) - time.monotonic())
        if not self._pending:
            time.sleep(seconds)
            return
        for reference in self._shards.ray.wait(list(self._pending), num_returns=1, timeout=seconds)[0]:
            self._take(reference, self._pending.pop(reference))

    def _take(self, reference: Any, call: _Call) -> None:
        """Take a result, or arrange that the call is repeated."""
        errors = self._shards.ray.exceptions
        try:
            self._results[call.number] = self._shards.ray.get(reference)
            call.replica.deaths = 0
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ShardBehind):
                self._again[call.number] = time.monotonic() + _RETRY_SECONDS
            elif isinstance(cause, KnnlmError):
                raise cause from None
            else:
                path = self._places[call.number].state.path
                raise ClusterError(f"The search of {path} failed: {type(cause).__name__}: {cause}") from error
        except errors.RayError as error:
            dead = isinstance(error, errors.ActorDiedError)
            self._shards.died(call.replica, dead=dead)
            self._again[call.number] = time.monotonic() + _RETRY_SECONDS

    def _late(self, call: _Call) -> None:
        """Restart an actor that hangs, and ask another one, if there is time."""
        self._shards.check_late(call.replica)
        self._submit(call.number, call.replica)

    def _give_up(self, number: int) -> None:
        path = self._places[number].state.path
        if not self._shards.options.allow_missing:
            raise ClusterError(
                f"The shard {path} cannot be reached: it has not answered within {self._seconds:g} seconds. With "
                "--allow-missing-shards, searches do without it."
            )
        self._missing.add(path)


def _stored_once(ray: Any, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, list[Any]]:
    """Return arguments as arrays; one that several shards get is put into Ray's object store once."""
    counts: dict[int, int] = {}
    for args in calls.values():
        for arg in args:
            counts[id(arg)] = counts.get(id(arg), 0) + 1
    stored: dict[int, Any] = {}

    def place(arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        if id(arg) not in stored:
            array = arg.detach().cpu().numpy()
            stored[id(arg)] = ray.put(array) if counts[id(arg)] > 1 else array
        return stored[id(arg)]

    return {number: [place(arg) for arg in args] for number, args in calls.items()}


class ReturnedNeighbours:
    """How many neighbours shards return: fewer than k at first, and all where one may have more of the k nearest.

    A shard finds its k nearest, most of which are not among those of all shards. What it does not return is neither
    copied nor merged. It keeps them for a while, and returns them for queries whose result could change. A process that
    has lost them searches for all queries of the call again, since other batches round otherwise.
    """

    def __init__(self, firsts: Mapping[int, int]) -> None:
        """Take the first id of each shard, which is added to those that the shard returns."""
        self._firsts, self._share = firsts, _FIRST_SHARE
        self._rate, self._uncut = 0.0, 0  # of queries that were asked about again; calls without any since then

    def nearest(self, ask: Callable[[Returned], dict[int, Neighbours]], k: int, count: int) -> Neighbours:
        """Return the k nearest of all shards for so many queries; `ask` returns the neighbours of each shard.

        Of a shard that is missing when it is asked again, the neighbours that it has returned before are used.
        """
        kept = min(k, math.ceil(k * self._share / len(self._firsts)) + _MORE_RETURNED)
        name = uuid4().hex if kept < k else ""
        found = ask(Returned(kept, call=name))
        best = self._merged(found, k, count)
        if kept == k:
            return best
        rows = cut_rows(list(found.values()), best, kept)
        self._learn(len(rows) / max(1, count))
        if len(rows):
            before = {number: Neighbours(one.ids[rows], one.distances[rows]) for number, one in found.items()}
            more = self._merged(before | ask(Returned(k, rows.numpy(), name)), k, len(rows))
            best.ids[rows], best.distances[rows] = more.ids, more.distances
        return best

    def _learn(self, cut: float) -> None:
        """Return more at first where this share of queries is large in many calls, and less after many without any."""
        self._rate += (cut - self._rate) / _CALLS_PER_RATE
        self._uncut = 0 if cut else self._uncut + 1
        if self._rate > _MAX_REPEATED:
            self._share, self._rate = 2 * self._share, 0.0
        elif self._uncut >= _CALLS_TO_FORGET and self._share > _FIRST_SHARE:
            self._share, self._uncut = self._share / 2, 0

    def _merged(self, found: Mapping[int, Neighbours], k: int, count: int) -> Neighbours:
        """Return the k nearest of shards for so many queries."""
        if not found:
            return no_neighbours(count, k)
        numbers = sorted(found)
        lists, firsts = [found[number] for number in numbers], [self._firsts[number] for number in numbers]
        return pad_neighbours(merge_shards(lists, firsts, k), k)


class RemoteIndex(ShardedIndex):
    """The indexes of shards in their actors."""

    def __init__(
        self, shards: RemoteShards, places: Sequence[_Place], firsts: Sequence[int], *, device: str = "cpu"
    ) -> None:
        self.metric, self.remote = places[0].settings.metric, shards.status
        self.indexes = []
        self._shards, self._places, self._firsts = shards, list(places), list(firsts)
        self._device = torch.device(device)
        self._known_probes: dict[int, list[int | None]] = {}
        self._returned = ReturnedNeighbours(dict(enumerate(firsts)))

    @property
    def rows(self) -> int:
        """The number of vectors in shards that can be reached."""
        return sum(place.rows for place in self._places if place.state.path not in self.remote.unreachable)

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest vectors of each of (N, D) queries."""
        self.remote.searches += 1
        queries_ = queries.detach().float().cpu()
        found = [super(RemoteIndex, self).search(part, k) for part in queries_.split(_QUERIES_PER_CALL)]
        return _joined(found, len(queries_), k, self._device)

    def _probes(self, k: int) -> list[int | None]:
        if k not in self._known_probes:
            calls = {place.number: (k,) for place in self._places}
            found = self._shards.scatter(self._places, "probes", calls)
            if len(found) < len(calls):
                return [found.get(place.number) for place in self._places]
            self._known_probes[k] = [found[place.number] for place in self._places]
        return self._known_probes[k]

    def _nearest(self, calls: Mapping[str, Mapping[int, tuple[Any, ...]]], k: int) -> Neighbours:
        def ask(returned: Returned) -> dict[int, Neighbours]:
            found: dict[int, Neighbours] = {}
            for method, own in calls.items():
                results = self._shards.scatter(self._places, method, own, returned=returned) if own else {}
                found |= {number: _neighbours(result) for number, result in results.items()}
            return found

        (queries, *_), *_ = [args for own in calls.values() for args in own.values()]
        return self._returned.nearest(ask, k, len(queries))

    def _scatter(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Neighbours]:
        results = self._shards.scatter(self._places, method, calls)
        missing = no_neighbours(len(next(iter(calls.values()))[0]), 0)
        return {number: _neighbours(results[number]) if number in results else missing for number in calls}


class RemoteExactIndex:
    """Exact search of shards in their actors: neighbours and distances are those of one store, to the last bit."""

    def __init__(self, shards: RemoteShards, places: Sequence[_Place], centre: Tensor, *, device: str = "cpu") -> None:
        self.metric, self.remote = places[0].settings.metric, shards.status
        self._shards, self._places, self._centre = shards, list(places), centre
        self._rows, self._device = sum(place.rows for place in places), torch.device(device)
        self._returned = ReturnedNeighbours({place.number: 0 for place in places})

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest vectors of each of (N, D) queries."""
        check_search(queries, k, len(self._centre))
        self.remote.searches += 1
        queries_ = queries.detach().float().cpu()
        count = min(k, self._rows)
        found = [
            search_precisely(
                lambda own, dtype: self._nearest(own, count, dtype), part, self._centre, metric=self.metric
            )
            for part in queries_.split(_QUERIES_PER_CALL)
        ]
        return _joined(found, len(queries_), k, self._device)

    def _nearest(self, queries: Tensor, k: int, dtype: torch.dtype) -> tuple[Neighbours, Tensor]:
        """Return the k nearest of all shards by (distance, id), and the largest |k|²."""
        name, largest = str(dtype).removeprefix("torch."), [0.0]

        calls = {place.number: (queries, k, name) for place in self._places}

        def ask(returned: Returned) -> dict[int, Neighbours]:
            results = self._shards.scatter(self._places, "nearest", calls, returned=returned)
            largest.extend(square for *_, square in results.values())
            return {number: _neighbours(result[:2]) for number, result in results.items()}

        best = self._returned.nearest(ask, k, len(queries))
        return Neighbours(best.ids, best.distances.to(dtype)), torch.tensor(max(largest))


def _neighbours(arrays: tuple[Any, Any]) -> Neighbours:
    ids, distances = arrays
    return Neighbours(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(np.array(distances)))


def _joined(found: Sequence[Neighbours], count: int, k: int, device: torch.device) -> Neighbours:
    """Return the results of several batches of queries on the device of the model."""
    if not count:
        return no_neighbours(0, k, device)
    both = Neighbours(torch.cat([one.ids for one in found]), torch.cat([one.distances for one in found]))
    padded = pad_neighbours(both, k)
    return Neighbours(padded.ids.to(device), padded.distances.to(device))
