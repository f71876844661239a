"""Which attention passes of ever-changing shapes use. Knows nothing about what is read.

cuDNN's plans for a tenth of a second at each shape that it has not seen. Windows of a training, and the growing text of
a generation, are of another shape nearly every time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def for_any_shape(device: torch.device) -> AbstractContextManager[None]:
    """Let passes on a GPU do without cuDNN's attention."""
    return sdpa_kernel(_ANY_SHAPE) if device.type == "cuda" else nullcontext()
