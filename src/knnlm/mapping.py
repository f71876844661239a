"""Look at mapped files, and bound how much of them is resident in a process. Knows nothing about what they hold.

Pages of a mapped file that were read stay with the process for as long as nobody else needs the room. A search touches
keys all over a memory, so in time all of it would count as this process's. Letting pages go costs a page fault when
they are touched again, though the system still has them. Keys are read from first to last for each batch, so those
just read are the ones that are needed last: they go, and what was there first stays.
"""

from __future__ import annotations

import mmap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST = 384 << 20  # bytes of mapped files that may become resident, whoever reads them
_STATM = Path("/proc/self/statm")  # where there is none, the system is left to itself


class Resident:
    """Looks after what is read; all owners in a process share what may be resident."""

    _least: int | None = None  # bytes that were resident when there were fewest

    def touched(self, array: NDArray[Any]) -> None:
        """Note that an array was read, and let its pages go where too many have become resident."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        now = mapped_bytes()
        Resident._least = now if Resident._least is None else min(Resident._least, now)
        if now - Resident._least > MOST and (mapping := _mapping(array)) is not None:
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


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Let torch see an array that is only to be read, which it warns of once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)
