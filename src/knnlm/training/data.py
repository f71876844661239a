"""Text as the training of a student reads it: windows of documents, in batches. Knows nothing about models.

Documents are kept apart, and a window never reaches into the next one. Where long ones are cut, and in which order
windows come, is another in each epoch, but follows from the seed alone: whoever was stopped can go on where it was.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore.store import Datastore
from knnlm.errors import ParameterError
from knnlm.lm.windows import WindowShape

_BLOCK = 1 << 20  # tokens that are read together

_FEW = 16  # documents: where there are fewer, windows are held out

_MANY = 8_192  # tokens of a step that are enough for four groups; fewer make two

_Row = tuple[int, int, int, int]


@dataclass(frozen=True)
class TokenStream:
    """The tokens of documents, one behind the other."""

    tokens: NDArray[np.int32]  # (rows,)
    starts: NDArray[np.int64]  # (documents + 1,) where each begins, and where the last one ends

    @classmethod
    def of_store(cls, store: Datastore) -> TokenStream:
        """Read all that a memory holds; row i of the memory is token i."""
        starts = [document.first_row for document in store.documents() if document.rows]
        return cls(stored_tokens(store), np.array([*starts, store.rows], dtype=np.int64))

    @classmethod
    def of_documents(cls, documents: Iterable[Sequence[int]]) -> TokenStream:
        """Take tokens as they are given; documents without any are left out."""
        parts = [np.asarray(document, dtype=np.int32) for document in documents if len(document)]
        starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return cls(np.concatenate(parts) if parts else np.zeros(0, np.int32), starts)

    @property
    def fingerprint(self) -> str:
        """What tells these tokens from others."""
        return tokens_hash(self.tokens)

    @property
    def division(self) -> str:
        """What tells these borders of documents from others."""
        return hashlib.sha256(self.starts.astype("<i8").tobytes()).hexdigest()[:16]


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
class TrainingBatch:
    """Windows side by side; N = B·T, row by row."""

    ids: Tensor  # (B, T) what is read
    targets: Tensor  # (N,) what comes; -1 where it does not count
    rows: Tensor  # (N,) the numbers of the targets in the text; -1 where they do not count


class TrainingBatches:
    """The windows of a text: which are trained on, which are held out, and in which steps they come.

    Windows are (W, 4) integers: where the document begins in the text, and the window's begin, first scored position
    and end in it.
    """

    def __init__(self, text: TokenStream, shape: WindowShape, *, start_token: int, held_out: float, seed: int) -> None:
        self.text, self._shape, self._start_token, self._seed = text, shape, start_token, seed
        borders = zip(text.starts[:-1].tolist(), text.starts[1:].tolist(), strict=True)
        table = _table([one for start, end in borders for one in self._cut(start, 0, end - start, shape.context)])
        held = self._hold_out(held_out, table)
        self.held_out = table[held]
        self._short, self._long = self._stretches(table[~held])
        self.tokens = len(text.tokens) - positions(self.held_out)  # that are trained on in an epoch
        if not self.tokens:
            raise ParameterError("There is no text to train on. Give more text, or hold less of it out.")

    def windows(self, epoch: int) -> NDArray[np.int64]:
        """Cut what is trained on into windows, long documents at other places in each epoch."""
        context, stride = self._shape.context, self._shape.stride
        made: list[_Row] = []
        for document, start, begin, end in self._long:
            first = int(np.random.default_rng([self._seed, epoch, document]).integers(1, context + 1))
            # Behind what is held out, a window reads what is before it, and so has room for fewer.
            made += self._cut(start, begin, end, first if not begin else 1 + (first - 1) % stride)
        return np.concatenate([self._short, _table(made)])

    def steps(self, epoch: int, batch_tokens: int) -> list[list[NDArray[np.int64]]]:
        """Give the windows of an epoch in steps of about as many tokens; a step is some groups of like length."""
        random = np.random.default_rng([self._seed, epoch])
        ready = self._pack(random.permutation(self.windows(epoch)), batch_tokens, random)
        # By turns of the longest, …, the shortest: whichever stand together in a step, they are of several lengths.
        kinds = [random.permutation(kind) for kind in np.array_split(np.arange(len(ready)), _groups(batch_tokens))]
        turns = [number for turn in itertools.zip_longest(*kinds) for number in turn if number is not None]
        groups = [ready[number] for number in turns]
        sizes = np.array([int((group[:, 3] - group[:, 1]).sum()) for group in groups])
        total = int(sizes.sum())
        # All steps are of like size, so the last one is no remainder: each group goes where its middle lies.
        count = max(1, (2 * total + batch_tokens) // (2 * batch_tokens))
        places = (2 * np.cumsum(sizes) - sizes) * count // (2 * total)
        borders = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(groups)]
        return [groups[begin:end] for begin, end in itertools.pairwise(borders)]

    def held_out_groups(self, batch_tokens: int) -> list[NDArray[np.int64]]:
        """Give the windows that are held out, in groups of like length."""
        return self._pack(self.held_out, batch_tokens)

    def read(self, windows: NDArray[np.int64]) -> TrainingBatch:
        """Put windows side by side; padding goes to the right, where no earlier position looks."""
        shape = len(windows), _longest(windows)
        ids = np.full(shape, self._start_token, dtype=np.int64)
        targets, rows = np.full(shape, -1, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
        for place, (first, begin, scored, end) in enumerate(windows.tolist()):
            before = max(1, begin)  # the first token of a document is read behind the start token
            ids[place, before - begin : end - begin] = self.text.tokens[first + before - 1 : first + end - 1]
            counted = slice(scored - begin, end - begin)
            targets[place, counted] = self.text.tokens[first + scored : first + end]
            rows[place, counted] = np.arange(first + scored, first + end)
        return TrainingBatch(
            torch.from_numpy(ids), torch.from_numpy(targets).reshape(-1), torch.from_numpy(rows).reshape(-1)
        )

    def _cut(self, start: int, begin: int, end: int, first: int) -> Iterator[_Row]:
        """Cut positions of the document at `start` into windows; the first scores so many, each later one `stride`."""
        back, scored, until = self._shape.context - self._shape.stride, begin, min(begin + first, end)
        while scored < end:
            yield start, max(0, scored - back), scored, until
            scored, until = until, min(until + self._shape.stride, end)

    def _stretches(self, table: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[_Row]]:
        """Divide what is trained on into whole windows, and stretches (document, start, begin, end) to be cut anew."""
        documents = np.searchsorted(self.text.starts, table[:, 0]).tolist()
        joined: list[list[int]] = []
        for document, (start, _, scored, end) in zip(documents, table.tolist(), strict=True):
            if joined and joined[-1][0] == document and joined[-1][3] == scored:
                joined[-1][3] = end
            else:
                joined.append([document, start, scored, end])
        short: list[_Row] = []
        long: list[_Row] = []
        for document, start, begin, end in joined:
            most = self._shape.stride if begin else self._shape.context
            if end - begin <= most:
                short += self._cut(start, begin, end, most)
            else:
                long.append((document, start, begin, end))
        return _table(short), long

    def _pack(
        self, windows: NDArray[np.int64], batch_tokens: int, random: np.random.Generator | None = None
    ) -> list[NDArray[np.int64]]:
        """Cut windows, by length and else in their order, into groups: a part of a step, or a single window."""
        lengths = windows[:, 3] - windows[:, 1]
        order = np.argsort(-lengths, kind="stable")
        windows, lengths = windows[order], lengths[order].tolist()
        share = batch_tokens // _groups(batch_tokens)
        packed, begin = [], 0
        while begin < len(windows):
            count = max(1, share // lengths[begin])
            if random is not None and not begin:
                count = int(random.integers(1, count + 1))  # or windows would have the same neighbours in each epoch
            packed.append(windows[begin : begin + count])
            begin += count
        return packed

    def _hold_out(self, share: float, table: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mark windows: those of whole documents, by the hash of their tokens, copies of a text together."""
        wanted = share * len(self.text.tokens)
        marked = np.zeros(len(table), dtype=bool)
        if not wanted:
            return marked
        whole = len(self.text.starts) - 1 >= _FEW
        ends = dict(zip(self.text.starts[:-1].tolist(), self.text.starts[1:].tolist(), strict=True))
        pieces: dict[bytes, list[int]] = {}
        digests: dict[tuple[int, int], bytes] = {}
        for number, (first, _, scored, end) in enumerate(table.tolist()):
            span = (first, ends[first]) if whole else (first + scored, first + end)
            if span not in digests:
                own = np.ascontiguousarray(self.text.tokens[slice(*span)])
                digests[span] = hashlib.sha256(f"{self._seed} ".encode() + own.tobytes()).digest()
            pieces.setdefault(digests[span], []).append(number)
        found = 0
        for _, numbers in sorted(pieces.items()):
            size = positions(table[numbers])
            # One text may be most of all, and what is held out is lost to training.
            if found < wanted and size <= max(2 * wanted, len(self.text.tokens) / _FEW):
                marked[numbers] = True
                found += size
        return marked


def join_groups(groups: Sequence[NDArray[np.int64]], room: int) -> list[NDArray[np.int64]]:
    """Put groups together, the longest windows first, where they take at most `room` positions with their padding."""
    made: list[NDArray[np.int64]] = []
    for group in sorted(groups, key=_longest, reverse=True):
        if made and (len(made[-1]) + len(group)) * _longest(made[-1]) <= room:
            made[-1] = np.concatenate([made[-1], group])
        else:
            made.append(group)
    return made


def positions(windows: NDArray[np.int64]) -> int:
    """Count the tokens that windows are to predict."""
    return int((windows[:, 3] - windows[:, 2]).sum())


def _groups(batch_tokens: int) -> int:
    return 4 if batch_tokens >= _MANY else 2  # more would be too small to keep a GPU busy


def _longest(windows: NDArray[np.int64]) -> int:
    return int((windows[:, 3] - windows[:, 1]).max())


def _table(rows: list[_Row]) -> NDArray[np.int64]:
    return np.array(rows, dtype=np.int64).reshape(-1, 4)
