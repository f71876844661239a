"""Text that a language model writes from its start token: what no memory can predict better than the model.

A gate that is trained also on such text learns where not to use the memories: outside their domain, and in text that
the model wrote.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from knnlm.corpus import Document
from knnlm.errors import ParameterError
from knnlm.lm.causal import CausalLM, eval_mode
from knnlm.progress import Progress, silent

_LENGTH = 256  # tokens of a document, at most
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
            for text in texts:
                count = len(lm.encode(text))
                advance(min(count, tokens - done))
                done = min(tokens, done + count)
                documents.append(Document(f"sample-{len(documents)}", "sampled", text))
    return documents


def check_sample_count(tokens: int) -> None:
    """Raise ParameterError for a number of tokens that cannot be sampled."""
    if tokens < 0:
        raise ParameterError(f"The number of sampled tokens must be at least 0, not {tokens}.")


def _sample(lm: CausalLM, count: int, length: int) -> list[str]:
    """Return the texts of one batch that are not empty."""
    rows = sample_tokens(lm, count, length).tolist()
    texts = [str(lm.tokenizer.decode(row, skip_special_tokens=True)) for row in rows]
    return [text for text in texts if text.strip()]


def sample_tokens(lm: CausalLM, count: int, length: int) -> Tensor:
    """Return (count, at most length) tokens that the model samples after its start token; padded at the end."""
    begin = torch.full((count, 1), lm.start_token, device=lm.device)
    model: Any = lm.model
    own = model.generation_config
    plain = type(own)(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length)
    plain.eos_token_id, plain.pad_token_id = own.eos_token_id, lm.start_token
    with torch.no_grad(), eval_mode(model):
        model.generation_config = plain  # penalties and limits of the model's own would make it another distribution
        try:
            written: Tensor = model.generate(begin, attention_mask=torch.ones_like(begin))
        finally:
            model.generation_config = own
    return written[:, 1:]
