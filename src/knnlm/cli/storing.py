"""The command that stores a memory's keys in fewer bytes: compress."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from knnlm.cli import options, screen


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(short_help="Store a memory's keys in fewer bytes.")(compress)


def compress(
    memory: options.Memory,
    out: Annotated[Path, typer.Option(help="The folder of the copy.", show_default=False)],
    keys: options.Keys = "codes",
    seed: Annotated[int, typer.Option(min=0, help="Which keys the codec is fitted to.")] = 0,
    json: options.Json = False,
) -> None:
    """knnlm compress memory --out compressed --keys int8

    Write a copy of a memory that stores its keys in another way, fitted to keys from all over it. What was tuned is
    not copied: distances are a little different. A copy that was stopped goes on when the same command is given again.
    """
    from knnlm import datastore

    begin = time.perf_counter()
    store = datastore.Datastore.open(memory)
    made = datastore.compress(store, out, keys=keys, seed=seed, progress=screen.bar)
    tokens = max(1, store.rows)
    facts: dict[str, Any] = {
        "memory": str(memory),
        "out": str(out),
        "keys": made.storage,
        "tokens": store.rows,
        "bytes_before": store.bytes,
        "bytes_after": made.bytes,
        "bytes_per_token_before": store.bytes / tokens,
        "bytes_per_token_after": made.bytes / tokens,
        "seconds": time.perf_counter() - begin,
    }
    if json:
        screen.print_json(facts)
        return
    screen.out.print(
        f"{out}: {store.bytes / tokens:,.0f} → {made.bytes / tokens:,.0f} bytes a token, {made.bytes / 1e6:,.1f} MB, "
        f"in {facts['seconds']:.1f} s. Next: knnlm index {out}, knnlm tune {out} TEXT",
        markup=False,
    )
