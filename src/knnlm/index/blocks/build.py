"""Sort keys into blocks and write them down. Knows nothing about searching them.

K-means on a sample gives lists; a list is cut in two until what is left fits into blocks; then every key moves to the
block whose centre is nearest, as far as there is room. Keys are read as often as there are steps, some at a time, so
that memory is bounded by a few numbers for each key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.index.base import Vectors, check_finite, check_metric, evenly
from knnlm.index.blocks.file import BlockWriter
from knnlm.index.blocks.index import BlockIndex
from knnlm.index.blocks.kernels import quantise
from knnlm.index.blocks.kmeans import Centroids, kmeans, means, split_in_two
from knnlm.index.gpu.keys import random_rotation
from knnlm.index.spec import ROUNDS, WIDTH, sample_for
from knnlm.progress import Progress, silent

_SPEC = re.compile(r"Lists([1-9]\d{0,7}),Blocks([1-9]\d{0,5})")

_AT_ONCE = 1 << 13  # keys

_LONGEST = 1 << 15  # keys of a list that are cut into blocks together

_COMPARED = 1 << 23  # keys times centres that are compared at once

_TAKEN = 1 << 11  # keys from all over a mapped file, of which each may bring 64 KiB with it

_SAMPLE = 1 << 28  # bytes to learn from, at most

_NEAR = 64  # lists around one, whose blocks its keys may move to

_TRIES = 6  # to find room in a nearer block: those that leave one make room for others


def is_blocks(spec: str) -> bool:
    """Say whether this names an index in blocks, such as `Lists2048,Blocks256`."""
    return _SPEC.fullmatch(spec) is not None


def build_blocks(vectors: Vectors, spec: str, *, metric: str = "l2", progress: Progress = silent) -> BlockIndex:
    """Make an index that is gone when nobody uses it."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "index"
        write_blocks(vectors, spec, path, metric=metric, progress=progress)
        return BlockIndex.load(path)


def write_blocks(vectors: Vectors, spec: str, path: Path, *, metric: str = "l2", progress: Progress = silent) -> None:
    """Make an index and write its file."""
    check_metric(metric)
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ParameterError(f"{spec!r} is no index in blocks: write it as Lists2048,Blocks256.")
    wanted, size = (int(number) for number in match.groups())
    if size & (size - 1):
        raise ParameterError(f"Blocks of {size} keys cannot be made: use a power of two, such as 256.")
    with progress("training the index", total=1, unit="steps") as advance:
        frame = Frame.learn(vectors, wanted)
        advance(1)
    lists = _into_lists(vectors, frame, progress)
    labels, centres = _into_blocks(vectors, frame, lists, size, progress)
    labels, count = _settle(vectors, frame, lists, labels, centres, size, progress)
    del lists, centres
    with BlockWriter(
        path, rows=vectors.rows, width=vectors.width, kept=frame.turn.shape[1], blocks=count, size=size, metric=metric
    ) as writer:
        writer.array("centre")[:], writer.array("turn")[:] = frame.centre, frame.turn
        _fill(vectors, frame, labels, count, writer, metric, progress)


@dataclass(frozen=True)
class Frame:
    """Where keys are looked at from, and the points that lists are around."""

    centre: Tensor  # (D,)
    turn: Tensor  # (D, W)
    points: Tensor  # (lists, W)

    @classmethod
    def learn(cls, vectors: Vectors, lists: int) -> Frame:
        """Learn from a sample that is taken evenly from all keys."""
        wanted = min(vectors.rows, sample_for(lists), max(1, _SAMPLE // (4 * max(1, vectors.width))))
        sample = _taken(vectors, evenly(vectors.rows, wanted).numpy())
        check_finite(sample.square().sum(1), 0)
        centre = sample.mean(0) if len(sample) else torch.zeros(vectors.width)
        sample = sample.sub_(centre)
        turn = _turn(sample)
        sample = sample @ turn
        points = kmeans(sample, min(lists, len(sample)), rounds=ROUNDS) if len(sample) else sample
        return cls(centre, turn, points)

    def turned(self, keys: Tensor) -> Tensor:
        """Bring (n, D) keys to where they are compared, (n, W)."""
        return (keys - self.centre) @ self.turn


def _turn(sample: Tensor) -> Tensor:
    """Turn keys so that no dimension is wider than others, which would leave these no bits; (D, W).

    Of keys that are wider than what is kept, those dimensions are left out that they differ least in.
    """
    width = sample.shape[1]
    kept = min(width, WIDTH)
    rotation = random_rotation(kept, sample.device)
    if kept < width:
        rotation = torch.linalg.eigh(sample.T @ sample)[1].flip(1)[:, :kept] @ rotation
    return rotation


def _into_lists(vectors: Vectors, frame: Frame, progress: Progress) -> NDArray[np.int32]:
    """Say which list each key is in."""
    centres = Centroids(frame.points)
    lists = np.empty(vectors.rows, np.int32)
    with progress("sorting keys into lists", total=vectors.rows, unit="keys") as advance:
        for first, keys in vectors.chunks(_AT_ONCE):
            check_finite(keys.square().sum(1), first)
            lists[first : first + len(keys)] = centres.nearest(quantise(frame.turned(keys))).numpy()
            advance(len(keys))
    return lists


def _into_blocks(
    vectors: Vectors, frame: Frame, lists: NDArray[np.int32], size: int, progress: Progress
) -> tuple[NDArray[np.int32], Tensor]:
    """Cut lists into blocks: say which block each key is in, list by list, and give the mean of each, (n, D)."""
    labels, centres, count = np.empty(vectors.rows, np.int32), list[Tensor](), 0
    with progress("cutting lists into blocks", total=vectors.rows, unit="keys") as advance:
        for numbers, keys in _list_by_list(vectors, frame, lists):
            for block in split_in_two(keys, -(-len(keys) // size)):
                labels[numbers[block.numpy()]] = count
                centres.append(keys[block].mean(0))
                count += 1
            advance(len(keys))
    return labels, torch.stack(centres) if centres else torch.zeros(0, vectors.width)


def _settle(
    vectors: Vectors, frame: Frame, lists: NDArray[np.int32], labels: NDArray[np.int32], centres: Tensor, size: int,
    progress: Progress,
) -> tuple[NDArray[np.int32], int]:  # fmt: skip
    """Move keys to nearer blocks while these have room; give the block of each key, and how many there are."""
    best, gain = np.empty(len(labels), np.int32), np.empty(len(labels), np.float32)
    around = _around(frame, lists, labels)
    with progress("moving keys to nearer blocks", total=vectors.rows, unit="keys") as advance:
        for numbers, keys in _list_by_list(vectors, frame, lists):
            blocks = around(int(lists[numbers[0]]))
            near = centres[blocks]
            step = max(1, _COMPARED // len(blocks))
            for at in range(0, len(keys), step):
                own = numbers[at : at + step]
                apart = torch.addmm(near.square().sum(1), keys[at : at + step], near.T, alpha=-2)
                least = apart.min(1)
                now = torch.searchsorted(blocks, torch.from_numpy(labels[own]).long())
                best[own] = blocks[least.indices].numpy()
                gain[own] = (apart.gather(1, now[:, None])[:, 0] - least.values).numpy()
            advance(len(keys))
    return _moved(labels, best, gain, size)


def _around(frame: Frame, lists: NDArray[np.int32], labels: NDArray[np.int32]) -> Callable[[int], Tensor]:
    """Give what says which blocks, ascending, are those of a list and of the lists around it."""
    first = np.full(len(frame.points), np.iinfo(np.int32).max)
    last = np.full(len(frame.points), -1)
    np.minimum.at(first, lists, labels)
    np.maximum.at(last, lists, labels)

    def blocks(number: int) -> Tensor:
        apart = (frame.points - frame.points[number]).square_().sum(1)
        near = apart.topk(min(_NEAR, len(apart)), largest=False).indices.tolist()
        ranges = [np.arange(first[one], last[one] + 1) for one in {number, *near}]
        return torch.from_numpy(np.sort(np.concatenate(ranges)))

    return blocks


def _moved(
    labels: NDArray[np.int32], best: NDArray[np.int32], gain: NDArray[np.float32], size: int
) -> tuple[NDArray[np.int32], int]:
    """Move keys to the blocks that are best for them, those first that gain most, while there is room."""
    labels = labels.copy()
    count = int(labels.max(initial=-1)) + 1
    for _ in range(_TRIES):
        room = size - np.bincount(labels, minlength=count)
        moving = np.flatnonzero((best != labels) & (gain > 0))
        moving = moving[np.lexsort((-gain[moving], best[moving]))]
        wanted = best[moving]
        rank = np.arange(len(moving)) - np.searchsorted(wanted, wanted)
        moving = moving[rank < room[wanted]]
        if not len(moving):
            break
        labels[moving] = best[moving]
    used, renamed = np.unique(labels, return_inverse=True)  # some may have been left by all
    return renamed.astype(np.int32), len(used)


def _fill(
    vectors: Vectors, frame: Frame, labels: NDArray[np.int32], count: int, writer: BlockWriter, metric: str,
    progress: Progress,
) -> None:  # fmt: skip
    """Write keys block by block."""
    first = done = 0
    with progress("filling the index", total=vectors.rows, unit="keys") as advance:
        for numbers, sizes in _runs(labels):
            rows = frame.turned(_taken(vectors, numbers))
            owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
            near = quantise(rows)
            part = slice(first, first + len(sizes))
            writer.array("sizes")[part] = sizes
            writer.array("centres")[part] = means(rows, owner, len(sizes))
            writer.array("numbers")[done : done + len(numbers)] = numbers
            at = (owner + first).numpy(), np.arange(len(numbers)) - np.repeat(np.cumsum(sizes) - np.array(sizes), sizes)
            writer.array("scales")[at] = near.scale[:, 0]
            writer.array("constants")[at] = torch.zeros(len(rows)) if metric == "ip" else near.squares()[:, 0]
            writer.write(near.values.numpy())
            first, done = first + len(sizes), done + len(numbers)
            advance(len(numbers))
    assert (first, done) == (count, vectors.rows)


def _runs(labels: NDArray[np.int32]) -> Iterator[tuple[NDArray[np.int64], list[int]]]:
    """Give keys in the order of their labels, some groups of one label at a time: their numbers, and group sizes.

    A group that is so large that it would fill the memory comes in pieces, as if it were several.
    """
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels) if len(labels) else np.zeros(0, np.int64)
    pieces = [[_LONGEST] * (size // _LONGEST) + [size % _LONGEST] for size in sizes.tolist()]
    sizes = np.array([size for piece in pieces for size in piece if size], np.int64)
    ends = np.cumsum(sizes)
    first = begin = 0
    while first < len(sizes):
        last = max(first + 1, int(np.searchsorted(ends, begin + _AT_ONCE, side="right")))
        end = int(ends[last - 1])
        yield order[begin:end], sizes[first:last].tolist()
        first, begin = last, end


def _list_by_list(
    vectors: Vectors, frame: Frame, lists: NDArray[np.int32]
) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
    """Give the keys of each list: their numbers, and themselves less the centre, (n, D)."""
    for numbers, cuts in _runs(lists):
        keys = _taken(vectors, numbers).sub_(frame.centre)
        yield from zip(np.split(numbers, np.cumsum(cuts)[:-1]), keys.split(cuts), strict=True)


def _taken(vectors: Vectors, numbers: NDArray[np.int64]) -> Tensor:
    """Read keys in the order in which they are stored, and give them in that of the numbers."""
    order = torch.from_numpy(np.argsort(numbers))
    ordered, keys = torch.from_numpy(numbers)[order], torch.empty(len(numbers), vectors.width)
    for at in range(0, len(numbers), _TAKEN):
        keys.index_copy_(0, order[at : at + _TAKEN], vectors.take(ordered[at : at + _TAKEN]))
    return keys
