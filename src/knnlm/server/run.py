"""Run the server on a socket until a signal; running requests are finished before it stops."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import uvicorn

from knnlm.errors import ParameterError
from knnlm.server.app import make_app
from knnlm.server.auth import ApiKeys, check_host
from knnlm.server.protocol import LimitedHttpProtocol
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


def serve(
    service: Service, bound: socket.socket, *, keys: ApiKeys | None = None, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until a signal; `ready` is called when the server listens."""
    make_server(service, bound, keys=keys, ready=ready).run(sockets=[bound])


def make_server(
    service: Service, bound: socket.socket, *, keys: ApiKeys | None = None, ready: Callable[[], None] = lambda: None
) -> Server:
    """Build a server that is not started."""

    class Limited(LimitedHttpProtocol):
        max_connections = service.limits.slots + service.limits.queue + _SPARE_CONNECTIONS

    config = uvicorn.Config(
        make_app(service, keys),
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
