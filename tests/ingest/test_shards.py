"""Shards of a text: how it is split, and that each build gives its part of a build on one machine."""

from __future__ import annotations

import itertools
from array import array

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from helpers.stores import contents, documents, large_model
from knnlm.corpus import Document
from knnlm.datastore.remove import remove
from knnlm.datastore.shards import join_shards
from knnlm.datastore.store import Datastore
from knnlm.errors import CorpusError, DatastoreError, ModelMismatch, ParameterError
from knnlm.ingest.build import _build, add, build, build_shard
from knnlm.ingest.shards import _cuts, choose_shard, parse_shard, split_text
from knnlm.lm.causal import CausalLM

DOCUMENTS = documents(12)


def read():
    return iter(DOCUMENTS)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 60))
def test_parts_are_consecutive_and_not_empty(sizes, count):
    if count > len(sizes):
        count = len(sizes)
    cuts = _cuts(array("q", sizes), count)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(sizes), count + 1)
    assert (np.diff(cuts) > 0).all()


@given(st.lists(st.integers(1, 50), min_size=40, max_size=80), st.integers(1, 5))
def test_parts_have_about_as_many_bytes_each(sizes, count):
    cuts = _cuts(array("q", sizes), count)
    parts = [sum(sizes[begin:end]) for begin, end in itertools.pairwise(cuts)]
    assert max(abs(part - sum(sizes) / count) for part in parts) <= max(sizes) + 1


@pytest.mark.parametrize("text", ["", "3", "0/3", "4/3", "1/0", "-1/3", "a/b", "1/2/3"])
def test_invalid_shard_is_refused(text):
    with pytest.raises(ParameterError, match="write i/n"):
        parse_shard(text)


def test_joined_shards_equal_a_build_on_one_machine(lm, tmp_path):
    one = build(DOCUMENTS, tmp_path / "one", lm=lm, segment_entries=300)
    paths = [tmp_path / f"part-{number}" for number in (1, 2, 3)]
    for number, path in enumerate(paths, 1):
        build_shard(read, path, shard=f"{number}/3", lm=lm, segment_entries=300).close()
    join_shards(paths, tmp_path / "joined")
    joined = Datastore.open(tmp_path / "joined")
    numbers = torch.arange(one.entry_count)
    assert torch.equal(joined.values(numbers), one.values(numbers))
    # The model reads documents at the border of shards in other batches, which round differently.
    torch.testing.assert_close(joined.take(numbers), one.take(numbers), atol=1e-3, rtol=1e-3)
    described = [
        [(each.number, each.id, each.source, each.first_entry, each.entries, each.sha256) for each in store.documents()]
        for store in (joined, one)
    ]
    assert described[0] == described[1]
    sizes = [shard.entry_count for shard in joined.shards]
    assert max(sizes) - min(sizes) < one.entry_count / 5


def test_joined_shards_have_the_bytes_of_a_build_with_the_same_segments(lm, tmp_path):
    one = build(DOCUMENTS, tmp_path / "one", lm=lm, segment_entries=1)  # a segment for each document
    paths = [tmp_path / f"part-{number}" for number in (1, 2)]
    for number, path in enumerate(paths, 1):
        build_shard(read, path, shard=f"{number}/2", lm=lm, segment_entries=1).close()
    join_shards(paths, tmp_path / "joined")
    assert Datastore.open(tmp_path / "joined").fingerprint == one.fingerprint


def test_an_interrupted_shard_resumes_with_the_same_bytes(lm, tmp_path):
    build_shard(read, tmp_path / "whole", shard="2/3", lm=lm, segment_entries=100).close()

    def broken():
        for number, document in enumerate(DOCUMENTS):
            if number == 7 and broken.fails:
                raise CorpusError("the disk is gone")
            yield document

    broken.fails = False
    part = split_text(broken, 2, 3)
    assert (part.part.first, part.part.total) == (4, 12)
    broken.fails = True
    with pytest.raises(CorpusError, match="gone"):
        _build(part.documents(), tmp_path / "again", lm, shard=part, segment_entries=100)
    with pytest.raises(DatastoreError, match="with another shard"):
        build_shard(read, tmp_path / "again", shard="3/3", lm=lm, segment_entries=100)
    build_shard(read, tmp_path / "again", shard="2/3", lm=lm, segment_entries=100).close()
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")


def test_shards_have_the_offset_of_a_build_on_one_machine(tmp_path):
    model = large_model(3000.0, shift=2000.0)
    one = build(DOCUMENTS[:4], tmp_path / "one", lm=model, segment_entries=50)
    assert one.offset is not None
    for number in (1, 2):
        options = {"shard": f"{number}/2", "lm": model, "segment_entries": 50}
        shard = build_shard(lambda: iter(DOCUMENTS[:4]), tmp_path / f"part-{number}", **options)
        assert torch.equal(shard.offset, one.offset)


def test_shards_with_a_fitted_codec_take_that_of_the_first(lm, tmp_path):
    options = {"lm": lm, "key_format": "pca16-int8"}
    first = build_shard(read, tmp_path / "1", shard="1/2", **options)
    with pytest.raises(ParameterError, match="Build --shard 1/2 first"):
        build_shard(read, tmp_path / "2", shard="2/2", **options)
    with pytest.raises(ParameterError, match=r"has keys as pca16-int8, not float16"):
        build_shard(read, tmp_path / "2", shard="2/2", lm=lm, like=first)
    other = CausalLM(large_model(1.0).model, lm.tokenizer, name="other")
    with pytest.raises(ModelMismatch, match="was built with tiny-llama"):
        build_shard(read, tmp_path / "2", shard="2/2", lm=other, key_format="pca16-int8", like=first)
    second = build_shard(read, tmp_path / "2", shard="2/2", like=first, **options)
    assert torch.equal(second.codec.step, first.codec.step)
    assert torch.equal(second.map.matrix, first.map.matrix)
    assert join_shards([tmp_path / "2", tmp_path / "1"], tmp_path / "joined").shards[0] == tmp_path / "1"


def test_too_few_documents_for_the_shards(lm, tmp_path):
    with pytest.raises(CorpusError, match="12 documents, which are too few for 13 shards"):
        build_shard(read, tmp_path / "part", shard="1/13", lm=lm)
    assert not (tmp_path / "part").exists()


def test_an_interrupted_addition_resumes_in_its_shard(lm, tmp_path):
    for number in (1, 2):
        build_shard(read, tmp_path / f"{number}", shard=f"{number}/2", lm=lm, segment_entries=100).close()
    join_shards([tmp_path / "1", tmp_path / "2"], tmp_path / "joined")
    new = documents(6, start=30)

    def stopping():
        yield from new[:4]
        raise CorpusError("stopped")

    with pytest.raises(CorpusError, match="stopped"):
        add(stopping(), tmp_path / "joined", lm=lm)
    chosen = choose_shard(Datastore.open(tmp_path / "joined"))
    other = Datastore.open(tmp_path / "joined").shards[1 - chosen]
    remove(other.path, document=next(other.documents()).id)  # which makes the other one the smallest
    added = add(new, tmp_path / "joined", lm=lm)
    assert (added.documents, added.skipped) == (6, 0)
    assert added.resumed > 0
    store = Datastore.open(tmp_path / "joined")
    assert {one.id for one in store.shards[chosen].documents()} >= {one.id for one in new}
    assert add([Document(id="x", source="x", text=DOCUMENTS[0].text)], tmp_path / "joined", lm=lm).skipped == 1


def test_unfinished_shard_is_not_resumed_with_the_codec_of_another_store(lm, tmp_path):
    options = {"key_format": "int8", "segment_entries": 100}
    first = build_shard(read, tmp_path / "1", shard="1/2", lm=lm, **options)
    other = build(DOCUMENTS[6:], tmp_path / "other", lm=lm, **options)
    part = split_text(read, 2, 2, like=first)

    def fail():
        yield from list(part.documents())[:4]
        raise CorpusError("gone")

    with pytest.raises(CorpusError, match="gone"):
        _build(fail(), tmp_path / "2", lm, shard=part, **options)
    with pytest.raises(
        DatastoreError, match=r"2 is an unfinished build with another codec than .*other.*the same --like"
    ):
        build_shard(read, tmp_path / "2", shard="2/2", lm=lm, like=other, **options)
    second = build_shard(read, tmp_path / "2", shard="2/2", lm=lm, like=first, **options)
    assert torch.equal(second.codec.step, first.codec.step)
