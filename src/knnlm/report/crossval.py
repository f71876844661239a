"""Judge weights on the text they are fitted to, by weights fitted to the rest of it. Knows nothing about stores.

A gate's figure on its tuning text is by networks that had not seen it. To be compared with that, the figures of other
weights must be made in the same way, on the same folds; else whoever has more to fit looks better than he is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knnlm.evaluation.fit import TraceTable
from knnlm.mixture.em import fit_folds, folds_of, log_mixed, renormalise
from knnlm.mixture.networks import DEFAULT_CONFIG, FEWEST, fewer_folds
from knnlm.mixture.weights import Buckets


def split_folds(groups: Tensor) -> Tensor:
    """Give each of N rows, by the (N,) numbers of their documents, the fold in which a gate holds it back."""
    recipe = fewer_folds(DEFAULT_CONFIG, groups)
    return folds_of(groups, recipe.folds, seed=recipe.seed, fewest=FEWEST)


def describe_folds(groups: Tensor) -> str:
    """Say what weights that are judged on a row were fitted to, as a clause."""
    fold = split_folds(groups)
    if int(fold.max()) < 0:
        return f"by weights fitted to all of it, since it has fewer than {FEWEST} tokens"
    pairs = torch.stack([groups, fold.to(groups)], 1).unique(dim=0)
    if len(pairs) == len(groups.unique()):
        return "by weights fitted to other documents"
    return "by weights fitted to other stretches of the text, of the same document where there are not several"


def out_of_fold(seen: TraceTable, kind: str) -> float:
    """Give the perplexity of a text by weights (fixed, fitted or buckets) that were fitted to other folds of it."""
    log_p = _by_buckets(seen) if kind == "buckets" else _by_fit(seen, kind)
    return float((-log_p.double().mean()).exp())


def _by_fit(seen: TraceTable, kind: str) -> Tensor:
    """Give the (N,) log-probabilities by weights that are the same everywhere."""
    # As in fitting: weights that are fixed weigh the first part of each memory only.
    used = (
        [0, *(span.start for span in seen.component_slices)]
        if kind == "fixed"
        else list(range(len(seen.component_names)))
    )
    logs = seen.log_probs[:, used]
    recipe = fewer_folds(DEFAULT_CONFIG, seen.documents)
    fold, _, weights = fit_folds(logs, seen.documents, folds=recipe.folds, seed=recipe.seed, fewest=FEWEST)
    return log_mixed(logs, renormalise(weights[fold.clamp(min=0)], logs.isnan()))


def _by_buckets(seen: TraceTable) -> Tensor:
    """Give the (N,) log-probabilities by weights that go by the distance of the nearest neighbour."""
    logs, near, fold = seen.log_probs, seen.memories[seen.expensive[0]].nearest, split_folds(seen.documents)
    assert near is not None
    found = torch.zeros(len(logs), dtype=torch.float64)
    for number in fold.unique().tolist():
        held = fold == number
        kept = held if number < 0 else ~held  # of few rows none is held back
        weights = Buckets.fit(logs[kept], near[kept]).weights(near[held], logs[held].isnan())
        found[held] = log_mixed(logs[held], weights).double()
    return found
