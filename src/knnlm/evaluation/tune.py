"""Choose the settings of the memories and their weights on held-out text, and save them in the store."""

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
from knnlm.evaluation.sweep import KS, Grid, Sweep
from knnlm.evaluation.trace import Trace, record
from knnlm.io import translate_os_errors
from knnlm.memories.decoder import DecoderCard, set_lambda
from knnlm.memories.voting import NeighbourMemory
from knnlm.mixture.loader import is_decoder
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.saved import SavedTuning, save_tuning, weights_state
from knnlm.mixture.spec import MemorySpec, parse_memories
from knnlm.mixture.weights import FixedWeights, Weights
from knnlm.progress import Progress, silent


@dataclass(frozen=True)
class Tuning:
    """Chosen settings and weights, and their perplexity on the text they were chosen on."""

    specs: list[MemorySpec]
    weights: Weights
    sweeps: list[Sweep | None]  # of each memory, alone with the language model; None where it has no neighbours
    tokens: int
    documents: int
    leaked_documents: int  # documents of the text that are in the store: settings chosen on them suit no other text
    base_perplexity: float
    perplexity: float  # of a gate: by networks that were not trained on the document
    seconds: float

    @property
    def lmbda(self) -> float | None:
        """λ: the weight of all memories together, None where it depends on the token."""
        return sum(self.weights.values[1:]) if isinstance(self.weights, FixedWeights) else None

    @property
    def sweep(self) -> Sweep | None:
        """The first sweep, None where no memory has neighbours."""
        return next((swept for swept in self.sweeps if swept is not None), None)


def tune(
    mixture: Mixture,
    documents: Iterable[Document],
    *,
    weights: str = "gated",
    sources: Sequence[str] = (),
    limit: int | None = None,
    grid: Grid | None = None,
    batch_tokens: int | None = None,
    progress: Progress = silent,
) -> Tuning:
    """Read a text once, choose settings and weights on it, save them in the store and apply them to the mixture."""
    store = mixture.store
    if store is None and mixture.path is not None and is_decoder(mixture.path):
        raise ParameterError(f"{mixture.path}: a decoder has no settings besides λ. Run knnlm tune to choose it.")
    if store is None:
        raise ParameterError("Only a mixture with a store can be tuned. Open it with Mixture.open.")
    check_weights(weights)
    specs = mixture.specs
    grid = grid or Grid.of()
    # Locked before the text is read, so that the time is not lost where the result cannot be saved.
    with writer_lock(store.path), scratch(store.path) as folder:
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
            trace, store, weights=weights, grid=grid, specs=specs, device=str(mixture.lm.device), progress=progress
        )
        save_result(store.path, result, trace)
    apply_tuning(mixture, result)
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
    """Choose settings and weights on a trace; nothing is saved."""
    begin = time.perf_counter()
    check_weights(weights)
    sweeps = sweep_all(trace, grid=grid, device=device)
    settings = choose_settings(trace, sweeps, several=weights != "fixed")
    base = math.exp(-float(np.asarray(trace.lm_log_probs, dtype=np.float64).mean()))
    first = sweeps[0]
    if weights == "fixed" and first is not None and len(sweeps) == 1:
        # One memory: the best λ of the grid, whose values may be the user's.
        lmbda, perplexity = first.best[2:]
        chosen: Weights = FixedWeights((1 - lmbda, lmbda))
    else:
        table = tabulate(trace, settings, with_features=weights == "gated", device=device)
        fitted = fit_weights(table, weights, frequencies=token_frequencies(store), device=device, progress=progress)
        chosen, perplexity = fitted.weights, fitted.perplexity
    known = specs or [_spec(metadata) for metadata in trace.metadata["memories"]]
    specs = [replace(spec, settings=tuple(own)) for spec, own in zip(known, settings, strict=True)]
    return Tuning(
        specs=specs,
        weights=chosen,
        sweeps=sweeps,
        tokens=len(trace),
        documents=trace.metadata["documents"],
        leaked_documents=trace.metadata["leaked_documents"],
        base_perplexity=base,
        perplexity=perplexity,
        seconds=time.perf_counter() - begin,
    )


def apply_tuning(mixture: Mixture, tuning: Tuning) -> None:
    """Set the weights of a mixture and the settings of its memories to tuned ones."""
    for memory, spec in zip(mixture.memories, tuning.specs, strict=True):
        if isinstance(memory, NeighbourMemory):
            memory.settings = spec.settings
    mixture.weights = tuning.weights


def save_trace_tuning(path: Path, result: Tuning, trace: Trace) -> None:
    """Save a tuning in the store that its trace was recorded with."""
    check_trace(path, trace)
    with writer_lock(path):
        save_result(path, result, trace)


def tune_decoder(
    mixture: Mixture,
    documents: Iterable[Document],
    *,
    sources: Sequence[str] = (),
    limit: int | None = None,
    progress: Progress = silent,
) -> DecoderCard:
    """Read a text with a model and its decoder, choose λ on it, and save λ in the decoder's card."""
    if mixture.path is None or not is_decoder(mixture.path):
        raise ParameterError("Only a mixture that was opened from a decoder can save its λ there.")
    with tempfile.TemporaryDirectory(prefix="knnlm-tune-") as folder:
        trace = record(mixture, documents, Path(folder) / "trace", sources=sources, limit=limit, progress=progress)
        table = tabulate(trace, [()], with_features=False)
    return set_lambda(mixture.path, *fit_decoder(table, mixture.lm.name, trace.metadata["sources"]))


def fit_decoder(table: TraceTable, model: str, text: Sequence[str]) -> tuple[float, dict[str, Any]]:
    """Return λ of a decoder, the only memory of the table, and the perplexities with and without it."""
    fitted = fit_weights(table, "fixed", frequencies=torch.zeros(0))  # frequencies are for gates only
    assert isinstance(fitted.weights, FixedWeights)
    metadata = {
        "model": model,
        "text": list(text),
        "tokens": len(table.lm_log_probs),
        "base_perplexity": math.exp(-float(table.lm_log_probs.double().mean())),
        "perplexity": fitted.perplexity,
    }
    return float(fitted.weights.values[1]), metadata


def check_trace(path: Path, trace: Trace) -> None:
    """Raise DatastoreError for a trace that was recorded with another store."""
    fingerprint = Datastore.open(path).fingerprint
    if fingerprint != trace.metadata["fingerprint"]:
        raise DatastoreError(
            f"{path}: the trace was recorded with another store ({trace.metadata['store']}, fingerprint "
            f"{trace.metadata['fingerprint']}, not {fingerprint}). Run knnlm eval {path} TEXT --save-trace."
        )


def token_frequencies(store: Datastore) -> Tensor:
    """Return (V,) how often each token occurs in a store."""
    counts = torch.zeros(int(store.model["vocab_size"]))
    for start in range(0, store.entry_count, 1 << 20):
        rows = torch.arange(start, min(start + (1 << 20), store.entry_count))
        counts += torch.bincount(store.values(rows), minlength=len(counts))
    return counts


def _spec(metadata: dict[str, Any]) -> MemorySpec:
    (spec,) = parse_memories(metadata["label"])
    return replace(spec, metric=metadata["metric"], identity=metadata["identity"])


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """Create a temporary folder on the store's own disk, after removing those of killed processes."""
    for leftover in path.glob(".trace-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with translate_os_errors(path):
        scratch = tempfile.TemporaryDirectory(prefix=".trace-", dir=path)
    with scratch as folder:
        yield Path(folder)


def save_result(path: Path, result: Tuning, trace: Trace) -> None:
    """Save a tuning in a store, whose writer lock the caller holds."""
    weights, tensors = weights_state(result.weights)
    save_tuning(
        path,
        SavedTuning(
            result.specs,
            weights,
            {
                "chosen_on": trace.metadata["sources"],
                "tokens": result.tokens,
                "base_perplexity": result.base_perplexity,
                "perplexity": result.perplexity,
            },
        ),
        tensors,
    )
