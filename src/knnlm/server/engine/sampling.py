"""Draw a token from a distribution. Knows nothing about where it comes from, nor about other texts in the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_COLD = 1e-4  # colder than that, any difference decides


@dataclass(frozen=True)
class Penalties:
    """What is taken from or added to log-probabilities before a token is drawn, as OpenAI's API has it."""

    presence: float = 0.0  # taken from every token that the text has already
    frequency: float = 0.0  # taken once for each time that it has it
    bias: Mapping[int, float] = field(default_factory=dict)  # added, token by token

    def __bool__(self) -> bool:
        return bool(self.presence or self.frequency or self.bias)

    def apply(self, log_p: Tensor, drawn: Mapping[int, int]) -> Tensor:
        """Give (V,) scores; `drawn` says how often each token was drawn in this text."""
        changes = {token: -self.presence - self.frequency * times for token, times in drawn.items()}
        for token, bias in self.bias.items():
            changes[token] = changes.get(token, 0.0) + bias
        places = torch.tensor(list(changes), dtype=torch.long, device=log_p.device)
        return log_p.float().index_add(0, places, torch.tensor(list(changes.values()), device=log_p.device))


class Sampler:
    """Draws the tokens of one text: the most probable ones, or by chance with a seed of its own."""

    def __init__(self, temperature: float, top_p: float, seed: int | None, penalties: Penalties | None = None) -> None:
        self.temperature = temperature
        self.top_p = top_p
        self.penalties = penalties or Penalties()
        self.drawn: Counter[int] = Counter()
        self.generator: torch.Generator | None = None
        if temperature > _COLD:
            self.generator = torch.Generator()
            self.generator.manual_seed(seed) if seed is not None else self.generator.seed()

    def draw(self, log_p: Tensor) -> int:
        """Draw from (V,) log-probabilities."""
        if not self.penalties:
            return self._draw(log_p)
        token = self._draw(self.penalties.apply(log_p, self.drawn))
        self.drawn[token] += 1
        return token

    def _draw(self, log_p: Tensor) -> int:
        if self.generator is None:
            return int(log_p.argmax())
        # Less the largest: a tiny temperature would make all of them -inf.
        scores = ((log_p.float() - log_p.max()) / self.temperature).cpu()
        probs = scores.softmax(0)
        if self.top_p < 1:
            probs = nucleus(probs, self.top_p)
        return int(torch.multinomial(probs, 1, generator=self.generator))


def nucleus(probs: Tensor, mass: float) -> Tensor:
    """Keep the fewest most probable tokens that have this much mass together, and at least one; others become 0."""
    ordered, order = probs.sort(descending=True)
    before = ordered.cumsum(0) - ordered
    before[0] = -1.0  # stays, however little mass is asked for
    return probs.masked_fill(torch.zeros_like(probs, dtype=torch.bool).scatter_(0, order, before >= mass), 0.0)
