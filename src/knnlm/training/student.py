"""Make a student: a pretrained model, some blocks of one, or a new one from a configuration. Knows no training.

It speaks the tokens of the model that it is to help, so the tokenizer is that model's, and vocabularies must agree.
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
class Student:
    """A model in float32 that is to be trained, and how it was made."""

    lm: CausalLM
    spec: str
    blocks: tuple[int, ...] | None = None  # those of the pretrained model that it has; None: all

    @property
    def parameters(self) -> int:
        """The number of weights; those that are used twice count once."""
        return sum(parameter.numel() for parameter in self.lm.model.parameters())

    @property
    def facts(self) -> dict[str, Any]:
        """What a card says of it."""
        return {
            "spec": self.spec,
            "blocks": None if self.blocks is None else list(self.blocks),
            "class": type(self.lm.model).__name__,
            "parameters": self.parameters,
            "weights": self.lm.identity["weights"],
        }


def open_student(spec: str, *, like: CausalLM, layers: int | None = None, seed: int = 0) -> Student:
    """Open a student for the model `like`: a model's name or folder, or the .json file of a configuration.

    A configuration gives a model with random weights, the same for the same seed, and the vocabulary of `like`.
    `layers` keeps that many blocks of a pretrained model: some of the first, and most of them the last.
    """
    path = Path(spec)
    if path.suffix == ".json":
        if layers is not None:
            raise ParameterError(f"{spec} says itself how many layers the student has. Leave layers out.")
        model = _from_config(path, like, seed)
        return Student(_reader(model, like, spec), str(path.resolve()))
    model, tokenizer = load_model(spec, dtype=torch.float32)
    own, wanted = tokenizer_fingerprint(tokenizer), tokenizer_fingerprint(like.tokenizer)
    if own != wanted:
        raise ModelMismatch(
            f"The student {spec} has another tokenizer ({own}) than {like.name} ({wanted}), so what it says would mean "
            "nothing to it. Use a student with the same tokenizer, or the .json file of a configuration."
        )
    size = model.config.get_text_config().vocab_size
    if size != like.vocab_size:
        raise ModelMismatch(
            f"The student {spec} has {size:,} tokens, but {like.name} has {like.vocab_size:,}. Use a student with the "
            "same vocabulary, or the .json file of a configuration."
        )
    blocks = None
    if layers is not None:
        model, blocks = keep_blocks(model, layers)
    name = str(path.resolve()) if path.exists() else spec
    return Student(_reader(model, like, spec), name, blocks)


def keep_blocks(model: PreTrainedModel, layers: int) -> tuple[PreTrainedModel, tuple[int, ...]]:
    """Make a model of some blocks of another, with its weights; say which blocks they were."""
    config = model.config
    count = config.get_text_config().num_hidden_layers
    if not 1 <= layers <= count:
        raise ParameterError(f"layers must be from 1 to {count}, the number that the model has, not {layers}.")
    kept = both_ends(count, layers)
    stack = _stack(model, count)
    smaller = _shorten(config, count, kept)
    try:
        # As transformers will read it again; a family that keeps its layers in a way of its own fails here.
        again = type(config).from_dict(smaller.to_dict())
        for name, value in _by_layer(smaller, len(kept)).items():
            if list(getattr(again.get_text_config(), name)) != list(value):
                raise ValueError(f"{name} of its configuration cannot be cut")
        made = AutoModelForCausalLM.from_config(again, dtype=torch.float32)
        made.load_state_dict(_renumber(model.state_dict(), stack, kept))
    except Exception as error:  # what a family makes of a configuration has no common root
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{type(model).__name__} cannot be cut to {layers} layers ({reason}). Use all of them, or the .json file "
            "of a configuration."
        ) from error
    if model.generation_config is not None:
        made.generation_config = copy.deepcopy(model.generation_config)
    return made.eval(), kept


def both_ends(count: int, wanted: int) -> tuple[int, ...]:
    """Choose some of `count` numbers: a quarter of them the first, and the rest the last; of one, the first.

    Blocks in the middle say least that others do not; blocks from all over do not fit together (docs/log.md).
    """
    first = -(-wanted // 4)
    return (*range(first), *range(count - wanted + first, count))


def _stack(model: PreTrainedModel, count: int) -> str:
    """Find the path of the list of blocks: the largest list of as many modules."""
    lists = {
        path: sum(parameter.numel() for parameter in module.parameters())
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    if not lists:
        raise ModelError(f"The {count} blocks of {type(model).__name__} were not found. Use all layers.")
    return str(max(lists, key=lambda path: lists[path]))


def _shorten(config: PretrainedConfig, count: int, kept: tuple[int, ...]) -> PretrainedConfig:
    """Give a configuration with these layers only: their number, and what is said of each."""
    smaller = copy.deepcopy(config)
    text = smaller.get_text_config()
    for name, value in _by_layer(config, count).items():
        setattr(text, name, [value[number] for number in kept])
    text.num_hidden_layers = len(kept)
    return smaller


def _by_layer(config: PretrainedConfig, count: int) -> dict[str, Any]:
    """Find what a configuration says of each of its layers, such as how far its attention reaches."""
    facts = vars(config.get_text_config())
    return {
        name: value
        for name, value in facts.items()
        if isinstance(value, (list, tuple)) and len(value) == count and "layer" in name and not name.startswith("_")
    }


def _renumber(weights: dict[str, Tensor], stack: str, kept: tuple[int, ...]) -> dict[str, Tensor]:
    """Keep the weights outside of the stack, and those of the kept blocks under their new numbers."""
    numbers = {old: new for new, old in enumerate(kept)}
    made = {}
    for name, weight in weights.items():
        if not name.startswith(f"{stack}."):
            made[name] = weight
            continue
        number, _, rest = name[len(stack) + 1 :].partition(".")
        if int(number) in numbers:
            made[f"{stack}.{numbers[int(number)]}.{rest}"] = weight
    return made


def _from_config(path: Path, like: CausalLM, seed: int) -> PreTrainedModel:
    """Make a model with random weights and the vocabulary of another."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"Cannot read the configuration {path}: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise ModelError(f"The configuration {path} is no JSON.") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("model_type"), str):
        raise ModelError(f'The configuration {path} does not say its "model_type", such as "llama".')
    theirs = like.model.config.get_text_config()
    special = {name: getattr(theirs, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    options = {**facts, "vocab_size": like.vocab_size, **special}
    kind = options.pop("model_type")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = AutoConfig.for_model(kind, **options)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # what can be wrong with a configuration has no common root
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"The configuration {path} gives no model: {reason}") from error
    made: PreTrainedModel = model.eval()
    return made


def _reader(model: PreTrainedModel, like: CausalLM, name: str) -> CausalLM:
    """Read with the student as with any model, and with the tokenizer of the other."""
    lm = CausalLM(model, like.tokenizer, name=name)
    if lm.vocab_size != like.vocab_size:
        raise ModelMismatch(f"The student {name} has {lm.vocab_size:,} tokens, but {like.name} {like.vocab_size:,}.")
    return lm
