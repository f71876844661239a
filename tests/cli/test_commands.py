"""The command line as people and scripts use it: real arguments, real files, real exit codes."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers

from helpers import oracle
from helpers.cli import failure, knnlm
from helpers.models import tiny_tokenizer
from helpers.stores import WORDS, documents
from knnlm.cli.app import app, run
from knnlm.datastore.store import Datastore
from knnlm.memories.automaton import AutomatonParams
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions

COMMANDS = [
    "build",
    "index",
    "tune",
    "eval",
    "generate",
    "explain",
    "translate",
    "lm-eval",
    "info",
    "distill",
    "plan",
    "prune",
    "compress",
    "adapt",
    "verify",
    "repair",
    "merge",
    "shards",
    "import",
    "export",
    "report",
    "bench",
    "serve",
    "chat",
    "demo",
    "add",
    "remove",
    "documents",
    "compact",
]
LIVING = ("add", "documents", "remove", "compact")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of text in several formats, and held-out text."""
    folder = tmp_path_factory.mktemp("texts")
    docs = folder / "docs"
    docs.mkdir()
    made = documents(12)
    (docs / "a.txt").write_text(made[0].text)
    (docs / "b.md").write_text(made[1].text)
    with gzip.open(docs / "c.jsonl.gz", "wt") as file:
        for document in made[2:]:
            file.write(json.dumps({"id": document.id, "text": document.text}) + "\n")
    (folder / "held-out.txt").write_text(documents(1, words=150, start=50)[0].text)
    return folder


@pytest.fixture(scope="module")
def store_path(texts, model_folder):
    path = texts / "docs.store"
    assert run(["build", str(texts / "docs"), "--out", str(path), "--model", str(model_folder)]) == 0
    return path


def examples() -> dict[str, str]:
    """The first line of every command's help."""
    return {
        command.name or command.callback.__name__: command.callback.__doc__.splitlines()[0]
        for command in app.registered_commands
    }


def test_help_of_every_command_begins_with_an_example(capfd):
    assert sorted(examples()) == sorted(COMMANDS)
    for name in COMMANDS:
        code, out, _ = knnlm(capfd, name, "--help")
        assert code == 0
        body = [line.strip() for line in out.splitlines() if line.strip()]
        assert body[1].startswith(f"knnlm {name}"), body
        assert "--json" in out


def test_examples_of_the_help_run(texts, model_folder, tmp_path, monkeypatch, capfd):
    """In the order a person would run them; the model is named, because a tiny one is quicker than the bundled."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(texts / "docs")
    (tmp_path / "held-out.txt").symlink_to(texts / "held-out.txt")
    lines = examples()
    for name in (
        *("build", "index", "tune", "eval", "generate", "explain", "info", "compress", "distill", "prune"),
        *LIVING,
    ):
        arguments = shlex.split(lines[name])[1:] + (["--model", str(model_folder)] if name == "build" else [])
        code, out, err = knnlm(capfd, *arguments)
        assert code == 0, err
        assert out.strip()


def test_build_reports_what_it_stored_as_json(texts, model_folder, tmp_path, capfd, lm):
    command = ("build", texts / "docs", "--out", tmp_path / "m", "--model", model_folder, "--json")
    code, out, err = knnlm(capfd, *command)
    assert code == 0
    progress = [json.loads(line) for line in err.splitlines() if line.startswith('{"event": ')]
    assert [event["event"] for event in progress if event["event"] != "progress"] == ["begin", "end"]
    assert progress[-1]["done"] == progress[-1]["total"]
    assert progress[-1]["unit"] == "bytes"
    assert 0 == progress[0]["seconds"] <= progress[-1]["seconds"]
    metadata = json.loads(out)
    assert metadata["documents"] == 12
    assert metadata["tokens"] == sum(len(lm.encode(document.text)) for document in documents(12))
    code, out, _ = knnlm(capfd, "info", tmp_path / "m", "--json")
    found = json.loads(out)
    assert (found["tokens"], found["documents"], found["index"]) == (metadata["tokens"], 12, "exact")
    assert found["model"]["key_layer"] == "ffn_input"
    assert found["window"] == {"context": 128, "stride": 64}


def test_eval_prints_what_the_library_computes(store_path, texts, lm, capfd):
    code, out, err = knnlm(
        capfd, "eval", store_path, texts / "held-out.txt", "--k", 7, "--knn-temperature", 3, "--lambda", 0.2, "--json"
    )
    assert code == 0, err
    figures = json.loads(out)
    mixture = Mixture.open(store_path, lm, k=7, knn_temperature=3.0, lmbda=0.2)
    right = mixture.evaluate(documents(1, words=150, start=50)).as_dict()
    assert figures.pop("memories") == right.pop("memories")
    for name, value in right.items():
        if name not in ("seconds", "tokens_per_second"):
            same = value if value is None or isinstance(value, str) else pytest.approx(value, rel=1e-5)
            assert figures[name] == same, name
    wanted = "tokens base_perplexity perplexity oracle_perplexity lambda k knn_temperature seconds tokens_per_second"
    assert set(wanted.split()) <= figures.keys()


def test_searches_are_avoided_by_an_automaton(store_path, texts, lm, capfd):
    held_out, plain = texts / "held-out.txt", ("--k", 7, "--knn-temperature", 3, "--lambda", 0.5)
    chosen = ("--search", "automaton", "--min-pointers", 2, "--max-pointers", 50, "--clusters", 20)
    code, out, err = knnlm(capfd, "eval", store_path, held_out, *plain, *chosen, "--json")
    assert code == 0, err
    options = MixtureOptions(automaton=AutomatonParams(min_pointers=2, max_pointers=50, clusters=20))
    mixture = Mixture.open(store_path, lm, k=7, knn_temperature=3.0, lmbda=0.5, options=options)
    right = mixture.evaluate(documents(1, words=150, start=50))
    assert json.loads(out)["perplexity"] == pytest.approx(right.perplexity, rel=1e-5)
    assert json.loads(out)["searched"] == pytest.approx(right.searched)
    assert 0 < right.searched < 1
    code, out, _ = knnlm(capfd, "eval", store_path, held_out, *plain, *chosen)
    assert f"{right.searched:.1%} of the tokens" in out
    code, out, err = knnlm(capfd, "generate", store_path, documents(12)[4].text[:50], *plain, *chosen, "--json")
    assert code == 0, err
    assert json.loads(out)["text"] == mixture.generate(documents(12)[4].text[:50])
    shown = " ".join(knnlm(capfd, "eval", "--help")[1].split())
    for name, default in AutomatonParams().as_dict().items():
        option = shown.partition(f"--{name.replace('_', '-')} ")[2]
        assert option.partition("[default: ")[2].partition("]")[0].strip("()") == str(default).lower()
    for wrong, line in (
        (("--search", "walk"), "There is no search 'walk': use full or automaton."),
        (("--min-pointers", 3), "--min-pointers is for --search automaton only."),
        (("--clusters", 3, "--search", "full"), "--clusters is for --search automaton only."),
        (("--search", "automaton", "--max-pointers", 0), "max_pointers must be at least 1, not 0."),
    ):
        assert failure(capfd, "eval", store_path, held_out, *wrong) == f"knnlm: error: {line}"


def test_eval_of_each_text_equals_an_eval_of_that_text(store_path, texts, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").symlink_to(texts / "held-out.txt")
    other = documents(2, words=60, start=80)
    (tmp_path / "b [red].txt").write_text("\n\n".join(document.text for document in other))
    names, options = ["a.txt", "b [red].txt"], ("--memories", "knn:0.2,cache:0.1", "--limit", 40)
    code, out, err = knnlm(capfd, "eval", store_path, *names, "--each", *options, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [figures.pop("text") for figures in found] == names
    for name, figures in zip(names, found, strict=True):
        alone = json.loads(knnlm(capfd, "eval", store_path, name, *options, "--json")[1])
        for measured in (alone, figures):
            del measured["seconds"], measured["tokens_per_second"]
        assert figures == alone
        log_ratio = math.log(figures["base_perplexity"] / figures["perplexity"])
        assert figures["gain_nats"] - figures["loss_nats"] == pytest.approx(log_ratio, abs=1e-12)
    code, out, _ = knnlm(capfd, "eval", store_path, *names, "--each", *options)
    lines = out.splitlines()
    assert lines[0].split() == ["text", "tokens", "model", "mixture", "ratio", "improved", "gain", "loss"]
    for name, figures, line in zip(names, found, lines[1:3], strict=True):
        before, after = figures["base_perplexity"], figures["perplexity"]
        cells = [f"{figures['tokens']:,}", f"{before:.3f}", f"{after:.3f}", f"{after / before:.4f}"]
        cells += [f"{figures['improved']:.1%}", f"{figures['gain_nats']:.3f}", f"{figures['loss_nats']:.3f}"]
        assert line.startswith(name)
        assert line.removeprefix(name).split() == cells
    assert "WARNING" not in out


def test_eval_of_each_text_warns_of_the_text_that_is_in_the_store(store_path, texts, capfd):
    known = texts / "docs" / "a.txt"
    code, out, _ = knnlm(capfd, "eval", store_path, texts / "held-out.txt", known, "--each", "--limit", 20)
    assert code == 0
    (warning,) = (line for line in out.splitlines() if "WARNING" in line)
    assert f"{known}: 1 of 1 document" in warning


def test_eval_of_each_text_refuses_a_trace_and_a_missing_text(store_path, texts, tmp_path, capfd):
    both = (texts / "held-out.txt", texts / "held-out.txt")
    assert "leave out --each" in failure(capfd, "eval", store_path, *both, "--each", "--save-trace", tmp_path / "t")
    assert not (tmp_path / "t").exists()
    assert "nowhere.txt" in failure(capfd, "eval", store_path, both[0], tmp_path / "nowhere.txt", "--each")


def test_tune_saves_its_settings_and_eval_uses_them(texts, model_folder, tmp_path, capfd):
    store_path = tmp_path / "m"
    assert run(["build", str(texts / "docs"), "--out", str(store_path), "--model", str(model_folder)]) == 0
    alone = ("--memories", "knn", "--weights", "fixed", "--no-online")
    code, out, _ = knnlm(capfd, "tune", store_path, texts / "held-out.txt", *alone, "--json")
    assert code == 0
    tuned = json.loads(out[out.index("{") :])
    assert tuned["chosen_on"] == [str(texts / "held-out.txt")]
    trace = tmp_path / "trace"
    code, out, _ = knnlm(capfd, "eval", store_path, texts / "held-out.txt", "--json", "--save-trace", trace)
    figures = json.loads(out)
    assert code == 0
    assert [figures[name] for name in ("k", "knn_temperature", "lambda")] == [
        tuned[name] for name in ("k", "knn_temperature", "lambda")
    ]
    assert figures["perplexity"] == pytest.approx(tuned["perplexity"], rel=1e-3)
    code, out, _ = knnlm(
        capfd,
        *("tune", store_path, "--trace", trace, "--weights", "fixed", "--json"),
        *("--k", "1,4", "--knn-temperature", "2", "--lambda", "0.1,0.2"),
    )
    assert code == 0
    again = json.loads(out)
    assert again["settings_tried"] == 4
    assert again["k"] in (1, 4)
    code, out, _ = knnlm(capfd, "info", store_path)
    assert f"chosen on {again['tokens']:,} tokens of {texts / 'held-out.txt'}" in " ".join(out.split())


def test_generate_with_drafts_writes_the_same_text(store_path, capfd):
    prompt = ("generate", store_path, "The memory of", "--max-new-tokens", 12, "--lambda", 0.9)
    for extra in ((), ("--do-sample", "--seed", 3)):
        plain, drafted = (json.loads(knnlm(capfd, *prompt, "--json", *extra, *more)[1]) for more in ((), ("--draft",)))
        assert drafted["text"] == plain["text"]
        assert "drafts" not in plain
        assert 0 <= drafted["drafts"]["accepted"] <= drafted["drafts"]["drafted"]
    code, _, err = knnlm(capfd, *prompt, "--draft")
    assert code == 0
    assert "drafted token" in err
    code, _, err = knnlm(capfd, *prompt, "--draft", "--no-memory")
    assert code == 2
    assert "without them" in err


def test_generate_with_and_without_the_store(store_path, capfd, lm):
    prompt = "The memory of a model"
    made = {}
    for extra in ((), ("--no-memory",)):
        code, out, _ = knnlm(
            capfd, "generate", store_path, prompt, "--max-new-tokens", 5, "--lambda", 0.9, "--json", *extra
        )
        assert code == 0
        made[extra] = json.loads(out)
    assert made[()]["text"] != made[("--no-memory",)]["text"]

    ids = torch.tensor([lm.prompt(prompt)])
    plain = lm.model.generate(ids, max_new_tokens=5, do_sample=False)
    right = lm.tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
    assert made[("--no-memory",)]["text"] == right
    sampled = []
    for seed in (1, 1, 2):
        arguments = ("--do-sample", "--top-p", 0.9, "--seed", seed, "--max-new-tokens", 8, "--json")
        sampled.append(json.loads(knnlm(capfd, "generate", store_path, prompt, *arguments)[1])["text"])
    assert sampled[0] == sampled[1] != sampled[2]
    code, out, _ = knnlm(capfd, "generate", store_path, prompt, "--max-new-tokens", 5, "--lambda", 0.9)
    assert code == 0
    assert (prompt + made[()]["text"]).strip() in out


def test_explain_names_documents(store_path, capfd):
    code, out, _ = knnlm(capfd, "explain", store_path, "The memory of a model", "--top", 2, "--json")
    assert code == 0
    explained = json.loads(out)["tokens"]
    assert "".join(token["token"] for token in explained) == "The memory of a model"
    assert all(len(token["neighbours"]) == 2 for token in explained)
    sources = {voice["source"] for token in explained for voice in token["neighbours"]}
    assert all("docs/" in source for source in sources)
    code, out, _ = knnlm(capfd, "explain", store_path, "The memory")
    assert code == 0
    assert "p_LM" in out
    assert "docs/" in out


def test_explain_reads_a_file_and_json_keeps_the_text_unchanged(store_path, tmp_path, capfd):
    text = "a :smile: [bold]日本[/bold]"
    (tmp_path / "text.txt").write_text(text)
    for given in (text, tmp_path / "text.txt"):
        code, out, _ = knnlm(capfd, "explain", store_path, given, "--top", 0, "--json")
        assert code == 0
        explained = json.loads(out)
        assert explained["text"] == text
        assert "".join(token["token"] for token in explained["tokens"]) == text
    assert knnlm(capfd, "explain", store_path, text)[0] == 0


def test_eval_reads_standard_input(store_path, texts, capfd, monkeypatch):
    named = json.loads(knnlm(capfd, "eval", store_path, texts / "held-out.txt", "--json")[1])
    with (texts / "held-out.txt").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        code, out, _ = knnlm(capfd, "eval", store_path, "-", "--json")
    assert code == 0
    assert json.loads(out)["perplexity"] == pytest.approx(named["perplexity"], rel=1e-6)


def test_infinite_perplexity_is_null_in_json(store_path, texts, capfd):
    code, out, _ = knnlm(capfd, "eval", store_path, texts / "held-out.txt", "--lambda", 1, "--k", 1, "--json")
    assert code == 0
    assert json.loads(out)["perplexity"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lambda", "1.5"], "lambda must be from 0 to 1, not 1.5"),
        (["--lambda", "-0.1"], "lambda must be from 0 to 1"),
        (["--k", "0"], "k must be at least 1, not 0"),
        (["--knn-temperature", "0"], "temperature must be above 0"),
        (["--knn-temperature", "-2"], "temperature must be above 0"),
        (["--metric", "cosine"], "Unknown metric 'cosine'"),
        (["--limit", "0"], "limit must be at least 1"),
        (["--k", "many"], "--k"),
        (["--nonsense"], "--nonsense"),
        (["--device", "abacus"], "Unknown device 'abacus'"),
        (["--dtype", "float12"], "Unknown dtype 'float12'"),
    ],
)
def test_invalid_settings_are_one_line_and_exit_code_two(store_path, texts, capfd, arguments, message):
    assert message in failure(capfd, "eval", store_path, texts / "held-out.txt", *arguments)


def bad_files(folder):
    """Files that cannot be read, and what must be said of each."""
    return {
        "missing.txt": (None, "missing.txt"),
        "empty.txt": (b"", "empty.txt: empty"),
        "blank.txt": (b" \n\t\n", "blank.txt: empty"),
        "junk.txt": (bytes(range(256)) * 10, "junk.txt"),
        "latin.txt": ("one\ntwo\nnaïve".encode("latin-1"), "latin.txt"),
        "field.jsonl": (b'{"text": "a"}\n{"body": "b"}\n', "field.jsonl:2"),
        "broken.jsonl": (b'{"text": "a"}\n{"text": \n', "broken.jsonl:2"),
        "cut.txt.gz": (gzip.compress(b"hello world" * 1000)[:40], "cut.txt.gz"),
        "picture.png": (b"\x89PNG", "picture.png"),
        "other.parquet": (b"PAR1 no", "other.parquet"),
    }


@pytest.mark.parametrize("name", sorted(bad_files(None)))
@pytest.mark.parametrize("command", ["build", "eval"])
def test_unreadable_text_is_named_before_anything_is_written(store_path, model_folder, tmp_path, capfd, name, command):
    content, message = bad_files(tmp_path)[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    if command == "build":
        line = failure(capfd, "build", tmp_path / name, "--out", tmp_path / "m", "--model", model_folder)
        assert not (tmp_path / "m").exists()
    else:
        line = failure(capfd, "eval", store_path, tmp_path / name)
    assert message in line


def test_line_of_invalid_text_is_given(tmp_path, model_folder, capfd):
    (tmp_path / "latin.txt").write_bytes("one\ntwo\nnaïve".encode("latin-1"))
    line = failure(capfd, "build", tmp_path / "latin.txt", "--out", tmp_path / "m", "--model", model_folder)
    assert re.search(r"latin\.txt.*line 3|latin\.txt:3", line)


def test_stores_that_cannot_be_opened_are_one_line_errors(store_path, texts, tmp_path, capfd):
    assert "is not a store" in failure(capfd, "info", tmp_path)
    assert "There is no folder" in failure(capfd, "eval", tmp_path / "nowhere", texts / "held-out.txt")
    (tmp_path / "catalog.db").write_bytes(b"no database" * 100)
    assert "catalog.db" in failure(capfd, "info", tmp_path)


def test_finished_store_is_not_overwritten(store_path, texts, model_folder, capfd):
    line = failure(capfd, "build", texts / "docs", "--out", store_path, "--model", model_folder)
    assert "finished store already" in line


def test_store_works_with_another_model_of_the_same_tokenizer_only(store_path, texts, tmp_path, capfd):
    from helpers.models import tiny, tiny_tokenizer

    other = tiny("llama", seed=9)
    other.save_pretrained(tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "other")
    text = ("eval", store_path, texts / "held-out.txt")
    code, out, err = knnlm(capfd, *text, "--model", tmp_path / "other", "--k", 7, "--lambda", 0.5, "--json")
    assert code == 0, err
    figures = json.loads(out)
    tokens = tokenizer((texts / "held-out.txt").read_text(), add_special_tokens=False)["input_ids"]
    window = Datastore.open(store_path).window
    module = other.model.layers[-1].mlp
    _, probabilities = oracle.read_token_by_token(other, module, tokens, start_token=tokenizer.bos_token_id, **window)
    right = oracle.perplexity(probabilities[range(len(tokens)), tokens])
    assert figures["base_perplexity"] == pytest.approx(right, rel=1e-4)
    tokenizer.add_tokens(["nonsense"])
    tokenizer.save_pretrained(tmp_path / "other")
    line = failure(capfd, *text, "--model", tmp_path / "other")
    assert str(tmp_path / "other") in line
    assert "was built with" in line


def test_missing_model_is_a_one_line_error(texts, tmp_path, capfd):
    line = failure(capfd, "build", texts / "docs", "--out", tmp_path / "m", "--model", tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in line
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "4096"], "context 4,096 is longer than the 128 tokens"),
        (["--context", "16", "--stride", "17"], "stride must be from 1 to the context (16)"),
        (["--key-layer", "soul"], "soul"),
        (["--layer", "7"], "7"),
        (["--key-format", "int3"], "int3"),
    ],
)
def test_invalid_builds_are_one_line_and_write_nothing(texts, model_folder, tmp_path, capfd, arguments, message):
    out = tmp_path / "m"
    line = failure(capfd, "build", texts / "docs", "--out", out, "--model", model_folder, *arguments)
    assert message in line
    assert not out.exists()


def test_prompt_longer_than_the_context_is_refused(store_path, capfd):
    assert "can read only 128" in failure(capfd, "generate", store_path, " ".join(WORDS * 3))


def test_text_longer_than_the_context_is_explained_window_by_window(store_path, capfd):
    code, out, _ = knnlm(capfd, "explain", store_path, " ".join(WORDS * 3), "--top", 0, "--json")
    assert code == 0
    assert len(json.loads(out)["tokens"]) > 256


def test_invalid_index_is_a_one_line_error(store_path, capfd):
    assert "nonsense" in failure(capfd, "index", store_path, "--index", "nonsense")


@pytest.mark.parametrize(
    "arguments",
    [
        ["a\udcffb"],
        ["x", "--repetition-penalty", "0"],
        ["x", "--repetition-penalty", "nan"],
        ["x", "--seed", "99999999999999999999"],
        ["x", "--do-sample", "--top-p", "0"],
        ["x", "--do-sample", "--temperature", "0"],
        ["x", "--max-new-tokens", "0"],
        ["x", "--device", "cuda:99"],
    ],
)
def test_invalid_generation_options_are_one_line_errors(store_path, capfd, arguments):
    failure(capfd, "generate", store_path, *arguments)


def test_store_is_opened_from_any_working_directory(texts, model_folder, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(model_folder.parent)
    arguments = ("--out", tmp_path / "m", "--model", model_folder.name)
    assert knnlm(capfd, "build", texts / "docs", *arguments)[0] == 0
    monkeypatch.chdir(tmp_path)
    assert knnlm(capfd, "eval", "m", texts / "held-out.txt", "--limit", 10)[0] == 0


def test_info_works_on_a_terminal_without_unicode(store_path):
    command = [sys.executable, "-m", "knnlm", "info", str(store_path)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert "tokens of" in result.stdout


def test_tune_needs_either_text_or_a_trace(store_path, texts, capfd, tmp_path):
    assert "either TEXT or --trace" in failure(capfd, "tune", store_path)
    assert "not a trace" in failure(capfd, "tune", store_path, "--trace", tmp_path)
    assert "--k takes numbers" in failure(capfd, "tune", store_path, texts / "held-out.txt", "--k", "a,b")


def test_missing_extras_name_the_install(store_path, tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'knnlm[datasets]'" in failure(capfd, "eval", store_path, "hf:some/name")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.txt.zst").write_bytes(b"(\xb5/\xfd")
    assert "pip install 'knnlm[zstd]'" in failure(capfd, "eval", store_path, tmp_path / "a.txt.zst")


def test_ctrl_c_exits_with_130_and_the_build_resumes_afterwards(tmp_path, model_folder):
    text = tmp_path / "long.jsonl"
    # Many segments; the first is finished well before the interrupt.
    with text.open("w") as file:
        for number in range(300):
            file.write(json.dumps({"text": documents(1, words=120, start=number)[0].text}) + "\n")
    out = tmp_path / "m"
    command = [sys.executable, "-m", "knnlm", "build", str(text), "--out", str(out), "--model", str(model_folder)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (out / "segments" / "000000").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        assert process.poll() is None, process.stderr.read()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "resume at the last complete segment" in err
    assert "Traceback" not in err
    finished = (out / "segments" / "000000" / "keys.npy").stat().st_mtime_ns
    assert subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
    assert (out / "segments" / "000000" / "keys.npy").stat().st_mtime_ns == finished
    assert not list((out / "segments").glob("*.partial"))


def test_closed_pipe_is_no_error(store_path):
    command = f"{shlex.quote(sys.executable)} -m knnlm info {shlex.quote(str(store_path))} --json | head -c 1"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert result.stdout == "{"
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


def test_help_imports_nothing_heavy():
    code = "import sys, knnlm.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_version_is_that_of_the_package(capfd):
    from importlib.metadata import version

    assert knnlm(capfd, "--version")[1].strip() == f"knnlm {version('knnlm')}"


@pytest.mark.parametrize(("content", "problem"), [(b"a\0b", "binary"), (b"caf\xe9", "UTF-8"), (b"", "empty")])
def test_unreadable_text_is_an_error_before_the_model_is_opened(capfd, tmp_path, content, problem):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    line = failure(capfd, "build", path, "--out", tmp_path / "out.store", "--model", tmp_path / "no-such-model")
    assert str(path) in line
    assert problem in line
    assert not (tmp_path / "out.store").exists()


def test_eval_measures_the_support_of_tokens(texts, model_folder, tmp_path, capfd):
    store = tmp_path / "docs.store"
    assert run(["build", str(texts / "docs"), "--out", str(store), "--model", str(model_folder)]) == 0
    capfd.readouterr()
    assert "Tune the store" in failure(capfd, "eval", store, texts / "held-out.txt", "--support")
    options = ("--memories", "knn", "--weights", "fixed")
    code, out, _ = knnlm(capfd, "tune", store, texts / "docs", *options, "--json")
    tuned = json.loads(out)["support"]
    assert code == 0
    assert 0 <= tuned["ece"] <= 1
    code, out, _ = knnlm(capfd, "tune", store, texts / "docs", *options)
    assert f"ECE {tuned['ece']:.4f}" in out
    code, out, _ = knnlm(capfd, "eval", store, texts / "held-out.txt", "--support", "--json")
    figures = json.loads(out)
    assert code == 0
    assert figures["support"]["tokens"] == figures["tokens"]
    code, out, _ = knnlm(capfd, "eval", store, texts / "held-out.txt", "--support")
    assert f"{figures['support']['auroc']:.3f} for right and wrong tokens" in " ".join(out.split())
    assert "leave out --each" in failure(capfd, "eval", store, texts / "held-out.txt", "--support", "--each")


def test_model_without_a_feed_forward_net_is_built_at_another_place_with_one_line(tmp_path, texts, capfd):
    config = transformers.MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    tiny_tokenizer().save_pretrained(tmp_path / "mamba")
    out = tmp_path / "m"
    code, _, err = knnlm(capfd, "build", texts / "held-out.txt", "--out", out, "--model", tmp_path / "mamba")
    assert code == 0
    lines = [line for line in err.splitlines() if line.startswith("WARNING")]
    assert lines == [
        "WARNING  MambaForCausalLM has no feed-forward network of its own in layer 1, so keys are read at "
        "attention_input. --key-layer names another place."
    ]
    code, _, err = knnlm(capfd, "eval", out, texts / "held-out.txt", "--json")
    assert code == 0
    assert "WARNING" not in err
    assert Datastore.open(out).model["key_layer"] == "attention_input"
