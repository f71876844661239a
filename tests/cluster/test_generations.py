"""Answers of stores whose shards change while they are searched on Ray; with threads in place of Ray's actors."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import contextmanager

import httpx
import pytest

from helpers.search_ray import FakeRay
from helpers.server import serving
from helpers.stores import documents
from knnlm.cluster.search import RemoteSearchOptions, RemoteShards
from knnlm.corpus import Document, read_documents
from knnlm.datastore.shards import join_shards
from knnlm.errors import ShardChanged
from knnlm.ingest.build import add, build_shard
from knnlm.mixture.mixture import MAX_REPEATS, Mixture
from knnlm.mixture.spec import MixtureOptions

HELD_OUT = documents(3, words=30, start=50)
NEW = [Document(f"new{number}", "new", f"mat dog sat {number} " * 10) for number in range(9)]


@pytest.fixture(scope="module")
def parts(lm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    for number in (1, 2):
        path = folder / f"part-{number}"
        build_shard(lambda: iter(documents(4)), path, shard=f"{number}/2", lm=lm).close()
    return folder


@pytest.fixture
def path(parts, tmp_path):
    shutil.copytree(parts, tmp_path / "whole")
    join_shards([tmp_path / "whole" / f"part-{number}" for number in (1, 2)], tmp_path / "whole")
    return tmp_path / "whole"


class Changed:
    """A store on a fake Ray: before some searches, a document is added to a shard and all processes restart."""

    def __init__(self, path, lm):
        self.path, self.lm, self.searches, self.added = path, lm, 0, 0
        self.ray, self.before, self.lock = FakeRay(), set(), threading.Lock()
        self.ray.before = self._count
        shards = RemoteShards(self.ray, RemoteSearchOptions(timeout=20.0, workers=1))
        self.options = MixtureOptions(open_index=shards.open_index)

    def open(self, memories="knn,ngram"):
        return Mixture.open(self.path, self.lm, memories=memories, options=self.options)

    def _count(self, path, method):
        if method != "probes" and path.endswith("part-1"):
            self.searches += 1
            if self.searches in self.before:
                self.change()

    def change(self):
        with self.lock:
            add(NEW[self.added : self.added + 1], self.path / "part-1", lm=self.lm)
            self.added += 1
            for actor in self.ray.actors:
                actor.restart()


@pytest.fixture
def changed(path, lm):
    return Changed(path, lm)


def local(changed, **options):
    return Mixture.open(changed.path, changed.lm, memories="knn,ngram").evaluate(HELD_OUT, **options)


def test_evaluation_is_repeated_from_the_new_state(changed):
    """Batches before the change were searched in the former state; none of them is in the result."""
    mixture, before = changed.open(), local(changed, batch_tokens=16)
    assert mixture.evaluate(HELD_OUT, batch_tokens=16).perplexity == before.perplexity
    changed.before = {changed.searches + 3}
    found, after = mixture.evaluate(HELD_OUT, batch_tokens=16), local(changed, batch_tokens=16)
    assert changed.added == 1
    assert found.perplexity == after.perplexity != before.perplexity
    assert mixture.stale  # it stays as it was opened


def test_repeated_answers_have_the_settings_of_the_mixture(changed):
    mixture = changed.open("knn")
    mixture.lmbda = 0.875
    changed.before = {changed.searches + 1}
    assert mixture.evaluate(HELD_OUT).lmbda == 0.875
    assert changed.added == 1


def test_files_are_read_again_and_other_iterators_are_not(changed, tmp_path):
    mixture, file = changed.open(), tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": one.text}) + "\n" for one in HELD_OUT))
    changed.before = {changed.searches + 2}
    assert mixture.evaluate(read_documents(str(file)), batch_tokens=16).tokens == local(changed).tokens
    assert changed.added == 1
    reader = read_documents(str(file))
    next(reader)
    with pytest.raises(ShardChanged, match="was changed: it is in generation 1, and the search is one of generation 0"):
        mixture.evaluate(reader)
    with pytest.raises(ShardChanged):
        mixture.evaluate(iter(HELD_OUT))


def test_store_that_changes_all_the_time_is_an_error(changed):
    mixture = changed.open("knn")
    changed.before = range(changed.searches + 1, 1000)
    with pytest.raises(ShardChanged, match="Repeat it"):
        mixture.evaluate(HELD_OUT)
    assert changed.added == 1 + MAX_REPEATS


def test_change_between_the_openings_of_the_store_is_repeated(changed):
    opened = []

    def change(path, _):
        if path.endswith("part-1") and not opened:
            opened.append(path)
            changed.change()

    changed.ray.before = change
    mixture = changed.open()
    assert not mixture.stale
    assert mixture.evaluate(HELD_OUT).perplexity == local(changed).perplexity


def test_generation_is_repeated_from_the_new_state(changed):
    mixture = changed.open()
    changed.before = {changed.searches + 4}
    text = mixture.generate("the cat", max_new_tokens=8, do_sample=False)
    assert changed.added == 1
    opened = Mixture.open(changed.path, changed.lm, memories="knn,ngram")
    assert text == opened.generate("the cat", max_new_tokens=8, do_sample=False)


def test_running_request_of_a_server_goes_on_with_the_new_state(changed):
    mixture = changed.open("knn")
    with serving(mixture) as server:
        changed.before = {changed.searches + 6}
        body = {"prompt": "the cat", "max_tokens": 12, "temperature": 0}
        choice = server.post("/v1/completions", **body)["choices"][0]
        assert changed.added == 1
        assert server.service.scheduler.reloads == 1
        assert choice["finish_reason"] in ("length", "stop")
        found = server.post("/v1/neighbours", prompt="mat dog", k=5)["neighbours"]
        assert "new0" in {one["document"] for one in found}


@contextmanager
def changing_always(changed):
    changed.before = range(changed.searches + 1, 1000)
    yield
    changed.before = ()


def test_server_whose_store_changes_all_the_time_refuses_and_recovers(changed):
    with serving(changed.open("knn")) as server:
        with changing_always(changed):
            response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "the", "max_tokens": 2})
        assert (response.status_code, "was changed" in response.text) == (503, True)
        server.post("/v1/completions", prompt="the", max_tokens=2)
