"""The arithmetic of the block index: int8 products, nearest centroids, row-wise top-k, and a thread pool.

A processor multiplies int8 several times as fast as float32. Products are integers, so they do not depend on how they
are computed. Where int8 is not faster, or where large sums overflow, as on processors whose int8 instructions
accumulate in 16 bits, float32 is used.

Sorting ten thousand numbers to keep a thousand would take longer than computing them. So `smallest_k` estimates from a
sample of each row a limit below which the k smallest are, selects what is below it, and sorts only that: every number
as an integer with its column in the lower bits, so that a plain sort moves both. Where the estimate was too low, the
exact limit is computed.
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

MAX_INT8 = 127

_MIN_SCALE = 1e-30  # of a vector that is all zeros
_MAX_EXACT_FLOAT = 1 << 24  # float32 represents all integers up to here
_TRIAL_SHAPE = (4, 256, 512)  # rows, other rows and columns of the int8 trial: too few for a second thread
_TRIAL_REPEATS = 30
_ASSIGN_BATCH = 1024  # vectors that are compared with all centroids

_SAMPLE_STEP = 16  # one in this many columns is in the sample
_SAFETY = 3.0  # standard deviations by which the estimated limit is too high
_MAX_NARROW_BITS = 16  # bits of a column number up to which it fits into 32 bits together with a value
_VALUE_BITS = 22  # at most: float32 represents integers of no more than 24
_MIN_RESOLUTION = 16  # steps for each of the first eighth of the result, on average; with fewer, rows are sorted again
_ROWS_PER_TASK = 512

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class QuantisedRows:
    """Rows in int8, and the factor of each row."""

    values: Tensor  # (n, D) int8
    scale: Tensor  # (n, 1) float32

    def __getitem__(self, rows: slice) -> QuantisedRows:
        return QuantisedRows(self.values[rows], self.scale[rows])

    def __len__(self) -> int:
        return len(self.values)

    def squares(self) -> Tensor:
        """Return the squared norm of each quantised row, (n, 1)."""
        return self.values.float().square_().sum(1, keepdim=True) * self.scale.square()


def quantise(rows: Tensor) -> QuantisedRows:
    """Round (n, D) rows to int8, each with a scale of its own."""
    scale = rows.abs().amax(1, keepdim=True).clamp_(min=_MIN_SCALE) / MAX_INT8
    return QuantisedRows((rows / scale).round_().to(torch.int8), scale)


def int8_matmul(rows: Tensor, others: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the products of (m, D) int8 rows and (n, D) int8 rows, (m, n) int32."""
    # With a single column, torch 2.13 reads beyond the end of the rows.
    use_int8 = rows.shape[1] > 1 and int8_is_faster()
    return (_matmul_int8 if use_int8 else _matmul_float)(rows, others, out)


def _matmul_int8(rows: Tensor, others: Tensor, out: Tensor | None) -> Tensor:
    return torch._int_mm(rows, others.T) if out is None else torch._int_mm(rows, others.T, out=out)


def _matmul_float(rows: Tensor, others: Tensor, out: Tensor | None) -> Tensor:
    step = max(1, _MAX_EXACT_FLOAT // MAX_INT8**2)  # columns whose products float32 sums exactly
    out = torch.empty(len(rows), len(others), dtype=torch.int32) if out is None else out
    out.zero_()
    for begin in range(0, rows.shape[1], step):
        columns = slice(begin, begin + step)
        out += (rows[:, columns].float() @ others[:, columns].float().T).int()
    return out


@cache
def int8_is_faster() -> bool:
    """Whether int8 products are right and faster than float32 on this processor; measured once.

    The times are those of one thread, in turns, and the shortest ones count: on a machine with other work, threads wait
    for each other, which would say nothing about the products.
    """
    if not hasattr(torch, "_int_mm"):
        return False
    count, others, width = _TRIAL_SHAPE
    generator = torch.Generator().manual_seed(0)
    rows, keys = (
        torch.randint(-MAX_INT8, MAX_INT8 + 1, (n, width), generator=generator).char() for n in (count, others)
    )
    rows[:2], keys[:2] = MAX_INT8, torch.tensor([[MAX_INT8], [-MAX_INT8]])  # the largest sums of either sign
    try:
        right = torch.equal(_matmul_int8(rows, keys, None), _matmul_float(rows, keys, None))
        both = _matmul_int8, _matmul_float
        times = [[_seconds(matmul, rows, keys) for matmul in both] for _ in range(_TRIAL_REPEATS)]
        return right and min(own for own, _ in times) < min(own for _, own in times)
    except (RuntimeError, NotImplementedError):
        return False


def _seconds(matmul: Callable[[Tensor, Tensor, Tensor | None], Tensor], rows: Tensor, others: Tensor) -> float:
    begin = time.perf_counter()
    matmul(rows, others, None)
    return time.perf_counter() - begin


class Centroids:
    """Points that are compared with vectors by squared distance, or by the negated inner product.

    In int8: which of some thousand centroids is nearest does not depend on the last digits.
    """

    def __init__(self, points: Tensor, *, metric: str = "l2") -> None:
        quantised = quantise(points)
        self._values = quantised.values
        self._factor = quantised.scale[:, 0] * (-1.0 if metric == "ip" else -2.0)
        self._constant = torch.zeros(len(points)) if metric == "ip" else points.square().sum(1)

    def __len__(self) -> int:
        return len(self._values)

    def distances(self, vectors: QuantisedRows) -> Tensor:
        """Return (m, n) distances of every vector to every point, less what is the same for all points."""
        distances = int8_matmul(vectors.values, self._values).float().mul_(self._factor)
        return torch.addcmul(self._constant, distances, vectors.scale, out=distances)

    def nearest(self, vectors: QuantisedRows) -> Tensor:
        """Return the nearest point of each vector, (m,) int64."""
        batches = (vectors[begin : begin + _ASSIGN_BATCH] for begin in range(0, len(vectors), _ASSIGN_BATCH))
        return torch.cat([self.distances(batch).argmin(1) for batch in batches] or [torch.empty(0, dtype=torch.int64)])


def smallest_k(values: Floats, k: int) -> tuple[NDArray[np.int64], Floats]:
    """Return the columns of the k smallest numbers of each row of (r, n) values, and these, ascending; (r, k) each.

    Returned numbers are rounded to some hundred-thousandths of the range of a row's k smallest. Infinity and NaN count
    as missing: where there are fewer than k numbers, columns are -1 and numbers infinite.
    """
    rows, width = values.shape
    columns, smallest = np.full((rows, k), -1, np.int64), np.full((rows, k), np.inf, np.float32)
    if not rows or not width:
        return columns, smallest
    limits = _estimated_limits(values, k)
    chosen, counts = _below(values, limits)
    if counts.min() < k or not np.isfinite(limits).all():
        short = np.flatnonzero((counts < k) | ~np.isfinite(limits[:, 0]))
        limits[short] = _exact_limits(values[short], k)
        chosen, counts = _below(values, limits)
    bits = max(1, (width - 1).bit_length())
    lowest = values.min(axis=1, keepdims=True)
    if (has_nan := np.isnan(lowest[:, 0])).any():
        lowest[has_nan] = np.nan_to_num(values[has_nan], nan=np.inf, posinf=np.inf).min(axis=1, keepdims=True)
    codes, unit = _encode(values, chosen, counts, lowest=lowest, limits=limits, bits=bits)
    codes.sort(axis=1)
    kept = codes[:, :k]
    count = kept.shape[1]
    present = np.arange(count) < counts[:, None]
    np.bitwise_and(kept, (1 << bits) - 1, out=columns[:, :count], where=present)
    with np.errstate(invalid="ignore"):
        np.add((kept >> bits).astype(np.float32) * unit, lowest, out=smallest[:, :count], where=present)
    # Where the last numbers are very far, rounding makes the first ones equal.
    if count and len(coarse := np.flatnonzero((kept[:, count // 8] >> bits) < _MIN_RESOLUTION * count)):
        _sort_exactly(values, columns, smallest, coarse)
    return columns, smallest


def _sort_exactly(values: Floats, columns: NDArray[np.int64], smallest: Floats, rows: NDArray[np.int64]) -> None:
    """Sort the result of some rows by the values themselves, in place."""
    own = columns[rows]
    exact = np.where(own < 0, np.inf, np.take_along_axis(values[rows], np.maximum(own, 0), axis=1))
    order = np.argsort(exact, axis=1, kind="stable")
    columns[rows] = np.take_along_axis(own, order, axis=1)
    smallest[rows] = np.take_along_axis(exact, order, axis=1)


def _estimated_limits(values: Floats, k: int) -> Floats:
    """Return a limit for each row below which k of its numbers most probably are, (r, 1)."""
    expected = k / _SAMPLE_STEP
    rank = math.ceil(expected + _SAFETY * math.sqrt(expected))
    if rank * _SAMPLE_STEP * 2 > values.shape[1]:  # nearly all would be chosen
        return _exact_limits(values, k)
    return np.sort(values[:, ::_SAMPLE_STEP], axis=1)[:, rank - 1 : rank].copy()


def _exact_limits(values: Floats, k: int) -> Floats:
    """Return the k-th smallest number of each row, or the largest where there are fewer, (r, 1)."""
    k = min(k, values.shape[1])
    limits = np.partition(values, k - 1, axis=1)[:, k - 1 : k]
    largest = np.where(np.isfinite(values), values, -np.inf).max(axis=1, keepdims=True)
    return np.where(np.isfinite(limits), limits, largest).astype(np.float32)


def _below(values: Floats, limits: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the flat indices, row after row, of all numbers up to their row's limit; and their number in each row."""
    rows, width = values.shape
    chosen = np.flatnonzero(values <= np.minimum(limits, np.finfo(np.float32).max))
    ends = np.searchsorted(chosen, np.arange(rows + 1) * width)
    return chosen, np.diff(ends)


def _encode(
    values: Floats,
    chosen: NDArray[np.int64],
    counts: NDArray[np.int64],
    *,
    lowest: Floats,
    limits: Floats,
    bits: int,
) -> tuple[NDArray[Any], Floats]:
    """Return chosen numbers as integers above their column numbers, (r, most in a row), and the step of each row.

    Rows are padded with the largest integer.
    """
    rows, width = values.shape
    dtype: Any = np.int32 if bits <= _MAX_NARROW_BITS else np.int64
    steps = (1 << (min(_VALUE_BITS, 31 - bits) if bits <= _MAX_NARROW_BITS else _VALUE_BITS)) - 1
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        span = np.maximum(limits - lowest, 0)  # NaN where a row has no finite number
        factor = np.where(span > 0, np.minimum(steps / span, np.finfo(np.float32).max), 0).astype(np.float32)
        unit = np.where(span > 0, span / steps, 0).astype(np.float32)
    numbers = np.take(values.reshape(-1), chosen)
    with np.errstate(over="ignore"):
        numbers -= np.repeat(lowest[:, 0], counts)
        numbers *= np.repeat(factor[:, 0], counts)
    integers: NDArray[Any] = np.minimum(numbers, steps).astype(dtype)
    integers <<= bits
    integers |= (chosen - np.repeat(np.arange(0, rows * width, width), counts)).astype(dtype)
    codes = np.full((rows, int(counts.max())), np.iinfo(dtype).max, dtype)
    end = 0
    for row, count in enumerate(counts.tolist()):
        codes[row, :count] = integers[end : end + count]
        end += count
    return codes, unit


def parallel_for(count: int, work: Callable[[int, int], None]) -> None:
    """Call `work(begin, end)` for ranges that cover 0 to count, on as many threads as torch uses.

    It is faster only if `work` releases the GIL most of the time.
    """
    threads = torch.get_num_threads()
    if threads < 2 or count < 2 * _ROWS_PER_TASK:
        work(0, count)
        return
    begins = range(0, count, _ROWS_PER_TASK)
    for _ in _pool(threads).map(lambda begin: work(begin, min(begin + _ROWS_PER_TASK, count)), begins):
        pass


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="search")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
