"""The mixture of a language model and its memories: all that evaluation, generation and the server see."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from knnlm.corpus import Document, DocumentReader
from knnlm.datastore.store import Datastore
from knnlm.errors import ParameterError, ShardChanged
from knnlm.index.base import remote_status
from knnlm.lm.causal import CausalLM
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.lm.windows import WindowShape
from knnlm.memories.automaton import Automaton
from knnlm.memories.base import (
    LM_LOGITS,
    LOGITS,
    Context,
    Memory,
    MemoryOutput,
    Prediction,
    Source,
    SourceTokens,
)
from knnlm.memories.cache import CacheMemory
from knnlm.memories.decoder import LMOutput
from knnlm.memories.knn import KnnMemory
from knnlm.memories.ngram_cache import NgramCacheMemory
from knnlm.memories.subset import PairSubsetIndex
from knnlm.memories.voting import NeighbourMemory, RetrievedNeighbours, VoteOutput, VoteParams, searches
from knnlm.mixture.layer import OnlineLayer, PositionInputs, SpanTexts
from knnlm.mixture.loader import LoadedMixture, check_model, load_mixture, specs_of
from knnlm.mixture.online import OnlineConfig
from knnlm.mixture.readers import ReadBatch, Readers
from knnlm.mixture.source_domain import SourceDomain, SourceRouter
from knnlm.mixture.spec import DEFAULTS, MemorySpec, MixtureOptions, MixtureRequest, SavedMixture
from knnlm.mixture.support import SupportModel
from knnlm.mixture.weights import (
    FixedWeights,
    GatedWeights,
    MixturePrediction,
    Weights,
    abstain_mask,
    component_log_probs,
    component_slices_of,
    equal_weights,
    multiply_end_odds,
)
from knnlm.progress import Progress, silent

if TYPE_CHECKING:
    from knnlm.evaluation.evaluate import Evaluation
    from knnlm.evaluation.explain import TokenExplanation
    from knnlm.evaluation.quality import TranslationQuality
    from knnlm.evaluation.support import SupportFigures
    from knnlm.evaluation.trace import Trace
    from knnlm.evaluation.tune import Tuning
    from knnlm.generation.seq2seq import TranslatedText

MAX_REPEATS = 3  # of an answer whose store changes meanwhile

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Retrieved:
    """The neighbours of N positions that one search found for every memory of a mixture that is expensive."""

    neighbours: Sequence[RetrievedNeighbours | None]  # for each memory; None: it has not been searched
    search_mask: Tensor | None = None  # (N,) False where the weights skipped the search; None: nowhere

    def select(self, rows: Tensor) -> Retrieved:
        """Return what was retrieved for some positions, (n,) → n positions."""
        neighbours = [None if each is None else each.select(rows) for each in self.neighbours]
        return Retrieved(neighbours, None if self.search_mask is None else self.search_mask[rows])

    def nearest(self, k: int) -> Retrieved:
        """Return at most the k nearest neighbours of each position."""
        return replace(self, neighbours=[None if each is None else each.nearest(k) for each in self.neighbours])

    def only(self, memories: Sequence[int]) -> Retrieved:
        """Return what was retrieved for some of the memories, in this order."""
        return replace(self, neighbours=[self.neighbours[number] for number in memories])


@dataclass(frozen=True)
class ComponentOutputs:
    """The predictions of every component at N positions, and what their weights are computed from."""

    components: Sequence[Prediction]  # the first one is the language model's
    given: PositionInputs
    outputs: Sequence[MemoryOutput]  # of each memory
    search_mask: Tensor | None  # (N,) False where a search was skipped; None: nowhere
    lm: MemoryOutput
    stores: Sequence[int]  # the numbers of the memories that search a store

    def log_probs(self, targets: Tensor) -> Tensor:
        """Return the (N, M) log-probabilities of one token per row by each component."""
        return component_log_probs(self.components, targets)

    @property
    def searched(self) -> Tensor | None:
        """The (N,) shares of the stores that were searched for each position; None: there is no store."""
        shares = []
        for output in (self.outputs[number] for number in self.stores):
            followed = output.neighbours.followed if isinstance(output, VoteOutput) else None
            every = torch.ones(len(self.given.abstains)) if self.search_mask is None else self.search_mask
            shares.append((every if followed is None else followed.searched).float().cpu())
        return torch.stack(shares).mean(0) if shares else None

    def mixed(
        self, weights: Tensor, states: Tensor | None = None, by_expert: Tensor | None = None
    ) -> MixturePrediction:
        """Return their sum with these (N, M) weights."""
        return MixturePrediction(
            self.components,
            weights,
            self.given.abstains,
            self.outputs,
            self.search_mask,
            states,
            by_expert,
            self.lm,
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
        online: OnlineConfig | None = None,
        domain_check: bool = True,
        damping: bool = True,
        support: SupportModel | None = None,
        source_domain: SourceDomain | None = None,
        end_odds: float = 1.0,
        readers: Readers | None = None,
        labels: Sequence[str] | None = None,
        store: Datastore | None = None,
        path: Path | None = None,
    ) -> None:
        self.lm = lm
        self._request: MixtureRequest | None = None
        self._repeats = True  # whether `answer` repeats an action
        self._layer: OnlineLayer | None = None  # of the present weights
        self.memories: list[Memory] = list(memory) if isinstance(memory, Sequence) else [memory]
        if not self.memories:
            raise ParameterError("A mixture needs at least one memory.")
        self.readers = readers or Readers(lm)
        self.labels = list(labels or [each.name for each in self.memories])
        self.store = store or (self.knn.store if self.knn else None)  # its windows are read, its catalog keeps tuning
        self.path = path or (self.store.path if self.store else None)  # that it was opened from
        self.weights = weights or equal_weights(self.memories, DEFAULTS["lambda"] if lmbda is None else lmbda)
        self.online = online  # None: without online weights
        self.damping = damping  # in generation with online weights, of memories that repeat what was generated
        self.support = support  # of tokens; None: not tuned, or with other weights than the tuned ones
        self.source_domain = source_domain  # of pairs; None: sources of all domains are translated with the memories
        self.end_odds = end_odds  # factor of the odds of the end token, in translations with the memories
        # Where there is a router, each source is translated with one of the stores, by the mixture of it alone.
        self.by_store: list[Mixture] = []
        self.router: SourceRouter | None = None
        self.domain_check = domain_check
        for each in self.memories:
            if isinstance(each, KnnMemory):
                check_model(each.store, self.readers.models[each.source.reader], place=each.source)
        # What is read at each position, and how many earlier positions' keys are kept.
        self.history_lengths: dict[Source, int] = {}
        for each in self.memories:
            if each.source is not None:
                self.history_lengths[each.source] = max(each.history_length, self.history_lengths.get(each.source, 0))
        self.readers.share(self.history_lengths)

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
        use_tuned: bool = True,
        options: MixtureOptions | None = None,
    ) -> Mixture:
        """Open a store with the model it was built with and the settings it was tuned to.

        The path is a folder, or an open store: one whose keys are on a device is searched there. `memories` names the
        components, as in "knn,cache,ngram"; None: those that were tuned last, or the store alone if nothing was tuned
        or k, τ or λ are given. Arguments take precedence over tuned settings, which take precedence over the defaults.
        """
        request = MixtureRequest(memories, k, knn_temperature, lmbda, use_tuned, options or MixtureOptions())
        return cls._load(path if isinstance(path, Datastore) else Path(path), lm, request)

    @classmethod
    def open_saved(cls, path: Path, lm: CausalLM, saved: SavedMixture) -> Mixture:
        """Open a store with the memories and weights that were saved with a model, instead of its own."""
        return cls._load(path, lm, MixtureRequest(options=saved.options, saved=saved))

    @classmethod
    def _load(
        cls, path: Path | Datastore, lm: CausalLM | None, request: MixtureRequest, before: Mixture | None = None
    ) -> Mixture:
        for repeats in range(MAX_REPEATS, -1, -1):
            try:
                loaded = load_mixture(path, lm, request, () if before is None else before.memories)
                break
            except ShardChanged:  # between the opening of the store here and that of the shard on Ray
                if not repeats or isinstance(path, Datastore):
                    raise
        mixture = cls._of(loaded, request)
        mixture._request = request
        if loaded.by_store:
            by_store = [cls._of(own, request) for own in loaded.by_store]
            mixture._route(by_store, None if before is None else before.router)
        return mixture

    def _route(self, by_store: list[Mixture], router: SourceRouter | None) -> None:
        """Translate each source with one of these mixtures; the router of a former state is kept if it fits."""
        assert isinstance(self.lm, Seq2SeqLM)
        stores = [own.store for own in by_store if own.store is not None]
        self.by_store = by_store
        self.router = router if router is not None and router.fits(stores) else SourceRouter.fit(self.lm, stores)

    @classmethod
    def _of(cls, loaded: LoadedMixture, request: MixtureRequest) -> Mixture:
        return cls(
            loaded.readers.models[0],
            loaded.memories,
            weights=loaded.weights,
            online=loaded.online,
            domain_check=request.options.domain_check and request.options.online,
            damping=request.options.damping and request.options.online,
            support=loaded.support,
            source_domain=loaded.source_domain,
            end_odds=loaded.end_odds,
            readers=loaded.readers,
            labels=loaded.labels,
            store=loaded.store,
            path=loaded.path,
        )

    def reopen(self) -> Mixture:
        """Open the store in its present state, with the same model and arguments; this mixture stays as it is."""
        if self._request is None or self.path is None:
            raise ParameterError("Only a mixture that was opened from a store can be opened again.")
        return self._load(self.path, self.lm, self._request, self)

    def answer(
        self, action: Callable[[Mixture, Iterable[Document]], _Result], documents: Iterable[Document] = ()
    ) -> _Result:
        """Return the result of an action, all of it from one state of the store.

        Where a shard on Ray has changed and no process has its former state any more, the action is repeated with the
        reopened store; this mixture stays as it is. Documents that can be read only once are not read again.
        """
        indexes = [memory.index for memory in self.memories if isinstance(memory, KnnMemory)]
        if not self._repeats or self._request is None or all(remote_status(index) is None for index in indexes):
            return action(self, documents)
        mixture, again = self, _opener(documents)
        for repeats in range(MAX_REPEATS, -1, -1):
            # An action within the action is not repeated alone.
            own = copy.copy(mixture)
            own._repeats = False
            try:
                return action(own, documents)
            except ShardChanged:
                if not repeats or again is None:
                    raise
                mixture, documents = self._reopened_alike(), again()
        raise AssertionError

    def _reopened_alike(self) -> Mixture:
        """Open the store in its present state, with the settings that this mixture has now."""
        after = self.reopen()
        if after.labels != self.labels:
            raise ShardChanged(f"{self.path} was changed, and has other memories now. Open it again.")
        if self.router is None:
            after.by_store, after.router = [], None
        for name in ("weights", "online", "domain_check", "damping", "support", "source_domain", "end_odds"):
            setattr(after, name, getattr(self, name))
        for new, old in zip(after.memories, self.memories, strict=True):
            if isinstance(new, NeighbourMemory) and isinstance(old, NeighbourMemory):
                new.settings = old.settings
        return after

    @property
    def domain_check(self) -> bool:
        """Whether generation checks the domain of a prompt or a source; see `restrict_to_domain`, `outside_domain`."""
        return self._domain_check

    @domain_check.setter
    def domain_check(self, check: bool) -> None:
        self._domain_check = check
        self.by_store = [copy.copy(own) for own in self.by_store]  # which other mixtures may have too
        for own in self.by_store:
            own.domain_check = check

    @property
    def knn(self) -> KnnMemory | None:
        """The first memory of the kind knn; None if there is none."""
        for memory in self.memories:
            if isinstance(memory, KnnMemory):
                return memory
        return None

    @property
    def stale(self) -> bool:
        """Whether documents were added to or removed from one of its stores since it was opened; see `reopen`."""
        return any(store.stale for store in self.stores)

    @property
    def stores(self) -> list[Datastore]:
        """The main store, if there is one, and those of other memories."""
        own = [memory.store for memory in self.memories if isinstance(memory, KnnMemory)]
        return list(dict.fromkeys([*([] if self.store is None else [self.store]), *own]))

    @property
    def lmbda(self) -> float | None:
        """λ, the sum of the memories' weights; None if it depends on the token."""
        if self.router is not None or not isinstance(self.weights, FixedWeights):
            return None
        return sum(self.weights.values[1:])

    @lmbda.setter
    def lmbda(self, lmbda: float) -> None:
        self.weights, self.online = equal_weights(self.memories, lmbda), None
        self.support = self.source_domain = self.router = None
        self.end_odds = 1.0

    @property
    def weights_kind(self) -> str:
        """The kind of the weights; of several stores that translate sources of their own, all that differ."""
        every = [self] if self.router is None else self.by_store
        return ", ".join(dict.fromkeys(own.weights.kind for own in every))

    @property
    def has_support(self) -> bool:
        """Whether the support of tokens is known."""
        every = [self] if self.router is None else self.by_store
        return all(own.support is not None for own in every)

    @property
    def lm_sources(self) -> list[Source]:
        """The places of the language model that memories read."""
        return [source for source in self.history_lengths if source.reader == 0 and source.place != LOGITS]

    @property
    def damps(self) -> bool:
        """Whether generation damps memories that repeat what was generated; see `knnlm.mixture.repetition`."""
        return self.damping and self.layer.stateful

    @property
    def needs_history(self) -> bool:
        """Whether a component needs more than the keys of the predicted positions."""
        return self.needs_tokens or self.reads_other_models

    @property
    def reads_other_models(self) -> bool:
        """Whether a component needs the states of another model than the language model."""
        return any(source.reader for source in self.history_lengths)

    @property
    def needs_sources(self) -> bool:
        """Whether a memory searches only the pairs whose sources are nearest to that of a text."""
        return any(isinstance(memory, KnnMemory) and memory.needs_sources for memory in self.memories)

    @property
    def needs_texts(self) -> bool:
        """Whether a component or the weights need all tokens of the text, or earlier keys."""
        return self.layer.stateful or self.memories_need_texts

    @property
    def memories_need_texts(self) -> bool:
        """Whether a memory needs all tokens of the text, or earlier keys."""
        return bool(self.automata) or any(memory.source is None or memory.history_length for memory in self.memories)

    @property
    def automata(self) -> dict[int, Automaton]:
        """The automata of memories that follow entries instead of searching, by the numbers of the memories."""
        every = ((n, memory.automaton) for n, memory in enumerate(self.memories) if isinstance(memory, KnnMemory))
        return {number: automaton for number, automaton in every if automaton is not None}

    @property
    def needs_positions(self) -> bool:
        """Whether the gate needs the position in the text and the last token."""
        return isinstance(self.weights, GatedWeights)

    @property
    def needs_tokens(self) -> bool:
        """Whether a component or the weights need tokens of the text, or earlier keys."""
        return self.needs_texts or self.needs_positions

    @property
    def layer(self) -> OnlineLayer:
        """The weights, and how the tokens of a text change them."""
        layer = self._layer
        if layer is None or layer.weights is not self.weights or layer.config is not self.online:
            kinds = tuple(memory.name for memory in self.memories)
            layer = OnlineLayer(self.weights, self.online, kinds, tuple(self.component_slices))
            self._layer = layer
        return layer

    @property
    def max_length(self) -> int | None:
        """The largest number of tokens that all models can read at once; None: no limit."""
        limits = [
            model.max_length
            for _, model, _, _ in self.readers.wanted(self.history_lengths)
            if model.max_length is not None
        ]
        return min(limits, default=None)

    @property
    def specs(self) -> list[MemorySpec]:
        """The specs that these memories can be opened from."""
        return specs_of(self.memories, self.labels, self.lm)

    @property
    def options(self) -> MixtureOptions:
        """The options that this mixture can be opened with, also where it was changed after it was opened."""
        given = MixtureOptions() if self._request is None else self._request.options
        indexes = [memory.index for memory in self.memories if isinstance(memory, KnnMemory)]
        return replace(
            given,
            domain_check=self.domain_check,
            damping=self.damping,
            cache_generated=any(
                own.generated for own in self.memories if isinstance(own, CacheMemory | NgramCacheMemory)
            ),
            subset=next((index.sentences for index in indexes if isinstance(index, PairSubsetIndex)), None),
            automaton=next((automaton.params for automaton in self.automata.values()), None),
        )

    @property
    def window(self) -> WindowShape:
        """The window that the store was built with; evaluation uses the same."""
        return WindowShape(**self.store.window) if self.store else self.lm.window(min(1024, self.max_length or 1024))

    @property
    def component_names(self) -> list[str]:
        """The names of all components, the language model first."""
        names = ["model"]
        for label, memory in zip(self.labels, self.memories, strict=True):
            names += [label + name.removeprefix(memory.name) for name in memory.component_names]
        return names

    @property
    def component_slices(self) -> list[slice]:
        """The components of each memory, among all components."""
        return component_slices_of(len(memory.component_names) for memory in self.memories)

    def read(self, documents: Sequence[Sequence[int]], *, batch_tokens: int = 1024) -> Iterator[ReadBatch]:
        """Read documents with all models that are needed, in the windows that the store was built with."""
        return self.readers.read(documents, self.window, self.history_lengths, batch_tokens=batch_tokens)

    def retrieve(self, context: Context, ks: Sequence[int | Sequence[int] | None] | None = None) -> Retrieved:
        """Search once for all positions, with every memory that is expensive.

        Without `ks`, each memory searches for as many neighbours as its settings need, where the weights need them;
        only weights that skip searches look at the logits for that. `ks` has one entry for each memory: how many
        neighbours are searched for everywhere, or one number for each position, 0: no search.
        """
        if ks is None and self.weights.skips_searches:
            lm = LMOutput(context.states[LM_LOGITS])
            context = replace(context, search_mask=self.weights.search_mask(context, lm, self._cheap_outputs(context)))
        return self._search(context, [None] * len(self.memories) if ks is None else ks)

    def predict(
        self,
        context: Context,
        retrieved: Retrieved | None = None,
        *,
        lm: MemoryOutput | None = None,
        all_components: bool = True,
    ) -> MixturePrediction:
        """Mix the language model's distribution with those of the memories.

        The context holds the (N, V) logits as LM_LOGITS; `lm` stands for them where they were not kept. What was not
        retrieved is searched for. Without `all_components`, memories whose weight is 0 everywhere are left out, and
        nothing is searched for them. Tokens of the context's spans change the weights of later positions, if the
        mixture has online weights.
        """
        if lm is None:
            lm = LMOutput(context.states[LM_LOGITS])
        layer = self.layer
        leave_out = not all_components and not layer.stateful
        if leave_out and isinstance(self.weights, FixedWeights) and not all(self.weights.values[1:]):
            return self._predict_weighted(context, retrieved, lm, self.weights.values)
        found = self.predict_components(context, retrieved, lm=lm)
        given = found.given
        if not layer.stateful:
            return found.mixed(self.weights.compute(given.inputs, given.abstains))
        spans, device = context.spans, given.abstains.device
        texts = SpanTexts.of(spans)
        if texts.has_evidence:
            states, by_expert = layer.span_states(texts, given, found.log_probs(texts.next_tokens(device)))
        else:
            states = layer.given_states(spans, len(given.abstains), device)
            by_expert = layer.by_expert(states, given)
        return found.mixed(layer.mixed(states, by_expert), states, by_expert)

    def restrict_to_domain(self, mixed: MixturePrediction, rows: Tensor | None = None) -> MixturePrediction:
        """Return a prediction of generated tokens: the language model's alone where the text is not in the domain.

        The (N,) rows are those to check; None: all. Where weights do not depend on the text, nothing is checked.
        """
        if mixed.states is None or not self.domain_check:
            return mixed
        outside = ~self.layer.in_domain(mixed.states)
        return mixed.without_memories(outside if rows is None else outside & rows)

    def generation_log_probs(self, mixed: MixturePrediction, outside: Tensor | None = None) -> Tensor:
        """Return the (N, V) log-probabilities that the next generated tokens are chosen by.

        The (N,) positions `outside` are those of sources outside the domain of the store: the language model alone
        predicts them. In translations with the memories, the odds of the end token are multiplied.
        """
        log_probs = (mixed if outside is None else mixed.without_memories(outside)).log_probs()
        if self.end_odds == 1 or not isinstance(self.lm, Seq2SeqLM):
            return log_probs
        rows = None if outside is None else ~outside
        return multiply_end_odds(log_probs, self.lm.end_tokens[-1], self.end_odds, rows)

    def set_weights(self, weights: Weights, settings: Sequence[Sequence[VoteParams]]) -> None:
        """Set weights that were fitted to these settings, one sequence for each memory; odds of the end become 1."""
        for memory, own in zip(self.memories, settings, strict=True):
            if isinstance(memory, NeighbourMemory):
                memory.settings = tuple(own)
        self.weights, self.end_odds, self.router = weights, 1.0, None

    @property
    def checks_sources(self) -> bool:
        """Whether translation depends on the domain of the source."""
        return self.source_domain is not None and self.domain_check

    def route_sources(self, tokens: Sequence[SourceTokens]) -> list[Mixture]:
        """Return the mixture that translates each source: of several stores, that of the one it is most like.

        Stores that contain the source come before others: its translation was added on purpose.
        """
        if self.router is None or not tokens:
            return [self] * len(tokens)
        scores = self.router.scores(tokens)  # (N, S)
        contained = torch.tensor([own._contain_sources(tokens) for own in self.by_store]).T
        scores = scores.masked_fill(contained.any(1, keepdim=True) & ~contained, -torch.inf)
        return [self.by_store[place] for place in scores.argmax(1).tolist()]

    def with_stores(self, by_store: Mapping[int, Mixture]) -> Mixture:
        """Return a copy that translates each source with one of these mixtures, by the places of their stores."""
        assert self.router is not None
        own = copy.copy(self)
        own.router, own.by_store = self.router.select(list(by_store)), list(by_store.values())
        return own

    def outside_domain(self, states: Tensor, tokens: Sequence[SourceTokens] | None) -> Tensor:
        """Mark the (B,) sources outside the domain of a store, by (B, D) mean encoder states and tokens, if known.

        A source that the store contains is inside, whatever it is like: its translation was added on purpose.
        """
        if self.source_domain is None or not self.domain_check:
            return torch.zeros(len(states), dtype=torch.bool, device=states.device)
        outside = ~self.source_domain.in_domain(states, tokens)
        marked = outside.nonzero()[:, 0].tolist()
        if tokens is not None and marked:
            contained = self._contain_sources([tokens[row] for row in marked])
            outside[[row for row, own in zip(marked, contained, strict=True) if own]] = False
        return outside

    def _contain_sources(self, tokens: Sequence[SourceTokens]) -> list[bool]:
        """Return whether one of the stores contains each source; not where its tokens do not tell all of its text."""
        assert isinstance(self.lm, Seq2SeqLM)
        tokenizer: Any = self.lm.tokenizer
        longest, unknown = self.lm.max_source_length or math.inf, tokenizer.unk_token_id
        whole = [len(row) < longest and unknown not in row for row in tokens]
        texts = tokenizer.batch_decode([list(row) for row in tokens], skip_special_tokens=True) if tokens else []
        found = [store.catalog.contains_sources(texts) for store in self.stores]
        return [own and any(each) for own, each in zip(whole, zip(*found, strict=True), strict=True)]

    def predict_components(
        self, context: Context, retrieved: Retrieved | None = None, *, lm: MemoryOutput | None = None
    ) -> ComponentOutputs:
        """Return the predictions of every component, and what their weights are computed from; see `predict`."""
        if lm is None:
            lm = LMOutput(context.states[LM_LOGITS])
        cheap = self._cheap_outputs(context)
        if retrieved is None or retrieved.search_mask is None:
            context = replace(context, search_mask=self.weights.search_mask(context, lm, cheap))
        else:
            context = replace(context, search_mask=retrieved.search_mask)
        outputs = [
            self._output(number, context, retrieved) if output is None else output
            for number, output in enumerate(cheap)
        ]
        components = [*lm.components, *(component for output in outputs for component in output.components)]
        given = PositionInputs(self.weights.inputs(context, lm, outputs), abstain_mask(components))
        stores = [number for number, memory in enumerate(self.memories) if searches(memory)]
        return ComponentOutputs(components, given, outputs, context.search_mask, lm, stores)

    # The methods below forward to higher packages, which are imported when they are called.

    def evaluate(
        self,
        documents: Iterable[Document],
        *,
        limit: int | None = None,
        batch_tokens: int | None = None,
        read_ahead: bool = False,
        progress: Progress = silent,
    ) -> Evaluation:
        """Return the perplexity of documents with the language model alone and with the mixture.

        `limit` stops after the document that reaches so many tokens. `read_ahead` runs the model while a search runs.
        """
        from knnlm.evaluation.evaluate import evaluate

        options: dict[str, Any] = {"batch_tokens": batch_tokens, "read_ahead": read_ahead, "progress": progress}
        return self.answer(lambda mixture, read: evaluate(mixture, read, limit=limit, **options), documents)

    def measure_support(
        self, documents: Iterable[Document], *, limit: int | None = None, progress: Progress = silent
    ) -> SupportFigures:
        """Return how well the support of tokens predicts which of the mixture's most probable tokens are right."""
        from knnlm.evaluation.support import measure_support

        return self.answer(
            lambda mixture, read: measure_support(mixture, read, limit=limit, progress=progress), documents
        )

    def measure_quality(
        self, pairs: Iterable[Document], *, limit: int | None = None, progress: Progress = silent, **settings: Any
    ) -> TranslationQuality:
        """Return BLEU and chrF of the translations of pairs' sources, by the model alone and by the mixture."""
        from knnlm.evaluation.quality import measure_quality

        return self.answer(
            lambda mixture, read: measure_quality(mixture, read, limit=limit, progress=progress, **settings), pairs
        )

    def tune(
        self,
        documents: Iterable[Document],
        *,
        weights: str = "gated",
        ks: Sequence[int] | None = None,
        knn_temperatures: Sequence[float] | None = None,
        lambdas: Sequence[float] | None = None,
        online: bool = True,
        samples: int | None = None,
        other: Iterable[Document] = (),
        quality: int = 0,
        sources: Sequence[str] = (),
        limit: int | None = None,
        batch_tokens: int | None = None,
        progress: Progress = silent,
    ) -> Tuning:
        """Choose settings and weights on held-out documents, save them in the store and apply them to this mixture.

        `weights` is fixed, fitted, buckets or gated. `ks`, `knn_temperatures` and `lambdas` are the values to try.
        `online` adds online weights, which return to the language model in a text that the memories predict worse; a
        gate is then trained also on `samples` tokens that the model writes, by default as many as the documents have,
        and on `other` documents, which should be predicted as by the model alone. Of an encoder-decoder model, the
        weight of the memories and, of other than fixed weights, the odds of the end token are then chosen by the BLEU
        of `quality` translations; 0: as fitted.
        """
        from knnlm.evaluation.sweep import Grid
        from knnlm.evaluation.tune import tune

        grid = Grid.of(ks, knn_temperatures, lambdas)
        reading: dict[str, Any] = {"limit": limit, "batch_tokens": batch_tokens, "progress": progress}
        chosen: dict[str, Any] = {"weights": weights, "grid": grid, "online": online, "samples": samples}
        chosen |= {"other": other, "quality": quality}
        return tune(self, documents, sources=sources, **chosen, **reading)

    def record(
        self,
        documents: Iterable[Document],
        path: str | Path,
        *,
        k: int | None = None,
        sources: Sequence[str] = (),
        limit: int | None = None,
        batch_tokens: int | None = None,
        progress: Progress = silent,
    ) -> Trace:
        """Read documents once, and write the output of every memory to a new folder, from which settings are tuned."""
        from knnlm.evaluation.trace import record

        reading: dict[str, Any] = {"limit": limit, "batch_tokens": batch_tokens, "progress": progress}
        return self.answer(
            lambda mixture, read: record(mixture, read, path, k=k, sources=sources, **reading), documents
        )

    def explain(self, text: str, *, source: str | None = None, top: int = 3) -> list[TokenExplanation]:
        """Return the probability of every token of a text, and the `top` nearest neighbours of each memory.

        `source` is the source of a pair, of which the text is the target.
        """
        from knnlm.evaluation.explain import explain

        return self.answer(lambda mixture, _: explain(mixture, text, source=source, top=top))

    def generate(self, prompt: str, *, max_new_tokens: int = 60, seed: int | None = None, **settings: Any) -> str:
        """Return the continuation of a prompt; settings are those of transformers' `generate`."""
        from knnlm.generation.causal import generate_text

        settings |= {"max_new_tokens": max_new_tokens, "seed": seed}
        return self.answer(lambda mixture, _: generate_text(mixture, prompt, **settings))

    def translate(
        self, sources: Sequence[str], *, max_new_tokens: int = 256, seed: int | None = None, **settings: Any
    ) -> list[str]:
        """Return the translations of texts by an encoder-decoder model; settings are those of `generate`.

        `progress` counts the texts.
        """
        settings |= {"max_new_tokens": max_new_tokens, "seed": seed}
        return [each.text for each in self.translate_each(sources, **settings)]

    def translate_each(self, sources: Sequence[str], **settings: Any) -> list[TranslatedText]:
        """Return the translations of texts with the stores that each was made with; see `translate`."""
        from knnlm.generation.seq2seq import translate_each

        return self.answer(lambda mixture, _: translate_each(mixture, sources, **settings))

    def _predict_weighted(
        self, context: Context, retrieved: Retrieved | None, lm: MemoryOutput, weights: Sequence[float]
    ) -> MixturePrediction:
        """Mix only the memories that have a weight."""
        components, used = [*lm.components], [weights[0]]
        for number, own in enumerate(self.component_slices):
            if any(weights[own]):
                components += self._output(number, context, retrieved).components
                used += weights[own]
        return MixturePrediction.from_fixed(components, used)

    def _cheap_outputs(self, context: Context) -> list[MemoryOutput | None]:
        """Return the outputs of the memories that need no search, None for the others."""
        return [None if memory.expensive else memory.predict(context) for memory in self.memories]

    def _search(self, context: Context, ks: Sequence[int | Sequence[int] | None]) -> Retrieved:
        neighbours = [
            memory.retrieve(context, k) if searches(memory) else None
            for memory, k in zip(self.memories, ks, strict=True)
        ]
        return Retrieved(neighbours, context.search_mask)

    def _output(self, number: int, context: Context, retrieved: Retrieved | None) -> MemoryOutput:
        """Return the output of one memory, from what was retrieved for it if anything was."""
        memory = self.memories[number]
        neighbours = None if retrieved is None else retrieved.neighbours[number]
        if neighbours is None or not searches(memory):
            return memory.predict(context)
        mask = context.search_mask
        return memory.output(neighbours if mask is None else neighbours.masked(mask))


def group_rows(mixtures: Sequence[Mixture]) -> list[tuple[Mixture, list[int]]]:
    """Return each of the mixtures of some rows, with the numbers of its rows."""
    rows: dict[int, list[int]] = {}
    for row, mixture in enumerate(mixtures):
        rows.setdefault(id(mixture), []).append(row)
    return [(mixtures[own[0]], own) for own in rows.values()]


def _opener(documents: Iterable[Document]) -> Callable[[], Iterable[Document]] | None:
    """Return a function that returns the same documents once more; None where they can be read only once."""
    if isinstance(documents, DocumentReader):
        return documents.again
    return None if isinstance(documents, Iterator) else lambda: documents
