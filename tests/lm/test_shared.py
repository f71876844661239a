"""Models whose first blocks are those of another one: what the last blocks compute against the whole model."""

from __future__ import annotations

import copy

import pytest
import torch

from helpers.models import FAMILIES, tiny, tiny_tokenizer
from knnlm.errors import KeyLayerError
from knnlm.lm import shared
from knnlm.lm.causal import CausalLM
from knnlm.lm.layers import layer_list
from knnlm.lm.shared import TopLM, equal_blocks, share_blocks
from knnlm.lm.windows import WindowShape
from knnlm.memories.base import LOGITS, Source
from knnlm.mixture import readers
from knnlm.mixture.readers import Readers

# Something is added to embeddings, or they are normalised, before the first block: found by trying.
WHOLE = {"gpt2", "gpt_neo", "opt", "opt_post_norm", "bloom", "bert_decoder"}
DOCUMENTS = [[5, 9, 7, 30, 11, 12, 8, 40, 41], [6, 10, 41], [7] * 14]
SHAPE = WindowShape(8, 4)


def trained(model, top=1):
    """A copy with other weights in the last blocks."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for block in list(layer_list(other))[-top:]:
        for weight in block.parameters():
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return other


def pair(family, top=1):
    model = tiny(family)
    return (
        CausalLM(model, tiny_tokenizer(), name="base"),
        CausalLM(trained(model, top), tiny_tokenizer(), name="other"),
    )


def states(base, other, sources):
    """The states of all sources at every scored position, in the order of the text."""
    both = Readers(base)
    both.models.append(other)
    found = {}
    for read in both.read(DOCUMENTS, SHAPE, dict.fromkeys(sources, 0), batch_tokens=32):
        for source, own in read.context.states.items():
            found.setdefault(source, torch.zeros(26, own.shape[1]))[read.rows] = own
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_last_blocks_compute_what_the_whole_model_does(family):
    base, other = pair(family)
    found = share_blocks(base, other)
    if family in WHOLE:
        assert found is other
        return
    assert isinstance(found, TopLM)
    assert found.first == 2
    assert len(layer_list(found.model)) == 1
    assert found.identity == other.identity
    assert (found.key_layer.layer, found.key_layer.layers) == (2, 3)
    sources = [Source(0), Source(1), Source(1, LOGITS)]
    whole, top = states(base, other, sources), states(base, found, sources)
    assert whole.keys() == top.keys()
    for source, expected in whole.items():
        torch.testing.assert_close(top[source], expected, rtol=1e-4, atol=1e-4)


def test_first_blocks_are_run_once_and_their_weights_are_not_kept_twice():
    base, other = pair("llama", top=2)
    found = share_blocks(base, other)
    assert found.first == 1
    calls = []
    for name, model in (("base", base.model), ("top", found.model)):
        for number, block in enumerate(layer_list(model)):
            block.register_forward_hook(lambda *_, name=name, number=number: calls.append((name, number)))
    both = Readers(base)
    both.models.append(found)
    passes = len(list(both.read(DOCUMENTS[:1], SHAPE, {Source(1, LOGITS): 0}, batch_tokens=64)))
    assert calls == [("base", 0), ("base", 1), ("base", 2), ("top", 0), ("top", 1)] * passes
    assert found.model.get_input_embeddings().weight is base.model.get_input_embeddings().weight
    own = {id(weight) for weight in found.model.parameters()} - {id(weight) for weight in base.model.parameters()}
    blocks = {id(weight) for block in list(layer_list(other.model))[1:] for weight in block.parameters()}
    assert own == blocks
    # The whole model is as it was.
    assert len(layer_list(other.model)) == other.model.config.num_hidden_layers == 3
    assert [block.self_attn.layer_idx for block in layer_list(other.model)] == [0, 1, 2]


def test_layers_have_the_numbers_of_the_whole_model():
    base, other = pair("llama", top=2)
    found = share_blocks(base, other)
    for layer in (1, -2, 2, -1):
        assert found.find_layer("output", layer).layer == layer % 3
        assert found.find_layer("ffn_input", layer).layers == 3
    assert found.find_layer("ffn_input", 2) is found.key_layer
    with pytest.raises(KeyLayerError, match="Layer 0 of other is not read: its first 1 layers are those of the model"):
        found.find_layer("output", 0)


@pytest.mark.parametrize(("lowest", "first"), [(None, 2), (2, 2), (1, 1), (0, None)])
def test_blocks_whose_states_are_needed_are_not_left_out(lowest, first):
    base, other = pair("llama")
    found = share_blocks(base, other, lowest)
    assert (found.first if isinstance(found, TopLM) else None) == first


def test_models_that_differ_before_the_last_blocks_are_not_shared():
    base, other = pair("llama")
    assert equal_blocks(base.model, other.model) == 2
    assert equal_blocks(base.model, copy.deepcopy(base.model)) == 2  # never all of them
    for change in ("embeddings", "first block", "type", "kind"):
        changed = copy.deepcopy(other.model)
        if change == "embeddings":
            changed.get_input_embeddings().weight.data[3, 4] += 1e-3
        elif change == "first block":
            changed.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1e-3
        elif change == "type":
            changed = changed.double()
        else:
            changed = tiny("mistral")
        assert equal_blocks(base.model, changed) == 0
    assert share_blocks(base, CausalLM(changed, tiny_tokenizer(), name="c")).model is changed


def test_model_that_would_compute_something_else_is_left_whole(monkeypatch):
    base, other = pair("llama")
    cut = shared.last_blocks

    def wrong(*args):
        top = cut(*args)
        layer_list(top)[0].input_layernorm = torch.nn.Identity()
        return top

    monkeypatch.setattr(shared, "last_blocks", wrong)
    assert share_blocks(base, other) is other

    def broken(*_):
        raise AttributeError("another family")

    monkeypatch.setattr(shared, "last_blocks", broken)
    assert share_blocks(base, other) is other


def test_readers_share_only_models_whose_states_are_needed(monkeypatch):
    base, other = pair("llama")
    both = Readers(base)
    both.models.append(other)
    both.share([Source(0)])
    assert both.tops == {}
    both.share([Source(0), Source(1, "ffn_input", -1)])
    top = both.tops[1]
    assert isinstance(top, TopLM)
    monkeypatch.setattr(readers, "block_input", None)  # nothing is looked up where nothing is shared
    assert both.trunks([Source(0)]) == []
    both.share([Source(1, LOGITS)])
    assert both.tops[1] is top


def test_readers_run_the_whole_model_where_its_first_blocks_are_needed():
    base, other = pair("llama")
    whole, both = Readers(base), Readers(base)
    for each in (whole, both):
        each.models.append(other)
    both.share([Source(1, LOGITS)])
    for sources, first in (([Source(1, LOGITS)], 2), ([Source(1, "output", 0)], None), ([Source(1, "output", -1)], 2)):
        model = both.wanted(sources)[1].model
        assert (model.first if isinstance(model, TopLM) else None) == first
        found, right = (
            [read.context.states for read in each.read(DOCUMENTS, SHAPE, dict.fromkeys(sources, 0), batch_tokens=32)]
            for each in (both, whole)
        )
        for one, expected in zip(found, right, strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)


def test_whole_model_takes_no_memory_beside_its_last_blocks():
    base, other = pair("llama", top=2)
    both = Readers(base)
    both.models.append(other)
    both.share([Source(1, LOGITS)])
    assert both.models[1].identity == other.identity
    assert both.models[1].key_layer.layer == other.key_layer.layer
    shared_weights = {id(weight) for model in (base.model, both.tops[1].model) for weight in model.parameters()}
    assert {id(weight) for weight in both.models[1].model.parameters()} <= shared_weights


def test_model_that_cannot_be_split_is_tried_once(monkeypatch):
    base, other = pair("gpt2")
    tried, cut = [], shared.last_blocks

    def counted(*args):
        tried.append(args)
        return cut(*args)

    monkeypatch.setattr(shared, "last_blocks", counted)
    both = Readers(base)
    both.models.append(other)
    for sources in ([Source(1, LOGITS)], [Source(1, "output", -1)], [Source(1, LOGITS)]):
        both.share(sources)
    assert len(tried) == 1
    assert both.wanted([Source(1, LOGITS)])[1].model is other
