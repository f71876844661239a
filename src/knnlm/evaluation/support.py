"""Support of tokens: training on a trace, and its figures on held-out text.

Candidates are tokens that were chosen without the target: the top tokens of the model and of each memory, a sample of
the model, and the nearest neighbours' tokens. Support is trained to predict which of them are right. The figures are of
the token with the largest probability in the mixture, which greedy generation shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.corpus import Document
from knnlm.errors import CorpusError, ParameterError
from knnlm.evaluation.evaluate import default_batch_tokens
from knnlm.evaluation.trace import MemoryTrace, Trace, to_tensor
from knnlm.memories.base import ROWS
from knnlm.memories.voting import VoteParams
from knnlm.mixture.gate import MemoryFeatures
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import ReadBatch
from knnlm.mixture.support import SUPPORTED, SupportModel, support_inputs, support_names, train_support
from knnlm.progress import Progress, silent

if TYPE_CHECKING:
    from knnlm.evaluation.tune import TraceTable

BINS = 15  # of the calibration error
FEWEST = 256  # positions: with fewer, no support is trained

_MAX_POSITIONS = 30_000  # for training, which takes longer with more

Array = NDArray[np.float64]


def expected_calibration_error(probabilities: Array, right: NDArray[np.bool_], *, bins: int = BINS) -> float:
    """Return the mean over bins with equal numbers of tokens of |mean probability - share of right tokens|."""
    if not len(probabilities):
        return 0.0
    order = np.argsort(probabilities, kind="stable")
    pairs = zip(np.array_split(probabilities[order], bins), np.array_split(right[order], bins), strict=True)
    return float(sum(abs(own.sum() - hits.sum()) for own, hits in pairs) / len(order))


def auroc(scores: Array, right: NDArray[np.bool_]) -> float:
    """Return the probability that a right token has a larger score than a wrong one; a tie counts half."""
    positives = int(right.sum())
    negatives = len(right) - positives
    if not positives or not negatives:
        return float("nan")
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(sizes) - (sizes - 1) / 2  # mean rank of each group of equal scores, from 1
    return float((ranks[group][right].sum() - positives * (positives + 1) / 2) / (positives * negatives))


@dataclass(frozen=True)
class SupportFigures:
    """How well support predicts whether the mixture's most probable token is right."""

    tokens: int
    right: float  # share of positions whose most probable token is right
    support: float  # mean support of these tokens
    supported_share: float  # share of them with a support of at least one half
    ece: float  # expected calibration error, of BINS bins with equal numbers of tokens
    auroc: float
    ece_probability: float  # the same of the mixture's own probability of the token
    auroc_probability: float
    auroc_entropy: float | None  # of the mixture's negative entropy; None: not measured
    text_support: float | None = None  # mean support of the tokens of the text itself; None: not measured

    @classmethod
    def of(
        cls, support: Array, probabilities: Array, right: NDArray[np.bool_], entropy: Array | None = None
    ) -> SupportFigures:
        """Return the figures of N tokens, from their supports, their probabilities and which of them are right."""
        return cls(
            tokens=len(right),
            right=float(right.mean()),
            support=float(support.mean()),
            supported_share=float((support >= SUPPORTED).mean()),
            ece=expected_calibration_error(support, right),
            auroc=auroc(support, right),
            ece_probability=expected_calibration_error(probabilities, right),
            auroc_probability=auroc(probabilities, right),
            auroc_entropy=None if entropy is None else auroc(-entropy, right),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class _Candidates:
    """Candidates at N positions of a trace."""

    tokens: Tensor  # (N, C); -1: none, or the same token as an earlier one
    first_log_probs: Tensor  # (N, C, 1 + memories) by the model and the first component of each memory
    mixture: Tensor  # (N, C) log-probabilities by the mixture
    right: Tensor  # (N, C)

    @property
    def best(self) -> Tensor:
        """The (N,) most probable candidates."""
        return self.mixture.masked_fill(self.tokens < 0, -torch.inf).argmax(1)


def fit_support(
    trace: Trace,
    table: TraceTable,
    settings: Sequence[Sequence[VoteParams]],
    weights: Tensor,
    *,
    device: str = "cpu",
    progress: Progress = silent,
) -> tuple[SupportModel, SupportFigures] | None:
    """Train support on a trace and the (N, M) weights of the components there; return it with its held-out figures.

    None: the trace has too few positions, or was recorded without candidates.
    """
    if trace.candidates is None or len(trace) < FEWEST:
        return None
    step = -(-len(trace) // _MAX_POSITIONS)
    positions = torch.arange(0, len(trace), step)
    candidates = _read_candidates(trace, settings, weights, step=step, device=device)
    row, column = (candidates.tokens >= 0).nonzero(as_tuple=True)  # (R,) each
    at = positions[row]
    inputs = support_inputs(
        (table.lm_features[at], table.lm_top[at]),
        [_select(memory.features, at) for memory in table.memories if memory.features is not None],
        candidates.tokens[row, column],
        candidates.first_log_probs[row, column],
    )
    log_p, right = candidates.mixture[row, column], candidates.right[row, column]
    names = support_names((memory.kind, memory.feature_names) for memory in table.memories)
    support = train_support(
        inputs, log_p, right, table.documents[at], feature_names=names, device=device, progress=progress
    )
    assert support.out_of_fold is not None
    best = column == candidates.best[row]
    figures = SupportFigures.of(_array(support.out_of_fold.cpu()[best]), _array(log_p[best].exp()), right[best].numpy())
    return replace(support, metadata={**support.metadata, "figures": figures.as_dict()}, out_of_fold=None), figures


def _array(values: Tensor) -> Array:
    return np.asarray(values.double().cpu().numpy())


def _select(features: MemoryFeatures, rows: Tensor) -> MemoryFeatures:
    return MemoryFeatures(
        *(getattr(features, name)[rows] for name in ("features", "log_prob_of_lm_top", "top", "lm_log_prob_of_top"))
    )


def _read_candidates(
    trace: Trace, settings: Sequence[Sequence[VoteParams]], weights: Tensor, *, step: int = 1, device: str = "cpu"
) -> _Candidates:
    """Return the candidates at every `step`-th position, with log-probabilities at these settings."""
    assert trace.candidates is not None
    assert trace.candidate_log_probs is not None
    blocks = []
    for block in trace.blocks(device):
        rows = slice(-(-block.start // step) * step, block.stop, step)
        tokens = to_tensor(trace.candidates[rows]).long()
        log_probs = [to_tensor(trace.candidate_log_probs[rows])[:, :, None]]
        log_probs += [
            _memory_log_probs(memory, own, rows, tokens, device)
            for memory, own in zip(trace.memories, settings, strict=True)
        ]
        first = torch.stack([each[:, :, 0] for each in log_probs], 2)
        every = torch.cat(log_probs, 2).nan_to_num(nan=-torch.inf)  # (n, C, M)
        mixed = (every.double() + weights[rows].double().log()[:, None]).logsumexp(2)
        right = tokens == to_tensor(trace.targets[rows])[:, None]
        blocks.append([_without_repeats(tokens), first, mixed.float(), right])
    return _Candidates(*(torch.cat(column) for column in zip(*blocks, strict=True)))


def _memory_log_probs(
    memory: MemoryTrace, settings: Sequence[VoteParams], rows: slice, tokens: Tensor, device: str
) -> Tensor:
    """Return the (n, C, P) log-probabilities of candidates by each component of a memory."""
    if not memory.has_neighbours:
        return to_tensor(memory.arrays["candidate_log_probs"][rows])
    votes = memory.vote(rows, settings, device=device).components
    width = max(each.values.shape[1] for each in votes)
    values = next(each.values for each in votes if each.values.shape[1] == width)
    weights = [torch.nn.functional.pad(each.log_weights.exp(), (0, width - each.values.shape[1])) for each in votes]
    hits = values[:, None] == tokens.to(device)[:, :, None]  # (n, C, k)
    return torch.bmm(hits.float(), torch.stack(weights, 2)).log().cpu()


def _without_repeats(tokens: Tensor) -> Tensor:
    """Return (n, C) tokens with -1 for those that an earlier column contains."""
    repeated = (tokens[:, :, None] == tokens[:, None]).tril(-1).any(2)
    return tokens.masked_fill(repeated, -1)


def measure_support(
    mixture: Mixture,
    documents: Iterable[Document],
    *,
    limit: int | None = None,
    batch_tokens: int | None = None,
    progress: Progress = silent,
) -> SupportFigures:
    """Return the figures of support on documents.

    `limit` stops after the document that reaches so many tokens. The state of online weights follows a document, whose
    windows are read `batch_tokens` at a time.
    """
    if mixture.router is not None:
        raise ParameterError("Each of several stores has its own support: measure each alone.")
    if mixture.support is None:
        raise ParameterError("The mixture has no support of tokens. Tune the store on text of at least 256 tokens.")
    rows = []
    state: Tensor | None = None
    with progress("measuring support", total=limit, unit="tokens") as advance:
        for batch, continues in _read_in_order(mixture, documents, limit, batch_tokens):
            if continues:
                first, *others = batch.context.spans
                spans = [replace(first, state=state), *others]
                batch = replace(batch, context=replace(batch.context, spans=spans))
            measured, state = _measure_batch(mixture, batch)
            rows.append(measured)
            advance(len(batch.targets))
    if not rows:
        raise CorpusError("There is no text to evaluate on: no document has a token.")
    support, log_p, right, entropy, of_text = (torch.cat(column) for column in zip(*rows, strict=True))
    figures = SupportFigures.of(_array(support), _array(log_p.exp()), right.numpy(), _array(entropy))
    return replace(figures, text_support=float(of_text.double().mean()))


def _read_in_order(
    mixture: Mixture, documents: Iterable[Document], limit: int | None, batch_tokens: int | None
) -> Iterator[tuple[ReadBatch, bool]]:
    """Read documents in batches; yield each, and whether it continues the document of the one before.

    A batch has windows of one document, in their order, or whole documents.
    """
    size = default_batch_tokens(mixture) if batch_tokens is None else batch_tokens
    group: list[list[int]] = []
    total = 0
    for document in documents:
        tokens = mixture.lm.encode_document(document)
        total += len(tokens)
        if len(tokens) > mixture.window.context:
            for number, batch in enumerate(mixture.read([tokens], batch_tokens=size)):
                yield batch, number > 0
        else:
            group.append(tokens)
        if sum(map(len, group)) >= size:
            yield from ((batch, False) for batch in mixture.read(group, batch_tokens=size))
            group = []
        if limit is not None and total >= limit:
            break
    if any(group):
        yield from ((batch, False) for batch in mixture.read(group, batch_tokens=size))


@torch.no_grad()
def _measure_batch(mixture: Mixture, batch: ReadBatch) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return of N positions: support and log p of the top token, whether it is right, entropy, the target's support.

    Also return the state of online weights after the last target; None: there are no such weights.
    """
    assert mixture.support is not None
    prediction = mixture.predict(batch.context)
    tops, entropies = [], []
    for rows in prediction.log_probs().split(ROWS):
        best = rows.max(1)
        tops.append(torch.stack([best.values.double(), best.indices.double()], 1))
        entropies.append(-(rows.exp() * rows.clamp(min=-1e9)).sum(1))
    log_p, token = torch.cat(tops).unbind(1)
    token = token.long()
    support, of_text = (mixture.support.of(prediction, each) for each in (token, batch.targets))
    right = token == batch.targets
    state = None
    if prediction.states is not None and prediction.by_expert is not None:
        before, by_expert = prediction.states[-1:], prediction.by_expert[-1:]
        log_probs, abstains = prediction.component_log_probs(batch.targets), prediction.component_abstains()
        state = mixture.layer.after(before, by_expert, log_probs[-1:], abstains[-1:])[0]
    return tuple(each.cpu() for each in (support, log_p, right, torch.cat(entropies), of_text)), state
