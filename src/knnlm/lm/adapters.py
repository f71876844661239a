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
from knnlm.lm.fingerprint import same_weights, set_fingerprint, weights_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_WEIGHTS = "knnlm_base_weights"  # in the metadata of the weights: the fingerprint of the base model

_PREFIX = "base_model.model."
_ENDS = (".lora_A.weight", ".lora_B.weight")
_UNSUPPORTED = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "bias")  # where set, but for bias: none


def has_adapters(name: str | Path) -> bool:
    """Whether a folder contains adapters instead of a model."""
    return (Path(name) / ADAPTER_CONFIG).is_file()


@dataclass(frozen=True)
class AdapterSet:
    """The adapters of a base model."""

    folder: Path
    base: str  # the name of the model
    base_weights: dict[str, str] | None  # its fingerprint; None: not recorded
    matrices: dict[str, tuple[Tensor, Tensor]]  # A (r, in) and scaled B (out, r) of each layer, by its name
    digest: str

    @classmethod
    def read(cls, folder: str | Path) -> AdapterSet:
        """Read and validate a folder."""
        folder = Path(folder)
        try:
            config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            tensors, metadata = _read_tensors(folder / ADAPTER_WEIGHTS)
            recorded = metadata.get(BASE_WEIGHTS)
            base_weights = None if recorded is None else dict(json.loads(recorded))
        except Exception as error:  # errors of safetensors have no common root
            raise ModelError(f"The adapters in {folder} cannot be read: {' '.join(str(error).split())[:200]}") from None
        problem = _problem(config)
        if problem:
            raise ModelError(f"The adapters in {folder} cannot be used: {problem}.")
        rank, alpha = config["r"], config["lora_alpha"]
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        names = [name.removeprefix(_PREFIX).removesuffix(_ENDS[0]) for name in tensors if name.endswith(_ENDS[0])]
        try:
            matrices = {
                name: (tensors[f"{_PREFIX}{name}{_ENDS[0]}"], scale * tensors[f"{_PREFIX}{name}{_ENDS[1]}"])
                for name in names
            }
        except KeyError as error:
            raise ModelError(f"The adapters in {folder} are incomplete: {error} is missing.") from None
        if not names or len(tensors) != 2 * len(names):
            raise ModelError(f"{folder / ADAPTER_WEIGHTS} has other tensors than the matrices A and B of layers.")
        return cls(folder, config["base_model_name_or_path"], base_weights, matrices, _digest(matrices))

    def belongs_to(self, weights: Mapping[str, Any], name: str) -> bool:
        """Whether a model with this fingerprint and name is the base."""
        return name == self.base if self.base_weights is None else same_weights(self.base_weights, dict(weights))

    def merge(self, model: PreTrainedModel) -> None:
        """Add the adapters to the weights of their base model, in place."""
        weights = weights_fingerprint(model)
        if not self.belongs_to(weights, self.base):
            raise ModelError(
                f"{self.base} has other weights than the model that the adapters in {self.folder} were trained for. "
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
        model = copy.deepcopy(base, shared)
        for name, (a, b) in self.matrices.items():
            layer = self._layer(model, name, a, b)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, AdaptedLayer(layer, a.to(layer.weight), b.to(layer.weight)))
        self._mark(model, weights_fingerprint(base))
        return model

    def _layer(self, model: PreTrainedModel, name: str, a: Tensor, b: Tensor) -> Any:
        """Return a layer of the base model; raise ModelError if it has another shape than the adapters."""
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            raise ModelError(f"{self.base} has no layer {name}, for which {self.folder} has adapters.") from None
        shape = tuple(getattr(layer, "weight", a).shape)
        wanted = (a.shape[1], b.shape[0]) if _is_transposed(model, name) else (b.shape[0], a.shape[1])
        if shape != wanted:
            raise ModelError(
                f"The layer {name} of {self.base} has the shape {shape}, but the adapters in {self.folder} are for "
                f"{wanted}."
            )
        return layer

    def _mark(self, model: PreTrainedModel, base: Mapping[str, str]) -> None:
        hashes = {dtype: hashlib.sha256(f"{own} {self.digest}".encode()) for dtype, own in base.items()}
        set_fingerprint(model, {dtype: each.hexdigest()[:16] for dtype, each in hashes.items()})


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


def _problem(config: Any) -> str | None:
    """Return why adapters with this configuration cannot be used."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        return "they are not of the type LORA"
    if not isinstance(config.get("base_model_name_or_path"), str):
        return "they do not name their model"
    numbers = config.get("r"), config.get("lora_alpha")
    if not all(isinstance(value, (int, float)) and value > 0 for value in numbers):
        return "their rank or scale is missing"
    used = [name for name in _UNSUPPORTED if config.get(name) not in (None, False, {}, [], "none")]
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
