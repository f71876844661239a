"""Find where a decoder's hidden states are read as keys. Knows no names of models, modules or classes.

A place is found by watching a short forward pass: which modules a block calls, with which tensors, and how
they behave when they are called again with other tensors.

- The *stack* is the list of modules that run one after another and keep the shape of the hidden states.
- A *norm* has no matrix, and does not care how long its input vectors are.
- The *mixer* has matrices and lets earlier positions change later ones: attention, or a state space model.
- The *feed-forward net* has matrices and treats every position alone.

The norm that feeds a module is the one *in the same block* that made the module's input. Where there is none
(OLMo 2; the attention of OPT-350m) the place before the norm is the module's input itself.

Does not know about tokens, texts, or what keys are used for; nor about modules that run without being called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from knnlm.errors import KeyLayerError, ModelError
from knnlm.lm.hooks import Tap, capture, hidden_states, hooked, items

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

_LENGTH = 8  # tokens in a probe


@dataclass(frozen=True)
class KeyLayer:
    """One place in one block of a model, ready to be read."""

    place: str
    layer: int
    layers: int
    module: str
    width: int
    _tap: Tap = field(repr=False, compare=False)

    def capture(self, *, stop: bool = False) -> AbstractContextManager[list[Tensor]]:
        """Collect the keys (B, T, D) of the passes inside; `stop` leaves the pass and the block at the key."""
        return capture(self._tap, self.width, stop)


def find_key_layer(model: PreTrainedModel, place: str = "ffn_input", layer: int = -1) -> KeyLayer:
    """Find a place in a block of the model; negative layers count from the last."""
    if place not in PLACES:
        raise KeyLayerError(f"There is no place {place!r}. The places are {', '.join(PLACES)}.")
    with _undisturbed(model):
        blocks, width = _find_stack(model)
        count, name = len(blocks), type(model).__name__
        if not -count <= layer < count:
            raise KeyLayerError(
                f"{name} has {count} layers, so there is no layer {layer}. Give a layer from {-count} to {count - 1}."
            )
        probe = _Probe(model, blocks, layer % count, width)
        taps = probe.taps()
        if place not in taps:
            raise KeyLayerError(
                f"{place} was not found in layer {layer % count} of {count} in {name}: "
                f"{probe.why_not(place)}. This layer has {', '.join(taps)}."
            )
    return KeyLayer(place, layer % count, count, taps[place].path, width, taps[place])


def check_causal(model: PreTrainedModel) -> None:
    """Refuse a model in which a position sees later tokens, or which reads its input with an encoder."""
    need = "A decoder-only model is needed, such as GPT-2 or Llama."
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{type(model).__name__} is an encoder-decoder model. {need}")
    half, ids = _LENGTH // 2, torch.arange(5, 5 + _LENGTH)
    with _undisturbed(model):
        here = _forward(model, ids)
        there = _forward(model, torch.cat([ids[:half], ids[half:] + _LENGTH]))
    if _change(here[:half], there[:half]) > max(1e-4, 4 * torch.finfo(here.dtype).eps):
        raise ModelError(f"In {type(model).__name__} later tokens change the states of earlier ones. {need}")


@dataclass(eq=False)
class _Call:
    """One call of a module; the copies (T, D) hold what the hidden states were at that time."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    callers: tuple[_Call, ...]  # outermost first
    taken: Tensor | None
    taken_copy: Tensor
    given: Tensor | None = None
    given_copy: Tensor = field(default_factory=lambda: torch.empty(0))

    def again(self, hidden: Tensor) -> Tensor:
        """Call the module again with other hidden states (T, D), and all else the same."""
        assert self.taken is not None
        other = hidden.to(self.taken).view(self.taken.shape)
        args = (other if value is self.taken else value for value in self.args)
        kwargs = {key: other if value is self.taken else value for key, value in self.kwargs.items()}
        return _copy(hidden_states(items(self.module(*args, **kwargs)), None, rows=_LENGTH))

    @cached_property
    def mixes(self) -> bool:
        """Whether the first half of the positions changes what comes out at the second half."""
        other = self.taken_copy.clone()
        other[: _LENGTH // 2].neg_()
        here, there = (self.again(hidden)[_LENGTH // 2 :] for hidden in (self.taken_copy, other))
        # A mixture of experts groups tokens anew and so rounds differently, which is not a change.
        return _change(here, there) > max(1e-4, torch.finfo(self.taken_copy.dtype).eps)


@contextmanager
def _undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode without gradients; training mode and random state come back as they were."""
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
    """Run the model on one short text (T,); return its first output, hidden states or logits, as (T, ...)."""
    # Weights that wait on disk are on "meta"; those at hand say where the model runs.
    device = next((weight.device for weight in model.parameters() if weight.device.type != "meta"), None)
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", _LENGTH)
    try:
        output = model(input_ids=(ids % vocabulary)[None].to(device), use_cache=False)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot read {_LENGTH} tokens: {error!r}. A decoder-only model is needed."
        ) from error
    return cast(Tensor, items(output)[0][0])


def _record(model: PreTrainedModel, modules: Mapping[str, nn.Module], width: int | None) -> list[_Call]:
    """Run the model once and note every call of these modules, in the order in which they begin."""
    calls: list[_Call] = []
    running: list[_Call] = []
    paths = {module: path for path, module in modules.items()}

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        taken = hidden_states((*args, *kwargs.values()), width, rows=_LENGTH)
        calls.append(_Call(paths[module], module, args, kwargs, tuple(running), taken, _copy(taken)))
        running.append(calls[-1])

    def end(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
        call = running.pop()
        call.given = hidden_states(items(output), width, rows=_LENGTH)
        call.given_copy = _copy(call.given)

    with hooked(paths, begin=begin, end=end):
        _forward(model, torch.arange(5, 5 + _LENGTH))
    return calls


def _find_stack(model: PreTrainedModel) -> tuple[dict[str, nn.Module], int]:
    """The list whose members run one after another, as long as the configuration says; and its width."""
    lists = [
        {f"{path}.{name}": block for name, block in module.named_children()}
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]
    calls = _record(model, {path: block for blocks in lists for path, block in blocks.items()}, None)
    wanted = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    best, stack = (False, 0, 0), None
    for blocks in lists:
        own = [call for call in calls if call.path in blocks]
        shapes = {None if x is None else tuple(x.shape) for call in own for x in (call.taken, call.given)}
        shape = shapes.pop() if len(shapes) == 1 else None
        rank = (len(blocks) == wanted, len(blocks), sum(map(_size, blocks.values())))
        if shape and shape[:-1] == (1, _LENGTH) and [call.path for call in own] == list(blocks) and rank > best:
            best, stack = rank, (blocks, shape[-1])
    if stack is None:
        raise KeyLayerError(
            f"{type(model).__name__} has no list of layers that run one after another on (B, T, D) states. "
            "A decoder-only transformer is needed."
        )
    return stack


class _Probe:
    """What was seen in one block, and after the last one."""

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
        takers = (call for call in after if _equal(call.taken_copy, last.given_copy) and self._is_norm(call))
        self.final_norm = next((call.module for call in takers), None)

    def taps(self) -> dict[str, Tap]:
        """All the places that this block has."""
        taps = {}
        mixer = next((call for call in self._parts(self.block) if self._kind(call) == "mixer"), None)
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
        """Say what was seen instead of the place."""
        if place == "output_normed":
            return 'no norm takes the last layer\'s output; use "output"'
        names = {call: call.path.removeprefix(f"{self.block.path}.") for call in self._parts(self.block)}
        return "the layer calls " + (", ".join(f"{names[c]} ({self._kind(c)})" for c in names) or "nothing")

    def _feed_forward(self, mixer: _Call | None) -> _Call | None:
        """The first large module that treats positions alone, beside the mixer or beside what holds it."""
        if mixer is None and self.block.mixes:
            return None  # attention is no module here, so its matrices would look like a feed-forward net
        for level in (self.block, mixer.callers[-1] if mixer else self.block):
            alone = [call for call in self._parts(level) if self._kind(call) == "position-wise"]
            largest = max((_size(call.module) for call in alone), default=0)
            for call in alone:
                if 2 * _size(call.module) >= largest:  # not a router or a gate
                    return self._behind_norm(call)
        return None

    def _parts(self, level: _Call) -> list[_Call]:
        return [call for call in self.inside if call.callers[-1] is level]

    def _kind(self, call: _Call) -> str:
        if call in self.norms:
            return "norm"
        if call.taken is None or not self._has_matrix(call.module):
            return "other"
        return "mixer" if call.mixes else "position-wise"

    def _has_matrix(self, module: nn.Module) -> bool:
        # Quantised weights may be buffers, or packed into one column.
        weights = (*module.parameters(), *module.buffers())
        return any(weight.dim() >= 2 and weight.numel() > self.width for weight in weights)

    def _is_norm(self, call: _Call) -> bool:
        if call.taken is None or call.given is None or self._has_matrix(call.module):
            return False
        rows = nn.functional.normalize(call.taken_copy.float(), dim=-1) * self.width**0.5
        return _equal(call.again(8 * rows), call.again(16 * rows))

    def _feeder(self, call: _Call) -> _Call | None:
        """The norm whose output is the call's input: the same tensor, or else the same numbers."""
        earlier = [norm for norm in self.norms if self.inside.index(norm) < self.inside.index(call)]
        same = [norm for norm in earlier if norm.given is call.taken]
        alike = [norm for norm in earlier if _parallel(norm.given_copy, call.taken_copy)]
        return next(reversed(same or alike), None)

    def _behind_norm(self, call: _Call) -> _Call:
        """Go into a module that first normalises its input (DBRX), to the one that works on the result."""
        within = [inner for inner in self.inside if call in inner.callers]
        readers = [inner for inner in within if _equal(inner.taken_copy, call.taken_copy)]
        if any(self._has_matrix(reader.module) for reader in readers):
            return call
        for norm in (reader for reader in readers if reader in self.norms):
            for inner in within:
                if _equal(inner.taken_copy, norm.given_copy) and self._kind(inner) == self._kind(call):
                    return self._behind_norm(inner)
        return call

    def _input_of(self, call: _Call) -> Tap:
        calls = [other for other in self.inside if other.module is call.module]
        return Tap(self.block.module, call.module, call.path, turn=calls.index(call))


def _copy(hidden: Tensor | None) -> Tensor:
    # To one device, since the layers of a model may be on several.
    return torch.empty(0) if hidden is None else hidden.detach().to("cpu", copy=True).reshape(_LENGTH, -1)


def _change(here: Tensor, there: Tensor) -> float:
    """The largest change of a row, relative to the row's length."""
    here, there = here.float(), there.float()
    rows = (here - there).norm(dim=-1) / here.norm(dim=-1).clamp_min(1e-9)
    return float(rows.max()) if here.numel() else 0.0


def _equal(here: Tensor, there: Tensor) -> bool:
    return here.numel() > 0 and here.shape == there.shape and _change(here, there) < 1e-2  # types may differ


def _parallel(here: Tensor, there: Tensor) -> bool:
    """Equal up to one factor, since some models scale what a norm gives (Falcon-H1)."""
    return _equal(here.float() / here.float().norm(), there.float() / there.float().norm())


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in (*module.parameters(), *module.buffers()))
