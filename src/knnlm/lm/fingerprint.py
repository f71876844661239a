"""Fingerprints that tell one model from another.

Keys of one model are meaningless to another, even of the same shape, so a store records the identity of its reader.
The same weights loaded as float32, bfloat16 or float16 count as the same model: a store built on a GPU in bfloat16 is
read on a laptop in float32. So weights are hashed after a cast to each of the three, and one match is enough.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VOCABULARY_FIELDS = ("tokenizer", "vocab_size", "start_token")  # the same for all models of a mixture
# Of encoder-decoder models: the languages, and the special tokens around source and target.
PAIR_FIELDS = ("encoder_decoder", "src_lang", "tgt_lang", "prefix_tokens", "end_tokens")

_FINGERPRINT = "knnlm_fingerprint"  # an attribute of models
_DTYPES = ("float32", "bfloat16", "float16")
_SAMPLES_PER_WEIGHT = 4096
_PROBE_TEXT = "The 3 naïve foxes\n\n\tsaid: “日本 2026!” def f(x): return x**2"
# Fields of a configuration that describe how a model is run or where it came from, not what it computes.
_IGNORED_CONFIG = {
    "_name_or_path",
    "architectures",
    "dtype",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "quantization_config",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def set_fingerprint(model: PreTrainedModel, hashes: Mapping[str, str]) -> None:
    """Record the hashes of a model whose weights differ by rounding where it is made; they hold for these weights."""
    setattr(model, _FINGERPRINT, (dict(hashes), _hashes(model)))


def weights_fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """Return a hash of an even sample of every weight, for each precision, or what was recorded for these weights."""
    found = _hashes(model)
    recorded, of = getattr(model, _FINGERPRINT, (found, found))
    return dict(recorded) if same_weights(of, found) else found


def _hashes(model: PreTrainedModel) -> dict[str, str]:
    import torch

    hashes = {name: hashlib.sha256() for name in _DTYPES}
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES_PER_WEIGHT)
        sample = flat[::step][:_SAMPLES_PER_WEIGHT].float().cpu()
        for dtype, digest in hashes.items():
            digest.update(f"{name}{tuple(weight.shape)}".encode())
            digest.update(sample.to(getattr(torch, dtype)).float().numpy().tobytes())
    return {name: digest.hexdigest()[:16] for name, digest in hashes.items()}


def relevant_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return the fields of a configuration that may change what a model computes, such as the rotary base."""
    return {
        name: value
        for name, value in sorted(model.config.get_text_config().to_dict().items())
        if name not in _IGNORED_CONFIG
        and not name.startswith("_")
        and not name.endswith("_token_id")
        and _survives_json(value)
    }


def config_difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Return a field that two configurations both have with different values.

    Fields that only one of them has do not count: each version of transformers adds some.
    """
    return next((name for name in one if name in other and one[name] != other[name]), None)


def token_fields(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields in which two models must agree to read the same tokens."""
    both = one.get("encoder_decoder") and other.get("encoder_decoder")
    return (*VOCABULARY_FIELDS, *PAIR_FIELDS) if both else VOCABULARY_FIELDS


def _survives_json(value: Any) -> bool:
    """Whether a value is the same after a round trip through JSON."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _survives_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_survives_json, value))
    return value is None or isinstance(value, (bool, int, float, str))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the vocabulary and of the tokens of a difficult sentence."""
    record = [sorted(tokenizer.get_vocab().items()), tokenizer(_PROBE_TEXT, add_special_tokens=False)["input_ids"]]
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()[:16]


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two weight fingerprints agree in any precision."""
    return any(one.get(name) is not None and one.get(name) == other.get(name) for name in _DTYPES)


def identity_difference(stored: Mapping[str, Any], loaded: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first field in which two model identities differ, with both values; None where they agree."""
    for name in VOCABULARY_FIELDS:
        if stored.get(name) != loaded[name]:
            return name, stored.get(name), loaded[name]
    for name in PAIR_FIELDS:
        if stored.get(name) != loaded.get(name):
            return name, stored.get(name), loaded.get(name)
    if (field := config_difference(stored["config"], loaded["config"])) is not None:
        return f"config's {field}", stored["config"][field], loaded["config"][field]
    if not same_weights(stored["weights"], loaded["weights"]):
        return "weights", stored["weights"].get("float32"), loaded["weights"]["float32"]
    return None
