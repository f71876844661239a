"""Attention over packed rows: a position attends to earlier positions of its own window only.

Two ways are known. `mask`: transformers itself builds a block-diagonal mask from positions that begin again at 0.
`varlen`: an attention function of transformers that is given where windows begin, and on a GPU calls the kernel of
`torch.nn.attention.varlen`, which skips everything outside of a window. Whether a model supports either is not a matter
of its name: a row of two windows is read, and the result compared with that of each window alone. A model with
recurrent layers, for example, fails this, and is trained on padded windows.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from knnlm.lm.causal import eval_mode

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None  # type: ignore[assignment]

MASK, VARLEN = "mask", "varlen"

_NAME = "knnlm_varlen"  # of the attention function in transformers
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # options of attention functions that the kernel does not have
_SHORT = 8  # tokens of the shorter window of the comparison
_MAX_CHANGE = 1e-3  # of hidden states in float32, relative; attention to another window changes them by far more
_MAX_KERNEL_CHANGE = 0.05  # of the kernel's output in bfloat16, relative
_OPTIONS = frozenset() if varlen_attn is None else frozenset(inspect.signature(varlen_attn).parameters)
_BOUNDARIES_MULTIPLE = 256  # so that compiled code sees few lengths of the boundaries


def boundaries(position_ids: Tensor) -> Tensor:
    """Return where windows begin in the flat rows, then N, repeated up to a multiple of 256 entries, as int32."""
    starts = (position_ids.reshape(-1) == 0).nonzero()[:, 0].int()
    return pad(starts, (0, _BOUNDARIES_MULTIPLE - len(starts) % _BOUNDARIES_MULTIPLE), value=position_ids.numel())


def packed_inputs(position_ids: Tensor, starts: Tensor | None, longest: int) -> dict[str, Any]:
    """Return the arguments of a model that reads packed rows; `longest` is the maximal length of a window.

    `starts` are the boundaries of windows, for the attention that is given them.
    """
    inputs: dict[str, Any] = {"position_ids": position_ids}
    if starts is not None:
        inputs |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
    return inputs


@contextmanager
def packed_attention(model: PreTrainedModel, attention: str | None) -> Iterator[None]:
    """Let a model read packed rows in this way inside the context."""
    if attention != VARLEN:
        yield
        return
    AttentionInterface.register(_NAME, varlen_attention)
    configs: dict[int, Any] = {id(own.config): own.config for own in model.modules() if hasattr(own, "config")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = _NAME
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  (there is none for this attention)
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within windows: an attention function of transformers, with (B, H, T, D) queries and its arguments."""
    starts, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if starts is None or longest is None or unsupported or (dropout and module.training):
        reason = ", ".join(unsupported) or ("dropout" if dropout else "no boundaries")
        raise NotImplementedError(f"attention over packed rows: {reason}")
    rows, _, length, _ = query.shape
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as torch's own attention does: rotary positions made float32 of them
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    q, k, v = (tensor.transpose(1, 2).reshape(rows * length, *tensor.shape[1::2]) for tensor in (query, key, value))
    window = kwargs.get("sliding_window")
    call = flash_varlen if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else reference_varlen
    output = call(q, k, v, starts, longest, scaling, window)
    return output.view(rows, length, *output.shape[1:]), None


def flash_varlen(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    """Return the (N, H, D) causal attention within windows by torch's kernel; `window` is that of sliding attention."""
    if varlen_attn is None:
        raise NotImplementedError("torch.nn.attention.varlen")
    options: dict[str, Any] = {}
    if "enable_gqa" in _OPTIONS:
        options["enable_gqa"] = True
    elif key.shape[1] != query.shape[1]:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    if "window_size" in _OPTIONS:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None or window >= longest:
        options["is_causal"] = True
    else:
        raise NotImplementedError("torch.nn.attention.varlen without sliding windows")
    if "scale" in _OPTIONS:
        options["scale"] = scale
    elif scale is not None:
        query = query * (scale * query.shape[-1] ** 0.5)
    output = varlen_attn(query, key, value, starts, starts, longest, longest, **options)
    assert isinstance(output, Tensor)
    return output


def reference_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int,  # noqa: ARG001
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Return the same as `flash_varlen` on any device and in any precision, window by window."""
    places = starts.unique_consecutive().tolist()
    outputs = []
    for begin, end in itertools.pairwise(places):
        q, k, v = (tensor[begin:end].transpose(0, 1) for tensor in (query, key, value))
        distance = torch.arange(end - begin, device=query.device)
        distance = distance[:, None] - distance
        allowed = (distance >= 0) & (distance < (window or end - begin))
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=True))
    return torch.cat(outputs, 1).transpose(0, 1)


def choose_attention(model: PreTrainedModel, row_length: int, *, precision: str) -> str | None:
    """Return how the model reads packed rows of this length, or None if it cannot. The model is in float32."""
    ways = [VARLEN, MASK] if model.device.type == "cuda" and precision == "bfloat16" else [MASK]
    return next((way for way in ways if supports_packing(model, row_length, way)), None)


def supports_packing(model: PreTrainedModel, row_length: int, attention: str) -> bool:
    """Whether windows in one row give the same hidden states as each of them alone."""
    short = min(_SHORT, row_length // 2)
    if not short:
        return False
    lengths = [row_length - short, short]
    device, vocabulary = model.device, model.config.get_text_config().vocab_size
    ids = (torch.arange(row_length) * 7 + 3).remainder(vocabulary)[None].to(device)
    position_ids = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    starts = boundaries(position_ids) if attention == VARLEN else None
    try:
        with torch.no_grad(), eval_mode(model):
            alone = [model.base_model(input_ids=part, use_cache=False)[0][0] for part in ids.split(lengths, 1)]
            inputs = packed_inputs(position_ids, starts, row_length)
            with packed_attention(model, attention):
                together = model.base_model(input_ids=ids, use_cache=False, **inputs)[0][0]
        if attention == VARLEN and not (_has_no_dropout(model) and kernel_change(device) <= _MAX_KERNEL_CHANGE):
            return False
    except torch.OutOfMemoryError:
        raise
    except Exception:  # of any family that does not take these arguments; they have no common base class
        return False
    pairs = zip(alone, together.split(lengths), strict=True)
    return all(_change(part, own) <= _MAX_CHANGE for own, part in pairs)


def _has_no_dropout(model: PreTrainedModel) -> bool:
    """Whether the attention of a model in training has no dropout, which the kernel does not have."""
    zero = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    inputs = packed_inputs(zero, boundaries(zero), 1)
    training = model.training
    model.train()
    try:
        with torch.no_grad(), torch.random.fork_rng(_devices(model.device)), packed_attention(model, VARLEN):
            model.base_model(input_ids=zero, **inputs)
    except NotImplementedError:
        return False
    finally:
        model.train(training)
    return True


def _devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def kernel_change(device: torch.device) -> float:
    """Return how much the kernel's output or gradients differ from those of the reference; 0 without a GPU."""
    if device.type != "cuda":
        return 0.0
    generator = torch.Generator(device)
    starts = torch.tensor([0, 100, 131, 160, 160], dtype=torch.int32, device=device)
    found = []
    for call in (flash_varlen, reference_varlen):
        generator.manual_seed(0)
        q, k, v = parts = [
            torch.randn(160, heads, 64, generator=generator, device=device, dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2, 2)
        ]
        output = call(q, k, v, starts, 128, None, 24)
        output.square().sum().backward()
        found.append([output.detach(), *(part.grad for part in parts if part.grad is not None)])
    return _largest_change(*found)


def _largest_change(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the largest relative difference; NaN if one is NaN, which Python's max may skip."""
    return float(torch.tensor([_change(one, other) for one, other in zip(found, right, strict=True)]).max())


def _change(found: Tensor, right: Tensor) -> float:
    """Return the relative difference; a comparison with NaN is False."""
    return float((found.double() - right.double()).norm() / right.double().norm().clamp(min=1e-30))
