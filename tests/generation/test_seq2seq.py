"""Translation with memories: transformers' generate against brute force, which reads every prefix by itself."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers.pairs import BruteForce, BruteForceScores, pair_lm, pairs, read_last, start_tokens
from knnlm.errors import ModelError, ParameterError
from knnlm.generation.seq2seq import KnnForSeq2SeqLM, translate
from knnlm.index.bm25 import BM25
from knnlm.ingest.build import build
from knnlm.memories.automaton import AutomatonParams
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.online import OnlineConfig
from knnlm.mixture.spec import MixtureOptions

STORED = pairs(24)
SOURCES = [each.source_text or "" for each in (*STORED[:3], *pairs(3, start=70))]
SETTINGS = {"k": 5, "knn_temperature": 4.0, "lmbda": 0.6}
NEW_TOKENS = 9


class Case:
    """A model of a family, a store, its mixture and its brute force."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self.lm = family, pair_lm(family)
        self.path = folder / "pairs.store"
        build(STORED, self.path, lm=self.lm, key_format="float32")
        self.brute_force = BruteForce(self.lm, family, STORED)
        self.start = start_tokens(family, self.lm.tokenizer)
        self.sources = [self.lm.tokenizer(source)["input_ids"] for source in SOURCES]

    def model(self, **settings: Any) -> KnnForSeq2SeqLM:
        return KnnForSeq2SeqLM(Mixture.open(self.path, self.lm, **{**SETTINGS, **settings}))

    def next_distribution(self, source: list[int], written: list[int]) -> np.ndarray:
        key, p_lm = read_last(self.lm, self.family, source, written)
        return self.brute_force.distribution(key, p_lm, **SETTINGS)

    def inputs(self, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
        return self.lm.pad_sources(self.sources[rows])


@pytest.fixture(scope="module")
def marian(case):
    return case("marian")


@pytest.fixture(scope="module")
def nllb(case):
    return case("m2m_100")


def reference(case: Case, *, beams: int = 1, rows: slice = slice(None), **settings: Any) -> torch.Tensor:
    """What the plain model generates with scores by brute force."""
    inputs = case.inputs(rows)
    start = torch.tensor([case.start]).expand(len(inputs["input_ids"]), -1)
    return case.lm.model.generate(
        **inputs,
        decoder_input_ids=start,
        decoder_start_token_id=case.start[0],
        num_beams=beams,
        max_new_tokens=NEW_TOKENS,
        logits_processor=transformers.LogitsProcessorList([BruteForceScores(case, beams)]),
        **settings,
    )


def test_greedy_translation_is_that_of_brute_force_token_by_token(every):
    model = every.model()
    for number, source in enumerate(every.sources[:4]):
        written = list(every.start)
        for _ in range(NEW_TOKENS):
            token = int(every.next_distribution(source, written).argmax())
            written.append(token)
            if token == every.lm.tokenizer.eos_token_id:
                break
        row = every.inputs(slice(number, number + 1))
        assert model.generate(**row, max_new_tokens=NEW_TOKENS)[0].tolist() == written


def test_batch_of_sources_is_translated_as_each_alone(every):
    model = every.model()
    together = model.generate(**every.inputs(), max_new_tokens=NEW_TOKENS)
    end = every.lm.tokenizer.eos_token_id
    for number in range(len(SOURCES)):
        alone = model.generate(**every.inputs(slice(number, number + 1)), max_new_tokens=NEW_TOKENS)[0].tolist()
        row = together[number].tolist()[: len(alone)]
        assert row == alone
        assert alone[-1] == end or len(alone) == len(every.start) + NEW_TOKENS


def test_beams_are_those_of_brute_force(every):
    found = every.model().generate(**every.inputs(slice(0, 3)), num_beams=3, max_new_tokens=NEW_TOKENS)
    right = reference(every, beams=3, rows=slice(0, 3))
    assert found.tolist() == right.tolist()


def test_samples_are_those_of_brute_force(marian, nllb):
    for case in (marian, nllb):
        torch.manual_seed(3)
        found = case.model().generate(**case.inputs(), do_sample=True, max_new_tokens=NEW_TOKENS)
        torch.manual_seed(3)
        assert found.tolist() == reference(case, do_sample=True).tolist()


@pytest.mark.parametrize("beams", [1, 3])
def test_memories_that_read_tokens_follow_their_beams(every, beams):
    model = every.model(memories="knn,ngram", k=None, knn_temperature=None)
    options = {"num_beams": beams, "max_new_tokens": NEW_TOKENS}
    with_cache = model.generate(**every.inputs(), **options)
    without = model.generate(**every.inputs(), **options, use_cache=False)
    assert with_cache.tolist() == without.tolist()


@pytest.mark.parametrize("weights", ["gated", "fixed"])
def test_tuned_mixture_with_online_weights_translates(nllb, tmp_path, weights):
    path = tmp_path / "tuned.store"
    build(STORED, path, lm=nllb.lm)
    similar = [replace(each, id=f"s{each.id}", source_text=f"{each.source_text}!") for each in STORED]
    Mixture.open(path, nllb.lm, memories="knn,ngram").tune(similar, weights=weights, ks=[1, 4])
    mixture = Mixture.open(path, nllb.lm)
    assert mixture.online is None  # no token of a translation is evidence
    mixture.online = OnlineConfig(0.1, 0.01)
    model = KnnForSeq2SeqLM(mixture)
    for options in ({}, {"num_beams": 3}):
        found, plain = (
            model.generate(**nllb.inputs(), max_new_tokens=NEW_TOKENS, use_cache=cached, **options)
            for cached in (True, False)
        )
        assert found.tolist() == plain.tolist()


def test_forward_gives_the_distributions_of_brute_force_and_the_loss_of_labels(every):
    model, source = every.model(), every.sources[1]
    target = every.lm.encode(STORED[4].text)
    ids = [*every.start, *target]
    output = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids]))
    assert output.logits.shape == (1, len(ids), every.lm.vocab_size)
    for position in range(len(every.start), len(ids) + 1):
        right = every.next_distribution(source, ids[:position])
        np.testing.assert_allclose(output.logits[0, position - 1].exp().detach(), right, rtol=1e-3, atol=1e-6)
    labels = torch.tensor([[*ids[1:], every.lm.tokenizer.eos_token_id]])
    loss = model(input_ids=torch.tensor([source]), labels=labels).loss.detach()
    picked = output.logits[0].detach().gather(1, labels[0, :, None])
    assert float(loss) == pytest.approx(-float(picked.mean()), rel=1e-5)


@pytest.mark.parametrize("memories", ["knn", "knn,ngram"])
def test_steps_with_a_cache_give_the_same_distributions(every, memories):
    model = every.model(memories=memories, k=None, knn_temperature=None)
    source = torch.tensor([every.sources[0]])
    ids = torch.tensor([[*every.start, *every.lm.encode(STORED[5].text)]])
    whole = model(input_ids=source, decoder_input_ids=ids).logits
    past, steps = None, []
    for position in range(ids.shape[1]):
        step = ids[:, position : position + 1]
        output = model(input_ids=source, decoder_input_ids=step, past_key_values=past, use_cache=True)
        past = output.past_key_values
        steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)


def test_deferred_checks_do_not_change_a_translation(marian):
    model = marian.model()
    plain = model.generate(**marian.inputs(), max_new_tokens=NEW_TOKENS)
    model.deferred_checks = True
    assert model.generate(**marian.inputs(), max_new_tokens=NEW_TOKENS).tolist() == plain.tolist()


@pytest.mark.parametrize("copy_store", [False, True])
def test_saved_model_translates_the_same(nllb, tmp_path, copy_store):
    model = nllb.model()
    model.save_pretrained(tmp_path / "saved", copy_store=copy_store)
    # Positions of these models are not saved, so the saved base model is the reference.
    for opened in (
        KnnForSeq2SeqLM.from_pretrained(tmp_path / "saved"),
        transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved"),
    ):
        assert type(opened) is KnnForSeq2SeqLM
        assert opened.mixture.lm.tgt_lang == "eng_Latn"
        assert opened.config.is_encoder_decoder
        assert opened.mixture.lmbda == pytest.approx(0.6)
        translated = opened.generate(**nllb.inputs(), max_new_tokens=NEW_TOKENS)
        assert translated[:, :2].tolist() == [nllb.start] * len(SOURCES)


def test_saved_model_searches_the_same_subset(nllb, tmp_path):
    options = MixtureOptions(subset=1)
    nllb.model(options=options, lmbda=0.9).save_pretrained(tmp_path / "saved")
    opened = KnnForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    assert opened.mixture.options == options
    lm = opened.mixture.lm  # the saved base model is the reference, as above
    subset, whole = (
        KnnForSeq2SeqLM(Mixture.open(nllb.path, lm, **{**SETTINGS, "lmbda": 0.9}, options=each))
        for each in (options, MixtureOptions())
    )
    found, right, other = (
        each.generate(**nllb.inputs(), max_new_tokens=NEW_TOKENS).tolist() for each in (opened, subset, whole)
    )
    assert found == right
    assert found != other  # so that the test above can fail


class SubsetCase(Case):
    """Brute force over the pairs whose sources are nearest to the one that is translated."""

    def __init__(self, case: Case, sentences: int) -> None:
        vars(self).update(vars(case))
        special = set(self.lm.tokenizer.all_special_ids)
        words = [
            [token for token in tokens if token not in special]
            for tokens in self.lm.tokenizer([each.source_text for each in STORED])["input_ids"]
        ]
        self.bm25, self.special, self.sentences = BM25(words), special, sentences

    def model(self, **settings: Any) -> KnnForSeq2SeqLM:
        return super().model(options=MixtureOptions(subset=self.sentences), **settings)

    def next_distribution(self, source: list[int], written: list[int]) -> np.ndarray:
        key, p_lm = read_last(self.lm, self.family, source, written)
        words = [token for token in source if token not in self.special]
        nearest = self.brute_force.only(self.bm25.nearest(words, self.sentences))
        return nearest.distribution(key, p_lm, **SETTINGS)


@pytest.mark.parametrize("beams", [1, 3])
def test_subset_search_translates_as_brute_force_over_the_nearest_pairs(every, beams):
    case = SubsetCase(every, 3)
    model = case.model()
    found = model.generate(**case.inputs(), num_beams=beams, max_new_tokens=NEW_TOKENS)
    assert found.tolist() == reference(case, beams=beams).tolist()
    assert model.mixture.needs_sources
    several = {"num_return_sequences": 3, "num_beams": 3, "max_new_tokens": 4}
    assert model.generate(**case.inputs(slice(0, 2)), **several).shape[0] == 6


def test_automata_follow_each_translation_of_a_batch(every):
    options = MixtureOptions(automaton=AutomatonParams(min_pointers=1))
    model = every.model(options=options)
    found = model.generate(**every.inputs(), max_new_tokens=NEW_TOKENS)
    before, searches = len(every.start), []
    for row, target in zip(range(len(SOURCES)), found, strict=True):
        tokens = target[before:].tolist()
        ends = [place for place, token in enumerate(tokens) if token == every.lm.tokenizer.eos_token_id]
        written = tokens[: ends[0]] if ends else tokens[:-1]  # the last token may be forced
        _, context = model.read_target(every.inputs(slice(row, row + 1)), written)
        retrieved = model.mixture.retrieve(context)
        log_p = model.mixture.predict(context, retrieved).log_probs()
        assert log_p.argmax(1).tolist() == written
        searches += retrieved.neighbours[0].followed.searched.tolist()
    assert 0 < sum(searches) < len(searches)


class EveryOther:
    """Stands for the domain of sources: every other source of a batch is inside."""

    def in_domain(self, states, _):
        return torch.arange(len(states)) % 2 == 0


def unseen(case: Case, count: int) -> dict[str, torch.Tensor]:
    """Sources that the store does not contain."""
    sources = [each.source_text or "" for each in pairs(count, start=70)]
    return case.lm.pad_sources(case.lm.tokenizer(sources)["input_ids"])


def test_source_outside_the_domain_continues_a_target_by_the_model_alone(marian, monkeypatch):
    """With online weights, more positions of the given target are predicted than are returned."""
    model = marian.model()
    model.mixture.online = OnlineConfig(0.1, 0.01)
    monkeypatch.setattr(model.mixture, "restrict_to_domain", lambda mixed: mixed)  # by the given target
    inputs = unseen(marian, 2)
    target = torch.tensor([[*marian.start, 5, 6]] * 2)
    length = {"min_new_tokens": 5, "max_new_tokens": 5}  # of every row, whatever it contains
    everywhere = model.generate(**inputs, decoder_input_ids=target, **length)
    model.mixture.source_domain = EveryOther()
    found = model.generate(**inputs, decoder_input_ids=target, **length)
    alone = marian.lm.model.generate(**inputs, decoder_input_ids=target, **length)
    assert everywhere[1].tolist() != alone[1].tolist()  # so that the test can fail
    assert found[0].tolist() == everywhere[0].tolist()
    assert found[1].tolist() == alone[1].tolist()


def test_odds_of_the_end_are_those_of_translations_with_the_memories(marian):
    """Against transformers' own bias of a token, which shifts the scores of one step alike."""
    model = marian.model()
    length = {"max_new_tokens": 12}
    end, inputs = marian.lm.end_tokens[-1], unseen(marian, 4)
    model.mixture.source_domain = EveryOther()
    plain = model.generate(**inputs, **length)
    model.mixture.end_odds = 1e4
    ended = model.generate(**inputs, **length)
    assert [row[1].item() == end for row in plain] == [False] * 4
    assert [row[1].item() == end for row in ended] == [True, False, True, False]
    assert ended[1::2].tolist() == plain[1::2].tolist()
    model.mixture.source_domain, model.mixture.end_odds = None, 1 / 8
    found = model.generate(**inputs, **length)
    model.mixture.end_odds = 1.0
    biased = model.generate(**inputs, **length, sequence_bias={(end,): -math.log(8)})
    assert found.tolist() == biased.tolist()


def searched(model: KnnForSeq2SeqLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of queries of each search, from now on."""
    counts, search = [], model.mixture.knn.search

    def counted(keys, *others):
        counts.append(len(keys))
        return search(keys, *others)

    monkeypatch.setattr(model.mixture.knn, "search", counted)
    return counts


def unfinished(written: torch.Tensor, end: int | None, start: int) -> list[int]:
    """The number of texts without an end before each step."""
    texts = written[:, start:].tolist()
    return [sum(end not in text[:step] for text in texts) for step in range(len(texts[0]))]


def test_texts_that_have_ended_are_not_searched(every, monkeypatch):
    model, end, start = every.model(), every.lm.tokenizer.eos_token_id, len(every.start)
    counts = searched(model, monkeypatch)
    written = model.generate(**every.inputs(), max_new_tokens=NEW_TOKENS)
    right = unfinished(written, end, start)
    assert right[0] == len(SOURCES) > right[-1] > 0  # so that the test can fail
    assert counts == right
    counts.clear()
    endless = model.generate(**every.inputs(), max_new_tokens=NEW_TOKENS, eos_token_id=None)
    assert counts == [len(SOURCES)] * NEW_TOKENS  # with the end token as any other
    assert any(end in row for row in endless[:, start:-1].tolist())
    counts.clear()
    model.generate(**every.inputs(), max_new_tokens=4, num_beams=2)
    assert set(counts) == {2 * len(SOURCES)}


def test_texts_that_met_a_criterion_are_not_searched(marian, monkeypatch):
    model = marian.model()
    every_other = torch.arange(len(SOURCES)) % 2 == 0
    counts = searched(model, monkeypatch)
    criteria = transformers.StoppingCriteriaList([lambda ids, *_, **__: every_other & (ids.shape[1] > 3)])
    model.generate(**marian.inputs(), max_new_tokens=5, min_new_tokens=5, stopping_criteria=criteria)
    assert counts == [6, 6, 6, 3, 3]


def test_sources_outside_the_domain_are_not_searched(marian, monkeypatch):
    model = marian.model()
    counts, inputs = searched(model, monkeypatch), unseen(marian, 5)
    length = {"max_new_tokens": 4, "min_new_tokens": 4}
    model.mixture.source_domain = EveryOther()
    model.generate(**inputs, **length)
    model.generate(**inputs, **length, num_beams=2)
    assert counts == [3] * 4 + [5] * 4  # every other one of 10 beams
    assert model.outside == [False, False, False, False, False]  # the first beam of each source
    counts.clear()
    monkeypatch.setattr(EveryOther, "in_domain", lambda _, states, __: torch.zeros(len(states), dtype=torch.bool))
    found = model.generate(**inputs, **length)
    assert counts == []
    assert found.tolist() == marian.lm.model.generate(**inputs, **length).tolist()


def test_subset_search_with_online_weights_and_tokens_follows_its_beams(nllb, tmp_path):
    path = tmp_path / "tuned.store"
    build(STORED, path, lm=nllb.lm)
    similar = [replace(each, id=f"s{each.id}", source_text=f"{each.source_text}!") for each in STORED]
    options = MixtureOptions(subset=4)
    Mixture.open(path, nllb.lm, memories="knn,ngram", options=options).tune(similar, ks=[1, 4])
    model = KnnForSeq2SeqLM(Mixture.open(path, nllb.lm, options=options))
    for beams in (1, 3):
        found, plain = (
            model.generate(**nllb.inputs(), max_new_tokens=NEW_TOKENS, use_cache=cached, num_beams=beams)
            for cached in (True, False)
        )
        assert found.tolist() == plain.tolist()


def test_forward_of_a_subset_search_reads_the_sources(marian):
    case = SubsetCase(marian, 2)
    model = case.model()
    inputs = case.inputs(slice(0, 3))
    ids = torch.tensor([[*case.start, *case.lm.encode(STORED[4].text)]]).expand(3, -1)
    with torch.no_grad():
        log_p = model(**inputs, decoder_input_ids=ids).logits
        for row, source in enumerate(case.sources[:3]):
            for position in range(len(case.start), ids.shape[1] + 1):
                right = case.next_distribution(source, ids[row, :position].tolist())
                np.testing.assert_allclose(log_p[row, position - 1].exp(), right, rtol=1e-3, atol=1e-6)
        encoded = case.lm.model.get_encoder()(**inputs)
        mask = inputs["attention_mask"]
        with pytest.raises(ModelError, match="needs the sources: give their tokens as input_ids"):
            model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=ids)


def test_texts_are_translated_in_their_order_whatever_the_batch(marian):
    mixture = Mixture.open(marian.path, marian.lm, **SETTINGS)
    options = {"max_new_tokens": NEW_TOKENS}
    found = translate(mixture, SOURCES, batch_size=2, **options)
    assert found == mixture.translate(SOURCES, **options)
    assert found == [translate(mixture, [source], **options)[0] for source in SOURCES]
    alone = translate(mixture, SOURCES, use_memory=False, **options)
    lm = marian.lm
    plain = lm.model.generate(**marian.inputs(), **options)
    assert alone == [text.strip() for text in lm.tokenizer.batch_decode(plain, skip_special_tokens=True)]
    assert translate(mixture, [], **options) == []


def test_store_with_a_large_weight_translates_its_own_sources(tmp_path):
    case = Case("t5", tmp_path)
    mixture = Mixture.open(case.path, case.lm, k=1, lmbda=0.99)
    assert mixture.translate([each.source_text for each in STORED]) == [each.text for each in STORED]


def test_wrong_uses_are_errors_in_words(marian, nllb, store, lm):
    with pytest.raises(ModelError, match="KnnForSeq2SeqLM needs an encoder-decoder model, but tiny-llama"):
        KnnForSeq2SeqLM(Mixture.open(store.path, lm))
    with pytest.raises(ModelError, match="Only an encoder-decoder model translates"):
        Mixture.open(store.path, lm).translate(["A text"])
    mixture = Mixture.open(marian.path, marian.lm)
    with pytest.raises(ParameterError, match="it translates a source, with knnlm translate"):
        mixture.generate("Hello")
    with pytest.raises(ParameterError, match="Text 2 is empty"):
        mixture.translate(["A", " "])
    with pytest.raises(ParameterError, match="at least 1"):
        mixture.translate(["A"], max_new_tokens=0)
    model = nllb.model()
    with pytest.raises(ParameterError, match="another target language than that of the store, eng_Latn"):
        model.generate(**nllb.inputs(), forced_bos_token_id=5)
    own = nllb.lm.start_token
    assert model.generate(**nllb.inputs(), forced_bos_token_id=own, max_new_tokens=2)[:, 1].tolist() == [own] * 6
    with pytest.raises(ParameterError, match="another target language than that of the store, eng_Latn"):
        model.generate(**nllb.inputs(), generation_config=transformers.GenerationConfig(forced_bos_token_id=5))
    with pytest.raises(ParameterError, match="generate needs input_ids"):
        model.generate()
    with pytest.raises(ModelError, match="Give decoder_input_ids or labels"):
        model(**nllb.inputs())


def test_forced_language_of_a_generation_config_is_written_once(every):
    model = every.model()
    config = transformers.GenerationConfig(forced_bos_token_id=every.lm.start_token, max_new_tokens=4)
    config.eos_token_id = model.generation_config.eos_token_id
    plain = model.generate(**every.inputs(), max_new_tokens=4)
    assert model.generate(**every.inputs(), generation_config=config).tolist() == plain.tolist()
    assert config.forced_bos_token_id == every.lm.start_token


def test_targets_padded_on_the_left_and_single_texts_are_refused(marian):
    model, ids = marian.model(), torch.tensor([[1, 5, 6]])
    with pytest.raises(ModelError, match="padded on the left"):
        model(**marian.inputs(slice(1)), decoder_input_ids=ids, decoder_attention_mask=torch.tensor([[0, 1, 1]]))
    with pytest.raises(ParameterError, match="list of texts"):
        model.mixture.translate(SOURCES[0])
