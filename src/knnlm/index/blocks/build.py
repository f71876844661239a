"""Build a block index.

K-means on a sample gives lists; a list is split in two until its pieces fit into blocks; then every key moves to the
block with the nearest centroid, as far as there is room. Every step reads the keys once, some at a time, so RAM is
bounded by a few numbers per key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.index.base import (
    KMEANS_ROUNDS,
    Vectors,
    check_finite,
    check_metric,
    even_sample,
    random_rotation,
    training_sample_size,
)
from knnlm.index.blocks import parse_spec
from knnlm.index.blocks.file import BlockWriter
from knnlm.index.blocks.index import BlockIndex
from knnlm.index.blocks.kernels import Centroids, quantise
from knnlm.progress import Progress, silent

MAX_CODE_WIDTH = 1024  # stored dimensions

_BATCH = 1 << 13  # keys
_MAX_LIST = 1 << 15  # keys of a list that are split into blocks together
_COMPARISON_BATCH = 1 << 23  # keys times centroids that are compared at once
_READ_BATCH = 1 << 11  # keys read from all over a mapped file: each may load 64 KiB
_MAX_SAMPLE_BYTES = 1 << 28  # of training vectors
_NEAR_LISTS = 64  # lists whose blocks a key may move to
_SPLIT_ROUNDS = 8
_MOVE_ROUNDS = 6  # keys that move away make room for others


def build_blocks(vectors: Vectors, spec: str, *, metric: str = "l2", progress: Progress = silent) -> BlockIndex:
    """Build an index in a temporary file."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "index"
        write_blocks(vectors, spec, path, metric=metric, progress=progress)
        return BlockIndex.load(path)


def write_blocks(vectors: Vectors, spec: str, path: Path, *, metric: str = "l2", progress: Progress = silent) -> None:
    """Build an index and write its file."""
    check_metric(metric)
    parsed = parse_spec(spec)
    if parsed is None:
        raise ParameterError(f"{spec!r} is not a block index: write it as Lists2048,Blocks256.")
    list_count, size = parsed
    if size & (size - 1):
        raise ParameterError(f"Blocks of {size} keys are not supported: use a power of two, such as 256.")
    with progress("training the index", total=1, unit="steps") as advance:
        frame = Frame.fit(vectors, list_count)
        advance(1)
    lists = _assign_lists(vectors, frame, progress)
    labels, centroids = _split_lists(vectors, frame, lists, size=size, progress=progress)
    best, gain = _nearest_blocks(vectors, frame, lists, labels=labels, centroids=centroids, progress=progress)
    labels, count = _move(labels, best, gain, size=size)
    del lists, centroids, best, gain
    with BlockWriter(
        path,
        rows=vectors.rows,
        width=vectors.width,
        code_width=frame.projection.shape[1],
        blocks=count,
        size=size,
        metric=metric,
    ) as writer:
        writer.arrays["centre"][:], writer.arrays["projection"][:] = frame.centre, frame.projection
        _fill(vectors, frame, labels, writer=writer, metric=metric, progress=progress)


@dataclass(frozen=True)
class Frame:
    """The space in which keys are compared, and the centroids of the lists."""

    centre: Tensor  # (D,)
    projection: Tensor  # (D, W)
    centroids: Tensor  # (lists, W)

    @classmethod
    def fit(cls, vectors: Vectors, lists: int) -> Frame:
        """Fit a frame to an even sample of the vectors."""
        fitting = max(1, _MAX_SAMPLE_BYTES // (4 * max(1, vectors.width)))
        wanted = min(vectors.rows, training_sample_size(lists), fitting)
        sample = _read(vectors, even_sample(vectors.rows, wanted).numpy())
        check_finite(sample.square().sum(1), 0)
        centre = sample.mean(0) if len(sample) else torch.zeros(vectors.width)
        sample = sample.sub_(centre)
        projection = _fit_projection(sample)
        sample = sample @ projection
        centroids = kmeans(sample, min(lists, len(sample)), rounds=KMEANS_ROUNDS) if len(sample) else sample
        return cls(centre, projection, centroids)

    def project(self, keys: Tensor) -> Tensor:
        """Map (n, D) keys to the space in which they are compared, (n, W)."""
        return (keys - self.centre) @ self.projection


def _fit_projection(sample: Tensor) -> Tensor:
    """Return a rotation after which all dimensions have about the same range, as one int8 scale per key needs; (D, W).

    Of keys with more than `MAX_CODE_WIDTH` dimensions, only the principal components are kept.
    """
    width = sample.shape[1]
    code_width = min(width, MAX_CODE_WIDTH)
    rotation = random_rotation(code_width, sample.device)
    if code_width < width:
        rotation = torch.linalg.eigh(sample.T @ sample)[1].flip(1)[:, :code_width] @ rotation
    return rotation


def _assign_lists(vectors: Vectors, frame: Frame, progress: Progress) -> NDArray[np.int32]:
    """Return the list of each key, (N,)."""
    centroids = Centroids(frame.centroids)
    lists = np.empty(vectors.rows, np.int32)
    with progress("sorting keys into lists", total=vectors.rows, unit="keys") as advance:
        for first, keys in vectors.chunks(_BATCH):
            check_finite(keys.square().sum(1), first)
            lists[first : first + len(keys)] = centroids.nearest(quantise(frame.project(keys))).numpy()
            advance(len(keys))
    return lists


def _split_lists(
    vectors: Vectors, frame: Frame, lists: NDArray[np.int32], *, size: int, progress: Progress
) -> tuple[NDArray[np.int32], Tensor]:
    """Split lists into blocks; return the block of each key, (N,), and the mean of each block, (n, D)."""
    labels, centroids, count = np.empty(vectors.rows, np.int32), list[Tensor](), 0
    with progress("splitting lists into blocks", total=vectors.rows, unit="keys") as advance:
        for ids, keys in _each_list(vectors, frame, lists):
            for block in balanced_split(keys, -(-len(keys) // size)):
                labels[ids[block.numpy()]] = count
                centroids.append(keys[block].mean(0))
                count += 1
            advance(len(keys))
    return labels, torch.stack(centroids) if centroids else torch.zeros(0, vectors.width)


def _nearest_blocks(
    vectors: Vectors,
    frame: Frame,
    lists: NDArray[np.int32],
    *,
    labels: NDArray[np.int32],
    centroids: Tensor,
    progress: Progress,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the nearest block of each key, and how much nearer than its own it is; (N,) each."""
    best, gain = np.empty(len(labels), np.int32), np.empty(len(labels), np.float32)
    blocks_near = _blocks_near(frame, lists, labels)
    with progress("moving keys to nearer blocks", total=vectors.rows, unit="keys") as advance:
        for ids, keys in _each_list(vectors, frame, lists):
            blocks = blocks_near(int(lists[ids[0]]))
            near = centroids[blocks]
            step = max(1, _COMPARISON_BATCH // len(blocks))
            for begin in range(0, len(keys), step):
                batch = ids[begin : begin + step]
                distances = torch.addmm(near.square().sum(1), keys[begin : begin + step], near.T, alpha=-2)
                nearest = distances.min(1)
                own = torch.searchsorted(blocks, torch.from_numpy(labels[batch]).long())
                best[batch] = blocks[nearest.indices].numpy()
                gain[batch] = (distances.gather(1, own[:, None])[:, 0] - nearest.values).numpy()
            advance(len(keys))
    return best, gain


def _blocks_near(frame: Frame, lists: NDArray[np.int32], labels: NDArray[np.int32]) -> Callable[[int], Tensor]:
    """Return a function from a list to the blocks, ascending, of that list and of the lists near it."""
    first = np.full(len(frame.centroids), np.iinfo(np.int32).max)
    last = np.full(len(frame.centroids), -1)
    np.minimum.at(first, lists, labels)
    np.maximum.at(last, lists, labels)

    def blocks(number: int) -> Tensor:
        distances = (frame.centroids - frame.centroids[number]).square_().sum(1)
        near = distances.topk(min(_NEAR_LISTS, len(distances)), largest=False).indices.tolist()
        ranges = [np.arange(first[other], last[other] + 1) for other in {number, *near}]
        return torch.from_numpy(np.sort(np.concatenate(ranges)))

    return blocks


def _move(
    labels: NDArray[np.int32], best: NDArray[np.int32], gain: NDArray[np.float32], *, size: int
) -> tuple[NDArray[np.int32], int]:
    """Move keys to their nearest blocks while there is room, those with the largest gain first.

    Return the block of each key and the number of blocks.
    """
    labels = labels.copy()
    count = int(labels.max(initial=-1)) + 1
    for _ in range(_MOVE_ROUNDS):
        room = size - np.bincount(labels, minlength=count)
        moving = np.flatnonzero((best != labels) & (gain > 0))
        moving = moving[np.lexsort((-gain[moving], best[moving]))]
        targets = best[moving]
        rank = np.arange(len(moving)) - np.searchsorted(targets, targets)
        moving = moving[rank < room[targets]]
        if not len(moving):
            break
        labels[moving] = best[moving]
    used, relabelled = np.unique(labels, return_inverse=True)  # some blocks may be empty now
    return relabelled.astype(np.int32), len(used)


def _fill(
    vectors: Vectors,
    frame: Frame,
    labels: NDArray[np.int32],
    *,
    writer: BlockWriter,
    metric: str,
    progress: Progress,
) -> None:
    """Write the keys block by block."""
    arrays = writer.arrays
    first = done = 0
    with progress("filling the index", total=vectors.rows, unit="keys") as advance:
        for ids, sizes in _batches_by_label(labels):
            keys = frame.project(_read(vectors, ids))
            owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
            quantised = quantise(keys)
            blocks = slice(first, first + len(sizes))
            arrays["sizes"][blocks] = sizes
            arrays["centroids"][blocks] = means(keys, owner, len(sizes))
            arrays["ids"][done : done + len(ids)] = ids
            column = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - np.array(sizes), sizes)
            places = (owner + first).numpy(), column
            arrays["scales"][places] = quantised.scale[:, 0]
            arrays["constants"][places] = torch.zeros(len(keys)) if metric == "ip" else quantised.squares()[:, 0]
            writer.write_keys(quantised.values.numpy())
            first, done = first + len(sizes), done + len(ids)
            advance(len(ids))
    assert (first, done) == (len(arrays["sizes"]), vectors.rows)


def _batches_by_label(labels: NDArray[np.int32]) -> Iterator[tuple[NDArray[np.int64], list[int]]]:
    """Yield ids in the order of their labels, some groups of one label at a time: the ids, and the groups' sizes.

    A group too large for RAM is yielded in pieces, as several groups.
    """
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels) if len(labels) else np.zeros(0, np.int64)
    pieces = [[_MAX_LIST] * (size // _MAX_LIST) + [size % _MAX_LIST] for size in sizes.tolist()]
    sizes = np.array([size for piece in pieces for size in piece if size], np.int64)
    ends = np.cumsum(sizes)
    first = begin = 0
    while first < len(sizes):
        last = max(first + 1, int(np.searchsorted(ends, begin + _BATCH, side="right")))
        end = int(ends[last - 1])
        yield order[begin:end], sizes[first:last].tolist()
        first, begin = last, end


def _each_list(vectors: Vectors, frame: Frame, lists: NDArray[np.int32]) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
    """Yield the ids of each list, and its keys less the centre, (n, D)."""
    for ids, sizes in _batches_by_label(lists):
        keys = _read(vectors, ids).sub_(frame.centre)
        yield from zip(np.split(ids, np.cumsum(sizes)[:-1]), keys.split(sizes), strict=True)


def _read(vectors: Vectors, ids: NDArray[np.int64]) -> Tensor:
    """Return the keys of these ids, in their order; they are read in the order in which they are stored."""
    order = torch.from_numpy(np.argsort(ids))
    ascending, keys = torch.from_numpy(ids)[order], torch.empty(len(ids), vectors.width)
    for begin in range(0, len(ids), _READ_BATCH):
        batch = slice(begin, begin + _READ_BATCH)
        keys.index_copy_(0, order[batch], vectors.take(ascending[batch]))
    return keys


def kmeans(vectors: Tensor, count: int, *, rounds: int) -> Tensor:
    """Return `count` centroids of the (n, W) vectors, (count, W)."""
    quantised = quantise(vectors)
    points = vectors[torch.linspace(0, len(vectors) - 1, count, dtype=torch.float64).long()].clone()
    for seed in range(rounds):
        labels = Centroids(points).nearest(quantised)
        points = means(vectors, labels, count)
        empty = (torch.bincount(labels, minlength=count) == 0).nonzero()[:, 0]
        # A centroid without vectors restarts at a random vector, most probably in a dense region.
        restarts = torch.randint(len(vectors), (len(empty),), generator=torch.Generator().manual_seed(seed))
        points[empty] = vectors[restarts]
    return points


def means(vectors: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return the mean of the vectors with each of the labels 0 to count - 1, zeros for unused ones: (count, W)."""
    sums = torch.zeros(count, vectors.shape[1]).index_add_(0, labels, vectors)
    return sums.div_(torch.bincount(labels, minlength=count).clamp_(min=1)[:, None])


def balanced_split(vectors: Tensor, count: int) -> list[Tensor]:
    """Split (n, W) vectors into groups of equal size whose members are near one another; return their row numbers."""
    todo, done = [(torch.arange(len(vectors)), count)], list[Tensor]()
    while todo:
        rows, groups = todo.pop()
        if groups == 1:
            done.append(rows)
            continue
        left = groups // 2
        members = vectors[rows]
        order = (members @ _split_direction(members)).argsort(stable=True)
        cut = round(len(rows) * left / groups)
        todo += [(rows[order[:cut]], left), (rows[order[cut:]], groups - left)]
    return done


def _split_direction(vectors: Tensor) -> Tensor:
    """Return the direction from one half of the vectors to the other, by k-means with two centroids."""
    vectors = vectors - vectors.mean(0)
    direction = vectors[0] - vectors[-1]
    for _ in range(_SPLIT_ROUNDS):
        side = (vectors @ direction) > 0
        count = int(side.sum())
        if not 0 < count < len(vectors):
            break
        total = vectors[side].sum(0)  # both sides sum to zero
        direction = total / count + total / (len(vectors) - count)
    return direction
