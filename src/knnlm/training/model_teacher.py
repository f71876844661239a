"""Predictions of a model at all positions of a text, as targets for the training of a smaller decoder.

A model that was trained on the text knows more about each position than its next token: which others were likely. The
predictions are computed once and stored like those of retrieval, since a training reads them several times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnlm.errors import DatastoreError, ModelMismatch, ParameterError
from knnlm.lm.causal import CausalLM
from knnlm.lm.windows import WindowShape
from knnlm.progress import Progress, silent
from knnlm.training.data import TokenStream
from knnlm.training.teacher import MODEL_TEACHER, SparseTargets, Targets, check_kept, sparsify, write_targets
from knnlm.training.trainer import output_folder

_POSITIONS = 1 << 14  # that are predicted between two writes, in whole documents
_BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}  # whose logits are computed at once


@dataclass(frozen=True)
class ModelTeacherConfig:
    """How much of the predictions is kept: the most probable tokens until they cover `mass`, at most `top`."""

    top: int = 128
    mass: float = 0.99

    def __post_init__(self) -> None:
        check_kept(self, self.mass)


class PlannedModelTeacher:
    """The metadata of a model's targets without the targets: enough to recognise what was trained from them."""

    def __init__(self, text: TokenStream, lm: CausalLM, config: ModelTeacherConfig) -> None:
        if lm.has_encoder or text.sources is not None:
            raise ParameterError("A teacher of pairs is a store: a model teaches decoder-only models alone.")
        self.text, self.lm, self.config = text, lm, config

    @property
    def token_count(self) -> int:
        """The number of positions."""
        return len(self.text.tokens)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """What the targets depend on."""
        weights: str = self.lm.identity["weights"]["float32"]
        return {
            "kind": MODEL_TEACHER,
            "teacher": weights,
            "text": self.text.fingerprint,
            "document_boundaries": self.text.boundaries_fingerprint,  # with others, contexts are others
            **asdict(self.config),
        }

    def lookup(self, positions: Tensor) -> SparseTargets:
        """Raise: there are no targets."""
        raise NotImplementedError


def make_model_targets(
    text: TokenStream,
    out: str | Path,
    lm: CausalLM,
    config: ModelTeacherConfig | None = None,
    *,
    checkpoint_every: float = 20.0,
    progress: Progress = silent,
) -> Targets:
    """Predict every token of a text from those before it, resuming unfinished targets of the same call.

    Each token is predicted with at least half of the model's context, if its document has so many tokens before it.
    """
    config = config or ModelTeacherConfig()
    shape = {"entries": len(text.tokens), "vocab_size": lm.vocab_size}
    if len(text.tokens) and int(text.tokens.max()) >= lm.vocab_size:
        raise ModelMismatch(f"The text has tokens up to {text.tokens.max()}, but {lm.name} has only {lm.vocab_size:,}.")
    settings = {**PlannedModelTeacher(text, lm, config).metadata, **shape}

    def predicted(first: int) -> Iterator[tuple[SparseTargets, Tensor]]:
        window = lm.window()
        for begin, end in _groups(text, first):
            yield _predict(text, begin, end, lm, window, config)

    return write_targets(
        output_folder(out), settings, predicted, what="predicting targets", every=checkpoint_every, progress=progress
    )


def _groups(text: TokenStream, first: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of groups of whole documents, beginning at a position."""
    if first not in text.starts:
        raise DatastoreError(f"The targets end at position {first}, where no document begins. Make them again.")
    begin = first
    for end in text.starts[text.starts > first].tolist():
        if end - begin >= _POSITIONS or end == text.starts[-1]:
            yield begin, end
            begin = end


def _predict(
    text: TokenStream, begin: int, end: int, lm: CausalLM, window: WindowShape, config: ModelTeacherConfig
) -> tuple[SparseTargets, Tensor]:
    """Return the targets of some documents, and the (n,) probability that was kept of each."""
    cuts = text.starts[(text.starts >= begin) & (text.starts <= end)]
    documents = [text.tokens[own:after].tolist() for own, after in pairwise(cuts)]
    top = min(config.top, lm.vocab_size)
    ids = np.zeros((end - begin, top), np.int32)
    probs, lengths = np.zeros((end - begin, top), np.float32), np.zeros(end - begin, np.int64)
    masses = torch.zeros(end - begin, dtype=torch.float64)
    for batch in lm.read(documents, window, batch_tokens=_BATCH_TOKENS.get(lm.device.type, 1024)):
        assert batch.logits is not None
        best = batch.logits.float().softmax(1).topk(top, dim=1)
        found, kept = sparsify(best.indices, best.values.double(), top=top, mass=config.mass)
        rows, width = batch.rows.cpu().numpy(), found.ids.shape[1]
        ids[rows, :width], probs[rows, :width] = found.ids.cpu().numpy(), found.probs.cpu().numpy()
        lengths[rows], masses[rows] = found.lengths.cpu().numpy(), kept.cpu().double()
    return SparseTargets(torch.from_numpy(ids).long(), torch.from_numpy(probs), torch.from_numpy(lengths)), masses
