"""Deferred checks of values on a device.

To read a value is to wait until the device has computed it. At every generated token that is expensive. So a check that
almost never fails can be collected during a step and evaluated once, at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor


class DeferredChecks:
    """Flags that have not been read yet."""

    def __init__(self) -> None:
        self._flags: list[Tensor] = []

    def add(self, flag: Tensor) -> None:
        """Keep a flag for later; it is set where something is wrong."""
        self._flags.append(flag.any())

    def flags(self) -> list[Tensor]:
        """Return one flag for each device: whether any of its flags is set."""
        devices = {flag.device: flag for flag in self._flags}
        return [torch.stack([flag for flag in self._flags if flag.device == device]).any() for device in devices]

    def any_failed(self) -> bool:
        """Whether any flag is set; waits for the device."""
        return any(bool(flag) for flag in self.flags())


_checks: ContextVar[DeferredChecks | None] = ContextVar("checks", default=None)


@contextmanager
def defer_checks() -> Iterator[DeferredChecks]:
    """Collect checks instead of evaluating them; the caller evaluates them later and repeats the step if one failed."""
    checks = DeferredChecks()
    token = _checks.set(checks)
    try:
        yield checks
    finally:
        _checks.reset(token)


def is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured on the tensor's device, so that no value can be read."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_deferred(tensor: Tensor) -> bool:
    """Whether checks of the tensor are not evaluated now."""
    return is_capturing(tensor) or _checks.get() is not None


def check_flag(flag: Tensor) -> bool:
    """Whether a flag is set anywhere; False while checks are deferred, also into a CUDA graph."""
    checks = _checks.get()
    if checks is None:
        return not is_capturing(flag) and bool(flag.any())
    checks.add(flag)
    return False
