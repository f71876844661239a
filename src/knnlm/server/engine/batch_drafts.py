"""Drafts for the sequences of a batch: each copies tokens from the store and from its own text.

One step reads the drafted tokens of all sequences, so that they share one decision about the length. A sequence samples
its tokens in their order, up to the first one that is not the drafted one, so that its text is the same as without
drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from knnlm.errors import ParameterError
from knnlm.generation.draft import Draft, Drafter, StepTimes, choose_drafts
from knnlm.generation.speculation import describe_drafts, initial_times, make_drafter
from knnlm.mixture.mixture import Mixture
from knnlm.server.engine.sequence import DraftedTokens, GeneratedSequence


class BatchDrafts:
    """Drafts for the sequences of a scheduler."""

    def __init__(self, mixture: Mixture) -> None:
        self.drafted = self.accepted = 0
        self._mixture = mixture
        self._times: dict[int, StepTimes] = {}  # by the number of sequences
        self._drafters: WeakKeyDictionary[GeneratedSequence, Drafter] = WeakKeyDictionary()

    def reload(self, mixture: Mixture) -> None:
        """Draft from this state of the store, for sequences that begin from now on; builds its suffix array."""
        self._mixture = mixture
        make_drafter(mixture)

    def propose(self, sequences: Sequence[GeneratedSequence]) -> list[DraftedTokens]:
        """Return what is read of each sequence."""
        times, count, found = self._step_times(len(sequences)), len(sequences), []
        for sequence in sequences:
            drafter, request = self._drafter(sequence), sequence.handle.request
            # A step writes one token more than it has drafted.
            room = request.max_tokens - sequence.generated - 1
            found.append(drafter.candidates([*request.tokens, *sequence.tokens], room, times.each / count))
        _, chosen = choose_drafts(found, times)
        if times.needs_comparison:
            chosen = [Draft()] * count
        for sequence, draft in zip(sequences, chosen, strict=True):
            self._drafter(sequence).take(draft)
        return [DraftedTokens(own.draw, draft.tokens) for own, draft in zip(sequences, chosen, strict=True)]

    def observe(
        self, sequences: Sequence[GeneratedSequence], read: Sequence[DraftedTokens], seconds: float | None
    ) -> None:
        """Learn which tokens were accepted, and the time of the step; None: it did other work, too."""
        for sequence, tokens in zip(sequences, read, strict=True):
            accepted = min(tokens.sampled - 1, len(tokens.draft))
            self._drafter(sequence).observe(accepted)
            self.drafted += len(tokens.draft)
            self.accepted += accepted
        if seconds is not None:
            self._step_times(len(sequences)).observe(max(map(len, read)) - 1, seconds)

    def describe(self, sequence: GeneratedSequence) -> dict[str, Any]:
        """Return the drafts of a text that ends, without the copied parts if the store has changed since it began."""
        drafter = self._drafter(sequence)
        try:
            return describe_drafts(drafter, self._mixture.store, sequence.tokens)
        except ParameterError:
            return describe_drafts(drafter, None, sequence.tokens)

    def _drafter(self, sequence: GeneratedSequence) -> Drafter:
        if sequence not in self._drafters:
            self._drafters[sequence] = drafter = make_drafter(self._mixture)
            drafter.begin(prompt=len(sequence.handle.request.tokens))
        return self._drafters[sequence]

    def _step_times(self, count: int) -> StepTimes:
        if count not in self._times:
            self._times[count] = initial_times(self._mixture.lm.device, texts=count)
        return self._times[count]
