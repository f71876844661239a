"""The command that serves a store over HTTP: serve."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnlm.cli.options import (
    SERVE,
    Draft,
    MachineFlags,
    MixtureFlags,
    NoDomainCheck,
    RaySearchFlags,
    Store,
    StoreModel,
    command,
    mixture_arguments,
)
from knnlm.cli.output import err, print_json, waiting
from knnlm.errors import MissingExtra, ParameterError

if TYPE_CHECKING:
    from knnlm.cluster.replicas import ReplicaSettings
    from knnlm.mixture.spec import MixtureOptions
    from knnlm.server.endpoint import Endpoint
    from knnlm.server.limits import Limits


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    command(app, SERVE, "Serve a store over HTTP: an OpenAI-compatible API and a web page.")(serve)


@dataclass(frozen=True)
class LimitFlags:
    """The limits of the server."""

    slots: Annotated[int, typer.Option(min=1, help="Sequences generated at the same time.")] = 64
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait for a slot.")] = 256
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds per request, including waiting.")] = 300.0
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of a prompt.")] = 8192
    max_output_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per request.")] = 4096


def serve(
    store: Store,
    host: Annotated[str, typer.Option(help="The address; other than loopback only with an API key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 is any free port.")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with the API keys of clients, one per line.", show_default="none")
    ] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="A file with the API keys that may change the store.", show_default="none")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The model name in the API.", show_default="the folder's")] = None,
    limits: LimitFlags = LimitFlags(),
    refresh: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two looks for changed shards at URLs.")
    ] = 30.0,
    draft: Draft = False,
    mixture: MixtureFlags = MixtureFlags(),
    no_domain_check: NoDomainCheck = False,
    model: StoreModel = None,
    machine: MachineFlags = MachineFlags(),
    remote: RaySearchFlags = RaySearchFlags(),
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --ray: engines on Ray Serve behind one address, each with a model of its own.",
            show_default="one engine in this process",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the address as one JSON object.")] = False,
) -> None:
    """knnlm serve docs.store --port 8000

    Serve a store with its model until Ctrl-C: /v1/completions, /v1/chat/completions, /v1/score and more, and a web page
    at / that shows the sources of each token.
    """
    check_installed()
    from knnlm.server import run
    from knnlm.server.auth import ApiKeys
    from knnlm.server.translation import make_service

    keys = ApiKeys.read(api_key_file, admin_key_file)
    if replicas is not None and remote.ray is None:
        raise ParameterError("--replicas is for --ray only.")
    bound = run.bind(host, port, keys=keys)
    name = name or store.resolve().name
    address = {"store": str(store), "model": name, "url": run.server_url(bound)}
    ready = partial(_announce, address, json=json)
    if replicas is not None:
        options, others = mixture_arguments(model, machine, **mixture.settings(domain_check=not no_domain_check))
        settings = replace(
            _replica_settings(store, name, options, others, remote),
            limits=_limits(limits),
            refresh=refresh,
            draft=draft,
        )
        with _endpoint(settings, replicas, str(remote.ray)) as endpoint, suppress(KeyboardInterrupt):
            run.serve_endpoint(endpoint, bound, keys=keys, ready=ready)
        return
    with remote.opener() as open_index:
        opened = mixture.open(store, model, machine, domain_check=not no_domain_check, open_index=open_index)
        service = make_service(opened, name=name, limits=_limits(limits), refresh=refresh, draft=draft)
        with suppress(KeyboardInterrupt):  # the usual way to stop the server
            run.serve(service, bound, keys=keys, ready=ready)


def _replica_settings(
    store: Path, name: str, options: MixtureOptions, others: dict[str, Any], remote: RaySearchFlags
) -> ReplicaSettings:
    """Return what every replica serves, with the usual limits."""
    from knnlm.cluster.replicas import ReplicaSettings
    from knnlm.datastore.manifest import is_sharded

    # Each replica searches the keys of an ordinary store itself, unless options ask for processes that do.
    search = remote.search_options() if remote.changed or is_sharded(store) else None
    path = str(store.resolve())
    return ReplicaSettings(path, name, options, others, search=search, started=int(time.time()))


@contextmanager
def _endpoint(settings: ReplicaSettings, count: int, address: str) -> Iterator[Endpoint]:
    """Start replicas on Ray and yield their endpoint."""
    from knnlm.cluster.replicas import served_replicas
    from knnlm.server.endpoint import Endpoint

    with ExitStack() as stack:
        with waiting(f"starting {count} replicas"):
            replicas = stack.enter_context(served_replicas(settings, count, address=address))
        yield Endpoint(replicas, settings.limits)


def _limits(flags: LimitFlags) -> Limits:
    from knnlm.server.limits import Limits

    return Limits(
        slots=flags.slots,
        queue=flags.queue,
        seconds=flags.timeout,
        prompt_tokens=flags.max_prompt_tokens,
        output_tokens=flags.max_output_tokens,
    )


def _announce(address: dict[str, str], *, json: bool) -> None:
    if json:
        print_json(address)
        sys.stdout.flush()
    else:
        err.print(f"knnlm: serving {address['store']} at {address['url']}", markup=False, soft_wrap=True)


def check_installed() -> None:
    """Raise MissingExtra, which names the installation, where a package of the server is missing."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if find_spec(package) is None:
            raise MissingExtra("knnlm serve", package.replace("_", "-"), "serve")
