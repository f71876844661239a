"""Progress callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

Advance = Callable[[int], None]


class Progress(Protocol):
    """Opens one progress bar: `with progress("reading", total=100, unit="tokens") as advance: advance(10)`."""

    def __call__(
        self, what: str, *, total: int | None = None, unit: str = "tokens"
    ) -> AbstractContextManager[Advance]: ...


@runtime_checkable
class SupportsNote(Protocol):
    """A progress bar that can show a note beside it."""

    def note(self, text: str) -> None:
        """Replace the note."""


def note(advance: Advance, text: str) -> None:
    """Show a note, such as the loss, beside a progress bar that supports it."""
    if isinstance(advance, SupportsNote):
        advance.note(text)


@contextmanager
def silent(what: str, *, total: int | None = None, unit: str = "tokens") -> Iterator[Advance]:  # noqa: ARG001
    """Show no progress, the default of the library."""
    yield lambda _: None
