"""Places in the decoders of encoder-decoder models, against module paths that were read from the models by hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from helpers.models import LAYERS, SEQ2SEQ_FAMILIES, VOCABULARY, WIDTH, randomise, tiny, tiny_tokenizer
from knnlm.errors import KeyLayerError, ModelError
from knnlm.lm.causal import CausalLM
from knnlm.lm.key_layers import PLACES, KeyLayer, check_causal, check_seq2seq, find_key_layer

SOURCE = torch.tensor([[7, 31, 5, 90, 12, 44, 201, 4, 9], [3, 8, 250, 17, 19, 64, 2, 33, 6]])
TARGET = torch.tensor([[11, 12, 40, 7], [5, 4, 100, 220]])


class Paths(NamedTuple):
    """Module paths by hand: a norm that is None means that none feeds the module."""

    blocks: str
    attention: str
    attention_norm: str | None
    feed_forward: str
    feed_forward_norm: str | None
    final_norm: str | None


POST_NORM = Paths("model.decoder.layers", "self_attn", None, "fc1", "encoder_attn_layer_norm", None)
PRE_NORM = Paths(
    "model.decoder.layers",
    "self_attn",
    "self_attn_layer_norm",
    "fc1",
    "final_layer_norm",
    "model.decoder.layer_norm",
)
T5 = Paths(
    "decoder.block",
    "layer.0.SelfAttention",
    "layer.0.layer_norm",
    "layer.2.DenseReluDense",
    "layer.2.layer_norm",
    "decoder.final_layer_norm",
)
ORACLE = {
    "marian": POST_NORM,
    "bart": POST_NORM,
    "m2m_100": PRE_NORM,
    "mbart": PRE_NORM,
    "pegasus": PRE_NORM,
    "whisper": PRE_NORM,
    "t5": T5,
    "t5_gated": T5,
    "mt5": T5,
}

families = pytest.mark.parametrize("family", sorted(SEQ2SEQ_FAMILIES))


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other over tiny tensors are a hundred times slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@lru_cache
def shared(family: str) -> hf.PreTrainedModel:
    return tiny(family)


def inputs(model: hf.PreTrainedModel) -> dict[str, Any]:
    if model.main_input_name == "input_features":
        features = torch.randn(2, 6, 24, generator=torch.Generator().manual_seed(0))
        return {"input_features": features, "decoder_input_ids": TARGET, "use_cache": False}
    return {"input_ids": SOURCE, "decoder_input_ids": TARGET, "use_cache": False}


def watch(model: hf.PreTrainedModel, path: str) -> tuple[Tensor, Tensor]:
    """The first input and the first output of a module in one pass, by plain hooks."""
    seen: list[Any] = []

    def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = output[0] if isinstance(output, tuple) else output
        taken = args[0] if args else kwargs["hidden_states"]
        seen.append((taken.clone(), given.clone()))

    handle = model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(**inputs(model))
    handle.remove()
    assert len(seen) == 1
    return seen[0]


def expected(family: str, place: str, layer: int) -> Tensor:
    """The key, through paths written by hand."""
    model, paths = shared(family), ORACLE[family]
    block = f"{paths.blocks}.{layer % LAYERS}"
    if place.startswith("output"):
        output = watch(model, block)[1]
        if place == "output":
            return output
        assert paths.final_norm is not None
        with torch.no_grad():
            return model.get_submodule(paths.final_norm)(output)
    kind = "feed_forward" if place.startswith("ffn") else "attention"
    path = getattr(paths, kind)
    if place.endswith("pre_norm"):
        path = getattr(paths, f"{kind}_norm") or path
    return watch(model, f"{block}.{path}")[0]


def keys(layer: KeyLayer, model: hf.PreTrainedModel) -> Tensor:
    with torch.no_grad(), layer.capture() as kept:
        model(**inputs(model))
    assert len(kept) == 1
    return kept[0]


@families
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layer", [0, 1, -1])
def test_key_of_a_decoder_is_the_input_or_output_of_the_expected_module(family: str, place: str, layer: int) -> None:
    model = shared(family)
    if place == "output_normed" and ORACLE[family].final_norm is None:
        with pytest.raises(KeyLayerError, match=r'no norm .* use "output"'):
            find_key_layer(model, place, layer)
        return
    found = find_key_layer(model, place, layer)
    assert (found.place, found.layer, found.layers, found.width) == (place, layer % LAYERS, LAYERS, WIDTH)
    key = keys(found, model)
    assert key.shape == (*TARGET.shape, WIDTH)
    torch.testing.assert_close(key, expected(family, place, layer), rtol=0, atol=0)


@families
def test_default_of_a_decoder_is_what_enters_the_last_feed_forward_net(family: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = find_key_layer(shared(family), None)
    paths = ORACLE[family]
    assert (found.place, found.module) == ("ffn_input", f"{paths.blocks}.{LAYERS - 1}.{paths.feed_forward}")


@families
def test_stopped_pass_of_a_decoder_gives_the_same_key(family: str) -> None:
    model = shared(family)
    found = find_key_layer(model)
    with torch.no_grad(), found.capture(stop=True) as kept:
        model(**inputs(model))
        pytest.fail("the pass went on")
    torch.testing.assert_close(kept[0], keys(found, model), rtol=0, atol=0)


@families
def test_encoder_decoder_families_are_accepted_as_such_only(family: str) -> None:
    check_seq2seq(shared(family))
    with pytest.raises(ModelError, match=r"encoder-decoder model.*decoder-only"):
        check_causal(shared(family))


@pytest.mark.parametrize("family", ["t5", "marian", "m2m_100"])
def test_decoder_in_half_precision_has_the_same_places(family: str) -> None:
    model = tiny(family).bfloat16()
    check_seq2seq(model)
    for place in ("ffn_input", "attention_input", "output"):
        assert find_key_layer(model, place).module == find_key_layer(shared(family), place).module


def test_decoder_only_model_is_no_seq2seq_model() -> None:
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has no encoder.*Marian or T5"):
        check_seq2seq(tiny("llama"))


def _without_ffn(name: str) -> hf.PreTrainedModel:
    config = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
    own = {
        "mamba": {"state_size": 8},
        "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
        "rwkv": {"attention_hidden_size": WIDTH, "context_length": 128},
    }[name]
    return randomise(lambda: hf.AutoModelForCausalLM.from_config(hf.CONFIG_MAPPING[name](**config, **own)))


@pytest.mark.parametrize("name", ["mamba", "mamba2", "rwkv"])
def test_model_without_a_feed_forward_net_has_another_default_place_with_one_warning(name: str) -> None:
    model = _without_ffn(name)
    with pytest.warns(UserWarning, match=r"keys are read at attention_input.*--key-layer") as caught:
        lm = CausalLM(model, tiny_tokenizer(), name=name)
    assert len(caught) == 1
    assert lm.key_layer.place == lm.identity["key_layer"] == "attention_input"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = CausalLM(model, tiny_tokenizer(), name=name, key_layer="attention_input")
    assert named.key_layer == lm.key_layer
    with pytest.raises(KeyLayerError, match="ffn_input was not found"):
        CausalLM(model, tiny_tokenizer(), name=name, key_layer="ffn_input")
