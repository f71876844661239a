"""Commands for a memory that lives: add, remove, documents, compact."""

from __future__ import annotations

import time
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnlm.cli.options import Device, Dtype, Json, Memory, Text, TextField, Wait
from knnlm.cli.output import bar, console, count, open_model, print_facts, print_json, visible

if TYPE_CHECKING:
    from knnlm.datastore.remove import Evidence


_SHOWN = 20

Document = Annotated[str | None, typer.Option(help="The id of a document.", show_default=False)]

Source = Annotated[
    str | None, typer.Option(help="A pattern of sources, in which * stands for anything.", show_default=False)
]

Where = Annotated[
    list[str] | None,
    typer.Option(
        help="field=value, with id, number, rows, sha256, source, or a field of the records; all must fit.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(short_help="Add documents to a memory.")(add)
    app.command(short_help="Remove documents from a memory.")(remove)
    app.command(short_help="List the documents of a memory.")(documents)
    app.command(short_help="Purge what was removed from a memory, and merge small segments.")(compact)


def add(
    memory: Memory,
    text: Text,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model that the memory was built with, where it is now.", show_default="where it was then"
        ),
    ] = None,
    wait: Wait = 0.0,
    text_field: TextField = "text",
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """knnlm add memory held-out.txt

    Read documents as those of the memory were read and add them, all at once; the next query finds them. A document
    whose text is there already is skipped. A command that was stopped goes on when it is given again.
    """
    import knnlm

    begin = time.perf_counter()
    documents = knnlm.read_documents(*text, text_field=text_field)
    lm = _open_reader(memory, model, device, dtype)
    added = knnlm.add(documents, memory, lm=lm, wait=wait, progress=bar)
    facts: dict[str, Any] = {"memory": str(memory), **asdict(added), "seconds": time.perf_counter() - begin}
    if json:
        print_json(facts)
        return
    skipped = f" {count(added.skipped, 'document')} skipped: there already." if added.skipped else ""
    resumed = f" {count(added.resumed, 'document')} had been read before." if added.resumed else ""
    console.print(
        f"{memory}: {count(added.documents, 'document')} added, {added.tokens:,} tokens, in "
        f"{facts['seconds']:.1f} s.{skipped}{resumed}",
        markup=False,
    )


def _open_reader(memory: Path, model: str | None, device: str, dtype: str) -> Any:
    """Open the model that reads a memory, at the place and the layer that its keys come from."""
    from contextlib import closing

    from knnlm.datastore.store import Datastore
    from knnlm.mixture.loader import reader_name

    with closing(Datastore.open(memory)) as store:
        name, layer = model or reader_name(store), int(store.model["layer"])
        place = store.model["key_layer"]
    return open_model(name, key_layer=place, layer=layer, device=device, dtype=dtype)


def remove(
    memory: Memory,
    document: Document = None,
    source: Source = None,
    where: Where = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say which would be removed, and remove nothing.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Say which files still hold bytes of removed documents.")
    ] = False,
    wait: Wait = 0.0,
    json: Json = False,
) -> None:
    """knnlm remove memory --source "*held-out*"

    Remove documents: from now on whoever opens the memory does not find them. Their bytes go with knnlm compact; with
    --report alone, say what is left of those that were removed before.
    """
    import knnlm
    from knnlm.datastore.remove import evidence

    chosen = document is not None or source is not None or bool(where)
    facts: dict[str, Any] = {"memory": str(memory)}
    if chosen or not report:
        removed = knnlm.remove(
            memory, document=document, source=source, where=tuple(where or ()), dry_run=dry_run, wait=wait
        )
        facts |= asdict(removed)
    left = evidence(memory) if report else None
    if json:
        print_json(facts if left is None else {**facts, "report": asdict(left)})
        return
    if chosen or not report:
        what = f"{count(len(facts['documents']), 'document')}, {facts['tokens']:,} tokens"
        if dry_run:
            _print_documents(facts["documents"][:_SHOWN])
        console.print(f"{memory}: {what} {'would be ' * dry_run}removed.", markup=False)
    if left is not None:
        _print_evidence(left)


def _print_evidence(left: Evidence) -> None:
    if not left.bytes:
        console.print("No file holds bytes of removed documents.", markup=False)
    else:
        console.print(f"Bytes of removed documents ({left.waiting:,} tokens) are still in:", markup=False)
    for held in (*left.bytes, *left.trained):
        console.print(f"  {held.path}: {held.what}; goes with: {held.goes}", markup=False)
    if left.trained:
        console.print("Decoders and copies in other folders are not looked at.", markup=False)


def documents(
    memory: Memory,
    document: Document = None,
    source: Source = None,
    where: Where = None,
    first: Annotated[int, typer.Option(min=0, help="How many to pass over.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="How many to show.")] = _SHOWN,
    json: Json = False,
) -> None:
    """knnlm documents memory

    List the documents: their number, id, tokens, where they came from, and the other fields of their records.
    """
    from knnlm.datastore.catalog import Selection
    from knnlm.datastore.remove import list_documents

    found, total = list_documents(memory, Selection(document, source, tuple(where or ())), first=first, limit=limit)
    if json:
        print_json({"memory": str(memory), "total": total, "documents": [asdict(one) for one in found]})
        return
    _print_documents([asdict(one) for one in found])
    if len(found) < total:
        console.print(
            f"{len(found):,} of {count(total, 'document')}; more with --first {first + len(found)}", markup=False
        )


def _print_documents(found: list[dict[str, Any]]) -> None:
    rows = [(one, f"{one['id']}  {one['rows']:,} tokens  {one['source']}{_fields(one)}") for one in found]
    print_facts([(str(one["number"]), visible(text)) for one, text in rows])


def _fields(one: dict[str, Any]) -> str:
    found = ((name, value if isinstance(value, str) else dumps(value)) for name, value in one["fields"].items())
    return "".join(f"  {name}={text}" for name, text in found)


def compact(memory: Memory, wait: Wait = 0.0, json: Json = False) -> None:
    """knnlm compact memory

    Write the memory anew without the bytes of removed documents, with small segments merged and the index made again.
    Others may go on reading; the old files are removed when nobody reads them any more.
    """
    import knnlm

    begin = time.perf_counter()
    done = knnlm.compact(memory, wait=wait, progress=bar)
    facts: dict[str, Any] = {"memory": str(memory), **asdict(done), "seconds": time.perf_counter() - begin}
    if json:
        print_json(facts)
        return
    console.print(
        f"{memory}: {done.tokens_dropped:,} tokens dropped, {done.segments_before:,} → "
        f"{count(done.segments_after, 'segment')}, index {done.index}, {facts['seconds']:.1f} s.",
        markup=False,
    )
    if not done.purged:
        console.print(
            "Others still read the old files. Their bytes go with the next add, remove or compact after that; or wait "
            "with --wait.",
            markup=False,
        )
