"""How much each part of a mixture counts: everywhere the same, by distance, or by a gate. Knows nothing of stores.

A mixture of M parts has the language model's prediction first, then every part of every memory. A memory that stands
for several ways of counting the same votes has several parts; weights that are the same everywhere use the first of
each, unless they were fitted over all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.memory import Answer, Context, Memory, Poll, Spoken
from knnlm.mixture.buckets import Buckets
from knnlm.mixture.evidence import evidence, features, place
from knnlm.mixture.fitted import share
from knnlm.mixture.fixed import check_lambda, placed
from knnlm.mixture.gate import Gate
from knnlm.mixture.skip import Skip

KINDS = ("fixed", "fitted", "buckets", "gated")


class Weights(Protocol):
    """Weighs the parts of a mixture."""

    @property
    def kind(self) -> str:
        """Say which kind of weights these are."""

    def weigh(self, context: Context, lm: Spoken, answers: Sequence[Answer], abstains: Tensor) -> Tensor:
        """Give (N, M) weights, rows sum to 1 and are 0 where a part abstains."""

    def asked(self, context: Context, lm: Spoken, answers: Sequence[Answer | None]) -> Tensor | None:
        """Mark the (N,) positions where memories that are not there yet are worth asking; None: all."""


@dataclass(frozen=True)
class Fixed:
    """The same weights everywhere; who abstains leaves its weight to the language model."""

    values: tuple[float, ...]
    kind: str = "fixed"

    def __post_init__(self) -> None:
        if not (min(self.values) >= -1e-6 and abs(sum(self.values) - 1) <= 1e-4):
            raise ParameterError(f"weights must be at least 0 and sum to 1, not {self.values}.")

    def weigh(self, context: Context, lm: Spoken, answers: Sequence[Answer], abstains: Tensor) -> Tensor:  # noqa: ARG002
        """Give the same weights to every row."""
        return share(placed(self.values, abstains.device), abstains)

    def asked(self, context: Context, lm: Spoken, answers: Sequence[Answer | None]) -> Tensor | None:  # noqa: ARG002
        """Ask everywhere."""
        return None


@dataclass(frozen=True)
class Bucketed:
    """Weights by the distance of the nearest neighbour of one memory."""

    buckets: Buckets
    memory: int  # which memory's neighbours
    kind: str = "buckets"

    def weigh(self, context: Context, lm: Spoken, answers: Sequence[Answer], abstains: Tensor) -> Tensor:  # noqa: ARG002
        """Look each row's weights up."""
        answer = answers[self.memory]
        assert isinstance(answer, Poll)
        return self.buckets.weights(nearest(answer.found.distances), abstains)

    def asked(self, context: Context, lm: Spoken, answers: Sequence[Answer | None]) -> Tensor | None:  # noqa: ARG002
        """Ask everywhere: the distance is known only then."""
        return None


@dataclass(frozen=True)
class Gated:
    """Weights by a small network that looks at cheap signals of every part; it may say where not to search."""

    gate: Gate
    frequencies: Tensor  # (V,) how often the store has each token
    skip: Skip | None = None
    fraction: float = 0.0  # of the positions are not searched for
    cheap: Gate | None = None  # weighs the parts that are there where there was no search
    kind: str = "gated"

    def weigh(self, context: Context, lm: Spoken, answers: Sequence[Answer], abstains: Tensor) -> Tensor:
        """Let the network weigh."""
        found = [evidence(answer, lm) for answer in answers]
        seen = features(place(context), self.frequencies, (lm.signals(), lm.top()), found)
        weights = self.gate.weights(seen, abstains)
        if context.asked is None or self.cheap is None:
            return weights
        return torch.where(context.asked[:, None], weights, self.cheap.weights(seen, abstains))

    def asked(self, context: Context, lm: Spoken, answers: Sequence[Answer | None]) -> Tensor | None:
        """Say where a search is worth its time, by what is known before it."""
        if self.skip is None or self.fraction <= 0:
            return None
        found = [evidence(answer, lm) for answer in answers if answer is not None]
        seen = features(place(context), self.frequencies, (lm.signals(), lm.top()), found)
        return self.skip.asked(seen, self.fraction)


def spans_of(counts: Iterable[int]) -> list[slice]:
    """Say which parts of a mixture are each memory's, by how many it has; part 0 is the language model."""
    ends = list(accumulate(counts, initial=1))
    return [slice(begin, end) for begin, end in pairwise(ends)]


def first_parts(memories: Sequence[Memory], model: float, weights: Sequence[float]) -> Fixed:
    """Give the language model its weight, and the first part of each memory all of its memory's."""
    values = [model]
    for memory, weight in zip(memories, weights, strict=True):
        values += [weight, *(0.0 for _ in memory.part_names[1:])]
    return Fixed(tuple(values))


def share_equally(memories: Sequence[Memory], weight: float) -> Fixed:
    """Share λ equally among memories."""
    check_lambda(weight)
    return first_parts(memories, 1.0 - weight, [weight / len(memories)] * len(memories))


def nearest(distances: Tensor) -> Tensor:
    """Give the (N,) distance of the nearest neighbour; inf = none."""
    return distances[:, 0] if distances.shape[1] else distances.new_full((len(distances),), torch.inf)
