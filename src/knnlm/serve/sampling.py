"""Draw a token from a distribution. Knows nothing about where it comes from, nor about other texts in the batch."""

from __future__ import annotations

import torch
from torch import Tensor

_COLD = 1e-4  # colder than that, any difference decides


class Sampler:
    """Draws the tokens of one text: the most probable ones, or by chance with a seed of its own."""

    def __init__(self, temperature: float, top_p: float, seed: int | None) -> None:
        self.temperature = temperature
        self.top_p = top_p
        self.generator: torch.Generator | None = None
        if temperature > _COLD:
            self.generator = torch.Generator()
            self.generator.manual_seed(seed) if seed is not None else self.generator.seed()

    def draw(self, log_p: Tensor) -> int:
        """Draw from (V,) log-probabilities."""
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
