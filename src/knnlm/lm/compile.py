"""Compile the blocks before the key layer, temporarily and for one input shape.

The blocks of a decoder are alike, so compiling one compiles all. Only one shape is compiled, since each costs seconds;
any other runs uncompiled, and so does the block of the key layer, which has hooks in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from knnlm.errors import KnnlmWarning
from knnlm.lm.hooks import hidden_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from knnlm.lm.key_layers import KeyLayer

Call = Callable[..., Any]


@dataclass
class CompileStatus:
    """Whether compilation failed, so that blocks run uncompiled."""

    failed: bool = False
    advice: str = "--no-compile skips the attempt."

    def report(self, error: Exception) -> None:
        """Warn once that blocks cannot be compiled."""
        if not self.failed:
            reason = " ".join(str(error).split()) or type(error).__name__
            warnings.warn(
                f"The model cannot be compiled ({reason[:200]}) and runs uncompiled, at half the speed. {self.advice}",
                KnnlmWarning,
                stacklevel=2,
            )
        self.failed = True


@contextmanager
def compiled(
    model: PreTrainedModel, key_layer: KeyLayer, shape: tuple[int, int], *, backend: str | Call = "inductor"
) -> Iterator[CompileStatus]:
    """Compile the blocks before the key layer for this thread and ids of this (B, T), until the context exits."""
    with compiled_blocks(blocks_before(model, key_layer), key_layer.width, shape, backend=backend) as status:
        yield status


@contextmanager
def compiled_blocks(
    blocks: Sequence[nn.Module],
    width: int,
    shape: tuple[int, int],
    *,
    training: bool = False,
    backend: str | Call = "inductor",
) -> Iterator[CompileStatus]:
    """Compile blocks for this thread and (B, T, D) hidden states of this shape, until the context exits.

    With `training`, only passes with gradients are compiled.
    """
    status = CompileStatus()
    if training:
        status.advice = "compile=False skips the attempt."
    with ExitStack() as undo:
        for block in blocks:
            if block._compiled_call_impl is None:  # otherwise the caller has compiled it already
                block._compiled_call_impl = _dispatch(block, width, shape, backend, status, training)
                undo.callback(delattr, block, "_compiled_call_impl")
        yield status


def blocks_before(model: PreTrainedModel, key_layer: KeyLayer) -> list[nn.Module]:
    """Return the blocks that run before the one with the key layer; none where they are not in a list."""
    names = key_layer.module.split(".")
    for depth in range(1, len(names)):
        if names[depth] != str(key_layer.layer):
            continue
        parent = model.get_submodule(".".join(names[:depth]))
        if isinstance(parent, (nn.ModuleList, nn.Sequential)) and len(parent) == key_layer.layers:
            return list(parent.children())[: key_layer.layer]
    return []


def _dispatch(
    block: nn.Module, width: int, shape: tuple[int, int], backend: str | Call, status: CompileStatus, training: bool
) -> Call:
    """Return a call of the block that is compiled for this shape and thread, and the block's own otherwise."""
    owner = get_ident()
    plain: Call = block._call_impl
    fast: Call | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal fast
        if training and not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        hidden = hidden_states((*args, *kwargs.values()), width)
        if status.failed or get_ident() != owner or hidden is None or hidden.shape[:-1] != shape:
            return plain(*args, **kwargs)
        try:
            fast = fast or torch.compile(plain, dynamic=False, backend=backend)
            return fast(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a missing C compiler, say; errors of the compilers have no common root
            status.report(error)
        return plain(*args, **kwargs)

    return call
