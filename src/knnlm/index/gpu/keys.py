"""Keys on a device as the kernels want them, and how far a rounded comparison can be off. Knows nothing about search.

Queries are rounded to what the keys are stored in before they are multiplied. The score of a key k is

    q·k - |k|²/2   for l2, which is (|q|² - |q-k|²)/2          q·k   for ip

and that of the rounded query r is off by e·k, where e = q - r. With any centre c, e·k = e·c + e·(k-c): the first term
is the same for all keys, and the second is at most |e||k-c|. `lower` turns that into a bound that nothing can pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from knnlm.index.base import check_finite

DEPTH = 64  # dimensions are padded to a multiple of this, for the kernels

TILE = 256  # and keys to a multiple of this

# Of a float32 sum on tensor cores, relative to |q||k|, for each dimension: they cut digits off, so that errors add up.
# At width 576 about five times the most that was seen.
_ROUNDING = 2.0**-28

_SIGMAS = 6.0  # of the error of an int8 query; see ByteKeys

_LEVELS = 127

_USUAL, _HEADROOM = 0.999, 1.25  # int8 ends at this many times a size that this share of numbers stays below

_ROTATION_SEED = 0


@dataclass(frozen=True)
class PreparedQueries:
    """Queries, ready to be compared with keys; padded with zeros."""

    exact: Tensor  # (B, D) float32, in the space of the keys
    rounded: Tensor  # (B, D) in the keys' dtype
    scales: Tensor  # (B,) what a product with `rounded` is multiplied by
    error: Tensor  # (B, D) float32: exact less rounded, in units of the keys as stored


class DeviceKeys(Protocol):
    """Keys on a device."""

    keys: Tensor  # (N, D), padded
    halves: Tensor  # (N,) |k|²/2 or 0; inf for padding
    scales: Tensor  # (D,) what the stored numbers are multiplied by
    rows: int
    width: int
    metric: str
    blur: float  # how many groups more than k are worth measuring at once, for a score is not quite the distance

    def fill(self, first: int, block: Tensor) -> None:
        """Put (n, D) keys to rows first … first + n - 1."""

    def ask(self, queries: Tensor, multiple: int) -> PreparedQueries:
        """Round (B, D) float32 queries, and pad them to a multiple of rows."""

    def lower(self, asked: PreparedQueries, distances: Tensor) -> Tensor:
        """Give the (B,) least score that a kernel can give to a key that is as near as these (B,) distances."""

    def shift(self, queries: Tensor) -> Tensor:
        """Give the (B,) that measured distances are to be moved by."""

    def take(self, begin: int, end: int) -> Tensor:
        """Give some keys as they are compared, (n, width) float32, where `ask` puts queries too."""


class HalfKeys:
    """Keys in float16, exactly as they are stored."""

    blur = 1 / 16

    def __init__(self, rows: int, width: int, *, metric: str, device: torch.device, centre: Tensor) -> None:
        self.rows, self.width, self.metric = rows, width, metric
        shape = padded(rows, TILE), padded(width, DEPTH)
        self.keys = torch.zeros(shape, dtype=torch.float16, device=device)
        self.halves = torch.full(shape[:1], torch.inf, device=device)
        self.scales = torch.ones(shape[1], device=device)
        self._centre = _wide(centre.to(device, torch.float32), shape[1])
        self._radius = torch.zeros((), device=device)  # largest |k - centre|

    def fill(self, first: int, block: Tensor) -> None:
        """Put (n, D) keys to rows first … first + n - 1."""
        rows = slice(first, first + len(block))
        self.keys[rows, : self.width] = block.to(self.keys)
        whole = self.keys[rows].float()
        squares = whole.square().sum(1)
        check_finite(squares, first)
        self.halves[rows] = squares / 2 if self.metric == "l2" else 0.0
        self._radius = torch.maximum(self._radius, (whole - self._centre).norm(dim=1).max())

    def ask(self, queries: Tensor, multiple: int) -> PreparedQueries:
        """Round (B, D) float32 queries, and pad them to a multiple of rows."""
        exact = _pad(queries, multiple, self.keys.shape[1])
        most = torch.finfo(torch.float16).max
        rounded = exact.clamp(-most, most).half()
        return PreparedQueries(exact, rounded, torch.ones(len(exact), device=exact.device), exact - rounded.float())

    def lower(self, asked: PreparedQueries, distances: Tensor) -> Tensor:
        """Give the (B,) least score that a kernel can give to a key that is as near as these (B,) distances."""
        count = len(distances)
        query, error = asked.exact[:count].double(), asked.error[:count].double()
        far, size, off = distances.double(), query.norm(dim=1), error.norm(dim=1)
        centre = self._centre.double()
        if self.metric == "l2":
            reach = far.clamp(min=0).sqrt()
            score = (size.square() - far) / 2
            # Who is so near cannot be farther from the centre than this.
            longest, apart = size + reach, (query - centre).norm(dim=1) + reach
        else:
            score, apart = -far, self._radius.double()
            longest = centre.norm() + apart
        slack = off * apart + rounding(self.keys.shape[1]) * longest * (size + longest)
        lower: Tensor = score - error @ centre - slack
        return lower.float()

    def shift(self, queries: Tensor) -> Tensor:
        """Give the (B,) that measured distances are to be moved by."""
        return queries.new_zeros(len(queries))

    def take(self, begin: int, end: int) -> Tensor:
        """Give some keys as they are compared, (n, width) float32, where `ask` puts queries too."""
        return self.keys[begin:end, : self.width].float()


class ByteKeys:
    """Keys in int8: half the bytes of float16 and half as fast again, for distances to rounded keys.

    Keys are centred and turned by a random rotation, which distances do not notice and which makes all dimensions
    alike, so that one int8 step suits them all, and queries too. After it, the error e of a rounded query points
    nowhere in particular, and e·k is about |e||k|/√D; the bound is six times that rather than the |e||k| of the worst
    case, so that a neighbour is missed with a probability below 1e-8 rather than never.
    """

    blur = 1.0

    def __init__(self, rows: int, width: int, *, metric: str, device: torch.device, sample: Tensor) -> None:
        self.rows, self.width, self.metric = rows, width, metric
        sample = sample.to(device, torch.float32)
        self._centre = sample.mean(0)
        self._rotation = random_rotation(width, device)
        shape = padded(rows, TILE), padded(width, DEPTH)
        # Not the largest of all: what one enormous key needs would leave the others a step or two.
        sizes = ((sample - self._centre) @ self._rotation).abs().sort(0).values
        usual = _HEADROOM * sizes[math.ceil(_USUAL * len(sizes)) - 1]
        self.scales = _wide(torch.minimum(sizes[-1], usual).clamp(min=1e-20) / _LEVELS, shape[1])
        self.keys = torch.zeros(shape, dtype=torch.int8, device=device)
        self.halves = torch.full(shape[:1], torch.inf, device=device)
        self._longest = torch.zeros((), device=device)  # largest |k|, in steps

    def fill(self, first: int, block: Tensor) -> None:
        """Put (n, D) keys to rows first … first + n - 1."""
        rows = slice(first, first + len(block))
        check_finite(block.float().square().sum(1), first)
        turned = (block.float() - self._centre) @ self._rotation
        steps = (turned / self.scales[: self.width]).round_().clamp_(-_LEVELS, _LEVELS)
        self.keys[rows, : self.width] = steps.to(torch.int8)
        self.halves[rows] = (steps * self.scales[: self.width]).square().sum(1) / 2 if self.metric == "l2" else 0.0
        self._longest = torch.maximum(self._longest, steps.norm(dim=1).max())

    def ask(self, queries: Tensor, multiple: int) -> PreparedQueries:
        """Round (B, D) float32 queries, and pad them to a multiple of rows."""
        centred = queries - self._centre if self.metric == "l2" else queries
        exact = _pad(centred @ self._rotation, multiple, self.keys.shape[1])
        wanted = exact * self.scales
        step = wanted.abs().amax(1, keepdim=True).clamp(min=1e-30) / _LEVELS
        steps = (wanted / step).round()
        return PreparedQueries(exact, steps.to(torch.int8), step[:, 0].contiguous(), wanted - steps * step)

    def lower(self, asked: PreparedQueries, distances: Tensor) -> Tensor:
        """Give the (B,) least score that a kernel can give to a key that is as near as these (B,) distances."""
        count = len(distances)
        squares = asked.exact[:count].double().square().sum(1)
        score = (squares - distances.double()) / 2 if self.metric == "l2" else -distances.double()
        off = asked.error[:count].double().norm(dim=1) * self._longest.double()
        blurred = _SIGMAS / math.sqrt(self.width) * off
        lower: Tensor = score - blurred - rounding(self.keys.shape[1]) * (squares + distances.double().abs())
        return lower.float()

    def shift(self, queries: Tensor) -> Tensor:
        """Give the (B,) that measured distances are to be moved by."""
        along: Tensor = queries @ self._centre
        return along.neg() if self.metric == "ip" else torch.zeros_like(along)

    def take(self, begin: int, end: int) -> Tensor:
        """Give some keys as they are compared, (n, width) float32, where `ask` puts queries too."""
        return self.keys[begin:end, : self.width] * self.scales[: self.width]


def rounding(width: int) -> float:
    """Give how far a sum over so many dimensions can be off, relative to the lengths of what is multiplied."""
    return _ROUNDING * max(512, width)


def random_rotation(width: int, device: torch.device) -> Tensor:
    """Give a (D, D) orthogonal matrix, the same every time."""
    generator = torch.Generator().manual_seed(_ROTATION_SEED)
    square = torch.randn(width, width, generator=generator, dtype=torch.float64)
    rotation: Tensor = torch.linalg.qr(square).Q
    return rotation.to(device, torch.float32).contiguous()


def padded(count: int, multiple: int) -> int:
    """Give the next multiple; at least one."""
    return max(1, -(-count // multiple)) * multiple


def _wide(vector: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(vector, (0, width - len(vector)))


def _pad(queries: Tensor, multiple: int, width: int) -> Tensor:
    rows = padded(len(queries), multiple)
    return torch.nn.functional.pad(queries.float(), (0, width - queries.shape[1], 0, rows - len(queries))).contiguous()
