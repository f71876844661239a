"""The GPU kernels behind exact search, in Triton. Know nothing about exactness: `fused` puts them together.

Keys are compared in groups of 2J: group g of a block of 8J keys holds the pairs 2g, 2g+1 of every 8, for g = 0 … 3.
That is how tensor cores lay a tile out, so the largest score of a group is found within one thread.

With TRITON_INTERPRET=1 the same kernels run on a CPU, slowly: that is how they are tested where there is no GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from knnlm.index.gpu.keys import DEPTH


@dataclass(frozen=True)
class Shape:
    """How a launch cuts its work up."""

    queries: int  # in a tile
    keys: int  # in a tile; divides `held.TILE`
    pairs: int  # in a group: J
    warps: int
    stages: int


# Measured on an H200 with keys of width 576; see docs/log.md.
_SMALL = {16: Shape(16, 128, 16, 4, 5), 32: Shape(32, 128, 16, 4, 5), 64: Shape(64, 128, 16, 4, 4)}

_LARGE = Shape(128, 256, 8, 8, 3)

_LARGE_BYTES = Shape(128, 128, 16, 4, 3)


def runs_on(device: torch.device) -> bool:
    """Say whether the kernels can run there: on a CPU only under Triton's interpreter."""
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def shape_for(count: int, dtype: torch.dtype) -> Shape:
    """Choose how to cut up a product of so many queries."""
    for most, shape in _SMALL.items():
        if count <= most:
            return shape
    return _LARGE_BYTES if dtype == torch.int8 else _LARGE


def group_maxima(queries: Tensor, scales: Tensor, keys: Tensor, halves: Tensor, out: Tensor, shape: Shape) -> None:
    """Write the largest score of each group of keys: (B, D), (B,), (N, D), (N,) → (B, N / 2J).

    A score is scale · (q·k) - half. B, N and D are multiples of the tile's.
    """
    count = len(queries) // shape.queries
    _group_maxima[(count * (len(keys) // shape.keys),)](
        queries,
        scales,
        keys,
        halves,
        out,
        out.shape[1],
        count,
        D=keys.shape[1],
        BQ=shape.queries,
        BK=shape.keys,
        STEP=DEPTH,
        J=shape.pairs,
        BYTES=keys.dtype == torch.int8,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


@triton.jit
def _group_maxima(
    queries,
    scales,
    keys,
    halves,
    out,
    groups,
    tiles,
    D: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    STEP: tl.constexpr,
    J: tl.constexpr,
    BYTES: tl.constexpr,
):
    # Neighbouring programs share a tile of keys, which is then in the L2 cache; all queries stay there anyway.
    program = tl.program_id(0)
    tile = program // tiles
    rows = (program % tiles) * BQ + tl.arange(0, BQ)
    columns = tile.to(tl.int64) * BK + tl.arange(0, BK)
    dims = tl.arange(0, STEP)
    query = queries + rows[:, None] * D + dims[None, :]
    key = keys + columns[None, :] * D + dims[:, None]
    if BYTES:
        sums = tl.zeros((BQ, BK), tl.int32)
    else:
        sums = tl.zeros((BQ, BK), tl.float32)
    for _ in range(0, D, STEP):
        sums = tl.dot(tl.load(query), tl.load(key), sums, out_dtype=sums.dtype)
        query += STEP
        key += STEP
    half = tl.load(halves + columns)
    if BYTES:
        scores = sums.to(tl.float32) * tl.load(scales + rows)[:, None] - half[None, :]
    else:
        scores = sums - half[None, :]
    best = tl.max(tl.max(tl.reshape(scores, (BQ, BK // (8 * J), J, 4, 2)), 4), 2)
    best = tl.reshape(best, (BQ, BK // (2 * J)))
    places = tile * (BK // (2 * J)) + tl.arange(0, BK // (2 * J))
    tl.store(out + rows.to(tl.int64)[:, None] * groups + places[None, :], best)


@dataclass(frozen=True)
class Survivors:
    """What reached the threshold of its row, in no order."""

    counts: Tensor  # (B,) how many did; where that is above the capacity, only some of them were kept
    places: Tensor  # (B, capacity) their columns
    values: Tensor  # (B, capacity) and what stood there; -inf where there is none


def survivors(maxima: Tensor, thresholds: Tensor, capacity: int) -> Survivors:
    """Collect what reaches the threshold of its row: (B, C), (B,)."""
    rows, columns = maxima.shape
    counts = torch.zeros(rows, dtype=torch.int32, device=maxima.device)
    places = torch.zeros(rows, capacity, dtype=torch.int32, device=maxima.device)
    values = torch.full((rows, capacity), -torch.inf, device=maxima.device)
    block = 256
    parts = min(64, triton.cdiv(columns, block))
    span = triton.cdiv(columns, parts * block) * block
    _survivors[(rows, parts)](
        maxima, thresholds, counts, places, values, columns, span, capacity, BLOCK=block, num_warps=1
    )
    return Survivors(counts, places, values)


@triton.jit
def _survivors(
    maxima,
    thresholds,
    counts,
    places,
    values,
    columns,
    span,
    capacity,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    threshold = tl.load(thresholds + row)
    begin = tl.program_id(1) * span
    for start in range(begin, begin + span, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(maxima + row * columns + column, mask=column < columns, other=float("-inf"))
        keep = (value >= threshold) & (column < columns)
        count = tl.sum(keep.to(tl.int32))
        if count > 0:
            place = tl.atomic_add(counts + row, count) + tl.cumsum(keep.to(tl.int32)) - 1
            fits = keep & (place < capacity)
            tl.store(places + row * capacity + place, column, mask=fits)
            tl.store(values + row * capacity + place, value, mask=fits)


def measure(
    queries: Tensor, keys: Tensor, scales: Tensor, groups: Tensor, rows: int, *, pairs: int, metric: str
) -> Tensor:
    """Measure every key of some groups in float32: (B, D), (N, D), (D,), (B, W) → (B, W·2J) distances.

    A group below 0 and a key from `rows` on are infinitely far. Keys are multiplied by their scales first.
    """
    wanted = groups.shape[1]
    members = 2 * pairs
    out = torch.empty(len(queries), wanted * members, device=queries.device)
    at_once = max(1, 128 // members)
    # The first axis of a grid has no end, the second ends at 65,535.
    _measure[(triton.cdiv(wanted, at_once) * len(queries),)](
        queries,
        keys,
        scales,
        groups,
        out,
        rows,
        wanted,
        triton.cdiv(wanted, at_once),
        D=keys.shape[1],
        STEP=DEPTH,
        J=pairs,
        GROUPS=at_once,
        INNER=metric == "ip",
        BYTES=keys.dtype == torch.int8,
        num_warps=4,
    )
    return out


@triton.jit
def _measure(
    queries,
    keys,
    scales,
    groups,
    out,
    rows,
    wanted,
    parts,
    D: tl.constexpr,
    STEP: tl.constexpr,
    J: tl.constexpr,
    GROUPS: tl.constexpr,
    INNER: tl.constexpr,
    BYTES: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // parts).to(tl.int64)
    member = tl.arange(0, GROUPS * 2 * J)
    which = (program % parts) * GROUPS + member // (2 * J)
    group = tl.load(groups + row * wanted + which, mask=which < wanted, other=-1).to(tl.int64)
    inside = member % (2 * J)
    key = (group // 4) * (8 * J) + (inside // 2) * 8 + (group % 4) * 2 + inside % 2
    there = (group >= 0) & (key < rows)
    total = tl.zeros((GROUPS * 2 * J,), tl.float32)
    for begin in range(0, D, STEP):
        dims = begin + tl.arange(0, STEP)
        query = tl.load(queries + row * D + dims)[None, :]
        stored = tl.load(keys + key[:, None] * D + dims[None, :], mask=there[:, None], other=0).to(tl.float32)
        if BYTES:
            stored = stored * tl.load(scales + dims)[None, :]
        if INNER:
            total -= tl.sum(stored * query, 1)
        else:
            apart = stored - query
            total += tl.sum(apart * apart, 1)
    total = tl.where(there, total, float("inf"))
    tl.store(out + row * wanted * (2 * J) + which * (2 * J) + inside, total, mask=which < wanted)


def key_numbers(groups: Tensor, places: Tensor, *, pairs: int) -> Tensor:
    """Say which keys stand at these places of what `measure` gave, (B, W), (B, k) → (B, k)."""
    members = 2 * pairs
    group, inside = groups.long().gather(1, places // members), places % members
    return group // 4 * (8 * pairs) + inside // 2 * 8 + group % 4 * 2 + inside % 2
