"""Maximum-likelihood mixture weights, the same at every position.

The mean log-likelihood of mixture weights is concave, so there is one greatest value, whatever the start:

    L(w) = mean over n of log Σ_m w_m · p_m(n),      g_m = mean over n of p_m(n) / Σ_j w_j · p_j(n)

EM multiplies each w_m by g_m. It never increases the loss, but takes thousands of steps where a weight goes to 0; so
Newton's step on the simplex is tried first, and EM's is taken where Newton's does not help. By Jensen's inequality no
weights are better than w by more than log max_m g_m: this gap is the stopping criterion.

The input is `logs`, (N, M) log-probabilities of the targets by each component. The first column is the language model's
and finite; -inf is a component with probability 0, and NaN one that abstains there, whose weight goes to the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from knnlm.errors import ParameterError

_ROWS = 16_384  # at a time: their (n, M) float64 intermediates stay in the processor's cache

_INSIDE = 1e-3  # share of even weights that is mixed into a start: EM cannot leave the boundary

_MAX_HALVINGS = 12  # of Newton's step, before EM's is taken

_MIN_KEPT = 0.02  # of a weight by one of Newton's steps


@dataclass(frozen=True)
class Fit:
    """Fitted weights and their loss."""

    weights: Tensor  # (M,) float64, sums to 1
    loss: float  # nats per token
    gap: float  # proven: no weights have a loss lower by more than this (including the prior)
    iterations: int


def fit(
    logs: Tensor,
    *,
    start: Tensor | None = None,
    prior: Tensor | None = None,
    tolerance: float = 1e-7,
    limit: int = 500,
) -> Fit:
    """Return the weights that maximise the likelihood of the text, to within `tolerance` nats per token.

    `prior` is (M,) pseudo-counts of a Dirichlet prior, in tokens.
    """
    check_logs(logs)
    count = logs.shape[1]
    if not (tolerance > 0 and limit >= 1):
        raise ParameterError(f"tolerance must be above 0 and limit at least 1, not {tolerance} and {limit}.")
    weights = _inside(start, count)
    imagined = _check_prior(prior, count)
    now = _measure(logs, weights, imagined)
    iterations = 0
    while now.gap > tolerance and iterations < limit:
        iterations += 1
        weights, now = _step(logs, weights, imagined, now)
    # The likelihood does not depend on a component that always abstains.
    weights = renormalise(weights, logs.isnan().all(0, keepdim=True).cpu())[0]
    loss = now.loss if prior is None else _measure(logs, weights, torch.zeros_like(imagined)).loss
    return Fit(weights, loss, now.gap, iterations)


def fit_folds(
    logs: Tensor, groups: Tensor, *, folds: int, seed: int = 0, fewest: int = 0, fitted: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the (N,) folds of `folds_of`, the weights fitted to all rows, and (K, M) fitted to all but each fold.

    `fitted` marks the (N,) rows that weights are fitted to; None: all of them.
    """
    one = torch.ones(
        logs.shape[1]
    )  # token per component: negligible in a text, but keeps weights of a few rows above 0
    if groups.shape != logs.shape[:1]:
        raise ParameterError(
            f"Each of the {len(logs)} rows needs the number of its document, not {tuple(groups.shape)}."
        )
    used = torch.ones(len(logs), dtype=torch.bool) if fitted is None else fitted.cpu()
    whole = fit(logs[used.to(logs.device)], prior=one).weights
    fold = folds_of(groups, folds, seed=seed, fewest=fewest)
    kept = [((fold != number) & used).to(logs.device) for number in range(folds)]
    kept = [rows if bool(rows.any()) else used.to(logs.device) for rows in kept]  # all of them may be in one fold
    return fold, whole, torch.stack([fit(logs[rows], start=whole, prior=one).weights for rows in kept])


def folds_of(groups: Tensor, folds: int, *, seed: int = 0, fewest: int = 0) -> Tensor:
    """Return the (N,) folds of N rows: whole documents, or blocks of rows if one document has almost all rows.

    There are no more folds than documents. With fewer than `fewest` rows none is held out: all are in fold -1.
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
    """Return (N, M) weights in which the weight of components that abstain goes to the first component."""
    given = weights.to(abstains.device).expand(abstains.shape)
    kept = given.masked_fill(abstains, 0)
    kept[..., 0] += (given - kept).sum(-1)
    return kept


def log_mixed(logs: Tensor, weights: Tensor) -> Tensor:
    """Return the (N,) log-probabilities of the mixture with (N, M) weights, summed in the log domain."""
    # A component that abstains is NaN there and has weight 0.
    return (logs.masked_fill(logs.isnan(), -torch.inf) + weights.log()).logsumexp(1)


def check_logs(logs: Tensor) -> None:
    """Raise ParameterError for log-probabilities that no weights can be fitted to."""
    if logs.ndim != 2 or 0 in logs.shape or not logs.is_floating_point():
        raise ParameterError(
            f"Weights are fitted to (N, M) log-probabilities, not to {logs.dtype} {tuple(logs.shape)}."
        )
    if not logs[:, 0].isfinite().all():
        row = int((~logs[:, 0].isfinite()).nonzero()[0, 0])
        raise ParameterError(f"The first component must not abstain, but is {float(logs[row, 0])} in row {row}.")
    if bool((logs == torch.inf).any()):
        raise ParameterError("A log-probability is +inf. Log-probabilities are at most 0.")


@dataclass(frozen=True)
class _Measured:
    """The loss at some weights, with its derivatives."""

    loss: float
    ratio: Tensor  # (M,) g: minus the gradient of the loss
    curvature: Tensor  # (M, M) the Hessian of the loss

    @property
    def gap(self) -> float:
        return max(0.0, math.log(max(float(self.ratio.max()), 1e-300))) if math.isfinite(self.loss) else math.inf


def _measure(logs: Tensor, weights: Tensor, imagined: Tensor) -> _Measured:
    """Measure all rows; a token of the prior is a row in which one component has probability 1 and the others 0."""
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
    """Yield blocks of rows as probabilities relative to the largest of each row, and the logarithm of that."""
    for rows in logs.split(_ROWS):
        rows = rows.double().cpu()
        rows = rows.where(~rows.isnan(), rows[:, :1])  # NaN: the weight goes to the first component
        scale = rows.amax(1)
        yield (rows - scale[:, None]).exp_(), scale


def _step(logs: Tensor, weights: Tensor, imagined: Tensor, now: _Measured) -> tuple[Tensor, _Measured]:
    """Take Newton's step as far as it lowers the loss, else EM's."""
    # With Σw added to the loss, w ≥ 0 is the only constraint left: the optimum's weights sum to 1 by themselves.
    aim = _least_quadratic(now.curvature, 2 * now.ratio - 1, weights)
    slope = float(((1 - now.ratio) * (aim - weights)).sum())
    for halving in range(_MAX_HALVINGS if slope < 0 else 0):
        # A weight of 0 cannot grow by EM's step, so weights only approach it.
        tried = torch.maximum(weights + (aim - weights) * 0.5**halving, _MIN_KEPT * weights)
        tried = tried / tried.sum()
        after = _measure(logs, tried, imagined)
        if after.loss <= now.loss + 1e-4 * slope * 0.5**halving:
            return tried, after
    tried = weights * now.ratio
    tried = tried / tried.sum()
    return tried, _measure(logs, tried, imagined)


def _least_quadratic(matrix: Tensor, vector: Tensor, start: Tensor) -> Tensor:
    """Minimise ½·x·A·x - b·x over x ≥ 0 by an active set, from a feasible start."""
    # Equal components make A singular; any split between them is optimal, and a small ridge picks one.
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


def _inside(start: Tensor | None, count: int) -> Tensor:
    """Check a start and move it off the boundary."""
    even = torch.full((count,), 1 / count, dtype=torch.float64)
    if start is None:
        return even
    start = start.double().cpu()
    if start.shape != even.shape or not start.isfinite().all() or bool((start < 0).any()) or float(start.sum()) <= 0:
        raise ParameterError(f"The start must be {count} weights of at least 0, not {start.tolist()}.")
    return (1 - _INSIDE) * start / start.sum() + _INSIDE * even


def _check_prior(prior: Tensor | None, count: int) -> Tensor:
    none = torch.zeros(count, dtype=torch.float64)
    if prior is None:
        return none
    prior = prior.double().cpu()
    if prior.shape != none.shape or not prior.isfinite().all() or bool((prior < 0).any()):
        raise ParameterError(f"The prior must be {count} numbers of tokens, at least 0, not {prior.tolist()}.")
    return prior
