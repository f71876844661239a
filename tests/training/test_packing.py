"""Packed rows: which windows share one, the same loss and gradients as windows alone, and models that cannot."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st

from helpers.models import tiny
from knnlm.lm.windows import WindowShape
from knnlm.training import decoder_pass, packed_attention
from knnlm.training.data import TokenStream, TrainingBatches, count_targets, pack_rows
from knnlm.training.decoder_pass import DecoderPass, split_rows
from knnlm.training.head_loss import head_loss
from knnlm.training.packed_attention import (
    MASK,
    VARLEN,
    boundaries,
    choose_attention,
    flash_varlen,
    reference_varlen,
    supports_packing,
)
from knnlm.training.packed_attention import (
    packed_attention as attention_of,
)

CONTEXT = 24


@given(lengths=st.lists(st.integers(1, 30), max_size=60), row_length=st.integers(30, 50))
def test_rows_hold_every_item_once_and_no_two_would_fit_in_one(lengths, row_length):
    rows = pack_rows(lengths, row_length)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    used = [sum(lengths[item] for item in row) for row in rows]
    assert all(0 < size <= row_length for size in used)
    assert all(one + other > row_length for one, other in itertools.combinations(used, 2))


def packed_batches(sizes, *, context=CONTEXT, stride=None, held_out=0.0, seed=0):
    random = np.random.default_rng(5)
    texts = [random.integers(2, 300, size).tolist() for size in sizes]
    shape = WindowShape(context, stride or context)
    return texts, TrainingBatches(
        TokenStream.from_documents(texts), shape, start_token=1, held_out=held_out, seed=seed, packed=True
    )


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    context=st.integers(2, 16),
    part=st.floats(0.2, 1),
    batch_tokens=st.integers(1, 80),
    epoch=st.integers(0, 2),
    spare=st.integers(0, 2),
)
def test_packed_rows_contain_the_windows_as_they_are_read_alone(sizes, context, part, batch_tokens, epoch, spare):
    texts, batches = packed_batches(sizes, context=context, stride=max(1, int(context * part)), held_out=0.2)
    length = batches.row_length(batch_tokens)
    assert length <= context
    steps = batches.steps(epoch, batch_tokens)
    windows = np.concatenate([row for rows in steps for row in rows])
    assert sorted(map(tuple, windows.tolist())) == sorted(map(tuple, batches.windows(epoch).tolist()))
    most = batches.rows_per_step(batch_tokens)
    assert max(map(len, steps)) <= most
    assert max(map(len, steps)) - min(map(len, steps)) <= 1
    for rows in [*steps, *batches.held_out_steps(batch_tokens)]:
        batch = batches.read_rows(rows, length, count=len(rows) + spare)
        assert batch.ids.shape == (len(rows) + spare, length)
        grids = [one.view(batch.ids.shape) for one in (batch.targets, batch.positions)]
        for number in range(len(rows) + spare):
            at = 0
            for window in rows[number] if number < len(rows) else []:
                alone = batches.read(window[None])
                size = alone.ids.shape[1]
                here = slice(at, at + size)
                assert batch.ids[number, here].tolist() == alone.ids[0].tolist()
                assert grids[0][number, here].tolist() == alone.targets.tolist()
                assert grids[1][number, here].tolist() == alone.positions.tolist()
                assert batch.position_ids[number, here].tolist() == list(range(size))
                at += size
            rest = slice(at, length)
            assert set(grids[0][number, rest].tolist()) | set(grids[1][number, rest].tolist()) <= {-1}
            assert batch.position_ids[number, rest].tolist() == [n % batches.longest for n in range(length - at)]
        for (part_, _), own in zip(split_rows(batch, None, 1), range(len(rows) + spare), strict=True):
            assert part_.ids.tolist() == batch.ids[own : own + 1].tolist()
            assert part_.targets.tolist() == grids[0][own].tolist()
            assert part_.position_ids.tolist() == batch.position_ids[own : own + 1].tolist()
    held = sum(count_targets(row) for rows in batches.held_out_steps(batch_tokens) for row in rows)
    assert held + batches.tokens == sum(map(len, texts))


def test_rows_are_nearly_full_and_differ_between_epochs():
    random = np.random.default_rng(0)
    sizes = random.integers(5, 400, size=600)
    _, batches = packed_batches(sizes, context=256)
    for epoch in range(2):
        steps = batches.steps(epoch, 2048)
        assert {len(rows) for rows in steps} <= {7, 8}
        filled = sum(int((row[:, 3] - row[:, 1]).sum()) for rows in steps for row in rows)
        assert filled / sum(256 * len(rows) for rows in steps) > 0.96
    first, second = (batches.steps(epoch, 2048)[0][0].tolist() for epoch in range(2))
    assert first != second
    assert [[row.tolist() for row in rows] for rows in batches.steps(0, 2048)] == [
        [row.tolist() for row in rows] for rows in packed_batches(sizes, context=256)[1].steps(0, 2048)
    ]


def test_padding_has_no_longer_windows_than_the_text():
    """A kernel that is told the length of the longest window leaves what is beyond it in a longer one undefined."""
    _, batches = packed_batches([30] * 40, context=1024)
    length = batches.row_length(2048)
    assert (batches.longest, length) == (30, 1024)
    rows = [row for step in batches.steps(0, 2048) for row in step]
    found = boundaries(batches.read_rows(rows, length, count=len(rows) + 1).position_ids)
    assert int(found.diff().max()) == 30


# ------------------------------------------------------------------------------------------------------ the oracle


def one_by_one(model, batches, windows):
    """The summed cross-entropy of windows, each read alone by the plain model."""
    total = torch.zeros((), dtype=torch.float64)
    for window in windows:
        alone = batches.read(window[None])
        logits = model(input_ids=alone.ids, use_cache=False).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits, alone.targets, ignore_index=-1, reduction="sum")
    return total


def gradients(model):
    found = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("attention", [MASK, VARLEN])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral", "gemma2"])
def test_loss_and_gradients_equal_those_of_windows_one_by_one(family, attention):
    """In float64. The sliding windows of Gemma and Mistral are shorter than those of the text."""
    model = tiny(family).double()
    model.config.sliding_window = 10
    for module in model.modules():
        if getattr(module, "sliding_window", None):
            module.sliding_window = 10
    _, batches = packed_batches([40, 3, 17, 1, 24, 9, 30], stride=16)
    rows = batches.steps(0, 4 * CONTEXT)[0]
    windows = np.concatenate(rows)
    count = count_targets(windows)
    right = one_by_one(model, batches, windows) / count
    right.backward()
    wanted = gradients(model)
    passes = DecoderPass(model, precision="float32", row_length=CONTEXT, longest=batches.longest)
    assert passes.attention == MASK
    if attention == VARLEN and family in ("gpt2", "gemma2"):  # dropout, and a cap of the scores
        assert not supports_packing(model, CONTEXT, VARLEN)
        return
    passes.attention = attention
    losses = passes.losses(batches.read_rows(rows, CONTEXT), None, beta=0.0, positions=count)
    single = family.startswith("gemma")  # its norms compute in float32
    torch.testing.assert_close(losses.total, right.detach(), rtol=1e-7 if single else 1e-12, atol=0)
    losses.total.backward()
    found = gradients(model)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        tolerance = {"rtol": 1e-5, "atol": 1e-7} if single else {"rtol": 1e-9, "atol": 1e-12}
        torch.testing.assert_close(gradient, wanted[name], **tolerance)


def test_model_with_a_recurrent_state_is_not_packed():
    config = hf.MambaConfig(vocab_size=320, hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    assert choose_attention(model, CONTEXT, precision="float32") is None
    assert not supports_packing(model, CONTEXT, VARLEN)
    assert not DecoderPass(model, precision="float32", row_length=CONTEXT, longest=CONTEXT).is_packed


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_model_without_restarting_positions_is_not_packed(family):
    assert choose_attention(tiny(family), CONTEXT, precision="float32") is None


def test_mask_is_used_if_the_kernel_fails_for_a_model(monkeypatch):
    monkeypatch.setattr(decoder_pass, "choose_attention", lambda *_, **__: VARLEN)
    for works, right in ((True, VARLEN), (False, MASK)):
        monkeypatch.setattr(DecoderPass, "_runs", lambda _, attention, works=works: attention is None or works)
        passes = DecoderPass(tiny("llama"), precision="bfloat16", row_length=CONTEXT, longest=CONTEXT)
        assert passes.attention == right


def test_model_is_left_as_it_was():
    model = tiny("llama")
    before = model.config._attn_implementation, model.training, torch.random.get_rng_state().tolist()
    assert supports_packing(model, CONTEXT, VARLEN)
    with attention_of(model, VARLEN):
        assert model.config._attn_implementation != before[0]
    assert (model.config._attn_implementation, model.training, torch.random.get_rng_state().tolist()) == before
    assert not supports_packing(model, 1, MASK)  # there is no room for two windows


# ------------------------------------------------------------------------------------------------------ the kernel


def test_boundaries_are_padded_to_few_lengths():
    position_ids = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    found = boundaries(position_ids)
    assert found.dtype == torch.int32
    assert len(found) == 256
    assert found.tolist()[:5] == [0, 3, 5, 6, 10]
    assert set(found.tolist()[5:]) == {10}
    assert len(boundaries(torch.zeros(1, 256, dtype=torch.long))) == 512  # there is always an end


@pytest.mark.parametrize("options", [{"window_size", "enable_gqa", "scale"}, {"window_size", "scale"}, {"is_causal"}])
@pytest.mark.parametrize("window", [None, 4])
def test_kernel_is_called_with_the_options_of_its_version(monkeypatch, options, window):
    """Versions of torch differ in the options; a stand-in of each computes by the reference."""
    calls = []

    def kernel(query, key, value, starts, starts_of_keys, longest, longest_key, **given):
        assert set(given) <= options
        assert (longest, longest_key) == (16, 16)
        assert starts is starts_of_keys
        calls.append(given)
        left, right = given.get("window_size", (-1, 0 if given.get("is_causal") else -1))
        assert right == 0
        return reference_varlen(query, key, value, starts, 16, given.get("scale"), None if left < 0 else left + 1)

    monkeypatch.setattr(packed_attention, "varlen_attn", kernel)
    monkeypatch.setattr(packed_attention, "_OPTIONS", frozenset(options))
    q, k, v = (torch.randn(20, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    starts = torch.tensor([0, 12, 20, 20], dtype=torch.int32)
    if window is not None and "window_size" not in options:
        with pytest.raises(NotImplementedError, match="sliding"):
            flash_varlen(q, k, v, starts, 16, 0.3, window)
        return
    found = flash_varlen(q, k, v, starts, 16, 0.3, window)
    torch.testing.assert_close(found, reference_varlen(q, k, v, starts, 16, 0.3, window))
    assert len(calls) == 1


def test_kernel_whose_gradients_are_nan_is_not_right():
    right = [torch.ones(3), torch.ones(3)]
    change = packed_attention._largest_change([torch.ones(3), torch.full((3,), torch.nan)], right)
    assert not change <= packed_attention._MAX_KERNEL_CHANGE
    assert packed_attention._largest_change([torch.ones(3), 2 * torch.ones(3)], right) == 1.0


def test_reference_is_softmax_attention_within_windows():
    q, k, v = (torch.randn(11, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    found = reference_varlen(q, k, v, torch.tensor([0, 7, 11, 11]), 8, 0.5, 3)
    for head in range(4):
        for here in range(11):
            begin = max(0 if here < 7 else 7, here - 2)
            scores = (0.5 * k[begin : here + 1, head // 2] @ q[here, head]).softmax(0)
            torch.testing.assert_close(found[here, head], scores @ v[begin : here + 1, head // 2])


def test_torch_traces_the_kernel_with_these_arguments():
    """Without a GPU: shapes only, on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if packed_attention.varlen_attn is None:
        return
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(20, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
        starts = torch.empty(3, dtype=torch.int32)
        output = flash_varlen(q, k, v, starts, 16, 0.3, 4)
        assert output.shape == q.shape


def test_passes_read_nothing_back_from_the_device(monkeypatch):
    """On fake tensors, which have no values: whatever the host waits for would raise an error."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if packed_attention.varlen_attn is None:
        return
    monkeypatch.setattr(packed_attention, "reference_varlen", flash_varlen)
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.LlamaConfig(vocab_size=320, intermediate_size=80, **shape)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        ids, targets = torch.empty(2, 64, dtype=torch.long), torch.empty(128, dtype=torch.long)
        starts, longest = torch.empty(256, dtype=torch.int32), 128
        packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
        with attention_of(model, VARLEN), torch.autocast("cpu", torch.bfloat16):
            hidden = model.base_model(input_ids=ids, position_ids=torch.empty_like(ids), use_cache=False, **packed)[0]
        head = model.get_output_embeddings()
        head_loss(hidden.flatten(0, 1).bfloat16(), head.weight, head.bias, targets, positions=100).total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert all(weight.grad.dtype == torch.float32 for weight in model.parameters())
