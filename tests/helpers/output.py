"""Small output matrices."""

from __future__ import annotations

import numpy as np
import torch

from knnlm.memories.output import OutputCard, OutputMatrix


def card_of(rows: int, words: int, width: int, vocabulary: int) -> OutputCard:
    model = {"width": width, "vocab_size": vocabulary, "key_layer": "ffn_input", "layer": -1}
    return OutputCard("store", model, {}, words, rows, 10, 0, 1, 1, None, None, [], 0.0)


def random_matrix(counts: list[int], *, width: int = 5, vocabulary: int = 40, seed: int = 0) -> OutputMatrix:
    """A matrix with this many rows for each of some words."""
    random = np.random.default_rng(seed)
    words = np.sort(random.choice(vocabulary, len(counts), replace=False)).repeat(counts)
    numbers = [random.normal(size=shape).astype(np.float32) for shape in ((len(words), width), len(words), width)]
    return OutputMatrix(*map(torch.from_numpy, numbers), torch.from_numpy(words))
