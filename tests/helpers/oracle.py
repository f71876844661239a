"""An independent oracle: the papers' formulas in NumPy, without the library."""

from __future__ import annotations

import math

import numpy as np
import torch


def softmax(scores):
    """Softmax of one row in float64."""
    scores = np.asarray(scores, dtype=np.float64)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def distances(query, keys, metric="l2"):
    """Squared L2, or minus the inner product, one query to all keys, in float64."""
    query, keys = np.asarray(query, np.float64), np.asarray(keys, np.float64)
    if metric == "ip":
        return -(keys @ query)
    return ((keys - query) ** 2).sum(1)


def knn_distribution(query, keys, values, vocab_size, *, k, knn_temperature, metric="l2"):
    """p_kNN by brute force; None where there are no keys."""
    if len(keys) == 0:
        return None
    all_distances = distances(query, keys, metric)
    nearest = np.argsort(all_distances, kind="stable")[:k]
    weights = softmax(-all_distances[nearest] / knn_temperature)
    probs = np.zeros(vocab_size)
    for weight, value in zip(weights, np.asarray(values)[nearest], strict=True):
        probs[value] += weight
    return probs


def knn_bounds(query, keys, values, target, *, k, knn_temperature, metric="l2"):
    """The bounds of p_kNN of the target over all ways to break ties at the k-th place.

    Ties are real: the first key of every document is the same, because all of them begin with the same token.
    """
    all_distances = distances(query, keys, metric)
    order = np.argsort(all_distances, kind="stable")[:k]
    last = all_distances[order[-1]]
    tied = np.abs(all_distances - last) <= 1e-5 * (1 + np.abs(last))
    sure = order[~tied[order]]
    free = len(order) - len(sure)
    weights = softmax(-all_distances[order] / knn_temperature)
    hit = weights[: len(sure)][values[sure] == target].sum()
    right = int((values[tied] == target).sum())
    least, most = max(0, free - int(tied.sum()) + right), min(free, right)
    return hit + least * weights[-1], hit + most * weights[-1]


def mix(p_lm, p_knn, lmbda):
    """(1-λ)·p_LM + λ·p_kNN."""
    return p_lm if p_knn is None else (1 - lmbda) * p_lm + lmbda * p_knn


@torch.no_grad()
def read_token_by_token(model, module, tokens, *, start_token, context, stride):
    """Feed a document prefix by prefix and take only the last position: (keys, p_LM) of each token.

    The context of a token is computed directly from the rule: everything within the first window; after that, a
    window begins every `stride` tokens and scores the last `stride` of its `context` positions.
    """
    inputs = [start_token, *tokens[:-1]]
    keys, probs = [], []
    for position in range(len(tokens)):
        begin = 0
        if position >= context:
            begin = ((position - context) // stride + 1) * stride
        captured = []
        handle = module.register_forward_pre_hook(
            lambda _, args, kwargs, captured=captured: captured.append((args or tuple(kwargs.values()))[0]),
            with_kwargs=True,
        )
        logits = model(torch.tensor([inputs[begin : position + 1]])).logits[0, -1]
        handle.remove()
        keys.append(captured[0][0, -1].numpy())
        probs.append(softmax(logits.double().numpy()))
    return np.array(keys), np.array(probs)


def perplexity(probabilities):
    """exp of the mean of -log p."""
    return math.exp(-np.mean(np.log(probabilities)))
