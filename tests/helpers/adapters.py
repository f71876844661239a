"""Adapters that were not trained."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel

from helpers.models import tiny_tokenizer
from knnlm.lm.causal import CausalLM
from knnlm.training.lora import Adapters


def random_adapters(folder: Path, model: PreTrainedModel, name: str, *, seed: int = 0) -> Path:
    """Save random adapters of a model of this name, if they can be saved alone."""
    other = copy.deepcopy(model)
    adapters = Adapters(other, rank=2, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for part, weight in other.named_parameters():
            if ".lora_B." in part:
                weight.normal_(std=0.1, generator=generator)
    folder.mkdir()
    adapters.save(folder, name, CausalLM(model, tiny_tokenizer(), name=name).identity)
    return folder
