"""Commands that guard a memory and carry it elsewhere: verify, repair, merge, import, export.

The command that stores a memory's keys in fewer bytes: compress.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from knnlm.cli.options import Device, Dtype, Json, Keys, Memory, Wait
from knnlm.cli.output import bar, console, count, err, open_model, print_json


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(short_help="Say what is wrong with a memory.")(verify)
    app.command(short_help="Keep what is sound of a damaged memory.")(repair)
    app.command(short_help="Make one memory of several.")(merge)
    app.command(name="import", short_help="Make a memory of another program's arrays.")(import_arrays)
    app.command(short_help="Write a memory for other programs.")(export)
    register_compress(app)


def verify(
    memory: Memory,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte: checksums, numbers, index.")] = False,
    trust_index: Annotated[
        bool,
        typer.Option("--trust-index/--no-trust-index", help="Open files of FAISS whose checksum is the catalog's."),
    ] = True,
    json: Json = False,
) -> None:
    """knnlm verify memory --deep

    Compare the catalog with the files and name all that is wrong. Changes nothing. The exit code is 1 where something
    is wrong.
    """
    import knnlm

    found = knnlm.verify(memory, deep=deep, trust_index=trust_index, progress=bar)
    if json:
        print_json({**asdict(found), "sound": found.sound})
    else:
        for problem in found.problems:
            console.print(str(problem), markup=False)
        for note in found.notes:
            err.print(f"note: {note}", markup=False)
        what = f"{found.store}: {count(found.documents, 'document')}, {found.tokens:,} tokens, " + (
            f"{count(found.files, 'file')} of {found.bytes / 1e6:,.1f} MB looked at in {found.seconds:.1f} s: "
        )
        more = "" if deep or not found.sound else " (checksums were not: --deep)"
        wrong = f"{count(len(found.problems), 'problem')}. See: knnlm repair {memory}"
        console.print(what + ("nothing is wrong" + more if found.sound else wrong), markup=False)
    if not found.sound:
        raise typer.Exit(1)


def repair(
    memory: Memory,
    index: Annotated[bool, typer.Option("--index/--no-index", help="Make the index again.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    wait: Wait = 0.0,
    json: Json = False,
) -> None:
    """knnlm repair memory

    Take damaged segments out of a memory and name the documents that were in them. Their files go to the folder lost
    in the memory. What is derived, such as an index, is made again.
    """
    import knnlm

    done = knnlm.repair(memory, index=index, dry_run=dry_run, wait=wait, progress=bar)
    if json:
        print_json(asdict(done))
        return
    for document in done.lost:
        console.print(f"lost: {document.source} ({document.id}), {document.tokens:,} tokens", markup=False)
    for table in done.unverified:
        what = "was kept: it fits the files, but its checksum does not match"
        console.print(f"unverified: {table} of the catalog {what}", markup=False)
    for name in done.dropped:
        console.print(f"dropped: {name}", markup=False)
    made = f"; the index {done.index} was made again" if done.index else ""
    if done.before.sound:
        console.print(f"{memory}: nothing is wrong{made}", markup=False)
        return
    kept = f"; what was damaged is in {done.kept_in}" if done.kept_in else ""
    would = "would have" if dry_run else "has"
    console.print(
        f"{memory} {would} {count(done.documents, 'document')} of {done.tokens:,} tokens, "
        f"{count(len(done.lost), 'document')} lost{kept}{made}",
        markup=False,
    )


def merge(
    memories: Annotated[list[Path], typer.Argument(help="The folders of memories.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder to make.", show_default=False)],
    index: Annotated[
        str | None, typer.Option(help="Make an index too: auto, exact, or a FAISS factory string.", show_default="none")
    ] = None,
    metric: Annotated[str, typer.Option(help="Of the index: l2 (squared) or ip (inner product).")] = "l2",
    wait: Wait = 0.0,
    json: Json = False,
) -> None:
    """knnlm merge memory --out merged

    Write one memory with the documents of several that were built with the same model, each text once. A merge that was
    stopped goes on when the same command is given again.
    """
    import knnlm

    done = knnlm.merge(memories, out, index=index, metric=metric, wait=wait, progress=bar)
    if json:
        print_json(asdict(done))
        return
    console.print(
        f"{out}: {done.tokens:,} tokens of {count(done.documents, 'document')}, "
        f"{done.duplicates:,} duplicates left out, {done.seconds:.1f} s. Next: knnlm tune {out} TEXT",
        markup=False,
    )


def import_arrays(
    keys: Annotated[Path, typer.Argument(help="The raw array of keys.", show_default=False)],
    values: Annotated[Path, typer.Argument(help="The raw array of tokens.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder to make.", show_default=False)],
    model: Annotated[str, typer.Option(help="The model that gave the keys: a folder or a hub name.")] = "bundled",
    format: Annotated[str, typer.Option(help="knn-transformers or fairseq.")] = "knn-transformers",  # noqa: A002
    entries: Annotated[
        int | None, typer.Option(help="Number of entries that were written.", show_default="all of the files")
    ] = None,
    key_dtype: Annotated[
        str | None, typer.Option(help="float16 or float32.", show_default="what fits the files")
    ] = None,
    value_dtype: Annotated[
        str | None, typer.Option(help="int64, int32 or int16.", show_default="what fits the files")
    ] = None,
    key_layer: Annotated[str, typer.Option(help="Where keys were read.")] = "ffn_input",
    layer: Annotated[int, typer.Option(help="Which layer, counted from 0, or from the end with -1.")] = -1,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Read a sample again with the model.")] = True,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """knnlm import dstore_keys.npy dstore_vals.npy --out imported

    Make a memory of the raw arrays that knn-transformers or fairseq's knnlm wrote. A sample is read again with the
    model, to see that the keys are its own. An import is one document: the arrays know none.
    """
    import knnlm

    lm = open_model(model, key_layer=key_layer, layer=layer, device=device, dtype=dtype)
    settings: dict[str, Any] = {
        "format": format,
        "entries": entries,
        "key_dtype": key_dtype,
        "value_dtype": value_dtype,
    }
    done = knnlm.import_arrays(keys, values, out=out, lm=lm, check=check, progress=bar, **settings)
    if json:
        print_json(asdict(done))
        return
    seen = "not checked" if done.agreement is None else f"{done.agreement:.0%} of a sample as the model gives them"
    console.print(
        f"{out}: {done.tokens:,} tokens, keys {done.key_dtype}, {seen}, {done.seconds:.1f} s. "
        f"Next: knnlm tune {out} TEXT",
        markup=False,
    )


def export(
    memory: Memory,
    out: Annotated[Path, typer.Option(help="The folder to make.", show_default=False)],
    format: Annotated[str, typer.Option(help="parquet.")] = "parquet",  # noqa: A002
    json: Json = False,
) -> None:
    """knnlm export memory --out exported

    Write every row of a memory to Parquet files: key, token, document, source and position. What was removed from the
    memory is not there.
    """
    import knnlm

    done = knnlm.export(memory, out, format=format, progress=bar)
    if json:
        print_json(asdict(done))
        return
    console.print(
        f"{out}: {done.entries:,} entries in {count(done.files, 'file')}, {done.bytes / 1e6:,.1f} MB, "
        f"{done.seconds:.1f} s",
        markup=False,
    )


def register_compress(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(short_help="Store a memory's keys in fewer bytes.")(compress)


def compress(
    memory: Memory,
    out: Annotated[Path, typer.Option(help="The folder of the copy.", show_default=False)],
    keys: Keys = "codes",
    seed: Annotated[int, typer.Option(min=0, help="Which keys the codec is fitted to.")] = 0,
    json: Json = False,
) -> None:
    """knnlm compress memory --out compressed --keys int8

    Write a copy of a memory that stores its keys in another way, fitted to keys from all over it. What was tuned is
    not copied: distances are a little different. A copy that was stopped goes on when the same command is given again.
    """
    import knnlm

    begin = time.perf_counter()
    store = knnlm.Datastore.open(memory)
    made = knnlm.compress(store, out, keys=keys, seed=seed, progress=bar)
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
        print_json(facts)
        return
    console.print(
        f"{out}: {store.bytes / tokens:,.0f} → {made.bytes / tokens:,.0f} bytes a token, {made.bytes / 1e6:,.1f} MB, "
        f"in {facts['seconds']:.1f} s. Next: knnlm index {out}, knnlm tune {out} TEXT",
        markup=False,
    )
