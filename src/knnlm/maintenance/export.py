"""Write a memory as files that other programs read. Knows nothing about what they do with it."""

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
from knnlm.io import sync_folder, translate_os_errors
from knnlm.progress import Advance, Progress, silent

FORMATS = ("parquet",)

FILE_ROWS = 1 << 20

_PARTIAL = ".knnlm-export"  # ends the name of a folder that is being written

_MARKER = ".knnlm-export"  # the file in it that says that it is ours

_PART = re.compile(r"part-\d{5,}\.parquet")

_GROUP_BYTES = 1 << 26  # of keys in a row group, which is what is in memory at a time


@dataclass(frozen=True)
class ExportResult:
    """What an export has written."""

    memory: Path
    out: Path
    files: int
    rows: int
    bytes: int
    seconds: float


def export(
    memory: str | Path,
    out: str | Path,
    *,
    format: str = "parquet",  # noqa: A002  (what the option is called)
    file_rows: int = FILE_ROWS,
    progress: Progress = silent,
) -> ExportResult:
    """Write every row of a memory: key, token, document, source, position; the folder appears complete or not at all.

    Where documents have fields of their records, these are one more column, as JSON.
    Keys are float32 as they are compared: less the offset, and mapped, where the memory has these; a row whose key was
    pruned has none. What was removed from the memory is not there.
    """
    begin, folder = time.perf_counter(), Path(out)
    if format not in FORMATS:
        raise ParameterError(f"Unknown format {format!r}: use {' or '.join(FORMATS)}.")
    if file_rows < 1:
        raise ParameterError(f"file rows must be at least 1, not {file_rows}.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ParameterError(f"{folder} is there already. Choose another --out, or remove it first.")
    _pyarrow()
    with closing(Datastore.open(memory, trust_index=False)) as store:
        partial = folder.with_name(f"{folder.name}{_PARTIAL}")
        with translate_os_errors(partial):
            _begin(partial)
            with progress("exporting", total=store.rows, unit="tokens") as advance:
                files = _Export(store, partial, file_rows).run(advance)
            sync_folder(partial)
            if folder.exists():
                folder.rmdir()
            partial.rename(folder)
            (folder / _MARKER).unlink()
            sync_folder(folder)
            sync_folder(folder.parent)
        size = sum(file.stat().st_size for file in folder.iterdir())
        return ExportResult(Path(memory), folder, files, store.rows, size, time.perf_counter() - begin)


def _begin(partial: Path) -> None:
    """Make the folder to write to, empty; what a stopped export left there is removed, and nothing else."""
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        raise ParameterError(
            f"{partial} is in the way: an export is written there first. Move it, or choose another --out."
        )
    partial.mkdir(parents=True, exist_ok=True)
    names = sorted(file.name for file in partial.iterdir())
    ours = [name for name in names if name == _MARKER or _PART.fullmatch(name)]
    if names and (names != ours or _MARKER not in names):
        raise ParameterError(
            f"{partial} holds what no export has written, and is written to first. Move it, or choose another --out."
        )
    (partial / _MARKER).touch()
    for name in ours:
        if name != _MARKER:
            (partial / name).unlink()


class _Export:
    """Goes through rows and keys side by side; both ascend."""

    def __init__(self, store: Datastore, folder: Path, file_rows: int) -> None:
        self._store, self._folder, self._file_rows = store, folder, file_rows
        self._group = max(1, min(file_rows, _GROUP_BYTES // (4 * store.width)))
        self._counted = store.counts(torch.arange(0)) is not None
        self._fielded = bool(store.catalog.other_fields())
        self._key = 0  # the first that was not written yet

    def run(self, advance: Advance) -> int:
        """Write all files and say how many there are."""
        parquet = _pyarrow()[1]
        schema, documents = self._schema(), _Documents(self._store)
        number = 0
        for first in range(0, max(1, self._store.rows), self._file_rows):
            end = min(first + self._file_rows, self._store.rows)
            with parquet.ParquetWriter(self._folder / f"part-{number:05d}.parquet", schema) as writer:
                for begin in range(first, end, self._group):
                    stop = min(begin + self._group, end)
                    writer.write_table(self._table(begin, stop, documents, schema))
                    advance(stop - begin)
            number += 1
        return number

    def _schema(self) -> Any:
        arrow, store = _pyarrow()[0], self._store
        columns = [
            ("row", arrow.int64()),
            ("token", arrow.int32()),
            ("key", arrow.list_(arrow.float32(), store.width)),
            ("document", arrow.string()),
            ("source", arrow.string()),
            ("position", arrow.int64()),
        ]
        columns += [("count", arrow.float32())] if self._counted else []
        columns += [("fields", arrow.string())] if self._fielded else []
        facts = {
            "model": store.model,
            "window": store.window,
            "offset": store.catalog.get("offset"),
            "map": store.catalog.get("map"),
            "fingerprint": store.fingerprint,
        }
        return arrow.schema(columns, metadata={"knnlm": json.dumps(facts)})

    def _table(self, begin: int, stop: int, documents: _Documents, schema: Any) -> Any:
        """Make the rows begin … stop - 1."""
        arrow, store = _pyarrow()[0], self._store
        rows = torch.arange(begin, stop)
        numbers = self._keys_of(rows)  # (n,) -1 where there is no key
        missing = numbers.numpy() < 0
        flat = store.take(numbers).numpy().reshape(-1)
        ids, sources, fields, positions = documents.of(begin, stop)
        arrays = {
            "row": arrow.array(rows.numpy()),
            "token": arrow.array(store.values(rows).numpy().astype(np.int32)),
            "key": arrow.FixedSizeListArray.from_arrays(
                arrow.array(flat, arrow.float32()), store.width, mask=arrow.array(missing)
            ),
            "document": arrow.array(ids, arrow.string()),
            "source": arrow.array(sources, arrow.string()),
            "position": arrow.array(positions),
        }
        if self._counted and (counts := store.counts(numbers)) is not None:
            arrays["count"] = arrow.array(counts.numpy(), mask=missing)
        if self._fielded:
            arrays["fields"] = arrow.array(fields, arrow.string())
        return arrow.table(arrays, schema=schema)

    def _keys_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Give the numbers of the keys of these rows, which come after those of all rows before."""
        begin, stop = int(rows[0]), int(rows[-1]) + 1
        candidates = torch.arange(self._key, min(self._key + len(rows), self._store.key_count))
        owners = self._store.rows_of(candidates)
        inside = owners < stop
        numbers = torch.full((len(rows),), -1)
        numbers[owners[inside] - begin] = candidates[inside]
        self._key += int(inside.sum())
        return numbers


class _Documents:
    """The documents in the order of their rows, asked for stretch by stretch."""

    def __init__(self, store: Datastore) -> None:
        self._source = store.documents()
        self._next, self._end = 0, 0
        self._current = ("", "", "")

    def of(self, begin: int, stop: int) -> tuple[list[str], list[str], list[str], NDArray[np.int64]]:
        """Give id, source, fields as JSON, and position in its document of every row."""
        texts: list[tuple[str, str, str]] = []
        positions = []
        for first, count, offset in self._stretches(begin, stop):
            texts += [self._current] * count
            positions.append(np.arange(first - offset, first - offset + count))
        ids, sources, fields = ([one[place] for one in texts] for place in range(3))
        return ids, sources, fields, np.concatenate(positions) if positions else np.zeros(0, np.int64)

    def _stretches(self, begin: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Give (first row, rows, first row of its document)."""
        while begin < stop:
            while self._end <= begin:
                document = next(self._source)
                self._next, self._end = self._end, self._end + document.rows
                self._current = (document.id, document.source, json.dumps(dict(document.fields), sort_keys=True))
            count = min(stop, self._end) - begin
            yield begin, count, self._next
            begin += count


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra("To write Parquet", "pyarrow", "parquet") from None
    return pa, parquet
