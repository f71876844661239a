"""Which attention is allowed where shapes change."""

from __future__ import annotations

import torch

from knnlm.lm.causal import for_any_shape


def allowed():
    """Which attention torch may use: cuDNN's, and any other."""
    cuda = torch.backends.cuda
    return cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled() and cuda.mem_efficient_sdp_enabled()


def test_a_gpu_does_without_cudnn_only_while_it_reads_and_a_cpu_is_left_alone():
    before = allowed()
    with for_any_shape(torch.device("cuda")):  # flags alone: no GPU is needed
        assert allowed() == (False, True)
    assert allowed() == before
    with for_any_shape(torch.device("cpu")):
        assert allowed() == before
