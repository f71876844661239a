"""The tokens that followed the longest match in the text being read.

An n-gram cache (Kuhn and De Mori 1990): a text tends to repeat its own passages, such as the phrases of a manual. The
last L tokens read are looked up in the text before them, for L = 1, 2, … up to the longest that occurs there. Of n_L
occurrences, c_L(y) are followed by y, and T_L is the number of distinct tokens that follow. Shorter matches smooth
longer ones, as in the n-grams of a store:

    p_L(y) = (c_L(y) + T_L · p_{L-1}(y)) / (n_L + T_L)          p_1(y) = c_1(y) / n_1

Where the last token has not occurred before, the memory abstains. As in the cache, an occurrence counts only if the
token that follows it was given, unless `generated` is set: each copy of generated text would make the next copy more
probable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.memories.base import Context, Origin, SimpleOutput, Span, Votes
from knnlm.memories.ngram import level_weights, ragged, sum_by_owner

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

_MAX_COMPARED = 1 << 22  # pairs of places whose tokens are compared at a time
_MAX_MATCHES = 1 << 20  # whose followers are counted at a time, where texts are many


@dataclass(frozen=True)
class _Matches:
    """P pairs of a position and an earlier place of its text, after which the same token was read."""

    size: int  # the number of positions, N
    row: Ints  # (P,) the number of the position, ascending
    follower: Ints  # (P,) the token that followed
    length: Ints  # (P,) how many of the last tokens are equal

    def join(self, other: _Matches) -> _Matches:
        """Return the pairs of both."""
        rows = np.append(self.row, other.row + self.size)
        follower, length = np.append(self.follower, other.follower), np.append(self.length, other.length)
        return _Matches(self.size + other.size, rows, follower, length)


@dataclass(frozen=True)
class _Followers:
    """The distinct tokens that followed, with their probabilities, for N positions."""

    features: Floats  # (N, 6)
    row: Ints  # (U,) ascending
    token: Ints  # (U,) ascending within a position
    probability: Floats  # (U,) sum to 1 within a position


class NgramCacheMemory:
    """The longest match of the last tokens in the text before them."""

    name = "ngram-cache"
    expensive = False
    source = None
    history_length = 0
    component_names = ("ngram-cache",)
    # Logarithms are log(1 + x). All are 0 where there is no match.
    feature_names = ("match length", "log match count", "log match distinct", "log count", "top", "entropy")

    def __init__(self, *, vocab_size: int, longest: int = 32, generated: bool = False) -> None:
        if longest < 1:
            raise ParameterError(f"The longest match must be at least 1 token, not {longest}.")
        self.vocab_size = vocab_size
        self.longest = longest
        self.generated = generated

    def predict(self, context: Context) -> SimpleOutput:
        """Look up the tokens that followed the last tokens of each position in its own text."""
        spans = [span for span in context.spans if len(span)]
        device = next((span.tokens.device for span in spans), torch.device("cpu"))
        found = [self._count(matches) for matches in _join(self._match(spans))]
        return _output(found, self.vocab_size, device)

    def _match(self, spans: Sequence[Span]) -> Iterator[_Matches]:
        """Yield the matches of all positions, some at a time."""
        if not spans:
            return
        ends = np.cumsum([len(span.tokens) for span in spans])[:-1]
        # One copy from the device for all spans.
        texts = np.split(_copy([span.tokens for span in spans]), ends)
        shown = [np.ones(len(text), np.bool_) for text in texts]
        if any(span.origins is not None for span in spans):
            origins = [torch.zeros_like(span.tokens) if span.origins is None else span.origins for span in spans]
            most = Origin.GENERATED if self.generated else Origin.GIVEN
            shown = np.split(_copy(origins) <= most, ends)
        for span, text, visible in zip(spans, texts, shown, strict=True):
            step = max(1, _MAX_COMPARED // len(text))
            for begin in range(span.start, len(text), step):
                yield self._match_rows(text, visible, np.arange(begin, min(begin + step, len(text))))

    def _match_rows(self, text: NDArray[Any], visible: NDArray[np.bool_], positions: Ints) -> _Matches:
        """Return the earlier places with the token of each position, and how many tokens up to there are equal."""
        before = int(positions[-1])
        equal = text[:before] == text[positions, None]
        equal &= visible[1 : before + 1]
        if len(positions) > 1:
            equal &= np.arange(before) < positions[:, None]
        row, place = np.nonzero(equal)
        length, alive, here = np.ones(len(row), np.int64), np.arange(len(row)), positions[row]
        for step in range(1, self.longest):
            alive = alive[place[alive] >= step]
            alive = alive[text[place[alive] - step] == text[here[alive] - step]]
            if not len(alive):
                break
            length[alive] += 1
        return _Matches(len(positions), row, text[place + 1].astype(np.int64), length)

    def _count(self, matches: _Matches) -> _Followers:
        """Return the smoothed prediction of each position, and its features."""
        size, width = matches.size, self.longest + 1

        def at_least(row: Ints, length: Ints) -> Ints:
            """Return how many of each row have at least 0 … `longest` tokens, (N, longest + 1)."""
            counts = np.bincount(row * width + length, minlength=size * width).reshape(size, width)
            return counts[:, ::-1].cumsum(1)[:, ::-1]

        # The distinct followers of a position, and the longest match that each of them follows.
        keys, member = np.unique(matches.row * self.vocab_size + matches.follower, return_inverse=True)
        row, token = np.divmod(keys, self.vocab_size)
        longest = np.zeros(len(keys), np.int64)
        np.maximum.at(longest, member, matches.length)
        counts, distinct = at_least(matches.row, matches.length), at_least(row, longest)  # n and T of each level
        sure: Floats = counts / np.maximum(counts + distinct, 1)
        sure[:, :2] = (0, 1)
        # A place counts at each level up to the length of its match.
        share = np.cumsum(level_weights(sure) / np.maximum(counts, 1), 1)
        probability = sum_by_owner(member, share[matches.row, matches.length], len(keys))
        matched = (counts[:, 1:] > 0).sum(1)
        top = np.zeros(size)
        np.maximum.at(top, row, probability)
        rows = np.arange(size)
        logs = [np.log1p(np.where(matched > 0, each, 0)) for each in (counts[rows, matched], distinct[rows, matched])]
        entropy = sum_by_owner(row, -probability * np.log(probability), size)
        features = [matched, *logs, np.log1p(counts[:, 1]), top, entropy]
        return _Followers(np.column_stack(features), row, token, probability)


def _join(matches: Iterable[_Matches]) -> Iterator[_Matches]:
    """Join matches until there are so many that their followers are counted."""
    joined = None
    for each in matches:
        joined = each if joined is None else joined.join(each)
        if len(joined.row) >= _MAX_MATCHES:
            yield joined
            joined = None
    if joined is not None:
        yield joined


def _output(found: Sequence[_Followers], vocab_size: int, device: torch.device) -> SimpleOutput:
    """Return the predictions of positions one after another, on a device."""
    sizes = [np.bincount(each.row, minlength=len(each.features)) for each in found]
    size = np.concatenate([np.empty(0, np.int64), *sizes])
    row, column = ragged(size)
    values = np.full((len(size), int(size.max(initial=0))), -1)
    log_weights = np.full(values.shape, -np.inf, np.float32)
    best = np.full(len(size), -1)
    if len(row):
        values[row, column] = np.concatenate([each.token for each in found])
        log_weights[row, column] = np.log(np.concatenate([each.probability for each in found]))
        best = values[np.arange(len(size)), log_weights.argmax(1)]  # the lowest of tied ones: tokens are ascending
    features = np.concatenate([np.empty((0, 6)), *(each.features for each in found)])
    votes = Votes(torch.from_numpy(values).to(device), torch.from_numpy(log_weights).to(device), vocab_size)
    on_device = torch.from_numpy(features).to(device, torch.float32)
    return SimpleOutput(votes, on_device, torch.from_numpy(best).to(device))


def _copy(tensors: Sequence[Tensor]) -> NDArray[Any]:
    """Return tensors one after another, in the memory of the CPU."""
    return torch.cat(list(tensors)).cpu().numpy()
