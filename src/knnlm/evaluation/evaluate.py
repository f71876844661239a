"""Perplexity of a mixture on text: per token, per word, bits per byte.

A search over many positions at once costs less than many small searches, because each key is read once for all of them.
Where memories and weights need nothing of the language model but the target's probability, the logits are dropped and
the positions of several batches are searched together.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from knnlm.corpus import Document, DocumentMeter
from knnlm.errors import CorpusError, ParameterError
from knnlm.lm.causal import CausalLM
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.memories.base import LM_LOGITS, Context, Logits, SimpleOutput, join_contexts
from knnlm.memories.voting import NeighbourMemory
from knnlm.mixture.em import log_mixed
from knnlm.mixture.gate import place
from knnlm.mixture.layer import OnlineLayer, PositionInputs
from knnlm.mixture.mixture import ComponentOutputs, Mixture, group_rows
from knnlm.mixture.online import OnlineConfig
from knnlm.mixture.readers import ReadBatch
from knnlm.mixture.weights import BucketWeights, FixedWeights
from knnlm.progress import Progress, silent

_MIN_QUERIES = 8192  # positions that are searched together, where the search can wait
_BATCH_TOKENS = 1024  # tokens of one forward pass
_GROUP_TOKENS = 8192  # tokens that are packed into batches together
_GPU_FACTOR = 16  # times as many tokens on a GPU, which smaller batches would leave idle
_GPU_LOGITS_FRACTION = 32  # the logits of a batch take at most this fraction of the GPU's memory
_MAX_SOURCES = 3  # documents whose source is kept


@dataclass(frozen=True)
class Evaluation:
    """Figures of a mixture on a text. Perplexities are per token unless their name has another unit."""

    documents: int
    leaked_documents: int  # documents of the text that are in the store: on them, figures are too good
    tokens: int
    words: int
    bytes: int
    base_perplexity: float
    perplexity: float
    oracle_perplexity: float  # of the best component at each token: a bound for any choice of weights
    improved: float  # share of tokens that the mixture predicts with a higher probability than the model alone
    gain_nats: float  # Σ max(0, log p - log p_LM) / N, over all tokens
    loss_nats: float  # Σ max(0, log p_LM - log p) / N; gain_nats - loss_nats = log(base_perplexity / perplexity)
    memories: list[dict[str, Any]]  # each memory's name, settings and mean weight
    weights: str  # the kind of weights: fixed, fitted, buckets, gated
    online: OnlineConfig | None  # None: without online weights
    seconds: float
    searched: float | None = None  # share of the tokens that stores were searched for; None: unknown, or no store

    def __str__(self) -> str:
        figures = f"perplexity {self.base_perplexity:.3f} → {self.perplexity:.3f} ({self.change})"
        noun = "document" if self.documents == 1 else "documents"
        text = f"{self.tokens:,} tokens of {self.documents:,} {noun}"
        return f"{figures} on {text}; {self.weights} weights, λ {self.lmbda:.3g}"

    @property
    def lmbda(self) -> float:
        """λ: the mean weight of all memories together."""
        return float(sum(memory["weight"] for memory in self.memories))

    @property
    def k(self) -> int | None:
        """Number of neighbours of the first store, None without a store."""
        return self._store.get("k")

    @property
    def knn_temperature(self) -> float | None:
        """Temperature of the first store's votes, None without a store."""
        return self._store.get("knn_temperature")

    @property
    def metric(self) -> str | None:
        """Distance of the first store, None without a store."""
        return self._store.get("metric")

    @property
    def _store(self) -> dict[str, Any]:
        return next((memory for memory in self.memories if memory["kind"] == "knn"), {})

    @property
    def gain(self) -> float:
        """How much lower the perplexity is with the memories, as a fraction; negative where it is higher."""
        return 1 - self.perplexity / self.base_perplexity

    @property
    def ratio(self) -> float:
        """The perplexity with the memories divided by that of the model alone."""
        return self.perplexity / self.base_perplexity

    @property
    def change(self) -> str:
        """The change of the perplexity in words, as in "12.3% lower"."""
        return describe_change(self.base_perplexity, self.perplexity)

    @property
    def tokens_per_second(self) -> float:
        """Speed of the evaluation."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return every figure under its name in `--json`."""
        return {
            "documents": self.documents,
            "leaked_documents": self.leaked_documents,
            "tokens": self.tokens,
            "words": self.words,
            "bytes": self.bytes,
            "base_perplexity": self.base_perplexity,
            "perplexity": self.perplexity,
            "gain": self.gain,
            "improved": self.improved,
            "gain_nats": self.gain_nats,
            "loss_nats": self.loss_nats,
            "oracle_perplexity": self.oracle_perplexity,
            "base_word_perplexity": _power(self.base_perplexity, self.tokens / max(1, self.words)),
            "word_perplexity": _power(self.perplexity, self.tokens / max(1, self.words)),
            "base_bits_per_byte": math.log2(self.base_perplexity) * self.tokens / self.bytes,
            "bits_per_byte": math.log2(self.perplexity) * self.tokens / self.bytes,
            "lambda": self.lmbda,
            "k": self.k,
            "knn_temperature": self.knn_temperature,
            "metric": self.metric,
            "weights": self.weights,
            "online": self.online.as_dict() if self.online else None,
            "memories": self.memories,
            "searched": self.searched,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }


def describe_change(before: float, after: float) -> str:
    """Return how much lower or higher a figure is, as in "12.3% lower"."""
    change = after / before - 1
    return f"{abs(change):.1%} {'higher' if change > 0 else 'lower'}"


@dataclass
class Totals:
    """Amount of text read so far."""

    documents: int = 0
    tokens: int = 0
    words: int = 0
    characters: int = 0
    bytes: int = 0
    leaked_documents: int = 0  # documents that are in the store
    sources: list[str] = field(default_factory=list)  # of the first documents

    def add(self, document: Document, tokens: int, *, leaked: bool) -> None:
        """Count one document."""
        text = document.text
        self.documents += 1
        self.leaked_documents += leaked
        if len(self.sources) < _MAX_SOURCES:
            self.sources.append(document.source)
        self.tokens += tokens
        self.words += len(text.split())
        self.characters += len(text)
        self.bytes += len(text.encode())

    def add_all(self, other: Totals) -> None:
        """Count the documents of another text."""
        for name in ("documents", "tokens", "words", "characters", "bytes", "leaked_documents"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.sources = [*self.sources, *other.sources][:_MAX_SOURCES]


def evaluate(
    mixture: Mixture,
    documents: Iterable[Document],
    *,
    limit: int | None = None,
    batch_tokens: int | None = None,
    read_ahead: bool = False,
    progress: Progress = silent,
) -> Evaluation:
    """Score every token of the documents with the model alone and with the mixture.

    `limit` stops after the document that reaches so many tokens. `read_ahead` runs the model while a search runs; see
    `score_batches` for when that helps.
    """
    begin = time.perf_counter()
    reading: dict[str, Any] = {"batch_tokens": batch_tokens, "read_ahead": read_ahead, "progress": progress}
    if mixture.router is None:
        scored = _score(mixture, documents, limit=limit, **reading)
    else:
        every = list(first_documents(documents, mixture.lm, limit))
        scored = _join_parts([_score(own, some, **reading) for own, some in _by_store(mixture, every)], mixture)
    found, seconds = (scored.totals, scored.sums.tolist(), scored.memories), time.perf_counter() - begin
    searched = None if scored.searched is None else scored.searched / scored.totals.tokens
    result = summarise(*found, mixture.weights_kind, online=mixture.online, seconds=seconds)
    return replace(result, searched=searched)


def _by_store(mixture: Mixture, pairs: Sequence[Document]) -> list[tuple[Mixture, list[Document]]]:
    """Return the mixtures of several stores with the pairs whose sources they translate, if there are any."""
    assert isinstance(mixture.lm, Seq2SeqLM)
    tokens = [tuple(row) for row in mixture.lm.encode_sources([pair.source_text or "" for pair in pairs])]
    groups = group_rows(mixture.route_sources(tokens))
    return [(own, [pairs[row] for row in rows]) for own, rows in groups] or [(mixture.by_store[0], [])]


@dataclass
class _Scored:
    """The sums of `summarise` over a text, and the memories with their mean weights."""

    totals: Totals
    sums: Tensor  # (6,)
    memories: list[dict[str, Any]]
    searched: float | None  # tokens that stores were searched for; None: there is no store


def _score(
    mixture: Mixture, documents: Iterable[Document], *, read_ahead: bool, limit: int | None = None, **reading: Any
) -> _Scored:
    """Score every token of the documents by one mixture."""
    totals, sums = Totals(), torch.zeros(6, dtype=torch.float64)
    searched: float | None = None
    weight_sums = torch.zeros(len(mixture.component_names), dtype=torch.float64)
    order = TextOrder(mixture.layer)
    read = read_batches(mixture, documents, totals=totals, limit=limit, **reading)
    for scores in order.weigh(score_batches(mixture, order.note(read), read_ahead=read_ahead)):
        best = scores.components.nan_to_num(nan=-torch.inf).amax(1)
        sums += score_sums(scores.components[:, 0], scores.mixture, best)
        weight_sums += scores.weights.double().sum(0).cpu()
        if scores.searched is not None:
            searched = (searched or 0.0) + float(scores.searched.double().sum())
    weights = mixture.weights
    if isinstance(weights, FixedWeights) and not mixture.layer.stateful:
        mean: Sequence[float] = weights.values
    else:
        mean = (weight_sums / totals.tokens).tolist()
    return _Scored(totals, sums, _memory_summaries(mixture, mean), searched)


def _join_parts(parts: Sequence[_Scored], mixture: Mixture) -> _Scored:
    """Return what was scored by the mixtures of several stores; mean weights are those over all tokens."""
    totals = Totals()
    for part in parts:
        totals.add_all(part.totals)
    found = {
        memory["name"]: {**memory, "weight": memory["weight"] * part.totals.tokens / totals.tokens}
        for part in parts
        for memory in part.memories
    }
    unused = _memory_summaries(mixture, [0.0] * len(mixture.component_names))
    memories = [found.get(memory["name"], memory) for memory in unused]
    searched = [part.searched for part in parts if part.searched is not None]
    sums = torch.stack([part.sums for part in parts]).sum(0)
    return _Scored(totals, sums, memories, sum(searched) if searched else None)


def _memory_summaries(mixture: Mixture, weights: Sequence[float]) -> list[dict[str, Any]]:
    """Return name, settings and weight of each memory; the weight is that of all its components."""
    summaries = []
    for label, memory, own in zip(mixture.labels, mixture.memories, mixture.component_slices, strict=True):
        summary: dict[str, Any] = {"name": label, "kind": memory.name, "weight": float(sum(weights[own]))}
        if isinstance(memory, NeighbourMemory):
            main = memory.settings[0]
            summary |= {"k": main.k, "knn_temperature": main.knn_temperature, "metric": memory.metric}
        summaries.append(summary)
    return summaries


def score_sums(lm: Tensor, mixture: Tensor, best: Tensor) -> Tensor:
    """Return the sums of `summarise` over N tokens, from their (N,) log-probabilities."""
    log_probs = torch.stack([column.double() for column in (lm, mixture, best)])
    change = log_probs[1] - log_probs[0]
    change = change.masked_fill(change.isnan(), 0.0)  # both are impossible
    changes = torch.stack([(change > 0).double(), change.clamp(min=0), (-change).clamp(min=0)])
    return torch.cat([log_probs, changes]).sum(1).cpu()


def summarise(
    totals: Totals,
    sums: Sequence[float],
    memories: list[dict[str, Any]],
    weights: str,
    *,
    online: OnlineConfig | None,
    seconds: float,
) -> Evaluation:
    """Turn sums of log-probabilities (model, mixture, best component), improved tokens, gains and losses into means."""
    base, mixed, best = (_exp(-total / totals.tokens) for total in sums[:3])
    improved, gain, loss = (total / totals.tokens for total in sums[3:])
    return Evaluation(
        documents=totals.documents,
        leaked_documents=totals.leaked_documents,
        tokens=totals.tokens,
        words=totals.words,
        bytes=totals.bytes,
        base_perplexity=base,
        perplexity=mixed,
        oracle_perplexity=best,
        improved=improved,
        gain_nats=gain,
        loss_nats=loss,
        memories=memories,
        weights=weights,
        online=online,
        seconds=seconds,
    )


def first_documents(documents: Iterable[Document], lm: CausalLM, tokens: int | None) -> Iterator[Document]:
    """Yield documents up to the one that reaches a number of tokens."""
    count = 0
    for document in documents:
        yield document
        count += len(lm.encode(document.text)) if tokens is not None else 0
        if tokens is not None and count >= tokens:
            return


def read_batches(
    mixture: Mixture,
    documents: Iterable[Document],
    *,
    totals: Totals,
    limit: int | None = None,
    batch_tokens: int | None = None,
    progress: Progress = silent,
    what: str = "evaluating",
) -> Iterator[tuple[int, ReadBatch]]:
    """Read whole documents until `limit` tokens are reached; yield (row of the group's first token, batch)."""
    if limit is not None and limit < 1:
        raise ParameterError(f"limit must be at least 1 token, not {limit}.")
    factor = _gpu_factor(mixture)
    batch_tokens = default_batch_tokens(mixture) if batch_tokens is None else batch_tokens
    first, meter = 0, DocumentMeter(documents)
    unit = "bytes" if limit is None else "tokens"
    with progress(what, total=meter.total_bytes if limit is None else limit, unit=unit) as advance:
        for group in _groups(mixture, meter, limit, totals, max(factor * _GROUP_TOKENS, batch_tokens)):
            tokens, size = sum(map(len, group)), meter.take(len(group))
            done = 0
            for batch in mixture.read(group, batch_tokens=batch_tokens):
                yield first, batch
                before, done = done, done + len(batch.rows)
                advance(len(batch.rows) if limit else size * done // tokens - size * before // tokens)
            first += tokens
        if limit is None:
            advance(meter.take_rest())
    if not totals.tokens:
        raise CorpusError("There is no text to evaluate on: no document has a token.")


def _gpu_factor(mixture: Mixture) -> int:
    return _GPU_FACTOR if mixture.lm.device.type == "cuda" else 1


def default_batch_tokens(mixture: Mixture) -> int:
    """Return the tokens of one forward pass: on a GPU, more of them, as far as their logits fit."""
    factor = _gpu_factor(mixture)
    if factor == 1:
        return _BATCH_TOKENS
    memory = torch.cuda.get_device_properties(mixture.lm.device).total_memory
    fitting = memory // _GPU_LOGITS_FRACTION // (4 * mixture.lm.vocab_size)
    return max(_BATCH_TOKENS, min(factor * _BATCH_TOKENS, fitting))


def _groups(
    mixture: Mixture, documents: Iterable[Document], limit: int | None, totals: Totals, size: int
) -> Iterator[list[list[int]]]:
    """Tokenise documents and collect them into groups of at least `size` tokens."""
    group: list[list[int]] = []
    for document in documents:
        tokens = mixture.lm.encode_document(document)
        group.append(tokens)
        leaked = mixture.store is not None and mixture.store.holds(document.text, document.source_text)
        totals.add(document, len(tokens), leaked=leaked)
        enough = limit is not None and totals.tokens >= limit
        if enough or sum(map(len, group)) >= size:
            yield group
            group = []
        if enough:
            return
    if group:
        yield group


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of the targets at N positions."""

    components: Tensor  # (N, M) by each component, the language model first
    mixture: Tensor  # (N,) float64, by the mixture
    weights: Tensor  # (N, M)
    searched: Tensor | None = None  # (N,) share of the stores that were searched; None: unknown, or no store


@dataclass(frozen=True)
class ComponentScores:
    """Log-probabilities of the targets at N positions by each component, and what their weights are computed from."""

    components: Tensor  # (N, M); the language model first
    given: PositionInputs
    searched: Tensor | None = None  # (N,) share of the stores that were searched; None: unknown, or no store

    def select(self, rows: slice) -> ComponentScores:
        """Return the scores of some rows."""
        searched = None if self.searched is None else self.searched[rows]
        return ComponentScores(self.components[rows], self.given.select(rows), searched)

    def weigh(self, layer: OnlineLayer, begins: Tensor) -> TokenScores:
        """Return the scores of the mixture; `begins` marks the (N,) first tokens of texts, whose rows are in order."""
        if not layer.stateful:
            return self.weigh_alone(layer)
        states, by_expert = layer.states_before(self.given, self.components, begins)
        return self._mixed(layer.mixed(states, by_expert))

    def weigh_alone(self, layer: OnlineLayer) -> TokenScores:
        """Return the scores of the mixture with weights that do not depend on the text so far, in any order of rows."""
        return self._mixed(layer.weights.compute(self.given.inputs, self.given.abstains))

    def _mixed(self, weights: Tensor) -> TokenScores:
        mixed = log_mixed(self.components.double(), weights.double())
        return TokenScores(self.components, mixed, weights, self.searched)


def join_scores(scores: Sequence[ComponentScores], rows: Sequence[Tensor]) -> ComponentScores:
    """Join the scores of batches in the order of their rows."""
    order = torch.cat(list(rows)).argsort()

    def join(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(tensors)).cpu()[order]

    inputs, abstains = join(each.given.inputs for each in scores), join(each.given.abstains for each in scores)
    known = [each.searched for each in scores if each.searched is not None]
    searched = join(known) if len(known) == len(scores) else None
    return ComponentScores(join(each.components for each in scores), PositionInputs(inputs, abstains), searched)


class TextOrder:
    """Computes weights in the order of texts: batches come by length, but weights may depend on the text so far.

    Documents are read in groups; the scores of a group are put in order when the next group begins.
    """

    def __init__(self, layer: OnlineLayer) -> None:
        self._layer = layer
        self._read: deque[tuple[int, Tensor, Tensor]] = deque()  # group, rows and first tokens of each batch

    def note(self, batches: Iterable[tuple[int, ReadBatch]]) -> Iterator[ReadBatch]:
        """Yield the batches of groups, and keep the places of their rows."""
        for group, batch in batches:
            if self._layer.stateful:
                self._read.append((group, batch.rows, place(batch.context).positions == 0))
            yield batch

    def weigh(self, scored: Iterable[ComponentScores]) -> Iterator[TokenScores]:
        """Yield the scores of the mixture, those of each group in the order of its rows if the order matters."""
        if not self._layer.stateful:
            yield from (scores.weigh_alone(self._layer) for scores in scored)
            return
        waiting: list[tuple[ComponentScores, Tensor, Tensor]] = []  # with the rows and first tokens of each
        current = 0
        for scores in scored:
            first = 0
            while first < len(scores.components):
                group, rows, begins = self._read.popleft()
                if group != current and waiting:
                    yield self._ordered(waiting)
                    waiting = []
                current = group
                waiting.append((scores.select(slice(first, first + len(rows))), rows, begins))
                first += len(rows)
        if waiting:
            yield self._ordered(waiting)

    def _ordered(self, waiting: Sequence[tuple[ComponentScores, Tensor, Tensor]]) -> TokenScores:
        scores, rows, begins = zip(*waiting, strict=True)
        return join_scores(scores, rows).weigh(self._layer, torch.cat(begins)[torch.cat(rows).argsort()])


def score_batches(
    mixture: Mixture, batches: Iterable[ReadBatch], *, read_ahead: bool = False
) -> Iterator[ComponentScores]:
    """Score the targets of every batch with each component, in order; several batches may come as one.

    `read_ahead` reads the next batches while a search runs. It helps only where the search and the model do not share
    cores; nothing was gained with the model on a GPU either.
    """
    if not can_defer_search(mixture):
        for batch in batches:
            yield component_scores(mixture.predict_components(batch.context), batch.targets)
        return
    coalesced = _coalesce(_strip(batch, with_spans=bool(mixture.automata)) for batch in batches)
    if read_ahead:
        yield from _search_in_thread(mixture, coalesced)
    else:
        yield from (_search(mixture, pending) for pending in coalesced)


def can_defer_search(mixture: Mixture) -> bool:
    """Whether memories and weights need only keys, so that the logits need not be kept until the search."""
    fixed = isinstance(mixture.weights, (FixedWeights, BucketWeights))
    return fixed and all(memory.expensive for memory in mixture.memories)


def component_scores(found: ComponentOutputs, targets: Tensor) -> ComponentScores:
    """Return the scores of targets, one for each position."""
    return ComponentScores(found.log_probs(targets), found.given, found.searched)


@dataclass(frozen=True)
class _TargetLogProbs:
    """A prediction of which only the log-probabilities of the targets were kept."""

    log_p: Tensor  # (N,)

    def log_prob(self, targets: Tensor) -> Tensor:  # noqa: ARG002  (always the same targets)
        return self.log_p

    def log_probs(self) -> Tensor:
        raise NotImplementedError("the logits were not kept")

    def abstains(self) -> Tensor:
        return torch.zeros(len(self.log_p), dtype=torch.bool, device=self.log_p.device)


@dataclass(frozen=True)
class _PendingScores:
    """Positions to search for, without the (N, V) logits."""

    context: Context  # keys and, with an automaton, texts
    targets: Tensor  # (N,)
    log_p: Tensor  # (N,) the language model's log-probabilities of the targets

    @property
    def lm(self) -> SimpleOutput:
        """The language model's output, reduced to the targets."""
        no_features = self.log_p.new_zeros(len(self.log_p), 0)
        return SimpleOutput(_TargetLogProbs(self.log_p), no_features, torch.full_like(self.targets, -1))


def _strip(batch: ReadBatch, *, with_spans: bool) -> _PendingScores:
    """Drop the logits of a batch, and the texts unless entries of a store are followed along them."""
    keys = {source: states for source, states in batch.context.states.items() if source != LM_LOGITS}
    spans = batch.context.spans if with_spans else ()
    context = Context(keys, spans, source_tokens=batch.context.source_tokens)
    return _PendingScores(context, batch.targets, Logits(batch.logits).log_prob(batch.targets))


def _coalesce(batches: Iterable[_PendingScores]) -> Iterator[_PendingScores]:
    """Join positions until there are enough for a search."""
    waiting: list[_PendingScores] = []
    for batch in batches:
        waiting.append(batch)
        if sum(len(each.targets) for each in waiting) >= _MIN_QUERIES:
            yield _join(waiting)
            waiting = []
    if waiting:
        yield _join(waiting)


def _join(batches: Sequence[_PendingScores]) -> _PendingScores:
    targets, log_p = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("targets", "log_p"))
    return _PendingScores(join_contexts([batch.context for batch in batches]), targets, log_p)


def _search(mixture: Mixture, pending: _PendingScores) -> ComponentScores:
    """Search for many positions at once."""
    return component_scores(mixture.predict_components(pending.context, lm=pending.lm), pending.targets)


def _search_in_thread(mixture: Mixture, coalesced: Iterable[_PendingScores]) -> Iterator[ComponentScores]:
    """Search in a second thread, one search at a time, while the caller's iterator reads on."""
    with ThreadPoolExecutor(1, thread_name_prefix="search") as worker:
        searching: Future[ComponentScores] | None = None
        for pending in coalesced:
            if searching is not None:
                yield searching.result()
            searching = worker.submit(_search, mixture, pending)
        if searching is not None:
            yield searching.result()


def _exp(loss: float) -> float:
    return math.inf if loss >= 700 else math.exp(loss)  # NaN stays NaN


def _power(perplexity: float, tokens_per_word: float) -> float:
    return _exp(math.log(perplexity) * tokens_per_word) if math.isfinite(perplexity) else math.inf
