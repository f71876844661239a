"""Checks of every request before its route: API keys, host, size and time of the body."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import time
from dataclasses import dataclass
from pathlib import Path

from fastapi.exceptions import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from knnlm.errors import ParameterError
from knnlm.server.metrics import Metrics
from knnlm.server.responses import error_body

_MIN_KEY_CHARACTERS = 8
_CLOSE = {"Connection": "close"}  # the rest of the body is not read
_PUBLIC = ("/healthz", "/readyz")
_ADMIN = "The admin key is missing or wrong. Send it as: Authorization: Bearer KEY"


@dataclass(frozen=True)
class ApiKeys:
    """The keys for requests, and those for changes of the store. Without user keys, every request is allowed."""

    users: tuple[bytes, ...] = ()
    admins: tuple[bytes, ...] = ()

    @classmethod
    def read(cls, users: Path | None, admins: Path | None) -> ApiKeys:
        """Read key files with one key on each line."""
        return cls(_read(users), _read(admins))

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self.users)

    def is_user(self, key: str) -> bool:
        """Whether requests with this key are allowed."""
        return not self.required or _among(key, self.users + self.admins)

    def is_admin(self, key: str) -> bool:
        """Whether changes of the store are allowed with this key."""
        return _among(key, self.admins)


def _among(key: str, known: tuple[bytes, ...]) -> bool:
    """Whether a key is one of the known ones, in constant time."""
    data = key.encode("latin-1", errors="replace")  # the encoding of headers
    return sum(hmac.compare_digest(data, each) for each in known) > 0


def _read(path: Path | None) -> tuple[bytes, ...]:
    if path is None:
        return ()
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ParameterError(
            f"{path}: cannot read the key file ({reason}). Use a text file with one key on each line."
        ) from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys or any(len(key) < _MIN_KEY_CHARACTERS or not key.isascii() for key in keys):
        raise ParameterError(f"{path}: each line must be a key of at least {_MIN_KEY_CHARACTERS} ASCII characters.")
    return tuple(key.encode() for key in keys)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host name or address."""
    host = host.strip("[]").rstrip(".").lower()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(host: str, keys: ApiKeys) -> None:
    """Raise for a host that other machines can reach, if requests need no key."""
    if not is_loopback(host) and not keys.required:
        raise ParameterError(f"{host} is reachable from other machines and needs a key. Use --api-key-file FILE.")


class RequestGuard:
    """Middleware that rejects requests before they reach their route, and counts all responses."""

    def __init__(
        self, app: ASGIApp, *, keys: ApiKeys, body_bytes: int, metrics: Metrics, body_seconds: float = 30.0
    ) -> None:
        self.app = app
        self.keys = keys
        self.body_bytes = body_bytes
        self.body_seconds = body_seconds  # for the whole body
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-content-type-options", b"nosniff")]
            await send(message)

        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                await _refuse(send_counted, *refusal)
            else:
                await self._pass(scope, receive, send_counted)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - began)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, complete = 0, False
        end = time.monotonic() + self.body_seconds

        async def receive_limited() -> Message:
            nonlocal size, complete
            try:
                # After the body, this waits for the client to disconnect, without a time limit.
                left = None if complete else max(0.0, end - time.monotonic())
                message = await asyncio.wait_for(receive(), left)
            except asyncio.TimeoutError:
                raise HTTPException(408, "The body did not arrive in time.", headers=_CLOSE) from None
            size += len(message.get("body", b""))
            complete = complete or not message.get("more_body", False)
            if size > self.body_bytes:
                raise HTTPException(413, self._too_large(), headers=_CLOSE)
            return message

        await self.app(scope, receive_limited, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and message for a request to reject, else None."""
        path, headers = scope["path"], Headers(scope=scope)
        if not self.keys.required and not is_loopback(_host(headers.get("host", ""))):
            # DNS rebinding: a foreign web page whose name resolves to this machine must not be served.
            return 403, "Without an API key, only local host names are allowed: localhost, 127.0.0.1."
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.body_bytes:
            return 413, self._too_large()
        if path in _PUBLIC or not path.startswith(("/v1/", "/metrics")):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if scope["method"] not in ("GET", "HEAD", "OPTIONS") and path.startswith("/v1/documents"):
            if not self.keys.admins:
                return 403, "This server does not allow changes of its store. Start it with --admin-key-file."
            if not self.keys.is_admin(key):
                return (403 if self.keys.required and self.keys.is_user(key) else 401), _ADMIN
        elif not self.keys.is_user(key):
            return 401, "The API key is missing or wrong. Send it as: Authorization: Bearer KEY"
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and media_type != "application/json":
            return 415, "Send the body as JSON, with Content-Type: application/json."
        return None

    def _too_large(self) -> str:
        return f"The body is larger than the limit of {self.body_bytes:,} bytes."


def _host(header: str) -> str:
    """Return the host name of a Host header, without its port."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]


async def _refuse(send: Send, status: int, message: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error_body(status, message)).encode()})
