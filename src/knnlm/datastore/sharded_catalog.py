"""The catalogs of all shards of a store as one catalog for readers.

Segments, entries and documents of a shard are numbered behind those of the shards before it. Metadata of the reader and
of the keys is that of the first shard, which is equal in all; tuned settings are in the catalog of the sharded store.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from time import time_ns
from typing import Any

import numpy as np

from knnlm.datastore.catalog import Catalog
from knnlm.datastore.manifest import MANIFEST_FILE, Manifest, NumberSpan, read_manifest
from knnlm.datastore.schema import CATALOG_FILE, IndexRow, RemovedRow, SegmentRow, StoredDocument
from knnlm.errors import DatastoreCorrupt

_MAX_FIELDS = 20
_MAX_CHANGES = 1 << 40  # of one set of shards
_SETTLED_NS = 2_000_000_000  # since the last write, beyond the resolution of any file system
# Metadata that all shards have in common.
_COMMON = ("model", "window", "key_dtype", "keys", "offset", "map", "codec", "segment_entries", "batch_tokens")


class ShardedCatalog(Catalog):
    """The catalog of a sharded store, which is read-only."""

    manifest: Manifest
    shards: list[Catalog]

    @classmethod
    def join(cls, path: Path, manifest: Manifest, shards: Sequence[Catalog], *, compare: bool = True) -> ShardedCatalog:
        """Open the catalog of a sharded store over the open catalogs of its shards."""
        catalog = super().open(path, hold=True, compare=compare)
        assert isinstance(catalog, ShardedCatalog)
        catalog.shards = list(shards)
        catalog.manifest = manifest.numbered([shard.next_document() for shard in shards])
        return catalog

    def close(self) -> None:
        """Close the databases."""
        super().close()
        _close(getattr(self, "shards", []))

    def reopen(self) -> ShardedCatalog:
        """Open the present state of all catalogs; the caller closes it."""
        while True:
            manifest, shards = read_manifest(self.path.parent), list[Catalog]()
            try:
                for folder in manifest.folders(self.path.parent):
                    shards.append(open_shard(folder))
                if read_manifest(self.path.parent) == manifest:
                    return ShardedCatalog.join(self.path, manifest, shards)
            except BaseException:
                _close(shards)
                raise
            _close(shards)  # a writer has numbered documents since: read all of it again

    def file_state(self) -> object | None:
        """Return the manifest, and the sizes and times of all catalogs; None if one was written a moment ago.

        A second write within the resolution of the clock would not show. The manifest is read, since a network file
        system may return old times of files that it has not opened.
        """
        folder = self.path.parent
        try:
            content = (folder / MANIFEST_FILE).read_bytes()
        except OSError:
            return None
        places = [folder, *self.manifest.folders(folder)]
        files = [place / name for place in places for name in (CATALOG_FILE, f"{CATALOG_FILE}-wal")]
        states = {file: _size_and_time(file) for file in files}
        latest = max((time for _, _, time in states.values()), default=0)
        return None if latest > time_ns() - _SETTLED_NS else (content, states)

    @property
    def generation(self) -> int:
        """Number of changes of all shards, and of joins."""
        return self.manifest.generation + sum(shard.generation for shard in self.shards)

    @property
    def layout(self) -> int:
        """A number that changes whenever entries may be renumbered: a change of any shard renumbers later ones."""
        changes = sum(shard.layout for shard in self.shards) + sum(shard.generation for shard in self.shards[:-1])
        return self.manifest.joins * _MAX_CHANGES + changes

    def get(self, key: str) -> Any:
        """Return one value of the metadata, or None."""
        return self.shards[0].get(key) if key in _COMMON else super().get(key)

    def metadata(self) -> dict[str, Any]:
        """Return all metadata of the store."""
        common = self.shards[0].metadata()
        return {**super().metadata(), **{name: common[name] for name in _COMMON if name in common}}

    @cached_property
    def _segments(self) -> list[list[SegmentRow]]:
        return [shard.segments() for shard in self.shards]

    @cached_property
    def _entry_starts(self) -> list[int]:
        return [0, *accumulate(sum(row.entries for row in rows) for rows in self._segments)]

    @cached_property
    def segment_starts(self) -> list[int]:
        """The number of each shard's segment 0."""
        return [0, *accumulate(max((row.id for row in rows), default=-1) + 1 for rows in self._segments)]

    def locate_document(self, number: int) -> tuple[int, int] | None:
        """Return the shard of a document, and its number there; None for a number that no document has had."""
        for shard, listed in enumerate(self.manifest.shards):
            for span in listed.documents:
                if span.number <= number < span.number + span.count:
                    return shard, number - span.number + span.local
        return None

    def segments(self) -> list[SegmentRow]:
        """Return the segments in the order of their entries."""
        return [
            replace(row, id=row.id + self.segment_starts[shard], first_entry=row.first_entry + first)
            for shard, (rows, first) in enumerate(zip(self._segments, self._entry_starts, strict=False))
            for row in rows
        ]

    def removed(self) -> list[RemovedRow]:
        """Return the entries of removed documents, in order."""
        return [
            replace(
                row,
                number=_number(self.manifest.shards[shard].documents, row.number),
                segment=row.segment + self.segment_starts[shard],
                first_entry=row.first_entry + self._entry_starts[shard],
            )
            for shard, catalog in enumerate(self.shards)
            for row in catalog.removed()
        ]

    def indexes(self) -> list[IndexRow]:
        """Return the indexes of all shards."""
        return [row for shard in self.shards for row in shard.indexes()]

    def global_document(self, shard: int, document: StoredDocument) -> StoredDocument:
        """Return a document of a shard with its numbers in the sharded store."""
        return replace(
            document,
            number=_number(self.manifest.shards[shard].documents, document.number),
            segment=document.segment + self.segment_starts[shard],
            first_entry=document.first_entry + self._entry_starts[shard],
        )

    def _each(self, read: Callable[[Catalog], Any]) -> Iterator[StoredDocument]:
        for shard, catalog in enumerate(self.shards):
            for document in read(catalog):
                yield self.global_document(shard, document)

    def documents(self) -> Iterator[StoredDocument]:
        """Iterate over the documents in the order of their entries, without loading all."""
        return self._each(lambda catalog: catalog.documents())

    def source_texts(self) -> list[tuple[int, int, int, str]]:
        """Return (number, first entry, entries, source text) of every document, in the order of their entries."""
        return [
            (_number(listed.documents, number), first + begin, entries, text)
            for catalog, listed, begin in zip(self.shards, self.manifest.shards, self._entry_starts, strict=False)
            for number, first, entries, text in catalog.source_texts()
        ]

    def contains_sources(self, texts: Sequence[str]) -> list[bool]:
        """Return whether each text is the source of a stored pair; outer spaces do not count."""
        return [any(found) for found in zip(*(shard.contains_sources(texts) for shard in self.shards), strict=True)]

    def sample_sources(self, count: int) -> list[str]:
        """Return at most so many sources, of each shard in proportion to its documents."""
        sizes = np.array([shard.document_count() for shard in self.shards])
        ends = np.cumsum(sizes) * min(count, int(sizes.sum())) // max(1, int(sizes.sum()))
        counts = np.diff(ends, prepend=0).tolist()
        return [text for shard, own in zip(self.shards, counts, strict=True) for text in shard.sample_sources(own)]

    def reuse_sources(self, before: Catalog) -> None:
        """Take the sources that the earlier states of these shards have read."""
        known = {catalog.path: catalog for catalog in getattr(before, "shards", [])}
        for shard in self.shards:
            if shard.path in known:
                shard.reuse_sources(known[shard.path])

    def documents_of(self, segment: int) -> list[StoredDocument]:
        """Return the documents of one segment."""
        shard, local = locate(self.segment_starts, segment)
        return [self.global_document(shard, document) for document in self.shards[shard].documents_of(local)]

    def document_count(self, condition: str = "1", values: Sequence[Any] = ()) -> int:
        """Return the number of documents, or of those that match an SQL condition."""
        return sum(shard.document_count(condition, values) for shard in self.shards)

    def has_text(self, sha256: str) -> bool:
        """Whether a document whose text has this SHA-256 is stored."""
        return any(shard.has_text(sha256) for shard in self.shards)

    def document_at(self, entry: int) -> StoredDocument:
        """Return the document of an entry."""
        shard = bisect_right(self._entry_starts, entry) - 1
        if not 0 <= shard < len(self.shards):
            raise DatastoreCorrupt(
                f"{self.path} has no document for entry {entry}. Run: knnlm verify {self.path.parent}"
            )
        return self.global_document(shard, self.shards[shard].document_at(entry - self._entry_starts[shard]))

    def other_fields(self, name: str = "") -> list[str] | None:
        """Return None if a document has this field, otherwise the first names of the fields that documents have."""
        names: set[str] = set()
        for shard in self.shards:
            others = shard.other_fields(name)
            if others is None:
                return None
            names.update(others)
        return sorted(names)[:_MAX_FIELDS]

    @cached_property
    def has_sources(self) -> bool:
        """Whether documents may have source texts: the store is one of an encoder-decoder model."""
        return self.shards[0].has_sources


def _size_and_time(file: Path) -> tuple[int, int, int]:
    try:
        found = file.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def _close(catalogs: Sequence[Catalog]) -> None:
    for catalog in catalogs:
        catalog.close()


def locate(starts: Sequence[int], number: int) -> tuple[int, int]:
    """Return the shard of a segment, given the numbers of the first segments, and its number there."""
    shard = bisect_right(starts, number) - 1
    return shard, number - starts[shard]


def open_shard(folder: Path, *, compare: bool = True) -> Catalog:
    """Open the catalog of a shard for one snapshot."""
    return Catalog.open(folder / CATALOG_FILE, hold=True, compare=compare)


def _number(spans: Sequence[NumberSpan], local: int) -> int:
    """Return the number of a shard's document in the sharded store."""
    place = bisect_right(spans, local, key=lambda span: span.local) - 1
    if place >= 0 and local < spans[place].local + spans[place].count:
        return local - spans[place].local + spans[place].number
    raise DatastoreCorrupt(f"A document with the number {local} of a shard has no number in the sharded store.")
