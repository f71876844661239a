"""The part of Ray that builds use, with threads in place of actors: fast tests of what the driver decides."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch


class RayError(Exception):
    """The death of an actor."""


class Method:
    """A method of an actor."""

    def __init__(self, actor: Actor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *args: Any) -> Future[Any]:
        return self._actor.call(self._name, args)


class Actor:
    """An object whose methods run in two threads."""

    def __init__(self, instance: Any) -> None:
        self._instance, self._pool = instance, ThreadPoolExecutor(2)

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def call(self, name: str, args: tuple[Any, ...]) -> Future[Any]:
        def run() -> Any:
            try:
                return getattr(self._instance, name)(*args)
            except Exception as error:
                raise RayError(f"it died of {error!r}") from error

        return self._pool.submit(run)


class ThreadRay:
    """Stands for the module ray; `make` makes the instances in place of the class that the driver names."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, make: Callable[..., Any], cores: int = 2) -> None:
        self._make, self._cores, self.options, self.killed = make, cores, {}, 0

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": float(self._cores)}}, {"Alive": False, "Resources": {"CPU": 64.0}}]

    def remote(self, _: type) -> Any:
        def options(**given: Any) -> Any:
            self.options = given
            return SimpleNamespace(remote=lambda job: Actor(self._make(job)))

        return SimpleNamespace(options=options)

    def wait(
        self, calls: list[Future[Any]], timeout: float, num_returns: int = 1
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        when = FIRST_COMPLETED if num_returns == 1 else ALL_COMPLETED
        done, rest = wait(calls, timeout=timeout, return_when=when)
        return list(done), list(rest)

    def get(self, call: Future[Any]) -> Any:
        return call.result()

    def kill(self, actor: Actor) -> None:
        self.killed += 1
        actor._pool.shutdown(wait=True, cancel_futures=True)

    @contextmanager
    def connected(self, address: str):
        assert address == "local"
        with patch("torch.set_num_threads"):  # that of the process, which other tests use
            yield self
