"""Rewrite a store without removed entries, while readers stay open.

Segments that lost entries, and consecutive small ones, are copied into new segments beside the old; the index is built
again. One transaction then replaces the old segments. Open readers go on with the old files, which are removed when
they have no reader. A killed compaction has changed nothing, or is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from knnlm.datastore.catalog import LAYOUT, Catalog, check_complete, drop_fields
from knnlm.datastore.indexes import choose_spec, make_index, stored_indexes
from knnlm.datastore.locks import purge, writer_lock
from knnlm.datastore.manifest import is_sharded
from knnlm.datastore.schema import CATALOG_FILE, COUNTS_FILE, KEPT_FILE, KEYS_FILE, VALUES_FILE, IndexRow, SegmentRow
from knnlm.datastore.segments import NewSegment, array_shapes
from knnlm.datastore.store import Datastore, next_segment
from knnlm.errors import IndexInvalid, ParameterError
from knnlm.progress import Advance, Progress, silent

_SEGMENT_ENTRIES = 16_384  # where the store has no setting


@dataclass(frozen=True)
class Compacted:
    """The result of a compaction."""

    tokens_dropped: int  # of removed documents
    segments_before: int
    segments_after: int
    index: str  # its spec
    purged: bool  # False while a reader keeps the old files on disk
    generation: int


def compact(
    path: str | Path, *, segment_entries: int | None = None, wait: float = 0.0, progress: Progress = silent
) -> Compacted:
    """Erase removed entries, merge small segments into segments of `segment_entries`, and build the index again.

    Waits up to `wait` seconds for another writer, and at the end for readers of the old files.
    """
    folder = Path(path)
    if segment_entries is not None and segment_entries < 1:
        raise ParameterError(f"segment entries must be at least 1, not {segment_entries}.")
    if is_sharded(folder):
        from knnlm.datastore.shards import compact_shards

        return compact_shards(folder, segment_entries=segment_entries, wait=wait, progress=progress)
    with writer_lock(folder, wait=wait), closing(Catalog.open(folder / CATALOG_FILE, write=True)) as catalog:
        check_complete(catalog)
        purge(folder, catalog, keep_pending=False)
        with closing(Datastore.open(folder)) as store:
            size = segment_entries or catalog.get("segment_entries") or _SEGMENT_ENTRIES
            work = _Compaction(store, catalog, _plan(store, size), progress)
            work.run()
            dropped, before = store.entry_numbers.total - store.entry_count, len(store.segments)
        catalog.vacuum()
        purged = purge(folder, catalog, wait=wait)
        index = next((row.spec for row in catalog.indexes()), "exact")
        return Compacted(dropped, before, len(catalog.segments()), index, purged, catalog.generation)


@dataclass(frozen=True)
class _Group:
    """Segments that are merged into one, or a single segment that is kept."""

    segments: tuple[SegmentRow, ...]
    rewrite: bool


def _plan(store: Datastore, size: int) -> list[_Group]:
    """Keep large segments that lost no entry; group consecutive other segments that can be merged."""
    groups: list[_Group] = []
    waiting: list[SegmentRow] = []

    def close() -> None:
        if waiting:
            rewrite = len(waiting) > 1 or live_entries(store, waiting[0]) < waiting[0].entries
            groups.append(_Group(tuple(waiting), rewrite))
            waiting.clear()

    for segment in store.segments:
        if segment.entries >= max(1, size // 2) and live_entries(store, segment) == segment.entries:
            close()
            groups.append(_Group((segment,), False))
            continue
        full = sum(live_entries(store, other) for other in waiting) >= size
        if waiting and (full or _kind(segment) != _kind(waiting[0])):
            close()
        waiting.append(segment)
    close()
    return groups


def live_entries(store: Datastore, segment: SegmentRow) -> int:
    """Return the number of a segment's entries that were not removed."""
    numbers = store.entry_numbers
    return numbers.before(segment.first_entry + segment.entries) - numbers.before(segment.first_entry)


def _kind(segment: SegmentRow) -> tuple[Any, ...]:
    """Return the properties that segments must share to be merged byte for byte."""
    return segment.scale, segment.kept is None, segment.counts_sha256 is None


class _Compaction:
    """Copies segments and then changes the catalog."""

    def __init__(self, store: Datastore, catalog: Catalog, groups: Sequence[_Group], progress: Progress) -> None:
        self._store, self._catalog, self._groups, self._progress = store, catalog, groups, progress
        self._next = next_segment(store.path, catalog)
        self._names: dict[int, int] = {}  # old segment → new segment

    def run(self) -> None:
        """Compact the store, if there is anything to do."""
        indexed = stored_indexes(self._store)
        covers = all(covered.whole and covered.total == self._store.key_numbers.total for _, covered in indexed)
        if not any(group.rewrite for group in self._groups) and covers:
            return
        total = sum(self._live(group) for group in self._groups if group.rewrite)
        segments: list[SegmentRow] = []
        waiting: list[int] = []
        with self._progress("copying segments", total=total, unit="tokens") as advance:
            for group in self._groups:
                first = segments[-1].first_entry + segments[-1].entries if segments else 0
                segment = self._copy(group, first, advance) if group.rewrite else group.segments[0]
                if segment is not None:
                    segments.append(replace(segment, first_entry=first))
                # Documents without entries outlive their segment: they go to the segment before, or to the first.
                waiting += [old.id for old in group.segments]
                if segments:
                    self._names |= dict.fromkeys(waiting, segments[-1].id)
                    waiting.clear()
        # Live keys have the numbers that they get in the new segments.
        index = self._index(indexed[0][0]) if indexed else None
        self._commit(segments, index)

    def _live(self, group: _Group) -> int:
        return sum(live_entries(self._store, segment) for segment in group.segments)

    def _index(self, old: IndexRow) -> IndexRow | None:
        """Build the same index again; the default one where too few keys are left for it."""
        store = self._store
        if not store.key_count:
            return None
        try:
            return make_index(store, self._catalog, old.spec, old.metric, self._progress)
        except (ParameterError, IndexInvalid):
            spec = choose_spec(store)
            if spec == "exact":
                return None
            return make_index(store, self._catalog, spec, old.metric, self._progress)

    def _copy(self, group: _Group, first: int, advance: Advance) -> SegmentRow | None:
        """Write the live entries of some segments as a new one; None where there are none."""
        entries = self._live(group)
        if not entries:
            return None
        number, self._next = self._next, self._next + 1
        new = NewSegment(self._store.path, number)
        names = self._store.files(group.segments[0])
        for name in names:
            if name == KEPT_FILE:
                with new.array(name, "int32") as writer:
                    writer.append(self._kept(group, first))
            else:
                self._copy_array(group, name, new, advance if name == VALUES_FILE else lambda _: None)
        kept = sum(count for _, count in self._keys(group)) if KEPT_FILE in names else None
        sums, scale = new.seal(), group.segments[0].scale
        return SegmentRow(
            number,
            first,
            entries,
            scale,
            sums[KEYS_FILE],
            sums[VALUES_FILE],
            kept,
            sums.get(KEPT_FILE),
            sums.get(COUNTS_FILE),
        )

    def _copy_array(self, group: _Group, name: str, new: NewSegment, advance: Advance) -> None:
        """Copy the live stretches of an array, byte for byte."""
        dtype, shape = array_shapes(group.segments[0], self._store.codec)[name]
        with new.array(name, dtype, shape[1:]) as writer:
            for segment in group.segments:
                for piece in self._store.arrays.copy(segment, name, self._local(segment, name)):
                    writer.append(piece)
                    advance(len(piece))

    def _local(self, segment: SegmentRow, name: str) -> Iterator[tuple[int, int]]:
        """Return (first, count) of the live stretches of a segment's array, relative to its begin."""
        if name == VALUES_FILE:
            numbers, begin, count = self._store.entry_numbers, segment.first_entry, segment.entries
        else:
            numbers, begin, count = self._store.key_numbers, self._store.first_key(segment), segment.keys
        for start, size in numbers.stretches(begin, begin + count):
            yield start - begin, size

    def _keys(self, group: _Group) -> Iterator[tuple[int, int]]:
        """Return (first live number, count) of each segment's keys."""
        numbers = self._store.key_numbers
        for segment in group.segments:
            begin = self._store.first_key(segment)
            low, high = numbers.before(begin), numbers.before(begin + segment.keys)
            yield low, high - low

    def _kept(self, group: _Group, first: int) -> NDArray[np.int32]:
        """Return the entries of the new segment that its keys belong to."""
        entries = [self._store.entries_of(torch.arange(low, low + count)).numpy() for low, count in self._keys(group)]
        return (np.concatenate(entries) - first).astype(np.int32)

    def _commit(self, segments: list[SegmentRow], index: IndexRow | None) -> None:
        """Replace the old segments and the index in one transaction."""
        catalog, before = self._catalog, self._store.entry_numbers.before
        with catalog.change() as connection:
            catalog.write_metadata(
                next_segment=self._next, next_document=catalog.next_document(), **{LAYOUT: catalog.layout + 1}
            )
            connection.execute("DELETE FROM segments")
            catalog.put_segments(segments)
            connection.create_function("entry_now", 1, before, deterministic=True)
            connection.create_function("segment_now", 1, lambda old: self._names.get(old, old), deterministic=True)
            connection.execute(
                "UPDATE documents SET first_entry = entry_now(first_entry), segment = segment_now(segment)"
            )
            if not segments:  # documents without entries need a segment; a build drops them too
                connection.execute("DELETE FROM documents")
                drop_fields(connection)
            connection.execute("DELETE FROM removed")
            catalog.put_index(index, [])
