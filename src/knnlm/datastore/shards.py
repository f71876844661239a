"""Join stores to a sharded store, and change it: every change is a change of one shard after another.

A sharded store has a writer lock of its own, and each shard has its own. A shard is an ordinary store, and changing it
directly is possible too; documents that were added so get their numbers with the next change of the sharded store.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from knnlm.datastore.catalog import LANGUAGE_MODEL, Catalog
from knnlm.datastore.compact import Compacted, compact
from knnlm.datastore.locks import (
    READERS_LOCK,
    WRITER_LOCK,
    has_stale_suffix_array,
    without_readers,
    writer_lock,
)
from knnlm.datastore.manifest import (
    MANIFEST_FILE,
    Manifest,
    Shard,
    is_sharded,
    is_url,
    read_manifest,
    relative_path,
    remote_url,
    write_manifest,
)
from knnlm.datastore.remote import fetch_shard
from knnlm.datastore.remove import (
    Remnant,
    RemovalReport,
    Removed,
    Selection,
    check_selected,
    remember_trained,
    removal_report,
    remove,
    trained_remnants,
)
from knnlm.datastore.schema import CATALOG_FILE, NGRAM_FOLDER, PARTIAL_CATALOG_FILES, SHARDED, StoredDocument
from knnlm.datastore.sharded_catalog import ShardedCatalog
from knnlm.datastore.store import Datastore, check_place, form_difference, form_of, key_identity
from knnlm.errors import DatastoreError, KnnlmError, ModelMismatch, ParameterError
from knnlm.progress import Progress, silent

SHARD = "shard"  # metadata of a store that was built as one part of a text
CALIBRATED = "calibrated"  # metadata of a shard: the offset of its keys was chosen before it was built


@dataclass(frozen=True)
class ShardPart:
    """Which part of a text a shard was built from: documents `first` to `end` - 1 of `total`, with a digest of all."""

    number: int  # from 1 on
    of: int
    first: int
    end: int
    total: int
    text: str


@dataclass(frozen=True)
class Joined:
    """The result of a join."""

    store: Path
    shards: tuple[Path, ...]  # in the order of their entries
    documents: int
    tokens: int


def join_shards(
    shards: Sequence[str | Path],
    out: str | Path,
    *,
    replace_manifest: bool = False,
    beside: Collection[str] = (),
    wait: float = 0.0,
    progress: Progress = silent,
) -> Joined:
    """Write the manifest of a sharded store over ordinary stores, which stay where they are.

    A shard is a folder, or a URL such as s3://bucket/part-1.store, of which a copy is fetched.
    Shards that were built as parts of one text are joined in the order of the parts, all others in the given order.
    `beside` are names of other files that a new store may have in its folder.
    """
    folder = Path(out)
    if not shards:
        raise ParameterError("Nothing to join. Name the shards.")
    with ExitStack() as stack:
        stores: list[Datastore] = []
        for place in shards:
            path = fetch_shard(place, progress=progress) if isinstance(place, str) and is_url(place) else Path(place)
            if path.exists() and not (path / CATALOG_FILE).is_file():
                raise DatastoreError(f"{path} is not a store, so it cannot be joined. Name the shards alone.")
            if path.exists() and path.resolve() != folder.resolve():
                check_place(folder, path)
            stores.append(stack.enter_context(closing(Datastore.open(path, trust_index=False))))
        stores = _ordered(stores)
        _check_common(stores)
        _check_out(folder, stores, replace_manifest=replace_manifest, beside=beside)
        if not all(_known(_listed(folder), folder, stores)) and shard_part(stores[0].catalog) is None:
            _check_ids(stores)
        with writer_lock(folder, create=True, wait=wait):
            if changed := next((store for store in stores if store.stale), None):
                raise DatastoreError(f"{changed.path} has changed meanwhile. Run the same command again.")
            _write_catalog(folder, stores)
            write_manifest(folder, _manifest(folder, stores))
        documents = sum(store.catalog.document_count() for store in stores)
        return Joined(folder, tuple(store.path for store in stores), documents, sum(one.entry_count for one in stores))


def _ordered(stores: list[Datastore]) -> list[Datastore]:
    """Return shards in the order of their parts, after checking that there is every part of one text."""
    paths = [store.path.resolve() for store in stores]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise ParameterError(f"{twice} is named twice. Name each shard once.")
    found = [(store, shard_part(store.catalog)) for store in stores]
    parts = {part.number: (store, part) for store, part in found if part is not None}
    if not parts:
        return stores
    if without := next((store for store, part in found if part is None), None):
        raise DatastoreError(
            f"{without.path} was not built with --shard, but other stores were. Join either kind alone."
        )
    first = found[0][1]
    assert first is not None
    for store, part in found:
        assert part is not None
        if (part.of, part.total) == (first.of, first.total) and part.text != first.text:
            raise DatastoreError(
                f"{store.path} and {found[0][0].path} were built from different texts. Build both from the same text."
            )
        if (part.of, part.total) != (first.of, first.total) or parts[part.number][0] is not store:
            raise DatastoreError(
                f"{store.path} is shard {part.number}/{part.of} of {part.total:,} documents, and {found[0][0].path} is "
                f"shard {first.number}/{first.of} of {first.total:,}: not two parts of one text. Build them from the "
                "same text."
            )
    if missing := [number for number in range(1, first.of + 1) if number not in parts]:
        raise DatastoreError(
            f"Shard {missing[0]} of {first.of} is missing. Build it with --shard {missing[0]}/{first.of}"
        )
    ordered = [parts[number] for number in range(1, first.of + 1)]
    for (_, before), (store, part) in pairwise(ordered):
        if part.first != before.end:
            raise DatastoreError(
                f"{store.path} was built from another text than the shard before it. Build both again."
            )
    return [store for store, _ in ordered]


def shard_part(catalog: Catalog) -> ShardPart | None:
    """Return which part of a text a store was built from; None where it was not built as a shard."""
    stored = catalog.get(SHARD)
    if stored is None:
        return None
    try:
        return ShardPart(**stored)
    except TypeError:
        raise DatastoreError(f"{catalog.path}: the number of the shard cannot be read. Build it again.") from None


def _check_common(stores: Sequence[Datastore]) -> None:
    """Raise unless all shards have the same reader, windows and form of keys."""
    first = stores[0]
    for store in stores[1:]:
        if (difference := form_difference(form_of(first), form_of(store))) is not None:
            what, one, two = difference
            advice = "Build all shards with the same model and options"
            if what.removeprefix("keys ") in ("offset", "map", "codec"):
                advice = f"Build the other shards with --like {first.path}"
            raise ModelMismatch(
                f"{first.path} and {store.path} cannot be shards of one store: {what} {one} and {two}. {advice}."
            )


def _check_ids(stores: Sequence[Datastore]) -> None:
    """Raise if two shards have a document of the same id."""
    seen: dict[bytes, int] = {}
    for number, store in enumerate(stores):
        for document in store.documents():
            digest = hashlib.blake2b(document.id.encode(), digest_size=16).digest()
            if seen.setdefault(digest, number) != number:
                raise DatastoreError(
                    f"{stores[seen[digest]].path} and {store.path} both have a document {document.id}. Remove it from "
                    "one of them, or build the shards from one text with --shard."
                )


def _check_out(
    folder: Path, stores: Sequence[Datastore], *, replace_manifest: bool, beside: Collection[str] = ()
) -> None:
    """Raise unless a sharded store can be written to a folder, which may contain its shards."""
    if folder.exists() and not folder.is_dir():
        raise DatastoreError(f"{folder} is a file. Choose another --out.")
    places = [store.path.resolve() for store in stores]
    if any(folder.resolve().is_relative_to(place) for place in places):
        raise DatastoreError(f"{folder} is one of the shards, or inside of one. Choose another --out.")
    if not folder.exists():
        return
    if is_sharded(folder):
        if not replace_manifest:
            raise DatastoreError(f"{folder} is a sharded store already. Choose another --out, or add --replace.")
        _check_same_form(folder, stores[0])
        return
    if (folder / CATALOG_FILE).exists():
        with closing(Catalog.open(folder / CATALOG_FILE)) as catalog:
            if catalog.get("state") != SHARDED:
                raise DatastoreError(f"{folder} is a store already. Choose another --out.")
        return
    ours = {
        WRITER_LOCK,
        READERS_LOCK,
        *beside,
        *PARTIAL_CATALOG_FILES,
        Path(MANIFEST_FILE).with_suffix(".partial").name,
    }
    for entry in sorted(folder.iterdir()):
        if entry.name not in ours and not any(place.is_relative_to(entry.resolve()) for place in places):
            raise DatastoreError(
                f"{folder} is not empty (it contains {entry.name}) and is not a store. Choose another --out."
            )


def _check_same_form(folder: Path, store: Datastore) -> None:
    """Raise unless new shards have the model and the keys of a sharded store, whose tuning they get."""
    with closing(Catalog.open(folder / CATALOG_FILE)) as catalog:
        before = {"model": catalog.get("model"), "window": catalog.get("window"), "keys": key_identity(store)}
    if (manifest := _listed(folder)) is not None:
        before["keys"] = manifest.keys
    if (difference := form_difference(before, form_of(store))) is not None:
        what, one, two = difference
        raise ModelMismatch(
            f"{store.path} cannot replace the shards of {folder}: its {what} is {two}, not {one}. Choose another --out."
        )


def _write_catalog(folder: Path, stores: Sequence[Datastore]) -> None:
    """Create the catalog of tuned settings, unless there is one."""
    if (folder / CATALOG_FILE).exists():
        return
    first = stores[0]
    metadata = {"state": SHARDED, "model": first.model, "window": first.window, "key_dtype": first.key_dtype}
    language_models = {store.catalog.get(LANGUAGE_MODEL) for store in stores}
    if len(language_models) == 1 and None not in language_models:
        metadata[LANGUAGE_MODEL] = language_models.pop()
    Catalog.create(folder / CATALOG_FILE, metadata).close()


def _manifest(folder: Path, stores: Sequence[Datastore]) -> Manifest:
    """Return the manifest of shards; those that the present manifest lists keep the numbers of their documents.

    No number is used again, and the generation increases.
    """
    before = _listed(folder)
    shards = [
        Shard(relative_path(store.path, folder), 0, 0, known.documents if known else (), 0, "")
        for store, known in zip(stores, _known(before, folder, stores), strict=True)
    ]
    form, new = form_of(stores[0]), sum(store.generation for store in stores)
    joined = Manifest(form["model"], form["window"], form["keys"], _counted(shards, stores))
    if before is not None:
        old = before.generation + _listed_generations(before, folder)
        joined = replace(joined, joins=before.joins + 1, generation=max(0, old + 1 - new), documents=before.next_number)
    return joined.numbered([store.catalog.next_document() for store in stores])


def _listed_generations(manifest: Manifest, folder: Path) -> int:
    """Return the sum of the generations of listed shards, which may have been changed directly since."""
    total = 0
    for shard, place in zip(manifest.shards, manifest.folders(folder), strict=True):
        present = shard.generation
        with suppress(KnnlmError), closing(Catalog.open(place / CATALOG_FILE)) as catalog:
            present = max(present, catalog.generation)
        total += present
    return total


def _listed(folder: Path) -> Manifest | None:
    """Return the present manifest of a sharded store; None where there is none that can be read."""
    if not is_sharded(folder):
        return None
    try:
        return read_manifest(folder)
    except KnnlmError:
        return None


def _known(before: Manifest | None, folder: Path, stores: Sequence[Datastore]) -> list[Shard | None]:
    """Return the shard that the present manifest lists for each store: the same one, or the one at the same place."""
    if before is None:
        return [None] * len(stores)
    by_content = {(shard.generation, shard.fingerprint): shard for shard in before.shards}
    places = (str(place) for place in before.folders(folder))
    by_place = {
        shard.path if is_url(shard.path) else place: shard for place, shard in zip(places, before.shards, strict=True)
    }
    found: list[Shard | None] = []
    for store in stores:
        known = by_content.get((store.generation, store.fingerprint))
        here = by_place.get(remote_url(store.path) or os.path.normpath(store.path.resolve()))
        if known is None and here is not None and store.generation > here.generation:
            known = here  # it was changed since
        found.append(None if known in found else known)
    return found


def _counted(shards: Sequence[Shard], stores: Sequence[Datastore]) -> tuple[Shard, ...]:
    """Return shards with the present counts of their stores."""
    firsts = [0, *accumulate(store.entry_count for store in stores)]
    return tuple(
        replace(
            shard,
            first_entry=first,
            entries=store.entry_count,
            generation=store.generation,
            fingerprint=store.fingerprint,
        )
        for shard, store, first in zip(shards, stores, firsts, strict=False)
    )


def update_manifest(folder: Path) -> Datastore:
    """Write the present state of the shards to the manifest and return the open store; the caller holds the lock."""
    if urls := read_manifest(folder).urls:
        raise DatastoreError(
            f"{folder} has shards at URLs, such as {urls[0]}, so it is read-only. Change the shard where it was built, "
            "and push it again: knnlm shards push"
        )
    store = Datastore.open(folder)
    catalog = sharded_catalog(store)
    present = replace(catalog.manifest, shards=_counted(catalog.manifest.shards, store.shards))
    if present != read_manifest(folder):
        write_manifest(folder, present)
    with without_readers_but(store) as sole:
        if sole and has_stale_suffix_array(folder, catalog):
            shutil.rmtree(folder / NGRAM_FOLDER)
    return store


def without_readers_but(store: Datastore) -> Any:
    """Return the context of an exclusive lock beside the store's own lock as a reader."""
    return store.reader_lock.exclusive() if store.reader_lock is not None else without_readers(store.path)


def sharded_catalog(store: Datastore) -> ShardedCatalog:
    """Return the catalog of a sharded store."""
    assert isinstance(store.catalog, ShardedCatalog)
    return store.catalog


def _selections(catalog: ShardedCatalog, selection: Selection) -> Iterator[tuple[int, Selection]]:
    """Yield each shard that may have selected documents, with the selection in its own numbers."""
    selection.check(catalog)
    for shard in range(len(catalog.shards)):

        def find(number: int, shard: int = shard) -> int | None:
            found = catalog.locate_document(number)
            return found[1] if found is not None and found[0] == shard else None

        local = selection.with_numbers(find)
        if local is not None:
            yield shard, local


def list_sharded_documents(
    folder: Path, selection: Selection, *, first: int, limit: int | None
) -> tuple[list[StoredDocument], int]:
    """Return a page of the selected documents of a sharded store, and the number of selected documents."""
    found, total = list[StoredDocument](), 0
    with closing(Datastore.open(folder, trust_index=False)) as store:
        catalog = sharded_catalog(store)
        for shard, local in _selections(catalog, selection):
            condition, own = local.condition(), catalog.shards[shard]
            count, begin = own.document_count(*condition), max(0, first - total)
            left = None if limit is None else limit - len(found)
            if begin < count and left != 0:
                page = own.select(*condition, first=begin, limit=left)
                found += [catalog.global_document(shard, document) for document in page]
            total += count
    return found, total


def remove_from_shards(folder: Path, selection: Selection, *, dry_run: bool, wait: float) -> Removed:
    """Remove documents from the shards that contain them: one transaction for each shard."""
    with nullcontext() if dry_run else writer_lock(folder, wait=wait):
        with closing(Datastore.open(folder, trust_index=False) if dry_run else update_manifest(folder)) as store:
            catalog, chosen = sharded_catalog(store), list[StoredDocument]()
            work: list[tuple[Path, Selection]] = []
            for shard, local in _selections(catalog, selection):
                if documents := catalog.shards[shard].select(*local.condition()):
                    chosen += [catalog.global_document(shard, document) for document in documents]
                    work.append((store.shards[shard].path, local))
            check_selected(catalog, selection, chosen)
            generation = store.generation
        tokens = sum(document.entries for document in chosen)
        if dry_run:
            return Removed(tuple(chosen), tokens, generation, True)
        remember_trained(folder)
        try:
            for path, local in work:
                remove(path, document=local.document, source=local.source, where=local.where, wait=wait)
        finally:
            with closing(update_manifest(folder)) as store:
                generation = store.generation
        return Removed(tuple(chosen), tokens, generation, False)


def compact_shards(folder: Path, *, segment_entries: int | None, wait: float, progress: Progress = silent) -> Compacted:
    """Compact one shard after another."""
    with writer_lock(folder, wait=wait):
        with closing(update_manifest(folder)) as store:
            paths = [shard.path for shard in store.shards]
        try:
            done = [compact(path, segment_entries=segment_entries, wait=wait, progress=progress) for path in paths]
        finally:
            with closing(update_manifest(folder)) as store:
                generation = store.generation
    return Compacted(
        tokens_dropped=sum(one.tokens_dropped for one in done),
        segments_before=sum(one.segments_before for one in done),
        segments_after=sum(one.segments_after for one in done),
        index=", ".join(dict.fromkeys(one.index for one in done)),
        purged=all(one.purged for one in done),
        generation=generation,
    )


def sharded_removal_report(folder: Path) -> RemovalReport:
    """Return the files of all shards that still contain bytes of removed documents."""
    with closing(Datastore.open(folder, trust_index=False)) as store:
        reports = [(shard.path, removal_report(shard.path)) for shard in store.shards]
        left: list[Remnant] = []
        if has_stale_suffix_array(folder, store.catalog):
            left.append(Remnant(NGRAM_FOLDER, "sorted tokens", "compact"))
    return RemovalReport(
        sum(report.removed_tokens for _, report in reports),
        (*_beside(reports, lambda report: report.bytes), *left),
        (*_beside(reports, lambda report: report.trained), *trained_remnants(folder)),
    )


def _beside(
    reports: Sequence[tuple[Path, RemovalReport]], read: Callable[[RemovalReport], tuple[Remnant, ...]]
) -> Iterator[Remnant]:
    for path, report in reports:
        for remnant in read(report):
            yield replace(remnant, path=str(path / remnant.path))
