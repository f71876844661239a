"""The command that serves a memory over HTTP."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from knnlm.cli.evaluate import open_mixture
from knnlm.cli.options import Device, Dtype, K, KnnTemperature, Lambda, Memories, Memory, Metric, Reader
from knnlm.cli.output import err, print_json
from knnlm.errors import MissingExtra


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(short_help="Serve a memory over HTTP: an OpenAI-style API, and a page.")(serve)


def serve(
    memory: Memory,
    host: Annotated[str, typer.Option(help="Where to listen; beyond this machine only with a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any that is free.")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with the keys of those who may ask, one a line.", show_default="none")
    ] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="A file with the keys of those who may change the memory.", show_default="none")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the model is called.", show_default="the folder's")] = None,
    slots: Annotated[int, typer.Option(min=1, help="Texts that are written at once.")] = 64,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait for a slot.")] = 256,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a request, waiting included.")] = 300.0,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="The longest prompt.")] = 8192,
    max_output_tokens: Annotated[int, typer.Option(min=1, help="The most tokens that a request may ask for.")] = 4096,
    memories: Memories = None,
    k: K = None,
    knn_temperature: KnnTemperature = None,
    lmbda: Lambda = None,
    metric: Metric = None,
    model: Reader = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Annotated[bool, typer.Option("--json", help="Say where it listens as one JSON object.")] = False,
) -> None:
    """knnlm serve memory --port 8000

    Serve a memory with its model until Ctrl-C: /v1/completions, /v1/chat/completions, /v1/score and more, and a page
    to look inside at /.
    """
    check_installed()
    from knnlm.server import run
    from knnlm.server.auth import ApiKeys
    from knnlm.server.limits import Limits
    from knnlm.server.service import Service

    keys = ApiKeys.read(api_key_file, admin_key_file)
    allowed = Limits(
        slots=slots,
        queue=queue,
        seconds=timeout,
        prompt_tokens=max_prompt_tokens,
        output_tokens=max_output_tokens,
    )
    taken = run.bind(run.Place(host, port), keys)
    chosen = {"memories": memories, "k": k, "knn_temperature": knn_temperature, "lmbda": lmbda, "metric": metric}
    mixture = open_mixture(memory, model=model, device=device, dtype=dtype, **chosen)
    service = Service(mixture, name=name or memory.resolve().name, limits=allowed)

    def ready() -> None:
        facts = {"memory": str(memory), "model": service.name, "url": run.address(taken)}
        if json:
            print_json(facts)
            sys.stdout.flush()
        else:
            err.print(f"knnlm: {memory} is served at {facts['url']}", markup=False, soft_wrap=True)

    with suppress(KeyboardInterrupt):  # the way to end it
        run.serve(service, taken, keys=keys, ready=ready)


def check_installed() -> None:
    """Say how to install what serving needs, where it is not."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if find_spec(package) is None:
            raise MissingExtra("knnlm serve", package.replace("_", "-"), "serve")
