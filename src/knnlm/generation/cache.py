"""State of the memories during generation, carried inside the transformers cache.

`generate` reorders, repeats and crops its cache layer by layer when beams fork and end. The tokens read so far, the
keys that memories look back on, and the caches of other readers are therefore appended to the cache as further layers,
after those of the base model, so that they follow every change of a beam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache, StaticLayer

from knnlm.errors import ModelError
from knnlm.generation.model_graph import ModelPass, accepted_arguments, read_with_graph
from knnlm.generation.speculation import crops_caches
from knnlm.lm.causal import CausalLM
from knnlm.lm.shared import BLOCK_INPUT, TopLM
from knnlm.memories.base import LOGITS, Context, Origin, Source, Span
from knnlm.mixture.layer import OnlineLayer
from knnlm.mixture.mixture import Mixture, Retrieved
from knnlm.mixture.readers import Reading, trunk_of
from knnlm.mixture.weights import MixturePrediction

_STATE_ATTRIBUTE = "knnlm_state"
_FIXED_CACHE = "A static or offloaded cache cannot carry the state of the memories. Use a DynamicCache."


class _HistoryLayer(DynamicLayer):
    """Keys (B, 1, T, D), or nothing, and tokens (B, 1, T, 1) of the texts of a batch."""

    def append(self, keys: Tensor, tokens: Tensor) -> None:
        """Append (B, T, D) keys and (B, T) tokens."""
        new_keys, new_tokens = keys[:, None], tokens[:, None, :, None]
        if self.is_initialized and self.keys is not None and self.values is not None:
            new_keys = torch.cat([self.keys, new_keys], -2)
            new_tokens = torch.cat([self.values, new_tokens], -2)
        self.keys, self.values = new_keys, new_tokens
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def replace(self, keys: Tensor, tokens: Tensor) -> None:
        """Keep only these (B, T, D) keys and (B, T) tokens."""
        self.is_initialized = False
        self.append(keys, tokens)


@dataclass
class MemoryState:
    """Layers added to a transformers cache."""

    tokens: _HistoryLayer = field(default_factory=_HistoryLayer)  # its keys are the origins of the tokens
    all_given: bool = True  # no token has another origin
    keys: dict[Source, _HistoryLayer] = field(default_factory=dict)
    online: _HistoryLayer = field(default_factory=_HistoryLayer)  # the state of online weights at each position
    # At the last position, if needed: (M · V,) log-probabilities of the components, (E · M,) weights by expert, (M,)
    # which components abstain, and M.
    pending: _HistoryLayer = field(default_factory=_HistoryLayer)
    # By the automaton, the entries that it reached at each position; -1 where it was not asked, or there are fewer.
    entries: dict[object, _HistoryLayer] = field(default_factory=dict)
    # By the reader's number and the first of its blocks that run: not 0 where it shares those before with the model.
    reader_caches: dict[tuple[int, int], Cache] = field(default_factory=dict)
    # By the reader's number, its keys and logits at tokens that the language model has not read yet.
    ahead: dict[int, list[dict[Source, Tensor]]] = field(default_factory=dict)
    last: ForwardStep | None = None
    length: int = 0  # tokens after the last step, of which some may be removed since

    def attach(self, cache: Cache) -> None:
        """Append the layers that the cache does not have yet."""
        own = [layer for reader_cache in self.reader_caches.values() for layer in text_cache(reader_cache).layers]
        online = [layer for layer in (self.online, self.pending) if layer.is_initialized]
        _append_missing(cache, [self.tokens, *self.keys.values(), *self.entries.values(), *online, *own])
        setattr(cache, _STATE_ATTRIBUTE, self)

    def attach_sources(self, cache: Cache) -> None:
        """Append the layers of other readers over the sources, which the cache does not have yet."""
        caches = (own for own in self.reader_caches.values() if isinstance(own, EncoderDecoderCache))
        _append_missing(cache, [layer for own in caches for layer in own.cross_attention_cache.layers])


def _append_missing(cache: Cache, layers: Sequence[Any]) -> None:
    present = {id(layer) for layer in cache.layers}
    cache.layers.extend(layer for layer in layers if id(layer) not in present)


@dataclass(frozen=True)
class ForwardStep:
    """New tokens of one forward pass, with the base model's arguments about them."""

    tokens: Tensor  # (B, T)
    mask: Tensor | None  # (B, all tokens read so far), 0 for padding
    positions: Tensor | None
    kept: slice | Tensor  # which of the T positions are predicted
    origins: Tensor | None = None  # (B, T) of the tokens; None: all are given
    # By the number of a reader with an encoder, what its decoder reads of the (B,) sources.
    encoded: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def after(self, count: int) -> ForwardStep:
        """Return the step without its first tokens."""
        positions = None if self.positions is None else self.positions[..., count:]
        return replace(self, tokens=self.tokens[:, count:], positions=positions)


def text_cache(cache: Any) -> Any:
    """Return the part of a cache that grows with the text, and that carries the state of the memories."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def refuse_static(cache: Any) -> None:
    """Raise an error for a cache of a fixed size, in which the positions of a text are unknown."""
    if any(isinstance(layer, StaticLayer) for layer in getattr(cache, "layers", ())):
        raise ModelError(_FIXED_CACHE)


def text_mask(mask: Tensor | Mapping[str, Tensor | None] | None, rows: int) -> Tensor | None:
    """Return the mask of tokens, (B, T) for masks by kind of layer, as transformers prepares them for hybrid models."""
    if not isinstance(mask, Mapping):
        return mask
    full = mask.get("full_attention", NotImplemented)
    if full is not None and not isinstance(full, Tensor):
        raise ModelError("The attention masks have no tensor for full attention. Pass one mask of (batch, tokens).")
    if full is None or full.dim() == 2:
        return full
    last = full[:, 0, -1]  # (B, T) the last token attends to all tokens of its text
    return (last if last.dtype == torch.bool else last >= 0).long().expand(rows, -1)


def memory_state(cache: Any) -> MemoryState:
    """Return the state that a cache carries, or a new one for an empty cache."""
    refuse_static(cache)
    if getattr(cache, "offloading", False):
        raise ModelError(_FIXED_CACHE)
    state = getattr(cache, _STATE_ATTRIBUTE, None)
    if state is not None:
        return state  # type: ignore[no-any-return]
    if isinstance(cache, Cache) and cache.get_seq_length() > 0:
        raise ModelError(
            "The cache was filled without the memories, which need the tokens in it. Fill it with KnnForCausalLM, or "
            "start with an empty cache."
        )
    return MemoryState()


def advance(
    mixture: Mixture,
    step: ForwardStep,
    keys: Mapping[Source, Tensor],
    *,
    state: MemoryState,
    cache: Any,
    with_spans: bool,
) -> Context:
    """Append one step to the state, and return the context of the positions to predict."""
    every = {source: own for source, own in keys.items() if source.place != BLOCK_INPUT}
    states = {source: own[:, step.kept].flatten(0, 1) for source, own in every.items()}
    for reading in mixture.readers.wanted(mixture.history_lengths):
        reader, model = reading.number, reading.model
        if reader:
            past = reader_cache(state, reader, model) if isinstance(cache, Cache) else None
            trunk = keys[trunk_of(model)] if isinstance(model, TopLM) else None
            read = state.ahead.pop(reader, [])
            if len(read) < step.tokens.shape[1]:
                read.append(run_reader(mixture, reading, step.after(len(read)), past=past, trunk=trunk))
            others = (
                read[0]
                if len(read) == 1
                else {source: torch.cat([own[source] for own in read], 1) for source in read[0]}
            )
            every |= others
            states |= {source: own[:, step.kept].flatten(0, 1) for source, own in others.items()}
    origins = torch.zeros_like(step.tokens) if step.origins is None else step.origins.to(step.tokens)
    state.tokens.append(origins[..., None], step.tokens)
    state.all_given &= step.origins is None
    for source, history_length in mixture.history_lengths.items():
        if history_length:
            if source not in state.keys:
                state.keys[source] = _HistoryLayer()  # type: ignore[no-untyped-call]
            state.keys[source].append(every[source], step.tokens)
    state.last, state.length = step, state.tokens.get_seq_length()
    if isinstance(cache, Cache):
        state.attach(cache)
    return Context(states, spans_of(state, step, mixture.layer) if with_spans else ())


def reader_cache(state: MemoryState, reader: int, model: CausalLM) -> Cache:
    """Return the cache of a reader, or of its last blocks."""
    place = (reader, model.first if isinstance(model, TopLM) else 0)
    if place not in state.reader_caches:
        if any(number == reader for number, _ in state.reader_caches):
            raise ModelError(
                f"The cache was filled while {model.name} ran with other blocks: the model was switched between "
                "training and evaluation. Start with an empty cache."
            )
        own = DynamicCache(config=model.model.config)
        if crops_caches():
            own.activate_past_recording()
        state.reader_caches[place] = EncoderDecoderCache(own, DynamicCache()) if model.has_encoder else own
    return state.reader_caches[place]


def _reader_inputs(
    reading: Reading,
    step: ForwardStep,
    *,
    past: Cache | None,
    trunk: Tensor | None,  # (B, T, D) states of the language model that stand for the tokens
) -> dict[str, Any]:
    """Return what another reader reads at a step."""
    model, encoded = reading.model, step.encoded.get(reading.number)
    accepted = accepted_arguments(type(model.model).forward)
    offered: dict[str, Any] = {"past_key_values": past, "use_cache": past is not None}
    if encoded is not None:
        begins = past is None or not past.get_seq_length()
        prefix = step.tokens.new_tensor(model.prefix_tokens if begins else ()).expand(len(step.tokens), -1)
        text = {"decoder_input_ids": torch.cat([prefix, step.tokens], 1), **encoded}
    else:
        offered |= {"attention_mask": step.mask, "position_ids": step.positions}
        text = {"input_ids": step.tokens} if trunk is None else {"inputs_embeds": trunk}
    return text | {name: value for name, value in offered.items() if name in accepted and value is not None}


def run_reader(
    mixture: Mixture, reading: Reading, step: ForwardStep, *, past: Cache | None, trunk: Tensor | None
) -> dict[Source, Tensor]:
    """Run another reader, and return its (B, T, D) keys and (B, T, V) logits at the tokens of the step."""
    number, model, places, wants_logits = reading
    inputs, length = _reader_inputs(reading, step, past=past, trunk=trunk), step.tokens.shape[1]
    layers = [mixture.readers.layer(source, model) for source in places]
    written = read_with_graph(ModelPass(model, layers, wants_logits, inputs))
    last = [own[:, -length:] for own in written]
    logits = {Source(number, LOGITS): last.pop()} if wants_logits else {}
    return {source: own.float() for source, own in zip(places, last, strict=True)} | logits


def spans_of(state: MemoryState, step: ForwardStep, layer: OnlineLayer) -> list[Span]:
    """Return the predicted positions of each text with the tokens before them; padding is a span of its own."""
    assert state.tokens.values is not None
    rows = _StateRows.of(state, step, layer)
    spans = []
    for row, start in enumerate(_text_starts(step.mask, *state.tokens.values[:, 0, :, 0].shape)):
        first = rows.first
        if first < start:
            spans.append(Span(rows.tokens[row][: min(start, rows.end)], first, {}))
            first = min(start, rows.end)
        if rows.end > first:
            spans.append(rows.span(row, start, first))
    return spans


@dataclass(frozen=True)
class _StateRows:
    """The texts of a batch, of which positions `first` … `end` - 1 are predicted; padding is counted."""

    state: MemoryState
    layer: OnlineLayer
    first: int
    end: int
    tokens: Sequence[Tensor]  # (end,) of each row
    origins: Sequence[Tensor] | None  # (end,) of each row; None: all are given
    past: Mapping[Source, Sequence[Tensor]]  # (first, D) keys of each row
    online: Sequence[Tensor] | None  # (S,) states of the online weights at `first`; None: without any
    known: int  # positions that have such a state
    pending: Tensor | None  # (B, 1, 1, …) see `MemoryState`; None: there is none
    entries: Mapping[object, Sequence[Tensor]]  # (W,) of each row at the position before `first`, by the automaton

    @classmethod
    def of(cls, state: MemoryState, step: ForwardStep, layer: OnlineLayer) -> _StateRows:
        """Split the tensors of all rows at once: an operation for each row and tensor would take most of a step."""
        assert state.tokens.keys is not None
        assert state.tokens.values is not None
        total, new = state.tokens.get_seq_length(), step.tokens.shape[1]
        places = range(new)[step.kept] if isinstance(step.kept, slice) else torch.arange(new)[step.kept.cpu()].tolist()
        if any(later - earlier != 1 for earlier, later in pairwise(places)):
            raise ModelError("With a memory, logits_to_keep must be a number or consecutive positions.")
        first = total - new + places[0] if places else total
        end = total - new + places[-1] + 1 if places else total
        online, known = state.online.keys, state.online.get_seq_length()
        return cls(
            state,
            layer,
            first,
            end,
            tokens=state.tokens.values[:, 0, :end, 0].long().unbind(),
            origins=None if state.all_given else state.tokens.keys[:, 0, :end, 0].unbind(),
            past={
                source: own.keys[:, 0, :first].unbind() for source, own in state.keys.items() if own.keys is not None
            },
            online=online[:, 0, min(first, known - 1)].unbind() if layer.stateful and online is not None else None,
            known=known,
            pending=state.pending.keys if state.pending.get_seq_length() else None,
            entries={
                automaton: own.keys[:, 0, first - 1].unbind()
                for automaton, own in state.entries.items()
                if own.keys is not None and 0 < first <= own.get_seq_length()
            },
        )

    def span(self, row: int, start: int, first: int) -> Span:
        """Return the span of a text that begins at `start`, from position `first` on."""
        tokens = self.tokens[row][start:] if start else self.tokens[row]
        origins = None if self.origins is None else self.origins[row]
        if origins is not None and start:
            origins = origins[start:]
        if first == self.first:
            past = {source: own[row][start:] if start else own[row] for source, own in self.past.items()}
        else:  # after padding
            past = {source: own[row][:0] for source, own in self.past.items()}
        continues = first == self.first > start
        entries = {automaton: own[row] for automaton, own in self.entries.items()} if continues else {}
        return Span(tokens, first - start, past, self._state(row, start, first, tokens, origins), origins, entries)

    def _state(self, row: int, start: int, first: int, tokens: Tensor, origins: Tensor | None) -> Tensor | None:
        """Return the state of online weights at position `first`; None where nothing of the text was read before."""
        if self.online is None or start >= self.known:
            return None
        before = self.online[row]
        if first != self.first:  # after padding
            assert self.state.online.keys is not None
            before = self.state.online.keys[row, 0, min(first, self.known - 1)]
        kept = first == self.known and self.pending is not None
        if kept and (origins is None or bool(origins[first - start] == Origin.GIVEN)):
            assert self.pending is not None
            before = _after_pending(before, self.pending[row, 0, 0], tokens[first - start], self.layer)
        return before


def _after_pending(before: Tensor, pending: Tensor, token: Tensor, layer: OnlineLayer) -> Tensor:
    """Return the (S,) state after the token that follows the last position of the previous step."""
    components = int(pending[-1])
    weights = layer.experts * components
    dense, by_expert, abstains, _ = pending.split([len(pending) - weights - components - 1, weights, components, 1])
    by_expert = by_expert.reshape(1, layer.experts, components)
    log_probs = dense.reshape(components, -1)[:, token][None]
    return layer.after(before[None], by_expert, log_probs, abstains[None] > 0)[0]


def keep_pending(state: MemoryState, step: ForwardStep, last: MixturePrediction) -> None:
    """Keep what the next token's evidence is computed from: the prediction of the last position of each text."""
    assert last.by_expert is not None
    dense = torch.stack([component.log_probs().float() for component in last.components], 1)  # (B, M, V)
    weights, abstains = last.by_expert, last.component_abstains()  # (B, E, M) and (B, M)
    count = weights.new_full((len(weights), 1), weights.shape[-1])
    pending = torch.cat([dense.flatten(1), weights.flatten(1), abstains.to(weights), count], 1).detach()
    state.pending.replace(pending[:, None], step.tokens[:, -1:])


def keep_entries(mixture: Mixture, state: MemoryState, step: ForwardStep, retrieved: Retrieved, cache: Any) -> None:
    """Append the entries that automata reached at the predicted positions; at other positions there are none."""
    for number, automaton in mixture.automata.items():
        neighbours = retrieved.neighbours[number]
        if neighbours is None or neighbours.followed is None:
            continue
        reached = neighbours.followed.entries.unflatten(0, (len(step.tokens), -1))  # (B, n, W)
        every = reached.new_full((*step.tokens.shape, reached.shape[2]), -1, dtype=automaton.kept_dtype)
        every[:, step.kept] = reached.to(every.dtype)
        state.entries.setdefault(automaton, _HistoryLayer()).append(every.to(step.tokens.device), step.tokens)  # type: ignore[no-untyped-call]
    if isinstance(cache, Cache):
        state.attach(cache)


def keep_states(state: MemoryState, step: ForwardStep, states: Tensor) -> None:
    """Append the (B, n, S) states of the predicted positions; positions before them get the first of these."""
    missing = step.tokens.shape[1] - states.shape[1]
    earlier = states[:, :1].expand(-1, missing, -1)
    state.online.append(torch.cat([earlier, states], 1).detach(), step.tokens)


def _text_starts(mask: Tensor | None, rows: int, total: int) -> list[int]:
    """Return the position of the first token of each text, after its left padding; `total` where all is padding."""
    if mask is None or mask.dim() != 2 or mask.shape[1] != total:
        return [0] * rows
    given = mask.bool()
    starts: list[int] = given.int().argmax(1).masked_fill(~given.any(1), total).tolist()  # one copy from the device
    return starts
