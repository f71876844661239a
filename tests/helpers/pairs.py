"""Pairs of a source and a target, tiny encoder-decoder models that read them, and kNN-MT by brute force."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from helpers import oracle
from helpers.models import LANGUAGES, TEXT, pair_tokenizer, tiny
from knnlm.corpus import Document
from knnlm.lm.seq2seq import Seq2SeqLM

WORDS = TEXT.split()
# What the decoder reads before the target, by hand; elsewhere the padding token.
START = {"bart": [2, 0], "m2m_100": [2, "eng_Latn"], "mbart": ["en_XX"]}


def ffn(family: str) -> str:
    """The path of the module whose input is the default key."""
    return "decoder.block.2.layer.2.DenseReluDense" if "t5" in family else "model.decoder.layers.2.fc1"


def start_tokens(family: str, tokenizer: Any) -> list[int]:
    """What the decoder reads before the target."""
    start = START.get(family, [1])
    return [token if isinstance(token, int) else tokenizer.convert_tokens_to_ids(token) for token in start]


def languages(family: str) -> dict[str, str]:
    """The languages of a family that has some."""
    return dict(zip(("src_lang", "tgt_lang"), LANGUAGES[family], strict=True)) if family in LANGUAGES else {}


def pair_lm(family: str, *, name: str | None = None) -> Seq2SeqLM:
    """A tiny random model of a family."""
    return Seq2SeqLM(tiny(family), pair_tokenizer(family), name=name or family, **languages(family))


def pairs(count: int, *, start: int = 0, name: str = "pairs.tsv") -> list[Document]:
    """Different pairs of a few words each; many targets begin alike."""
    made = []
    for number in range(start, start + count):
        target = [WORDS[(number * 3 + step) % len(WORDS)] for step in range(2 + number % 4)]
        source = [WORDS[(number * 5 + 2 * step) % len(WORDS)] for step in range(1 + number % 5)]
        made.append(
            Document(
                f"p{number}", f"{name}:{number + 1}", " ".join(target), source_text=" ".join(source) + f" {number}"
            )
        )
    return made


def write_jsonl(path: Path, documents: Iterable[Document], source: str = "source", text: str = "text") -> Path:
    """Write pairs as records."""
    records = ({"id": each.id, source: each.source_text, text: each.text} for each in documents)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_tsv(path: Path, documents: Iterable[Document]) -> Path:
    """Write pairs as lines of source, tab and target."""
    path.write_text("".join(f"{each.source_text}\t{each.text}\n" for each in documents))
    return path


def read_last(lm: Seq2SeqLM, family: str, source: list[int], decoder_input: list[int]) -> tuple[Any, Any]:
    """The key and the probabilities at the last position of one pass, by a plain hook."""
    return _read_last(lm, family, tuple(source), tuple(decoder_input))


@lru_cache(maxsize=1 << 14)  # tests of one model read the same prefixes many times
@torch.no_grad()
def _read_last(lm: Seq2SeqLM, family: str, source: tuple[int, ...], decoder_input: tuple[int, ...]) -> tuple[Any, Any]:
    seen: list[Any] = []

    def hook(_: nn.Module, args: Any) -> None:
        seen.append(args[0])

    handle = lm.model.get_submodule(ffn(family)).register_forward_pre_hook(hook)
    prefix = torch.tensor([decoder_input])
    logits = lm.model(input_ids=torch.tensor([source]), decoder_input_ids=prefix).logits[0, -1]
    handle.remove()
    return seen[0][0, -1].numpy(), oracle.softmax(logits.double().numpy())


def read_prefixes(lm: Seq2SeqLM, family: str, document: Document) -> tuple[Any, Any, list[int]]:
    """Keys, probabilities and targets of one pair: each from a pass over one prefix, by plain hooks."""
    tokenizer: Any = lm.tokenizer
    source = tokenizer(document.source_text)["input_ids"]
    target = [*tokenizer(text_target=document.text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    start = start_tokens(family, tokenizer)
    read = [read_last(lm, family, source, [*start, *target[:position]]) for position in range(len(target))]
    return np.array([key for key, _ in read]), np.array([probs for _, probs in read]), target


class BruteForce:
    """kNN-MT in NumPy: p = (1-λ)·p_NMT + λ·p_kNN at each position of a target."""

    def __init__(self, lm: Seq2SeqLM, family: str, stored: list[Document]) -> None:
        self.lm, self.family = lm, family
        read = [read_prefixes(lm, family, document) for document in stored]
        self.keys = np.concatenate([keys for keys, _, _ in read])
        self.values = np.concatenate([np.array(target) for _, _, target in read])
        self.documents = np.repeat(np.arange(len(stored)), [len(target) for _, _, target in read])

    def only(self, documents: Any) -> BruteForce:
        """The same with only some of the stored documents, by their places."""
        kept = np.isin(self.documents, documents)
        fewer = copy.copy(self)
        fewer.keys, fewer.values = self.keys[kept], self.values[kept]
        return fewer

    def distribution(self, key: Any, p_lm: Any, *, k: int, knn_temperature: float, lmbda: float) -> Any:
        """The mixture's distribution at one position."""
        settings = {"k": k, "knn_temperature": knn_temperature}
        return oracle.mix(p_lm, oracle.knn_distribution(key, self.keys, self.values, len(p_lm), **settings), lmbda)

    def perplexity(self, documents: list[Document], **settings: Any) -> float:
        """The perplexity of targets given their sources."""
        log_p = []
        for document in documents:
            for key, p_lm, target in zip(*read_prefixes(self.lm, self.family, document), strict=True):
                log_p.append(math.log(self.distribution(key, p_lm, **settings)[target]))
        return math.exp(-np.mean(log_p))


class BruteForceScores(transformers.LogitsProcessor):
    """Replaces the scores of the plain model by a mixture's, computed for each row from its prefix alone."""

    def __init__(self, case: Any, beams: int) -> None:
        """Take the `next_distribution` and the tokenised `sources` of a case."""
        self.case, self.beams = case, beams

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = []
        for row, written in enumerate(input_ids.tolist()):
            source = self.case.sources[row // self.beams]
            rows.append(np.log(np.maximum(self.case.next_distribution(source, written), 1e-300)))
        return torch.tensor(np.array(rows), dtype=scores.dtype)
