"""Keep a GPU busy: tokenise text ahead of the model, and write keys behind it.

Keys stay on the device until a segment is complete, in the order of their rows and in float16. Then a thread writes
them to disk while the model reads the next segment. The bytes are those that a `KeyWriter` would write.
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.corpus import Document
from knnlm.datastore.schema import KEYS_FILE, VALUES_FILE
from knnlm.datastore.segments import ArrayWriter, write_header
from knnlm.errors import KnnlmError
from knnlm.io import commit_folder, create_partial_folder
from knnlm.lm.causal import CausalLM
from knnlm.lm.windows import Window, WindowShape, batches, source_of, windows

PIPELINED_DEVICES = {"cuda"}

_MAX_CALL_CHARACTERS, _MAX_CALL_DOCUMENTS = 1 << 22, 1024  # of one call of the tokenizer
_CALLS_AHEAD = 2  # of the tokenizer
_COPY_BYTES = 1 << 26  # from the device to the disk at a time
_ENCODED_KEYS = 1 << 14  # at a time
_THREADS = 2  # that write, and as many that hash
_MAX_UNSCALED_KEY = 65504.0 / 2  # above this, a KeyWriter divides the keys

Tokenised = tuple[Document, list[int]]
Encode = Callable[[Tensor], Tensor]


def is_pipelined(device: torch.device) -> bool:
    """Whether a model on this device is so fast that it would wait for tokenizer and disk."""
    return device.type in PIPELINED_DEVICES


def tokenise(documents: Iterable[Document], lm: CausalLM) -> Generator[Tokenised]:
    """Yield each document with its tokens, made ahead of time on a GPU."""
    if is_pipelined(lm.device):
        yield from tokenise_ahead(documents, lm)
    else:
        for document in documents:
            yield document, lm.encode_document(document)


def tokenise_ahead(documents: Iterable[Document], lm: CausalLM) -> Iterator[Tokenised]:
    """Yield each document with its tokens, which a thread makes ahead of time.

    Documents are read from their source in the caller's thread. An error there, or in a text, is raised after all
    documents before it were yielded. Close the iterator when it is not read to its end.
    """
    pool = ThreadPoolExecutor(1, "knnlm-tokenise")
    pending: deque[tuple[list[Document], Future[list[list[int]]]]] = deque()
    source = _tokenizer_calls(documents)
    failure: Exception | None = None
    try:
        while True:
            try:
                batch = next(source, None)
            except Exception as error:
                batch, failure = None, error
            if batch is None:
                break
            pending.append((batch, pool.submit(lm.encode_documents, batch)))
            if len(pending) > _CALLS_AHEAD:
                yield from _result(*pending.popleft(), lm)
        while pending:
            yield from _result(*pending.popleft(), lm)
        if failure is not None:
            raise failure
    finally:
        pool.shutdown(cancel_futures=True)


def _tokenizer_calls(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield the documents of each call of the tokenizer; those before an error are yielded first."""
    batch: list[Document] = []
    characters = 0
    try:
        for document in documents:
            batch.append(document)
            characters += len(document.text) + len(document.source_text or "")
            if characters >= _MAX_CALL_CHARACTERS or len(batch) >= _MAX_CALL_DOCUMENTS:
                yield batch
                batch, characters = [], 0
    except Exception:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def _result(batch: list[Document], future: Future[list[list[int]]], lm: CausalLM) -> Iterator[Tokenised]:
    try:
        tokens = future.result()
    except KnnlmError:
        # One after another, so that those before the bad one are kept, and the error is about that one.
        for document in batch:
            yield document, lm.encode_document(document)
        return
    yield from zip(batch, tokens, strict=True)


@dataclass(frozen=True)
class CollectedKeys:
    """The keys of a segment on the device, complete once `done` has been recorded there."""

    keys: Tensor  # (N, D) float16
    largest: Tensor  # () float32, the largest absolute value; NaN if a key has NaN
    done: torch.cuda.Event | None  # None where the device is synchronous


def collect_keys(
    lm: CausalLM,
    documents: Sequence[Sequence[int]],
    shape: WindowShape,
    *,
    batch_tokens: int,
    offset: Tensor | None,
    advance: Callable[[int], None],
) -> CollectedKeys:
    """Read documents and return their keys, minus the offset, on the device, without waiting for it."""
    device = lm.device
    row, ready = 0, list[Window]()
    for document in documents:
        tokens = np.asarray(document, np.int64)
        source = source_of(document)
        ready.extend(windows(tokens, shape, start_token=lm.start_token, row=row, source=source))  # type: ignore[arg-type]
        row += len(tokens)
    keys = torch.empty(row, lm.width, dtype=torch.float16, device=device)
    largest = torch.zeros((), device=device)
    offset = None if offset is None else offset.to(device)
    for batch in batches(ready, batch_tokens):
        ids, places, rows = (_send(array, device) for array in _layout(batch, lm))
        with torch.inference_mode():
            (hidden,), _ = lm.forward(ids, logits=False, sources=lm.sources(batch))  # (B, T, D)
            found = hidden.flatten(0, 1).index_select(0, places).float()  # (n, D)
            found = found if offset is None else found - offset
            torch.maximum(largest, found.abs().amax(), out=largest)
            keys.index_copy_(0, rows, found.to(torch.float16))
        advance(len(rows))
    done = None
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(device))
    return CollectedKeys(keys, largest, done)


def _layout(batch: Sequence[Window], lm: CausalLM) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the model's input (B, T), the flat places of the scored positions in it, and their rows."""
    length = max(len(window) + len(lm.prefix(window)) for window in batch)
    ids = np.full((len(batch), length), batch[0].start_token, np.int64)
    places, rows = [], []
    for number, window in enumerate(batch):
        # The token before each position; before the first one it is the start token, which is filled in already.
        prefix, first = lm.prefix(window), 0 if window.begin else 1
        ids[number, : len(prefix)] = prefix
        text = ids[number, len(prefix) :]
        text[first : len(window)] = window.document[window.begin + first - 1 : window.end - 1]
        count = window.end - window.scored
        begin = number * length + len(prefix) + window.scored - window.begin
        places.append(np.arange(begin, begin + count))
        rows.append(np.arange(window.row, window.row + count))
    return ids, np.concatenate(places), np.concatenate(rows)


def _send(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """Copy an array to the device; from pinned memory, since otherwise the host waits for the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def free_bytes(device: torch.device) -> int:
    """Return how many bytes of the device keys may take, leaving some for the model's activations."""
    if device.type != "cuda":
        return sys.maxsize
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused - total // 8


@dataclass(frozen=True)
class WrittenSegment:
    """A segment on disk, or one that was not written because its keys are too large for float16."""

    largest: float  # absolute value of a key
    checksums: tuple[str, str] | None  # of keys and values; None where nothing was written


class SegmentWriter:
    """Writes segments in threads; leaving the context waits until all are finished or failed."""

    def __init__(self) -> None:
        self._writers = ThreadPoolExecutor(_THREADS, "knnlm-write")
        self._hashers = ThreadPoolExecutor(_THREADS, "knnlm-hash")

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._writers.shutdown()
        self._hashers.shutdown()

    def submit(
        self,
        final: Path,
        collected: CollectedKeys,
        values: NDArray[np.int32],
        file: str = KEYS_FILE,
        encode: Encode | None = None,
    ) -> Future[WrittenSegment]:
        """Write keys and values under a temporary name, once the device has computed the keys, and rename them.

        `encode` returns the stored form of keys; without it they are stored as they are.
        """
        return self._writers.submit(self._write, final, collected, values, file, encode)

    def _write(
        self, final: Path, collected: CollectedKeys, values: NDArray[np.int32], file: str, encode: Encode | None
    ) -> WrittenSegment:
        keys = collected.keys
        if collected.done is not None:
            collected.done.synchronize()
        # On its own stream: on the model's, a copy would wait for all the work that is queued there.
        with torch.cuda.stream(torch.cuda.Stream(keys.device)) if keys.device.type == "cuda" else nullcontext():
            largest = float(collected.largest)
            if not largest <= _MAX_UNSCALED_KEY:
                return WrittenSegment(largest, None)
            partial = create_partial_folder(final)
            stored = keys if encode is None else torch.cat([encode(part) for part in keys.split(_ENCODED_KEYS)])
            dtype = str(stored.dtype).removeprefix("torch.")
            checksums = (
                self._write_array(partial / file, dtype, tuple(stored.shape), _chunks(stored)),
                self._write_array(partial / VALUES_FILE, "int32", values.shape, [values]),
            )
        commit_folder(partial, final)
        return WrittenSegment(largest, checksums)

    def _write_array(self, path: Path, dtype: str, shape: tuple[int, ...], chunks: Iterable[NDArray[Any]]) -> str:
        """Write an array chunk by chunk and return the SHA-256 of the file, computed at the same time."""
        digest = hashlib.sha256(_header(dtype, shape))
        with ArrayWriter(path, dtype, shape[1:]) as writer:
            for chunk in chunks:
                hashed = self._hashers.submit(digest.update, chunk.data if chunk.size else b"")
                try:
                    writer.append(chunk)
                finally:
                    hashed.result()  # the next chunk uses the same memory
        return digest.hexdigest()


def _chunks(keys: Tensor) -> Iterator[NDArray[Any]]:
    """Yield keys in chunks on the host; each is overwritten by the next."""
    step = max(1, _COPY_BYTES // (keys.element_size() * keys.shape[1]))
    pinned = keys.device.type == "cuda"
    host = torch.empty(min(step, len(keys)), keys.shape[1], dtype=keys.dtype, pin_memory=pinned)
    for begin in range(0, len(keys), step):
        chunk = host[: len(keys) - begin]
        chunk.copy_(keys[begin : begin + step])
        yield chunk.numpy()


def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of a .npy file, as `ArrayWriter` writes it."""
    file = io.BytesIO()
    write_header(file, np.dtype(dtype), shape)
    return file.getvalue()
