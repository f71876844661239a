"""Low-rank adapters (LoRA) of a model: read from a folder in the format of peft, merged, or beside shared weights.

Merged, they are added to the weights of a model of its own. Beside another model that is the one they were trained for,
they are computed in addition to its layers, whose weights are in memory once. Merged weights differ by rounding from
machine to machine, so that the identity of such a model is that of its base and of the adapters.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from knnlm.errors import ModelError
from knnlm.lm.fingerprint import (
    config_difference,
    identity_difference,
    relevant_config,
    same_weights,
    set_fingerprint,
    weights_fingerprint,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_IDENTITY = "knnlm_base"  # in the metadata of the weights: the identity of the base model

_PREFIX = "base_model.model."
_ENDS = (".lora_A.weight", ".lora_B.weight")
# Fields of peft's configuration that are read, or do not change what the adapters compute; others must not be set.
_KNOWN = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "target_modules",
    "task_type",
    "use_rslora",
}
_INITIAL_WEIGHTS = (True, False, "gaussian", "orthogonal", "eva")  # others change the weights of the model


class UnsupportedAdapters(ModelError):
    """Adapters of a kind that is not read."""


def has_adapters(name: str | Path) -> bool:
    """Whether a folder contains adapters instead of a model."""
    return (Path(name) / ADAPTER_CONFIG).is_file()


def base_of(folder: str | Path) -> str:
    """Return the name of the model that the adapters in a folder belong to; a path is absolute."""
    return _base(Path(folder), _read_config(Path(folder)))


def final_base(name: str) -> str:
    """Return the name of a model that is no adapters: the base of the base and so on, or the name itself."""
    seen = []
    while has_adapters(name):
        if (place := Path(name).resolve()) in seen:
            raise ModelError(f"The adapters in {name} belong to themselves: {ADAPTER_CONFIG} names no other model.")
        seen.append(place)
        name = base_of(name)
    return name


@dataclass(frozen=True)
class AdapterSet:
    """The adapters of a base model."""

    folder: Path
    base: str  # the name of the model
    identity: dict[str, Any] | None  # that of the base; None: not recorded
    matrices: dict[str, tuple[Tensor, Tensor]]  # A (r, in) and scaled B (out, r) of each layer, by its name
    digest: str

    @classmethod
    def read(cls, folder: str | Path) -> AdapterSet:
        """Read and validate a folder."""
        folder = Path(folder)
        config = _read_config(folder)
        if problem := _problem(config):
            raise UnsupportedAdapters(f"The adapters in {folder} cannot be used: {problem}.")
        file = folder / ADAPTER_WEIGHTS
        try:
            tensors, metadata = _read_tensors(file)
            recorded = metadata.get(BASE_IDENTITY)
            identity = None if recorded is None else dict(json.loads(recorded))
        except Exception as error:  # errors of safetensors have no common root
            raise ModelError(
                f"{file} cannot be read ({' '.join(str(error).split())[:200]}). Restore it from a copy, or train the "
                "adapters again."
            ) from None
        scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
        names = [name.removeprefix(_PREFIX).removesuffix(_ENDS[0]) for name in tensors if name.endswith(_ENDS[0])]
        known = {f"{_PREFIX}{name}{end}" for name in names for end in _ENDS}
        if not names or known != tensors.keys():
            other = min(known ^ tensors.keys(), default="the matrices")
            what = "has no" if other in known or not names else "has other tensors than the matrices of layers:"
            raise UnsupportedAdapters(f"{file} {what} {other}.")
        first, second = ([tensors[f"{_PREFIX}{name}{end}"] for name in names] for end in _ENDS)
        matrices = {name: (a, scale * b) for name, a, b in zip(names, first, second, strict=True)}
        return cls(folder, _base(folder, config), identity, matrices, _digest(matrices))

    def belongs_to(self, identity: Mapping[str, Any], name: str) -> bool:
        """Whether a model with this identity and name is the base."""
        if self.identity is None:
            return name == self.base
        return identity_difference(self.identity, identity) is None

    def merge(self, model: PreTrainedModel) -> None:
        """Add the adapters to the weights of their base model, in place."""
        weights = weights_fingerprint(model)
        if self.identity is not None:
            field = config_difference(self.identity["config"], relevant_config(model))
            changed = "other weights" if not same_weights(self.identity["weights"], weights) else f"another {field}"
            if field is not None or changed == "other weights":
                raise ModelError(
                    f"{self.base} has {changed} than the model that the adapters in {self.folder} were trained for. "
                    "Restore that model, or train the adapters again."
                )
        with torch.no_grad():
            for name, (a, b) in self.matrices.items():
                weight = self._layer(model, name, a, b).weight
                change = (b.float() @ a.float()).to(weight.device)
                weight.copy_(weight.float() + (change.T if _is_transposed(model, name) else change))
        self._mark(model, weights)

    def beside(self, base: PreTrainedModel) -> PreTrainedModel:
        """Return a model with the tensors of its base and the adapters beside them."""
        shared: dict[int, Any] = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
        model: PreTrainedModel = copy.deepcopy(base, shared).eval()
        for name, (a, b) in self.matrices.items():
            layer = self._layer(model, name, a, b)
            parent, _, last = name.rpartition(".")
            own = (matrix.to(layer.weight.device, model.dtype) for matrix in (a, b))
            setattr(model.get_submodule(parent), last, AdaptedLayer(layer, *own))
        self._mark(model, weights_fingerprint(base))
        return model

    def _layer(self, model: PreTrainedModel, name: str, a: Tensor, b: Tensor) -> Any:
        """Return a layer of the base model; raise ModelError if the adapters cannot be those of this layer."""
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            raise ModelError(f"{self.base} has no layer {name}, for which {self.folder} has adapters.") from None
        weight: Any = getattr(layer, "weight", a)
        shape, wanted = tuple(weight.shape), (b.shape[0], a.shape[1])
        wanted = wanted[::-1] if _is_transposed(model, name) else wanted
        if shape != wanted:
            raise ModelError(
                f"The layer {name} of {self.base} has the shape {shape}, but the adapters in {self.folder} are for "
                f"{wanted}."
            )
        if not weight.is_floating_point() or weight is getattr(model.get_input_embeddings(), "weight", None):
            kind = "shares its weights with the embeddings" if weight.is_floating_point() else "is quantised"
            raise UnsupportedAdapters(
                f"The adapters in {self.folder} cannot be used: the layer {name} of {self.base} {kind}."
            )
        return layer

    def _mark(self, model: PreTrainedModel, base: Mapping[str, str]) -> None:
        """Record that the model is its base with the adapters; adapters that change nothing leave it its base."""
        hashes = {dtype: hashlib.sha256(f"{own} {self.digest}".encode()) for dtype, own in base.items()}
        changes = any(bool(b.any()) for _, b in self.matrices.values())
        set_fingerprint(model, {dtype: each.hexdigest()[:16] for dtype, each in hashes.items()} if changes else base)


class AdaptedLayer(nn.Module):
    """A linear layer and its adapter."""

    def __init__(self, layer: nn.Module, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.a, self.b = nn.Parameter(a, requires_grad=False), nn.Parameter(b, requires_grad=False)

    @property
    def weight(self) -> Any:
        """The weight of the layer, which some models look at."""
        return self.layer.weight

    def forward(self, states: Tensor) -> Tensor:
        """Return the output of the layer and of its adapter."""
        output: Tensor = self.layer(states)
        return output + linear(linear(states, self.a), self.b)


def _read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of adapters that name their model."""
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config["base_model_name_or_path"], str):
            raise ValueError("it names no model")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{folder / ADAPTER_CONFIG} cannot be read ({error}). Restore it from a copy, or train the adapters again."
        ) from None
    return config  # type: ignore[no-any-return]


def _base(folder: Path, config: Mapping[str, Any]) -> str:
    name: str = config["base_model_name_or_path"]
    found = next((place for place in (folder / name, Path(name)) if place.exists()), None)
    return name if found is None else str(found.resolve())


def _problem(config: Mapping[str, Any]) -> str | None:
    """Return why adapters with this configuration cannot be used."""
    if config.get("peft_type") != "LORA":
        return "they are not of the type LORA"
    numbers = config.get("r"), config.get("lora_alpha")
    if not all(isinstance(value, (int, float)) and 0 < value < math.inf for value in numbers):
        return "their rank or scale is missing"
    if config.get("init_lora_weights", True) not in _INITIAL_WEIGHTS:
        return f"init_lora_weights {config['init_lora_weights']!r} is not supported"
    used = [name for name, value in config.items() if name not in _KNOWN and value not in (None, False, {}, [], "none")]
    return f"{used[0]} is not supported" if used else None


def _digest(matrices: Mapping[str, tuple[Tensor, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, own in sorted(matrices.items()):
        digest.update(name.encode())
        for matrix in own:
            digest.update(str(tuple(matrix.shape)).encode())
            digest.update(matrix.float().numpy().tobytes())
    return digest.hexdigest()


def _is_transposed(model: PreTrainedModel, name: str) -> bool:
    """Whether a layer stores its weight as (in, out), as those of GPT-2 do."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(model.get_submodule(name), Conv1D)
