"""Numbers of entries without those that were removed.

A stored entry keeps its number until the next compaction; live entries are numbered without gaps. A store shows live
numbers only, so removed entries cannot be addressed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from knnlm.datastore.catalog import Catalog
from knnlm.datastore.schema import SegmentRow
from knnlm.errors import DatastoreCorrupt

Ints = NDArray[np.int64]


class LiveNumbers:
    """Stored numbers 0 … total - 1 with gaps, and the live numbers of those between the gaps."""

    def __init__(self, total: int, gaps: Iterable[tuple[int, int]] = ()) -> None:
        """`gaps` are (first stored number, count); they may touch, but not overlap."""
        self.total = total
        known = sorted((first, count) for first, count in gaps if count)
        self._first: Ints = np.array([first for first, _ in known], dtype=np.int64)
        self._end: Ints = self._first + np.array([count for _, count in known], dtype=np.int64)
        # The number removed before each gap, followed by the number removed in all.
        self._gone: Ints = np.append(0, np.cumsum(self._end - self._first))
        self._live_first: Ints = self._first - self._gone[:-1]  # live numbers from here on are behind the gap

    @property
    def live(self) -> int:
        """The number of live entries."""
        return self.total - int(self._gone[-1])

    @property
    def whole(self) -> bool:
        """Whether there are no gaps."""
        return not len(self._first)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The gaps: (first stored number, count)."""
        return list(zip(self._first.tolist(), (self._end - self._first).tolist(), strict=True))

    def to_stored(self, live: Ints) -> Ints:
        """Return the stored numbers of live ones; negative numbers stay."""
        if self.whole:
            return live
        found = live + self._gone[np.searchsorted(self._live_first, live, side="right")]
        return np.where(live < 0, live, found)

    def to_live(self, stored: Ints) -> Ints:
        """Return the live numbers of stored ones; -1 for those in a gap, below 0 or beyond the end."""
        place = np.searchsorted(self._first, stored, side="right")
        inside = (place > 0) & (np.append(self._end, 0)[place - 1] > stored)
        return np.where(inside | (stored < 0) | (stored >= self.total), -1, stored - self._gone[place])

    def before(self, stored: int) -> int:
        """Return the number of live entries before a stored number, which need not be live itself."""
        place = int(np.searchsorted(self._first, stored, side="right"))
        if place and stored < self._end[place - 1]:
            stored = int(self._first[place - 1])
            place -= 1
        return stored - int(self._gone[place])

    def stretches(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Return (first stored number, count) of each live stretch from `begin` to `end`."""
        place = int(np.searchsorted(self._end, begin, side="right"))
        while begin < end:
            stop = min(end, int(self._first[place])) if place < len(self._first) else end
            if begin < stop:
                yield begin, stop - begin
            if place >= len(self._first):
                return
            begin, place = int(self._end[place]), place + 1


def by_segment(numbers: Ints, starts: Ints) -> Iterator[tuple[int, Ints, Ints]]:
    """Return (segment, positions in `numbers` that belong to it, their numbers within the segment)."""
    if len(numbers) and numbers.max() >= starts[-1]:
        raise IndexError(f"entry {numbers.max()} of {starts[-1]}")
    segments = np.searchsorted(starts[:-1], numbers, side="right") - 1
    segments[numbers < 0] = -1
    order = np.argsort(segments, kind="stable")
    cuts = np.flatnonzero(np.diff(segments[order], prepend=-2)).tolist()
    for begin, end in pairwise([*cuts, len(order)]):
        if (segment := int(segments[order[begin]])) >= 0:
            places = order[begin:end]
            yield segment, places, numbers[places] - starts[segment]


def check_removed(catalog: Catalog, segments: Sequence[SegmentRow]) -> list[tuple[int, int]]:
    """Return the removed stretches of entries, (first, count), after checking that each is within its segment."""
    ends = {segment.id: segment.first_entry + segment.entries for segment in segments}
    gaps, end = [], 0
    for removed in catalog.removed():
        first, count = removed.first_entry, removed.entries
        integers = all(type(number) is int for number in (removed.segment, first, count))
        if not integers or count < 0 or first < end or first + count > ends.get(removed.segment, -1):
            raise DatastoreCorrupt(
                f"{catalog.path}: {count} entries from {first} on were removed, which are not in segment "
                f"{removed.segment}. Build the store again."
            )
        end = first + count
        gaps.append((first, count))
    return gaps
