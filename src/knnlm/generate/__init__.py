"""Generate text with a model and its memory."""

from knnlm.generate.model import KnnConfig, KnnForCausalLM

__all__ = ["KnnConfig", "KnnForCausalLM"]
