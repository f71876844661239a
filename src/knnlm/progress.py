"""How long work tells how far it is. Knows nothing about the work or about screens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

Advance = Callable[[int], None]


class Progress(Protocol):
    """Opens one bar: `with progress("reading", total=100, unit="tokens") as advance: advance(10)`."""

    def __call__(
        self, what: str, *, total: int | None = None, unit: str = "tokens"
    ) -> AbstractContextManager[Advance]: ...


@runtime_checkable
class Noted(Protocol):
    """A bar that has room for a few words beside it."""

    def note(self, text: str) -> None:
        """Show these words instead of those before."""


def note(advance: Advance, text: str) -> None:
    """Show a few words beside a bar, such as the loss; one that has no room for them stays as it is."""
    if isinstance(advance, Noted):
        advance.note(text)


@contextmanager
def silent(what: str, *, total: int | None = None, unit: str = "tokens") -> Iterator[Advance]:  # noqa: ARG001
    """Show nothing: the library's default."""
    yield lambda _: None
