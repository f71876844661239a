"""The keys of a memory as an index sees them. Knows nothing about files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from knnlm.datastore.codec import Plain

if TYPE_CHECKING:
    from knnlm.datastore.store import Datastore

_LARGEST = 65504.0 / 2  # of float16, with room to add
_BLOCK = 4096  # keys that are decoded at a time


@dataclass(frozen=True)
class Keys:
    """The keys of a memory as an index sees them: `Vectors`, numbered from 0; all, or those from `first` to `end`."""

    store: Datastore
    first: int = 0
    end: int | None = None

    @property
    def rows(self) -> int:
        """The number of keys."""
        return (self.store.key_count if self.end is None else self.end) - self.first

    @property
    def width(self) -> int:
        """The number of dimensions of a key."""
        return self.store.width

    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Give (number of the first key, (n, D) float32) from first to last."""
        for number, block in self.store.chunks(size, begin=self.first):
            if number - self.first >= self.rows:
                return
            yield number - self.first, block[: self.rows - (number - self.first)]

    def take(self, ids: Tensor) -> Tensor:
        """Give these keys, (…) → (…, D) float32; an id below 0 gives zeros."""
        return self.store.take(torch.where(ids < 0, ids, ids + self.first) if self.first else ids)

    @property
    def half(self) -> bool:
        """Whether keys can be had in float16: stored just so, not divided by anything, or decoded within its range."""
        codec = self.store.codec
        if not isinstance(codec, Plain):
            return codec.largest <= _LARGEST
        return codec.dtype == "float16" and all(segment.scale == 1.0 for segment in self.store.segments)

    def read(self, first: int, out: Tensor) -> None:
        """Fill a (n, D) float16 tensor with the keys from this one on, as they are stored or as they are decoded."""
        codec = self.store.codec
        first += self.first
        if isinstance(codec, Plain):
            self.store.read(first, out)
            return
        stored = torch.empty(len(out), codec.columns, dtype=getattr(torch, codec.dtype))
        self.store.read(first, stored)
        for begin in range(0, len(out), _BLOCK):
            out[begin : begin + _BLOCK] = codec.decode(stored[begin : begin + _BLOCK], 1.0)

    @property
    def resident_keys(self) -> list[Tensor] | None:
        """The keys on the device that they were built on, if they were kept there."""
        return self.store.resident_keys if not self.first else None

    def release(self) -> None:
        """Let the keys on the device go; they are in their files."""
        self.store.resident_keys = None
