"""Key-value caches of the sequences in a batch.

A sequence joins when its prompt has been read into a cache of its own, and leaves when it is finished. `BatchedCache`
holds all sequences in one cache, padded on the left, and reads one token of each in one forward pass.
`SequentialCache` reads one sequence after the other, for models whose caches cannot be batched.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from knnlm.errors import KnnlmError
from knnlm.generation.causal import KnnForCausalLM
from knnlm.memories.base import Context, Origin, join_contexts
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import ReadBatch

_WINDOW_BATCH_TOKENS = 256  # tokens of windows read in one step; at least one window is read


@dataclass
class Prompt:
    """A prompt that is being read, and its cache."""

    tokens: list[int]
    done: int = 0  # tokens read
    cache: Any = None
    state: Tensor | None = None  # (S,) of the online weights after the tokens read; None: none was evidence
    origins: list[int] | None = None  # of the tokens; None: all are given
    entries: Mapping[object, Tensor] = field(default_factory=dict)  # reached after the tokens read, see `Span.entries`

    @property
    def remaining(self) -> int:
        """Number of tokens to read."""
        return len(self.tokens) - self.done


@dataclass
class WindowedPrompt(Prompt):
    """A text to score, read in the store's windows as evaluation does, several windows at a time."""

    document: Sequence[int] = ()  # the tokens to score
    batches: Iterator[ReadBatch] | None = None

    def read(self, mixture: Mixture) -> tuple[Tensor, Context]:
        """Read the next windows, and return (n, V) logits of the positions they score and their context."""
        if self.batches is None:
            # All windows but the last have the same length, so their order is kept.
            self.batches = mixture.read([self.document], batch_tokens=_WINDOW_BATCH_TOKENS)
        batch = next(self.batches)
        self.done += len(batch.rows)
        # The same fields as in contexts of prompts, so that the two can be joined.
        return batch.logits, batch.context if mixture.needs_tokens else replace(batch.context, spans=())


class SequenceCache(Protocol):
    """The caches of the sequences in a batch."""

    def __len__(self) -> int:
        """Return the number of sequences."""

    def join(self, prompt: Prompt, copies: int) -> None:
        """Append a sequence whose prompt has been read, once for each copy."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""

    @property
    def can_cut(self) -> bool:
        """Whether several tokens of a sequence can be read at once, and the last of them be removed again."""

    def step(self, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Context]:
        """Read the next tokens of each sequence, and return (N, V) logits after each, and the context of the memories.

        After a step with several tokens of a sequence, `cut` must be called.
        """

    def cut(self, counts: Sequence[int]) -> None:
        """Keep only so many of the tokens of each sequence that the last step has read."""


def supports_cache(model: KnnForCausalLM) -> bool:
    """Whether a model can continue from a cache."""
    own = model.mixture.needs_history and getattr(model.base, "_is_stateful", False)
    return not own and "past_key_values" in model._base_arguments


def read_prompt(model: KnnForCausalLM, prompt: Prompt, *, max_tokens: int, all_logits: bool) -> tuple[Tensor, Context]:
    """Read the next tokens of a prompt, and return (n, V) logits of all of them or of the last, and their context."""
    if isinstance(prompt, WindowedPrompt):
        return prompt.read(model.mixture)
    if not supports_cache(model):
        before, prompt.done = prompt.done, min(len(prompt.tokens), prompt.done + max_tokens)
        output, context = model.read(  # from the beginning of the text, whatever was read before
            _ids(model, prompt.tokens[: prompt.done]),
            use_cache=False,
            logits_to_keep=prompt.done - before if all_logits else 1,
            origins=None if prompt.origins is None else _ids(model, prompt.origins[: prompt.done]),
        )
        return output.logits[0], context
    chunk = prompt.tokens[prompt.done : prompt.done + max_tokens]
    origins = None if prompt.origins is None else prompt.origins[prompt.done : prompt.done + max_tokens]
    if prompt.cache is None:
        prompt.cache = _new_cache(model)
    output, context = model.read(
        _ids(model, chunk),
        past_key_values=prompt.cache,
        use_cache=True,
        logits_to_keep=0 if all_logits else 1,
        origins=None if origins is None else _ids(model, origins),
    )
    # A model may use its own class of cache.
    prompt.cache = getattr(output, "past_key_values", None) or prompt.cache
    prompt.done += len(chunk)
    return output.logits[0], context


def _new_cache(model: KnnForCausalLM) -> Cache | None:
    """Return an empty cache, None where the model creates its own."""
    if getattr(model.base, "_is_stateful", False):
        return None
    return DynamicCache(config=model.base.config)


def _ids(model: KnnForCausalLM, tokens: Sequence[int]) -> Tensor:
    return torch.tensor([list(tokens)], device=model.mixture.lm.device)


class BatchedCache:
    """One cache for all sequences, padded on the left to the longest and masked there."""

    def __init__(self, model: KnnForCausalLM) -> None:
        self.model = model
        self.device = model.mixture.lm.device  # the property takes as long as a small layer
        self.cache: Any = None
        self.lengths: list[int] = []
        self._read = 1  # tokens of each sequence in the last step, with those that fill up the shorter ones

    def __len__(self) -> int:
        return len(self.lengths)

    def join(self, prompt: Prompt, copies: int) -> None:
        """Append a sequence."""
        new = prompt.cache
        if copies > 1:
            new.batch_repeat_interleave(copies)
        if self.cache is None:
            self.cache = new
        else:
            total = max(*self.lengths, prompt.done)
            for own, other in zip(self.cache.layers, new.layers, strict=True):
                if own.is_initialized:
                    _resize(own, total)
                    _resize(other, total)
                    own.keys = torch.cat([own.keys, other.keys])
                    own.values = torch.cat([own.values, other.values])
        self.lengths += [prompt.done] * copies

    def keep(self, rows: Sequence[int]) -> None:
        """Drop the other sequences, and padding that is not needed any more."""
        if not rows:  # also resets the state after an error
            self.cache, self.lengths = None, []
            return
        if list(rows) == list(range(len(self))):
            return
        self.lengths = [self.lengths[row] for row in rows]
        chosen = torch.tensor(rows, device=self.device)
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.batch_select_indices(chosen)
                _resize(layer, max(self.lengths))

    @property
    def can_cut(self) -> bool:
        """Whether no layer has dropped tokens that would be in its window again."""
        return not any(isinstance(layer, DynamicSlidingWindowLayer) for layer in self.cache.layers)

    def step(self, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Context]:
        """Read the next tokens of each sequence in one forward pass, in which all have as many as the longest."""
        counts = [len(own) for own in tokens]
        self._read = new = max(counts)
        padding: dict[str, Tensor] = {}
        if min(self.lengths) < max(self.lengths):
            lengths, total = torch.tensor(self.lengths)[:, None], max(self.lengths) + new
            mask = torch.arange(total) >= total - new - lengths  # (B, T)
            positions = lengths + torch.arange(new)
            padding = {"attention_mask": mask.long().to(self.device), "position_ids": positions.to(self.device)}
        ids = torch.tensor([[*own, *[own[-1]] * (new - len(own))] for own in tokens], device=self.device)
        output, context = self.model.read(
            ids,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=new,
            origins=torch.full_like(ids, Origin.GENERATED),
            **padding,
        )
        self.lengths = [length + new for length in self.lengths]
        logits = output.logits[:, -new:].flatten(0, 1)
        if min(counts) == new:
            return logits, context
        rows = torch.tensor([row * new + place for row, count in enumerate(counts) for place in range(count)])
        return logits[rows.to(self.device)], _first_positions(context, counts, rows.to(self.device))

    def cut(self, counts: Sequence[int]) -> None:
        """Remove tokens from the end of each sequence, which moves what is left of it to the right."""
        before, drop = max(self.lengths), [self._read - count for count in counts]
        self.lengths = [length - own for length, own in zip(self.lengths, drop, strict=True)]
        total = max(self.lengths)
        if not any(drop):
            return
        kept = torch.arange(before - total, before) - torch.tensor(drop)[:, None]  # (B, total) of the tokens before
        for layer in self.cache.layers:
            if layer.is_initialized:
                if len(set(drop)) == 1:
                    layer.keys, layer.values = (each[..., :total, :] for each in (layer.keys, layer.values))
                else:
                    places = kept.clamp(min=0).to(layer.keys.device)[:, None, :, None]
                    layer.keys, layer.values = (_gather_tokens(each, places) for each in (layer.keys, layer.values))


def _gather_tokens(tensor: Tensor, places: Tensor) -> Tensor:
    """Return the tokens at (B, 1, T, 1) places of a (B, H, L, D) tensor."""
    return tensor.gather(2, places.expand(-1, tensor.shape[1], -1, tensor.shape[3]))


def _first_positions(context: Context, counts: Sequence[int], rows: Tensor) -> Context:
    """Return the first positions of each sequence, at these rows, of a context with as many of each."""
    spans = []
    for span, count in zip(context.spans, counts, strict=True) if context.spans else ():
        end = span.start + count
        spans.append(
            replace(span, tokens=span.tokens[:end], origins=None if span.origins is None else span.origins[:end])
        )
    return replace(context, states={source: own[rows] for source, own in context.states.items()}, spans=spans)


def _resize(layer: Any, total: int) -> None:
    """Pad or cut a layer on the left to this many tokens."""
    length = total
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = total
        length = min(total, layer.sliding_window - 1)
    for name in ("keys", "values"):
        tensor = getattr(layer, name)  # (B, H, T, D)
        more = length - tensor.shape[-2]
        if more > 0:
            tensor = torch.nn.functional.pad(tensor, (0, 0, more, 0))
        elif more < 0:
            tensor = tensor[..., -length:, :].contiguous()
        setattr(layer, name, tensor)


@dataclass
class SequentialCache:
    """One cache for each sequence; without cache support, each step reads the whole sequence."""

    model: KnnForCausalLM
    sequences: list[Prompt] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sequences)

    def join(self, prompt: Prompt, copies: int) -> None:
        """Append a sequence with its own cache."""
        origins = prompt.origins or [Origin.GIVEN] * len(prompt.tokens)
        self.sequences += [
            Prompt([*prompt.tokens], prompt.done, copy.deepcopy(prompt.cache), origins=[*origins])
            for _ in range(copies - 1)
        ]
        self.sequences.append(replace(prompt, origins=[*origins]))

    def keep(self, rows: Sequence[int]) -> None:
        """Drop the other sequences."""
        self.sequences = [self.sequences[row] for row in rows]

    @property
    def can_cut(self) -> bool:
        """Never: such caches have states of other kinds."""
        return False

    def cut(self, counts: Sequence[int]) -> None:
        """Keep the only token of each sequence."""

    def step(self, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Context]:
        """Read one more token of each sequence, one after the other."""
        results = []
        for sequence, (token,) in zip(self.sequences, tokens, strict=True):
            sequence.tokens.append(token)
            assert sequence.origins is not None
            sequence.origins.append(Origin.GENERATED)
            results.append(read_prompt(self.model, sequence, max_tokens=len(sequence.tokens), all_logits=False))
        return torch.cat([logits for logits, _ in results]), join_contexts([context for _, context in results])


@torch.inference_mode()
def choose_cache(model: KnnForCausalLM) -> SequenceCache:
    """Return a batched cache if two sequences get the same logits in it as each alone, else a sequential one."""
    if not supports_cache(model):
        return SequentialCache(model)
    texts = [[model.mixture.lm.start_token] * 2, [model.mixture.lm.start_token] * 5]
    batched, sequential = BatchedCache(model), SequentialCache(model)
    try:
        for cache in (batched, sequential):
            for tokens in texts:
                prompt = Prompt(list(tokens))
                read_prompt(model, prompt, max_tokens=len(tokens), all_logits=False)
                if not _mergeable(prompt.cache, len(tokens)):
                    return SequentialCache(model)
                cache.join(prompt, 1)
        next_tokens = [[1], [2]]
        logits, expected = batched.step(next_tokens)[0].float(), sequential.step(next_tokens)[0].float()
    except (KnnlmError, RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        # A model of an unknown kind may fail in any way on a padded cache.
        return SequentialCache(model)
    tolerance = 1e-3 if expected.dtype == model.base.dtype else 5e-2
    close = torch.allclose(logits, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    return BatchedCache(model) if close else SequentialCache(model)


def _mergeable(cache: Any, length: int) -> bool:
    """Whether a cache has only (B, H, T, D) layers that can be padded."""
    if not isinstance(cache, DynamicCache):
        return False
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
            return False
        usual = type(layer).update in (DynamicLayer.update, DynamicSlidingWindowLayer.update)
        if not usual or layer.get_seq_length() != length:
            return False
    return True
