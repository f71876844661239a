"""Commands that make something else out of a memory: distill, prune."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnlm.cli import options, screen
from knnlm.cli.adapting import describe_decoder, distill_decoder, open_helped
from knnlm.errors import ParameterError

if TYPE_CHECKING:
    from knnlm.datastore import Datastore

_DECODER = (
    "student",
    "layers",
    "teacher",
    "beta",
    "k",
    "temperature",
    "exclude",
    "learning_rate",
    "batch_tokens",
    "accumulate",
    "context",
    "valid",
)
# Which options are for which kind of --into; the others are for all.
_OWN: dict[str, tuple[str, ...]] = {
    "output": ("rows", "rows_by", "held_out", "interpolate"),
    "keys": ("width", "anchors", "neighbours", "rounds"),
    "decoder": _DECODER,
}


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(short_help="Train an output matrix, a better similarity or a decoder on a memory.")(distill)
    app.command(short_help="Make a memory smaller.")(prune)


def distill(
    memory: options.Memory,
    into: Annotated[
        str,
        typer.Option(
            help="output (a matrix with rows for every word, mixed in as --memory output), keys (a memory whose "
            "similarity was trained, mixed in as --memory knn=OUT) or decoder (a model that says what the memory "
            "would, mixed in as --memory lm=OUT, or used in its place)."
        ),
    ] = "output",
    out: Annotated[
        Path | None,
        typer.Option(help="The folder to make.", show_default="MEMORY/output; for others, it must be given"),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, max=9, help="output: rows for each word.", show_default="1")
    ] = None,
    rows_by: Annotated[
        str | None,
        typer.Option(help="output: uniform, or frequency (more rows for frequent words).", show_default="uniform"),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Passes over the pairs at most; of keys, over the anchors in each round.",
            show_default="6; for keys and a decoder, 3",
        ),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.5,
            help="output: fraction of the text, in whole documents, that tells when to stop; 0 holds nothing out.",
            show_default="0.02",
        ),
    ] = None,
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
    anchors: Annotated[
        int | None, typer.Option(min=1, help="keys: contexts to learn from.", show_default="40000")
    ] = None,
    neighbours: Annotated[
        int | None, typer.Option(min=2, help="keys: neighbours of each, of other documents.", show_default="128")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="keys: how often neighbours are looked for anew.", show_default="1")
    ] = None,
    student: Annotated[
        str | None,
        typer.Option(
            help="decoder: what it begins as, a model or the .json file of a configuration.",
            show_default="the memory's model",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="decoder: blocks of it to keep.", show_default="all")
    ] = None,
    teacher: Annotated[
        Path | None,
        typer.Option(
            help="decoder: a memory of the same text to learn from, read by a fine-tuned model say.",
            show_default="MEMORY",
        ),
    ] = None,
    beta: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="decoder: share of the loss that is the teacher's; 0 is the text alone.",
            show_default="0",
        ),
    ] = None,
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="decoder: neighbours that teach.", show_default="1024")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="decoder: τ of their vote.", show_default="2")] = None,
    exclude: Annotated[
        str | None,
        typer.Option(
            help="decoder: what of the memory a position may not see: self, or its document.", show_default="self"
        ),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="decoder: the highest, after a warm-up.", show_default="0.0002")
    ] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="decoder: tokens in a step.", show_default="what gives 300 steps, 16384 at most"),
    ] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(
            min=1, help="decoder: parts that a step is read in, where it does not fit at once.", show_default="1"
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="decoder: tokens read at once.", show_default="1024, or what the student can read"),
    ] = None,
    valid: Annotated[
        list[str] | None, typer.Option(help="decoder: text to choose its λ on.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Makes training repeatable.")] = 0,
    model: options.Reader = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    json: options.Json = False,
) -> None:
    """knnlm distill memory --into output

    Learn from the stored pairs alone: no text is read again, and the model is not run (but for --interpolate, and for a
    decoder, which is trained on the stored text). A run that was stopped goes on when the same command is given again;
    of keys, once they are learned and being written.
    """
    from knnlm.datastore import Datastore
    from knnlm.lm.causal import choose_device

    if into not in _OWN:
        raise ParameterError(f"--into takes {', '.join(_OWN)}, not {into!r}.")
    given: dict[str, Any] = {"rows": rows, "rows_by": rows_by, "held_out": held_out, "interpolate": interpolate}
    given |= {"width": width, "anchors": anchors, "neighbours": neighbours, "rounds": rounds, "epochs": epochs}
    given |= {"student": student, "layers": layers, "teacher": teacher, "beta": beta, "k": k, "exclude": exclude}
    given |= {"temperature": temperature, "learning_rate": learning_rate, "batch_tokens": batch_tokens}
    given |= {"accumulate": accumulate, "context": context, "valid": valid}
    settings = _settings(into, given)
    where = str(choose_device(device))
    store = Datastore.open(memory)
    if into != "output" and out is None:
        raise ParameterError(f"--into {into} makes a new folder: say where with --out.")
    if into == "decoder":
        assert out is not None
        facts = distill_decoder(store, out, seed=seed, model=model, device=where, dtype=dtype, **settings)
        summary = describe_decoder(facts)
    elif into == "keys":
        assert out is not None
        facts = _distill_keys(store, out, seed=seed, device=where, **settings)
        summary = f"{out}: a memory with trained keys. Next: knnlm tune {memory} TEXT --memory knn,knn={out}"
    else:
        place = out or memory / "output"
        log_p = None if interpolate is None else _log_p(store, model, where, dtype)
        facts = _distill_output(store, place, seed=seed, device=where, log_p_lm=log_p, **settings)
        summary = f"{place}: {_gain(facts)} in {facts['seconds']:.0f} s. "
        summary += f"Next: knnlm tune {memory} TEXT --memory knn,output"
    if json:
        screen.print_json({"memory": str(memory), **facts})
        return
    screen.out.print(summary, markup=False)


def _settings(into: str, given: dict[str, Any]) -> dict[str, Any]:
    """Take the options that were given, and refuse those that are for the other kind."""
    chosen = {name: value for name, value in given.items() if value is not None}
    others = [kind for kind in _OWN if kind != into]
    other = next((kind for kind in others if any(name in chosen for name in _OWN[kind])), None)
    if other is not None:
        wrong = [f"--{name.replace('_', '-')}" for name in _OWN[other] if name in chosen]
        raise ParameterError(
            f"{' and '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} for --into {other}, not for --into {into}. "
            f"Leave {'it' if len(wrong) == 1 else 'them'} out, or say --into {other}."
        )
    return chosen


def _distill_output(store: Datastore, place: Path, **settings: Any) -> dict[str, Any]:
    from knnlm.distill.output import distill_output

    card = distill_output(store, place, progress=screen.bar, **settings)
    return {"into": "output", "out": str(place), **asdict(card)}


def _distill_keys(store: Datastore, out: Path, **settings: Any) -> dict[str, Any]:
    from knnlm.distill.keys import distill_keys

    begin = time.perf_counter()
    made = distill_keys(store, out, progress=screen.bar, **settings)
    return {
        "into": "keys",
        "out": str(out),
        "width": made.width,
        "learned": {} if made.map is None else made.map.facts,
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
            help="Drop keys whose token --model gives at least this probability; reads the memory's text once more.",
            show_default="off",
        ),
    ] = None,
    held_out: Annotated[
        list[str] | None,
        typer.Option("--text", help="Held-out text: say what pruning costs on it.", show_default=False),
    ] = None,
    limit: options.Limit = None,
    seed: Annotated[int, typer.Option(min=0, help="The order of merging.")] = 0,
    model: options.Reader = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    json: options.Json = False,
) -> None:
    """knnlm prune memory --out smaller --merge 8 --text held-out.txt

    Write a smaller memory beside the old one. Its text stays whole, so neighbours are still shown where they stand.
    With --text, both are measured on it, each with its own best k, τ and λ.
    """
    from knnlm.datastore import Datastore
    from knnlm.datastore.derive import check_out
    from knnlm.lm.causal import choose_device
    from knnlm.prune import prune as prune_store

    if width is None and merge is None and drop_known is None:
        raise ParameterError("Say how to prune: --width, --merge, --drop-known, or several of them.")
    begin = time.perf_counter()
    where = str(choose_device(device))
    store = Datastore.open(memory)
    check_out(store, out)
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
    if held_out:
        opening = {"model": model, "device": device, "dtype": dtype}
        facts["perplexity_before"] = _perplexity(memory, held_out, limit, opening)
        facts["perplexity_after"] = _perplexity(out, held_out, limit, opening)
    if json:
        screen.print_json(facts)
        return
    rows = [
        ("keys", f"{facts['keys_before']:,} → {facts['keys_after']:,}"),
        ("  dropped", f"{facts['dropped']:,} that the model knows"),
        ("  merged", f"{facts['merged']:,} into others"),
        ("bytes", f"{facts['bytes_before']:,} → {facts['bytes_after']:,}"),
    ]
    if held_out:
        figures = f"{facts['perplexity_before']:.3f} → {facts['perplexity_after']:.3f}"
        rows.append(("perplexity", f"{figures}, each with its best k, τ and λ for that text"))
    rows.append(("next", f"knnlm tune {out} TEXT"))
    if facts["explained_variance"] is not None:
        rows.insert(3, ("variance kept", f"{facts['explained_variance']:.1%}"))
    screen.print_facts(rows)


def _perplexity(memory: Path, text: list[str], limit: int | None, opening: dict[str, Any]) -> float:
    """Give the best perplexity that one λ over the memory's neighbours has on a text."""
    from knnlm import corpus
    from knnlm.cli.measuring import open_mixture
    from knnlm.sweeping import KS, sweep
    from knnlm.trace import record

    mixture = open_mixture(memory, memories="knn", fresh=True, **opening)
    with tempfile.TemporaryDirectory(prefix="knnlm-prune-") as folder:
        place = Path(folder) / "trace"
        trace = record(mixture, corpus.read(*text), place, k=max(KS), limit=limit, progress=screen.bar)
        return sweep(trace, device=str(mixture.lm.device)).best[3]


def _log_p(store: Datastore, model: str | None, device: str, dtype: str) -> Any:
    """Read the memory's text again with the language model: the one that is named, else the memory's own."""
    from knnlm.mixture import check_model
    from knnlm.mixture.opening import language_model
    from knnlm.prune import store_log_p

    lm = open_helped(store, model, device, dtype)
    if model is None and language_model(store) is None:  # one that is named may be another than made the keys
        check_model(store, lm)
    return store_log_p(store, lm, progress=screen.bar)


def _gain(facts: dict[str, Any]) -> str:
    if facts["held_out_after"] is None:
        return "nothing was held out"
    return f"loss on held-out documents {facts['held_out_before']:.3f} → {facts['held_out_after']:.3f}"
