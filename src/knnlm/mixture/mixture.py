"""A language model and its memories, mixed. Knows nothing about evaluation or generation, which only see this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from knnlm.datastore.store import Datastore
from knnlm.errors import ParameterError
from knnlm.lm.causal import CausalLM
from knnlm.lm.windows import WindowShape
from knnlm.memories.base import LOGITS, Context, Memory, MemoryOutput, Prediction, Source
from knnlm.memories.decoder import LMOutput
from knnlm.memories.knn import KnnMemory
from knnlm.mixture.loader import check_model, load_mixture, specs_of
from knnlm.mixture.options import DEFAULTS, MixtureOptions, SavedMixture
from knnlm.mixture.readers import ReadBatch, Readers
from knnlm.mixture.spec import MemorySpec
from knnlm.mixture.weights import (
    FixedWeights,
    GatedWeights,
    Mixed,
    Weights,
    abstain_mask,
    component_slices_of,
    equal_weights,
    mix,
)


class Mixture:
    """p = w_0·p_LM + Σ_m w_m·p_m; with one memory of neighbours, p = (1-λ)·p_LM + λ·p_kNN."""

    def __init__(
        self,
        lm: CausalLM,
        memory: Memory | Sequence[Memory],
        *,
        lmbda: float | None = None,
        weights: Weights | None = None,
        readers: Readers | None = None,
        labels: Sequence[str] | None = None,
        home: Datastore | None = None,
        folder: Path | None = None,
    ) -> None:
        self.lm = lm
        self._again: Callable[[Path, CausalLM], Mixture] | None = None
        self.memories: list[Memory] = list(memory) if isinstance(memory, Sequence) else [memory]
        if not self.memories:
            raise ParameterError("A mixture needs at least one memory.")
        self.readers = readers or Readers(lm)
        self.labels = list(labels or [one.name for one in self.memories])
        self.home = home or (self.knn.store if self.knn else None)  # whose windows are read, where choices are kept
        self.folder = folder or (self.home.path if self.home else None)  # what it was opened from
        self.weights = weights or equal_weights(self.memories, DEFAULTS["lambda"] if lmbda is None else lmbda)
        for one in self.memories:
            if isinstance(one, KnnMemory):
                check_model(one.store, self.readers.models[one.source.reader], place=one.source)
        # What is read of each position, and how many earlier keys of it are remembered.
        self.history_lengths: dict[Source, int] = {}
        for one in self.memories:
            if one.source is not None:
                self.history_lengths[one.source] = max(one.history_length, self.history_lengths.get(one.source, 0))

    @classmethod
    def open(
        cls,
        path: str | Path | Datastore,
        lm: CausalLM | None = None,
        *,
        memories: str | None = None,
        k: int | None = None,
        knn_temperature: float | None = None,
        lmbda: float | None = None,
        metric: str | None = None,
        skip: float | None = None,
        rerank: bool = True,
        device_keys: str = "float16",
        fresh: bool = False,
        written: SavedMixture | None = None,
        model: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
    ) -> Mixture:
        """Open a memory with the model it was built with, and with the settings it was tuned to.

        The memory is a folder, or a store that is open: one that has its keys on the device is searched there.
        `memories` names what is mixed, as in "knn,cache,ngram"; None is what was tuned last, or the store alone where
        nothing was or where k, τ or λ are given. What is given here is used instead of what was tuned; where neither is
        there, the defaults are. `fresh` forgets what was tuned; `written` is a mixture that was written down elsewhere.
        """
        wanted = MixtureOptions(memories, k, knn_temperature, lmbda, metric, skip, rerank, fresh, written, device_keys)
        again = partial(cls._gather, wanted, model=model, device=device, dtype=dtype)
        return again(path if isinstance(path, Datastore) else Path(path), lm)

    @classmethod
    def _gather(
        cls,
        wanted: MixtureOptions,
        memory: Path | Datastore,
        lm: CausalLM | None,
        *,
        model: str | None,
        device: str,
        dtype: str,
    ) -> Mixture:
        found = load_mixture(memory, lm, wanted, model=model, device=device, dtype=dtype)
        made = cls(
            found.readers.models[0],
            found.memories,
            weights=found.weights,
            readers=found.readers,
            labels=found.labels,
            home=found.home,
            folder=found.folder,
        )
        made._again = partial(cls._gather, wanted, model=None, device=device, dtype=dtype)
        return made

    def reopen(self) -> Mixture:
        """Open the memory as it is now, with the same model, as this mixture was opened; this one stays as it is."""
        if self._again is None or self.folder is None:
            raise ParameterError("Only a mixture that was opened from a memory can be opened again.")
        return self._again(self.folder, self.lm)

    @property
    def knn(self) -> KnnMemory | None:
        """The first memory that is a store, None where there is none."""
        for memory in self.memories:
            if isinstance(memory, KnnMemory):
                return memory
        return None

    @property
    def stale(self) -> bool:
        """Whether documents were added to or removed from a store of it since it was opened: then open it again."""
        stores = {memory.store for memory in self.memories if isinstance(memory, KnnMemory)}
        return any(store.stale for store in stores | ({self.home} if self.home is not None else set()))

    @property
    def lmbda(self) -> float | None:
        """λ: what all memories together weigh, None where that depends on the token."""
        return sum(self.weights.values[1:]) if isinstance(self.weights, FixedWeights) else None

    @lmbda.setter
    def lmbda(self, lmbda: float) -> None:
        self.weights = equal_weights(self.memories, lmbda)

    @property
    def lm_sources(self) -> list[Source]:
        """The places of the language model itself that memories read."""
        return [source for source in self.history_lengths if source.reader == 0 and source.place != LOGITS]

    @property
    def needs_history(self) -> bool:
        """Whether anything here needs more than the keys of the positions that are predicted."""
        return self.needs_tokens or any(source.reader for source in self.history_lengths)

    @property
    def needs_tokens(self) -> bool:
        """Whether anything here looks at the tokens of a text, or at earlier keys."""
        gated = isinstance(self.weights, GatedWeights)
        return gated or any(memory.source is None or memory.history_length for memory in self.memories)

    @property
    def longest(self) -> int | None:
        """The most tokens that all the models here can read at once, None where there is no end."""
        limits = [
            model.longest for model, _, _ in self.readers.wanted(self.history_lengths) if model.longest is not None
        ]
        return min(limits, default=None)

    @property
    def specs(self) -> list[MemorySpec]:
        """What these memories are opened from, written down."""
        return specs_of(self.memories, self.labels, self.lm)

    @property
    def window(self) -> WindowShape:
        """The window that the store was read with; evaluation uses the same."""
        return WindowShape(**self.home.window) if self.home else self.lm.window(min(1024, self.longest or 1024))

    @property
    def component_names(self) -> list[str]:
        """Name everything that is mixed, the language model first."""
        names = ["model"]
        for label, memory in zip(self.labels, self.memories, strict=True):
            names += [label + name.removeprefix(memory.name) for name in memory.component_names]
        return names

    @property
    def component_slices(self) -> list[slice]:
        """The parts of each memory, among all that is mixed."""
        return component_slices_of(len(memory.component_names) for memory in self.memories)

    def read(self, documents: Sequence[Sequence[int]], *, batch_tokens: int = 1024) -> Iterator[ReadBatch]:
        """Read documents with all the models that are needed, in the windows that the store was read with."""
        return self.readers.read(documents, self.window, self.history_lengths, batch_tokens=batch_tokens)

    def ask(self, logits: Tensor, context: Context) -> tuple[Context, LMOutput, list[MemoryOutput]]:
        """Ask the language model and every memory; searches may be left out where the weights say so."""
        lm = LMOutput(logits)
        answers: list[MemoryOutput | None] = [
            None if isinstance(memory, KnnMemory) else memory.predict(context) for memory in self.memories
        ]
        search_mask = self.weights.search_mask(context, lm, answers)
        context = replace(context, search_mask=search_mask)
        complete = [
            memory.predict(context) if answer is None else answer
            for memory, answer in zip(self.memories, answers, strict=True)
        ]
        return context, lm, complete

    def mix(self, context: Context, lm: LMOutput, answers: Sequence[MemoryOutput]) -> Mixed:
        """Weigh what was answered."""
        parts = [*lm.components, *(part for answer in answers for part in answer.components)]
        abstains = abstain_mask(parts)  # (N, M)
        return Mixed(parts, self.weights.weigh(context, lm, answers, abstains), abstains)

    def predict(self, logits: Tensor, context: Context, *, every: bool = True) -> Mixed:
        """Mix what the model says, (N, V) logits, with what the memories say.

        Not `every` memory need be asked where only the mixture is looked at, and not its parts: then those that weigh
        nothing anywhere are left out, and nothing is searched for them.
        """
        if every or not isinstance(self.weights, FixedWeights) or all(self.weights.values[1:]):
            return self.mix(*self.ask(logits, context))
        values = self.weights.values
        parts: list[Prediction] = [*LMOutput(logits).components]
        heard = [values[0]]
        for memory, span in zip(self.memories, self.component_slices, strict=True):
            if any(values[span]):
                parts += memory.predict(context).components
                heard += values[span]
        return mix(parts, heard)
