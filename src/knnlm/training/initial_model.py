"""The model a decoder is trained from: a pretrained model, some of its layers, or a new one from a configuration.

A decoder predicts the tokens of the language model it is mixed with, so it takes that model's tokenizer, and their
vocabularies must be the same.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from knnlm.errors import ModelError, ModelMismatch, ParameterError
from knnlm.lm.causal import CausalLM
from knnlm.lm.fingerprint import tokenizer_fingerprint
from knnlm.lm.loading import load_model


@dataclass(frozen=True)
class InitialModel:
    """A model in float32 that a decoder is trained from, and its origin."""

    lm: CausalLM
    spec: str
    layers: tuple[int, ...] | None = None  # those of the pretrained model that are kept; None: all

    @property
    def parameters(self) -> int:
        """The number of weights; shared ones count once."""
        return sum(parameter.numel() for parameter in self.lm.model.parameters())

    @property
    def is_pretrained(self) -> bool:
        """Whether it has all weights of a pretrained model."""
        return self.layers is None and Path(self.spec).suffix != ".json"

    @property
    def metadata(self) -> dict[str, Any]:
        """Its description in the decoder's card."""
        return {
            "spec": self.spec,
            "layers": None if self.layers is None else list(self.layers),
            "class": type(self.lm.model).__name__,
            "parameters": self.parameters,
            "weights": self.lm.identity["weights"],
        }


def open_initial_model(spec: str, *, like: CausalLM, layers: int | None = None, seed: int = 0) -> InitialModel:
    """Open a model to train a decoder for `like` from: a model's name or folder, or the .json file of a configuration.

    A configuration gives a model with random weights, the same for the same seed, and the vocabulary of `like`.
    `layers` keeps that many layers of a pretrained model: a quarter of them the first, the rest the last.
    """
    path = Path(spec)
    like.require_text("A decoder")
    if path.suffix == ".json":
        if layers is not None:
            raise ParameterError(f"{spec} determines how many layers the decoder has. Leave layers out.")
        return InitialModel(_as_lm(_from_config(path, like, seed), like, spec), str(path.resolve()))
    model, tokenizer = load_model(spec, dtype=torch.float32)
    own, wanted = tokenizer_fingerprint(tokenizer), tokenizer_fingerprint(like.tokenizer)
    if own != wanted:
        raise ModelMismatch(
            f"{spec} has another tokenizer ({own}) than {like.name} ({wanted}), so a decoder trained from it could not "
            "be mixed with it. Use a model with the same tokenizer, or the .json file of a configuration."
        )
    size = model.config.get_text_config().vocab_size
    if size != like.vocab_size:
        raise ModelMismatch(
            f"{spec} has {size:,} tokens, but {like.name} has {like.vocab_size:,}. Use a model with the same "
            "vocabulary, or the .json file of a configuration."
        )
    kept = None
    if layers is not None:
        model, kept = keep_layers(model, layers)
    name = str(path.resolve()) if path.exists() else spec
    return InitialModel(_as_lm(model, like, spec), name, kept)


def keep_layers(model: PreTrainedModel, layers: int) -> tuple[PreTrainedModel, tuple[int, ...]]:
    """Return a model of some layers of another, with its weights, and the numbers of those layers."""
    config = model.config
    count = config.get_text_config().num_hidden_layers
    if not 1 <= layers <= count:
        raise ParameterError(f"layers must be from 1 to {count}, the number of layers of the model, not {layers}.")
    kept = first_and_last(count, layers)
    stack = _layer_list_path(model, count)
    smaller = _shorten(config, count, kept)
    try:
        # As transformers will read it back; a family that stores its layers in another way fails here.
        reread = type(config).from_dict(smaller.to_dict())
        for name, value in _per_layer_options(smaller, len(kept)).items():
            if list(getattr(reread.get_text_config(), name)) != list(value):
                raise ValueError(f"{name} of its configuration cannot be shortened")
        shorter = AutoModelForCausalLM.from_config(reread, dtype=torch.float32)
        shorter.load_state_dict(_renumber(model.state_dict(), stack, kept))
    except Exception as error:  # errors of model families have no common base class
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{type(model).__name__} cannot be cut to {layers} layers ({reason}). Use all of them, or the .json file "
            "of a configuration."
        ) from error
    if model.generation_config is not None:
        shorter.generation_config = copy.deepcopy(model.generation_config)
    return shorter.eval(), kept


def first_and_last(count: int, wanted: int) -> tuple[int, ...]:
    """Return `wanted` of `count` numbers: a quarter of them the first, the rest the last; if only one, the first.

    The middle layers contribute least; evenly spaced layers do not fit together (docs/background/log.md).
    """
    first = -(-wanted // 4)
    return (*range(first), *range(count - wanted + first, count))


def layer_list(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a model."""
    layers = model.get_submodule(_layer_list_path(model, model.config.get_text_config().num_hidden_layers))
    assert isinstance(layers, nn.ModuleList)
    return layers


def _layer_list_path(model: PreTrainedModel, count: int) -> str:
    """Return the path of the list of layers: the largest list of `count` modules."""
    lists = {
        path: sum(parameter.numel() for parameter in module.parameters())
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    if not lists:
        raise ModelError(f"The {count} layers of {type(model).__name__} were not found. Use all layers.")
    return str(max(lists, key=lambda path: lists[path]))


def _shorten(config: PretrainedConfig, count: int, kept: tuple[int, ...]) -> PretrainedConfig:
    """Return a configuration with these layers only: their number, and every option given per layer."""
    smaller = copy.deepcopy(config)
    text = smaller.get_text_config()
    for name, value in _per_layer_options(config, count).items():
        setattr(text, name, [value[number] for number in kept])
    text.num_hidden_layers = len(kept)
    return smaller


def _per_layer_options(config: PretrainedConfig, count: int) -> dict[str, Any]:
    """Return the options that a configuration lists per layer, such as the kind of attention."""
    return {
        name: value
        for name, value in vars(config.get_text_config()).items()
        if isinstance(value, (list, tuple)) and len(value) == count and "layer" in name and not name.startswith("_")
    }


def _renumber(weights: dict[str, Tensor], stack: str, kept: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the weights outside the list of layers, and those of the kept layers under their new numbers."""
    numbers = {old: new for new, old in enumerate(kept)}
    renumbered = {}
    for name, weight in weights.items():
        if not name.startswith(f"{stack}."):
            renumbered[name] = weight
            continue
        number, _, rest = name[len(stack) + 1 :].partition(".")
        if int(number) in numbers:
            renumbered[f"{stack}.{numbers[int(number)]}.{rest}"] = weight
    return renumbered


def _from_config(path: Path, like: CausalLM, seed: int) -> PreTrainedModel:
    """Return a model with random weights and the vocabulary of `like`."""
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"Cannot read the configuration {path}: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise ModelError(f"The configuration {path} is not valid JSON.") from None
    if not isinstance(options, dict) or not isinstance(options.get("model_type"), str):
        raise ModelError(f'The configuration {path} has no "model_type", such as "llama".')
    text = like.model.config.get_text_config()
    special = {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    options = {**options, "vocab_size": like.vocab_size, **special}
    kind = options.pop("model_type")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = AutoConfig.for_model(kind, **options)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # errors in a configuration have no common base class
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"No model can be built from the configuration {path}: {reason}") from error
    initial: PreTrainedModel = model.eval()
    return initial


def _as_lm(model: PreTrainedModel, like: CausalLM, name: str) -> CausalLM:
    """Return the model with the tokenizer of `like`."""
    lm = CausalLM(model, like.tokenizer, name=name)
    if lm.vocab_size != like.vocab_size:
        raise ModelMismatch(f"{name} has {lm.vocab_size:,} tokens, but {like.name} has {like.vocab_size:,}.")
    return lm
