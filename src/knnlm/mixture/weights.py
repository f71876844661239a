"""How much each part of a mixture counts: everywhere the same, by distance, or by a gate. Knows nothing of stores.

A mixture of M parts has the language model's prediction first, then every part of every memory. A memory that stands
for several ways of counting the same votes has several parts; weights that are the same everywhere use the first of
each, unless they were fitted over all.

Mix predictions with the same weights everywhere. Knows nothing about what is mixed.

p(y | x) = w_0 · p_LM(y | x) + Σ_m w_m · p_m(y | x)

Weights by how near the nearest neighbour is (Drozdov et al. 2022). Knows nothing about where distances come from.

Positions are put into buckets of about equal size by the distance of their nearest neighbour, and each bucket has
weights of its own. A small bucket knows little, so its weights are drawn to those of the whole text by a prior that is
worth some tokens. Positions without any neighbour have a bucket of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.memories.base import Context, Memory, MemoryOutput, Prediction, Votes
from knnlm.memories.voting import VoteOutput, by_token
from knnlm.mixture.em import check_logs, fit, renormalise
from knnlm.mixture.gate import Gate, SearchSkipper, features, memory_features, place


@dataclass(frozen=True)
class MixturePrediction:
    """A weighted sum of predictions, which is a prediction itself. The first component is the language model's."""

    components: Sequence[Prediction]
    weights: Tensor  # (N, M), rows sum to 1
    abstain_mask: Tensor | None = None  # (N, M) where a component abstains; None: not computed yet
    outputs: Sequence[MemoryOutput] = ()  # of each memory
    search_mask: Tensor | None = None  # (N,) False where a search was skipped; None: nowhere

    @classmethod
    def from_fixed(cls, components: Sequence[Prediction], weights: Sequence[float]) -> MixturePrediction:
        """Mix components by the same weights everywhere; the weight of one that abstains goes to the first."""
        abstains = abstain_mask(components)  # (N, M)
        return cls(components, renormalise(on_device(tuple(weights), abstains.device), abstains), abstains)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the (N,) log-probabilities of one token per row, summed in the log domain."""
        return self.combine(self.component_log_probs(targets))

    def component_log_probs(self, targets: Tensor) -> Tensor:
        """Return the (N, M) log-probabilities of one token per row by each component."""
        return torch.stack([component.log_prob(targets) for component in self.components], 1)

    def combine(self, component_log_probs: Tensor) -> Tensor:
        """Return the (N,) log-probabilities of the mixture from the (N, M) of its components."""
        return (component_log_probs + self.weights.log()).logsumexp(1)

    def log_probs(self) -> Tensor:
        """Give the (N, V) log-probabilities, summed in the log domain, where nothing underflows."""
        logs = self.weights.log()
        total = self.components[0].log_probs()
        # In place where nobody wants gradients: a vocabulary is large, and one copy of it is enough.
        total = total + logs[:, :1] if total.requires_grad else total.add_(logs[:, :1])
        polled = []
        for number, part in enumerate(self.components[1:], 1):
            if isinstance(part, Votes):
                polled.append((part, self.weights[:, number].to(total)))
            else:
                total = torch.logaddexp(total, part.log_probs() + logs[:, number : number + 1])
        if not polled:
            return total
        few = total.device.type == "cpu" and not total.requires_grad  # elsewhere, steps count more than copies
        return _add_few(total, polled) if few else _add_many(total, polled)

    def abstains(self) -> Tensor:
        """Mark the (N,) rows where every component abstains."""
        return self.component_abstains().all(1)

    def component_abstains(self) -> Tensor:
        """Mark the (N, M) components that abstain."""
        return abstain_mask(self.components) if self.abstain_mask is None else self.abstain_mask


def abstain_mask(components: Sequence[Prediction]) -> Tensor:
    """Mark the (N, M) components that abstain."""
    return torch.stack([component.abstains() for component in components], 1)


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


def check_lambda(lmbda: float) -> None:
    """Refuse a λ that is not a probability."""
    if not (math.isfinite(lmbda) and 0 <= lmbda <= 1):
        raise ParameterError(f"lambda must be from 0 to 1, not {lmbda}.")


@lru_cache(maxsize=64)
def on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Bring weights to a device once: the copy is something that the host would wait for at every token."""
    return torch.tensor(values, device=device)


_SUM = 1e-3  # how far from 1 the weights of a stored bucket may sum


@dataclass(frozen=True)
class Buckets:
    """Bounds on the nearest distance, and the weights between them."""

    edges: Tensor  # (B - 1,) float64, ascending; a distance that is an edge belongs to the farther bucket
    table: Tensor  # (B + 1, M) float64, rows sum to 1; the last row is for positions without a neighbour

    @classmethod
    def fit(cls, logs: Tensor, nearest: Tensor, *, count: int = 16, prior: float = 20.0) -> Buckets:
        """Fit the weights of `count` buckets to (N, M) log-probabilities and (N,) distances; inf or NaN is none."""
        check_logs(logs)
        if count < 1 or not (prior >= 0 and math.isfinite(prior)):
            raise ParameterError(f"There must be at least 1 bucket and a prior of 0 or more, not {count} and {prior}.")
        if nearest.shape != logs.shape[:1]:
            raise ParameterError(f"Each of the {len(logs)} rows needs one distance, not {tuple(nearest.shape)}.")
        edges = _edges(nearest, count)
        whole = fit(logs).weights
        own = _bucket(nearest, edges).to(logs.device)
        table = whole.repeat(len(edges) + 2, 1)
        for number in own.unique().tolist():
            table[number] = fit(logs[own == number], start=whole, prior=prior * whole).weights
        return cls(edges, table)

    def weights(self, nearest: Tensor, abstains: Tensor) -> Tensor:
        """Give (N, M) weights for (N,) distances; those of parts that abstain, (N, M), go to the first part."""
        if abstains.shape != (len(nearest), self.table.shape[1]):
            raise ParameterError(
                f"These buckets weigh {self.table.shape[1]} parts of {len(nearest)} rows, not {tuple(abstains.shape)}."
            )
        rows = self.table.float().to(nearest.device)[_bucket(nearest, self.edges)]
        return renormalise(rows, abstains)

    def as_dict(self) -> dict[str, Any]:
        """Give plain numbers, for JSON."""
        return {"edges": self.edges.tolist(), "weights": self.table.tolist()}

    @classmethod
    def from_dict(cls, stored: Any) -> Buckets:
        """Make buckets of what `as_dict` gave, and trust none of it."""
        try:
            edges = torch.tensor([float(edge) for edge in stored["edges"]], dtype=torch.float64)
            rows = [[float(weight) for weight in row] for row in stored["weights"]]
            table = torch.tensor(rows, dtype=torch.float64)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DatastoreCorrupt(f"The stored buckets of weights cannot be read ({error}). Tune again.") from None
        wrong = _wrong(edges, table)
        if wrong:
            raise DatastoreCorrupt(f"The stored buckets of weights are wrong: {wrong}. Tune again.")
        return cls(edges, table / table.sum(1, keepdim=True))


def _edges(nearest: Tensor, count: int) -> Tensor:
    """Cut the distances there are into parts of equal size; equal distances are never cut apart."""
    there = nearest[nearest.isfinite()].double().cpu().sort().values
    if len(there) == 0:
        return there
    cuts = torch.arange(1, count) * len(there) // count
    edges: Tensor = there[cuts].unique()
    return edges[edges > there[0]]  # nothing would be nearer than such an edge


def _bucket(nearest: Tensor, edges: Tensor) -> Tensor:
    """Give the (N,) numbers of the buckets; the last is for no neighbour."""
    found = torch.bucketize(nearest.double(), edges.to(nearest.device), right=True)
    return found.masked_fill(~nearest.isfinite(), len(edges) + 1)


def _wrong(edges: Tensor, table: Tensor) -> str | None:
    """Say what is wrong with stored buckets."""
    if table.ndim != 2 or table.shape[0] != len(edges) + 2 or table.shape[1] == 0:
        return f"{len(edges)} edges need {len(edges) + 2} rows of weights, found {tuple(table.shape)}"
    if not edges.isfinite().all() or bool((edges.diff() <= 0).any()):
        return "the edges do not ascend"
    if not table.isfinite().all() or bool((table < 0).any()) or bool(((table.sum(1) - 1).abs() > _SUM).any()):
        return "the weights of a bucket are not at least 0 with the sum 1"
    return None


KINDS = ("fixed", "fitted", "buckets", "gated")


class Weights(Protocol):
    """Weighs the parts of a mixture."""

    @property
    def kind(self) -> str:
        """Say which kind of weights these are."""

    def compute(self, context: Context, lm: MemoryOutput, answers: Sequence[MemoryOutput], abstains: Tensor) -> Tensor:
        """Give (N, M) weights, rows sum to 1 and are 0 where a part abstains."""

    @property
    def skips_searches(self) -> bool:
        """Whether `search_mask` leaves out any position."""

    def search_mask(self, context: Context, lm: MemoryOutput, answers: Sequence[MemoryOutput | None]) -> Tensor | None:
        """Mark the (N,) positions where memories without an output (None) are worth a search; None: all."""


@dataclass(frozen=True)
class FixedWeights:
    """The same weights everywhere; who abstains leaves its weight to the language model."""

    values: tuple[float, ...]
    kind: str = "fixed"
    skips_searches: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (min(self.values) >= -1e-6 and abs(sum(self.values) - 1) <= 1e-4):
            raise ParameterError(f"weights must be at least 0 and sum to 1, not {self.values}.")

    def compute(self, context: Context, lm: MemoryOutput, answers: Sequence[MemoryOutput], abstains: Tensor) -> Tensor:  # noqa: ARG002
        """Give the same weights to every row."""
        return renormalise(on_device(self.values, abstains.device), abstains)

    def search_mask(self, context: Context, lm: MemoryOutput, answers: Sequence[MemoryOutput | None]) -> Tensor | None:  # noqa: ARG002
        """Ask everywhere."""
        return None


@dataclass(frozen=True)
class BucketWeights:
    """Weights by the distance of the nearest neighbour of one memory."""

    buckets: Buckets
    memory: int  # which memory's neighbours
    kind: str = "buckets"
    skips_searches: ClassVar[bool] = False

    def compute(self, context: Context, lm: MemoryOutput, answers: Sequence[MemoryOutput], abstains: Tensor) -> Tensor:  # noqa: ARG002
        """Look each row's weights up."""
        answer = answers[self.memory]
        assert isinstance(answer, VoteOutput)
        return self.buckets.weights(nearest(answer.neighbours.distances), abstains)

    def search_mask(self, context: Context, lm: MemoryOutput, answers: Sequence[MemoryOutput | None]) -> Tensor | None:  # noqa: ARG002
        """Ask everywhere: the distance is known only then."""
        return None


@dataclass(frozen=True)
class GatedWeights:
    """Weights by a small network that looks at cheap signals of every part; it may say where not to search."""

    gate: Gate
    frequencies: Tensor  # (V,) how often the store has each token
    skip: SearchSkipper | None = None
    fraction: float = 0.0  # of the positions are not searched for
    cheap: Gate | None = None  # weighs the parts that are there where there was no search
    kind: str = "gated"

    @property
    def skips_searches(self) -> bool:
        """Whether a fraction of the positions is not searched for."""
        return self.skip is not None and self.fraction > 0

    def compute(self, context: Context, lm: MemoryOutput, answers: Sequence[MemoryOutput], abstains: Tensor) -> Tensor:
        """Let the network weigh."""
        found = [memory_features(answer, lm) for answer in answers]
        seen = features(place(context), self.frequencies, (lm.features(), lm.top()), found)
        weights = self.gate.weights(seen, abstains)
        if context.search_mask is None or self.cheap is None:
            return weights
        return torch.where(context.search_mask[:, None], weights, self.cheap.weights(seen, abstains))

    def search_mask(self, context: Context, lm: MemoryOutput, answers: Sequence[MemoryOutput | None]) -> Tensor | None:
        """Say where a search is worth its time, by what is known before it."""
        if self.skip is None or not self.skips_searches:
            return None
        found = [memory_features(answer, lm) for answer in answers if answer is not None]
        seen = features(place(context), self.frequencies, (lm.features(), lm.top()), found)
        return self.skip.search_mask(seen, self.fraction)


def component_slices_of(counts: Iterable[int]) -> list[slice]:
    """Say which parts of a mixture are each memory's, by how many it has; part 0 is the language model."""
    ends = list(accumulate(counts, initial=1))
    return [slice(begin, end) for begin, end in pairwise(ends)]


def first_components(memories: Sequence[Memory], model: float, weights: Sequence[float]) -> FixedWeights:
    """Give the language model its weight, and the first part of each memory all of its memory's."""
    values = [model]
    for memory, weight in zip(memories, weights, strict=True):
        values += [weight, *(0.0 for _ in memory.component_names[1:])]
    return FixedWeights(tuple(values))


def equal_weights(memories: Sequence[Memory], lmbda: float) -> FixedWeights:
    """Share λ equally among memories."""
    check_lambda(lmbda)
    return first_components(memories, 1.0 - lmbda, [lmbda / len(memories)] * len(memories))


def nearest(distances: Tensor) -> Tensor:
    """Give the (N,) distance of the nearest neighbour; inf = none."""
    return distances[:, 0] if distances.shape[1] else distances.new_full((len(distances),), torch.inf)
