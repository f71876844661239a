"""Every place, in every family, against explicit module paths that were read from the models by hand.

The families of encoder-decoder models have their places in the decoder.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from helpers.models import FAMILIES, LAYERS, SEQ2SEQ_FAMILIES, VOCABULARY, WIDTH, randomise, tiny, tiny_tokenizer
from knnlm.errors import KeyLayerError, ModelError
from knnlm.lm.causal import CausalLM
from knnlm.lm.key_layers import PLACES, KeyLayer, check_causal, check_seq2seq, find_key_layer

IDS = torch.tensor([[7, 31, 5, 90, 12, 44, 201], [3, 8, 250, 17, 19, 64, 2]])
SOURCE = torch.tensor([[7, 31, 5, 90, 12, 44, 201, 4, 9], [3, 8, 250, 17, 19, 64, 2, 33, 6]])


class Paths(NamedTuple):
    """Module paths by hand: a norm that is None means that none feeds the module."""

    blocks: str
    attention: str
    attention_norm: str | None
    feed_forward: str
    feed_forward_norm: str | None
    final_norm: str | None


LLAMA = Paths("model.layers", "self_attn", "input_layernorm", "mlp", "post_attention_layernorm", "model.norm")
GPT2 = Paths("transformer.h", "attn", "ln_1", "mlp", "ln_2", "transformer.ln_f")
NEOX = Paths(
    "gpt_neox.layers",
    "attention",
    "input_layernorm",
    "mlp",
    "post_attention_layernorm",
    "gpt_neox.final_layer_norm",
)
BLOOM = Paths(
    "transformer.h",
    "self_attention",
    "input_layernorm",
    "mlp",
    "post_attention_layernorm",
    "transformer.ln_f",
)
OPT = Paths(
    "model.decoder.layers",
    "self_attn",
    "self_attn_layer_norm",
    "fc1",
    "final_layer_norm",
    "model.decoder.final_layer_norm",
)
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
SHARED = {"feed_forward_norm": "input_layernorm"}  # one norm for attention and feed-forward net

ORACLE = {
    "gpt2": GPT2,
    "gpt_neox": NEOX,
    "gpt_neox_sequential": NEOX,
    "gpt_neo": GPT2,
    "gptj": GPT2._replace(feed_forward_norm="ln_1"),
    "opt": OPT,
    "opt_post_norm": OPT._replace(attention_norm=None, feed_forward_norm="self_attn_layer_norm", final_norm=None),
    "bloom": BLOOM,
    "falcon": BLOOM._replace(**SHARED),
    "falcon_new": BLOOM._replace(attention_norm="ln_attn", feed_forward_norm="ln_mlp"),
    "falcon_sequential": BLOOM,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma2": LLAMA._replace(feed_forward_norm="pre_feedforward_layernorm"),
    "gemma3": LLAMA._replace(feed_forward_norm="pre_feedforward_layernorm"),
    "phi": LLAMA._replace(**SHARED, final_norm="model.final_layernorm"),
    "phi3": LLAMA,
    "olmo": LLAMA,
    "olmo2": LLAMA._replace(attention_norm=None, feed_forward_norm=None),
    "mixtral": LLAMA,
    "qwen3_moe": LLAMA,
    "cohere": LLAMA._replace(**SHARED),
    "mpt": Paths("transformer.blocks", "attn", "norm_1", "ffn", "norm_2", "transformer.norm_f"),
    "starcoder2": LLAMA,
    "stablelm": LLAMA,
    "dbrx": Paths(
        "transformer.blocks",
        "norm_attn_norm.attn",
        "norm_attn_norm.norm_1",
        "ffn",
        "norm_attn_norm.norm_2",
        "transformer.norm_f",
    ),
    "bert_decoder": Paths("bert.encoder.layer", "attention", None, "intermediate", "attention.output.LayerNorm", None),
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

# What HF calls the last hidden state is the final norm's output; bert and opt_post_norm have no final norm.
families = pytest.mark.parametrize("family", sorted(FAMILIES))
pair_families = pytest.mark.parametrize("family", sorted(SEQ2SEQ_FAMILIES))


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


def inputs(model: hf.PreTrainedModel, ids: Tensor = IDS) -> dict[str, Any]:
    """The arguments of one pass over tokens; an encoder-decoder model reads a source as well."""
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids, "use_cache": False}
    if model.main_input_name == "input_features":
        features = torch.randn(2, 6, 24, generator=torch.Generator().manual_seed(0))
        return {"input_features": features, "decoder_input_ids": ids, "use_cache": False}
    return {"input_ids": SOURCE, "decoder_input_ids": ids, "use_cache": False}


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def watch(model: hf.PreTrainedModel, path: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The first input and the first output of a module in one pass, by plain hooks."""
    seen: list[Any] = []

    def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = output[0] if isinstance(output, tuple) else output
        taken = args[0] if args else kwargs["hidden_states"]
        seen.append((taken.clone(), given.clone()))

    handle = model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(**inputs(model, ids))
    handle.remove()
    assert len(seen) == 1
    return seen[0]


def expected(family: str, place: str, layer: int, ids: Tensor = IDS) -> Tensor:
    """The key, through paths written by hand."""
    model, paths = shared(family), ORACLE[family]
    block = f"{paths.blocks}.{layer % LAYERS}"
    if place.startswith("output"):
        output = watch(model, block, ids)[1]
        if place == "output":
            return output
        assert paths.final_norm is not None
        with torch.no_grad():
            return model.get_submodule(paths.final_norm)(output)
    kind = "feed_forward" if place.startswith("ffn") else "attention"
    path = getattr(paths, kind)
    if place.endswith("pre_norm"):
        path = getattr(paths, f"{kind}_norm") or path
    return watch(model, f"{block}.{path}", ids)[0].reshape(*ids.shape, -1)


def keys(layer: KeyLayer, model: hf.PreTrainedModel, ids: Tensor = IDS, **options: Any) -> Tensor:
    with torch.no_grad(), layer.capture() as kept:
        model(**{**inputs(model, ids), **options})
    assert len(kept) == 1
    return kept[0]


def lacks(family: str, place: str) -> bool:
    return place == "output_normed" and ORACLE[family].final_norm is None


@pytest.mark.parametrize("family", sorted(ORACLE))
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layer", [0, 1, -1])
def test_key_is_the_input_or_output_of_the_expected_module(family: str, place: str, layer: int) -> None:
    model = shared(family)
    if lacks(family, place):
        with pytest.raises(KeyLayerError, match=r'no norm .* use "output"'):
            find_key_layer(model, place, layer)
        return
    found = find_key_layer(model, place, layer)
    assert (found.place, found.layer, found.layers, found.width) == (place, layer % LAYERS, LAYERS, WIDTH)
    key = keys(found, model)
    assert key.shape == (*IDS.shape, WIDTH)
    assert not key.requires_grad
    torch.testing.assert_close(key, expected(family, place, layer), rtol=0, atol=0)
    assert model.get_submodule(found.module) is not None


@families
def test_output_agrees_with_the_hidden_states_that_the_model_returns(family: str) -> None:
    model = shared(family)
    with torch.no_grad():
        hidden = model(IDS, use_cache=False, output_hidden_states=True).hidden_states
        last = model.base_model(IDS, use_cache=False)[0]
    for layer in range(LAYERS - 1):  # the last of them is after the final norm
        torch.testing.assert_close(keys(find_key_layer(model, "output", layer), model), hidden[layer + 1])
    place = "output" if lacks(family, "output_normed") else "output_normed"
    torch.testing.assert_close(keys(find_key_layer(model, place), model), last, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["opt", "olmo", "llama", "gemma2", "dbrx"])
def test_places_differ(family: str) -> None:
    found = [keys(find_key_layer(shared(family), place, 1), shared(family)) for place in PLACES]
    for index, key in enumerate(found):
        assert not any(torch.allclose(key, other) for other in found[:index])


@families
@pytest.mark.parametrize("place", PLACES)
def test_stopped_pass_gives_the_same_key_and_runs_nothing_after_it(family: str, place: str) -> None:
    if lacks(family, place):
        return
    model, found = shared(family), find_key_layer(shared(family), place, 1)
    ran: list[str] = []
    later = [f"{ORACLE[family].blocks}.2", ORACLE[family].final_norm]
    modules = [model.get_output_embeddings(), *(model.get_submodule(path) for path in later if path)]
    handles = [module.register_forward_pre_hook(lambda m, _: ran.append(type(m).__name__)) for module in modules]
    with torch.no_grad(), found.capture(stop=True) as kept:
        model(IDS, use_cache=False)
        pytest.fail("the pass went on")
    assert ran == []
    with torch.no_grad():
        model(IDS, use_cache=False)
    assert len(ran) == len(modules)
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(kept[0], keys(found, model), rtol=0, atol=0)


@families
def test_model_is_unchanged_after_capture(family: str) -> None:
    model = tiny(family)
    model.train()
    model.get_input_embeddings().eval()
    modes = [module.training for module in model.modules()]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    count, random = hooks(model), torch.get_rng_state()
    found = find_key_layer(model, "ffn_input", 1)
    check_causal(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert hooks(model) == count
    model.eval()
    with torch.no_grad():
        before = model(IDS).logits
        with found.capture():
            during = model(IDS).logits
        with found.capture(stop=True):
            model(IDS)
        after = model(IDS).logits
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    assert hooks(model) == count


def test_hooks_are_removed_after_an_error() -> None:
    model, count = shared("llama"), hooks(shared("llama"))
    found = find_key_layer(model)
    for stop in (False, True):
        with pytest.raises(ZeroDivisionError), found.capture(stop=stop):
            raise ZeroDivisionError
    handle = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), found.capture():
        model(IDS)
    with pytest.raises(ModelError, match="ZeroDivisionError"):
        find_key_layer(model)
    handle.remove()
    assert hooks(model) == count


def test_every_pass_inside_gives_a_key_and_captures_can_be_nested() -> None:
    model = shared("gpt2")
    early, late = find_key_layer(model, layer=0), find_key_layer(model, layer=2)
    with torch.no_grad(), early.capture() as first:
        with late.capture(stop=True) as second:
            model(IDS)
        model(IDS[:, :3])
    assert [tuple(key.shape) for key in first] == [(2, 7, WIDTH), (2, 3, WIDTH)]
    assert [tuple(key.shape) for key in second] == [(2, 7, WIDTH)]
    with torch.no_grad(), early.capture(stop=True) as first:
        with late.capture(stop=True) as second:
            model(IDS)
        pytest.fail("the outer capture ends its own block")
    assert (len(first), len(second)) == (1, 0)


def test_keys_carry_no_gradient_even_while_training() -> None:
    model = tiny("llama")
    for place in PLACES:
        with find_key_layer(model, place).capture() as kept:
            loss = model(IDS, labels=IDS).loss
        assert not kept[0].requires_grad
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@families
@pytest.mark.parametrize("place", ["ffn_input", "output"])
def test_keys_are_the_same_one_token_at_a_time(family: str, place: str) -> None:
    model, found = shared(family), find_key_layer(shared(family), place, -1)
    full, cache = keys(found, model), None
    with torch.no_grad(), found.capture() as kept:
        for step in range(IDS.shape[1]):
            cache = model(IDS[:, step : step + 1], past_key_values=cache, use_cache=True).past_key_values
    assert all(key.shape == (2, 1, WIDTH) for key in kept)
    torch.testing.assert_close(torch.cat(kept, 1), full, rtol=1e-4, atol=1e-4)


@families
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_keys(family: str, side: str) -> None:
    model, found = shared(family), find_key_layer(shared(family), "ffn_input", -1)
    pad, here = torch.zeros(2, 2, dtype=torch.long), slice(2, None) if side == "left" else slice(0, 7)
    ids = torch.cat([pad, IDS] if side == "left" else [IDS, pad], 1)
    mask = torch.ones_like(ids)
    mask[:, [0, 1] if side == "left" else [-1, -2]] = 0
    # Alibi reads positions from the mask by itself, and such models take no position_ids.
    alibi = family in ("bloom", "mpt", "falcon_sequential")
    positions = {} if alibi else {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    padded = keys(found, model, ids, attention_mask=mask, **positions)[:, here]
    torch.testing.assert_close(padded, keys(found, model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "opt", "dbrx", "mixtral", "falcon_new", "olmo"])
def test_half_precision_is_found_and_kept(family: str) -> None:
    model = tiny(family).bfloat16()
    check_causal(model)
    for place in PLACES:
        found = find_key_layer(model, place, 1)
        assert found.module == find_key_layer(shared(family), place, 1).module
        assert keys(found, model).dtype == torch.bfloat16


@families
def test_causal_families_are_accepted(family: str) -> None:
    check_causal(shared(family))


def small(name: str, **options: Any) -> hf.PretrainedConfig:
    return hf.CONFIG_MAPPING[name](vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, **options)


def test_encoder_is_refused() -> None:
    config = small("bert", num_attention_heads=4, intermediate_size=80, is_decoder=False)
    model = randomise(lambda: hf.BertLMHeadModel(config))
    with pytest.raises(ModelError, match=r"BertLMHeadModel.*decoder-only"):
        check_causal(model)
    with pytest.raises(ModelError, match=r"BertLMHeadModel.*decoder-only"):
        check_causal(model.bfloat16())


def test_encoder_decoder_is_refused() -> None:
    config = hf.T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    model = hf.T5ForConditionalGeneration(config)
    with pytest.raises(ModelError, match=r"T5ForConditionalGeneration.*decoder-only"):
        check_causal(model)
    with pytest.raises(ModelError, match=r"T5ForConditionalGeneration.*decoder-only"):
        CausalLM(model, tiny_tokenizer())


def test_state_space_model_has_a_mixer_but_no_feed_forward_net() -> None:
    model = randomise(lambda: hf.MambaForCausalLM(small("mamba", state_size=8)))
    with pytest.raises(KeyLayerError) as caught:
        find_key_layer(model, "ffn_input", 1)
    assert str(caught.value) == (
        "ffn_input was not found in layer 1 of 3 in MambaForCausalLM: the layer calls norm (norm), mixer (mixer). "
        "This layer has attention_input, attention_input_pre_norm, output, output_normed."
    )
    for place, path in (("attention_input", "mixer"), ("attention_input_pre_norm", "norm")):
        key = keys(find_key_layer(model, place, 1), model)
        torch.testing.assert_close(key, watch(model, f"backbone.layers.1.{path}", IDS)[0])


class Bare(nn.Module):
    """A block that has no module for attention; its matrices look like a feed-forward net's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project, self.back = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.project(self.norm(hidden)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + self.back(mixed)


class Strange(hf.PreTrainedModel):
    """A model that shares no structure with transformers' own."""

    config_class = hf.LlamaConfig

    def __init__(self, config: hf.LlamaConfig, blocks: list[nn.Module]) -> None:
        super().__init__(config)
        self.words, self.tower = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(*blocks)

    def forward(self, input_ids: Tensor, **_: Any) -> tuple[Tensor]:
        return (self.tower(self.words(input_ids)),)


def test_attention_that_is_not_a_module_is_not_taken_for_a_feed_forward_net() -> None:
    torch.manual_seed(0)
    model = Strange(small("llama"), [Bare(), Bare()]).eval()
    with pytest.raises(KeyLayerError, match=r"Strange.*project \(position-wise\).* has output\."):
        find_key_layer(model)
    torch.testing.assert_close(keys(find_key_layer(model, "output"), model), model(IDS)[0])


def test_norm_that_blocks_share_and_call_twice_is_read_at_the_right_call() -> None:
    torch.manual_seed(0)
    norm, inputs = nn.LayerNorm(WIDTH), []

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mix = norm, nn.GRU(WIDTH, WIDTH, batch_first=True)
            self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            hidden = hidden + self.mix(self.norm(hidden))[0]
            return hidden + self.net(self.norm(hidden))

    model = Strange(small("llama"), [Twice(), Twice(), Twice()]).eval()
    norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone()))
    found = {name: find_key_layer(model, name, 1) for name in ("attention_input_pre_norm", "ffn_input_pre_norm")}
    inputs.clear()
    first = keys(found["attention_input_pre_norm"], model)
    torch.testing.assert_close(first, inputs[2])
    torch.testing.assert_close(keys(found["ffn_input_pre_norm"], model), inputs[3])


def test_unknown_places_and_layers_are_named() -> None:
    with pytest.raises(KeyLayerError, match=r"'ffn'.*ffn_input, ffn_input_pre_norm"):
        find_key_layer(shared("gpt2"), "ffn")
    for layer in (3, -4):
        with pytest.raises(KeyLayerError, match=f"GPT2LMHeadModel has 3 layers.*layer {layer}.*from -3 to 2"):
            find_key_layer(shared("gpt2"), "output", layer)


def test_tiny_tokenizer_reads_any_text_back() -> None:
    text = 'The memory "λ" remembers 20 rooms — 東京.'
    for bos in (True, False):
        tokenizer = tiny_tokenizer(bos=bos)
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert max(ids) < len(tokenizer) <= VOCABULARY
        assert (tokenizer.bos_token_id is not None) is bos


@pair_families
def test_default_of_a_decoder_is_what_enters_the_last_feed_forward_net(family: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = find_key_layer(shared(family), None)
    paths = ORACLE[family]
    assert (found.place, found.module) == ("ffn_input", f"{paths.blocks}.{LAYERS - 1}.{paths.feed_forward}")


@pair_families
def test_stopped_pass_of_a_decoder_gives_the_same_key(family: str) -> None:
    model = shared(family)
    found = find_key_layer(model)
    with torch.no_grad(), found.capture(stop=True) as kept:
        model(**inputs(model))
        pytest.fail("the pass went on")
    torch.testing.assert_close(kept[0], keys(found, model), rtol=0, atol=0)


@pair_families
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


def without_ffn(name: str) -> hf.PreTrainedModel:
    config = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
    own = {
        "mamba": {"state_size": 8},
        "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
        "rwkv": {"attention_hidden_size": WIDTH, "context_length": 128},
    }[name]
    return randomise(lambda: hf.AutoModelForCausalLM.from_config(hf.CONFIG_MAPPING[name](**config, **own)))


@pytest.mark.parametrize("name", ["mamba", "mamba2", "rwkv"])
def test_model_without_a_feed_forward_net_has_another_default_place_with_one_warning(name: str) -> None:
    model = without_ffn(name)
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
