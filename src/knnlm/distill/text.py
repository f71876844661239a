"""Text as the training of a student reads it: windows of documents, in batches. Knows nothing about models.

Documents are kept apart, and a window never reaches into the next one. The order of an epoch follows from the seed
alone, so whoever was stopped can go on where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore import Datastore
from knnlm.errors import ParameterError
from knnlm.lm import WindowShape
from knnlm.lm.windows import windows

_BLOCK = 1 << 20  # tokens that are read together
_FEW = 16  # documents: where there are fewer, windows are held out


@dataclass(frozen=True)
class Text:
    """The tokens of documents, one behind the other."""

    tokens: NDArray[np.int32]  # (rows,)
    starts: NDArray[np.int64]  # (documents + 1,) where each begins, and where the last one ends

    @classmethod
    def of_store(cls, store: Datastore) -> Text:
        """Read all that a memory holds; row i of the memory is token i."""
        starts = [document.first_row for document in store.catalog.documents() if document.rows]
        return cls(stored_tokens(store), np.array([*starts, store.rows], dtype=np.int64))

    @classmethod
    def of_documents(cls, documents: Iterable[Sequence[int]]) -> Text:
        """Take tokens as they are given; documents without any are left out."""
        parts = [np.asarray(document, dtype=np.int32) for document in documents if len(document)]
        starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return cls(np.concatenate(parts) if parts else np.zeros(0, np.int32), starts)

    @property
    def fingerprint(self) -> str:
        """What tells these tokens from others."""
        return tokens_hash(self.tokens)


def stored_tokens(store: Datastore) -> NDArray[np.int32]:
    """Give the (rows,) tokens of a memory."""
    tokens = np.empty(store.rows, dtype=np.int32)
    for begin in range(0, store.rows, _BLOCK):
        rows = torch.arange(begin, min(begin + _BLOCK, store.rows))
        tokens[begin : begin + len(rows)] = store.values(rows).numpy()
    return tokens


def tokens_hash(tokens: NDArray[np.int32]) -> str:
    """Hash tokens, to know them again."""
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i4").data).hexdigest()[:16]


@dataclass(frozen=True)
class Batch:
    """Windows side by side; N = B·T, row by row."""

    ids: Tensor  # (B, T) what is read
    targets: Tensor  # (N,) what comes; -1 where it does not count
    rows: Tensor  # (N,) the numbers of the targets in the text; -1 where they do not count


class Lessons:
    """The windows of a text: which are trained on, which are held out, and in which batches they come."""

    def __init__(self, text: Text, shape: WindowShape, *, start_token: int, held_out: float, seed: int) -> None:
        self.text, self._start_token, self._seed = text, start_token, seed
        spans = [
            (first, window.begin, window.scored, window.end)
            for first, end in zip(text.starts[:-1].tolist(), text.starts[1:].tolist(), strict=True)
            for window in windows(range(end - first), shape, start_token=start_token)
        ]
        # (W, 4): where the document begins in the text, and the window's begin, first scored position and end in it.
        self._windows = np.array(spans, dtype=np.int64).reshape(-1, 4)
        self._lengths = self._windows[:, 3] - self._windows[:, 1]
        self._scored = self._windows[:, 3] - self._windows[:, 2]
        left = self._hold_out(held_out)
        self.training, self.held_out = np.flatnonzero(~left), np.flatnonzero(left)
        if not len(self.training):
            raise ParameterError("There is no text to train on. Give more text, or hold less of it out.")

    def positions(self, numbers: NDArray[np.int64]) -> int:
        """Count the tokens that these windows are to predict."""
        return int(self._scored[numbers].sum())

    def batches(self, epoch: int, batch_tokens: int) -> list[NDArray[np.int64]]:
        """Give the numbers of all windows in training, in batches of like length, the longest first in each."""
        random = np.random.default_rng([self._seed, epoch])
        packed = self._pack(random.permutation(self.training), batch_tokens)
        return [packed[number] for number in random.permutation(len(packed))]

    def held_out_batches(self, batch_tokens: int) -> list[NDArray[np.int64]]:
        """Give the numbers of the windows that are held out, in batches."""
        return self._pack(self.held_out, batch_tokens)

    def read(self, numbers: NDArray[np.int64]) -> Batch:
        """Put windows side by side; padding goes to the right, where no earlier position looks."""
        shape = len(numbers), int(self._lengths[numbers].max())
        ids = np.full(shape, self._start_token, dtype=np.int64)
        targets, rows = np.full(shape, -1, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
        for place, (first, begin, scored, end) in enumerate(self._windows[numbers].tolist()):
            before = max(1, begin)  # the first token of a document is read behind the start token
            ids[place, before - begin : end - begin] = self.text.tokens[first + before - 1 : first + end - 1]
            counted = slice(scored - begin, end - begin)
            targets[place, counted] = self.text.tokens[first + scored : first + end]
            rows[place, counted] = np.arange(first + scored, first + end)
        return Batch(torch.from_numpy(ids), torch.from_numpy(targets).reshape(-1), torch.from_numpy(rows).reshape(-1))

    def _pack(self, order: NDArray[np.int64], batch_tokens: int) -> list[NDArray[np.int64]]:
        """Cut windows, by length and else in their order, into batches that are no larger, or a single window."""
        order = order[np.argsort(-self._lengths[order], kind="stable")]
        packed, begin = [], 0
        while begin < len(order):
            count = max(1, batch_tokens // int(self._lengths[order[begin]]))
            packed.append(order[begin : begin + count])
            begin += count
        return packed

    def _hold_out(self, share: float) -> NDArray[np.bool_]:
        """Mark windows: those of whole documents, by the hash of their tokens, copies of a text together."""
        wanted = share * len(self.text.tokens)
        marked = np.zeros(len(self._windows), dtype=bool)
        if not wanted:
            return marked
        whole = len(self.text.starts) - 1 >= _FEW
        ends = dict(zip(self.text.starts[:-1].tolist(), self.text.starts[1:].tolist(), strict=True))
        pieces: dict[bytes, list[int]] = {}
        digests: dict[tuple[int, int], bytes] = {}
        for number, (first, _, scored, end) in enumerate(self._windows.tolist()):
            span = (first, ends[first]) if whole else (first + scored, first + end)
            if span not in digests:
                own = np.ascontiguousarray(self.text.tokens[slice(*span)])
                digests[span] = hashlib.sha256(f"{self._seed} ".encode() + own.tobytes()).digest()
            pieces.setdefault(digests[span], []).append(number)
        found = 0
        for _, numbers in sorted(pieces.items()):
            size = int(self._scored[numbers].sum())
            # One text may be most of all, and what is held out is lost to training.
            if found < wanted and size <= max(2 * wanted, len(self.text.tokens) / _FEW):
                marked[numbers] = True
                found += size
        return marked
