"""Commands that make something else out of a memory: distill, prune."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnlm.cli import options, screen
from knnlm.errors import ParameterError

if TYPE_CHECKING:
    from knnlm.datastore import Datastore


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(short_help="Train an output matrix or a better similarity on a memory.")(distill)
    app.command(short_help="Make a memory smaller.")(prune)


def distill(
    memory: options.Memory,
    into: Annotated[
        str,
        typer.Option(
            help="output (a matrix with rows for every word, mixed in as --memory output) or keys (a memory whose "
            "similarity was trained, mixed in as --memory knn=OUT)."
        ),
    ] = "output",
    out: Annotated[
        Path | None,
        typer.Option(help="The folder to make.", show_default="MEMORY/output; for keys, it must be given"),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, max=9, help="output: rows for each word.")] = 1,
    rows_by: Annotated[
        str, typer.Option(help="output: uniform, or frequency (more rows for frequent words).")
    ] = "uniform",
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the pairs at most.", show_default="6")] = None,
    interpolate: Annotated[
        float | None,
        typer.Option(
            help="output: train on (1-λ)·p_LM + λ·p_output with this λ; reads the memory's text once more.",
            show_default="off",
        ),
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=1, help="keys: dimensions after the map.", show_default="as many as before")
    ] = None,
    anchors: Annotated[int, typer.Option(min=1, help="keys: contexts to learn from.")] = 40_000,
    neighbours: Annotated[int, typer.Option(min=2, help="keys: neighbours of each, of other documents.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="keys: how often neighbours are looked for anew.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Makes training repeatable.")] = 0,
    model: options.Reader = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    json: options.Json = False,
) -> None:
    """knnlm distill memory --into output

    Learn from the stored pairs alone: no text is read again, and the model is not run (but for --interpolate). A run
    that was stopped goes on when the same command is given again.
    """
    from knnlm.datastore import Datastore
    from knnlm.lm.causal import choose_device

    if into not in ("output", "keys"):
        raise ParameterError(f"--into takes output or keys, not {into!r}.")
    where = str(choose_device(device))
    store = Datastore.open(memory)
    if into == "keys":
        if out is None:
            raise ParameterError("--into keys makes a new memory: say where with --out.")
        settings: dict[str, Any] = {} if epochs is None else {"epochs": epochs}
        settings |= {"width": width, "anchors": anchors, "neighbours": neighbours, "rounds": rounds}
        facts = _distill_keys(store, out, seed=seed, device=where, **settings)
        summary = f"{out}: a memory with trained keys. Next: knnlm tune {memory} TEXT --memory knn,knn={out}"
    else:
        place = out or memory / "output"
        log_p = None if interpolate is None else _log_p(store, model, where, dtype)
        settings = {} if epochs is None else {"epochs": epochs}
        settings |= {"rows": rows, "rows_by": rows_by, "interpolate": interpolate, "log_p_lm": log_p}
        facts = _distill_output(store, place, seed=seed, device=where, **settings)
        summary = (
            f"{place}: loss on held-out documents {_nats(facts['held_out_before'])} → {_nats(facts['held_out_after'])} "
            f"in {facts['seconds']:.0f} s. Next: knnlm tune {memory} TEXT --memory knn,output"
        )
    if json:
        screen.print_json({"memory": str(memory), **facts})
        return
    screen.out.print(summary, markup=False)


def _distill_output(store: Datastore, place: Path, **settings: Any) -> dict[str, Any]:
    from knnlm.distill.output import distill_output

    card = distill_output(store, place, progress=screen.bar, **settings)
    return {"into": "output", "out": str(place), **asdict(card)}


def _distill_keys(store: Datastore, out: Path, **settings: Any) -> dict[str, Any]:
    from knnlm.datastore import derive
    from knnlm.distill.similarity import learn_map

    begin = time.perf_counter()
    key_map = learn_map(store, progress=screen.bar, **settings)
    made = derive(store, out, key_map=key_map, progress=screen.bar)
    return {
        "into": "keys",
        "out": str(out),
        "width": made.width,
        "learned": key_map.facts,
        "seconds": time.perf_counter() - begin,
    }


def prune(
    memory: options.Memory,
    out: Annotated[Path, typer.Option(help="The folder of the smaller memory.", show_default=False)],
    width: Annotated[
        int | None, typer.Option(min=1, help="Keep this many principal components.", show_default="all")
    ] = None,
    merge: Annotated[
        int | None,
        typer.Option(min=1, help="Merge keys into one of this many neighbours with their token.", show_default="off"),
    ] = None,
    drop_known: Annotated[
        float | None,
        typer.Option(
            help="Drop keys whose token the model gives at least this probability; reads the memory's text once more.",
            show_default="off",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The order of merging.")] = 0,
    model: options.Reader = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    json: options.Json = False,
) -> None:
    """knnlm prune memory --out smaller --merge 8

    Write a smaller memory beside the old one. Its text stays whole, so neighbours are still shown where they stand;
    what it costs is measured by tune and eval.
    """
    from knnlm.datastore import Datastore
    from knnlm.lm.causal import choose_device
    from knnlm.prune import prune as prune_store

    if width is None and merge is None and drop_known is None:
        raise ParameterError("Say how to prune: --width, --merge, --drop-known, or several of them.")
    begin = time.perf_counter()
    where = str(choose_device(device))
    store = Datastore.open(memory)
    log_p = None if drop_known is None else _log_p(store, model, where, dtype)
    facts = prune_store(
        store,
        out,
        width=width,
        merge=merge,
        drop_known=drop_known,
        log_p=log_p,
        device=where,
        seed=seed,
        progress=screen.bar,
    )
    facts |= {"memory": str(memory), "out": str(out), "seconds": time.perf_counter() - begin}
    if json:
        screen.print_json(facts)
        return
    rows = [
        ("keys", f"{facts['keys_before']:,} → {facts['keys_after']:,}"),
        ("  dropped", f"{facts['dropped']:,} that the model knows"),
        ("  merged", f"{facts['merged']:,} into others"),
        ("bytes", f"{facts['bytes_before']:,} → {facts['bytes_after']:,}"),
        ("next", f"knnlm tune {out} TEXT, then knnlm eval: that is what it costs"),
    ]
    if facts["explained_variance"] is not None:
        rows.insert(3, ("variance kept", f"{facts['explained_variance']:.1%}"))
    screen.print_facts(rows)


def _log_p(store: Datastore, model: str | None, device: str, dtype: str) -> Any:
    """Read the memory's text again with its model."""
    from knnlm.mixture import check_model, open_reader
    from knnlm.prune import store_log_p

    screen.quiet()
    with screen.waiting(f"opening {model or store.model['name']}"):
        lm = open_reader(store, name=model, device=device, dtype=dtype)
        check_model(store, lm)
    return store_log_p(store, lm, progress=screen.bar)


def _nats(loss: float | None) -> str:
    return "?" if loss is None else f"{loss:.3f}"
