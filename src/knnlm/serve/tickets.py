"""An order that was taken, and why one may not be. Knows nothing about how orders are carried out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from knnlm.errors import KnnlmError
from knnlm.serve.orders import Ended, Event, Failed, Order
from knnlm.serve.recall import Recollection


class Busy(KnnlmError):
    """There is no room for one more order."""


class Stopped(KnnlmError):
    """Orders are not carried out any more."""


class Ticket:
    """An order that was taken: its events come here, and it can be called off."""

    def __init__(self, order: Order, put: Callable[[Event], None] | None = None) -> None:
        self.order = order
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.put = put or self.events.put
        self.cancelled = False
        self.taken = time.monotonic()
        self.texts: list[Recollection] = []  # one for each continuation

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.cancelled = True

    def wait(self) -> Iterator[Event]:
        """Give its events as they come, until it is done."""
        left = self.order.copies
        while left:
            event = self.events.get()
            left = 0 if isinstance(event, Failed) else left - isinstance(event, Ended)
            yield event
