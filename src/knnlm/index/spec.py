"""Which index for how many keys: the ladder behind `auto`. Knows nothing about how indexes work.

Each rung is on the Pareto front of (perplexity, time, bytes) of what was measured; see docs/search.md. All rungs are of
one kind, and only their numbers grow:

    Lists512    sorts keys into lists by the nearest of so many centroids
    Blocks256   cuts lists into blocks of up to so many keys that are near one another, a byte for each dimension; a
                query looks into some blocks only

Choose an index that adds little to keys which are themselves codes. Knows nothing about how keys are stored.

It only makes a shortlist, which is measured again on what is stored. So it compares 20 bytes a key, half a byte for
every two of 80 principal components, and with the 8 of a key's number and the lists' centres it takes 30 bytes a key.
"""

from __future__ import annotations

import math

EXACT = 20_000  # keys up to which comparing with all of them is as cheap as anything

BLOCKS = 40  # that a query looks into

WIDTH = 1024  # dimensions that are kept, at most

_SIZE = 256  # keys in a block: with fewer there are more centres to compare with, with more a query must look at more

_MANY = 32_000  # blocks, beyond which they are made larger

_FILLED = 0.9  # of a block, on average

_LISTS = 0.5  # times the root of the number of keys: more of them would be cut into fewer blocks that are less full

_INVERTED = 2.0  # as many, where lists are not cut

_PROBES = 64  # lists that a query looks into, in an index of FAISS

_PER_LIST = 48  # keys to train on for each centroid: fewer make lists uneven, more only take longer

_SAMPLE = 20_000  # keys to train on at the least

ROUNDS = 5  # of k-means: the first ones do nearly all of the work


def default_spec(rows: int) -> str:
    """Choose an index from the number of keys: `exact` while that is cheap, then blocks."""
    if rows <= EXACT:
        return "exact"
    size = _SIZE
    while rows > _MANY * size * _FILLED:
        size *= 2
    return f"Lists{_power_of_two(_LISTS * math.sqrt(rows))},Blocks{size}"


def fallback_spec(rows: int) -> str:
    """Give what is made where a rung fails its self-check: an index of FAISS with two bytes for each dimension.

    Where clusters are narrow and far from one another, unlike those of language models, a byte for the whole of a range
    cannot tell their members apart.
    """
    return f"IVF{inverted_lists_for(rows)},SQfp16"


def inverted_lists_for(rows: int) -> int:
    """Choose the number of lists of an index of FAISS."""
    return _power_of_two(_INVERTED * math.sqrt(rows))


def _power_of_two(number: float) -> int:
    """Give the nearest one."""
    return 1 << round(math.log2(max(1, number)))


def probes_for(lists: int) -> int:
    """Choose how many lists a query looks into."""
    return min(lists, _PROBES)


def sample_for(lists: int) -> int:
    """Choose how many keys an index with so many lists is trained on."""
    return max(_PER_LIST * lists, _SAMPLE)


def pieces(width: int) -> int:
    """Choose how many bytes a code has: the largest divisor of the width up to 64."""
    return max(count for count in range(1, min(width, 64) + 1) if width % count == 0)


_COMPONENTS, _PIECES = 80, 40

_EXACT = 200_000  # keys up to which comparing with all of them is cheap


def compressed_spec(rows: int, width: int) -> str:
    """Give the FAISS factory string of a thin index for so many keys, or `exact`."""
    if rows <= _EXACT:
        return "exact"
    lists = inverted_lists_for(rows)
    if width < _COMPONENTS:
        return f"IVF{lists},SQ8"
    # Turned at random after the projection, so that every piece varies as much as the others.
    return f"PCAR{_COMPONENTS},IVF{lists},PQ{_PIECES}x4fsr"
