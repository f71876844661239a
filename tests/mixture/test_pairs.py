"""Stores of pairs: built, changed, evaluated, tuned and explained with encoder-decoder models, against brute force."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from helpers.models import SEQ2SEQ_FAMILIES, pair_tokenizer, tiny
from helpers.pairs import BruteForce, pair_lm, pairs, read_prefixes
from knnlm.corpus import Document
from knnlm.datastore.store import Datastore, text_hash
from knnlm.errors import CorpusError, DatastoreCorrupt, DatastoreError, ModelError, ModelMismatch, ParameterError
from knnlm.generation.causal import KnnForCausalLM
from knnlm.index.bm25 import BM25
from knnlm.ingest import pipeline
from knnlm.ingest.build import add, build
from knnlm.lm.causal import CausalLM
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.maintenance.merge import merge
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions
from knnlm.training.output_matrix import OutputConfig, train_output
from knnlm.training.prune import store_log_p

STORED, HELD_OUT = pairs(30), pairs(8, start=60)
SETTINGS = {"k": 6, "knn_temperature": 5.0, "lmbda": 0.4}
FAMILIES = sorted(SEQ2SEQ_FAMILIES.keys() - {"whisper"})


@pytest.fixture(scope="module", params=["marian", "t5"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def lm(family):
    return pair_lm(family)


@pytest.fixture(scope="module")
def store(family, lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / f"{family}.store"
    return build(STORED, path, lm=lm, segment_entries=40, key_format="float32")


@pytest.fixture(scope="module")
def brute_force(family, lm):
    return BruteForce(lm, family, STORED)


def test_store_contains_keys_targets_and_sources_of_every_pair(family, lm, store):
    assert store.has_pairs
    assert store.catalog.segments()[-1].id > 1
    row = 0
    for stored, document in zip(store.documents(), STORED, strict=True):
        keys, _, target = read_prefixes(lm, family, document)
        rows = torch.arange(row, row + len(target))
        assert store.values(rows).tolist() == target
        np.testing.assert_allclose(store.take(rows).numpy(), keys, rtol=1e-4, atol=1e-4)
        assert (stored.id, stored.source_text, stored.entries) == (document.id, document.source_text, len(target))
        assert stored.sha256 == text_hash(document.text, document.source_text) != text_hash(document.text)
        row += len(target)
    assert row == store.entry_count
    assert store.verify(deep=True).problems == ()


def test_perplexity_of_targets_given_their_sources_is_that_of_brute_force(family, lm, store, brute_force):
    mixture = Mixture.open(store.path, lm, **SETTINGS)
    result = mixture.evaluate(HELD_OUT)
    assert result.perplexity == pytest.approx(brute_force.perplexity(HELD_OUT, **SETTINGS), rel=1e-4)
    alone = brute_force.perplexity(HELD_OUT, **{**SETTINGS, "lmbda": 0.0})
    assert result.base_perplexity == pytest.approx(alone, rel=1e-4)
    assert result.tokens == sum(len(read_prefixes(lm, family, document)[2]) for document in HELD_OUT)
    assert result.leaked_documents == 0
    assert mixture.evaluate(STORED[:3]).leaked_documents == 3
    # The same target with another source is another document.
    assert mixture.evaluate([replace(STORED[0], source_text="Other")]).leaked_documents == 0


@pytest.mark.parametrize("sentences", [1, 5])
@pytest.mark.parametrize("read_ahead", [False, True])
def test_perplexity_of_a_subset_search_is_that_of_brute_force(family, lm, store, brute_force, sentences, read_ahead):
    mixture = Mixture.open(store.path, lm, options=MixtureOptions(subset=sentences), **SETTINGS)
    special = set(lm.tokenizer.all_special_ids)
    texts = [each.source_text for each in (*STORED, *HELD_OUT)]
    words = [[token for token in tokens if token not in special] for tokens in lm.tokenizer(texts)["input_ids"]]
    bm25 = BM25(words[: len(STORED)])
    log_p = []
    for document, query in zip(HELD_OUT, words[len(STORED) :], strict=True):
        nearest = brute_force.only(bm25.nearest(query, sentences))
        count = len(read_prefixes(lm, family, document)[2])
        log_p += [np.log(nearest.perplexity([document], **SETTINGS))] * count
    result = mixture.evaluate(HELD_OUT, read_ahead=read_ahead)
    assert result.perplexity == pytest.approx(np.exp(np.mean(log_p)), rel=1e-4)


def test_subset_of_all_pairs_is_the_whole_store(lm, store):
    whole = Mixture.open(store.path, lm, **SETTINGS).evaluate(HELD_OUT)
    every = Mixture.open(store.path, lm, options=MixtureOptions(subset=len(STORED)), **SETTINGS)
    assert every.evaluate(HELD_OUT).perplexity == whole.perplexity


def test_explanation_of_a_subset_search_shows_only_the_nearest_pairs(lm, store):
    mixture = Mixture.open(store.path, lm, options=MixtureOptions(subset=1), **SETTINGS)
    pair = STORED[7]
    explained = mixture.explain(pair.text, source=pair.source_text, top=6)
    assert {each.source for token in explained for each in token.neighbours} == {pair.source}


def test_subset_search_skips_what_a_gate_skips(lm, tmp_path):
    path = tmp_path / "gated.store"
    build(STORED, path, lm=lm)
    similar = [replace(each, id=f"s{each.id}", source_text=f"{each.source_text}!") for each in STORED]
    options = MixtureOptions(subset=4)
    tuned = Mixture.open(path, lm, memories="knn,ngram", options=options).tune(similar, ks=[1, 4])
    assert tuned.perplexity < tuned.base_perplexity
    for skip in (0.0, 0.5, 1.0):
        mixture = Mixture.open(path, lm, options=replace(options, skip_fraction=skip))
        assert mixture.evaluate(HELD_OUT).perplexity > 0


def test_reopened_mixture_searches_the_pairs_that_were_added(lm, tmp_path):
    path = tmp_path / "living.store"
    build(STORED[:10], path, lm=lm)
    mixture = Mixture.open(path, lm, options=MixtureOptions(subset=1), **SETTINGS)
    pair = HELD_OUT[3]
    add([pair], path, lm=lm)
    explained = mixture.reopen().explain(pair.text, source=pair.source_text, top=1)
    assert {each.source for token in explained for each in token.neighbours} == {pair.source}


def test_subset_needs_pairs_of_texts(lm, store, tmp_path):
    with pytest.raises(ParameterError, match="subset must be at least 1 sentence, not 0"):
        MixtureOptions(subset=0)
    texts = CausalLM(tiny("llama"), lm.tokenizer, name="tiny")
    build([Document("n", "notes.txt", "A note.")], tmp_path / "n", lm=texts)
    with pytest.raises(ParameterError, match=r"is a store of texts, which have no sources: --subset is for stores of"):
        Mixture.open(tmp_path / "n", texts, options=MixtureOptions(subset=3))


def test_store_is_opened_with_its_own_kind_of_model(lm, store, tmp_path):
    lm.model.save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")
    path = tmp_path / "own.store"
    opened = type(lm).open(str(tmp_path / "model"))
    build(STORED[:5], path, lm=opened)
    mixture = Mixture.open(path)
    assert mixture.lm.has_encoder
    assert mixture.evaluate(HELD_OUT).tokens
    with pytest.raises(ModelMismatch, match="was built with"):
        Mixture.open(path, CausalLM(tiny("llama"), lm.tokenizer))
    with pytest.raises(ModelError, match=r"KnnForCausalLM\) needs a decoder-only model"):
        KnnForCausalLM(mixture)


def test_store_of_another_model_with_the_same_tokenizer_is_read_by_that_model(lm, store, tmp_path):
    other = Seq2SeqLM(tiny(lm.name, seed=5), lm.tokenizer, name=lm.name)
    other.model.save_pretrained(tmp_path / "other")
    other.tokenizer.save_pretrained(tmp_path / "other")
    reader = Seq2SeqLM.open(str(tmp_path / "other"))
    build(STORED, tmp_path / "other.store", lm=reader, key_format="float32")
    mixture = Mixture.open(tmp_path / "other.store", lm, **SETTINGS)
    assert [model.name for model in mixture.readers.models] == [lm.name, reader.name]
    result = mixture.evaluate(HELD_OUT)
    log_p = []
    brute_force = BruteForce(reader, lm.name, STORED)
    for document in HELD_OUT:
        (keys, _, targets), (_, p_lm, _) = (read_prefixes(model, lm.name, document) for model in (reader, lm))
        for key, probs, target in zip(keys, p_lm, targets, strict=True):
            log_p.append(np.log(brute_force.distribution(key, probs, **SETTINGS)[target]))
    assert result.perplexity == pytest.approx(np.exp(-np.mean(log_p)), rel=1e-3)


def test_store_of_other_languages_is_refused(tmp_path):
    nllb = pair_lm("m2m_100")
    build(STORED[:4], tmp_path / "s", lm=nllb)
    languages = {"src_lang": "eng_Latn", "tgt_lang": "eng_Latn"}
    other = Seq2SeqLM(nllb.model, pair_tokenizer("m2m_100"), name="other", **languages)
    with pytest.raises(ModelMismatch, match=r"src lang deu_Latn\).*src lang eng_Latn"):
        Mixture.open(tmp_path / "s", other)


@pytest.mark.parametrize("weights", ["fixed", "gated"])
def test_tuned_memories_of_pairs_lower_the_perplexity_of_similar_pairs(lm, tmp_path, weights):
    path = tmp_path / "tuned.store"
    build(STORED, path, lm=lm)
    similar = [replace(each, id=f"s{each.id}", source_text=f"{each.source_text}!") for each in STORED]
    memories = "knn" if weights == "fixed" else "knn,ngram"
    result = Mixture.open(path, lm, memories=memories).tune(similar[:20], weights=weights, ks=[1, 4, 8])
    assert result.perplexity < result.base_perplexity
    measured = Mixture.open(path, lm).evaluate(similar[20:])
    assert measured.perplexity < measured.base_perplexity


def test_output_matrix_is_trained_on_the_entries_of_pairs(lm, tmp_path):
    path = tmp_path / "output.store"
    store = build(STORED, path, lm=lm)
    log_p = store_log_p(store, lm)
    mixture = Mixture.open(path, lm, lmbda=0.0)
    assert float(log_p.double().mean().neg().exp()) == pytest.approx(mixture.evaluate(STORED).base_perplexity, rel=1e-4)
    train_output(store, path / "output", OutputConfig(epochs=2, interpolate=0.5), log_p_lm=log_p)
    with_output = Mixture.open(path, lm, memories="knn,output,ngram")
    assert with_output.evaluate(HELD_OUT).perplexity > 0
    assert [memory.name for memory in with_output.memories] == ["knn", "output", "ngram"]


def test_added_and_removed_pairs_appear_and_disappear_with_their_sources(lm, tmp_path):
    path = tmp_path / "living.store"
    build(STORED[:10], path, lm=lm)
    again = replace(STORED[0], id="again", source_text="Another source")
    added = add([*STORED[8:12], again], path, lm=lm)
    assert (added.documents, added.skipped) == (3, 2)
    with closing(Datastore.open(path)) as store:
        assert [each.source_text for each in store.documents()] == [
            *(each.source_text for each in STORED[:12]),
            "Another source",
        ]
        store.remove(document=STORED[3].id)
        assert STORED[3].source_text not in [each.source_text for each in store.documents()]
        store.compact()
        texts = [each.source_text for each in store.documents()]
        assert texts == [*(each.source_text for each in (*STORED[:3], *STORED[4:12])), "Another source"]
        assert store.verify(deep=True).problems == ()
    assert STORED[3].source_text.encode() not in (path / "catalog.db").read_bytes()
    result = Mixture.open(path, lm, **SETTINGS).evaluate(HELD_OUT)
    rest = [*STORED[:3], *STORED[4:12], again]
    right = BruteForce(lm, lm.name, rest).perplexity(HELD_OUT, **SETTINGS)
    assert result.perplexity == pytest.approx(right, rel=2e-3)  # keys are float16


def test_interrupted_addition_of_pairs_resumes_with_their_sources(lm, tmp_path):
    path = tmp_path / "staged.store"
    build(STORED[:4], path, lm=lm, segment_entries=8)

    def failing():
        yield from STORED[4:9]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add(failing(), path, lm=lm)
    added = add(STORED[4:9], path, lm=lm)
    assert added.resumed
    assert [each.source_text for each in Datastore.open(path).documents()] == [each.source_text for each in STORED[:9]]


def test_merged_stores_keep_their_sources(lm, tmp_path):
    build(STORED[:6], tmp_path / "a", lm=lm)
    build(STORED[4:9], tmp_path / "b", lm=lm)
    merged = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    assert (merged.documents, merged.duplicates) == (9, 2)
    store = Datastore.open(tmp_path / "m")
    assert [each.source_text for each in store.documents()] == [each.source_text for each in STORED[:9]]
    small = store.compress(tmp_path / "c", key_format="int8")
    assert [each.source_text for each in small.documents()] == [each.source_text for each in STORED[:9]]
    store.build_index("exact")


def test_exported_entries_of_pairs_have_their_source_texts(lm, store, tmp_path):
    store.export(tmp_path / "exported")
    table = pq.read_table(next((tmp_path / "exported").glob("*.parquet")))
    texts = {each.source: each.source_text for each in STORED}
    columns = zip(table["source"].to_pylist(), table["source_text"].to_pylist(), strict=True)
    assert {(source, texts[source]) for source in texts} == set(columns)


def test_explanation_shows_the_source_of_each_neighbour(lm, store):
    mixture = Mixture.open(store.path, lm, **SETTINGS)
    document = HELD_OUT[1]
    explained = mixture.explain(document.text, source=document.source_text, top=2)
    assert "".join(token.token for token in explained[:-1]).strip() == document.text
    assert explained[-1].token == "</s>"
    sources = {each.source: each.source_text for each in STORED}
    for token in explained:
        assert len(token.neighbours) == 2
        for neighbour in token.neighbours:
            assert neighbour.source_text == sources[neighbour.source]
    with pytest.raises(CorpusError, match="The text has no source text"):
        mixture.explain(document.text)


@pytest.mark.parametrize("memory", ["cache", "ngram-cache"])
def test_cache_is_refused_with_a_reason(lm, store, memory):
    with pytest.raises(ParameterError, match=r"earlier positions of the same text.*--memories knn,ngram"):
        Mixture.open(store.path, lm, memories=f"knn,{memory}")


def test_pairs_and_texts_are_not_mixed(lm, tmp_path):
    with pytest.raises(CorpusError, match=r"notes.txt has no source text"):
        build([Document("n", "notes.txt", "A note.")], tmp_path / "n", lm=lm)
    assert not (tmp_path / "n").exists()
    with pytest.raises(ModelError, match="has a source text, which tiny would not read"):
        build(STORED, tmp_path / "m", lm=CausalLM(tiny("llama"), lm.tokenizer, name="tiny"))


@pytest.mark.parametrize("other", FAMILIES)
def test_pipelined_build_writes_the_same_keys(other, tmp_path, monkeypatch):
    lm = pair_lm(other)
    plain = build(STORED, tmp_path / "plain", lm=lm, segment_entries=60)
    monkeypatch.setattr(pipeline, "PIPELINED_DEVICES", {"cpu"})
    fast = build(STORED, tmp_path / "fast", lm=lm, segment_entries=60)
    rows = torch.arange(plain.entry_count)
    assert fast.values(rows).equal(plain.values(rows))
    torch.testing.assert_close(fast.take(rows), plain.take(rows), rtol=2e-3, atol=2e-3)
    assert [each.source_text for each in fast.documents()] == [each.source_text for each in STORED]


def test_long_targets_are_read_in_windows(lm, tmp_path):
    long = [Document("l", "l", " ".join(each.text for each in STORED), source_text="A source")]
    store = build(long, tmp_path / "long", lm=lm, window=lm.window(24, 12))
    assert store.entry_count > 60
    assert Mixture.open(tmp_path / "long", lm).evaluate(long).tokens == store.entry_count


def test_changed_source_text_is_a_checksum_mismatch(lm, tmp_path):
    path = tmp_path / "damaged.store"
    build(STORED[:4], path, lm=lm)
    with closing(sqlite3.connect(path / "catalog.db")) as connection, connection:
        connection.execute("UPDATE sources SET text = 'Something else' WHERE number = 2")
    with (
        closing(Datastore.open(path)) as store,
        pytest.raises(DatastoreCorrupt, match=r"checksum mismatch.* in sources"),
    ):
        list(store.documents())
    assert any("sources" in problem.message for problem in verify(path).problems)


def test_repaired_store_keeps_the_sources_of_the_pairs_that_are_left(lm, tmp_path):
    path = tmp_path / "lost.store"
    store = build(STORED, path, lm=lm, segment_entries=60)
    lost = [each.id for each in store.documents() if each.segment == 1]
    store.close()
    keys = path / "segments" / "000001" / "keys.npy"
    content = bytearray(keys.read_bytes())
    content[-5] ^= 0xFF
    keys.write_bytes(bytes(content))
    assert verify(path, deep=True).problems
    repair(path)
    assert verify(path, deep=True).problems == ()
    with closing(Datastore.open(path)) as repaired:
        left = {each.id: each.source_text for each in repaired.documents()}
    assert left == {each.id: each.source_text for each in STORED if each.id not in lost}
    with closing(sqlite3.connect(path / "catalog.db")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM sources").fetchone() == (len(left),)


def test_interrupted_build_of_pairs_resumes(lm, tmp_path):
    def failing():
        yield from STORED[:20]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(failing(), tmp_path / "s", lm=lm, segment_entries=40)
    changed = [replace(STORED[0], source_text="Another source"), *STORED[1:]]
    with pytest.raises(DatastoreError, match="its text has changed"):
        build(changed, tmp_path / "s", lm=lm, segment_entries=40)
    store = build(STORED, tmp_path / "s", lm=lm, segment_entries=40)
    assert [each.source_text for each in store.documents()] == [each.source_text for each in STORED]
