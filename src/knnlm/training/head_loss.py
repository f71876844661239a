"""The loss of hidden states through the output matrix of a model, without the logits of all positions at once.

The logits of a few positions are computed, compared and turned into gradients, then overwritten by those of the next
positions. The loss is a scalar, so its gradient is known in the forward pass up to a factor: no logits are computed
twice, and none are kept. In half precision most of the time is memory traffic of the logits, so few passes are made
over them, and positions are weighted where gradients have the width of the model, not of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, log_softmax

from knnlm.training.trainer import (
    MAX_LOGITS,
    Goal,
    Losses,
    row_gradient,
    row_losses,
    slices,
    sparse_targets,
)

RowPass = Callable[[Tensor, Goal], tuple[Tensor, Tensor, Tensor]]

_HALF = (torch.bfloat16, torch.float16)
_GPU_FACTOR = 4  # times as many logits at a time on a GPU, where few large products are faster


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ids: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    beta: float = 0.0,
    positions: Tensor | int | None = None,
    rows: int | None = None,
    row_pass: RowPass | None = None,
) -> Losses:
    """Return `distillation_loss` of the logits of (N, D) hidden states, with the (V, D) weight and the bias of a head.

    Products are computed in the dtype of the hidden states, losses in float32 or float64. `row_pass` replaces
    `default_row_pass`, for example by a compiled one.
    """
    ids, probs, beta = sparse_targets(targets, ids, probs, beta)
    divisor = (targets >= 0).sum().clamp(min=1) if positions is None else torch.as_tensor(positions)
    limit = MAX_LOGITS * (_GPU_FACTOR if hidden.is_cuda else 1)
    rows = rows or even_rows(len(hidden), max(1, limit // len(weight)))
    compute = row_pass or default_row_pass(hidden.dtype)
    losses = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, ids, probs, beta, divisor, rows, compute, torch.is_grad_enabled()
    )
    return Losses(*losses)


def default_row_pass(dtype: torch.dtype) -> RowPass:
    """Return what compares the logits of hidden states of this dtype."""
    return half_losses_and_gradient if dtype in _HALF else losses_and_gradient


def losses_and_gradient(logits: Tensor, goal: Goal) -> tuple[Tensor, Tensor, Tensor]:
    """Return the KL and the cross-entropy of (n, V) logits, each (n,), and the gradient in the dtype of the logits."""
    normaliser, kl, ce = row_losses(logits, goal)
    return kl, ce, row_gradient(logits, normaliser, goal).to(logits.dtype)


def half_losses_and_gradient(logits: Tensor, goal: Goal) -> tuple[Tensor, Tensor, Tensor]:
    """Return the KL and the cross-entropy of (n, V) logits, each (n,), and the gradient of their sum, not weighted."""
    log_q = log_softmax(logits, 1, dtype=torch.float32)
    ce = -log_q.gather(1, goal.targets[:, None])[:, 0]
    cross = (goal.probs * log_q.gather(1, goal.ids)).masked_fill(goal.probs == 0, 0.0)
    kl = (torch.xlogy(goal.probs, goal.probs) - cross).sum(1)
    losses = kl.masked_fill(~goal.with_target, 0.0), ce.masked_fill(~goal.counted, 0.0)
    if torch.compiler.is_compiling() and not goal.ids.shape[1]:  # all of it in one pass over the logits
        wanted = torch.arange(logits.shape[1], device=logits.device) == goal.targets[:, None]
        return *losses, (log_q.exp() - wanted.float()).to(logits.dtype)
    gradient = log_q.exp_()  # probabilities of target distributions sum to 1
    gradient.scatter_add_(1, goal.ids, -goal.share[:, None] * goal.probs)
    gradient.scatter_add_(1, goal.targets[:, None], goal.share[:, None] - 1)
    return *losses, gradient.to(logits.dtype)


def even_rows(count: int, limit: int) -> int:
    """Return how many of `count` rows to process at a time, at most `limit`: parts of one size if possible."""
    parts = math.ceil(count / limit)
    even = next((number for number in range(parts, 2 * parts) if count % number == 0), None)
    return max(1, count // even if even else min(count, limit))


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ids: Tensor,
        probs: Tensor,
        beta: float,
        divisor: Tensor,
        rows: int,
        row_pass: RowPass,
        is_training: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        goal = Goal.build(targets, ids, probs, beta, divisor, hidden.dtype)
        matrix, shift = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        kl = torch.zeros(len(hidden), dtype=goal.probs.dtype, device=hidden.device)
        ce = torch.zeros_like(kl)
        needs_weight = any(ctx.needs_input_grad[1:3])
        into = _Gradients(hidden, weight, bias, needs_weight=needs_weight) if is_training else None
        for part in slices(len(hidden), rows):
            logits = linear(hidden[part], matrix, shift)  # (n, V)
            if into is None:
                _, kl[part], ce[part] = row_losses(logits, goal.rows(part))
            else:
                kl[part], ce[part], gradient = row_pass(logits, goal.rows(part))
                into.add(part, gradient, matrix, goal.weight[part] if hidden.dtype in _HALF else None)
        ctx.save_for_backward(*(into.tensors if into is not None else ()))
        out = goal.sum(kl, ce, divisor)
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *others = (tensor * outer.to(tensor.dtype) for tensor in ctx.saved_tensors)
        weight, bias = (*others, None, None)[:2]
        return hidden, weight, bias, *([None] * 8)


class _Gradients:
    """The gradients of hidden states and, if they are trained, of weight and bias, collected part by part."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, needs_weight: bool) -> None:
        self._from = hidden
        self._needs_weight = needs_weight
        self._hidden = torch.empty_like(hidden)
        # Parts are summed in float32, also if the weights are in half precision.
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        size = weight.shape if needs_weight else (0,)
        self._weight = torch.zeros(size, dtype=wide, device=weight.device)
        self._bias = None if bias is None else torch.zeros_like(bias, dtype=wide)

    def add(self, part: slice, gradient: Tensor, matrix: Tensor, weight: Tensor | None) -> None:
        """Add the gradients of some positions, from that of their (n, V) logits, which is multiplied by (n,) weights.

        None: it is weighted already.
        """
        own, hidden = self._hidden[part], self._from[part]
        torch.mm(gradient, matrix, out=own)
        if weight is not None:
            own *= weight[:, None]
            hidden = (hidden * weight[:, None]).to(own.dtype)
        if not self._needs_weight:
            return
        if gradient.dtype == self._weight.dtype:
            self._weight.addmm_(gradient.T, hidden)
        else:
            self._weight += gradient.T @ hidden
        if self._bias is not None:
            wide = gradient.to(self._bias.dtype)
            self._bias += (wide if weight is None else wide * weight[:, None]).sum(0)

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the hidden states, of the weight and, if there is one, of the bias."""
        if not self._needs_weight:
            return [self._hidden]
        return [self._hidden, self._weight, *([] if self._bias is None else [self._bias])]
