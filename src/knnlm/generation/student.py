"""A decoder of a mixture that drafts tokens for it.

It reads the text, token by token, before the language model does, and what it computes is part of the pass that
verifies the draft: a drafted token costs one pass of the student, which it would have cost without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as processors_of

from knnlm.generation.cache import ForwardStep, MemoryState, memory_state, reader_cache, run_reader, text_cache
from knnlm.generation.draft import Proposal
from knnlm.generation.speculation import KeyedSample
from knnlm.memories.base import LOGITS, Source
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import Reading

# Others may call functions of the user, or have a state that changes with each call.
_APPLIED = (
    processors_of.MinLengthLogitsProcessor,
    processors_of.MinNewTokensLengthLogitsProcessor,
    processors_of.MinPLogitsWarper,
    processors_of.NoRepeatNGramLogitsProcessor,
    processors_of.RepetitionPenaltyLogitsProcessor,
    processors_of.SequenceBiasLogitsProcessor,
    processors_of.SuppressTokensLogitsProcessor,
    processors_of.TemperatureLogitsWarper,
    processors_of.TopKLogitsWarper,
    processors_of.TopPLogitsWarper,
)


class DraftingStudent:
    """The student in the generation of one text."""

    def __init__(self, mixture: Mixture, reading: Reading, cache: Any, processors: Sequence[Any]) -> None:
        """Take the decoder, the cache of the generation, and the processors of its scores."""
        self._mixture, self._reading, self._cache = mixture, reading, cache
        self._applied: list[Any] = [each for each in processors if isinstance(each, _APPLIED)]
        self._sample = next((each for each in processors if isinstance(each, KeyedSample)), None)

    def propose(self, input_ids: Tensor, drafted: Sequence[int]) -> Proposal:
        """Read the last token of a (1, T) text with some drafted tokens, and return the token chosen after it."""
        text = torch.cat([input_ids, input_ids.new_tensor([drafted], dtype=input_ids.dtype).view(1, -1)], 1)
        state = memory_state(text_cache(self._cache))
        logits = _read_ahead(self._mixture, self._reading, text[:, -1:].to(self._mixture.lm.device), state=state)
        scores = logits.float().log_softmax(-1)
        for processor in self._applied:
            scores = processor(text, scores)
        if self._sample is not None:
            scores = self._sample.with_noise(text, scores)
        (first, second), (token, _) = torch.cat([*scores.double().topk(2)], 0).tolist()  # one copy from the device
        return Proposal(int(token), first - second)


def _read_ahead(mixture: Mixture, reading: Reading, tokens: Tensor, *, state: MemoryState) -> Tensor:
    """Let a reader read (B, 1) tokens before the language model does, and return its (B, V) logits.

    They follow the tokens in the state and those that were read ahead before. The next step must begin with all of
    them: what the reader computed is part of it.
    """
    assert state.last is not None
    last, read = state.last, state.ahead.setdefault(reading.number, [])
    before = state.tokens.get_seq_length() + len(read)
    mask, positions = last.mask, last.positions
    if mask is not None:
        mask = torch.nn.functional.pad(mask[:, :before], (0, before + 1 - min(before, mask.shape[1])), value=1)
    if positions is not None:
        positions = positions[..., -1:] + (before + 1 - state.length)
    past = reader_cache(state, reading.number, reading.model)
    step = ForwardStep(tokens, mask, positions, slice(None))
    read.append(run_reader(mixture, reading, step, past=past, trunk=None))
    return read[-1][Source(reading.number, LOGITS)][:, -1]
