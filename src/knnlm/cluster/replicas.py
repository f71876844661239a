"""Replicas of a server on Ray Serve: each is a model with its scheduler and service, in a process of its own.

Each replica is a Serve application with one replica, so that each can be addressed: a change of the store is confirmed
by every one of them, traces belong to one, and metrics name theirs. Serve places and starts the processes, checks their
health and restarts them, streams responses and cancels requests. Its HTTP proxies are not used: clients reach the
process of the command, whose `Endpoint` distributes requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
import warnings
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import knnlm
from knnlm.cluster.build import WorkerPlan, node_resources, plan_workers
from knnlm.cluster.build_worker import Failure, prepare_process
from knnlm.cluster.connection import LOCAL, Presence, connected, import_ray
from knnlm.cluster.search import RemoteSearchOptions, RemoteShards
from knnlm.datastore.manifest import is_sharded
from knnlm.datastore.schema import CATALOG_FILE
from knnlm.datastore.store import Datastore
from knnlm.errors import ClusterError, KnnlmError, MissingExtra
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions
from knnlm.server.endpoint import ReplicaLost
from knnlm.server.limits import Limits
from knnlm.server.metrics import MetricValues
from knnlm.server.replica import ForwardedRequest, Replica, ResponseHead
from knnlm.server.service import REFRESH_SECONDS
from knnlm.server.translation import make_service

_POLL_SECONDS = 2.0  # between two looks at replicas that have not started
_OWNER_SECONDS = 5.0  # between two looks whether the command still runs
_HEALTH_SECONDS = 1.0  # between two checks by Serve
_HANG_SECONDS = 30.0  # after which a process that does not answer is restarted
_STOP_SECONDS = 5.0  # for a replica; its requests have ended then
_ARRIVAL_SECONDS = 10.0  # of a request at its replica
_FAILURE_SECONDS = 10.0  # for the command to learn why a replica cannot be opened, before it is restarted
_MAX_REQUESTS = 1 << 20  # of a replica at a time according to Serve; the limits of the service are below
_SEARCH_CORES = 0.5  # of each replica that are left to the processes with shards
_FAILED = ("DEPLOY_FAILED", "DELETING", "NOT_STARTED")


@dataclass(frozen=True)
class ReplicaSettings:
    """What every replica serves."""

    store: str
    name: str  # of the model in the API
    options: MixtureOptions
    mixture: Mapping[str, Any]  # other arguments of `Mixture.open`
    limits: Limits = field(default_factory=Limits)  # of each replica
    refresh: float = REFRESH_SECONDS  # between two looks for changed shards at URLs
    draft: bool = False
    search: RemoteSearchOptions | None = None  # of shards in other processes; None: in each replica
    threads: int = 1
    started: int = 0  # seconds since 1970
    working_folder: str = field(default_factory=lambda: str(Path.cwd()))
    version: str = knnlm.__version__


@contextmanager
def served_replicas(settings: ReplicaSettings, count: int, *, address: str = LOCAL) -> Iterator[list[ServedReplica]]:
    """Start replicas on Ray Serve and yield them when all of them answer; they end with the context."""
    _import_serve()
    shards = _check_store(Path(settings.store))
    temporary = address == LOCAL and not import_ray().is_initialized()
    with connected(address) as ray:
        plan = _plan(ray, settings, count)
        options = replace(settings.options, device=plan.device)
        settings = replace(settings, options=options, threads=max(1, plan.cores))
        search = settings.search
        remote = None
        actors: list[list[Any]] | None = None
        if search is not None:
            # Searches of all replicas run at the same time in one process.
            remote = RemoteShards(ray, replace(search, in_flight=search.in_flight * count))
            actors = remote.start(shards)
        try:
            with _applications(ray, settings, plan, actors, temporary=temporary) as replicas:
                yield replicas
        finally:
            if remote is not None:
                remote.close()


def _check_store(path: Path) -> int:
    """Raise for a store that cannot be opened, before Ray is started; return the number of its shards."""
    if path.is_dir() and not (path / CATALOG_FILE).exists() and not is_sharded(path):
        return 1  # such as a trained model
    with closing(Datastore.open(path)) as store:
        return len(store.shards or [store])


def _import_serve() -> Any:
    """Return the module ray.serve; raise MissingExtra where it is not installed."""
    import_ray()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Ray's use of other packages
            serve = import_module("ray.serve")
    except ImportError:
        raise MissingExtra("--replicas", "ray[serve]", "ray") from None
    # Its processes write logs to Ray's folder; here it would print between the messages of the command.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    return serve


def _plan(ray: Any, settings: ReplicaSettings, count: int) -> WorkerPlan:
    """Return the cores and GPUs of each replica; raise where the cluster has too few, or too few that are free."""
    plan = plan_workers(node_resources(ray), settings.options.device, count, None, what="replicas")
    free = int(ray.available_resources().get("CPU", 0))
    if free < count * _reserved(plan, settings):
        raise ClusterError(
            f"{count} replicas need {count * plan.cores} cores, but only {free} of the cluster are free. Use fewer."
        )
    return plan


def _reserved(plan: WorkerPlan, settings: ReplicaSettings) -> float:
    """Return the cores that a replica reserves."""
    return plan.cores if settings.search is None else max(0.1, plan.cores - _SEARCH_CORES)


@contextmanager
def _applications(
    ray: Any, settings: ReplicaSettings, plan: WorkerPlan, actors: list[list[Any]] | None, *, temporary: bool
) -> Iterator[list[ServedReplica]]:
    """Run the replicas as applications of Serve within the context; a temporary Ray ends with it."""
    serve = _import_serve()
    others = set(serve.status().applications)
    serve.start(proxy_location="Disabled")
    name = f"knnlm-{secrets.token_hex(4)}"
    owner = ray.remote(Presence).options(num_cpus=0).remote()
    kind = serve.deployment(ReplicaServer).options(
        name="replica",
        num_replicas=1,
        ray_actor_options={"num_cpus": _reserved(plan, settings), "num_gpus": plan.gpus},
        max_ongoing_requests=_MAX_REQUESTS,
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=_HANG_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=_STOP_SECONDS,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    numbers = range(1, plan.count + 1)
    names = [f"{name}-{number}" for number in numbers]
    targets = [
        serve.RunTarget(kind.bind(settings, number, actors, owner), name=own, route_prefix=None)
        for number, own in zip(numbers, names, strict=True)
    ]
    try:
        handles = serve.run_many(targets, wait_for_applications_running=False)
        replicas = [ServedReplica(ray, number, handle) for number, handle in zip(numbers, handles, strict=True)]
        for replica, own in zip(replicas, names, strict=True):
            _wait(serve, replica, own)
        yield replicas
    finally:
        if not temporary:
            _delete(serve, names, last=not others)


def _delete(serve: Any, names: Sequence[str], *, last: bool) -> None:
    """End applications, and Serve itself if it was started for them and no other program uses it."""
    with suppress(Exception):  # the cluster may be gone
        for name in names:
            serve.delete(name, _blocking=name == names[-1])
        if last and not set(serve.status().applications) - set(names):
            serve.shutdown()


def _wait(serve: Any, replica: ServedReplica, name: str) -> None:
    """Wait until a replica answers; raise the error of one that cannot be opened."""
    while True:
        try:
            failure = replica.report(_POLL_SECONDS)
        except (TimeoutError, ReplicaLost):
            found = serve.status().applications.get(name)
            if found is None or found.status in _FAILED:
                reason = "" if found is None else " ".join(found.message.split())[:300]
                raise ClusterError(f"Ray Serve has not started replica {replica.number}: {reason}") from None
            continue
        if failure is not None:
            raise failure.error()
        return


class ReplicaServer:
    """The deployment: opens the store and its model, and answers requests of the endpoint."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: ReplicaSettings, number: int, actors: Sequence[Sequence[Any]] | None, owner: Any
    ) -> None:
        self._failure: Failure | None = None
        self._replica: Replica | None = None
        try:
            self._replica = await asyncio.get_running_loop().run_in_executor(
                None, _open_replica, settings, number, actors
            )
            self._replica.service.start()
        except KnnlmError as error:
            self._failure, self._failed = Failure.of(error), time.monotonic()
        self._watching = asyncio.ensure_future(_watch_owner(owner))

    async def report(self) -> Failure | None:
        """Return why the store or the model cannot be opened, None if they are open."""
        return self._failure

    async def respond(self, request: ForwardedRequest) -> AsyncGenerator[ResponseHead | bytes | None, None]:
        """Yield None when the request arrives, then the head and the body of the response."""
        yield None
        async for part in self._opened.respond(request):
            yield part

    async def wait(self, seconds: float) -> None:
        """Return after some seconds: a call that fails when the process ends."""
        await asyncio.sleep(seconds)

    async def refresh(self, generation: int, forget: bool) -> int:
        """Return the generation of the store that this process sees."""
        return await self._opened.refresh(generation, forget=forget)

    async def metrics(self) -> list[MetricValues]:
        """Return the metrics of the engine."""
        return self._opened.metrics()

    async def process(self) -> int:
        """Return the process id."""
        return os.getpid()

    async def check_health(self) -> None:
        """Raise if the process is to be restarted."""
        if self._failure is not None and time.monotonic() < self._failed + _FAILURE_SECONDS:
            return  # the command asks for the reason
        if self._opened.service.failed:
            raise ClusterError("The scheduler has stopped with an error.")

    @property
    def _opened(self) -> Replica:
        if self._replica is None:
            raise ClusterError(f"The replica has not opened its store: {self._failure and self._failure.message}")
        return self._replica

    async def __del__(self) -> None:
        """Stop the service; Serve calls this before it ends the process."""
        self._watching.cancel()
        if self._replica is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._replica.service.stop)


def _open_replica(settings: ReplicaSettings, number: int, actors: Sequence[Sequence[Any]] | None) -> Replica:
    """Open the store with its model in this process."""
    prepare_process(threads=settings.threads, working_folder=settings.working_folder, version=settings.version)
    options = settings.options
    if settings.search is not None:
        options = replace(options, open_index=RemoteShards(import_ray(), settings.search, actors).open_index)
    mixture = Mixture.open(settings.store, options=options, **settings.mixture)
    others = {"limits": settings.limits, "refresh": settings.refresh, "draft": settings.draft}
    service = make_service(mixture, name=settings.name, **others)
    service.started = settings.started
    return Replica(service, number)


async def _watch_owner(owner: Any) -> None:
    """Delete this application when the command has ended without doing so, as a killed one has."""
    ray, serve = import_ray(), _import_serve()
    while True:
        await asyncio.sleep(_OWNER_SECONDS)
        try:
            await owner.ping.remote()
        except ray.exceptions.ActorUnavailableError:
            continue
        except ray.exceptions.RayActorError:
            name = serve.get_replica_context().app_name
            await asyncio.get_running_loop().run_in_executor(None, partial(serve.delete, name, _blocking=False))
            return


class ServedReplica:
    """A replica on Ray Serve, for the endpoint."""

    def __init__(self, ray: Any, number: int, handle: Any) -> None:
        self.number = number
        self._ray, self._handle = ray, handle
        self._serve_error: type[Exception] = _import_serve().exceptions.RayServeException
        self._responses = handle.options(method_name="respond", stream=True)
        self._losses = 0
        self._arriving: set[asyncio.Future[Any]] = set()  # requests that are not known to be in the process

    def report(self, seconds: float) -> Failure | None:
        """Return why the replica cannot open its store; raise TimeoutError where it does not answer in time."""
        response = self._handle.report.remote()
        try:
            found: Failure | None = response.result(timeout_s=seconds)
        except TimeoutError:
            response.cancel()
            raise
        except self._ray.exceptions.RayError as error:
            raise ReplicaLost(f"Replica {self.number} of the server has ended.") from error
        return found

    async def respond(self, request: ForwardedRequest) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Yield the head and the body of the response to a request; closing the iterator cancels the request."""
        response = self._responses.remote(request)
        finished = False
        try:
            with self._lost():
                await self._arrived(response)
                async for part in response:
                    yield part
            finished = True
        finally:
            if not finished:
                response.cancel()

    async def _arrived(self, response: Any) -> None:
        """Wait until a request is in the process; raise if that ends before.

        Serve would keep the request until there is a new process, while other replicas have room.
        """
        arrival, lost = asyncio.ensure_future(anext(response)), self._losses
        self._arriving.add(arrival)
        try:
            await asyncio.wait_for(arrival, _ARRIVAL_SECONDS)
        except asyncio.CancelledError:
            if lost == self._losses:
                raise
            raise ReplicaLost(f"Replica {self.number} of the server has ended.") from None
        finally:
            self._arriving.discard(arrival)

    async def refresh(self, generation: int, *, forget: bool) -> int:
        """Return the generation of the store that the process sees."""
        found: int = await self._call("refresh", generation, forget)
        return found

    async def wait(self, seconds: float) -> None:
        """Return after some seconds, or raise ReplicaLost as soon as the process ends."""
        await self._call("wait", seconds)

    async def metrics(self) -> list[MetricValues]:
        """Return the metrics of the engine."""
        found: list[MetricValues] = await self._call("metrics")
        return found

    async def process(self) -> int:
        """Return the process id of the replica."""
        found: int = await self._call("process")
        return found

    async def _call(self, method: str, *args: Any) -> Any:
        response = self._handle.options(method_name=method).remote(*args)
        try:
            with self._lost():
                return await response
        except asyncio.CancelledError:
            response.cancel()
            raise

    @contextmanager
    def _lost(self) -> Iterator[None]:
        """Raise ReplicaLost in place of Ray's errors, and ClusterError in place of those of the replica's own code."""
        try:
            yield
        except self._ray.exceptions.RayTaskError as error:
            raise ClusterError(f"Replica {self.number} of the server failed. See its log in Ray's folder.") from error
        except (self._ray.exceptions.RayError, self._serve_error, asyncio.TimeoutError) as error:
            self._losses += 1
            for arrival in self._arriving:
                arrival.cancel()
            raise ReplicaLost(f"Replica {self.number} of the server has ended.") from error
