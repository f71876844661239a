"""Text that a model samples."""

from __future__ import annotations

import torch

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
