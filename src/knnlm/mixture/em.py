"""Fit one weight per part to a text. Knows nothing about what the parts are, nor about features of a position.

The mean log-likelihood of mixture weights is concave, so there is one greatest value, whatever the start:

    L(w) = mean over n of log Σ_m w_m · p_m(n),      g_m = mean over n of p_m(n) / Σ_j w_j · p_j(n)

EM multiplies each w_m by g_m. It never loses, but takes thousands of steps where a weight goes to 0; so Newton's step
on the simplex is tried first, and EM's is taken where Newton's does not gain. By Jensen's inequality no weights are
better than w by more than log max_m g_m: that is the gap which says when to stop.

What a part says is its column of `logs`, (N, M) log-probabilities of the tokens that came. The first column is the
language model's and finite; -inf is a part that gave the token nothing, and NaN is one that abstains there, whose
weight goes to the first part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from knnlm.errors import ParameterError

_ROWS = 16_384  # at a time: their (n, M) float64 intermediates stay in the processor's cache

_INSIDE = 1e-3  # how far a start is moved from the boundary, which EM cannot leave

_HALVINGS = 12  # of Newton's step, before EM's is taken

_NEARER = 0.02  # the least share of a weight that one of Newton's steps leaves


@dataclass(frozen=True)
class Fit:
    """Weights, and how good they are."""

    weights: Tensor  # (M,) float64, sums to 1
    loss: float  # nats a token
    gap: float  # proven: no weights have a loss lower by more than this (the prior counted in)
    iterations: int


def fit(
    logs: Tensor,
    *,
    start: Tensor | None = None,
    prior: Tensor | None = None,
    tolerance: float = 1e-7,
    limit: int = 500,
) -> Fit:
    """Find the weights that make the text most probable, to within `tolerance` nats a token.

    `prior` is (M,) tokens imagined beside the text, of which each was surely one part's: a Dirichlet prior.
    """
    check_logs(logs)
    parts = logs.shape[1]
    if not (tolerance > 0 and limit >= 1):
        raise ParameterError(f"tolerance must be above 0 and limit at least 1, not {tolerance} and {limit}.")
    weights = _inside(start, parts)
    imagined = _check_prior(prior, parts)
    now = _measure(logs, weights, imagined)
    iterations = 0
    while now.gap > tolerance and iterations < limit:
        iterations += 1
        weights, now = _step(logs, weights, imagined, now)
    # Who always abstained is no different from the first part here, and nothing is known of what it would say.
    weights = renormalise(weights, logs.isnan().all(0, keepdim=True).cpu())[0]
    loss = now.loss if prior is None else _measure(logs, weights, torch.zeros_like(imagined)).loss
    return Fit(weights, loss, now.gap, iterations)


def fit_folds(
    logs: Tensor, groups: Tensor, *, folds: int, seed: int = 0, fewest: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the (N,) folds of `folds_of`, the weights fitted to all rows, and (K, M) fitted to all but each fold."""
    one = torch.ones(logs.shape[1])  # token for each part: nothing in a text, but a few rows prove no part useless
    if groups.shape != logs.shape[:1]:
        raise ParameterError(
            f"Each of the {len(logs)} rows needs the number of its document, not {tuple(groups.shape)}."
        )
    whole = fit(logs, prior=one).weights
    fold = folds_of(groups, folds, seed=seed, fewest=fewest)
    kept = [(fold != number).to(logs.device) for number in range(folds)]
    return fold, whole, torch.stack([fit(logs[rows], start=whole, prior=one).weights for rows in kept])


def folds_of(groups: Tensor, folds: int, *, seed: int = 0, fewest: int = 0) -> Tensor:
    """Give each of N rows its fold, (N,): whole documents; blocks of rows where there is one, or one has almost all.

    There are fewer folds where there are fewer documents. Of fewer than `fewest` rows none is held back: all are in
    fold -1.
    """
    rows = len(groups)
    if rows < max(fewest, 2 * folds):
        return torch.full((rows,), -1)
    _, number, sizes = groups.cpu().unique(return_inverse=True, return_counts=True)
    if len(sizes) < 2 or int(sizes.max()) > 0.9 * rows:
        return torch.arange(rows) * folds // rows
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed))
    filled, fold = [0] * folds, torch.zeros(len(sizes), dtype=torch.int64)
    for group in order[sizes[order].argsort(descending=True, stable=True)].tolist():
        fold[group] = least = min(range(folds), key=filled.__getitem__)
        filled[least] += int(sizes[group])
    return fold[number]


def renormalise(weights: Tensor, abstains: Tensor) -> Tensor:
    """Give each of N rows its (M,) or (N, M) weights, those of parts that abstain there handed to the first part."""
    given = weights.to(abstains.device).expand(abstains.shape)
    kept = given.masked_fill(abstains, 0)
    kept[..., 0] += (given - kept).sum(-1)
    return kept


def log_mixed(logs: Tensor, weights: Tensor) -> Tensor:
    """Give the (N,) log-probabilities of the mixture with (N, M) weights, summed in the log domain."""
    # A part that abstains is undefined there and has no weight: it adds nothing.
    return (logs.masked_fill(logs.isnan(), -torch.inf) + weights.log()).logsumexp(1)


def check_logs(logs: Tensor) -> None:
    """Refuse what no weights can be fitted to."""
    if logs.ndim != 2 or 0 in logs.shape or not logs.is_floating_point():
        raise ParameterError(
            f"Weights are fitted to (N, M) log-probabilities, not to {logs.dtype} {tuple(logs.shape)}."
        )
    if not logs[:, 0].isfinite().all():
        row = int((~logs[:, 0].isfinite()).nonzero()[0, 0])
        raise ParameterError(
            f"The first part must have an opinion everywhere, but says {float(logs[row, 0])} in row {row}."
        )
    if bool((logs == torch.inf).any()):
        raise ParameterError("A log-probability is +inf. Log-probabilities are at most 0.")


@dataclass(frozen=True)
class _Measured:
    """The loss at some weights, with its slopes."""

    loss: float
    ratio: Tensor  # (M,) g: minus the gradient of the loss
    curvature: Tensor  # (M, M) the Hessian of the loss

    @property
    def gap(self) -> float:
        return max(0.0, math.log(max(float(self.ratio.max()), 1e-300))) if math.isfinite(self.loss) else math.inf


def _measure(logs: Tensor, weights: Tensor, imagined: Tensor) -> _Measured:
    """Go over all rows once; imagined tokens are rows in which one part alone gave the token all it had."""
    used = weights > 0
    safe = weights.where(used, torch.ones_like(weights))
    loss = -float((imagined * safe.log()).sum())
    if bool((imagined[~used] > 0).any()):
        loss = math.inf
    ratio = imagined / safe
    curvature = torch.diag(imagined / safe.square())
    for probs, scale in _scaled(logs):
        mixed = probs @ weights  # (n,)
        loss -= float(mixed.log().sum() + scale.sum())
        shares = probs / mixed[:, None]
        ratio = ratio + shares.sum(0)
        curvature = curvature + shares.T @ shares
    total = len(logs) + float(imagined.sum())
    return _Measured(loss / total, ratio / total, curvature / total)


def _scaled(logs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Give some rows at a time as probabilities, relative to the largest of each row, and the logarithm of that."""
    for rows in logs.split(_ROWS):
        rows = rows.double().cpu()
        rows = rows.where(~rows.isnan(), rows[:, :1])  # who abstains leaves the word to the first part
        scale = rows.amax(1)
        yield (rows - scale[:, None]).exp_(), scale


def _step(logs: Tensor, weights: Tensor, imagined: Tensor, now: _Measured) -> tuple[Tensor, _Measured]:
    """Take Newton's step as far as it gains, else EM's."""
    # With Σw added to the loss, w ≥ 0 is the only constraint left: the optimum's weights sum to 1 by themselves.
    aim = _least_quadratic(now.curvature, 2 * now.ratio - 1, weights)
    slope = float(((1 - now.ratio) * (aim - weights)).sum())
    for halving in range(_HALVINGS if slope < 0 else 0):
        # A weight of 0 could not come back by EM's step, which then would prove nothing; so they only come near it.
        tried = torch.maximum(weights + (aim - weights) * 0.5**halving, _NEARER * weights)
        tried = tried / tried.sum()
        after = _measure(logs, tried, imagined)
        if after.loss <= now.loss + 1e-4 * slope * 0.5**halving:
            return tried, after
    tried = weights * now.ratio
    tried = tried / tried.sum()
    return tried, _measure(logs, tried, imagined)


def _least_quadratic(matrix: Tensor, vector: Tensor, start: Tensor) -> Tensor:
    """Minimise ½·x·A·x - b·x over x ≥ 0 by an active set, from a feasible start."""
    # Twin parts make A singular; any of their splits will do, and a little ridge picks one.
    matrix = matrix + torch.diag(matrix.diagonal().clamp(min=1e-30)) * 1e-10
    found, free = start.clone(), start > 0
    for _ in range(10 * len(vector)):
        wanted = torch.zeros_like(found)
        wanted[free] = torch.linalg.solve(matrix[free][:, free], vector[free])
        blocked = free & (wanted < 0)
        if bool(blocked.any()):
            steps = torch.where(blocked, found / (found - wanted), torch.inf)
            length, first = steps.min(0)
            found = (found + length * (wanted - found)).clamp_(min=0)
            found[first] = 0
            free[first] = False
            continue
        found = wanted
        pull = (vector - matrix @ found).masked_fill(free, 0)
        if float(pull.max()) <= 1e-12:
            break
        free[pull.argmax()] = True
    return found


def _inside(start: Tensor | None, parts: int) -> Tensor:
    """Check a start and move it off the boundary."""
    even = torch.full((parts,), 1 / parts, dtype=torch.float64)
    if start is None:
        return even
    start = start.double().cpu()
    if start.shape != even.shape or not start.isfinite().all() or bool((start < 0).any()) or float(start.sum()) <= 0:
        raise ParameterError(f"The start must be {parts} weights of at least 0, not {start.tolist()}.")
    return (1 - _INSIDE) * start / start.sum() + _INSIDE * even


def _check_prior(prior: Tensor | None, parts: int) -> Tensor:
    none = torch.zeros(parts, dtype=torch.float64)
    if prior is None:
        return none
    prior = prior.double().cpu()
    if prior.shape != none.shape or not prior.isfinite().all() or bool((prior < 0).any()):
        raise ParameterError(f"The prior must be {parts} numbers of tokens, at least 0, not {prior.tolist()}.")
    return prior
