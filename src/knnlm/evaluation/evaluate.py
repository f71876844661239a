"""Score the tokens of a text by every part of a mixture. Knows nothing about perplexity.

A search over many positions at once costs less than many searches: keys are read from first to last for each, and one
that several positions ask for is read once. So where nothing but the token that came is asked of the model's own
probabilities, these are not kept, and searches wait until there are many. The model may read on meanwhile.

Measure a mixture on text: perplexity per token, per word, bits per byte. Knows nothing about indexes or stores.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from knnlm.corpus import Document, DocumentMeter
from knnlm.errors import CorpusError, ParameterError
from knnlm.memories.base import LM_LOGITS, Context, Logits, SimpleOutput
from knnlm.memories.voting import NeighbourMemory
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import ReadBatch
from knnlm.mixture.weights import BucketWeights, FixedWeights, MixturePrediction
from knnlm.progress import Progress, silent

_TOGETHER = 8192  # positions that are searched for at once, at the least


@dataclass(frozen=True)
class Scores:
    """What the tokens that came were given at some positions."""

    each: Tensor  # (N, M) log-probabilities by each part, the model's first
    mixed: Tensor  # (N,) by the mixture
    weights: Tensor  # (N, M)


def scores(mixture: Mixture, batches: Iterable[ReadBatch], *, ahead: bool = False) -> Iterator[Scores]:
    """Score the targets of every batch, in their order; several batches may come as one.

    `ahead` lets the next batches be read while a search runs. That only helps where the search is left alone by what
    reads: on the same cores both take longer, and also where the model was on a GPU nothing was gained.
    """
    if not searches_can_wait(mixture):
        for batch in batches:
            yield _scores_of(mixture.predict(batch.context), batch.targets)
        return
    coalesced = _coalesce(map(_strip, batches))
    if ahead:
        yield from _while_reading_on(mixture, coalesced)
    else:
        yield from (_search(mixture, positions) for positions in coalesced)


def _scores_of(prediction: MixturePrediction, targets: Tensor) -> Scores:
    each = prediction.component_log_probs(targets)
    return Scores(each, prediction.combine(each), prediction.weights)


def _while_reading_on(mixture: Mixture, coalesced: Iterable[_ReadPositions]) -> Iterator[Scores]:
    """Search in a thread of its own, one search at a time."""
    with ThreadPoolExecutor(1, thread_name_prefix="search") as worker:
        searching: Future[Scores] | None = None
        for positions in coalesced:
            if searching is not None:
                yield searching.result()
            searching = worker.submit(_search, mixture, positions)
        if searching is not None:
            yield searching.result()


def searches_can_wait(mixture: Mixture) -> bool:
    """Whether memories and weights look at keys only, so that the logits need not be kept until the search."""
    fixed = isinstance(mixture.weights, (FixedWeights, BucketWeights))
    return fixed and not mixture.needs_tokens and all(memory.expensive for memory in mixture.memories)


@dataclass(frozen=True)
class _TargetLogProbs:
    """A prediction of which only the log-probabilities of the targets were kept."""

    log_p: Tensor  # (N,)

    def log_prob(self, targets: Tensor) -> Tensor:  # noqa: ARG002  (it is of these targets and no others)
        return self.log_p

    def log_probs(self) -> Tensor:
        raise NotImplementedError("the logits were not kept")

    def abstains(self) -> Tensor:
        return torch.zeros(len(self.log_p), dtype=torch.bool, device=self.log_p.device)


@dataclass(frozen=True)
class _ReadPositions:
    """Positions that were read, without the (N, V) logits."""

    context: Context  # keys only
    targets: Tensor  # (N,)
    log_p: Tensor  # (N,) the language model's log-probabilities of the targets

    @property
    def lm(self) -> SimpleOutput:
        """What is left of the language model's output; the weights look at nothing else."""
        nothing = self.log_p.new_zeros(len(self.log_p), 0)
        return SimpleOutput(_TargetLogProbs(self.log_p), nothing, torch.full_like(self.targets, -1))


def _strip(batch: ReadBatch) -> _ReadPositions:
    keys = {source: states for source, states in batch.context.states.items() if source != LM_LOGITS}
    return _ReadPositions(Context(keys), batch.targets, Logits(batch.logits).log_prob(batch.targets))


def _coalesce(batches: Iterable[_ReadPositions]) -> Iterator[_ReadPositions]:
    """Join positions until there are enough for a search."""
    waiting: list[_ReadPositions] = []
    for batch in batches:
        waiting.append(batch)
        if sum(len(each.targets) for each in waiting) >= _TOGETHER:
            yield _join(waiting)
            waiting = []
    if waiting:
        yield _join(waiting)


def _join(batches: Sequence[_ReadPositions]) -> _ReadPositions:
    sources = batches[0].context.states
    keys = {source: torch.cat([batch.context.states[source] for batch in batches]) for source in sources}
    targets, log_p = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("targets", "log_p"))
    return _ReadPositions(Context(keys), targets, log_p)


def _search(mixture: Mixture, positions: _ReadPositions) -> Scores:
    """Search for many positions at once, and mix."""
    return _scores_of(mixture.predict(positions.context, lm=positions.lm), positions.targets)


_NAMED = 3  # sources that are kept by name

_BATCH, _GROUP = 1024, 8192  # tokens that are read at once, and tokens that are packed into batches together

_GPU = 16  # times as many on a GPU, which is idle with less

_SHARE = 32  # of its memory, one part in so many is for the logits of a batch


@dataclass(frozen=True)
class Evaluation:
    """What a mixture makes of a text. Perplexities are per token unless they say otherwise."""

    documents: int
    remembered: int  # documents that are in the memory themselves: on them, figures are too good
    tokens: int
    words: int
    bytes: int
    base_perplexity: float
    perplexity: float
    oracle_perplexity: float  # per token the best of all parts: what no mixture can beat by choosing
    memories: list[dict[str, Any]]  # each memory's name, settings and mean weight
    weights: str  # how they were weighed: fixed, fitted, buckets, gated
    seconds: float

    @property
    def lambda_(self) -> float:
        """What all memories together weighed, on average."""
        return float(sum(memory["weight"] for memory in self.memories))

    @property
    def first(self) -> dict[str, Any]:
        """The first store's settings, empty where there is no store."""
        return next((memory for memory in self.memories if memory["kind"] == "knn"), {})

    @property
    def k(self) -> int | None:
        """How many neighbours voted in the first store."""
        return self.first.get("k")

    @property
    def knn_temperature(self) -> float | None:
        """The temperature of that vote."""
        return self.first.get("knn_temperature")

    @property
    def metric(self) -> str | None:
        """How distances were measured there."""
        return self.first.get("metric")

    @property
    def gain(self) -> float:
        """How much lower the perplexity is with the memory, as a fraction."""
        return 1 - self.perplexity / self.base_perplexity

    @property
    def tokens_per_second(self) -> float:
        """How fast the text was evaluated."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Give every figure under the name it has in `--json`."""
        return {
            "documents": self.documents,
            "remembered_documents": self.remembered,
            "tokens": self.tokens,
            "words": self.words,
            "bytes": self.bytes,
            "base_perplexity": self.base_perplexity,
            "perplexity": self.perplexity,
            "gain": self.gain,
            "oracle_perplexity": self.oracle_perplexity,
            "base_word_perplexity": _power(self.base_perplexity, self.tokens / max(1, self.words)),
            "word_perplexity": _power(self.perplexity, self.tokens / max(1, self.words)),
            "base_bits_per_byte": math.log2(self.base_perplexity) * self.tokens / self.bytes,
            "bits_per_byte": math.log2(self.perplexity) * self.tokens / self.bytes,
            "lambda": self.lambda_,
            "k": self.k,
            "knn_temperature": self.knn_temperature,
            "metric": self.metric,
            "weights": self.weights,
            "memories": self.memories,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass
class Totals:
    """How much text has been read."""

    documents: int = 0
    tokens: int = 0
    words: int = 0
    characters: int = 0
    bytes: int = 0
    remembered: int = 0  # documents that are in the memory themselves
    sources: list[str] = field(default_factory=list)  # of the first documents

    def add(self, document: Document, tokens: int, *, remembered: bool) -> None:
        """Count one document."""
        text = document.text
        self.documents += 1
        self.remembered += remembered
        if len(self.sources) < _NAMED:
            self.sources.append(document.source)
        self.tokens += tokens
        self.words += len(text.split())
        self.characters += len(text)
        self.bytes += len(text.encode())


def evaluate(
    mixture: Mixture,
    documents: Iterable[Document],
    *,
    limit: int | None = None,
    batch_tokens: int | None = None,
    ahead: bool = False,
    progress: Progress = silent,
) -> Evaluation:
    """Score every token of the documents with the model alone and with the mixture.

    `ahead` lets the model read on while a search runs; see `scoring.scores` for when that helps.
    """
    begin = time.perf_counter()
    tally = Totals()
    sums = torch.zeros(3, dtype=torch.float64)
    parts = torch.zeros(len(mixture.component_names), dtype=torch.float64)
    read = read_all(mixture, documents, tally=tally, limit=limit, batch_tokens=batch_tokens, progress=progress)
    for found in scores(mixture, (batch for _, batch in read), ahead=ahead):
        best = found.each.nan_to_num(nan=-torch.inf).amax(1)
        sums += torch.stack([found.each[:, 0], found.mixed, best]).double().sum(1).cpu()
        parts += found.weights.double().sum(0).cpu()
    weights = mixture.weights
    shares = describe(mixture, weights.values if isinstance(weights, FixedWeights) else (parts / tally.tokens).tolist())
    return summary(tally, sums.tolist(), shares, mixture.weights.kind, seconds=time.perf_counter() - begin)


def describe(mixture: Mixture, weights: Sequence[float]) -> list[dict[str, Any]]:
    """Say which memories there are, with which settings, and what the parts of each weighed together."""
    found = []
    for label, memory, span in zip(mixture.labels, mixture.memories, mixture.component_slices, strict=True):
        facts: dict[str, Any] = {"name": label, "kind": memory.name, "weight": float(sum(weights[span]))}
        if isinstance(memory, NeighbourMemory):
            main = memory.settings[0]
            facts |= {"k": main.k, "knn_temperature": main.knn_temperature, "metric": memory.metric}
        found.append(facts)
    return found


def summary(
    tally: Totals, sums: Sequence[float], memories: list[dict[str, Any]], weights: str, *, seconds: float
) -> Evaluation:
    """Turn sums of log-probabilities (model, mixture, best of all parts) into perplexities."""
    base, mixed, best = (_exp(-total / tally.tokens) for total in sums)
    return Evaluation(
        documents=tally.documents,
        remembered=tally.remembered,
        tokens=tally.tokens,
        words=tally.words,
        bytes=tally.bytes,
        base_perplexity=base,
        perplexity=mixed,
        oracle_perplexity=best,
        memories=memories,
        weights=weights,
        seconds=seconds,
    )


def read_all(
    mixture: Mixture,
    documents: Iterable[Document],
    *,
    tally: Totals,
    limit: int | None = None,
    batch_tokens: int | None = None,
    progress: Progress = silent,
    what: str = "evaluating",
) -> Iterator[tuple[int, ReadBatch]]:
    """Read whole documents until `limit` tokens are reached; give (row of the group's first token, batch)."""
    if limit is not None and limit < 1:
        raise ParameterError(f"limit must be at least 1 token, not {limit}.")
    times = _GPU if mixture.lm.device.type == "cuda" else 1
    batch_tokens = _batch_tokens(mixture, times) if batch_tokens is None else batch_tokens
    first, meter = 0, DocumentMeter(documents)
    unit = "bytes" if limit is None else "tokens"
    with progress(what, total=meter.total_bytes if limit is None else limit, unit=unit) as advance:
        for group in _groups(mixture, meter, limit, tally, max(times * _GROUP, batch_tokens)):
            tokens, size = sum(map(len, group)), meter.take(len(group))
            done = 0
            for batch in mixture.read(group, batch_tokens=batch_tokens):
                yield first, batch
                before, done = done, done + len(batch.rows)
                advance(len(batch.rows) if limit else size * done // tokens - size * before // tokens)
            first += tokens
        if limit is None:
            advance(meter.take_rest())
    if not tally.tokens:
        raise CorpusError("There is no text to evaluate on: no document has a token.")


def _batch_tokens(mixture: Mixture, times: int) -> int:
    """Choose how many tokens are read at once: on a GPU, more, as far as their logits fit."""
    if times == 1:
        return _BATCH
    memory = torch.cuda.get_device_properties(mixture.lm.device).total_memory
    return max(_BATCH, min(times * _BATCH, memory // _SHARE // (4 * mixture.lm.vocab_size)))


def _groups(
    mixture: Mixture, documents: Iterable[Document], limit: int | None, tally: Totals, size: int
) -> Iterator[list[list[int]]]:
    """Tokenise documents and gather some thousand tokens of them."""
    group: list[list[int]] = []
    for document in documents:
        tokens = mixture.lm.encode(document.text)
        group.append(tokens)
        remembered = mixture.store is not None and mixture.store.holds(document.text)
        tally.add(document, len(tokens), remembered=remembered)
        enough = limit is not None and tally.tokens >= limit
        if enough or sum(map(len, group)) >= size:
            yield group
            group = []
        if enough:
            return
    if group:
        yield group


def _exp(loss: float) -> float:
    return math.inf if loss >= 700 else math.exp(loss)  # what is undefined stays so


def _power(perplexity: float, tokens_per_word: float) -> float:
    return _exp(math.log(perplexity) * tokens_per_word) if math.isfinite(perplexity) else math.inf
