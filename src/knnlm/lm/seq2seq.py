"""Read pairs of a source and a target with an encoder-decoder model: Marian, M2M-100, NLLB, T5, BART, mBART, Pegasus.

The encoder reads the source, and the decoder reads the target with teacher forcing: at each position it has read the
start tokens and the target so far, and predicts the next token. The last token of a target is the end token, so that a
store contains where a translation ends. Keys and logits of the decoder are those of `CausalLM`, so a store, a mixture
and an evaluation need nothing else.

A tokenizer writes special tokens around a target: Marian and T5 only the end token, NLLB also the language before it,
BART a start token. The tokens before the target are not predicted: generation sets them, and so they are no entries of
a store. The last of them is the start token of the text; those before it are the `prefix_tokens`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from knnlm.errors import CorpusError, KnnlmWarning, ModelError, ParameterError
from knnlm.lm.causal import CausalLM, TextDocument, check_text, open_on_device
from knnlm.lm.key_layers import check_seq2seq
from knnlm.lm.loading import BUNDLED
from knnlm.lm.windows import PairTokens, Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PROBE_TEXT = "a"
_MAX_TOKENIZER_LENGTH = 1 << 20  # a tokenizer without a limit has a much larger number


class Seq2SeqLM(CausalLM):
    """An encoder-decoder model, its tokenizer, and the place of the decoder where its keys are captured."""

    has_encoder = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str | None = None,
        key_layer: str | None = None,
        layer: int = -1,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
    ) -> None:
        super().__init__(model, tokenizer, name=name, key_layer=key_layer, layer=layer)
        self.vocab_size = getattr(model.config, "decoder_vocab_size", None) or self.vocab_size
        self.src_lang, self.tgt_lang = self._set_languages(src_lang, tgt_lang)
        start, self.end_tokens = _frame(model, tokenizer, self.name)
        self.prefix_tokens, self.start_token = start[:-1], start[-1]
        self._truncated = False
        self._lock = threading.Lock()  # some tokenizers change their state between sources and targets

    @classmethod
    def open(
        cls,
        name: str = BUNDLED,
        *,
        key_layer: str | None = None,
        layer: int = -1,
        device: str = "auto",
        dtype: str = "auto",
        src_lang: str | None = None,
        tgt_lang: str | None = None,
    ) -> Seq2SeqLM:
        """Open a local folder or a hub name; a model of many languages needs those of source and target."""
        name, model, tokenizer = open_on_device(name, device, dtype, encoder=True)
        languages = {"src_lang": src_lang, "tgt_lang": tgt_lang}
        return cls(model, tokenizer, name=name, key_layer=key_layer, layer=layer, **languages)

    @staticmethod
    def _check(model: PreTrainedModel) -> None:
        check_seq2seq(model)

    def _set_languages(self, src_lang: str | None, tgt_lang: str | None) -> tuple[str | None, str | None]:
        """Set the languages of the tokenizer, and return them; None where it has none."""
        return _set_languages(self.tokenizer, src_lang, tgt_lang, self.name)

    @property
    def languages(self) -> dict[str, Any]:
        """The options of `open` that name the languages of the model."""
        return {"src_lang": self.src_lang, "tgt_lang": self.tgt_lang}

    @property
    def start_tokens(self) -> tuple[int, ...]:
        """All tokens that the decoder reads before a target; the last is the start token of the text."""
        return (*self.prefix_tokens, self.start_token)

    @property
    def max_length(self) -> int | None:
        """The maximal number of tokens of a target, None where positions are unlimited."""
        config = self.model.config.get_text_config()
        limits = (getattr(config, name, None) for name in ("max_target_positions", "max_position_embeddings"))
        limit = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
        return None if limit is None else limit - len(self.prefix_tokens)

    @property
    def max_source_length(self) -> int | None:
        """The maximal number of tokens of a source, None where positions are unlimited."""
        config = self.model.config.get_text_config()
        limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
        limits.append(getattr(self.tokenizer, "model_max_length", None))
        found = [limit for limit in limits if isinstance(limit, int) and 0 < limit <= _MAX_TOKENIZER_LENGTH]
        return min(found, default=None)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What identifies the model, its languages and its key layer; stores record it."""
        return {
            **super().identity,
            "encoder_decoder": True,
            **self.languages,
            "prefix_tokens": list(self.prefix_tokens),
            "end_tokens": list(self.end_tokens),
        }

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a target, without special ones."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of many targets, each as by `encode`."""
        for text in texts:
            check_text(text)
        if not texts:
            return []
        with self._lock:
            encoded = self.tokenizer(text_target=list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [self._checked(list(tokens)) for tokens in encoded]

    def encode_sources(self, texts: Sequence[str]) -> list[Any]:
        """Return the tokens of sources, with special ones; one that is too long is cut off, with a warning."""
        for text in texts:
            check_text(text)
        if not texts:
            return []
        limit = self.max_source_length
        with self._lock:
            encoded = self.tokenizer(list(texts), verbose=False)["input_ids"]
            longest = max(map(len, encoded))
            if limit is not None and longest > limit:
                encoded = self.tokenizer(list(texts), truncation=True, max_length=limit, verbose=False)["input_ids"]
                self._warn_of_truncation(longest, limit)
        embeddings: Any = self.model.get_input_embeddings()
        size = int(embeddings.weight.shape[0])
        return [self._checked(list(tokens), size) for tokens in encoded]

    def _warn_of_truncation(self, longest: int, limit: int) -> None:
        """Warn once that a source is longer than the model can read."""
        if not self._truncated:
            warnings.warn(
                f"A source has {longest:,} tokens, of which {self.name} reads only the first {limit:,}; so for every "
                "longer one. Split long texts into sentences.",
                KnnlmWarning,
                stacklevel=4,
            )
        self._truncated = True

    def encode_document(self, document: TextDocument) -> list[int]:
        """Return the tokens of a target with the end token, unless it is cut off, and of its source."""
        return self.encode_documents([document])[0]

    def encode_documents(self, documents: Sequence[TextDocument]) -> list[list[int]]:
        """Return the tokens of many pairs, each as by `encode_document`."""
        sources = self.encode_sources([self._source(document) for document in documents])
        targets = self.encode_all([document.text for document in documents])
        ends = [() if document.cut_off else self.end_tokens for document in documents]
        every = zip(targets, ends, sources, strict=True)
        return [PairTokens([*target, *end], source) for target, end, source in every]

    def _source(self, document: TextDocument) -> str:
        if document.source_text is None:
            raise CorpusError(
                f"{document.source} has no source text, and {self.name} is an encoder-decoder model, which reads one. "
                "Give pairs: jsonl or parquet with the fields source and text, a .tsv file, or --source FILE."
            )
        if not document.source_text.strip():
            raise CorpusError(f"{document.source} has an empty source. Give the text of which it is the target.")
        return document.source_text

    def stored_document(self, tokens: list[int], source_text: str | None) -> list[int]:
        """Return stored tokens of a target with the tokens of its source."""
        return PairTokens(tokens, self.encode_sources([source_text or ""])[0])

    def require_text(self, what: str) -> None:
        """Raise an error: a model with an encoder reads pairs."""
        raise ModelError(f"{what} needs a decoder-only model, but {self.name} is an encoder-decoder model.")

    def prompt(self, text: str, *, room: int = 0, max_length: int | None = None) -> list[int]:  # noqa: ARG002
        """Raise an error: a model with an encoder does not continue texts."""
        raise ParameterError(f"{self.name} is an encoder-decoder model: it translates a source, with knnlm translate.")

    def sources(self, batch: Sequence[Window]) -> dict[str, Tensor]:
        """Return the padded sources of windows and their mask."""
        if not all(window.source for window in batch):
            raise ParameterError(f"{self.name} is an encoder-decoder model: each text needs its source.")
        return self.pad_sources([window.source for window in batch])

    def pad_sources(self, sources: Sequence[Any]) -> dict[str, Tensor]:
        """Return (B, S) tokens of sources and their mask, on the model's device."""
        pad = self.tokenizer.pad_token_id
        lengths = np.array([len(source) for source in sources])
        ids = np.full((len(sources), lengths.max()), pad if isinstance(pad, int) else 0, np.int64)
        for row, source in enumerate(sources):  # in NumPy: a batch of a GPU has a thousand rows
            ids[row, : len(source)] = source
        mask = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
        return {
            "input_ids": torch.from_numpy(ids).to(self.device),
            "attention_mask": torch.from_numpy(mask).to(self.device),
        }

    @torch.no_grad()
    def mean_source_states(self, tokens: Sequence[Sequence[int]], *, batch_size: int = 64) -> Tensor:
        """Return the (N, D) mean encoder states of sources, given their tokens, in float32 on the CPU."""
        order = sorted(range(len(tokens)), key=lambda number: len(tokens[number]))
        found: list[Tensor] = []
        for begin in range(0, len(order), batch_size):
            inputs = self.pad_sources([tokens[number] for number in order[begin : begin + batch_size]])
            found.append(self.mean_states(inputs).cpu())
        places = torch.empty(len(order), dtype=torch.long).scatter_(0, torch.tensor(order), torch.arange(len(order)))
        return torch.cat(found)[places]

    @torch.no_grad()
    def mean_states(self, sources: Mapping[str, Tensor]) -> Tensor:
        """Return the (B, D) mean encoder states of padded sources."""
        hidden = cast(Any, self.model).get_encoder()(**sources).last_hidden_state
        return mean_states(hidden, sources["attention_mask"])

    def _run(self, ids: Tensor, sources: Mapping[str, Tensor]) -> Any:
        return self.model(**sources, decoder_input_ids=ids, use_cache=False)


def mean_states(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return the (B, D) means of (B, S, D) encoder states over the tokens that a (B, S) mask marks; None: all."""
    if mask is None:
        return hidden.float().mean(1)
    kept = mask.to(hidden.device).float()[..., None]
    return (hidden.float() * kept).sum(1) / kept.sum(1).clamp(min=1)


def _set_languages(
    tokenizer: PreTrainedTokenizerBase, src_lang: str | None, tgt_lang: str | None, name: str
) -> tuple[str | None, str | None]:
    """Set the languages of a tokenizer that has some, and return them; None for one that has none."""
    given = {"src_lang": src_lang, "tgt_lang": tgt_lang}
    if not hasattr(tokenizer, "src_lang"):
        if language := src_lang or tgt_lang:
            raise ParameterError(f"The tokenizer of {name} has no languages, so {language!r} cannot be chosen.")
        return None, None
    if not (src_lang or tgt_lang):
        given = {attribute: getattr(tokenizer, attribute, None) for attribute in given}
    for attribute, language in given.items():
        if not isinstance(language, str):
            option = attribute.replace("_", "-")
            raise ParameterError(
                f"{name} has several languages. Name those of source and target: --{option} is missing."
            )
        if not _is_language(tokenizer, language):
            known = [str(token) for token in tokenizer.all_special_tokens if len(str(token).strip("<>/_")) > 1]
            raise ParameterError(f"{name} has no language {language!r}. Special tokens: {', '.join(known[:12])}, …")
        setattr(tokenizer, attribute, language)
    return given["src_lang"], given["tgt_lang"]


def _is_language(tokenizer: PreTrainedTokenizerBase, language: str) -> bool:
    """Whether a language is a token, or a tokenizer has its own list of languages with this one."""
    own = getattr(tokenizer, "lang_code_to_token", None) or getattr(tokenizer, "lang_code_to_id", None)
    return language in own if isinstance(own, Mapping) else language in tokenizer.get_vocab()


def _frame(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that the decoder reads before a target, at least one, and those that end a target."""
    before, after = _special_tokens(tokenizer)
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ModelError(f"The tokenizer of {name} has no end token, so translations would not end.")
    after = after if end in after else [*after, end]
    # mBART writes the language behind the end token, and reads it as the first one.
    behind = after[after.index(end) + 1 :]
    start = behind[-1] if behind else _decoder_start(model, tokenizer, name)
    own = before[1:] if before[:1] == [start] else before
    return (start, *own), tuple(after[: after.index(end) + 1])


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer writes before and behind a target."""
    bare = list(tokenizer(text_target=_PROBE_TEXT, add_special_tokens=False)["input_ids"])
    framed = list(tokenizer(text_target=_PROBE_TEXT)["input_ids"])
    for begin in range(len(framed) - len(bare) + 1):
        if framed[begin : begin + len(bare)] == bare:
            return framed[:begin], framed[begin + len(bare) :]
    return [], []


def _decoder_start(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    """Return the token that the decoder begins with."""
    generation: Any = getattr(model, "generation_config", None)
    config = model.config
    for holder, attribute in (
        (generation, "decoder_start_token_id"),
        (config, "decoder_start_token_id"),
        (config.get_text_config(), "bos_token_id"),
        (tokenizer, "bos_token_id"),
    ):
        if isinstance(token := getattr(holder, attribute, None), int):
            return token
    raise ModelError(f"{name} names no token that the decoder begins with. Set model.config.decoder_start_token_id.")
