"""The connection to Ray: a local one that is started for a task, or a running cluster.

Ray unpickles what reaches its ports, so clusters belong into trusted networks; recent versions also ask for a token.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from knnlm.errors import ClusterError, MissingExtra

LOCAL = "local"  # the address of a Ray that is started for the task and stopped with it
AUTO = "auto"  # the address of the cluster that runs on this machine
NAMESPACE = "knnlm"  # of named actors

_AUTH_MODE, _TOKEN = "RAY_AUTH_MODE", "token"
_FIRST_CALL = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # of every program that connects
_REACH_SECONDS = 3.0
_SETTINGS, _FRAME_HEAD = b"\4", 9  # the type of the first frame of HTTP/2, and the bytes before its content
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0" * 5
_OBJECT_STORE_BYTES = 1 << 28  # of a local Ray: keys do not travel through it
# No statistics are sent, and nothing but results and progress is printed. Variables that are set stay as they are.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


def import_ray() -> Any:
    """Return the module ray; raise MissingExtra where it is not installed."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise MissingExtra("A cluster", "ray", "ray") from None
    return ray


class Presence:
    """An actor that ends with the program that has started it, which tells others that the program has ended."""

    def ping(self) -> None:
        """Return nothing."""


@contextmanager
def connected(
    address: str = LOCAL, *, cores: float | None = None, object_store_bytes: int = _OBJECT_STORE_BYTES
) -> Iterator[Any]:
    """Connect to Ray and yield the module; what was started or connected here is stopped at the end.

    `address` is `local` for a Ray that is started here with `cores` cores, `auto` for the cluster that runs
    on this machine, or the address of a cluster, such as `10.0.0.1:6379`. A program that is connected already stays so.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:
        options |= {"include_dashboard": False, "object_store_memory": object_store_bytes}
        options |= {} if cores is None else {"num_cpus": cores}
    else:
        address = _resolved(address)
        _check_reachable(address)
    mode = os.environ.get(_AUTH_MODE)
    try:
        if mode is None and _asks_for_token(address):
            os.environ[_AUTH_MODE] = _TOKEN
            _read_auth_mode()
        ray.init(address=address, **options)
    except Exception as error:
        reason = _reason(address, error)
        _restore_auth_mode(mode)
        raise ClusterError(reason) from error
    try:
        with _without_messages():
            yield ray
    finally:
        ray.shutdown()
        _restore_auth_mode(mode)


def _restore_auth_mode(mode: str | None) -> None:
    """Undo that Ray asks for a token from now on: it sets the variable when it starts a local Ray with one.

    The processes of another cluster, which has no token, would refuse this program.
    """
    if os.environ.get(_AUTH_MODE) == mode:
        return
    os.environ.pop(_AUTH_MODE) if mode is None else os.environ.update({_AUTH_MODE: mode})
    _read_auth_mode()


def _read_auth_mode() -> None:
    """Make Ray read the variable again."""
    raylet: Any = sys.modules.get("ray._raylet")  # there is no public function
    if hasattr(raylet, "Config") and hasattr(raylet, "AuthenticationTokenLoader"):
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _without_messages() -> Iterator[None]:
    """Keep Ray from printing the deaths of workers to standard output, between the results; errors name them."""
    worker: Any = sys.modules.get("ray._private.worker")  # there is no public setting
    if not hasattr(worker, "_worker_logs_enabled"):
        yield
        return
    worker._worker_logs_enabled, before = False, worker._worker_logs_enabled
    try:
        yield
    finally:
        worker._worker_logs_enabled = before


def _resolved(address: str) -> str:
    """Return the address of the cluster that runs on this machine for `auto`, if it is known, and others as they are.

    With `auto`, Ray would ask for a token wherever a file has one, also of a cluster that has none.
    """
    services: Any = sys.modules.get("ray._private.services")  # there is no public function
    if address != AUTO or not hasattr(services, "canonicalize_bootstrap_address"):
        return address
    try:
        found = services.canonicalize_bootstrap_address(AUTO)
    except Exception:  # several clusters, or none: Ray has the reason
        return address
    return str(found or address)


def _asks_for_token(address: str) -> bool:
    """Whether a cluster refuses a program without a token: Ray itself would try for half a minute."""
    if address in (LOCAL, AUTO) or address.startswith("ray://") or os.environ.get("RAY_USE_TLS", "0") != "0":
        return False
    try:
        import grpc  # type: ignore[import-untyped]
    except ImportError:
        return False
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_FIRST_CALL)(b"", timeout=_REACH_SECONDS)
        except grpc.RpcError as error:
            return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False


def _reason(address: str, error: Exception) -> str:
    """Return one line of why Ray did not start, or a cluster refused the connection."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if address == LOCAL:
        return f"Ray did not start on this machine: {first}"
    if address == AUTO:
        return "No Ray cluster runs on this machine. Start one with ray start --head, or name its address."
    advice = ""
    if os.environ.get(_AUTH_MODE) == _TOKEN:
        advice = " The cluster wants its token, in ~/.ray/auth_token or the variable RAY_AUTH_TOKEN."
    return f"No connection to the Ray cluster at {address}: {first.rstrip('.')}.{advice}"


def _check_reachable(address: str) -> None:
    """Raise if nothing listens at an address: Ray itself would try for ten minutes."""
    if address == AUTO:
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ClusterError(
            f"Invalid address {address!r} of a Ray cluster: write HOST:PORT, such as 10.0.0.1:6379, or local, or auto."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS) as connection:
            _check_protocol(connection)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ClusterError(
            f"No Ray cluster at {address} ({reason}). ray start --head prints the address of a new one."
        ) from None


def _check_protocol(connection: socket.socket) -> None:
    """Raise OSError unless a server speaks HTTP/2, as Ray's do."""
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    connection.sendall(_HTTP2_GREETING)
    if connection.recv(_FRAME_HEAD, socket.MSG_WAITALL)[3:4] != _SETTINGS:
        raise OSError("another server listens there")
