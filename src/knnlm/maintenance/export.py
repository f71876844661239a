"""Export a store as Parquet files."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from knnlm.datastore.store import Datastore
from knnlm.errors import MissingExtra, ParameterError
from knnlm.io import commit_folder, sync_folder, translate_os_errors
from knnlm.progress import Advance, Progress, silent

FORMATS = ("parquet",)
FILE_ENTRIES = 1 << 20

_PARTIAL_SUFFIX = ".knnlm-export"  # of the folder that is being written
_MARKER = ".knnlm-export"  # the file in it by which a later export recognises the folder
_FILE_NAME = re.compile(r"part-\d{5,}\.parquet")
_GROUP_BYTES = 1 << 26  # of keys in a row group: what is held in RAM at a time


@dataclass(frozen=True)
class ExportResult:
    """The result of an export."""

    store: Path
    out: Path
    files: int
    entries: int
    bytes: int
    seconds: float


def export(
    path: str | Path,
    out: str | Path,
    *,
    format: str = "parquet",  # noqa: A002  (the option's name)
    file_entries: int = FILE_ENTRIES,
    progress: Progress = silent,
) -> ExportResult:
    """Write every entry of a store: key, token, document, source, position. The folder appears complete or not at all.

    Where documents have metadata fields, these are one more column, as JSON. Keys are float32 as they are compared:
    with the offset subtracted and mapped, where the store has an offset or a key map. An entry whose key was pruned has
    no key. Removed documents are left out.
    """
    begin, folder = time.perf_counter(), Path(out)
    if format not in FORMATS:
        raise ParameterError(f"Unknown format {format!r}: use {' or '.join(FORMATS)}.")
    if file_entries < 1:
        raise ParameterError(f"file_entries must be at least 1, not {file_entries}.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ParameterError(f"{folder}: already exists. Choose another --out, or remove it first.")
    _import_pyarrow()
    with closing(Datastore.open(path, trust_index=False)) as store:
        partial = folder.with_name(f"{folder.name}{_PARTIAL_SUFFIX}")
        with translate_os_errors(partial):
            _prepare(partial)
            with progress("exporting", total=store.entry_count, unit="tokens") as advance:
                files = _Export(store, partial, file_entries).run(advance)
            commit_folder(partial, folder)  # a rename replaces an empty folder
            (folder / _MARKER).unlink()
            sync_folder(folder)
        size = sum(file.stat().st_size for file in folder.iterdir())
        return ExportResult(Path(path), folder, files, store.entry_count, size, time.perf_counter() - begin)


def _prepare(partial: Path) -> None:
    """Create the folder to write to, or empty that of an interrupted export; any other folder is refused."""
    advice = "An export is written there first. Move it, or choose another --out."
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        raise ParameterError(f"{partial}: not a folder. {advice}")
    partial.mkdir(parents=True, exist_ok=True)
    names = sorted(file.name for file in partial.iterdir())
    exported = [name for name in names if name == _MARKER or _FILE_NAME.fullmatch(name)]
    if names and (names != exported or _MARKER not in names):
        raise ParameterError(f"{partial}: contains files that no export wrote. {advice}")
    (partial / _MARKER).touch()
    for name in exported:
        if name != _MARKER:
            (partial / name).unlink()


class _Export:
    """Write entries and keys side by side; both are in ascending order."""

    def __init__(self, store: Datastore, folder: Path, file_entries: int) -> None:
        self._store, self._folder, self._file_entries = store, folder, file_entries
        self._group = max(1, min(file_entries, _GROUP_BYTES // (4 * store.width)))
        self._has_counts = store.counts(torch.arange(0)) is not None
        self._has_fields = bool(store.catalog.other_fields())
        self._next_key = 0

    def run(self, advance: Advance) -> int:
        """Write all files and return their number."""
        parquet = _import_pyarrow()[1]
        schema, documents = self._schema(), _Documents(self._store)
        number = 0
        for first in range(0, max(1, self._store.entry_count), self._file_entries):
            end = min(first + self._file_entries, self._store.entry_count)
            with parquet.ParquetWriter(self._folder / f"part-{number:05d}.parquet", schema) as writer:
                for begin in range(first, end, self._group):
                    stop = min(begin + self._group, end)
                    writer.write_table(self._table(begin, stop, documents, schema))
                    advance(stop - begin)
            number += 1
        return number

    def _schema(self) -> Any:
        arrow, store = _import_pyarrow()[0], self._store
        columns = [
            ("entry", arrow.int64()),
            ("token", arrow.int32()),
            ("key", arrow.list_(arrow.float32(), store.width)),
            ("document", arrow.string()),
            ("source", arrow.string()),
            ("position", arrow.int64()),
        ]
        columns += [("count", arrow.float32())] if self._has_counts else []
        columns += [("fields", arrow.string())] if self._has_fields else []
        columns += [("source_text", arrow.string())] if store.has_pairs else []
        metadata = {
            "model": store.model,
            "window": store.window,
            "offset": store.catalog.get("offset"),
            "map": store.catalog.get("map"),
            "fingerprint": store.fingerprint,
        }
        return arrow.schema(columns, metadata={"knnlm": json.dumps(metadata)})

    def _table(self, begin: int, stop: int, documents: _Documents, schema: Any) -> Any:
        """Return a table of the entries begin … stop - 1."""
        arrow, store = _import_pyarrow()[0], self._store
        entries = torch.arange(begin, stop)
        keys = self._key_numbers(entries)  # (n,) -1 where there is no key
        missing = keys.numpy() < 0
        flat = store.take(keys).numpy().reshape(-1)
        (ids, sources, fields, source_texts), positions = documents.columns(begin, stop)
        arrays = {
            "entry": arrow.array(entries.numpy()),
            "token": arrow.array(store.values(entries).numpy().astype(np.int32)),
            "key": arrow.FixedSizeListArray.from_arrays(
                arrow.array(flat, arrow.float32()), store.width, mask=arrow.array(missing)
            ),
            "document": arrow.array(ids, arrow.string()),
            "source": arrow.array(sources, arrow.string()),
            "position": arrow.array(positions),
        }
        if self._has_counts and (counts := store.counts(keys)) is not None:
            arrays["count"] = arrow.array(counts.numpy(), mask=missing)
        if self._has_fields:
            arrays["fields"] = arrow.array(fields, arrow.string())
        if store.has_pairs:
            arrays["source_text"] = arrow.array(source_texts, arrow.string())
        return arrow.table(arrays, schema=schema)

    def _key_numbers(self, entries: torch.Tensor) -> torch.Tensor:
        """Return the key numbers of entries, which must follow those of the call before."""
        begin, stop = int(entries[0]), int(entries[-1]) + 1
        candidates = torch.arange(self._next_key, min(self._next_key + len(entries), self._store.key_count))
        owners = self._store.entries_of(candidates)
        inside = owners < stop
        numbers = torch.full((len(entries),), -1)
        numbers[owners[inside] - begin] = candidates[inside]
        self._next_key += int(inside.sum())
        return numbers


class _Documents:
    """Document columns of consecutive ranges of entries."""

    def __init__(self, store: Datastore) -> None:
        self._documents = store.documents()
        self._begin, self._end = 0, 0  # the entries of the current document
        self._current: tuple[str | None, ...] = ("", "", "", None)

    def columns(self, begin: int, stop: int) -> tuple[list[list[str | None]], NDArray[np.int64]]:
        """Return id, source, fields as JSON and source text, and position in the document, of every entry."""
        texts: list[tuple[str | None, ...]] = []
        positions = []
        for first, count, document_begin in self._ranges(begin, stop):
            texts += [self._current] * count
            positions.append(np.arange(first - document_begin, first - document_begin + count))
        columns = [[text[column] for text in texts] for column in range(4)]
        return columns, np.concatenate(positions) if positions else np.zeros(0, np.int64)

    def _ranges(self, begin: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first entry, entries, first entry of the document) for each document."""
        while begin < stop:
            while self._end <= begin:
                document = next(self._documents)
                self._begin, self._end = self._end, self._end + document.entries
                fields = json.dumps(dict(document.fields), sort_keys=True)
                self._current = (document.id, document.source, fields, document.source_text)
            count = min(stop, self._end) - begin
            yield begin, count, self._begin
            begin += count


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra("To write Parquet", "pyarrow", "parquet") from None
    return pa, parquet
