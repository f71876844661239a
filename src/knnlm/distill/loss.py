"""The loss of a student: β·KL(p_kNN ‖ p_student) + (1-β)·CE. Knows nothing about models or stores.

Both gradients are the student's softmax less what it should be, so one pass over the logits gives both. It goes over a
few rows at a time: beside the logits and their gradient, no (N, V) tensor is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ELEMENTS = 1 << 26  # logits that are looked at together: 256 MB in float32


class Losses(NamedTuple):
    """What a batch lost, in nats."""

    total: Tensor  # the sum over its positions, divided by `positions`; the only one with a gradient
    kl: Tensor  # the sum over positions with a target
    ce: Tensor  # the sum over all positions that count
    answered: Tensor  # how many positions have a target


def distillation_loss(
    logits: Tensor,
    targets: Tensor,
    ids: Tensor | None = None,
    probs: Tensor | None = None,
    beta: float = 0.0,
    *,
    positions: int | None = None,
    rows: int | None = None,
) -> Losses:
    """Compare (N, V) logits with (N,) next tokens and the (N, m) tokens and probabilities that retrieval gives.

    A target below 0 does not count. A row without probabilities has the cross-entropy alone. `positions` is what the
    sum is divided by, where the batch is part of a larger one; `rows` is how many are looked at together.
    """
    if ids is None or probs is None or not beta:
        ids, probs, beta = targets.new_zeros(len(targets), 0), logits.new_zeros(len(targets), 0), 0.0
    divisor = (targets >= 0).sum().clamp(min=1) if positions is None else torch.tensor(positions)
    rows = rows or max(1, _ELEMENTS // max(1, logits.shape[1]))
    parts = _Distillation.apply(logits, targets, ids, probs, beta, divisor, rows)  # type: ignore[no-untyped-call]
    return Losses(*parts)


class _Distillation(torch.autograd.Function):
    """The sum and its gradient, some rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ids: Tensor, probs: Tensor, beta: float, divisor: Tensor, rows: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exact = _exact(logits)
        normaliser = torch.empty(len(logits), dtype=exact, device=logits.device)
        kl, ce = torch.zeros_like(normaliser), torch.zeros_like(normaliser)
        wanted = probs.to(exact)
        for part in _parts(len(logits), rows):
            scores = logits[part].to(exact)  # (n, V)
            normaliser[part] = scores.logsumexp(1)
            ce[part] = normaliser[part] - scores.gather(1, targets[part].clamp(min=0)[:, None])[:, 0]
            log_q = scores.gather(1, ids[part]) - normaliser[part][:, None]
            # Where p is 0 the product is 0, also where q is.
            cross = (wanted[part] * log_q).masked_fill(wanted[part] == 0, 0.0)
            kl[part] = (torch.xlogy(wanted[part], wanted[part]) - cross).sum(1)
        counted = targets >= 0
        answered = counted & (probs > 0).any(1)
        kl, ce = kl.masked_fill(~answered, 0.0), ce.masked_fill(~counted, 0.0)
        share = beta * answered.to(exact)
        total = (share * kl + (1 - share) * ce).sum() / divisor
        ctx.save_for_backward(logits, targets, ids, wanted, normaliser, share, divisor)
        ctx.rows = rows
        out = total, kl.sum(), ce.sum(), answered.sum()
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, ids, wanted, normaliser, share, divisor = ctx.saved_tensors
        weight = (targets >= 0) * (outer.to(wanted.dtype) / divisor)  # (N,)
        gradient = torch.empty_like(logits)
        for part in _parts(len(logits), ctx.rows):
            own, kl, ce = weight[part], share[part] * weight[part], (1 - share[part]) * weight[part]
            scores = (logits[part].to(wanted.dtype) - normaliser[part][:, None]).exp_()
            scores *= (own + kl * (wanted[part].sum(1) - 1))[:, None]
            scores.scatter_add_(1, ids[part], -kl[:, None] * wanted[part])
            scores.scatter_add_(1, targets[part].clamp(min=0)[:, None], -ce[:, None])
            gradient[part] = scores
        return gradient, None, None, None, None, None, None


def _parts(count: int, rows: int) -> Iterator[slice]:
    return (slice(begin, begin + rows) for begin in range(0, count, rows))


def _exact(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
