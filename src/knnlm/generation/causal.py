"""A language model with a memory as a transformers model. Knows nothing about how the memory finds neighbours.

`KnnForCausalLM` holds the base model as an ordinary sub-module and calls it; it replaces nothing in it. Its logits are
log-probabilities of the mixture, so sampling, beams, streaming and pipelines work as with any other model.
"""

from __future__ import annotations

import copy
import inspect
import os
import shutil
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.generic import ModelOutput

from knnlm.datastore.catalog import CATALOG_FILE, Catalog
from knnlm.datastore.compact import compact
from knnlm.datastore.garbage import purge
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.segments import LOST
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError, ModelError
from knnlm.generation.cache import Step, look, state_of
from knnlm.index.gpu.deferred import defer_checks
from knnlm.lm.causal import CausalLM, for_any_shape
from knnlm.memories.base import LM_LOGITS, Context
from knnlm.mixture.loader import is_decoder, language_model
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.options import DEFAULTS, SavedMixture
from knnlm.mixture.saved import read_mixture, weights_state, write_mixture

_BASE, _MEMORY = "base", "memory"

# What `generate` may be given that it changes or calls with every token.
_CHANGED = (
    "assistant_model",
    "custom_generate",
    "logits_processor",
    "past_key_values",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "streamer",
)


class KnnConfig(PreTrainedConfig):
    """The base model's configuration, where the memory lies, and how it is mixed."""

    model_type = "knnlm"
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012  (transformers reads a plain dict)

    def __init__(
        self,
        text_config: PreTrainedConfig | dict[str, Any] | None = None,
        *,
        memory: str | None = None,
        k: int = DEFAULTS["k"],
        knn_temperature: float = DEFAULTS["knn_temperature"],
        lmbda: float | None = None,
        metric: str = "l2",
        mixture: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(text_config, dict):
            text_config = AutoConfig.for_model(**text_config)
        self.text_config = text_config
        self.memory = memory
        self.k = k
        self.knn_temperature = knn_temperature
        self.lmbda = lmbda
        self.metric = metric
        self.mixture = mixture
        super().__init__(**kwargs)


class KnnForCausalLM(PreTrainedModel, GenerationMixin):
    """p = (1-λ)·p_LM + λ·p_kNN, as a model that transformers can generate with."""

    config: KnnConfig
    config_class = KnnConfig
    base_model_prefix = ""
    # The base model has its own say in all of these; this class adds no attention of its own.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, mixture: Mixture) -> None:
        base = mixture.lm.model
        super().__init__(_config(mixture))
        self.base = base
        self.mixture = mixture
        self.generation_config = copy.deepcopy(base.generation_config)
        self._base_arguments = inspect.signature(base.forward).parameters
        # Whether `generate` looks at the end, rather than at each token, if every search was proven to be exact.
        self.looks_late: bool | None = None  # None: on a GPU

    @classmethod
    def from_memory(cls, path: str | os.PathLike[str], lm: CausalLM | None = None, **settings: Any) -> KnnForCausalLM:
        """Open a memory with the model it was built with; settings as for `Mixture.open`."""
        return cls(Mixture.open(Path(path), lm, **settings))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The base model's tokenizer."""
        return self.mixture.lm.tokenizer

    def get_input_embeddings(self) -> torch.nn.Module:
        """The base model's input embeddings."""
        return self.base.get_input_embeddings()

    def get_output_embeddings(self) -> torch.nn.Module:
        """The base model's output embeddings."""
        return cast(torch.nn.Module, self.base.get_output_embeddings())

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Let the base model prepare its own inputs: it is the one that reads them."""
        base: Any = self.base
        return cast(dict[str, Any], base.prepare_inputs_for_generation(*args, **kwargs))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does; a base model whose cache is of a kind of its own is used without one."""
        own = self.mixture.needs_history and getattr(self.base, "_is_stateful", False)
        if own or "past_key_values" not in self._base_arguments:
            kwargs["use_cache"] = False
        begin = partial(GenerationMixin.generate, cast(Any, self), *args, **kwargs)
        # To do it again, nothing that it changes may be the caller's.
        late = self.device.type == "cuda" if self.looks_late is None else self.looks_late
        if not late or len(args) > 1 or any(kwargs.get(name) is not None for name in _CHANGED):
            return begin()
        state = _random_state(self.device)
        with defer_checks() as doubts:
            text = begin()
        if not doubts.justified():
            return text
        _restore(self.device, state)
        return begin()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,  # noqa: ARG002  (the output is always a dictionary)
        **others: Any,
    ) -> ModelOutput:
        """Read keys and logits from one pass of the base model; return log p of the mixture as logits."""
        # `generate` looks at this signature to see what a model takes; the base model may take less.
        output, context = self.read(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **others,
        )
        logits = output.logits
        mixed = self.mixture.predict(context, all_components=False).log_probs()
        log_p = mixed.unflatten(0, logits.shape[:2])
        # The base model's own output with other logits: whatever kind of cache it carries goes along.
        output["logits"] = log_p
        if labels is not None:
            # log p sums to one already, so its cross entropy is -log p of the label.
            output["loss"] = torch.nn.functional.cross_entropy(log_p[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return cast(ModelOutput, output)

    def read(
        self,
        input_ids: Tensor | None,
        *,
        past_key_values: Any = None,
        logits_to_keep: int | Tensor = 0,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **offered: Any,
    ) -> tuple[Any, Context]:
        """Run the base model once: its own output, with the logits asked for, and what the memories may look at."""
        named = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": offered.pop("inputs_embeds", None),
            "use_cache": offered.pop("use_cache", None),
            "logits_to_keep": logits_to_keep,
        }
        inputs = {name: value for name, value in named.items() if name in self._base_arguments and value is not None}
        # Before the pass, since the base model fills the cache.
        state = state_of(past_key_values) if self.mixture.needs_history else None
        readers, sources = self.mixture.readers, self.mixture.lm_sources
        with ExitStack() as hooks:
            kept = [hooks.enter_context(readers.layer(source).capture()) for source in sources]
            hooks.enter_context(for_any_shape(self.device))
            output = self.base(input_ids=input_ids, return_dict=True, **inputs, **offered)
        keys = {source: own[-1].float() for source, own in zip(sources, kept, strict=True)}  # (B, T, D)
        given = input_ids if input_ids is not None else inputs["inputs_embeds"]
        if output.logits.shape[1] == given.shape[1] and isinstance(logits_to_keep, int):
            output["logits"] = output.logits[:, -logits_to_keep:]  # 0 keeps all of them
        positions = slice(-output.logits.shape[1], None) if isinstance(logits_to_keep, int) else logits_to_keep
        if state is None:
            context = Context({source: own[:, positions].flatten(0, 1) for source, own in keys.items()})
        elif input_ids is None:
            raise ModelError("This mixture looks at the tokens of the text: give input_ids, not inputs_embeds.")
        else:
            step = Step(input_ids, attention_mask, position_ids, positions)
            context = look(self.mixture, step, keys, state, getattr(output, "past_key_values", None))
        seen = {**context.states, LM_LOGITS: output.logits.flatten(0, 1)}
        return output, replace(context, states=seen)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], *, copy_memory: bool = False, **kwargs: Any
    ) -> None:
        """Write the base model as an ordinary folder inside this one, and name the memory or copy it along."""
        folder = Path(save_directory)
        self.base.save_pretrained(folder / _BASE, **kwargs)
        self.tokenizer.save_pretrained(folder / _BASE)
        self.tokenizer.save_pretrained(folder)
        config = _config(self.mixture)  # as it is now, not as it was when this object was made
        config.mixture = _write_mixture(self.mixture, folder, copy_memory=copy_memory)
        config.architectures = [type(self).__name__]
        source, copied = _home(self.mixture).resolve(), (folder / _MEMORY).resolve()
        if copy_memory and source != copied:
            shutil.rmtree(copied, ignore_errors=True)
            shutil.copytree(source, copied, ignore=shutil.ignore_patterns("*.lock", "*-shm", ".trace-*", LOST))
            _purge(copied)
        if copy_memory or source == copied:
            config.memory = _MEMORY
        config.save_pretrained(folder)
        self.generation_config.save_pretrained(folder)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *model_args: Any, **kwargs: Any
    ) -> KnnForCausalLM:
        """Open what `save_pretrained` wrote; other arguments (dtype, device_map, …) go to the base model."""
        folder = Path(pretrained_model_name_or_path)
        config = kwargs.pop("config", None) or KnnConfig.from_pretrained(folder)
        if not isinstance(config, KnnConfig) or config.memory is None:
            raise ModelError(f"{folder} does not name a memory. Save one with KnnForCausalLM.save_pretrained.")
        memory = folder / config.memory  # an absolute path stays as it is
        if not memory.exists():
            raise DatastoreError(
                f"{folder} uses the memory {memory}, which is not there. Bring it back, or save with copy_memory=True."
            )
        kwargs.setdefault("dtype", "auto")
        base = AutoModelForCausalLM.from_pretrained(folder / _BASE, *model_args, **_for_base(kwargs))
        tokenizer = AutoTokenizer.from_pretrained(folder / _BASE)
        mixture = _open_mixture(memory, base, tokenizer, config, folder)
        return cls(mixture)


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Note where the random numbers are that sampling draws."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _restore(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    """Go back there."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def _purge(memory: Path) -> None:
    """Leave nothing of removed documents in a copy that may be given away."""
    if is_decoder(memory):
        return
    with closing(Datastore.open(memory)) as store:
        whole = store.row_numbers.whole
    if not whole:
        compact(memory)
    else:
        # What a compaction has replaced may still lie there, for somebody was reading it.
        with writer_lock(memory), closing(Catalog.open(memory / CATALOG_FILE, write=True)) as catalog:
            purge(memory, catalog, keep_pending=False)


def _config(mixture: Mixture) -> KnnConfig:
    """Describe a mixture; the base model's configuration is copied, since transformers changes what it is given."""
    base = mixture.lm.model.config
    knn = mixture.knn
    return KnnConfig(
        copy.deepcopy(base),
        memory=str(_home(mixture).resolve()),
        k=knn.k if knn else DEFAULTS["k"],
        knn_temperature=knn.knn_temperature if knn else DEFAULTS["knn_temperature"],
        lmbda=mixture.lmbda,
        metric=knn.metric if knn else "l2",
        **{name: getattr(base, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def _home(mixture: Mixture) -> Path:
    if mixture.folder is None:
        raise ModelError("A mixture without a store has no folder to be named by. Open it with Mixture.open.")
    return mixture.folder


def _for_base(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop what the Auto classes add about this class rather than about the base model."""
    return {
        name: value for name, value in kwargs.items() if name not in ("_from_auto", "adapter_kwargs", "_commit_hash")
    }


def _open_mixture(
    memory: Path, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: KnnConfig, folder: Path
) -> Mixture:
    if is_decoder(memory):
        return Mixture.open(memory, CausalLM(base, tokenizer), lmbda=config.lmbda)
    store = Datastore.open(memory)
    name = language_model(store)  # which need not have as many layers as the model that reads the store
    lm = CausalLM(
        base,
        tokenizer,
        name=name or store.model["name"],
        key_layer=store.model["key_layer"],
        layer=-1 if name else store.model["layer"],
    )
    if config.mixture is None:
        settings: dict[str, Any] = {"k": config.k, "knn_temperature": config.knn_temperature, "lmbda": config.lmbda}
        return Mixture.open(memory, lm, memories="knn", metric=config.metric, **settings)
    try:
        written = SavedMixture(*read_mixture(config.mixture, str(folder)), folder)
    except (KeyError, TypeError) as error:
        raise ModelError(f"{folder} does not say which mixture it is ({error}). Save it again.") from None
    return Mixture.open(memory, lm, written=written)


def _write_mixture(mixture: Mixture, folder: Path, *, copy_memory: bool) -> dict[str, Any]:
    """Write the weights' networks into the folder, and give the rest of what must be known to open the mixture."""
    specs = mixture.specs
    outside = [spec.label for spec in specs if spec.path and spec.kind != "cache" and Path(spec.path).is_absolute()]
    if copy_memory and outside:
        raise ModelError(f"copy_memory copies the memory itself, but {outside[0]} lies elsewhere. Copy that by hand.")
    return write_mixture(folder, specs, *weights_state(mixture.weights))


AutoConfig.register(KnnConfig.model_type, KnnConfig)

AutoModelForCausalLM.register(KnnConfig, KnnForCausalLM)
