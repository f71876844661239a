"""Sampling of the next token from a distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_GREEDY_TEMPERATURE = 1e-4  # at and below it, the most probable token is taken


@dataclass(frozen=True)
class Penalties:
    """Changes to log-probabilities before sampling, as in OpenAI's API."""

    presence: float = 0.0  # subtracted for every token that the text contains
    frequency: float = 0.0  # subtracted once for each occurrence
    bias: Mapping[int, float] = field(default_factory=dict)  # added, by token

    def __bool__(self) -> bool:
        return bool(self.presence or self.frequency or self.bias)

    def apply(self, log_p: Tensor, counts: Mapping[int, int]) -> Tensor:
        """Return (V,) scores; `counts` are the occurrences of each token that was sampled in this text."""
        changes = {token: -self.presence - self.frequency * count for token, count in counts.items()}
        for token, bias in self.bias.items():
            changes[token] = changes.get(token, 0.0) + bias
        tokens = torch.tensor(list(changes), dtype=torch.long, device=log_p.device)
        return log_p.float().index_add(0, tokens, torch.tensor(list(changes.values()), device=log_p.device))


class Sampler:
    """Samples the tokens of one text, greedily or with its own random generator."""

    def __init__(self, temperature: float, top_p: float, seed: int | None, penalties: Penalties | None = None) -> None:
        self.temperature = temperature
        self.top_p = top_p
        self.penalties = penalties or Penalties()
        self.counts: Counter[int] = Counter()
        self.generator: torch.Generator | None = None
        if temperature > _GREEDY_TEMPERATURE:
            self.generator = torch.Generator()
            self.generator.manual_seed(seed) if seed is not None else self.generator.seed()

    def draw(self, log_p: Tensor) -> int:
        """Return a token sampled from (V,) log-probabilities."""
        if not self.penalties:
            return self._draw(log_p)
        token = self._draw(self.penalties.apply(log_p, self.counts))
        self.counts[token] += 1
        return token

    def _draw(self, log_p: Tensor) -> int:
        if self.generator is None:
            return int(log_p.argmax())
        # Subtract the maximum: a tiny temperature would make all scores -inf.
        scores = ((log_p.float() - log_p.max()) / self.temperature).cpu()
        probs = scores.softmax(0)
        if self.top_p < 1:
            probs = nucleus(probs, self.top_p)
        return int(torch.multinomial(probs, 1, generator=self.generator))


def nucleus(probs: Tensor, mass: float) -> Tensor:
    """Set all but the fewest most probable tokens that have this mass together to 0; at least one stays."""
    ordered, order = probs.sort(descending=True)
    before = ordered.cumsum(0) - ordered
    before[0] = -1.0  # stays, however small the mass
    return probs.masked_fill(torch.zeros_like(probs, dtype=torch.bool).scatter_(0, order, before >= mass), 0.0)
