"""Rows rounded to a byte a number, and products of such rows. Knows nothing about what the rows are.

A processor multiplies bytes several times as fast as float32. What comes out are whole numbers, so it does not matter
which way they were computed. Where bytes are not faster, or where large sums come out wrong, as on processors whose
instructions for bytes add up in 16 bits, float32 is used.

Find the smallest of many numbers, row by row. Knows nothing about what they are.

Sorting ten thousand numbers to keep a thousand would take longer than computing them. So a sample of a row says below
which limit the thousand will be, what is below it is picked out, and only that is sorted: each number as a whole one,
with its place in the lower bits, so that a plain sort moves both. Where the sample was wrong, the limit is looked for.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGEST = 127  # of a byte with a sign

_LEAST = 1e-30  # a scale, where all numbers are 0

_EXACT = 1 << 24  # float32 has whole numbers up to here

_TRIAL = (64, 256, 512)  # rows, others and numbers a row of a trial

_TURNS = 5


@dataclass(frozen=True)
class QuantisedRows:
    """Rows as bytes, and by what each is to be multiplied."""

    values: Tensor  # (n, D) int8
    scale: Tensor  # (n, 1) float32

    def __getitem__(self, part: slice) -> QuantisedRows:
        """Take some of the rows."""
        return QuantisedRows(self.values[part], self.scale[part])

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.values)

    def squares(self) -> Tensor:
        """Give the squared length of each row as it was rounded, (n, 1)."""
        return self.values.float().square_().sum(1, keepdim=True) * self.scale.square()


def quantise(rows: Tensor) -> QuantisedRows:
    """Round (n, D) rows, each by a scale of its own."""
    scale = rows.abs().amax(1, keepdim=True).clamp_(min=_LEAST) / LARGEST
    return QuantisedRows((rows / scale).round_().to(torch.int8), scale)


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


Floats = NDArray[np.float32]

_STEP = 16  # one in so many numbers is in the sample

_SURE = 3.0  # standard deviations by which the limit is too high

_NARROW = 16  # bits for a place, up to which it fits into 32 with a number

_FINE = 22  # bits for a number at most: float32 has whole numbers of no more than 24

_APART = 16  # steps for each of the first eighth of what is kept, on average; with fewer, numbers are looked at again

_PIECE = 512  # rows that a thread takes at a time


def smallest_k(values: Floats, k: int) -> tuple[NDArray[np.int64], Floats]:
    """Give the places of the k smallest of each row of (r, n) numbers, and these, ascending; both are (r, k).

    Numbers are given within some hundred-thousandths of how far a row's k smallest are apart. Infinity, and what is no
    number, counts as not being there: where there are fewer than k, places are -1 and numbers infinite.
    """
    rows, width = values.shape
    places, found = np.full((rows, k), -1, np.int64), np.full((rows, k), np.inf, np.float32)
    if not rows or not width:
        return places, found
    limits = _limits(values, k)
    chosen, counts = _below(values, limits)
    if counts.min() < k or not np.isfinite(limits).all():
        short = np.flatnonzero((counts < k) | ~np.isfinite(limits[:, 0]))
        limits[short] = _exact_limits(values[short], k)
        chosen, counts = _below(values, limits)
    bits = max(1, (width - 1).bit_length())
    lowest = values.min(axis=1, keepdims=True)
    if (strange := np.isnan(lowest[:, 0])).any():
        lowest[strange] = np.nan_to_num(values[strange], nan=np.inf, posinf=np.inf).min(axis=1, keepdims=True)
    codes, unit = _coded(values, chosen, counts, lowest, limits, bits)
    codes.sort(axis=1)
    kept = codes[:, :k]
    count = kept.shape[1]
    there = np.arange(count) < counts[:, None]
    np.bitwise_and(kept, (1 << bits) - 1, out=places[:, :count], where=there)
    with np.errstate(invalid="ignore"):
        np.add((kept >> bits).astype(np.float32) * unit, lowest, out=found[:, :count], where=there)
    # Where the last are very far, the first all look alike.
    if count and len(alike := np.flatnonzero((kept[:, count // 8] >> bits) < _APART * count)):
        _sort_again(values, places, found, alike)
    return places, found


def _sort_again(values: Floats, places: NDArray[np.int64], found: Floats, rows: NDArray[np.int64]) -> None:
    """Put what was found in some rows into the order of the numbers themselves."""
    at = places[rows]
    numbers = np.where(at < 0, np.inf, np.take_along_axis(values[rows], np.maximum(at, 0), axis=1))
    order = np.argsort(numbers, axis=1, kind="stable")
    places[rows] = np.take_along_axis(at, order, axis=1)
    found[rows] = np.take_along_axis(numbers, order, axis=1)


def _limits(values: Floats, k: int) -> Floats:
    """Give a number for each row that k of its numbers are most probably not above, (r, 1)."""
    expected = k / _STEP
    rank = math.ceil(expected + _SURE * math.sqrt(expected))
    if rank * _STEP * 2 > values.shape[1]:  # nearly all would be chosen
        return _exact_limits(values, k)
    return np.sort(values[:, ::_STEP], axis=1)[:, rank - 1 : rank].copy()


def _exact_limits(values: Floats, k: int) -> Floats:
    """Give the k-th smallest number of each row, or the largest where there are fewer, (r, 1)."""
    k = min(k, values.shape[1])
    limits = np.partition(values, k - 1, axis=1)[:, k - 1 : k]
    largest = np.where(np.isfinite(values), values, -np.inf).max(axis=1, keepdims=True)
    return np.where(np.isfinite(limits), limits, largest).astype(np.float32)


def _below(values: Floats, limits: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give the places, row after row, of all numbers that are not above their row's limit; and how many in each row."""
    rows, width = values.shape
    chosen = np.flatnonzero(values <= np.minimum(limits, np.finfo(np.float32).max))
    ends = np.searchsorted(chosen, np.arange(rows + 1) * width)
    return chosen, np.diff(ends)


def _coded(
    values: Floats, chosen: NDArray[np.int64], counts: NDArray[np.int64], lowest: Floats, limits: Floats, bits: int
) -> tuple[NDArray[Any], Floats]:
    """Write chosen numbers as whole ones above their places, (r, most in a row); and say how far one is from the next.

    Behind a row's own comes the largest whole number there is.
    """
    rows, width = values.shape
    kind: Any = np.int32 if bits <= _NARROW else np.int64
    steps = (1 << (min(_FINE, 31 - bits) if bits <= _NARROW else _FINE)) - 1
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        span = np.maximum(limits - lowest, 0)  # nothing where a row has no finite number
        factor = np.where(span > 0, np.minimum(steps / span, np.finfo(np.float32).max), 0).astype(np.float32)
        unit = np.where(span > 0, span / steps, 0).astype(np.float32)
    numbers = np.take(values.reshape(-1), chosen)
    with np.errstate(over="ignore"):
        numbers -= np.repeat(lowest[:, 0], counts)
        numbers *= np.repeat(factor[:, 0], counts)
    whole: NDArray[Any] = np.minimum(numbers, steps).astype(kind)
    whole <<= bits
    whole |= (chosen - np.repeat(np.arange(0, rows * width, width), counts)).astype(kind)
    codes = np.full((rows, int(counts.max())), np.iinfo(kind).max, kind)
    end = 0
    for row, count in enumerate(counts.tolist()):
        codes[row, :count] = whole[end : end + count]
        end += count
    return codes, unit


def share(count: int, work: Callable[[int, int], None]) -> None:
    """Let as many threads as torch uses do the work for rows from one to another; work must leave the interpreter."""
    threads = torch.get_num_threads()
    if threads < 2 or count < 2 * _PIECE:
        work(0, count)
        return
    for _ in _pool(threads).map(lambda begin: work(begin, min(begin + _PIECE, count)), range(0, count, _PIECE)):
        pass


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="search")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the threads
