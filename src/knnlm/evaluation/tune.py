"""Choose how the memories of a mixture vote and weigh, on held-out text, and keep the choice in the memory."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnlm.corpus import Document
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError, ParameterError
from knnlm.evaluation.fit import TraceTable, check_weights, choose_settings, fit_weights, sweep_all, tabulate
from knnlm.evaluation.sweep import KS, LAMBDAS, Grid, Sweep
from knnlm.evaluation.trace import Trace, record
from knnlm.io import translate_os_errors
from knnlm.memories.decoder import DecoderCard, set_lambda
from knnlm.mixture.loader import is_decoder
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.saved import SavedTuning, save_tuning, weights_state
from knnlm.mixture.spec import MemorySpec, parse_memories
from knnlm.mixture.weights import FixedWeights, Weights
from knnlm.progress import Progress, silent


@dataclass(frozen=True)
class Tuning:
    """What was chosen, and what it gave on the text it was chosen on."""

    specs: list[MemorySpec]
    weights: Weights
    sweeps: list[Sweep | None]  # of each memory, alone with the model; None where there is nothing to sweep
    tokens: int
    documents: int
    remembered: int  # documents that are in the memory themselves: what is chosen on them suits no other text
    base_perplexity: float
    perplexity: float  # of a gate: by networks that did not see the document
    seconds: float

    @property
    def lambda_(self) -> float | None:
        """What all memories together weigh, None where that depends on the token."""
        return sum(self.weights.values[1:]) if isinstance(self.weights, FixedWeights) else None

    @property
    def sweep(self) -> Sweep | None:
        """The first sweep, None where no memory has neighbours."""
        return next((found for found in self.sweeps if found is not None), None)


def tune(
    mixture: Mixture,
    documents: Iterable[Document],
    *,
    weights: str = "gated",
    sources: Sequence[str] = (),
    limit: int | None = None,
    ks: Sequence[int] | None = None,
    knn_temperatures: Sequence[float] | None = None,
    lambdas: Sequence[float] = LAMBDAS,
    batch_tokens: int | None = None,
    progress: Progress = silent,
) -> Tuning:
    """Read a text, choose settings and weights on it, and store the choice in the memory."""
    home = mixture.store
    if home is None and mixture.path is not None and is_decoder(mixture.path):
        raise ParameterError(f"{mixture.path} is a decoder: choose its λ with knnlm.tuning.tune_decoder.")
    if home is None:
        raise ParameterError("Only a mixture that was opened from a memory can be tuned: the choice is kept there.")
    check_weights(weights)
    specs = mixture.specs
    grid = Grid.of(ks, knn_temperatures, lambdas)
    # Locked from the beginning, so that nobody waits for a choice that cannot be stored.
    with writer_lock(home.path), scratch(home.path) as folder:
        trace = record(
            mixture,
            documents,
            folder / "trace",
            k=max(grid.ks or KS),
            sources=sources,
            limit=limit,
            batch_tokens=batch_tokens,
            progress=progress,
        )
        result = tune_trace(
            trace, home, weights=weights, grid=grid, specs=specs, device=str(mixture.lm.device), progress=progress
        )
        store_choice(home.path, result, trace)
    return result


def tune_trace(
    trace: Trace,
    store: Datastore,
    *,
    weights: str = "gated",
    grid: Grid | None = None,
    specs: Sequence[MemorySpec] | None = None,
    device: str = "cpu",
    progress: Progress = silent,
) -> Tuning:
    """Choose settings and weights on a trace; nothing is stored."""
    begin = time.perf_counter()
    check_weights(weights)
    grid = grid or Grid.of(None, None, LAMBDAS)
    sweeps = sweep_all(trace, ks=grid.ks, knn_temperatures=grid.knn_temperatures, lambdas=grid.lambdas, device=device)
    settings = choose_settings(trace, sweeps, several=weights != "fixed")
    base = math.exp(-float(np.asarray(trace.log_p, dtype=np.float64).mean()))
    first = sweeps[0]
    if weights == "fixed" and first is not None and len(sweeps) == 1:
        # One memory: the grid's own λ, which the user may have given.
        lmbda, perplexity = first.best[2:]
        chosen: Weights = FixedWeights((1 - lmbda, lmbda))
    else:
        seen = tabulate(trace, settings, evidence=weights == "gated", device=device)
        found = fit_weights(seen, weights, frequencies=token_frequencies(store), device=device, progress=progress)
        chosen, perplexity = found.weights, found.perplexity
    known = specs or [_spec(facts) for facts in trace.facts["memories"]]
    specs = [replace(spec, settings=tuple(own)) for spec, own in zip(known, settings, strict=True)]
    return Tuning(
        specs=specs,
        weights=chosen,
        sweeps=sweeps,
        tokens=len(trace),
        documents=trace.facts["documents"],
        remembered=trace.facts["remembered"],
        base_perplexity=base,
        perplexity=perplexity,
        seconds=time.perf_counter() - begin,
    )


def choose_from(path: Path, result: Tuning, trace: Trace) -> None:
    """Store what was chosen on a trace in the memory that the trace was made with."""
    check_trace(path, trace)
    with writer_lock(path):
        store_choice(path, result, trace)


def tune_decoder(
    mixture: Mixture,
    documents: Iterable[Document],
    *,
    sources: Sequence[str] = (),
    limit: int | None = None,
    progress: Progress = silent,
) -> DecoderCard:
    """Read a text with a model and its decoder, choose λ on it, and write it into the decoder's card."""
    if mixture.path is None or not is_decoder(mixture.path):
        raise ParameterError("Only a mixture that was opened from a decoder keeps its λ there.")
    with tempfile.TemporaryDirectory(prefix="knnlm-tune-") as folder:
        place = Path(folder) / "trace"
        trace = record(mixture, documents, place, sources=sources, limit=limit, progress=progress)
        seen = tabulate(trace, [()], evidence=False)
    return set_lambda(mixture.path, *fit_decoder(seen, mixture.lm.name, trace.facts["text"]))


def fit_decoder(seen: TraceTable, model: str, text: Sequence[str]) -> tuple[float, dict[str, Any]]:
    """Choose λ of the decoder, which is all that was seen beside the model, and say what that gives."""
    found = fit_weights(seen, "fixed", frequencies=torch.zeros(0))  # which one λ has no use for
    assert isinstance(found.weights, FixedWeights)
    facts = {
        "model": model,
        "text": list(text),
        "tokens": len(seen.model),
        "base_perplexity": math.exp(-float(seen.model.double().mean())),
        "perplexity": found.perplexity,
    }
    return float(found.weights.values[1]), facts


def check_trace(path: Path, trace: Trace) -> None:
    """Refuse a trace that was made with another memory."""
    fingerprint = Datastore.open(path).fingerprint
    if fingerprint != trace.facts["fingerprint"]:
        raise DatastoreError(
            f"The trace was made with another memory ({trace.facts['memory']}, {trace.facts['fingerprint']}) than "
            f"{path} ({fingerprint}). Make one with: knnlm eval {path} TEXT --save-trace"
        )


def token_frequencies(store: Datastore) -> Tensor:
    """Count (V,) how often a store has each token."""
    counts = torch.zeros(int(store.model["vocab_size"]))
    for start in range(0, store.rows, 1 << 20):
        rows = torch.arange(start, min(start + (1 << 20), store.rows))
        counts += torch.bincount(store.values(rows), minlength=len(counts))
    return counts


def _spec(facts: dict[str, Any]) -> MemorySpec:
    (spec,) = parse_memories(facts["label"])
    return replace(spec, metric=facts["metric"], identity=facts["identity"])


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """Make room for a trace on the memory's own disk, and remove what a killed process left there."""
    for leftover in path.glob(".trace-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with translate_os_errors(path):
        scratch = tempfile.TemporaryDirectory(prefix=".trace-", dir=path)
    with scratch as folder:
        yield Path(folder)


def store_choice(path: Path, result: Tuning, trace: Trace) -> None:
    """Store what was chosen; the caller holds the memory's writer lock."""
    facts, tensors = weights_state(result.weights)
    save_tuning(
        path,
        SavedTuning(
            result.specs,
            facts,
            {
                "chosen_on": trace.facts["text"],
                "tokens": result.tokens,
                "base_perplexity": result.base_perplexity,
                "perplexity": result.perplexity,
            },
        ),
        tensors,
    )
