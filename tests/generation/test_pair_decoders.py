"""Translation with a second encoder-decoder model as a memory, against passes of both models over each prefix."""

from __future__ import annotations

import math
from dataclasses import replace
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
from knnlm.generation.causal import prompt_length
from knnlm.generation.seq2seq import KnnForSeq2SeqLM
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.mixture.mixture import Mixture

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


@pytest.fixture(scope="module")
def tuned(case, tmp_path_factory):
    """A gate over the store of Marian and its decoder."""
    marian, path = case("marian"), tmp_path_factory.mktemp("tuned") / "pairs.store"
    build(STORED, path, lm=marian.lm)
    memories = f"knn,decoder={marian.decoder.name}"
    Mixture.open(path, marian.lm, memories=memories).tune(pairs(24, start=8), ks=[1, 4])
    return Mixture.open(path, marian.lm)


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}])
def test_tuned_gate_over_a_decoder_translates_with_and_without_a_cache(case, tuned, options):
    assert [memory.name for memory in tuned.memories] == ["knn", "decoder"]
    model, found = KnnForSeq2SeqLM(tuned), []
    for use_cache in (True, False):
        torch.manual_seed(2)
        inputs = case("marian").inputs()
        found.append(model.generate(**inputs, **options, max_new_tokens=NEW_TOKENS, use_cache=use_cache).tolist())
    assert found[0] == found[1]


def test_gate_over_a_decoder_generates_from_the_distributions_of_evaluation(case, tuned):
    """The positions that generation gives to the gate stand for the texts that evaluation gives to it."""
    marian, target = case("marian"), " ".join(each.text for each in STORED[2:5])
    pair = replace(STORED[3], text=target, source_text=SOURCES[1])
    model = KnnForSeq2SeqLM(tuned)
    ids = torch.tensor([[*marian.start, *marian.lm.encode(target)]])
    with prompt_length(1):  # as inside of `generate`
        logits = model(input_ids=torch.tensor([marian.sources[1]]), decoder_input_ids=ids).logits[0]
    wanted = [*marian.lm.encode(target), marian.lm.tokenizer.eos_token_id]
    picked = logits[-len(wanted) :].gather(1, torch.tensor(wanted)[:, None])
    assert math.exp(-picked.mean().item()) == pytest.approx(tuned.evaluate([pair]).perplexity, rel=1e-4)


def test_texts_of_a_cache_may_change_places_with_their_sources(case):
    """The layers of the second model over the sources follow those of the model."""
    for family in ("marian", "m2m_100"):
        own = case(family)
        inputs, start = own.inputs(slice(0, 2)), torch.tensor([own.start] * 2)
        past = own.model(**inputs, decoder_input_ids=start, use_cache=True).past_key_values
        following = torch.tensor([[7], [9]])
        past.reorder_cache(torch.tensor([1, 0]))
        swapped = {name: tensor.flip(0) for name, tensor in inputs.items()}
        found = own.model(**swapped, decoder_input_ids=following, past_key_values=past, use_cache=True).logits
        whole = own.model(**swapped, decoder_input_ids=torch.cat([start, following], 1)).logits[:, -1:]
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
        past.batch_select_indices(torch.tensor([1]))
        first = {name: tensor[:1] for name, tensor in inputs.items()}
        found = own.model(**first, decoder_input_ids=following[:1], past_key_values=past, use_cache=True).logits
        ids = torch.cat([start[:1], following[1:], following[:1]], 1)
        whole = own.model(**first, decoder_input_ids=ids).logits[:, -1:]
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


def test_model_inside_of_a_generation_has_sources_of_its_own(case):
    """Logits processors may call other mixtures, which must not read the sources of the running one."""
    marian, nllb = case("marian"), case("m2m_100")
    encoded = nllb.lm.model.get_encoder()(**nllb.inputs(slice(1, 2)))

    def processor(_, scores):
        with pytest.raises(ModelError, match="reads the sources with an encoder of its own"):
            nllb.model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([nllb.start]))
        return scores

    marian.model.generate(**marian.inputs(slice(0, 1)), max_new_tokens=2, logits_processor=[processor])


def test_store_of_another_reader_is_searched_with_its_keys(case, tmp_path):
    """The keys of the store are those of the second model, and its encoder reads the sources for them."""
    marian = case("marian")
    build(STORED, tmp_path / "other.store", lm=marian.decoder, key_format="float32")
    mixture = Mixture.open(tmp_path / "other.store", marian.lm, k=5, knn_temperature=4.0, lmbda=0.6)
    brute_force = BruteForce(marian.decoder, "marian", STORED)
    start = torch.tensor([marian.start])
    found = KnnForSeq2SeqLM(mixture).generate(**marian.inputs(), max_new_tokens=NEW_TOKENS).tolist()
    for source, row in zip(marian.sources, found, strict=True):
        written = start[0].tolist()
        for _ in range(NEW_TOKENS):
            key, _ = read_last(marian.decoder, "marian", source, written)
            _, p_lm = read_last(marian.lm, "marian", source, written)
            p = brute_force.distribution(key, p_lm, k=5, knn_temperature=4.0, lmbda=0.6)
            written.append(int(p.argmax()))
            if written[-1] == marian.lm.tokenizer.eos_token_id:
                break
        assert row[: len(written)] == written


def test_saved_mixture_with_a_decoder_translates_the_same(case, tmp_path):
    nllb = case("m2m_100")
    nllb.model.save_pretrained(tmp_path / "saved")
    opened = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    assert [memory.name for memory in opened.mixture.memories] == ["knn", "decoder"]
    reference = KnnForSeq2SeqLM(
        Mixture.open(
            nllb.mixture.path,
            opened.mixture.lm,  # positions of these models are not saved
            memories=f"knn:{KNN},decoder={nllb.decoder.name}:{DECODER}",
            k=5,
            knn_temperature=4.0,
        )
    )
    found, right = (model.generate(**nllb.inputs(), max_new_tokens=NEW_TOKENS) for model in (opened, reference))
    assert found.tolist() == right.tolist()


def test_encoder_of_the_decoder_runs_once_for_a_translation(case):
    marian = case("marian")
    calls: list[Any] = []
    handle = marian.decoder.model.get_encoder().register_forward_pre_hook(lambda *_: calls.append(1))
    marian.model.generate(**marian.inputs(), num_beams=2, max_new_tokens=NEW_TOKENS)
    handle.remove()
    assert len(calls) == 1


@pytest.mark.parametrize("gated", [False, True])
def test_store_is_not_searched_for_texts_that_have_ended_or_are_outside_the_domain(case, tuned, monkeypatch, gated):
    marian = case("marian")
    mixture = tuned if gated else marian.mixture
    model, queries, search = KnnForSeq2SeqLM(mixture), [], mixture.knn.search

    def counted(keys, *args):
        queries.append(len(keys))
        return search(keys, *args)

    monkeypatch.setattr(mixture.knn, "search", counted)
    inputs, end = marian.inputs(), marian.lm.tokenizer.eos_token_id
    written = model.generate(**inputs, max_new_tokens=NEW_TOKENS)[:, len(marian.start) :].tolist()
    lengths = [row.index(end) + 1 if end in row else len(row) for row in written]
    assert len(set(lengths)) > 1  # else no text ends before the others
    assert sum(queries) == sum(lengths)
    queries.clear()
    monkeypatch.setattr(type(mixture), "checks_sources", True)
    monkeypatch.setattr(mixture, "outside_domain", lambda states, _: torch.ones(len(states), dtype=torch.bool))
    outside = model.generate(**inputs, max_new_tokens=NEW_TOKENS)
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
    with pytest.raises(ModelError, match="decoder reads the sources with an encoder of its own: pass input_ids"):
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
    with pytest.raises(ModelMismatch, match=r"cannot be mixed with m2m_100: The tokenizer of .* has no languages"):
        Mixture.open(store, nllb.lm, memories=f"knn,decoder={save_decoder('marian', tmp_path / 'marian')}")
    short = Seq2SeqLM(SEQ2SEQ_FAMILIES["bart"](), pair_tokenizer("bart"), name="short")
    short.model.config.max_position_embeddings = 24
    with pytest.raises(ModelMismatch, match="short reads sources of at most 24 tokens, but bart reads longer ones"):
        case("bart").mixture.readers.add(short)
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
