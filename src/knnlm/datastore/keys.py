"""The keys of a memory as an index sees them. Knows nothing about files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from knnlm.datastore.store import Datastore


@dataclass(frozen=True)
class Keys:
    """The keys of a memory as an index sees them: `Vectors`, numbered from 0."""

    store: Datastore

    @property
    def rows(self) -> int:
        """The number of keys."""
        return self.store.key_count

    @property
    def width(self) -> int:
        """The number of dimensions of a key."""
        return self.store.width

    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Give (number of the first key, (n, D) float32) from first to last."""
        return self.store.chunks(size)

    def take(self, ids: Tensor) -> Tensor:
        """Give these keys, (…) → (…, D) float32; an id below 0 gives zeros."""
        return self.store.take(ids)

    @property
    def half(self) -> bool:
        """Whether keys are stored in float16 just as they are, not divided by anything."""
        return self.store.key_dtype == "float16" and all(segment.scale == 1.0 for segment in self.store.segments)

    def read(self, first: int, out: Tensor) -> None:
        """Fill a (n, D) float16 tensor with the keys from this one on, as they are stored."""
        self.store.read(first, out)

    @property
    def resident_keys(self) -> list[Tensor] | None:
        """The keys on the device that they were built on, if they were kept there."""
        return self.store.resident_keys

    def release(self) -> None:
        """Let the keys on the device go; they are in their files."""
        self.store.resident_keys = None
