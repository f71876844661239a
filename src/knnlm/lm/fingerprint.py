"""Tell one model from another. Knows nothing about stores.

Keys made by one model mean nothing to another, even of the same shape, so a store remembers whose keys it holds.
The same weights loaded as float32, bfloat16 or float16 count as the same model: a store built on a GPU in bfloat16
is read on a laptop in float32. So weights are hashed after a cast to each of the three, and one match is enough.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_SAMPLE = 4096

LANGUAGE = ("tokenizer", "vocab_size", "start_token")  # in which all the models of a mixture must agree

# Fields that say how a model is run or where it came from, not what it computes.
_INCIDENTAL = {
    "name_or_path",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "architectures",
}

_INCIDENTAL |= {"output_attentions", "output_hidden_states", "return_dict", "quantization_config"}

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


def config_facts(model: PreTrainedModel) -> dict[str, Any]:
    """Keep what of a configuration may change what a model computes, such as the base of its rotary positions."""
    facts = model.config.get_text_config().to_dict()
    return {
        name: value
        for name, value in sorted(facts.items())
        if name not in _INCIDENTAL and not name.startswith("_") and not name.endswith("_token_id") and _is_plain(value)
    }


def config_difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Name a field that two configurations both have with different values.

    Fields that only one of them has do not count: each version of transformers adds some.
    """
    return next((name for name in one if name in other and one[name] != other[name]), None)


def _is_plain(value: Any) -> bool:
    """Say whether JSON gives a value back as it was."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the vocabulary and how it cuts a difficult sentence."""
    record = [sorted(tokenizer.get_vocab().items()), tokenizer(_PROBE, add_special_tokens=False)["input_ids"]]
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()[:16]


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Say whether two weight fingerprints agree in any precision."""
    return any(one.get(name) is not None and one.get(name) == other.get(name) for name in _DTYPES)


def difference(facts: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Name the first thing in which a model's identity differs from that of another one, and both values."""
    for what in LANGUAGE:
        if facts.get(what) != given[what]:
            return what, facts.get(what), given[what]
    if (field := config_difference(facts["config"], given["config"])) is not None:
        return f"config's {field}", facts["config"][field], given["config"][field]
    if not same_weights(facts["weights"], given["weights"]):
        return "weights", facts["weights"].get("float32"), given["weights"]["float32"]
    return None
