"""The benchmark of training on a tiny model: every loop runs, and the table has its ratios."""

from __future__ import annotations

import sys

import pytest
import torch

import training_speed
from helpers.corpora import corpus_folder


@pytest.mark.parametrize("with_corpus", [False, True])
def test_table_compares_the_trainer_with_the_plain_loop(model_folder, tmp_path, monkeypatch, capsys, with_corpus):
    arguments = f"--model {model_folder} --device cpu --rows 2 3 --length 32 --mean 12 --steps 2 --warm-up 1".split()
    if with_corpus:
        arguments += ["--corpus", str(corpus_folder(tmp_path / "corpus"))]
    monkeypatch.setattr(sys, "argv", ["training_speed.py", *arguments])
    training_speed.main()
    shown = capsys.readouterr().out.splitlines()
    assert sum("attention over packed rows: mask; no notes" in line for line in shown) == 2
    (checked,) = [line for line in shown if line.startswith("packed rows (mask, float32) beside")]
    loss, gradients = checked.split("loss ")[1].removesuffix(" relative").split(", gradients ")
    assert abs(float(loss)) < 1e-5
    assert float(gradients) < 1e-4
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown if line.startswith("|")]
    assert tuple(table[0]) == training_speed.COLUMNS
    names = ["plain, float32", "ours, eager, float32"]
    assert [row[:2] for row in table[2:]] == [[name, rows] for rows in "23" for name in names]
    for plain, ours in zip(table[2::2], table[3::2], strict=True):
        speeds = [float(row[2].replace(",", "")) for row in (plain, ours)]
        assert plain[3] == "1.000"
        assert float(ours[3]) == pytest.approx(speeds[1] / speeds[0], rel=0.02)
        assert all(float(ours[column]) >= 0 for column in (4, 5, 6))
        assert float(ours[5]) > 0


def test_nothing_is_compiled_on_a_cpu():
    options = training_speed.argparse.Namespace(no_compile=False)
    assert training_speed.kinds(torch.device("cpu"), options) == [False]
    assert training_speed.kinds(torch.device("cuda"), options) == [False, True]
    assert training_speed.plain_kinds(torch.device("cuda")) == ["autocast", "bfloat16"]
