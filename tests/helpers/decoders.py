"""Trained decoders: their weights and curves, and the loss of windows that are read one by one."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from knnlm.training.trainer import read_curve


def weights(folder):
    return load_file(folder / "model.safetensors")


def equal(one, other):
    first, second = weights(one), weights(other)
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def losses(folder):
    """The curve without what depends on the clock."""
    return [{**line, "tokens_per_second": 0} for line in read_curve(folder / "losses.jsonl")]


def loss_one_by_one(model, batches, windows, targets, beta):
    """The mean of β·KL + (1-β)·CE by its formula, each window read alone; without targets that of CE."""
    total, count = 0.0, 0
    for one in windows:
        window = batches.read(one[None])
        log_q = model(window.ids).logits[0].log_softmax(1)
        ce = -log_q.gather(1, window.targets[:, None])[:, 0]
        if targets is None:
            total, count = total + ce.sum(), count + len(ce)
            continue
        sparse = targets.lookup(window.positions)
        kl = (sparse.probs * (sparse.probs.clamp(min=1e-30).log() - log_q.gather(1, sparse.ids))).sum(1)
        total, count = total + (beta * kl + (1 - beta) * ce).sum(), count + len(ce)
    return total / count
