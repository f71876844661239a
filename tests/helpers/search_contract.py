"""The contract of exact search on any device: plain functions that raise AssertionError, without a test framework.

`test_gpu.py` calls them on a CPU under Triton's interpreter, `benchmarks/check_gpu.py` on a GPU with larger sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnlm.index.base import Neighbours
from knnlm.index.exact import BruteForceSearch, ExactIndex
from knnlm.index.gpu import kernels
from knnlm.index.gpu import search as gpu_search
from knnlm.index.gpu.keys import DeviceKeys, HalfKeys, Int8Keys
from knnlm.index.packed import merge_shards

SHAPES = {
    "16 queries": (kernels._SMALL_SHAPES[16], torch.float16),
    "32 queries": (kernels._SMALL_SHAPES[32], torch.float16),
    "64 queries": (kernels._SMALL_SHAPES[64], torch.float16),
    "many queries": (kernels._LARGE_SHAPE, torch.float16),
    "16 queries, int8": (kernels._SMALL_SHAPES[16], torch.int8),
    "32 queries, int8": (kernels._SMALL_SHAPES[32], torch.int8),
    "64 queries, int8": (kernels._SMALL_SHAPES[64], torch.int8),
    "many queries, int8": (kernels._LARGE_INT8_SHAPE, torch.int8),
}


class Array:
    """Vectors in RAM, without information on how they are stored."""

    def __init__(self, data: Any) -> None:
        self.data = torch.as_tensor(data)

    @property
    def rows(self) -> int:
        """The number of keys."""
        return len(self.data)

    @property
    def width(self) -> int:
        """The number of their dimensions."""
        return self.data.shape[1]

    def chunks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (id of the first key, (n, D) float32) from first to last."""
        for first in range(0, self.rows, size):
            yield first, self.data[first : first + size].float()

    def take(self, ids: Tensor) -> Tensor:
        """Return the keys of these ids."""
        return self.data[ids.clamp(min=0)].float() * (ids >= 0)[..., None]


def random_data(generator: torch.Generator, rows: int, width: int, count: int) -> tuple[Tensor, Tensor]:
    """Keys and queries without any structure."""
    device = generator.device
    keys = torch.randn(rows, width, generator=generator, device=device).half()
    return keys, torch.randn(count, width, generator=generator, device=device)


def anisotropic(generator: torch.Generator, rows: int, width: int, count: int) -> tuple[Tensor, Tensor]:
    """A few dimensions a thousand times larger than the others, all means far from zero: like those of a model."""
    device = generator.device
    size = torch.rand(width, generator=generator, device=device) + 0.5
    size[:: max(1, width // 3)] *= 1000
    mean = size * 5 * torch.randn(width, generator=generator, device=device)
    keys = (mean + size * torch.randn(rows, width, generator=generator, device=device)).half()
    return keys, mean + size * torch.randn(count, width, generator=generator, device=device)


def shifted(generator: torch.Generator, rows: int, width: int, count: int) -> tuple[Tensor, Tensor]:
    """So far from zero that a query loses all its digits when it is rounded."""
    device = generator.device
    keys = (1000 + 4 * torch.randn(rows, width, generator=generator, device=device)).half()
    return keys, 1000 + 4 * torch.randn(count, width, generator=generator, device=device)


def clusters(generator: torch.Generator, rows: int, width: int, count: int) -> tuple[Tensor, Tensor]:
    """A few tight clusters, and queries close to some of their keys."""
    device = generator.device
    centres = 10 * torch.randn(max(1, rows // 100), width, generator=generator, device=device)
    own = torch.randint(len(centres), (rows,), generator=generator, device=device)
    keys = (centres[own] + 0.05 * torch.randn(rows, width, generator=generator, device=device)).half()
    chosen = torch.randint(rows, (count,), generator=generator, device=device)
    return keys, keys[chosen].float() + 0.01 * torch.randn(count, width, generator=generator, device=device)


def duplicates(generator: torch.Generator, rows: int, width: int, count: int) -> tuple[Tensor, Tensor]:
    """Two of three keys are the same one, and some queries are that one too."""
    keys, queries = random_data(generator, rows, width, count)
    same = torch.rand(rows, generator=generator, device=generator.device) < 2 / 3
    keys[same] = keys[0].clone()
    queries[::2] = keys[0].float()
    return keys, queries


def outlier(generator: torch.Generator, rows: int, width: int, count: int) -> tuple[Tensor, Tensor]:
    """One key is enormous."""
    keys, queries = random_data(generator, rows, width, count)
    keys[rows // 2] *= 10_000
    return keys, queries


def huge_queries(generator: torch.Generator, rows: int, width: int, count: int) -> tuple[Tensor, Tensor]:
    """Queries beyond the range of float16."""
    keys, queries = random_data(generator, rows, width, count)
    return keys * 100, queries * 1e6


def tiny_keys(generator: torch.Generator, rows: int, width: int, count: int) -> tuple[Tensor, Tensor]:
    """Keys at the lower end of float16's range, and queries partly below it."""
    keys, queries = random_data(generator, rows, width, count)
    return (keys.float() * 1e-6).half(), queries * 1e-6


def ascending(generator: torch.Generator, rows: int, width: int, count: int) -> tuple[Tensor, Tensor]:
    """Keys in the order of their norms: a sample at even steps is no random sample."""
    keys, queries = random_data(generator, rows, width, count)
    keys *= torch.linspace(0.1, 10, rows, device=keys.device)[:, None].half()
    return keys, queries


KINDS = {
    kind.__name__: kind
    for kind in (
        random_data,
        anisotropic,
        shifted,
        clusters,
        duplicates,
        outlier,
        huge_queries,
        tiny_keys,
        ascending,
    )
}


def seeded(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a random generator."""
    return torch.Generator(device).manual_seed(seed)


def true_distances(queries: Tensor, keys: Tensor, metric: str) -> Tensor:
    """Return the (B, N) distances in float64, from differences rather than from products where that fits."""
    queries, keys = queries.double(), keys.double()
    if metric == "ip":
        return -(queries @ keys.T)
    if queries.numel() * len(keys) <= 1 << 24:
        return (queries[:, None] - keys[None]).square().sum(2)
    centre = keys.mean(0)
    queries, keys = queries - centre, keys - centre
    squares = queries.square().sum(1)[:, None] + keys.square().sum(1)
    return torch.addmm(squares, queries, keys.T, alpha=-2).clamp(min=0)


def allowed(queries: Tensor, keys: Tensor, truth: Tensor, metric: str) -> Tensor:
    """Return the (B, 1) error that distances may have: a few units in the last place of float32."""
    sizes = queries.double().norm(dim=1, keepdim=True)
    if metric == "ip":
        return 2e-6 * sizes * keys.double().norm(dim=1).max() + 1e-30
    # |q - k| is found from the differences, so only the query's own rounding is not relative to the distance.
    return 1e-5 * truth.amin(1, keepdim=True) + 1e-13 * sizes.square() + 1e-30


def check_answer(found: Neighbours, truth: Tensor, k: int, slack: Tensor) -> None:
    """Compare an answer with the (B, N) true distances; `slack` is (B, 1), beside 1e-5 of a distance."""
    rows = truth.shape[1]
    count = min(k, rows)
    assert found.ids.shape == found.distances.shape == (len(truth), k)
    assert found.ids.dtype == torch.int64
    assert found.distances.dtype == torch.float32
    assert (found.ids[:, count:] == -1).all()
    assert (found.distances[:, count:] == torch.inf).all()
    ids, distances = found.ids[:, :count], found.distances[:, :count].double()
    assert ((ids >= 0) & (ids < rows)).all()
    assert (ids.sort(1).values.diff(dim=1) > 0).all(), "an id comes twice"
    assert (distances.diff(dim=1) >= 0).all(), "distances do not ascend"
    own = truth.gather(1, ids)
    off = (own - distances).abs() - 1e-5 * own.abs() - slack
    assert (off <= 0).all(), f"distances are off by {float(off.max()):.3g} more than rounding"
    last = truth.topk(count, dim=1, largest=False).values[:, -1:]
    edge = 2 * (1e-5 * last.abs() + slack)
    assert (own <= last + edge).all(), "something found is farther than the k-th nearest"
    sure = truth < last - edge
    assert torch.equal(sure.gather(1, ids).sum(1), sure.sum(1)), "a neighbour was missed"


@contextmanager
def poisoned() -> Iterator[None]:
    """Make fresh memory device_keys what no result may device_keys."""
    empty = torch.empty

    def full(*shape: Any, **options: Any) -> Tensor:
        fresh = empty(*shape, **options)
        return fresh.fill_(torch.nan if fresh.is_floating_point() else -7)

    torch.empty = full  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty = empty


@contextmanager
def settings(module: Any, **values: Any) -> Iterator[None]:
    """Set some names of a module for a while."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def check_search(
    keys: Tensor,
    queries: Tensor,
    k: int,
    metric: str,
    *,
    coarse: float = 0.0,
    truth: Tensor | None = None,
    **options: Any,
) -> ExactIndex:
    """Search (N, D) float16 keys with the kernels, on the device of the queries, and compare with float64.

    `coarse` allows for more, as a share of |q|² + |k|²: torch's own products are less exact than the kernels.
    """
    with poisoned():
        index = ExactIndex(Array(keys.cpu()), metric=metric, device=queries.device, kernels=True, **options)
        found = index.search(queries, k)
    assert not isinstance(index.searcher, BruteForceSearch)
    if truth is None:
        truth = true_distances(queries, keys, metric)
    slack = allowed(queries, keys, truth, metric)
    if coarse:
        slack = slack + coarse * (queries.double().square().sum(1, keepdim=True) + keys.double().square().sum(1).max())
    check_answer(found, truth, k, slack)
    return index


def check_parts(keys: Tensor, queries: Tensor, k: int, metric: str, firsts: list[int], **options: Any) -> Neighbours:
    """Compare the merged neighbours in parts of (N, D) keys, which begin at `firsts`, with those in all keys, by bits.

    Whole and parts are searched with the same options; equal distances are in the order of ids.
    """

    def nearest(own: Tensor) -> Neighbours:
        index = ExactIndex(Array(own.cpu()), metric=metric, device=queries.device, kernels=True, **options)
        return index.search(queries, k)

    with poisoned():
        whole = nearest(keys)
        parts = [nearest(keys[first:end]) for first, end in itertools.pairwise([*firsts, len(keys)])]
        merged = merge_shards(parts, firsts, k)
    present = whole.ids[:, : min(k, len(keys))]
    assert torch.equal(whole.ids, merged.ids), "parts have other neighbours than all keys"
    assert torch.equal(whole.distances.view(torch.int32), merged.distances.view(torch.int32)), "distances differ"
    same = whole.distances[:, : present.shape[1]].diff(dim=1) == 0
    assert (present.diff(dim=1)[same] > 0).all(), "equal distances are not in the order of ids"
    return whole


def members(groups: int, pairs: int) -> Tensor:
    """Return the keys of each group, (groups, 2J), by counting rather than by arithmetic."""
    table: list[list[int]] = [[] for _ in range(groups)]
    for key in range(groups * 2 * pairs):
        block, place = divmod(key, 8 * pairs)
        table[4 * block + place % 8 // 2].append(key)
    return torch.tensor(table)


def check_group_maxima(shape: kernels.TileShape, dtype: torch.dtype, width: int, generator: torch.Generator) -> None:
    """Compare with float64, between guards that must stay as they are."""
    device = generator.device
    count, rows = 2 * shape.queries, 512
    if dtype == torch.int8:
        queries = torch.randint(-127, 128, (count, width), generator=generator, device=device).to(dtype)
        keys = torch.randint(-127, 128, (rows, width), generator=generator, device=device).to(dtype)
        scales = torch.rand(count, generator=generator, device=device) + 0.1
    else:
        queries = torch.randn(count, width, generator=generator, device=device).half()
        keys = torch.randn(rows, width, generator=generator, device=device).half()
        scales = torch.full((count,), torch.nan, device=device)  # not read
    half_squares = torch.rand(rows, generator=generator, device=device) * 10
    half_squares[rows - 140 :] = torch.inf  # more than one whole block of 128
    groups = rows // (2 * shape.pairs)
    out = torch.full((count + 2, groups), torch.nan, device=device)
    kernels.group_maxima(queries, keys, scales=scales, half_squares=half_squares, out=out[1:-1], shape=shape)
    assert out[0].isnan().all(), "written before the beginning"
    assert out[-1].isnan().all(), "written after the end"
    scores = queries.double() @ keys.double().T
    if dtype == torch.int8:
        scores *= scales.double()[:, None]
    scores -= half_squares.double()
    expected = scores[:, members(groups, shape.pairs).to(device)].amax(2)
    assert (expected == -torch.inf).any(), "no group of padding alone"
    real = expected > -torch.inf
    assert torch.equal(out[1:-1] == -torch.inf, ~real)
    size = queries.double().norm(dim=1).max() * keys.double().norm(dim=1).max()
    if dtype == torch.int8:
        size = size * scales.max()
    assert float((out[1:-1].double() - expected)[real].abs().max()) <= 2.0**-19 * float(size)


def check_group_distances(pairs: int, dtype: torch.dtype, metric: str, width: int, generator: torch.Generator) -> None:
    """Compare every distance with float64; missing groups and padding are infinitely far."""
    device = generator.device
    keys = torch.randint(-100, 101, (512, width), generator=generator, device=device).to(dtype)
    scales = torch.rand(width, generator=generator, device=device) + 0.1
    if dtype != torch.int8:
        scales = torch.full_like(scales, torch.nan)  # not read
    queries = 50 * torch.randn(3, width, generator=generator, device=device)
    total = 512 // (2 * pairs)
    groups = torch.stack([torch.randperm(total, generator=generator, device=device)[:11] for _ in range(3)]).int()
    groups[0, 3:5], groups[2, -1] = -1, total - 1
    rows = 490
    with poisoned():
        found = kernels.group_distances(
            queries, keys, scales=scales, groups=groups, rows=rows, pairs=pairs, metric=metric
        )
    stored = keys.double() * scales.double() if dtype == torch.int8 else keys.double()
    truth = true_distances(queries, stored, metric)
    truth[:, rows:] = torch.inf
    numbers = members(total, pairs).to(device)[groups.clamp(min=0).long()]  # (3, 11, 2J)
    expected = truth.gather(1, numbers.flatten(1))
    expected[(groups < 0).repeat_interleave(2 * pairs, 1)] = torch.inf
    assert torch.equal(found == torch.inf, expected == torch.inf)
    there = expected < torch.inf
    size = queries.double().norm(dim=1).max() * stored.norm(dim=1).max()
    assert float((found.double() - expected)[there].abs().max()) <= 2e-6 * float(size)
    places = torch.arange(found.shape[1], device=device).repeat(3, 1)
    there = (groups >= 0).repeat_interleave(2 * pairs, 1)
    assert torch.equal(kernels.key_ids(groups, places, pairs=pairs)[there], numbers.flatten(1)[there])


def check_survivors(rows: int, columns: int, capacity: int, generator: torch.Generator) -> None:
    """Compare with a plain comparison: all are counted, as many as fit are kept, nothing else is written."""
    device = generator.device
    maxima = torch.randn(rows, columns, generator=generator, device=device)
    thresholds = torch.randn(rows, generator=generator, device=device) * 2
    thresholds[0], thresholds[-1] = -torch.inf, torch.inf
    maxima[0, 0] = thresholds[1] = maxima[1, -1]  # equal is enough
    right = maxima >= thresholds[:, None]
    _check_kept(kernels.survivors(maxima, thresholds, capacity), maxima, right, capacity, empty=(0, -torch.inf))

    counts = torch.full((rows + 2,), -7, dtype=torch.int32, device=device)
    counts[1:-1] = 0
    places = torch.full((rows + 2, capacity), -7, dtype=torch.int32, device=device)
    values = torch.full((rows + 2, capacity), torch.nan, device=device)
    parts, block = 3, 64 if columns < 4096 else 2048
    span = -(-columns // (parts * block)) * block
    kernels._survivors[(rows, parts)](
        maxima, thresholds, counts[1:-1], places[1:-1], values[1:-1], columns, span, capacity, BLOCK=block, num_warps=4
    )
    for guard in (0, -1):
        assert counts[guard] == -7
        assert (places[guard] == -7).all()
        assert values[guard].isnan().all()
    kept = kernels.Survivors(counts[1:-1], places[1:-1], values[1:-1])
    _check_kept(kept, maxima, right, capacity, empty=(-7, torch.nan))


def _check_kept(
    kept: kernels.Survivors, maxima: Tensor, right: Tensor, capacity: int, *, empty: tuple[int, float]
) -> None:
    assert torch.equal(kept.counts.long(), right.sum(1))
    fits = torch.arange(capacity, device=maxima.device) < kept.counts[:, None]
    assert (kept.columns[~fits] == empty[0]).all()
    rest = kept.values[~fits]
    assert bool((rest.isnan() if np.isnan(empty[1]) else rest == empty[1]).all())
    for row in range(len(maxima)):
        own = kept.columns[row][fits[row]].long()
        assert len(own.unique()) == len(own)
        assert right[row][own].all()
        assert torch.equal(kept.values[row][fits[row]], maxima[row][own])


@dataclass
class Spy:
    """Counts of what `_above_threshold` did."""

    few: int = 0  # rows with too few survivors
    many: int = 0  # rows with more than fit
    good: int = 0
    rounds: int = 0
    direct: int = 0  # rows that a plain top-k had to do


@contextmanager
def spying(wanted: int) -> Iterator[Spy]:
    """Count which ways `_above_threshold` goes."""
    spy, look, top = Spy(), kernels.survivors, gpu_search._top

    def survivors(maxima: Tensor, thresholds: Tensor, capacity: int) -> kernels.Survivors:
        kept = look(maxima, thresholds, capacity)
        spy.rounds += 1
        spy.few += int((kept.counts <= wanted).sum())
        spy.many += int((kept.counts > capacity).sum())
        spy.good += int(((kept.counts > wanted) & (kept.counts <= capacity)).sum())
        return kept

    def direct(maxima: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
        spy.direct += len(maxima)
        return top(maxima, wanted)

    with settings(gpu_search, survivors=survivors, _top=direct):
        yield spy


def check_groups(maxima: Tensor, wanted: int) -> Spy:
    """Check that the chosen groups have the largest scores, and that the limit is the next one."""
    with spying(wanted) as spy, poisoned():
        chosen, limit = gpu_search.nearest_groups(maxima, wanted)
    groups = maxima.shape[1]
    count = min(wanted, groups)
    assert chosen.shape == (len(maxima), count)
    assert ((chosen >= 0) & (chosen < groups)).all()
    assert (chosen.long().sort(1).values.diff(dim=1) > 0).all()
    order = maxima.sort(1, descending=True).values
    assert torch.equal(maxima.gather(1, chosen.long()).sort(1, descending=True).values, order[:, :count])
    if groups > wanted:
        assert torch.equal(limit, order[:, wanted])
    else:
        assert (limit == -torch.inf).all()
    return spy


def misled(kind: str, rows: int, groups: int, step: int, generator: torch.Generator) -> Tensor:
    """Scores of which every `step`-th, which the threshold is taken from, is not like the others."""
    scores = torch.randn(rows, groups, generator=generator, device=generator.device)
    if kind == "sample too good":
        scores[:, ::step] += 100
    elif kind == "sample too bad":
        scores[:, ::step] -= 100
    elif kind == "all equal":
        scores[:] = 1.0
    elif kind == "mixed":
        scores[::3, ::step] += 100
        scores[1::3, ::step] -= 100
    elif kind == "nearly all padding":
        scores[:, groups // 20 :] = -torch.inf
    return scores


def device_keys(keys: Tensor, metric: str, *, int8: bool) -> DeviceKeys:
    """Return keys on their device as the search holds them."""
    on_device: DeviceKeys
    rows, width = keys.shape
    if int8:
        on_device = Int8Keys(rows, width, metric=metric, device=keys.device, sample=keys)
    else:
        on_device = HalfKeys(rows, width, metric=metric, device=keys.device, centre=keys.float().mean(0))
    on_device.fill(0, keys[: rows // 2])
    on_device.fill(rows // 2, keys[rows // 2 :])
    return on_device


def kernel_scores(on_device: DeviceKeys, queries: Tensor) -> tuple[Any, Tensor]:
    """Return the kernel's score of every key, (B, N): each is alone in its group in one of many launches."""
    shape = kernels.shape_for(len(queries), on_device.keys.dtype)
    prepared = on_device.prepare(queries, shape.queries)
    groups = len(on_device.keys) // (2 * shape.pairs)
    numbers = members(groups, shape.pairs).to(on_device.keys.device)
    scores = torch.full((len(prepared.exact), len(on_device.keys)), torch.nan, device=on_device.keys.device)
    for member in range(2 * shape.pairs):
        alone = torch.full_like(on_device.half_squares, torch.inf)
        alone[numbers[:, member]] = on_device.half_squares[numbers[:, member]]
        out = torch.full((len(prepared.exact), groups), torch.nan, device=on_device.keys.device)
        kernels.group_maxima(
            prepared.rounded, on_device.keys, scales=prepared.scales, half_squares=alone, out=out, shape=shape
        )
        scores[:, numbers[:, member]] = out
    assert not scores.isnan().any()
    return prepared, scores[: len(queries), : on_device.rows]


def check_score_bound(keys: Tensor, queries: Tensor, metric: str, *, int8: bool = False) -> float:
    """Check that no key scores below the bound for its own distance; return the largest share of keys beyond it."""
    on_device = device_keys(keys, metric, int8=int8)
    prepared, scores = kernel_scores(on_device, queries)
    truth = true_distances(prepared.exact[: len(queries), : on_device.width], on_device.take(0, on_device.rows), metric)
    order = truth.argsort(1)
    beyond = 0.0
    for rank in {0, 1, on_device.rows // 10, on_device.rows // 2, on_device.rows - 1}:
        last = truth.gather(1, order[:, rank : rank + 1])[:, 0]
        lower = on_device.score_bound(prepared, last.float())
        assert lower.isfinite().all()
        near = truth <= last[:, None]
        low = torch.where(near, scores, torch.inf).amin(1)
        assert (low >= lower).all(), f"a key at rank {rank} scores {float((lower - low).max()):.3g} below the bound"
        beyond = max(beyond, float(((scores >= lower[:, None]) & ~near).double().mean()))
    return beyond


def check_int8(keys: Tensor, queries: Tensor, k: int, metric: str) -> float:
    """Compare with float64 over the keys as int8 rounds them; return the recall against the unrounded keys."""
    with poisoned():
        index = ExactIndex(Array(keys.cpu()), metric=metric, device=queries.device, key_dtype="int8", kernels=True)
        found = index.search(queries, k)
    on_device = index.searcher.device_keys  # type: ignore[attr-defined]
    assert on_device.keys.dtype == torch.int8
    stored = on_device.take(0, on_device.rows)
    rotated = on_device.prepare(queries, 16).exact[: len(queries), : on_device.width]
    truth = true_distances(rotated, stored, metric) + on_device.distance_offset(queries).double()[:, None]
    slack = allowed(rotated, stored, truth, metric)
    if metric == "ip":
        slack = slack + 2e-6 * on_device.distance_offset(queries).double().abs()[:, None]
    check_answer(found, truth, k, slack)
    exact = true_distances(queries, keys, metric)
    own, best = exact.gather(1, found.ids), exact.topk(k, dim=1, largest=False).values
    spread = exact.abs().mean()
    assert float((own - found.distances).abs().mean() / spread) < 0.02, "distances are not close to the true ones"
    return float((own <= best[:, -1:]).double().mean())
