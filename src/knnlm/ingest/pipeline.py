"""Keep a fast model busy: text is tokenised ahead of it, keys are written behind it. Knows nothing about catalogs.

Keys stay on the device until all of a segment are there, in the order of their rows and in the type they are stored
in. From there a thread takes them to the disk while the model reads the next segment. The bytes are those that a
`KeyWriter` would write.
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
from knnlm.datastore.paths import KEYS_FILE, VALUES_FILE
from knnlm.datastore.segments import ArrayWriter, write_header
from knnlm.errors import KnnlmError
from knnlm.ingest.batches import Tokenised
from knnlm.io import translate_os_errors
from knnlm.lm.causal import CausalLM
from knnlm.lm.windows import Window, WindowShape, batches, windows

DEVICES = {"cuda"}

_CHARACTERS, _DOCUMENTS = 1 << 22, 1024  # in one call of the tokenizer, at most

_AHEAD = 2  # such calls that are under way or done before their text is needed

_PIECE = 1 << 26  # bytes that go from the device to the disk at a time

_ENCODED = 1 << 14  # keys that are encoded at a time

_THREADS = 2  # that write, and as many that hash

_LARGEST = 65504.0 / 2  # above this, a KeyWriter divides what it writes

Encode = Callable[[Tensor], Tensor]


def pipelined(device: torch.device) -> bool:
    """Say whether a model is so fast here that tokenizer and disk would make it wait."""
    return device.type in DEVICES


def tokenised(documents: Iterable[Document], lm: CausalLM) -> Generator[Tokenised]:
    """Give each document with its tokens, ahead of time where that helps."""
    if pipelined(lm.device):
        yield from tokenise_ahead(documents, lm)
    else:
        for document in documents:
            yield document, lm.encode(document.text)


def tokenise_ahead(documents: Iterable[Document], lm: CausalLM) -> Iterator[Tokenised]:
    """Give each document with its tokens, which a thread makes ahead of time.

    Documents are taken from their source in the caller's thread. An error there, or in a text, is raised after all that
    came before it was given. Close the iterator when it is not read to its end.
    """
    pool = ThreadPoolExecutor(1, "knnlm-tokenise")
    waiting: deque[tuple[list[Document], Future[list[list[int]]]]] = deque()
    source = _gather(documents)
    failure: Exception | None = None
    try:
        while True:
            try:
                batch = next(source, None)
            except Exception as error:
                batch, failure = None, error
            if batch is None:
                break
            waiting.append((batch, pool.submit(lm.encode_all, [document.text for document in batch])))
            if len(waiting) > _AHEAD:
                yield from _result(*waiting.popleft(), lm)
        while waiting:
            yield from _result(*waiting.popleft(), lm)
        if failure is not None:
            raise failure
    finally:
        pool.shutdown(cancel_futures=True)


def _gather(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Gather documents for one call of the tokenizer; those that came before a failure are given first."""
    batch: list[Document] = []
    characters = 0
    try:
        for document in documents:
            batch.append(document)
            characters += len(document.text)
            if characters >= _CHARACTERS or len(batch) >= _DOCUMENTS:
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
        # One after another, so that those before the bad one are not lost, and the error is about that one.
        for document in batch:
            yield document, lm.encode(document.text)
        return
    yield from zip(batch, tokens, strict=True)


@dataclass(frozen=True)
class Collected:
    """The keys of a segment where the model is; `largest` is known when the device gets there."""

    keys: Tensor  # (N, D) float16
    largest: Tensor  # () float32, in absolute value; undefined where a key is
    done: torch.cuda.Event | None  # None where the device does not run behind


def collect(
    lm: CausalLM,
    documents: Sequence[Sequence[int]],
    shape: WindowShape,
    *,
    batch_tokens: int,
    offset: Tensor | None,
    advance: Callable[[int], None],
) -> Collected:
    """Read documents and keep their keys, less the offset, on the device, without waiting for it; `advance` by rows."""
    device = lm.device
    row, ready = 0, list[Window]()
    for document in documents:
        tokens = np.asarray(document, np.int64)
        ready.extend(windows(tokens, shape, start_token=lm.start_token, row=row))  # type: ignore[arg-type]
        row += len(tokens)
    keys = torch.empty(row, lm.width, dtype=torch.float16, device=device)
    largest = torch.zeros((), device=device)
    offset = None if offset is None else offset.to(device)
    for batch in batches(ready, batch_tokens):
        ids, places, rows = (_send(array, device) for array in _layout(batch))
        with torch.inference_mode():
            (hidden,), _ = lm.forward(ids, logits=False)  # (B, T, D)
            found = hidden.flatten(0, 1).index_select(0, places).float()  # (n, D)
            found = found if offset is None else found - offset
            torch.maximum(largest, found.abs().amax(), out=largest)
            keys.index_copy_(0, rows, found.to(torch.float16))
        advance(len(rows))
    done = None
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(device))
    return Collected(keys, largest, done)


def _layout(batch: Sequence[Window]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Give what the model reads (B, T), where in it the scored positions are, and which rows these have."""
    longest = len(batch[0])
    ids = np.full((len(batch), longest), batch[0].start_token, np.int64)
    places, rows = [], []
    for number, window in enumerate(batch):
        # The token before each position; before the first one the start token, which is there already.
        first = 0 if window.begin else 1
        ids[number, first : len(window)] = window.document[window.begin + first - 1 : window.end - 1]
        count = window.end - window.scored
        begin = number * longest + window.scored - window.begin
        places.append(np.arange(begin, begin + count))
        rows.append(np.arange(window.row, window.row + count))
    return ids, np.concatenate(places), np.concatenate(rows)


def _send(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """Copy to the device; from pinned memory, since any other makes the host wait for the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def room(device: torch.device) -> int:
    """Say how many bytes of the device keys may take, which leaves some for the model to work in."""
    if device.type != "cuda":
        return sys.maxsize
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused - total // 8


@dataclass(frozen=True)
class WrittenSegment:
    """What became of a segment: the hashes of its files, or None where its keys cannot be stored as they are."""

    largest: float
    sums: tuple[str, str] | None  # of keys and values


class Disk:
    """Writes segments in threads. Leave it as a context: what was handed in is finished, or fails, first."""

    def __init__(self, seal: Callable[[Path, Path], None]) -> None:
        self._seal = seal  # makes a folder that was written under the first name appear under the second
        self._writers = ThreadPoolExecutor(_THREADS, "knnlm-write")
        self._hashers = ThreadPoolExecutor(_THREADS, "knnlm-hash")

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self._writers.shutdown()
        self._hashers.shutdown()

    def submit(
        self,
        final: Path,
        collected: Collected,
        values: NDArray[np.int32],
        file: str = KEYS_FILE,
        encode: Encode | None = None,
    ) -> Future[WrittenSegment]:
        """Write keys and values when the device has the keys, first under a name for what is not finished.

        `encode` says what is stored of keys, if not the keys themselves.
        """
        return self._writers.submit(self._write, final, collected, values, file, encode)

    def _write(
        self, final: Path, collected: Collected, values: NDArray[np.int32], file: str, encode: Encode | None
    ) -> WrittenSegment:
        keys, partial = collected.keys, final.with_suffix(".partial")
        if collected.done is not None:
            collected.done.synchronize()
        # On a stream of its own: on the model's, a copy would come after all that the model still has to do.
        with torch.cuda.stream(torch.cuda.Stream(keys.device)) if keys.device.type == "cuda" else nullcontext():
            largest = float(collected.largest)
            if not largest <= _LARGEST:
                return WrittenSegment(largest, None)
            with translate_os_errors(partial):
                partial.mkdir(parents=True)
            stored = keys if encode is None else torch.cat([encode(some) for some in keys.split(_ENCODED)])
            dtype = str(stored.dtype).removeprefix("torch.")
            sums = (
                self._write_array(partial / file, dtype, tuple(stored.shape), _pieces(stored)),
                self._write_array(partial / VALUES_FILE, "int32", values.shape, [values]),
            )
        self._seal(partial, final)
        return WrittenSegment(largest, sums)

    def _write_array(self, path: Path, dtype: str, shape: tuple[int, ...], pieces: Iterable[NDArray[Any]]) -> str:
        """Write an array piece by piece and give its file's hash, made at the same time."""
        digest = hashlib.sha256(_header(dtype, shape))
        with ArrayWriter(path, dtype, shape[1:]) as writer:
            for piece in pieces:
                hashed = self._hashers.submit(digest.update, piece.data if piece.size else b"")
                try:
                    writer.append(piece)
                finally:
                    hashed.result()  # the next piece may come to lie in the same memory
        return digest.hexdigest()


def _pieces(keys: Tensor) -> Iterator[NDArray[Any]]:
    """Bring keys to the host in pieces; each is gone when the next is asked for."""
    step = max(1, _PIECE // (keys.element_size() * keys.shape[1]))
    pinned = keys.device.type == "cuda"
    host = torch.empty(min(step, len(keys)), keys.shape[1], dtype=keys.dtype, pin_memory=pinned)
    for begin in range(0, len(keys), step):
        piece = host[: len(keys) - begin]
        piece.copy_(keys[begin : begin + step])
        yield piece.numpy()


def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Give the header of a .npy file, as `ArrayWriter` writes it."""
    file = io.BytesIO()
    write_header(file, np.dtype(dtype), shape)
    return file.getvalue()
