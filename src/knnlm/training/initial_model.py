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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from knnlm.errors import ModelError, ModelMismatch, ParameterError
from knnlm.lm.causal import CausalLM
from knnlm.lm.fingerprint import tokenizer_fingerprint
from knnlm.lm.layers import layer_list, layer_list_path, per_layer_options, shorten_config
from knnlm.lm.loading import load_model
from knnlm.lm.speech import wrap_model


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
            **self.lm.languages,
        }


def open_initial_model(spec: str, *, like: CausalLM, layers: int | None = None, seed: int = 0) -> InitialModel:
    """Open a model to train a decoder for `like` from: a model's name or folder, or the .json file of a configuration.

    A configuration gives a model with random weights, the same for the same seed, and the vocabulary of `like`.
    `layers` keeps that many layers of a pretrained model: a quarter of them the first, the rest the last. An
    encoder-decoder model is trained as a whole.
    """
    path = Path(spec)
    if like.reads_audio:
        raise ParameterError(f"{like.name} reads sounds: no decoder can be trained for it.")
    if like.has_encoder and (layers is not None or path.suffix == ".json"):
        raise ParameterError(
            f"A decoder for {like.name}, an encoder-decoder model, has all blocks of a pretrained one. Leave layers "
            "out, and name a model instead of a configuration."
        )
    if path.suffix == ".json":
        if layers is not None:
            raise ParameterError(f"{spec} determines how many layers the decoder has. Leave layers out.")
        return InitialModel(_as_lm(_from_config(path, like, seed), like, spec), str(path.resolve()))
    model, tokenizer = load_model(spec, dtype=torch.float32, encoder=like.has_encoder)
    own, wanted = tokenizer_fingerprint(tokenizer), tokenizer_fingerprint(like.tokenizer)
    if own != wanted:
        raise ModelMismatch(
            f"{spec} has another tokenizer ({own}) than {like.name} ({wanted}), so a decoder trained from it could not "
            f"be mixed with it. {_advice(like, 'tokenizer')}"
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
    stack = layer_list_path(model)
    smaller = shorten_config(config, kept)
    try:
        # As transformers will read it back; a family that stores its layers in another way fails here.
        reread = type(config).from_dict(smaller.to_dict())
        for name, value in per_layer_options(smaller).items():
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


def freeze_first_blocks(model: PreTrainedModel, top: int) -> None:
    """Leave only so many of the last blocks, and what follows them before the head, to be trained."""
    blocks = layer_list(model)
    if top > len(blocks):
        raise ParameterError(f"top must be from 1 to {len(blocks)}, the number of blocks of the decoder, not {top}.")
    embeddings = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module]
    fixed = {id(weight) for module in (*embeddings, *blocks[: len(blocks) - top]) for weight in module.parameters()}
    after = {id(weight) for weight in _after_blocks(model, blocks)}
    trained = {id(weight) for block in blocks[len(blocks) - top :] for weight in block.parameters()} | after
    for weight in model.parameters():
        weight.requires_grad_(id(weight) in trained - fixed)


def _after_blocks(model: PreTrainedModel, blocks: nn.ModuleList) -> list[Tensor]:
    """Return the weights that are used after the last block, such as those of a norm, by the order of modules."""
    inside = {id(module) for block in blocks for module in block.modules()}
    found: list[Tensor] = []
    last = False
    for module in model.modules():
        last = last or module is blocks[-1]
        if last and id(module) not in inside:
            found += module.parameters(recurse=False)
    return found


def first_and_last(count: int, wanted: int) -> tuple[int, ...]:
    """Return `wanted` of `count` numbers: a quarter of them the first, the rest the last; if only one, the first.

    The middle layers contribute least; evenly spaced layers do not fit together (docs/background/log.md).
    """
    first = -(-wanted // 4)
    return (*range(first), *range(count - wanted + first, count))


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
    """Return the model with the tokenizer and the languages of `like`."""
    lm = wrap_model(model, like.tokenizer, name=name, **like.languages)
    if lm.vocab_size != like.vocab_size:
        raise ModelMismatch(
            f"{name} has {lm.vocab_size:,} tokens, but {like.name} has {like.vocab_size:,}. "
            f"{_advice(like, 'vocabulary')}"
        )
    own, wanted = ([*each.prefix_tokens, each.start_token] for each in (lm, like))
    if own != wanted:
        raise ModelMismatch(
            f"Texts of {name} begin with the tokens {own}, those of {like.name} with {wanted}: they cannot be mixed."
        )
    return lm


def _advice(like: CausalLM, same: str) -> str:
    """Return which models a decoder beside another one can be trained from."""
    other = "" if like.has_encoder else ", or the .json file of a configuration"
    return f"Use a model with the same {same}{other}."
