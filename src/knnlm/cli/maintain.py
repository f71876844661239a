"""Commands that maintain a store: info, documents, remove, compact, verify, repair, export."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnlm.cli.options import MAINTAIN, Json, Out, SelectionFlags, Store, Wait, command
from knnlm.cli.output import bar, console, count, err, print_json, print_table, show, visible
from knnlm.cli.train import adaptation_rows
from knnlm.datastore.schema import ADAPTED_FILE

if TYPE_CHECKING:
    from knnlm.datastore.remove import RemovalReport
    from knnlm.datastore.schema import StoredDocument
    from knnlm.datastore.store import Datastore
    from knnlm.maintenance.repair import RepairResult
    from knnlm.training.adapt import Adaptation

_SHOWN = 20  # documents

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    command(app, MAINTAIN, "Describe a store: size, model, index, tuning.")(info)
    command(app, MAINTAIN, "List the documents of a store.")(documents)
    command(app, MAINTAIN, "Remove documents from a store.")(remove)
    command(app, MAINTAIN, "Erase removed documents and merge small segments.")(compact)
    command(app, MAINTAIN, "Check a store for damage.")(verify)
    command(app, MAINTAIN, "Recover the undamaged part of a store.")(repair)
    command(app, MAINTAIN, "Write a store to Parquet files.")(export)


def info(store: Store, json: Json = False) -> None:
    """knnlm info docs.store

    Describe a store: its size, the model that built it and its tuned settings; of a decoder, how it was trained.
    """
    from knnlm.mixture.loader import is_decoder

    if is_decoder(store):
        _show_decoder(store, json=json)
        return
    from knnlm.datastore.store import Datastore

    with closing(Datastore.open(store)) as opened:
        metadata = _metadata(opened)
        if json:
            print_json(metadata)
        else:
            print_table(_info_rows(opened, metadata))


def _metadata(store: Datastore) -> dict[str, Any]:
    from knnlm.datastore.indexes import stored_indexes
    from knnlm.datastore.manifest import remote_url
    from knnlm.mixture.loader import language_model

    adapted, tokens = _load_adaptation(store.path), store.entry_count
    kinds = dict.fromkeys((one.spec, one.metric) for one, _ in stored_indexes(store))
    index = [{"spec": spec, "metric": metric} for spec, metric in kinds]
    scale = max((segment.scale for segment in store.segments), default=1.0)
    return {
        "store": str(store.path),
        "documents": store.catalog.document_count(),
        "tokens": tokens,
        "segments": len(store.segments),
        "shards": [
            {
                "path": remote_url(shard.path) or str(shard.path),
                "documents": shard.catalog.document_count(),
                "tokens": shard.entry_count,
            }
            for shard in store.shards
        ],
        "generation": store.generation,
        "removed_tokens": store.entry_numbers.total - tokens,
        "bytes": store.bytes,
        "index_bytes": store.index_bytes,
        "bytes_per_token": (store.bytes + store.index_bytes) / tokens if tokens else 0,
        "keys": {
            "format": store.storage,
            "dtype": store.key_dtype,
            "largest_scale": scale,
            "offset": store.offset is not None,
        },
        "model": store.model,
        "language_model": language_model(store),
        "window": store.window,
        "index": index or "exact",
        "tunings": store.catalog.get("tunings") or {},
        "active_tuning": store.catalog.get("active_tuning"),
        "adapted": None if adapted is None else asdict(adapted),
    }


def _info_rows(store: Datastore, metadata: dict[str, Any]) -> list[tuple[str, str]]:
    model, tuning = store.model, metadata["tunings"].get(metadata["active_tuning"])
    documents, index = count(metadata["documents"], "document"), metadata["index"]
    specs = index if isinstance(index, str) else ", ".join(f"{one['spec']} ({one['metric']})" for one in index)
    size = f"{store.entry_count:,} tokens of {documents}, {store.bytes / 1e6:,.1f} MB"
    per_token = (
        f"{metadata['bytes_per_token']:,.1f} bytes per token, {store.index_bytes / 1e6:,.1f} MB of index included"
    )
    rows = [("store", f"{store.path}"), ("size", size), ("", per_token)]
    for shard in metadata["shards"]:
        figures = f"{shard['tokens']:,} tokens of {count(shard['documents'], 'document')}"
        rows.append(("shard", f"{shard['path']}: {figures}"))
    if metadata["removed_tokens"]:
        removed = f"{metadata['removed_tokens']:,} tokens, erased by: knnlm compact {store.path}"
        rows.append(("removed", removed))
    if metadata["language_model"]:
        rows.append(("for", metadata["language_model"]))
    rows += [
        ("model", f"{model['name']} ({model['class']}, weights {model['weights']['float32']})"),
        *([("reads", _describe_pairs(model))] if store.has_pairs else []),
        ("keys", f"{model['key_layer']} of layer {model['layer']} of {model['layers']} ({model['key_module']})"),
        ("", f"{store.width} dimensions as {store.storage}, scale {metadata['keys']['largest_scale']:g}"),
        ("window", f"{store.window['context']} tokens, stride {store.window['stride']}"),
        ("index", specs),
        ("tuned", _describe(tuning) if tuning else "not yet: knnlm tune"),
    ]
    if (adapted := _load_adaptation(store.path)) is not None:
        rows.append(("adapted", f"perplexity of {count(adapted.held_out_tokens, 'held-out token')}"))
        rows += [(f"  {name}", figure) for name, figure in adaptation_rows(adapted)]
    return rows


def _describe_pairs(model: dict[str, Any]) -> str:
    """Return what an encoder-decoder model reads."""
    languages = f", {model['src_lang']} → {model['tgt_lang']}" if model.get("src_lang") else ""
    return f"pairs of a source and a target{languages}"


def _load_adaptation(store: Path) -> Adaptation | None:
    """Return the figures of `knnlm adapt`, None where there are none; its module imports transformers."""
    if not (store / ADAPTED_FILE).exists():
        return None
    from knnlm.training.adapt import load_adaptation

    return load_adaptation(store)


def _describe(tuning: dict[str, Any]) -> str:
    memories = []
    for memory in tuning["memories"]:
        kind = memory["kind"] if memory["path"] is None else f"{memory['kind']}={memory['path']}"
        votes = [f" k {k}, τ {knn_temperature:g}" for k, knn_temperature in memory["settings"][:1]]
        memories.append(kind + "".join(votes))
    weights, tuned = tuning["weights"], tuning["metadata"]
    share = f", λ {1 - weights['values'][0]:.3g}" if "values" in weights else ""
    return (
        f"{'; '.join(memories)}; {weights['kind']} weights{share}; chosen on {tuned['tokens']:,} tokens of "
        f"{', '.join(tuned['chosen_on'])} (perplexity {tuned['base_perplexity']:.2f} → {tuned['perplexity']:.2f})"
    )


def _show_decoder(folder: Path, *, json: bool) -> None:
    from knnlm.memories.decoder import load_card

    card = load_card(folder)
    if json:
        metadata = asdict(card)
        tuned = {"lambda": metadata.pop("lmbda"), "lambda_metadata": metadata.pop("lmbda_metadata")}
        print_json({"decoder": str(folder), **tuned, **metadata})
        return
    initial = card.initial_model
    layers = "" if initial["layers"] is None else f", layers {', '.join(map(str, initial['layers']))}"
    losses = ", ".join(f"{name} {value:.3f}" for name, value in card.losses.items() if value is not None)
    teacher = "" if card.teacher is None else f", {card.beta:g} of the loss to the store {card.teacher}"
    print_table(
        [
            ("decoder", f"{folder}"),
            (
                "initial model",
                f"{initial['spec']} ({initial['class']}, {initial['parameters'] / 1e6:,.1f}M weights{layers})",
            ),
            ("vocabulary", f"{card.vocab_size:,} tokens, tokenizer {card.tokenizer}"),
            ("trained", f"{card.tokens:,} tokens of text, {card.steps:,} steps, {card.seconds:,.0f} s{teacher}"),
            ("", f"final losses: {losses}"),
            ("window", f"{card.window['context']} tokens"),
            ("tuned", _describe_lambda(card.lmbda, card.lmbda_metadata)),
            *(("note", note) for note in card.notes),
        ]
    )


def _describe_lambda(lmbda: float | None, tuned: dict[str, Any] | None) -> str:
    if lmbda is None:
        return "not yet: knnlm tune DECODER TEXT --model MODEL"
    if tuned is None:
        return f"λ {lmbda:.3g}"
    figures = f"{tuned['base_perplexity']:.2f} → {tuned['perplexity']:.2f}"
    chosen_on = f"{tuned['tokens']:,} tokens of {', '.join(tuned['text'])}"
    return f"λ {lmbda:.3g} for {tuned['model']}; chosen on {chosen_on} (perplexity {figures})"


def documents(
    store: Store,
    selection: SelectionFlags = SelectionFlags(),
    first: Annotated[int, typer.Option(min=0, help="Number of documents to skip.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="Number of documents to show.")] = _SHOWN,
    json: Json = False,
) -> None:
    """knnlm documents docs.store

    List the documents: number, id, tokens, source, and the other fields of their records.
    """
    from knnlm.datastore.remove import Selection, list_documents

    chosen = Selection(*selection.conditions.values())
    found, total = list_documents(store, chosen, first=first, limit=limit)
    listed = [_document_json(document) for document in found]
    if json:
        print_json({"store": str(store), "total": total, "documents": listed})
        return
    _print_documents(listed)
    if len(found) < total:
        more = f"{len(found):,} of {count(total, 'document')}; more with --first {first + len(found)}"
        console.print(more, markup=False)


def _document_json(document: StoredDocument) -> dict[str, Any]:
    names = {"entries": "tokens"}
    return {names.get(name, name): value for name, value in asdict(document).items()}


def _print_documents(listed: list[dict[str, Any]]) -> None:
    rows = []
    for document in listed:
        fields = "".join(
            f"  {name}={value if isinstance(value, str) else dumps(value)}"
            for name, value in document["fields"].items()
        )
        translated = "" if document["source_text"] is None else f"  ← {document['source_text'][:80]}"
        text = f"{document['id']}  {document['tokens']:,} tokens  {document['source']}{fields}{translated}"
        rows.append((str(document["number"]), visible(text)))
    print_table(rows)


def remove(
    store: Store,
    selection: SelectionFlags = SelectionFlags(),
    dry_run: DryRun = False,
    report: Annotated[
        bool, typer.Option("--report", help="List the files that still contain bytes of removed documents.")
    ] = False,
    wait: Wait = 0.0,
    json: Json = False,
) -> None:
    """knnlm remove docs.store --source "*held-out*"

    Remove documents: they disappear from every answer at once, and knnlm compact erases their bytes. With --report
    alone, list what is left of documents that were removed before.
    """
    from knnlm.datastore.remove import removal_report, remove

    result: dict[str, Any] = {"store": str(store)}
    removing = selection.given or not report
    if removing:
        removed = remove(store, **selection.conditions, dry_run=dry_run, wait=wait)
        result |= asdict(removed) | {"documents": [_document_json(document) for document in removed.documents]}
    left = removal_report(store) if report else None
    if json:
        print_json(result if left is None else {**result, "report": asdict(left)})
        return
    if removing:
        if dry_run:
            _print_documents(result["documents"][:_SHOWN])
        what = f"{count(len(result['documents']), 'document')}, {result['tokens']:,} tokens"
        console.print(f"{store}: {what} {'would be ' * dry_run}removed.", markup=False)
    if left is not None:
        _print_removal_report(left)


def _print_removal_report(left: RemovalReport) -> None:
    if not left.bytes:
        console.print("No file contains bytes of removed documents.", markup=False)
    else:
        console.print(f"Bytes of removed documents ({left.removed_tokens:,} tokens) are still in:", markup=False)
    for held in (*left.bytes, *left.trained):
        console.print(f"  {held.path}: {held.what}; erased by: {held.erased_by}", markup=False)
    if left.trained:
        console.print("Decoders and copies in other folders are not examined.", markup=False)


def compact(store: Store, wait: Wait = 0.0, json: Json = False) -> None:
    """knnlm compact docs.store

    Rewrite the store without the bytes of removed documents, with small segments merged and the index rebuilt. Other
    processes may read meanwhile; the old files are deleted when no process reads them.
    """
    from knnlm.datastore.compact import compact

    begin = time.perf_counter()
    done = compact(store, wait=wait, progress=bar)
    seconds = time.perf_counter() - begin
    text = (
        f"{store}: {done.tokens_dropped:,} tokens erased, {done.segments_before:,} → "
        f"{count(done.segments_after, 'segment')}, index {done.index}, {seconds:.1f} s."
    )
    if not done.purged:
        text += (
            "\nOther processes still read the old files. The next add, remove or compact deletes them; or wait with "
            "--wait."
        )
    show({"store": str(store), **asdict(done), "seconds": seconds}, text, json=json)


def verify(
    store: Store,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte: checksums, values, index.")] = False,
    trust_index: Annotated[
        bool,
        typer.Option("--trust-index/--no-trust-index", help="Open FAISS files whose checksum matches the catalog."),
    ] = True,
    json: Json = False,
) -> None:
    """knnlm verify docs.store --deep

    Compare the catalog with the files and list every problem. Nothing is changed. The exit code is 1 if there is a
    problem.
    """
    from knnlm.datastore.manifest import is_sharded
    from knnlm.maintenance.verify import verify

    found = verify(store, deep=deep, trust_index=trust_index, progress=bar)
    if json:
        print_json({**asdict(found), "sound": found.sound})
    else:
        for problem in found.problems:
            console.print(str(problem), markup=False)
        for note in found.notes:
            err.print(f"note: {note}", markup=False)
        text = f"{store}: {count(found.documents, 'document')}, {found.tokens:,} tokens, "
        text += f"{count(found.files, 'file')} of {found.bytes / 1e6:,.1f} MB checked in {found.seconds:.1f} s: "
        shallow = "" if deep else " (without checksums: --deep)"
        advice = (
            "Run knnlm repair for each shard with damaged files" if is_sharded(store) else f"Run: knnlm repair {store}"
        )
        wrong = f"{count(len(found.problems), 'problem')}. {advice}"
        console.print(text + (f"no problem{shallow}" if found.sound else wrong), markup=False)
    if not found.sound:
        raise typer.Exit(1)


def repair(
    store: Store,
    index: Annotated[bool, typer.Option("--index/--no-index", help="Rebuild the index.")] = True,
    dry_run: DryRun = False,
    wait: Wait = 0.0,
    json: Json = False,
) -> None:
    """knnlm repair docs.store

    Take damaged segments out of a store and list the documents that were in them. Their files move to the folder lost
    in the store. Derived files, such as an index, are built again.
    """
    from knnlm.maintenance.repair import repair

    done = repair(store, index=index, dry_run=dry_run, wait=wait, progress=bar)
    if json:
        print_json(asdict(done))
    else:
        _print_repair(store, done, dry_run=dry_run)


def _print_repair(store: Path, done: RepairResult, *, dry_run: bool) -> None:
    for document in done.lost:
        console.print(f"lost: {document.source} ({document.id}), {document.tokens:,} tokens", markup=False)
    for table in done.unverified:
        text = "was kept: it is consistent with the files, but its checksum does not match"
        console.print(f"unverified: {table} of the catalog {text}", markup=False)
    for name in done.dropped:
        console.print(f"dropped: {name}", markup=False)
    rebuilt = f"; the index {done.index} was rebuilt" if done.index else ""
    if done.before.sound:
        console.print(f"{store}: no problem{rebuilt}", markup=False)
        return
    kept = f"; damaged files are in {done.kept_in}" if done.kept_in else ""
    would = "would have" if dry_run else "has"
    console.print(
        f"{store} {would} {count(done.documents, 'document')} of {done.tokens:,} tokens, "
        f"{count(len(done.lost), 'document')} lost{kept}{rebuilt}",
        markup=False,
    )


def export(
    store: Store,
    out: Out,
    format: Annotated[str, typer.Option(help="parquet.")] = "parquet",  # noqa: A002
    json: Json = False,
) -> None:
    """knnlm export docs.store --out exported

    Write every entry of a store to Parquet files: key, token, document, source and position. Removed documents are left
    out.
    """
    from knnlm.maintenance.export import export

    done = export(store, out, format=format, progress=bar)
    size = f"{count(done.files, 'file')}, {done.bytes / 1e6:,.1f} MB"
    show(asdict(done), f"{out}: {done.entries:,} entries in {size}, {done.seconds:.1f} s", json=json)
