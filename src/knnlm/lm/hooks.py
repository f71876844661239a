"""Capture hidden states at one place of a model during a forward pass.

Hooks exist for the length of a `with` block and act only in the thread that set them: two threads may use one model at
the same time without capturing each other's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from knnlm.errors import KeyLayerError

Hook = Callable[..., None] | None


@dataclass(frozen=True)
class Tap:
    """The input or the output of a module, at one of its calls within a block."""

    block: nn.Module
    module: nn.Module
    path: str
    output: bool = False
    turn: int = 0  # which call, since a module may be called more than once in a block
    then: nn.Module | None = None  # applied to the captured states


class _Stop(Exception):
    """Ends a forward pass after its key was captured; carries the list that holds the key."""


@contextmanager
def capture(tap: Tap, width: int, stop: bool) -> Iterator[list[Tensor]]:
    """Yield a list that collects the states at the tap; `stop` ends each pass there."""
    kept: list[Tensor] = []
    shape: torch.Size | None = None
    turn = tap.turn + 1  # calls before the block begins do not count

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal shape, turn
        hidden = hidden_states((*args, *kwargs.values()), width)
        shape, turn = None if hidden is None else hidden.shape, 0  # (B, T, D)

    def read(_: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        nonlocal turn
        turn += 1
        if turn != tap.turn + 1:
            return
        values = as_tuple(output[0]) if output else (*args, *kwargs.values())
        hidden = None if shape is None else hidden_states(values, width, rows=shape[:-1].numel())
        if shape is None or hidden is None:
            raise KeyLayerError(f"{tap.path} has no hidden states of width {width}, unlike in the probe.")
        key = hidden.detach().reshape(shape)  # some models flatten to (B*T, D)
        # Cloned, since some models later write into hidden states; `forward`, in order not to trigger hooks.
        with torch.no_grad():
            kept.append(tap.then.forward(key) if tap.then else key.clone())
        if stop:
            raise _Stop(kept)

    try:
        side = "end" if tap.output else "begin"
        with hooked([tap.block], begin=enter), hooked([tap.module], **{side: read}):
            yield kept
    except _Stop as stopped:
        if stopped.args[0] is not kept:  # of an outer capture
            raise


@contextmanager
def hooked(modules: Iterable[nn.Module], *, begin: Hook = None, end: Hook = None) -> Iterator[None]:
    """Call `begin` before and `end` after each call of the modules."""
    with ExitStack() as hooks:
        for module in modules:
            if begin is not None:
                hooks.callback(module.register_forward_pre_hook(_in_this_thread(begin), with_kwargs=True).remove)
            if end is not None:
                hooks.callback(module.register_forward_hook(_in_this_thread(end), with_kwargs=True).remove)
        yield


def _in_this_thread(hook: Callable[..., None]) -> Callable[..., None]:
    """Restrict a hook to this thread; others may even call it with other arguments while it is being removed."""
    owner = get_ident()
    return lambda *arguments: hook(*arguments) if get_ident() == owner else None


def hidden_states(values: Iterable[Any], width: int | None, *, rows: int | None = None) -> Tensor | None:
    """Return the first of the values that can be hidden states: (B, T, D) or (B*T, D)."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() in (2, 3):
            wide = width is None or value.shape[-1] == width
            if wide and (rows is None or value.shape[:-1].numel() == rows):
                return value
    return None


def as_tuple(output: Any) -> tuple[Any, ...]:
    """Return the output of a module as a flat tuple."""
    values = output.values() if isinstance(output, Mapping) else output
    return tuple(values) if isinstance(output, (Mapping, tuple, list)) else (output,)
