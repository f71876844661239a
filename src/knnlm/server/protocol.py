"""A connection that nobody can hold for nothing. Knows nothing about requests but where their head ends.

uvicorn waits for ever for the head of a request, takes one of any size, and waits for ever for somebody who asks and
does not read. A thousand such connections are all that a process can have open, so here each of these has an end.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from knnlm.server.middleware import error_body


class LimitedHttpProtocol(HttpToolsProtocol):
    """One client's connection."""

    head_seconds = 20.0  # for the head of a request, from the first byte or from the beginning on
    head_bytes = 64 << 10
    read_seconds = 60.0  # for a client to take what was written for it
    most = 1024  # connections at once

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._size = 0  # of a head that is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self._refuse(503, "Service Unavailable", "This server has too many connections. Try again later.")
        else:
            self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Take what came; what follows the head is the body, whose size and time others look after."""
        if self.transport.is_closing():
            return
        self._size += len(data)
        super().data_received(data)
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            return
        if self._size > self.head_bytes:
            self._refuse(431, "Request Header Fields Too Large", "The head of the request is too large.")
        elif self._head is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        """Wait for no head any more."""
        self._size = 0
        if self._head is not None:
            self._head.cancel()
            self._head = None
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Count the next head anew."""
        self._size = 0
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not take what is written: wait for a while."""
        super().pause_writing()
        if self._stuck is None:
            self._stuck = self.loop.call_later(self.read_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        for timer in (self._head, self._stuck):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._head = self.loop.call_later(self.head_seconds, self._late)

    def _late(self) -> None:
        if self._size:
            self._refuse(408, "Request Timeout", "The request did not come in time.")
        else:
            self.transport.close()  # it asked for nothing

    def _refuse(self, status: int, phrase: str, message: str) -> None:
        body = json.dumps(error_body(status, message)).encode()
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
