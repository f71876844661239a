"""Check that an index answers as its vectors say it must. Knows nothing about tokens.

An index file can be stale, half written, or of other keys, and still answer every query. So before it is used, some
stored vectors must find themselves, and the distances it gives must ascend and agree with those of the vectors.
"""

from __future__ import annotations

import torch

from knnlm.errors import IndexInvalid
from knnlm.index.base import Index, Vectors, evenly
from knnlm.index.rerank import measure

_SAMPLE = 256

_FOUND = 0.8  # of the sample must find themselves (or a vector just as near): compressed codes may lose a few

_FINE = 0.05  # the same of all distances, where nothing will be measured again

_ERROR = 0.5  # median error of a distance, relative to a usual distance


def check_index(index: Index, vectors: Vectors, *, what: str, k: int = 32, fine: bool = False) -> None:
    """Raise IndexInvalid when a sample of the vectors does not find itself.

    `fine`: the index's own distances will be voted with, so all that it gives must be nearly right.
    """
    if not vectors.rows:
        return
    picked = evenly(vectors.rows, min(_SAMPLE, vectors.rows))
    queries = vectors.take(picked)  # (n, D)
    answer = index.search(queries, k)
    advice = "Make it again with: knnlm index MEMORY"
    finite = answer.distances.nan_to_num(posinf=torch.finfo(torch.float32).max)
    if (finite.diff(dim=1) < 0).any():
        raise IndexInvalid(f"{what} gives distances that do not ascend. {advice}")
    if (answer.ids >= vectors.rows).any():
        raise IndexInvalid(f"{what} names rows beyond the {vectors.rows:,} that are stored. {advice}")
    true = measure(vectors, queries, answer.ids, metric=index.metric)
    nearest = true.amin(1)
    own = measure(vectors, queries, picked[:, None], metric=index.metric)[:, 0]
    # A duplicate is as good as oneself, so compare distances rather than ids.
    found = (nearest <= own + 1e-3 * own.abs() + 1e-6).float().mean().item()
    if found < _FOUND:
        raise IndexInvalid(
            f"{what} belongs to other keys, or its codes are too coarse: only {found:.0%} of {len(picked)} stored keys "
            f"find themselves (at least {_FOUND:.0%} must). {advice}"
        )
    usual = true[true.isfinite()].abs().median().clamp(min=1e-6)
    looked = slice(None) if fine else slice(1)
    off = ((true - answer.distances)[:, looked].abs() / usual)[true[:, looked].isfinite()]
    error, allowed = off.nan_to_num(nan=1e9, posinf=1e9).median().item(), _FINE if fine else _ERROR
    if error > allowed:
        raise IndexInvalid(
            f"{what} gives distances that are {error:.0%} away from those of the stored keys (median; at most "
            f"{allowed:.0%} is allowed). {advice}"
        )
