"""`knnlm serve --ray --replicas 2`: real processes on Ray Serve behind one address; tests/server/test_endpoint.py has
what the endpoint decides.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import psutil
import pytest

from helpers.cli import failure
from helpers.server import serving, serving_endpoint
from helpers.stores import documents
from knnlm.cluster.replicas import ReplicaSettings, _plan, served_replicas
from knnlm.datastore.shards import join_shards
from knnlm.errors import ClusterError, MissingExtra
from knnlm.ingest.build import build, build_shard
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions
from knnlm.server.auth import ApiKeys

ADMIN = "admin-key-1234"
NEW = "Anna asked the librarian where the zebra of 1998 was, and the librarian said that the zebra sleeps."
PROMPT = NEW[: NEW.index(" sleeps")]
COMPLETION = {"prompt": "The librarian said", "max_tokens": 8, "temperature": 0, "sources": 2, "logprobs": 2}
OPTIONS = {"k": 4, "knn_temperature": 1.0, "lmbda": 0.6}


class Command:
    """A running command and its processes."""

    def __init__(self, process, url):
        self.process, self.url = process, url

    def client(self, key=ADMIN):
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False)


def replica_processes():
    """Return the process ids of replicas on this machine by number."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if line.startswith("ray::ServeReplica:knnlm-"):
            found[line.split(":replica")[0].rsplit("-", 1)[1]] = process.pid
    return found


@contextmanager
def command(path, model_folder, *options):
    """Run the command with two replicas."""
    (path.parent / "admin").write_text(ADMIN)
    flags = ["--model", str(model_folder), "--port", "0", "--admin-key-file", str(path.parent / "admin"), "--json"]
    flags += ["--replicas", "2", "--k", "4", "--knn-temperature", "1", "--lambda", "0.6", "--ray", *options]
    words = [sys.executable, "-m", "knnlm", "serve", str(path), *flags]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        printed = ""
        while not printed.endswith("}\n"):
            line = process.stdout.readline()
            assert line, "it ended"
            printed += line
        yield Command(process, json.loads(printed)["url"])
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.stdout.close()


@pytest.fixture(scope="module")
def path(lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("replicas") / "docs.store"
    build(documents(10), path, lm=lm).close()
    return path


def by_replica(ask, count=2, seconds=90.0):
    """Ask until every replica has answered, and return their responses by number; none may be an error."""
    found, end = {}, time.monotonic() + seconds
    while len(found) < count:
        assert time.monotonic() < end
        response = ask()
        assert response.status_code == 200, response.text
        found[response.headers["x-knnlm-replica"]] = response
    return found


def nearest(client):
    """Return the document nearest to the middle of the new text, by each replica."""
    answers = by_replica(lambda: client.post("/v1/neighbours", json={"prompt": PROMPT, "k": 1}))
    return {number: response.json()["neighbours"][0]["document"] for number, response in answers.items()}


def choice(response):
    """Return the text, log-probabilities and sources of a whole response or of a stream."""
    if "event-stream" not in response.headers["content-type"]:
        (found,) = response.json()["choices"]
        parts = [found]
    else:
        assert response.text.endswith("data: [DONE]\n\n")
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        parts = [event["choices"][0] for event in events]
    tokens = [token for part in parts for token in part["knnlm"]["tokens"]]
    logprobs = [number for part in parts if part["logprobs"] for number in part["logprobs"]["token_logprobs"]]
    sources = [[source["document"] for source in token["sources"]] for token in tokens]
    return "".join(part["text"] for part in parts), sources, logprobs


def check_completions(client, path, lm):
    """Every replica completes like one server, whole and as a stream."""
    with serving(Mixture.open(path, lm, use_tuned=False, **OPTIONS)) as one, one.client() as other:
        for stream in (False, True):
            body = {**COMPLETION, "stream": stream}
            *expected, logprobs = choice(other.post("/v1/completions", json=body))
            for response in by_replica(lambda body=body: client.post("/v1/completions", json=body)).values():
                assert choice(response) == (*expected, pytest.approx(logprobs, abs=1e-5))


def check_changes(client):
    """A document is found through all replicas when it was added, and through none when it was removed."""
    for number in range(4):
        assert "zebra" not in nearest(client).values()
        added = client.post("/v1/documents", json={"documents": [{"id": "zebra", "text": f"{NEW} {number}"}]})
        assert added.json()["added"] == 1
        assert nearest(client) == {"1": "zebra", "2": "zebra"}
        (listed,) = client.get("/v1/documents", params={"query": "zebra"}).json()["documents"]
        assert client.delete(f"/v1/documents/{listed['number']}").json() == {"removed": 1}
    assert "zebra" not in nearest(client).values()


def check_own_state(client):
    """Traces and metrics belong to one replica."""
    scored = by_replica(lambda: client.post("/v1/score", json={"text": NEW, "sources": 1}))
    for number, response in scored.items():
        rescored = client.post("/v1/rescore", json={"id": response.json()["knnlm"]["id"], "lambda": 0.1})
        assert (rescored.status_code, rescored.headers["x-knnlm-replica"]) == (200, number)
    text = client.get("/metrics").text
    assert all(f'knnlm_tokens_read_total{{replica="{number}"}}' in text for number in scored)


@pytest.mark.slow
def test_replicas_answer_like_one_server_and_see_every_change(path, lm, model_folder):
    """One test, as starting replicas takes most of its time."""
    options = MixtureOptions(model=str(model_folder))
    settings = ReplicaSettings(str(path), "docs", options, {"use_tuned": False, **OPTIONS})
    with served_replicas(settings, 2) as replicas:
        with serving_endpoint(replicas, keys=ApiKeys((), (ADMIN.encode(),))) as made, made.client(ADMIN) as client:
            check_completions(client, path, lm)
            check_changes(client)
            check_own_state(client)
        with pytest.raises(ClusterError, match="replicas need"), served_replicas(settings, 2):
            pass


@pytest.mark.slow  # a process of five seconds more, and a replica that starts again
def test_command_serves_while_a_killed_replica_returns_with_all_changes(path, model_folder):
    with command(path, model_folder) as made, made.client() as client:
        before = replica_processes()
        assert before.keys() == {"1", "2"}
        os.kill(before["1"], signal.SIGKILL)
        begin = time.monotonic()
        while client.get("/healthz").json() != {"status": "ok", "replicas": 2, "ready": 1}:
            assert time.monotonic() < begin + 5
        added = client.post("/v1/documents", json={"documents": [{"id": "zebra", "text": NEW}]})
        assert (added.status_code, added.headers["x-knnlm-replica"]) == (200, "2")
        assert client.get("/healthz").json()["ready"] == 1  # the change has not waited for the new process
        assert nearest(client) == {"1": "zebra", "2": "zebra"}
        after = replica_processes()
        assert after["1"] != before["1"]
        assert after["2"] == before["2"]
        with made.client("other-key") as other:
            assert other.post("/v1/documents", json={"documents": []}).status_code == 401
        body = {"prompt": "When", "max_tokens": 100, "n": 16, "logit_bias": {"0": -100}, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            made.process.send_signal(signal.SIGINT)  # what is in flight is finished
            events = [json.loads(one[6:]) for one in lines if one.startswith("data: {")]
        assert [event["choices"][0]["finish_reason"] for event in events].count("length") == 16
        assert made.process.wait(30) == 0
    assert not replica_processes()


def test_options_packages_and_cores_that_are_missing_are_named(monkeypatch, capfd, path):
    assert "--replicas is for --ray only" in failure(capfd, "serve", path, "--replicas", "2", "--port", "0")
    assert "--replicas" in failure(capfd, "serve", path, "--ray", "--replicas", "0")
    settings = ReplicaSettings(str(path), "docs", MixtureOptions(), {})
    ray = SimpleNamespace(
        nodes=lambda: [{"Resources": {"CPU": 4.0}, "Alive": True}], available_resources=lambda: {"CPU": 1.0}
    )
    with pytest.raises(ClusterError, match="The cluster has 4 cores, which are too few for 5 replicas"):
        _plan(ray, settings, 5)
    with pytest.raises(ClusterError, match="2 replicas need 4 cores, but only 1 of the cluster are free"):
        _plan(ray, settings, 2)
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(MissingExtra, match=r"ray\[serve\]: pip install 'knnlm\[ray\]'"), served_replicas(settings, 2):
        pass


@pytest.mark.slow  # five processes with models or shards, on two cores
def test_replicas_share_the_processes_of_shards_and_end_with_a_killed_command(cluster, lm, model_folder, tmp_path):
    shards = [tmp_path / "1", tmp_path / "2"]
    for number, shard in enumerate(shards, 1):
        build_shard(lambda: iter(documents(10)), shard, shard=f"{number}/2", lm=lm).close()
    join_shards(shards, tmp_path / "docs.store")
    with command(tmp_path / "docs.store", model_folder, cluster.address) as made:
        with made.client() as client:
            assert client.post("/v1/documents", json={"documents": [{"id": "zebra", "text": NEW}]}).status_code == 200
            assert nearest(client) == {"1": "zebra", "2": "zebra"}
            lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
            assert sum(line.startswith("ray::ShardActor") for line in lines) == 2
            text = client.get("/metrics").text
            assert 'knnlm_shards{replica="1"} 2.0' in text
        made.process.kill()
        made.process.wait()
        end = time.monotonic() + 60
        while replica_processes():
            assert time.monotonic() < end
            time.sleep(0.5)
