"""Commands that make a memory and look at it: build, index, info."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnlm.cli.options import Device, Dtype, Json, Keys, Memory, Text, TextField, Wait
from knnlm.cli.output import (
    adaptation_rows,
    bar,
    console,
    count,
    open_model,
    print_facts,
    print_json,
    show_decoder,
)
from knnlm.datastore.paths import ADAPTED_FILE

if TYPE_CHECKING:
    from knnlm.training.adapt import Adaptation


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(short_help="Read text once and make a memory of it.")(build)
    app.command(short_help="Make a memory searchable fast.")(index)
    app.command(short_help="Say what is in a memory.")(info)


def build(
    text: Text,
    out: Annotated[Path, typer.Option(help="The folder to make.", show_default=False)],
    model: Annotated[str, typer.Option(help="bundled, a local folder, a .gguf file, or a hub name.")] = "bundled",
    key_layer: Annotated[
        str,
        typer.Option(
            help="Where keys are read: ffn_input, ffn_input_pre_norm, attention_input, attention_input_pre_norm, "
            "output, output_normed."
        ),
    ] = "ffn_input",
    layer: Annotated[int, typer.Option(help="Which layer, counted from 0, or from the end with -1.")] = -1,
    context: Annotated[
        int | None, typer.Option(help="Tokens read at once.", show_default="1024, or what the model can read")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens a window moves on by.", show_default="half the context")
    ] = None,
    keys: Keys = "float16",
    compile: Annotated[  # noqa: A002
        bool | None,
        typer.Option("--compile/--no-compile", help="Compile the model first.", show_default="on a GPU, for much text"),
    ] = None,
    text_field: TextField = "text",
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """knnlm build docs/ --out memory

    Read every document once with the model and store, for each token, the context vector and the token that followed.
    A build that was stopped goes on when the same command is given again, from its last finished segment (16,384 tokens
    on a CPU, a million on a GPU).
    """
    import knnlm

    begin = time.perf_counter()
    documents = knnlm.read_documents(*text, text_field=text_field)
    lm = open_model(model, key_layer=key_layer, layer=layer, device=device, dtype=dtype)
    store = knnlm.build(
        documents,
        out,
        lm=lm,
        window=lm.window(context, stride),
        keys=keys,
        compile=compile,
        progress=bar,
    )
    seconds = time.perf_counter() - begin
    facts: dict[str, Any] = {
        "memory": str(out),
        "documents": store.catalog.document_count(),
        "tokens": store.rows,
        "bytes": store.bytes,
        "seconds": seconds,
        "tokens_per_second": store.rows / seconds,
    }
    if json:
        print_json(facts)
        return
    console.print(
        f"{out}: {store.rows:,} tokens of {count(facts['documents'], 'document')} in {seconds:.0f} s, "
        f"{store.bytes / 1e6:,.1f} MB. Next: knnlm tune {out} TEXT",
        markup=False,
    )


def index(
    memory: Memory,
    spec: Annotated[
        str,
        typer.Option(
            "--index",
            help="auto, exact, blocks such as Lists512,Blocks256, or a FAISS factory string such as IVF1024,PQ64.",
        ),
    ] = "auto",
    metric: Annotated[str, typer.Option(help="l2 (squared) or ip (inner product).")] = "l2",
    wait: Wait = 0.0,
    json: Json = False,
) -> None:
    """knnlm index memory

    Make an index. A memory of up to 20,000 tokens is searched exactly, which needs none; above that, auto makes blocks
    of keys that are near one another, a byte a dimension, of which a query looks into some.
    """
    import knnlm

    begin = time.perf_counter()
    store = knnlm.Datastore.open(memory)
    made = knnlm.build_index(store, spec, metric=metric, wait=wait, progress=bar)
    facts = {"memory": str(memory), "index": made, "tokens": store.rows, "seconds": time.perf_counter() - begin}
    if json:
        print_json(facts)
        return
    console.print(f"{memory}: {made} over {store.rows:,} keys, {facts['seconds']:.1f} s", markup=False)


def info(memory: Memory, json: Json = False) -> None:
    """knnlm info memory

    Say how large a memory is, which model made it, and what it was tuned to; of a decoder, how it was trained.
    """
    from knnlm.datastore.indexes import stored_indexes
    from knnlm.datastore.store import Datastore
    from knnlm.mixture.loader import is_decoder, language_model

    if is_decoder(memory):
        show_decoder(memory, json=json)
        return
    store = Datastore.open(memory)
    indexes = [row for row, _ in stored_indexes(store)]
    waiting = store.row_numbers.total - store.rows
    adapted = _load_adaptation(memory)
    facts: dict[str, Any] = {
        "memory": str(memory),
        "documents": store.catalog.document_count(),
        "tokens": store.rows,
        "segments": len(store.segments),
        "generation": store.generation,
        "removed_tokens": waiting,
        "bytes": store.bytes,
        "index_bytes": store.index_bytes,
        "bytes_per_token": (store.bytes + store.index_bytes) / store.rows if store.rows else 0,
        "keys": {
            "storage": store.storage,
            "dtype": store.key_dtype,
            "largest_scale": max((segment.scale for segment in store.segments), default=1.0),
            "offset": store.offset is not None,
        },
        "model": store.model,
        "language_model": language_model(store),
        "window": store.window,
        "index": [{"spec": row.spec, "metric": row.metric} for row in indexes] or "exact",
        "choices": store.catalog.get("choices") or {},
        "chosen": store.catalog.get("chosen"),
        "adapted": None if adapted is None else asdict(adapted),
    }
    if json:
        print_json(facts)
        return
    model, choice = store.model, facts["choices"].get(facts["chosen"])
    rows = [
        ("memory", f"{memory}"),
        (
            "size",
            f"{store.rows:,} tokens of {count(facts['documents'], 'document')}, {store.bytes / 1e6:,.1f} MB",
        ),
        ("", f"{facts['bytes_per_token']:,.1f} bytes a token, {store.index_bytes / 1e6:,.1f} MB of index included"),
        ("model", f"{model['name']} ({model['class']}, weights {model['weights']['float32']})"),
        ("keys", f"{model['key_layer']} of layer {model['layer']} of {model['layers']} ({model['key_module']})"),
        ("", f"{store.width} dimensions as {store.storage}, scale {facts['keys']['largest_scale']:g}"),
        ("window", f"{store.window['context']} tokens, moved on by {store.window['stride']}"),
        ("index", ", ".join(f"{row.spec} ({row.metric})" for row in indexes) or "exact"),
        ("tuned", _describe(choice) if choice else "not yet: knnlm tune"),
    ]
    if waiting:
        rows.insert(2, ("removed", f"{waiting:,} tokens, whose bytes go with: knnlm compact {memory}"))
    if facts["language_model"]:
        rows.insert(2, ("for", facts["language_model"]))
    if adapted is not None:
        rows.append(("adapted", f"perplexity of {count(adapted.held_out_tokens, 'held-out token')}"))
        rows += [(f"  {name}", figure) for name, figure in adaptation_rows(adapted)]
    print_facts(rows)


def _load_adaptation(store: Path) -> Adaptation | None:
    """Load the figures of `knnlm adapt`, whose module imports transformers, where the store has some."""
    if not (store / ADAPTED_FILE).exists():
        return None
    from knnlm.training.adapt import load_adaptation

    return load_adaptation(store)


def _describe(choice: dict[str, Any]) -> str:
    memories = []
    for memory in choice["memories"]:
        kind = memory["kind"] if memory["path"] is None else f"{memory['kind']}={memory['path']}"
        votes = [f" k {k}, τ {knn_temperature:g}" for k, knn_temperature in memory["settings"][:1]]
        memories.append(kind + "".join(votes))
    weights, facts = choice["weights"], choice["facts"]
    share = f", λ {1 - weights['values'][0]:.3g}" if "values" in weights else ""
    return (
        f"{'; '.join(memories)}; {weights['kind']} weights{share}; chosen on {facts['tokens']:,} tokens of "
        f"{', '.join(facts['chosen_on'])} (perplexity {facts['base_perplexity']:.2f} → {facts['perplexity']:.2f})"
    )
