"""Find where a decoder's hidden states are captured as keys, without knowing its modules' names.

A place is found by observing a short forward pass: which modules a block calls, with which tensors, and how they behave
when they are called again with other tensors.

- The *stack* is the list of modules that run one after another and keep the shape of the hidden states.
- A *norm* has no matrix, and its output does not depend on the length of its input vectors.
- The *mixer* has matrices and lets earlier positions change later ones: attention, or a state space model.
- *Cross-attention* has matrices, treats every position alone, and depends on the states of the encoder.
- The *feed-forward net* has matrices, treats every position alone, and depends on nothing else.

In an encoder-decoder model only the decoder is searched: the source of the probe has another length than the target, so
modules of the encoder do not run on states of the target's shape.

The norm that feeds a module is the one *in the same block* that produced the module's input. Where there is none
(OLMo 2; the attention of OPT-350m) the place before the norm is the module's input itself. Modules that run without
being called are not found.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from knnlm.errors import KeyLayerError, KnnlmWarning, ModelError
from knnlm.lm.hooks import Tap, as_tuple, capture, hidden_states, hooked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLACES: tuple[str, ...] = (
    "ffn_input",
    "ffn_input_pre_norm",
    "attention_input",
    "attention_input_pre_norm",
    "output",
    "output_normed",
)

_PROBE_LENGTH = 8  # tokens
_SOURCE_LENGTH = 5  # tokens that the encoder reads; another number than the decoder's

# By the perplexity of the places in Table 5 of the kNN-LM paper; the others are worse than these.
_DEFAULT_PLACES = ("ffn_input", "attention_input", "output_normed", "output")


@dataclass(frozen=True)
class KeyLayer:
    """One place in one block of a model, where keys are captured."""

    place: str
    layer: int
    layers: int
    module: str
    width: int
    _tap: Tap = field(repr=False, compare=False)

    def capture(self, *, stop: bool = False) -> AbstractContextManager[list[Tensor]]:
        """Collect the (B, T, D) keys of the passes inside the context; `stop` ends pass and context at the key."""
        return capture(self._tap, self.width, stop)


def find_key_layer(model: PreTrainedModel, place: str | None = "ffn_input", layer: int = -1) -> KeyLayer:
    """Return a place in a block of the model's decoder; negative layers count from the last.

    None is the best place that the block has: `ffn_input`, or another one with a warning.
    """
    if place is not None and place not in PLACES:
        raise KeyLayerError(f"There is no place {place!r}. The places are {', '.join(PLACES)}.")
    with _undisturbed(model):
        blocks, width = _find_stack(model)
        count, name = len(blocks), type(model).__name__
        if not -count <= layer < count:
            raise KeyLayerError(
                f"{name} has {count} layers, so there is no layer {layer}. Use a layer from {-count} to {count - 1}."
            )
        probe = _Probe(model, blocks, layer % count, width)
        taps = probe.taps()
    chosen = place or next(each for each in _DEFAULT_PLACES if each in taps)
    if chosen not in taps:
        raise KeyLayerError(
            f"{chosen} was not found in layer {layer % count} of {count} in {name}: "
            f"{probe.why_not(chosen)}. This layer has {', '.join(taps)}."
        )
    if place is None and chosen != PLACES[0]:
        warnings.warn(
            f"{name} has no feed-forward network of its own in layer {layer % count}, so keys are read at {chosen}. "
            "--key-layer names another place.",
            KnnlmWarning,
            stacklevel=2,
        )
    return KeyLayer(chosen, layer % count, count, taps[chosen].path, width, taps[chosen])


def check_causal(model: PreTrainedModel) -> None:
    """Raise an error for a model with an encoder, or in which a position attends to later tokens."""
    need = "A decoder-only model is needed, such as GPT-2 or Llama."
    if has_encoder(model):
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder model. {need} Open this one with knnlm.open_lm."
        )
    _check_order(model, need)


def check_seq2seq(model: PreTrainedModel) -> None:
    """Raise an error for a model without an encoder, or whose decoder attends to later tokens."""
    need = "An encoder-decoder model is needed, such as Marian or T5."
    if not has_encoder(model):
        raise ModelError(f"{type(model).__name__} has no encoder. {need}")
    _check_order(model, need)


def has_encoder(model: PreTrainedModel) -> bool:
    """Whether a model reads a source with an encoder."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _check_order(model: PreTrainedModel, need: str) -> None:
    """Raise an error if later tokens change the states of earlier ones."""
    half, ids = _PROBE_LENGTH // 2, torch.arange(5, 5 + _PROBE_LENGTH)
    with _undisturbed(model):
        here = _forward(model, ids)
        there = _forward(model, torch.cat([ids[:half], ids[half:] + _PROBE_LENGTH]))
    if _change(here[:half], there[:half]) > max(1e-4, 4 * torch.finfo(here.dtype).eps):
        raise ModelError(f"In {type(model).__name__} later tokens change the states of earlier ones. {need}")


@dataclass(eq=False)
class _Call:
    """One call of a module, with copies (T, D) of its hidden states at that time."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    callers: tuple[_Call, ...]  # outermost first
    input: Tensor | None
    input_copy: Tensor
    output: Tensor | None = None
    output_copy: Tensor = field(default_factory=lambda: torch.empty(0))

    def repeat(self, hidden: Tensor) -> Tensor:
        """Call the module again with other hidden states (T, D) and otherwise the same arguments."""
        assert self.input is not None
        other = hidden.to(self.input).view(self.input.shape)
        args = (other if value is self.input else value for value in self.args)
        kwargs = {key: other if value is self.input else value for key, value in self.kwargs.items()}
        return _copy(hidden_states(as_tuple(self.module(*args, **kwargs)), None, rows=_PROBE_LENGTH))

    @cached_property
    def mixes(self) -> bool:
        """Whether the first half of the positions affects the output at the second half."""
        other = self.input_copy.clone()
        other[: _PROBE_LENGTH // 2].neg_()
        here, there = (self.repeat(hidden)[_PROBE_LENGTH // 2 :] for hidden in (self.input_copy, other))
        # A mixture of experts groups tokens differently and so rounds differently, which is not a change.
        return _change(here, there) > max(1e-4, torch.finfo(self.input_copy.dtype).eps)

    @cached_property
    def crosses(self) -> bool:
        """Whether states of another length than the input, those of an encoder, affect the output."""
        given = (*self.args, *self.kwargs.values())
        source = next((value for value in given if _is_source(value)), None)
        if source is None:
            return False
        here = self.repeat(self.input_copy)
        args = tuple(-value if value is source else value for value in self.args)
        kwargs = {key: -value if value is source else value for key, value in self.kwargs.items()}
        return _change(here, replace(self, args=args, kwargs=kwargs).repeat(self.input_copy)) > 1e-4


@contextmanager
def _undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Switch to evaluation mode without gradients; afterwards restore training mode and random state."""
    training = [module for module in model.modules() if module.training]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices), torch.no_grad():
        model.train(False)
        try:
            yield
        finally:
            for module in training:
                module.training = True


def _forward(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Run the model on one short text (T,) and return its first output, hidden states or logits, as (T, ...)."""
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", _PROBE_LENGTH)
    text = (ids % vocabulary)[None].to(_device(model))
    inputs = {"input_ids": text} if not has_encoder(model) else {**_source(model), "decoder_input_ids": text}
    try:
        output = model(**inputs, use_cache=False)
    except Exception as error:
        need = "A decoder-only or encoder-decoder model is needed."
        raise ModelError(f"{type(model).__name__} cannot read {_PROBE_LENGTH} tokens: {error!r}. {need}") from error
    return cast(Tensor, as_tuple(output)[0][0])


def _device(model: PreTrainedModel) -> torch.device | None:
    # Offloaded weights are on "meta"; the others tell where the model runs.
    return next((weight.device for weight in model.parameters() if weight.device.type != "meta"), None)


def _source(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a short input of the encoder: tokens, or the features of a sound of the length that the model needs."""
    name, config, device = model.main_input_name, model.config, _device(model)
    if name == "input_ids":
        return {name: torch.arange(5, 5 + _SOURCE_LENGTH)[None].to(device) % config.get_text_config().vocab_size}
    if name != "input_features" or not hasattr(config, "num_mel_bins"):
        raise ModelError(f"The encoder of {type(model).__name__} reads neither text nor log-mel features ({name}).")
    frames = 2 * getattr(config, "max_source_positions", _PROBE_LENGTH)
    waves = torch.arange(config.num_mel_bins * frames, device=device, dtype=model.dtype).sin()
    return {name: waves.view(1, config.num_mel_bins, frames)}


def _record(model: PreTrainedModel, modules: Mapping[str, nn.Module], width: int | None) -> list[_Call]:
    """Run the model once and return every call of these modules, in the order in which they begin."""
    calls: list[_Call] = []
    running: list[_Call] = []
    paths = {module: path for path, module in modules.items()}

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = hidden_states((*args, *kwargs.values()), width, rows=_PROBE_LENGTH)
        calls.append(_Call(paths[module], module, args, kwargs, tuple(running), hidden, _copy(hidden)))
        running.append(calls[-1])

    def end(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
        call = running.pop()
        call.output = hidden_states(as_tuple(output), width, rows=_PROBE_LENGTH)
        call.output_copy = _copy(call.output)

    with hooked(paths, begin=begin, end=end):
        _forward(model, torch.arange(5, 5 + _PROBE_LENGTH))
    return calls


def _find_stack(model: PreTrainedModel) -> tuple[dict[str, nn.Module], int]:
    """Return the list of blocks that run one after another, of the configured length if possible, and its width."""
    lists = [
        {f"{path}.{name}": block for name, block in module.named_children()}
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]
    calls = _record(model, {path: block for blocks in lists for path, block in blocks.items()}, None)
    wanted = _configured_layers(model)
    best, stack = (False, 0, 0), None
    for blocks in lists:
        own = [call for call in calls if call.path in blocks]
        shapes = {None if x is None else tuple(x.shape) for call in own for x in (call.input, call.output)}
        shape = shapes.pop() if len(shapes) == 1 else None
        rank = (len(blocks) == wanted, len(blocks), sum(map(_size, blocks.values())))
        if shape and shape[:-1] == (1, _PROBE_LENGTH) and [call.path for call in own] == list(blocks) and rank > best:
            best, stack = rank, (blocks, shape[-1])
    if stack is None:
        raise KeyLayerError(
            f"{type(model).__name__} has no list of layers that run one after another on (B, T, D) states. "
            "A decoder-only transformer is needed."
        )
    return stack


def _configured_layers(model: PreTrainedModel) -> int | None:
    """Return the number of the decoder's layers according to the configuration."""
    config = model.config.get_text_config()
    # In an encoder-decoder model, the last name is the encoder's number.
    names = ("decoder_layers", "num_decoder_layers") if has_encoder(model) else ()
    counts = (getattr(config, name, None) for name in (*names, "num_hidden_layers"))
    return next((count for count in counts if isinstance(count, int)), None)


class _Probe:
    """The calls observed in one block, and after the last one."""

    def __init__(self, model: PreTrainedModel, blocks: dict[str, nn.Module], layer: int, width: int) -> None:
        here, end = list(blocks)[layer], list(blocks)[-1]
        others = {module for block in blocks.values() for module in block.modules()}
        others -= {blocks[end], *blocks[here].modules()}
        watched = {path: module for path, module in model.named_modules() if module not in others}
        calls = _record(model, watched, width)
        self.width = width
        self.block = next(call for call in calls if call.path == here)
        self.inside = [call for call in calls if self.block in call.callers]
        self.norms = [call for call in self.inside if self._is_norm(call)]
        last = next(call for call in calls if call.path == end)
        after = [call for call in calls[calls.index(last) + 1 :] if last not in call.callers]
        takers = (call for call in after if _equal(call.input_copy, last.output_copy) and self._is_norm(call))
        self.final_norm = next((call.module for call in takers), None)

    def taps(self) -> dict[str, Tap]:
        """Return all the places that this block has."""
        taps = {}
        mixer = next((call for call in self._children(self.block) if self._kind(call) == "mixer"), None)
        mixer = mixer and self._behind_norm(mixer)
        for name, call in (("ffn_input", self._feed_forward(mixer)), ("attention_input", mixer)):
            if call is not None:
                taps[name] = self._input_of(call)
                taps[f"{name}_pre_norm"] = self._input_of(self._feeder(call) or call)
        taps["output"] = Tap(self.block.module, self.block.module, self.block.path, output=True)
        if self.final_norm is not None:
            taps["output_normed"] = replace(taps["output"], then=self.final_norm)
        return taps

    def why_not(self, place: str) -> str:
        """Return what was observed instead of the place."""
        if place == "output_normed":
            return 'no norm takes the last layer\'s output; use "output"'
        names = {call: call.path.removeprefix(f"{self.block.path}.") for call in self._children(self.block)}
        return "the layer calls " + (", ".join(f"{names[c]} ({self._kind(c)})" for c in names) or "nothing")

    def _feed_forward(self, mixer: _Call | None) -> _Call | None:
        """Return the first large module that treats positions alone, beside the mixer or beside its parent."""
        if mixer is None and self.block.mixes:
            return None  # attention is no module here, so its matrices would pass for a feed-forward net
        for level in (self.block, mixer.callers[-1] if mixer else self.block):
            alone = [call for call in self._children(level) if self._kind(call) == "position-wise"]
            largest = max((_size(call.module) for call in alone), default=0)
            for call in alone:
                if 2 * _size(call.module) >= largest:  # not a router or a gate
                    return self._behind_norm(call)
        return None

    def _children(self, level: _Call) -> list[_Call]:
        return [call for call in self.inside if call.callers[-1] is level]

    def _kind(self, call: _Call) -> str:
        if call in self.norms:
            return "norm"
        if call.input is None or not self._has_matrix(call.module):
            return "other"
        if call.mixes:
            return "mixer"
        return "cross-attention" if call.crosses else "position-wise"

    def _has_matrix(self, module: nn.Module) -> bool:
        # Quantised weights may be buffers, or packed into one column.
        weights = (*module.parameters(), *module.buffers())
        return any(weight.dim() >= 2 and weight.numel() > self.width for weight in weights)

    def _is_norm(self, call: _Call) -> bool:
        if call.input is None or call.output is None or self._has_matrix(call.module):
            return False
        rows = nn.functional.normalize(call.input_copy.float(), dim=-1) * self.width**0.5
        return _equal(call.repeat(8 * rows), call.repeat(16 * rows))

    def _feeder(self, call: _Call) -> _Call | None:
        """Return the norm whose output is the call's input: the same tensor, or else the same numbers."""
        earlier = [norm for norm in self.norms if self.inside.index(norm) < self.inside.index(call)]
        same = [norm for norm in earlier if norm.output is call.input]
        alike = [norm for norm in earlier if _parallel(norm.output_copy, call.input_copy)]
        return next(reversed(same or alike), None)

    def _behind_norm(self, call: _Call) -> _Call:
        """Return the inner module that gets the normalised input, where a module starts with a norm (DBRX)."""
        within = [inner for inner in self.inside if call in inner.callers]
        readers = [inner for inner in within if _equal(inner.input_copy, call.input_copy)]
        if any(self._has_matrix(reader.module) for reader in readers):
            return call
        for norm in (reader for reader in readers if reader in self.norms):
            for inner in within:
                if _equal(inner.input_copy, norm.output_copy) and self._kind(inner) == self._kind(call):
                    return self._behind_norm(inner)
        return call

    def _input_of(self, call: _Call) -> Tap:
        calls = [other for other in self.inside if other.module is call.module]
        return Tap(self.block.module, call.module, call.path, turn=calls.index(call))


def _is_source(value: Any) -> bool:
    """Whether an argument can be the states of an encoder: (1, S, D) with another length than the probe."""
    states = isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3
    return states and value.shape[:2].numel() != _PROBE_LENGTH


def _copy(hidden: Tensor | None) -> Tensor:
    # To one device, since the layers of a model may be on several.
    return torch.empty(0) if hidden is None else hidden.detach().to("cpu", copy=True).reshape(_PROBE_LENGTH, -1)


def _change(here: Tensor, there: Tensor) -> float:
    """Return the largest change of a row, relative to the norm of the row."""
    here, there = here.float(), there.float()
    rows = (here - there).norm(dim=-1) / here.norm(dim=-1).clamp_min(1e-9)
    return float(rows.max()) if here.numel() else 0.0


def _equal(here: Tensor, there: Tensor) -> bool:
    return here.numel() > 0 and here.shape == there.shape and _change(here, there) < 1e-2  # dtypes may differ


def _parallel(here: Tensor, there: Tensor) -> bool:
    """Whether two tensors are equal up to one factor, since some models scale the output of a norm (Falcon-H1)."""
    return _equal(here.float() / here.float().norm(), there.float() / there.float().norm())


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in (*module.parameters(), *module.buffers()))
