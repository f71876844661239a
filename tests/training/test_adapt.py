"""Adapting to a text in one command: its figures by other means, through interruptions, and wherever it is moved."""

from __future__ import annotations

import json
import math
import resource
import shutil
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf

import knnlm as library
from helpers import oracle
from helpers.cli import failure, knnlm
from helpers.models import VOCABULARY, randomise, tiny_tokenizer
from helpers.stores import BESIDE, documents
from helpers.training import fit_adaptation
from knnlm.cli.train import perplexity, selection_rows
from knnlm.corpus import Document
from knnlm.datastore.catalog import LANGUAGE_MODEL, Catalog
from knnlm.datastore.rewrite import derive
from knnlm.datastore.schema import CATALOG_FILE, DECODER_FOLDER
from knnlm.datastore.store import Datastore
from knnlm.errors import CorpusError, DatastoreCorrupt, DatastoreError, ParameterError
from knnlm.generation.causal import KnnForCausalLM
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.lm.fingerprint import tokenizer_fingerprint
from knnlm.memories.decoder import load_card
from knnlm.mixture.mixture import Mixture
from knnlm.training import adapt as adapt_module
from knnlm.training import decoder_trainer
from knnlm.training.adapt import MEMORIES, load_adaptation
from knnlm.training.data import TokenStream
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.initial_model import open_initial_model

QUICK = {"epochs": 2, "batch_tokens": 512, "learning_rate": 3e-3, "device": "cpu"}
OPTIONS = ("--epochs", 2, "--batch-tokens", 512, "--learning-rate", 0.003, "--no-select")
TEXT = documents(24)


@pytest.fixture(scope="module")
def base(model_folder):
    """The model, by a name that it can be opened by again."""
    return CausalLM.open(str(model_folder), device="cpu")


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    """A finished adaptation, shared and not to be changed, and its result."""
    out = tmp_path_factory.mktemp("adapted") / "out"
    return out, fit_adaptation(TEXT, out, lm=base, **QUICK)


@pytest.fixture
def copied(adapted, tmp_path):
    return shutil.copytree(adapted[0], tmp_path / "elsewhere")


@pytest.fixture
def texts(tmp_path):
    """The text as files, and a held-out one."""
    (tmp_path / "docs").mkdir()
    for number, document in enumerate(TEXT):
        (tmp_path / "docs" / f"{number:02}.txt").write_text(document.text)
    (tmp_path / "valid.txt").write_text("\n".join(one.text for one in documents(3, start=60)))
    return tmp_path


def held_out(out):
    """The documents that are not in the store."""
    store = Datastore.open(out)
    return [document for document in TEXT if not store.holds(document.text)]


def without_time(result):
    """The result without the time it took."""
    return {name: value for name, value in vars(result).items() if name != "seconds"}


def log_p(folder, tokens):
    """What a plain transformers model gives to each token."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    module = model.model.layers[-1].mlp
    _, probs = oracle.read_token_by_token(model, module, tokens, start_token=1, context=128, stride=64)
    return probs[range(len(tokens)), tokens]


# ---------------------------------------------------------------------------------------------------------- figures


def test_figures_match_plain_models_and_evaluations(adapted, base, model_folder, tmp_path):
    out, result = adapted
    kept = held_out(out)
    tokens = base.encode_all([document.text for document in kept])
    p_base, p_decoder = (
        np.concatenate([log_p(folder, one) for one in tokens]) for folder in (model_folder, out / "decoder")
    )
    assert result.base == pytest.approx(oracle.perplexity(p_base), rel=1e-4)
    assert result.fine_tuned == pytest.approx(oracle.perplexity(p_decoder), rel=1e-4)
    assert result.fine_tuned < result.base / 2
    grid = [oracle.perplexity(oracle.mix(p_base, p_decoder, weight)) for weight in np.linspace(0, 1, 2001)]
    assert result.decoder == pytest.approx(min(grid), rel=1e-4)
    assert result.decoder_lambda == pytest.approx(np.argmin(grid) / 2000, abs=2e-3)
    assert (result.held_out_documents, result.held_out_tokens) == (len(kept), sum(map(len, tokens)))
    assert (result.leaked_documents, result.model) == (0, str(model_folder))

    # The store alone by a sweep over a trace of its own: one λ of a grid, so never better than the best.
    trace = Mixture.open(out, base, memories="knn", use_tuned=False).record(kept, tmp_path / "trace", k=1024)
    on_grid = trace.sweep().best[3]
    assert result.knn <= on_grid * (1 + 1e-6)
    assert result.knn == pytest.approx(on_grid, rel=1e-2)
    mixture = Mixture.open(out)
    assert (mixture.weights.kind, ",".join(mixture.labels)) == ("gated", MEMORIES)
    assert [model.name for model in mixture.readers.models] == [str(model_folder), str(out / "decoder")]
    # Networks that saw the documents do no worse on them than those that did not.
    assert mixture.evaluate(kept).perplexity <= result.everything * 1.02
    assert result.everything < min(result.base, result.fine_tuned, result.decoder)
    assert load_adaptation(out) == result


def test_held_out_documents_are_neither_stored_nor_trained_on(adapted, base):
    out, result = adapted
    store = Datastore.open(out)
    kept = held_out(out)
    learnt = [document for document in TEXT if document not in kept]
    assert 0 < len(kept) < 6
    assert [stored.id for stored in store.catalog.documents()] == [document.id for document in learnt]
    card = load_card(out / "decoder")
    tokens = TokenStream.from_documents(base.encode_all([document.text for document in learnt]))
    assert (card.text, card.tokens) == (tokens.fingerprint, len(tokens.tokens))
    assert (result.tokens, card.beta, card.teacher) == (len(tokens.tokens), 0.0, None)
    assert (card.lmbda, card.lmbda_metadata["perplexity"]) == (result.decoder_lambda, result.decoder)


def test_copies_of_a_text_are_held_out_together(base, tmp_path):
    twice = [Document(id=f"{one.id}-{n}", source=one.source, text=one.text) for n in range(2) for one in documents(8)]
    result = fit_adaptation(twice, tmp_path / "out", lm=base, **{**QUICK, "epochs": 1})
    kept = [one for one in twice if not Datastore.open(tmp_path / "out").holds(one.text)]
    assert result.leaked_documents == 0
    assert len(kept) == 2 * len({one.text for one in kept}) == result.held_out_documents


def test_document_that_is_most_of_the_text_is_trained_on(base, tmp_path):
    long, short = documents(1, words=200)[0], documents(1, words=20, start=3)[0]
    empty = Document(id="empty", source="empty", text="")
    for seed in range(3):
        out = tmp_path / str(seed)
        result = fit_adaptation([long, empty, short], out, lm=base, seed=seed, layers=1, **{**QUICK, "epochs": 1})
        assert result.held_out_tokens == len(base.encode(short.text))
        assert Datastore.open(out).holds(long.text)


BOOK = Document(id="book", source="book.txt", text="\n".join(document.text for document in documents(24)))
LINES = [replace(line, id=f"line {number}") for number, line in enumerate(documents(60, words=3))]


@pytest.mark.parametrize(
    ("corpus", "select"), [(documents(10), False), ([BOOK], True), (LINES, True)], ids=["ten", "one", "lines"]
)
def test_corpora_of_any_shape_are_split_trained_on_and_tuned(base, tmp_path, corpus, select):
    out, options = tmp_path / "out", {**QUICK, "epochs": 1, "layers": 1, "select": select}
    result = fit_adaptation(corpus, out, lm=base, **options)
    assert all(math.isfinite(value) for value in vars(result).values() if isinstance(value, float))
    assert result.leaked_documents == 0
    everything = sum(map(len, base.encode_all([document.text for document in corpus])))
    assert 0.05 <= result.held_out_tokens / everything <= 0.2
    stored = [document.id for document in Datastore.open(out).documents()]
    if corpus == [BOOK]:
        assert stored == ["book#1", "book#2"]
        assert result.tokens + result.held_out_tokens == pytest.approx(everything, abs=10)
    assert fit_adaptation(corpus, out, lm=base, **options) == result  # the split is the same: the run is finished


def test_part_of_one_document_that_is_held_out_depends_on_the_seed_and_the_limit(base):
    text = "".join(chr(97 + number % 26) * (number % 9 + 1) + " " * (number % 4 > 0) for number in range(600))
    book = Document(id="book", source="book.txt", text=text)
    held = set()
    for seed in range(5):
        splits = adapt_module._split([book], base, seed, 60_000)
        parts = [document.text for document in splits.training]
        (out,) = splits.held_out
        assert parts[0] + out.text + (parts[1] if len(parts) > 1 else "") == text
        assert parts[0]
        assert 0.05 < len(out.text) / len(text) < 0.2
        assert out.text[0].isspace()
        held.add(out.text)
        few = adapt_module._split([book], base, seed, 30)
        assert 0 < few.held_out_tokens < 150
    assert len(held) == 5
    copied = adapt_module._split([BOOK, replace(BOOK, id="copy")], base, 0, 60_000)
    assert [document.id for document in copied.training] == ["book#1", "book#2", "copy#1", "copy#2"]
    assert [document.text for document in copied.training[:2]] == [document.text for document in copied.training[2:]]
    assert len(copied.held_out) == 1
    without_spaces = Document(id="x", source="x", text="xyz" * 2000)
    assert len(adapt_module._split([without_spaces], base, 0, 60_000).training) == 2


# --------------------------------------------------------------------------------------------------------- resuming


class StoppedError(Exception):
    pass


def stopping(what, after):
    """Progress that raises in the middle of one stage."""

    @contextmanager
    def progress(stage, *, total=None, unit="tokens"):
        left = [after]

        def advance(count):
            if stage == what:
                left[0] -= 1
                if left[0] < 0:
                    raise StoppedError(stage)

        yield advance

    return progress


@pytest.mark.parametrize("stage", ["training", "reading", "tracing"])
def test_run_stopped_in_any_stage_resumes_to_the_same_result(adapted, base, tmp_path, stage):
    out, right = tmp_path / "out", adapted[1]
    with pytest.raises(StoppedError, match=stage):
        fit_adaptation(
            TEXT, out, lm=base, progress=stopping(stage, 3 if stage == "training" else 0), checkpoint_every=0, **QUICK
        )
    assert load_adaptation(out) is None
    assert (out / "decoder").exists() == (stage != "training")
    assert without_time(fit_adaptation(TEXT, out, lm=base, **QUICK)) == without_time(right)
    names = sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.name not in BESIDE)
    wanted = (str(file.relative_to(adapted[0])) for file in adapted[0].rglob("*") if file.name not in BESIDE)
    assert names == sorted(wanted)
    for name in ("decoder/model.safetensors", "segments/000000/keys.npy"):
        assert (out / name).read_bytes() == (adapted[0] / name).read_bytes()


def test_finished_adaptation_is_not_repeated_and_other_text_is_refused(adapted, copied, base):
    before = {file: file.stat().st_mtime_ns for file in copied.rglob("*") if file.suffix in (".json", ".npy", ".db")}
    stages = []

    @contextmanager
    def watching(stage, *, total=None, unit="tokens"):
        stages.append(stage)
        yield [].append

    assert fit_adaptation(TEXT, copied, lm=base, progress=watching, **QUICK) == adapted[1]
    assert stages == []
    assert {file: file.stat().st_mtime_ns for file in before} == before
    for other in (documents(23), [*TEXT[:5], documents(1, start=90)[0], *TEXT[6:]]):
        with pytest.raises(DatastoreError, match="another text"):
            fit_adaptation(other, copied, lm=base, **QUICK)
    with pytest.raises(DatastoreError, match="another epochs"):
        fit_adaptation(TEXT, copied, lm=base, **{**QUICK, "epochs": 1})
    # Tuning on less is another tuning of the same store.
    kept = held_out(copied)
    learnt = [document for document in TEXT if document not in kept]
    again = fit_adaptation(learnt, copied, lm=base, held_out=kept, limit=20, progress=watching, **QUICK)
    assert again.held_out_tokens < adapted[1].held_out_tokens
    assert set(stages) & {"training", "reading"} == set()
    (copied / "adapted.json").write_text('{"model": 5}')
    with pytest.raises(DatastoreCorrupt, match=r"adapted.json cannot be read"):
        load_adaptation(copied)


# ----------------------------------------------------------------------------------------------------------- places


def test_occupied_folder_is_refused_before_anything_is_trained(base, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    occupied = build(TEXT, tmp_path / "docs.store", lm=base).path
    for place, message in (("file", "is a file"), ("full", "contains notes.txt"), ("docs.store", "is a store already")):
        with pytest.raises(DatastoreError, match=message):
            fit_adaptation(TEXT, tmp_path / place, lm=base, **QUICK)
    assert not (occupied / "decoder.partial").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs.store", "file", "full"]


def test_full_disk_is_a_library_error_and_the_run_resumes_afterwards(base, tmp_path):
    """A limit on the size of files, which the weights of the decoder exceed, fails as a full disk does."""
    options = {**QUICK, "layers": 1, "epochs": 1}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(DatastoreError, match="decoder"):
            fit_adaptation(TEXT, tmp_path / "out", lm=base, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert math.isfinite(fit_adaptation(TEXT, tmp_path / "out", lm=base, **options).everything)


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (TEXT[:1], {}, ParameterError, "One document alone cannot be split: give text to tune on with --valid"),
        ([TEXT[0], TEXT[0]], {}, ParameterError, "One document alone"),
        ([], {}, CorpusError, "no text to learn"),
        (TEXT, {"held_out": []}, CorpusError, "no text to tune on"),
        ([], {"held_out": TEXT[:1]}, CorpusError, "no text to learn"),
        (TEXT, {"limit": 0}, ParameterError, "limit must be at least 1"),
        (TEXT, {"learning_rate": -1.0}, ParameterError, "learning_rate must be above 0"),
        (TEXT, {"layers": 7}, ParameterError, "layers must be from 1 to 3"),
        (TEXT, {"initial_model": "/nowhere"}, library.KnnlmError, "Cannot open the model /nowhere"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_written(base, tmp_path, given, options, error, message):
    with pytest.raises(error, match=message):
        fit_adaptation(given, tmp_path / "out", lm=base, **{**QUICK, **options})
    assert not (tmp_path / "out").exists()


def test_decoder_of_another_tokenizer_is_refused_with_both_fingerprints(base, model_folder, tmp_path):
    other = shutil.copytree(model_folder, tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["nonsense"])
    tokenizer.save_pretrained(other)
    with pytest.raises(library.KnnlmError) as caught:
        fit_adaptation(TEXT, tmp_path / "out", lm=base, initial_model=str(other), **QUICK)
    assert tokenizer_fingerprint(tokenizer) in str(caught.value)
    assert base.identity["tokenizer"] in str(caught.value)


# ----------------------------------------------------------------------------------------------------- other decoders


def test_decoder_with_a_shorter_context_limits_the_windows_of_the_store(base, tmp_path, capfd):
    config = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"intermediate_size": 32, "max_position_embeddings": 64, "vocab_size": 9}
    (tmp_path / "small.json").write_text(json.dumps(config))
    result = fit_adaptation(TEXT, tmp_path / "out", lm=base, initial_model=str(tmp_path / "small.json"), **QUICK)
    decoder = hf.AutoConfig.from_pretrained(tmp_path / "out" / "decoder")
    assert (decoder.num_hidden_layers, decoder.vocab_size) == (1, VOCABULARY)
    assert Datastore.open(tmp_path / "out").window == {"context": 64, "stride": 32}
    assert math.isfinite(result.everything)
    assert knnlm(capfd, "eval", tmp_path / "out", "--json", write(tmp_path / "t.txt", documents(1, start=60)))[0] == 0


def write(path, some):
    path.write_text("\n".join(document.text for document in some))
    return path


def test_model_with_a_shorter_context_limits_the_windows_of_the_store(tmp_path):
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    special = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    for name, longest in (("short", 32), ("far", 96)):
        config = hf.LlamaConfig(**shape, **special, max_position_embeddings=longest)
        randomise(lambda config=config: hf.AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    lm = CausalLM.open(str(tmp_path / "short"), device="cpu")
    fit_adaptation(TEXT, tmp_path / "out", lm=lm, initial_model=str(tmp_path / "far"), **QUICK)
    assert Datastore.open(tmp_path / "out").window["context"] == 32


# -------------------------------------------------------------------------------------------------------- commands


def test_every_command_takes_an_adapted_store(texts, model_folder, base, capfd, monkeypatch):
    monkeypatch.chdir(texts)
    start = ("adapt", "docs", "--out", "out", "--model", model_folder, *OPTIONS, "--layers", 2)
    code, out, err = knnlm(capfd, *start)
    assert code == 0, err
    metadata = json.loads(knnlm(capfd, *start, "--json")[1])
    figures = ("base", "fine_tuned", "knn", "decoder", "everything")
    for name in figures:
        assert f"{metadata[name]:.3f}" in out
    assert metadata["out"] == "out"
    assert "knnlm eval out/decoder TEXT" in " ".join(out.split())
    read = [document.text.strip() for document in library.read_documents(str(texts / "docs"))]
    assert sorted(read) == sorted(document.text for document in TEXT)

    shutil.move("out", "moved")  # and the model is where it was
    code, out, err = knnlm(capfd, "eval", "moved", "valid.txt", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [memory["name"] for memory in found["memories"]] == MEMORIES.split(",")
    assert (found["weights"], found["leaked_documents"]) == ("gated", 0)
    assert found["perplexity"] < found["base_perplexity"]
    assert found["base_perplexity"] == pytest.approx(
        Mixture.open("moved/decoder", base, lmbda=0.0).evaluate(library.read_documents("valid.txt")).perplexity,
        rel=1e-5,
    )
    code, out, err = knnlm(capfd, "generate", "moved", "The memory of", "--max-new-tokens", 3, "--json")
    assert code == 0, err
    assert json.loads(out)["tokens"] <= 3
    explained = json.loads(knnlm(capfd, "explain", "moved", "The memory of", "--json")[1])["tokens"]
    assert [share["memory"] for share in explained[-1]["shares"]] == MEMORIES.split(",")
    code, out, err = knnlm(capfd, "eval", "moved/decoder", "valid.txt", "--json")
    assert code == 0, err
    assert json.loads(out)["lambda"] == metadata["decoder_lambda"]


def test_info_shows_the_table_and_tune_keeps_the_decoder(copied, adapted, texts, capfd, model_folder):
    result = adapted[1]
    words = " ".join(knnlm(capfd, "info", copied)[1].split())
    for figure in (result.base, result.fine_tuned, result.knn, result.decoder, result.everything):
        assert f"{figure:.3f}" in words
    assert f"for{model_folder}" in words.replace(" ", "")  # a long path is folded
    found = json.loads(knnlm(capfd, "info", copied, "--json")[1])
    assert found["adapted"] == vars(result)
    assert found["language_model"] == str(model_folder)
    code, out, err = knnlm(capfd, "tune", copied, texts / "valid.txt", "--json")
    assert code == 0, err
    memories = json.loads(out)["memories"]
    assert {(memory["kind"], memory["path"]) for memory in memories} == {
        ("knn", None), ("cache", None), ("ngram", None), ("decoder", "decoder"),
    }  # fmt: skip
    assert len(json.loads(knnlm(capfd, "eval", copied, texts / "valid.txt", "--json")[1])["memories"]) == 4


def test_drop_known_uses_the_language_model_and_not_the_decoder(copied, base, tmp_path, capfd):
    """Not of the decoder, which made the keys."""
    options = ("--drop-known", 0.05, "--json")
    found = [
        json.loads(knnlm(capfd, "prune", copied, "--out", tmp_path / name, *options, *more)[1])["dropped"]
        for name, more in (("a", ()), ("b", ("--model", base.name)), ("c", ("--model", copied / "decoder")))
    ]
    assert found[0] == found[1] < found[2]


def test_valid_is_tuned_on_and_leaked_documents_are_reported(texts, model_folder, base, capfd):
    start = ("adapt", texts / "docs", "--out", texts / "out", "--model", model_folder, *OPTIONS, "--layers", 1)
    valid = ("--valid", texts / "valid.txt")
    code, out, err = knnlm(capfd, *start, *valid, "--json")
    assert code == 0, err
    metadata = json.loads(out)
    assert metadata["tokens"] == Datastore.open(texts / "out").entry_count
    assert metadata["tokens"] == sum(
        map(len, base.encode_all([one.text for one in library.read_documents(str(texts / "docs"))]))
    )
    assert metadata["held_out_tokens"] == len(base.encode((texts / "valid.txt").read_text()))
    code, out, err = knnlm(capfd, *start, "--valid", texts / "docs" / "00.txt")
    assert code == 0, err
    assert "WARNING" in out
    assert "1 of 1 document are in the store itself" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--learning-rate", 0), "learning rate must be above 0, not 0"),
        (("--learning-rate", "inf"), "learning rate must be above 0"),
        (("--epochs", 0), "--epochs"),
        (("--limit", 0), "--limit"),
        (("--layers", 9), "layers must be from 1 to 3"),
        (("--valid", "/nowhere.txt"), "/nowhere.txt"),
        (("--init", "/nowhere.json"), "/nowhere.json"),
        (("--device", "abacus"), "Unknown device 'abacus'"),
        (("--seed", -1), "--seed"),
    ],
    ids=str,
)
def test_wrong_options_are_a_one_line_error_and_write_nothing(texts, model_folder, capfd, options, message):
    line = failure(capfd, "adapt", texts / "docs", "--out", texts / "out", "--model", model_folder, *options)
    assert message in line
    assert not (texts / "out").exists()


def test_one_document_and_an_occupied_folder_are_one_line_errors(texts, model_folder, capfd):
    start = ("adapt", texts / "valid.txt", "--model", model_folder)
    assert "--valid" in failure(capfd, *start, "--out", texts / "out")
    assert "is a file" in failure(capfd, *start, "--out", texts / "valid.txt")
    assert "/nowhere" in failure(capfd, "adapt", "/nowhere", "--out", texts / "out")


def test_message_after_ctrl_c_names_the_command_that_resumes(texts, model_folder, capfd, monkeypatch):
    from knnlm.training.decoder_trainer import DecoderTrainer

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(DecoderTrainer, "run", interrupted)
    code, out, err = knnlm(capfd, "adapt", texts / "docs", "--out", texts / "out", "--model", model_folder)
    assert (code, out) == (130, "")
    assert "training at the last checkpoint" in err


# ---------------------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("together", [False, True])
def test_adapted_model_is_saved_and_opened_again(copied, tmp_path, together):
    ids = torch.tensor([[1, 40, 41, 90, 7]])
    saved = KnnForCausalLM(Mixture.open(copied))
    saved.save_pretrained(tmp_path / "saved", copy_store=together)
    with torch.no_grad():
        right = saved(input_ids=ids).logits
        if together:
            shutil.rmtree(copied)
        again = KnnForCausalLM.from_pretrained(tmp_path / "saved")
        torch.testing.assert_close(again(input_ids=ids).logits, right)
    assert again.mixture.weights.kind == "gated"


def test_copy_is_for_the_same_model_and_opens_each_model_once(copied, base, tmp_path, monkeypatch):
    derive(Datastore.open(copied), tmp_path / "derived", keep=torch.arange(0, 50)).close()
    opened = []
    original = CausalLM.open.__func__

    def counting(cls, name, **options):
        opened.append(str(name))
        return original(cls, name, **options)

    monkeypatch.setattr(CausalLM, "open", classmethod(counting))
    mixture = Mixture.open(copied)
    assert opened == [base.name, str(copied / DECODER_FOLDER)]  # not the one that it is a copy of
    assert [model.name for model in mixture.readers.models] == [base.name, str((copied / DECODER_FOLDER).resolve())]
    assert Mixture.open(tmp_path / "derived").lm.name == base.name


@pytest.mark.parametrize("value", [5, "", ["x"]])
def test_store_with_an_invalid_language_model_is_corrupt(copied, base, value):
    catalog = Catalog.open(copied / CATALOG_FILE, write=True)
    catalog.put(**{LANGUAGE_MODEL: value})
    catalog.close()
    with pytest.raises(DatastoreCorrupt, match="the name of its language model is invalid"):
        Mixture.open(copied)
    assert Mixture.open(copied, base).lm is base


@pytest.mark.parametrize(("value", "words"), [(21.88049, "21.880"), (999_999.0, "999999.000"), (1.7e15, "1.7e+15")])
def test_perplexity_is_formatted_without_meaningless_digits(value, words):
    assert perplexity(value) == words


def test_selection_of_a_decoder_that_was_trained_before_averages_is_shown():
    chosen = {"learning_rate": 2e-4, "epochs": 1, "interpolation": 0.85}
    trials = [{"learning_rate": None, "epochs": 0.0, "loss": 2.0}, {"learning_rate": 2e-4, "epochs": 1, "loss": 1.0}]
    selection = {"trials": trials, "interpolations": [], "chosen": chosen}
    wanted = "rate 0.0002, 1 epochs, 0.85 of the change"
    assert selection_rows(selection) == [("rate 0.0002, 1 epochs", "2.718"), ("chosen", wanted)]
    averaged = {**selection, "chosen": {**chosen, "average": 0.5}}
    assert selection_rows(averaged)[-1] == ("chosen", f"{wanted}, averaged with the second best")


def test_selection_is_shown_recorded_and_chosen_on_the_held_out_text(texts, model_folder, capfd):
    out = texts / "out"
    arguments = ("adapt", texts / "docs", "--out", out, "--model", model_folder, *OPTIONS[:-1])
    status, shown, _ = knnlm(capfd, *arguments)
    assert status == 0
    selection = load_card(out / DECODER_FOLDER).selection
    tried = [trial for trial in selection["trials"] if trial["learning_rate"] is not None]
    assert [trial["learning_rate"] for trial in tried[:3]] == pytest.approx([0.003, 0.006, 0.012])
    for trial in tried:
        assert perplexity(math.exp(trial["loss"])) in shown
    assert "chosen" in shown
    result = json.loads(knnlm(capfd, *arguments, "--json")[1])
    assert result["selection"] == selection
    best = min(loss for _, loss in selection["interpolations"])
    assert result["fine_tuned"] == pytest.approx(math.exp(best), rel=0.05)  # read in other windows
    decoder = texts / "distilled"
    flags = ("--into", "decoder", "--out", decoder, "--lora", 2, "--epochs", 1, "--model", model_folder)
    found = json.loads(knnlm(capfd, "distill", out, *flags, "--json")[1])
    assert found["selection"] == load_card(decoder).selection
    assert [trial["learning_rate"] for trial in found["selection"]["trials"][1:3]] == [1e-3, 2e-3]
    assert found["settings"]["lora"] == 2
    assert not (texts / "out.first").exists()
    assert 0 < found["held_out_tokens"] < found["tokens"] / 4
    assert (decoder / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("flags", "rank", "found"),
    [((), 16, 16), (("--lora", 0), 16, 0), (("--lora", 3), 16, 3), (("--top", 1), 16, 0), (("--layers", 1), 16, 0)],
)
def test_on_a_cpu_adapters_are_trained_unless_something_else_is_asked_for(
    texts, model_folder, capfd, flags, rank, found
):
    out = texts / "out"
    arguments = ("adapt", texts / "docs", "--out", out, "--model", model_folder, *OPTIONS, *flags)
    status, shown, _ = knnlm(capfd, *arguments)
    assert status == 0
    card = load_card(out / DECODER_FOLDER)
    assert (card.settings["lora"] or 0) == found
    assert (out / DECODER_FOLDER / "adapter_model.safetensors").is_file() == bool(found)
    assert (f"adapters of rank {found}" in shown) == bool(found)


def test_decoder_of_another_machine_is_found_where_its_kind_is_automatic(texts, model_folder, capfd, monkeypatch):
    out = texts / "out"
    arguments = ("adapt", texts / "docs", "--out", out, "--model", model_folder, *OPTIONS[:4], "--no-select", "--json")
    result = knnlm(capfd, *arguments)[1]
    assert load_card(out / DECODER_FOLDER).settings["lora"] == 16
    monkeypatch.setattr(decoder_trainer, "automatic_rank", lambda *_: 0)  # as on a GPU
    assert knnlm(capfd, *arguments)[1] == result
    status, _, error = knnlm(capfd, *arguments, "--lora", 0)
    assert status == 2
    assert "another learning rate" in error or "another lora" in error


def test_without_peft_all_weights_are_trained(lm, model_folder, monkeypatch):
    initial = open_initial_model(str(model_folder), like=lm)
    config, cpu = DecoderConfig(lora=None), torch.device("cpu")
    text = TokenStream.from_documents([[5] * 40])
    assert config.resolve(text, initial, cpu).lora == 16
    assert config.resolve(text, initial, cpu).learning_rate == 1e-3
    monkeypatch.setattr(decoder_trainer, "find_spec", lambda _: None)
    assert config.resolve(text, initial, cpu).lora == 0
    assert config.resolve(text, initial, cpu).learning_rate == 2e-4


def test_store_of_the_models_own_keys_can_be_used_during_the_training(texts, base, model_folder, capfd, monkeypatch):
    out, first = texts / "out", texts / "out.first"
    arguments = ("adapt", texts / "docs", "--out", out, "--model", model_folder, "--store-first", *OPTIONS)
    seen = []

    def train(*_, **__):
        mixture = Mixture.open(first)
        seen.append(mixture.evaluate([Document("one", "", "The memory of a model is read.")], limit=20).perplexity)
        raise KeyboardInterrupt

    monkeypatch.setattr("knnlm.training.adapt.train_decoder", train)
    status, _, _ = knnlm(capfd, *arguments)
    assert status == 130
    assert seen[0] > 1
    monkeypatch.undo()
    fingerprint = Datastore.open(first).fingerprint
    status, _, _ = knnlm(capfd, *arguments)
    assert status == 0
    assert Datastore.open(first).fingerprint == fingerprint
    stored, own = Datastore.open(out), Datastore.open(first)
    assert [document.sha256 for document in stored.documents()] == [document.sha256 for document in own.documents()]
    assert own.model["weights"] == base.identity["weights"] != stored.model["weights"]
