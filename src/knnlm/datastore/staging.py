"""What an addition has finished and not yet committed.

Readers must see all documents of an addition or none. So its segments are noted in the file `staging.log`, each when it
is on disk, and enter the catalog in one transaction at the end. Where the process was stopped before that, the next
addition goes through the documents that it is given and claims those that are pending instead of reading them again;
what is not claimed is dropped. Any other writer leaves all this as it is, but a compaction drops it.

A line of the file is the SHA-256 of its rest, and that is JSON. The first one that is not sound, and all behind it,
count for nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from knnlm.corpus import Document
from knnlm.datastore.catalog import Catalog, check_fields
from knnlm.datastore.integrity import hash_metadata
from knnlm.datastore.paths import (
    CODEC_FILE,
    KEYS_FILE,
    MAP_FILE,
    STAGING_FILE,
    UNENCODED_FILE,
    VALUES_FILE,
    segment_folder,
)
from knnlm.datastore.schema import RemovedRow, SegmentRow, StoredDocument
from knnlm.datastore.validation import typed
from knnlm.errors import KnnlmError
from knnlm.io import checksum, sync_folder, translate_os_errors

_LIKE = ("model", "window", "keys", "key_dtype", "offset", "codec", "map")  # what keys mean: metadata of the catalog

_METADATA = ("offset", "compile", "codec", "map")  # that the first keys of a store decide

_LONGEST = 1 << 28  # bytes of a line

_DIGEST = 64

# What reading a line of no sense may come to: it and all that follows count for nothing.
_SENSELESS = (OSError, KnnlmError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)


class StagedAddition:
    """The segments that are on disk and not committed, on top of a catalog: the `SegmentSink` of an addition."""

    def __init__(self, folder: Path, catalog: Catalog) -> None:
        self.path = catalog.path
        self._folder, self._catalog = folder, catalog
        self._file = folder / STAGING_FILE
        self._size = 0  # of what is sound of the file
        self._like = hash_metadata({name: catalog.get(name) for name in _LIKE})[:16]
        self._metadata: dict[str, Any] = {}
        self._segments: dict[int, SegmentRow] = {}
        self._documents: dict[int, list[StoredDocument]] = {}  # rows are counted from the segment's first
        self._places: dict[str, tuple[int, int]] = {}  # by hash of the text: segment, and which of its documents
        self._claimed: set[tuple[int, int]] = set()
        if self._file.is_file():
            self._load()

    @property
    def folders(self) -> list[Path]:
        """Where the segments lie."""
        return [segment_folder(self._folder, number) for number in self._segments]

    @property
    def document_count(self) -> int:
        """How many documents are pending."""
        return sum(map(len, self._documents.values()))

    @property
    def claimed(self) -> list[SegmentRow]:
        """The segments of which a document at least was claimed, or was read just now."""
        numbers = dict.fromkeys(number for number, _ in sorted(self._claimed))
        return [self._segments[number] for number in numbers]

    def get(self, key: str) -> Any:
        """Read one fact about the store, as it will be."""
        return self._metadata[key] if key in self._metadata else self._catalog.get(key)

    def segments(self) -> list[SegmentRow]:
        """List the segments, those of the catalog and those that will be there."""
        found = self._catalog.segments()
        for segment in self.claimed:
            found.append(replace(segment, first_entry=found[-1].first_entry + found[-1].entries if found else 0))
        return found

    def next_segment(self) -> int:
        """Return the number of the next segment."""
        return max(self._catalog.next_segment(), *(number + 1 for number in self._segments), 0)

    def next_document(self) -> int:
        """Return the number of the next document; those that are pending get theirs when they are committed."""
        return self._catalog.next_document()

    def add_segment(self, segment: SegmentRow, documents: Iterable[StoredDocument], **metadata: Any) -> None:
        """Note a segment that is on disk."""
        given = [replace(one, first_entry=one.first_entry - segment.first_entry) for one in documents]
        names = ("id", "entries", "scale", "keys_sha256", "values_sha256")
        kept = {name: getattr(segment, name) for name in names}
        listed = [[one.id, one.source, one.entries, one.sha256, dict(one.fields)] for one in given]
        self._append({"segment": kept, "documents": listed, "metadata": metadata})
        self._enter(replace(segment, first_entry=0), given, metadata)
        self._claimed |= {(segment.id, place) for place in range(len(given))}

    def replace_keys(self, segments: Iterable[SegmentRow], **metadata: Any) -> None:
        """Note that segments have other files of keys now; pending ones that are not among them are dropped."""
        changed = [[one.id, one.scale, one.keys_sha256] for one in segments]
        self._append({"replaced": changed, "metadata": metadata})
        self._exchange(changed, metadata)

    def claim(self, document: Document, sha256: str) -> bool:
        """Take over a document that is pending, under the name that it has now; False where it is not."""
        place = self._places.get(sha256)
        if place is None or place in self._claimed:
            return False
        segment, number = place
        own = self._documents[segment]
        own[number] = replace(own[number], id=document.id, source=document.source, fields=document.fields)
        self._claimed.add(place)
        return True

    def check(self) -> None:
        """Drop segments whose files have a checksum mismatch, before documents are claimed."""
        beside = (("codec", CODEC_FILE), ("map", MAP_FILE))
        sums = {file: self._metadata[name].get("sha256") for name, file in beside if name in self._metadata}
        if any(not _has_sum(self._folder / file, sha256) for file, sha256 in sums.items()):
            self.drop()
        keys = UNENCODED_FILE if self.get("keys") is not None and self.get("codec") is None else KEYS_FILE
        bad = []
        for segment in self._segments.values():
            folder = segment_folder(self._folder, segment.id)
            pairs = ((keys, segment.keys_sha256), (VALUES_FILE, segment.values_sha256))
            if not all(_has_sum(folder / name, sha256) for name, sha256 in pairs):
                bad.append(segment.id)
            elif keys == KEYS_FILE and (folder / UNENCODED_FILE).exists():
                with translate_os_errors(folder):
                    (folder / UNENCODED_FILE).unlink()  # left by a process killed after the codec was chosen
        self._forget(bad)
        if not self._segments:
            self.drop()  # also the metadata, which are to be decided again

    def commit(self) -> tuple[int, int]:
        """Let all that was claimed exist, in one transaction, and drop the rest; say how many documents and rows."""
        taken = self.claimed
        if taken:
            with self._catalog.change():
                self._put(taken)
        rows = sum(self._documents[segment][place].entries for segment, place in self._claimed)
        count = len(self._claimed)
        self._clear(but={segment.id for segment in taken})
        return count, rows

    def drop(self) -> None:
        """Drop everything that is staged. The caller holds the writer lock."""
        self._clear(but=set())

    def tidy(self) -> None:
        """Remove the file where nothing of it is pending: the names in it may be of documents that are gone."""
        if not self._segments and self._file.is_file():
            self._clear(but=set())

    def _put(self, taken: list[SegmentRow]) -> None:
        """Write segments and documents within a change; the rows of what was not claimed are noted as removed."""
        catalog, before = self._catalog, self._catalog.segments()
        row, number = before[-1].first_entry + before[-1].entries if before else 0, catalog.next_document()
        catalog.put_within(**self._metadata)
        for segment in taken:
            there, gone = list[StoredDocument](), list[RemovedRow]()
            for place, one in enumerate(self._documents[segment.id]):
                first = row + one.first_entry
                if (segment.id, place) in self._claimed:
                    there.append(replace(one, number=number, first_entry=first))
                else:
                    gone.append(RemovedRow(number, segment.id, first, one.entries))
                number += 1
            catalog.put_segments([replace(segment, first_entry=row)])
            catalog.put_documents(there)
            catalog.put_removed(gone)
            row += segment.entries
        catalog.put_within(next_document=number)

    def _enter(self, segment: SegmentRow, documents: list[StoredDocument], metadata: dict[str, Any]) -> None:
        self._metadata |= metadata
        self._segments[segment.id], self._documents[segment.id] = segment, documents
        self._places |= {one.sha256: (segment.id, place) for place, one in enumerate(documents)}

    def _exchange(self, changed: Iterable[Any], metadata: dict[str, Any]) -> None:
        self._metadata |= metadata
        sums = {number: (scale, sha256) for number, scale, sha256 in changed}
        self._forget([number for number in self._segments if number not in sums])
        for number in [number for number in sums if number in self._segments]:
            scale, sha256 = sums[number]
            self._segments[number] = replace(self._segments[number], scale=scale, keys_sha256=sha256)

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            del self._segments[number]
            for one in self._documents.pop(number):
                if self._places.get(one.sha256, (number, 0))[0] == number:
                    self._places.pop(one.sha256, None)
        self._claimed = {place for place in self._claimed if place[0] in self._segments}

    def _append(self, entry: dict[str, Any]) -> None:
        """Write a line, so that it is on disk, behind the last sound one."""
        text = json.dumps({"like": self._like, **entry}, sort_keys=True).encode()
        line = hashlib.sha256(text).hexdigest().encode() + b" " + text + b"\n"
        with translate_os_errors(self._file):
            new = not self._file.exists()
            with self._file.open("wb" if new else "rb+") as file:
                file.truncate(self._size)
                file.seek(self._size)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            if new:
                sync_folder(self._folder)
        self._size += len(line)

    def _load(self) -> None:
        """Read what is sound of the file; segments that have been committed since are no longer pending."""
        known = {segment.id for segment in self._catalog.segments()}
        with suppress(*_SENSELESS), self._file.open("rb") as file:
            for line in _lines(file):
                self._take(json.loads(line[_DIGEST + 1 :]))
                self._size += len(line)
        self._forget([number for number in self._segments if number in known])

    def _take(self, entry: dict[str, Any]) -> None:
        """Take one line in; raises whatever it may where the line is of no sense."""
        metadata = dict(entry["metadata"])
        if entry["like"] != self._like or set(metadata) - set(_METADATA):
            raise ValueError("of another store")
        if not all(isinstance(metadata[name], dict) for name in ("codec", "map") if name in metadata):
            raise ValueError("no codec")
        if "replaced" in entry:
            changed = [(int(number), float(scale), str(sha256)) for number, scale, sha256 in entry["replaced"]]
            self._exchange(changed, metadata)
            return
        about = entry["segment"]
        values = (about["id"], 0, about["entries"], float(about["scale"]), about["keys_sha256"], about["values_sha256"])
        segment = typed(SegmentRow, values, self._file)
        documents, row = list[StoredDocument](), 0
        for name, source, rows, sha256, fields in entry["documents"]:
            one = (0, name, source, segment.id, row, rows, sha256)
            documents.append(replace(typed(StoredDocument, one, self._file), fields=check_fields(fields)))
            row += rows
        if row != segment.entries or row < 1 or not 0 < segment.scale < math.inf or segment.id in self._segments:
            raise ValueError("rows that do not fit")
        self._enter(segment, documents, metadata)

    def _clear(self, *, but: set[int]) -> None:
        """Remove the file first: segments that nothing names are garbage to everybody."""
        folders = [segment_folder(self._folder, number) for number in self._segments if number not in but]
        with translate_os_errors(self._file):
            if self._file.is_file():
                self._file.unlink()
                sync_folder(self._folder)
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
        self._forget(list(self._segments))
        self._metadata, self._size = {}, 0


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Return the lines up to the first that is not sound."""
    while (line := file.readline(_LONGEST)).endswith(b"\n"):
        if line[:_DIGEST] != hashlib.sha256(line[_DIGEST + 1 : -1]).hexdigest().encode():
            return
        yield line


def _has_sum(path: Path, sha256: Any) -> bool:
    return path.is_file() and checksum(path) == sha256
