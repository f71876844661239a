"""The study of key layers, which reads samples of the store and of both texts again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from knnlm.errors import KeyLayerError
from knnlm.evaluation.trace import Trace
from knnlm.index.exact import ExactIndex
from knnlm.lm.key_layers import PLACES
from knnlm.lm.windows import WindowShape
from knnlm.memories.base import Source
from knnlm.memories.voting import RetrievedNeighbours
from knnlm.mixture.readers import Readers
from knnlm.progress import Progress
from knnlm.report.context import ReportContext, TracedText, perplexity
from knnlm.report.search import ArrayVectors, select_settings, with_neighbours
from knnlm.report.study import Outcome, Plot, Study, StudyUnavailable, Table, lowest

# By `quick`:
_STORED_TOKENS = {True: 4000, False: 20_000}
_TEXT_TOKENS = {True: 1500, False: 4000}  # of each text

_GROUP = 8192  # tokens that are packed into batches together


@dataclass(frozen=True)
class _LayerKeys:
    """The keys of a text at every key layer."""

    keys: dict[Source, Tensor]  # (N, D) float32 each
    targets: Tensor  # (N,)


def study_layer(context: ReportContext) -> Study:
    """Search exactly in the same sample of the store, with keys of every key layer of the last block."""
    sources, notes = _sources(context)
    stored = _sample(context, _STORED_TOKENS[context.quick])
    shape = context.mixture.window
    memory = _read_all(context, stored, sources, shape, "reading the store")
    texts = [_read_text(context, read, sources, shape) for read in (context.valid, context.test)]
    own = context.mixture.knn.source if context.mixture.knn else None
    tried: list[Outcome] = []
    for source in sources:
        index = ExactIndex(ArrayVectors(memory.keys[source]), device=context.device)
        tried.append(
            select_settings(*(_neighbours(index, memory, source, *text, k=context.chosen[0].k) for text in texts))
        )
    names = [f"{source.place}{' (this store)' * (source == own)}" for source in sources]
    cells = [(name, source.layer, one.k) for name, source, one in zip(names, sources, tried, strict=True)]
    perplexities = [one.test for one in tried]
    best, base = lowest([one.valid for one in tried]), perplexity(texts[1][0].lm_log_probs)
    size = f"{len(memory.targets):,} stored tokens and {len(texts[1][0]):,} of the held-out text"
    return Study(
        name="layer",
        title="Key layers",
        paper="kNN-LM, Table 5",
        finding=(
            f"{sources[best].place} is best on the tuning text and gives {perplexities[best]:.2f}, the worst "
            f"{max(perplexities):.2f}, the model alone {base:.2f}, all on the same sample."
        ),
        command=context.report_command("layer"),
        tables=[Table.of_outcomes({"key layer": "", "layer": "d", "k": ",d"}, cells, tried)],
        plots=[
            Plot.bars("Perplexity by key layer", [source.place for source in sources], perplexities, model_alone=base)
        ],
        notes=[f"In a sample of {size}, the same for all key layers.", *notes],
    )


def _sources(context: ReportContext) -> tuple[list[Source], list[str]]:
    """Return every key layer of the last block, and the store's own."""
    knn = context.mixture.knn
    assert knn is not None
    assert knn.source is not None
    reader = context.mixture.readers.models[knn.source.reader]
    last = reader.key_layer.layers - 1
    wanted = [Source(knn.source.reader, place, last) for place in PLACES]
    if knn.source not in wanted:
        wanted.append(knn.source)
    layers, notes = [], []
    for source in wanted:
        try:
            context.mixture.readers.layer(source)
            layers.append(source)
        except KeyLayerError as error:
            notes.append(f"{source.place} was skipped: {error}")
    if len(layers) < 2:
        raise StudyUnavailable("the model has only one key layer")
    return layers, notes


def _sample(context: ReportContext, tokens: int) -> list[list[int]]:
    """Return documents of the store, in the order of a hash of their text, up to so many tokens."""
    documents = sorted(context.store.documents(), key=lambda document: (document.sha256, document.number))
    sample: list[list[int]] = []
    for document in documents:
        room = tokens - sum(map(len, sample))
        if room <= 0:
            break
        entries = torch.arange(document.first_entry, document.first_entry + min(document.entries, room))
        sample.append(context.store.values(entries).tolist())
    return sample


def _read_all(
    context: ReportContext, documents: Sequence[Sequence[int]], sources: Sequence[Source], shape: WindowShape, what: str
) -> _LayerKeys:
    return read_keys(context.mixture.readers, documents, sources, shape, progress=context.progress, what=what)


def read_keys(
    readers: Readers,
    documents: Sequence[Sequence[int]],
    sources: Sequence[Source],
    shape: WindowShape,
    *,
    progress: Progress,
    what: str,
) -> _LayerKeys:
    """Read documents in one pass and return the keys at all sources."""
    total = sum(map(len, documents))
    targets = torch.zeros(total, dtype=torch.long)
    keys: dict[Source, Tensor] = {}
    with progress(what, total=total, unit="tokens") as advance:
        for batch in readers.read(documents, shape, dict.fromkeys(sources, 0), batch_tokens=1024):
            targets[batch.rows] = batch.targets.cpu()
            for source in sources:
                states = batch.context.states[source].float().cpu()
                if source not in keys:
                    keys[source] = torch.zeros(total, states.shape[1])
                keys[source][batch.rows] = states
            advance(len(batch.rows))
    return _LayerKeys(keys, targets)


def _read_text(
    context: ReportContext, read: TracedText, sources: list[Source], shape: WindowShape
) -> tuple[Trace, _LayerKeys]:
    """Read the first documents of a text again, at all sources."""
    trace = read.head(_TEXT_TOKENS[context.quick]).trace
    starts = sorted({*trace.documents.tolist(), len(trace)})
    documents = [trace.targets[begin:end].tolist() for begin, end in pairwise(starts)]
    return trace, _read_all(context, documents, sources, shape, "reading the text")


def _neighbours(
    index: ExactIndex, memory: _LayerKeys, source: Source, trace: Trace, text: _LayerKeys, *, k: int
) -> Trace:
    neighbours = index.search(text.keys[source], min(max(k, 1), len(memory.targets)))
    ids = neighbours.ids.cpu()
    values = memory.targets[ids.clamp(min=0)].masked_fill(ids < 0, -1)
    return with_neighbours(trace, RetrievedNeighbours(ids, neighbours.distances.cpu(), values))
