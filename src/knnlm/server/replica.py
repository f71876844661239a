"""One of several engines of a server: its requests arrive from the process that clients reach, as data."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import Message

from knnlm.errors import KnnlmError
from knnlm.server.app import make_service_app
from knnlm.server.metrics import MetricValues
from knnlm.server.service import Service

Headers = tuple[tuple[bytes, bytes], ...]

_BEHIND_SECONDS = 10.0  # to wait for a change to be visible on a network file system
_LOOK_SECONDS = 0.1

_log = logging.getLogger(__name__)


class ResponseAborted(KnnlmError):
    """An error occurred after the beginning of a response."""


@dataclass(frozen=True)
class ForwardedRequest:
    """A request with its whole body."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes

    @property
    def changes_store(self) -> bool:
        """Whether documents are added or removed."""
        return self.path.startswith("/v1/documents") and self.method in ("POST", "DELETE")

    def scope(self) -> dict[str, Any]:
        """Return the request for an ASGI application."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": None,
            "server": None,
        }


@dataclass(frozen=True)
class ResponseHead:
    """The beginning of a response; parts of its body follow."""

    status: int
    headers: Headers
    route: str  # with the names of its parameters, for metrics
    generation: int | None = None  # of the store, after a change


def trace_prefix(number: int) -> str:
    """Return the beginning of the ids of traces that a replica keeps."""
    return f"trace-r{number}-"


class Replica:
    """A service behind requests that were checked by another process; all methods are for one event loop."""

    def __init__(self, service: Service, number: int) -> None:
        self.service = service
        self._app = make_service_app(service)
        service.scheduler.traces.prefix = trace_prefix(number)

    async def respond(self, request: ForwardedRequest) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Yield the head and the body of the response to a request; closing the iterator cancels the request."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        scope = request.scope()
        task = asyncio.ensure_future(self._run(scope, request.body, messages))
        complete = False
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield self._head(request, scope, message)
                    continue
                complete = not message.get("more_body", False)
                if body := message.get("body", b""):
                    yield body
            if not complete:
                raise ResponseAborted("The response was not finished because of an error.")
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self, scope: dict[str, Any], body: bytes, messages: asyncio.Queue[Message | None]) -> None:
        """Run the application on one request; None follows its last message."""
        unread = True

        async def receive() -> Message:
            nonlocal unread
            if unread:
                unread = False
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.Event().wait()  # a client that disconnects cancels this task
            raise AssertionError

        try:
            await self._app(scope, receive, messages.put)
        except Exception:
            _log.exception("a request failed")
        finally:
            messages.put_nowait(None)

    def _head(self, request: ForwardedRequest, scope: dict[str, Any], message: Message) -> ResponseHead:
        status = int(message["status"])
        headers = tuple((bytes(name), bytes(value)) for name, value in message.get("headers", ()))
        route = getattr(scope.get("route"), "path", "other")
        changed = request.changes_store and status == 200
        return ResponseHead(status, headers, route, self._generation() if changed else None)

    async def refresh(self, generation: int, *, forget: bool) -> int:
        """Return the generation of the store as this process sees it, after a wait if it is below the given one.

        Requests that arrive later are answered from it. `forget`: traces are deleted, as documents were removed.
        """
        if forget:
            self.service.scheduler.traces.clear()
        loop = asyncio.get_running_loop()
        end = loop.time() + _BEHIND_SECONDS
        while True:
            found = await loop.run_in_executor(None, self._generation)
            if found >= generation or loop.time() > end:
                return found
            await asyncio.sleep(_LOOK_SECONDS)

    def metrics(self) -> list[MetricValues]:
        """Return the metrics of the engine."""
        return self.service.metrics.values()

    def _generation(self) -> int:
        documents = self.service.documents
        return 0 if documents is None else documents.generation
