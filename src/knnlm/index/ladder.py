"""Which index for how many keys: the ladder behind `auto`. Knows nothing about FAISS but the names of its indexes.

Each rung is on the Pareto front of (perplexity, time, bytes) of what was measured; see docs/search.md. All rungs are of
one kind, and only the number of lists grows:

    PCAR256    keeps the 256 dimensions that hold most of the spread, and turns them so that all are alike: the tables
               that codes are compared with have 8 bits, and one wide dimension would leave none for the others
    IVF…       sorts keys into lists by the nearest of so many centroids; a query looks into some lists only
    PQ128x4fs  writes a key down as half a byte for every two dimensions, which a processor compares 32 at a time
               without leaving its registers
"""

from __future__ import annotations

import math

EXACT = 20_000  # keys up to which comparing with all of them is as cheap as anything
_WIDTH = 256  # dimensions that are kept
_PAIR = 2  # dimensions that share a code
_LISTS = (
    2.0  # times the root of the number of keys: more lists are shorter, but there are more centroids to compare with
)
_PROBES = 64  # lists that a query looks into
_PER_LIST = 48  # keys to train on for each centroid: fewer make lists uneven, more only take longer
_SAMPLE = 20_000  # keys to train on at the least: codes need them too
ROUNDS = 5  # of k-means: the first ones do nearly all of the work


def auto_spec(rows: int, width: int, *, metric: str = "l2") -> str:
    """Choose an index from the number of keys: `exact` while that is cheap, then lists that grow with its root."""
    if rows <= EXACT:
        return "exact"
    lists = f"IVF{lists_for(rows)}"
    if metric == "ip":
        # Principal components leave out a mean, and with it what inner products differ by. A rotation does not.
        return f"RR{width},{lists},PQ{width // _PAIR if width % _PAIR == 0 else width}x4fs"
    kept = min(_WIDTH, width)
    return f"PCAR{kept},{lists},PQ{kept // _PAIR if kept % _PAIR == 0 else kept}x4fs"


def finer_spec(spec: str) -> str:
    """Give what is made where a rung fails its self-check: a byte for each dimension, in as many lists.

    Codes are of whole keys. Where clusters are narrow and far from one another, unlike those of language models, half a
    byte for two dimensions cannot tell their members apart.
    """
    lists = next(part for part in spec.split(",") if part.startswith("IVF"))
    return f"{lists},SQ8"


def lists_for(rows: int) -> int:
    """Choose the number of lists: the power of two nearest to some roots of the number of keys."""
    return 1 << round(math.log2(_LISTS * math.sqrt(max(1, rows))))


def probes_for(lists: int) -> int:
    """Choose how many lists a query looks into."""
    return min(lists, _PROBES)


def sample_for(lists: int) -> int:
    """Choose how many keys an index with so many lists is trained on."""
    return max(_PER_LIST * lists, _SAMPLE)


def pieces(width: int) -> int:
    """Choose how many bytes a code has: the largest divisor of the width up to 64."""
    return max(count for count in range(1, min(width, 64) + 1) if width % count == 0)
