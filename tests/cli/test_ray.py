"""Builds on Ray on the command line, with threads in place of Ray's actors."""

from __future__ import annotations

import json

import pytest

from helpers.cli import failure, knnlm
from helpers.stores import documents
from helpers.thread_ray import ThreadRay
from knnlm.cli.options import with_ray_address
from knnlm.cluster.build_worker import BuildWorker


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": document.text}) for document in documents(6)))
    return path


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("build a --ray", "build a --ray local"),
        ("build a --ray --workers 2", "build a --ray local --workers 2"),
        ("build a --ray auto --workers 2", "build a --ray auto --workers 2"),
        ("build a --ray=10.0.0.1:6379 b", "build a --ray=10.0.0.1:6379 b"),
        ("build a -- --ray", "build a -- --ray"),
    ],
)
def test_the_address_of_ray_may_be_left_out(given, expected):
    assert with_ray_address(given.split()) == expected.split()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "2"], "--workers is for --ray only"),
        (["--index", "auto"], "--index is for --ray only"),
        (["--work-folder", "disk"], "--work-folder is for --ray only"),
        (["--ray", "--push", "bucket"], "bucket is no URL"),
        (["--ray", "--shard", "1/2"], "leave out one of them"),
        (["--ray", "nonsense"], "Invalid address 'nonsense'"),
    ],
)
def test_options_that_do_not_fit_together(options, message, text, model_folder, tmp_path, capfd):
    command = ("build", text, "--out", tmp_path / "out", "--model", model_folder)
    assert message in failure(capfd, *command, *options)
    assert not (tmp_path / "out").exists()


def test_standard_input_is_not_read_by_workers(tmp_path, capfd):
    assert "instead of standard input" in failure(capfd, "build", "-", "--out", tmp_path / "out", "--ray")


def test_build_on_ray_prints_what_other_builds_print(text, model_folder, tmp_path, capfd, monkeypatch):
    ray = ThreadRay(BuildWorker)
    monkeypatch.setattr("knnlm.cluster.build.connected", ray.connected)
    command = ("build", text, "--out", tmp_path / "out", "--model", model_folder, "--ray", "--workers", "2", "--json")
    monkeypatch.setattr("knnlm.cli.output._EVENT_SECONDS", 0.0)
    code, shown, progress = knnlm(capfd, *command)
    assert code == 0
    events = [json.loads(line) for line in progress.splitlines() if line.startswith('{"event": ')]
    assert [event["event"] for event in events if event["event"] != "progress"] == ["begin", "end"]
    assert {event["what"] for event in events} == {"reading"}
    assert [event["done"] for event in events] == sorted(event["done"] for event in events)
    assert events[-1]["done"] == events[-1]["total"] == sum(len(one.text.encode()) for one in documents(6))
    assert any(event["note"].endswith("of 2 workers, 1 of 2 shards") for event in events)
    assert events[-1]["note"] == "2 of 2 shards"
    assert (ray.options["num_cpus"], ray.options["num_gpus"]) == (1, 0)
    result = json.loads(shown)
    assert (result["documents"], result["shards"]) == (6, 2)
    assert result["store"] == str(tmp_path / "out")
    assert knnlm(capfd, "verify", tmp_path / "out")[0] == 0
    assert "finished store already" in failure(capfd, *command)
