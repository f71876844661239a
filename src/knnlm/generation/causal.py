"""A mixture as a transformers model.

`KnnForCausalLM` holds the base model as an ordinary sub-module and does not modify it. Its logits are log-probabilities
of the mixture, so sampling, beam search, streaming and pipelines work as with any other model.
"""

from __future__ import annotations

import copy
import inspect
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
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
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from knnlm.datastore.catalog import Catalog
from knnlm.datastore.compact import compact
from knnlm.datastore.locks import purge, writer_lock
from knnlm.datastore.manifest import is_sharded
from knnlm.datastore.schema import CATALOG_FILE, LOST_FOLDER
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreError, ModelError, ParameterError
from knnlm.generation.cache import (
    ForwardStep,
    MemoryState,
    advance,
    keep_entries,
    keep_pending,
    keep_states,
    memory_state,
    refuse_static,
    spans_of,
    text_cache,
    text_mask,
)
from knnlm.generation.draft import MAX_DRAFT, Drafter
from knnlm.generation.model_graph import ModelPass, replayed, run_model
from knnlm.generation.speculation import (
    Candidates,
    Speculation,
    SpeculationMixin,
    can_draft,
    drafting_student,
    make_drafter,
)
from knnlm.generation.step_graph import step_graphs
from knnlm.generation.student import DraftingStudent
from knnlm.index.gpu.deferred import defer_checks
from knnlm.lm.causal import CausalLM
from knnlm.lm.key_layers import KeyLayer
from knnlm.lm.loading import auto_class, load_feature_extractor, reads_audio
from knnlm.lm.speech import wrap_model
from knnlm.memories.base import LM_LOGITS, Context, Origin, Positions, Source, SourceTokens
from knnlm.mixture.loader import is_decoder, language_model
from knnlm.mixture.mixture import Mixture, Retrieved
from knnlm.mixture.repetition import NO_TOKEN, damp
from knnlm.mixture.saved import read_mixture, weights_state, write_mixture
from knnlm.mixture.spec import DEFAULTS, MixtureOptions, SavedMixture
from knnlm.mixture.weights import MixturePrediction

EVIDENCE_TOKENS = 1024  # of a prompt, its last ones, update the online weights

BASE_FOLDER, _STORE_FOLDER = "base", "store"

_STEP_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
# Arguments of `generate` that it modifies or calls at every token, so that it cannot be run twice with them.
_STATEFUL_ARGUMENTS = (
    "assistant_model",
    "custom_generate",
    "logits_processor",
    "past_key_values",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "streamer",
)


class _EndedTexts(StoppingCriteriaList):
    """The stopping criteria of `generate`, and which texts of the batch have met one."""

    mask: Tensor | None = None  # (B,)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        ended: Tensor = super().__call__(input_ids, scores, **kwargs)
        self.mask = ended if self.mask is None else self.mask | ended
        return ended


@dataclass
class _Prompts:
    """The prompts that `generate` continues."""

    length: int  # of all, padding included
    readable: Tensor | None = None  # (B, length) False where a token is hidden
    criteria: _EndedTexts | None = None  # None: with beams, of which texts end beside those that are continued

    def ended(self, positions: int) -> Tensor | None:
        """Mark the (B,) texts that have ended, if this many positions are one of each text; None: unknown."""
        mask = None if self.criteria is None else self.criteria.mask
        return mask if mask is not None and len(mask) == positions else None

    def origins(self, tokens: Tensor, before: int) -> Tensor:
        """Return the (rows, T) origins of new tokens after `before` others; every prompt may have several rows."""
        origins = torch.full_like(tokens, Origin.GENERATED)
        given = max(0, min(tokens.shape[1], self.length - before))
        origins[:, :given] = Origin.GIVEN
        if self.readable is not None and given:
            hidden = ~self.readable[:, before : before + given].to(tokens.device)
            hidden = hidden.repeat_interleave(len(tokens) // len(hidden), 0)
            origins[:, :given].masked_fill_(hidden, Origin.HIDDEN)
        return origins


_prompts: ContextVar[_Prompts | None] = ContextVar("prompts", default=None)  # None: outside of `generate`


@contextmanager
def prompt_length(length: int) -> Iterator[None]:
    """Generate after so many given tokens, which are evidence, inside the context."""
    token = _prompts.set(_Prompts(length))
    try:
        yield
    finally:
        _prompts.reset(token)


class KnnConfig(PreTrainedConfig):
    """Configuration of the base model, path of the store, and settings of the mixture."""

    model_type = "knnlm"
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012  (transformers reads a plain dict)

    def __init__(
        self,
        text_config: PreTrainedConfig | dict[str, Any] | None = None,
        *,
        store: str | None = None,
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
        self.store = store
        self.k = k
        self.knn_temperature = knn_temperature
        self.lmbda = lmbda
        self.metric = metric
        self.mixture = mixture
        super().__init__(**kwargs)


class KnnForCausalLM(SpeculationMixin, PreTrainedModel, GenerationMixin):
    """A mixture as a transformers model: p = w_0·p_LM + Σ_m w_m·p_m."""

    config: KnnConfig
    config_class = KnnConfig
    base_model_prefix = ""
    # This class adds no attention of its own; the base model checks what it supports.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, mixture: Mixture) -> None:
        self._check_kind(mixture)
        base = mixture.lm.model
        super().__init__(self._make_config(mixture))
        self.base = base
        self.mixture = mixture
        self.generation_config = copy.deepcopy(base.generation_config)
        self._base_arguments = inspect.signature(base.forward).parameters
        # Whether `generate` checks once at the end, not at each token, that every search was exact; None: on a GPU.
        self.deferred_checks: bool | None = None

    @classmethod
    def from_store(cls, path: str | os.PathLike[str], lm: CausalLM | None = None, **settings: Any) -> KnnForCausalLM:
        """Open a store with the model it was built with; settings as for `Mixture.open`."""
        return cls(Mixture.open(Path(path), lm, **settings))

    @staticmethod
    def _check_kind(mixture: Mixture) -> None:
        """Raise an error for a language model of another kind."""
        mixture.lm.require_text("Text generation (generate, chat, KnnForCausalLM)")

    @classmethod
    def _make_config(cls, mixture: Mixture) -> KnnConfig:
        """Return the configuration of a mixture."""
        return _config(mixture, cls.config_class)

    @property
    def _keeps_state(self) -> bool:
        """Whether generation keeps the texts so far beside the cache of the base model."""
        mixture = self.mixture
        if mixture.needs_texts or mixture.reads_other_models:
            return True
        # The cache of a stateful model does not tell how many tokens were read.
        return mixture.needs_positions and bool(getattr(self.base, "_is_stateful", False))

    def _text_length(self, cache: Any) -> int:
        """Return how many tokens of the texts a cache contains; raise an error for a cache of a fixed size."""
        refuse_static(text_cache(cache))
        # A copy: the forward pass may change a length that is a tensor.
        return int(cache.get_seq_length()) if isinstance(cache, Cache) else 0

    def _filled_cache(self, output: Any) -> Any:
        """Return that part of the cache in the base model's output."""
        return text_cache(getattr(output, "past_key_values", None))

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
        """Return the inputs as the base model prepares them."""
        base: Any = self.base
        return cast(dict[str, Any], base.prepare_inputs_for_generation(*args, **kwargs))

    def generate(
        self,
        *args: Any,
        readable_mask: Tensor | None = None,
        draft: bool | Drafter = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as transformers does, without a cache where the base model has none of the usual kind.

        `readable_mask` (B, T) marks the tokens of the prompts that update the online weights and that the cache reads,
        for example those that a user wrote, and not those of a chat template; None: all.

        `draft` copies tokens from the store and from the text, or takes those of a decoder of the mixture, and
        verifies several at once: the same text in less time. With a `seed`, or with drafts, text that is sampled
        without beams depends on the seed and the probabilities alone; its scores are 0 for the sample and -inf for
        other tokens. None: any seed.

        With deferred checks, a generation in which a search turns out inexact is repeated with checks at each token.
        """
        stateful = self.mixture.needs_history and getattr(self.base, "_is_stateful", False)
        if stateful or "past_key_values" not in self._base_arguments:
            kwargs["use_cache"] = False
        if draft is not False or seed is not None:
            return self._speculate(*args, readable_mask=readable_mask, draft=draft, seed=seed, **kwargs)
        run = partial(self._generate_from, *args, readable_mask=readable_mask, **kwargs)
        deferred = self.device.type == "cuda" if self.deferred_checks is None else self.deferred_checks
        if not deferred or len(args) > 1 or any(kwargs.get(name) is not None for name in _STATEFUL_ARGUMENTS):
            return run()
        state = _random_state(self.device)
        with defer_checks() as checks:
            output = run()
        if not checks.any_failed():
            return output
        _restore_random_state(self.device, state)
        return run()

    def _speculate(self, *args: Any, draft: bool | Drafter, seed: int | None, **kwargs: Any) -> Any:
        """Generate with keyed noise and, unless `draft` is False, with drafts."""
        candidates, stops = None, False
        if draft is not False:
            stops = self._check_drafts(*args, **kwargs)
            candidates = Candidates(make_drafter(self.mixture) if draft is True else draft)
            if (config := kwargs.get("generation_config")) is not None:
                kwargs["generation_config"] = config = copy.deepcopy(config)
                config.prompt_lookup_num_tokens = MAX_DRAFT
            else:
                kwargs["prompt_lookup_num_tokens"] = MAX_DRAFT  # with it, transformers requests candidates
            seed = int(torch.randint(2**63 - 1, ())) if seed is None else seed
        with self.speculate(Speculation(candidates, seed)):
            output = self.generate(*args, **kwargs)
        if candidates is None or not stops:
            return output
        prompt = _prompt(args, kwargs)
        return candidates.cut(output, 1 if prompt is None else prompt.shape[1])

    def _student(self, cache: Any, processors: Any) -> DraftingStudent | None:
        """Return the decoder of the mixture that drafts; None: there is none."""
        reading = drafting_student(self.mixture)
        return None if reading is None else DraftingStudent(self.mixture, reading, cache, processors)

    def _check_drafts(self, *args: Any, **kwargs: Any) -> bool:
        """Raise an error for what cannot be generated with drafts; return whether the text has other ends than eos."""
        if len(args) > 1:
            raise ParameterError("With drafts, pass only the prompt without a name, and all other arguments by name.")
        config = kwargs.get("generation_config") or self.generation_config

        def chosen(name: str) -> Any:
            return kwargs.get(name, getattr(config, name, None))

        prompt = _prompt(args, kwargs)
        rows = (1 if prompt is None else len(prompt)) * (chosen("num_return_sequences") or 1)
        if (chosen("num_beams") or 1) > 1 or rows > 1:
            what = f"{rows} texts at once" if rows > 1 else "beams"
            raise ParameterError(f"Drafts cannot be made for {what}: generate one text without beams, or no drafts.")
        stateful = bool(getattr(self.base, "_is_stateful", False))  # its state cannot return to an earlier token
        if chosen("use_cache") is False or chosen("cache_implementation") or stateful or self.mixture.lm.has_encoder:
            raise ParameterError(
                f"{self.mixture.lm.name}: its texts cannot be drafted, which needs a cache that tokens can be removed "
                "from. Generate without drafts."
            )
        if not can_draft(self.mixture):
            raise ParameterError(
                f"{self.mixture.lm.name}: its positions depend on the length of the text, so that rejected tokens "
                "would change what is left. Generate without drafts."
            )
        stops = bool(kwargs.get("stopping_criteria") or chosen("stop_strings"))
        if stops and (kwargs.get("streamer") or chosen("return_dict_in_generate")):
            raise ParameterError(
                "Text with stop strings or other criteria can be drafted, but then neither streamed nor returned with "
                "its scores."
            )
        return stops

    def _generate_from(self, *args: Any, readable_mask: Tensor | None, **kwargs: Any) -> Any:
        """Generate with the online weights of the prompt: tokens that the mixture writes are no evidence."""
        prompt = _prompt(args, kwargs)
        shape = prompt.shape if isinstance(prompt, Tensor) else (1, 1)  # else: the start token
        if readable_mask is not None and readable_mask.shape != shape:
            raise ParameterError(
                f"readable_mask has the shape {tuple(readable_mask.shape)}, but the prompts have {tuple(shape)}."
            )
        readable = None if readable_mask is None else readable_mask.bool()
        token = _prompts.set(_Prompts(shape[1], readable))
        try:
            return GenerationMixin.generate(cast(Any, self), *args, **kwargs)
        finally:
            _prompts.reset(token)

    def _get_stopping_criteria(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        criteria = super()._get_stopping_criteria(generation_config, *args, **kwargs)
        if (prompts := _prompts.get()) is None or (generation_config.num_beams or 1) > 1:
            return criteria
        prompts.criteria = _EndedTexts(criteria)
        return prompts.criteria

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
        """Run the base model once, and return its output with the mixture's log-probabilities as logits."""
        # transformers inspects this signature, so it names all arguments; the base model may accept fewer.
        wide = self._with_evidence(input_ids, past_key_values, logits_to_keep)
        output, context, state, step = self._read(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            logits_to_keep=wide,
            keep_state=self._keeps_state,
            locate=self.mixture.needs_positions and not self.mixture.needs_texts,
            **others,
        )
        prompts = _prompts.get()
        generates = prompts is not None
        if prompts is not None and not self.mixture.layer.stateful and not self.mixture.automata:
            outside = self._outside_domain(output.logits.shape, **others)
            ended = prompts.ended(len(context.states[LM_LOGITS]))
            log_p = step_graphs(self.mixture).predict(context, outside, ended)
        else:
            retrieved = self._retrieve(context, state, step, cache=self._filled_cache(output))
            mixed = self.mixture.predict(context, retrieved, all_components=False)
            if mixed.states is not None:
                assert state is not None
                assert step is not None
                kept = None if wide is logits_to_keep else _places(logits_to_keep)
                mixed = self._remember(mixed, context, state, step, kept, cache=self._filled_cache(output))
                output["logits"] = output.logits if kept is None else output.logits[:, kept]
                if generates:
                    mixed = self._damp(self.mixture.restrict_to_domain(mixed), state)
            # After the logits are narrowed: a row of the mixture for each position that remains.
            if generates:
                log_p = self.mixture.generation_log_probs(mixed, self._outside_domain(output.logits.shape, **others))
            else:
                log_p = mixed.log_probs()
        log_p = log_p.unflatten(0, output.logits.shape[:2])
        # The output object is the base model's own, so its cache is kept, whatever its class.
        output["logits"] = log_p
        if labels is not None:
            # The logits are normalised already, so their cross entropy is -log p of the label.
            output["loss"] = torch.nn.functional.cross_entropy(log_p[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return cast(ModelOutput, output)

    def _encoded(self, rows: int, **inputs: Any) -> dict[int, dict[str, Any]]:  # noqa: ARG002  (for subclasses)
        """Return what other readers with an encoder read of the sources of this many texts; here there are none."""
        return {}

    def _outside_domain(self, shape: torch.Size, **inputs: Any) -> Tensor | None:  # noqa: ARG002  (for subclasses)
        """Mark the positions of (B, T, V) logits whose source is outside the domain; None: there are no sources."""
        return None

    def read(
        self,
        input_ids: Tensor | None,
        *,
        past_key_values: Any = None,
        logits_to_keep: int | Tensor = 0,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        origins: Tensor | None = None,
        **others: Any,
    ) -> tuple[Any, Context]:
        """Run the base model once, and return its output (with the logits to keep) and the memories' context.

        `origins` (B, T) are those of the tokens; None: all are given, or as in `generate`.
        """
        output, context, _, _ = self._read(
            input_ids,
            past_key_values=past_key_values,
            logits_to_keep=logits_to_keep,
            attention_mask=attention_mask,
            position_ids=position_ids,
            keep_state=self.mixture.needs_history,
            locate=False,
            origins=origins,
            **others,
        )
        return output, context

    def _read(
        self,
        input_ids: Tensor | None,
        *,
        past_key_values: Any,
        logits_to_keep: int | Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        keep_state: bool,
        locate: bool,
        origins: Tensor | None = None,
        **others: Any,
    ) -> tuple[Any, Context, MemoryState | None, ForwardStep | None]:
        """Return what `read` returns, the state of the memories, and the step; None without `keep_state`.

        With `locate`, the context has the positions in the texts instead of the texts.
        """
        named = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": others.pop("inputs_embeds", None),
            "use_cache": others.pop("use_cache", None),
            "logits_to_keep": logits_to_keep,
        }
        inputs = {name: value for name, value in named.items() if name in self._base_arguments and value is not None}
        # Before the forward pass, because the base model fills the cache.
        state = memory_state(text_cache(past_key_values)) if keep_state else None
        before = 0
        if locate:
            before = self._text_length(past_key_values) if state is None else state.tokens.get_seq_length()
        if input_ids is None and self.mixture.needs_tokens:
            raise ModelError("The memories of this mixture need the tokens: pass input_ids, not inputs_embeds.")
        output, keys = self._run_base(input_ids=input_ids, **inputs, **others)
        length = (input_ids if input_ids is not None else inputs["inputs_embeds"]).shape[1]
        if output.logits.shape[1] == length and isinstance(logits_to_keep, int):
            output["logits"] = output.logits[:, -logits_to_keep:]  # 0 keeps all of them
        kept = slice(-output.logits.shape[1], None) if isinstance(logits_to_keep, int) else logits_to_keep
        step = None
        if state is None:
            context = Context({source: own[:, kept].flatten(0, 1) for source, own in keys.items()})
        else:
            assert input_ids is not None
            if origins is None and (prompts := _prompts.get()) is not None:
                origins = prompts.origins(input_ids, state.tokens.get_seq_length())
            mask = text_mask(attention_mask, len(input_ids))
            step = ForwardStep(input_ids, mask, position_ids, kept, origins, self._encoded(len(input_ids), **others))
            cache, with_spans = self._filled_cache(output), self.mixture.needs_tokens and not locate
            context = advance(self.mixture, step, keys, state=state, cache=cache, with_spans=with_spans)
        where = None
        if locate and input_ids is not None:
            where = _positions(input_ids, text_mask(attention_mask, len(input_ids)), before, kept)
        states = {**context.states, LM_LOGITS: output.logits.flatten(0, 1)}
        return output, replace(context, states=states, where=where), state, step

    def _with_evidence(self, input_ids: Tensor | None, cache: Any, logits_to_keep: int | Tensor) -> int | Tensor:
        """Return how many logits to keep so that the new tokens of a prompt update the online weights."""
        if not self.mixture.layer.stateful or input_ids is None:
            return logits_to_keep
        if not isinstance(logits_to_keep, int):
            return 0
        new = input_ids.shape[1]
        before = memory_state(text_cache(cache)).tokens.get_seq_length()
        prompts = _prompts.get()
        if not logits_to_keep or new == 1 or (prompts is not None and before >= prompts.length):
            return logits_to_keep
        generated = 0 if prompts is None else max(0, before + new - prompts.length)
        wide = max(logits_to_keep, min(new, EVIDENCE_TOKENS + generated))
        return logits_to_keep if wide == logits_to_keep else wide

    def _retrieve(
        self, context: Context, state: MemoryState | None, step: ForwardStep | None, *, cache: Any
    ) -> Retrieved | None:
        """Search with automata, and keep what they reach at each position in the state; None: there are none."""
        if not self.mixture.automata or state is None or step is None:
            return None
        retrieved = self.mixture.retrieve(context)
        keep_entries(self.mixture, state, step, retrieved, cache)
        return retrieved

    def _remember(
        self,
        mixed: MixturePrediction,
        context: Context,
        state: MemoryState,
        step: ForwardStep,
        kept: slice | Tensor | None,
        *,
        cache: Any,
    ) -> MixturePrediction:
        """Keep the online weights of every position in the state, and return the prediction of the kept positions."""
        assert mixed.states is not None
        keep_states(state, step, mixed.states.unflatten(0, (len(step.tokens), -1)))
        if kept is not None:
            mixed = self._predict_again(context, state, step, kept)
        if isinstance(cache, Cache):
            prompts = _prompts.get()
            if prompts is None or state.tokens.get_seq_length() < prompts.length:  # the next token may be evidence
                keep_pending(state, step, self._predict_again(context, state, step, slice(-1, None)))
            else:
                state.pending.reset()
            state.attach(cache)
        return mixed

    def _damp(self, mixed: MixturePrediction, state: MemoryState) -> MixturePrediction:
        """Damp memories that repeat what was generated; the prediction is that of the last positions of each text."""
        prompts = _prompts.get()
        if prompts is None or not self.mixture.damps or state.tokens.values is None:
            return mixed
        generated = state.tokens.values[:, 0, prompts.length :, 0]  # (B, G)
        count, length = len(mixed.weights) // len(generated), generated.shape[1]
        before = [  # of each of the last `count` positions
            torch.nn.functional.pad(generated[:, : max(0, length - later)], (min(later, length), 0), value=NO_TOKEN)
            for later in reversed(range(count))
        ]
        return damp(mixed, torch.stack(before, 1).flatten(0, 1))

    def _predict_again(
        self, context: Context, state: MemoryState, step: ForwardStep, kept: slice | Tensor
    ) -> MixturePrediction:
        """Predict only some positions of each text again, with the online weights in the state."""
        batch = len(step.tokens)
        states = {
            source: own.unflatten(0, (batch, -1))[:, kept].flatten(0, 1) for source, own in context.states.items()
        }
        spans = spans_of(state, replace(step, kept=kept), self.mixture.layer)
        again = Context(states, spans, source_tokens=_sources_again(context, states))
        return self.mixture.predict(again, all_components=False)

    def _run_base(self, **inputs: Any) -> tuple[Any, dict[Source, Tensor]]:
        """Run the base model, and return its output and the (B, T, D) keys of each source."""
        readers = self.mixture.readers
        sources, trunks = self.mixture.lm_sources, readers.trunks(self.mixture.history_lengths)
        layers = [readers.layer(source) for source in (*sources, *trunks)]
        given = self._step(layers, inputs)
        written = None if given is None else replayed(given)
        if written is not None:
            *states, logits = written
            fields: dict[str, Any] = {"logits": logits, "past_key_values": inputs["past_key_values"]}
            output: Any = CausalLMOutputWithPast(**fields)
        else:
            output, states = run_model(self.base, layers, inputs)
        keys = {source: own.float() for source, own in zip(sources, states[: len(sources)], strict=True)}
        return output, keys | dict(zip(trunks, states[len(sources) :], strict=True))

    def _step(self, layers: Sequence[KeyLayer], inputs: Mapping[str, Any]) -> ModelPass | None:
        """Return the pass of the base model over new tokens of each text; None: its inputs are others."""
        cache, count = inputs.get("past_key_values"), int(self.base.config.get_text_config().num_hidden_layers)
        others = [name for name, value in inputs.items() if name not in _STEP_ARGUMENTS and value is not None]
        if others or not isinstance(cache, Cache) or len(cache.layers) < count or inputs.get("use_cache") is False:
            return None
        given = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}
        # Without the layers that carry the state of the memories.
        given |= {"past_key_values": Cache(layers=cache.layers[:count]), "use_cache": True}
        return ModelPass(self.mixture.lm, layers, True, given)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], *, copy_store: bool = False, **kwargs: Any
    ) -> None:
        """Write the base model into a sub-folder, and the path of the store or, with `copy_store`, a copy of it."""
        folder = Path(save_directory)
        self.base.save_pretrained(folder / BASE_FOLDER, **kwargs)
        self.tokenizer.save_pretrained(folder / BASE_FOLDER)
        self.tokenizer.save_pretrained(folder)
        config = self._make_config(self.mixture)  # the mixture may have changed since this object was made
        config.mixture = _write_mixture(self.mixture, folder, copy_store=copy_store)
        config.architectures = [type(self).__name__]
        source, copied = _folder(self.mixture).resolve(), (folder / _STORE_FOLDER).resolve()
        if copy_store and source != copied:
            shutil.rmtree(copied, ignore_errors=True)
            shutil.copytree(source, copied, ignore=shutil.ignore_patterns("*.lock", "*-shm", ".trace-*", LOST_FOLDER))
            _purge(copied)
        if copy_store or source == copied:
            config.store = _STORE_FOLDER
        config.save_pretrained(folder)
        self.generation_config.save_pretrained(folder)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *model_args: Any, **kwargs: Any
    ) -> KnnForCausalLM:
        """Open a folder of `save_pretrained`; other arguments (dtype, device_map, …) go to the base model."""
        folder = Path(pretrained_model_name_or_path)
        config = kwargs.pop("config", None) or cls.config_class.from_pretrained(folder)
        if not isinstance(config, KnnConfig) or config.store is None:
            raise ModelError(f"{folder}: names no store. Write it with {cls.__name__}.save_pretrained.")
        store = folder / config.store  # an absolute path stays as it is
        if not store.exists():
            raise DatastoreError(
                f"{folder}: its store {store} does not exist. Restore it, or save the model with copy_store=True."
            )
        kwargs.setdefault("dtype", "auto")
        base = auto_class(config.text_config).from_pretrained(folder / BASE_FOLDER, *model_args, **_for_base(kwargs))
        tokenizer = AutoTokenizer.from_pretrained(folder / BASE_FOLDER)
        return cls(_open_mixture(store, base, tokenizer, config=config, folder=folder))


def generate_text(
    mixture: Mixture, prompt: str, *, max_new_tokens: int = 60, seed: int | None = None, **settings: Any
) -> str:
    """Return the continuation of a prompt; settings are those of transformers' `generate`."""
    tokens = generate_tokens(mixture, prompt, max_new_tokens=max_new_tokens, seed=seed, **settings)
    return str(mixture.lm.tokenizer.decode(tokens, skip_special_tokens=True))


def generate_tokens(
    mixture: Mixture,
    prompt: str,
    *,
    max_new_tokens: int = 60,
    seed: int | None = None,
    use_memory: bool = True,
    draft: bool | Drafter = False,
    **settings: Any,
) -> list[int]:
    """Return the tokens that continue a prompt, by the mixture or, without `use_memory`, by the model alone.

    `draft` and `seed` as in `KnnForCausalLM.generate`: the tokens are the same with drafts and without.
    """
    if draft is not False and not use_memory:
        raise ParameterError("Drafts are verified by the mixture: the model alone generates without them.")
    lm = mixture.lm
    max_length = mixture.max_length if use_memory else lm.max_length
    ids = torch.tensor([lm.prompt(prompt, room=max_new_tokens, max_length=max_length)], device=lm.device)
    if seed is not None:
        torch.manual_seed(seed)
    model: Any = lm.model
    if use_memory:
        model, settings = KnnForCausalLM(mixture), {**settings, "draft": draft, "seed": seed}
    # One prompt needs no padding, but transformers warns about a model without a padding token.
    settings.setdefault("pad_token_id", lm.model.config.pad_token_id or lm.start_token)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **settings)
    return list(output[0, ids.shape[1] :].tolist())


def _sources_again(context: Context, states: Mapping[Source, Tensor]) -> list[SourceTokens] | None:
    """Return the sources of some positions of each text: those of all its positions."""
    if context.source_tokens is None:
        return None
    before, count = (len(next(iter(each.values()))) for each in (context.states, states))
    return [context.source_tokens[row * before // count] for row in range(count)]


def _prompt(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the prompts among the arguments of `generate`; None: the start token."""
    given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs"))
    return next((value for value in given if value is not None), None)


def _positions(tokens: Tensor, mask: Tensor | None, before: int, kept: slice | Tensor) -> Positions:
    """Return where the kept ones of (B, T) tokens stand in their texts, after `before` tokens, padding counted."""
    count = tokens.shape[1]
    places = torch.arange(before, before + count, device=tokens.device).expand(tokens.shape)
    if mask is not None and mask.dim() == 2 and mask.shape[1] == before + count:
        places = (places - mask.bool().int().argmax(1, keepdim=True)).clamp(min=0)  # after the padding on the left
    return Positions(places[:, kept].flatten(), tokens[:, kept].flatten())


def _places(logits_to_keep: int | Tensor) -> slice | Tensor:
    """Return which of the last positions the logits are kept of."""
    return slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the states of the random number generators that sampling uses."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _restore_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def _purge(path: Path) -> None:
    """Erase the bytes of removed documents from a copied store, which may be published."""
    if is_decoder(path):
        return
    with closing(Datastore.open(path)) as store:
        whole = store.entry_numbers.whole
    if not whole:
        compact(path)
    else:
        # Files that a compaction has replaced may remain, because a process was reading them.
        with writer_lock(path), closing(Catalog.open(path / CATALOG_FILE, write=True)) as catalog:
            purge(path, catalog, keep_pending=False)


def _config(mixture: Mixture, kind: type[KnnConfig]) -> KnnConfig:
    """Return the configuration of a mixture; the base model's is copied, because transformers modifies it."""
    base = mixture.lm.model.config
    knn = mixture.knn
    return kind(
        copy.deepcopy(base),
        store=str(_folder(mixture).resolve()),
        k=knn.k if knn else DEFAULTS["k"],
        knn_temperature=knn.knn_temperature if knn else DEFAULTS["knn_temperature"],
        lmbda=mixture.lmbda,
        metric=knn.metric if knn else "l2",
        **{name: getattr(base, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def _folder(mixture: Mixture) -> Path:
    if mixture.path is None:
        raise ModelError("The mixture has no folder that could be saved. Open it with Mixture.open.")
    return mixture.path


def _for_base(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop the arguments that transformers' Auto classes add for this class."""
    added = ("_from_auto", "adapter_kwargs", "_commit_hash")
    return {name: value for name, value in kwargs.items() if name not in added}


def _open_mixture(
    path: Path, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, config: KnnConfig, folder: Path
) -> Mixture:
    if is_decoder(path):
        return Mixture.open(path, wrap_model(base, tokenizer), lmbda=config.lmbda)
    store = Datastore.open(path)
    name = language_model(store)  # which need not have as many layers as the model that reads the store
    lm = wrap_model(
        base,
        tokenizer,
        name=name or store.model["name"],
        key_layer=store.model["key_layer"],
        layer=-1 if name else store.model["layer"],
        extractor=load_feature_extractor(str(folder / BASE_FOLDER)) if reads_audio(base.config) else None,
        src_lang=store.model.get("src_lang"),
        tgt_lang=store.model.get("tgt_lang"),
    )
    if config.mixture is None:
        settings: dict[str, Any] = {"k": config.k, "knn_temperature": config.knn_temperature, "lmbda": config.lmbda}
        return Mixture.open(path, lm, memories="knn", options=MixtureOptions(metric=config.metric), **settings)
    try:
        saved = SavedMixture(
            *read_mixture(config.mixture, str(folder)),
            folder,
            MixtureOptions.from_dict(config.mixture.get("options", {})),
        )
    except (KeyError, TypeError) as error:
        raise ModelError(f"{folder}: its mixture cannot be read ({error}). Save the model again.") from None
    return Mixture.open_saved(path, lm, saved)


def _write_mixture(mixture: Mixture, folder: Path, *, copy_store: bool) -> dict[str, Any]:
    """Write the networks of the weights into the folder, and return the rest of the mixture as JSON."""
    if mixture.router is not None:
        raise ModelError("A model that chooses among several stores cannot be saved. Save one for each store.")
    specs = mixture.specs
    outside = [spec.label for spec in specs if spec.path and spec.kind != "cache" and Path(spec.path).is_absolute()]
    if copy_store and mixture.path is not None and is_sharded(mixture.path):
        raise ModelError(
            f"{mixture.path} is a sharded store, which copy_store does not copy. Make one store of it: knnlm merge "
            f"{mixture.path} --out STORE"
        )
    if copy_store and outside:
        raise ModelError(
            f"{outside[0]}: lies outside the store, and copy_store copies the store only. Copy it by hand."
        )
    state = weights_state(
        mixture.weights,
        mixture.online,
        support=mixture.support,
        source_domain=mixture.source_domain,
        end_odds=mixture.end_odds,
    )
    written = write_mixture(folder, specs, *state)
    return {**written, "options": mixture.options.as_dict()}


AutoConfig.register(KnnConfig.model_type, KnnConfig)
AutoModelForCausalLM.register(KnnConfig, KnnForCausalLM)
