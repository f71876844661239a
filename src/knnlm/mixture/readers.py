"""The models that a mixture needs, and one forward pass of each over texts.

The language model is reader 0. Stores whose keys come from another model, and decoders, have readers of their own;
memories with the same reader share its pass. A reader whose first blocks are those of the language model, because only
its last ones were trained, shares these, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from knnlm.errors import ModelMismatch, ParameterError
from knnlm.lm.causal import CausalLM, scored_targets
from knnlm.lm.fingerprint import identity_difference, token_fields
from knnlm.lm.key_layers import KeyLayer
from knnlm.lm.shared import BLOCK_INPUT, TopLM, block_input, share_blocks, share_tensors
from knnlm.lm.windows import Window, WindowShape, batches, windows
from knnlm.memories.base import LM_LOGITS, LOGITS, Context, Source, SourceTokens, Span


@dataclass(frozen=True)
class ReadBatch:
    """Positions of some documents: their targets, and the context that memories predict from."""

    rows: Tensor  # (N,) numbers of the targets, counted over all documents of the call
    targets: Tensor  # (N,)
    context: Context

    @property
    def logits(self) -> Tensor:
        """The (N, V) logits of the language model."""
        return self.context.states[LM_LOGITS]


class Reading(NamedTuple):
    """A model that is needed, and what is needed of it."""

    number: int  # of the reader
    model: CausalLM  # the reader, or its last blocks
    places: list[Source]  # whose states are needed
    logits: bool  # whether its logits are needed


class Readers:
    """The language model, other models with the same tokenizer, and their key layers."""

    def __init__(self, lm: CausalLM) -> None:
        self.models = [lm]  # whole
        self.tops: dict[int, TopLM | None] = {}  # last blocks by the reader's number; None: they cannot be separated
        self.layers: dict[tuple[CausalLM, Source], KeyLayer] = {}

    def add(self, model: CausalLM) -> int:
        """Add a model with the language model's tokenizer, and return its number; an equal model is added once."""
        if (number := self.find(model.identity)) is not None:
            return number
        lm = self.models[0]
        for what in token_fields(model.identity, lm.identity):
            if model.identity[what] != lm.identity[what]:
                raise ModelMismatch(
                    f"{model.name} has another tokenizer or vocabulary ({what.replace('_', ' ')} "
                    f"{model.identity[what]}) than {lm.name} ({lm.identity[what]}), so they cannot be mixed. "
                    "Use a model with the same tokenizer and vocabulary."
                )
        own, limit = model.max_source_length, lm.max_source_length
        if own is not None and (limit is None or own < limit):
            raise ModelMismatch(
                f"{model.name} reads sources of at most {own:,} tokens, but {lm.name} reads longer ones, so they "
                "cannot be mixed. Use a model that reads sources of the same length."
            )
        self.models.append(model)
        return len(self.models) - 1

    def find(self, identity: Mapping[str, Any]) -> int | None:
        """Return the number of the model that a store was built with; None if it has not been added."""
        models = enumerate(self.models)
        return next((number for number, model in models if identity_difference(identity, model.identity) is None), None)

    def layer(self, source: Source, model: CausalLM | None = None) -> KeyLayer:
        """Return the key layer that a source names, in the whole model or in the given last blocks of it."""
        model = self.models[source.reader] if model is None else model
        if (model, source) not in self.layers:
            if source.place == BLOCK_INPUT:
                self.layers[model, source] = block_input(model, source.layer)
            else:
                self.layers[model, source] = model.find_layer(source.place, source.layer)
        return self.layers[model, source]

    def share(self, sources: Iterable[Source]) -> None:
        """Let models that have the first blocks of the language model read its states instead of computing them again.

        `sources` are those whose states are needed. Whether a model can be split is tried once. The whole model is
        kept, with the tensors of the language model, for mixtures that need states of its first blocks.
        """
        for number, model, places, _ in self.wanted(sources):
            if number == 0 or number in self.tops:
                continue
            layers = [source.layer % model.key_layer.layers for source in places]
            top = share_blocks(self.models[0], model, min(layers, default=None))
            self.tops[number] = None
            if isinstance(top, TopLM) and top is not model:
                self.tops[number], self.models[number] = top, share_tensors(self.models[0], model)

    def trunks(self, sources: Iterable[Source]) -> list[Source]:
        """Return the places of the language model whose states the last blocks of other models read."""
        models = [reading.model for reading in self.wanted(sources)]
        return [trunk_of(model) for model in models if isinstance(model, TopLM)]

    def wanted(self, sources: Iterable[Source]) -> list[Reading]:
        """Return each model that is needed with its sources, and whether its logits are needed."""
        sources = list(sources)
        needed = []
        for number in range(len(self.models)):
            own = [source for source in sources if source.reader == number]
            places = [source for source in own if source.place != LOGITS]
            if number == 0 or own:
                logits = number == 0 or len(places) < len(own)
                needed.append(Reading(number, self._part(number, places), places, logits))
        return needed

    def _part(self, number: int, places: Sequence[Source]) -> CausalLM:
        """Return the last blocks of a model if they suffice for some places, else the whole model."""
        whole, top = self.models[number], self.tops.get(number)
        # The states of a language model in training have its dropout, which a memory must not read.
        if top is None or self.models[0].model.training:
            return whole
        return top if all(place.layer % top.key_layer.layers >= top.first for place in places) else whole

    def read(
        self,
        documents: Sequence[Sequence[int]],
        shape: WindowShape,
        history_lengths: Mapping[Source, int],
        *,
        batch_tokens: int,
    ) -> Iterator[ReadBatch]:
        """Read documents in windows; `history_lengths` has the number of earlier keys to keep for each source."""
        for _, model, _, _ in self.wanted(history_lengths):
            if model.max_length is not None and shape.context > model.max_length:
                raise ParameterError(
                    f"{model.name} can read only {model.max_length:,} tokens at once, but the store's window has "
                    f"{shape.context:,}. Use a model with a longer context."
                )
        start_token = self.models[0].start_token
        ready: list[Window] = []
        past = _Past(history_lengths, start_token, self.models[0].device)
        for document in documents:
            ready.extend(windows(document, shape, start_token=start_token, row=past.begin(document)))
        for batch in batches(ready, batch_tokens):
            states = self.states(batch, history_lengths)
            rows, targets = scored_targets(batch)
            spans = past.spans(batch, states)
            context = Context(states, spans, source_tokens=_source_tokens(batch))
            yield ReadBatch(rows, targets.to(states[LM_LOGITS].device), context)

    def states(self, batch: Sequence[Window], sources: Iterable[Source]) -> dict[Source, Tensor]:
        """Read a batch of windows once with each model that is needed, and return keys and logits where it scores."""
        states: dict[Source, Tensor] = {}
        sources = list(sources)
        captured: dict[Source, list[Tensor]] = {}
        for number, model, places, needs_logits in self.wanted(sources):
            layers = [self.layer(source, model) for source in places]
            inputs = {"inputs_embeds": captured[trunk_of(model)][-1]} if isinstance(model, TopLM) else None
            with ExitStack() as hooks:
                if not number:
                    trunks = self.trunks(sources)
                    captured = {trunk: hooks.enter_context(self.layer(trunk).capture()) for trunk in trunks}
                keys, logits = model.read_batch(batch, layers, logits=needs_logits, inputs=inputs)
            states.update(zip(places, keys, strict=True))
            if logits is not None:
                states[Source(number, LOGITS)] = logits
        return states


def trunk_of(model: TopLM) -> Source:
    """Return the place of the language model whose states the last blocks of a model read."""
    return Source(0, BLOCK_INPUT, model.first)


def _source_tokens(batch: Sequence[Window]) -> list[SourceTokens] | None:
    """Return the source of each scored position; None where windows have none, or sounds."""
    if not all(isinstance(window.source, list) for window in batch):
        return None
    sources = []
    for window in batch:
        assert isinstance(window.source, list)
        sources += [tuple(window.source)] * (window.end - window.scored)
    return sources


class _Past:
    """The keys of earlier windows, document by document."""

    def __init__(self, history_lengths: Mapping[Source, int], start_token: int, device: torch.device) -> None:
        self.history_lengths = {
            source: history_length for source, history_length in history_lengths.items() if history_length
        }
        self.start_token = start_token
        self.device = device
        self.texts: dict[int, Tensor] = {}  # by the row of a document's first target
        self.scored: dict[int, int] = {}
        self.keys: dict[int, dict[Source, Tensor]] = {}
        self.rows = 0

    def begin(self, document: Sequence[int]) -> int:
        """Register a document and return the row of its first target."""
        row, self.rows = self.rows, self.rows + len(document)
        self.texts[row] = torch.tensor([self.start_token, *document[:-1]], device=self.device)
        self.scored[row] = 0
        self.keys[row] = {}
        return row

    def spans(self, batch: Sequence[Window], states: Mapping[Source, Tensor]) -> list[Span]:
        """Return the span of each window, and keep its keys for the windows that follow."""
        spans = []
        first = 0
        for window in batch:
            document = window.row - window.scored
            # Longer windows come first, and the last window of a document is its shortest.
            assert self.scored[document] == window.scored, "windows of a document must come in order"
            past = self.keys[document]
            spans.append(Span(self.texts[document][: window.end], window.scored, dict(past)))
            last = first + window.end - window.scored
            for source, history_length in self.history_lengths.items():
                new = states[source][first:last]
                past[source] = (
                    torch.cat([past[source], new])[-history_length:] if source in past else new[-history_length:]
                )
            self.scored[document], first = window.end, last
        return spans
