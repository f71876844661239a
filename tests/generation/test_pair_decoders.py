"""Translation with a second encoder-decoder model as a memory, against passes of both models over each prefix."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers.models import SEQ2SEQ_FAMILIES, pair_tokenizer, tiny, tiny_tokenizer
from helpers.pairs import BruteForce, BruteForceScores, languages, pair_lm, pairs, read_last, start_tokens
from knnlm.corpus import Document
from knnlm.errors import ModelError, ModelMismatch, ParameterError
from knnlm.generation.seq2seq import KnnForSeq2SeqLM
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.mixture.mixture import Mixture

FAMILIES = sorted(SEQ2SEQ_FAMILIES.keys() - {"whisper"})
STORED = pairs(16)
SOURCES = [each.source_text or "" for each in (*STORED[:2], *pairs(2, start=70))]
KNN, DECODER = 0.3, 0.4  # weights; the model has the rest
NEW_TOKENS = 7


def save_decoder(family: str, folder: Path) -> Path:
    """Save a model of a family with other weights, and its tokenizer."""
    tiny(family, seed=1).save_pretrained(folder)
    pair_tokenizer(family).save_pretrained(folder)
    return folder


class Case:
    """A model of a family, a second one, a store of the first, and their mixture."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self.lm = family, pair_lm(family)
        build(STORED, folder / "pairs.store", lm=self.lm, key_format="float32")
        decoder = save_decoder(family, folder / "decoder")
        memories = f"knn:{KNN},decoder={decoder}:{DECODER}"
        self.mixture = Mixture.open(folder / "pairs.store", self.lm, memories=memories, k=5, knn_temperature=4.0)
        self.model = KnnForSeq2SeqLM(self.mixture)
        self.decoder = self.mixture.readers.models[1]
        self.brute_force = BruteForce(self.lm, family, STORED)
        self.start = start_tokens(family, self.lm.tokenizer)
        self.sources = [self.lm.tokenizer(source)["input_ids"] for source in SOURCES]

    def next_distribution(self, source: list[int], written: list[int]) -> np.ndarray:
        """(1 - λ_knn - λ_decoder)·p_NMT + λ_knn·p_kNN + λ_decoder·p_decoder, each from one pass over the prefix."""
        key, p_lm = read_last(self.lm, self.family, source, written)
        _, p_decoder = read_last(self.decoder, self.family, source, written)
        p_knn = self.brute_force.distribution(key, p_lm, k=5, knn_temperature=4.0, lmbda=1.0)
        return (1 - KNN - DECODER) * p_lm + KNN * p_knn + DECODER * p_decoder

    def inputs(self, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
        return self.lm.pad_sources(self.sources[rows])


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """The case of a family, which is built once."""
    return lru_cache(lambda family: Case(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module", params=FAMILIES)
def every(request, case):
    return case(request.param)


@pytest.mark.parametrize("beams", [1, 3])
def test_batch_is_translated_as_by_brute_force_with_both_models(every, beams):
    inputs = every.inputs()
    options = {"num_beams": beams, "max_new_tokens": NEW_TOKENS}
    start = torch.tensor([every.start]).expand(len(SOURCES), -1)
    right = every.lm.model.generate(
        **inputs,
        **options,
        decoder_input_ids=start,
        decoder_start_token_id=every.start[0],
        logits_processor=transformers.LogitsProcessorList([BruteForceScores(every, beams)]),
    )
    assert every.model.generate(**inputs, **options).tolist() == right.tolist()
    assert every.model.generate(**inputs, **options, use_cache=False).tolist() == right.tolist()


def test_forward_in_steps_gives_the_distributions_of_brute_force(every):
    source = every.sources[1]
    ids = [*every.start, *every.lm.encode(STORED[4].text)]
    whole = every.model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids])).logits[0].detach()
    for position in range(len(every.start), len(ids) + 1):
        right = every.next_distribution(source, ids[:position])
        np.testing.assert_allclose(whole[position - 1].exp(), right, rtol=1e-3, atol=1e-6)
    past, steps = None, []
    for token in ids:  # the first steps are those of tokens before the text, where a family has some
        step = torch.tensor([[token]])
        output = every.model(
            input_ids=torch.tensor([source]), decoder_input_ids=step, past_key_values=past, use_cache=True
        )
        past = output.past_key_values
        steps.append(output.logits[0])
    first = len(every.start) - 1
    torch.testing.assert_close(torch.cat(steps)[first:].detach(), whole[first:], rtol=1e-4, atol=1e-4)


def test_perplexity_is_that_of_brute_force(every):
    tests = pairs(4, start=40)
    log_p = []
    for pair in tests:
        source = every.lm.tokenizer(pair.source_text)["input_ids"]
        target = [*every.lm.encode(pair.text), every.lm.tokenizer.eos_token_id]
        for place, token in enumerate(target):
            log_p.append(math.log(every.next_distribution(source, [*every.start, *target[:place]])[token]))
    assert every.mixture.evaluate(tests).perplexity == pytest.approx(math.exp(-np.mean(log_p)), rel=1e-4)


def test_tuned_gate_over_a_decoder_translates_with_and_without_a_cache(case, tmp_path):
    marian = case("marian")
    build(STORED, tmp_path / "tuned.store", lm=marian.lm)
    similar = pairs(24, start=8)
    memories = f"knn,ngram,decoder={save_decoder('marian', tmp_path / 'decoder')}"
    Mixture.open(tmp_path / "tuned.store", marian.lm, memories=memories).tune(similar, ks=[1, 4])
    mixture = Mixture.open(tmp_path / "tuned.store", marian.lm)
    assert sorted(memory.name for memory in mixture.memories) == ["decoder", "knn", "ngram"]
    model, options = KnnForSeq2SeqLM(mixture), {"num_beams": 2, "max_new_tokens": NEW_TOKENS}
    with_cache = model.generate(**marian.inputs(), **options)
    assert with_cache.tolist() == model.generate(**marian.inputs(), **options, use_cache=False).tolist()


def test_encoder_of_the_decoder_runs_once_for_a_translation(case):
    marian = case("marian")
    calls: list[Any] = []
    handle = marian.decoder.model.get_encoder().register_forward_pre_hook(lambda *_: calls.append(1))
    marian.model.generate(**marian.inputs(), num_beams=2, max_new_tokens=NEW_TOKENS)
    handle.remove()
    assert len(calls) == 1


def test_store_is_not_searched_for_texts_that_have_ended_or_are_outside_the_domain(case, monkeypatch):
    marian = case("marian")
    queries: list[int] = []
    search = marian.mixture.knn.search

    def counted(keys, *args):
        queries.append(len(keys))
        return search(keys, *args)

    monkeypatch.setattr(marian.mixture.knn, "search", counted)
    inputs, end = marian.inputs(), marian.lm.tokenizer.eos_token_id
    written = marian.model.generate(**inputs, max_new_tokens=NEW_TOKENS)[:, len(marian.start) :].tolist()
    lengths = [row.index(end) + 1 if end in row else len(row) for row in written]
    assert len(set(lengths)) > 1  # else no text ends before the others
    assert sum(queries) == sum(lengths)
    queries.clear()
    monkeypatch.setattr(type(marian.mixture), "checks_sources", True)
    monkeypatch.setattr(marian.mixture, "outside_domain", lambda states, _: torch.ones(len(states), dtype=torch.bool))
    outside = marian.model.generate(**inputs, max_new_tokens=NEW_TOKENS)
    assert queries == []
    alone = marian.lm.model.generate(
        **inputs,
        decoder_input_ids=torch.tensor([marian.start]).expand(len(SOURCES), -1),
        decoder_start_token_id=marian.start[0],
        max_new_tokens=NEW_TOKENS,
    )
    assert outside.tolist() == alone.tolist()


def test_encoder_output_alone_is_refused(case):
    marian = case("marian")
    inputs = marian.inputs()
    encoded = marian.lm.model.get_encoder()(**inputs)
    with pytest.raises(ModelError, match="decoder reads the sources too: pass input_ids, not encoder_outputs"):
        marian.model.generate(encoder_outputs=encoded, max_new_tokens=2)


def test_decoders_of_another_kind_or_language_are_refused(case, tmp_path):
    nllb = case("m2m_100")
    store = nllb.mixture.store.path
    english = {"src_lang": "eng_Latn", "tgt_lang": "eng_Latn"}
    opened = Seq2SeqLM(tiny("m2m_100"), pair_tokenizer("m2m_100"), name="other", **english)
    with pytest.raises(ModelMismatch, match="src lang eng_Latn"):
        nllb.mixture.readers.add(opened)
    tiny("gpt2").save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ModelMismatch, match="another tokenizer"):
        Mixture.open(store, nllb.lm, memories=f"knn,decoder={tmp_path / 'gpt2'}")
    texts = [Document("a", "a.txt", "some words of a text")]
    lm = CausalLM.open(str(tmp_path / "gpt2"), device="cpu")
    build(texts, tmp_path / "texts.store", lm=lm)
    with pytest.raises(ParameterError, match="is an encoder-decoder model, which reads a source beside each text"):
        Mixture.open(tmp_path / "texts.store", lm, memories=f"knn,decoder={save_decoder('marian', tmp_path / 'pair')}")


def test_languages_of_a_decoder_are_those_of_the_model(case):
    nllb = case("m2m_100")
    assert isinstance(nllb.decoder, Seq2SeqLM)
    assert (nllb.decoder.src_lang, nllb.decoder.tgt_lang) == tuple(languages("m2m_100").values())
