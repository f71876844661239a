"""Read pairs of a sound file and its transcript with an encoder-decoder model such as Whisper; open any model.

The source of a pair is the path of a WAV file. Sounds are read, and turned into features, when their batch is: those of
half a minute take a megabyte.
"""

from __future__ import annotations

import wave
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnlm.errors import CorpusError, ParameterError
from knnlm.lm.causal import CausalLM, open_on_device
from knnlm.lm.loading import (
    BUNDLED,
    has_encoder,
    load_config,
    load_feature_extractor,
    reads_audio,
)
from knnlm.lm.seq2seq import Seq2SeqLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, SequenceFeatureExtractor

_SAMPLE_TYPES = {1: np.uint8, 2: np.int16, 4: np.int32}  # by bytes


@dataclass(frozen=True)
class AudioFile:
    """A sound as the source of a pair; its length is the number of positions of the encoder."""

    path: str
    positions: int

    def __len__(self) -> int:
        return self.positions


class SpeechLM(Seq2SeqLM):
    """An encoder-decoder model whose encoder reads sounds, and whose decoder writes text."""

    reads_audio = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        extractor: SequenceFeatureExtractor,
        **settings: Any,
    ) -> None:
        super().__init__(model, tokenizer, **settings)
        self.extractor = extractor

    @classmethod
    def open(cls, name: str = BUNDLED, *, device: str = "auto", dtype: str = "auto", **settings: Any) -> SpeechLM:
        """Open a local folder or a hub name; settings as for `Seq2SeqLM.open`.

        `tgt_lang` is the language of the transcripts, as in `en`; a model of one language needs none.
        """
        name, model, tokenizer = open_on_device(name, device, dtype, encoder=True)
        return cls(model, tokenizer, load_feature_extractor(name), name=name, **settings)

    def _set_languages(self, src_lang: str | None, tgt_lang: str | None) -> tuple[str | None, str | None]:
        if src_lang is not None:
            raise ParameterError(f"{self.name} finds the language of a sound by itself: leave out --src-lang.")
        if tgt_lang is not None:
            tokenizer: Any = self.tokenizer
            try:
                tokenizer.set_prefix_tokens(language=tgt_lang, task="transcribe")
            except (AttributeError, ValueError):
                raise ParameterError(f"{self.name} has no language {tgt_lang!r}. Write it as in: en, de.") from None
        return None, tgt_lang

    @property
    def max_source_length(self) -> int | None:
        """The number of positions of the encoder, the same for every sound."""
        positions = getattr(self.model.config, "max_source_positions", None)
        return positions if isinstance(positions, int) else None

    def encode_sources(self, texts: Sequence[str]) -> list[Any]:
        """Return the files with these paths, after checking that they can be read."""
        for path in texts:
            self._read(path, samples=0)
        return [AudioFile(path, self.max_source_length or 1) for path in texts]

    def pad_sources(self, sources: Sequence[Any]) -> dict[str, Tensor]:
        """Return the (B, mel, frames) features of sounds, on the model's device."""
        sounds = [self._read(source.path) for source in sources]
        extract: Any = self.extractor
        features = extract(sounds, sampling_rate=extract.sampling_rate, return_tensors="pt")["input_features"]
        return {"input_features": features.to(self.device, self.model.dtype)}

    def _read(self, path: str, samples: int | None = None) -> NDArray[np.float32]:
        """Return the samples of a WAV file, or the first of them, as the mean of its channels, from -1 to 1."""
        extract: Any = self.extractor
        try:
            with wave.open(path, "rb") as file:
                rate, channels, size = file.getframerate(), file.getnchannels(), file.getsampwidth()
                data = file.readframes(file.getnframes() if samples is None else samples)
        except (OSError, EOFError, wave.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise CorpusError(f"{path}: cannot be read as a WAV file ({reason}). {_advice(path, extract)}") from None
        if rate != extract.sampling_rate or size not in _SAMPLE_TYPES:
            found = f"{rate:,} samples a second of {8 * size} bits"
            raise CorpusError(f"{path}: {found}, but {self.name} reads another rate. {_advice(path, extract)}")
        values = np.frombuffer(data, _SAMPLE_TYPES[size]).reshape(-1, channels).astype(np.float32)
        mean: NDArray[np.float32] = values.mean(1) / np.float32(1 << (8 * size - 1))
        return mean - 1 if size == 1 else mean  # samples of one byte are not signed


def _advice(path: str, extractor: Any) -> str:
    return f"Convert it: ffmpeg -i {path} -ar {extractor.sampling_rate} -ac 1 sound.wav"


def open_lm(
    name: str = BUNDLED, *, src_lang: str | None = None, tgt_lang: str | None = None, **settings: Any
) -> CausalLM:
    """Open a decoder-only or an encoder-decoder model; settings as for `CausalLM.open`.

    `src_lang` and `tgt_lang` name the languages of a model of many, as its tokenizer writes them.
    """
    languages: dict[str, Any] = {"src_lang": src_lang, "tgt_lang": tgt_lang}
    if has_encoder(name):
        kind = SpeechLM if reads_audio(load_config(name)) else Seq2SeqLM
        return kind.open(name, **languages, **settings)
    if src_lang is not None or tgt_lang is not None:
        raise ParameterError(
            f"{name} is a decoder-only model, which has no languages: leave out --src-lang, --tgt-lang."
        )
    return CausalLM.open(name, **settings)


def wrap_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    extractor: SequenceFeatureExtractor | None = None,
    src_lang: str | None = None,
    tgt_lang: str | None = None,
    **settings: Any,
) -> CausalLM:
    """Return a loaded model as the class of its kind; a model that reads sounds needs its feature extractor."""
    languages: dict[str, Any] = {"src_lang": src_lang, "tgt_lang": tgt_lang}
    if not model.config.is_encoder_decoder:
        return CausalLM(model, tokenizer, **settings)
    if extractor is not None:
        return SpeechLM(model, tokenizer, extractor, **languages, **settings)
    return Seq2SeqLM(model, tokenizer, **languages, **settings)
