"""Run the server on a socket until a signal; running requests are finished before it stops.

uvicorn has no timeout for the headers of a request, no limit of their size, and no timeout for a client that does not
read. About a thousand such connections would exhaust a process, so `LimitedHttpProtocol` limits each of these.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from knnlm.errors import ParameterError
from knnlm.server.app import make_app
from knnlm.server.auth import ApiKeys, check_host
from knnlm.server.endpoint import Endpoint, make_endpoint_app
from knnlm.server.responses import error_body
from knnlm.server.service import Service

_SHUTDOWN_SECONDS = 60  # for running requests after a signal
_SPARE_CONNECTIONS = 256  # beyond those of running and waiting requests


def bind(host: str, port: int, *, keys: ApiKeys) -> socket.socket:
    """Return a bound socket; port 0 is any free port. Raise for a public host without keys."""
    check_host(host, keys)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or error
        wrong_host = isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        option = "--host" if wrong_host else "--port"
        raise ParameterError(f"Cannot listen on {host}:{port}: {reason}. Choose another {option}.") from None
    return bound


def server_url(bound: socket.socket) -> str:
    """Return the URL of a server."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """A uvicorn server that calls `ready` when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets."""
        await super().startup(sockets)
        if self.started:
            self._ready()


class LimitedHttpProtocol(HttpToolsProtocol):
    """One client's connection."""

    head_seconds = 20.0  # for the headers of a request
    head_bytes = 64 << 10
    read_seconds = 60.0  # for a client to read what was sent
    max_connections = 1024

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._head_size = 0  # of incomplete headers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the headers, or refuse the connection."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(503, "Service Unavailable", "Too many connections. Try again later.")
        else:
            self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Check the size of headers; RequestGuard checks bodies."""
        if self.transport.is_closing():
            return
        self._head_size += len(data)
        super().data_received(data)
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            return
        if self._head_size > self.head_bytes:
            self._refuse(431, "Request Header Fields Too Large", "The headers of the request are too large.")
        elif self._head_timer is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        """Stop the timer of the headers."""
        self._head_size = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Reset the size of the headers."""
        self._head_size = 0
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start the timer of a client that does not read."""
        super().pause_writing()
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(self.read_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer of a client that does not read."""
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        for timer in (self._head_timer, self._read_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_timeout)

    def _head_timeout(self) -> None:
        if self._head_size:
            self._refuse(408, "Request Timeout", "The headers of the request did not arrive in time.")
        else:
            self.transport.close()  # an idle connection

    def _refuse(self, status: int, phrase: str, message: str) -> None:
        body = json.dumps(error_body(status, message)).encode()
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


def serve(
    service: Service, bound: socket.socket, *, keys: ApiKeys | None = None, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until a signal; `ready` is called when the server listens."""
    make_server(service, bound, keys=keys, ready=ready).run(sockets=[bound])


def serve_endpoint(
    endpoint: Endpoint, bound: socket.socket, *, keys: ApiKeys | None = None, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve replicas until a signal; `ready` is called when the server listens."""
    make_endpoint_server(endpoint, bound, keys=keys, ready=ready).run(sockets=[bound])


def make_endpoint_server(
    endpoint: Endpoint, bound: socket.socket, *, keys: ApiKeys | None = None, ready: Callable[[], None] = lambda: None
) -> Server:
    """Build a server of replicas that is not started."""
    connections = endpoint.count * (endpoint.limits.slots + endpoint.limits.queue)
    return make_app_server(make_endpoint_app(endpoint, keys), bound, connections=connections, ready=ready)


def make_server(
    service: Service, bound: socket.socket, *, keys: ApiKeys | None = None, ready: Callable[[], None] = lambda: None
) -> Server:
    """Build a server of a service that is not started."""
    connections = service.limits.slots + service.limits.queue
    return make_app_server(make_app(service, keys), bound, connections=connections, ready=ready)


def make_app_server(app: FastAPI, bound: socket.socket, *, connections: int, ready: Callable[[], None]) -> Server:
    """Build a server of an application for so many running and waiting requests that is not started."""

    class Limited(LimitedHttpProtocol):
        max_connections = connections + _SPARE_CONNECTIONS

    config = uvicorn.Config(
        app,
        http=Limited,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        timeout_keep_alive=30,
        host=bound.getsockname()[0],
        port=bound.getsockname()[1],
    )
    return Server(config, ready)
