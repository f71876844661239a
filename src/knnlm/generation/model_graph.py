"""The pass of a model over one new token of each text, or over the tokens of a draft, as a CUDA graph.

The language model reads every new token, and so does a decoder that is mixed with it, with a cache of its own. On a
GPU, launching the kernels of such a pass takes longer than running them. It is therefore captured once for each number
of texts, capacity of the cache and number of tokens, and replayed: keys and values are written into buffers of a fixed
size, at places that are inputs of the graph, and positions after each token are masked. A draft is padded to one of few
numbers of tokens; graphs that differ in that alone share their buffers.

The layers of the model's cache remain what `generate` reorders, repeats and crops. After a replayed pass they are
views of the buffers; layers that were changed since are copied into the buffers before the next one.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from knnlm.errors import KnnlmWarning
from knnlm.lm.causal import CausalLM, dynamic_shape_attention, eval_mode
from knnlm.lm.cuda_graph import WARM_RUNS, CapturedGraph, capture_graph
from knnlm.lm.key_layers import KeyLayer

MIN_CAPACITY, MAX_CAPACITY = 256, 8192  # tokens of a text; powers of two
MAX_POSITIONS = 1 << 17  # of all texts together: the buffers of a graph take as much memory as a cache
COUNTS = (1, 8, 32)  # tokens of a pass; others are padded to the next number
MAX_GRAPHS = 24  # of a model, of different shapes
KEPT_PASSES = 1000  # of a model, after which a graph that was not replayed makes room for another

_MAX_CHANGE, _MAX_HALF_CHANGE = 1e-3, 0.02  # of what a pass computes, relative, in float32 and in half precision
_EMBEDDED, _TOKENS = "inputs_embeds", "input_ids"


class _Shape(NamedTuple):
    """Equal for passes that one graph can compute."""

    thread: int  # the buffers of a graph are used by one thread, as a replay in another one would overwrite them
    rows: int
    capacity: int  # tokens of a text
    tokens: int  # of each text that are read, padding included
    read: tuple[str, torch.dtype, torch.device]
    layers: tuple[tuple[str, int], ...]
    logits: bool


@dataclass(frozen=True)
class ModelPass:
    """A pass of a model over the new tokens of a step."""

    model: CausalLM
    layers: Sequence[KeyLayer]  # whose states are wanted
    logits: bool  # whether the logits are wanted
    inputs: Mapping[str, Any]  # with the model's cache, if it has one

    def run(self) -> list[Tensor]:
        """Return the (B, T, D) states of each layer and, if wanted, the (B, T, V) logits last; extend the cache."""
        return self.compute(self.inputs)

    def compute(self, inputs: Mapping[str, Any]) -> list[Tensor]:
        """Return the same for other inputs."""
        model = self.model.model
        # Switching every module to evaluation takes as long as one block of a small model, so only where it is needed.
        with eval_mode(model) if model.training else nullcontext():
            output, states = run_model(model, self.layers, inputs)
        return [*states, output.logits] if self.logits else states

    @property
    def own_layers(self) -> list[DynamicLayer]:
        """The layers of the model's own cache."""
        return list(self.inputs["past_key_values"].layers)

    @property
    def argument(self) -> str:
        """The argument of the model that the new tokens, or the states that stand for them, are passed as."""
        return _EMBEDDED if _EMBEDDED in self.inputs else _TOKENS

    def shape(self) -> _Shape | None:
        """Return what a graph of the pass depends on; None: it is computed without a graph."""
        given = self.inputs.get(self.argument)
        if given is None or given.shape[1] > COUNTS[-1] or not capturable(given.device):
            return None
        if torch.is_grad_enabled() or torch.is_autocast_enabled(given.device.type) or not _supports(self.model):
            return None
        (rows, tokens), cache = given.shape[:2], self.inputs.get("past_key_values")
        before = _length(cache, rows, given.device)
        if before is None or not _are_plain(self.inputs, rows, tokens, before + tokens):
            return None
        count = next(each for each in COUNTS if each >= tokens)
        capacity = max(MIN_CAPACITY, 1 << (before + count).bit_length())  # larger than the text
        if capacity > MAX_CAPACITY or rows * capacity > MAX_POSITIONS:
            return None
        places = tuple((layer.place, layer.layer) for layer in self.layers)
        read = (self.argument, given.dtype, given.device)
        return _Shape(threading.get_ident(), rows, capacity, count, read, places, self.logits)


def run_model(model: Any, layers: Sequence[KeyLayer], inputs: Mapping[str, Any]) -> tuple[Any, list[Tensor]]:
    """Run a model, and return its output and the (B, T, D) states of each layer."""
    with dynamic_shape_attention(model.device), ExitStack() as hooks:
        captured = [hooks.enter_context(layer.capture()) for layer in layers]
        output = model(return_dict=True, **inputs)
    return output, [own[-1] for own in captured]


def capturable(device: torch.device) -> bool:
    """Whether passes on a device can be captured."""
    return device.type == "cuda"


def _supports(lm: CausalLM) -> bool:
    """Whether a model reads positions and masks from tensors; attention without a mask reads the whole buffers."""
    model = lm.model
    if model.training or lm.has_encoder:
        return False
    accepted = accepted_arguments(type(model).forward)
    attention = model.config.get_text_config()._attn_implementation
    return {"attention_mask", "position_ids"} <= accepted and attention in ("eager", "sdpa")


def _length(cache: Any, rows: int, device: torch.device) -> int | None:
    """Return the number of tokens in a cache; None where its layers are not of the simplest kind, equal and filled."""
    layers = getattr(cache, "layers", ())
    # Kinds of layers that are derived from this one have other states too.
    if not all(type(layer) is DynamicLayer and layer.is_initialized for layer in layers):
        return None
    found = {(len(layer.keys), layer.get_seq_length(), layer.keys.device) for layer in layers}
    length = next((length for _, length, _ in found), 0)
    return length if length and found == {(rows, length, device)} else None


def _are_plain(inputs: Mapping[str, Any], rows: int, tokens: int, total: int) -> bool:
    """Whether mask and positions are those of the last tokens of texts of `total` tokens."""
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None and mask.shape != (rows, total):
        return False
    if positions is None:
        return mask is None  # some families count the tokens of the mask
    return positions.dim() == 2 and len(positions) in (1, rows) and positions.shape[1] == tokens


@lru_cache(maxsize=16)
def accepted_arguments(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a forward method's arguments; cached, because inspecting them at every token is slow."""
    return frozenset(inspect.signature(forward).parameters)


class _Storage:
    """Keys and values (B, H, L, D) of one layer of a cache."""

    def __init__(self, like: DynamicLayer, capacity: int) -> None:
        assert like.keys is not None
        assert like.values is not None
        self.keys, self.values = (
            tensor.new_zeros(*tensor.shape[:2], capacity, tensor.shape[-1]) for tensor in (like.keys, like.values)
        )

    def begins(self, layer: DynamicLayer) -> bool:
        """Whether the states of a layer are the first ones of the buffers."""
        return all(
            tensor.data_ptr() == own.data_ptr() and tensor.stride() == own.stride()
            for tensor, own in ((layer.keys, self.keys), (layer.values, self.values))
            if tensor is not None
        )

    def release(self, layer: DynamicLayer) -> None:
        """Copy the states of a layer that are views of the buffers."""
        assert layer.keys is not None
        assert layer.values is not None
        if _share(layer.keys, self.keys) or _share(layer.values, self.values):
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()

    def copy_from(self, layer: DynamicLayer, *, clear: bool) -> None:
        """Let the buffers begin with the states of a layer; `clear` the rest, which may not be finite."""
        for tensor, own in ((layer.keys, self.keys), (layer.values, self.values)):
            assert tensor is not None
            own[:, :, : tensor.shape[2]].copy_(tensor)
            if clear:
                own[:, :, tensor.shape[2] :].zero_()

    def lend(self, layer: DynamicLayer, length: int) -> None:
        """Make the states of a layer the first ones of the buffers."""
        layer.keys, layer.values = self.keys.narrow(2, 0, length), self.values.narrow(2, 0, length)


class _Held:
    """The buffers of all layers, and the layers whose states they may contain."""

    def __init__(self, like: Sequence[DynamicLayer], capacity: int) -> None:
        self.storages = [_Storage(layer, capacity) for layer in like]
        self._users: list[ref[DynamicLayer]] = []  # which may be views of the buffers

    def hold(self, layers: Sequence[DynamicLayer]) -> None:
        """Let the buffers begin with the states of these layers, unless they do."""
        users = [user() for user in self._users]
        held = len(users) == len(layers) and all(user is layer for user, layer in zip(users, layers, strict=True))
        if held and all(own.begins(layer) for own, layer in zip(self.storages, layers, strict=True)):
            return
        for own, user, layer in zip(self.storages, users or layers, layers, strict=True):
            for each in (user, layer):
                if each is not None and each.is_initialized:
                    own.release(each)
            own.copy_from(layer, clear=not held)
        self._users = [ref(layer) for layer in layers]


class _Buffers(CacheLayerMixin):
    """One layer of a cache whose keys and values (B, H, L, D) of new tokens are written at a place (T,)."""

    keys: Tensor
    values: Tensor

    def __init__(self, storage: _Storage, place: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values, self.place = storage.keys, storage.values, place
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Leave the buffers, which are made with the layer."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write (B, H, T, D) keys and values at the place, and return the buffers."""
        self.keys.index_copy_(2, self.place, key_states)
        self.values.index_copy_(2, self.place, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the length and offset that a mask would have."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Return a number that is never that of the tokens: a graph would contain it, which the first replay shows."""
        return self.keys.shape[2] - 1

    def get_max_length(self) -> int:
        """Return the capacity."""
        return self.keys.shape[2]


def _share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class _Captured:
    """A graph, and the tensors that it reads."""

    graph: CapturedGraph

    def __init__(self, given: ModelPass, shape: _Shape, held: _Held) -> None:
        tokens, rows, count = given.inputs[given.argument], shape.rows, shape.tokens
        device = tokens.device
        self.argument = given.argument
        # Those that pad a draft are any that were read before.
        self.tokens = tokens.new_zeros(rows, count, *tokens.shape[2:])  # (B, T) tokens or (B, T, D) states
        self.positions = torch.zeros(rows, count, dtype=torch.long, device=device)
        self.mask = torch.zeros(rows, 1, count, shape.capacity, dtype=torch.bool, device=device)
        self.place = torch.zeros(count, dtype=torch.long, device=device)
        self._steps = torch.arange(count, device=device)
        self._every = torch.arange(shape.capacity, device=device)
        self.held = held
        self.buffers = [_Buffers(storage, self.place) for storage in held.storages]
        self.dtype = self.buffers[0].keys.dtype
        self._weights = list(given.model.model.parameters())
        self._pointers = self._places_of_weights()

    @property
    def is_valid(self) -> bool:
        """Whether the weights are where the graph reads them."""
        return self._places_of_weights() == self._pointers

    def _places_of_weights(self) -> list[int]:
        return [weight.data_ptr() for weight in self._weights]

    def capture(self, given: ModelPass, pool: Any) -> None:
        """Capture a pass over the tensors of this object."""
        attention = given.model.model.config.get_text_config()._attn_implementation
        inputs = {self.argument: self.tokens, "position_ids": self.positions, "use_cache": True}
        inputs["past_key_values"] = Cache(layers=list(self.buffers))

        def run() -> list[Tensor]:
            mask = self.mask
            if attention == "eager":  # which adds the mask
                mask = torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, torch.finfo(self.dtype).min)
            return given.compute({**inputs, "attention_mask": mask})

        self.fill(given)
        with _RefuseSynchronisation():  # type: ignore[no-untyped-call]
            run()
        self.graph = capture_graph(run, self.tokens.device, pool=pool)

    def fill(self, given: ModelPass) -> int:
        """Copy the inputs of a pass, and return the length of the texts after it."""
        layers, tokens = given.own_layers, given.inputs[given.argument]
        before, count = layers[0].get_seq_length(), int(tokens.shape[1])
        total: int = before + count
        self.held.hold(layers)
        torch.add(self._steps, before, out=self.place)
        self.tokens[:, :count].copy_(tokens)
        positions, mask = given.inputs.get("position_ids"), given.inputs.get("attention_mask")
        self.positions[:, :count].copy_(self.place[:count] if positions is None else positions)
        self.mask.zero_()
        visible = self.mask[:, 0, :, :total]
        if mask is None:
            visible.fill_(True)
        else:
            visible.copy_(mask[:, None])
        if len(self.place) > 1:
            visible.logical_and_(self._every[:total] <= self.place[:, None])
        return total

    def replay(self, count: int) -> list[Tensor]:
        """Return what the pass over the present inputs computes of their first tokens."""
        self.graph.replay()
        return [tensor[:, :count].clone() for tensor in self.graph.written]

    def step(self, given: ModelPass) -> list[Tensor]:
        """Return what a pass computes, and extend its cache."""
        total = self.fill(given)
        written = self.replay(given.inputs[given.argument].shape[1])
        for own, layer in zip(self.held.storages, given.own_layers, strict=True):
            own.lend(layer, total)
        return written


_INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


class _RefuseSynchronisation(TorchDispatchMode):
    """Raises RuntimeError for operations of this thread that make the host wait for the device.

    A capture would fail at them, after which torch draws no random numbers on the device any more; torch's own check,
    `set_sync_debug_mode`, acts in all threads.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, unless its values decide something on the host."""
        waits = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))
        if func.overloadpacket in _INDEXING:  # which counts what a mask selects
            waits = any(each is not None and each.dtype == torch.bool for each in args[1])
        if waits:
            raise RuntimeError(f"{func} makes the host wait for the device")
        found = func(*args, **(kwargs or {}))
        copies = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        if copies and len({each.device for each in (*args, found) if isinstance(each, Tensor)}) > 1:
            raise RuntimeError(f"{func} copies between devices")
        return found


class ModelGraphs:
    """The graphs of a model."""

    def __init__(self) -> None:
        self._graphs: dict[_Shape, _Captured] = {}
        self._passes: Counter[_Shape] = Counter()  # without a graph
        self._replays: dict[_Shape, int] = {}  # the last one of each graph, counted over all passes
        self._count = 0
        self._held: WeakValueDictionary[tuple[Any, ...], _Held] = WeakValueDictionary()
        self._too_large: set[_Shape] = set()
        self._failed: set[int] = set()  # numbers of tokens

    def __len__(self) -> int:
        return len(self._graphs)

    def read(self, given: ModelPass, shape: _Shape) -> list[Tensor] | None:
        """Return what a pass computes, and extend its cache; None: there is no graph of it yet."""
        if shape in self._graphs and not self._graphs[shape].is_valid:
            self.clear()
        self._count += 1
        if shape in self._graphs:
            self._replays[shape] = self._count
            return self._graphs[shape].step(given)
        self._passes[shape] += 1
        if shape.tokens in self._failed or self._passes[shape] <= WARM_RUNS or shape in self._too_large:
            return None
        if not self._has_room():
            return None
        return self._capture(given, shape)

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self._graphs.clear()
        self._passes.clear()

    def _has_room(self) -> bool:
        """Whether another graph can be captured; those that are not used any more are dropped."""
        if len(self._graphs) >= MAX_GRAPHS:
            living = {thread.ident for thread in threading.enumerate()}
            for shape in list(self._graphs):
                if shape.thread not in living or self._replays[shape] <= self._count - KEPT_PASSES:
                    del self._graphs[shape]
                    self._passes[shape] = 0
        return len(self._graphs) < MAX_GRAPHS

    def _capture(self, given: ModelPass, shape: _Shape) -> list[Tensor] | None:
        """Capture a pass, compare it with the one without a graph, and return what the latter computes."""
        try:
            # Tensors of inference mode could not be written again outside of it.
            with torch.inference_mode(False), torch.no_grad():
                captured = _Captured(given, shape, self._buffers(given, shape))
                captured.capture(given, _shared_pool(shape.read[2]))
                found = captured.replay(given.inputs[given.argument].shape[1])
        except torch.OutOfMemoryError:
            self._too_large.add(shape)
            return None
        except Exception as error:  # of any family; they have no common base class
            self._give_up(given, shape, f"cannot be captured into a CUDA graph ({error})")
            return None
        expected = given.run()
        if all(_is_same(*pair, captured.dtype) for pair in zip(found, expected, strict=True)):
            self._graphs[shape], self._replays[shape] = captured, self._count
        else:
            self._give_up(given, shape, "computes something else as a CUDA graph")
        return expected

    def _buffers(self, given: ModelPass, shape: _Shape) -> _Held:
        """Return the buffers of a shape, which graphs of other numbers of tokens may use too."""
        key = (shape.thread, shape.rows, shape.capacity, shape.read[2])
        if (held := self._held.get(key)) is None:
            held = self._held[key] = _Held(given.own_layers, shape.capacity)
        return held

    def _give_up(self, given: ModelPass, shape: _Shape, why: str) -> None:
        self._failed.add(shape.tokens)
        for other in [each for each in self._graphs if each.tokens == shape.tokens]:
            del self._graphs[other]
        what = "one token" if shape.tokens == 1 else f"up to {shape.tokens} tokens"
        warnings.warn(
            f"A pass of {given.model.name} over {what} {why}. Generation is slower without.",
            KnnlmWarning,
            stacklevel=2,
        )


# Graphs of a device share the memory of their temporary tensors, so that only one of them runs at a time.
_lock = threading.RLock()
_every: WeakKeyDictionary[CausalLM, ModelGraphs] = WeakKeyDictionary()


def model_graphs(model: CausalLM) -> ModelGraphs:
    """Return the graphs of a model."""
    with _lock:
        if model not in _every:
            _every[model] = ModelGraphs()
        return _every[model]


def read_with_graph(given: ModelPass) -> list[Tensor]:
    """Return what a pass computes, with a graph if there is one, and extend its cache."""
    written = replayed(given)
    return given.run() if written is None else written


def replayed(given: ModelPass) -> list[Tensor] | None:
    """Return what a pass computes with a graph, and extend its cache; None: there is no graph of it."""
    if (shape := given.shape()) is None:
        return None
    with _lock:
        return model_graphs(given.model).read(given, shape)


def _shared_pool(device: torch.device) -> Any:
    """Return the memory of the graphs of a device; None if there is no graph, as it is freed with the last one."""
    captured = (own for graphs in _every.values() for own in graphs._graphs.values())
    return next((own.graph.pool for own in captured if own.tokens.device == device), None)


def _is_same(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two results of a pass in some precision differ by rounding only."""
    allowed = _MAX_HALF_CHANGE if dtype in (torch.bfloat16, torch.float16) else _MAX_CHANGE
    finite = expected.isfinite()
    change = (found.float() - expected.float())[finite]
    return float(change.norm()) <= allowed * float(expected[finite].float().norm())
