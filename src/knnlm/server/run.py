"""Listen on a port until told to stop. Knows nothing about routes.

A signal ends it gracefully: nobody new is let in, what is in flight is finished, then the engine stops.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from knnlm.errors import ParameterError
from knnlm.server.auth import ApiKeys, check_host
from knnlm.server.protocol import LimitedHttpProtocol
from knnlm.server.routes import make_app
from knnlm.server.service import Service

PATIENCE = 60  # seconds for what is in flight when the server is told to stop

SPARE = 256  # connections beyond those whose requests are being answered or wait


@dataclass(frozen=True)
class Place:
    """Where a server listens."""

    host: str = "127.0.0.1"
    port: int = 8000


def bind(place: Place, keys: ApiKeys) -> socket.socket:
    """Take a port, before anything slow is opened; 0 is any that is free."""
    check_host(place.host, keys)
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((place.host, place.port))
    except (OSError, OverflowError) as error:
        taken.close()
        reason = getattr(error, "strerror", None) or error
        elsewhere = isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        other = "--host" if elsewhere else "--port"
        raise ParameterError(f"Cannot listen on {place.host}:{place.port}: {reason}. Choose another {other}.") from None
    return taken


def address(taken: socket.socket) -> str:
    """Give the address of a server as a browser takes it."""
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Tells when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            self._ready()


def serve(
    service: Service, taken: socket.socket, *, keys: ApiKeys | None = None, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until a signal comes; `ready` is called when requests are answered."""
    make_server(service, taken, keys=keys, ready=ready).run(sockets=[taken])


def make_server(
    service: Service, taken: socket.socket, *, keys: ApiKeys | None = None, ready: Callable[[], None] = lambda: None
) -> Server:
    """Make a server that has not begun yet."""

    class Limited(LimitedHttpProtocol):
        most = service.limits.slots + service.limits.queue + SPARE

    config = uvicorn.Config(
        make_app(service, keys),
        http=Limited,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=PATIENCE,
        timeout_keep_alive=30,
        host=taken.getsockname()[0],
        port=taken.getsockname()[1],
    )
    return Server(config, ready)
