"""The staging log: segments of an addition that are on disk and not yet committed.

Readers must see all documents of an addition or none. So each segment is recorded in the file `staging.log` when it is
on disk, and all of them enter the catalog in one transaction at the end. After an interruption, the next addition
claims those of its documents that are staged instead of reading them again; unclaimed ones are dropped. Other writers
leave the log unchanged, except a compaction, which drops it.

A line of the file is a JSON object after its SHA-256. The first invalid line and all lines after it are ignored.
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
from knnlm.datastore.schema import (
    CODEC_FILE,
    KEYS_FILE,
    MAP_FILE,
    STAGING_FILE,
    UNENCODED_FILE,
    VALUES_FILE,
    RemovedRow,
    SegmentRow,
    StoredDocument,
    segment_folder,
)
from knnlm.datastore.validation import parse_row
from knnlm.errors import KnnlmError
from knnlm.io import checksum, sync_folder, translate_os_errors

_KEY_METADATA = ("model", "window", "keys", "key_dtype", "offset", "codec", "map")  # defines the meaning of keys
_FIRST_KEYS_METADATA = ("offset", "compile", "codec", "map")  # computed from the first keys of a store
_MAX_LINE_BYTES = 1 << 28
_DIGEST_LENGTH = 64
_INVALID_LINE_ERRORS = (
    OSError,
    KnnlmError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    OverflowError,
)


class StagedAddition:
    """The staged segments of an addition on top of a catalog: a `SegmentSink`."""

    def __init__(self, folder: Path, catalog: Catalog) -> None:
        self.path = catalog.path
        self._folder, self._catalog = folder, catalog
        self._file = folder / STAGING_FILE
        self._size = 0  # of the valid lines of the file
        self._key_fingerprint = hash_metadata({name: catalog.get(name) for name in _KEY_METADATA})[:16]
        self._metadata: dict[str, Any] = {}
        self._segments: dict[int, SegmentRow] = {}
        self._documents: dict[int, list[StoredDocument]] = {}  # first_entry is relative to the segment
        self._places: dict[str, tuple[int, int]] = {}  # by hash of the text: segment, position in it
        self._claimed: set[tuple[int, int]] = set()
        if self._file.is_file():
            self._load()

    @property
    def folders(self) -> list[Path]:
        """The folders of the staged segments."""
        return [segment_folder(self._folder, number) for number in self._segments]

    @property
    def document_count(self) -> int:
        """Number of staged documents."""
        return sum(map(len, self._documents.values()))

    @property
    def claimed(self) -> list[SegmentRow]:
        """The segments with at least one claimed or new document."""
        numbers = dict.fromkeys(number for number, _ in sorted(self._claimed))
        return [self._segments[number] for number in numbers]

    def get(self, key: str) -> Any:
        """Return one value of the metadata that the store will have after the commit."""
        return self._metadata[key] if key in self._metadata else self._catalog.get(key)

    def segments(self) -> list[SegmentRow]:
        """Return the segments of the catalog and the claimed ones."""
        found = self._catalog.segments()
        for segment in self.claimed:
            found.append(replace(segment, first_entry=found[-1].first_entry + found[-1].entries if found else 0))
        return found

    def next_segment(self) -> int:
        """Return the number of the next segment."""
        return max(self._catalog.next_segment(), *(number + 1 for number in self._segments), 0)

    def next_document(self) -> int:
        """Return the number of the next document; staged documents get their numbers at the commit."""
        return self._catalog.next_document()

    def add_segment(self, segment: SegmentRow, documents: Iterable[StoredDocument], **metadata: Any) -> None:
        """Record a segment that is on disk."""
        relative = [replace(one, first_entry=one.first_entry - segment.first_entry) for one in documents]
        names = ("id", "entries", "scale", "keys_sha256", "values_sha256")
        kept = {name: getattr(segment, name) for name in names}
        listed = [
            [one.id, one.source, one.entries, one.sha256, dict(one.fields), *filter(None, [one.source_text])]
            for one in relative
        ]
        self._append({"segment": kept, "documents": listed, "metadata": metadata})
        self._register(replace(segment, first_entry=0), relative, metadata)
        self._claimed |= {(segment.id, place) for place in range(len(relative))}

    def replace_keys(self, segments: Iterable[SegmentRow], **metadata: Any) -> None:
        """Record new key files of segments; other staged segments are dropped."""
        changed = [[one.id, one.scale, one.keys_sha256] for one in segments]
        self._append({"replaced": changed, "metadata": metadata})
        self._update_keys(changed, metadata)

    def claim(self, document: Document, sha256: str) -> bool:
        """Claim a staged document under its present id and source; return False if it is not staged."""
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
        if any(not _has_checksum(self._folder / file, sha256) for file, sha256 in sums.items()):
            self.drop()
        keys = UNENCODED_FILE if self.get("keys") is not None and self.get("codec") is None else KEYS_FILE
        bad = []
        for segment in self._segments.values():
            folder = segment_folder(self._folder, segment.id)
            pairs = ((keys, segment.keys_sha256), (VALUES_FILE, segment.values_sha256))
            if not all(_has_checksum(folder / name, sha256) for name, sha256 in pairs):
                bad.append(segment.id)
            elif keys == KEYS_FILE and (folder / UNENCODED_FILE).exists():
                with translate_os_errors(folder):
                    (folder / UNENCODED_FILE).unlink()  # left by a process killed after the codec was chosen
        self._discard(bad)
        if not self._segments:
            self.drop()  # with the metadata, which is computed again

    def commit(self) -> tuple[int, int]:
        """Commit the claimed documents in one transaction and drop the rest; return how many documents and entries."""
        taken = self.claimed
        if taken:
            with self._catalog.change():
                self._put(taken)
        entries = sum(self._documents[segment][place].entries for segment, place in self._claimed)
        count = len(self._claimed)
        self._clear(keep={segment.id for segment in taken})
        return count, entries

    def drop(self) -> None:
        """Drop everything that is staged. The caller holds the writer lock."""
        self._clear(keep=set())

    def remove_if_empty(self) -> None:
        """Remove the file if nothing is staged: it may contain names of removed documents."""
        if not self._segments and self._file.is_file():
            self._clear(keep=set())

    def _put(self, taken: list[SegmentRow]) -> None:
        """Write segments and documents within a transaction, with unclaimed documents as removed ones."""
        catalog, before = self._catalog, self._catalog.segments()
        entry, number = before[-1].first_entry + before[-1].entries if before else 0, catalog.next_document()
        catalog.write_metadata(**self._metadata)
        for segment in taken:
            there, gone = list[StoredDocument](), list[RemovedRow]()
            for place, one in enumerate(self._documents[segment.id]):
                first = entry + one.first_entry
                if (segment.id, place) in self._claimed:
                    there.append(replace(one, number=number, first_entry=first))
                else:
                    gone.append(RemovedRow(number, segment.id, first, one.entries))
                number += 1
            catalog.put_segments([replace(segment, first_entry=entry)])
            catalog.put_documents(there)
            catalog.put_removed(gone)
            entry += segment.entries
        catalog.write_metadata(next_document=number)

    def _register(self, segment: SegmentRow, documents: list[StoredDocument], metadata: dict[str, Any]) -> None:
        self._metadata |= metadata
        self._segments[segment.id], self._documents[segment.id] = segment, documents
        self._places |= {one.sha256: (segment.id, place) for place, one in enumerate(documents)}

    def _update_keys(self, changed: Iterable[Any], metadata: dict[str, Any]) -> None:
        self._metadata |= metadata
        sums = {number: (scale, sha256) for number, scale, sha256 in changed}
        self._discard([number for number in self._segments if number not in sums])
        for number in [number for number in sums if number in self._segments]:
            scale, sha256 = sums[number]
            self._segments[number] = replace(self._segments[number], scale=scale, keys_sha256=sha256)

    def _discard(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            del self._segments[number]
            for one in self._documents.pop(number):
                if self._places.get(one.sha256, (number, 0))[0] == number:
                    self._places.pop(one.sha256, None)
        self._claimed = {place for place in self._claimed if place[0] in self._segments}

    def _append(self, entry: dict[str, Any]) -> None:
        """Write a line after the last valid one, and flush it to disk."""
        text = json.dumps({"key_fingerprint": self._key_fingerprint, **entry}, sort_keys=True).encode()
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
        """Read the valid lines, without the segments that have been committed."""
        known = {segment.id for segment in self._catalog.segments()}
        with suppress(*_INVALID_LINE_ERRORS), self._file.open("rb") as file:
            for line in _lines(file):
                self._read_line(json.loads(line[_DIGEST_LENGTH + 1 :]))
                self._size += len(line)
        self._discard([number for number in self._segments if number in known])

    def _read_line(self, entry: dict[str, Any]) -> None:
        """Apply one line; raise one of `_INVALID_LINE_ERRORS` if it is invalid."""
        metadata = dict(entry["metadata"])
        if entry["key_fingerprint"] != self._key_fingerprint or set(metadata) - set(_FIRST_KEYS_METADATA):
            raise ValueError("the line belongs to another store")
        if not all(isinstance(metadata[name], dict) for name in ("codec", "map") if name in metadata):
            raise ValueError("invalid codec or map")
        if "replaced" in entry:
            changed = [(int(number), float(scale), str(sha256)) for number, scale, sha256 in entry["replaced"]]
            self._update_keys(changed, metadata)
            return
        about = entry["segment"]
        values = (about["id"], 0, about["entries"], float(about["scale"]), about["keys_sha256"], about["values_sha256"])
        segment = parse_row(SegmentRow, values, self._file)
        documents, total = list[StoredDocument](), 0
        for name, source, entries, sha256, fields, *source_text in entry["documents"]:
            one = (0, name, source, segment.id, total, entries, sha256, check_fields(fields), *source_text)
            documents.append(parse_row(StoredDocument, one, self._file))
            total += entries
        if total != segment.entries or total < 1 or not 0 < segment.scale < math.inf or segment.id in self._segments:
            raise ValueError("the entries of the documents do not add up to those of the segment")
        self._register(segment, documents, metadata)

    def _clear(self, *, keep: set[int]) -> None:
        """Remove the log and its segments, except `keep`."""
        # First the log: every writer deletes segments that are not listed anywhere.
        folders = [segment_folder(self._folder, number) for number in self._segments if number not in keep]
        with translate_os_errors(self._file):
            if self._file.is_file():
                self._file.unlink()
                sync_folder(self._folder)
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
        self._discard(list(self._segments))
        self._metadata, self._size = {}, 0


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines before the first invalid one."""
    while (line := file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):
        if line[:_DIGEST_LENGTH] != hashlib.sha256(line[_DIGEST_LENGTH + 1 : -1]).hexdigest().encode():
            return
        yield line


def _has_checksum(path: Path, sha256: Any) -> bool:
    return path.is_file() and checksum(path) == sha256
