"""Remember which names have been met, in eight bytes each. Knows nothing about what the names are of."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_RECENT = 1 << 15


class Seen:
    """A set of names that stays small: a Python set takes a hundred bytes for each."""

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._sorted: NDArray[np.uint64] = np.empty(0, np.uint64)

    def add(self, name: str) -> bool:
        """Add a name and say whether it is new. Two of a billion names share a hash once in forty runs."""
        key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        if key in self._recent:
            return False
        place = int(np.searchsorted(self._sorted, np.uint64(key)))
        if place < len(self._sorted) and self._sorted[place] == key:
            return False
        self._recent.add(key)
        if len(self._recent) >= _RECENT:
            recent = np.fromiter(self._recent, np.uint64, len(self._recent))
            self._sorted = np.union1d(self._sorted, recent)
            self._recent.clear()
        return True
