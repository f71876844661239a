"""Weights of the components of a mixture, and the mixture's prediction.

p(y | x) = w_0(x) · p_LM(y | x) + Σ_m w_m(x) · p_m(y | x)

Weights are the same everywhere (fixed, fitted), depend on the distance of the nearest neighbour (buckets, Drozdov et
al. 2022), or come from a small network (gated). A memory may have several components: fixed weights use the first of
each, unless they were fitted over all.

Buckets have about equal numbers of positions, and each has its own weights. Those of a small bucket are drawn towards
the weights of the whole text by a prior. Positions without any neighbour have a bucket of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.memories.base import AdditivePrediction, Context, Memory, MemoryOutput, Prediction, Votes, on_device
from knnlm.memories.voting import VoteOutput, by_token
from knnlm.mixture.em import check_logs, fit, renormalise
from knnlm.mixture.evidence import EVIDENCE
from knnlm.mixture.gate import Gate, SearchSkipper, features, memory_features, place

KINDS = ("fixed", "fitted", "buckets", "gated")

_SUM_TOLERANCE = 1e-3  # of the sum of stored weights


@dataclass(frozen=True)
class MixturePrediction:
    """A weighted sum of predictions, which is a prediction itself. The first component is the language model's."""

    components: Sequence[Prediction]
    weights: Tensor  # (N, M), rows sum to 1
    abstain_mask: Tensor | None = None  # (N, M) where a component abstains; None: not computed yet
    outputs: Sequence[MemoryOutput] = ()  # of each memory
    search_mask: Tensor | None = None  # (N,) False where a search was skipped; None: nowhere
    states: Tensor | None = None  # (N, S) of the text before the token that follows each position; None: not needed
    by_expert: Tensor | None = None  # (N, E, M) weights of the components for each expert of online weights
    lm: MemoryOutput | None = None  # the output of the language model; None: not kept

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
        return component_log_probs(self.components, targets)

    def combine(self, component_log_probs: Tensor) -> Tensor:
        """Return the (N,) log-probabilities of the mixture from the (N, M) of its components."""
        return (component_log_probs + self.weights.log()).logsumexp(1)

    def log_probs(self) -> Tensor:
        """Return the (N, V) log-probabilities, summed in the log domain, where nothing underflows."""
        total = self.components[0].log_probs()
        logs = self.weights.log().to(total)  # online weights are in float64, where they do not underflow
        # In place if there are no gradients, so that only one (N, V) tensor is made.
        total = total + logs[:, :1] if total.requires_grad else total.add_(logs[:, :1])
        added: list[tuple[AdditivePrediction, Tensor]] = []
        for number, component in enumerate(self.components[1:], 1):
            if isinstance(component, AdditivePrediction):
                added.append((component, self.weights[:, number].to(total)))
            else:
                total = torch.logaddexp(total, component.log_probs() + logs[:, number : number + 1])
        if not added:
            return total
        # On a GPU the number of kernels matters more than a second (N, V) tensor.
        votes = [(component, weights) for component, weights in added if isinstance(component, Votes)]
        sparse = len(votes) == len(added) and total.device.type == "cpu" and not total.requires_grad
        return _add_sparse(total, votes) if sparse else _add_dense(total, added)

    def without_memories(self, rows: Tensor) -> MixturePrediction:
        """Return the prediction with all weight on the language model at the (N,) marked rows."""
        weights = self.weights.masked_fill(rows[:, None], 0.0)
        weights[:, 0].masked_fill_(rows, 1.0)
        return replace(self, weights=weights)

    def abstains(self) -> Tensor:
        """Mark the (N,) rows where every component abstains."""
        return self.component_abstains().all(1)

    def component_abstains(self) -> Tensor:
        """Mark the (N, M) components that abstain."""
        return abstain_mask(self.components) if self.abstain_mask is None else self.abstain_mask


def component_log_probs(components: Sequence[Prediction], targets: Tensor) -> Tensor:
    """Return the (N, M) log-probabilities of one token per row by each component."""
    return torch.stack([component.log_prob(targets) for component in components], 1)


def abstain_mask(components: Sequence[Prediction]) -> Tensor:
    """Mark the (N, M) components that abstain."""
    known: dict[int, Tensor] = {}  # votes by the same neighbours abstain together
    for component in components:
        if _shared(component) not in known:
            known[_shared(component)] = component.abstains()
    return torch.stack([known[_shared(component)] for component in components], 1)


def _shared(component: Prediction) -> int:
    """Return what identifies the neighbours of votes; other predictions share nothing."""
    return id(component.values if isinstance(component, Votes) else component)


def _add_dense(total: Tensor, added: Sequence[tuple[AdditivePrediction, Tensor]]) -> Tensor:
    """Add weighted predictions to (N, V) log-probabilities through one dense tensor, in few steps."""
    probs = torch.zeros_like(total)
    votes = [(component, weights) for component, weights in added if isinstance(component, Votes)]
    for values, shares in _sum_shares(votes):
        probs.scatter_add_(1, values.clamp(min=0), shares)  # a missing neighbour adds nothing to token 0
    for component, weights in added:
        if not isinstance(component, Votes):
            component.add_to(probs, weights)
    return torch.logaddexp(total, _log(probs))


def _sum_shares(votes: Sequence[tuple[Votes, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (N, k) values and the sums of their weighted votes, once for all votes by the same neighbours."""
    alike: dict[int, list[tuple[Votes, Tensor]]] = {}
    for component, weights in votes:
        alike.setdefault(_shared(component), []).append((component, weights))
    for own in alike.values():
        logs = torch.stack([component.log_weights for component, _ in own])  # (S, N, k)
        weights = torch.stack([weights for _, weights in own])  # (S, N)
        yield own[0][0].values, (logs.exp() * weights[..., None]).sum(0)


def _log(probs: Tensor) -> Tensor:
    """Return logarithms, in place; on a CPU, NumPy's of zeros takes a tenth of the time of torch's."""
    if probs.requires_grad or probs.device.type != "cpu":
        return probs.log_()
    with np.errstate(divide="ignore"):
        np.log(probs.numpy(), out=probs.numpy())
    return probs


def _add_sparse(total: Tensor, votes: Sequence[tuple[Votes, Tensor]]) -> Tensor:
    """Add weighted votes to (N, V) log-probabilities in place, only at the tokens that have votes."""
    summed = list(_sum_shares(votes))
    values, shares = (torch.cat([own[place] for own in summed], 1) for place in (0, 1))  # (N, k) each
    if not values.shape[1]:
        return total
    tokens, order, group = by_token(values)
    sums = torch.zeros_like(shares).scatter_add_(1, group, shares.gather(1, order))
    # Pad with the last valid token: an element that is written twice must get the same value.
    missing = tokens < 0
    tokens = tokens.where(~missing, tokens[:, -1:]).clamp(min=0)
    sums = sums.gather(1, group.where(~missing, group[:, -1:]))
    return total.scatter_(1, tokens, torch.logaddexp(total.gather(1, tokens), sums.log_()))


def check_lambda(lmbda: float) -> None:
    """Raise ParameterError for a λ that is not a probability."""
    if not (math.isfinite(lmbda) and 0 <= lmbda <= 1):
        raise ParameterError(f"lambda must be from 0 to 1, not {lmbda}.")


@dataclass(frozen=True)
class Buckets:
    """Ranges of the nearest distance, and the weights in each."""

    edges: Tensor  # (B - 1,) float64, ascending; a distance equal to an edge belongs to the farther bucket
    table: Tensor  # (B + 1, M) float64, rows sum to 1; the last row is for positions without a neighbour

    @classmethod
    def fit(cls, logs: Tensor, nearest: Tensor, *, count: int = 16, prior: float = 20.0) -> Buckets:
        """Fit the weights of `count` buckets to (N, M) log-probabilities and (N,) distances; inf or NaN: none."""
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
        """Return (N, M) weights for (N,) distances; the weights of components that abstain go to the first one."""
        if abstains.shape != (len(nearest), self.table.shape[1]):
            raise ParameterError(
                f"These buckets have weights of {self.table.shape[1]} components for {len(nearest)} rows, not "
                f"{tuple(abstains.shape)}."
            )
        rows = self.table.float().to(nearest.device)[_bucket(nearest, self.edges)]
        return renormalise(rows, abstains)

    def as_dict(self) -> dict[str, Any]:
        """Return the buckets as JSON types."""
        return {"edges": self.edges.tolist(), "weights": self.table.tolist()}

    @classmethod
    def from_dict(cls, stored: Any) -> Buckets:
        """Validate and read what `as_dict` returned."""
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
    """Split the finite distances into buckets of equal size; equal distances stay together."""
    finite = nearest[nearest.isfinite()].double().cpu().sort().values
    if len(finite) == 0:
        return finite
    cuts = torch.arange(1, count) * len(finite) // count
    edges: Tensor = finite[cuts].unique()
    return edges[edges > finite[0]]  # no distance is below the first one


def _bucket(nearest: Tensor, edges: Tensor) -> Tensor:
    """Return the (N,) numbers of the buckets; the last is for positions without a neighbour."""
    found = torch.bucketize(nearest.double(), edges.to(nearest.device), right=True)
    return found.masked_fill(~nearest.isfinite(), len(edges) + 1)


def _wrong(edges: Tensor, table: Tensor) -> str | None:
    """Return what is wrong with stored buckets; None if nothing is."""
    if table.ndim != 2 or table.shape[0] != len(edges) + 2 or table.shape[1] == 0:
        return f"{len(edges)} edges need {len(edges) + 2} rows of weights, found {tuple(table.shape)}"
    if not edges.isfinite().all() or bool((edges.diff() <= 0).any()):
        return "the edges do not ascend"
    if not table.isfinite().all() or bool((table < 0).any()) or bool(((table.sum(1) - 1).abs() > _SUM_TOLERANCE).any()):
        return "the weights of a bucket are not at least 0 with the sum 1"
    return None


class Weights(Protocol):
    """Weights of the components of a mixture."""

    @property
    def kind(self) -> str:
        """One of KINDS."""

    @property
    def uses_evidence(self) -> bool:
        """Whether weights depend on how well each memory has predicted the text so far."""

    def inputs(self, context: Context, lm: MemoryOutput, outputs: Sequence[MemoryOutput]) -> Tensor:
        """Return the (N, F) inputs that the weights of positions are computed from."""

    def compute(self, inputs: Tensor, abstains: Tensor, evidence: Tensor | None = None) -> Tensor:
        """Return (N, M) weights; rows sum to 1, and components that abstain have 0.

        `evidence` are the (N, 3·m) features of the text so far; None: those of the beginning of a text.
        """

    @property
    def skips_searches(self) -> bool:
        """Whether `search_mask` leaves out any position."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can contain their computation: nothing of it is decided or read by the host."""

    def search_mask(self, context: Context, lm: MemoryOutput, outputs: Sequence[MemoryOutput | None]) -> Tensor | None:
        """Mark the (N,) positions where memories without an output (None) are worth a search; None: all."""


@dataclass(frozen=True)
class FixedWeights:
    """The same weights everywhere; the weight of a component that abstains goes to the language model."""

    values: tuple[float, ...]
    kind: str = "fixed"
    capturable: ClassVar[bool] = True
    skips_searches: ClassVar[bool] = False
    uses_evidence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (min(self.values) >= -1e-6 and abs(sum(self.values) - 1) <= 1e-4):
            raise ParameterError(f"weights must be at least 0 and sum to 1, not {self.values}.")

    def inputs(self, context: Context, lm: MemoryOutput, outputs: Sequence[MemoryOutput]) -> Tensor:  # noqa: ARG002
        """Return (N, 0): nothing is needed."""
        return lm.components[0].abstains()[:, None][:, :0].float()

    def compute(self, inputs: Tensor, abstains: Tensor, evidence: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return the same weights for every row, in the precision of the inputs."""
        return renormalise(on_device(self.values, abstains.device, inputs.dtype), abstains)

    def search_mask(self, context: Context, lm: MemoryOutput, outputs: Sequence[MemoryOutput | None]) -> Tensor | None:  # noqa: ARG002
        """Return None: search everywhere."""
        return None


@dataclass(frozen=True)
class BucketWeights:
    """Weights by the distance of the nearest neighbour of one memory."""

    buckets: Buckets
    memory: int  # which memory's neighbours
    kind: str = "buckets"
    capturable: ClassVar[bool] = False  # the buckets are copied from the host
    skips_searches: ClassVar[bool] = False
    uses_evidence: ClassVar[bool] = False

    def inputs(self, context: Context, lm: MemoryOutput, outputs: Sequence[MemoryOutput]) -> Tensor:  # noqa: ARG002
        """Return the (N, 1) distances of the nearest neighbours."""
        output = outputs[self.memory]
        assert isinstance(output, VoteOutput)
        return nearest(output.neighbours.distances)[:, None]

    def compute(self, inputs: Tensor, abstains: Tensor, evidence: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return the weights of each row's bucket."""
        return self.buckets.weights(inputs[:, 0], abstains)

    def search_mask(self, context: Context, lm: MemoryOutput, outputs: Sequence[MemoryOutput | None]) -> Tensor | None:  # noqa: ARG002
        """Return None: the distance is known only after the search."""
        return None


@dataclass(frozen=True)
class GatedWeights:
    """Weights by a small network over features of every component; it may skip searches."""

    gate: Gate
    frequencies: Tensor  # (V,) the number of occurrences of each token in the store
    skip: SearchSkipper | None = None
    fraction: float = 0.0  # of the searches that are skipped
    cheap: Gate | None = None  # for positions whose search was skipped
    kind: str = "gated"

    @property
    def skips_searches(self) -> bool:
        """Whether a fraction of the positions is not searched for."""
        return self.skip is not None and self.fraction > 0

    @property
    def capturable(self) -> bool:
        """Whether every position is searched for: the host reads which ones are."""
        return not self.skips_searches

    @property
    def uses_evidence(self) -> bool:
        """Whether the network was trained with features of the text so far."""
        return self._evidence_count > 0

    @cached_property
    def _evidence_count(self) -> int:
        return sum(name.endswith(EVIDENCE) for name in self.gate.feature_names)

    @cached_property
    def _moved(self) -> dict[torch.device, GatedWeights]:
        return {}

    def _beside(self, tensor: Tensor) -> GatedWeights:
        """Return these weights on the GPU of a tensor: a copy at every token would make the host wait."""
        device = tensor.device
        if device.type == "cpu" or self.frequencies.device == self.gate.starts.device == device:
            return self
        if device not in self._moved:
            self._moved[device] = replace(
                self,
                gate=self.gate.to(device),
                frequencies=self.frequencies.to(device),
                skip=None if self.skip is None else self.skip.to(device),
                cheap=None if self.cheap is None else self.cheap.to(device),
            )
        return self._moved[device]

    def inputs(self, context: Context, lm: MemoryOutput, outputs: Sequence[MemoryOutput]) -> Tensor:
        """Return the (N, F) features and, where searches are skipped, whether there was one."""
        by_memory = [memory_features(output, lm) for output in outputs]
        model = lm.features(), lm.top()
        inputs = features(place(context), self._beside(model[0]).frequencies, model, by_memory)
        if context.search_mask is None:
            return inputs
        return torch.cat([inputs, context.search_mask[:, None].to(inputs)], 1)

    def compute(self, inputs: Tensor, abstains: Tensor, evidence: Tensor | None = None) -> Tensor:
        """Return the network's weights."""
        gate, cheap = (here := self._beside(inputs)).gate, here.cheap
        count = len(gate.feature_names) - self._evidence_count
        own = inputs[:, :count]
        if self._evidence_count:
            zeros = own.new_zeros(len(own), self._evidence_count)
            own = torch.cat([own, zeros if evidence is None else evidence.to(own)], 1)
        weights = gate.weights(own, abstains)
        if inputs.shape[1] == count or cheap is None:
            return weights
        return torch.where(inputs[:, count:] > 0, weights, cheap.weights(own, abstains))

    def search_mask(self, context: Context, lm: MemoryOutput, outputs: Sequence[MemoryOutput | None]) -> Tensor | None:
        """Mark the positions whose predicted gain is worth a search."""
        if self.skip is None or not self.skips_searches:
            return None
        by_memory = [memory_features(output, lm) for output in outputs if output is not None]
        here = self._beside(lm.features())
        inputs = features(place(context), here.frequencies, (lm.features(), lm.top()), by_memory)
        assert here.skip is not None
        return here.skip.search_mask(inputs, self.fraction)


def component_slices_of(counts: Iterable[int]) -> list[slice]:
    """Return the slice of components of each memory from their numbers; component 0 is the language model."""
    ends = list(accumulate(counts, initial=1))
    return [slice(begin, end) for begin, end in pairwise(ends)]


def first_components(memories: Sequence[Memory], model: float, weights: Sequence[float]) -> FixedWeights:
    """Return weights of the language model and of the first component of each memory; the others have 0."""
    values = [model]
    for memory, weight in zip(memories, weights, strict=True):
        values += [weight, *(0.0 for _ in memory.component_names[1:])]
    return FixedWeights(tuple(values))


def equal_weights(memories: Sequence[Memory], lmbda: float) -> FixedWeights:
    """Return weights that share λ equally among memories."""
    check_lambda(lmbda)
    return first_components(memories, 1.0 - lmbda, [lmbda / len(memories)] * len(memories))


def nearest(distances: Tensor) -> Tensor:
    """Return the (N,) distance of the nearest neighbour; inf = none."""
    return distances[:, 0] if distances.shape[1] else distances.new_full((len(distances),), torch.inf)


def multiply_odds(weights: Weights, factor: float) -> Weights:
    """Return weights whose odds of memories against the language model are multiplied; of a gate, each network's."""
    if _check_factor(factor) == 1:
        return weights
    if isinstance(weights, FixedWeights):
        values = _multiplied(torch.tensor(weights.values, dtype=torch.float64), factor)
        return replace(weights, values=tuple(values.tolist()))
    if isinstance(weights, BucketWeights):
        table = _multiplied(weights.buckets.table, factor)
        return replace(weights, buckets=replace(weights.buckets, table=table))
    if isinstance(weights, GatedWeights):
        cheap = None if weights.cheap is None else _multiply_gate(weights.cheap, factor)
        return replace(weights, gate=_multiply_gate(weights.gate, factor), cheap=cheap)
    raise ParameterError(f"The odds of {weights.kind} weights cannot be multiplied.")


def multiply_end_odds(log_probs: Tensor, end: int, factor: float, rows: Tensor | None = None) -> Tensor:
    """Return (N, V) log-probabilities, changed in place, in which the odds of the token `end` are multiplied.

    The (N,) rows are those to change; None: all. Each row sums to 1, before and after.
    """
    log_end, log_factor = log_probs[:, end], math.log(_check_factor(factor))
    total = torch.logaddexp(torch.log1p(-log_end.exp().clamp(max=1)), log_end + log_factor)
    # Where nothing is changed, nothing is rounded either.
    marked = torch.ones_like(log_end) if rows is None else rows.to(log_end)
    log_probs[:, end] = log_end + log_factor * marked
    return log_probs.sub_((total * marked)[:, None])


def _check_factor(factor: float) -> float:
    """Return a factor of odds; raise ParameterError for one that is not a positive number."""
    if not (math.isfinite(factor) and factor > 0):
        raise ParameterError(f"odds are multiplied by a number above 0, not {factor}.")
    return factor


def _multiply_gate(gate: Gate, factor: float) -> Gate:
    return replace(gate, starts=_multiplied(gate.starts, factor), fitted=_multiplied(gate.fitted, factor))


def _multiplied(weights: Tensor, factor: float) -> Tensor:
    """Multiply all but the first of (..., M) weights, so that they sum to 1 again."""
    scaled = torch.cat([weights[..., :1], factor * weights[..., 1:]], -1)
    return scaled / scaled.sum(-1, keepdim=True)
