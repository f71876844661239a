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
QUICK = ("--epochs", 1, "--batch-tokens", 512, "--learning-rate", 0.003, "--no-select")


@pytest.fixture(scope="module")
def models(tmp_path_factory, model_folder, lm):
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
def store_path(models, model_folder):
    """A store of the text that the decoder was trained on, opened by its model's folder."""
    return build(documents(12), models / "docs.store", lm=CausalLM.open(str(model_folder), device="cpu")).path


@pytest.fixture
def decoder(models, tmp_path):
    """The decoder, in a folder where its card may be changed."""
    return shutil.copytree(models / "decoder", tmp_path / "decoder")


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
def test_one_decoder_mixed_with_two_models_matches_numpy(models, model_folder, base, capfd):
    folder = model_folder if base == "model" else models / "larger"
    assert len(probabilities(folder, HELD_OUT)[0]) > 128, "several windows"
    right = {weight: mixed(weight, folder, models / "decoder", HELD_OUT) for weight in (0.0, 0.3, 1.0)}
    for weight, perplexity in right.items():
        options = ("--model", folder, "--lambda", weight, "--json")
        code, out, err = knnlm(capfd, "eval", models / "decoder", models / "valid.txt", *options)
        assert code == 0, err
        figures = json.loads(out)
        assert figures["perplexity"] == pytest.approx(perplexity, rel=1e-4)
        assert figures["base_perplexity"] == pytest.approx(right[0.0], rel=1e-4)
        assert figures["lambda"] == weight
        assert [memory["name"] for memory in figures["memories"]] == ["decoder=decoder"]


def test_tune_saves_the_best_lambda_in_the_decoder_for_all_commands(decoder, models, capfd):
    trained = models / "trained"
    code, out, err = knnlm(capfd, "tune", decoder, models / "valid.txt", "--model", trained, "--json")
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
    assert (chosen["tokens"], chosen["text"]) == (len(tokens), [str(models / "valid.txt")])
    card = load_card(decoder)
    assert (card.lmbda, card.lmbda_metadata["model"]) == (chosen["lambda"], str(trained))

    figures = json.loads(knnlm(capfd, "eval", decoder, models / "valid.txt", "--json")[1])  # the model is known now
    assert figures["perplexity"] == pytest.approx(chosen["perplexity"], rel=1e-5)
    explained = json.loads(knnlm(capfd, "explain", decoder, models / "valid.txt", "--json")[1])["tokens"]
    right = oracle.mix(base, initial, chosen["lambda"])
    np.testing.assert_allclose([token["p"] for token in explained], right, rtol=1e-3, atol=1e-9)
    assert {share["memory"] for token in explained for share in token["shares"]} == {"decoder=decoder"}
    trace = decoder.parent / "trace"
    traced = json.loads(knnlm(capfd, "eval", decoder, models / "valid.txt", "--save-trace", trace, "--json")[1])
    assert traced["perplexity"] == pytest.approx(chosen["perplexity"], rel=1e-5)
    code, out, err = knnlm(capfd, "tune", decoder, models / "valid.txt", "--weights", "fixed", "--limit", 20)
    assert code == 0, err
    assert "λ = " in out


def test_generation_takes_the_most_probable_token_of_the_mixture(models, model_folder, capfd):
    options = ("--model", model_folder, "--lambda", 0.6, "--max-new-tokens", 6, "--json")
    code, out, err = knnlm(capfd, "generate", models / "decoder", "The memory of", *options)
    assert code == 0, err
    models = [
        hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (model_folder, models / "decoder")
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


def test_tuning_from_python_is_saved_in_the_decoder(decoder, lm):
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
        assert worse.evaluate(documents(2, start=50)).perplexity > best * (1 - 1e-6)  # EM stops near the optimum
    assert [token.p_knn for token in mixture.explain("The memory")] == [None] * len(lm.encode("The memory"))
    with pytest.raises(ParameterError, match="no settings besides λ"):
        mixture.tune(documents(1, start=50))
    alone = Mixture(lm, mixture.memories, readers=mixture.readers)
    with pytest.raises(ParameterError, match="opened from a decoder"):
        tune_decoder(alone, documents(1, start=50))


def test_decoder_is_mixed_with_a_store(store_path, models, lm, capfd):
    options = ("--memories", f"knn:0.2,decoder={models / 'decoder'}:0.3", "--json")
    code, out, err = knnlm(capfd, "eval", store_path, models / "valid.txt", *options)
    assert code == 0, err
    figures = json.loads(out)
    tokens, p_base = probabilities(lm_folder(store_path), HELD_OUT)
    _, p_decoder = probabilities(models / "decoder", HELD_OUT)
    asked = Mixture.open(store_path, memories="knn", lmbda=1.0)
    p_knn = np.array([token.p_knn for token in asked.explain(HELD_OUT, top=0)])
    rows = range(len(tokens))
    right = 0.5 * p_base[rows, tokens] + 0.2 * p_knn + 0.3 * p_decoder[rows, tokens]
    assert figures["perplexity"] == pytest.approx(oracle.perplexity(right), rel=1e-4)


def lm_folder(store_path):
    """The folder of the model that a store was built with."""
    return Datastore.open(store_path).model["name"]


# ---------------------------------------------------------------------------------------------------- being refused


@pytest.mark.parametrize(
    "options",
    [
        ("--k", 5),
        ("--knn-temperature", 2),
        ("--memories", "knn"),
        ("--metric", "ip"),
        ("--skip-fraction", 0.5),
        ("--search", "automaton"),
        ("--no-rerank",),
        ("--key-dtype", "int8"),
    ],
    ids=lambda options: options[0],
)
def test_store_options_are_refused_for_a_decoder(models, model_folder, capfd, options):
    for command in (("eval", models / "decoder", models / "valid.txt"), ("generate", models / "decoder", "The")):
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
def test_only_lambda_of_a_decoder_can_be_tuned(models, model_folder, capfd, options):
    line = failure(capfd, "tune", models / "decoder", models / "valid.txt", "--model", model_folder, *options)
    assert ("its weights are fixed, not gated" if options[0] == "--weights" else "only λ is chosen") in line


def test_model_is_required_until_tuned_and_must_exist(decoder, models, model_folder, capfd):
    for command in (("eval", decoder, models / "valid.txt"), ("tune", decoder, models / "valid.txt")):
        assert "name the language model it is mixed with: --model" in failure(capfd, *command)
    assert "Give TEXT" in failure(capfd, "tune", decoder, "--model", model_folder)
    told = {"text": ["valid"], "tokens": 9, "base_perplexity": 3.0, "perplexity": 2.0}
    set_lambda(decoder, 0.5, {"model": "/nowhere/at/all", **told})
    assert "was tuned with /nowhere/at/all" in failure(capfd, "eval", decoder, models / "valid.txt")
    assert knnlm(capfd, "eval", decoder, models / "valid.txt", "--model", model_folder)[0] == 0


def test_another_tokenizer_is_refused_with_both_fingerprints(models, tmp_path, capfd):
    other = shutil.copytree(models / "larger", tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["nonsense"])
    tokenizer.save_pretrained(other)
    line = failure(capfd, "eval", models / "decoder", models / "valid.txt", "--model", other)
    assert tokenizer_fingerprint(tokenizer) in line
    assert load_card(models / "decoder").tokenizer in line
    with pytest.raises(ModelMismatch):
        Mixture.open(models / "decoder", CausalLM.open(str(other), device="cpu"))


def test_commands_that_need_a_store_refuse_a_decoder(models, capfd):
    for command in (("index", models / "decoder"), ("prune", models / "decoder", "--out", models / "x", "--merge", 2)):
        assert "is not a store" in failure(capfd, *command)


# ------------------------------------------------------------------------------------------------ saving and showing


def logits(model):
    ids = torch.tensor([[1, 40, 41, 90, 7]])
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("copied", [False, True])
def test_model_with_its_decoder_is_saved_and_opened_again(decoder, lm, tmp_path, copied):
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


def test_damaged_checkpoint_error_does_not_mention_an_output_matrix(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    save_tensors(path, {"a": torch.zeros(2)}, {})
    assert load_tensors(path)[0]["a"].tolist() == [0, 0]
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(Exception, match=r"corrupt.*the command that made it"):
        load_tensors(path)


# -------------------------------------------------------------------------------------------- distill --into decoder


def distill(capfd, store_path, out, *options):
    """Train a decoder by the command, and return its JSON output."""
    code, said, err = knnlm(capfd, "distill", store_path, "--into", "decoder", "--out", out, *QUICK, *options, "--json")
    assert code == 0, err
    return json.loads(said)


def test_decoder_without_beta_is_trained_on_text_alone(store_path, models, lm, model_folder, tmp_path, capfd):
    metadata = distill(capfd, store_path, tmp_path / "d")
    assert (metadata["beta"], metadata["teacher"], metadata["targets"], metadata["lambda"]) == (0.0, None, None, None)
    assert metadata["model"] == str(model_folder)
    assert not (tmp_path / "d.targets").exists()
    tokens = TokenStream.from_documents(lm.encode_all([document.text for document in documents(12)]))
    assert (metadata["text"], metadata["tokens"]) == (tokens.fingerprint, len(tokens.tokens))
    # The same training in Python, without a store, ends with the same weights.
    settings = {"epochs": 1, "batch_tokens": 512, "learning_rate": 0.003, "device": "cpu"}
    initial = open_initial_model(str(model_folder), like=lm)
    fit_decoder(lm.encode_all([one.text for one in documents(12)]), initial, tmp_path / "python", **settings)
    one, other = (hf.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("d", "python"))
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name
    assert distill(capfd, store_path, tmp_path / "d") == metadata  # finished already
    code, said, _ = knnlm(capfd, "distill", store_path, "--into", "decoder", "--out", tmp_path / "d", *QUICK)
    assert code == 0
    out = tmp_path / "d"
    assert f"Next, with the store: knnlm tune {store_path} TEXT --memories knn,ngram,decoder={out}; without" in said
    assert f"without it: knnlm tune {out} TEXT --model {model_folder}" in said


def test_beta_trains_on_targets_of_the_store_and_valid_tunes_lambda(store_path, models, model_folder, tmp_path, capfd):
    out = tmp_path / "d"
    options = ("--beta", 0.5, "--k", 16, "--knn-temperature", 20, "--exclude", "document", "--layers", 1)
    metadata = distill(capfd, store_path, out, *options, "--valid", models / "valid.txt")
    assert metadata["teacher"] == Datastore.open(store_path).fingerprint
    wanted = {"k": 16, "knn_temperature": 20.0, "exclude": "document"}
    assert {name: metadata["targets"][name] for name in wanted} == wanted
    assert metadata["initial_model"]["layers"] == [0]
    losses = metadata["losses"]
    assert losses["loss"] == pytest.approx((losses["kl"] + losses["ce"]) / 2, rel=1e-4)
    assert metadata["lambda"] == load_card(out).lmbda
    assert metadata["lambda_metadata"]["text"] == [str(models / "valid.txt")]
    right = mixed(metadata["lambda"], model_folder, out, HELD_OUT)
    assert metadata["lambda_metadata"]["perplexity"] == pytest.approx(right, rel=1e-4)
    arguments = ("distill", store_path, "--into", "decoder", "--out", out, *QUICK, *options)
    said = knnlm(capfd, *arguments, "--valid", models / "valid.txt")[1]
    assert f"λ = {metadata['lambda']:.2f}" in said
    assert f"Next: knnlm eval {out} TEXT" in said


def test_finished_decoder_needs_no_targets_and_keeps_its_lambda(store_path, models, tmp_path, capfd):
    out, targets = tmp_path / "d", tmp_path / "d.targets"
    options = ("--beta", 0.5, "--k", 8, "--valid", models / "valid.txt")
    metadata = distill(capfd, store_path, out, *options)
    shutil.rmtree(targets)
    set_lambda(out, 0.125, metadata["lambda_metadata"])  # as if it had been tuned since
    again = distill(capfd, store_path, out, *options)
    assert again == {**metadata, "lambda": 0.125}
    start = ("distill", store_path, "--into", "decoder", "--out", out, *QUICK, *options[:2])
    assert "another targets" in failure(capfd, *start, "--k", 9)
    assert not targets.exists()


def test_teacher_may_be_another_store_of_the_same_text_only(store_path, models, tmp_path, capfd):
    reader = CausalLM.open(str(models / "larger"), device="cpu")
    same = build(documents(12), tmp_path / "same", lm=reader)
    metadata = distill(capfd, store_path, tmp_path / "d", "--beta", 1, "--teacher", same.path, "--k", 8)
    assert metadata["teacher"] == same.fingerprint != Datastore.open(store_path).fingerprint
    assert metadata["losses"]["loss"] == pytest.approx(metadata["losses"]["kl"], rel=1e-4)
    other = build(documents(11), tmp_path / "other", lm=reader)
    start = ("distill", store_path, "--into", "decoder", "--out", tmp_path / "e", *QUICK)
    line = failure(capfd, *start, "--beta", 1, "--teacher", other.path)
    assert "contains another text" in line
    assert not (tmp_path / "e.targets").exists()


def test_decoder_teaches_a_smaller_one(store_path, tmp_path, capfd):
    teacher, out = tmp_path / "teacher", tmp_path / "d"
    distill(capfd, store_path, teacher)
    options = ("--beta", 0.5, "--teacher", teacher, "--init", teacher, "--layers", 1)
    metadata = distill(capfd, store_path, out, *options)
    assert metadata["targets"]["kind"] == "model"
    assert metadata["teacher"] == CausalLM.open(str(teacher), device="cpu").identity["weights"]["float32"]
    assert metadata["initial_model"]["layers"] == [0]
    losses = metadata["losses"]
    assert losses["loss"] == pytest.approx((losses["kl"] + losses["ce"]) / 2, rel=1e-4)
    targets = tmp_path / "d.targets"
    shutil.rmtree(targets)
    assert distill(capfd, store_path, out, *options) == metadata
    assert not targets.exists()
    start = ("distill", store_path, "--into", "decoder", "--out", tmp_path / "e", *QUICK, "--beta", 1)
    assert "leave out --k" in failure(capfd, *start, "--teacher", teacher, "--k", 9)


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
def test_invalid_decoder_options_are_one_line_and_write_nothing(store_path, tmp_path, capfd, options, message):
    line = failure(capfd, "distill", store_path, "--into", "decoder", "--out", tmp_path / "d", *options)
    assert message in line
    assert not list(tmp_path.iterdir())


def test_occupied_folder_and_options_of_the_wrong_kind_are_refused(store_path, models, tmp_path, capfd):
    start = ("distill", store_path, "--into", "decoder")
    assert "creates a new folder: give --out" in failure(capfd, *start)
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", store_path):
        assert "is not a decoder. Choose another --out" in failure(capfd, *start, "--out", place, "--beta", 0.5)
    assert (tmp_path / "file").read_text() == "mine"
    line = failure(capfd, *start, "--out", models / "decoder", "--learning-rate", 0.5)
    assert "trained with another" in line
    decoders = ("--init", "x", "--layers", 1, "--beta", 0.5, "--k", 1, "--knn-temperature", 1, "--exclude", "self")
    decoders += ("--teacher", "x", "--learning-rate", 1, "--batch-tokens", 1, "--accumulate", 1, "--context", 1)
    for into in ("output", "keys"):
        line = failure(capfd, "distill", store_path, "--into", into, "--out", tmp_path / "o", *decoders, "--valid", "x")
        for name in (*decoders[::2], "--valid"):
            assert name in line
        assert f"to --into decoder, not to --into {into}" in line
