"""Texts that are read side by side, a token of each at a time. Knows nothing about memories or sampling.

A text joins when its prompt has been read into a cache of its own, and leaves when it is finished. `Together` keeps all
caches in one, padded on the left, and reads one token of every text in one pass. `Apart` is for models whose caches
cannot be put side by side: it reads one text after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from knnlm.errors import KnnlmError
from knnlm.generation.causal import KnnForCausalLM
from knnlm.memories.base import Context
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import ReadBatch

_PAGES = 256  # tokens of windows that are read at once, and at least one window


@dataclass
class Prompt:
    """A text whose beginning is being read: all its tokens, how many were read, and the cache that they went into."""

    tokens: list[int]
    done: int = 0
    cache: Any = None

    @property
    def left(self) -> int:
        """How many tokens are still to be read."""
        return len(self.tokens) - self.done


@dataclass
class WindowedPrompt(Prompt):
    """A text that is only scored, read in the memory's windows as evaluation does, one or some of them at a time."""

    document: Sequence[int] = ()  # all that is predicted
    batches: Iterator[ReadBatch] | None = None

    def turn(self, mixture: Mixture) -> tuple[Tensor, Context]:
        """Read the next windows: (n, V) logits of the positions that they score, and their context."""
        if self.batches is None:
            # The windows of one text are all of one length but the last, so they come in their order.
            self.batches = mixture.read([self.document], batch_tokens=_PAGES)
        batch = next(self.batches)
        self.done += len(batch.rows)
        # As contexts of prompts are, so that the two can be joined.
        return batch.logits, batch.context if mixture.needs_tokens else replace(batch.context, spans=())


class RowCaches(Protocol):
    """Texts side by side."""

    def __len__(self) -> int:
        """The number of texts."""

    def join(self, prompt: Prompt, copies: int) -> None:
        """Put a text whose prompt has been read behind the others, some times."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these texts only, in this order."""

    def step(self, tokens: Sequence[int]) -> tuple[Tensor, Context]:
        """Read one more token of each text: (B, V) logits, and what memories may look at."""


def caches(model: KnnForCausalLM) -> bool:
    """Say whether a model can go on from where it stopped."""
    own = model.mixture.needs_history and getattr(model.base, "_is_stateful", False)
    return not own and "past_key_values" in model._base_arguments


def read_prompt(model: KnnForCausalLM, prompt: Prompt, *, most: int, every: bool) -> tuple[Tensor, Context]:
    """Read the next tokens of a prompt: (n, V) logits of all of them, or of the last only, and their context."""
    if isinstance(prompt, WindowedPrompt):
        return prompt.turn(model.mixture)
    if not caches(model):
        # Its positions are told of once, so that nothing is counted twice.
        prompt.done = len(prompt.tokens)
        output, context = model.read(_ids(model, prompt.tokens), use_cache=False, logits_to_keep=0 if every else 1)
        return output.logits[0], context
    piece = prompt.tokens[prompt.done : prompt.done + most]
    if prompt.cache is None:
        prompt.cache = _new_cache(model)
    output, context = model.read(
        _ids(model, piece), past_key_values=prompt.cache, use_cache=True, logits_to_keep=0 if every else 1
    )
    # A model may have a kind of cache of its own.
    prompt.cache = getattr(output, "past_key_values", None) or prompt.cache
    prompt.done += len(piece)
    return output.logits[0], context


def _new_cache(model: KnnForCausalLM) -> Cache | None:
    """Begin a cache; a model that has a kind of its own makes it itself."""
    if getattr(model.base, "_is_stateful", False):
        return None
    return DynamicCache(config=model.base.config)


def _ids(model: KnnForCausalLM, tokens: Sequence[int]) -> Tensor:
    return torch.tensor([list(tokens)], device=model.mixture.lm.device)


class BatchedCache:
    """One cache for all texts: the shorter ones are padded on the left, and a mask says where each begins."""

    def __init__(self, model: KnnForCausalLM) -> None:
        self.model = model
        self.device = model.mixture.lm.device  # to look for it takes as long as a small layer
        self.cache: Any = None
        self.lengths: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def join(self, prompt: Prompt, copies: int) -> None:
        """Put a text behind the others."""
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
        """Drop the other texts, and the padding that only they needed."""
        if not rows:  # also what an error has left half done
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

    def step(self, tokens: Sequence[int]) -> tuple[Tensor, Context]:
        """Read one more token of each text in one pass."""
        padding: dict[str, Tensor] = {}
        if min(self.lengths) < max(self.lengths):
            lengths, total = torch.tensor(self.lengths), max(self.lengths) + 1
            mask = torch.arange(total) >= total - 1 - lengths[:, None]  # (B, T)
            padding = {"attention_mask": mask.long().to(self.device), "position_ids": lengths[:, None].to(self.device)}
        output, context = self.model.read(
            torch.tensor(tokens, device=self.device)[:, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **padding,
        )
        self.lengths = [length + 1 for length in self.lengths]
        return output.logits[:, -1], context


def _resize(layer: Any, total: int) -> None:
    """Make a layer look as if this many tokens had been read: pad it on the left, or cut padding off there."""
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
    """A cache for each text, or none where the model has none that could be kept: then texts are read anew."""

    model: KnnForCausalLM
    texts: list[Prompt] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.texts)

    def join(self, prompt: Prompt, copies: int) -> None:
        """Keep the text with its own cache."""
        self.texts += [Prompt([*prompt.tokens], prompt.done, copy.deepcopy(prompt.cache)) for _ in range(copies - 1)]
        self.texts.append(prompt)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop the other texts."""
        self.texts = [self.texts[row] for row in rows]

    def step(self, tokens: Sequence[int]) -> tuple[Tensor, Context]:
        """Read one more token of each text, one after the other."""
        heard = []
        for text, token in zip(self.texts, tokens, strict=True):
            text.tokens.append(token)
            heard.append(read_prompt(self.model, text, most=len(text.tokens), every=False))
        return torch.cat([logits for logits, _ in heard]), join_contexts([context for _, context in heard])


def join_contexts(contexts: Sequence[Context]) -> Context:
    """Put the rows of several contexts one after another."""
    if len(contexts) == 1:
        return contexts[0]
    seen = {source: torch.cat([context.states[source] for context in contexts]) for source in contexts[0].states}
    return Context(seen, [run for context in contexts for run in context.spans])


@torch.inference_mode()
def choose_rows(model: KnnForCausalLM) -> RowCaches:
    """Say how this model can read several texts: tried on two texts, whose next logits must be as each alone gives."""
    if not caches(model):
        return SequentialCache(model)
    texts = [[model.mixture.lm.start_token] * 2, [model.mixture.lm.start_token] * 5]
    together, apart = BatchedCache(model), SequentialCache(model)
    try:
        for rows in (together, apart):
            for tokens in texts:
                prompt = Prompt(list(tokens))
                read_prompt(model, prompt, most=len(tokens), every=False)
                if not _mergeable(prompt.cache, len(tokens)):
                    return SequentialCache(model)
                rows.join(prompt, 1)
        step = [1, 2]
        found, right = together.step(step)[0].float(), apart.step(step)[0].float()
    except (KnnlmError, RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        # Whatever a model of an unknown kind does with a padded cache, it can be read by itself.
        return SequentialCache(model)
    slack = 1e-3 if right.dtype == model.base.dtype else 5e-2
    close = torch.allclose(found, right, rtol=slack, atol=slack * float(right.abs().max()))
    return BatchedCache(model) if close else SequentialCache(model)


def _mergeable(cache: Any, length: int) -> bool:
    """Say whether a cache is made of (B, H, T, D) layers only, of which we know what to do with padding."""
    if not isinstance(cache, DynamicCache):
        return False
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
            return False
        usual = type(layer).update in (DynamicLayer.update, DynamicSlidingWindowLayer.update)
        if not usual or layer.get_seq_length() != length:
            return False
    return True
