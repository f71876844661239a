"""The suffix array of a store's text, for n-grams of any length.

The documents are concatenated, with a border before, between and after them. A number is a token plus 1; 0 is the
border. `order` lists the positions of this text sorted by the numbers that follow: the positions where some tokens
occur are consecutive in it, and so are, among those, the positions where one more token follows. Two positions are
compared by at least 64 numbers, so that a text that consists of copies is sorted as fast as any other; positions equal
up to there are in the order of the text.

store/
  ngram/metadata.json  the identity of the store, and the checksums of the files
  ngram/text.npy       (n,) int32, the numbers
  ngram/order.npy      (n,) int32, the sorted positions
  ngram/followers.npy  (V + 2,) int32, how many different tokens follow each number

They are derived data: built when first opened, and again when the store has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from knnlm.datastore.locks import writer_lock
from knnlm.datastore.schema import NGRAM_FOLDER
from knnlm.datastore.segments import ArrayWriter, open_array
from knnlm.datastore.store import Datastore
from knnlm.datastore.validation import check_regular_file
from knnlm.errors import DatastoreCorrupt, DatastoreError, ParameterError
from knnlm.io import atomic_folder, checksum, translate_os_errors
from knnlm.progress import Progress, silent

Ints: TypeAlias = NDArray[np.int64]
Small: TypeAlias = NDArray[np.int32]

DEPTH = 64  # numbers by which two positions are compared, at least

_METADATA_FILE = "metadata.json"
_MAX_METADATA_BYTES = 1 << 16
_FORMAT = 1
_MAX_TOKENS = 2**31 - 2  # positions have 32 bits
_BLOCK = 1 << 20  # entries of the store read at a time
_PROGRESS_TITLE = "sorting n-grams"


@dataclass(frozen=True)
class SuffixArray:
    """The text of a store and its sorted positions; see `from_documents` and `open_suffix_array`."""

    text: Small  # (n,) the border is 0, a token is itself plus 1; it begins and ends with a border
    order: Small  # (n,) positions of the text
    followers: Small  # (V + 2,) the number of different tokens that follow each number
    first: Ints  # (V + 3,) the first row of `order` whose position has this number
    vocab_size: int
    start_token: int
    kept: bool = False  # on disk, and mapped

    @cached_property
    def distinct(self) -> int:
        """The number of different tokens in the text."""
        return int((np.diff(self.first)[1:] > 0).sum())

    def encode(self, tokens: NDArray[Any], *, begins: bool) -> Ints:
        """Return tokens as numbers; a start token at the begin of a text becomes the border before a document."""
        known = (tokens >= 0) & (tokens < self.vocab_size)
        numbers = np.where(known, tokens, self.vocab_size).astype(np.int64) + 1  # the last number never occurs
        if begins and len(tokens) and tokens[0] == self.start_token:
            numbers[0] = 0
        return numbers

    def following(self, rows: Ints, length: Ints | int) -> Small:
        """Return the number `length` after the position of each row."""
        # Sound rows never leave the text; those of a damaged file must not read beyond it.
        positions = self.order.take(rows, mode="clip").astype(np.int64) + length
        return self.text.take(positions, mode="clip")

    def match(self, numbers: Ints, longest: int) -> tuple[Ints, Ints]:
        """Find where the last 0 … `longest` of the numbers up to each one occur, followed by a token.

        Returns the first row and the one after the last, both (Q, longest + 1); equal where there is none.
        """
        low = np.zeros((longest + 1, len(numbers)), np.int64)
        high = np.zeros((longest + 1, len(numbers)), np.int64)
        low[0], high[0] = self.first[1], len(self.order)
        # The match that begins at each number is extended by one number at a time while it occurs.
        begins = np.arange(len(numbers))
        lows, highs = self.first[numbers], self.first[numbers + 1]
        for length in range(1, longest + 1):
            lows = self._skip_borders(lows, highs, length)
            alive = np.flatnonzero(lows < highs)
            begins, lows, highs = begins[alive], lows[alive], highs[alive]
            low[length, begins + length - 1], high[length, begins + length - 1] = lows, highs
            more = begins + length < len(numbers)
            begins, lows, highs = begins[more], lows[more], highs[more]
            if not len(begins):
                break
            lows, highs = self.extend_match(lows, highs, numbers[begins + length], length)
        return low.T, high.T

    def continue_match(self, low: Ints, high: Ints, numbers: Ints) -> tuple[Ints, Ints]:
        """Return what `match` returns for the (Q,) numbers that follow others, from what it returned for those."""
        next_low, next_high = np.zeros_like(low), np.zeros_like(high)
        next_low[:, 0], next_high[:, 0] = self.first[1], len(self.order)
        query, length = np.nonzero(low[:, :-1] < high[:, :-1])
        longer = length > 0
        query, length = query[longer], length[longer]
        lows, highs = self.extend_match(low[query, length], high[query, length], numbers[query], length)
        # A match of one number needs no search.
        query = np.append(query, np.arange(len(numbers)))
        lows, highs = np.append(lows, self.first[numbers]), np.append(highs, self.first[numbers + 1])
        length = np.append(length + 1, np.ones(len(numbers), np.int64))
        lows = self._skip_borders(lows, highs, length)
        found = lows < highs
        next_low[query[found], length[found]], next_high[query[found], length[found]] = lows[found], highs[found]
        return next_low, next_high

    def extend_match(self, low: Ints, high: Ints, numbers: Ints, length: Ints | int) -> tuple[Ints, Ints]:
        """Keep, of the rows low … high - 1, those where this number stands after `length` others."""
        lengths = np.broadcast_to(length, low.shape)
        bounds = np.concatenate([numbers, numbers + 1])
        both = self._bound(np.tile(low, 2), np.tile(high, 2), bounds, np.tile(lengths, 2))
        return both[: len(low)], both[len(low) :]

    def count_followers(self, low: Ints, high: Ints, lengths: Ints) -> tuple[Ints, Ints, Ints]:
        """Count what stands after `lengths` numbers in stretches of rows: (stretch, number, count), in that order.

        A stretch whose ends are equal is equal throughout, so only those that are not are cut in two, again and again:
        a long stretch with few different numbers is counted without being read.
        """
        found: list[tuple[Ints, Ints, Ints]] = []
        owner, begin, end = np.arange(len(low)), low, high - 1  # `end` is the last one
        while len(owner) or not found:
            first, last = (self.following(rows, lengths[owner]).astype(np.int64) for rows in (begin, end))
            same = first == last
            found.append((owner[same], first[same], (end - begin + 1)[same]))
            owner, begin, end = owner[~same], begin[~same], end[~same]
            middle = (begin + end) >> 1
            owner, begin, end = np.tile(owner, 2), np.append(begin, middle + 1), np.append(middle, end)
        owners, numbers, counts = (np.concatenate([low[:0], *each]) for each in zip(*found, strict=True))
        keys, where = np.unique(owners * len(self.first) + numbers, return_inverse=True)
        sums = np.bincount(where, counts, len(keys)).astype(np.int64)
        return keys // len(self.first), keys % len(self.first), sums

    def _skip_borders(self, low: Ints, high: Ints, length: Ints | int) -> Ints:
        """Leave out the positions where the document ends after `length` numbers; they come first."""
        at_border = np.flatnonzero((low < high) & (self.following(low, length) == 0))
        if len(at_border):
            ones, lengths = np.ones(len(at_border), np.int64), np.broadcast_to(length, low.shape)[at_border]
            low = low.copy()
            low[at_border] = self._bound(low[at_border], high[at_border], ones, lengths)
        return low

    def _bound(self, low: Ints, high: Ints, numbers: Ints, lengths: Ints) -> Ints:
        """Find the first of the rows low … high - 1 with this number or a larger one after `lengths` others."""
        low, high = low.copy(), high.copy()
        searched = np.flatnonzero(low < high)
        while len(searched):
            middle = (low[searched] + high[searched]) >> 1
            less = self.following(middle, lengths[searched]) < numbers[searched]
            low[searched[less]] = middle[less] + 1
            high[searched[~less]] = middle[~less]
            searched = searched[low[searched] < high[searched]]
        return low


def from_documents(
    documents: Iterable[Sequence[int]], *, vocab_size: int, start_token: int, progress: Progress = silent
) -> SuffixArray:
    """Build the suffix array of documents given as tokens, without their start token."""
    pieces: list[Small] = [np.zeros(1, np.int32)]
    for document in documents:
        tokens = np.asarray(document, np.int64)
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
            raise ParameterError(f"A document has a token that is not from 0 to {vocab_size - 1}.")
        if len(tokens):
            pieces.append(np.append(tokens + 1, 0).astype(np.int32))
    return _build(np.concatenate(pieces), vocab_size, start_token, progress=progress, what=_PROGRESS_TITLE)


def open_suffix_array(store: Datastore, *, progress: Progress = silent) -> SuffixArray:
    """Open the suffix array of a store; build it where there is none, or that of another store.

    Where it cannot be written (a read-only folder, a concurrent writer, a full disk), it stays in memory, and is built
    again the next time.
    """
    store.pinned = True
    expected = _expected(store)
    found = _load(store, expected)
    if found is not None:
        return found
    what = (
        f"{_PROGRESS_TITLE} again, as the store has changed"
        if (store.path / NGRAM_FOLDER).exists()
        else _PROGRESS_TITLE
    )
    made = _build(_text(store), expected["vocab_size"], _start_token(store), progress=progress, what=what)
    try:
        _save(store, made, expected)
    except DatastoreError:
        return made
    return _load(store, expected) or made


def stored_suffix_array(store: Datastore) -> SuffixArray | None:
    """Open and check the suffix array on disk; None where there is none, or that of another store."""
    return _load(store, _expected(store))


def _expected(store: Datastore) -> dict[str, Any]:
    """Return the metadata that the files of this store must have."""
    changed = {"generation": store.generation} if store.generation else {}
    return {
        "format": _FORMAT,
        "fingerprint": store.fingerprint,
        "documents": store.catalog.document_count(),
        "vocab_size": int(store.model["vocab_size"]),
        "depth": DEPTH,
        **changed,
    }


def _build(text: Small, vocab_size: int, start_token: int, *, progress: Progress, what: str) -> SuffixArray:
    if len(text) > _MAX_TOKENS:
        raise ParameterError(f"Cannot sort the n-grams of {len(text):,} tokens: the limit is {_MAX_TOKENS:,}.")
    with progress(what, total=len(text), unit="tokens") as advance:
        order = _sort(text, vocab_size, advance)
    return SuffixArray(
        text, order, _followers(text, order, vocab_size), _first_rows(text, vocab_size), vocab_size, start_token
    )


def _sort(text: Small, vocab_size: int, advance: Callable[[int], None]) -> Small:
    """Sort the positions of a text: first by as many numbers as fit in 64 bits, then by twice as many, and so on.

    Takes about 30 bytes per token. Only positions that are still equal to another are sorted again: the rank of a
    position is the first row of its equals, and the rank of the position `width` further on doubles the width.
    """
    keys, width = _pack(text, vocab_size)
    order = np.argsort(keys).astype(np.int32)
    keys = keys[order]
    rows = np.arange(len(text), dtype=np.int64)  # those of positions that are equal to another
    ranks = np.empty(len(text), np.int32)
    while True:
        new = np.ones(len(rows), np.bool_)  # the first row of its equals
        np.not_equal(keys[1:], keys[:-1], out=new[1:])
        ranks[order[rows]] = rows[new][np.cumsum(new) - 1]
        alone = new & np.append(new[1:], True)
        advance(int(alone.sum()))
        rows = rows[~alone]
        if not len(rows) or width >= DEPTH:
            break
        positions = order[rows]
        further = positions.astype(np.int64) + width
        # The end of the text sorts first.
        keys = np.where(further < len(text), ranks.take(further, mode="clip").astype(np.int64) + 1, 0)
        keys |= ranks[positions].astype(np.int64) << 32
        sorting = np.argsort(keys)
        keys, order[rows] = keys[sorting], positions[sorting]
        width *= 2
    # Positions that are still equal stay in the order of the text.
    keys = (ranks[order[rows]].astype(np.int64) << 32) | order[rows]
    order[rows] = np.sort(keys) & 0xFFFFFFFF
    advance(len(rows))
    return order


def _pack(text: Small, vocab_size: int) -> tuple[NDArray[np.uint64], int]:
    """Pack as many numbers as fit into 64 bits, and return their count too."""
    bits = vocab_size.bit_length()  # the largest number is the vocabulary's size
    width = 64 // bits
    keys = np.zeros(len(text), np.uint64)
    for step in range(min(width, len(text))):
        keys[: len(text) - step] |= text[step:].astype(np.uint64) << np.uint64(bits * (width - 1 - step))
    return keys, width


def _followers(text: Small, order: Small, vocab_size: int) -> Small:
    """Return the number of different tokens that follow each number."""
    here = text[order]
    there = text.take(order.astype(np.int64) + 1, mode="clip")
    new = np.ones(len(order), np.bool_)
    new[1:] = (here[1:] != here[:-1]) | (there[1:] != there[:-1])
    new &= there > 0
    return np.bincount(here[new], minlength=vocab_size + 2).astype(np.int32)


def _first_rows(text: Small, vocab_size: int) -> Ints:
    """Return the first row of `order` for each number."""
    return np.append(0, np.cumsum(np.bincount(text, minlength=vocab_size + 2)))


def _text(store: Datastore) -> Small:
    """Return the text of the store's documents, with borders."""
    begins, expected = [], 0
    for document in store.documents():
        if document.first_entry != expected or document.entries < 0:
            raise DatastoreCorrupt(
                f"{store.catalog.path}: {document.source} begins at entry {document.first_entry}, not at {expected}. "
                "Build the store again."
            )
        if document.entries:
            begins.append(document.first_entry)
        expected += document.entries
    if expected != store.entry_count:
        raise DatastoreCorrupt(
            f"{store.catalog.path} has documents of {expected:,} entries, but segments of {store.entry_count:,}. "
            "Build the store again."
        )
    text = np.zeros(store.entry_count + len(begins) + 1, np.int32)
    for begin in range(0, store.entry_count, _BLOCK):
        entries = np.arange(begin, min(begin + _BLOCK, store.entry_count))
        values = store.values(torch.from_numpy(entries)).numpy()
        if values.min() < 0:
            raise DatastoreCorrupt(f"{store.path} contains a token below 0. Build the store again.")
        # One border precedes each document up to this entry.
        text[entries + np.searchsorted(begins, entries, side="right")] = values + 1
    return text


def _start_token(store: Datastore) -> int:
    token = store.model.get("start_token")
    if not isinstance(token, int):
        raise DatastoreCorrupt(f"{store.catalog.path} has no valid start token of the model. Build the store again.")
    return token


def _load(store: Datastore, expected: dict[str, Any]) -> SuffixArray | None:
    """Map the files; None where there are none, or those of another store."""
    folder = store.path / NGRAM_FOLDER
    metadata = _read_metadata(folder / _METADATA_FILE)
    if metadata is None or any(metadata.get(name) != value for name, value in expected.items()):
        return None
    try:
        return _map(store, metadata, expected)
    except DatastoreCorrupt:
        # Another process may have replaced the files meanwhile.
        if _read_metadata(folder / _METADATA_FILE) != metadata:
            return None
        raise


def _map(store: Datastore, metadata: dict[str, Any], expected: dict[str, Any]) -> SuffixArray:
    """Map the files after comparing them with the metadata."""
    folder = store.path / NGRAM_FOLDER
    size, vocab_size = metadata.get("size"), expected["vocab_size"]
    if not isinstance(size, int) or not 0 < size - store.entry_count <= expected["documents"] + 1:
        raise _corrupt(folder, f"{_METADATA_FILE} has {size} positions for {store.entry_count:,} tokens")
    shapes = {"text": (size,), "order": (size,), "followers": (vocab_size + 2,)}
    for name in shapes:
        check_regular_file(store.path, folder / f"{name}.npy")
    # As plain arrays: np.memmap makes every small look-up slower.
    arrays = {name: np.asarray(open_array(folder / f"{name}.npy", np.int32, shape)) for name, shape in shapes.items()}
    for name in shapes:
        if metadata.get(f"{name}_sha256") != checksum(folder / f"{name}.npy"):
            raise _corrupt(folder, f"{name}.npy: checksum mismatch")
    _check_range(folder, arrays, size, vocab_size)
    first = _first_rows(arrays["text"], vocab_size)
    return SuffixArray(**arrays, first=first, vocab_size=vocab_size, start_token=_start_token(store), kept=True)


def _check_range(folder: Path, arrays: dict[str, Small], size: int, vocab_size: int) -> None:
    """Raise for numbers out of range, even where the checksums match."""
    for name, end in (("text", vocab_size + 1), ("order", size), ("followers", size + 1)):
        if arrays[name].min() < 0 or arrays[name].max() >= end:
            raise _corrupt(folder, f"{name}.npy contains numbers that are not from 0 to {end - 1:,}")


def _read_metadata(path: Path) -> dict[str, Any] | None:
    check_regular_file(path.parent.parent, path)
    try:
        if path.stat().st_size > _MAX_METADATA_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes")
        metadata = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DatastoreError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise _corrupt(path.parent, f"{path.name} cannot be read, {error}") from None
    if not isinstance(metadata, dict):
        raise _corrupt(path.parent, f"{path.name} is not a JSON object")
    return metadata


def _corrupt(folder: Path, what: str) -> DatastoreCorrupt:
    return DatastoreCorrupt(f"{folder}: corrupt ({what}). Remove it: it is built again when it is needed.")


def _save(store: Datastore, made: SuffixArray, metadata: dict[str, Any]) -> None:
    """Write the files and replace older ones."""
    folder = store.path / NGRAM_FOLDER
    with writer_lock(store.path):
        if store.stale:  # the files would be for an older state
            return
        with atomic_folder(folder, replace=True) as partial:
            sums: dict[str, str] = {}
            for name in ("text", "order", "followers"):
                with ArrayWriter(partial / f"{name}.npy", np.int32) as writer:
                    writer.append(getattr(made, name))
                sums[f"{name}_sha256"] = checksum(partial / f"{name}.npy")
            with translate_os_errors(folder):
                (partial / _METADATA_FILE).write_text(
                    json.dumps({**metadata, "size": len(made.text), **sums}, indent=1)
                )
