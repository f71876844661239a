"""The benchmark of drafts on a tiny model: texts are the same, and ratios are those of its speeds."""

from __future__ import annotations

import json
import sys

import pytest

import drafts
import served_drafts
from helpers.corpora import corpus_folder


def test_table_compares_drafts_with_mixture_and_model(model_folder, tmp_path, monkeypatch, capsys):
    folder = corpus_folder(tmp_path / "corpus")
    arguments = f"{folder} --model {model_folder} --device cpu --limit 200 --prompts 2"
    arguments += f" --prompt-tokens 4 --new-tokens 12 --from train --json {tmp_path / 'rows.json'}"
    monkeypatch.setattr(sys, "argv", ["drafts.py", *arguments.split()])
    drafts.main()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["mode"] for row in rows] == ["greedy", "sampled"]
    for row in rows:
        assert row["same"] == 2
        for other in ("model", "mixture"):
            ratio = row["drafts_tokens_per_second"] / row[f"{other}_tokens_per_second"]
            assert row[f"drafts_of_{other}"] == pytest.approx(ratio, rel=0.02)
        assert row["tokens_per_step"] >= 1
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert [cells[:2] for cells in shown[-2:]] == [["corpus", "greedy"], ["corpus", "sampled"]]


def test_table_compares_engines_with_drafts_and_without(model_folder, tmp_path, monkeypatch, capsys):
    folder = corpus_folder(tmp_path / "corpus")
    arguments = f"{folder} --model {model_folder} --device cpu --limit 200 --prompts 3 --slots 1,2"
    arguments += " --prompt-tokens 4 --new-tokens 12 --from train"
    monkeypatch.setattr(sys, "argv", ["served_drafts.py", *arguments.split()])
    served_drafts.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(row["slots"], row["mode"]) for row in rows] == [
        (1, "greedy"),
        (1, "sampled"),
        (2, "greedy"),
        (2, "sampled"),
    ]
    for row in rows:
        assert row["same"] == "3 of 3"
        assert row["ratio"] == pytest.approx(row["drafts"] / row["plain"], abs=0.006, rel=0.02)
        accepted, drafted = map(int, row["accepted"].split(" of "))
        assert 0 <= accepted <= drafted
    assert [line.split("|")[1].strip() for line in lines[-4:]] == ["corpus"] * 4
