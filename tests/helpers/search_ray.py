"""The part of Ray that searches use, with threads in place of actors."""

from __future__ import annotations

import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace

from knnlm.cluster.search_actor import ShardActor


class RayError(Exception):
    """The loss of a call."""


class ActorDiedError(RayError):
    """The death of an actor."""


class RayTaskError(RayError):
    """An error that a method has raised."""

    def __init__(self, cause):
        super().__init__(str(cause))
        self.cause = cause


class Actor:
    """A `ShardActor` in threads; `fail` and `before` are called before each search."""

    def __init__(self, ray, *args):
        self.ray, self.args, self.inner, self.pool = ray, args, ShardActor(*args), ThreadPoolExecutor(8)
        self.calls, self.stopped = 0, threading.Event()
        ray.actors.append(self)

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args: self.pool.submit(self.run, name, args))

    def restart(self):
        """Lose the open shards, as a process does that is killed and restarted."""
        self.inner = ShardActor(*self.args)

    def run(self, name, args):
        if name == "call":
            self.calls += 1
            self.ray.fail(self, args[2])
            self.ray.before(args[0].path, args[2])
        elif name == "ping" and self.stopped.is_set():
            time.sleep(0.5)
        try:
            return getattr(self.inner, name)(*args)
        except Exception as error:
            raise RayTaskError(error) from None


class FakeRay:
    """The part of the module ray that searches use."""

    exceptions = SimpleNamespace(RayError=RayError, ActorDiedError=ActorDiedError, RayTaskError=RayTaskError)

    def __init__(self):
        self.actors, self.killed, self.fail = [], [], lambda _actor, _method: None
        self.before = lambda _path, _method: None

    def remote(self, _):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *args: Actor(self, *args)))

    def cluster_resources(self):
        return {"CPU": 2.0}

    def put(self, value):
        return value

    def wait(self, references, *, timeout, num_returns=1):
        assert num_returns == 1
        done, _ = wait(references, timeout=timeout, return_when=FIRST_COMPLETED)
        return list(done)[:1], []

    def get(self, reference):
        return reference.result() if isinstance(reference, Future) else reference

    def kill(self, actor, *, no_restart=True):
        self.killed.append((actor, no_restart))
        actor.stopped.clear()
