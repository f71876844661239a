"""Rows rounded to a byte a number, and products of such rows. Knows nothing about what the rows are.

A processor multiplies bytes several times as fast as float32. What comes out are whole numbers, so it does not matter
which way they were computed. Where bytes are not faster, or where large sums come out wrong, as on processors whose
instructions for bytes add up in 16 bits, float32 is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

LARGEST = 127  # of a byte with a sign
_LEAST = 1e-30  # a scale, where all numbers are 0
_EXACT = 1 << 24  # float32 has whole numbers up to here
_TRIAL = (64, 256, 512)  # rows, others and numbers a row of a trial
_TURNS = 5


@dataclass(frozen=True)
class Rounded:
    """Rows as bytes, and by what each is to be multiplied."""

    values: Tensor  # (n, D) int8
    scale: Tensor  # (n, 1) float32

    def __getitem__(self, part: slice) -> Rounded:
        """Take some of the rows."""
        return Rounded(self.values[part], self.scale[part])

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.values)

    def squares(self) -> Tensor:
        """Give the squared length of each row as it was rounded, (n, 1)."""
        return self.values.float().square_().sum(1, keepdim=True) * self.scale.square()


def rounded(rows: Tensor) -> Rounded:
    """Round (n, D) rows, each by a scale of its own."""
    scale = rows.abs().amax(1, keepdim=True).clamp_(min=_LEAST) / LARGEST
    return Rounded((rows / scale).round_().to(torch.int8), scale)


def products(rows: Tensor, others: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply every one of (m, D) int8 rows with every one of (n, D) others: (m, n) int32."""
    # Of rows of one number each, torch 2.13 multiplies what lies behind them.
    by_bytes = rows.shape[1] > 1 and bytes_are_faster()
    return (_by_bytes if by_bytes else _by_floats)(rows, others, out)


def _by_bytes(rows: Tensor, others: Tensor, out: Tensor | None) -> Tensor:
    return torch._int_mm(rows, others.T) if out is None else torch._int_mm(rows, others.T, out=out)


def _by_floats(rows: Tensor, others: Tensor, out: Tensor | None) -> Tensor:
    step = max(1, _EXACT // LARGEST**2)  # numbers a row whose products float32 can still sum up exactly
    out = torch.empty(len(rows), len(others), dtype=torch.int32) if out is None else out
    out.zero_()
    for begin in range(0, rows.shape[1], step):
        part = slice(begin, begin + step)
        out += (rows[:, part].float() @ others[:, part].float().T).int()
    return out


@cache
def bytes_are_faster() -> bool:
    """Try on this processor, once, whether bytes give what float32 gives, in less time."""
    if not hasattr(torch, "_int_mm"):
        return False
    count, others, width = _TRIAL
    generator = torch.Generator().manual_seed(0)
    rows, keys = (torch.randint(-LARGEST, LARGEST + 1, (n, width), generator=generator).char() for n in (count, others))
    rows[:2], keys[:2] = LARGEST, torch.tensor([[LARGEST], [-LARGEST]])  # sums as large as they get, of either sign
    try:
        right = torch.equal(_by_bytes(rows, keys, None), _by_floats(rows, keys, None))
        return right and _seconds(_by_bytes, rows, keys) < _seconds(_by_floats, rows, keys)
    except (RuntimeError, NotImplementedError):
        return False


def _seconds(work: Callable[[Tensor, Tensor, Tensor | None], Tensor], rows: Tensor, others: Tensor) -> float:
    """Give the shortest of a few tries."""
    taken = []
    for _ in range(_TURNS):
        begin = time.perf_counter()
        work(rows, others, None)
        taken.append(time.perf_counter() - begin)
    return min(taken)
