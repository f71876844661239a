"""When the host looks at what a device has computed. Knows nothing about what it looks for.

To look at a value is to wait until the device has computed it. Once in a while that costs nothing; at every token of a
text that is generated it does. So where something is almost certainly so, the doubt is noted, and looked at in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor


class DeferredChecks:
    """What nobody has looked at yet."""

    def __init__(self) -> None:
        self._flags: list[Tensor] = []

    def note(self, flag: Tensor) -> None:
        """Keep a flag for later: it is set where something was not as it should be."""
        self._flags.append(flag.any())

    def justified(self) -> bool:
        """Look: say whether any flag was set."""
        devices = {flag.device for flag in self._flags}
        return any(
            bool(torch.stack([flag for flag in self._flags if flag.device == device]).any()) for device in devices
        )


_checks: ContextVar[DeferredChecks | None] = ContextVar("doubts", default=None)


@contextmanager
def defer_checks() -> Iterator[DeferredChecks]:
    """Let nothing look while this lasts; whoever asked for it looks afterwards, and does it again if need be."""
    doubts = DeferredChecks()
    token = _checks.set(doubts)
    try:
        yield doubts
    finally:
        _checks.reset(token)


def is_capturing(tensor: Tensor) -> bool:
    """Say whether a CUDA graph is being captured there, so that nobody on the host may look at a value."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_deferred(tensor: Tensor) -> bool:
    """Say whether nobody may look now."""
    return is_capturing(tensor) or _checks.get() is not None


def check_flag(flag: Tensor) -> bool:
    """Look whether a flag is set anywhere. While nobody may look, say no and note the doubt."""
    if is_capturing(flag):
        return False
    doubts = _checks.get()
    if doubts is None:
        return bool(flag.any())
    doubts.note(flag)
    return False
