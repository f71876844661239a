"""Cross-validated perplexity of weights on their tuning text.

The perplexity of a gate on its tuning text comes from networks trained on other folds. Other weights are comparable to
it only if they are cross-validated on the same folds; otherwise weights with more parameters look better than they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knnlm.evaluation.fit import TraceTable
from knnlm.mixture.em import fit_folds, folds_of, log_mixed, renormalise
from knnlm.mixture.networks import DEFAULT_CONFIG, FEWEST, fewer_folds
from knnlm.mixture.weights import Buckets


def split_folds(groups: Tensor) -> Tensor:
    """Return the fold in which a gate holds each of N rows out, by the (N,) numbers of their documents."""
    config = fewer_folds(DEFAULT_CONFIG, groups)
    return folds_of(groups, config.folds, seed=config.seed, fewest=FEWEST)


def describe_folds(groups: Tensor) -> str:
    """Return a clause that tells which text the cross-validated weights were fitted to."""
    fold = split_folds(groups)
    if int(fold.max()) < 0:
        return f"by weights fitted to all of it, since it has fewer than {FEWEST} tokens"
    pairs = torch.stack([groups, fold.to(groups)], 1).unique(dim=0)
    if len(pairs) == len(groups.unique()):
        return "by weights fitted to other documents"
    return "by weights fitted to other spans of the text, of the same document where there is only one"


def out_of_fold(table: TraceTable, kind: str) -> float:
    """Return the perplexity of a text by weights (fixed, fitted or buckets) that were fitted to its other folds."""
    log_p = _by_buckets(table) if kind == "buckets" else _by_fit(table, kind)
    return float((-log_p.double().mean()).exp())


def _by_fit(table: TraceTable, kind: str) -> Tensor:
    """Return (N,) log-probabilities by constant weights."""
    # As in fitting, fixed weights use only the first component of each memory.
    used = (
        [0, *(span.start for span in table.component_slices)]
        if kind == "fixed"
        else list(range(len(table.component_names)))
    )
    logs = table.log_probs[:, used]
    config = fewer_folds(DEFAULT_CONFIG, table.documents)
    fold, _, weights = fit_folds(logs, table.documents, folds=config.folds, seed=config.seed, fewest=FEWEST)
    return log_mixed(logs, renormalise(weights[fold.clamp(min=0)], logs.isnan()))


def _by_buckets(table: TraceTable) -> Tensor:
    """Return (N,) log-probabilities by weights that depend on the distance of the nearest neighbour."""
    logs, near, fold = table.log_probs, table.memories[table.expensive[0]].nearest, split_folds(table.documents)
    assert near is not None
    log_probs = torch.zeros(len(logs), dtype=torch.float64)
    for number in fold.unique().tolist():
        held = fold == number
        kept = held if number < 0 else ~held  # with few rows none is held out
        weights = Buckets.fit(logs[kept], near[kept]).weights(near[held], logs[held].isnan())
        log_probs[held] = log_mixed(logs[held], weights).double()
    return log_probs
