"""Connecting to Ray: a local one, errors in one line."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import knnlm
from knnlm.cluster import connection
from knnlm.cluster.connection import connected, import_ray


def test_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(knnlm.MissingExtra, match=r"pip install 'knnlm\[ray\]'"):
        import_ray()


@pytest.mark.parametrize("address", ["nonsense", "10.0.0.1:", ":6379", "host:port"])
def test_invalid_address_is_an_error(address):
    with pytest.raises(knnlm.ClusterError, match="HOST:PORT"), connected(address):
        pass


def test_address_without_a_cluster_is_an_error_at_once():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(knnlm.ClusterError, match=f"No Ray cluster at {address}") as caught, connected(address):
            pass
    assert "\n" not in str(caught.value)


def test_server_that_is_no_ray_cluster_is_an_error(monkeypatch):
    monkeypatch.setattr(connection, "_REACH_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(knnlm.ClusterError, match=f"No Ray cluster at {address}"), connected(address):
            pass


def test_local_ray_is_started_quietly_and_stopped(capfd, cluster):
    before = os.environ.get("RAY_AUTH_MODE")
    capfd.readouterr()
    with connected(cores=1) as ray:
        assert ray.cluster_resources()["CPU"] == 1
        with connected("127.0.0.1:1") as same:  # connected already
            assert same is ray
        assert ray.is_initialized()
    assert not ray.is_initialized()
    # A local Ray may ask for a token, which the cluster does not have.
    assert os.environ.get("RAY_AUTH_MODE") == before
    with connected(cluster.address):
        actor = ray.remote(Counter).options(num_cpus=0.1).remote("abc")
        assert ray.get(actor.total.remote(), timeout=60) == 3
    assert capfd.readouterr() == ("", "")


def test_running_cluster_is_used_and_stays(cluster, capfd):
    capfd.readouterr()
    for _ in range(2):
        with connected(cluster.address) as ray:
            assert ray.cluster_resources()["CPU"] == 2
    assert capfd.readouterr() == ("", "")


class Refusing(grpc.GenericRpcHandler):
    """A server that refuses every call without a token, or has no methods at all."""

    def __init__(self, code):
        self.code, self.calls = code, []

    def service(self, details):
        self.calls.append((details.method, dict(details.invocation_metadata).get("authorization")))

        def refuse(_, context):
            context.abort(self.code, "no")

        return grpc.unary_unary_rpc_method_handler(refuse)


@pytest.mark.parametrize(("code", "asks"), [("UNAUTHENTICATED", True), ("UNIMPLEMENTED", False)])
def test_cluster_that_asks_for_a_token_is_recognised(code, asks):
    server, handler = grpc.server(ThreadPoolExecutor(1)), Refusing(getattr(grpc.StatusCode, code))
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert connection._asks_for_token(f"127.0.0.1:{port}") is asks
    finally:
        server.stop(None).wait()
    assert handler.calls == [("/ray.rpc.NodeInfoGcsService/GetClusterId", None)]
    assert not connection._asks_for_token(f"127.0.0.1:{port}")  # nothing listens
    assert not any(connection._asks_for_token(address) for address in ("local", "auto", "ray://127.0.0.1:1"))


def test_running_cluster_is_found_and_asked_for_nothing_it_does_not_want(cluster, monkeypatch, capfd):
    """With `auto`, Ray would use a token wherever a file has one."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    before = os.environ.get("RAY_AUTH_MODE")
    for address in ("auto", cluster.address):
        with connected(address) as ray:
            assert os.environ.get("RAY_AUTH_MODE") == before
            actor = ray.remote(Counter).options(num_cpus=0.1).remote("abc")
            assert ray.get(actor.total.remote(), timeout=60) == 3
