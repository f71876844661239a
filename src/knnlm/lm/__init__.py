"""Hidden states and next-token logits from any Hugging Face decoder."""

from knnlm.lm.causal import CausalLM, Reading
from knnlm.lm.key_layers import PLACES, KeyLayer, find_key_layer
from knnlm.lm.windows import WindowShape

__all__ = ["PLACES", "CausalLM", "KeyLayer", "Reading", "WindowShape", "find_key_layer"]
