"""Measures of generated text: repetition, copies from a store, and divergence from real text.

The divergence follows MAUVE (Pillutla et al. 2021): vectors of generated and real texts are clustered together; p and
q are the shares of real and generated texts in each cluster. For mixtures r = w·p + (1-w)·q, the divergence curve has
the points (exp(-c·KL(q‖r)), exp(-c·KL(p‖r))), and the score is the area under it: 1 if p = q, near 0 if no cluster has
both. Figures of other features or numbers of texts are not comparable.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from knnlm.datastore.suffix_array import DEPTH, SuffixArray

Floats = NDArray[np.float64]

LOOP = 0.5  # below this distinct ratio, a text is a loop
SCALE = 5.0  # c of the divergence curve, as in the paper

_CURVE_POINTS = 100
_PER_CLUSTER = 20  # texts per cluster, on average


def distinct_ratio(tokens: Sequence[int], n: int = 4) -> float:
    """Return the number of different n-grams divided by the number of n-grams; 1 for a text without any."""
    count = len(tokens) - n + 1
    if count < 1:
        return 1.0
    return len({tuple(tokens[begin : begin + n]) for begin in range(count)}) / count


def longest_copies(array: SuffixArray, texts: Sequence[Sequence[int]]) -> list[int]:
    """Return for each text the length of its longest run of tokens that a document of the store contains, exactly."""
    border = array.vocab_size + 1  # a number that never occurs
    pieces = [np.append(array.encode(np.asarray(text, np.int64), begins=False), border) for text in texts]
    if not pieces:
        return []
    numbers = np.concatenate(pieces)
    lengths = np.zeros(len(numbers), np.int64)  # of the longest match that begins at each number
    begins = np.arange(len(numbers))
    low, high = array.first[numbers], array.first[numbers + 1]
    length = 1
    while len(begins):
        alive = low < high
        begins, low, high = begins[alive], low[alive], high[alive]
        lengths[begins] = length
        if length == DEPTH:  # positions are sorted no further
            begins, runs = _runs(begins, low, high, array.order)
            np.maximum.at(lengths, begins, runs)
            break
        low, high = array.extend_match(low, high, numbers[begins + length], length)  # the border matches nothing
        length += 1
    ends = np.cumsum([len(piece) for piece in pieces])
    return [int(own.max()) for own in np.split(lengths, ends[:-1])]


def _runs(
    begins: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64], order: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where copies of at least DEPTH tokens begin, and their lengths.

    A number and a place of the store match in DEPTH tokens. Where the numbers and places after them do so too, the
    copy goes on: it is as long as such a sequence, and DEPTH - 1 more.
    """
    owner = np.repeat(np.arange(len(begins)), high - low)
    step = np.arange(len(owner)) - np.repeat(np.cumsum(high - low) - (high - low), high - low)
    begin, place = begins[owner], order[low[owner] + step].astype(np.int64)
    sorting = np.lexsort((begin, place - begin))
    begin, shift = begin[sorting], (place - begin)[sorting]
    new = np.ones(len(begin), np.bool_)
    new[1:] = (np.diff(begin) != 1) | (np.diff(shift) != 0)
    heads = np.flatnonzero(new)
    return begin[heads], np.diff(heads, append=len(begin)) + DEPTH - 1


def kmeans(vectors: Floats, clusters: int, *, seed: int = 0, steps: int = 50) -> NDArray[np.int64]:
    """Return the (N,) cluster of each vector: Lloyd's algorithm after k-means++, the best of five starts."""
    best, least = np.zeros(len(vectors), np.int64), np.inf
    generator = np.random.default_rng(seed)
    for _ in range(5):
        centres = vectors[generator.integers(len(vectors))][None]
        while len(centres) < clusters:
            weights = _squares(vectors, centres).min(1)
            total = weights.sum()
            chosen = generator.choice(len(vectors), p=weights / total if total > 0 else None)
            centres = np.concatenate([centres, vectors[chosen][None]])
        labels = np.full(len(vectors), -1)
        for _ in range(steps):
            far = _squares(vectors, centres)
            new = far.argmin(1)
            if (new == labels).all():
                break
            labels = new
            for cluster in np.unique(labels):
                centres[cluster] = vectors[labels == cluster].mean(0)
        cost = _squares(vectors, centres)[np.arange(len(vectors)), labels].sum()
        if cost < least:
            best, least = labels, cost
    return best


def _squares(vectors: Floats, centres: Floats) -> Floats:
    """Return the (N, K) squared distances."""
    products = vectors @ centres.T
    squares = (vectors**2).sum(1)[:, None] + (centres**2).sum(1) - 2 * products
    return np.maximum(squares, 0.0)


def frontier_area(p: Floats, q: Floats, *, scale: float = SCALE, points: int = _CURVE_POINTS) -> float:
    """Return the area under the divergence curve of two distributions over the same clusters."""
    xs, ys = [0.0, 1.0], [1.0, 0.0]
    for weight in np.linspace(0, 1, points + 2)[1:-1]:
        mixed = weight * p + (1 - weight) * q
        xs.append(float(np.exp(-scale * _kl(q, mixed))))
        ys.append(float(np.exp(-scale * _kl(p, mixed))))
    order = np.lexsort((-np.array(ys), xs))  # by x; of equal x, the larger y first
    x, y = np.array(xs)[order], np.array(ys)[order]
    return float(((x[1:] - x[:-1]) * (y[1:] + y[:-1]) / 2).sum())


def _kl(p: Floats, q: Floats) -> float:
    own = p > 0
    return float((p[own] * np.log(p[own] / q[own])).sum())


def divergence_score(real: Floats, generated: Floats, *, clusters: int | None = None, seed: int = 0) -> float:
    """Return the area under the divergence curve of (N, D) and (M, D) vectors; 1: the same distribution."""
    vectors = np.concatenate([real, generated]).astype(np.float64)
    vectors -= vectors.mean(0)  # hidden states share a large common part
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    count = max(2, len(vectors) // _PER_CLUSTER) if clusters is None else clusters
    labels = kmeans(vectors, count, seed=seed)
    p, q = (np.bincount(own, minlength=count) / len(own) for own in np.split(labels, [len(real)]))
    return frontier_area(p, q)
