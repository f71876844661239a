"""Encoder-decoder models: keys, log-probabilities and targets against plain passes of transformers, pair by pair."""

from __future__ import annotations

import sys
import warnings
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from helpers.models import LANGUAGES, SEQ2SEQ_FAMILIES, TEXT, VOCABULARY, pair_tokenizer, tiny
from helpers.pairs import ffn, languages
from helpers.pairs import start_tokens as start_of
from knnlm.corpus import Document
from knnlm.errors import CorpusError, KnnlmWarning, ModelError, ParameterError
from knnlm.lm.causal import CausalLM, KeyBatch
from knnlm.lm.fingerprint import identity_difference
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.lm.speech import open_lm
from knnlm.lm.windows import PairTokens, WindowShape, batches, first_tokens, windows

TEXT_FAMILIES = sorted(SEQ2SEQ_FAMILIES.keys() - {"whisper"})
families = pytest.mark.parametrize("family", TEXT_FAMILIES)


@lru_cache
def shared(family: str) -> Seq2SeqLM:
    return Seq2SeqLM(tiny(family), pair_tokenizer(family), name=family, **languages(family))


def start_tokens(family: str) -> list[int]:
    return start_of(family, shared(family).tokenizer)


def pairs(count: int = 7) -> list[Document]:
    words = TEXT.split()
    return [
        Document(
            f"p{n}",
            f"pairs.tsv:{n}",
            " ".join(words[3 * n : 3 * n + 2 + n % 4]),
            source_text=" ".join(words[5 * n : 5 * n + 1 + (3 * n) % 5]),
        )
        for n in range(count)
    ]


def plain(family: str, source: list[int], decoder_input: list[int]) -> tuple[Tensor, Tensor]:
    """The (T, D) keys and (T, V) log-probabilities of one pair, by a plain hook."""
    model, seen = shared(family).model, []

    def hook(_: nn.Module, args: Any) -> None:
        seen.append(args[0].clone())

    handle = model.get_submodule(ffn(family)).register_forward_pre_hook(hook)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([decoder_input])).logits
    handle.remove()
    return seen[0][0], logits[0].log_softmax(-1)


def read_all(found: list[KeyBatch], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, log-probabilities and targets in the order of rows."""
    order = torch.cat([batch.rows for batch in found]).argsort()
    keys = torch.cat([batch.keys for batch in found])[order]
    assert keys.shape[1] == width
    log_p = torch.cat([batch.logits for batch in found if batch.logits is not None])[order].log_softmax(-1)
    return keys, log_p, torch.cat([batch.targets for batch in found])[order]


@families
@pytest.mark.parametrize("batch_tokens", [1, 40, 4096])
def test_batches_of_pairs_agree_with_one_pass_for_each_pair(family: str, batch_tokens: int) -> None:
    lm = shared(family)
    documents = pairs()
    encoded = lm.encode_documents(documents)
    keys, log_p, targets = read_all(list(lm.read(encoded, WindowShape(64, 32), batch_tokens=batch_tokens)), lm.width)
    row = 0
    for document in documents:
        tokenizer = lm.tokenizer
        source = tokenizer(document.source_text)["input_ids"]
        target = [*tokenizer(text_target=document.text, add_special_tokens=False)["input_ids"], 2]
        start = start_tokens(family)
        right_keys, right_log_p = plain(family, source, [*start, *target[:-1]])
        here = slice(row, row + len(target))
        assert targets[here].tolist() == target
        torch.testing.assert_close(keys[here], right_keys[len(start) - 1 :], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(log_p[here], right_log_p[len(start) - 1 :], rtol=1e-5, atol=1e-5)
        row += len(target)
    assert row == len(targets)


@families
def test_target_longer_than_a_window_is_read_in_several_with_its_whole_source(family: str) -> None:
    lm = shared(family)
    document = Document("long", "long", " ".join(TEXT.split()[:24]), source_text=" ".join(TEXT.split()[20:29]))
    target = lm.encode_document(document)
    assert isinstance(target, PairTokens)
    assert len(target) > 20
    keys, _, targets = read_all(list(lm.read([target], WindowShape(12, 5))), lm.width)
    assert targets.tolist() == list(target)
    start = start_tokens(family)
    right = [plain(family, list(target.source), [*start, *target[:11]])[0][len(start) - 1 :]]
    begin, done = 5, 12
    while done < len(target):
        end = min(begin + 12, len(target))
        right.append(plain(family, list(target.source), target[begin - 1 : end - 1])[0][done - begin :])
        begin, done = begin + 5, end
    torch.testing.assert_close(keys, torch.cat(right), rtol=1e-5, atol=1e-5)


@families
def test_pass_without_logits_stops_at_the_same_keys(family: str) -> None:
    lm = shared(family)
    encoded = lm.encode_documents(pairs())
    ran = []
    handle = lm.model.get_output_embeddings().register_forward_pre_hook(lambda *_: ran.append(1))
    short = list(lm.read(encoded, WindowShape(64, 32), logits=False))
    handle.remove()
    assert ran == []
    for one, other in zip(short, lm.read(encoded, WindowShape(64, 32)), strict=True):
        assert one.logits is None
        torch.testing.assert_close(one.keys, other.keys, rtol=0, atol=0)


@families
def test_start_and_end_tokens_are_those_of_the_family(family: str) -> None:
    lm = shared(family)
    assert [*lm.prefix_tokens, lm.start_token] == start_tokens(family)
    assert lm.end_tokens == (2,)
    identity = lm.identity
    assert identity["encoder_decoder"] is True
    assert [identity["src_lang"], identity["tgt_lang"]] == list(LANGUAGES.get(family, (None, None)))
    assert identity["vocab_size"] == VOCABULARY
    assert identity["layers"] == 3


def test_shift_of_labels_by_transformers_gives_the_same_decoder_input() -> None:
    for family in ("bart", "marian", "m2m_100", "mbart", "pegasus"):
        lm, document = shared(family), pairs()[3]
        labels = torch.tensor([lm.tokenizer(text_target=document.text)["input_ids"]])
        shift = sys.modules[type(lm.model).__module__].shift_tokens_right
        shifted = shift(labels, 1, *([] if family == "mbart" else [lm.model.config.decoder_start_token_id]))[0].tolist()
        if family == "mbart":  # writes the language behind the end token
            shifted.pop()
        target = lm.encode_document(document)
        assert shifted == [*lm.prefix_tokens, lm.start_token, *target[:-1]], family


def test_source_of_another_pair_changes_keys_and_a_pair_is_no_plain_text() -> None:
    lm = shared("marian")
    document = pairs()[2]
    other = Document("o", "o", document.text, source_text="The library")
    one, two = (
        read_all(list(lm.read([lm.encode_document(each)], WindowShape())), lm.width) for each in (document, other)
    )
    assert one[2].equal(two[2])
    assert (one[0] - two[0]).abs().max() > 1e-2
    with pytest.raises(CorpusError, match=r"notes.txt has no source text.*encoder-decoder.*--source FILE"):
        lm.encode_document(Document("n", "notes.txt", "A note."))
    with pytest.raises(ParameterError, match="each text needs its source"):
        list(lm.read([[5, 6, 7]], WindowShape()))


def test_decoder_only_model_refuses_pairs() -> None:
    lm = CausalLM(tiny("llama"), pair_tokenizer())
    with pytest.raises(ModelError, match=r"pairs.tsv:1 has a source text.*decoder-only"):
        lm.encode_document(pairs()[1])
    with pytest.raises(ModelError, match=r"pairs.tsv:0 has a source text.*decoder-only"):
        lm.encode_documents(pairs())


def test_source_that_is_too_long_is_cut_off_with_one_warning() -> None:
    lm = Seq2SeqLM(tiny("marian"), pair_tokenizer(), name="marian")
    assert lm.max_source_length == 128
    assert lm.max_length == 128
    with pytest.warns(KnnlmWarning, match=r"tokens, of which marian reads only the first 128") as caught:
        long, _ = lm.encode_sources([TEXT])[0], lm.encode_sources([TEXT])
    assert len(caught) == 1
    assert len(long) == 128
    assert long[-1] == 2
    assert shared("t5").max_length is None


def test_languages_must_be_those_of_the_tokenizer() -> None:
    model = tiny("m2m_100")
    with pytest.raises(ParameterError, match=r"several languages.*--tgt-lang is missing"):
        Seq2SeqLM(model, pair_tokenizer("m2m_100"), name="nllb")
    with pytest.raises(ParameterError, match=r"several languages.*--src-lang is missing"):
        Seq2SeqLM(model, pair_tokenizer("m2m_100"), name="nllb", tgt_lang="eng_Latn")
    with pytest.raises(ParameterError, match=r"nllb has no language 'klingon'.*deu_Latn"):
        Seq2SeqLM(model, pair_tokenizer("m2m_100"), name="nllb", src_lang="deu_Latn", tgt_lang="klingon")
    with pytest.raises(ParameterError, match="has no languages, so 'de' cannot"):
        Seq2SeqLM(tiny("marian"), pair_tokenizer(), name="marian", src_lang="de")
    swapped = Seq2SeqLM(model, pair_tokenizer("m2m_100"), src_lang="eng_Latn", tgt_lang="deu_Latn")
    difference = identity_difference(shared("m2m_100").identity, swapped.identity)
    assert difference is not None
    assert difference[0] == "start_token"
    for one, other in (("eng_Latn", "eng_Latn"), ("deu_Latn", "eng_Latn")):
        lm = Seq2SeqLM(model, pair_tokenizer("m2m_100"), src_lang=one, tgt_lang=other)
        assert lm.encode_sources(["a"])[0][0] == lm.tokenizer.convert_tokens_to_ids(one)
    same_target = Seq2SeqLM(model, pair_tokenizer("m2m_100"), src_lang="eng_Latn", tgt_lang="eng_Latn")
    difference = identity_difference(shared("m2m_100").identity, same_target.identity)
    assert difference == ("src_lang", "deu_Latn", "eng_Latn")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")
    for family in ("marian", "t5", "m2m_100", "llama"):
        tiny(family).save_pretrained(folder / family)
        pair_tokenizer(family).save_pretrained(folder / family)
    config = hf.CLIPConfig()
    config.save_pretrained(folder / "clip")
    return folder


def test_open_lm_chooses_the_class_by_the_configuration(folders: Any) -> None:
    assert type(open_lm(str(folders / "llama"))) is CausalLM
    for family in ("marian", "t5", "m2m_100"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", KnnlmWarning)
            lm = open_lm(str(folders / family), key_layer="output", layer=1, **languages(family))
        assert type(lm) is Seq2SeqLM
        assert (lm.key_layer.place, lm.key_layer.layer) == ("output", 1)
        assert lm.name == str(folders / family)
    with pytest.raises(ParameterError, match=r"decoder-only model, which has no languages"):
        open_lm(str(folders / "llama"), src_lang="de")


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            "t5",
            r"t5 \(t5\) is an encoder-decoder model, but a decoder-only model is needed. knnlm.open_lm opens either.",
        ),
        ("marian", r"marian \(marian\) is an encoder-decoder model, but a decoder-only model is needed"),
        ("clip", r"clip \(clip\) has no decoder that predicts text. Use a decoder-only model such as Llama, or"),
    ],
)
def test_model_that_is_no_decoder_only_model_is_refused_in_words(folders: Any, family: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        CausalLM.open(str(folders / family))
    assert len(str(caught.value)) < 300


def test_model_that_is_no_encoder_decoder_is_refused_in_words(folders: Any) -> None:
    with pytest.raises(ModelError, match="is a decoder-only model, but an encoder-decoder model is needed"):
        Seq2SeqLM.open(str(folders / "llama"))


def test_first_tokens_of_a_pair_keep_its_source() -> None:
    pair = PairTokens([4, 5, 6], [7, 8])
    short = first_tokens(pair, 2)
    assert isinstance(short, PairTokens)
    assert (list(short), short.source) == ([4, 5], [7, 8])
    assert first_tokens([4, 5, 6], 2) == [4, 5]


def test_batches_count_sources() -> None:
    ready = [w for n in range(8) for w in windows(PairTokens([5] * 4, [6] * (n + 1)), WindowShape(), start_token=1)]
    found = list(batches(ready, 24))
    assert sorted(w.source_length for batch in found for w in batch) == list(range(1, 9))
    assert all(len(b) == 1 or len(b) * (4 + max(w.source_length for w in b)) <= 24 for b in found)
    assert max(map(len, found)) > 1
