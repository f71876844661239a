"""The protocols of memories: the context they predict from, and the predictions they return.

A text is its start token and then its tokens. Position t has read tokens[: t + 1] and predicts the next one; the key of
a position is a hidden state of some model there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

ROWS = 128  # of an (N, V) tensor that are processed at a time, so that no second tensor of that size is made

SourceTokens = tuple[int, ...]  # of the source of a pair, as the encoder reads them

LOGITS = "logits"  # the place of a source whose states are the model's logits


class Prediction(Protocol):
    """Next-token distributions at N positions. A row may abstain: its weight goes to the other components."""

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the (N,) log-probabilities of one token per row, without building (N, V)."""

    def log_probs(self) -> Tensor:
        """Return the (N, V) log-probabilities; a row that abstains is all -inf."""

    def abstains(self) -> Tensor:
        """Mark the (N,) rows that abstain."""


@runtime_checkable
class AdditivePrediction(Prediction, Protocol):
    """A prediction that is added to others without a tensor of its own over the vocabulary."""

    def add_to(self, probs: Tensor, weights: Tensor) -> Tensor:
        """Add the probabilities, multiplied by (N,) weights, to (N, V) probabilities in place."""


@dataclass(frozen=True)
class Logits:
    """The prediction of a language model: a softmax over the vocabulary. It never abstains."""

    logits: Tensor  # (N, V)

    @cached_property
    def _totals(self) -> Tensor:
        """The (N,) normalisers of the rows; computing them reads all logits."""
        if len(self.logits) <= ROWS:
            return self.logits.float().logsumexp(1)
        return torch.cat([rows.float().logsumexp(1) for rows in self.logits.split(ROWS)])

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the (N,) log-probabilities of one token per row."""
        return self.log_prob_each(targets[:, None])[:, 0]

    def log_prob_each(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities of n tokens per row, (N, n) → (N, n)."""
        return self.logits.gather(1, tokens).float() - self._totals[:, None]

    def log_probs(self) -> Tensor:
        """Return the (N, V) log-probabilities."""
        return self.logits.float().log_softmax(1)

    def abstains(self) -> Tensor:
        """Return (N,) False."""
        return torch.zeros(len(self.logits), dtype=torch.bool, device=self.logits.device)


@dataclass(frozen=True)
class Votes:
    """The prediction of neighbours: k tokens with weights that sum to 1 in each row that does not abstain."""

    values: Tensor  # (N, k); -1 where there is no neighbour
    log_weights: Tensor  # (N, k) float32; -inf where there is no neighbour
    vocab_size: int

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the (N,) log-probabilities of one token per row: -inf where no neighbour votes for it."""
        voted = self.values == targets[:, None]
        return self.log_weights.masked_fill(~voted, -torch.inf).logsumexp(1)

    def log_probs(self) -> Tensor:
        """Return the (N, V) log-probabilities: -inf for tokens without a vote."""
        probs = self.log_weights.new_zeros(len(self.values), self.vocab_size)
        return self.add_to(probs, probs.new_ones(len(probs))).log_()

    def add_to(self, probs: Tensor, weights: Tensor) -> Tensor:
        """Add these votes, multiplied by (N,) weights, to (N, V) probabilities in place."""
        # Neighbours often share a token, so add rather than assign; a missing one adds nothing to token 0.
        return probs.scatter_add_(1, self.values.clamp(min=0), self.log_weights.exp() * weights[:, None])

    def abstains(self) -> Tensor:
        """Mark the (N,) rows that have no neighbour."""
        return (self.values < 0).all(1)


@dataclass(frozen=True)
class Source:
    """Where states come from: a model, a place and a layer."""

    reader: int = 0  # the number of the model; 0 is the language model itself
    place: str = "ffn_input"
    layer: int = -1


LM_LOGITS = Source(0, LOGITS)  # the (N, V) logits of the language model itself


class Origin(IntEnum):
    """Where a token of a text comes from, which decides whether it is evidence and whether the cache reads it."""

    GIVEN = 0  # a prompt, a user or a document: evidence, and read
    GENERATED = 1  # the mixture itself: no evidence, and read only where that is asked for
    HIDDEN = 2  # a chat template or a system prompt: no evidence, and not read


@dataclass(frozen=True)
class Span:
    """Consecutive positions of one text that are predicted, and the text before them."""

    tokens: Tensor  # (T,) all tokens read so far, the start token first
    start: int  # positions start … T - 1 are predicted
    past: Mapping[Source, Tensor] = field(default_factory=dict)  # (P, D) keys of the P positions before `start`
    state: Tensor | None = None  # (S,) of the online weights at `start`; None: that of the beginning of a text
    origins: Tensor | None = None  # (T,) of the tokens, see `Origin`; None: all are given
    # By the automaton, the entries that it reached at the position before `start`; none at the beginning of a text.
    entries: Mapping[object, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens) - self.start


@dataclass(frozen=True)
class Positions:
    """The positions of rows in their texts."""

    positions: Tensor  # (N,) number of tokens read before
    tokens: Tensor  # (N,) the last token read

    def select(self, rows: Tensor) -> Positions:
        """Return those of some rows, by their numbers."""
        return Positions(self.positions[rows], self.tokens[rows])


@dataclass(frozen=True)
class Context:
    """N positions of some texts; immutable, so that forks of a text are independent."""

    states: Mapping[Source, Tensor]  # (N, D) keys, or (N, V) logits, at the positions of all spans, in their order
    spans: Sequence[Span] = ()
    search_mask: Tensor | None = None  # (N,) False where an expensive memory need not search; None: nowhere
    source_tokens: Sequence[SourceTokens] | None = None  # N: of the pair that each position belongs to; None: unknown
    where: Positions | None = None  # stands for the spans where nothing else of the texts is needed; None: see them

    def each_span(self) -> Iterator[tuple[slice, Span]]:
        """Yield each span with the rows of its positions."""
        row = 0
        for span in self.spans:
            yield slice(row, row + len(span)), span
            row += len(span)

    def select(self, rows: Tensor) -> Context:
        """Return the context of some positions, by their numbers; spans cannot be divided."""
        assert not self.spans
        sources = self.source_tokens
        return Context(
            {source: own[rows] for source, own in self.states.items()},
            search_mask=None if self.search_mask is None else self.search_mask[rows],
            source_tokens=None if sources is None else [sources[row] for row in rows.tolist()],
            where=None if self.where is None else self.where.select(rows),
        )


_collected: ContextVar[list[Tensor] | None] = ContextVar("collected", default=None)


@contextmanager
def collect_constants() -> Iterator[list[Tensor]]:
    """Collect the tensors that `on_device` returns: a CUDA graph that reads them must keep them."""
    constants: list[Tensor] = []
    token = _collected.set(constants)
    try:
        yield constants
    finally:
        _collected.reset(token)


def on_device(values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers on a device; cached, since the host would wait for the copy at every token."""
    found = _cached_on_device(values, device, dtype)
    if (collected := _collected.get()) is not None:
        collected.append(found)
    return found


@lru_cache(maxsize=256)
def _cached_on_device(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # a tensor of inference mode could not be used outside of it
        return torch.tensor(values, device=device, dtype=dtype)


def join_contexts(contexts: Sequence[Context]) -> Context:
    """Concatenate contexts."""
    if len(contexts) == 1:
        return contexts[0]
    states = {source: torch.cat([context.states[source] for context in contexts]) for source in contexts[0].states}
    spans = [span for context in contexts for span in context.spans]
    sources = [context.source_tokens for context in contexts if context.source_tokens is not None]
    every = [source for own in sources for source in own] if len(sources) == len(contexts) else None
    return Context(states, spans, source_tokens=every, where=_join_positions([context.where for context in contexts]))


def _join_positions(wheres: Sequence[Positions | None]) -> Positions | None:
    known = [where for where in wheres if where is not None]
    if len(known) < len(wheres):
        return None
    return Positions(torch.cat([own.positions for own in known]), torch.cat([own.tokens for own in known]))


class MemoryOutput(Protocol):
    """The output of one memory at N positions."""

    @property
    def components(self) -> Sequence[Prediction]:
        """The memory's predictions: the main one, then variants of it with other settings."""

    def features(self) -> Tensor:
        """Return (N, F) finite inputs of the gate; `Memory.feature_names` names the columns."""

    def top(self) -> Tensor:
        """Return the (N,) most probable tokens of the first component; -1 where it abstains."""


class Memory(Protocol):
    """A component besides the language model that predicts the next token."""

    @property
    def expensive(self) -> bool:
        """Whether `predict` searches so much that searches are shared, delayed, or skipped; see `SearchMemory`."""

    @property
    def name(self) -> str:
        """The kind: knn, cache, …"""

    @property
    def source(self) -> Source | None:
        """Where its keys come from; None: it reads tokens only."""

    @property
    def history_length(self) -> int:
        """The number of earlier positions whose keys it needs."""

    @property
    def feature_names(self) -> Sequence[str]:
        """The names of the columns of `MemoryOutput.features`."""

    @property
    def component_names(self) -> Sequence[str]:
        """The names of the predictions in `MemoryOutput.components`."""

    def predict(self, context: Context) -> MemoryOutput:
        """Predict the token that follows each position."""


@dataclass(frozen=True)
class SimpleOutput:
    """The output of a memory that has one prediction and has computed its features."""

    prediction: Prediction
    feature_values: Tensor  # (N, F)
    best: Tensor  # (N,)

    @property
    def components(self) -> Sequence[Prediction]:
        """The one prediction."""
        return (self.prediction,)

    def features(self) -> Tensor:
        """Return the features."""
        return self.feature_values

    def top(self) -> Tensor:
        """Return the most probable tokens."""
        return self.best
