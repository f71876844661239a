"""The loss through the output matrix: torch's cross-entropy and its gradients, a few positions at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.models import tiny
from knnlm.training import head_loss as module
from knnlm.training.decoder_pass import plain_head
from knnlm.training.head_loss import default_row_pass, even_rows, head_loss, losses_and_gradient
from knnlm.training.trainer import Goal, distillation_loss


def case(seed, *, rows=9, words=13, width=5, dtype=torch.float64):
    random = np.random.default_rng(seed)
    hidden, weight, bias = (
        torch.tensor(random.normal(size=shape), dtype=dtype, requires_grad=True)
        for shape in ((rows, width), (words, width), (words,))
    )
    targets = torch.tensor(np.where(random.random(rows) < 0.2, -1, random.integers(words, size=rows)))
    ids = torch.tensor(np.stack([random.choice(words, 4, replace=False) for _ in range(rows)]))
    probs = torch.tensor(random.dirichlet(np.ones(4), size=rows) * (random.random((rows, 1)) < 0.7))
    return hidden, weight, bias, targets, ids, probs


def gradients(loss, inputs):
    return torch.autograd.grad(3 * loss, inputs)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 10), with_bias=st.booleans())
def test_loss_and_gradients_are_those_of_cross_entropy(seed, rows, with_bias):
    hidden, weight, bias, targets, _, _ = case(seed)
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    if not (targets >= 0).any():
        return
    logits = torch.nn.functional.linear(hidden, weight, bias if with_bias else None)
    right = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1)
    found = head_loss(hidden, weight, bias if with_bias else None, targets, rows=rows)
    torch.testing.assert_close(found.total, right)
    torch.testing.assert_close(gradients(found.total, inputs), gradients(right, inputs))


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_teacher_loss_is_that_of_the_logits(beta):
    for seed in range(5):
        hidden, weight, bias, targets, ids, probs = case(seed)
        logits = torch.nn.functional.linear(hidden, weight, bias)
        right = distillation_loss(logits, targets, ids, probs, beta=beta, positions=20)
        found = head_loss(hidden, weight, bias, targets, ids, probs, beta=beta, positions=20, rows=4)
        torch.testing.assert_close(tuple(found), tuple(right))
        inputs = [hidden, weight, bias]
        torch.testing.assert_close(gradients(found.total, inputs), gradients(right.total, inputs))


def test_logits_of_a_few_positions_exist_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "MAX_LOGITS", 13 * 4)
    hidden, weight, bias, targets, ids, probs = case(1, rows=12)
    seen = []

    def watched(logits, goal):
        seen.append(tuple(logits.shape))
        return losses_and_gradient(logits, goal)

    whole = distillation_loss(torch.nn.functional.linear(hidden, weight, bias), targets, ids, probs, beta=0.5)
    found = head_loss(hidden, weight, bias, targets, ids, probs, beta=0.5, row_pass=watched)
    torch.testing.assert_close(found.total, whole.total)
    assert seen == [(4, 13)] * 3
    with torch.no_grad():  # an evaluation computes no gradients
        torch.testing.assert_close(tuple(head_loss(hidden, weight, bias, targets, row_pass=None))[2], found.ce)
        head_loss(hidden, weight, bias, targets, row_pass=watched)
    assert len(seen) == 3


@given(count=st.integers(1, 5000), limit=st.integers(1, 600))
def test_parts_have_one_size_where_it_divides(count, limit):
    rows = even_rows(count, limit)
    assert 1 <= rows <= limit
    assert count % rows == 0 or rows == limit


@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_half_precision_has_the_gradients_of_its_values(beta):
    """Parts of two positions are summed in float32; positions that do not count have no gradient."""
    hidden, weight, bias, targets, ids, probs = case(3, rows=512, dtype=torch.float32)
    half = hidden.detach().bfloat16().requires_grad_()
    exact = hidden.detach().bfloat16().double().requires_grad_()
    matrix, shift = (tensor.detach().bfloat16().double().requires_grad_() for tensor in (weight, bias))
    options = {"beta": beta, "positions": 700}
    right = head_loss(exact, matrix, shift, targets, ids, probs, **options)
    found = head_loss(half, weight, bias, targets, ids, probs, rows=2, **options)
    torch.testing.assert_close([part.item() for part in found], [part.item() for part in right], rtol=0.01, atol=0)
    wanted = gradients(right.total, [exact, matrix, shift])
    taken = gradients(found.total, [half, weight, bias])
    assert [gradient.dtype for gradient in taken] == [torch.bfloat16, torch.float32, torch.float32]
    for one, other in zip(taken, wanted, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 0.02
    assert not taken[0][targets < 0].any()


@pytest.mark.parametrize("columns", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_comparison_is_the_same(monkeypatch, columns, dtype):
    """Traced, without a compiler."""
    hidden, weight, _, targets, ids, probs = case(2, dtype=torch.float32)
    logits = (hidden @ weight.T).detach().to(dtype)
    share = 0.5 if columns else 0.0
    goal = Goal.build(targets, ids[:, :columns], probs[:, :columns], share, torch.tensor(9), dtype)
    compare = default_row_pass(dtype)
    right = compare(logits.clone(), goal)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        torch.testing.assert_close(compare(logits.clone(), goal), right)


def test_head_is_plain_only_if_nothing_else_happens_to_the_logits():
    assert isinstance(plain_head(tiny("llama")), torch.nn.Linear)
    assert isinstance(plain_head(tiny("gpt2")), torch.nn.Linear)
    assert plain_head(tiny("gemma2")) is None  # a cap
    assert plain_head(tiny("cohere")) is None  # a factor
