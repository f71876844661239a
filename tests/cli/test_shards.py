"""Shards on the command line: array jobs, and one line for what does not fit together."""

from __future__ import annotations

import json

import pytest

from helpers.cli import failure, knnlm
from helpers.stores import documents


@pytest.fixture(scope="module")
def parts(model_folder, tmp_path_factory):
    """A folder of text, held-out text, and three shards."""
    from knnlm.cli.app import run

    folder = tmp_path_factory.mktemp("parts")
    (folder / "docs").mkdir()
    for number, document in enumerate(documents(9)):
        (folder / "docs" / f"{number}.txt").write_text(document.text)
    (folder / "held-out.txt").write_text(documents(1, words=60, start=50)[0].text)
    for number in (1, 2, 3):
        command = ["build", folder / "docs", "--out", folder / f"{number}.store", "--shard", f"{number}/3"]
        assert run([str(each) for each in (*command, "--model", model_folder)]) == 0
    return folder


def test_shards_are_joined_and_used_like_one_store(parts, model_folder, tmp_path, capfd):
    shards, out = [parts / f"{number}.store" for number in (2, 3, 1)], tmp_path / "docs.store"
    code, shown, _ = knnlm(capfd, "shards", "join", *shards, "--out", out, "--json")
    assert code == 0
    joined = json.loads(shown)
    assert joined["documents"] == 9
    assert [path.rsplit("/")[-1] for path in joined["shards"]] == ["1.store", "2.store", "3.store"]
    assert knnlm(capfd, "merge", *sorted(shards), "--out", tmp_path / "one.store")[0] == 0
    figures = []
    for store in (out, tmp_path / "one.store"):
        arguments = (
            "eval",
            store,
            parts / "held-out.txt",
            "--model",
            model_folder,
            "--json",
            "--memories",
            "knn,ngram",
        )
        code, shown, err = knnlm(capfd, *arguments)
        assert code == 0, err
        figures.append(json.loads(shown)["perplexity"])
    assert figures[0] == figures[1]
    code, shown, _ = knnlm(capfd, "info", out, "--json")
    assert [shard["tokens"] for shard in json.loads(shown)["shards"]]
    assert sum(shard["tokens"] for shard in json.loads(shown)["shards"]) == joined["tokens"]
    code, shown, _ = knnlm(capfd, "info", out)
    assert shown.count("shard ") >= 3
    text = "The store of the river"
    for command in (("generate", out, text), ("explain", out, text)):
        code, shown, err = knnlm(capfd, *command, "--model", model_folder)
        assert code == 0, err
        assert shown.strip()


def test_errors_of_shards_are_one_line(parts, model_folder, tmp_path, capfd):
    build = ("build", parts / "docs", "--out", tmp_path / "x", "--model", model_folder)
    assert "write i/n" in failure(capfd, *build, "--shard", "4/3")
    assert "--like is for --shard only" in failure(capfd, *build, "--like", parts / "1.store")
    assert "name files" in failure(capfd, "build", "-", "--out", tmp_path / "x", "--shard", "1/3")
    assert "too few for 10 shards" in failure(capfd, *build, "--shard", "1/10")
    assert "Shard 2 of 3 is missing" in failure(
        capfd, "shards", "join", parts / "1.store", parts / "3.store", "--out", tmp_path / "out"
    )
    assert "Unknown action 'split'" in failure(capfd, "shards", "split", parts / "1.store", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
