"""Commands on pairs: build, add, remove, index, tune, eval, explain, and errors of one line."""

from __future__ import annotations

import io
import json
import shutil

import pytest
import torch

from helpers.cli import failure, knnlm
from helpers.models import pair_tokenizer, tiny
from helpers.pairs import BruteForce, pairs, write_jsonl, write_tsv
from knnlm.cli.app import run
from knnlm.datastore.store import Datastore
from knnlm.evaluation import odds
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.mixture.mixture import Mixture

STORED, VALID, TEST = pairs(30), pairs(10, start=60), pairs(8, start=90)


@pytest.fixture(scope="module", params=["marian", "t5"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    """A model, pairs in every format, and a store of them."""
    folder = tmp_path_factory.mktemp(family)
    tiny(family).save_pretrained(folder / "model")
    pair_tokenizer(family).save_pretrained(folder / "model")
    write_jsonl(folder / "stored.jsonl", STORED)
    write_tsv(folder / "valid.tsv", VALID)
    (folder / "test.en").write_text("".join(f"{each.text}\n" for each in TEST))
    (folder / "test.de").write_text("".join(f"{each.source_text}\n" for each in TEST))
    (folder / "plain.txt").write_text("A text without a source.")
    build = ["build", folder / "stored.jsonl", "--out", folder / "pairs.store", "--model", folder / "model"]
    assert run([str(argument) for argument in build]) == 0
    return folder


def test_eval_of_two_files_agrees_with_brute_force(family, folder, capfd):
    arguments = ["--k", 4, "--knn-temperature", 3, "--lambda", 0.5, "--json"]
    code, out, _ = knnlm(
        capfd, "eval", folder / "pairs.store", folder / "test.en", "--source", folder / "test.de", *arguments
    )
    assert code == 0
    result = json.loads(out)
    # Opened from the folder: positions of Marian are not saved.
    brute_force = BruteForce(Seq2SeqLM.open(str(folder / "model")), family, STORED)
    settings = {"k": 4, "knn_temperature": 3.0}
    assert result["perplexity"] == pytest.approx(brute_force.perplexity(TEST, lmbda=0.5, **settings), rel=2e-3)
    assert result["base_perplexity"] == pytest.approx(brute_force.perplexity(TEST, lmbda=0.0, **settings), rel=1e-4)
    assert result["documents"] == len(TEST)


def test_all_formats_give_the_same_figures(folder, tmp_path, capfd):
    write_tsv(tmp_path / "t.tsv", TEST)
    write_jsonl(tmp_path / "t.jsonl", TEST, source="german", text="english")
    inputs = [
        [tmp_path / "t.tsv"],
        [tmp_path / "t.jsonl", "--source-field", "german", "--text-field", "english"],
        [folder / "test.en", "--source", folder / "test.de"],
    ]
    figures = set()
    for given in inputs:
        code, out, _ = knnlm(capfd, "eval", folder / "pairs.store", *given, "--json")
        assert code == 0
        figures.add(json.loads(out)["perplexity"])
    assert len(figures) == 1


def test_store_of_pairs_is_changed_indexed_tuned_and_evaluated(folder, tmp_path, capfd):
    store = tmp_path / "living.store"
    code, _, _ = knnlm(
        capfd, "build", write_tsv(tmp_path / "a.tsv", STORED), "--out", store, "--model", folder / "model"
    )
    assert code == 0
    code, out, _ = knnlm(capfd, "add", store, write_jsonl(tmp_path / "b.jsonl", [*STORED[:2], *VALID[:3]]), "--json")
    assert code == 0
    assert (json.loads(out)["documents"], json.loads(out)["skipped"]) == (3, 2)
    code, out, _ = knnlm(capfd, "remove", store, "--document", VALID[0].id, "--json")
    assert code == 0
    code, out, _ = knnlm(capfd, "documents", store, "--document", VALID[1].id, "--json")
    assert json.loads(out)["documents"][0]["source_text"] == VALID[1].source_text
    for command in (["compact"], ["index"], ["verify", "--deep"]):
        code, _, _ = knnlm(capfd, command[0], store, *command[1:])
        assert code == 0
    code, out, err = knnlm(capfd, "tune", store, folder / "valid.tsv", "--k", "1,4", "--json")
    assert code == 0, err
    assert [memory["kind"] for memory in json.loads(out)["memories"]] == ["knn", "ngram"]
    code, out, _ = knnlm(capfd, "eval", store, folder / "test.en", "--source", folder / "test.de")
    assert code == 0
    assert "gated" in out
    code, out, _ = knnlm(capfd, "info", store)
    assert code == 0


def test_store_of_pairs_is_tuned_on_a_trace(folder, tmp_path, capfd):
    trace, valid = tmp_path / "trace", write_tsv(tmp_path / "valid.tsv", pairs(40, start=120))
    arguments = ["--memories", "knn,ngram", "--save-trace", trace, "--json"]
    code, out, _ = knnlm(capfd, "eval", folder / "pairs.store", valid, *arguments)
    assert code == 0
    code, _, err = knnlm(capfd, "tune", folder / "pairs.store", "--trace", trace, "--weights", "fitted", "--k", "1,4")
    assert code == 0, err
    code, out, err = knnlm(capfd, "eval", folder / "pairs.store", valid, "--support", "--json")
    assert code == 0, err
    assert json.loads(out)["weights"] == "fitted"


def test_explain_shows_sources(folder, capfd):
    pair = TEST[0]
    arguments = ["explain", folder / "pairs.store", pair.text, "--source", pair.source_text, "--top", 1]
    code, out, _ = knnlm(capfd, *arguments, "--json")
    assert code == 0
    result = json.loads(out)
    assert result["source"] == pair.source_text
    stored = list(Datastore.open(folder / "pairs.store").documents())
    sources = {each.source_text for each in stored}
    assert all(neighbour["source_text"] in sources for token in result["tokens"] for neighbour in token["neighbours"])
    code, out, _ = knnlm(capfd, *arguments)
    assert code == 0
    shown = "".join(out.split())
    assert any("".join(f"{each.source}: {each.source_text}".split()) in shown for each in stored)
    for empty in ("", " \n"):
        line = failure(capfd, "explain", folder / "pairs.store", pair.text, "--source", empty)
        assert "The text has an empty source. Give the text of which it is the target." in line
    assert "give the source of the text too" in failure(capfd, "explain", folder / "pairs.store", pair.text)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("plain.txt", [], "plain.txt: a text without a source, but an encoder-decoder model reads pairs."),
        ("stored.jsonl", ["--source-field", "src"], "no field 'src' among 'id', 'source', 'text'"),
        ("stored.jsonl", ["--text-field", "target"], "no field 'target' among 'id', 'source', 'text'"),
        ("test.en", ["--source", "valid.de"], "valid.de: cannot read it"),
        ("test.en", ["--source", "plain.txt"], "test.en has more lines than"),
        ("stored.jsonl", ["--subset", "0"], "subset must be at least 1 sentence, not 0."),
        ("stored.jsonl", ["--memories", "knn,cache"], "The cache looks for earlier positions of the same text"),
    ],
)
def test_wrong_pairs_are_errors_of_one_line(folder, capfd, monkeypatch, text, arguments, message):
    monkeypatch.chdir(folder)
    assert message in failure(capfd, "eval", "pairs.store", text, *arguments)


def test_decoder_only_model_refuses_pairs(folder, model_folder, store, tmp_path, capfd):
    build = ["build", "--out", tmp_path / "m", "--model", model_folder]
    line = failure(capfd, *build, folder / "test.en", "--source", folder / "test.de")
    assert "is a decoder-only model, which would not read the sources" in line
    assert "would not read the sources" in failure(capfd, *build, folder / "stored.jsonl", "--source-field", "source")
    assert "a .tsv file has pairs" in failure(capfd, *build, folder / "valid.tsv")
    line = failure(capfd, "eval", store.path, folder / "stored.jsonl", "--source-field", "source")
    assert "would not read the sources" in line
    # Without the option, a field of the record named source stays an ordinary field.
    assert knnlm(capfd, *build, folder / "stored.jsonl")[0] == 0
    assert next(Datastore.open(tmp_path / "m").documents()).fields["source"] == STORED[0].source_text


def test_languages_are_stored_and_used_again(tmp_path, capfd):
    tiny("m2m_100").save_pretrained(tmp_path / "nllb")
    pair_tokenizer("m2m_100").save_pretrained(tmp_path / "nllb")
    text, out = write_tsv(tmp_path / "a.tsv", STORED), tmp_path / "m"
    build = ["build", text, "--out", out, "--model", tmp_path / "nllb"]
    assert "--tgt-lang is missing" in failure(capfd, *build)
    assert "has no language 'Klingon'" in failure(capfd, *build, "--src-lang", "deu_Latn", "--tgt-lang", "Klingon")
    assert knnlm(capfd, *build, "--src-lang", "deu_Latn", "--tgt-lang", "eng_Latn")[0] == 0
    model = Datastore.open(out).model
    assert (model["src_lang"], model["tgt_lang"]) == ("deu_Latn", "eng_Latn")
    assert knnlm(capfd, "eval", out, write_tsv(tmp_path / "b.tsv", TEST))[0] == 0
    assert knnlm(capfd, "add", out, write_tsv(tmp_path / "c.tsv", VALID))[0] == 0
    assert "pairs of a source and a target, deu_Latn → eng_Latn" in knnlm(capfd, "info", out)[1]
    assert f"← {STORED[0].source_text}" in " ".join(knnlm(capfd, "documents", out, "--limit", 1)[1].split())
    lm = Seq2SeqLM.open(str(tmp_path / "nllb"), src_lang="deu_Latn", tgt_lang="eng_Latn")
    assert Datastore.open(out).model["start_token"] == lm.start_token


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["generate", "pairs.store", "Hello"], "it translates a source"),
        (
            ["chat", "pairs.store"],
            "pairs.store has pairs, which are translated and not chatted with. Use knnlm translate.",
        ),
        (["report", "pairs.store", "plain.txt", "--out", "r"], "store of pairs"),
        (["distill", "pairs.store", "--into", "decoder", "--out", "d", "--top", "1"], "top is for decoder-only models"),
        (["bench", "--quick", "--model", "model"], "The benchmark needs a decoder-only model"),
        (["adapt", "plain.txt", "--out", "x", "--model", "model"], "adapt needs a decoder-only model"),
    ],
)
def test_commands_without_a_meaning_for_pairs_say_so(folder, capfd, monkeypatch, command, message):
    monkeypatch.chdir(folder)
    assert message in failure(capfd, *command)


def test_translate_reads_a_text_a_file_or_standard_input(folder, tmp_path, capfd, monkeypatch):
    store, options = folder / "pairs.store", ["--k", 1, "--lambda", 0.99, "--max-new-tokens", 20]
    code, out, _ = knnlm(capfd, "translate", store, STORED[2].source_text, *options)
    assert code == 0
    mixture = Mixture.open(store, k=1, lmbda=0.99)
    right = mixture.translate([each.source_text for each in STORED[:4]], max_new_tokens=20)
    assert out == f"{right[2]}\n"
    lines = "\n".join([STORED[0].source_text, "", *(each.source_text for each in STORED[1:4])])
    (tmp_path / "text.de").write_text(lines + "\n")
    code, out, _ = knnlm(capfd, "translate", store, tmp_path / "text.de", *options, "--batch-size", 2)
    assert code == 0
    assert out.split("\n") == [right[0], "", *right[1:], ""]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    code, out, _ = knnlm(capfd, "translate", store, "-", *options, "--json")
    assert code == 0
    translations = json.loads(out)["translations"]
    assert [pair["text"] for pair in translations] == [right[0], "", *right[1:]]
    assert translations[0]["source"] == STORED[0].source_text
    assert [pair["stores"] for pair in translations] == [[str(store)], [], *[[str(store)]] * 3]
    code, out, _ = knnlm(capfd, "translate", store, STORED[0].source_text, "--no-memory", "--beams", 2, "--json")
    assert code == 0
    assert json.loads(out)["memory"] is False
    assert json.loads(out)["translations"][0]["stores"] == []
    (tmp_path / "blank.txt").write_text("\n \n")
    assert knnlm(capfd, "translate", store, tmp_path / "blank.txt")[:2] == (0, "\n\n")


@pytest.mark.parametrize("text", ["missing.txt", "./missing", "~/missing", "/tmp/missing", "a/b-c.de", "../x.y/z.json"])
def test_mistyped_file_is_not_translated(folder, capfd, text):
    line = failure(capfd, "translate", folder / "pairs.store", text)
    assert f"There is no file {text}." in line


@pytest.mark.parametrize("text", ["and/or", "a@b.com", "Wort.Das", "/help", "version.2", "你好.再见", "Anna.", "1.5"])
def test_words_with_dots_and_slashes_are_translated(folder, capfd, text):
    assert knnlm(capfd, "translate", folder / "pairs.store", text, "--max-new-tokens", 1)[0] == 0


def test_translate_says_which_texts_are_outside_the_domain(folder, capfd, monkeypatch):
    outside = monkeypatch.setattr
    outside(Mixture, "checks_sources", True)
    outside(Mixture, "outside_domain", lambda _, states, __: torch.arange(len(states)) == 0)
    lines = "\n".join(each.source_text for each in VALID[:3])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    code, _, err = knnlm(capfd, "translate", folder / "pairs.store", "-", "--max-new-tokens", 2)
    assert code == 0
    assert "note: 1 of 3 texts are outside the store's domain: the model alone" in " ".join(err.split())


def test_translate_needs_a_store_of_pairs(store, model_folder, capfd):
    line = failure(capfd, "translate", store.path, "A text", "--model", model_folder)
    assert "Only an encoder-decoder model translates" in line


def test_eval_measures_the_quality_of_translations(folder, capfd):
    given = ["eval", folder / "pairs.store", folder / "valid.tsv", "--limit", 20, "--k", 1, "--lambda", 0.9]
    code, out, err = knnlm(capfd, *given, "--quality", "--json")
    assert code == 0, err
    quality = json.loads(out)["quality"]
    assert 0 < quality["sentences"] < len(VALID)
    assert quality["bleu_signature"].startswith("nrefs:1")
    code, out, _ = knnlm(capfd, *given, "--quality")
    assert code == 0
    assert "BLEU" in out
    assert "chrF" in out
    assert "leave out --each" in failure(capfd, *given, "--quality", "--each")


def test_commands_search_a_subset(folder, store, model_folder, tmp_path, capfd):
    pairs_store, pair = folder / "pairs.store", STORED[4]
    sure = ["--k", 4, "--lambda", 0.99]
    code, out, err = knnlm(
        capfd, "translate", pairs_store, pair.source_text, *sure, "--subset", 1, "--max-new-tokens", 20
    )
    assert code == 0, err
    assert out.strip() == pair.text
    arguments = ["explain", pairs_store, pair.text, "--source", pair.source_text, "--subset", 1, *sure, "--json"]
    code, out, err = knnlm(capfd, *arguments)
    assert code == 0, err
    found = {each["source_text"] for token in json.loads(out)["tokens"] for each in token["neighbours"]}
    assert found == {pair.source_text}
    figures = []
    for subset in ([], ["--subset", 1], ["--subset", len(STORED)]):
        code, out, err = knnlm(capfd, "eval", pairs_store, folder / "valid.tsv", *sure, *subset, "--json")
        assert code == 0, err
        figures.append(json.loads(out)["perplexity"])
    assert figures[0] == figures[2] != figures[1]
    living = tmp_path / "s"
    build = ["build", folder / "stored.jsonl", "--out", living, "--model", folder / "model"]
    assert knnlm(capfd, *build)[0] == 0
    code, _, err = knnlm(capfd, "tune", living, folder / "valid.tsv", "--k", "1,4", "--subset", 3)
    assert code == 0, err
    line = failure(capfd, "eval", store.path, folder / "plain.txt", "--model", model_folder, "--subset", 3)
    assert "is a store of texts, which have no sources" in line


def test_tune_of_pairs_with_text_of_another_domain(folder, tmp_path, capfd):
    store = tmp_path / "other.store"
    shutil.copytree(folder / "pairs.store", store)
    other = write_tsv(tmp_path / "other.tsv", pairs(30, start=200))
    code, _, err = knnlm(capfd, "tune", store, folder / "valid.tsv", "--other", other, "--memories", "knn")
    assert code == 0, err
    weights = Mixture.open(store, Seq2SeqLM.open(str(folder / "model"))).weights
    assert not weights.uses_evidence  # no token of a translation is given
    valid = ["tune", store, folder / "valid.tsv", "--other"]
    assert "cannot read it" in failure(capfd, *valid, tmp_path / "missing.tsv")
    assert "trains a gate" in failure(capfd, *valid, other, "--weights", "fixed")
    given = ["tune", store, folder / "test.en", "--source", folder / "test.de", "--other", other]
    assert "--source has the sources of TEXT alone" in failure(capfd, *given)
    assert Mixture.open(store, Seq2SeqLM.open(str(folder / "model"))).online is None  # translations have no evidence


def test_texts_that_cannot_be_read_twice_are_refused(folder, capfd):
    assert "standard input" in failure(capfd, "eval", folder / "pairs.store", "-", "--quality")
    given = ["eval", folder / "pairs.store", folder / "stored.jsonl", "--source-field", "text"]
    assert "cannot be both text and source" in failure(capfd, *given)


def test_tune_by_the_quality_of_translations(folder, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(odds, "_NEW_TOKENS", 24)  # random weights do not end a translation
    store = tmp_path / "quality.store"
    shutil.copytree(folder / "pairs.store", store)
    arguments = ["tune", store, folder / "valid.tsv", "--memories", "knn", "--weights", "fixed", "--quality", 4]
    code, out, err = knnlm(capfd, *arguments, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [own["factor"] for own in found["odds"]["tried"][:3]] == [0, 1, 2]
    best = max(found["odds"]["tried"][1:], key=lambda own: own["bleu"])
    assert found["odds"]["factor"] == best["factor"]
    code, out, _ = knnlm(capfd, *arguments)
    assert f"BLEU {best['bleu']:.2f}, chrF {best['chrf']:.2f}, chosen" in " ".join(out.split())
    trace = ["tune", store, "--trace", tmp_path / "trace", "--quality", 4]
    assert "need the model" in failure(capfd, *trace)
