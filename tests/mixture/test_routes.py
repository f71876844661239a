"""Several stores of pairs: each source is translated with one of them, as with that store alone."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from helpers.pairs import pair_lm, pairs
from helpers.server import serving
from knnlm.corpus import Document
from knnlm.errors import ModelError, ParameterError
from knnlm.generation.seq2seq import KnnForSeq2SeqLM
from knnlm.ingest.build import add, build
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.source_domain import SourceRouter, sample_sources
from knnlm.mixture.spec import MixtureOptions

SETTINGS = {"max_new_tokens": 12, "batch_size": 5}


@pytest.fixture(scope="module")
def lm():
    return pair_lm("marian")


def marked(count: int, start: int, word: str, name: str = "pairs.tsv") -> list[Document]:
    """Pairs whose sources repeat a word."""
    own = pairs(count, start=start, name=name)
    return [Document(each.id, each.source, each.text, source_text=f"{word} {word} {each.source_text}") for each in own]


FIRST, SECOND = marked(40, 0, "with"), marked(40, 200, "model", "other.tsv")
TEXTS = [pair.source_text for pair in [*marked(7, 400, "with"), *marked(6, 500, "model")]]
MIXED = [text for number in range(7) for text in (TEXTS[number], *TEXTS[7 + number : 8 + number])]  # in turns


@pytest.fixture(scope="module")
def paths(lm, tmp_path_factory):
    """Two stores, each tuned alone; the settings differ."""
    folder = tmp_path_factory.mktemp("routes")
    for documents, name, start, ks in ((FIRST, "first", 100, [2]), (SECOND, "second", 300, [8])):
        build(documents, folder / name, lm=lm).close()
        valid = marked(20, start, "with" if name == "first" else "model")
        Mixture.open(folder / name, lm, memories="knn", use_tuned=False).tune(valid, weights="fitted", ks=ks)
    return folder / "first", folder / "second"


def open_both(lm, paths, **options):
    return Mixture.open(paths[0], lm, memories=f"knn,knn={paths[1]}", **options)


@pytest.fixture(scope="module")
def both(lm, paths):
    return open_both(lm, paths)


def nearest_by_hand(lm, texts, stored):
    """The store with the larger probability of a source's tokens, by naive Bayes in NumPy."""
    encoded = [[row for text in own for row in lm.encode_sources([text])] for own in stored]
    size = 1 + max(max(row) for own in encoded for row in own)
    counts = np.stack([np.bincount(np.concatenate(own), minlength=size) for own in encoded]).astype(float)
    shared = counts.sum(0) + 0.1
    counts += 100 * shared / shared.sum()
    logs = np.log(counts / counts.sum(1, keepdims=True))
    rows = [lm.encode_sources([text])[0] for text in texts]
    return [int(np.argmax([sum(own[token] for token in row if token < size) for own in logs])) for row in rows]


def test_router_finds_the_store_whose_sources_have_these_tokens(lm, both):
    stored = [[pair.source_text for pair in own] for own in (FIRST, SECOND)]
    assert [sample_sources(store) for store in both.stores] == stored
    texts = [pair.source_text for pair in (*pairs(60, start=600), *marked(9, 700, "with"), *marked(9, 800, "model"))]
    wanted = nearest_by_hand(lm, texts, stored)
    assert set(wanted) == {0, 1}
    router = SourceRouter.fit(lm, both.stores)
    assert router.nearest([tuple(row) for row in lm.encode_sources(texts)]) == wanted
    assert router.nearest([(10**6,), ()]) == [0, 0]  # tokens that no store has


@pytest.mark.parametrize("beams", [1, 3])
def test_each_source_is_translated_as_with_its_store_alone(lm, paths, both, beams):
    settings = {**SETTINGS, "num_beams": beams}
    alone = [Mixture.open(path, lm).translate(MIXED, **settings) for path in paths]
    routes = nearest_by_hand(lm, MIXED, [[pair.source_text for pair in own] for own in (FIRST, SECOND)])
    assert 3 < sum(routes) < 10
    expected = [alone[route][row] for row, route in enumerate(routes)]
    assert alone[0] != alone[1]
    assert both.translate(MIXED, **settings) == expected
    assert [store.path for store in both.stores_used(MIXED)] == [paths[route] for route in routes]
    assert both.translate(MIXED, use_memory=False, **settings) == Mixture.open(paths[0], lm).translate(
        MIXED, use_memory=False, **settings
    )


def test_rows_of_a_batch_keep_their_order_and_copies(lm, paths, both):
    inputs = lm.pad_sources(lm.encode_sources(MIXED[:6]))
    settings = {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2}
    written = KnnForSeq2SeqLM(both).generate(**inputs, **settings)
    assert len(written) == 12
    for row, store in enumerate(both.stores_used(MIXED[:6])):
        one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        own = KnnForSeq2SeqLM(Mixture.open(store.path, lm)).generate(**one, **settings)
        texts = [lm.tokenizer.decode(text, skip_special_tokens=True) for text in written[2 * row : 2 * row + 2]]
        assert texts == [lm.tokenizer.decode(text, skip_special_tokens=True) for text in own]


def test_sources_of_one_store_may_be_returned_with_their_scores(lm, both):
    model = KnnForSeq2SeqLM(both)
    inputs = lm.pad_sources(lm.encode_sources(MIXED[:2]))
    for settings in ({"return_dict_in_generate": True, "output_logits": True}, {"streamer": object()}):
        with pytest.raises(ParameterError, match="different stores"):
            model.generate(**inputs, **settings)
    one = lm.pad_sources(lm.encode_sources(TEXTS[:1]))
    output = model.generate(**one, max_new_tokens=4, return_dict_in_generate=True, output_logits=True)
    assert len(output.logits) == output.sequences.shape[1] - 1


def test_sources_that_are_not_given_as_tokens_are_refused(lm, both):
    model, inputs = KnnForSeq2SeqLM(both), lm.pad_sources(lm.encode_sources(MIXED[:2]))
    encoded = lm.model.get_encoder()(**inputs)
    with pytest.raises(ParameterError, match="pass input_ids"):
        model.generate(encoder_outputs=encoded, attention_mask=inputs["attention_mask"])
    with pytest.raises(ModelError, match="use generate, or a model of one store"):
        model(**inputs, labels=inputs["input_ids"])


def test_a_source_that_a_store_contains_is_translated_with_it(lm, paths, tmp_path):
    """Although its words are those of the other store."""
    text = TEXTS[0]
    path = tmp_path / "second"
    build(SECOND, path, lm=lm).close()
    Mixture.open(path, lm, memories="knn", use_tuned=False).tune(marked(20, 300, "model"), weights="fitted", ks=[8])
    opened = open_both(lm, (paths[0], path))
    assert [store.path for store in opened.stores_used([text])] == [paths[0]]
    add([Document("new", "new", "a corrected text", source_text=f" {text} ")], path, lm=lm)
    again = opened.reopen()
    assert [store.path for store in again.stores_used([text])] == [path]


def test_domain_check_is_that_of_the_store(lm, paths, tmp_path):
    path = tmp_path / "first"
    build(marked(60, 0, "with"), path, lm=lm).close()
    tuned = Mixture.open(path, lm, memories="knn", use_tuned=False)
    tuned.tune(marked(20, 100, "with"), other=marked(60, 900, "memory"), samples=0, ks=[4])
    assert tuned.source_domain is not None
    opened = open_both(lm, (path, paths[1]))
    texts = [*TEXTS, *(pair.source_text for pair in marked(40, 950, "memory"))]
    routes = opened.route_sources([tuple(row) for row in lm.encode_sources(texts)])
    outside = Mixture.open(path, lm).stores_used(texts)
    expected = [
        route.store.path if route is opened.by_store[1] or inside else None
        for route, inside in zip(routes, outside, strict=True)
    ]
    assert expected.count(None) > 2
    assert [store and store.path for store in opened.stores_used(texts)] == expected
    alone = opened.translate(texts, use_memory=False, **SETTINGS)
    for row, text in enumerate(opened.translate(texts, **SETTINGS)):
        if expected[row] is None:
            assert text == alone[row]
    unchecked = open_both(lm, (path, paths[1]), options=MixtureOptions(domain_check=False))
    assert not unchecked.checks_sources
    assert None not in unchecked.stores_used(texts)


def test_settings_and_a_tuning_of_both_leave_the_routes_out(lm, paths, tmp_path):
    for options in ({"lmbda": 0.4}, {"k": 3}, {"use_tuned": False}):
        assert open_both(lm, paths, **options).router is None
    weighted = Mixture.open(paths[0], lm, memories=f"knn:0.2,knn={paths[1]}:0.2")
    assert weighted.router is None
    path = tmp_path / "untuned"
    build(FIRST, path, lm=lm).close()
    assert Mixture.open(path, lm, memories=f"knn,knn={paths[1]}").router is None
    opened = open_both(lm, paths)
    opened.lmbda = 0.5
    assert opened.router is None
    Mixture.open(path, lm, memories="knn", use_tuned=False).tune(marked(20, 100, "with"), weights="fitted", ks=[2])
    joined = Mixture.open(path, lm, memories=f"knn,knn={paths[1]}")
    assert joined.router is not None
    joined.tune([*marked(10, 100, "with"), *marked(10, 300, "model")], weights="fixed")
    assert joined.router is None
    assert Mixture.open(path, lm, memories=f"knn,knn={paths[1]}").router is None
    assert Mixture.open(path, lm, memories="knn").lmbda is not None


def test_perplexity_is_that_of_each_pair_with_its_store(lm, paths, both):
    valid = [*marked(7, 400, "with"), *marked(6, 500, "model")]
    routes = [paths.index(store.path) for store in both.stores_used([pair.source_text for pair in valid])]
    assert 3 < sum(routes) < 10
    alone = [Mixture.open(path, lm) for path in paths]
    parts = [alone[n].evaluate([pair for pair, own in zip(valid, routes, strict=True) if own == n]) for n in (0, 1)]
    found = both.evaluate(valid)
    tokens = sum(part.tokens for part in parts)
    assert (found.documents, found.tokens, found.words) == (13, tokens, sum(part.words for part in parts))
    for name in ("perplexity", "base_perplexity", "oracle_perplexity"):
        nats = sum(part.tokens * np.log(getattr(part, name)) for part in parts)
        assert getattr(found, name) == pytest.approx(np.exp(nats / tokens), rel=1e-6)
    weights = [part.lmbda * part.tokens / tokens for part in parts]
    assert [memory["name"] for memory in found.memories] == both.labels
    assert [memory["weight"] for memory in found.memories] == pytest.approx(weights)
    assert [memory["k"] for memory in found.memories] == [2, 8]
    first = [pair for pair, own in zip(valid, routes, strict=True) if own == 0]
    only = both.evaluate(first, limit=len(lm.encode(first[0].text)))
    assert only.documents == 1
    assert only.perplexity == pytest.approx(alone[0].evaluate(first[:1]).perplexity, rel=1e-6)
    assert [memory["weight"] for memory in only.memories] == pytest.approx([only.lmbda, 0.0])


def test_tokens_are_explained_by_the_store_of_their_source(lm, paths, both):
    for pair, path, name in ((FIRST[3], paths[0], "pairs.tsv"), (SECOND[3], paths[1], "other.tsv")):
        found = both.explain(pair.text, source=pair.source_text, top=2)
        right = Mixture.open(path, lm).explain(pair.text, source=pair.source_text, top=2)
        assert [token.p for token in found] == pytest.approx([token.p for token in right])
        assert {vote.source.partition(":")[0] for token in found for vote in token.neighbours} == {name}


def test_model_of_several_stores_is_not_saved(both, tmp_path):
    with pytest.raises(ModelError, match="Save one for each store"):
        KnnForSeq2SeqLM(both).save_pretrained(tmp_path / "saved")


def test_server_translates_and_traces_with_the_store_of_each_source(lm, paths, both):
    alone = [Mixture.open(path, lm) for path in paths]
    wanted = both.translate(MIXED, max_new_tokens=12)
    stores = [paths.index(store.path) for store in both.stores_used(MIXED)]
    with serving(copy.copy(both)) as served:
        plain = served.post("/v1/translate", text=MIXED, max_tokens=12)["translations"]
        traced = served.post("/v1/translate", text=MIXED, max_tokens=12, sources=4)["translations"]
        first = served.post("/v1/translate", text=MIXED, max_tokens=12, memory={"memories": ["knn"]})["translations"]
        off = served.post("/v1/translate", text=MIXED, max_tokens=12, memory={"off": True})["translations"]
        chat = served.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": MIXED[1]}], max_tokens=12, sources=1
        )
    assert [each["text"] for each in plain] == [each["text"] for each in traced] == wanted
    assert chat["choices"][0]["message"]["content"] == wanted[1]
    assert chat["choices"][0]["knnlm"]["memory"] is True
    assert {each["memory"] for each in plain} == {True}
    assert {each["memory"] for each in off} == {False}
    assert [each["text"] for each in first] == alone[0].translate(MIXED, max_new_tokens=12)
    names = [{source["source"].partition(":")[0] for source in sources_of(each)} for each in traced]
    assert names == [{("pairs.tsv", "other.tsv")[store]} for store in stores]
    for number in (0, 1):
        with serving(alone[stores[number]]) as served:
            single = served.post("/v1/translate", text=MIXED[number], max_tokens=12, sources=4)["translations"][0]
        for one, other in zip(single["knnlm"]["tokens"], traced[number]["knnlm"]["tokens"], strict=True):
            assert one["p"] == pytest.approx(other["p"], rel=1e-5)
            assert one["p_knn"] == pytest.approx(other["p_knn"], rel=1e-5)


def sources_of(translation):
    """The stored pairs behind the tokens of a translation."""
    return [source for token in translation["knnlm"]["tokens"] for source in token["sources"]]


def test_sources_are_found_among_those_that_are_stored(lm, paths, both):
    catalog = both.stores[0].catalog
    stored = [pair.source_text for pair in FIRST[:3]]
    texts = [f"  {stored[0]}\n", stored[1] + ".", stored[2], "", "nothing like it"]
    assert catalog.contains_sources(texts) == [True, False, True, False, False]
    assert catalog.contains_sources([]) == []
