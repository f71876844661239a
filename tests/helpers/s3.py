"""A local S3 server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec

BUCKET = "s3://knnlm"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Run a server with a bucket, and yield the variables by which other processes find it; this one has them set."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    kind = fsspec.get_filesystem_class("s3")
    kind.clear_instance_cache()  # one of an earlier server
    fsspec.filesystem("s3").makedirs("knnlm", exist_ok=True)  # the servers of a process have the same buckets
    yield names
    kind.clear_instance_cache()
    server.stop()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
