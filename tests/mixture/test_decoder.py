"""A decoder in the place of a memory: mixed with any model of its tokenizer, tuned, saved, trained by a command."""

from __future__ import annotations

import json
import shutil
from functools import lru_cache

import numpy as np
import pytest
import torch
import transformers as hf

from helpers import oracle
from helpers.cli import failure, knnlm
from helpers.models import VOCABULARY, randomise, tiny_tokenizer
from helpers.stores import documents
from helpers.training import fit_decoder
from knnlm.datastore.store import Datastore
from knnlm.errors import ModelMismatch, ParameterError
from knnlm.evaluation.tune import tune_decoder
from knnlm.generation.causal import KnnForCausalLM
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.lm.fingerprint import tokenizer_fingerprint
from knnlm.memories.decoder import load_card, set_lambda
from knnlm.memories.output import load_tensors, save_tensors
from knnlm.mixture.mixture import Mixture
from knnlm.training.data import TokenStream
from knnlm.training.initial_model import open_initial_model

HELD_OUT = documents(1, words=60, start=50)[0].text
QUICK = ("--epochs", 1, "--batch-tokens", 512, "--learning-rate", 0.003)


@pytest.fixture(scope="module")
def desk(tmp_path_factory, model_folder, lm):
    """A decoder, text, and a second, larger model with the same tokenizer."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "valid.txt").write_text(HELD_OUT)
    tokens = lm.encode_all([document.text for document in documents(12)])
    initial = open_initial_model(str(model_folder), like=lm, layers=2)
    settings = {"epochs": 3, "batch_tokens": 512, "learning_rate": 3e-3, "device": "cpu"}
    fit_decoder(tokens, initial, folder / "decoder", **settings)
    # A model that knows something, so that the best λ is neither 0 nor 1.
    others = lm.encode_all([document.text for document in documents(12, start=20)])
    fit_decoder(others, open_initial_model(str(model_folder), like=lm), folder / "trained", **settings)
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=128, bos_token_id=1, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    randomise(lambda: hf.AutoModelForCausalLM.from_config(config), seed=7).save_pretrained(folder / "larger")
    tiny_tokenizer().save_pretrained(folder / "larger")
    return folder


@pytest.fixture(scope="module")
def memory(desk, model_folder):
    """A memory of the text that the decoder was trained on, opened by its model's folder."""
    return build(documents(12), desk / "memory", lm=CausalLM.open(str(model_folder), device="cpu")).path


@pytest.fixture
def decoder(desk, tmp_path):
    """The decoder, in a folder where its card may be changed."""
    return shutil.copytree(desk / "decoder", tmp_path / "decoder")


@lru_cache
def probabilities(folder, text):
    """What a plain transformers model gives to each token of a text, and to all others, token by token."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
    _, probs = oracle.read_token_by_token(
        model, model.model.layers[-1].mlp, tokens, start_token=1, context=128, stride=64
    )
    return tokens, probs


def mixed(weight, base, initial, text):
    """The perplexity of (1-λ)·p_base + λ·p_decoder by two plain models."""
    tokens, p_base = probabilities(base, text)
    _, p_decoder = probabilities(initial, text)
    rows = range(len(tokens))
    return oracle.perplexity(oracle.mix(p_base[rows, tokens], p_decoder[rows, tokens], weight))


# ------------------------------------------------------------------------------------------------------ measuring


@pytest.mark.parametrize("base", ["model", "larger"])
def test_one_decoder_helps_two_models_as_two_plain_models_in_numpy_do(desk, model_folder, base, capfd):
    folder = model_folder if base == "model" else desk / "larger"
    assert len(probabilities(folder, HELD_OUT)[0]) > 128, "several windows"
    right = {weight: mixed(weight, folder, desk / "decoder", HELD_OUT) for weight in (0.0, 0.3, 1.0)}
    for weight, perplexity in right.items():
        options = ("--model", folder, "--lambda", weight, "--json")
        code, out, err = knnlm(capfd, "eval", desk / "decoder", desk / "valid.txt", *options)
        assert code == 0, err
        figures = json.loads(out)
        assert figures["perplexity"] == pytest.approx(perplexity, rel=1e-4)
        assert figures["base_perplexity"] == pytest.approx(right[0.0], rel=1e-4)
        assert figures["lambda"] == weight
        assert [memory["name"] for memory in figures["memories"]] == ["decoder=decoder"]


def test_tune_writes_the_best_lambda_into_the_decoder_and_all_commands_use_it(decoder, desk, capfd):
    trained = desk / "trained"
    code, out, err = knnlm(capfd, "tune", decoder, desk / "valid.txt", "--model", trained, "--json")
    assert code == 0, err
    chosen = json.loads(out)
    tokens, p_base = probabilities(trained, HELD_OUT)
    _, p_decoder = probabilities(decoder, HELD_OUT)
    rows = range(len(tokens))
    base, initial = p_base[rows, tokens], p_decoder[rows, tokens]
    grid = np.linspace(0, 1, 20_001)
    by_weight = np.array([oracle.perplexity(oracle.mix(base, initial, weight)) for weight in grid])
    assert 0 < grid[by_weight.argmin()] < 1
    assert chosen["lambda"] == pytest.approx(grid[by_weight.argmin()], abs=1e-3)
    assert chosen["perplexity"] == pytest.approx(by_weight.min(), rel=1e-5)
    assert chosen["base_perplexity"] == pytest.approx(oracle.perplexity(base), rel=1e-5)
    assert (chosen["tokens"], chosen["text"]) == (len(tokens), [str(desk / "valid.txt")])
    card = load_card(decoder)
    assert (card.lmbda, card.lmbda_metadata["model"]) == (chosen["lambda"], str(trained))

    figures = json.loads(knnlm(capfd, "eval", decoder, desk / "valid.txt", "--json")[1])  # the model is known now
    assert figures["perplexity"] == pytest.approx(chosen["perplexity"], rel=1e-5)
    explained = json.loads(knnlm(capfd, "explain", decoder, desk / "valid.txt", "--json")[1])["tokens"]
    right = oracle.mix(base, initial, chosen["lambda"])
    np.testing.assert_allclose([token["p"] for token in explained], right, rtol=1e-3, atol=1e-9)
    assert {share["memory"] for token in explained for share in token["shares"]} == {"decoder=decoder"}
    trace = decoder.parent / "trace"
    traced = json.loads(knnlm(capfd, "eval", decoder, desk / "valid.txt", "--save-trace", trace, "--json")[1])
    assert traced["perplexity"] == pytest.approx(chosen["perplexity"], rel=1e-5)
    code, out, err = knnlm(capfd, "tune", decoder, desk / "valid.txt", "--weights", "fixed", "--limit", 20)
    assert code == 0, err
    assert "λ = " in out


def test_generation_takes_the_most_probable_token_of_the_mixture(desk, model_folder, capfd):
    options = ("--model", model_folder, "--lambda", 0.6, "--max-new-tokens", 6, "--json")
    code, out, err = knnlm(capfd, "generate", desk / "decoder", "The memory of", *options)
    assert code == 0, err
    models = [
        hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (model_folder, desk / "decoder")
    ]
    tokenizer = tiny_tokenizer()
    ids = [1, *tokenizer("The memory of", add_special_tokens=False)["input_ids"]]
    begin = len(ids)
    while len(ids) < begin + 6 and ids[-1] != tokenizer.eos_token_id:
        with torch.no_grad():
            p_base, p_decoder = (
                oracle.softmax(model(torch.tensor([ids])).logits[0, -1].double().numpy()) for model in models
            )
        ids.append(int(oracle.mix(p_base, p_decoder, 0.6).argmax()))
    assert json.loads(out)["text"] == tokenizer.decode(ids[begin:], skip_special_tokens=True)


def test_a_decoder_is_opened_from_python_and_keeps_what_is_tuned_there(decoder, lm):
    mixture = Mixture.open(decoder, lm)
    assert (mixture.lmbda, mixture.store, mixture.knn) == (0.5, None, None)
    card = tune_decoder(mixture, documents(2, start=50))
    assert Mixture.open(decoder, lm).lmbda == card.lmbda
    assert Mixture.open(decoder, lm, use_tuned=False).lmbda == 0.5
    assert Mixture.open(decoder, lm, lmbda=0.125).lmbda == 0.125
    best = Mixture.open(decoder, lm).evaluate(documents(2, start=50)).perplexity
    assert best == pytest.approx(card.lmbda_metadata["perplexity"], rel=1e-5)
    for weight in (card.lmbda - 0.05, card.lmbda + 0.05):
        worse = Mixture.open(decoder, lm, lmbda=min(1.0, max(0.0, weight)))
        assert worse.evaluate(documents(2, start=50)).perplexity > best
    assert [token.p_knn for token in mixture.explain("The memory")] == [None] * len(lm.encode("The memory"))
    with pytest.raises(ParameterError, match="no settings besides λ"):
        mixture.tune(documents(1, start=50))
    alone = Mixture(lm, mixture.memories, readers=mixture.readers)
    with pytest.raises(ParameterError, match="opened from a decoder"):
        tune_decoder(alone, documents(1, start=50))


def test_a_decoder_is_mixed_with_a_store(memory, desk, lm, capfd):
    options = ("--memories", f"knn:0.2,decoder={desk / 'decoder'}:0.3", "--json")
    code, out, err = knnlm(capfd, "eval", memory, desk / "valid.txt", *options)
    assert code == 0, err
    figures = json.loads(out)
    tokens, p_base = probabilities(lm_folder(memory), HELD_OUT)
    _, p_decoder = probabilities(desk / "decoder", HELD_OUT)
    asked = Mixture.open(memory, memories="knn", lmbda=1.0)
    p_knn = np.array([token.p_knn for token in asked.explain(HELD_OUT, top=0)])
    rows = range(len(tokens))
    right = 0.5 * p_base[rows, tokens] + 0.2 * p_knn + 0.3 * p_decoder[rows, tokens]
    assert figures["perplexity"] == pytest.approx(oracle.perplexity(right), rel=1e-4)


def lm_folder(memory):
    """The folder of the model that a memory was built with."""
    return Datastore.open(memory).model["name"]


# ---------------------------------------------------------------------------------------------------- being refused


@pytest.mark.parametrize(
    "options",
    [
        ("--k", 5),
        ("--knn-temperature", 2),
        ("--memories", "knn"),
        ("--metric", "ip"),
        ("--skip-fraction", 0.5),
        ("--no-rerank",),
        ("--key-dtype", "int8"),
    ],
    ids=lambda options: options[0],
)
def test_options_of_a_store_mean_nothing_to_a_decoder(desk, model_folder, capfd, options):
    for command in (("eval", desk / "decoder", desk / "valid.txt"), ("generate", desk / "decoder", "The")):
        line = failure(capfd, *command, "--model", model_folder, *options)
        assert "is a decoder" in line
        assert "--memories knn,decoder=" in line


@pytest.mark.parametrize(
    "options",
    [
        ("--k", "1,2"),
        ("--knn-temperature", "1"),
        ("--lambda", "0.1"),
        ("--memories", "knn"),
        ("--weights", "gated"),
        ("--trace", "t"),
        ("--no-rerank",),
        ("--key-dtype", "int8"),
    ],
    ids=lambda options: options[0],
)
def test_there_is_only_lambda_to_tune(desk, model_folder, capfd, options):
    line = failure(capfd, "tune", desk / "decoder", desk / "valid.txt", "--model", model_folder, *options)
    assert ("its weights are fixed, not gated" if options[0] == "--weights" else "only λ is chosen") in line


def test_a_model_must_be_named_until_one_is_tuned_for_and_must_be_there(decoder, desk, model_folder, capfd):
    for command in (("eval", decoder, desk / "valid.txt"), ("tune", decoder, desk / "valid.txt")):
        assert "name the language model it is mixed with: --model" in failure(capfd, *command)
    assert "Give TEXT" in failure(capfd, "tune", decoder, "--model", model_folder)
    told = {"text": ["valid"], "tokens": 9, "base_perplexity": 3.0, "perplexity": 2.0}
    set_lambda(decoder, 0.5, {"model": "/nowhere/at/all", **told})
    assert "was tuned with /nowhere/at/all" in failure(capfd, "eval", decoder, desk / "valid.txt")
    assert knnlm(capfd, "eval", decoder, desk / "valid.txt", "--model", model_folder)[0] == 0


def test_another_tokenizer_is_refused_with_both_fingerprints(desk, tmp_path, capfd):
    other = shutil.copytree(desk / "larger", tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["nonsense"])
    tokenizer.save_pretrained(other)
    line = failure(capfd, "eval", desk / "decoder", desk / "valid.txt", "--model", other)
    assert tokenizer_fingerprint(tokenizer) in line
    assert load_card(desk / "decoder").tokenizer in line
    with pytest.raises(ModelMismatch):
        Mixture.open(desk / "decoder", CausalLM.open(str(other), device="cpu"))


def test_commands_that_need_a_store_say_that_a_decoder_is_none(desk, capfd):
    for command in (("index", desk / "decoder"), ("prune", desk / "decoder", "--out", desk / "x", "--merge", 2)):
        assert "is not a store" in failure(capfd, *command)


# ------------------------------------------------------------------------------------------------ saving and showing


def logits(model):
    ids = torch.tensor([[1, 40, 41, 90, 7]])
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("copied", [False, True])
def test_a_model_with_its_decoder_is_saved_and_opened_again(decoder, lm, tmp_path, copied):
    saved = KnnForCausalLM.from_store(decoder, lm, lmbda=0.3)
    base, initial = (
        model(input_ids=torch.tensor([[1, 40, 41, 90, 7]])).logits.softmax(-1)
        for model in (lm.model, hf.AutoModelForCausalLM.from_pretrained(decoder).eval())
    )
    torch.testing.assert_close(logits(saved).exp(), 0.7 * base + 0.3 * initial, rtol=1e-4, atol=1e-7)
    saved.save_pretrained(tmp_path / "saved", copy_store=copied)
    if copied:
        shutil.rmtree(decoder)
    again = KnnForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(again), logits(saved))


def test_info_describes_a_decoder(decoder, model_folder, capfd):
    code, out, err = knnlm(capfd, "info", decoder)
    assert code == 0, err
    parameters = sum(weight.numel() for weight in hf.AutoModelForCausalLM.from_pretrained(decoder).parameters())
    said = " ".join(out.split())
    for words in (f"{parameters / 1e6:.1f}M weights", "layers 0, 2", str(model_folder), "not yet: knnlm tune"):
        assert words in said
    metadata = {"model": "some", "text": ["a.txt"], "tokens": 9, "base_perplexity": 30.0, "perplexity": 20.0}
    set_lambda(decoder, 0.25, metadata)
    said = " ".join(knnlm(capfd, "info", decoder)[1].split())
    assert "λ 0.25 for some; chosen on 9 tokens of a.txt (perplexity 30.00 → 20.00)" in said
    found = json.loads(knnlm(capfd, "info", decoder, "--json")[1])
    assert found["initial_model"]["parameters"] == parameters
    assert (found["lambda"], found["lambda_metadata"]) == (0.25, metadata)


def test_a_damaged_checkpoint_is_not_blamed_on_an_output_matrix(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    save_tensors(path, {"a": torch.zeros(2)}, {})
    assert load_tensors(path)[0]["a"].tolist() == [0, 0]
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(Exception, match=r"corrupt.*the command that made it"):
        load_tensors(path)


# -------------------------------------------------------------------------------------------- distill --into decoder


def distill(capfd, memory, out, *options):
    """Train a decoder by the command, and give what it says."""
    code, said, err = knnlm(capfd, "distill", memory, "--into", "decoder", "--out", out, *QUICK, *options, "--json")
    assert code == 0, err
    return json.loads(said)


def test_a_decoder_is_trained_on_the_text_alone_without_beta(memory, desk, lm, model_folder, tmp_path, capfd):
    metadata = distill(capfd, memory, tmp_path / "d")
    assert (metadata["beta"], metadata["teacher"], metadata["targets"], metadata["lambda"]) == (0.0, None, None, None)
    assert metadata["model"] == str(model_folder)
    assert not (tmp_path / "d.targets").exists()
    tokens = TokenStream.from_documents(lm.encode_all([document.text for document in documents(12)]))
    assert (metadata["text"], metadata["tokens"]) == (tokens.fingerprint, len(tokens.tokens))
    # The same training in Python, without a memory, ends with the same weights.
    settings = {"epochs": 1, "batch_tokens": 512, "learning_rate": 0.003, "device": "cpu"}
    initial = open_initial_model(str(model_folder), like=lm)
    fit_decoder(lm.encode_all([one.text for one in documents(12)]), initial, tmp_path / "python", **settings)
    one, other = (hf.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("d", "python"))
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name
    assert distill(capfd, memory, tmp_path / "d") == metadata  # finished already
    code, said, _ = knnlm(capfd, "distill", memory, "--into", "decoder", "--out", tmp_path / "d", *QUICK)
    assert code == 0
    assert f"Next: knnlm tune {tmp_path / 'd'} TEXT --model {model_folder}" in said


def test_a_store_teaches_with_beta_and_valid_tunes_lambda(memory, desk, model_folder, tmp_path, capfd):
    out = tmp_path / "d"
    options = ("--beta", 0.5, "--k", 16, "--knn-temperature", 20, "--exclude", "document", "--layers", 1)
    metadata = distill(capfd, memory, out, *options, "--valid", desk / "valid.txt")
    assert metadata["teacher"] == Datastore.open(memory).fingerprint
    wanted = {"k": 16, "knn_temperature": 20.0, "exclude": "document"}
    assert {name: metadata["targets"][name] for name in wanted} == wanted
    assert metadata["initial_model"]["layers"] == [0]
    losses = metadata["losses"]
    assert losses["loss"] == pytest.approx((losses["kl"] + losses["ce"]) / 2, rel=1e-4)
    assert metadata["lambda"] == load_card(out).lmbda
    assert metadata["lambda_metadata"]["text"] == [str(desk / "valid.txt")]
    right = mixed(metadata["lambda"], model_folder, out, HELD_OUT)
    assert metadata["lambda_metadata"]["perplexity"] == pytest.approx(right, rel=1e-4)
    arguments = ("distill", memory, "--into", "decoder", "--out", out, *QUICK, *options)
    said = knnlm(capfd, *arguments, "--valid", desk / "valid.txt")[1]
    assert f"λ = {metadata['lambda']:.2f}" in said
    assert f"Next: knnlm eval {out} TEXT" in said


def test_a_finished_decoder_needs_no_targets_and_keeps_its_lambda(memory, desk, tmp_path, capfd):
    out, targets = tmp_path / "d", tmp_path / "d.targets"
    options = ("--beta", 0.5, "--k", 8, "--valid", desk / "valid.txt")
    metadata = distill(capfd, memory, out, *options)
    shutil.rmtree(targets)
    set_lambda(out, 0.125, metadata["lambda_metadata"])  # as if it had been tuned since
    again = distill(capfd, memory, out, *options)
    assert again == {**metadata, "lambda": 0.125}
    start = ("distill", memory, "--into", "decoder", "--out", out, *QUICK, *options[:2])
    assert "another targets" in failure(capfd, *start, "--k", 9)
    assert not targets.exists()


def test_another_memory_of_the_same_text_may_teach_and_one_of_other_text_may_not(memory, desk, tmp_path, capfd):
    reader = CausalLM.open(str(desk / "larger"), device="cpu")
    same = build(documents(12), tmp_path / "same", lm=reader)
    metadata = distill(capfd, memory, tmp_path / "d", "--beta", 1, "--teacher", same.path, "--k", 8)
    assert metadata["teacher"] == same.fingerprint != Datastore.open(memory).fingerprint
    assert metadata["losses"]["loss"] == pytest.approx(metadata["losses"]["kl"], rel=1e-4)
    other = build(documents(11), tmp_path / "other", lm=reader)
    start = ("distill", memory, "--into", "decoder", "--out", tmp_path / "e", *QUICK)
    line = failure(capfd, *start, "--beta", 1, "--teacher", other.path)
    assert "contains another text" in line
    assert not (tmp_path / "e.targets").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--teacher", "x"), "--teacher need a teacher: give --beta"),
        (("--k", 5, "--exclude", "self"), "--k and --exclude need a teacher"),
        (("--knn-temperature", 5, "--beta", 0), "--knn-temperature need a teacher"),
        (("--learning-rate", 0), "learning rate must be above 0"),
        (("--learning-rate", "nan"), "learning rate must be above 0"),
        (("--beta", 2), "--beta"),
        (("--context", 4096, "--beta", 0.5), "context 4,096 is longer"),
        (("--layers", 9), "layers must be from 1 to 3"),
        (("--exclude", "nobody", "--beta", 0.5), "Unknown exclude 'nobody'"),
        (("--init", "/nowhere"), "Cannot open the model /nowhere"),
        (("--valid", "/nowhere.txt"), "/nowhere.txt"),
        (("--rows", 2), "--rows applies to --into output"),
        (("--width", 2, "--rounds", 1), "--width and --rounds apply to --into keys"),
    ],
    ids=str,
)
def test_decoders_that_cannot_be_are_one_line_and_make_nothing(memory, tmp_path, capfd, options, message):
    line = failure(capfd, "distill", memory, "--into", "decoder", "--out", tmp_path / "d", *options)
    assert message in line
    assert not list(tmp_path.iterdir())


def test_a_place_that_is_taken_and_options_of_the_wrong_kind_are_refused(memory, desk, tmp_path, capfd):
    start = ("distill", memory, "--into", "decoder")
    assert "creates a new folder: give --out" in failure(capfd, *start)
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", memory):
        assert "is not a decoder. Choose another --out" in failure(capfd, *start, "--out", place, "--beta", 0.5)
    assert (tmp_path / "file").read_text() == "mine"
    line = failure(capfd, *start, "--out", desk / "decoder", "--learning-rate", 0.5)
    assert "trained with another" in line
    decoders = ("--init", "x", "--layers", 1, "--beta", 0.5, "--k", 1, "--knn-temperature", 1, "--exclude", "self")
    decoders += ("--teacher", "x", "--learning-rate", 1, "--batch-tokens", 1, "--accumulate", 1, "--context", 1)
    for into in ("output", "keys"):
        line = failure(capfd, "distill", memory, "--into", into, "--out", tmp_path / "o", *decoders, "--valid", "x")
        for name in (*decoders[::2], "--valid"):
            assert name in line
        assert f"to --into decoder, not to --into {into}" in line
