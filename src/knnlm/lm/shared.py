"""A model whose first blocks are those of another one, which computes their output for both.

A decoder of which only the last blocks were trained has the other blocks, and the embeddings, in common with the
language model that it is mixed with. `share_blocks` replaces it by its last blocks, which read the states that enter
them in the language model. Nothing is copied, and tensors outside of the blocks that are equal are shared. Whether a
model can be split like this is found by trying: what the last blocks compute, at once and step by step with a cache, is
compared with the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from knnlm.errors import KeyLayerError
from knnlm.lm.causal import CausalLM, eval_mode
from knnlm.lm.hooks import Tap
from knnlm.lm.key_layers import KeyLayer, find_key_layer
from knnlm.lm.layers import layer_list, layer_list_path, per_layer_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK_INPUT = "block_input"  # the states that enter a block

_PROBE_LENGTH = 9  # tokens
_MAX_CHANGE, _MAX_HALF_CHANGE = 1e-3, 0.02  # of logits, relative, in float32 and in half precision


class TopLM(CausalLM):
    """The last blocks of a model, from block `first` on, and its head.

    Layers have the numbers that they have in the whole model.
    """

    def __init__(self, whole: CausalLM, top: PreTrainedModel, first: int) -> None:
        own = whole.key_layer
        super().__init__(top, whole.tokenizer, name=whole.name, key_layer=own.place, layer=own.layer - first)
        self.first = first
        self.key_layer = self._numbered(self.key_layer)
        self.__dict__["identity"] = whole.identity  # of all blocks, in place of the cached property

    def find_layer(self, place: str, layer: int) -> KeyLayer:
        """Return a place in a layer of the whole model; raise KeyLayerError for one that is not among the last."""
        number = layer % self.key_layer.layers
        if number < self.first:
            raise KeyLayerError(
                f"Layer {number} of {self.name} is not read: its first {self.first} layers are those of the model."
            )
        if (place, number) == (self.key_layer.place, self.key_layer.layer):
            return self.key_layer
        return self._numbered(find_key_layer(self.model, place, number - self.first))

    def _numbered(self, layer: KeyLayer) -> KeyLayer:
        return replace(layer, layer=layer.layer + self.first, layers=layer.layers + self.first)

    def _run(self, ids: Tensor, sources: Mapping[str, Tensor]) -> Any:  # noqa: ARG002  (the states stand for them)
        """Run the last blocks on the states that enter them."""
        return self.model(inputs_embeds=sources["inputs_embeds"], use_cache=False)


def block_input(lm: CausalLM, number: int) -> KeyLayer:
    """Return the place before a block of a model."""
    blocks, path = layer_list(lm.model), layer_list_path(lm.model)
    tap = Tap(blocks[number], blocks[number], f"{path}.{number}")
    return KeyLayer(BLOCK_INPUT, number, len(blocks), tap.path, lm.width, tap)


def share_blocks(base: CausalLM, other: CausalLM, lowest: int | None = None) -> CausalLM:
    """Return the last blocks of a model if the others are those of a base model, else the model itself.

    `lowest` is the lowest layer of the model whose states are needed; None: its logits alone.
    """
    if base.has_encoder or other.has_encoder or isinstance(other, TopLM):
        return other
    # The place of the model's own keys is looked up in the last blocks.
    needed = other.key_layer.layer if lowest is None else min(lowest, other.key_layer.layer)
    first = min(equal_blocks(base.model, other.model), needed)
    if first < 1:
        return other
    try:
        top = last_blocks(other.model, first, base.model)
        works = _is_same(base, other.model, top, first)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # of any family that is not made like this; they have no common base class
        return other
    return TopLM(other, top, first) if works else other


def share_tensors(base: CausalLM, other: CausalLM) -> CausalLM:
    """Return a whole model with the base model's tensors in place of its own ones that are equal."""
    own = other.key_layer
    model = last_blocks(other.model, 0, base.model)
    same = CausalLM(model, other.tokenizer, name=other.name, key_layer=own.place, layer=own.layer)
    same.__dict__["identity"] = other.identity  # in place of the cached property: the weights are equal
    return same


def equal_blocks(base: PreTrainedModel, other: PreTrainedModel) -> int:
    """Return how many of the first blocks of two models are equal, at most all but one; 0 if embeddings differ."""
    if type(base) is not type(other) or base.device != other.device or base.dtype != other.dtype:
        return 0
    count = int(other.config.get_text_config().num_hidden_layers)
    embeddings = (base.get_input_embeddings(), other.get_input_embeddings())
    if count != base.config.get_text_config().num_hidden_layers or not _equal(*embeddings):
        return 0
    pairs = zip(layer_list(base), layer_list(other), strict=True)
    equal = next((number for number, pair in enumerate(pairs) if not _equal(*pair)), count)
    return min(equal, count - 1)


def _equal(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def last_blocks(model: PreTrainedModel, first: int, base: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the blocks from `first` on, with their tensors, or equal ones of the base model."""
    known = dict(base.named_parameters())
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for name, weight in model.named_parameters():
        own = known.get(name)
        if own is not None and own.shape == weight.shape and torch.equal(own, weight):
            shared[id(weight)] = own
    top = copy.deepcopy(model, shared)
    path = layer_list_path(top)
    blocks = list(layer_list(top))[first:]
    text, options = top.config.get_text_config(), per_layer_options(top.config)
    for name, value in options.items():  # in place: the blocks refer to this configuration
        setattr(text, name, value[first:])
    text.num_hidden_layers = len(blocks)
    for module in (module for block in blocks for module in block.modules()):
        if isinstance(number := getattr(module, "layer_idx", None), int):
            module.layer_idx = number - first  # type: ignore[assignment]
    parent, _, name = path.rpartition(".")
    setattr(top.get_submodule(parent), name, nn.ModuleList(blocks))
    return top


@torch.no_grad()
def _is_same(base: CausalLM, whole: PreTrainedModel, top: PreTrainedModel, first: int) -> bool:
    """Whether the last blocks compute the logits of the whole model from the states of the base model."""
    from transformers import DynamicCache

    ids = (torch.arange(5, 5 + _PROBE_LENGTH) % base.vocab_size)[None].to(base.device)
    with eval_mode(base.model), eval_mode(whole), eval_mode(top):
        with block_input(base, first).capture() as captured:
            base.model(input_ids=ids, use_cache=False)
        states, wanted = captured[-1], whole(input_ids=ids, use_cache=False).logits
        cache: Any = DynamicCache(config=top.config)
        found = [top(inputs_embeds=states, use_cache=False).logits]
        pieces = states.split([_PROBE_LENGTH - 2, 1, 1], 1)
        steps = [top(inputs_embeds=piece, past_key_values=cache, use_cache=True).logits for piece in pieces]
        found.append(torch.cat(steps, 1))
    allowed = _MAX_HALF_CHANGE if wanted.dtype in (torch.bfloat16, torch.float16) else _MAX_CHANGE
    wanted = wanted.float()
    return all(float((own.float() - wanted).norm()) <= allowed * float(wanted.norm()) for own in found)
