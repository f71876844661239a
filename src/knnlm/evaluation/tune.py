"""Choose the settings of the memories and their weights on held-out text, and save them in the store.

`tabulate` reduces a trace to the target's log-probability by each component and the features of a gate. Fitting and
evaluation are arithmetic on that table, for any subset of the memories.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from knnlm.corpus import Document
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.store import Datastore
from knnlm.errors import CorpusError, DatastoreError, KnnlmWarning, ParameterError
from knnlm.evaluation.evaluate import (
    ComponentScores,
    Evaluation,
    TokenScores,
    Totals,
    first_documents,
    score_sums,
    summarise,
)
from knnlm.evaluation.odds import ChosenOdds, OddsSearch, best_choice
from knnlm.evaluation.quality import check_metrics
from knnlm.evaluation.samples import check_sample_count, sample_documents
from knnlm.evaluation.support import SupportFigures, fit_support
from knnlm.evaluation.sweep import KS, Grid, Sweep, sweep, totals_of
from knnlm.evaluation.trace import MemoryTrace, Trace, record, to_tensor
from knnlm.io import translate_os_errors
from knnlm.lm.causal import CausalLM
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.memories.base import Positions
from knnlm.memories.decoder import DecoderCard, set_lambda
from knnlm.memories.voting import VoteParams
from knnlm.mixture.em import fit, log_mixed
from knnlm.mixture.evidence import evidence_features, text_evidence
from knnlm.mixture.gate import (
    DEFAULT_CONFIG,
    FEWEST,
    Gate,
    MemoryFeatures,
    feature_names,
    features,
    train_gate,
    train_skip,
)
from knnlm.mixture.layer import OnlineLayer, PositionInputs
from knnlm.mixture.loader import is_decoder
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.online import ExpertScores, OnlineConfig, choose_config, expert_log_probs
from knnlm.mixture.saved import SavedTuning, save_tuning, weights_state
from knnlm.mixture.source_domain import FEWEST_SOURCES, MAX_SOURCES, SourceDomain, Sources
from knnlm.mixture.spec import MemorySpec, parse_memories
from knnlm.mixture.support import SupportModel
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

MAX_SAMPLES = 60_000  # tokens that the model writes for the training of a gate
FEW_KS = (1, 4, 8, 16)  # tried beside the usual ones where translations decide
OTHER_PAIRS = 4  # of another domain, for each pair that is held out to be translated

_Columns = TypeVar("_Columns", MemoryFeatures, Positions)
SettingsByMemory = Sequence[Sequence[VoteParams]]  # for each memory; empty where it has no neighbours


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
    perplexity: float  # of the weights as fitted; of a gate: by networks that were not trained on the document
    seconds: float
    online: OnlineConfig | None = None  # None: without online weights
    support: SupportModel | None = None  # None: too few tokens to train it
    support_figures: SupportFigures | None = None  # of documents that the support was not trained on
    source_domain: SourceDomain | None = None  # None: the store has no sources, or there is no text of another domain
    odds: ChosenOdds | None = None  # None: not chosen by the quality of translations

    @property
    def lmbda(self) -> float | None:
        """λ: the weight of all memories together, None where it depends on the token."""
        return sum(self.weights.values[1:]) if isinstance(self.weights, FixedWeights) else None

    @property
    def end_odds(self) -> float:
        """Factor of the odds of the end token in translations."""
        return 1.0 if self.odds is None else self.odds.end_odds

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
    online: bool = True,
    samples: int | None = None,
    other: Iterable[Document] = (),
    quality: int = 0,
    batch_tokens: int | None = None,
    progress: Progress = silent,
) -> Tuning:
    """Read a text once, choose settings and weights on it, save them in the store and apply them to the mixture.

    A gate with online weights is trained also on `samples` tokens that the model writes (None: as many as the text has,
    at most 60,000) and on `other` documents, of other domains than the store's, with at most `limit` tokens. The weight
    of memories of pairs, whether few neighbours vote or many and, of other than fixed weights, the odds of the end
    token are then chosen by the BLEU of `quality` translations of held-out pairs, at most a third; 0: as fitted.
    """
    store = mixture.store
    if store is None and mixture.path is not None and is_decoder(mixture.path):
        raise ParameterError(f"{mixture.path}: a decoder has no settings besides λ. Run knnlm tune to choose it.")
    if store is None:
        raise ParameterError("Only a mixture with a store can be tuned. Open it with Mixture.open.")
    check_weights(weights)
    _check_texts(mixture.lm, samples=samples, quality=quality)
    if other and not (online and weights == "gated"):
        raise ParameterError("Text of another domain trains a gate with online weights; other weights do not use it.")
    if quality or (other and mixture.lm.has_encoder):
        documents, other = (list(first_documents(each, mixture.lm, limit)) for each in (documents, other))
    documents, some = _hold_out(documents, quality)
    # Few sources of another domain pass the check of the domain, and only these are translated more than once.
    other, others = _hold_out(other, OTHER_PAIRS * quality)
    if quality and not some:
        raise CorpusError("A third of the pairs is held out to be translated, so that at least 3 are needed.")
    mixture.router = None  # all stores are tuned together
    specs, grid = mixture.specs, grid or Grid.of()
    reading: dict[str, Any] = {"k": max(grid.ks or KS), "batch_tokens": batch_tokens, "progress": progress}
    # Locked before the text is read, so that the time is not lost where the result cannot be saved.
    with writer_lock(store.path), scratch(store.path) as folder:
        trace = record(mixture, documents, folder / "trace", sources=sources, limit=limit, **reading)
        elsewhere = None
        if online and weights == "gated":
            most = MAX_SAMPLES if _writes_samples(mixture.lm, other) else 0
            count = min(len(trace), most) if samples is None else samples
            written = sample_documents(mixture.lm, count, progress=progress) if count else []
            if negative := [*written, *first_documents(other, mixture.lm, limit)]:
                elsewhere = record(mixture, negative, folder / "samples", **reading)
        options: dict[str, Any] = {"device": str(mixture.lm.device), "progress": progress}
        # Of a translation, no token is given, so that evidence would be missing where it is generated.
        options["evidence"] = not mixture.lm.has_encoder
        source_domain = _fit_source_domain(mixture, documents, other) if other else None
        mixture.source_domain = source_domain
        if quality:
            options["search"] = OddsSearch(mixture, some, other=others, progress=progress)
        result = tune_trace(
            trace, store, weights=weights, grid=grid, specs=specs, online=online, samples=elsewhere, **options
        )
        result = replace(result, source_domain=source_domain)
        save_result(store.path, result, trace)
    apply_tuning(mixture, result)
    return result


def _hold_out(documents: Iterable[Document], count: int) -> tuple[Iterable[Document], list[Document]]:
    """Return the documents without the last ones, and these: so many, but at most a third; of 0, as they are."""
    if not count:
        return documents, []
    every = list(documents)
    held_out = min(count, len(every) // 3)
    return every[: len(every) - held_out], every[len(every) - held_out :]


def _writes_samples(lm: CausalLM, other: Iterable[Document]) -> bool:
    """Whether the model writes text for the gate by default: not of sounds, and of pairs only without other ones.

    Sources of random words are a poor substitute for those of another domain, and cost quality in the store's own.
    """
    return not lm.reads_audio and not (lm.has_encoder and other)


def _fit_source_domain(
    mixture: Mixture, documents: Iterable[Document], other: Iterable[Document]
) -> SourceDomain | None:
    """Fit the domain of the sources of all stores against sources of another; None for a model without sources."""
    lm = mixture.lm
    if not isinstance(lm, Seq2SeqLM) or lm.reads_audio:
        return None
    given = [document.source_text or "" for document in documents][:MAX_SOURCES]
    elsewhere = [document.source_text or "" for document in other][:MAX_SOURCES]
    own = [*given, *(text for store in mixture.stores for text in store.catalog.sample_sources(MAX_SOURCES))]
    if (fewest := min(len(own), len(elsewhere))) < FEWEST_SOURCES:
        warnings.warn(
            f"No domain check is fitted: it needs {FEWEST_SOURCES} sources of the store's domain and of the other one, "
            f"and there are {fewest}. Other text may be translated with the store.",
            KnnlmWarning,
            stacklevel=2,
        )
        return None
    return SourceDomain.fit(Sources.read(lm, own), Sources.read(lm, elsewhere))


def _check_texts(lm: CausalLM, *, samples: int | None, quality: int) -> None:
    """Raise where a model cannot write the samples or the translations that are asked for."""
    check_sample_count(samples or 0)
    if samples and lm.reads_audio:
        raise ParameterError(f"{lm.name} reads sounds, of which none can be made up: leave out --samples.")
    if quality < 0:
        raise ParameterError(f"The number of translations must be at least 0, not {quality}.")
    if quality and (lm.reads_audio or not lm.has_encoder):
        raise ParameterError(f"{lm.name} does not translate texts, so that no translations can be compared.")
    if quality:
        check_metrics()


def tune_trace(
    trace: Trace,
    store: Datastore,
    *,
    weights: str = "gated",
    grid: Grid | None = None,
    specs: Sequence[MemorySpec] | None = None,
    online: bool = True,
    samples: Trace | None = None,
    evidence: bool = True,
    search: OddsSearch | None = None,
    device: str = "cpu",
    progress: Progress = silent,
) -> Tuning:
    """Choose settings and weights on a trace; nothing is saved. `online`: with online weights.

    `samples` is the trace of text that the memories should not be used for: the model wrote it, or it is of another
    domain. A gate is trained also on it, by default with evidence. `search` multiplies the odds of the fitted weights.
    """
    begin = time.perf_counter()
    check_weights(weights)
    grid = grid or Grid.of()
    fit = partial(_fit_settings, trace, store, weights, samples, evidence=evidence, device=device, progress=progress)
    found, odds = fit(grid), None
    if search is not None:
        # Many neighbours have the better probabilities, and few often the better translations.
        few = [] if grid.ks or found.max_k <= max(FEW_KS) else [fit(grid, ks=FEW_KS)]
        found, odds = _choose_by_quality([found, *few], search)
    table, fitted, written = found.table, found.fitted, found.samples
    perplexity, config = fitted.perplexity, None
    if online and evidence:  # without evidence, the experts of a text keep their prior
        config, perplexity = choose_online(table, fitted.weights, written)
    chosen = fitted.weights if odds is None else odds.weights
    mixed = score_table(table, chosen, config).weights
    supported = fit_support(trace, table, found.settings, mixed, device=device, progress=progress) or (None, None)
    known = specs or [_spec(metadata) for metadata in trace.metadata["memories"]]
    specs = [replace(spec, settings=tuple(own)) for spec, own in zip(known, found.settings, strict=True)]
    return Tuning(
        specs=specs,
        weights=chosen,
        sweeps=found.sweeps,
        tokens=len(trace),
        documents=trace.metadata["documents"],
        leaked_documents=trace.metadata["leaked_documents"],
        base_perplexity=math.exp(-float(np.asarray(trace.lm_log_probs, dtype=np.float64).mean())),
        perplexity=perplexity,
        seconds=time.perf_counter() - begin,
        online=config,
        support=supported[0],
        support_figures=supported[1],
        odds=odds,
    )


@dataclass(frozen=True)
class _FittedSettings:
    """Settings of the memories from one grid, and weights fitted to them."""

    sweeps: list[Sweep | None]
    settings: list[tuple[VoteParams, ...]]
    table: TraceTable
    samples: TraceTable | None
    fitted: FittedWeights

    @property
    def max_k(self) -> int:
        """The largest k of the settings; 0 where no memory has neighbours."""
        return max((setting.k for own in self.settings for setting in own), default=0)


def _fit_settings(
    trace: Trace,
    store: Datastore,
    weights: str,
    samples: Trace | None,
    grid: Grid,
    *,
    evidence: bool,
    ks: tuple[int, ...] | None = None,
    **how: Any,
) -> _FittedSettings:
    """Choose settings from a grid, and fit weights to them. `ks` are those of all memories, where the grid has none."""
    sweeps = sweep_all(trace, grid=grid, ks=ks, device=how["device"])
    settings = choose_settings(trace, sweeps, several=weights != "fixed")
    table = tabulate(trace, settings, device=how["device"])
    written = None if samples is None else tabulate(samples, settings, device=how["device"])
    if weights == "fixed" and len(sweeps) == 1 and sweeps[0] is not None:
        fitted = _best_lambda(sweeps[0])
    else:
        frequencies = token_frequencies(store)
        fitted = fit_weights(table, weights, frequencies=frequencies, samples=written, evidence=evidence, **how)
    return _FittedSettings(sweeps, settings, table, written, fitted)


def _choose_by_quality(found: Sequence[_FittedSettings], search: OddsSearch) -> tuple[_FittedSettings, ChosenOdds]:
    """Return the settings with the best translations, and their odds with the figures of all.

    With fixed weights, which are those of kNN-MT's paper, the odds of the end token stay as they are.
    """
    chosen = [search.choose(own.settings, own.fitted.weights) for own in found]
    place = best_choice(chosen)
    best, odds = found[place], chosen[place]
    if best.fitted.weights.kind != "fixed":
        odds = search.choose_end(best.settings, best.fitted.weights, odds)
    others = [figures for number, own in enumerate(chosen) if number != place for figures in own.figures[1:]]
    return best, replace(odds, figures=(*odds.figures, *others))


def _best_lambda(swept: Sweep) -> FittedWeights:
    """Return the best λ of one memory among those that were tried, which may be the user's."""
    lmbda, perplexity = swept.best[2:]
    return FittedWeights(FixedWeights((1 - lmbda, lmbda)), perplexity)


def apply_tuning(mixture: Mixture, tuning: Tuning) -> None:
    """Set the weights of a mixture and the settings of its memories to tuned ones."""
    mixture.set_weights(tuning.weights, [spec.settings for spec in tuning.specs])
    mixture.online, mixture.end_odds = tuning.online, tuning.end_odds
    mixture.support, mixture.source_domain = tuning.support, tuning.source_domain


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
    weights, tensors = weights_state(
        result.weights,
        result.online,
        support=result.support,
        source_domain=result.source_domain,
        end_odds=result.end_odds,
    )
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
                "odds": result.odds.as_dict() if result.odds else None,
            },
        ),
        tensors,
    )


def check_weights(kind: str) -> None:
    """Raise ParameterError for an unknown kind of weights."""
    if kind not in KINDS:
        raise ParameterError(f"Unknown weights {kind!r}. Use one of {', '.join(KINDS)}.")


@dataclass(frozen=True)
class MemoryColumns:
    """Output of one memory for N targets, at chosen settings."""

    label: str
    kind: str
    component_names: list[str]
    log_probs: Tensor  # (N, P) log-probability of the target by each component; NaN: it abstains
    features: MemoryFeatures | None  # None where the table was made without them
    nearest: Tensor | None  # (N,) distance of the nearest neighbour, of a memory that has neighbours
    metadata: dict[str, Any]  # k, τ and metric of the first setting, of a memory that has neighbours
    feature_names: Sequence[str] = ()
    expensive: bool = False  # it needs a search

    def join(self, other: MemoryColumns) -> MemoryColumns:
        """Return the rows of both."""
        features = nearest = None
        if self.features is not None and other.features is not None:
            features = _join(self.features, other.features)
        if self.nearest is not None and other.nearest is not None:
            nearest = torch.cat([self.nearest, other.nearest])
        log_probs = torch.cat([self.log_probs, other.log_probs])
        return replace(self, log_probs=log_probs, features=features, nearest=nearest)


def _join(one: _Columns, other: _Columns) -> _Columns:
    """Concatenate the tensors of two dataclasses."""
    names = [field.name for field in fields(one)]
    return type(one)(*(torch.cat([getattr(one, name), getattr(other, name)]) for name in names))


@dataclass(frozen=True)
class TraceTable:
    """Output of every component of a mixture for the N targets of a trace, at chosen settings."""

    lm_log_probs: Tensor  # (N,) log-probability of the target by the language model
    lm_features: Tensor  # (N, F)
    lm_top: Tensor  # (N,) the language model's most probable token
    positions: Positions
    documents: Tensor  # (N,) number of the document that each row is in
    memories: list[MemoryColumns]
    totals: Totals

    def select(self, *labels: str) -> TraceTable:
        """Return the table of some of the memories, in this order."""
        by_label = {memory.label: memory for memory in self.memories}
        return replace(self, memories=[by_label[label] for label in labels])

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities (N, M) of the targets by each component, the language model first."""
        return torch.cat([self.lm_log_probs[:, None], *(memory.log_probs for memory in self.memories)], 1)

    @property
    def component_names(self) -> list[str]:
        """Names of the M components."""
        return ["model", *(name for memory in self.memories for name in memory.component_names)]

    @property
    def component_slices(self) -> list[slice]:
        """The components of each memory."""
        return component_slices_of(len(memory.component_names) for memory in self.memories)

    @property
    def begins(self) -> Tensor:
        """Marks the (N,) rows that are the first of their document."""
        return self.documents == torch.arange(len(self.documents))

    @property
    def evidence(self) -> Tensor:
        """The (N, 3·m) features of the text before each row, from how well each memory predicted it."""
        log_probs, first = self.log_probs, [own.start for own in self.component_slices]
        states = text_evidence(log_probs, log_probs.isnan(), first, self.begins.numpy())
        return evidence_features(torch.from_numpy(states))

    def join(self, other: TraceTable) -> TraceTable:
        """Return the rows of both tables; the totals are those of this one."""
        names = ("lm_log_probs", "lm_features", "lm_top")
        joined: dict[str, Any] = {name: torch.cat([getattr(self, name), getattr(other, name)]) for name in names}
        positions = _join(self.positions, other.positions)
        documents = torch.cat([self.documents, other.documents + len(self.documents)])
        memories = [one.join(two) for one, two in zip(self.memories, other.memories, strict=True)]
        return replace(self, **joined, positions=positions, documents=documents, memories=memories)

    @property
    def expensive(self) -> list[int]:
        """Numbers of the memories that need a search."""
        return [number for number, memory in enumerate(self.memories) if memory.expensive]

    def features(self, frequencies: Tensor, *, without: Sequence[int] = (), leave_out: bool = False) -> Tensor:
        """Return the (N, F) features of a gate; memories in `without` appear as not searched, or are left out."""
        by_memory = []
        for number, memory in enumerate(self.memories):
            assert memory.features is not None, "tabulate with features for a gate"
            if number not in without:
                by_memory.append(memory.features)
            elif not leave_out:
                by_memory.append(_not_searched(memory.features))
        return features(self.positions, frequencies, (self.lm_features, self.lm_top), by_memory)

    def layer(self, weights: Weights, config: OnlineConfig | None) -> OnlineLayer:
        """Return weights of these memories, and how the tokens of a text change them."""
        kinds = tuple(memory.kind for memory in self.memories)
        return OnlineLayer(weights, config, kinds, tuple(self.component_slices))

    def log_probs_without(self, memories: Sequence[int], rows: Tensor) -> Tensor:
        """Return the log-probabilities with some memories abstaining at some rows."""
        log_probs = self.log_probs
        for number in memories:
            columns = self.component_slices[number]
            log_probs[rows, columns.start : columns.stop] = torch.nan
        return log_probs


def _not_searched(known: MemoryFeatures) -> MemoryFeatures:
    """Return the features of a memory that was not searched."""
    impossible = torch.full_like(known.log_prob_of_lm_top, -torch.inf)
    return MemoryFeatures(torch.zeros_like(known.features), impossible, torch.full_like(known.top, -1), impossible)


def tabulate(
    trace: Trace, settings: SettingsByMemory, *, with_features: bool = True, device: str = "cpu"
) -> TraceTable:
    """Compute the log-probabilities of the targets by each component, and the features of a gate."""
    return TraceTable(
        lm_log_probs=to_tensor(trace.lm_log_probs),
        lm_features=to_tensor(trace.lm_features),
        lm_top=to_tensor(trace.lm_top).long(),
        positions=trace.positions_of(slice(0, len(trace))),
        documents=to_tensor(trace.documents).long(),
        memories=[
            _memory_columns(trace, memory, own, device, with_features=with_features)
            for memory, own in zip(trace.memories, settings, strict=True)
        ],
        totals=totals_of(trace),
    )


def _memory_columns(
    trace: Trace, memory: MemoryTrace, settings: Sequence[VoteParams], device: str, *, with_features: bool
) -> MemoryColumns:
    log_probs, blocks = [], []
    for rows in trace.blocks(device):
        targets = to_tensor(trace.targets[rows]).long().to(device)
        lm_top = to_tensor(trace.lm_top[rows]).long().to(device)
        log_probs.append(memory.component_log_probs(rows, targets, settings, device=device).cpu())
        if with_features:
            blocks.append(memory.features(rows, lm_top, settings, device=device))
    columns = [[getattr(block, name).cpu() for block in blocks] for name in MemoryFeatures.__dataclass_fields__]
    metadata: dict[str, Any] = {}
    names = list(memory.metadata["component_names"])
    if memory.has_neighbours:
        main = settings[0]
        metadata = {"k": main.k, "knn_temperature": main.knn_temperature, "metric": memory.metadata["metric"]}
        names = [f"{memory.label} {setting}" for setting in settings]
    return MemoryColumns(
        label=memory.label,
        kind=memory.metadata["kind"],
        component_names=names,
        log_probs=torch.cat(log_probs),
        features=MemoryFeatures(*map(torch.cat, columns)) if with_features else None,
        nearest=nearest(to_tensor(memory.distances[:, :1])) if memory.has_neighbours else None,
        metadata=metadata,
        feature_names=memory.metadata["feature_names"],
        expensive=memory.metadata["expensive"],
    )


def vote_variants(
    swept: Sweep, ks: Sequence[int] = (1, 8, 64, 1024), *, steps: Sequence[int] = (-6, -3, 3, 6)
) -> list[VoteParams]:
    """Return the best setting, then others for a gate to choose from: other temperatures, other k."""
    best_k, best_temperature = swept.setting
    chosen = [VoteParams(best_k, best_temperature)]
    best = swept.knn_temperatures.index(best_temperature)
    for step in steps:
        if 0 <= best + step < len(swept.knn_temperatures):
            chosen.append(VoteParams(best_k, swept.knn_temperatures[best + step]))
    for k in ks:
        if k in swept.ks and k != best_k:
            mixed = swept.perplexity[swept.ks.index(k)][:, np.array(swept.lambdas) > 0]
            number = int(mixed.min(1).argmin()) if mixed.size else 0
            chosen.append(VoteParams(k, swept.knn_temperatures[number]))
    return chosen


@dataclass(frozen=True)
class FittedWeights:
    """Weights, and their perplexity on the text they were fitted on (out of fold, for a gate)."""

    weights: Weights
    perplexity: float


def fit_weights(
    table: TraceTable,
    kind: str,
    *,
    frequencies: Tensor,
    samples: TraceTable | None = None,
    evidence: bool = True,
    device: str = "cpu",
    progress: Progress = silent,
) -> FittedWeights:
    """Fit weights of one kind; `fixed` weights only the first component of each memory, the others all of them.

    A gate is trained also on `samples`, the table of text that the memories should not be used for, and then sees
    `evidence` of the text so far.
    """
    check_weights(kind)
    if kind in ("fixed", "fitted"):
        count = len(table.component_names)
        used = [0, *(own.start for own in table.component_slices)] if kind == "fixed" else list(range(count))
        estimate = fit(table.log_probs[:, used])
        values = torch.zeros(count, dtype=torch.float64)
        values[used] = estimate.weights
        return FittedWeights(FixedWeights(tuple(values.tolist()), kind), math.exp(estimate.loss))
    if kind == "buckets":
        return _fit_buckets(table)
    gated = _fit_gate(table, samples, frequencies, device, progress, with_evidence=evidence and samples is not None)
    assert gated.gate.out_of_fold is not None
    own = gated.gate.out_of_fold[: len(table.lm_log_probs)]
    return FittedWeights(gated, math.exp(-float(own.double().mean())))


def _fit_buckets(table: TraceTable) -> FittedWeights:
    if not table.expensive:
        raise ParameterError("Bucket weights depend on the distance of the nearest stored context: mix in knn.")
    number = table.expensive[0]
    distances, log_probs = table.memories[number].nearest, table.log_probs
    assert distances is not None
    buckets = Buckets.fit(log_probs, distances)
    mixed = log_mixed(log_probs.double(), buckets.weights(distances, log_probs.isnan()).double())
    return FittedWeights(BucketWeights(buckets, number), math.exp(-float(mixed.mean())))


def _fit_gate(
    table: TraceTable,
    samples: TraceTable | None,
    frequencies: Tensor,
    device: str,
    progress: Progress,
    *,
    with_evidence: bool,
) -> GatedWeights:
    """Train a gate, a second one for positions without a search, and the network that skips searches."""
    every, groups = table, table.documents
    if samples is not None:
        every = table.join(samples)
        groups = torch.cat([_units(table.documents), samples.documents + len(table.documents)])
    evidence = every.evidence if with_evidence else torch.empty(len(every.documents), 0)
    names = feature_names([(memory.kind, memory.feature_names) for memory in table.memories], evidence=with_evidence)

    def train(inputs: Tensor, log_probs: Tensor) -> Gate:
        return train_gate(
            torch.cat([inputs, evidence], 1),
            log_probs,
            groups,
            feature_names=names,
            component_names=table.component_names,
            fitted=torch.arange(len(groups)) < len(table.documents),  # the text alone, not what the model wrote
            device=device,
            progress=progress,
        )

    gate = train(every.features(frequencies), every.log_probs)
    expensive, count = table.expensive, len(table.lm_log_probs)
    if not expensive or count < FEWEST:
        return GatedWeights(gate, frequencies)
    everywhere = torch.ones(len(every.documents), dtype=torch.bool)
    cheap = train(every.features(frequencies, without=expensive), every.log_probs_without(expensive, everywhere))
    assert gate.out_of_fold is not None
    assert cheap.out_of_fold is not None
    gain = (gate.out_of_fold.cpu() - cheap.out_of_fold.cpu())[:count]
    before_search = table.features(frequencies, without=expensive, leave_out=True)
    skip = train_skip(before_search, gain, table.documents, device=device, progress=progress)
    return GatedWeights(gate, frequencies, skip=skip, cheap=cheap)


def _units(documents: Tensor) -> Tensor:
    """Return what is held out together, beside other text: documents, or blocks of rows where one has almost all."""
    rows = len(documents)
    largest = int(documents.unique(return_counts=True)[1].max())
    return documents if largest <= 0.9 * rows else torch.arange(rows) * DEFAULT_CONFIG.folds // rows


def component_table(table: TraceTable, weights: Weights) -> ComponentScores:
    """Return the log-probabilities of the targets by each component, and what these weights are computed from."""
    log_probs = table.log_probs
    inputs = torch.empty(len(log_probs), 0, dtype=torch.float64)
    if isinstance(weights, BucketWeights):
        distances = table.memories[weights.memory].nearest
        assert distances is not None
        inputs = distances[:, None]
    elif isinstance(weights, GatedWeights):
        inputs = table.features(weights.frequencies)
        if weights.skip is not None and weights.skips_searches:
            expensive = table.expensive
            before_search = table.features(weights.frequencies, without=expensive, leave_out=True)
            searched = weights.skip.search_mask(before_search, weights.fraction)
            log_probs = table.log_probs_without(expensive, ~searched)
            not_searched = table.features(weights.frequencies, without=expensive)
            inputs = torch.cat([torch.where(searched[:, None], inputs, not_searched), searched[:, None].float()], 1)
    return ComponentScores(log_probs, PositionInputs(inputs, log_probs.isnan()))


def choose_online(
    table: TraceTable, weights: Weights, samples: TraceTable | None = None
) -> tuple[OnlineConfig | None, float]:
    """Choose the prior and the switch rate of online weights over fitted weights; return them and the perplexity.

    A gate is represented by its predictions for documents that it was not trained on. `samples` is the table of a text
    that the model wrote, on which the memories should not be used.
    """
    held_out = weights.gate.out_of_fold if isinstance(weights, GatedWeights) else None
    count = len(table.lm_log_probs)
    own = _expert_scores(table, weights, None if held_out is None else held_out[:count])
    other = None
    if samples is not None:
        other = _expert_scores(samples, weights, None if held_out is None else held_out[count:])
    kinds = [memory.kind for memory in table.memories]
    config, loss = choose_config(own, other, stores=kinds.count("knn"), caches=kinds.count("cache"))
    return config, math.exp(loss)


def _expert_scores(table: TraceTable, weights: Weights, held_out: Tensor | None) -> ExpertScores:
    """Return the log-probabilities of the targets by each expert; those of the mixture are given, if `held_out` is."""
    scores = component_table(table, weights)
    layer = table.layer(weights, OnlineConfig())
    _, by_expert = layer.states_before(scores.given, scores.components, table.begins)
    log_probs = expert_log_probs(by_expert, scores.components).numpy()  # (N, E)
    if held_out is not None:
        log_probs[:, 1] = held_out.double().cpu().numpy()
    return ExpertScores(log_probs, table.begins.numpy())


def score_table(table: TraceTable, weights: Weights, online: OnlineConfig | None = None) -> TokenScores:
    """Return the scores of the table's targets with these weights."""
    return component_table(table, weights).weigh(table.layer(weights, online), table.begins)


def evaluate_table(table: TraceTable, weights: Weights, online: OnlineConfig | None = None) -> Evaluation:
    """Return what `Mixture.evaluate` returns with these weights, computed from the table."""
    begin = time.perf_counter()
    scores = score_table(table, weights, online)
    best = scores.components.nan_to_num(nan=-torch.inf).amax(1)
    sums = score_sums(scores.components[:, 0], scores.mixture, best).tolist()
    if isinstance(weights, FixedWeights) and online is None:
        mean: Sequence[float] = weights.values
    else:
        mean = scores.weights.mean(0).tolist()
    memories = [
        {"name": memory.label, "kind": memory.kind, "weight": float(sum(mean[own])), **memory.metadata}
        for memory, own in zip(table.memories, table.component_slices, strict=True)
    ]
    return summarise(table.totals, sums, memories, weights.kind, online=online, seconds=time.perf_counter() - begin)


def evaluate_trace(
    trace: Trace, settings: SettingsByMemory, weights: Weights, online: OnlineConfig | None = None
) -> Evaluation:
    """Return what `Mixture.evaluate` returns with these settings and weights, computed from a trace."""
    return evaluate_table(tabulate(trace, settings, with_features=isinstance(weights, GatedWeights)), weights, online)


def choose_settings(trace: Trace, sweeps: Sequence[Sweep | None], *, several: bool) -> list[tuple[VoteParams, ...]]:
    """Return the best setting of each memory of neighbours, with `several` followed by variants of it."""
    chosen: list[tuple[VoteParams, ...]] = []
    for memory, swept in zip(trace.memories, sweeps, strict=True):
        if swept is None:
            assert not memory.has_neighbours
            chosen.append(())
        else:
            chosen.append(tuple(vote_variants(swept)) if several else (VoteParams(*swept.setting),))
    return chosen


def sweep_all(
    trace: Trace, *, grid: Grid | None = None, ks: tuple[int, ...] | None = None, device: str = "cpu"
) -> list[Sweep | None]:
    """Sweep every memory of neighbours, each alone with the language model; the grid is for the first of them.

    `ks` are tried for every memory for which the grid has none.
    """
    own = grid or Grid.of()
    sweeps: list[Sweep | None] = []
    for number, memory in enumerate(trace.memories):
        if memory.has_neighbours:
            sweeps.append(sweep(trace, memory=number, device=device, **asdict(replace(own, ks=own.ks or ks))))
            own = Grid.of()
        else:
            sweeps.append(None)
    return sweeps
