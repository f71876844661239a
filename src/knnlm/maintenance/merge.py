"""Merge stores that were built with the same model.

Documents are copied with their entries as stored, each text once. Each segment of the new store holds the new documents
of one segment of a source, and is committed together with the position of the merge; so an interrupted merge resumes
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
from knnlm.datastore.rewrite import check_out
from knnlm.datastore.schema import (
    CATALOG_FILE,
    COUNTS_FILE,
    KEPT_FILE,
    KEYS_FILE,
    VALUES_FILE,
    SegmentRow,
    StoredDocument,
    segment_folder,
)
from knnlm.datastore.segments import NewSegment, array_shapes
from knnlm.datastore.shards import CALIBRATED, SHARD
from knnlm.datastore.store import Datastore, shorten
from knnlm.errors import DatastoreCorrupt, DatastoreError, ModelMismatch, ParameterError
from knnlm.index.base import check_metric
from knnlm.io import atomic_write, checksum, remove_unlisted
from knnlm.progress import Progress, silent

_POSITION = "merged"  # the metadata that holds how far a merge has come

# Metadata that may differ between stores that are merged. Anything else must be equal, also what is unknown here.
_MAY_DIFFER = {
    "format", "state", "tunings", "active_tuning", "derived", "segment_entries", "batch_tokens", "compile",
    "generation", "layout", "index_skipped", "next_segment", "next_document", "trained_before_removal", LANGUAGE_MODEL,
    _POSITION, "offset", "map", "model", REQUESTED_INDEX, SHARD, CALIBRATED,
}  # fmt: skip


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge."""

    store: Path
    stores: int  # that were merged
    documents: int
    duplicates: int  # documents left out because their text was already there
    tokens: int
    keys: int
    index: str | None
    seconds: float


def merge(
    stores: Sequence[str | Path],
    out: str | Path,
    *,
    index: str | None = None,
    metric: str = "l2",
    wait: float = 0.0,
    progress: Progress = silent,
) -> MergeResult:
    """Write one store with the documents of all, each text once; if `index` is given, build that index of it.

    `wait` is the number of seconds to wait for the lock of `out`.
    """
    begin, folder = time.perf_counter(), Path(out)
    if not stores:
        raise ParameterError("Nothing to merge. Name the stores.")
    check_metric(metric)
    with ExitStack() as stack:
        opened = [stack.enter_context(closing(Datastore.open(path, trust_index=False))) for path in stores]
        # A sharded store is merged as its shards are, one after another.
        sources = [source for store in opened for source in store.shards or [store]]
        for source in sources:
            check_compatible(sources[0], source)
        if index is None or not _lacks_only_index(folder, sources):
            request = {} if index is None else {REQUESTED_INDEX: request_index(index, metric)}
            _write_merged(folder, sources, request, wait=wait, progress=progress)
        read = sum(source.catalog.document_count() for source in sources)
    spec = None if index is None else build_requested_index(folder, index, metric, wait=wait, progress=progress)
    with closing(Datastore.open(folder)) as merged:
        documents = merged.catalog.document_count()
        return MergeResult(
            store=folder,
            stores=len(stores),
            documents=documents,
            duplicates=read - documents,
            tokens=merged.entry_count,
            keys=merged.key_count,
            index=spec,
            seconds=time.perf_counter() - begin,
        )


def _write_merged(
    folder: Path, sources: list[Datastore], request: dict[str, Any], *, wait: float, progress: Progress
) -> None:
    """Write the merged segments, or those that an interrupted merge has not written, and complete the store."""
    for source in sources:
        check_out(source, folder)
    with writer_lock(folder, create=True, wait=wait), closing(_open_catalog(folder, sources)) as catalog:
        _Merge(folder, catalog, sources).run(progress)
        catalog.put(state="complete", **{_POSITION: None}, **request)


def _lacks_only_index(folder: Path, sources: Sequence[Datastore]) -> bool:
    """Whether these stores were already merged by a command that was killed before it had built the index."""
    if not (folder / CATALOG_FILE).is_file() or any(folder.resolve() == source.path.resolve() for source in sources):
        return False
    with closing(Catalog.open(folder / CATALOG_FILE)) as catalog:
        same = catalog.get("derived") == _origin(sources) and catalog.get("state") == "complete"
        return same and requested_index(catalog) is not None


def _origin(sources: Sequence[Datastore]) -> dict[str, Any]:
    """Return the metadata that identifies a merge."""
    return {"merge": [source.fingerprint for source in sources]}


def check_compatible(first: Datastore, other: Datastore) -> None:
    """Raise where the keys of two stores cannot be compared, naming the difference."""
    difference = _difference(first, other)
    if difference is None:
        return
    name, one, two = difference
    raise ModelMismatch(
        f"{first.path} and {other.path} cannot be merged: their {name} differs ({shorten(one)} and {shorten(two)}). "
        "Build one of them again with the settings of the other."
    )


def _difference(first: Datastore, other: Datastore) -> tuple[str, Any, Any] | None:
    for name in sorted((set(first.model) | set(other.model)) - {"name"}):
        if first.model.get(name) != other.model.get(name):
            return f"model's {name.replace('_', ' ')}", first.model.get(name), other.model.get(name)
    one, two = first.catalog.metadata(), other.catalog.metadata()
    for name in sorted((set(one) | set(two)) - _MAY_DIFFER):
        if one.get(name) != two.get(name):
            return name.replace("_", " "), one.get(name), two.get(name)
    maps = [(metadata.get("map") or {}).get("sha256") for metadata in (one, two)]
    if maps[0] != maps[1]:
        return "key map", maps[0], maps[1]
    if _shift(first, other) is not None and not isinstance(first.codec, Plain):
        return f"offset, which cannot be changed for keys stored as {first.storage},", "one", "another"
    return None


def _shift(first: Datastore, other: Datastore) -> Tensor | None:
    """Return the vector to add to stored keys of `other` for the offset of `first`; None for no change."""
    if first.catalog.get("offset") == other.catalog.get("offset"):
        return None
    zero = torch.zeros(first.width)
    return (zero if other.origin is None else other.origin) - (zero if first.origin is None else first.origin)


def _open_catalog(folder: Path, sources: Sequence[Datastore]) -> Catalog:
    """Create a catalog, or open that of an unfinished merge of the same stores."""
    origin = _origin(sources)
    if (folder / CATALOG_FILE).exists():
        catalog = Catalog.open(folder / CATALOG_FILE, write=True, copying=True)
        if catalog.get("derived") != origin:
            catalog.close()
            raise DatastoreError(
                f"{folder}: an unfinished merge of other stores. Finish it with the same command, or remove it."
            )
        remove_unlisted(folder / "segments", [segment_folder(folder, segment.id) for segment in catalog.segments()])
        return catalog
    metadata = sources[0].catalog.metadata()
    copied = {
        name: metadata[name] for name in metadata if name not in _MAY_DIFFER or name in ("offset", "map", "model")
    }
    language_models = {source.catalog.get(LANGUAGE_MODEL) for source in sources}
    if len(language_models) == 1 and None not in language_models:
        copied[LANGUAGE_MODEL] = language_models.pop()
    for name, value in metadata.items():
        if isinstance(value, dict) and isinstance(sha256 := value.get("sha256"), str):
            _copy_file(sources[0].path / f"{name}.safetensors", folder / f"{name}.safetensors", sha256)
    return Catalog.create(folder / CATALOG_FILE, {**copied, "state": "building", "derived": origin})


def _copy_file(source: Path, target: Path, sha256: str) -> None:
    """Copy a file that lies beside the catalog, such as the key map."""
    with atomic_write(target) as partial:
        shutil.copyfile(source, partial)
    if checksum(target) != sha256:
        raise DatastoreCorrupt(f"{source}: checksum mismatch (SHA-256). Run: knnlm verify {source.parent} --deep")


class _Merge:
    """Copy new documents, segment by segment."""

    def __init__(self, folder: Path, catalog: Catalog, sources: Sequence[Datastore]) -> None:
        self._folder, self._catalog, self._sources = folder, catalog, sources
        segments = catalog.segments()
        self._segment = len(segments)  # the number of the next segment
        self._row = segments[-1].first_entry + segments[-1].entries if segments else 0
        self._documents = catalog.document_count()
        self._empty: list[StoredDocument] = []  # documents without entries, written with the next or the last segment

    def run(self, progress: Progress) -> None:
        """Continue after the last committed segment."""
        done = tuple(self._catalog.get(_POSITION) or (-1, -1))
        total = sum(segment.entries for source in self._sources for segment in source.segments)
        with progress("merging", total=total, unit="tokens") as advance:
            for number, source in enumerate(self._sources):
                for position, segment in enumerate(source.segments):
                    if (number, position) > done:
                        self._add(source, segment, [number, position])
                    advance(segment.entries)
        if self._segment:
            # One transaction each: a resumed merge then finds the committed ones and does not add them twice.
            for document in self._renumber(self._empty, self._segment - 1):
                self._catalog.put_documents([document])

    def _add(self, source: Datastore, segment: SegmentRow, position: list[int]) -> None:
        new = list(self._new_documents(source.catalog.documents_of(segment.id)))
        rows = sum(document.entries for document in new)
        if not rows:
            self._empty += new
            return
        copy = _SegmentCopy(source, segment, new, _shift(self._sources[0], source))
        row = copy.write(NewSegment(self._folder, self._segment))
        row = replace(row, id=self._segment, first_entry=self._row, entries=rows)
        documents = list(self._renumber([*self._empty, *new], self._segment))
        self._catalog.add_segment(row, documents, **{_POSITION: position})
        self._segment, self._empty = self._segment + 1, []

    def _renumber(self, documents: Sequence[StoredDocument], segment: int) -> Iterator[StoredDocument]:
        """Yield documents with their numbers in the new store."""
        for document in documents:
            yield replace(document, number=self._documents, segment=segment, first_entry=self._row)
            self._row, self._documents = self._row + document.entries, self._documents + 1

    def _new_documents(self, documents: Sequence[StoredDocument]) -> Iterator[StoredDocument]:
        hashes = {document.sha256 for document in self._empty}
        for document in documents:
            if document.sha256 not in hashes and not self._catalog.has_text(document.sha256):
                hashes.add(document.sha256)
                yield document


class _SegmentCopy:
    """The entries of some documents of a segment."""

    def __init__(
        self, source: Datastore, segment: SegmentRow, documents: Sequence[StoredDocument], shift: Tensor | None
    ) -> None:
        self._source, self._segment, self._shift = source, segment, shift
        self._names = source.files(segment)
        self._ranges = list(_row_ranges(documents, segment.first_entry))
        self._key_ranges = self._ranges
        if KEPT_FILE in self._names:
            self._kept = source.arrays.open(segment, KEPT_FILE)
            bounds = [np.searchsorted(self._kept, [first, first + rows]) for first, rows in self._ranges]
            self._key_ranges = [(int(low), int(high - low)) for low, high in bounds]

    def write(self, new: NewSegment) -> SegmentRow:
        """Write the new segment; the caller sets its numbers in the new store."""
        scale = self._write_keys(new)
        self._write_array(new, VALUES_FILE, self._ranges)
        kept = None
        if KEPT_FILE in self._names:
            kept = sum(count for _, count in self._key_ranges)
            with new.array(KEPT_FILE, "int32") as writer:
                begin = 0
                for (first, rows), (key, count) in zip(self._ranges, self._key_ranges, strict=True):
                    writer.append(self._kept[key : key + count] - first + begin)
                    begin += rows
        if COUNTS_FILE in self._names:
            self._write_array(new, COUNTS_FILE, self._key_ranges)
        checksums = new.seal()
        return SegmentRow(
            0,
            0,
            0,
            scale,
            checksums[KEYS_FILE],
            checksums[VALUES_FILE],
            kept,
            checksums.get(KEPT_FILE),
            checksums.get(COUNTS_FILE),
        )

    def _write_keys(self, new: NewSegment) -> float:
        """Copy keys as stored, or change their offset; return their scale."""
        if self._shift is None:
            self._write_array(new, KEYS_FILE, self._key_ranges)
            return self._segment.scale
        scale = np.float32(self._segment.scale)
        with new.keys(self._source.key_dtype, self._source.width) as writer:
            for chunk in self._source.arrays.copy(self._segment, KEYS_FILE, self._key_ranges):
                shifted = chunk.astype(np.float32) * scale + self._shift.numpy()
                writer.put_keys(np.arange(writer.rows, writer.rows + len(shifted)), shifted)
        return writer.divisor

    def _write_array(self, new: NewSegment, name: str, ranges: Sequence[tuple[int, int]]) -> None:
        dtype, shape = array_shapes(self._segment, self._source.codec)[name]
        with new.array(name, dtype, shape[1:]) as writer:
            for chunk in self._source.arrays.copy(self._segment, name, ranges):
                writer.append(chunk)


def _row_ranges(documents: Sequence[StoredDocument], base: int) -> Iterator[tuple[int, int]]:
    """Yield (first row in the segment, rows) of documents, adjacent ones joined."""
    begin = end = -1
    for document in documents:
        first = document.first_entry - base
        if first != end:
            if end > begin:
                yield begin, end - begin
            begin = first
        end = first + document.entries
    if end > begin:
        yield begin, end - begin
