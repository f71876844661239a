"""Group documents into batches, run a model over them and commit each batch as a segment.

A segment is written under a temporary name, flushed and renamed; it exists from the moment its catalog row is
committed. Windows are packed within a segment only, so a build that was killed and resumed after its last finished
segment ends with the same bytes. On a GPU, segments are written in threads while the model continues, and are committed
in order when they are on disk.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnlm.corpus import Document, DocumentMeter
from knnlm.datastore.catalog import SegmentSink
from knnlm.datastore.codecs import Plain
from knnlm.datastore.encoder import DeferredEncoder
from knnlm.datastore.schema import VALUES_FILE, SegmentRow, StoredDocument, segment_folder
from knnlm.datastore.segments import ArrayWriter
from knnlm.datastore.shards import CALIBRATED
from knnlm.datastore.store import next_segment, stored_offset, text_hash
from knnlm.errors import DatastoreError, ModelError
from knnlm.ingest.pipeline import SegmentWriter, Tokenised, WrittenSegment, collect_keys, free_bytes, is_pipelined
from knnlm.io import checksum, commit_folder, create_partial_folder
from knnlm.lm.causal import CausalLM
from knnlm.lm.compile import CompileStatus, compiled
from knnlm.lm.windows import WindowShape, first_tokens
from knnlm.progress import Advance

_MAX_PENDING_SEGMENTS = 3  # that are being written while the model continues
_MIN_COMPILED_TOKENS = 15_000_000  # compiling takes ten seconds, and saves 0.7 per million tokens in full windows

# Above this, one step of float16 is a whole unit: as much as neighbours differ by in an ordinary dimension.
_MAX_PRECISE_KEY = 1024.0
_FIRST_SAMPLE, _CALIBRATION_SAMPLE = 256, 2048  # tokens; the second is read only if the first has large keys

_BATCH_TOKENS = {"cpu": 1024, "cuda": 65_536}  # on a GPU, for a model of this width; fewer for a wider one
_OTHER_BATCH_TOKENS, _MIN_BATCH_TOKENS, _BATCH_WIDTH = 16_384, 4096, 576


def document_hash(document: Document) -> str:
    """Return the SHA-256 by which a document is recognised."""
    return text_hash(document.text, document.source_text)


def default_batch_tokens(lm: CausalLM) -> int:
    """Return the tokens of a batch: as many as keep the device busy and fit beside the keys."""
    tokens = _BATCH_TOKENS.get(lm.device.type, _OTHER_BATCH_TOKENS)
    return tokens if lm.device.type == "cpu" else max(_MIN_BATCH_TOKENS, min(tokens, tokens * _BATCH_WIDTH // lm.width))


@dataclass
class DocumentBatch:
    """Tokenised documents that will become one segment."""

    documents: list[Document] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    entries: int = 0  # one for each token
    size: int = 0  # bytes of the input

    def add(self, document: Document, tokens: list[int]) -> None:
        """Append a document."""
        self.documents.append(document)
        self.tokens.append(tokens)
        self.entries += len(tokens)

    def sample(self, count: int) -> list[Sequence[int]]:
        """Return the tokens of the first documents, at most `count` in all."""
        sample: list[Sequence[int]] = []
        for tokens in self.tokens:
            sample.append(first_tokens(tokens, count))
            count -= len(sample[-1])
            if count <= 0:
                break
        return sample

    def full_windows(self, shape: WindowShape) -> int:
        """Return the number of windows of the full context length."""
        lengths = (len(tokens) for tokens in self.tokens if len(tokens) >= shape.context)
        return sum((length - shape.context) // shape.stride + 1 for length in lengths)

    def advance_bytes(self, advance: Advance) -> Advance:
        """Return a callback that takes a number of entries and advances by the bytes they came from."""
        done, size = 0, self.size

        def advance_entries(count: int) -> None:
            nonlocal done
            before, done = done, done + count
            advance(size * done // self.entries - size * before // self.entries)

        return advance_entries

    def stored(self, segment: int, *, first_entry: int, number: int) -> Iterator[StoredDocument]:
        """Yield the catalog entries of the documents."""
        for document, tokens in zip(self.documents, self.tokens, strict=True):
            yield StoredDocument(
                number,
                document.id,
                document.source,
                segment,
                first_entry,
                len(tokens),
                document_hash(document),
                document.fields,
                document.source_text,
            )
            number += 1
            first_entry += len(tokens)


def batch_documents(tokenised: Iterable[Tokenised], entries: int) -> Iterator[DocumentBatch]:
    """Group whole documents into batches of at least `entries` tokens, except the last."""
    batch = DocumentBatch()
    for document, tokens in tokenised:
        batch.add(document, tokens)
        if batch.entries >= entries:
            yield batch
            batch = DocumentBatch()
    if batch.entries:
        yield batch


@dataclass(frozen=True)
class _Segment:
    """A batch and its place in the store."""

    batch: DocumentBatch
    number: int
    first_entry: int


class SegmentBuilder:
    """Reads one batch after another with the model and commits each as the next segment."""

    def __init__(
        self,
        folder: Path,
        catalog: SegmentSink,
        lm: CausalLM,
        encoder: DeferredEncoder,
        source: DocumentMeter,
        advance: Advance,
        *,
        compile: bool | None,  # noqa: A002
        keep_on_device: bool,
    ) -> None:
        self._folder, self._catalog, self._lm, self._advance = folder, catalog, lm, advance
        self._compile, self._source, self._encoder = compile, source, encoder
        self._window = WindowShape(**catalog.get("window"))
        self._batch_tokens: int = catalog.get("batch_tokens") or default_batch_tokens(lm)
        segments = catalog.segments()
        self._number = next_segment(folder, catalog)
        self._entry = segments[-1].first_entry + segments[-1].entries if segments else 0
        self._offset = stored_offset(catalog)
        self._first, self._growing = catalog.next_segment() == 0, catalog.get("state") == "complete"
        self._compile_status: CompileStatus | None = None
        # Threads write float16 keys as they are, or as the device has encoded them.
        self._pipelined = is_pipelined(lm.device) and (
            encoder.stores_model_output or not isinstance(encoder.codec, Plain)
        )
        self._pending: deque[tuple[_Segment, Future[WrittenSegment]]] = deque()
        # Keys stay on the device only if they are stored without loss.
        keep_on_device = keep_on_device and self._pipelined and encoder.stores_model_output and not segments
        self.resident_keys: list[Tensor] | None = [] if keep_on_device else None

    def run(self, batches: Iterable[DocumentBatch]) -> None:
        """Store each batch as a segment; segments that are on disk when an error occurs are committed first."""
        with ExitStack() as stack:
            self._writer = stack.enter_context(SegmentWriter())
            try:
                for number, batch in enumerate(batches):
                    batch.size = self._source.take(len(batch.documents))
                    if number == 0:
                        self._prepare(batch, stack)
                    self._add(batch)
                self._commit_written(0)
                self._encoder.fit()
            except BaseException:
                self._rescue()
                raise

    def _prepare(self, batch: DocumentBatch, stack: ExitStack) -> None:
        """Choose offset and compilation by the first batch; a resumed build has chosen them."""
        window = self._window
        if self._first:
            if self._catalog.get(CALIBRATED) is None:
                self._offset = calibrate(self._lm, batch, window)
            compiling = self._compiling_pays(batch) if self._compile is None else self._compile
        else:
            compiling = bool(self._catalog.get("compile")) and not self._growing
        if compiling:
            shape = (max(1, self._batch_tokens // window.context), window.context)  # of every batch of full windows
            self._compile_status = stack.enter_context(compiled(self._lm.model, self._lm.key_layer, shape))

    def _compiling_pays(self, batch: DocumentBatch) -> bool:
        """Whether compiling saves more time than it takes, estimated from the full windows of a batch."""
        if self._lm.device.type != "cuda" or (total := self._source.total_bytes) is None:
            return False
        tokens = batch.full_windows(self._window) * self._window.context
        return tokens * total >= _MIN_COMPILED_TOKENS * max(1, batch.size)

    def _add(self, batch: DocumentBatch) -> None:
        if self._encoder.is_due(self._entry):
            self._commit_written(0)
            self._encoder.fit()
        segment = _Segment(batch, self._number, self._entry)
        self._number, self._entry = self._number + 1, self._entry + batch.entries
        self._commit_written(_MAX_PENDING_SEGMENTS - 1)
        if self._pipelined and self._make_room(batch.entries * self._lm.width * 2):
            collected = collect_keys(
                self._lm,
                batch.tokens,
                self._window,
                batch_tokens=self._batch_tokens,
                offset=self._offset,
                advance=batch.advance_bytes(self._advance),
            )
            if self.resident_keys is not None:
                self.resident_keys.append(collected.keys)
            values = np.concatenate([np.asarray(tokens, np.int32) for tokens in batch.tokens])
            final = segment_folder(self._folder, segment.number)
            encode = self._encoder.encode if self._encoder.plain_dtype is None else None
            self._pending.append((segment, self._writer.submit(final, collected, values, self._encoder.file, encode)))
        else:
            self.resident_keys = None
            self._commit_written(0)
            self._commit(segment, *self._write(segment, batch.advance_bytes(self._advance)))

    def _make_room(self, size: int) -> bool:
        """Free device memory for keys of `size` bytes; return False where that is impossible."""
        while size > free_bytes(self._lm.device):
            if self._pending:
                self._commit_oldest()
            elif self.resident_keys:
                self.resident_keys = None
            else:
                return False
        return True

    def _commit_written(self, limit: int) -> None:
        """Commit finished segments, and wait until at most `limit` are unfinished."""
        while self._pending and (len(self._pending) > limit or self._pending[0][1].done()):
            self._commit_oldest()

    def _commit_oldest(self) -> None:
        """Commit the oldest pending segment."""
        segment, future = self._pending[0]
        written = future.result()
        if not math.isfinite(written.largest):
            raise self._undefined_keys(segment.batch)
        if written.checksums is not None:
            self._commit(segment, 1.0, *written.checksums)
        else:
            # Too large for float16: read again, into a file with a scale, and so from now on.
            self._pipelined, self.resident_keys = False, None
            self._commit(segment, *self._write(segment, lambda _: None))
        self._pending.popleft()  # last: after an error, no later segment may be committed

    def _rescue(self) -> None:
        """Commit pending segments up to the first that fails."""
        for segment, future in self._pending:
            if future.exception() is not None or (checksums := future.result().checksums) is None:
                return
            try:
                self._commit(segment, 1.0, *checksums)
            except DatastoreError:  # the first error is the one to report
                return

    def _write(self, segment: _Segment, advance: Advance) -> tuple[float, str, str]:
        """Read a batch and write it synchronously; return the scale and the checksums of keys and values."""
        final = segment_folder(self._folder, segment.number)
        partial = create_partial_folder(final)
        with self._encoder.writer(partial) as writer:
            key_batches = self._lm.read(
                segment.batch.tokens, self._window, batch_tokens=self._batch_tokens, logits=False
            )
            for key_batch in key_batches:
                keys = key_batch.keys.cpu()
                if self._offset is not None:
                    keys = keys - self._offset
                keys = self._encoder.mapped(keys)
                if not math.isfinite(float(keys.abs().max())):
                    raise self._undefined_keys(segment.batch)
                writer.put_keys(key_batch.rows.numpy(), keys.numpy())
                advance(len(keys))
        with ArrayWriter(partial / VALUES_FILE, "int32") as values:
            for tokens in segment.batch.tokens:
                values.append(np.asarray(tokens, np.int32))
        commit_folder(partial, final)
        return writer.divisor, checksum(final / self._encoder.file), checksum(final / VALUES_FILE)

    def _undefined_keys(self, batch: DocumentBatch) -> ModelError:
        return ModelError(
            f"{self._lm.name} produced infinite or undefined hidden states at {self._lm.key_layer.module} "
            f"(among the tokens of {batch.documents[0].source} and after). Try --dtype float32 or another "
            "--key-layer."
        )

    def _commit(self, segment: _Segment, scale: float, keys_sha256: str, values_sha256: str) -> None:
        """Commit a segment that is on disk."""
        row = SegmentRow(segment.number, segment.first_entry, segment.batch.entries, scale, keys_sha256, values_sha256)
        number = self._catalog.next_document()
        documents = segment.batch.stored(segment.number, first_entry=segment.first_entry, number=number)
        metadata: dict[str, Any] = {}
        if self._first:
            metadata["compile"] = self._compile_status is not None and not self._compile_status.failed
            if self._offset is not None:
                metadata["offset"] = self._offset.tolist()
        self._catalog.add_segment(row, documents, **metadata)
        self._first = False


def calibrate(lm: CausalLM, batch: DocumentBatch, window: WindowShape) -> Tensor | None:
    """Return the mean of the keys where some are too large for the precision of float16; otherwise None.

    Some models have a few dimensions that are thousands of times larger than the rest and hardly vary. Without their
    mean, they are stored as precisely as the others.
    """
    for count, bound in ((_FIRST_SAMPLE, _MAX_PRECISE_KEY / 4), (_CALIBRATION_SAMPLE, _MAX_PRECISE_KEY)):
        keys = torch.cat([found.keys.cpu() for found in lm.read(batch.sample(count), window, logits=False)])
        if float(keys.abs().max()) <= bound:
            return None
    return keys.mean(0)
