"""Remove documents from a store, and say what still holds their bytes.

A removal is one short transaction: the documents leave the catalog, and their rows are noted as gone. From then on
a store that is opened later does not contain them. The next compaction erases their bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnlm.datastore.catalog import Catalog, Selection, check_complete, drop_fields
from knnlm.datastore.garbage import has_stale_suffix_array, purge
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.paths import (
    CATALOG_FILE,
    CODEC_FILE,
    DECODER_FOLDER,
    GATES_FOLDER,
    LOST_FOLDER,
    MAP_FILE,
    NGRAM_FOLDER,
    STAGING_FILE,
    index_folder,
    segment_folder,
)
from knnlm.datastore.schema import RemovedRow, StoredDocument
from knnlm.datastore.staging import StagedAddition
from knnlm.datastore.validation import LARGEST
from knnlm.errors import DatastoreError, ParameterError

FORGOT = "forgot"  # the fact that says what had been trained when documents were removed

# What was trained or chosen on a store's text or keys, and lies in its folder.
_TRAINED = {
    MAP_FILE: "the map of its keys",
    CODEC_FILE: "the codec of its keys",
    "output": "an output matrix, W_ds",
    GATES_FOLDER: "a gate: networks that weigh the memories",
    DECODER_FOLDER: "a decoder that was trained on it",
}

_PIECE = 1 << 16  # bytes at each end by which one file is told from another


@dataclass(frozen=True)
class Holding:
    """A file that still has bytes of removed documents, or something that learnt from them."""

    path: str
    what: str
    goes: str  # what makes an end of it


@dataclass(frozen=True)
class Evidence:
    """What is left of documents that were removed from a store."""

    waiting: int  # tokens of removed documents whose bytes are still there
    bytes: tuple[Holding, ...]
    trained: tuple[Holding, ...]


@dataclass(frozen=True)
class Removed:
    """What was removed."""

    documents: tuple[StoredDocument, ...]
    tokens: int
    generation: int  # of the store, as it is now
    dry_run: bool


def list_documents(
    path: str | Path, selection: Selection | None = None, *, first: int = 0, limit: int | None = None
) -> tuple[list[StoredDocument], int]:
    """List the documents that are meant, all where nothing is said, and count all that are; for looking through."""
    if not 0 <= first < LARGEST or not 0 <= (limit or 0) < LARGEST:
        raise ParameterError(f"first ({first}) and limit ({limit}) must be from 0 to {LARGEST - 1}.")
    with closing(Catalog.open(Path(path) / CATALOG_FILE)) as catalog, catalog.snapshot():
        check_complete(catalog)
        wanted = selection or Selection()
        wanted.check(catalog)
        condition = wanted.condition()
        return catalog.select(*condition, first=first, limit=limit), catalog.document_count(*condition)


def remove(
    path: str | Path,
    *,
    document: str | None = None,
    source: str | None = None,
    where: str | tuple[str, ...] = (),
    dry_run: bool = False,
    wait: float = 0.0,
) -> Removed:
    """Remove documents: by id, by a pattern of their source (`*.txt`), by `field=value`; all that is given must fit."""
    folder = Path(path)
    selection = Selection(document, source, (where,) if isinstance(where, str) else tuple(where))
    if selection.empty:
        raise ParameterError("Which documents? Give --document ID, --source PATTERN or --where FIELD=VALUE.")
    if dry_run:
        found, _ = list_documents(folder, selection)
        with closing(Catalog.open(folder / CATALOG_FILE)) as catalog:
            _check_some(catalog, selection, found)
            return Removed(tuple(found), sum(one.entries for one in found), catalog.generation, True)
    with writer_lock(folder, wait=wait), closing(Catalog.open(folder / CATALOG_FILE, write=True)) as catalog:
        check_complete(catalog)
        selection.check(catalog)
        found = catalog.select(*selection.condition())
        _check_some(catalog, selection, found)
        _forget(folder, catalog, found)
        purge(folder, catalog)
        return Removed(tuple(found), sum(one.entries for one in found), catalog.generation, False)


def _forget(folder: Path, catalog: Catalog, documents: list[StoredDocument]) -> None:
    """Take documents out of the catalog, and note their rows and what may have learnt from them."""
    marks = _trained_marks(folder)
    # A gate that is gone does not come back: its file is named by what is in it.
    earlier = {name: mark for name, mark in (catalog.get(FORGOT) or {}).items() if "/" not in name or name in marks}
    forgot = {**earlier, **marks}
    with catalog.change() as connection:
        catalog.put_within(next_document=catalog.next_document(), **{FORGOT: forgot}, **_less_names(catalog))
        catalog.put_removed(RemovedRow(one.number, one.segment, one.first_entry, one.entries) for one in documents)
        connection.executemany("DELETE FROM documents WHERE number = ?", ((one.number,) for one in documents))
        drop_fields(connection, (one.number for one in documents))


def _less_names(catalog: Catalog) -> dict[str, Any]:
    """Return the fact of an import without the names of its files, which earlier imports have left there."""
    derived = catalog.get("derived")
    about = derived.get("import") if isinstance(derived, dict) else None
    if not isinstance(about, dict):
        return {}
    return {"derived": {"import": {name: about[name] for name in about if name not in ("keys", "values")}}}


def _check_some(catalog: Catalog, selection: Selection, found: list[StoredDocument]) -> None:
    if not found:
        raise DatastoreError(
            f"{catalog.path.parent} has no document for {selection.text}, so nothing was removed. "
            f"List them with: knnlm documents {catalog.path.parent}"
        )


def evidence(path: str | Path) -> Evidence:
    """Return what still holds bytes of removed documents, and what learnt from them and cannot forget."""
    folder = Path(path)
    with closing(Catalog.open(folder / CATALOG_FILE)) as catalog, catalog.snapshot():
        gone = catalog.removed()
        files = [*_segments(folder, gone), *_derived(folder, catalog, gone), *_replaced(folder, catalog)]
        trained = tuple(_trained(folder, catalog))
    if (folder / LOST_FOLDER).exists():
        files.append(Holding(LOST_FOLDER, "what a repair has taken out, as it was then", "delete the folder"))
    log = folder / f"{CATALOG_FILE}-wal"
    if log.exists() and log.stat().st_size:
        files.append(Holding(log.name, "the catalog's last changes: names and hashes, no text", "compact"))
    return Evidence(sum(row.entries for row in gone), tuple(files), trained)


def _segments(folder: Path, gone: list[RemovedRow]) -> Iterator[Holding]:
    for number in sorted({row.segment for row in gone if row.entries}):
        rows = sum(row.entries for row in gone if row.segment == number)
        for file in sorted(segment_folder(folder, number).glob("*.npy")):
            yield Holding(str(file.relative_to(folder)), f"{rows:,} removed rows", "compact")


def _derived(folder: Path, catalog: Catalog, gone: list[RemovedRow]) -> Iterator[Holding]:
    if any(row.entries for row in gone):
        for row in catalog.indexes():
            yield Holding(f"index/{row.id:06d}", f"the index {row.spec}, codes of keys", "compact")
    # Also after a compaction during which there was a reader, when no removed row is left.
    if catalog.get(FORGOT) is not None and has_stale_suffix_array(folder, catalog):
        yield Holding(NGRAM_FOLDER, "sorted tokens", "compact")


def _replaced(folder: Path, catalog: Catalog) -> Iterator[Holding]:
    """Files of an interrupted addition, and files that were replaced while they had a reader."""
    pending = StagedAddition(folder, catalog)
    for path in [*pending.folders, *([folder / STAGING_FILE] if (folder / STAGING_FILE).exists() else [])]:
        what = "of an interrupted addition"
        yield Holding(str(path.relative_to(folder)), what, "compact, or the same add")
    known = {segment_folder(folder, row.id) for row in catalog.segments()} | set(pending.folders)
    known |= {index_folder(folder, row.id) for row in catalog.indexes()}
    for place in ("segments", "index"):
        for entry in sorted(set((folder / place).glob("*")) - known):
            yield Holding(str(entry.relative_to(folder)), "replaced while it had a reader", "compact")


def _trained(folder: Path, catalog: Catalog) -> Iterator[Holding]:
    """What was there when a document was removed and is still the same."""
    forgot, now = catalog.get(FORGOT), _trained_marks(folder)
    if not isinstance(forgot, dict):
        return
    for name, mark in now.items():
        if forgot.get(name) == mark:
            what = f"{_TRAINED[name.partition('/')[0]]}, trained while the documents were there: it cannot forget them"
            yield Holding(name, what, "train again")
    if catalog.get("offset") is not None:
        what = "the offset of its keys, a mean over the first that were read, which removed ones may have been among"
        yield Holding(CATALOG_FILE, what, "build again")
    if any(segment.counts_sha256 is not None for segment in catalog.segments()):
        yield Holding("segments/*/counts.npy", "votes of keys that were merged into others' keys", "prune again")


def _trained_marks(folder: Path) -> dict[str, str]:
    """Tell what was trained on a store and lies in its folder from what may take its place later."""
    marks = {}
    for name in _TRAINED:
        place = folder / name
        files = sorted(file for file in (place.rglob("*") if place.is_dir() else [place]) if file.is_file())
        # Gates come and go one by one; a folder of another kind is one thing.
        groups = {f"{name}/{file.name}": [file] for file in files} if name == GATES_FOLDER else {name: files}
        for group, members in groups.items():
            if members:
                marks[group] = hashlib.sha256(b"".join(map(_ends, members))).hexdigest()[:16]
    return marks


def _ends(file: Path) -> bytes:
    """Return the size and both ends of a file: enough to know it again, and a decoder may be large."""
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(0)
        head = opened.read(_PIECE)
        opened.seek(max(0, size - _PIECE))
        return size.to_bytes(8, "little") + head + opened.read(_PIECE)
