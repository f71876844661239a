"""The self-check of an index against the vectors it was built from.

An index file can be stale, incomplete, or belong to other keys, and still return neighbours. So before it is used, a
sample of the stored vectors must find themselves, and the distances must ascend and agree with those of the vectors.
"""

from __future__ import annotations

import torch

from knnlm.errors import IndexInvalid
from knnlm.index.base import Index, Vectors, even_sample
from knnlm.index.rerank import exact_distances

_SAMPLE = 256  # vectors
_MIN_FOUND = 0.8  # share of the sample that must find themselves or a duplicate: compressed codes may lose a few
_MAX_ERROR = 0.5  # median error of the nearest distance, relative to the median distance
_MAX_PRECISE_ERROR = 0.05  # the same for all distances, if they are not measured again


def check_index(index: Index, vectors: Vectors, *, what: str, k: int = 32, precise: bool = False) -> None:
    """Raise IndexInvalid if a sample of the vectors does not find itself.

    `precise`: the index's own distances are used as they are, so all of them must be nearly right.
    """
    if not vectors.rows:
        return
    sample = even_sample(vectors.rows, min(_SAMPLE, vectors.rows))
    queries = vectors.take(sample)  # (n, D)
    neighbours = index.search(queries, k)
    advice = "Build it again with: knnlm index STORE"
    finite = neighbours.distances.nan_to_num(posinf=torch.finfo(torch.float32).max)
    if (finite.diff(dim=1) < 0).any():
        raise IndexInvalid(f"{what} returns distances that do not ascend. {advice}")
    if (neighbours.ids >= vectors.rows).any():
        raise IndexInvalid(f"{what} returns ids beyond the {vectors.rows:,} stored keys. {advice}")
    exact = exact_distances(vectors, queries, neighbours.ids, metric=index.metric)
    own = exact_distances(vectors, queries, sample[:, None], metric=index.metric)[:, 0]
    # A duplicate is as good as the vector itself, so compare distances rather than ids.
    found = (exact.amin(1) <= own + 1e-3 * own.abs() + 1e-6).float().mean().item()
    if found < _MIN_FOUND:
        raise IndexInvalid(
            f"{what} belongs to other keys, or its codes are too coarse: only {found:.0%} of {len(sample)} stored keys "
            f"find themselves (at least {_MIN_FOUND:.0%} must). {advice}"
        )
    median = exact[exact.isfinite()].abs().median().clamp(min=1e-6)
    columns = slice(None) if precise else slice(1)
    errors = ((exact - neighbours.distances)[:, columns].abs() / median)[exact[:, columns].isfinite()]
    error = errors.nan_to_num(nan=1e9, posinf=1e9).median().item()
    allowed = _MAX_PRECISE_ERROR if precise else _MAX_ERROR
    if error > allowed:
        raise IndexInvalid(
            f"{what} returns distances that differ by {error:.0%} from those of the stored keys (median; at most "
            f"{allowed:.0%} is allowed). {advice}"
        )
