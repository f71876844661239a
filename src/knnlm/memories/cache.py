"""Earlier positions of the text being read vote for the next token.

The continuous cache (Grave et al. 2017): a text tends to repeat itself. The vote is that of a store, over the pairs
(key of an earlier position, token that followed it). Only given tokens vote: those of a chat template or a system
prompt never do, and those that the mixture generated only if `generated` is set, since each copy of its own output
would make the next copy more probable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from knnlm.errors import ParameterError
from knnlm.index.base import check_metric
from knnlm.memories.base import Context, Origin, Source, Span
from knnlm.memories.voting import NeighbourMemory, RetrievedNeighbours, VoteParams

WINDOW = 65_536  # positions: all of most texts

_MAX_PADDING = 2  # times the stored positions of a batch may be padded to, to search all of its texts at once
_MAX_CPU_NUMBERS = 1 << 20  # in the padded keys of such a batch


class CacheMemory(NeighbourMemory):
    """The last positions of the text, as a small store."""

    name = "cache"

    def __init__(
        self,
        *,
        vocab_size: int,
        window: int = WINDOW,
        k: int = 1024,
        knn_temperature: float = 2.0,
        metric: str = "l2",
        others: Sequence[VoteParams] = (),
        source: Source | None = None,
        generated: bool = False,
    ) -> None:
        check_metric(metric)
        if window < 1:
            raise ParameterError(f"the cache's window must be at least 1 position, not {window}.")
        self.vocab_size = vocab_size
        self.history_length = window
        self.metric = metric
        self.settings = (VoteParams(k, knn_temperature), *others)
        self.source = source or Source()
        self.generated = generated

    def retrieve(self, context: Context, k: int | None = None) -> RetrievedNeighbours:
        """Return the nearest earlier positions of each position in its own text; ids count from its beginning."""
        k = min(k or self.max_k, self.history_length)
        keys = context.states[self.source]
        neighbours = RetrievedNeighbours.empty(len(keys), k, device=keys.device)
        if len(context.spans) > 1 and all(len(span) == 1 for span in context.spans):  # a batch that is generated
            pasts = [self._past(span, keys) for span in context.spans]
            lengths = [len(past) for past in pasts]
            padded = max(lengths) * len(lengths)
            # On a CPU, passes over more than its cache take longer than the loop.
            fits = keys.device.type != "cpu" or padded * keys.shape[1] <= _MAX_CPU_NUMBERS
            if fits and padded <= _MAX_PADDING * sum(lengths):
                self._search_batch(context.spans, pasts, keys, neighbours)
                return neighbours
        for rows, span in context.each_span():
            out = RetrievedNeighbours(neighbours.ids[rows], neighbours.distances[rows], neighbours.values[rows])
            self._search_span(span, keys[rows], out)
        return neighbours

    def _search_span(self, span: Span, keys: Tensor, out: RetrievedNeighbours) -> None:
        """Fill in the neighbours of one span's positions."""
        past = self._past(span, keys)
        stored = torch.cat([past, keys])[:-1]  # (S, D): no position comes after the last one
        if not len(stored):
            return
        first = span.start - len(past)
        distances = self._distances(keys, stored, stored.mean(0))  # (n, S)
        # Positions that are not before the query, and those outside the window.
        hidden = torch.ones(distances.shape, dtype=torch.bool, device=keys.device).triu_(len(past))
        if len(stored) > self.history_length:
            hidden |= torch.ones_like(hidden).tril_(len(past) - self.history_length - 1)
        if span.origins is not None:
            following = span.origins[first + 1 : first + 1 + len(stored)].to(keys.device)
            hidden |= following > (Origin.GENERATED if self.generated else Origin.GIVEN)
        distances.masked_fill_(hidden, torch.inf)
        k = min(out.ids.shape[1], len(stored))
        nearest, columns = distances.topk(k, largest=False)
        there = nearest.isfinite()
        ids = columns + first
        tokens = span.tokens.to(keys.device)
        out.distances[:, :k] = nearest
        out.ids[:, :k] = ids.masked_fill(~there, -1)
        out.values[:, :k] = tokens[ids + 1].masked_fill(~there, -1)

    def _search_batch(
        self, spans: Sequence[Span], pasts: Sequence[Tensor], keys: Tensor, out: RetrievedNeighbours
    ) -> None:
        """Fill in the neighbours of spans of one position each, all at once: a loop would launch kernels for each."""
        if not any(map(len, pasts)):
            return
        device = keys.device
        counts = [len(past) for past in pasts]
        begins = [span.start - count + 1 for span, count in zip(spans, counts, strict=True)]
        lengths, first = torch.tensor([counts, begins], device=device)
        columns = torch.arange(max(counts), device=device)
        hidden = columns >= lengths[:, None]  # (B, S)
        places = (columns + (lengths.cumsum(0) - lengths)[:, None]).clamp_(max=sum(counts) - 1)  # in what is joined
        stored = torch.cat(list(pasts))[places].masked_fill_(hidden[:, :, None], 0)  # (B, S, D)

        def following(rows: Sequence[Tensor]) -> Tensor:
            """Return what is after each stored position, (B, S)."""
            own = [row[begin : begin + count] for row, begin, count in zip(rows, begins, counts, strict=True)]
            return torch.cat(own).to(device)[places]

        values = following([span.tokens for span in spans])
        if any(span.origins is not None for span in spans):
            origins = [torch.zeros_like(span.tokens) if span.origins is None else span.origins for span in spans]
            hidden |= following(origins) > (Origin.GENERATED if self.generated else Origin.GIVEN)
        centres = stored.sum(1, keepdim=True) / lengths.clamp(min=1)[:, None, None]
        distances = self._distances(keys[:, None], stored, centres)[:, 0].masked_fill_(hidden, torch.inf)  # (B, S)
        k = min(out.ids.shape[1], stored.shape[1])
        nearest, nearest_columns = distances.topk(k, largest=False)
        there = nearest.isfinite()
        out.distances[:, :k] = nearest
        out.ids[:, :k] = (nearest_columns + (first - 1)[:, None]).masked_fill(~there, -1)
        out.values[:, :k] = values.gather(1, nearest_columns).masked_fill(~there, -1)

    def _past(self, span: Span, keys: Tensor) -> Tensor:
        """Return the (P, D) keys of the positions before a span that are in the window."""
        past = span.past.get(self.source)
        if past is None:
            return keys[:0]
        return (past if len(past) <= self.history_length else past[-self.history_length :]).to(keys)

    def _distances(self, queries: Tensor, stored: Tensor, centre: Tensor) -> Tensor:
        """Return the (…, n, S) distances of (…, n, D) queries to (…, S, D) stored keys, with their mean."""
        if self.metric == "ip":
            return -(queries @ stored.mT)
        # Subtract the mean: small differences of long vectors would lose their digits.
        queries, stored = queries - centre, stored - centre
        products = queries @ stored.mT
        squares = queries.square().sum(-1)[..., None] + stored.square().sum(-1)[..., None, :]
        return (squares - 2 * products).clamp_(min=0)
