"""Log-likelihood of continuations after contexts, as multiple-choice tasks need it.

Only the positions of continuations are searched for and predicted, except with online weights, for which the context is
evidence: its positions are predicted once for all continuations of the same context. Contexts are read as they are
given, in one window: no start token is added, and the beginning of a context that is too long is cut off. Pairs that
differ only in the last token, such as the letters of multiple choice, are read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.evaluation.evaluate import default_batch_tokens
from knnlm.lm.windows import Window, batches
from knnlm.memories.base import Context, Span, join_contexts
from knnlm.mixture.mixture import Mixture
from knnlm.progress import Progress, silent

Pair: TypeAlias = tuple[Sequence[int], Sequence[int]]  # the tokens of a context and of its continuation

_MIN_POSITIONS = 256  # positions that are searched together; their logits are kept until then


@dataclass(frozen=True)
class ContinuationScore:
    """The log-probability of a continuation, and whether greedy generation would produce it."""

    log_prob: float
    is_greedy: bool


@dataclass
class _Text:
    """Tokens that are read once, and the continuations that are scored with them."""

    tokens: tuple[int, ...]  # the model's input
    start: int  # positions start … T - 1 predict the continuation
    continuations: list[Sequence[int]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of the pairs
    state: Tensor | None = (
        None  # (S,) of the online weights at `start`, where a text with the same context has led to it
    )


def score_continuations(
    mixture: Mixture,
    pairs: Sequence[Pair],
    *,
    max_length: int | None = None,
    batch_tokens: int | None = None,
    progress: Progress = silent,
) -> list[ContinuationScore]:
    """Score each continuation after its context; both are tokens, and a context has at least one.

    `max_length` is the maximal number of tokens that are read at once, by default that of the models.
    """
    scores = [ContinuationScore(0.0, True)] * len(pairs)  # of an empty continuation
    texts = _texts(pairs, mixture.max_length if max_length is None else max_length)
    size = default_batch_tokens(mixture) if batch_tokens is None else batch_tokens
    # With online weights, the first text of each context leads to the state at which the others continue.
    others = _others(texts) if mixture.layer.stateful else {}
    later = {id(text) for same in others.values() for text in same}
    parts = [text for text in texts if id(text) not in later], [text for text in texts if id(text) in later]
    with progress("scoring", total=sum(len(text.numbers) for text in texts), unit="requests") as advance:
        for group, context in chain.from_iterable(_joined(_read(mixture, part, size)) for part in parts):
            prediction = mixture.predict(context, all_components=False)
            log_probs = prediction.log_probs()  # (N, V)
            row = 0
            for text, span in zip(group, context.spans, strict=True):
                first = row + text.start - span.start
                row += len(span)
                for other in others.get(id(text), ()):
                    assert prediction.states is not None
                    other.state = prediction.states[first]
                for number, score in zip(text.numbers, _scores(log_probs[first:row], text.continuations), strict=True):
                    scores[number] = score
                advance(len(text.numbers))
    return scores


def _others(texts: Sequence[_Text]) -> dict[int, list[_Text]]:
    """Return, by the id of the first text of each context, the other texts of the same context."""
    first: dict[tuple[int, ...], _Text] = {}
    others: dict[int, list[_Text]] = {}
    for text in texts:
        leader = first.setdefault(text.tokens[: text.start + 1], text)
        if leader is not text:
            others.setdefault(id(leader), []).append(text)
    return others


def _texts(pairs: Sequence[Pair], max_length: int | None) -> list[_Text]:
    """Return the texts to read, each once."""
    texts: dict[tuple[int, tuple[int, ...]], _Text] = {}
    for number, (context, continuation) in enumerate(pairs):
        if not len(context):
            raise ParameterError("A context must have at least one token, such as the start token.")
        if not len(continuation):
            continue
        if max_length is not None and len(continuation) > max_length:
            raise ParameterError(
                f"A continuation has {len(continuation):,} tokens, but only {max_length:,} can be read at once."
            )
        tokens = (*context, *continuation)[:-1]
        tokens = tokens if max_length is None else tokens[-max_length:]
        start = len(tokens) - len(continuation)
        text = texts.setdefault((start, tokens), _Text(tokens, start))
        text.continuations.append(continuation)
        text.numbers.append(number)
    return list(texts.values())


def _read(mixture: Mixture, texts: Sequence[_Text], batch_tokens: int) -> Iterator[tuple[list[_Text], Context]]:
    """Read texts in batches of similar length, and yield the context of the positions to predict."""
    lm = mixture.lm
    # Online weights at a continuation are those that its context leads to, so all positions of it are predicted once.
    online = mixture.layer.stateful
    histories = {source: length for source, length in mixture.history_lengths.items() if length}
    ready = []
    for number, text in enumerate(texts):
        kept = 0 if online or histories else text.start  # the first position whose keys are needed
        # A window that does not begin at 0 reads its document without a start token.
        document = (*text.tokens, 0)
        ready.append(Window(document, lm.start_token, begin=1, scored=1 + kept, end=len(document), row=number))
    for batch in batches(ready, batch_tokens):
        own = [texts[window.row] for window in batch]
        states = mixture.readers.states(batch, mixture.history_lengths)
        spans, rows, first = [], [], 0
        for text, window in zip(own, batch, strict=True):
            kept = window.scored - 1
            start = 0 if online and text.state is None else text.start
            begin, end = first + start - kept, first + len(text.tokens) - kept
            past = {source: states[source][first:begin][-length:] for source, length in histories.items()}
            spans.append(Span(torch.tensor(text.tokens, device=lm.device), start, past, text.state))
            rows.append(torch.arange(begin, end, device=lm.device))
            first = end
        predicted = torch.cat(rows)
        yield own, Context({source: every[predicted] for source, every in states.items()}, spans)


def _joined(batches: Iterator[tuple[list[_Text], Context]]) -> Iterator[tuple[list[_Text], Context]]:
    """Join batches until there are enough positions for a search."""
    texts: list[_Text] = []
    contexts: list[Context] = []
    for own, context in batches:
        texts, contexts = [*texts, *own], [*contexts, context]
        if sum(len(span) for each in contexts for span in each.spans) >= _MIN_POSITIONS:
            yield texts, join_contexts(contexts)
            texts, contexts = [], []
    if texts:
        yield texts, join_contexts(contexts)


def _scores(log_probs: Tensor, continuations: Sequence[Sequence[int]]) -> Iterator[ContinuationScore]:
    """Score continuations that share all tokens but the last, from the (n, V) log-probabilities of their positions."""
    best = log_probs.argmax(1)
    for continuation in continuations:
        targets = torch.tensor(list(continuation), device=log_probs.device)
        total = log_probs.gather(1, targets[:, None]).double().sum()
        yield ContinuationScore(float(total), bool((best == targets).all()))
