"""What a writer of segments asks of the place where they are noted. Knows nothing about how they are kept there.

A build notes its segments in the catalog; an addition notes them beside it, until all of them are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from knnlm.datastore.schema import SegmentRow, StoredDocument


class Ledger(Protocol):
    """The catalog, or what stands in for it."""

    path: Path  # of the catalog

    def get(self, key: str) -> Any:
        """Read one fact about the memory; None where it is not known."""

    def segments(self) -> list[SegmentRow]:
        """List the segments in the order of their rows."""

    def next_segment(self) -> int:
        """Give the number of the next segment."""

    def next_document(self) -> int:
        """Give the number of the next document."""

    def add_segment(self, segment: SegmentRow, documents: Iterable[StoredDocument], **facts: Any) -> None:
        """Note a segment that is on disk, its documents, and facts that hold from now on."""

    def replace_keys(self, segments: Iterable[SegmentRow], **facts: Any) -> None:
        """Note that segments have other files of keys now, and facts that hold from now on."""
