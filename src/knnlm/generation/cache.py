"""What memories remember of the texts being generated, carried in the cache that transformers carries.

`generate` reorders, repeats and crops its cache when beams fork and end. It does so layer by layer; so the tokens read
so far, the keys that memories look back on, and the caches of other readers are layers of that cache too, after those
of the base model, and whatever happens to a beam happens to what its memories know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from knnlm.errors import ModelError
from knnlm.lm.causal import CausalLM, evaluating
from knnlm.memories.base import LOGITS, Context, Source, Span
from knnlm.mixture.mixture import Mixture

_MARK = "knnlm_state"


class _Layer(DynamicLayer):
    """One row a text: (B, 1, T, D) keys, or nothing, and (B, 1, T, 1) tokens."""

    def grow(self, keys: Tensor, tokens: Tensor) -> None:
        """Append (B, T, D) keys and (B, T) tokens."""
        new_keys, new_tokens = keys[:, None], tokens[:, None, :, None]
        if self.is_initialized and self.keys is not None and self.values is not None:
            new_keys = torch.cat([self.keys, new_keys], -2)
            new_tokens = torch.cat([self.values, new_tokens], -2)
        self.keys, self.values = new_keys, new_tokens
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True


@dataclass
class State:
    """The layers that were added to a cache."""

    texts: _Layer = field(default_factory=_Layer)
    past: dict[Source, _Layer] = field(default_factory=dict)
    caches: dict[int, DynamicCache] = field(default_factory=dict)  # by reader

    def join(self, cache: Cache) -> None:
        """Add what is not there yet to the cache's layers."""
        layers = [self.texts, *self.past.values(), *(layer for own in self.caches.values() for layer in own.layers)]
        there = {id(layer) for layer in cache.layers}
        cache.layers.extend(layer for layer in layers if id(layer) not in there)
        setattr(cache, _MARK, self)


def state_of(cache: Any) -> State:
    """Find the state in a cache, or begin a new one with an empty cache."""
    fixed = any(isinstance(layer, StaticLayer) for layer in getattr(cache, "layers", ()))
    if fixed or getattr(cache, "offloading", False):
        raise ModelError(
            "A cache of fixed size, or an offloaded one, cannot carry what memories remember. Use the usual."
        )
    found = getattr(cache, _MARK, None)
    if found is not None:
        return found  # type: ignore[no-any-return]
    if isinstance(cache, Cache) and cache.get_seq_length() > 0:
        raise ModelError(
            "The cache was filled without the memory, so the memory does not know what was read. Fill it with "
            "KnnForCausalLM itself, or begin without a cache."
        )
    return State()


@dataclass(frozen=True)
class Step:
    """One call: the new tokens, and what the base model was told about them."""

    tokens: Tensor  # (B, T)
    mask: Tensor | None  # (B, all that was read), 0 for padding
    positions: Tensor | None
    kept: slice | Tensor  # which of the T positions are predicted


def look(mixture: Mixture, step: Step, keys: Mapping[Source, Tensor], state: State, cache: Any) -> Context:
    """Bring the state up to date with one step, and give the context of the positions that are predicted."""
    seen = {source: own[:, step.kept].flatten(0, 1) for source, own in keys.items()}
    every = dict(keys)
    for number, (model, places, speaks) in enumerate(mixture.readers.wanted(mixture.history_lengths)):
        if number:
            reader = mixture.readers.models.index(model)
            others, logits = _read(mixture, model, places, step, state, reader, keep=isinstance(cache, Cache))
            every |= others
            seen |= {source: own[:, step.kept].flatten(0, 1) for source, own in others.items()}
            if speaks:
                seen[Source(reader, LOGITS)] = logits[:, step.kept].flatten(0, 1)
    state.texts.grow(step.tokens[..., None], step.tokens)
    for source, history_length in mixture.history_lengths.items():
        if history_length:
            if source not in state.past:
                state.past[source] = _Layer()  # type: ignore[no-untyped-call]
            state.past[source].grow(every[source], step.tokens)
    if isinstance(cache, Cache):
        state.join(cache)
    return Context(seen, _runs(state, step) if mixture.needs_tokens else ())


def _read(
    mixture: Mixture,
    model: CausalLM,
    places: Sequence[Source],
    step: Step,
    state: State,
    reader: int,
    *,
    keep: bool,
) -> tuple[dict[Source, Tensor], Tensor]:
    """Run another reader over the new tokens, with a cache of its own."""
    accepted = _arguments(type(model.model).forward)
    inputs: dict[str, Any] = {"attention_mask": step.mask, "position_ids": step.positions, "use_cache": keep}
    if keep:
        if reader not in state.caches:
            state.caches[reader] = DynamicCache(config=model.model.config)
        inputs["past_key_values"] = state.caches[reader]
    inputs = {name: value for name, value in inputs.items() if name in accepted and value is not None}
    # To look through all modules takes as long as a block of a small model takes.
    quiet = evaluating(model.model) if model.model.training else nullcontext()
    with quiet, ExitStack() as hooks:
        layers = [mixture.readers.layer(source) for source in places]
        kept = [hooks.enter_context(layer.capture()) for layer in layers]
        output = model.model(input_ids=step.tokens, return_dict=True, **inputs)
    return {source: own[-1].float() for source, own in zip(places, kept, strict=True)}, output.logits


@lru_cache(maxsize=16)
def _arguments(forward: Callable[..., Any]) -> frozenset[str]:
    """Say what a model takes; to find out at every token takes longer than it should."""
    return frozenset(inspect.signature(forward).parameters)


def _runs(state: State, step: Step) -> list[Span]:
    """Say for each text what was read and which positions are predicted; padding is a text of its own."""
    assert state.texts.values is not None
    tokens = state.texts.values[:, 0, :, 0].long()  # (B, all)
    total, new = tokens.shape[1], step.tokens.shape[1]
    kept = step.kept if isinstance(step.kept, slice) else step.kept.cpu()
    wanted = torch.arange(new)[kept] + total - new
    if (wanted.diff() != 1).any():
        raise ModelError("With a memory, logits_to_keep must be a number or consecutive positions.")
    runs = []
    for row in range(len(tokens)):
        first = int(wanted[0]) if len(wanted) else total
        last = int(wanted[-1]) + 1 if len(wanted) else total
        begin = _begin(step.mask, row, total)
        if first < begin:
            runs.append(Span(tokens[row, : min(begin, last)], first, {}))
            first = min(begin, last)
        if last > first:
            past = {
                source: layer.keys[row, 0, begin:first]
                for source, layer in state.past.items()
                if layer.keys is not None
            }
            runs.append(Span(tokens[row, begin:last], first - begin, past))
    return runs


def _begin(mask: Tensor | None, row: int, total: int) -> int:
    """Say where a text begins behind its padding."""
    if mask is None or mask.dim() != 2 or mask.shape[1] != total:
        return 0
    return int(mask[row].bool().int().argmax())
