"""The shape of a model, read from its configuration without its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from knnlm.errors import ModelError
from knnlm.lm.causal import DEFAULT_CONTEXT
from knnlm.lm.loading import auto_class, load_config, model_folder
from knnlm.lm.windows import WindowShape
from knnlm.plan.sizes import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def describe_model(name: str) -> ModelShape:
    """Return the shape of a model by its name; its weights are not loaded."""
    import torch
    from transformers import AutoConfig

    config = load_config(name)
    if config is None:  # the bundled model or a GGUF file
        config = AutoConfig.from_pretrained(model_folder(name))
    try:
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"The shape of {name} cannot be read from its configuration: {error}") from None
    return shape_of(model, name)


def shape_of(model: PreTrainedModel, name: str) -> ModelShape:
    """Return the shape of a model, which may be without weights."""
    config: Any = model.config.get_text_config()
    parameters = {id(each): each.numel() for each in model.parameters()}  # shared ones count once
    outside = {
        id(each)
        for part in (model.get_input_embeddings(), model.get_output_embeddings())
        if part is not None
        for each in part.parameters()
    }
    width = int(config.hidden_size)
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    head = int(getattr(config, "head_dim", 0) or (width // heads if heads else 0))
    limit = getattr(config, "max_position_embeddings", None)
    context = min(DEFAULT_CONTEXT, limit) if isinstance(limit, int) and limit > 0 else DEFAULT_CONTEXT
    return ModelShape(
        name=name,
        width=width,
        parameters=sum(parameters.values()),
        body_parameters=sum(size for each, size in parameters.items() if each not in outside),
        layers=int(getattr(config, "num_hidden_layers", 1)),
        attention_width=heads * head,
        window=WindowShape(context, max(1, context // 2)),
    )
