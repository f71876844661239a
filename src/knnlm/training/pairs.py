"""The pairs of a store as training reads them: in a shuffled order, some held out. Knows nothing about what is trained.

The order follows from the seed alone: blocks of keys are shuffled, gathered to a buffer, and shuffled again within it,
so memory is bounded by the buffer, and whoever was stopped can go on where it was.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore.store import Datastore
from knnlm.errors import ParameterError

_BLOCK = 2048  # keys that are read together

_BUFFER = 1 << 17  # keys that are shuffled together

_SAMPLE = 1 << 15  # keys that tell the mean and the spread of all

_MOST_HELD_OUT = 1 << 16  # tokens; more would only take longer to look at

_FEW = 16  # documents: where there are fewer, they are cut into stretches

_LEAST_STRETCH = 64  # tokens of a document that are held out together


class Pairs:
    """The stored pairs: their order, which are held out, their keys brought to mean 0 and spread 1."""

    def __init__(
        self,
        store: Datastore,
        *,
        held_out: float,
        seed: int,
        every_word: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.store, self.seed, self.device, self.dtype = store, seed, device, dtype
        rows_held_out = hold_out(store, held_out, seed=seed)
        self.is_held_out = np.zeros(store.key_count, dtype=bool)
        self.counts = np.zeros(store.model["vocab_size"], dtype=np.int64)  # of words, in training
        present = np.full(len(self.counts), every_word)
        for begin in range(0, store.key_count, _BUFFER):
            rows = store.rows_of(torch.arange(begin, min(begin + _BUFFER, store.key_count)))
            values, left = store.values(rows).numpy(), rows_held_out[rows.numpy()]
            self.is_held_out[begin : begin + len(rows)] = left
            present[values] = True
            self.counts += np.bincount(values[~left], minlength=len(self.counts))
        self.words = torch.from_numpy(np.flatnonzero(present))  # (W,)
        self.held_out = torch.from_numpy(np.flatnonzero(self.is_held_out))
        self.count = store.key_count - len(self.held_out)
        if not self.count:
            raise ParameterError(
                f"All of {store.path} would be held out. Give more text, or hold nothing out with held_out=0 "
                "(--held-out 0)."
            )
        self.mean, self.spread = self._measure()
        self._resident = self._keep() if device.type == "cuda" else None

    def keys(self, ids: Tensor) -> Tensor:
        """Give these (n, D) keys as the matrix is trained on them."""
        if self._resident is not None:
            return self._resident[ids.to(self.device)]
        return self._bring(self.store.take(ids))

    def columns(self, ids: Tensor) -> Tensor:
        """Give the (n,) numbers of these keys' tokens among the words."""
        return torch.searchsorted(self.words, self.store.values(self.store.rows_of(ids))).to(self.device)

    def batches(self, epoch: int, size: int, *, skip: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Give (ids, keys, columns) of all pairs in training once, without the first `skip` batches."""
        random = np.random.default_rng([self.seed, epoch])
        blocks = random.permutation(-(-self.store.key_count // _BLOCK))
        for begin in range(0, len(blocks), _BUFFER // _BLOCK):
            starts = np.sort(blocks[begin : begin + _BUFFER // _BLOCK]) * _BLOCK
            ids = (starts[:, None] + np.arange(_BLOCK)).reshape(-1)
            ids = ids[ids < self.store.key_count]
            ids = ids[~self.is_held_out[ids]]
            # Of nearly one size: a last batch of a few pairs would be a step as long as any, and in the dark.
            parts = np.array_split(random.permutation(len(ids)), max(1, round(len(ids) / size))) if len(ids) else []
            if skip >= len(parts):
                skip -= len(parts)
                continue
            chosen = torch.from_numpy(ids)
            keys, columns = self.keys(chosen), self.columns(chosen)
            for part in map(torch.from_numpy, parts[skip:]):
                there = part.to(self.device)
                yield chosen[part], keys[there], columns[there]
            skip = 0

    def _measure(self) -> tuple[Tensor, Tensor]:
        """Give the (D,) mean and spread of the keys in training, by a sample."""
        train = np.flatnonzero(~self.is_held_out)
        if len(train) > _SAMPLE:
            train = np.sort(np.random.default_rng([self.seed]).choice(train, _SAMPLE, replace=False))
        sample = self.store.take(torch.from_numpy(train)).double()
        spread = sample.std(0, correction=0)
        # A dimension that hardly varies tells nothing, and must not be blown up where it does.
        spread = spread.clamp(min=1e-3 * float(spread.mean()) or 1.0)
        return sample.mean(0).float(), spread.float()

    def _bring(self, keys: Tensor) -> Tensor:
        return ((keys - self.mean) / self.spread).to(self.device, self.dtype)

    def _keep(self) -> Tensor | None:
        """Put all keys on the GPU where they take less than half of what is free there."""
        shape = (self.store.key_count, self.store.width)
        if math.prod(shape) * self.dtype.itemsize > torch.cuda.mem_get_info(self.device)[0] // 2:
            return None
        kept = torch.empty(shape, dtype=self.dtype, device=self.device)
        for first, keys in self.store.chunks(_BLOCK * 8):
            kept[first : first + len(keys)] = self._bring(keys)
        return kept


def hold_out(store: Datastore, share: float, *, seed: int) -> NDArray[np.bool_]:
    """Mark the (rows,) tokens that are held out: whole documents by the hash of their text, the same for equal texts.

    Where there are few documents, or too few that are short enough, they are cut into stretches, so that one book can
    be trained on and held out too.
    """
    wanted = min(share * store.rows, _MOST_HELD_OUT)
    if not wanted:
        return np.zeros(store.rows, dtype=bool)
    texts = {document.sha256 for document in store.documents() if document.rows}
    if len(texts) >= _FEW:
        # One text may be most of a memory, and what is held out is lost to training.
        most = min(max(wanted, store.rows / _FEW), _MOST_HELD_OUT)
        marked = _mark(store, wanted, seed, stretch=store.rows, most=most)
        if marked.sum() >= wanted:
            return marked
    return _mark(store, wanted, seed, stretch=max(_LEAST_STRETCH, int(wanted) // 2), most=store.rows)


def _mark(store: Datastore, wanted: float, seed: int, *, stretch: int, most: float) -> NDArray[np.bool_]:
    """Mark stretches of documents in the order of their hashes until it is enough; none that has more than `most`."""
    marked = np.zeros(store.rows, dtype=bool)
    pieces: dict[bytes, list[tuple[int, int]]] = {}  # those with the same text are one
    for document in store.documents():
        for begin in range(0, document.rows, stretch):
            digest = hashlib.sha256(f"{seed} {document.sha256} {begin}".encode()).digest()
            place = (document.first_row + begin, min(stretch, document.rows - begin))
            pieces.setdefault(digest, []).append(place)
    held_out = 0
    for _, places in sorted(pieces.items()):
        size = sum(rows for _, rows in places)
        if held_out >= wanted:
            break
        if size <= most:
            for first, rows in places:
                marked[first : first + rows] = True
            held_out += size
    return marked
