"""Several stores of pairs: each source is translated with one of them, as with that store alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.pairs import pair_lm, pairs
from helpers.server import serving
from knnlm.corpus import Document
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.remove import remove
from knnlm.errors import CorpusError, KnnlmWarning, ModelError, ParameterError
from knnlm.generation.seq2seq import KnnForSeq2SeqLM
from knnlm.ingest.build import add, build
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.source_domain import SourceRouter
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


def stores_of(mixture, texts):
    """The path of the store that each text is translated with; None: by the model alone."""
    used = [each.stores for each in mixture.translate_each(texts, max_new_tokens=1)]
    assert all(len(stores) < 2 for stores in used)
    return [stores[0].path if stores else None for stores in used]


def open_both(lm, paths, **options):
    return Mixture.open(paths[0], lm, memories=f"knn,knn={paths[1]}", **options)


@pytest.fixture(scope="module")
def both(lm, paths):
    return open_both(lm, paths)


def token_logs(counts):
    """log p(token | store) from (S, V) counts, smoothed with the tokens of all stores, in NumPy."""
    shared = counts.sum(0) + 0.1
    counts = counts + 100 * shared / shared.sum()
    return np.log(counts / counts.sum(1, keepdims=True))


def count(rows, size):
    return np.bincount([token for row in rows for token in row], minlength=size).astype(float)


def bayes(logs, row):
    return np.array([sum(own[token] for token in row if token < logs.shape[1]) for own in logs])


def nearest_by_hand(lm, texts, mixture):
    """The store with the largest probability of a source's tokens, by naive Bayes in NumPy with the fitted biases."""
    encoded = [lm.encode_sources([pair.source_text for pair in own]) for own in (FIRST, SECOND)]
    size = 1 + max(max(row) for own in encoded for row in own)
    logs = token_logs(np.stack([count(own, size) for own in encoded]))
    biases = mixture.router.biases.numpy()
    return [int(np.argmax(bayes(logs, row) + len(row) * biases)) for row in lm.encode_sources(texts)]


def test_router_finds_the_store_whose_sources_have_these_tokens(lm, both):
    stored = [[pair.source_text for pair in own] for own in (FIRST, SECOND)]
    assert [store.catalog.sample_sources(99) for store in both.stores] == stored
    texts = [pair.source_text for pair in (*pairs(60, start=600), *marked(9, 700, "with"), *marked(9, 800, "model"))]
    wanted = nearest_by_hand(lm, texts, both)
    assert set(wanted) == {0, 1}
    router = SourceRouter.fit(lm, both.stores)
    tokens = [tuple(row) for row in lm.encode_sources(texts)]
    assert router.scores(tokens).argmax(1).tolist() == wanted
    swapped = router.select([1, 0])
    torch.testing.assert_close(swapped.scores(tokens), router.scores(tokens).flip(1))
    assert router.scores([(), (10**6,)]).tolist() == [[0, 0], (router.scale * router.biases).tolist()]


class Sources:
    """Stands for a store, of which only the sources and the size are read."""

    def __init__(self, rows):
        self.catalog, self.rows, self.entry_count = self, rows, len(rows)

    def sample_sources(self, most):
        assert len(self.rows) <= most
        return self.rows


class Encoded:
    """Stands for a model whose sources are tokens already."""

    @staticmethod
    def encode_sources(rows):
        return [list(row) for row in rows]


def draw(generator, probabilities, count, length):
    """Sources of random tokens."""
    return [tuple(row) for row in generator.choice(len(probabilities), (count, length), p=probabilities).tolist()]


@pytest.fixture(scope="module")
def unequal():
    """A large store, a small one with short sources, and the probabilities of their tokens, half of them shared."""
    generator = np.random.default_rng(0)
    zipf = 1 / np.arange(3, 5003)
    both = [zipf + generator.permutation(zipf) for _ in range(2)]
    first, second = (own / own.sum() for own in both)
    stores = [Sources(draw(generator, first, 1500, 20)), Sources(draw(generator, second, 120, 8))]
    return stores, (first, second), generator


def test_small_store_gets_its_sources_beside_a_large_one(unequal):
    stores, probabilities, generator = unequal
    router = SourceRouter.fit(Encoded(), stores)
    plain = replace(router, scale=1.0, biases=torch.zeros(2))
    tests = [draw(generator, own, 400, 20) for own in probabilities]
    wrong, wrong_plain = (
        [float((own.scores(test).argmax(1) != place).double().mean()) for place, test in enumerate(tests)]
        for own in (router, plain)
    )
    assert max(wrong) < 0.16
    assert max(wrong_plain) > 1.5 * max(wrong)


def test_biases_are_the_best_for_stored_sources_that_were_held_out(unequal):
    """By an independent loss: no change of a value makes it smaller."""
    stores, _, _ = unequal
    router = SourceRouter.fit(Encoded(), stores)
    size = 1 + max(max(row) for store in stores for row in store.rows)
    scores, labels = [], []
    for fold in range(5):
        kept = [[row for n, row in enumerate(store.rows) if n % 5 != fold] for store in stores]
        logs = token_logs(np.stack([count(rows, size) for rows in kept]))
        for place, store in enumerate(stores):
            joined = [token for row in store.rows[fold::5] for token in row]
            for begin in range(0, len(joined) - 15, 16):
                scores.append(bayes(logs, joined[begin : begin + 16]))
                labels.append(place)
    scores, labels = np.stack(scores), np.array(labels)
    scores = scores - scores.mean(1, keepdims=True)

    def loss(log_scale, first, second):
        logits = np.exp(log_scale) * (scores + 16 * np.array([first, second]))
        losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels]
        mean = np.mean([losses[labels == place].mean() for place in (0, 1)])
        return mean + 1e-4 * (log_scale**2 + first**2 + second**2)

    fitted = [np.log(router.scale), *router.biases.tolist()]
    best = loss(*fitted)
    for place in range(3):
        for step in (-0.02, 0.02):
            changed = list(fitted)
            changed[place] += step
            assert loss(*changed) > best


def test_router_is_kept_while_stores_are_about_as_large(lm, paths, tmp_path):
    opened = open_both(lm, paths)
    assert opened.reopen().router is opened.router
    grown = [*opened.stores[:1], Sources([()] * int(1.3 * opened.stores[1].entry_count))]
    assert not opened.router.fits(grown)
    assert not opened.router.fits(opened.stores[:1])


@pytest.mark.parametrize("beams", [1, 3])
def test_each_source_is_translated_as_with_its_store_alone(lm, paths, both, beams):
    settings = {**SETTINGS, "num_beams": beams}
    alone = [Mixture.open(path, lm).translate(MIXED, **settings) for path in paths]
    routes = nearest_by_hand(lm, MIXED, both)
    assert 3 < sum(routes) < 10
    expected = [alone[route][row] for row, route in enumerate(routes)]
    assert alone[0] != alone[1]
    assert both.translate(MIXED, **settings) == expected
    assert stores_of(both, MIXED) == [paths[route] for route in routes]
    assert both.translate(MIXED, use_memory=False, **settings) == Mixture.open(paths[0], lm).translate(
        MIXED, use_memory=False, **settings
    )


def test_rows_of_a_batch_keep_their_order_and_copies(lm, paths, both):
    inputs = lm.pad_sources(lm.encode_sources(MIXED[:6]))
    settings = {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2}
    written = KnnForSeq2SeqLM(both).generate(**inputs, **settings)
    assert len(written) == 12
    for row, path in enumerate(stores_of(both, MIXED[:6])):
        one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        own = KnnForSeq2SeqLM(Mixture.open(path, lm)).generate(**one, **settings)
        texts = [lm.tokenizer.decode(text, skip_special_tokens=True) for text in written[2 * row : 2 * row + 2]]
        assert texts == [lm.tokenizer.decode(text, skip_special_tokens=True) for text in own]


def test_sources_of_one_store_may_be_returned_with_their_scores(lm, both):
    model = KnnForSeq2SeqLM(both)
    inputs = lm.pad_sources(lm.encode_sources(MIXED[:2]))
    for settings in (
        {"return_dict_in_generate": True},
        {"streamer": object()},
        {"prefix_allowed_tokens_fn": lambda *_: [1]},
        {"encoder_outputs": lm.model.get_encoder()(**inputs)},
    ):
        with pytest.raises(ParameterError, match=f"so that {next(iter(settings))} cannot be used"):
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
    assert stores_of(opened, [text]) == [paths[0]]
    add([Document("new", "new", "a corrected text", source_text=f" {text} ")], path, lm=lm)
    again = opened.reopen()
    assert stores_of(again, [text]) == [path]


def test_arguments_by_position_and_a_batch_without_a_mask_are_those_of_one_store(lm, both):
    model, inputs = KnnForSeq2SeqLM(both), lm.pad_sources(lm.encode_sources(MIXED[:4]))
    right = model.generate(**inputs, max_new_tokens=3)
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens = 3
    assert model.generate(inputs["input_ids"], config).tolist() == right.tolist()
    padded = torch.nn.functional.pad(inputs["input_ids"], (0, 40), value=lm.tokenizer.pad_token_id)
    assert model.generate(padded, max_new_tokens=3).tolist() == right.tolist()


def test_nothing_to_translate_is_no_error(both):
    assert both.translate([]) == []
    with pytest.raises(CorpusError, match="no text to evaluate"):
        both.evaluate([])


def test_a_source_of_two_stores_is_translated_with_the_one_it_is_most_like(lm, tmp_path):
    """Not with the first, and not with a third, which it is more like."""
    text, words = "with with model model model 77", ("memory", "with", "model")
    same = Document("same", "same", "some text", source_text=f"  {text} ")
    for place, word in enumerate(words):
        own = marked(30, 100 * place, word)
        build([*own, same] if word != "model" else own, tmp_path / word, lm=lm).close()
        Mixture.open(tmp_path / word, lm, memories="knn", use_tuned=False).tune(marked(9, 500, word), weights="fitted")
    names = ",".join(["knn", *(f"knn={tmp_path / word}" for word in words[1:])])
    opened = Mixture.open(tmp_path / words[0], lm, memories=names)
    (row,) = lm.encode_sources([text])
    by_tokens = opened.router.scores([tuple(row)])[0].tolist()
    assert by_tokens[0] < by_tokens[1] < by_tokens[2]
    assert stores_of(opened, [text]) == [tmp_path / "with"]
    alone = [Mixture.open(tmp_path / word, lm) for word in words]
    texts = [pair.source_text for word in words for pair in marked(4, 700, word)]
    used = stores_of(opened, texts)
    assert set(used) == {tmp_path / word for word in words}
    for source, path, written in zip(texts, used, opened.translate(texts, **SETTINGS), strict=True):
        assert written == alone[words.index(path.name)].translate([source], **SETTINGS)[0]
    with serving(opened) as served:
        chosen = [label for label in opened.labels if label != f"knn={tmp_path / 'with'}"]
        found = served.post("/v1/translate", text=texts, max_tokens=12, memory={"memories": chosen}, sources=1)
    outer = [alone[place].translate(texts, **SETTINGS) for place in (0, 2)]
    for number, each in enumerate(found["translations"]):
        place = used[number] == tmp_path / "model"
        left = [own[number] for own in outer] if used[number] == tmp_path / "with" else [outer[place][number]]
        assert each["text"] in left


def test_other_metrics_and_memories_are_those_that_each_store_was_tuned_with(lm, paths, tmp_path):
    path, other = tmp_path / "ip", tmp_path / "grams"
    build(SECOND, path, lm=lm).close()
    options = MixtureOptions(metric="ip")
    Mixture.open(path, lm, memories="knn", use_tuned=False, options=options).tune(
        marked(20, 300, "model"), weights="fitted", ks=[3]
    )
    build(FIRST, other, lm=lm).close()
    Mixture.open(other, lm, memories="knn,ngram", use_tuned=False).tune(marked(20, 100, "with"))
    opened = Mixture.open(other, lm, memories=f"knn,ngram,knn={path}")
    assert opened.labels == ["knn", "ngram", f"knn={path}"]
    assert [memory.metric for memory in opened.memories[::2]] == ["l2", "ip"]
    used = stores_of(opened, MIXED)
    alone = [Mixture.open(each, lm).translate(MIXED, **SETTINGS) for each in (other, path)]
    expected = [alone[(other, path).index(each)][row] for row, each in enumerate(used)]
    assert set(used) == {other, path}
    assert opened.translate(MIXED, **SETTINGS) == expected
    behind = Mixture.open(path, lm, memories=f"knn,knn={other},ngram={other}")
    assert behind.translate(MIXED, **SETTINGS) == expected
    assert opened.weights_kind == "gated, fitted"
    skipping = MixtureOptions(skip_fraction=0.1)
    with pytest.raises(ParameterError, match="Only a gate can skip searches"):  # the weights of one are fitted
        Mixture.open(other, lm, memories=f"knn,ngram,knn={path}", options=skipping)
    for names, named in ((f"knn,knn={path}", other), (f"knn,ngram,knn={paths[1]},ngram={paths[1]}", paths[1])):
        with pytest.warns(KnnlmWarning, match=f"{named} is not tuned with knn(,ngram)? alone"):
            assert Mixture.open(other, lm, memories=names).router is None


def test_domain_check_is_that_of_the_store(lm, paths, tmp_path):
    path = tmp_path / "first"
    build(marked(60, 0, "with"), path, lm=lm).close()
    tuned = Mixture.open(path, lm, memories="knn", use_tuned=False)
    tuned.tune(marked(20, 100, "with"), other=marked(60, 900, "memory"), samples=0, ks=[4])
    assert tuned.source_domain is not None
    opened = open_both(lm, (path, paths[1]))
    texts = [*TEXTS, *(pair.source_text for pair in marked(40, 950, "memory"))]
    routes = opened.route_sources([tuple(row) for row in lm.encode_sources(texts)])
    expected = [
        route.store.path if route is opened.by_store[1] or inside else None
        for route, inside in zip(routes, stores_of(Mixture.open(path, lm), texts), strict=True)
    ]
    assert expected.count(None) > 2
    assert stores_of(opened, texts) == expected
    alone = opened.translate(texts, use_memory=False, **SETTINGS)
    for row, text in enumerate(opened.translate(texts, **SETTINGS)):
        if expected[row] is None:
            assert text == alone[row]
    unchecked = open_both(lm, (path, paths[1]), options=MixtureOptions(domain_check=False))
    assert None not in stores_of(unchecked, texts)
    opened.domain_check = False
    assert None not in stores_of(opened, texts)


def test_settings_and_a_tuning_of_both_leave_the_routes_out(lm, paths, tmp_path):
    for options in ({"lmbda": 0.4}, {"k": 3}, {"use_tuned": False}):
        assert open_both(lm, paths, **options).router is None
    weighted = Mixture.open(paths[0], lm, memories=f"knn:0.2,knn={paths[1]}:0.2")
    assert weighted.router is None
    path = tmp_path / "untuned"
    build(FIRST, path, lm=lm).close()
    with pytest.warns(KnnlmWarning, match=f"{path} is not tuned with knn alone"):
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
    routes = [paths.index(path) for path in stores_of(both, [pair.source_text for pair in valid])]
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
    stores = [paths.index(path) for path in stores_of(both, MIXED)]
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
        same_tokens(single["knnlm"], traced[number]["knnlm"])


def same_tokens(one, other):
    """Compare the probabilities of the tokens of two responses."""
    for name in ("p", "p_lm", "p_knn"):
        expected = [token[name] for token in one["tokens"]]
        assert [token[name] for token in other["tokens"]] == pytest.approx(expected, rel=1e-5)


def test_translations_are_rescored_by_the_store_of_each_source(lm, paths, both):
    changes = ({}, {"lambda": 0.5}, {"k": 1}, {"k": 2, "knn_temperature": 3.0, "lambda": 0.9})
    number = [stores_of(both, [text])[0] for text in MIXED].index(paths[1])
    with serving(both) as served, serving(Mixture.open(paths[1], lm)) as single:
        assert served.client().get("/v1/models").json()["data"][0]["knnlm"]["lambda"] is None
        found, right = (
            each.post("/v1/translate", text=MIXED[number], max_tokens=12, sources=4)["translations"][0]["knnlm"]
            for each in (served, single)
        )
        assert (found["k"], right["k"]) == (2, 8)  # of any of the stores, of this one
        for change in changes:
            rescored = [
                each.post("/v1/rescore", id=own["id"], **change) for each, own in ((served, found), (single, right))
            ]
            same_tokens(rescored[1]["knnlm"], rescored[0]["knnlm"])
            assert rescored[0]["perplexity"] == pytest.approx(rescored[1]["perplexity"], rel=1e-5)
        memory = {"k": 1, "lambda": 0.9, "knn_temperature": 2.0}
        changed = [
            each.post("/v1/translate", text=MIXED[number], max_tokens=12, sources=1, memory=memory)["translations"][0]
            for each in (served, single)
        ]
        assert changed[0]["text"] == changed[1]["text"]
        same_tokens(changed[1]["knnlm"], changed[0]["knnlm"])


def sources_of(translation):
    """The stored pairs behind the tokens of a translation."""
    return [source for token in translation["knnlm"]["tokens"] for source in token["sources"]]


def test_sources_are_found_among_those_that_are_stored(lm, paths, both):
    catalog = both.stores[0].catalog
    stored = [pair.source_text for pair in FIRST[:3]]
    spaces, ligature = stored[2].replace(" ", " \t "), stored[2].replace("with", "wi\uff54h")
    texts = [f"  {stored[0]}\n", stored[1] + ".", stored[2], "", "nothing like it", spaces, ligature]
    assert catalog.contains_sources(texts) == [True, False, True, False, False, True, True]
    assert catalog.contains_sources([]) == []


def test_only_new_sources_are_read_when_a_store_is_opened_again(lm, tmp_path, monkeypatch):
    path = tmp_path / "store"
    build(FIRST, path, lm=lm).close()
    mixture = Mixture.open(path, lm, memories="knn")
    texts = [pair.source_text for pair in (*FIRST[:2], *SECOND[:2])]
    assert mixture.store.catalog.contains_sources(texts) == [True, True, False, False]
    add(SECOND[:1], path, lm=lm)
    remove(path, document=FIRST[0].id)
    read, original = [], Catalog._sources_of
    monkeypatch.setattr(Catalog, "source_texts", lambda _: read.append("all") or [])
    monkeypatch.setattr(Catalog, "_sources_of", lambda self, numbers: read.extend(numbers) or original(self, numbers))
    again = mixture.reopen()
    assert again.store.catalog.contains_sources(texts) == [False, True, True, False]
    assert read == [len(FIRST)]
    assert again.reopen().store.catalog.contains_sources(texts) == [False, True, True, False]
    assert read == [len(FIRST)]
    assert mixture.store.catalog.contains_sources(texts) == [True, True, False, False]
