"""Low-rank adapters: what they change, a training in plain torch with them, and the saved adapters."""

from __future__ import annotations

import copy
import itertools
import socket
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.func import functional_call

from helpers.models import tiny
from helpers.stores import documents
from knnlm.errors import KnnlmWarning, MissingExtra, ModelError
from knnlm.lm.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from knnlm.lm.causal import CausalLM
from knnlm.training import decoder, decoder_trainer
from knnlm.training import lora as module
from knnlm.training.data import TokenStream, TrainingBatches
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.head_loss import head_loss
from knnlm.training.initial_model import open_initial_model
from knnlm.training.lora import Adapters

CONFIG = DecoderConfig(lora=3, epochs=2, batch_tokens=256, learning_rate=5e-3, context=64)


@pytest.fixture(scope="module")
def texts(lm):
    every = lm.encode_all([document.text for document in documents(14, words=24)])
    return every[:11], every[11:]


def pairs(model):
    """The matrices A and B of each linear layer, by its name."""
    found = dict(model.named_parameters())
    ends = ".lora_A.default.weight", ".lora_B.default.weight"
    names = [name.removesuffix(ends[0]) for name in found if name.endswith(ends[0])]
    return {name: tuple(found[name + end] for end in ends) for name in names}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_adapters_change_nothing_until_they_are_trained_and_then_their_product(family):
    base = tiny(family)
    model = copy.deepcopy(base)
    adapters = Adapters(model, rank=2, seed=5)
    ids = torch.arange(1, 20)[None]
    assert torch.equal(model(input_ids=ids).logits, base(input_ids=ids).logits)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    kept = {}
    with torch.no_grad():
        for name, (a, b) in pairs(model).items():
            b.normal_(generator=torch.Generator().manual_seed(len(name)))
            product = 2 * (b @ a)
            transposed = product.shape != base.get_submodule(name).weight.shape or family == "gpt2"
            kept[f"{name}.weight"] = product.T if transposed else product
    with_adapters = model(input_ids=ids).logits
    merged = dict(adapters.merge().named_parameters())
    assert merged.keys() == dict(base.named_parameters()).keys()
    for name, weight in base.named_parameters():
        torch.testing.assert_close(merged[name], weight + kept.get(name, torch.zeros(())), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(input_ids=ids).logits, with_adapters, rtol=1e-4, atol=1e-4)


def in_plain_torch(initial, texts, config):
    """The merged weights after a training whose matrices are W + 2·B·A, by a loop of torch's own AdamW."""
    stream = TokenStream.from_documents(texts)
    resolved = config.resolve(stream, initial, torch.device("cpu"))
    batches = TrainingBatches(stream, resolved.window, start_token=initial.lm.start_token, held_out=0.0, seed=0)
    base = copy.deepcopy(initial.lm.model).float()
    fixed = {name: weight.detach() for name, weight in base.named_parameters()}
    begun = copy.deepcopy(base)
    Adapters(begun, rank=config.lora, seed=config.seed)
    matrices = {name: [part.detach().clone().requires_grad_() for part in own] for name, own in pairs(begun).items()}

    def merged():
        return fixed | {f"{name}.weight": fixed[f"{name}.weight"] + 2 * b @ a for name, (a, b) in matrices.items()}

    weights = [part for own in matrices.values() for part in own]
    optimiser = torch.optim.AdamW(weights, weight_decay=0.01)
    steps = [step for epoch in range(config.epochs) for step in batches.steps(epoch, 256)]
    warm_up = -(-len(steps) * 5 // 100)
    for number, step in enumerate(steps):
        read = [batches.read(group) for group in step]
        count = sum(int((batch.targets >= 0).sum()) for batch in read)
        for batch in read:
            logits = functional_call(base, merged(), (batch.ids,)).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, batch.targets, ignore_index=-1, reduction="sum")
            (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        rising, falling = (number + 1) / warm_up, (len(steps) - number) / (len(steps) - warm_up + 1)
        optimiser.param_groups[0]["lr"] = config.learning_rate * (rising if number < warm_up else falling)
        optimiser.step()
        optimiser.zero_grad()
    return {name: weight.detach() for name, weight in merged().items()}


def test_training_is_that_of_plain_torch_and_the_folder_has_the_adapters(initial, texts, lm, tmp_path):
    card = train_decoder(texts[0], initial, tmp_path / "decoder", CONFIG, device="cpu")
    decoder = CausalLM.open(str(tmp_path / "decoder"))
    found = dict(decoder.model.named_parameters())
    right = in_plain_torch(initial, texts[0], CONFIG)
    for name, weight in found.items():
        torch.testing.assert_close(weight, right[name], rtol=1e-3, atol=2e-5)
    before = dict(initial.lm.model.named_parameters())
    changes = {name: weight - before[name] for name, weight in found.items()}
    ranks = {name: int(torch.linalg.matrix_rank(change, rtol=1e-3)) for name, change in changes.items() if change.any()}
    assert ranks
    assert all("proj" in name and rank == 3 for name, rank in ranks.items())
    assert card.settings["lora"] == 3
    base = copy.deepcopy(initial.lm.model)
    ids = torch.tensor([texts[1][0][:32]])
    adapted = PeftModel.from_pretrained(base, tmp_path / "decoder").eval()
    torch.testing.assert_close(adapted(input_ids=ids).logits, decoder.model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    assert adapted.peft_config["default"].base_model_name_or_path == initial.spec
    assert not (tmp_path / "decoder" / "model.safetensors").exists()
    assert (tmp_path / "decoder" / ADAPTER_WEIGHTS).stat().st_size < sum(
        weight.nbytes for weight in before.values()
    ) / 4


def test_interrupted_training_ends_with_the_same_adapters_and_rates_can_be_selected(
    initial, texts, tmp_path, monkeypatch
):
    config = replace(CONFIG, select=True)
    train_decoder(texts[0], initial, tmp_path / "whole", config, held_out_text=texts[1], device="cpu")
    from knnlm.training.decoder_trainer import DecoderTrainer

    taken, step = [], DecoderTrainer._step

    def interrupted(self, *arguments):
        taken.append(1)
        if len(taken) == 7:
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(DecoderTrainer, "_step", interrupted)
    options = {"held_out_text": texts[1], "device": "cpu"}
    with pytest.raises(KeyboardInterrupt):
        train_decoder(texts[0], initial, tmp_path / "resumed", config, **options)
    card = train_decoder(texts[0], initial, tmp_path / "resumed", config, **options)
    one, other = (load_file(tmp_path / name / ADAPTER_WEIGHTS) for name in ("whole", "resumed"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    losses = [trial["loss"] for trial in card.selection["trials"]]
    assert min(losses) < losses[0]


def test_adapters_of_some_layers_or_of_new_weights_are_not_saved_alone(model_folder, lm, texts, tmp_path):
    lm.model.config.save_pretrained(tmp_path / "new")
    (tmp_path / "new" / "config.json").rename(tmp_path / "new.json")
    for name, spec, layers in (("cut", model_folder, 1), ("new", tmp_path / "new.json", None)):
        initial = open_initial_model(str(spec), like=lm, layers=layers)
        train_decoder(texts[0][:2], initial, tmp_path / f"{name}.decoder", replace(CONFIG, epochs=1), device="cpu")
        assert (tmp_path / f"{name}.decoder" / "model.safetensors").is_file()
        assert not (tmp_path / f"{name}.decoder" / ADAPTER_CONFIG).exists()


def test_adapters_are_saved_without_a_connection(tmp_path, monkeypatch):
    def connect(*_):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Adapters(tiny("llama"), rank=2, seed=0).save(tmp_path, "owner/name-on-a-hub", {"weights": {}})
    assert (tmp_path / ADAPTER_CONFIG).is_file()


def test_half_precision_keeps_the_weights_that_are_not_trained(initial, texts, tmp_path):
    train_decoder(texts[0], initial, tmp_path / "half", replace(CONFIG, precision="bfloat16", epochs=1), device="cpu")
    found = dict(CausalLM.open(str(tmp_path / "half")).model.named_parameters())
    before = dict(initial.lm.model.named_parameters())
    fixed = [name for name in found if "proj" not in name]
    assert fixed
    assert all(torch.equal(found[name], before[name]) for name in fixed)
    assert any(not torch.equal(found[name], before[name]) for name in found)


def test_matrix_that_is_not_trained_gets_no_gradient():
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in ((9, 5), (13, 5), (13,)))
    targets = torch.arange(9)
    hidden.requires_grad_()
    right = torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight, bias), targets)
    (expected,) = torch.autograd.grad(right, hidden)
    head_loss(hidden, weight, bias, targets, rows=4).total.backward()
    torch.testing.assert_close(hidden.grad, expected)
    assert weight.grad is None


def test_default_rate_is_larger_for_adapters():
    assert (DecoderConfig().peak_rate, DecoderConfig(lora=4).peak_rate) == (2e-4, 1e-3)
    assert DecoderConfig(lora=4, learning_rate=3e-4).peak_rate == 3e-4


def test_without_peft_the_error_names_the_extra(initial, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"pip install 'knnlm\[lora\]'"):
        train_decoder(texts[0], initial, tmp_path / "none", CONFIG, device="cpu")
    assert not list(tmp_path.iterdir())


def test_model_without_linear_layers_is_refused():
    model = tiny("llama")
    for block in model.model.layers:
        block.self_attn, block.mlp = torch.nn.Identity(), torch.nn.Identity()
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be trained with lora"):
        Adapters(model, rank=2, seed=0)


def test_long_training_is_announced_with_its_time(initial, texts, tmp_path, monkeypatch):
    shown = []

    class Bar:
        def __call__(self, _):
            pass

        def note(self, text):
            shown.append(text)

    @contextmanager
    def progress(*_, **__):
        yield Bar()

    monkeypatch.setattr(decoder_trainer, "_PROBE", 16)
    monkeypatch.setattr(decoder_trainer, "_MIN_PROBES", 2)
    monkeypatch.setattr(decoder_trainer, "_LONG", 0.0)
    begin = time.perf_counter()
    options = {"device": "cpu", "progress": progress}
    with pytest.warns(KnnlmWarning, match=r"takes about .* here\. lora=16") as warned:
        card = train_decoder(texts[0], initial, tmp_path / "all", replace(CONFIG, lora=0), **options)
    assert time.perf_counter() - begin < 60
    assert len(warned) == 1
    assert shown[0].startswith("about ")
    assert any(note.startswith("Training all weights takes") for note in card.notes)
    monkeypatch.undo()
    quiet = train_decoder(texts[0], initial, tmp_path / "plain", replace(CONFIG, lora=0), device="cpu")
    assert quiet.held_out == card.held_out
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("all", "plain")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("select", [False, True])
def test_estimate_is_the_time_of_a_token_times_the_tokens_that_remain(initial, texts, monkeypatch, select):
    config = replace(CONFIG, select=select, epochs=3).resolve(
        TokenStream.from_documents(texts[0]), initial, torch.device("cpu")
    )
    held_out = TokenStream.from_documents(texts[1])
    stream = TokenStream.from_documents(texts[0])
    trainer, _ = decoder._make_trainer(stream, held_out, initial, None, config, torch.device("cpu"))
    ticks = itertools.count(0.0, 0.5)
    monkeypatch.setattr(decoder_trainer.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(decoder_trainer, "_PROBE", 10)
    # With a selection four rates for half an epoch, then from a third to 1, from 2/3 to 2, from 4/3 to 3.
    epochs = 4 * 0.5 + 2 / 3 + 4 / 3 + 5 / 3 if select else 3
    assert trainer.estimate() == pytest.approx(0.5 / 10 * epochs * sum(map(len, texts[0])))
    assert all(weight.grad is None for weight in trainer.model.parameters())
