"""Hidden states and next-token logits from any Hugging Face decoder."""

from knnlm.lm.causal import CausalLM, Reading
from knnlm.lm.key_layers import PLACES, KeyLayer
from knnlm.lm.windows import WindowShape

__all__ = ["PLACES", "CausalLM", "KeyLayer", "Reading", "WindowShape"]
