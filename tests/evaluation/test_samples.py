"""Text that a model samples."""

from __future__ import annotations

import pytest
import torch

from helpers.pairs import pair_lm
from knnlm.errors import ParameterError
from knnlm.evaluation import samples
from knnlm.evaluation.samples import sample_documents, sample_tokens


def test_samples_have_the_number_of_tokens_and_do_not_touch_the_random_state(lm):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    documents = sample_documents(lm, 700)
    assert torch.equal(torch.rand(2), expected)
    count = sum(len(lm.encode(document.text)) for document in documents)
    assert 560 <= count <= 2_000
    assert len({document.id for document in documents}) == len(documents)
    assert [document.text for document in documents] == [document.text for document in sample_documents(lm, 700)]
    assert documents[0].text != sample_documents(lm, 700, seed=1)[0].text


def test_sampled_tokens_follow_the_models_distribution(lm):
    """The first tokens of many samples are as frequent as the model says, within four standard errors."""
    with torch.no_grad():
        probs = lm.model(torch.tensor([[lm.start_token]], device=lm.device)).logits[0, -1].float().softmax(0).cpu()
    torch.manual_seed(0)
    tokens = sample_tokens(lm, 2_000, 1)[:, 0].cpu()
    for count in (1, 10, len(probs) // 2):
        likely = probs.argsort(descending=True)[:count]
        expected, found = float(probs[likely].sum()), float(torch.isin(tokens, likely).float().mean())
        assert abs(found - expected) < 4 * (expected * (1 - expected) / len(tokens)) ** 0.5


def test_defaults_of_the_model_do_not_change_the_distribution(lm, monkeypatch):
    torch.manual_seed(0)
    expected = sample_tokens(lm, 4, 12)
    for name, value in (("no_repeat_ngram_size", 1), ("repetition_penalty", 9.0), ("min_p", 0.9)):
        monkeypatch.setattr(lm.model.generation_config, name, value)
    torch.manual_seed(0)
    assert torch.equal(sample_tokens(lm, 4, 12), expected)


def test_smaller_batches_follow_where_memory_is_short(lm, monkeypatch):
    sizes = []

    def sample(lm, count, length):
        sizes.append(count)
        if count > 4:
            raise torch.cuda.OutOfMemoryError
        return [("a text of the model " * 40, None, False)] * count

    monkeypatch.setattr(samples, "_sample", sample)
    documents = sample_documents(lm, 40 * 256)
    assert sizes[:4] == [32, 16, 8, 4]
    assert sum(len(lm.encode(document.text)) for document in documents) >= 0.8 * 40 * 256


def test_negative_number_of_tokens_is_refused(lm):
    with pytest.raises(ParameterError, match="at least 0, not -5"):
        sample_documents(lm, -5)


def test_targets_that_are_cut_off_have_no_end_token(monkeypatch):
    lm = pair_lm("marian")
    monkeypatch.setattr(samples, "_LENGTH", 20)
    documents = sample_documents(lm, 2_000)
    ended = [lm.encode_document(document)[-1:] == list(lm.end_tokens) for document in documents]
    assert ended == [not document.cut_off for document in documents]
    # Below 20 tokens, all texts of the tiny model end; some tokens are encoded differently than they were sampled.
    lengths = [len(lm.encode(document.text)) for document in documents]
    assert all(end for end, length in zip(ended, lengths, strict=True) if length < 10)
    assert {True, False} == set(ended)


@pytest.mark.parametrize("family", ["marian", "m2m_100"])
def test_encoder_decoder_model_writes_targets_of_random_sources(family):
    lm = pair_lm(family)
    documents = sample_documents(lm, 300)
    assert sum(len(lm.encode(document.text)) for document in documents) >= 240
    assert all(document.source_text and document.source_text.strip() for document in documents)
    assert len({document.source_text for document in documents}) == len(documents)
    assert documents == sample_documents(lm, 300)
    # Many targets of one source follow the model's distribution, within four standard errors.
    source = documents[0].source_text
    assert source is not None
    inputs = lm.pad_sources(lm.encode_sources([source]))
    with torch.no_grad():
        logits = lm.model(**inputs, decoder_input_ids=torch.tensor([lm.start_tokens])).logits[0, -1]
    probs = logits.float().softmax(0)
    torch.manual_seed(0)
    tokens = sample_tokens(lm, 2_000, 1, [source] * 2_000)[:, 0]
    for count in (1, 10, len(probs) // 2):
        likely = probs.argsort(descending=True)[:count]
        expected, found = float(probs[likely].sum()), float(torch.isin(tokens, likely).float().mean())
        assert abs(found - expected) < 4 * (expected * (1 - expected) / len(tokens)) ** 0.5
