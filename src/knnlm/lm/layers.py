"""The blocks of a model as a list, and configurations of models with fewer of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from knnlm.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedConfig, PreTrainedModel

_CHANGING_ROPES = ("dynamic", "longrope")


def layer_list(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a model."""
    layers = model.get_submodule(layer_list_path(model))
    assert isinstance(layers, nn.ModuleList)
    return layers


def layer_list_path(model: PreTrainedModel) -> str:
    """Return the path of the list of layers: the largest list with as many modules as the configuration has layers."""
    count = model.config.get_text_config().num_hidden_layers
    lists = {
        path: sum(parameter.numel() for parameter in module.parameters())
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    if not lists:
        raise ModelError(f"The {count} layers of {type(model).__name__} were not found. Use all layers.")
    return str(max(lists, key=lambda path: lists[path]))


def shorten_config(config: PreTrainedConfig, kept: Sequence[int]) -> PreTrainedConfig:
    """Return a configuration with these layers only: their number, and every option given per layer."""
    smaller = copy.deepcopy(config)
    text = smaller.get_text_config()
    for name, value in per_layer_options(config).items():
        setattr(text, name, [value[number] for number in kept])
    text.num_hidden_layers = len(kept)
    return smaller


def per_layer_options(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the options that a configuration lists per layer, such as the kind of attention."""
    text = config.get_text_config()
    return {
        name: value
        for name, value in vars(text).items()
        if isinstance(value, (list, tuple))
        and len(value) == text.num_hidden_layers
        and "layer" in name
        and not name.startswith("_")
    }


def has_fixed_positions(config: Any) -> bool:
    """Whether the rotation of a position does not depend on the last position of a pass."""

    def kinds(given: Any) -> Iterator[Any]:
        if isinstance(given, Mapping):
            yield given.get("rope_type", given.get("type"))
            for value in given.values():  # by the kind of layer
                yield from kinds(value)

    text = config.get_text_config()
    given = (getattr(text, name, None) for name in ("rope_parameters", "rope_scaling"))
    return not any(kind in _CHANGING_ROPES for each in given for kind in kinds(each))
