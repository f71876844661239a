"""Read a text collection once and store its (context vector → next token) pairs. Knows nothing about search.

Documents are gathered until they fill a segment. A segment is written under a temporary name, flushed, renamed, and
then exists from the moment its catalog row is committed. Windows are packed within a segment only, so a build that was
killed and run again from its last finished segment ends with the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from knnlm.corpus import Document
from knnlm.datastore.catalog import FILE, Catalog, SegmentRow, StoredDocument
from knnlm.datastore.keymap import FILE as MAP
from knnlm.datastore.segment import (
    KEY_DTYPES,
    ArrayWriter,
    KeyWriter,
    checksum,
    remove_others,
    sync_folder,
    writing,
)
from knnlm.datastore.store import KEYS, VALUES, Datastore, segment_folder, stored_offset, text_hash
from knnlm.errors import DatastoreBusy, DatastoreError, ModelError, ParameterError
from knnlm.lm import CausalLM, WindowShape
from knnlm.progress import Progress, silent

# Above this, one step of float16 is a whole unit: as much as neighbours differ by in an ordinary dimension.
_LARGE = 1024.0
_CALIBRATION = 2048  # tokens read to see how large the keys of a model are


@dataclass
class _Group:
    """Documents that will make one segment."""

    documents: list[Document] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    rows: int = 0

    def add(self, document: Document, tokens: list[int]) -> None:
        self.documents.append(document)
        self.tokens.append(tokens)
        self.rows += len(tokens)


def build(
    documents: Iterable[Document],
    path: str | Path,
    *,
    lm: CausalLM,
    window: WindowShape | None = None,
    key_dtype: str = "float16",
    segment_rows: int | None = None,
    batch_tokens: int | None = None,
    total: int | None = None,
    progress: Progress = silent,
) -> Datastore:
    """Store every document, resuming an unfinished build of the same text; `total` is its number of characters."""
    if key_dtype not in KEY_DTYPES:
        raise ParameterError(f"Unknown key dtype {key_dtype!r}: use {' or '.join(KEY_DTYPES)}.")
    # A stopped build loses the segment that was begun, so it should take half a minute, not more.
    slow = lm.device.type == "cpu"
    segment_rows = segment_rows if segment_rows is not None else (16_384 if slow else 65_536)
    batch_tokens = batch_tokens if batch_tokens is not None else (1024 if slow else 16_384)
    if segment_rows < 1 or batch_tokens < 1:
        raise ParameterError(f"segment rows ({segment_rows}) and batch tokens ({batch_tokens}) must be at least 1.")
    folder = Path(path)
    check_folder(folder)
    with writer_lock(folder, create=True):
        catalog = _begin(folder, lm, window or lm.window(), key_dtype, segment_rows, batch_tokens)
        try:
            with progress("reading", total=total, unit="characters") as advance:
                for group in _groups(_resume(documents, catalog, advance), lm, segment_rows):
                    _write_segment(folder, catalog, lm, group, advance)
            catalog.put(state="complete")
        finally:
            catalog.close()
    return Datastore.open(folder)


@contextmanager
def writer_lock(folder: Path, *, create: bool = False) -> Iterator[None]:
    """Let one process write at a time; the lock of a dead process is free."""
    if create:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    elif not (folder / FILE).is_file():
        raise DatastoreError(f"{folder} is not a memory: it has no {FILE}. Make one with: knnlm build")
    lock = FileLock(folder / "writer.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise DatastoreBusy(f"Another process is writing to {folder}. Try again when it has finished.") from None
    except OSError as error:
        raise DatastoreError(f"Cannot write to {folder}: {error.strerror or error}.") from None
    try:
        yield
    finally:
        lock.release()


def check_folder(folder: Path) -> None:
    """Refuse a place that holds something else, before anything is put there."""
    if folder.exists() and not folder.is_dir():
        raise DatastoreError(f"{folder} is a file. Choose another --out.")
    ours = {"writer.lock", "catalog.partial", "catalog.partial-journal", MAP, Path(MAP).with_suffix(".partial").name}
    if folder.exists() and not (folder / FILE).exists():
        foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in ours)
        if foreign:
            raise DatastoreError(
                f"{folder} is not empty (it holds {foreign[0]}) and is not a memory. Choose another --out."
            )


def _begin(
    folder: Path, lm: CausalLM, window: WindowShape, key_dtype: str, segment_rows: int, batch_tokens: int
) -> Catalog:
    """Make a new catalog, or open that of an unfinished build with the same settings."""
    settings: dict[str, Any] = {
        "model": lm.identity,
        "window": {"context": window.context, "stride": window.stride},
        "key_dtype": key_dtype,
        "segment_rows": segment_rows,
        "batch_tokens": batch_tokens,
    }
    file = folder / FILE
    if not file.exists():
        return Catalog.create(file, {"state": "building", "offset": None, **settings})
    catalog = Catalog.open(file, write=True)
    if catalog.get("state") == "complete":
        raise DatastoreError(f"{folder} is a finished memory already. Choose another --out, or remove it first.")
    for name, wanted in settings.items():
        found = catalog.get(name)
        if found != wanted:
            raise DatastoreError(
                f"{folder} is an unfinished build with another {name.replace('_', ' ')} "
                f"({_difference(found, wanted)}). Finish it with the same options, or remove it."
            )
    remove_others(folder / "segments", [segment_folder(folder, segment.id) for segment in catalog.segments()])
    return catalog


def _difference(found: Any, wanted: Any) -> str:
    """Say in what two settings differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        name = next(name for name in wanted if found.get(name) != wanted[name])
        return f"{name} {found.get(name)}, now {wanted[name]}"
    return f"{found}, now {wanted}"


def _resume(documents: Iterable[Document], catalog: Catalog, advance: Any) -> Iterator[Document]:
    """Skip the documents that are stored, after checking that they are the same."""
    stored = catalog.documents()
    for document in documents:
        known = next(stored, None)
        if known is None:
            yield document
        elif (known.id, known.sha256) == (document.id, text_hash(document.text)):
            advance(len(document.text))
        else:
            raise DatastoreError(
                f"{catalog.path.parent} is an unfinished build of other text: document {known.number + 1} was "
                f"{known.source}, now it is {document.source} or its text has changed. Give the same text in the "
                "same order, or remove the memory and begin again."
            )
    if (left := next(stored, None)) is not None:
        raise DatastoreError(
            f"{catalog.path.parent} is an unfinished build of more text: it already holds {left.source}, which is not "
            "in the text given now. Give the same text, or remove the memory and begin again."
        )


def _groups(documents: Iterable[Document], lm: CausalLM, segment_rows: int) -> Iterator[_Group]:
    """Tokenise documents and gather whole ones until they fill a segment."""
    group = _Group()
    for document in documents:
        group.add(document, lm.encode(document.text))
        if group.rows >= segment_rows:
            yield group
            group = _Group()
    if group.rows:
        yield group


def _write_segment(folder: Path, catalog: Catalog, lm: CausalLM, group: _Group, advance: Any) -> None:
    """Read one group with the model and commit it as the next segment."""
    segments = catalog.segments()
    number = len(segments)
    first_row = segments[-1].first_row + segments[-1].rows if segments else 0
    window = WindowShape(**catalog.get("window"))
    offset = _calibrate(lm, group, window) if number == 0 else stored_offset(catalog)
    final = segment_folder(folder, number)
    partial = final.with_suffix(".partial")
    with writing(partial):
        partial.mkdir(parents=True)
    batch_tokens = catalog.get("batch_tokens")
    scale = _write_keys(partial / KEYS, lm, group, window, offset, catalog.get("key_dtype"), batch_tokens, advance)
    with ArrayWriter(partial / VALUES, "int32") as values:
        for tokens in group.tokens:
            values.append(torch.tensor(tokens, dtype=torch.int32).numpy())
    with writing(final):
        sync_folder(partial)
        partial.rename(final)
        sync_folder(final.parent)
    row = SegmentRow(number, first_row, group.rows, scale, checksum(final / KEYS), checksum(final / VALUES))
    documents = _rows(group, number, first_row, catalog.document_count())
    facts = {} if offset is None else {"offset": offset.tolist()}
    catalog.add_segment(row, documents, **facts)


def _write_keys(
    path: Path,
    lm: CausalLM,
    group: _Group,
    window: WindowShape,
    offset: Tensor | None,
    dtype: str,
    batch_tokens: int,
    advance: Any,
) -> float:
    """Write the keys of a group and return what they were divided by to stay within the range of the dtype."""
    characters = sum(len(document.text) for document in group.documents)
    done = 0
    with KeyWriter(path, dtype, lm.width) as writer:
        for reading in lm.read(group.tokens, window, batch_tokens=batch_tokens, logits=False):
            keys = reading.keys.cpu()
            if offset is not None:
                keys = keys - offset
            if not math.isfinite(float(keys.abs().max())):
                raise ModelError(
                    f"{lm.name} gives infinite or undefined hidden states at {lm.key_layer.module} "
                    f"(among the tokens of {group.documents[0].source} and after). Try --dtype float32 or another "
                    "--key-layer."
                )
            writer.put_keys(reading.rows.numpy(), keys.numpy())
            before, done = done, done + len(keys)
            advance(characters * done // group.rows - characters * before // group.rows)
    return writer.divisor


def _calibrate(lm: CausalLM, group: _Group, window: WindowShape) -> Tensor | None:
    """Find the mean of the keys where some are too large for fine steps of float16; None where all is well.

    Some models have a few dimensions that are thousands of times larger than the rest and hardly vary. Stored less
    their mean, they take as little of the precision as the others do.
    """
    sample: list[list[int]] = []
    for tokens in group.tokens:
        sample.append(tokens[: _CALIBRATION - sum(map(len, sample))])
        if sum(map(len, sample)) >= _CALIBRATION:
            break
    keys = torch.cat([reading.keys.cpu() for reading in lm.read(sample, window, logits=False)])
    return keys.mean(0) if float(keys.abs().max()) > _LARGE else None


def _rows(group: _Group, segment: int, first_row: int, number: int) -> Iterator[StoredDocument]:
    """Give the catalog rows of a group's documents."""
    for document, tokens in zip(group.documents, group.tokens, strict=True):
        yield StoredDocument(
            number, document.id, document.source, segment, first_row, len(tokens), text_hash(document.text)
        )
        number += 1
        first_row += len(tokens)
