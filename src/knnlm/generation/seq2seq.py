"""A mixture of an encoder-decoder model and its memories as a transformers model: kNN-MT.

The text of the mixture is what the decoder writes after its start tokens. The encoder reads the source once; from then
on, a step is one of `KnnForCausalLM`: keys and logits of the decoder's new positions, one search for all sentences and
beams, and the mixture's log-probabilities as logits. Tokens before the start token, such as the one that NLLB's decoder
reads before the language, are read by the decoder and not by the memories.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationMixin, PreTrainedConfig
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import ModelOutput

from knnlm.datastore.store import Datastore
from knnlm.errors import ModelError, ParameterError
from knnlm.generation.cache import memory_state, text_cache
from knnlm.generation.causal import BASE_FOLDER, KnnConfig, KnnForCausalLM, prompt_length
from knnlm.lm.causal import eval_mode
from knnlm.lm.seq2seq import Seq2SeqLM, mean_states
from knnlm.lm.speech import SpeechLM
from knnlm.memories.base import Context, Origin, Source, SourceTokens
from knnlm.mixture.mixture import Mixture, group_rows
from knnlm.mixture.readers import Reading
from knnlm.progress import Progress, silent

# The sources that `generate` translates, because it gives only the encoder's output to each step.
_sources: ContextVar[_Sources | None] = ContextVar("sources", default=None)

_BATCH_SIZE = 32  # sources that are translated together
_IGNORED_LABEL = -100  # of transformers
# Arguments of `generate`: those with a row for each source, and those that belong to the whole batch.
_BY_ROW = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
_OF_WHOLE_BATCH = (
    "streamer",
    "return_dict_in_generate",
    "prefix_allowed_tokens_fn",
    "logits_processor",
    "stopping_criteria",
    "encoder_outputs",
)


class KnnSeq2SeqConfig(KnnConfig):
    """Configuration of an encoder-decoder model, path of the store, and settings of the mixture."""

    model_type = "knnlm_seq2seq"

    def __init__(self, *args: Any, is_encoder_decoder: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, is_encoder_decoder=is_encoder_decoder, **kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Return the base model's configuration, of its decoder or encoder."""
        if self.text_config is None:
            return self
        return self.text_config.get_text_config(decoder=decoder, encoder=encoder)


@dataclass
class _Sources:
    """The sources of a batch, and what is known of them as long as they are translated."""

    mixture: Mixture  # that translates them
    inputs: dict[str, Tensor]  # (B, …) tokens of an encoder with their mask, or features of sounds
    outside: Tensor | None = None  # (B or B·beams,) those outside the domain of the store; None: not checked yet
    encoded: dict[int, dict[str, Any]] = field(default_factory=dict)  # by the number of the reader

    @property
    def count(self) -> int:
        """How many there are."""
        return len(next(iter(self.inputs.values())))

    @cached_property
    def tokens(self) -> list[SourceTokens] | None:
        """Their tokens without padding; sounds have none."""
        given = self.inputs.get("input_ids")
        return None if given is None else _unpadded(given, self.inputs.get("attention_mask"))

    def of_rows(self, rows: int) -> list[SourceTokens] | None:
        """Return the source of each of some rows; beams and positions of one source are consecutive."""
        return None if self.tokens is None else [self.tokens[row * self.count // rows] for row in range(rows)]

    def outside_rows(self) -> list[bool] | None:
        """Return for each source whether it is outside the domain of the store; None: that was not checked."""
        if self.outside is None:
            return None
        return self.outside[:: len(self.outside) // self.count].tolist()

    def encode(self, reader: Reading, rows: int) -> dict[str, Any]:
        """Return the output of a reader's encoder and its mask for each of some rows; it runs once."""
        known = self.encoded.get(reader.number)
        if known is None or len(known["encoder_outputs"][0]) != rows:
            model: Any = reader.model.model
            inputs = {
                name: own.to(model.dtype) if own.is_floating_point() else own for name, own in self.inputs.items()
            }
            with eval_mode(model):
                states = model.get_encoder()(**inputs).last_hidden_state
            copies, mask = rows // len(states), self.inputs.get("attention_mask")
            known = {"encoder_outputs": BaseModelOutput(last_hidden_state=states.repeat_interleave(copies, 0))}
            if mask is not None:
                known["attention_mask"] = mask.repeat_interleave(copies, 0)
            self.encoded[reader.number] = known
        return known


@dataclass
class _PairInputs:
    """The inputs of one pass of the base model that are no part of the text."""

    decoder_input_ids: Tensor  # (B, T) with the tokens before the text
    before: int  # how many of the T are before the text
    source: dict[str, Any]  # of the encoder
    sources: _Sources | None = None  # None: unknown or not needed
    logits: Tensor | None = field(default=None)  # (B, before, V) of the positions before the text


class KnnForSeq2SeqLM(KnnForCausalLM):
    """A mixture of an encoder-decoder model as a transformers model: p = w_0·p_NMT + Σ_m w_m·p_m."""

    config: KnnSeq2SeqConfig
    config_class = KnnSeq2SeqConfig

    def __init__(self, mixture: Mixture) -> None:
        super().__init__(mixture)
        assert self.generation_config is not None
        self.generation_config.decoder_start_token_id = self._lm.start_tokens[0]
        self.main_input_name = self.base.main_input_name  # tokens, or the features of sounds
        self.outside: list[bool] | None = None  # the sources of the last `generate` that the model alone translated

    @staticmethod
    def _check_kind(mixture: Mixture) -> None:
        if not mixture.lm.has_encoder:
            raise ModelError(f"KnnForSeq2SeqLM needs an encoder-decoder model, but {mixture.lm.name} has no encoder.")

    def _text_length(self, cache: Any) -> int:
        """Return how many tokens of the targets a cache contains, without those before the text."""
        return max(0, super()._text_length(cache) - len(self._lm.prefix_tokens))

    @property
    def _lm(self) -> Seq2SeqLM:
        return cast(Seq2SeqLM, self.mixture.lm)

    def get_encoder(self, modality: str | None = None) -> torch.nn.Module:  # noqa: ARG002  (transformers passes it)
        """The base model's encoder."""
        return cast(torch.nn.Module, self.base.get_encoder())

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return labels (B, T) shifted by one, with the decoder's first token before them."""
        first = labels.new_full((len(labels), 1), self._lm.start_tokens[0])
        pad = self.tokenizer.pad_token_id
        shifted = torch.cat([first, labels[:, :-1]], 1)
        return shifted.masked_fill(shifted == _IGNORED_LABEL, pad if isinstance(pad, int) else self._lm.start_token)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:  # type: ignore[override]
        """Write the base model into a sub-folder, and the path of the store or, with `copy_store`, a copy of it."""
        super().save_pretrained(save_directory, **kwargs)
        if isinstance(self._lm, SpeechLM):
            self._lm.extractor.save_pretrained(Path(save_directory) / BASE_FOLDER)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does; every target begins with the start tokens of the model's languages."""
        self._check_language(kwargs.pop("forced_bos_token_id", None))
        if (config := kwargs.get("generation_config")) is not None:
            self._check_language(config.forced_bos_token_id)
            if config.forced_bos_token_id == self._lm.start_token:  # which the decoder reads already
                kwargs["generation_config"] = copy.deepcopy(config)
                kwargs["generation_config"].forced_bos_token_id = None
        if kwargs.get("decoder_input_ids") is None:
            names = ("inputs", "input_ids", "input_features", "encoder_outputs")
            given = [*args[:1], *(kwargs.get(name) for name in names)]
            source = next((value for value in given if value is not None), None)
            if source is None:
                raise ParameterError(f"generate needs {self.main_input_name}: the source to translate.")
            rows = len(source if isinstance(source, Tensor) else source[0])
            start = torch.tensor([self._lm.start_tokens], device=self.device)
            kwargs["decoder_input_ids"] = start.expand(rows, -1).contiguous()
        if self.mixture.router is None:
            return super().generate(*args, **kwargs)
        named = dict(zip(inspect.signature(GenerationMixin.generate).parameters, [self, *args], strict=False))
        del named["self"]
        return self._generate_by_store({**kwargs, **named})

    def with_mixture(self, mixture: Mixture) -> KnnForSeq2SeqLM:
        """Return a model with the same base model and another mixture of it."""
        model = copy.copy(self)
        model.mixture = mixture
        return model

    def _generate_by_store(self, inputs: dict[str, Any]) -> Any:
        """Generate the rows of each store together, and return all in the order of the batch."""
        tokens = _source_inputs((inputs.pop("inputs", None),), inputs, "input_ids")
        if tokens is None:
            raise ParameterError("The tokens of the sources choose the store: pass input_ids.")
        inputs["input_ids"] = tokens
        if inputs.get("attention_mask") is None and self.tokenizer.pad_token_id is not None:
            inputs["attention_mask"] = (tokens != self.tokenizer.pad_token_id).long()
        groups = group_rows(self.mixture.route_sources(_unpadded(tokens, inputs.get("attention_mask"))))
        if len(groups) == 1:
            return self.with_mixture(groups[0][0]).generate(**inputs)
        config = inputs.get("generation_config") or self.generation_config
        inputs["return_dict_in_generate"] = inputs.get("return_dict_in_generate", config.return_dict_in_generate)
        if refused := [name for name in _OF_WHOLE_BATCH if inputs.get(name)]:
            raise ParameterError(
                f"Different stores translate these sources, each in batches of its own, so that {refused[0]} cannot be "
                "used. Translate the sources of each store alone."
            )
        written = [
            self.with_mixture(mixture).generate(**{name: _select(name, value, rows) for name, value in inputs.items()})
            for mixture, rows in groups
        ]
        return self._joined([rows for _, rows in groups], written)

    def _joined(self, rows: Sequence[Sequence[int]], written: Sequence[Tensor]) -> Tensor:
        """Return the texts of some rows, in the order of the rows; shorter ones are padded."""
        pad, longest = self.tokenizer.pad_token_id, max(texts.shape[1] for texts in written)
        first, copies = written[0], len(written[0]) // len(rows[0])
        output = first.new_full((copies * sum(map(len, rows)), longest), pad if isinstance(pad, int) else 0)
        for own, texts in zip(rows, written, strict=True):
            places = [copies * row + number for row in own for number in range(copies)]
            output[places, : texts.shape[1]] = texts
        return output

    def _check_language(self, forced: int | None) -> None:
        """Raise ParameterError for a first token that is neither the store's target language nor the model's own."""
        own: Any = self.base.generation_config
        if forced not in (None, self._lm.start_token, own.forced_bos_token_id):
            raise ParameterError(
                f"forced_bos_token_id {forced} is another target language than that of the store, "
                f"{self._lm.tgt_lang or self._lm.start_token}."
            )

    def _generate_from(self, *args: Any, readable_mask: Tensor | None, **kwargs: Any) -> Any:
        """Generate; only the tokens that are given to the decoder are evidence."""
        if readable_mask is not None:
            raise ParameterError("readable_mask is for the prompts of a decoder-only model.")
        name = self.main_input_name
        sources = self._find_sources({**kwargs, name: _source_inputs(args, kwargs, name)})
        token = _sources.set(sources)
        try:
            with prompt_length(kwargs["decoder_input_ids"].shape[1] - len(self._lm.prefix_tokens)):
                return GenerationMixin.generate(cast(Any, self), *args, **kwargs)
        finally:
            _sources.reset(token)
            self.outside = None if sources is None else sources.outside_rows()

    def _find_sources(self, inputs: Mapping[str, Any]) -> _Sources | None:
        """Return the sources among inputs of the model, if something depends on them; None: unknown or not needed."""
        given, mask = inputs.get(self.main_input_name), inputs.get("attention_mask")
        if given is None:  # first, because it is so at every step of a generation
            return None
        if not (self.mixture.needs_sources or self.mixture.checks_sources or self._encoding_readers):
            return None
        named = {self.main_input_name: given, "attention_mask": mask}
        return _Sources(self.mixture, {name: value for name, value in named.items() if value is not None})

    @property
    def _encoding_readers(self) -> list[Reading]:
        """The readers besides the model that have an encoder."""
        readers = self.mixture.readers.wanted(self.mixture.history_lengths)[1:]
        return [reader for reader in readers if reader.model.has_encoder]

    def _encoded(self, rows: int, **inputs: Any) -> dict[int, dict[str, Any]]:
        """Return what each reader with an encoder reads of the sources of this many texts."""
        readers, sources = self._encoding_readers, inputs["pair"].sources
        if readers and sources is None:
            raise ModelError(
                f"{readers[0].model.name} reads the sources with an encoder of its own: pass {self.main_input_name}."
            )
        return {reader.number: sources.encode(reader, rows) for reader in readers}

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        input_features: Tensor | None = None,
        return_dict: bool | None = None,  # noqa: ARG002  (the output is always a dictionary)
        **others: Any,
    ) -> ModelOutput:
        """Run the base model once, and return its output with the mixture's log-probabilities as logits."""
        if decoder_attention_mask is not None and not bool(decoder_attention_mask[:, 0].all()):
            raise ModelError("Targets are padded on the left. Give decoder_input_ids that are padded on the right.")
        if decoder_input_ids is None:
            if labels is None:
                raise ModelError("Give decoder_input_ids or labels: the target, which the memories predict.")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if self.mixture.router is not None:
            raise ModelError("With several stores, each source has its own: use generate, or a model of one store.")
        encoder = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        source = {**encoder, "input_features": input_features, "encoder_outputs": encoder_outputs, **others}
        source = {name: value for name, value in source.items() if value is not None}
        done = past_key_values.get_seq_length() if isinstance(past_key_values, Cache) else 0
        before = min(decoder_input_ids.shape[1], max(0, len(self._lm.prefix_tokens) - done))
        sources = self._find_sources(source)
        if sources is None and (running := _sources.get()) is not None and running.mixture is self.mixture:
            sources = running
        pair = _PairInputs(decoder_input_ids, before, source, sources)
        output: Any
        reading = {"past_key_values": past_key_values, "use_cache": use_cache}
        if before == decoder_input_ids.shape[1]:
            output = self._read_prefix(pair, reading)
        else:
            text = decoder_input_ids[:, before:]
            output = super().forward(text, **reading, logits_to_keep=logits_to_keep, pair=pair)
            if pair.logits is not None:
                output["logits"] = torch.cat([pair.logits.float().log_softmax(-1), output.logits], 1)
        if labels is not None:
            # The logits are normalised already, so their cross entropy is -log p of the label.
            output["loss"] = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        return cast(ModelOutput, output)

    def read_target(self, source: Mapping[str, Tensor], target: Sequence[int]) -> tuple[Tensor, Context]:
        """Read one source and a generated target, and return (T, V) logits and the memories' context of its tokens."""
        ids = torch.tensor([[*self._lm.start_tokens, *target[:-1]]], device=self.device)
        before = len(self._lm.prefix_tokens)
        text = ids[:, before:]
        origins = torch.full_like(text, Origin.GENERATED)
        origins[:, 0] = Origin.GIVEN
        pair = _PairInputs(ids, before, dict(source), self._find_sources(source))
        output, context = self.read(text, origins=origins, use_cache=False, pair=pair)
        return output.logits[0], context

    def _read_prefix(self, pair: _PairInputs, reading: dict[str, Any]) -> ModelOutput:
        """Read only tokens before the text, which the model alone predicts."""
        state = memory_state(text_cache(reading["past_key_values"])) if self._keeps_state else None
        given = {name: value for name, value in reading.items() if value is not None}
        output: Any = self.base(**pair.source, decoder_input_ids=pair.decoder_input_ids, return_dict=True, **given)
        output["logits"] = output.logits.float().log_softmax(-1)
        if state is not None and isinstance(cache := self._filled_cache(output), Cache):
            state.attach(cache)
        return cast(ModelOutput, output)

    def _read(self, input_ids: Tensor | None, **inputs: Any) -> tuple[Any, Context, Any, Any]:
        """Read a step, with the source of each position in the context; beams have the source of their text."""
        output, context, state, step = super()._read(input_ids, **inputs)
        cache = getattr(output, "past_key_values", None)
        if state is not None and isinstance(cache, EncoderDecoderCache):
            state.attach_sources(cache.cross_attention_cache)
        sources: _Sources | None = inputs["pair"].sources
        if sources is not None and self.mixture.needs_sources:
            positions = output.logits.shape[0] * output.logits.shape[1]
            context = replace(context, source_tokens=sources.of_rows(positions))
        return output, context, state, step

    def _outside_domain(self, shape: torch.Size, **inputs: Any) -> Tensor | None:
        """Mark the (B·T,) positions of sources outside the domain of the store; None: there is no such check."""
        pair: _PairInputs = inputs["pair"]
        if not self.mixture.checks_sources or pair.source.get("encoder_outputs") is None:
            return None
        sources = pair.sources
        if sources is None or sources.outside is None or len(sources.outside) != shape[0]:
            states = mean_states(pair.source["encoder_outputs"][0], pair.source.get("attention_mask"))
            outside = self.mixture.outside_domain(states, None if sources is None else sources.of_rows(shape[0]))
            if sources is not None:
                sources.outside = outside
        else:
            outside = sources.outside
        return outside if shape[1] == 1 else outside.repeat_interleave(shape[1])

    def _run_base(self, **inputs: Any) -> tuple[Any, dict[Source, Tensor]]:
        """Run the base model on source and target, and return its output and keys at the positions of the text."""
        pair: _PairInputs = inputs.pop("pair")
        length = inputs.pop("input_ids").shape[1]
        output, keys = super()._run_base(decoder_input_ids=pair.decoder_input_ids, **pair.source, **inputs)
        if pair.before and output.logits.shape[1] > length:
            pair.logits, output["logits"] = output.logits[:, : pair.before], output.logits[:, pair.before :]
        return output, {source: own[:, pair.before :] for source, own in keys.items()}


def _source_inputs(args: Sequence[Any], inputs: Mapping[str, Any], name: str) -> Tensor | None:
    """Return what the encoder reads, (B, …), among the arguments of `generate`; None: it is not there."""
    given = [*args[:1], inputs.get("inputs"), inputs.get(name)]
    return next((value for value in given if isinstance(value, Tensor)), None)


def _unpadded(tokens: Tensor, mask: Tensor | None) -> list[SourceTokens]:
    """Return the tokens (B, S) of sources without padding."""
    masks = [None] * len(tokens) if mask is None else mask.tolist()
    rows = zip(tokens.tolist(), masks, strict=True)
    return [tuple(row if own is None else compress(row, own)) for row, own in rows]


def _select(name: str, value: Any, rows: Sequence[int]) -> Any:
    """Return some rows of an argument of `generate`; an argument that has no rows as it is."""
    return value[list(rows)] if name in _BY_ROW and isinstance(value, Tensor) else value


@dataclass(frozen=True)
class TranslatedText:
    """A text in the target language, and the stores that it was translated with."""

    text: str
    stores: tuple[Datastore, ...]
    memory: bool = True  # whether the memories took part; False: the model alone, where the domain check said so


def translate(mixture: Mixture, sources: Sequence[str], **settings: Any) -> list[str]:
    """Return the translation of each source; settings are those of `translate_each`."""
    return [each.text for each in translate_each(mixture, sources, **settings)]


def translate_each(
    mixture: Mixture,
    sources: Sequence[str],
    *,
    max_new_tokens: int = 256,
    batch_size: int = _BATCH_SIZE,
    seed: int | None = None,
    use_memory: bool = True,
    progress: Progress = silent,
    **settings: Any,
) -> list[TranslatedText]:
    """Return the translation of each source, by the mixture or, without `use_memory`, by the model alone.

    Sources of one store and of similar length are translated together. Other settings are those of transformers'
    `generate`.
    """
    if not isinstance(mixture.lm, Seq2SeqLM):
        raise ModelError(f"Only an encoder-decoder model translates, and {mixture.lm.name} has no encoder.")
    if batch_size < 1 or max_new_tokens < 1:
        raise ParameterError("The batch size and the number of new tokens must be at least 1.")
    if isinstance(sources, str):
        raise ParameterError("translate takes a list of texts. Put the text in brackets.")
    if empty := next((number for number, text in enumerate(sources, 1) if not text.strip()), None):
        raise ParameterError(f"Text {empty} is empty: there is nothing to translate.")
    lm = mixture.lm
    if mixture.max_length is not None:
        max_new_tokens = min(max_new_tokens, mixture.max_length - 1)
    if seed is not None:
        torch.manual_seed(seed)
    tokens = lm.encode_sources(sources)
    found: dict[int, TranslatedText] = {}
    settings |= {"max_new_tokens": max_new_tokens, "use_memory": use_memory}
    routed = use_memory and mixture.router is not None
    routes = mixture.route_sources([tuple(row) for row in tokens]) if routed else [mixture] * len(tokens)
    with progress("translating", total=len(tokens), unit="texts") as advance:
        for own, rows in group_rows(routes):
            model, stores = KnnForSeq2SeqLM(own), tuple(own.stores) if use_memory else ()
            order = sorted(rows, key=lambda number: len(tokens[number]), reverse=True)
            for begin in range(0, len(order), batch_size):
                batch = order[begin : begin + batch_size]
                output = generate_targets(model, [tokens[number] for number in batch], **settings)
                outside = model.outside if use_memory and model.outside is not None else [False] * len(batch)
                for number, text, alone in zip(batch, target_texts(lm, output), outside, strict=True):
                    found[number] = TranslatedText(text, () if alone else stores, use_memory and not alone)
                advance(len(batch))
    return [found[number] for number in range(len(tokens))]


def generate_targets(
    model: KnnForSeq2SeqLM, sources: Sequence[Any], *, max_new_tokens: int, use_memory: bool = True, **settings: Any
) -> list[list[int]]:
    """Return the target tokens of one batch of tokenised sources, with the end token and padding."""
    lm = cast(Seq2SeqLM, model.mixture.lm)
    start = torch.tensor([lm.start_tokens], device=lm.device)
    inputs: dict[str, Any] = {**lm.pad_sources(sources), **settings}
    inputs |= {"decoder_input_ids": start.expand(len(sources), -1).contiguous(), "max_new_tokens": max_new_tokens}
    inputs["decoder_start_token_id"] = lm.start_tokens[0]
    # Not the model's own method: Whisper's cuts sounds into pieces by itself.
    output = model.generate(**inputs) if use_memory else GenerationMixin.generate(cast(Any, lm.model), **inputs)
    return cast(list[list[int]], output[:, start.shape[1] :].tolist())


def target_texts(lm: Seq2SeqLM, targets: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of target tokens."""
    texts = lm.tokenizer.batch_decode([list(target) for target in targets], skip_special_tokens=True)
    return [str(text).strip() for text in texts]


AutoConfig.register(KnnSeq2SeqConfig.model_type, KnnSeq2SeqConfig)
AutoModelForSeq2SeqLM.register(KnnSeq2SeqConfig, KnnForSeq2SeqLM)
