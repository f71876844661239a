"""Check that an index answers as its vectors say it must. Knows nothing about tokens.

An index file can be stale, half written, or of other keys, and still answer every query. So before it is used, some
stored vectors must find themselves, and the distances it gives must ascend and agree with those of the vectors.
"""

from __future__ import annotations

import torch

from knnlm.errors import IndexInvalid
from knnlm.index.base import Index, Vectors
from knnlm.index.rerank import remeasure

_SAMPLE = 256
_FOUND = 0.8  # of the sample must find themselves (or a vector just as near): compressed codes may lose a few
_ERROR = 0.5  # median error of a distance, relative to a usual distance


def check_index(index: Index, vectors: Vectors, *, what: str, k: int = 32) -> None:
    """Raise IndexInvalid when a sample of the vectors does not find itself."""
    if not vectors.rows:
        return
    picked = torch.linspace(0, vectors.rows - 1, min(_SAMPLE, vectors.rows), dtype=torch.float64).long().unique()
    queries = vectors.take(picked)  # (n, D)
    answer = index.search(queries, k)
    advice = "Make it again with: knnlm index MEMORY"
    finite = answer.distances.nan_to_num(posinf=torch.finfo(torch.float32).max)
    if (finite.diff(dim=1) < 0).any():
        raise IndexInvalid(f"{what} gives distances that do not ascend. {advice}")
    if (answer.ids >= vectors.rows).any():
        raise IndexInvalid(f"{what} names rows beyond the {vectors.rows:,} that are stored. {advice}")
    exact = remeasure(vectors, queries, answer.ids, metric=index.metric)
    own = remeasure(vectors, queries, picked[:, None], metric=index.metric).distances[:, 0]
    # A duplicate is as good as oneself, so compare distances rather than ids.
    found = (exact.distances[:, 0] <= own + 1e-3 * own.abs() + 1e-6).float().mean().item()
    if found < _FOUND:
        raise IndexInvalid(
            f"{what} belongs to other keys, or its codes are too coarse: only {found:.0%} of {len(picked)} stored keys "
            f"find themselves (at least {_FOUND:.0%} must). {advice}"
        )
    given = remeasure(vectors, queries, answer.ids[:, :1], metric=index.metric).distances[:, 0]
    usual = exact.distances[exact.distances.isfinite()].abs().median().clamp(min=1e-6)
    error = ((given - answer.distances[:, 0]).abs() / usual).nan_to_num(posinf=1e9).median().item()
    if error > _ERROR:
        raise IndexInvalid(
            f"{what} gives distances that are {error:.0%} away from those of the stored keys (median; at most "
            f"{_ERROR:.0%} is allowed). {advice}"
        )
