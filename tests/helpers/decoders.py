"""Trained decoders: their weights and curves, and the same training in plain torch, windows read one by one."""

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


class PlainTraining:
    """A training in plain torch: AdamW without decay of vectors, and clipped gradients."""

    def __init__(self, model, batches, *, trained=None, weight_decay=0.01, clip=1.0, loss=loss_one_by_one):
        """Train the parameters of these names; None: all. `loss` has the arguments of `loss_one_by_one`."""
        self.model, self.batches, self.clip, self.loss = model, batches, clip, loss
        named = model.named_parameters()
        self.trained = [weight for name, weight in named if trained is None or name in trained]
        decayed = [weight for weight in self.trained if weight.dim() > 1]
        others = [weight for weight in self.trained if weight.dim() <= 1]
        self.optimiser = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        )

    def step(self, windows, rate, targets=None, beta=0.0):
        """Take a step on windows, and return their loss before it."""
        loss = self.loss(self.model, self.batches, windows, targets, beta)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, self.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.model.zero_grad()
        return loss.item()

    def check_weights(self, folder):
        """Compare the weights of a trained decoder with those of this training."""
        for name, weight in type(self.model).from_pretrained(folder).named_parameters():
            if name.endswith("k_proj.bias"):  # attention does not depend on it, so its gradient is rounding alone
                continue
            torch.testing.assert_close(weight, self.model.get_parameter(name), rtol=1e-3, atol=2e-4)
