"""Which rows of a memory are gone, by what the catalog says, checked. Knows nothing about arrays."""

from __future__ import annotations

from collections.abc import Sequence

from knnlm.datastore.catalog import Catalog, SegmentRow
from knnlm.errors import DatastoreCorrupt


def check_removed(catalog: Catalog, segments: Sequence[SegmentRow]) -> list[tuple[int, int]]:
    """Give the stretches of rows that are no longer there, (first, count): each within its segment, none twice."""
    ends = {segment.id: segment.first_row + segment.rows for segment in segments}
    gaps, end = [], 0
    for gone in catalog.removed():
        numbers = all(type(one) is int for one in (gone.segment, gone.first_row, gone.rows))
        if (
            not numbers
            or gone.rows < 0
            or gone.first_row < end
            or gone.first_row + gone.rows > ends.get(gone.segment, -1)
        ):
            raise DatastoreCorrupt(
                f"{catalog.path}: {gone.rows} rows from {gone.first_row} on were removed, which are not in segment "
                f"{gone.segment}. Build the memory again."
            )
        end = gone.first_row + gone.rows
        gaps.append((gone.first_row, gone.rows))
    return gaps
