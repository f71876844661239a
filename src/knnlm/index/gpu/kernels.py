"""The Triton kernels of exact search; `search.py` combines them.

Keys are compared in groups of 2J: group g of a block of 8J keys holds the pairs 2g, 2g+1 of every 8, for g = 0 … 3.
That is how tensor cores lay a tile out, so the largest score of a group is found within one thread.

With TRITON_INTERPRET=1 the same kernels run on a CPU, slowly, so that tests need no GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from knnlm.index.gpu.keys import WIDTH_MULTIPLE


@dataclass(frozen=True)
class TileShape:
    """The tiles of a launch."""

    queries: int  # of a tile
    keys: int  # of a tile; divides `keys.KEY_MULTIPLE`
    pairs: int  # of a group: J
    warps: int
    stages: int


# Measured on an H200 with keys of width 576; see docs/background/log.md.
_SMALL_SHAPES = {16: TileShape(16, 128, 16, 4, 5), 32: TileShape(32, 128, 16, 4, 5), 64: TileShape(64, 128, 16, 4, 4)}
_LARGE_SHAPE = TileShape(128, 256, 8, 8, 3)
_LARGE_INT8_SHAPE = TileShape(128, 128, 16, 4, 3)


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on a device; on a CPU only under Triton's interpreter."""
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def shape_for(count: int, dtype: torch.dtype) -> TileShape:
    """Return the tiles for this many queries."""
    for max_count, shape in _SMALL_SHAPES.items():
        if count <= max_count:
            return shape
    return _LARGE_INT8_SHAPE if dtype == torch.int8 else _LARGE_SHAPE


def group_maxima(
    queries: Tensor, keys: Tensor, *, scales: Tensor, half_squares: Tensor, out: Tensor, shape: TileShape
) -> None:
    """Write the largest score of each group of keys: (B, D), (N, D), (B,), (N,) → (B, N / 2J).

    A score is scale · (q·k) - half square. B, N and D are multiples of the tile's.
    """
    count = len(queries) // shape.queries
    _group_maxima[(count * (len(keys) // shape.keys),)](
        queries,
        scales,
        keys,
        half_squares,
        out,
        out.shape[1],
        count,
        D=keys.shape[1],
        BQ=shape.queries,
        BK=shape.keys,
        STEP=WIDTH_MULTIPLE,
        J=shape.pairs,
        INT8=keys.dtype == torch.int8,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


@triton.jit
def _group_maxima(
    queries,
    scales,
    keys,
    half_squares,
    out,
    groups,
    tiles,
    D: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    STEP: tl.constexpr,
    J: tl.constexpr,
    INT8: tl.constexpr,
):
    # Neighbouring programs share a tile of keys, so that it is in the L2 cache; all queries stay there anyway.
    program = tl.program_id(0)
    tile = program // tiles
    rows = (program % tiles) * BQ + tl.arange(0, BQ)
    columns = tile.to(tl.int64) * BK + tl.arange(0, BK)
    dims = tl.arange(0, STEP)
    query = queries + rows[:, None] * D + dims[None, :]
    key = keys + columns[None, :] * D + dims[:, None]
    if INT8:
        sums = tl.zeros((BQ, BK), tl.int32)
    else:
        sums = tl.zeros((BQ, BK), tl.float32)
    for _ in range(0, D, STEP):
        sums = tl.dot(tl.load(query), tl.load(key), sums, out_dtype=sums.dtype)
        query += STEP
        key += STEP
    half_square = tl.load(half_squares + columns)
    if INT8:
        scores = sums.to(tl.float32) * tl.load(scales + rows)[:, None] - half_square[None, :]
    else:
        scores = sums - half_square[None, :]
    best = tl.max(tl.max(tl.reshape(scores, (BQ, BK // (8 * J), J, 4, 2)), 4), 2)
    best = tl.reshape(best, (BQ, BK // (2 * J)))
    places = tile * (BK // (2 * J)) + tl.arange(0, BK // (2 * J))
    tl.store(out + rows.to(tl.int64)[:, None] * groups + places[None, :], best)


@dataclass(frozen=True)
class Survivors:
    """The values that reach the threshold of their row, in no order."""

    counts: Tensor  # (B,) their number; above the capacity, only some of them were kept
    columns: Tensor  # (B, capacity)
    values: Tensor  # (B, capacity); -inf where there is none

    def kept_columns(self) -> Tensor:
        """Return the columns that were kept, (B, W); -1 where a row has fewer than W."""
        counts = self.counts.clamp(max=self.columns.shape[1])
        columns = self.columns[:, : int(counts.max())]
        absent = torch.arange(columns.shape[1], device=columns.device) >= counts[:, None]
        return columns.masked_fill(absent, -1)


def survivors(maxima: Tensor, thresholds: Tensor, capacity: int) -> Survivors:
    """Collect the values that reach the threshold of their row: (B, C), (B,)."""
    rows, width = maxima.shape
    counts = torch.zeros(rows, dtype=torch.int32, device=maxima.device)
    columns = torch.zeros(rows, capacity, dtype=torch.int32, device=maxima.device)
    values = torch.full((rows, capacity), -torch.inf, device=maxima.device)
    block = 256
    programs = min(64, triton.cdiv(width, block))
    span = triton.cdiv(width, programs * block) * block
    _survivors[(rows, programs)](
        maxima, thresholds, counts, columns, values, width, span, capacity, BLOCK=block, num_warps=1
    )
    return Survivors(counts, columns, values)


@triton.jit
def _survivors(
    maxima,
    thresholds,
    counts,
    columns,
    values,
    width,
    span,
    capacity,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    threshold = tl.load(thresholds + row)
    begin = tl.program_id(1) * span
    for start in range(begin, begin + span, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(maxima + row * width + column, mask=column < width, other=float("-inf"))
        keep = (value >= threshold) & (column < width)
        count = tl.sum(keep.to(tl.int32))
        if count > 0:
            place = tl.atomic_add(counts + row, count) + tl.cumsum(keep.to(tl.int32)) - 1
            fits = keep & (place < capacity)
            tl.store(columns + row * capacity + place, column, mask=fits)
            tl.store(values + row * capacity + place, value, mask=fits)


def group_distances(
    queries: Tensor, keys: Tensor, *, scales: Tensor, groups: Tensor, rows: int, pairs: int, metric: str
) -> Tensor:
    """Return the float32 distances of every key of some groups: (B, D), (N, D), (D,), (B, W) → (B, W·2J).

    A negative group and keys from `rows` on are infinitely far. Keys are multiplied by their scales first.
    """
    wanted = groups.shape[1]
    members = 2 * pairs
    out = torch.empty(len(queries), wanted * members, device=queries.device)
    batch = max(1, 128 // members)
    # The first axis of a grid is unlimited, the second ends at 65,535.
    _group_distances[(triton.cdiv(wanted, batch) * len(queries),)](
        queries,
        keys,
        scales,
        groups,
        out,
        rows,
        wanted,
        triton.cdiv(wanted, batch),
        D=keys.shape[1],
        STEP=WIDTH_MULTIPLE,
        J=pairs,
        GROUPS=batch,
        INNER=metric == "ip",
        INT8=keys.dtype == torch.int8,
        num_warps=4,
    )
    return out


@triton.jit
def _group_distances(
    queries,
    keys,
    scales,
    groups,
    out,
    rows,
    wanted,
    programs,
    D: tl.constexpr,
    STEP: tl.constexpr,
    J: tl.constexpr,
    GROUPS: tl.constexpr,
    INNER: tl.constexpr,
    INT8: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // programs).to(tl.int64)
    member = tl.arange(0, GROUPS * 2 * J)
    which = (program % programs) * GROUPS + member // (2 * J)
    group = tl.load(groups + row * wanted + which, mask=which < wanted, other=-1).to(tl.int64)
    inside = member % (2 * J)
    key = (group // 4) * (8 * J) + (inside // 2) * 8 + (group % 4) * 2 + inside % 2
    present = (group >= 0) & (key < rows)
    total = tl.zeros((GROUPS * 2 * J,), tl.float32)
    for begin in range(0, D, STEP):
        dims = begin + tl.arange(0, STEP)
        query = tl.load(queries + row * D + dims)[None, :]
        stored = tl.load(keys + key[:, None] * D + dims[None, :], mask=present[:, None], other=0).to(tl.float32)
        if INT8:
            stored = stored * tl.load(scales + dims)[None, :]
        if INNER:
            total -= tl.sum(stored * query, 1)
        else:
            difference = stored - query
            total += tl.sum(difference * difference, 1)
    total = tl.where(present, total, float("inf"))
    tl.store(out + row * wanted * (2 * J) + which * (2 * J) + inside, total, mask=which < wanted)


def key_ids(groups: Tensor, columns: Tensor, *, pairs: int) -> Tensor:
    """Return the keys of these columns of the result of `group_distances`, (B, W), (B, k) → (B, k)."""
    members = 2 * pairs
    group, inside = groups.long().gather(1, columns // members), columns % members
    return group // 4 * (8 * pairs) + inside // 2 * 8 + group % 4 * 2 + inside % 2
