"""Bound how much of mapped files is resident in a process. Knows nothing about what they hold.

Pages of a mapped file that were read stay with the process for as long as nobody else needs the room. A search touches
keys all over a memory, so in time all of it would count as this process's. Letting pages go costs a page fault when
they are touched again, though the system still has them. Keys are read from first to last for each batch, so those
just read are the ones that are needed last: they go, and what was there first stays.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = 512 << 20  # bytes of mapped files that may become resident
_OFTEN = 4  # reads between two looks
_STATM = Path("/proc/self/statm")  # where there is none, the system is left to itself


class Resident:
    """Looks after what one owner reads."""

    def __init__(self) -> None:
        self._reads = 0
        self._least: int | None = None

    def touched(self, array: NDArray[Any]) -> None:
        """Note that an array was read, and let its pages go where too many have become resident."""
        self._reads += 1
        if self._reads % _OFTEN or not hasattr(mmap, "MADV_DONTNEED"):
            return
        now = mapped_bytes()
        self._least = now if self._least is None else min(self._least, now)
        if now - self._least > MOST and (mapping := _mapping(array)) is not None:
            mapping.madvise(mmap.MADV_DONTNEED)


def mapped_bytes() -> int:
    """Count the bytes of mapped files, libraries too, that are resident in this process; 0 where nobody says."""
    try:
        return int(_STATM.read_text().split()[2]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0


def _mapping(array: Any) -> mmap.mmap | None:
    """Find the mapping that an array looks at; None where it is in memory, as an empty one is."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, mmap.mmap) else None
