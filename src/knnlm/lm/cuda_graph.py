"""Capture the kernels of a computation on a GPU, and run them again with other values in the tensors that it reads.

Launching a small kernel takes longer than running it, and a captured graph is launched as a whole. A computation can be
captured if nothing of it is decided on the host by values on the device. What it reads must stay in the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WARM_RUNS = 2  # without a graph, for each shape: they fill the caches that a graph reads, and compile kernels


@dataclass(frozen=True)
class CapturedGraph:
    """A graph, and the tensors that it writes."""

    written: list[Tensor]
    replay: Callable[[], None]
    pool: Any = None  # of the memory that it uses


def capture_graph(
    run: Callable[[], list[Tensor]], device: torch.device, *, pool: Any = None, rehearse: bool = False
) -> CapturedGraph:
    """Capture what `run` computes on a device; the tensors that it returns have their values after the first replay.

    Graphs with one `pool` share memory and must not be replayed at the same time. `rehearse` runs it once before, and
    raises RuntimeError where the host waits for the device.
    """
    with torch.cuda.device(device):
        if rehearse:
            _rehearse(run)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads may use the device meanwhile
            try:
                written = run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return CapturedGraph(written, graph.replay, graph.pool())


def _rehearse(run: Callable[[], list[Tensor]]) -> None:
    """Run without a capture: after a capture that failed, torch draws no random numbers on the device any more."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(before)
