"""The models that memories read with, and one pass of them over texts. Knows nothing about memories.

The language model is reader 0. A store whose keys come from another model, or a second language model that is a memory
itself, brings a reader of its own; stores with the same reader share its pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knnlm.errors import ModelMismatch, ParameterError
from knnlm.lm.causal import CausalLM, scored_targets
from knnlm.lm.fingerprint import VOCABULARY_FIELDS, identity_difference
from knnlm.lm.key_layers import KeyLayer, find_key_layer
from knnlm.lm.windows import Window, WindowShape, batches, windows
from knnlm.memories.base import LM_LOGITS, LOGITS, Context, Source, Span


@dataclass(frozen=True)
class ReadBatch:
    """Some positions of some documents: what came, what the language model said, what memories may look at."""

    rows: Tensor  # (N,) numbers of the targets, counted through all documents of the call
    targets: Tensor  # (N,)
    context: Context

    @property
    def logits(self) -> Tensor:
        """The (N, V) logits of the language model."""
        return self.context.states[LM_LOGITS]


class Readers:
    """The language model, other models with the same tokenizer, and the places where each of them is read."""

    def __init__(self, lm: CausalLM) -> None:
        self.models = [lm]
        self.layers: dict[Source, KeyLayer] = {}

    def add(self, model: CausalLM) -> int:
        """Give a model its number, the same as its twin's; it must speak the language model's tokens."""
        if (number := self.find(model.identity)) is not None:
            return number
        lm = self.models[0]
        for what in VOCABULARY_FIELDS:
            if model.identity[what] != lm.identity[what]:
                raise ModelMismatch(
                    f"{model.name} has another tokenizer or vocabulary ({what.replace('_', ' ')} "
                    f"{model.identity[what]}) than {lm.name} ({lm.identity[what]}), so what it says means nothing to "
                    "it. Use a model with the same tokenizer and vocabulary."
                )
        self.models.append(model)
        return len(self.models) - 1

    def find(self, facts: Mapping[str, Any]) -> int | None:
        """Give the number of the reader that a store was built with, None where it is not here."""
        return next((number for number, model in enumerate(self.models) if is_reader(facts, model)), None)

    def layer(self, source: Source) -> KeyLayer:
        """Give the place in the model that a source names."""
        if source not in self.layers:
            model = self.models[source.reader]
            own = model.key_layer
            known = (own.place, own.layer) == (source.place, source.layer % own.layers)
            self.layers[source] = own if known else find_key_layer(model.model, source.place, source.layer)
        return self.layers[source]

    def wanted(self, sources: Iterable[Source]) -> list[tuple[CausalLM, list[Source], bool]]:
        """Give each reader that is needed with its places, and whether its logits are wanted."""
        sources = list(sources)
        found = []
        for number, model in enumerate(self.models):
            own = [source for source in sources if source.reader == number]
            places = [source for source in own if source.place != LOGITS]
            if number == 0 or own:
                found.append((model, places, number == 0 or len(places) < len(own)))
        return found

    def read(
        self,
        documents: Sequence[Sequence[int]],
        shape: WindowShape,
        history_lengths: Mapping[Source, int],
        *,
        batch_tokens: int,
    ) -> Iterator[ReadBatch]:
        """Read documents in windows; `history_lengths` says how many earlier keys of each source are remembered."""
        wanted = self.wanted(history_lengths)
        for model, _, _ in wanted:
            if model.max_length is not None and shape.context > model.max_length:
                raise ParameterError(
                    f"{model.name} can read only {model.max_length:,} tokens at once, but the memory's window has "
                    f"{shape.context:,}. Use a model that reads as far."
                )
        start_token = self.models[0].start_token
        ready: list[Window] = []
        past = _Past(history_lengths, start_token, self.models[0].device)
        for document in documents:
            ready.extend(windows(document, shape, start_token=start_token, row=past.begin(document)))
        for batch in batches(ready, batch_tokens):
            seen: dict[Source, Tensor] = {}
            logits = None
            for number, (model, places, speaks) in enumerate(wanted):
                layers = [self.layer(source) for source in places]
                keys, said = model.read_batch(batch, layers, logits=speaks)
                seen.update(zip(places, keys, strict=True))
                if number == 0:
                    logits = said
                if said is not None:  # of the language model itself too: it may be its own second opinion
                    seen[Source(self.models.index(model), LOGITS)] = said
            assert logits is not None
            rows, targets = scored_targets(batch)
            runs = past.runs(batch, seen)
            yield ReadBatch(rows, targets.to(logits.device), Context(seen, runs))


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
        """Note a document and give the row of its first target."""
        row, self.rows = self.rows, self.rows + len(document)
        self.texts[row] = torch.tensor([self.start_token, *document[:-1]], device=self.device)
        self.scored[row] = 0
        self.keys[row] = {}
        return row

    def runs(self, batch: Sequence[Window], seen: Mapping[Source, Tensor]) -> list[Span]:
        """Make the run of each window, and remember its keys for the windows that follow."""
        runs = []
        first = 0
        for window in batch:
            document = window.row - window.scored
            # Longer windows come first, and the last window of a document is its shortest.
            assert self.scored[document] == window.scored, "windows of a document must come in order"
            past = self.keys[document]
            runs.append(Span(self.texts[document][: window.end], window.scored, dict(past)))
            last = first + window.end - window.scored
            for source, history_length in self.history_lengths.items():
                new = seen[source][first:last]
                past[source] = (
                    torch.cat([past[source], new])[-history_length:] if source in past else new[-history_length:]
                )
            self.scored[document], first = window.end, last
        return runs


def is_reader(facts: Mapping[str, Any], model: CausalLM) -> bool:
    """Say whether a store with these facts was built with this model, at whatever place."""
    return identity_difference(facts, model.identity) is None
