"""The study of key layers: where in the model a context is read. Reads samples of the store and of both texts again."""

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
from knnlm.report.context import Read, ReportContext, perplexity
from knnlm.report.search import ArrayVectors, Outcome, choose, with_neighbours
from knnlm.report.study import FIGURES, CannotStudy, Cell, Plot, Study, Table, lowest

_STORED = {True: 4000, False: 20_000}  # tokens of the store that are read again, by whether it is to be quick

_TEXT = {True: 1500, False: 4000}  # of each text

_GROUP = 8192  # tokens that are packed into batches together


@dataclass(frozen=True)
class _Reading:
    """The keys of a text at every place."""

    keys: dict[Source, Tensor]  # (N, D) float32 each
    targets: Tensor  # (N,)


def study_layer(desk: ReportContext) -> Study:
    """Search exactly in the same sample of the store, with keys from every place of the last layer."""
    sources, notes = _sources(desk)
    stored = _sample(desk, _STORED[desk.quick])
    shape = desk.mixture.window
    memory = _read_all(desk, stored, sources, shape, "reading the store")
    texts = [_read_text(desk, read, sources, shape) for read in (desk.valid, desk.test)]
    own = desk.mixture.knn.source if desk.mixture.knn else None
    tried: list[Outcome] = []
    for source in sources:
        index = ExactIndex(ArrayVectors(memory.keys[source]), device=desk.device)
        tried.append(choose(*(_neighbours(index, memory, source, *text, k=desk.chosen[0].k) for text in texts)))
    names = [f"{source.place}{' (as here)' * (source == own)}" for source in sources]
    rows: list[list[Cell]] = [
        [name, source.layer, one.k, *one.figures()] for name, source, one in zip(names, sources, tried, strict=True)
    ]
    perplexities = [one.test for one in tried]
    best, base = lowest([one.valid for one in tried]), perplexity(texts[1][0].lm_log_probs)
    size = f"{len(memory.targets):,} stored tokens and {len(texts[1][0]):,} of the held-out text"
    return Study(
        name="layer",
        title="Where the key is read",
        paper="kNN-LM, Table 5",
        finding=(
            f"{sources[best].place} is best on the tuning text and gives {perplexities[best]:.2f}, the worst place "
            f"{max(perplexities):.2f}, the model alone {base:.2f}, all on the same sample."
        ),
        command=desk.again("layer"),
        tables=[
            Table.of(
                {"key layer": "", "layer": "d", "k": ",d", **FIGURES},
                rows,
                best=best,
            )
        ],
        plots=[
            Plot.bars("Perplexity by key layer", [source.place for source in sources], perplexities, model_alone=base)
        ],
        notes=[f"In a sample of {size}, the same for all places.", *notes],
    )


def _sources(desk: ReportContext) -> tuple[list[Source], list[str]]:
    """Find every place there is in the last layer, and the store's own."""
    knn = desk.mixture.knn
    assert knn is not None
    assert knn.source is not None
    reader = desk.mixture.readers.models[knn.source.reader]
    last = reader.key_layer.layers - 1
    wanted = [Source(knn.source.reader, place, last) for place in PLACES]
    if knn.source not in wanted:
        wanted.append(knn.source)
    found, notes = [], []
    for source in wanted:
        try:
            desk.mixture.readers.layer(source)
            found.append(source)
        except KeyLayerError as error:
            notes.append(f"{source.place} was left out: {error}")
    if len(found) < 2:
        raise CannotStudy("the model has only one place that keys can be read from")
    return found, notes


def _sample(desk: ReportContext, tokens: int) -> list[list[int]]:
    """Take whole documents of the store, in the order of a hash of their text, up to so many tokens."""
    documents = sorted(desk.store.documents(), key=lambda document: (document.sha256, document.number))
    found: list[list[int]] = []
    for document in documents:
        room = tokens - sum(map(len, found))
        if room <= 0:
            break
        rows = torch.arange(document.first_row, document.first_row + min(document.rows, room))
        found.append(desk.store.values(rows).tolist())
    return found


def _read_all(
    desk: ReportContext, documents: Sequence[Sequence[int]], sources: Sequence[Source], shape: WindowShape, what: str
) -> _Reading:
    return read_places(desk.mixture.readers, documents, sources, shape, progress=desk.progress, what=what)


def read_places(
    readers: Readers,
    documents: Sequence[Sequence[int]],
    sources: Sequence[Source],
    shape: WindowShape,
    *,
    progress: Progress,
    what: str,
) -> _Reading:
    """Read documents in one pass, and keep the keys at all places."""
    total = sum(map(len, documents))
    targets = torch.zeros(total, dtype=torch.long)
    keys: dict[Source, Tensor] = {}
    with progress(what, total=total, unit="tokens") as advance:
        for batch in readers.read(documents, shape, dict.fromkeys(sources, 0), batch_tokens=1024):
            targets[batch.rows] = batch.targets.cpu()
            for source in sources:
                seen = batch.context.states[source].float().cpu()
                if source not in keys:
                    keys[source] = torch.zeros(total, seen.shape[1])
                keys[source][batch.rows] = seen
            advance(len(batch.rows))
    return _Reading(keys, targets)


def _read_text(desk: ReportContext, read: Read, sources: list[Source], shape: WindowShape) -> tuple[Trace, _Reading]:
    """Read the first documents of a text again."""
    trace = read.begin(_TEXT[desk.quick]).trace
    starts = sorted({*trace.documents.tolist(), len(trace)})
    documents = [trace.targets[begin:end].tolist() for begin, end in pairwise(starts)]
    return trace, _read_all(desk, documents, sources, shape, "reading the text")


def _neighbours(index: ExactIndex, memory: _Reading, source: Source, trace: Trace, text: _Reading, *, k: int) -> Trace:
    found = index.search(text.keys[source], min(max(k, 1), len(memory.targets)))
    ids = found.ids.cpu()
    values = memory.targets[ids.clamp(min=0)].masked_fill(ids < 0, -1)
    return with_neighbours(trace, RetrievedNeighbours(ids, found.distances.cpu(), values))
