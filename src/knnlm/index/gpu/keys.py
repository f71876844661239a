"""Keys on a device in the layout of the kernels, and bounds on the error of a rounded comparison.

Queries are rounded to the type of the keys before they are multiplied. The score of a key k is

    q·k - |k|²/2   for l2, which is (|q|² - |q-k|²)/2          q·k   for ip

and that of the rounded query r is off by e·k, where e = q - r. With any centre c, e·k = e·c + e·(k-c): the first term
is the same for all keys, and the second is at most |e||k-c|. `score_bound` turns that into a lower bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from knnlm.index.base import check_finite, random_rotation

WIDTH_MULTIPLE = 64  # dimensions are padded to a multiple of this, for the kernels
KEY_MULTIPLE = 256  # and keys to a multiple of this

# Error of a float32 sum on tensor cores, relative to |q||k|, per dimension: they truncate, so errors add up. At width
# 576, about five times the largest error measured.
_ROUNDING = 2.0**-28
_MIN_ROUNDING_WIDTH = 512
_SIGMAS = 6.0  # of the error of an int8 query; see Int8Keys
_MAX_INT8 = 127
_QUANTILE, _HEADROOM = 0.999, 1.25  # the range of int8 is this factor times this quantile of the sample


@dataclass(frozen=True)
class PreparedQueries:
    """Queries in the layout of the kernels, padded with zeros."""

    exact: Tensor  # (B, D) float32, in the space of the keys
    rounded: Tensor  # (B, D) in the keys' dtype
    scales: Tensor  # (B,) factor of a product with `rounded`
    error: Tensor  # (B, D) float32: exact less rounded, in units of the keys as stored


class DeviceKeys(Protocol):
    """Keys on a device."""

    keys: Tensor  # (N, D), padded
    half_squares: Tensor  # (N,) |k|²/2 or 0; inf for padding
    scales: Tensor  # (D,) factors of the stored numbers
    rows: int
    width: int
    metric: str
    extra_groups: float  # share of k by which more groups are measured, because scores are rounded

    def fill(self, first: int, block: Tensor) -> None:
        """Store (n, D) keys from row `first` on."""

    def prepare(self, queries: Tensor, multiple: int) -> PreparedQueries:
        """Round (B, D) float32 queries and pad their number to a multiple."""

    def score_bound(self, queries: PreparedQueries, distances: Tensor) -> Tensor:
        """Return the (B,) least score that a kernel can compute for a key at these (B,) distances."""

    def distance_offset(self, queries: Tensor) -> Tensor:
        """Return what is added to the measured distances of each query, (B,)."""

    def take(self, begin: int, end: int) -> Tensor:
        """Return keys as they are compared, (n, width) float32, in the space of prepared queries."""


class HalfKeys:
    """Keys in float16, exactly as they are stored."""

    extra_groups = 1 / 16

    def __init__(self, rows: int, width: int, *, metric: str, device: torch.device, centre: Tensor) -> None:
        self.rows, self.width, self.metric = rows, width, metric
        shape = padded(rows, KEY_MULTIPLE), padded(width, WIDTH_MULTIPLE)
        self.keys = torch.zeros(shape, dtype=torch.float16, device=device)
        self.half_squares = torch.full(shape[:1], torch.inf, device=device)
        self.scales = torch.ones(shape[1], device=device)
        self._centre = _pad_vector(centre.to(device, torch.float32), shape[1])
        self._radius = torch.zeros((), device=device)  # largest |k - centre|

    def fill(self, first: int, block: Tensor) -> None:
        """Store (n, D) keys from row `first` on."""
        rows = slice(first, first + len(block))
        self.keys[rows, : self.width] = block.to(self.keys)
        keys = self.keys[rows].float()
        squares = keys.square().sum(1)
        check_finite(squares, first)
        self.half_squares[rows] = squares / 2 if self.metric == "l2" else 0.0
        self._radius = torch.maximum(self._radius, (keys - self._centre).norm(dim=1).max())

    def prepare(self, queries: Tensor, multiple: int) -> PreparedQueries:
        """Round (B, D) float32 queries and pad their number to a multiple."""
        exact = _pad_queries(queries, multiple, self.keys.shape[1])
        largest = torch.finfo(torch.float16).max
        rounded = exact.clamp(-largest, largest).half()
        return PreparedQueries(exact, rounded, torch.ones(len(exact), device=exact.device), exact - rounded.float())

    def score_bound(self, queries: PreparedQueries, distances: Tensor) -> Tensor:
        """Return the (B,) least score that a kernel can compute for a key at these (B,) distances."""
        count = len(distances)
        query, error = queries.exact[:count].double(), queries.error[:count].double()
        distance, norm, error_norm = distances.double(), query.norm(dim=1), error.norm(dim=1)
        centre = self._centre.double()
        if self.metric == "l2":
            reach = distance.clamp(min=0).sqrt()
            score = (norm.square() - distance) / 2
            # A key at this distance cannot be farther from the centre than this.
            max_norm, max_radius = norm + reach, (query - centre).norm(dim=1) + reach
        else:
            score, max_radius = -distance, self._radius.double()
            max_norm = centre.norm() + max_radius
        slack = error_norm * max_radius + rounding(self.keys.shape[1]) * max_norm * (norm + max_norm)
        bound: Tensor = score - error @ centre - slack
        return bound.float()

    def distance_offset(self, queries: Tensor) -> Tensor:
        """Return what is added to the measured distances of each query, (B,)."""
        return queries.new_zeros(len(queries))

    def take(self, begin: int, end: int) -> Tensor:
        """Return keys as they are compared, (n, width) float32, in the space of prepared queries."""
        return self.keys[begin:end, : self.width].float()


class Int8Keys:
    """Keys in int8: half the bytes of float16 and half as fast again, for distances to rounded keys.

    Keys are centred and rotated at random, which keeps distances and gives all dimensions the same range, so that one
    int8 step suits them all, and queries too. After it, the error e of a rounded query has no preferred direction, and
    e·k is about |e||k|/√D; the bound is six times that rather than the |e||k| of the worst case, so that a neighbour is
    missed with a probability below 1e-8 rather than never.
    """

    extra_groups = 1.0

    def __init__(self, rows: int, width: int, *, metric: str, device: torch.device, sample: Tensor) -> None:
        self.rows, self.width, self.metric = rows, width, metric
        sample = sample.to(device, torch.float32)
        self._centre = sample.mean(0)
        self._rotation = random_rotation(width, device)
        shape = padded(rows, KEY_MULTIPLE), padded(width, WIDTH_MULTIPLE)
        # Not the maximum: the range of one enormous key would leave the others a step or two.
        sizes = ((sample - self._centre) @ self._rotation).abs().sort(0).values
        limit = _HEADROOM * sizes[math.ceil(_QUANTILE * len(sizes)) - 1]
        self.scales = _pad_vector(torch.minimum(sizes[-1], limit).clamp(min=1e-20) / _MAX_INT8, shape[1])
        self.keys = torch.zeros(shape, dtype=torch.int8, device=device)
        self.half_squares = torch.full(shape[:1], torch.inf, device=device)
        self._max_norm = torch.zeros((), device=device)  # largest |k|, in steps

    def fill(self, first: int, block: Tensor) -> None:
        """Store (n, D) keys from row `first` on."""
        rows = slice(first, first + len(block))
        check_finite(block.float().square().sum(1), first)
        rotated = (block.float() - self._centre) @ self._rotation
        steps = (rotated / self.scales[: self.width]).round_().clamp_(-_MAX_INT8, _MAX_INT8)
        self.keys[rows, : self.width] = steps.to(torch.int8)
        squares = (steps * self.scales[: self.width]).square().sum(1)
        self.half_squares[rows] = squares / 2 if self.metric == "l2" else 0.0
        self._max_norm = torch.maximum(self._max_norm, steps.norm(dim=1).max())

    def prepare(self, queries: Tensor, multiple: int) -> PreparedQueries:
        """Round (B, D) float32 queries and pad their number to a multiple."""
        centred = queries - self._centre if self.metric == "l2" else queries
        exact = _pad_queries(centred @ self._rotation, multiple, self.keys.shape[1])
        scaled = exact * self.scales
        step = scaled.abs().amax(1, keepdim=True).clamp(min=1e-30) / _MAX_INT8
        steps = (scaled / step).round()
        return PreparedQueries(exact, steps.to(torch.int8), step[:, 0].contiguous(), scaled - steps * step)

    def score_bound(self, queries: PreparedQueries, distances: Tensor) -> Tensor:
        """Return the (B,) least score that a kernel can compute for a key at these (B,) distances."""
        count = len(distances)
        squares = queries.exact[:count].double().square().sum(1)
        score = (squares - distances.double()) / 2 if self.metric == "l2" else -distances.double()
        max_error = queries.error[:count].double().norm(dim=1) * self._max_norm.double()
        likely_error = _SIGMAS / math.sqrt(self.width) * max_error
        bound: Tensor = score - likely_error - rounding(self.keys.shape[1]) * (squares + distances.double().abs())
        return bound.float()

    def distance_offset(self, queries: Tensor) -> Tensor:
        """Return what is added to the measured distances of each query, (B,)."""
        products: Tensor = queries @ self._centre
        return products.neg() if self.metric == "ip" else torch.zeros_like(products)

    def take(self, begin: int, end: int) -> Tensor:
        """Return keys as they are compared, (n, width) float32, in the space of prepared queries."""
        return self.keys[begin:end, : self.width] * self.scales[: self.width]


def rounding(width: int) -> float:
    """Return the error of a sum over this many dimensions, relative to the norms of the factors."""
    return _ROUNDING * max(_MIN_ROUNDING_WIDTH, width)


def padded(count: int, multiple: int) -> int:
    """Return the next multiple, at least one."""
    return max(1, -(-count // multiple)) * multiple


def _pad_vector(vector: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(vector, (0, width - len(vector)))


def _pad_queries(queries: Tensor, multiple: int, width: int) -> Tensor:
    rows = padded(len(queries), multiple)
    return torch.nn.functional.pad(queries.float(), (0, width - queries.shape[1], 0, rows - len(queries))).contiguous()
