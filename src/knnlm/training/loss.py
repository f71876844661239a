"""The distillation loss β·KL(p_kNN ‖ p_decoder) + (1-β)·CE.

Both gradients are the decoder's softmax minus a target distribution, so one pass over the logits computes both. It
works on a few rows at a time: besides the logits and their gradient, no (N, V) tensor is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_MAX_LOGITS = 1 << 26  # processed at a time: 256 MB in float32


class Losses(NamedTuple):
    """Losses of a batch, in nats."""

    total: Tensor  # the sum over all positions, divided by `positions`; the only one with a gradient
    kl: Tensor  # the sum over positions with a target distribution
    ce: Tensor  # the sum over all positions that count
    with_target: Tensor  # the number of positions with a target distribution


def distillation_loss(
    logits: Tensor,
    targets: Tensor,
    ids: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    beta: float = 0.0,
    positions: int | None = None,
    rows: int | None = None,
) -> Losses:
    """Compare (N, V) logits with (N,) next tokens and with (N, m) tokens and probabilities from retrieval.

    A target below 0 does not count. A row without probabilities has the cross-entropy alone. `positions` is the divisor
    of the sum, for a batch that is part of a larger one; `rows` is how many rows are processed at a time.
    """
    if ids is None or probs is None or not beta:
        ids, probs, beta = targets.new_zeros(len(targets), 0), logits.new_zeros(len(targets), 0), 0.0
    divisor = (targets >= 0).sum().clamp(min=1) if positions is None else torch.tensor(positions)
    rows = rows or max(1, _MAX_LOGITS // max(1, logits.shape[1]))
    losses = _Distillation.apply(logits, targets, ids, probs, beta, divisor, rows)  # type: ignore[no-untyped-call]
    return Losses(*losses)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ids: Tensor, probs: Tensor, beta: float, divisor: Tensor, rows: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        normaliser = torch.empty(len(logits), dtype=dtype, device=logits.device)
        kl, ce = torch.zeros_like(normaliser), torch.zeros_like(normaliser)
        wanted = probs.to(dtype)
        for part in _slices(len(logits), rows):
            scores = logits[part].to(dtype)  # (n, V)
            normaliser[part] = scores.logsumexp(1)
            ce[part] = normaliser[part] - scores.gather(1, targets[part].clamp(min=0)[:, None])[:, 0]
            log_q = scores.gather(1, ids[part]) - normaliser[part][:, None]
            # Where p is 0 the product is 0, even if log q is -inf.
            cross = (wanted[part] * log_q).masked_fill(wanted[part] == 0, 0.0)
            kl[part] = (torch.xlogy(wanted[part], wanted[part]) - cross).sum(1)
        counted = targets >= 0
        with_target = counted & (probs > 0).any(1)
        kl, ce = kl.masked_fill(~with_target, 0.0), ce.masked_fill(~counted, 0.0)
        share = beta * with_target.to(dtype)
        total = (share * kl + (1 - share) * ce).sum() / divisor
        ctx.save_for_backward(logits, targets, ids, wanted, normaliser, share, divisor)
        ctx.rows = rows
        out = total, kl.sum(), ce.sum(), with_target.sum()
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, ids, wanted, normaliser, share, divisor = ctx.saved_tensors
        weight = (targets >= 0) * (outer.to(wanted.dtype) / divisor)  # (N,)
        gradient = torch.empty_like(logits)
        for part in _slices(len(logits), ctx.rows):
            own, kl, ce = weight[part], share[part] * weight[part], (1 - share[part]) * weight[part]
            scores = (logits[part].to(wanted.dtype) - normaliser[part][:, None]).exp_()
            scores *= (own + kl * (wanted[part].sum(1) - 1))[:, None]
            scores.scatter_add_(1, ids[part], -kl[:, None] * wanted[part])
            scores.scatter_add_(1, targets[part].clamp(min=0)[:, None], -ce[:, None])
            gradient[part] = scores
        return gradient, None, None, None, None, None, None


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(begin, begin + size) for begin in range(0, count, size))
