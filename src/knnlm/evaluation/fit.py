"""Fit the weights of a mixture on a trace. Knows nothing about models, stores or how neighbours are found.

`look` reduces a trace to what weights need: what each part of each memory gave to the target, and what a gate may look
at. All that follows is arithmetic on that, for any subset of the memories.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.evaluation.evaluate import Evaluation, Totals, summary
from knnlm.evaluation.sweep import LAMBDAS, Sweep, sweep, tally
from knnlm.evaluation.trace import MemoryTrace, Trace, tensor_of
from knnlm.memories.voting import VoteParams
from knnlm.mixture.em import fit, renormalise
from knnlm.mixture.gate import Gate, MemoryFeatures, Positions, feature_names, features, train_gate, train_skip
from knnlm.mixture.networks import FEWEST
from knnlm.mixture.weights import (
    KINDS,
    Buckets,
    BucketWeights,
    FixedWeights,
    GatedWeights,
    Weights,
    component_slices_of,
    nearest,
)
from knnlm.progress import Progress, silent

SettingsByMemory = Sequence[Sequence[VoteParams]]  # of each memory; empty where it has no neighbours


def check_weights(kind: str) -> None:
    """Refuse weights that there are not."""
    if kind not in KINDS:
        raise ParameterError(f"There are no weights {kind!r}. Weights are {', '.join(KINDS)}.")


@dataclass(frozen=True)
class MemoryColumns:
    """What one memory said of N targets, at chosen settings."""

    label: str
    kind: str
    names: list[str]  # of its parts
    logs: Tensor  # (N, P) log-probability of the target by each part; NaN = it abstains
    evidence: MemoryFeatures | None  # None where nobody asked for it
    nearest: Tensor | None  # (N,) distance of the nearest neighbour, of a memory that has neighbours
    facts: dict[str, Any]  # how its neighbours vote
    signals: Sequence[str] = ()  # what its signals are called


@dataclass(frozen=True)
class TraceTable:
    """What a trace says about every part of a mixture, at chosen settings."""

    model: Tensor  # (N,) log-probability of the target by the language model
    signals: Tensor  # (N, F) how sure it seemed
    choice: Tensor  # (N,) the token it found most probable
    place: Positions
    groups: Tensor  # (N,) the document that each row is in
    memories: list[MemoryColumns]
    tally: Totals

    def only(self, *labels: str) -> TraceTable:
        """Keep some of the memories, in this order."""
        own = {memory.label: memory for memory in self.memories}
        return replace(self, memories=[own[label] for label in labels])

    @property
    def logs(self) -> Tensor:
        """Log-probabilities (N, M) of the target by each part, the model first."""
        return torch.cat([self.model[:, None], *(memory.logs for memory in self.memories)], 1)

    @property
    def names(self) -> list[str]:
        """Names of the M parts."""
        return ["model", *(name for memory in self.memories for name in memory.names)]

    @property
    def component_slices(self) -> list[slice]:
        """The parts of each memory."""
        return component_slices_of(len(memory.names) for memory in self.memories)

    @property
    def stores(self) -> list[int]:
        """The memories that must be searched, which takes time."""
        return [number for number, memory in enumerate(self.memories) if memory.kind == "knn"]

    def features(self, frequencies: Tensor, *, without: Sequence[int] = (), leave_out: bool = False) -> Tensor:
        """Give what a gate looks at; memories in `without` are shown as if nobody had asked them, or left out."""
        found = []
        for number, memory in enumerate(self.memories):
            assert memory.evidence is not None, "look with evidence for a gate"
            if number not in without:
                found.append(memory.evidence)
            elif not leave_out:
                found.append(_nothing(memory.evidence))
        return features(self.place, frequencies, (self.signals, self.choice), found)

    def forget(self, memories: Sequence[int], rows: Tensor) -> Tensor:
        """Give the logs, with some memories abstaining at some rows."""
        logs = self.logs
        for number in memories:
            span = self.component_slices[number]
            logs[rows, span.start : span.stop] = torch.nan
        return logs


def _nothing(evidence: MemoryFeatures) -> MemoryFeatures:
    """What is known about a memory that was not asked."""
    never = torch.full_like(evidence.of_choice, -torch.inf)
    return MemoryFeatures(torch.zeros_like(evidence.signals), never, torch.full_like(evidence.choice, -1), never)


def tabulate(trace: Trace, settings: SettingsByMemory, *, evidence: bool = True, device: str = "cpu") -> TraceTable:
    """Compute what each part gave to each target, and, as evidence, what a gate may look at."""
    whole = slice(0, len(trace))
    return TraceTable(
        model=tensor_of(trace.log_p),
        signals=tensor_of(trace.signals),
        choice=tensor_of(trace.choice).long(),
        place=trace.place(whole),
        groups=tensor_of(trace.documents).long(),
        memories=[
            _memory_columns(trace, seen, own, device, evidence=evidence)
            for seen, own in zip(trace.memories, settings, strict=True)
        ],
        tally=tally(trace),
    )


def _memory_columns(
    trace: Trace, seen: MemoryTrace, settings: Sequence[VoteParams], device: str, *, evidence: bool
) -> MemoryColumns:
    logs, found = [], []
    for rows in trace.blocks(device):
        targets = tensor_of(trace.targets[rows]).long().to(device)
        choice = tensor_of(trace.choice[rows]).long().to(device)
        logs.append(seen.log_p(rows, targets, settings, device=device).cpu())
        if evidence:
            found.append(seen.features(rows, choice, settings, device=device))
    parts = [[getattr(one, name).cpu() for one in found] for name in MemoryFeatures.__dataclass_fields__]
    facts: dict[str, Any] = {}
    if seen.polls:
        facts = {"k": settings[0].k, "knn_temperature": settings[0].knn_temperature, "metric": seen.facts["metric"]}
    names = [f"{seen.label} {setting}" for setting in settings] if seen.polls else list(seen.facts["parts"])
    return MemoryColumns(
        label=seen.label,
        kind=seen.facts["kind"],
        names=names,
        logs=torch.cat(logs),
        evidence=MemoryFeatures(*map(torch.cat, parts)) if evidence else None,
        nearest=nearest(tensor_of(seen.distances[:, :1])) if seen.polls else None,
        facts=facts,
        signals=seen.facts["signals"],
    )


def variants(
    found: Sweep, ks: Sequence[int] = (1, 8, 64, 1024), *, steps: Sequence[int] = (-6, -3, 3, 6)
) -> list[VoteParams]:
    """Give the best way of counting votes, then others for a gate to choose from: fewer voters, colder, hotter."""
    best_k, best_temperature = found.setting
    chosen = [VoteParams(best_k, best_temperature)]
    place = found.knn_temperatures.index(best_temperature)
    for step in steps:
        if 0 <= place + step < len(found.knn_temperatures):
            chosen.append(VoteParams(best_k, found.knn_temperatures[place + step]))
    for k in ks:
        if k in found.ks and k != best_k:
            heard = found.perplexity[found.ks.index(k)][:, np.array(found.lambdas) > 0]
            knn_temperature = int(heard.min(1).argmin()) if heard.size else 0
            chosen.append(VoteParams(k, found.knn_temperatures[knn_temperature]))
    return chosen


@dataclass(frozen=True)
class Fitted:
    """Weights, and what they gave on the text they were fitted on (out of fold, for a gate)."""

    weights: Weights
    perplexity: float


def fit_weights(
    seen: TraceTable,
    kind: str,
    *,
    frequencies: Tensor,
    device: str = "cpu",
    progress: Progress = silent,
) -> Fitted:
    """Fit weights of one kind; `fixed` weighs the first part of each memory only, the others all parts."""
    check_weights(kind)
    if kind in ("fixed", "fitted"):
        used = [0, *(span.start for span in seen.component_slices)] if kind == "fixed" else list(range(len(seen.names)))
        found = fit(seen.logs[:, used])
        values = torch.zeros(len(seen.names), dtype=torch.float64)
        values[used] = found.weights
        return Fitted(FixedWeights(tuple(values.tolist()), kind), math.exp(found.loss))
    if kind == "buckets":
        return _fit_buckets(seen)
    gate = _fit_gate(seen, frequencies, device, progress)
    assert gate.gate.out_of_fold is not None
    return Fitted(gate, math.exp(-float(gate.gate.out_of_fold.double().mean())))


def _fit_buckets(seen: TraceTable) -> Fitted:
    if not seen.stores:
        raise ParameterError("Buckets go by the distance of the nearest stored context: mix in knn.")
    number = seen.stores[0]
    near, logs = seen.memories[number].nearest, seen.logs
    assert near is not None
    buckets = Buckets.fit(logs, near)
    mixed = _log_p(logs, buckets.weights(near, logs.isnan()))
    return Fitted(BucketWeights(buckets, number), math.exp(-float(mixed.mean())))


def _fit_gate(seen: TraceTable, frequencies: Tensor, device: str, progress: Progress) -> GatedWeights:
    """Train a gate over everything, one for where there was no search, and the judge of where to search."""

    def train(looks: Tensor, logs: Tensor) -> Gate:
        return train_gate(
            looks,
            logs,
            seen.groups,
            feature_names=feature_names((memory.kind, memory.signals) for memory in seen.memories),
            component_names=seen.names,
            device=device,
            progress=progress,
        )

    gate = train(seen.features(frequencies), seen.logs)
    stores = seen.stores
    if not stores or len(seen.model) < FEWEST:
        return GatedWeights(gate, frequencies)
    without = seen.forget(stores, torch.ones(len(seen.model), dtype=torch.bool))
    cheap = train(seen.features(frequencies, without=stores), without)
    assert gate.out_of_fold is not None
    assert cheap.out_of_fold is not None
    gain = gate.out_of_fold.cpu() - cheap.out_of_fold.cpu()
    before = seen.features(frequencies, without=stores, leave_out=True)
    skip = train_skip(before, gain, seen.groups, device=device, progress=progress)
    return GatedWeights(gate, frequencies, skip=skip, cheap=cheap)


def _log_p(logs: Tensor, weights: Tensor) -> Tensor:
    """Mix (N, M) log-probabilities by (N, M) weights, in the log domain."""
    return (logs.nan_to_num(nan=-torch.inf).double() + weights.double().log()).logsumexp(1)


def apply_weights(seen: TraceTable, weights: Weights) -> tuple[Tensor, Tensor]:
    """Give the (N, M) log-probabilities of the targets by each part, and the (N, M) weights of the parts."""
    logs = seen.logs
    abstains = logs.isnan()
    if isinstance(weights, FixedWeights):
        return logs, renormalise(torch.tensor(weights.values, dtype=torch.float64), abstains)
    if isinstance(weights, BucketWeights):
        near = seen.memories[weights.memory].nearest
        assert near is not None
        return logs, weights.buckets.weights(near, abstains)
    assert isinstance(weights, GatedWeights)
    looks = seen.features(weights.frequencies)
    if weights.skip is None or weights.cheap is None or weights.fraction <= 0:
        return logs, weights.gate.weights(looks, abstains)
    stores = seen.stores
    asked = weights.skip.search_mask(
        seen.features(weights.frequencies, without=stores, leave_out=True), weights.fraction
    )
    blind = seen.features(weights.frequencies, without=stores)
    logs = seen.forget(stores, ~asked)
    abstains = logs.isnan()
    both = weights.gate.weights(looks, abstains), weights.cheap.weights(blind, abstains)
    return logs, torch.where(asked[:, None], *both)


def evaluate_table(seen: TraceTable, weights: Weights) -> Evaluation:
    """Evaluate with weights: what `evaluate` gives, without the model."""
    begin = time.perf_counter()
    logs, weighed = apply_weights(seen, weights)
    best = logs.nan_to_num(nan=-torch.inf).amax(1)
    sums = [float(column.double().sum()) for column in (logs[:, 0], _log_p(logs, weighed), best)]
    shares = weights.values if isinstance(weights, FixedWeights) else weighed.mean(0).tolist()
    memories = [
        {"name": memory.label, "kind": memory.kind, "weight": float(sum(shares[span])), **memory.facts}
        for memory, span in zip(seen.memories, seen.component_slices, strict=True)
    ]
    return summary(seen.tally, sums, memories, weights.kind, seconds=time.perf_counter() - begin)


def evaluate_trace(trace: Trace, settings: SettingsByMemory, weights: Weights) -> Evaluation:
    """Evaluate a trace with weights."""
    return evaluate_table(tabulate(trace, settings, evidence=isinstance(weights, GatedWeights)), weights)


def choose_settings(trace: Trace, sweeps: Sequence[Sweep | None], *, several: bool) -> list[tuple[VoteParams, ...]]:
    """Give each memory of neighbours its best setting, and others beside it if weights can make use of them."""
    chosen: list[tuple[VoteParams, ...]] = []
    for seen, found in zip(trace.memories, sweeps, strict=True):
        if found is None:
            assert not seen.polls
            chosen.append(())
        else:
            chosen.append(tuple(variants(found)) if several else (VoteParams(*found.setting),))
    return chosen


def sweep_all(
    trace: Trace,
    *,
    ks: Sequence[int] | None = None,
    knn_temperatures: Sequence[float] | None = None,
    lambdas: Sequence[float] = LAMBDAS,
    device: str = "cpu",
) -> list[Sweep | None]:
    """Sweep every memory that finds neighbours, each alone with the model; the grid is for the first of them."""
    found: list[Sweep | None] = []
    for number, seen in enumerate(trace.memories):
        if not seen.polls:
            found.append(None)
            continue
        if any(found):
            found.append(sweep(trace, memory=number, device=device))
        else:
            found.append(
                sweep(trace, memory=number, ks=ks, knn_temperatures=knn_temperatures, lambdas=lambdas, device=device)
            )
    return found
