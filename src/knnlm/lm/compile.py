"""Compile the blocks that a key's pass runs through, for a while and for one shape of input. Knows no texts or stores.

Blocks of a decoder are alike, so compiling one compiles all; one shape is compiled, since each costs seconds, and any
other runs as it is. The block that holds the key stays as it is: hooks sit in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from knnlm.lm.hooks import hidden_states
from knnlm.lm.key_layers import KeyLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Call = Callable[..., Any]


@dataclass
class Compiling:
    """How it went: `broken` from the moment that compiling failed and blocks run as they are."""

    broken: bool = False

    def give_up(self, error: Exception) -> None:
        """Say once that blocks cannot be compiled."""
        if not self.broken:
            reason = " ".join(str(error).split()) or type(error).__name__
            warnings.warn(
                f"The model cannot be compiled ({reason[:200]}): it is read without, at half the speed. "
                "--no-compile leaves the attempt out.",
                stacklevel=2,
            )
        self.broken = True


@contextmanager
def compiled(
    model: PreTrainedModel, key_layer: KeyLayer, shape: tuple[int, int], *, backend: str | Call = "inductor"
) -> Iterator[Compiling]:
    """Let passes of this thread over ids of this (B, T) run compiled up to the key's block; then all is as it was."""
    state = Compiling()
    with ExitStack() as undo:
        for block in blocks_before(model, key_layer):
            if block._compiled_call_impl is None:  # otherwise its owner has compiled it already
                block._compiled_call_impl = _choosing(block, key_layer.width, shape, backend, state)
                undo.callback(delattr, block, "_compiled_call_impl")
        yield state


def blocks_before(model: PreTrainedModel, key_layer: KeyLayer) -> list[nn.Module]:
    """List the blocks that run before the one with the key; none where they are in no list."""
    names = key_layer.module.split(".")
    for depth in range(1, len(names)):
        if names[depth] != str(key_layer.layer):
            continue
        parent = model.get_submodule(".".join(names[:depth]))
        if isinstance(parent, (nn.ModuleList, nn.Sequential)) and len(parent) == key_layer.layers:
            return list(parent.children())[: key_layer.layer]
    return []


def _choosing(block: nn.Module, width: int, shape: tuple[int, int], backend: str | Call, state: Compiling) -> Call:
    """Make a call of the block that is compiled for the shape and the thread, and is the block's own for all others."""
    owner = get_ident()
    plain: Call = block._call_impl
    fast: Call | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal fast
        hidden = hidden_states((*args, *kwargs.values()), width)
        if state.broken or get_ident() != owner or hidden is None or hidden.shape[:-1] != shape:
            return plain(*args, **kwargs)
        try:
            fast = fast or torch.compile(plain, dynamic=False, backend=backend)
            return fast(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # without a C compiler, say; what the compilers raise has no common root
            state.give_up(error)
        return plain(*args, **kwargs)

    return call
