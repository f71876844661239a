"""Low-rank adapters (LoRA, Hu et al. 2021) on all linear layers of a model, by the package peft.

Only the adapters are trained, so that no gradients and moments of the other weights are computed and kept. Those of a
pretrained model are saved alone (`knnlm.lm.adapters` opens them); others are added to the weights of the model.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from knnlm.errors import MissingExtra, ModelError
from knnlm.lm.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_IDENTITY, AdapterSet, UnsupportedAdapters
from knnlm.lm.layers import layer_list, layer_list_path

if TYPE_CHECKING:
    from peft.tuners.lora import LoraModel

_ALPHA = 2  # of the rank: the factor by which the product of both matrices is multiplied
_NAME = "default"


def require_peft() -> None:
    """Raise MissingExtra if peft is not installed."""
    if find_spec("peft") is None:
        raise MissingExtra("Training with lora", "peft", "lora")


class Adapters:
    """The adapters of a model, which is changed in place: its linear layers have them, and other weights are fixed."""

    def __init__(self, model: PreTrainedModel, *, rank: int, seed: int, top: int | None = None) -> None:
        """Add adapters of this rank, which do not change what the model computes before they are trained.

        `top` adds them to so many of the last blocks; None: to all.
        """
        require_peft()
        self._is_seq2seq = bool(model.config.is_encoder_decoder)
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel

        config = LoraConfig(r=rank, lora_alpha=_ALPHA * rank, lora_dropout=0.0, target_modules="all-linear")
        if top is not None:
            first = "|".join(map(str, range(len(layer_list(model)) - top)))
            config.exclude_modules = rf"{re.escape(layer_list_path(model))}\.({first})\..*" if first else None
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out")  # of layers that are stored transposed
            torch.manual_seed(seed)
            try:
                self._tuner: LoraModel = LoraModel(model, config, _NAME)
            except (ValueError, NotImplementedError, RuntimeError) as error:
                raise ModelError(
                    f"{type(model).__name__} cannot be trained with lora ({error}). Train all of its weights."
                ) from None

    def save(self, folder: Path, base_model: str, base_identity: Mapping[str, Any]) -> bool:
        """Write the adapters in the format of peft, with the name and the identity of their model.

        Return whether `knnlm.lm.adapters` can open them; else nothing is written, as with some mixtures of experts.
        """
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        config = self._tuner.peft_config[_NAME]
        task = "SEQ_2_SEQ_LM" if self._is_seq2seq else "CAUSAL_LM"
        config.base_model_name_or_path, config.task_type, config.inference_mode = base_model, task, True
        config.save_pretrained(str(folder))
        tensors: dict[str, Any] = get_peft_model_state_dict(
            self._tuner,
            adapter_name=_NAME,
            save_embedding_layers=False,  # "auto" would ask the hub for the base model
        )
        named = {f"base_model.model.{name.removeprefix('model.')}": value for name, value in tensors.items()}
        save_file(
            {name: value.contiguous().cpu() for name, value in named.items()},
            folder / ADAPTER_WEIGHTS,
            {BASE_IDENTITY: json.dumps(dict(base_identity), sort_keys=True)},
        )
        try:
            AdapterSet.read(folder)
        except UnsupportedAdapters:
            for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
                (folder / name).unlink()
            return False
        return True

    def merge(self) -> PreTrainedModel:
        """Return the model with the adapters added to its weights."""
        merged = self._tuner.merge_and_unload()
        assert isinstance(merged, PreTrainedModel)
        return merged
