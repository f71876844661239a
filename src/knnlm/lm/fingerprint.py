"""Tell one model from another. Knows nothing about stores.

Keys made by one model mean nothing to another, even of the same shape, so a store remembers whose keys it holds.
The same weights loaded as float32, bfloat16 or float16 count as the same model: a store built on a GPU in bfloat16
is read on a laptop in float32. So weights are hashed after a cast to each of the three, and one match is enough.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAMPLE = 4096
# Fields that say how a model is run, not what it is.
_INCIDENTAL = {"_name_or_path", "_attn_implementation", "dtype", "torch_dtype", "transformers_version"}
_PROBE = "The 3 naïve foxes\n\n\tsaid: “日本 2026!” def f(x): return x**2"


def weights_fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """Hash a spread sample of every weight, once for each precision."""
    hashes = {name: hashlib.sha256() for name in _DTYPES}
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLE)
        sample = flat[::step][:_SAMPLE].float().cpu()
        for dtype, digest in hashes.items():
            digest.update(f"{name}{tuple(weight.shape)}".encode())
            digest.update(sample.to(_DTYPES[dtype]).float().numpy().tobytes())
    return {name: digest.hexdigest()[:16] for name, digest in hashes.items()}


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the vocabulary and how it cuts a difficult sentence."""
    record = [sorted(tokenizer.get_vocab().items()), tokenizer(_PROBE, add_special_tokens=False)["input_ids"]]
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()[:16]


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Say whether two weight fingerprints agree in any precision."""
    return any(one.get(name) is not None and one.get(name) == other.get(name) for name in _DTYPES)
