"""Stores, mixtures and prompts for tests of drafts."""

from __future__ import annotations

import numpy as np
import torch

from helpers.stores import documents
from knnlm.ingest.build import build
from knnlm.mixture.mixture import Mixture

TEXTS = documents(10)


def stored(path, lm):
    """Build a store of the texts."""
    return build(TEXTS, path, lm=lm, window=lm.window(128)).path


def tuned_mixture(path, lm, *, reader=None, memories="knn,ngram"):
    """Build a store of the texts, and tune a mixture with a gate and online weights."""
    mixture = Mixture.open(stored(path, reader or lm), lm, memories=memories, use_tuned=False)
    mixture.tune(documents(4, start=40))
    return mixture


def prompts(lm, count):
    """Yield ends of stored texts, and other ones."""
    random = np.random.default_rng(3)
    for number in range(count):
        tokens = lm.encode(TEXTS[number % len(TEXTS)].text)
        begin = int(random.integers(0, max(1, len(tokens) - 12)))
        yield torch.tensor([[lm.start_token, *tokens[begin : begin + int(random.integers(1, 10))]]])
