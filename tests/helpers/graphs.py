"""A stand-in for CUDA graphs: it runs the captured computation again, on the tensors that it was captured with."""

from __future__ import annotations

import torch

from knnlm.lm.cuda_graph import CapturedGraph


class Replays:
    """Counts what is captured and replayed."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.pools = []

    def capture(self, run, device, *, pool=None, rehearse=False):
        assert isinstance(device, torch.device)
        self.pools.append(pool)
        if rehearse:
            run()
        written = [tensor.detach() for tensor in run()]
        self.captured += 1

        def replay():
            self.replayed += 1
            for tensor, value in zip(written, run(), strict=True):
                tensor.copy_(value.detach())

        for tensor in written:  # what a capture writes before the first replay is undefined
            tensor.fill_(True if tensor.dtype == torch.bool else torch.nan)
        return CapturedGraph(written, replay, pool or object())
