"""Neighbours as packed numbers, each a distance and an id in their order, and the merge of several results.

Neighbours are the nearest by (distance, id), so those of parts merge to those of all vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from knnlm.index.base import Neighbours

_NUMBER_BITS = 32  # of a packed pair
_MAX_NUMBER = (1 << _NUMBER_BITS) - 1  # also stands for -1
_MERGED_ROWS = 64  # queries whose neighbours are merged at once


def can_pack(neighbours: Neighbours) -> bool:
    """Whether pairs of a distance and an id fit into 64 bits."""
    ids = neighbours.ids
    return neighbours.distances.dtype == torch.float32 and (not ids.numel() or int(ids.max()) < _MAX_NUMBER)


def pack(neighbours: Neighbours) -> Tensor:
    """Return int64 numbers in the order of (distance, id), those of -1 last; NaN counts as infinity."""
    # Adding 0 makes -0.0 equal to 0.0. Of negative floats, all bits but the sign are inverted.
    bits = (neighbours.distances + 0.0).nan_to_num_(torch.inf, torch.inf, -torch.inf).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & torch.iinfo(torch.int32).max)
    return (ordered.long() << _NUMBER_BITS) | (neighbours.ids & _MAX_NUMBER)


def unpack(packed: Tensor) -> Neighbours:
    """Return the neighbours that `pack` was given."""
    ordered = (packed >> _NUMBER_BITS).int()
    bits = ordered ^ ((ordered >> 31) & torch.iinfo(torch.int32).max)
    ids = packed & _MAX_NUMBER
    return Neighbours(ids.masked_fill_(ids == _MAX_NUMBER, -1), bits.view(torch.float32))


def smallest_packed(packed: Tensor, k: int) -> Tensor:
    """Return the k smallest numbers of each row, ascending."""
    if packed.device.type != "cpu":
        return packed.topk(k, dim=1, largest=False, sorted=True).values
    numbers = packed.numpy()  # which partitions integers faster than torch
    kept = numbers if k == numbers.shape[1] else np.partition(numbers, k - 1, axis=1)[:, :k]
    return torch.from_numpy(np.sort(kept, axis=1))


def merge_shards(found: Sequence[Neighbours], firsts: Sequence[int], k: int) -> Neighbours:
    """Return the k nearest of all shards by (distance, id), given the nearest of each, at most k, and its first id."""
    first = found[0]
    k, rows = min(k, sum(one.ids.shape[1] for one in found)), len(first.ids)
    if first.ids.device.type != "cpu":
        return _merge_rows(found, firsts, k)
    # Few queries at a time, whose numbers stay in the cache: fresh memory costs more than the merge.
    ids = torch.empty(rows, k, dtype=torch.int64)
    distances = torch.empty(rows, k, dtype=first.distances.dtype)
    for begin in range(0, rows, _MERGED_ROWS):
        own = slice(begin, begin + _MERGED_ROWS)
        merged = _merge_rows([Neighbours(one.ids[own], one.distances[own]) for one in found], firsts, k)
        ids[own], distances[own] = merged.ids, merged.distances
    return Neighbours(ids, distances)


def _merge_rows(found: Sequence[Neighbours], firsts: Sequence[int], k: int) -> Neighbours:
    """Return the k nearest of all shards, at least k in all."""
    device = found[0].ids.device
    ids = torch.cat(
        [
            torch.where(one.ids < 0, one.ids, one.ids + first).to(device)
            for one, first in zip(found, firsts, strict=True)
        ],
        1,
    )
    both = Neighbours(ids, torch.cat([one.distances.to(device) for one in found], 1))
    if can_pack(both):
        return unpack(smallest_packed(pack(both), k))
    by_id = ids.where(ids >= 0, torch.iinfo(torch.int64).max).argsort(dim=1)
    distances, columns = both.distances.gather(1, by_id).sort(dim=1, stable=True)
    return Neighbours(ids.gather(1, by_id).gather(1, columns)[:, :k], distances[:, :k])


def cut_rows(found: Sequence[Neighbours], best: Neighbours, kept: int) -> Tensor:
    """Return the queries of which a shard may have more of the nearest than the `kept` that it has returned."""
    last = best.distances[:, -1]
    cut = torch.zeros_like(last, dtype=torch.bool)
    for one in found:
        if one.ids.shape[1] >= kept:
            cut |= (one.ids[:, kept - 1] >= 0) & (one.distances[:, kept - 1] <= last)
    return cut.nonzero()[:, 0]
