"""Reading with a model: keys and logits do not depend on how windows are packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers import oracle
from helpers.models import FAMILIES, tiny, tiny_tokenizer
from helpers.stores import documents
from knnlm.errors import ModelError, ModelMismatch, ParameterError
from knnlm.lm.causal import CausalLM
from knnlm.lm.fingerprint import same_weights, tokenizer_fingerprint, weights_fingerprint
from knnlm.lm.windows import WindowShape

SHAPE = WindowShape(16, 8)


def collect(lm, tokens, *, shape=SHAPE, batch_tokens, logits=True):
    """Put the batches of a call into the order of their rows."""
    total = sum(map(len, tokens))
    keys, scores = torch.full((total, lm.width), torch.nan), torch.full((total, lm.vocab_size), torch.nan)
    targets = torch.full((total,), -1)
    for batch in lm.read(tokens, shape, batch_tokens=batch_tokens, logits=logits):
        keys[batch.rows], targets[batch.rows] = batch.keys, batch.targets
        if logits:
            scores[batch.rows] = batch.logits
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


def test_keys_do_not_depend_on_other_documents(lm):
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


def test_model_in_training_mode_is_read_without_dropout_and_left_in_training_mode():
    model = tiny("gpt2")
    lm = CausalLM(model, tiny_tokenizer())
    calm = collect(lm, [[5, 6, 7, 8]], batch_tokens=16)[0]
    model.train()
    assert torch.equal(collect(lm, [[5, 6, 7, 8]], batch_tokens=16)[0], calm)
    assert all(module.training for module in model.modules())


def test_document_begins_with_bos_or_with_eos_where_there_is_none():
    with_bos, without = tiny_tokenizer(), tiny_tokenizer(bos=False)
    assert CausalLM(tiny("llama"), with_bos).start_token == with_bos.bos_token_id
    assert CausalLM(tiny("llama"), without).start_token == without.eos_token_id


def test_default_window_fits_the_models_maximum(lm):
    assert lm.max_length == 128
    assert lm.window() == WindowShape(128, 64)
    assert lm.window(32) == WindowShape(32, 16)
    with pytest.raises(ParameterError, match=r"context 129 is longer than the 128 tokens"):
        lm.window(129)
    alibi = CausalLM(tiny("bloom"), tiny_tokenizer())
    assert alibi.max_length is None
    assert alibi.window() == WindowShape(1024, 512)


def test_prompt_that_leaves_no_room_is_refused(lm):
    assert lm.prompt("The memory", room=10)[0] == lm.start_token
    with pytest.raises(ParameterError, match="can read only 128"):
        lm.prompt("The memory " * 60, room=10)


def test_fingerprint_is_the_same_in_every_precision_and_differs_after_a_change_of_one_percent():
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


def test_token_that_the_model_does_not_have_is_refused_when_it_is_used():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"extra{number}" for number in range(400)])
    lm = CausalLM(tiny("llama"), tokenizer)
    assert lm.encode("The memory")
    with pytest.raises(ModelError, match="do not belong together"):
        lm.encode("extra399")


@pytest.mark.parametrize("name", ["/nowhere/at/all", "no-such-model-anywhere"])
def test_unknown_model_is_one_error(name):
    with pytest.raises(ModelError, match="Cannot open the model") as caught:
        CausalLM.open(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("option", "value"), [("device", "abacus"), ("dtype", "float12")])
def test_unknown_devices_and_precisions_are_refused(model_folder, option, value):
    with pytest.raises(ParameterError, match=value):
        CausalLM.open(str(model_folder), **{option: value})


def test_model_with_missing_weights_is_refused(model_folder, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(model_folder, tmp_path / "hole")
    weights = load_file(tmp_path / "hole" / "model.safetensors")
    gone = [name for name in weights if ".layers.1." in name]
    save_file(
        {name: weight for name, weight in weights.items() if name not in gone},
        tmp_path / "hole" / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ModelError, match=rf"are incomplete: .*layers\.1\..* and {len(gone) - 1} more"):
        CausalLM.open(str(tmp_path / "hole"))
    (tmp_path / "hole" / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ModelError, match="Cannot open the model"):
        CausalLM.open(str(tmp_path / "hole"))


def test_invalid_gguf_file_is_one_error(tmp_path):
    (tmp_path / "junk.gguf").write_bytes(b"GGUF" + b"junk" * 100)
    with pytest.raises(ModelError, match=r"Cannot open the model .*junk\.gguf"):
        CausalLM.open(str(tmp_path / "junk.gguf"))


def test_token_texts_concatenate_to_the_text_where_a_character_is_many_tokens(lm):
    text = "日本 é: naïve 🙂 end"
    tokens = lm.encode(text)
    assert len(tokens) > len(text)
    assert "".join(lm.token_texts(tokens)) == text
    assert "\ufffd" not in "".join(lm.token_texts(tokens))


def test_two_threads_that_use_one_model_get_their_own_keys(lm):
    from concurrent.futures import ThreadPoolExecutor

    tokens = [lm.encode(document.text)[:24] for document in documents(8)]
    alone = [collect(lm, [one], batch_tokens=64)[0] for one in tokens]

    def work(number):
        return [collect(lm, [tokens[number]], batch_tokens=64)[0] for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for number, results in enumerate(pool.map(work, range(8))):
            for keys in results:
                torch.testing.assert_close(keys, alone[number], rtol=1e-4, atol=1e-5)


def test_store_refuses_another_model_and_names_both(store, lm):
    from knnlm.mixture.mixture import Mixture

    other = CausalLM(tiny("llama", seed=3), tiny_tokenizer(), name="another-llama")
    with pytest.raises(ModelMismatch, match=r"tiny-llama.*another-llama") as caught:
        Mixture.open(store.path, other)
    assert "weights" in str(caught.value)
    model = tiny("llama")
    model.config.rope_parameters["rope_theta"] = 77.0
    turned = CausalLM(model, tiny_tokenizer(), name="turned-llama")
    with pytest.raises(ModelMismatch, match=r"rope parameters .*10000.*77"):
        Mixture.open(store.path, turned)
    elsewhere = CausalLM(lm.model, lm.tokenizer, name="tiny-llama", key_layer="output")
    # A store's own place is read, wherever the model was going to be read by others.
    opened = Mixture.open(store.path, elsewhere)
    (batch,) = opened.read([[5, 6, 7]])
    (right,), _ = lm.forward(torch.tensor([[lm.start_token, 5, 6]]))
    torch.testing.assert_close(batch.context.states[opened.knn.source], right[0])
