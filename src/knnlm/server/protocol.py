"""An HTTP protocol with limits on headers, slow clients and connections.

uvicorn has no timeout for the headers of a request, no limit of their size, and no timeout for a client that does not
read. About a thousand such connections would exhaust a process, so each of these has a limit here.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from knnlm.server.responses import error_body


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
