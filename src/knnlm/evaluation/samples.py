"""Text that a language model writes from its start token: what no memory can predict better than the model.

An encoder-decoder model writes it for random sources, so that sources of every domain are among them.

A gate that is trained also on such text learns where not to use the memories: outside their domain, and in text that
the model wrote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knnlm.corpus import Document
from knnlm.errors import ParameterError
from knnlm.lm.causal import CausalLM, eval_mode
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.progress import Progress, silent

_LENGTH = 256  # tokens of a document, at most
_SOURCE_LENGTHS = 4, 21  # tokens of a random source, from the first number to below the second
_BATCH = 32  # documents at a time
_GPU_FACTOR = 16  # times as many on a GPU, which smaller batches would leave idle
_ENOUGH = 0.8  # of the wanted tokens: a further batch takes as many steps as a full one, for few documents
_MAX_ROUNDS = 4  # times as many batches as full documents would need: some models end most texts at once


def sample_documents(lm: CausalLM, tokens: int, *, seed: int = 0, progress: Progress = silent) -> list[Document]:
    """Return documents that the model samples, with at least 80 % of this number of tokens together.

    Fewer, if the model ends most of its texts at once. Each call returns the same documents on the same device.
    """
    check_sample_count(tokens)
    length = max(1, min(_LENGTH, (lm.max_length or _LENGTH + 1) - 1))
    batch = _BATCH * (_GPU_FACTOR if lm.device.type == "cuda" else 1)
    documents: list[Document] = []
    done, rounds = 0, _MAX_ROUNDS * math.ceil(tokens / (batch * length))
    devices = [lm.device] if lm.device.type == "cuda" else []
    with torch.random.fork_rng(devices), progress("sampling", total=tokens, unit="tokens") as advance:
        torch.manual_seed(seed)
        while done < _ENOUGH * tokens and rounds:
            rounds -= 1
            try:
                texts = _sample(lm, min(batch, math.ceil((tokens - done) / length)), length)
            except torch.cuda.OutOfMemoryError:
                if batch == 1:
                    raise
                batch, rounds, texts = batch // 2, 2 * rounds + 2, []
            for text, source_text, cut_off in texts:
                count = len(lm.encode(text))
                advance(min(count, tokens - done))
                done = min(tokens, done + count)
                name = f"sample-{len(documents)}"
                documents.append(Document(name, "sampled", text, source_text=source_text, cut_off=cut_off))
    return documents


def check_sample_count(tokens: int) -> None:
    """Raise ParameterError for a number of tokens that cannot be sampled."""
    if tokens < 0:
        raise ParameterError(f"The number of sampled tokens must be at least 0, not {tokens}.")


def _sample(lm: CausalLM, count: int, length: int) -> list[tuple[str, str | None, bool]]:
    """Return the texts of one batch that are not empty, their random sources, and whether the length cuts them off.

    A model without an encoder has no sources.
    """
    sources = _random_sources(lm, count) if isinstance(lm, Seq2SeqLM) else []
    rows = sample_tokens(lm, count, length, sources).tolist()
    texts = [str(lm.tokenizer.decode(row, skip_special_tokens=True)) for row in rows]
    given: Sequence[str | None] = sources or [None] * count
    end: Any = lm.model.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [end])
    cut_off = [ends.isdisjoint(row) for row in rows]
    return [sample for sample in zip(texts, given, cut_off, strict=True) if sample[0].strip()]


def _random_sources(lm: Seq2SeqLM, count: int) -> list[str]:
    """Return texts of random tokens."""
    vocabulary = sorted(set(lm.tokenizer.get_vocab().values()) - set(lm.tokenizer.all_special_ids))
    sources: list[str] = []
    while len(sources) < count:
        length = int(torch.randint(*_SOURCE_LENGTHS, (1,)))
        picked = torch.randint(len(vocabulary), (length,)).tolist()
        text = str(lm.tokenizer.decode([vocabulary[number] for number in picked]))
        sources += [text] if text.strip() else []
    return sources


def sample_tokens(lm: CausalLM, count: int, length: int, sources: Sequence[str] = ()) -> Tensor:
    """Return (count, at most length) tokens that the model samples after its start token; padded at the end.

    `sources` are those of an encoder-decoder model.
    """
    inputs = _inputs(lm, count, sources)
    model: Any = lm.model
    own = model.generation_config
    plain = type(own)(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length)
    plain.eos_token_id, plain.pad_token_id = own.eos_token_id, lm.start_token
    plain.decoder_start_token_id = lm.start_tokens[0] if isinstance(lm, Seq2SeqLM) else None
    with torch.no_grad(), eval_mode(model):
        model.generation_config = plain  # penalties and limits of the model's own would make it another distribution
        try:
            written: Tensor = model.generate(**inputs)
        finally:
            model.generation_config = own
    return written[:, inputs.get("decoder_input_ids", inputs["input_ids"]).shape[1] :]


def _inputs(lm: CausalLM, count: int, sources: Sequence[str]) -> dict[str, Tensor]:
    """Return the arguments of `generate` before the first token of each text."""
    if not isinstance(lm, Seq2SeqLM):
        begin = torch.full((count, 1), lm.start_token, device=lm.device)
        return {"input_ids": begin, "attention_mask": torch.ones_like(begin)}
    start = torch.tensor([lm.start_tokens], device=lm.device).expand(count, -1).contiguous()
    return {**lm.pad_sources(lm.encode_sources(sources)), "decoder_input_ids": start}
