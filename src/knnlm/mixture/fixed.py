"""Mix predictions with the same weights everywhere. Knows nothing about what is mixed.

p(y | x) = w_0 · p_LM(y | x) + Σ_m w_m · p_m(y | x)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.memory import Prediction, Votes
from knnlm.memory.neighbours import by_token
from knnlm.mixture.fitted import share


@dataclass(frozen=True)
class Mixed:
    """A weighted sum of predictions. It is a prediction itself. The first part is the language model's."""

    parts: Sequence[Prediction]
    weights: Tensor  # (N, M), rows sum to 1
    silent: Tensor | None = None  # (N, M) who abstains, where that was asked already

    def of(self, targets: Tensor) -> Tensor:
        """Give the (N,) log-probabilities of one token a row, summed in the log domain."""
        return self.weigh(self.each_of(targets))

    def each_of(self, targets: Tensor) -> Tensor:
        """Give the (N, M) log-probabilities of one token a row by each part."""
        return torch.stack([part.of(targets) for part in self.parts], 1)

    def weigh(self, logs: Tensor) -> Tensor:
        """Mix what `each_of` gave, for those who want both and would not ask every part twice."""
        return (logs + self.weights.log()).logsumexp(1)

    def log_dense(self) -> Tensor:
        """Give the (N, V) log-probabilities, summed in the log domain, where nothing underflows."""
        logs = self.weights.log()
        total = self.parts[0].log_dense()
        # In place where nobody wants gradients: a vocabulary is large, and one copy of it is enough.
        total = total + logs[:, :1] if total.requires_grad else total.add_(logs[:, :1])
        polled = []
        for number, part in enumerate(self.parts[1:], 1):
            if isinstance(part, Votes):
                polled.append((part, self.weights[:, number].to(total)))
            else:
                total = torch.logaddexp(total, part.log_dense() + logs[:, number : number + 1])
        if not polled:
            return total
        few = total.device.type == "cpu" and not total.requires_grad  # elsewhere, steps count more than copies
        return _add_few(total, polled) if few else _add_many(total, polled)

    def abstains(self) -> Tensor:
        """Mark the (N,) rows where no part has an opinion."""
        return self.each_abstains().all(1)

    def each_abstains(self) -> Tensor:
        """Mark the (N, M) parts that have no opinion."""
        return who_abstains(self.parts) if self.silent is None else self.silent


def who_abstains(parts: Sequence[Prediction]) -> Tensor:
    """Ask every part, (N, M)."""
    return torch.stack([part.abstains() for part in parts], 1)


def _add_many(total: Tensor, polled: Sequence[tuple[Votes, Tensor]]) -> Tensor:
    """Add votes to (N, V) log-probabilities over the whole vocabulary, which takes few steps."""
    votes = torch.zeros_like(total)  # votes are few tokens each, so all of them share one (N, V) tensor
    for part, weights in polled:
        part.add_to(votes, weights)
    return torch.logaddexp(total, votes.log_())


def _add_few(total: Tensor, polled: Sequence[tuple[Votes, Tensor]]) -> Tensor:
    """Add votes to (N, V) log-probabilities in place, where there are any: nothing else of that size is made."""
    values = torch.cat([part.values for part, _ in polled], 1)  # (N, k)
    if not values.shape[1]:
        return total
    shares = torch.cat([part.log_weights.exp() * weights[:, None] for part, weights in polled], 1)
    tokens, order, group = by_token(values)
    sums = torch.zeros_like(shares).scatter_add_(1, group, shares.gather(1, order))
    # Who is not there says once more what the last one says: what is written twice must be the same.
    nobody = tokens < 0
    tokens = tokens.where(~nobody, tokens[:, -1:]).clamp(min=0)
    sums = sums.gather(1, group.where(~nobody, group[:, -1:]))
    return total.scatter_(1, tokens, torch.logaddexp(total.gather(1, tokens), sums.log_()))


def check_lambda(weight: float) -> None:
    """Refuse a λ that is not a probability."""
    if not (math.isfinite(weight) and 0 <= weight <= 1):
        raise ParameterError(f"lambda must be from 0 to 1, not {weight}.")


def mix(parts: Sequence[Prediction], weights: Sequence[float]) -> Mixed:
    """Mix parts by fixed weights; the weight of a part that abstains goes to the first part, the language model."""
    abstains = who_abstains(parts)  # (N, M)
    return Mixed(parts, share(placed(tuple(weights), abstains.device), abstains), abstains)


@lru_cache(maxsize=64)
def placed(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Bring weights to a device once: the copy is something that the host would wait for at every token."""
    return torch.tensor(values, device=device)
