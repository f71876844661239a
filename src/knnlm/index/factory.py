"""Spec strings, the choice behind `auto`, and building an approximate index from a spec.

`auto` chooses an index on the Pareto front of measured (perplexity, time, bytes); see docs/guides/scale.md. The specs
of all sizes are of one kind and differ in their numbers only:

    Lists512    k-means sorts keys into this many lists
    Blocks256   lists are split into blocks of up to this many keys, one byte per dimension; a query searches the
                nearest blocks

Any other spec is a FAISS factory string.
"""

from __future__ import annotations

import math

from knnlm.index.base import Index, Vectors
from knnlm.index.blocks import is_blocks
from knnlm.index.blocks.build import build_blocks
from knnlm.index.faiss import FaissIndex, make_empty
from knnlm.index.rerank import RerankedIndex
from knnlm.progress import Progress, silent

MAX_EXACT = 20_000  # keys up to which exact search is as fast as an index

_MAX_EXACT_CODES = 200_000  # the same, for keys that are stored as codes
_BLOCK_SIZE = 256  # keys: smaller blocks have more centroids to compare with, larger ones more keys
_MAX_BLOCKS = 32_000  # beyond which blocks are made larger
_BLOCK_FILL = 0.9  # average share of a block that is filled
_LISTS_PER_ROOT = 0.5  # times √keys: more lists are split into fewer blocks that are less full
_INVERTED_LISTS_PER_ROOT = 2.0  # the same, for FAISS, where lists are not split
_PCA_WIDTH, _PQ_CODES = 80, 40  # of the index for compressed keys


def default_spec(keys: int) -> str:
    """Return the spec for this many keys: `exact` while that is fast, then blocks."""
    if keys <= MAX_EXACT:
        return "exact"
    size = _BLOCK_SIZE
    while keys > _MAX_BLOCKS * size * _BLOCK_FILL:
        size *= 2
    return f"Lists{_power_of_two(_LISTS_PER_ROOT * math.sqrt(keys))},Blocks{size}"


def fallback_spec(keys: int) -> str:
    """Return the spec to use where the default fails its self-check: FAISS with two bytes per dimension.

    One byte per dimension cannot separate the members of narrow clusters that are far apart, which keys of language
    models do not form.
    """
    return f"IVF{inverted_lists(keys)},SQfp16"


def compressed_spec(keys: int, width: int) -> str:
    """Return the spec for keys that are themselves stored as codes: a small index, or `exact`.

    The index only makes a shortlist, which is measured on the stored keys. A key takes 20 bytes, half a byte for every
    two of 80 principal components; with its id and its share of the centroids it takes 30.
    """
    if keys <= _MAX_EXACT_CODES:
        return "exact"
    lists = inverted_lists(keys)
    if width < _PCA_WIDTH:
        return f"IVF{lists},SQ8"
    # Rotated at random after the projection, so that every sub-vector has the same variance.
    return f"PCAR{_PCA_WIDTH},IVF{lists},PQ{_PQ_CODES}x4fsr"


def inverted_lists(keys: int) -> int:
    """Return the number of lists of a FAISS index."""
    return _power_of_two(_INVERTED_LISTS_PER_ROOT * math.sqrt(keys))


def _power_of_two(number: float) -> int:
    """Return the nearest power of two."""
    return 1 << round(math.log2(max(1, number)))


def check_spec(spec: str, width: int, *, metric: str = "l2") -> None:
    """Raise for the spec of an index that cannot be built over vectors of this width."""
    if spec not in ("auto", "exact") and not is_blocks(spec):
        make_empty(spec, width, metric=metric)


def build_approximate(
    vectors: Vectors, spec: str, *, metric: str = "l2", rerank: bool = True, progress: Progress = silent
) -> Index:
    """Build a block index or a FAISS index; distances are measured on the vectors where the index has only codes."""
    if is_blocks(spec):
        blocks = build_blocks(vectors, spec, metric=metric, progress=progress)
        return RerankedIndex(blocks, vectors) if rerank and not blocks.keeps_all_dimensions else blocks
    index = FaissIndex.build(vectors, spec, metric=metric, progress=progress)
    return RerankedIndex(index, vectors) if rerank else index
