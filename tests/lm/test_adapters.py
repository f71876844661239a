"""Adapters beside a model and merged into it: peft's own output, shared tensors, identities, and what is refused."""

from __future__ import annotations

import copy
import json
import math
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from helpers.adapters import random_adapters
from helpers.models import FAMILIES, tiny, tiny_tokenizer
from helpers.stores import documents
from knnlm.errors import ModelError
from knnlm.lm.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    AdaptedLayer,
    AdapterSet,
    base_of,
    has_adapters,
)
from knnlm.lm.causal import CausalLM
from knnlm.lm.fingerprint import identity_difference, weights_fingerprint
from knnlm.lm.loading import write_checksums
from knnlm.lm.shared import TopLM
from knnlm.mixture.loader import open_beside
from knnlm.mixture.mixture import Mixture
from knnlm.training.adapt import adapt
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.initial_model import open_initial_model

EXPERTS = {"mixtral", "qwen3_moe"}  # peft gives experts another rank
IDS = torch.arange(3, 33)[None]


def saved(folder, model, *, seed=0):
    """Save a model and random adapters of it."""
    model.save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    return random_adapters(folder / "adapters", model, str(folder / "base"), seed=seed)


@pytest.fixture
def folder(lm, tmp_path):
    return saved(tmp_path, lm.model)


@pytest.fixture
def base(lm, folder):
    return CausalLM.open(str(folder.parent / "base"), device="cpu")


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_adapters_are_those_of_peft_beside_the_model_and_merged(family, tmp_path):
    model = tiny(family)
    folder = saved(tmp_path, model)
    assert has_adapters(folder) == (family not in EXPERTS)
    if family in EXPERTS:
        assert not list(folder.iterdir())
        return
    right = logits(PeftModel.from_pretrained(copy.deepcopy(model), folder).eval())
    assert (right - logits(model)).abs().max() > 1e-3
    beside = AdapterSet.read(folder).beside(model)
    torch.testing.assert_close(logits(beside), right, rtol=1e-3, atol=1e-3)
    merged = CausalLM.open(str(folder), device="cpu")
    torch.testing.assert_close(logits(merged.model), right, rtol=1e-3, atol=1e-3)
    assert weights_fingerprint(beside) == merged.identity["weights"]


def test_weights_are_in_memory_once(base, folder):
    beside = open_beside(base, str(folder), dtype="auto")
    own = {id(weight) for weight in base.model.parameters()}
    others = {name: weight for name, weight in beside.model.named_parameters() if id(weight) not in own}
    assert len(own) == len(list(base.model.parameters()))
    assert all(name.endswith((".a", ".b")) for name in others)
    assert sum(map(torch.numel, others.values())) == sum(map(torch.numel, load_file(folder / ADAPTER_WEIGHTS).values()))
    assert any(isinstance(module, AdaptedLayer) for module in beside.model.modules())
    assert not any(isinstance(module, AdaptedLayer) for module in base.model.modules())


def test_identity_is_that_of_the_base_and_the_adapters(lm, base, folder, tmp_path):
    merged = CausalLM.open(str(folder), device="cpu")
    half = CausalLM.open(str(folder), device="cpu", dtype="bfloat16")
    beside = open_beside(base, str(folder), dtype="auto")
    assert identity_difference(merged.identity, beside.identity) is None
    assert identity_difference(merged.identity, half.identity) is None
    assert half.model.dtype == torch.bfloat16
    assert identity_difference(merged.identity, base.identity)[0] == "weights"
    (tmp_path / "second").mkdir()
    other = CausalLM.open(str(saved(tmp_path / "second", lm.model, seed=7)), device="cpu")
    assert identity_difference(merged.identity, other.identity)[0] == "weights"


def test_half_precision_rounds_the_sum_once(folder):
    merged = CausalLM.open(str(folder), device="cpu").model
    half = CausalLM.open(str(folder), device="cpu", dtype="bfloat16").model
    for name, weight in merged.named_parameters():
        assert torch.equal(dict(half.named_parameters())[name], weight.to(torch.bfloat16))


def test_beside_another_model_or_in_another_precision_they_are_merged(base, folder, lm):
    other = CausalLM(tiny("llama", seed=3), tiny_tokenizer(), name="other")
    for beside in (open_beside(other, str(folder), dtype="auto"), open_beside(base, str(folder), dtype="bfloat16")):
        assert not any(isinstance(module, AdaptedLayer) for module in beside.model.modules())
        assert identity_difference(beside.identity, CausalLM.open(str(folder), device="cpu").identity) is None


def test_a_second_model_has_the_precision_of_the_first(folder):
    half = CausalLM.open(str(folder.parent / "base"), device="cpu", dtype="bfloat16")
    own = {id(weight) for weight in half.model.parameters()}
    adapted = open_beside(half, str(folder), dtype="auto")
    assert own < {id(weight) for weight in adapted.model.parameters()}
    whole = open_beside(half, str(folder.parent / "base"), dtype="auto")
    assert whole.dtype == "bfloat16"
    assert torch.equal(logits(whole.model), logits(half.model))
    assert open_beside(half, str(folder.parent / "base"), dtype="float32").dtype == "float32"
    double = CausalLM(tiny("llama").double(), tiny_tokenizer(), name="double")
    assert open_beside(double, str(folder.parent / "base"), dtype="auto").dtype == "float64"


def test_adapters_that_peft_made_elsewhere_are_opened(base, folder, tmp_path):
    config = LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
    own = get_peft_model(copy.deepcopy(base.model), config)
    with torch.no_grad():
        for name, weight in own.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    own.save_pretrained(tmp_path / "elsewhere")
    assert has_adapters(tmp_path / "elsewhere")
    path = tmp_path / "elsewhere" / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": base.name}))
    beside = open_beside(base, str(tmp_path / "elsewhere"), dtype="auto")
    assert any(isinstance(module, AdaptedLayer) for module in beside.model.modules())
    torch.testing.assert_close(logits(beside.model), logits(own.eval()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "not of the type LORA"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"bias": "all"}, "bias is not supported"),
        ({"r": 0}, "rank or scale is missing"),
        ({"lora_alpha": math.inf}, "rank or scale is missing"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens is not supported"),
        ({"made_up": 3}, "made_up is not supported"),
        ({"base_model_name_or_path": None}, "names no model"),
        ({"base_model_name_or_path": "."}, "belong to themselves"),
        ({"base_model_name_or_path": "./nowhere"}, "adapters of another model, which cannot be opened"),
    ],
)
def test_adapters_that_cannot_be_used_are_one_clear_error(folder, change, message):
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        CausalLM.open(str(folder), device="cpu")


def test_damaged_and_incomplete_weights_are_named(folder):
    file = folder / ADAPTER_WEIGHTS
    tensors = load_file(file)
    first = sorted(name for name in tensors if ".lora_B." in name)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, file)
    with pytest.raises(ModelError, match=r"has no .*lora_B"):
        AdapterSet.read(folder)
    save_file({**tensors, "extra": torch.zeros(2)}, file)
    with pytest.raises(ModelError, match="other tensors than the matrices of layers: extra"):
        AdapterSet.read(folder)
    file.write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="cannot be read"):
        AdapterSet.read(folder)


def test_a_base_that_was_changed_is_refused(folder):
    tiny("llama", seed=5).save_pretrained(folder.parent / "base")
    with pytest.raises(ModelError, match="has other weights than the model that the adapters"):
        CausalLM.open(str(folder), device="cpu")
    with pytest.raises(ModelError, match=r"has no layer model\.layers\.0"):
        AdapterSet.read(folder).beside(tiny("gpt2"))
    adapters = AdapterSet.read(folder)
    name, (a, b) = next(iter(adapters.matrices.items()))
    adapters.matrices[name] = a[:, 1:], b
    with pytest.raises(ModelError, match=r"has the shape .*, but the adapters"):
        adapters.beside(tiny("llama"))


def test_a_base_with_another_configuration_or_tokenizer_is_refused(base, folder):
    other = copy.deepcopy(base.model)
    other.config.rope_parameters["rope_theta"] = 77.0
    wrong = CausalLM(other, tiny_tokenizer(), name=base.name)
    beside = open_beside(wrong, str(folder), dtype="auto")  # merged into the model that they name
    assert not any(isinstance(module, AdaptedLayer) for module in beside.model.modules())
    other.save_pretrained(folder.parent / "base")
    with pytest.raises(ModelError, match="has another rope_parameters than the model that the adapters"):
        CausalLM.open(str(folder), device="cpu")


def test_recorded_identity_holds_for_these_weights_only(folder):
    merged = CausalLM.open(str(folder), device="cpu")
    other = CausalLM(copy.deepcopy(merged.model), tiny_tokenizer(), name="other")
    assert identity_difference(merged.identity, other.identity) is None
    changed = CausalLM(copy.deepcopy(merged.model), tiny_tokenizer(), name="changed")
    with torch.no_grad():
        next(changed.model.parameters()).mul_(2)
    assert identity_difference(merged.identity, changed.identity)[0] == "weights"


def test_adapters_that_change_nothing_are_the_model(base, folder):
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    zero = {name: tensor * (".lora_A." in name) for name, tensor in tensors.items()}
    save_file(zero, folder / ADAPTER_WEIGHTS)
    beside = open_beside(base, str(folder), dtype="auto")
    assert identity_difference(beside.identity, base.identity) is None


def test_adapters_of_tied_embeddings_are_refused(tmp_path, folder):
    model = tiny("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    base = CausalLM(model, tiny_tokenizer(), name="tied")
    tensors = {
        "base_model.model.lm_head.lora_A.weight": torch.ones(2, base.width),
        "base_model.model.lm_head.lora_B.weight": torch.ones(base.vocab_size, 2),
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    with pytest.raises(ModelError, match=r"lm_head of .* shares its weights with the embeddings"):
        AdapterSet.read(folder).beside(model)


def test_checksums_are_verified_before_adapters_are_read(base, folder):
    write_checksums(folder, without="none")
    with (folder / ADAPTER_WEIGHTS).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelError, match="checksum mismatch"):
        open_beside(base, str(folder), dtype="auto")


def test_the_base_may_have_moved_where_it_is_given(folder, tmp_path):
    (folder.parent / "base").rename(tmp_path / "moved")
    base = CausalLM.open(str(tmp_path / "moved"), device="cpu")
    beside = open_beside(base, str(folder), dtype="auto")
    assert any(isinstance(module, AdaptedLayer) for module in beside.model.modules())
    with pytest.raises(ModelError, match="adapters of another model, which cannot be opened"):
        CausalLM.open(str(folder), device="cpu")


def test_relative_name_of_the_base_is_that_of_a_folder_beside_the_adapters(folder, monkeypatch, tmp_path):
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "../base"}))
    monkeypatch.chdir(tmp_path.parent)
    assert base_of(folder) == str((folder.parent / "base").resolve())
    CausalLM.open(str(folder), device="cpu")


@pytest.fixture(scope="module")
def decoders(model_folder, tmp_path_factory):
    """Trained adapters of all blocks and of the last one."""
    lm = CausalLM.open(str(model_folder), device="cpu")
    initial, place = open_initial_model(str(model_folder), like=lm), tmp_path_factory.mktemp("decoders")
    tokens = lm.encode_all([document.text for document in documents(12, words=24)])
    for name, top in (("all", None), ("top", 1)):
        config = DecoderConfig(lora=3, top=top, epochs=2, batch_tokens=256, learning_rate=1e-2, context=64)
        train_decoder(tokens, initial, place / name, config, device="cpu")
    return lm, place


@pytest.mark.parametrize("name", ["all", "top"])
def test_mixture_with_adapters_is_that_with_the_merged_model(decoders, name, tmp_path):
    lm, place = decoders
    merged = CausalLM.open(str(place / name), device="cpu")
    merged.model.save_pretrained(tmp_path / "merged")
    lm.tokenizer.save_pretrained(tmp_path / "merged")
    shutil.copy(place / name / "decoder.json", tmp_path / "merged")
    text = documents(5, start=40)
    found, right = (Mixture.open(path, lm, lmbda=0.7).evaluate(text) for path in (place / name, tmp_path / "merged"))
    assert found.perplexity == pytest.approx(right.perplexity, rel=1e-5)
    assert found.perplexity != pytest.approx(found.base_perplexity, rel=1e-3)


def test_only_the_last_blocks_run_again_where_only_they_have_adapters(decoders):
    lm, place = decoders
    mixture = Mixture.open(place / "top", lm, lmbda=0.7)
    top = mixture.readers.tops[1]
    assert isinstance(top, TopLM)
    assert top.first == 2
    assert Mixture.open(place / "all", lm, lmbda=0.7).readers.tops.get(1) is None


@pytest.mark.parametrize("memories", ["knn,decoder=decoder", "decoder=decoder,knn"])
def test_store_of_adapters_keys_is_read_beside_the_model(model_folder, tmp_path, memories):
    lm = CausalLM.open(str(model_folder), device="cpu")
    config = DecoderConfig(lora=2, epochs=1, batch_tokens=256, learning_rate=1e-2, context=64)
    adapt(documents(14, words=24), tmp_path / "adapted", lm=lm, held_out=documents(3, start=60), config=config)
    mixture = Mixture.open(tmp_path / "adapted", lm, memories=memories, use_tuned=False)
    assert len(mixture.readers.models) == 2
    own = {id(weight) for weight in lm.model.parameters()}
    others = [name for name, weight in mixture.readers.models[1].model.named_parameters() if id(weight) not in own]
    assert all(name.endswith((".a", ".b")) for name in others)
    tuned = Mixture.open(tmp_path / "adapted", lm)
    assert tuned.evaluate(documents(3, start=60)).perplexity < tuned.evaluate(documents(3, start=60)).base_perplexity
