"""Reading with a model: keys and logits do not depend on how windows are packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oracle
from conftest import documents
from knnlm import CausalLM
from knnlm.errors import ModelError, ModelMismatch, ParameterError
from knnlm.lm.fingerprint import same_weights, tokenizer_fingerprint, weights_fingerprint
from knnlm.lm.windows import WindowShape
from models import FAMILIES, tiny, tiny_tokenizer

SHAPE = WindowShape(16, 8)


def collect(lm, tokens, *, shape=SHAPE, batch_tokens, logits=True):
    """Put the readings of a call into the order of their rows."""
    total = sum(map(len, tokens))
    keys, scores = torch.full((total, lm.width), torch.nan), torch.full((total, lm.vocab_size), torch.nan)
    targets = torch.full((total,), -1)
    for reading in lm.read(tokens, shape, batch_tokens=batch_tokens, logits=logits):
        keys[reading.rows], targets[reading.rows] = reading.keys, reading.targets
        if logits:
            scores[reading.rows] = reading.logits
    return keys, scores, targets


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packing_and_padding_do_not_change_a_key_beyond_rounding(family):
    lm = CausalLM(tiny(family), tiny_tokenizer())
    tokens = [
        lm.encode(document.text)[:length] for document, length in zip(documents(5), (40, 3, 17, 1, 24), strict=True)
    ]
    alone = [collect(lm, [one], batch_tokens=1) for one in tokens]
    keys, scores, targets = collect(lm, tokens, batch_tokens=64)
    torch.testing.assert_close(keys, torch.cat([one[0] for one in alone]), rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(scores, torch.cat([one[1] for one in alone]), rtol=1e-3, atol=2e-4)
    assert targets.tolist() == [token for one in tokens for token in one]
    headless, _, _ = collect(lm, tokens, batch_tokens=64, logits=False)
    assert torch.equal(headless, keys)


def test_sliding_windows_equal_a_token_by_token_reading(lm):
    tokens = lm.encode(documents(1, words=60)[0].text)[:50]
    keys, logits, _ = collect(lm, [tokens], batch_tokens=48)
    expected_keys, expected = oracle.read_token_by_token(
        lm.model, lm.model.model.layers[-1].mlp, tokens, start_token=lm.start_token, context=16, stride=8
    )
    np.testing.assert_allclose(keys.numpy(), expected_keys, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(logits.softmax(1).numpy(), expected, rtol=1e-4, atol=1e-7)


def test_a_document_never_sees_another_documents_context(lm):
    first, second = (lm.encode(document.text)[:20] for document in documents(2))
    together = collect(lm, [first, second], batch_tokens=64)[0][20:]
    apart = collect(lm, [second], batch_tokens=64)[0]
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


def test_reading_without_logits_never_runs_the_head(lm):
    calls = []
    handle = lm.model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    try:
        collect(lm, [[5, 6, 7]], batch_tokens=16, logits=False)
        assert calls == []
        collect(lm, [[5, 6, 7]], batch_tokens=16)
        assert calls == [1]
    finally:
        handle.remove()


def test_a_model_in_training_mode_is_read_without_dropout_and_left_in_training_mode():
    model = tiny("gpt2")
    lm = CausalLM(model, tiny_tokenizer())
    calm = collect(lm, [[5, 6, 7, 8]], batch_tokens=16)[0]
    model.train()
    assert torch.equal(collect(lm, [[5, 6, 7, 8]], batch_tokens=16)[0], calm)
    assert all(module.training for module in model.modules())


def test_a_document_begins_with_bos_or_with_eos_where_there_is_none():
    with_bos, without = tiny_tokenizer(), tiny_tokenizer(bos=False)
    assert CausalLM(tiny("llama"), with_bos).start_token == with_bos.bos_token_id
    assert CausalLM(tiny("llama"), without).start_token == without.eos_token_id


def test_the_window_follows_what_the_model_can_read(lm):
    assert lm.longest == 128
    assert lm.window() == WindowShape(128, 64)
    assert lm.window(32) == WindowShape(32, 16)
    with pytest.raises(ParameterError, match=r"context 129 is longer than the 128 tokens"):
        lm.window(129)
    alibi = CausalLM(tiny("bloom"), tiny_tokenizer())
    assert alibi.longest is None
    assert alibi.window() == WindowShape(1024, 512)


def test_a_prompt_that_leaves_no_room_is_refused(lm):
    assert lm.prompt("The memory", room=10)[0] == lm.start_token
    with pytest.raises(ParameterError, match="can read only 128"):
        lm.prompt("The memory " * 60, room=10)


def test_a_fingerprint_is_the_same_in_every_precision_and_differs_after_the_smallest_training_step():
    model = tiny("llama")
    plain = weights_fingerprint(model)
    for dtype in (torch.bfloat16, torch.float16):
        assert same_weights(plain, weights_fingerprint(tiny("llama").to(dtype)))
    assert not same_weights(plain, weights_fingerprint(tiny("llama", seed=1)))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight *= 1.01
    assert not same_weights(plain, weights_fingerprint(model))


def test_tokenizers_differ_by_their_vocabulary():
    changed = tiny_tokenizer()
    changed.add_tokens(["zzz"])
    assert tokenizer_fingerprint(changed) != tokenizer_fingerprint(tiny_tokenizer())
    assert tokenizer_fingerprint(tiny_tokenizer()) == tokenizer_fingerprint(tiny_tokenizer())


def test_a_tokenizer_larger_than_the_model_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"extra{number}" for number in range(400)])
    with pytest.raises(ModelError, match="do not belong together"):
        CausalLM(tiny("llama"), tokenizer)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "no-such-model-anywhere"])
def test_a_model_that_cannot_be_opened_is_one_clear_line(name):
    with pytest.raises(ModelError, match="Cannot open the model") as caught:
        CausalLM.open(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("option", "value"), [("device", "abacus"), ("dtype", "float12")])
def test_unknown_devices_and_precisions_are_refused(model_folder, option, value):
    with pytest.raises(ParameterError, match=value):
        CausalLM.open(str(model_folder), **{option: value})


def test_a_store_refuses_another_model_and_names_both(store, lm):
    from knnlm import Mixture

    other = CausalLM(tiny("llama", seed=3), tiny_tokenizer(), name="another-llama")
    with pytest.raises(ModelMismatch, match=r"tiny-llama.*another-llama") as caught:
        Mixture.open(store.path, other)
    assert "weights" in str(caught.value)
    elsewhere = CausalLM(lm.model, lm.tokenizer, name="tiny-llama", key_layer="output")
    with pytest.raises(ModelMismatch, match=r"key layer ffn_input.*key layer output"):
        Mixture.open(store.path, elsewhere)
