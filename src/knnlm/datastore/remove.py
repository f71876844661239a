"""Select, list and remove documents of a store, and report which files still contain bytes of removed ones.

A removal is one short transaction: the documents leave the catalog, and their entries are recorded as removed. A store
that is opened later does not contain them: `live_numbers.LiveNumbers` numbers its entries and keys without the removed
ones, and `index.composite.FilteredIndex` leaves them out of the results of an index that was built before. The next
compaction erases their bytes.

A `Selection` chooses documents by field: a built-in one, or one of the users' records; `fields.source` is always a
field of the records.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from knnlm.datastore.catalog import Catalog, check_complete, drop_fields, field_condition
from knnlm.datastore.locks import has_stale_suffix_array, purge, writer_lock
from knnlm.datastore.manifest import is_sharded
from knnlm.datastore.schema import (
    CATALOG_FILE,
    CODEC_FILE,
    DECODER_FOLDER,
    GATES_FOLDER,
    LOST_FOLDER,
    MAP_FILE,
    NGRAM_FOLDER,
    STAGING_FILE,
    RemovedRow,
    StoredDocument,
    index_folder,
    segment_folder,
)
from knnlm.datastore.staging import StagedAddition
from knnlm.datastore.validation import MAX_INTEGER
from knnlm.errors import DatastoreError, ParameterError

FIELDS = ("id", "number", "tokens", "sha256", "source")  # built-in fields of a document, for conditions
TRAINED_BEFORE_REMOVAL = "trained_before_removal"  # metadata: hashes of the trained files at the last removal

# Files and folders of a store that were trained on its text or keys.
_TRAINED = {
    MAP_FILE: "the map of its keys",
    CODEC_FILE: "the codec of its keys",
    "output": "an output matrix, W_ds",
    GATES_FOLDER: "a gate of the mixture",
    DECODER_FOLDER: "a decoder trained on the store",
}

_CONDITION = re.compile(r"\s*([^=\s](?:[^=]*[^=\s])?)\s*=\s?(.*)", re.DOTALL)
_RECORD_PREFIX = "fields."
_INTEGER_FIELDS = ("number", "tokens")
_COLUMNS = {"tokens": "entries"}  # of the table of documents, where the field has another name
_GLOB_SPECIAL = re.compile(r"[\[?]")
_HASHED_END_BYTES = 1 << 16  # hashed at each end of a trained file, to recognise it


@dataclass(frozen=True)
class Selection:
    """Conditions that choose documents, all of which must hold."""

    document: str | None = None  # its id
    source: str | None = None  # a pattern, where * matches any text
    where: tuple[str, ...] = ()  # field=value

    @property
    def empty(self) -> bool:
        """Whether there is no condition."""
        return self.document is None and self.source is None and not self.where

    @property
    def text(self) -> str:
        """The conditions as options of the CLI."""
        options = [
            ("--document", self.document),
            ("--source", self.source),
            *(("--where", text) for text in self.where),
        ]
        return " ".join(f"{name} {value}" for name, value in options if value is not None)

    def check(self, catalog: Catalog) -> None:
        """Raise if no document has a field of the conditions."""
        for text, name, _ in self._conditions():
            if name not in FIELDS and (others := catalog.other_fields(name.removeprefix(_RECORD_PREFIX))) is not None:
                known = ", ".join([*FIELDS, *others])
                raise ParameterError(f"Invalid condition {text!r}: no document has this field. The fields are {known}.")

    def condition(self) -> tuple[str, list[Any]]:
        """Return the conditions as SQL, and its parameters."""
        parts, values = ["1"], list[Any]()
        if self.document is not None:
            parts.append("id = ?")
            values.append(self.document)
        for text, name, value in self._conditions():
            if name in FIELDS:
                part, parameters = _built_in_condition(text, name, value)
            else:
                part, parameters = field_condition(name.removeprefix(_RECORD_PREFIX), value)
            parts.append(part)
            values += parameters
        if self.source is not None:
            pattern = "*" in self.source
            parts.append("source GLOB ?" if pattern else "source = ?")
            # SQLite has more wildcards than *, and file names may contain them.
            values.append(_GLOB_SPECIAL.sub(r"[\g<0>]", self.source) if pattern else self.source)
        return " AND ".join(parts), values

    def with_numbers(self, find: Callable[[int], int | None]) -> Selection | None:
        """Return the selection with other numbers of documents; None if `find` returns None for one of them."""
        where = []
        for text, name, value in self._conditions():
            if name == "number":
                _built_in_condition(text, name, value)  # raises for a value that is no number
                if (number := find(int(value))) is None:
                    return None
                text = f"number={number}"
            where.append(text)
        return replace(self, where=tuple(where))

    def _conditions(self) -> Iterator[tuple[str, str, str]]:
        """Yield the text, field and value of each condition of `where`."""
        for text in self.where:
            match = _CONDITION.fullmatch(text)
            if match is None:
                raise ParameterError(f"Invalid condition {text!r}: write field=value.")
            yield text, match[1], match[2]


def _built_in_condition(text: str, name: str, value: str) -> tuple[str, list[Any]]:
    if name not in _INTEGER_FIELDS:
        return f"{name} = ?", [value]
    if not re.fullmatch(r"\d{1,18}", value):
        raise ParameterError(f"Invalid condition {text!r}: the {name} of a document is an integer.")
    return f"{_COLUMNS.get(name, name)} = ?", [int(value)]


@dataclass(frozen=True)
class Remnant:
    """A file with bytes of removed documents, or one that was trained on them."""

    path: str
    what: str
    erased_by: str  # the command or action


@dataclass(frozen=True)
class RemovalReport:
    """The files that still contain bytes of removed documents, or were trained on them."""

    removed_tokens: int  # not yet erased
    bytes: tuple[Remnant, ...]
    trained: tuple[Remnant, ...]


@dataclass(frozen=True)
class Removed:
    """The result of a removal."""

    documents: tuple[StoredDocument, ...]
    tokens: int
    generation: int  # of the store after the removal
    dry_run: bool


def list_documents(
    path: str | Path, selection: Selection | None = None, *, first: int = 0, limit: int | None = None
) -> tuple[list[StoredDocument], int]:
    """Return a page of the selected documents, by default of all, and the number of selected documents."""
    if not 0 <= first < MAX_INTEGER or not 0 <= (limit or 0) < MAX_INTEGER:
        raise ParameterError(f"first ({first}) and limit ({limit}) must be from 0 to {MAX_INTEGER - 1}.")
    if is_sharded(Path(path)):
        from knnlm.datastore.shards import list_sharded_documents

        return list_sharded_documents(Path(path), selection or Selection(), first=first, limit=limit)
    with closing(Catalog.open(Path(path) / CATALOG_FILE)) as catalog, catalog.snapshot():
        check_complete(catalog)
        selection = selection or Selection()
        selection.check(catalog)
        condition = selection.condition()
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
    """Remove documents by id, by a pattern of their source (`*.txt`) or by `field=value`; all conditions must hold."""
    folder = Path(path)
    selection = Selection(document, source, (where,) if isinstance(where, str) else tuple(where))
    if selection.empty:
        raise ParameterError("No documents are selected. Use --document ID, --source PATTERN or --where FIELD=VALUE.")
    if is_sharded(folder):
        from knnlm.datastore.shards import remove_from_shards

        return remove_from_shards(folder, selection, dry_run=dry_run, wait=wait)
    if dry_run:
        found, _ = list_documents(folder, selection)
        with closing(Catalog.open(folder / CATALOG_FILE)) as catalog:
            check_selected(catalog, selection, found)
            return Removed(tuple(found), sum(one.entries for one in found), catalog.generation, True)
    with writer_lock(folder, wait=wait), closing(Catalog.open(folder / CATALOG_FILE, write=True)) as catalog:
        check_complete(catalog)
        selection.check(catalog)
        found = catalog.select(*selection.condition())
        check_selected(catalog, selection, found)
        _remove_from_catalog(folder, catalog, found)
        purge(folder, catalog)
        return Removed(tuple(found), sum(one.entries for one in found), catalog.generation, False)


def _remove_from_catalog(folder: Path, catalog: Catalog, documents: list[StoredDocument]) -> None:
    """Delete documents from the catalog, and record their entries and the files that may be trained on them."""
    trained = _trained_before_removal(folder, catalog)
    with catalog.change() as connection:
        catalog.write_metadata(next_document=catalog.next_document(), **trained, **_without_file_names(catalog))
        catalog.put_removed(RemovedRow(one.number, one.segment, one.first_entry, one.entries) for one in documents)
        connection.executemany("DELETE FROM documents WHERE number = ?", ((one.number,) for one in documents))
        drop_fields(connection, (one.number for one in documents))


def _trained_before_removal(folder: Path, catalog: Catalog) -> dict[str, Any]:
    """Return the metadata that recognises files trained on what is removed now, or was removed before."""
    hashes = _trained_hashes(folder)
    # A deleted gate does not return, since its file is named by its content.
    earlier = {
        name: value
        for name, value in (catalog.get(TRAINED_BEFORE_REMOVAL) or {}).items()
        if "/" not in name or name in hashes
    }
    return {TRAINED_BEFORE_REMOVAL: {**earlier, **hashes}}


def remember_trained(folder: Path) -> None:
    """Record the trained files of a sharded store before documents are removed; the caller holds its writer lock."""
    with closing(Catalog.open(folder / CATALOG_FILE, write=True)) as catalog:
        catalog.put(**_trained_before_removal(folder, catalog))


def trained_remnants(folder: Path) -> list[Remnant]:
    """Return the trained files of a sharded store that are unchanged since documents were removed."""
    with closing(Catalog.open(folder / CATALOG_FILE)) as catalog:
        return list(_trained(folder, catalog))


def _without_file_names(catalog: Catalog) -> dict[str, Any]:
    """Return the metadata of an import without the names of its files."""
    derived = catalog.get("derived")
    about = derived.get("import") if isinstance(derived, dict) else None
    if not isinstance(about, dict):
        return {}
    return {"derived": {"import": {name: about[name] for name in about if name not in ("keys", "values")}}}


def check_selected(catalog: Catalog, selection: Selection, found: list[StoredDocument]) -> None:
    """Raise if no document is selected."""
    if not found:
        raise DatastoreError(
            f"{catalog.path.parent} has no document for {selection.text}; nothing was removed. "
            f"List them with: knnlm documents {catalog.path.parent}"
        )


def removal_report(path: str | Path) -> RemovalReport:
    """Return the files that still contain bytes of removed documents, and those that were trained on them."""
    folder = Path(path)
    if is_sharded(folder):
        from knnlm.datastore.shards import sharded_removal_report

        return sharded_removal_report(folder)
    with closing(Catalog.open(folder / CATALOG_FILE)) as catalog, catalog.snapshot():
        gone = catalog.removed()
        files = [*_segments(folder, gone), *_derived(folder, catalog, gone), *_replaced(folder, catalog)]
        trained = tuple(_trained(folder, catalog))
    if (folder / LOST_FOLDER).exists():
        files.append(Remnant(LOST_FOLDER, "files that a repair removed", "delete the folder"))
    log = folder / f"{CATALOG_FILE}-wal"
    if log.exists() and log.stat().st_size:
        files.append(Remnant(log.name, "recent changes of the catalog: names and hashes, no text", "compact"))
    return RemovalReport(sum(row.entries for row in gone), tuple(files), trained)


def _segments(folder: Path, gone: list[RemovedRow]) -> Iterator[Remnant]:
    for number in sorted({row.segment for row in gone if row.entries}):
        entries = sum(row.entries for row in gone if row.segment == number)
        for file in sorted(segment_folder(folder, number).glob("*.npy")):
            yield Remnant(str(file.relative_to(folder)), f"{entries:,} removed entries", "compact")


def _derived(folder: Path, catalog: Catalog, gone: list[RemovedRow]) -> Iterator[Remnant]:
    if any(row.entries for row in gone):
        for row in catalog.indexes():
            yield Remnant(f"index/{row.id:06d}", f"the index {row.spec}, codes of keys", "compact")
    # Also after a compaction with a concurrent reader, when the catalog lists no removed entries.
    if catalog.get(TRAINED_BEFORE_REMOVAL) is not None and has_stale_suffix_array(folder, catalog):
        yield Remnant(NGRAM_FOLDER, "sorted tokens", "compact")


def _replaced(folder: Path, catalog: Catalog) -> Iterator[Remnant]:
    """Yield files of an interrupted addition, and replaced files that a reader had open."""
    pending = StagedAddition(folder, catalog)
    for path in [*pending.folders, *([folder / STAGING_FILE] if (folder / STAGING_FILE).exists() else [])]:
        what = "of an interrupted addition"
        yield Remnant(str(path.relative_to(folder)), what, "compact, or the same add")
    known = {segment_folder(folder, row.id) for row in catalog.segments()} | set(pending.folders)
    known |= {index_folder(folder, row.id) for row in catalog.indexes()}
    for place in ("segments", "index"):
        for entry in sorted(set((folder / place).glob("*")) - known):
            yield Remnant(str(entry.relative_to(folder)), "replaced while a reader had it open", "compact")


def _trained(folder: Path, catalog: Catalog) -> Iterator[Remnant]:
    """Yield trained files that are unchanged since documents were removed."""
    before, now = catalog.get(TRAINED_BEFORE_REMOVAL), _trained_hashes(folder)
    if not isinstance(before, dict):
        return
    for name, value in now.items():
        if before.get(name) == value:
            what = f"{_TRAINED[name.partition('/')[0]]}, trained before the documents were removed"
            yield Remnant(name, what, "train again")
    if catalog.get("offset") is not None:
        what = "the offset of its keys, a mean that may include removed documents"
        yield Remnant(CATALOG_FILE, what, "build again")
    if any(segment.counts_sha256 is not None for segment in catalog.segments()):
        yield Remnant("segments/*/counts.npy", "counts of merged keys", "prune again")


def _trained_hashes(folder: Path) -> dict[str, str]:
    """Return a hash of each trained file of a store, by which a replacement is recognised."""
    hashes = {}
    for name in _TRAINED:
        place = folder / name
        files = sorted(file for file in (place.rglob("*") if place.is_dir() else [place]) if file.is_file())
        # Gates are single files; any other folder is hashed as a whole.
        groups = {f"{name}/{file.name}": [file] for file in files} if name == GATES_FOLDER else {name: files}
        for group, members in groups.items():
            if members:
                hashes[group] = hashlib.sha256(b"".join(map(_ends, members))).hexdigest()[:16]
    return hashes


def _ends(file: Path) -> bytes:
    """Return the size and both ends of a file, which identify it; a decoder may be large."""
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(0)
        head = opened.read(_HASHED_END_BYTES)
        opened.seek(max(0, size - _HASHED_END_BYTES))
        return size.to_bytes(8, "little") + head + opened.read(_HASHED_END_BYTES)
