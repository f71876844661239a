"""Which attention is allowed where shapes change."""

from __future__ import annotations

import torch

from knnlm.lm.causal import dynamic_shape_attention


def allowed():
    """Which attention torch may use: cuDNN's, and any other."""
    cuda = torch.backends.cuda
    return cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled() and cuda.mem_efficient_sdp_enabled()


def test_cudnn_attention_is_disabled_on_a_gpu_during_reading_only():
    before = allowed()
    with dynamic_shape_attention(torch.device("cuda")):  # flags alone: no GPU is needed
        assert allowed() == (False, True)
    assert allowed() == before
    with dynamic_shape_attention(torch.device("cpu")):
        assert allowed() == before
