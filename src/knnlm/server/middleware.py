"""What every request goes through before it is answered: who asks, how large it is, how long it took.

Knows nothing about what is asked for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from fastapi.exceptions import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from knnlm.server.auth import ApiKeys, is_loopback

_CLOSE = {"Connection": "close"}  # what is left of the body is not waited for

PUBLIC = ("/healthz", "/readyz")

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "unavailable_error"}

OnResponse = Callable[[str, int, float], None]


_ADMIN = "The admin key is missing or wrong. Send it as: Authorization: Bearer KEY"

# What the framework says, and what tells more.
_PLAIN = {
    "Not Found": "There is no such route. Those of the API begin with /v1; /openapi.json lists them.",
    "Method Not Allowed": "This route has no such method. /openapi.json lists those that there are.",
    "Field required": "The body is empty. Send one JSON object.",
    "Input should be a valid dictionary or object to extract fields from": "The body must be one JSON object.",
    "There was an error parsing the body": "The body cannot be read. Send one JSON object in UTF-8.",
}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Write an error in OpenAI's shape."""
    usual = "server_error" if status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": _PLAIN.get(message, message),
            "type": _KINDS.get(status, usual),
            "param": param,
            "code": code,
        }
    }


class RequestGuard:
    """Checks keys, the Host header and the size of the body, and counts."""

    def __init__(
        self, app: ASGIApp, *, keys: ApiKeys, body_bytes: int, seen: OnResponse, patience: float = 30.0
    ) -> None:
        self.app = app
        self.keys = keys
        self.body_bytes = body_bytes
        self.patience = patience  # seconds for a body, all of it: a byte now and then is no body
        self.seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-content-type-options", b"nosniff")]
            await send(message)

        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                await _refuse(counted, *refusal)
            else:
                await self._pass(scope, receive, counted)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.seen(route, status, time.perf_counter() - began)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, complete = 0, False
        end = time.monotonic() + self.patience

        async def limited() -> Message:
            nonlocal size, complete
            try:
                # Once the body is there, this waits for the client to go, which may take as long as it likes.
                left = None if complete else max(0.0, end - time.monotonic())
                message = await asyncio.wait_for(receive(), left)
            except asyncio.TimeoutError:
                raise HTTPException(408, "The body did not come in time.", headers=_CLOSE) from None
            size += len(message.get("body", b""))
            complete = complete or not message.get("more_body", False)
            if size > self.body_bytes:
                raise HTTPException(413, self._too_large(), headers=_CLOSE)
            return message

        await self.app(scope, limited, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Say why a request is refused, None where it is not."""
        path, headers = scope["path"], Headers(scope=scope)
        if not self.keys.needed and not is_loopback(_host(headers.get("host", ""))):
            # A page of a stranger whose name was made to point here would otherwise be as good as a local one.
            return 403, "Without an API key this server answers only to names of this machine: localhost, 127.0.0.1."
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.body_bytes:
            return 413, self._too_large()
        if path in PUBLIC or not path.startswith(("/v1/", "/metrics")):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if scope["method"] not in ("GET", "HEAD", "OPTIONS") and path.startswith("/v1/documents"):
            if not self.keys.admins:
                return 403, "This server lets nobody change its memory. Start it with --admin-key-file."
            if not self.keys.may_change(key):
                return (403 if self.keys.needed and self.keys.may_ask(key) else 401), _ADMIN
        elif not self.keys.may_ask(key):
            return 401, "The API key is missing or wrong. Send it as: Authorization: Bearer KEY"
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            return 415, "Send the body as JSON, with Content-Type: application/json."
        return None

    def _too_large(self) -> str:
        return f"The body is larger than the {self.body_bytes:,} bytes that this server takes."


def _host(header: str) -> str:
    """Take the port from a Host header."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]


async def _refuse(send: Send, status: int, message: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error_body(status, message)).encode()})
