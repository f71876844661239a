"""Score the tokens of a text by every part of a mixture. Knows nothing about perplexity.

A search over many positions at once costs less than many searches: keys are read from first to last for each, and one
that several positions ask for is read once. So where nothing but the token that came is asked of the model's own
probabilities, these are not kept, and searches wait until there are many. The model may read on meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from knnlm.memory import Context, KnnMemory, Logits, Spoken
from knnlm.mixture import Batch, Mixed, Mixture
from knnlm.mixture.weights import Bucketed, Fixed

_TOGETHER = 8192  # positions that are searched for at once, at the least


@dataclass(frozen=True)
class Scores:
    """What the tokens that came were given at some positions."""

    each: Tensor  # (N, M) log-probabilities by each part, the model's first
    mixed: Tensor  # (N,) by the mixture
    weights: Tensor  # (N, M)


def scores(mixture: Mixture, batches: Iterable[Batch], *, ahead: bool = False) -> Iterator[Scores]:
    """Score the targets of every batch, in their order; several batches may come as one.

    `ahead` lets the next batches be read while a search runs. That only helps where the search is left alone by what
    reads: on the same cores both take longer, and also where the model was on a GPU nothing was gained.
    """
    if not searches_can_wait(mixture):
        for batch in batches:
            prediction = mixture.predict(batch.logits, batch.context)
            each = prediction.each_of(batch.targets)
            yield Scores(each, prediction.weigh(each), prediction.weights)
        return
    many = _together(map(_hear, batches))
    if ahead:
        yield from _while_reading_on(mixture, many)
    else:
        yield from (_search(mixture, heard) for heard in many)


def _while_reading_on(mixture: Mixture, many: Iterable[_Heard]) -> Iterator[Scores]:
    """Search in a thread of its own, one search at a time."""
    with ThreadPoolExecutor(1, thread_name_prefix="search") as worker:
        searching: Future[Scores] | None = None
        for heard in many:
            if searching is not None:
                yield searching.result()
            searching = worker.submit(_search, mixture, heard)
        if searching is not None:
            yield searching.result()


def searches_can_wait(mixture: Mixture) -> bool:
    """Say whether memories and weights look at keys only, and not at what the model says besides."""
    return isinstance(mixture.weights, (Fixed, Bucketed)) and all(
        isinstance(memory, KnnMemory) for memory in mixture.memories
    )


@dataclass(frozen=True)
class _Heard:
    """Positions that were read, without the (N, V) that the model said there."""

    said: Tensor  # (N,) what the model gave the token that came
    targets: Tensor  # (N,)
    context: Context


def _hear(batch: Batch) -> _Heard:
    keys = {source: seen for source, seen in batch.context.seen.items() if seen is not batch.logits}
    return _Heard(Logits(batch.logits).of(batch.targets), batch.targets, Context(keys))


def _together(parts: Iterable[_Heard]) -> Iterator[_Heard]:
    """Join positions until there are enough for a search."""
    waiting: list[_Heard] = []
    for heard in parts:
        waiting.append(heard)
        if sum(len(one.said) for one in waiting) >= _TOGETHER:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(parts: list[_Heard]) -> _Heard:
    seen = {source: torch.cat([part.context.seen[source] for part in parts]) for source in parts[0].context.seen}
    said, targets = (torch.cat([getattr(part, name) for part in parts]) for name in ("said", "targets"))
    return _Heard(said, targets, Context(seen))


def _search(mixture: Mixture, heard: _Heard) -> Scores:
    """Ask the memories, and mix."""
    answers = [memory.predict(heard.context) for memory in mixture.memories]
    parts = [part for answer in answers for part in answer.parts]
    never = torch.zeros(len(heard.said), dtype=torch.bool, device=heard.said.device)
    abstains = torch.stack([never, *(part.abstains() for part in parts)], 1)
    nothing = Spoken(heard.said.new_zeros(len(never), 0))  # nobody looks at it
    weights = mixture.weights.weigh(heard.context, nothing, answers, abstains)
    each = torch.stack([heard.said, *(part.of(heard.targets) for part in parts)], 1)
    return Scores(each, Mixed([], weights).weigh(each), weights)
