"""Hand events over to those who wait for them, those of a few milliseconds together. Knows nothing about texts.

Whoever is woken takes the interpreter from the one who computes, for as long as a small model takes for a layer. Tokens
that come more quickly than anybody can read need not wake anybody one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from knnlm.serve.orders import Event
from knnlm.serve.tickets import Ticket

# Seconds from one handing over to the next, where nothing is urgent: as long as a screen shows one picture.
PAUSE = 1 / 60

Post = Callable[[list[tuple[Ticket, Event]]], None]


def put_each(events: list[tuple[Ticket, Event]]) -> None:
    """Bring each event to its ticket."""
    for ticket, event in events:
        ticket.put(event)


class Outbox:
    """Events that nobody was told of yet; for one thread only."""

    def __init__(self, post: Post = put_each) -> None:
        self.post = post
        self.posted = 0  # times that something was handed over
        self._events: list[tuple[Ticket, Event]] = []
        self._urgent = False
        self._last = -PAUSE

    def add(self, ticket: Ticket, event: Event, *, urgent: bool) -> None:
        """Take an event; one that is urgent is handed over at the next occasion, with all that came before it."""
        self._events.append((ticket, event))
        self._urgent = self._urgent or urgent

    def hand_over(self, *, at_once: bool) -> None:
        """Hand over what is there, at once or where it is time."""
        if not self._events:
            return
        now = time.monotonic()
        if at_once or self._urgent or now - self._last >= PAUSE:
            events, self._events = self._events, []
            self._urgent, self._last = False, now
            self.posted += 1
            self.post(events)
