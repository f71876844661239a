"""An oracle of online weights: one token at a time, in plain arithmetic."""

from __future__ import annotations

import math

import numpy as np
import torch


def prior_by_hand(config, stores, caches):
    """Return the prior of the model, the mixture, each store if there are several, and two experts of each cache."""
    if config is None:
        return np.array([1.0])
    alone = np.full(2 * caches, config.prior / 2)
    if alone.sum() > (1 - config.prior) / 2:
        alone *= (1 - config.prior) / 2 / alone.sum()
    rest = 1 - config.prior - alone.sum()
    if stores < 2:
        return np.array([config.prior, rest, *alone])
    return np.array([config.prior, 0.9 * rest, *[0.1 * rest / stores] * stores, *alone])


class OnlineByHand:
    """The state of one text: the weights of the experts, and the evidence of each memory."""

    def __init__(self, mixture):
        self.mixture = mixture
        named = list(zip(mixture.memories, mixture.component_slices, strict=True))
        self.stores = [own for memory, own in named if memory.name == "knn"]
        self.caches = [own for memory, own in named if memory.name == "cache"]
        self.prior = prior_by_hand(mixture.online, len(self.stores), len(self.caches))
        self.weights = self.prior
        self.evidence = np.zeros((len(named), 3))
        self.gain, self.tokens = 0.0, 0

    def component_weights(self, inputs, abstains):
        """Return the (E, M) weights of the components by each expert at a position with these inputs."""
        evidence = None
        if self.mixture.weights.uses_evidence:
            total = self.evidence[:, 2]
            features = np.column_stack([self.evidence[:, :2], np.sign(total) * np.log1p(np.abs(total))])
            evidence = torch.from_numpy(features.reshape(1, -1)).float()
        rows = (torch.as_tensor(inputs)[None], torch.as_tensor(abstains)[None], evidence)
        base = self.mixture.weights.compute(*rows)[0].double().numpy()
        if self.mixture.online is None:
            return base[None]
        experts = [np.eye(len(base))[0], base]
        for own in self.stores if len(self.stores) > 1 else []:
            one = base.copy()
            for each in self.stores:
                one[each] = 0
            one[own.start] = sum(base[each].sum() for each in self.stores)
            experts.append(one)
        for own in self.caches:
            for weight in (0.02, 0.2):
                one = np.zeros(len(base))
                one[0], one[own] = 1 - weight, weight / (own.stop - own.start)
                experts.append(one)
        # The weight of a component that abstains goes to the language model.
        return np.array([[*(one[:1] + one[abstains].sum()), *np.where(abstains, 0, one)[1:]] for one in experts])

    def mixed(self, by_expert):
        """Return the (M,) weights of the components for all experts together."""
        return self.weights @ by_expert

    def observe(self, by_expert, probs, abstains):
        """Update the state by a token with these (M,) probabilities by each component."""
        probs = np.where(abstains, 0, probs)
        experts = by_expert @ probs
        rate = 0.0 if self.mixture.online is None else self.mixture.online.switch_rate
        self.gain += min(2.0, math.log((self.weights @ experts) / probs[0]))
        self.tokens += 1
        self.weights = (1 - rate) * self.weights * experts / (self.weights @ experts) + rate * self.prior
        for memory, own in enumerate(self.mixture.component_slices):
            gain = 0.0 if abstains[own.start] else min(3.0, math.log(0.5 + 0.5 * probs[own.start] / probs[0]))
            fast, slow, total = self.evidence[memory]
            self.evidence[memory] = 0.8 * fast + 0.2 * gain, 0.97 * slow + 0.03 * gain, total + gain


def log_probs_by_hand(mixture, texts):
    """Return the log-probability of each token of each text, one token at a time."""
    results = []
    for text in texts:
        tokens = mixture.lm.encode(text.text)
        rows = {}
        for batch in mixture.read([tokens]):
            found = mixture.predict_components(batch.context)
            columns = (
                found.given.inputs,
                found.given.abstains.numpy(),
                found.log_probs(batch.targets).double().numpy(),
            )
            rows |= {row: each for row, *each in zip(batch.rows.tolist(), *columns, strict=True)}
        state, log_p = OnlineByHand(mixture), []
        for row in range(len(tokens)):
            inputs, abstains, logs = rows[row]
            by_expert = state.component_weights(inputs, abstains)
            probs = np.where(abstains, 0, np.exp(logs))
            log_p.append(math.log(state.mixed(by_expert) @ probs))
            state.observe(by_expert, probs, abstains)
        results.append(log_p)
    return results
