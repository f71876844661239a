"""Generation with drafts: several tokens in one pass, and the same text as without.

transformers verifies drafts in its assisted generation; here they are handed over. Text is sampled as the largest of
the log-probabilities plus Gumbel noise, which depends on the seed and the position alone. So a sampled text is a greedy
one of other scores, and drafts do not change it either.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.candidate_generator import CandidateGenerator

from knnlm.datastore.store import Datastore
from knnlm.datastore.suffix_array import SuffixArray, open_suffix_array
from knnlm.errors import ParameterError
from knnlm.generation.draft import MAX_DRAFT, Drafter, Proposal, StepTimes
from knnlm.lm.shared import TopLM
from knnlm.memories.decoder import DecoderMemory
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import Reading
from knnlm.progress import Progress, silent

_MODULUS = 2**63 - 1


class KeyedSample(LogitsProcessor):
    """Leaves only one token of each row possible: a sample of the softmax of the scores."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return (B, V) scores that are 0 for the sample after (B, T) tokens, and -inf for all others."""
        best = self.with_noise(input_ids, scores).argmax(-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter_(-1, best, 0.0)

    def with_noise(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the (B, V) scores with noise: the largest one is that of the sample after (B, T) tokens."""
        rows = [gumbel(self._seed, row, input_ids.shape[1], scores.shape[-1]) for row in range(len(scores))]
        return scores.double() + torch.stack(rows).to(scores.device)


@lru_cache(maxsize=MAX_DRAFT + 1)  # a draft of a student is sampled with the same noise as the text
def gumbel(seed: int, row: int, position: int, size: int) -> Tensor:
    """Return (size,) noise that depends on these numbers alone, not on the device."""
    key = (seed * 0x9E3779B97F4A7C15 + row * 0xC2B2AE3D27D4EB4F + position * 0x165667B19E3779F9) % _MODULUS
    uniform = torch.rand(size, generator=torch.Generator().manual_seed(key), dtype=torch.float64)
    return -(-uniform.clamp(min=1e-300).log()).log()


class Student(Protocol):
    """A decoder of the mixture that reads a text before the language model does."""

    def propose(self, input_ids: Tensor, drafted: Sequence[int]) -> Proposal:
        """Return the token that it would choose after a (1, T) text and some drafted tokens."""


class Candidates(CandidateGenerator):
    """Drafts for transformers' assisted generation of one text."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.criteria: Any = None  # of the end of the text
        self.begin(0)

    def begin(self, max_length: int, student: Student | None = None) -> None:
        """Begin a text of at most this length."""
        self.drafter.begin()
        self._max_length, self._student, self._began, self._steps = max_length, student, 0.0, 0

    def get_candidates(self, input_ids: Any, **_: Any) -> Any:
        """Return the (1, T) text with the draft after it, and no scores."""
        self._steps, self._began = self._steps + 1, time.perf_counter()
        tokens = input_ids[0].tolist()
        reads_prompt = self._steps == 1  # which the student reads with the language model
        propose = None if self._student is None or reads_prompt else partial(self._student.propose, input_ids)
        # The pass that verifies a draft also returns the token after it.
        draft = self.drafter.draft(tokens, self._max_length - len(tokens) - 1, propose)
        return torch.cat([input_ids, input_ids.new_tensor([draft.tokens]).view(1, -1)], 1), None

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: Any) -> None:  # noqa: ARG002
        """Learn which tokens of the draft were accepted, and the time of the step."""
        reads_prompt = self._steps == 1
        seconds = None if reads_prompt else time.perf_counter() - self._began
        self.drafter.observe(int(num_matches), seconds, int(input_ids[0, -1]))

    def cut(self, tokens: Tensor, start: int) -> Tensor:
        """Return the (1, T) tokens up to the first one with which a criterion is met, at or after `start`.

        transformers checks criteria after all tokens of a draft that are accepted.
        """
        for end in range(start + 1, tokens.shape[1] + 1):
            if bool(self.criteria(tokens[:, :end], None).all()):
                return tokens[:, :end]
        return tokens


@dataclass(frozen=True)
class Speculation:
    """How `generate` chooses tokens: with drafts, and with which noise."""

    candidates: Candidates | None = None  # None: without drafts
    seed: int | None = None  # of keyed noise; None: as transformers samples


_crops: ContextVar[bool] = ContextVar("crops", default=False)
_PLAIN = Speculation()
_active: ContextVar[Speculation] = ContextVar("speculation", default=_PLAIN)


def crops_caches() -> bool:
    """Whether tokens may be removed from the caches of the text that is generated now."""
    return _crops.get()


class SpeculationMixin:
    """The hooks of transformers' generation that drafts and keyed noise need."""

    @staticmethod
    @contextmanager
    def speculate(speculation: Speculation) -> Iterator[None]:
        """Generate in this way inside the context."""
        token = _active.set(speculation)
        try:
            yield
        finally:
            _active.reset(token)

    def _get_candidate_generator(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        candidates = _active.get().candidates
        if candidates is None:
            return super()._get_candidate_generator(generation_config, *args, **kwargs)  # type: ignore[misc]
        student = self._student(kwargs["model_kwargs"]["past_key_values"], kwargs["logits_processor"])
        candidates.begin(generation_config.max_length, student)
        return candidates

    def _student(self, cache: Any, processors: Any) -> Student | None:  # noqa: ARG002  (for classes with a mixture)
        """Return what drafts with a cache and processors of scores; None: copied tokens alone are drafted."""
        return None

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        token = _crops.set(True)
        try:
            return super()._assisted_decoding(*args, **kwargs)  # type: ignore[misc]
        finally:
            _crops.reset(token)

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)  # type: ignore[misc]
        seed = _active.get().seed
        if seed is not None and generation_config.do_sample and (generation_config.num_beams or 1) == 1:
            processors.append(KeyedSample(seed))  # after temperature, top-k and all others
        return processors

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        criteria = super()._get_stopping_criteria(*args, **kwargs)  # type: ignore[misc]
        if (candidates := _active.get().candidates) is not None:
            candidates.criteria = criteria
        return criteria


_arrays: WeakKeyDictionary[Datastore, SuffixArray] = WeakKeyDictionary()


def make_drafter(mixture: Mixture, *, progress: Progress = silent) -> Drafter:
    """Return drafts from the store of a mixture, from the text itself, and from a decoder of the mixture.

    The suffix array is kept with the store.
    """
    # On a GPU, a pass over several tokens takes hardly longer than one over a single token.
    extra, each = (0.05, 0.02) if mixture.lm.device.type == "cuda" else (0.4, 0.06)
    student, student_times = drafting_student(mixture), None
    if student is not None:
        own, lm = (model.model.num_parameters() for model in (student.model, mixture.lm))
        student_times = StepTimes(extra=extra, each=each + own / (own + lm))
    store, suffixes = mixture.store, None
    if store is not None:
        if store not in _arrays:
            _arrays[store] = open_suffix_array(store, progress=progress)
        suffixes = _arrays[store]
    identity = None if store is None else _identity(store)
    return Drafter(suffixes, StepTimes(extra=extra, each=each), student_times=student_times, identity=identity)


def drafting_student(mixture: Mixture) -> Reading | None:
    """Return the first decoder of a mixture that can read a text before the language model does; None: there is none.

    A decoder that shares its first blocks with the language model cannot, nor one that is the language model, nor one
    with a recurrent state, from which rejected tokens cannot be removed.
    """
    readings = {reading.number: reading for reading in mixture.readers.wanted(mixture.history_lengths)}
    for memory in mixture.memories:
        reading = readings[memory.source.reader] if isinstance(memory, DecoderMemory) else None
        if reading is None or not reading.number or isinstance(reading.model, TopLM):
            continue
        if not getattr(reading.model.model, "_is_stateful", False):
            return reading
    return None


def _identity(store: Datastore) -> Hashable:
    """Return what differs between two states of a store, and between stores."""
    return store.fingerprint, store.generation, store.entry_count


@dataclass(frozen=True)
class CopiedText:
    """A part of a generated text that was copied from a document."""

    start: int  # in the generated tokens
    tokens: int
    document: str
    source: str
    offset: int  # of its first token in the document


def copied_texts(drafter: Drafter, store: Datastore, tokens: Sequence[int]) -> list[CopiedText]:
    """Return the copied parts of the tokens that were generated."""
    if drafter.identity != _identity(store):
        raise ParameterError(f"{store.path} has changed since these drafts were made, or is another store.")
    found = []
    for span in drafter.copied_spans(tokens):
        entry = drafter.entry_at(span.place)
        document = store.document_at(entry)
        found.append(CopiedText(span.start, span.count, document.id, document.source, entry - document.first_entry))
    return found


def describe_drafts(drafter: Drafter, store: Datastore | None, tokens: Sequence[int]) -> dict[str, Any]:
    """Return the drafts of the last text, of which these tokens were generated, as JSON types."""
    copied = [] if store is None else copied_texts(drafter, store, tokens)
    return {
        "drafted": drafter.drafted,
        "accepted": drafter.accepted,
        "sources": {
            source: {"drafted": count, "accepted": drafter.accepted_from[source]}
            for source, count in drafter.drafted_from.items()
        },
        "copied": [asdict(part) for part in copied],
    }
