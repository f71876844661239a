"""Make one memory of several that were read by the same model. Knows nothing about models beyond what catalogs say.

Documents are copied with their rows as they are stored, each text once. A segment of the new memory is what is new of
one segment of an old one, and is committed together with how far the merge has come; so a merge that was killed goes on
after its last segment and ends with the same bytes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnlm.datastore.catalog import LANGUAGE_MODEL, REQUESTED_INDEX, Catalog
from knnlm.datastore.codecs import Plain
from knnlm.datastore.indexes import build_requested_index, request_index, requested_index
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.paths import CATALOG_FILE, COUNTS_FILE, KEPT_FILE, KEYS_FILE, VALUES_FILE, segment_folder
from knnlm.datastore.rewrite import check_out
from knnlm.datastore.schema import SegmentRow, StoredDocument
from knnlm.datastore.segments import NewSegment, array_shapes
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, DatastoreError, ModelMismatch, ParameterError
from knnlm.index.base import check_metric
from knnlm.io import checksum, remove_others, replacing
from knnlm.progress import Progress, silent

_POSITION = "merged"  # the fact that says how far a merge has come

# Facts that may differ between memories that fit together; any other must be the same, also one that is not known here.
_FREE = {"format", "state", "choices", "chosen", "derived", "segment_rows", "batch_tokens", "compile", "generation"}

_FREE |= {"layout", "index_skipped", "next_segment", "next_document", "forgot", LANGUAGE_MODEL, _POSITION}

_FREE |= {"offset", "map", "model", REQUESTED_INDEX}


@dataclass(frozen=True)
class MergeResult:
    """What a merge has made."""

    memory: Path
    memories: int
    documents: int
    duplicates: int  # documents that were left out because their text was there already
    tokens: int
    keys: int
    index: str | None
    seconds: float


def merge(
    memories: Sequence[str | Path],
    out: str | Path,
    *,
    index: str | None = None,
    metric: str = "l2",
    wait: float = 0.0,
    progress: Progress = silent,
) -> MergeResult:
    """Write one memory with the documents of all, each text once; `index` is made of it if one is named.

    Waits so many seconds for another who writes to `out`.
    """
    begin, folder = time.perf_counter(), Path(out)
    if not memories:
        raise ParameterError("Nothing to merge: name the memories.")
    check_metric(metric)
    with ExitStack() as stack:
        stores = [stack.enter_context(closing(Datastore.open(path, trust_index=False))) for path in memories]
        for store in stores:
            check_fits(stores[0], store)
        if index is None or not _lacks_index(folder, stores):
            for store in stores:
                check_out(store, folder)
            with writer_lock(folder, create=True, wait=wait), closing(_begin(folder, stores)) as catalog:
                _Merge(folder, catalog, stores).run(progress)
                later = {} if index is None else {REQUESTED_INDEX: request_index(index, metric)}
                catalog.put(state="complete", **{_POSITION: None}, **later)
        read = sum(store.catalog.document_count() for store in stores)
    spec = None if index is None else build_requested_index(folder, index, metric, wait=wait, progress=progress)
    with closing(Datastore.open(folder)) as made:
        documents = made.catalog.document_count()
        seconds = time.perf_counter() - begin
        return MergeResult(folder, len(stores), documents, read - documents, made.rows, made.key_count, spec, seconds)


def _lacks_index(folder: Path, stores: Sequence[Datastore]) -> bool:
    """Whether these memories were merged already, by a command that was killed before it had made the index."""
    if not (folder / CATALOG_FILE).is_file() or any(folder.resolve() == store.path.resolve() for store in stores):
        return False
    with closing(Catalog.open(folder / CATALOG_FILE)) as catalog:
        same = catalog.get("derived") == _derived(stores) and catalog.get("state") == "complete"
        return same and requested_index(catalog) is not None


def _derived(stores: Sequence[Datastore]) -> dict[str, Any]:
    return {"merge": [store.fingerprint for store in stores]}


def check_fits(first: Datastore, other: Datastore) -> None:
    """Refuse memories whose keys are not of one kind, and name in what they differ."""
    what = _difference(first, other)
    if what is None:
        return
    name, one, two = what
    raise ModelMismatch(
        f"{first.path} and {other.path} cannot be merged: their {name} differs ({_short(one)} and {_short(two)}). "
        f"Build one of them again as the other was."
    )


def _difference(first: Datastore, other: Datastore) -> tuple[str, Any, Any] | None:
    for name in sorted((set(first.model) | set(other.model)) - {"name"}):
        if first.model.get(name) != other.model.get(name):
            return f"model's {name.replace('_', ' ')}", first.model.get(name), other.model.get(name)
    one, two = first.catalog.facts(), other.catalog.facts()
    for name in sorted((set(one) | set(two)) - _FREE):
        if one.get(name) != two.get(name):
            return name.replace("_", " "), one.get(name), two.get(name)
    maps = [(facts.get("map") or {}).get("sha256") for facts in (one, two)]
    if maps[0] != maps[1]:
        return "map of keys", maps[0], maps[1]
    if _shift(first, other) is not None and not isinstance(first.codec, Plain):
        return f"offset, which keys stored as {first.storage} cannot be moved by,", "one", "another"
    return None


def _shift(first: Datastore, other: Datastore) -> Tensor | None:
    """Say by what stored keys of the other must be moved, to be as those of the first; None: by nothing."""
    if first.catalog.get("offset") == other.catalog.get("offset"):
        return None
    zero = torch.zeros(first.width)
    return (zero if other.origin is None else other.origin) - (zero if first.origin is None else first.origin)


def _begin(folder: Path, stores: Sequence[Datastore]) -> Catalog:
    """Make a new catalog, or open that of an unfinished merge of the same memories."""
    derived = _derived(stores)
    if (folder / CATALOG_FILE).exists():
        catalog = Catalog.open(folder / CATALOG_FILE, write=True, copying=True)
        if catalog.get("derived") != derived:
            catalog.close()
            raise DatastoreError(
                f"{folder} is unfinished and of other memories. Finish it with the same command, or remove it."
            )
        remove_others(folder / "segments", [segment_folder(folder, segment.id) for segment in catalog.segments()])
        return catalog
    facts = stores[0].catalog.facts()
    meta = {name: facts[name] for name in facts if name not in _FREE or name in ("offset", "map", "model")}
    helped = {store.catalog.get(LANGUAGE_MODEL) for store in stores}
    if len(helped) == 1 and None not in helped:
        meta[LANGUAGE_MODEL] = helped.pop()
    for name, fact in facts.items():
        if isinstance(fact, dict) and isinstance(sum_ := fact.get("sha256"), str):
            _copy_beside(stores[0].path / f"{name}.safetensors", folder / f"{name}.safetensors", sum_)
    return Catalog.create(folder / CATALOG_FILE, {**meta, "state": "building", "derived": derived})


def _copy_beside(source: Path, target: Path, sha256: str) -> None:
    """Copy a file that lies beside the catalog, such as the map of keys."""
    with replacing(target) as partial:
        shutil.copyfile(source, partial)
    if checksum(target) != sha256:
        raise DatastoreCorrupt(f"{source} is not as it was written. Run: knnlm verify {source.parent} --deep")


class _Merge:
    """Copies what is new, segment by segment."""

    def __init__(self, folder: Path, catalog: Catalog, stores: Sequence[Datastore]) -> None:
        self._folder, self._catalog, self._stores = folder, catalog, stores
        segments = catalog.segments()
        self._number = len(segments)
        self._row = segments[-1].first_row + segments[-1].rows if segments else 0
        self._documents = catalog.document_count()
        self._waiting: list[StoredDocument] = []  # those of no rows, which go with the next segment, or with the last

    def run(self, progress: Progress) -> None:
        """Go on after the last segment that was committed."""
        done = tuple(self._catalog.get(_POSITION) or (-1, -1))
        total = sum(segment.rows for store in self._stores for segment in store.segments)
        with progress("merging", total=total, unit="tokens") as advance:
            for number, store in enumerate(self._stores):
                for place, segment in enumerate(store.segments):
                    if (number, place) > done:
                        self._add(store, segment, [number, place])
                    advance(segment.rows)
        if self._number:
            # One by one: each that is in is not new when a merge that was killed goes on.
            for document in self._numbered(self._waiting, self._number - 1):
                self._catalog.put_documents([document])

    def _add(self, store: Datastore, segment: SegmentRow, position: list[int]) -> None:
        new = list(self._new(store.catalog.documents_of(segment.id)))
        rows = sum(document.rows for document in new)
        if not rows:
            self._waiting += new
            return
        copy = _Copy(store, segment, new, _shift(self._stores[0], store))
        row = copy.write(NewSegment(self._folder, self._number))
        row = replace(row, id=self._number, first_row=self._row, rows=rows)
        documents = list(self._numbered([*self._waiting, *new], self._number))
        self._catalog.add_segment(row, documents, **{_POSITION: position})
        self._number, self._waiting = self._number + 1, []

    def _numbered(self, documents: Sequence[StoredDocument], segment: int) -> Iterator[StoredDocument]:
        """Give documents the numbers that they have in the new memory."""
        for document in documents:
            yield replace(document, number=self._documents, segment=segment, first_row=self._row)
            self._row, self._documents = self._row + document.rows, self._documents + 1

    def _new(self, documents: Sequence[StoredDocument]) -> Iterator[StoredDocument]:
        seen = {document.sha256 for document in self._waiting}
        for document in documents:
            if document.sha256 not in seen and not self._catalog.holds(document.sha256):
                seen.add(document.sha256)
                yield document


class _Copy:
    """The rows of some documents of a segment."""

    def __init__(
        self, store: Datastore, segment: SegmentRow, documents: Sequence[StoredDocument], shift: Tensor | None
    ) -> None:
        self._store, self._segment, self._shift = store, segment, shift
        self._names = store.files(segment)
        self._runs = list(_runs(documents, segment.first_row))  # (first row, rows) within the segment
        self._key_runs = self._runs
        if KEPT_FILE in self._names:
            self._kept = store.arrays.open(segment, KEPT_FILE)
            bounds = [np.searchsorted(self._kept, [first, first + rows]) for first, rows in self._runs]
            self._key_runs = [(int(low), int(high - low)) for low, high in bounds]

    def write(self, made: NewSegment) -> SegmentRow:
        """Write the new segment; its numbers in the new memory are not known here."""
        scale = self._write_keys(made)
        self._write_array(made, VALUES_FILE, self._runs)
        kept = None
        if KEPT_FILE in self._names:
            kept = sum(count for _, count in self._key_runs)
            with made.array(KEPT_FILE, "int32") as writer:
                begin = 0
                for (first, rows), (key, count) in zip(self._runs, self._key_runs, strict=True):
                    writer.append(self._kept[key : key + count] - first + begin)
                    begin += rows
        if COUNTS_FILE in self._names:
            self._write_array(made, COUNTS_FILE, self._key_runs)
        sums = made.seal()
        return SegmentRow(
            0, 0, 0, scale, sums[KEYS_FILE], sums[VALUES_FILE], kept, sums.get(KEPT_FILE), sums.get(COUNTS_FILE)
        )

    def _write_keys(self, made: NewSegment) -> float:
        """Copy keys as they are stored, or move them to the offset of the others; give what they are divided by."""
        if self._shift is None:
            self._write_array(made, KEYS_FILE, self._key_runs)
            return self._segment.scale
        scale = np.float32(self._segment.scale)
        with made.keys(self._store.key_dtype, self._store.width) as writer:
            for piece in self._store.arrays.copy(self._segment, KEYS_FILE, self._key_runs):
                moved = piece.astype(np.float32) * scale + self._shift.numpy()
                writer.put_keys(np.arange(writer.rows, writer.rows + len(moved)), moved)
        return writer.divisor

    def _write_array(self, made: NewSegment, name: str, runs: Sequence[tuple[int, int]]) -> None:
        dtype, shape = array_shapes(self._segment, self._store.codec)[name]
        with made.array(name, dtype, shape[1:]) as writer:
            for piece in self._store.arrays.copy(self._segment, name, runs):
                writer.append(piece)


def _runs(documents: Sequence[StoredDocument], base: int) -> Iterator[tuple[int, int]]:
    """Give (first row in the segment, rows) of documents, those that touch as one."""
    begin = end = -1
    for document in documents:
        first = document.first_row - base
        if first != end:
            if end > begin:
                yield begin, end - begin
            begin = first
        end = first + document.rows
    if end > begin:
        yield begin, end - begin


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"
