"""Progress callbacks, and times in words."""

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


def duration(seconds: float) -> str:
    """Return a time in words."""
    for unit, length in (("years", 365.25 * 86400), ("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= (2 if unit == "years" else 1) * 0.9995 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"
