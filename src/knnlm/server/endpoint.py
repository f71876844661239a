"""The application of several replicas: the process that clients reach, which passes requests on to engines elsewhere.

API keys, sizes and hosts are checked here; a request goes to the replica with the fewest requests in progress. Where
the process of a replica dies before its response begins, another replica gets the request.

Documents are changed by one replica at a time. The response follows when every replica sees the change. A replica that
does not within some seconds gets no requests until it does, so that no request is answered from the store before the
change.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from fastapi import FastAPI, Request, Response
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from knnlm.errors import ClusterError, KnnlmError
from knnlm.server.app import APP_OPTIONS, add_error_handlers, add_page
from knnlm.server.auth import ApiKeys, RequestGuard
from knnlm.server.engine.requests import ErrorEvent, RequestFailed
from knnlm.server.engine.scheduler import TIMEOUT_MESSAGE
from knnlm.server.limits import Limits
from knnlm.server.metrics import CONTENT_TYPE, Metrics, MetricValues, merged_metrics
from knnlm.server.replica import ForwardedRequest, ResponseHead, trace_prefix
from knnlm.server.responses import DONE, JsonResponse, error_body

REPLICA_HEADER = b"x-knnlm-replica"

_REFRESH_SECONDS = 30.0  # for a replica to see a change; then it gets no requests until it does
_WATCH_SECONDS = 2.0  # between two checks of a replica
_RETRY_SECONDS = 0.25  # between two checks of a replica that does not answer
_METRICS_SECONDS = 5.0
_GRACE_SECONDS = 5.0  # beyond the time limit of requests, which replicas enforce
# Keys were checked here, and the connection is the client's.
_KEPT_BACK = frozenset((b"authorization", b"cookie", b"connection", b"content-length", b"transfer-encoding"))


class ReplicaLost(ClusterError):
    """The process of a replica has ended, or cannot be reached."""


class RemoteReplica(Protocol):
    """A `Replica` in another process; methods raise ReplicaLost."""

    number: int

    def respond(self, request: ForwardedRequest) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Yield the head and the body of the response to a request; closing the iterator cancels the request."""

    async def refresh(self, generation: int, *, forget: bool) -> int:
        """Return the generation of the store that the process sees."""

    async def wait(self, seconds: float) -> None:
        """Return after some seconds, or raise ReplicaLost as soon as the process ends."""

    async def metrics(self) -> list[MetricValues]:
        """Return the metrics of the engine."""


@dataclass(eq=False)
class _Member:
    """What the endpoint knows of a replica."""

    replica: RemoteReplica
    up: bool = True  # it answers, and sees all changes
    in_progress: int = 0
    turn: int = 0  # of its last request
    forgotten: int = 0  # removals after which its traces were deleted

    @contextmanager
    def busy(self, turn: int) -> Iterator[None]:
        """Count a request while it is in progress."""
        self.in_progress, self.turn = self.in_progress + 1, turn
        try:
            yield
        finally:
            self.in_progress -= 1


class Endpoint:
    """Distributes requests to replicas; for one event loop."""

    def __init__(self, replicas: Sequence[RemoteReplica], limits: Limits) -> None:
        self.limits = limits
        self.metrics = Metrics()
        self._members = [_Member(replica) for replica in replicas]
        self._generation = self._removals = self._turns = 0
        self._writing = asyncio.Lock()

    @property
    def ready(self) -> int:
        """The number of replicas that get requests."""
        return sum(member.up for member in self._members)

    @property
    def count(self) -> int:
        """The number of replicas."""
        return len(self._members)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Check all replicas periodically within the context."""
        tasks = [asyncio.ensure_future(self._watch(member)) for member in self._members]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, member: _Member) -> None:
        while True:
            await self._check(member)
            if not member.up:
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            try:
                await asyncio.wait_for(member.replica.wait(_WATCH_SECONDS), _WATCH_SECONDS + _REFRESH_SECONDS)
            except Exception:
                member.up = False

    async def _check(self, member: _Member) -> None:
        """Find out whether a replica answers and sees all changes."""
        removals = self._removals
        try:
            found = await asyncio.wait_for(
                member.replica.refresh(self._generation, forget=member.forgotten < removals), _REFRESH_SECONDS
            )
        except Exception:  # of any kind: a replica that does not answer gets no requests
            member.up = False
            return
        member.forgotten = max(member.forgotten, removals)
        # There may have been another change meanwhile.
        member.up = found >= self._generation and member.forgotten == self._removals

    @asynccontextmanager
    async def respond(self, request: ForwardedRequest) -> AsyncIterator[tuple[ResponseHead, AsyncIterator[bytes]]]:
        """Return head and body of the response of one replica; raise where no replica answers in time.

        Another replica is asked where one is lost before the response begins, or has no room.
        """
        tried: list[_Member] = []
        while True:
            member = self._choose(request, tried)
            tried.append(member)
            stream = member.replica.respond(request)
            self._turns += 1
            with member.busy(self._turns):
                try:
                    try:
                        head = await asyncio.wait_for(anext(stream), self.limits.seconds + _GRACE_SECONDS)
                    except ReplicaLost:
                        member.up = False
                        continue
                    except asyncio.TimeoutError:
                        raise RequestFailed(ErrorEvent(504, TIMEOUT_MESSAGE)) from None
                    assert isinstance(head, ResponseHead)
                    if head.status == 429 and any(other.up for other in self._members if other not in tried):
                        continue
                    number = (REPLICA_HEADER, str(member.replica.number).encode())
                    own = ResponseHead(head.status, (*head.headers, number), head.route, head.generation)
                    yield own, _body(stream)
                    return
                finally:
                    await stream.aclose()

    def _choose(self, request: ForwardedRequest, tried: Sequence[_Member]) -> _Member:
        """Return the replica that has the trace of a request, otherwise one with the fewest requests in progress."""
        left = [member for member in self._members if member.up and member not in tried]
        if not left:
            raise ReplicaLost("No replica of the server answers. Try again later.")
        if (prefix := _trace_of(request)) is not None:
            left = [member for member in left if prefix.startswith(trace_prefix(member.replica.number))] or left
        return min(left, key=lambda member: (member.in_progress, member.turn))

    async def change(self, request: ForwardedRequest) -> tuple[ResponseHead, bytes]:
        """Add or remove documents with one replica, and return its response when all replicas see the change."""
        try:
            await asyncio.wait_for(self._writing.acquire(), self.limits.seconds)
        except asyncio.TimeoutError:
            raise RequestFailed(ErrorEvent(504, TIMEOUT_MESSAGE)) from None
        try:
            return await self._change(request)
        finally:
            self._writing.release()

    async def _change(self, request: ForwardedRequest) -> tuple[ResponseHead, bytes]:
        member = self._choose(request, ())
        self._turns += 1
        with member.busy(self._turns):
            stream = member.replica.respond(request)
            try:
                head, *body = await asyncio.wait_for(_collect(stream), self.limits.seconds + _GRACE_SECONDS)
            except (ReplicaLost, asyncio.TimeoutError) as error:
                lost = isinstance(error, ReplicaLost)
                member.up = member.up and not lost
                self._removals += request.method == "DELETE"  # it may have been done
                raise RequestFailed(ErrorEvent(503 if lost else 504, _UNKNOWN_CHANGE)) from None
            finally:
                await stream.aclose()
        assert isinstance(head, ResponseHead)
        if head.generation is not None:
            self._generation = max(self._generation, head.generation)
            self._removals += request.method == "DELETE"
            # Those that are down get no requests before they see the change, too.
            await asyncio.gather(*(self._check(other) for other in self._members if other.up))
        number = (REPLICA_HEADER, str(member.replica.number).encode())
        return ResponseHead(head.status, (*head.headers, number), head.route), b"".join(_bytes(body))

    async def metrics_text(self) -> bytes:
        """Return the metrics of requests, and those of all replicas with a label."""
        values = await asyncio.gather(*map(self._metrics_of, self._members))
        found = [(str(member.replica.number), own) for member, own in zip(self._members, values, strict=True)]
        return self.metrics.text([*self._own_metrics(), *merged_metrics(found)])

    async def _metrics_of(self, member: _Member) -> list[MetricValues]:
        try:
            if member.up:
                return await asyncio.wait_for(member.replica.metrics(), _METRICS_SECONDS)
        except (KnnlmError, asyncio.TimeoutError):
            pass
        # Its counters are missing, and this shows why.
        return [MetricValues("knnlm_ready", "1 if requests are processed.", "gauge", (("knnlm_ready", {}, 0.0),))]

    def _own_metrics(self) -> list[Metric]:
        return [
            GaugeMetricFamily("knnlm_replicas", "Replicas of the server.", value=self.count),
            GaugeMetricFamily("knnlm_replicas_ready", "Replicas that get requests.", value=self.ready),
        ]


_UNKNOWN_CHANGE = "A replica did not finish the change, which may have been made. List the documents before a retry."


def _bytes(parts: Sequence[ResponseHead | bytes]) -> Iterator[bytes]:
    return (part for part in parts if isinstance(part, bytes))


async def _body(stream: AsyncIterator[ResponseHead | bytes]) -> AsyncIterator[bytes]:
    async for part in stream:
        assert isinstance(part, bytes)
        yield part


async def _collect(stream: AsyncIterator[ResponseHead | bytes]) -> list[ResponseHead | bytes]:
    return [part async for part in stream]


def _trace_of(request: ForwardedRequest) -> str | None:
    """Return the id of the trace that a request names; None where it names none."""
    if request.path != "/v1/rescore":
        return None
    try:
        body = json.loads(request.body)
    except (ValueError, RecursionError):  # the replica will say so
        return None
    trace = body.get("id") if isinstance(body, dict) else None
    return trace if isinstance(trace, str) else None


def make_endpoint_app(endpoint: Endpoint, keys: ApiKeys | None = None) -> FastAPI:
    """Build the application that passes requests on to replicas."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with endpoint.watching():
            yield

    app = FastAPI(lifespan=lifespan, openapi_url=None, **APP_OPTIONS)
    add_error_handlers(app, lambda: 1)
    _add_status(app, endpoint)
    add_page(app)
    app.router.routes.append(Route("/{path:path}", _Forward(endpoint)))
    body_bytes = endpoint.limits.body_bytes
    app.add_middleware(RequestGuard, keys=keys or ApiKeys(), body_bytes=body_bytes, metrics=endpoint.metrics)
    return app


def _add_status(app: FastAPI, endpoint: Endpoint) -> None:
    @app.get("/healthz")
    async def health() -> JsonResponse:
        return JsonResponse({"status": "ok", "replicas": endpoint.count, "ready": endpoint.ready})

    @app.get("/readyz")
    async def ready() -> JsonResponse:
        return JsonResponse({"ready": endpoint.ready > 0}, status_code=200 if endpoint.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await endpoint.metrics_text(), media_type=CONTENT_TYPE)


class _Forward:
    """The ASGI application of all other routes."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its response back; cancel it if the client disconnects."""
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        headers = tuple((name, value) for name, value in scope["headers"] if name not in _KEPT_BACK)
        request = ForwardedRequest(scope["method"], scope["path"], scope["query_string"], headers, body)
        if request.changes_store:  # also finished for a client that disconnects
            head, content = await self._endpoint.change(request)
            await _send_head(scope, send, head)
            await send({"type": "http.response.body", "body": content})
            return
        response = _Response(scope, send)
        work = asyncio.ensure_future(response.pass_on(self._endpoint, request))
        disconnected = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({work, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif not response.began:
                raise HTTPException(499, "The client has disconnected.")
        finally:
            for task in (work, disconnected):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


class _Response:
    """A response on its way to the client."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.began = False
        self._scope, self._send = scope, send

    async def pass_on(self, endpoint: Endpoint, request: ForwardedRequest) -> None:
        """Send the response of a replica."""
        async with endpoint.respond(request) as (head, body):
            self.began = True
            await _send_head(self._scope, self._send, head)
            try:
                async for part in body:
                    await self._send({"type": "http.response.body", "body": part, "more_body": True})
            except ReplicaLost:
                if (b"content-type", b"text/event-stream; charset=utf-8") not in head.headers:
                    raise
                error = json.dumps(error_body(503, "The replica of the server that answered has ended. Try again."))
                event = b"data: " + error.encode() + b"\n\n" + DONE
                await self._send({"type": "http.response.body", "body": event, "more_body": True})
            await self._send({"type": "http.response.body", "body": b""})


@dataclass(frozen=True)
class _RouteName:
    path: str


async def _send_head(scope: Scope, send: Send, head: ResponseHead) -> None:
    scope["route"] = _RouteName(head.route)  # that RequestGuard counts
    await send({"type": "http.response.start", "status": head.status, "headers": list(head.headers)})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
