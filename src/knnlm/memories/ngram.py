"""The tokens that followed the longest match in the stored text.

The last L tokens read are looked up in the store's text, for L = 0, 1, 2, … up to the longest that occurs there with a
token behind it. Of n_L occurrences, c_L(y) are followed by y, and T_L is the number of distinct tokens that follow.
Shorter matches smooth longer ones, which is interpolated Witten-Bell:

    p_L(y) = (c_L(y) + T_L · p_{L-1}(y)) / (n_L + T_L)          p_0(y) = c_0(y) / n_0

Where not even the last token occurs, the memory abstains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore.store import Datastore
from knnlm.datastore.suffix_array import DEPTH, Ints, SuffixArray, open_suffix_array
from knnlm.errors import ParameterError
from knnlm.memories.base import Context, Prediction
from knnlm.progress import Progress, silent

Floats: TypeAlias = NDArray[np.float64]

_KNOWN = 4  # predictions whose matches are kept: a server may predict several groups of texts in turn
_MAX_KEPT = 1 << 21  # followers of frequent matches that are kept, 16 bytes each
_ROWS = 1024  # positions at a time, to bound the size of intermediate arrays


class _FollowerCounts:
    """The followers of frequent matches, kept because most steps of a generation need the same ones."""

    def __init__(self, suffixes: SuffixArray) -> None:
        self.suffixes = suffixes
        self._known: dict[tuple[int, int], tuple[Ints, Floats]] = {}  # by the first suffix and the length
        self._size = 0  # tokens in it

    def count(self, low: Ints, count: Ints, length: Ints) -> list[tuple[Ints, Floats]]:
        """Return the distinct tokens that follow in ranges of `count` suffixes from `low` on, and their shares."""
        keys, known = list(zip(low.tolist(), length.tolist(), strict=True)), self._known
        missing = np.array([number for number, key in enumerate(keys) if key not in known], np.int64)
        found = {}
        if len(missing):
            begin, sizes = low[missing], count[missing]
            owner, numbers, counts = self.suffixes.count_followers(begin, begin + sizes, length[missing])
            cuts = np.searchsorted(owner, np.arange(1, len(missing)))
            parts = zip(np.split(_token(numbers), cuts), np.split(counts / sizes[owner], cuts), strict=True)
            found = {keys[number]: part for number, part in zip(missing.tolist(), parts, strict=True)}
            self._keep(found, len(numbers))
        return [found[key] if key in found else known[key] for key in keys]

    def _keep(self, found: dict[tuple[int, int], tuple[Ints, Floats]], size: int) -> None:
        """Keep what was counted; where it would be too much, in place of all the rest."""
        if size > _MAX_KEPT:
            return
        if self._size + size > _MAX_KEPT:
            self._known, self._size = {}, 0  # not cleared: another thread may read it
        self._known.update(found)
        self._size += size


@dataclass(frozen=True)
class _Ranges:
    """Ranges of the suffix array, whose suffixes begin with the same tokens; positions share them."""

    counts: _FollowerCounts
    blocks: Sequence[_Block]
    device: torch.device

    @cached_property
    def length(self) -> Ints:
        """The (U,) numbers of tokens in the match."""
        return np.concatenate([block.range_level for block in self.blocks])

    @cached_property
    def low(self) -> Ints:
        """The (U,) first suffixes."""
        return np.concatenate([block.range_low for block in self.blocks])

    @cached_property
    def count(self) -> Ints:
        """The (U,) numbers of suffixes."""
        return np.concatenate([block.range_count for block in self.blocks])

    @cached_property
    def followers(self) -> tuple[Ints, Ints, Tensor, Tensor]:
        """The first element and the number of elements of each range, then the tokens and shares of all elements.

        The followers of matches without a token are left out: they are all tokens of the text.
        """
        tallies = [block.tally for block in self.blocks]
        begins = np.cumsum([0, *(len(tally.tokens) for tally in tallies)])
        first = np.concatenate([tally.begin[:-1] + begin for tally, begin in zip(tallies, begins[:-1], strict=True)])
        size = np.concatenate([np.diff(tally.begin) for tally in tallies])
        size[self.length == 0] = 0
        # A tally is exact unless the range was sampled.
        (sampled,) = np.nonzero((self.length > 0) & np.concatenate([block.range_sampled for block in self.blocks]))
        counted = self.counts.count(self.low[sampled], self.count[sampled], self.length[sampled])
        size[sampled] = [len(tokens) for tokens, _ in counted]
        first[sampled] = begins[-1] + np.cumsum(size[sampled]) - size[sampled]
        tokens = np.concatenate([*(tally.tokens for tally in tallies), *(tokens for tokens, _ in counted)])
        shares = np.concatenate([*(tally.shares for tally in tallies), *(shares for _, shares in counted)])
        return first, size, torch.from_numpy(tokens).to(self.device), _float(shares, self.device)


@dataclass(frozen=True)
class Backoff:
    """A prediction from matches of several lengths: P pairs of a position and a match of its last tokens."""

    ranges: _Ranges
    unigrams: Tensor  # (V,) on the device: the share of each token in the text
    size: int  # N
    row: Ints  # (P,) which position, ascending
    match: Ints  # (P,) which range
    weight: Floats  # (P,) sum to 1 over the pairs of a position

    @property
    def device(self) -> torch.device:
        """The device of the probabilities."""
        return self.unigrams.device

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the exact (N,) log-probabilities of one token per position."""
        with np.errstate(divide="ignore"):
            return _float(np.log(self.probabilities(np.arange(self.size), targets.cpu().numpy())), self.device)

    def log_probs(self) -> Tensor:
        """Return the (N, V) log-probabilities."""
        probs = self.unigrams.new_zeros(self.size, len(self.unigrams))
        return self.add_to(probs, probs.new_ones(self.size)).log_()

    def add_to(self, probs: Tensor, weights: Tensor) -> Tensor:
        """Add the probabilities, multiplied by (N,) weights, to (N, V) probabilities in place.

        Only the followers of matches are copied to the device, each match once; no (N, V) array is made.
        """
        of_text = self.ranges.length[self.match] == 0
        if of_text.any():
            shares = np.zeros(self.size)
            shares[self.row[of_text]] = self.weight[of_text]
            probs.addr_(_float(shares, self.device) * weights, self.unigrams)
        first, size, tokens, shares_ = self.ranges.followers
        sizes = size[self.match]
        total = int(sizes.sum())
        if total:
            begin = first[self.match] - (np.cumsum(sizes) - sizes)  # in `tokens`, of the first element of each pair
            row, begins, repeats = torch.from_numpy(np.stack([self.row, begin, sizes])).to(self.device)
            factor = _float(self.weight, self.device) * weights[row]
            pair = torch.repeat_interleave(repeats, output_size=total)
            entry = torch.arange(total, device=self.device) + begins[pair]
            place = row[pair] * probs.shape[1] + tokens[entry]
            probs.view(-1).scatter_add_(0, place, shares_[entry] * factor[pair])
        return probs

    def abstains(self) -> Tensor:
        """Mark the (N,) positions without a match."""
        return torch.from_numpy(np.bincount(self.row, minlength=self.size) == 0).to(self.device)

    def probabilities(self, rows: Ints, tokens: NDArray[Any]) -> Floats:
        """Return the probability of each token at each of these positions."""
        begin = np.searchsorted(self.row, np.arange(self.size + 1))
        asked, step = ragged(np.diff(begin)[rows])
        pair = begin[rows][asked] + step
        numbers = self.ranges.counts.suffixes.encode(tokens, begins=False)[asked]
        match = self.match[pair]
        first, count = self.ranges.low[match], self.ranges.count[match]
        low, high = self.ranges.counts.suffixes.extend_match(first, first + count, numbers, self.ranges.length[match])
        return sum_by_owner(asked, self.weight[pair] * (high - low) / count, len(rows))

    def only(self, row: int) -> Backoff:
        """Return the prediction at one position."""
        pairs = self.row == row
        own = np.zeros(int(pairs.sum()), np.int64)
        return replace(self, size=1, row=own, match=self.match[pairs], weight=self.weight[pairs])


class NgramMemory:
    """The suffix array of a store's text, and the longest match.

    Probabilities are exact given T, and those of the longest match alone are exact. Other statistics of a match with
    more than `cap` occurrences come from a sample: followers are sorted there, so `cap` evenly spaced occurrences
    estimate each token's share to within 1 / cap. T of matches of two or more tokens with more than `cap` occurrences
    is estimated from it: where two neighbours in the sample differ, from 1 to `step` new tokens lie between them
    (`step` occurrences apart), and the geometric mean √step is taken.
    """

    name = "ngram"
    expensive = False
    source = None
    history_length = 0
    # Logarithms are log(1 + x). All are 0 where there is no match. The entropy is that of the sample.
    feature_names = ("match length", "log match count", "log match distinct", "match agreement", "top", "entropy")

    def __init__(self, suffixes: SuffixArray, *, vocab_size: int, longest: int = 32, cap: int = 256) -> None:
        if not 1 <= longest < DEPTH:
            raise ParameterError(f"The longest match must be from 1 to {DEPTH - 1} tokens, not {longest}.")
        if cap < 1:
            raise ParameterError(f"cap must be at least 1, not {cap}.")
        self.suffixes = suffixes
        self.vocab_size = vocab_size
        self.longest = longest
        self.cap = cap
        self._counts = _FollowerCounts(suffixes)
        self._unigrams_on: dict[torch.device, Tensor] = {}
        # Matches of the last predictions: the row of each text by its last numbers; (texts, longest + 1) low and high.
        self._known: deque[tuple[dict[bytes, int], Ints, Ints]] = deque(maxlen=_KNOWN)

    @classmethod
    def open(cls, store: Datastore, *, longest: int = 32, cap: int = 256, progress: Progress = silent) -> NgramMemory:
        """Open the n-grams of a store; the suffix array is built at the first time."""
        suffixes = open_suffix_array(store, progress=progress)
        return cls(suffixes, vocab_size=int(store.model["vocab_size"]), longest=longest, cap=cap)

    @property
    def component_names(self) -> Sequence[str]:
        """The smoothed prediction, and that of the longest match alone."""
        return ("ngram", "ngram longest")

    def predict(self, context: Context) -> NgramOutput:
        """Look up the tokens that followed the last tokens of each position."""
        numbers, places, last = self._read(context)
        low, high = self._match(numbers, places, last)
        cuts = range(_ROWS, len(places), _ROWS)
        parts = zip(*(np.split(each, cuts) for each in (low, high, numbers[places])), strict=True)
        blocks = [_Block(self, *part) for part in parts]
        device = next((span.tokens.device for span in context.spans), torch.device("cpu"))
        ranges = _Ranges(self._counts, blocks, device)
        return NgramOutput(self._backoff(ranges), self._backoff(ranges, longest=True), blocks)

    def _backoff(self, ranges: _Ranges, *, longest: bool = False) -> Backoff:
        """Join the matches of all positions, or the longest of each alone."""
        blocks = ranges.blocks
        rows = np.cumsum([0, *(block.size for block in blocks)])
        matches = np.cumsum([0, *(len(block.range_low) for block in blocks)])
        chosen = [block.last if longest else np.arange(len(block.row)) for block in blocks]
        each = list(zip(blocks, chosen, rows[:-1], matches[:-1], strict=True))
        return Backoff(
            ranges,
            self._unigrams(ranges.device),
            int(rows[-1]),
            row=np.concatenate([block.row[pairs] + first for block, pairs, first, _ in each]),
            match=np.concatenate([block.range[pairs] + first for block, pairs, _, first in each]),
            weight=np.concatenate([np.ones(len(pairs)) if longest else block.weight for block, pairs, _, _ in each]),
        )

    def _unigrams(self, device: torch.device) -> Tensor:
        """Return the (V,) shares of tokens in the text."""
        if device not in self._unigrams_on:
            counts = np.diff(self.suffixes.first)[1 : self.vocab_size + 1]
            shares = np.zeros(self.vocab_size)
            shares[: len(counts)] = counts / max(1, len(self.suffixes.order) - int(self.suffixes.first[1]))
            with torch.inference_mode(False):  # it is kept, and may be used where gradients are computed
                self._unigrams_on[device] = _float(shares, device)
        return self._unigrams_on[device]

    def _read(self, context: Context) -> tuple[Ints, Ints, Ints]:
        """Return the encoded tokens of all spans, one after another; the places of the predicted positions, (N,); and
        the first and the last place of each span in which anything is predicted, (spans, 2).
        """
        spans = [span for span in context.spans if len(span)]
        begins = np.array([max(0, span.start - self.longest) for span in spans], np.int64)
        tails = [span.tokens[max(0, span.start - self.longest) :] for span in spans]
        sizes = np.array([len(tail) for tail in tails], np.int64)
        predicted = np.array([len(span) for span in spans], np.int64)
        tokens = torch.cat(tails).cpu().numpy() if tails else np.empty(0, np.int64)  # one copy from the device
        numbers = self.suffixes.encode(tokens, begins=False)
        ends = np.cumsum(sizes)
        first = (ends - sizes)[begins == 0]
        numbers[first[tokens[first] == self.suffixes.start_token]] = 0  # the border before a document
        # Between two spans, and after the last one: no match reaches across it.
        numbers = np.insert(numbers, ends, self.suffixes.vocab_size + 1)
        ends += np.arange(len(spans))
        owner, step = ragged(predicted)
        return numbers, (ends - predicted)[owner] + step, np.column_stack([ends - sizes, ends - 1])

    def _match(self, numbers: Ints, places: Ints, ends: Ints) -> tuple[Ints, Ints]:
        """Return the rows of the suffix array where the last 0 … `longest` numbers up to each place occur.

        A text that is generated is read one token further at each step, and its matches are those of the step before
        that continue; these are found by their last tokens.
        """
        tails = [(max(begin, end - self.longest + 1), end + 1) for begin, end in ends.tolist()]
        keys = [numbers[begin:end].tobytes() for begin, end in tails]
        matches = None
        if len(places) == len(keys):  # one position of each text
            before = [numbers[max(begin, end - self.longest) : end].tobytes() for begin, end in ends.tolist()]
            matches = self._continue(before, numbers[places])
        if matches is None:
            low, high = self.suffixes.match(numbers, self.longest)
            matches = low[places], high[places]
        rows = np.searchsorted(places, ends[:, 1])
        self._known.append(({key: row for row, key in enumerate(keys)}, matches[0][rows], matches[1][rows]))
        return matches

    def _continue(self, before: Sequence[bytes], numbers: Ints) -> tuple[Ints, Ints] | None:
        """Return the matches that one more number continues; None if those of one of the texts are not known."""
        for rows, low, high in reversed(self._known.copy()):
            found = [rows.get(key, -1) for key in before]
            if min(found, default=-1) >= 0 and low.shape[1] == self.longest + 1:
                return self.suffixes.continue_match(low[found], high[found], numbers)
        return None

    def tally(self, low: Ints, counts: Ints, lengths: Ints) -> _Followers:
        """Count the followers in ranges of `counts` suffixes from `low` on, whose first `lengths` tokens are equal."""
        sizes = np.minimum(counts, self.cap)
        owner, step = ragged(sizes)
        # The middle of each of `size` equal parts; all suffixes if there are no more than `cap`.
        rows = low[owner] + (2 * step + 1) * counts[owner] // (2 * sizes[owner])
        tokens = _token(self.suffixes.following(rows, lengths[owner]))
        heads = np.flatnonzero((step == 0) | (tokens != np.roll(tokens, 1)))
        owners = owner[heads]
        shares = np.diff(np.append(heads, len(rows))) / sizes[owners]
        different = np.bincount(owners, minlength=len(low))
        apart: Floats = np.sqrt(counts / sizes)
        return _Followers(np.append(0, np.cumsum(different)), tokens[heads], shares, 1 + (different - 1) * apart)


@dataclass(frozen=True)
class NgramOutput:
    """Two predictions: smoothed by shorter matches, and by the longest match alone."""

    smoothed: Backoff
    longest: Backoff
    blocks: Sequence[_Block]

    @property
    def components(self) -> Sequence[Prediction]:
        """The smoothed prediction, and that of the longest match alone."""
        return (self.smoothed, self.longest)

    def features(self) -> Tensor:
        """Return (N, 6): see `NgramMemory.feature_names`."""
        matched = np.concatenate([block.matched() for block in self.blocks])
        entropy = np.concatenate([block.sample.entropy() for block in self.blocks])
        features = np.column_stack([matched, self._top[1], entropy])
        return torch.from_numpy(features).to(self.smoothed.device, torch.float32)

    def top(self) -> Tensor:
        """Return the (N,) most probable tokens: the lowest of tied ones, -1 where it abstains."""
        return torch.from_numpy(self._top[0]).to(self.smoothed.device)

    @cached_property
    def _top(self) -> tuple[Ints, Floats]:
        """The most probable tokens and their exact probabilities; the sample only limits the candidates."""
        begin = np.cumsum([0, *(block.size for block in self.blocks)])
        near = [block.near_the_top() for block in self.blocks]
        rows = np.concatenate([rows + first for (rows, _), first in zip(near, begin[:-1], strict=True)])
        tokens = np.concatenate([tokens for _, tokens in near])
        probs = self.smoothed.probabilities(rows, tokens)
        # By position, then the most probable first, then the lowest: the first of a position is its best.
        order = np.lexsort((tokens, -probs, rows))
        first = order[np.flatnonzero(np.diff(rows[order], prepend=-1))]
        best, most = np.full(begin[-1], -1, np.int64), np.zeros(begin[-1])
        best[rows[first]], most[rows[first]] = tokens[first], probs[first]
        # A token outside the sample may have a probability up to the error of the sample.
        error = np.concatenate([block.error for block in self.blocks])
        for row in np.flatnonzero((best >= 0) & (most <= error)).tolist():
            dense = self.smoothed.only(row).log_probs()[0]
            best[row], most[row] = int(dense.argmax()), float(dense.max().exp())
        return best, most


@dataclass(frozen=True)
class _Followers:
    """The followers of U ranges of suffixes: elements begin[u] … begin[u + 1] - 1 are those of range u."""

    begin: Ints  # (U + 1,)
    tokens: Ints  # ascending within a range
    shares: Floats  # sum to 1 within a range
    distinct: Floats  # (U,) number of distinct followers, an estimate if the range was sampled


@dataclass(frozen=True)
class _Sample:
    """The smoothed prediction by the samples, for B positions."""

    size: int
    row: Ints  # ascending
    tokens: Ints  # ascending within a position
    weights: Floats  # sum to 1 within a position

    def entropy(self) -> Floats:
        """Return the (B,) entropies in nats."""
        return sum_by_owner(self.row, -self.weights * np.log(np.maximum(self.weights, 1e-300)), self.size)


class _Block:
    """Some positions and their matches: pairs of a position and a match. A match at level L has L tokens."""

    def __init__(self, memory: NgramMemory, low: Ints, high: Ints, numbers: Ints) -> None:
        # A longer match never has more occurrences, except in a corrupt file.
        self._counts = np.minimum.accumulate(high - low, 1)  # (B, longest + 1)
        self.size = len(self._counts)
        self._matched = (self._counts[:, 1:] > 0).sum(1)  # (B,) tokens in the longest match
        self._levels = int(self._matched.max(initial=0)) + 1
        self._counts = self._counts[:, : self._levels]
        # Matches of equal counts have the same occurrences, so only the longest of them is kept.
        longer = np.append(self._counts[:, 1:], np.zeros((self.size, 1), np.int64), 1)
        self._kept = (self._counts > longer) & (self._matched > 0)[:, None]
        self.row, self.level = np.nonzero(self._kept)
        self.low, self.count = low[self.row, self.level], self._counts[self.row, self.level]
        # Positions often share a match, mostly a short one; its first suffix and its length identify it.
        _, where, self.range = np.unique(self.low * DEPTH + self.level, return_index=True, return_inverse=True)
        self.range_low, self.range_count, self.range_level = self.low[where], self.count[where], self.level[where]
        self.range_sampled = self.range_count > memory.cap
        self.tally = memory.tally(self.range_low, self.range_count, self.range_level)
        self._vocab_size, self._cap = memory.vocab_size, memory.cap
        self._distinct = self._find_distinct(memory.suffixes, numbers)
        self.weight = self._find_weights()[self.row, self.level]
        self.last = np.flatnonzero(self.level == self._matched[self.row])  # the pairs of the longest matches

    def _find_distinct(self, suffixes: SuffixArray, numbers: Ints) -> Floats:
        """Return T of every level, (B, levels)."""
        distinct = np.zeros((self.size, self._levels))
        distinct[self.row, self.level] = self.tally.distinct[self.range]
        for level in range(self._levels - 2, -1, -1):
            distinct[:, level] = np.where(self._kept[:, level], distinct[:, level], distinct[:, level + 1])
        distinct[:, 0] = suffixes.distinct
        distinct[:, 1:2] = suffixes.followers[numbers][:, None]
        # A longer match cannot have more distinct followers, whatever the estimate.
        return np.minimum.accumulate(distinct, 1)

    def _find_weights(self) -> Floats:
        """Return the (B, levels) weights of the kept levels in the smoothed prediction."""
        sure: Floats = self._counts / np.maximum(self._counts + self._distinct, 1)
        sure[:, 0] = 1
        weights = level_weights(sure)
        for level in range(self._levels - 1):
            weights[:, level + 1] += np.where(self._kept[:, level], 0, weights[:, level])
        return weights

    def matched(self) -> Floats:
        """Return (B, 4): length, count and distinct followers of the longest match, and their largest share."""
        rows = self.row[self.last]
        found = np.zeros((self.size, 4))
        if len(rows):
            length = self._matched[rows]
            found[rows, 0] = length
            found[rows, 1] = np.log1p(self._counts[rows, length])
            found[rows, 2] = np.log1p(self._distinct[rows, length])
            found[rows, 3] = np.maximum.reduceat(self.tally.shares, self.tally.begin[:-1])[self.range[self.last]]
        return found

    @cached_property
    def sample(self) -> _Sample:
        """The mixture of all levels, each token of a position once."""
        begin = self.tally.begin[self.range]
        pair, step = ragged(self.tally.begin[self.range + 1] - begin)
        entry = begin[pair] + step
        weights = self.tally.shares[entry] * self.weight[pair]
        keys = self.row[pair] * self._vocab_size + self.tally.tokens[entry]
        order = np.argsort(keys, kind="stable")  # ascending within each pair, which this algorithm makes use of
        keys = keys[order]
        heads = np.flatnonzero(np.diff(keys, prepend=-1))
        sums = np.add.reduceat(weights[order], heads) if len(heads) else weights
        rows, tokens = np.divmod(keys[heads], self._vocab_size)
        return _Sample(self.size, rows, tokens, sums)

    @cached_property
    def error(self) -> Floats:
        """The (B,) largest error of a probability by the sample; 0 where nothing was sampled."""
        return sum_by_owner(self.row, np.where(self.count > self._cap, self.weight / self._cap, 0), self.size)

    def near_the_top(self) -> tuple[Ints, Ints]:
        """Return the (positions, tokens) that may be the most probable ones, as far as they are sampled."""
        most = np.zeros(self.size)
        np.maximum.at(most, self.sample.row, self.sample.weights)
        # Sums in another order differ in their last digits.
        chosen = self.sample.weights >= (most - 2 * self.error)[self.sample.row] * (1 - 1e-9)
        return self.sample.row[chosen], self.sample.tokens[chosen]


def _token(numbers: NDArray[Any]) -> Ints:
    """Turn numbers of the text into tokens; a border, which follows in a corrupt file only, into 0."""
    return np.maximum(numbers.astype(np.int64) - 1, 0)


def _float(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as float32 on a device."""
    return torch.from_numpy(array.astype(np.float32, copy=False)).to(device)


def level_weights(sure: Floats) -> Floats:
    """Return the (B, levels) weights of matches of 0, 1, … tokens, which get this share of what longer ones leave."""
    left = np.append(np.cumprod((1 - sure)[:, ::-1], 1)[:, ::-1][:, 1:], np.ones((len(sure), 1)), 1)
    weights: Floats = sure * left
    return weights


def sum_by_owner(owner: Ints, weights: Floats, size: int) -> Floats:
    """Sum the weights of each owner."""
    return np.bincount(owner, weights, size).astype(np.float64)


def ragged(sizes: Ints) -> tuple[Ints, Ints]:
    """Enumerate ranges of these sizes: (number of the range, offset in it)."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    begin = np.cumsum(sizes) - sizes
    return owner, np.arange(len(owner)) - begin[owner]
