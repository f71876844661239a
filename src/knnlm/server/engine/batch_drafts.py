"""Drafts for the sequences of a batch: each copies tokens from the store and from its own text.

One step reads the drafted tokens of all sequences, so that they share one decision about the length. A sequence samples
its tokens in their order, up to the first one that is not the drafted one, so that its text is the same as without
drafts.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from knnlm.datastore.suffix_array import SuffixArray
from knnlm.errors import KnnlmError
from knnlm.generation.draft import Draft, Drafter, StepTimes, choose_drafts
from knnlm.generation.speculation import can_draft, describe_drafts, initial_times, stored_text
from knnlm.mixture.mixture import Mixture
from knnlm.server.engine.sequence import DraftedTokens, GeneratedSequence

_MOST_READ = 256  # tokens of a prompt that are read for drafts in one step
_PATIENCE = 16  # steps in which nothing is drafted, after which a text is looked at in every _PAUSE-th step only
_PAUSE = 4

_ERRORS = (KnnlmError, OSError, sqlite3.Error)

_log = logging.getLogger(__name__)


class _SequenceDrafts:
    """The drafts of one sequence."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.idle = 0  # steps since a draft

    @property
    def rests(self) -> bool:
        """Whether no draft is looked for in this step."""
        return self.idle > _PATIENCE and self.idle % _PAUSE > 0


class BatchDrafts:
    """Drafts for the sequences of a scheduler; its methods, but for the counters, are for the scheduler's thread."""

    def __init__(self, mixture: Mixture) -> None:
        self.drafted = self.accepted = 0
        self._mixture = mixture
        self._text: tuple[SuffixArray | None, Hashable] = None, None
        self._times: dict[int, StepTimes] = {}  # by the number of sequences
        self._sequences: WeakKeyDictionary[GeneratedSequence, _SequenceDrafts] = WeakKeyDictionary()
        self._learnt = Drafter(None, StepTimes(extra=0.0, each=0.0))  # whose acceptance those of all texts share
        self.possible = can_draft(mixture)

    def open(self) -> None:
        """Open the suffix array of the store; build it the first time."""
        self._open(self._mixture)

    def reload(self, mixture: Mixture) -> None:
        """Draft from this state of the store, once its suffix array is built by another thread."""
        self._mixture, self._text, self.possible = mixture, (None, None), can_draft(mixture)
        threading.Thread(target=self._open, args=(mixture,), name="knnlm-drafts", daemon=True).start()

    def _open(self, mixture: Mixture) -> None:
        try:
            text = stored_text(mixture)
        except _ERRORS:
            _log.exception(
                "the store's text cannot be indexed, so that drafts are copied from prompts and answers only"
            )
            return
        if mixture is self._mixture:
            self._text = text

    def propose(self, sequences: Sequence[GeneratedSequence]) -> list[DraftedTokens]:
        """Return what is read of each sequence."""
        times, count, found = self._step_times(len(sequences)), len(sequences), []
        most, limit = max(map(_length, sequences)), self._mixture.max_length
        for sequence in sequences:
            own, request = self._drafts(sequence), sequence.handle.request
            # A step writes one token more than it has drafted.
            room = request.max_tokens - sequence.generated - 1
            if limit is not None:  # every text is filled up to the length of the longest draft
                room = min(room, limit - most)
            text = [*request.tokens, *sequence.tokens] if not own.rests and room > 0 else []
            found.append(own.drafter.candidates(text, room, times.each / count, most_read=_MOST_READ) if text else [])
        _, chosen = choose_drafts(found, times)
        if times.needs_comparison:
            chosen = [Draft()] * count
        for sequence, draft in zip(sequences, chosen, strict=True):
            own = self._drafts(sequence)
            own.drafter.take(draft)
            own.idle = 0 if draft else own.idle + 1
        return [DraftedTokens(own.draw, draft.tokens) for own, draft in zip(sequences, chosen, strict=True)]

    def observe(
        self, sequences: Sequence[GeneratedSequence], read: Sequence[DraftedTokens], seconds: float | None
    ) -> None:
        """Learn which tokens were accepted, and the time of the step; None: it did other work, too."""
        for sequence, tokens in zip(sequences, read, strict=True):
            if tokens.draft:
                self._drafts(sequence).drafter.observe(tokens.accepted)
                self.drafted += len(tokens.draft)
                self.accepted += tokens.accepted
        if seconds is not None:
            self._step_times(len(sequences)).observe(max(map(len, read)) - 1, seconds)

    def describe(self, sequence: GeneratedSequence) -> dict[str, Any]:
        """Return the drafts of a text that ends, without the copied parts if the store has changed since it began."""
        drafter = self._drafts(sequence).drafter
        try:
            return describe_drafts(drafter, self._mixture.store, sequence.tokens)
        except _ERRORS:  # a text does not fail because its sources cannot be named
            return describe_drafts(drafter, None, sequence.tokens)

    def _drafts(self, sequence: GeneratedSequence) -> _SequenceDrafts:
        if sequence not in self._sequences:
            suffixes, identity = self._text
            drafter = Drafter(suffixes, self._step_times(1), identity=identity, like=self._learnt)
            drafter.begin(prompt=len(sequence.handle.request.tokens))
            self._sequences[sequence] = _SequenceDrafts(drafter)
        return self._sequences[sequence]

    def _step_times(self, count: int) -> StepTimes:
        if count not in self._times:
            self._times[count] = initial_times(self._mixture.lm.device, texts=count)
        return self._times[count]


def _length(sequence: GeneratedSequence) -> int:
    return len(sequence.handle.request.tokens) + sequence.generated
