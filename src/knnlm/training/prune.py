"""Pruning of a store: fewer dimensions, merged keys, dropped keys.

After He et al. 2021, "Efficient Nearest Neighbor Language Models": principal components of the keys; a greedy merge of
near keys with the same next token, whose counts stay in the vote; and no keys for tokens that the language model
predicts well alone. Only keys are removed: all tokens of the text stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore.indexes import open_index
from knnlm.datastore.rewrite import check_out, derive, principal_components
from knnlm.datastore.store import Datastore
from knnlm.errors import ModelMismatch, ParameterError
from knnlm.index.base import Index
from knnlm.lm.causal import CausalLM
from knnlm.progress import Progress, silent

_KEYS_PER_SEARCH = 4096
_MIN_TOKENS_PER_READ = 8192


@dataclass(frozen=True)
class MergedKeys:
    """Result of a merge."""

    into: Tensor  # (K,) the key that each was merged into; itself if it stays; -1 if it was dropped before
    counts: Tensor  # (K,) float32: the number of contexts each remaining key stands for; 0 for the others

    @property
    def keep(self) -> Tensor:
        """The (K,) mask of the keys that stay."""
        return self.into == torch.arange(len(self.into))


def prune(
    store: Datastore,
    out: str | Path,
    *,
    width: int | None = None,
    merge: int | None = None,
    drop_known: float | None = None,
    log_p: Tensor | None = None,
    key_dtype: str | None = None,
    device: str = "cpu",
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write a smaller store and return how many keys were dropped and merged, and the sizes.

    `drop_known` drops keys whose token the language model gives at least this probability, by the `log_p` of each token
    (see `store_log_p`); then `merge` is the number of neighbours that each remaining key may be merged into; `width` is
    the number of principal components.
    """
    _check(store, width, merge, drop_known, log_p)
    check_out(store, out)
    alive = torch.ones(store.key_count, dtype=torch.bool)
    if drop_known is not None and log_p is not None:
        alive = ~known_keys(store, log_p, drop_known)
    keep, counts = alive, None
    if merge is not None:
        index = open_index(store, device=device)
        merged = merge_keys(store, index, neighbours=merge, alive=alive, seed=seed, progress=progress)
        keep, counts = merged.keep, merged.counts
    key_map = None if width is None else principal_components(store, width, seed=seed, progress=progress)
    done = {
        "settings": {"width": width, "merge": merge, "drop_known": drop_known, "seed": seed},
        "dropped": int((~alive).sum()),
        "merged": int(alive.sum()) - int(keep.sum()),
        "explained_variance": None if key_map is None else key_map.metadata["explained_variance"],
    }
    kept: dict[str, Any] = {} if keep.all() else {"keep": keep, "counts": counts}
    options: dict[str, Any] = {"key_map": key_map, "key_dtype": key_dtype, "metadata": done, "progress": progress}
    with closing(derive(store, out, **options, **kept)) as smaller:
        return {"tokens": store.entry_count, **_sizes(store, "before"), **_sizes(smaller, "after"), **done}


def _sizes(store: Datastore, when: str) -> dict[str, int]:
    return {f"keys_{when}": store.key_count, f"bytes_{when}": store.bytes}


def _check(
    store: Datastore, width: int | None, merge: int | None, drop_known: float | None, log_p: Tensor | None
) -> None:
    """Raise if the options are out of range, before anything slow begins."""
    if width is merge is drop_known is None:
        raise ParameterError("Nothing to prune: give --width, --merge or --drop-known.")
    if width is not None and not 1 <= width <= store.width:
        raise ParameterError(
            f"width must be from 1 to {store.width}, the width of the keys of {store.path}, not {width}."
        )
    if merge is not None and merge < 1:
        raise ParameterError(f"merge must be at least 1 neighbour, not {merge}.")
    if drop_known is None:
        return
    if not 0 < drop_known <= 1:
        raise ParameterError(f"drop-known must be a probability above 0 and at most 1, not {drop_known}.")
    if log_p is None or log_p.shape != (store.entry_count,):
        found = "none" if log_p is None else f"shape {tuple(log_p.shape)}"
        raise ParameterError(
            f"drop-known needs the log-probability of each of the {store.entry_count:,} tokens of {store.path}, not "
            f"{found}: see store_log_p."
        )


def known_keys(store: Datastore, log_p: Tensor, probability: float) -> Tensor:
    """Return which of the (K,) keys have a token of at least this probability, from the (N,) log-probabilities."""
    rows = store.entries_of(torch.arange(store.key_count))
    return log_p.cpu().double()[rows] >= math.log(probability)


def merge_keys(
    store: Datastore,
    index: Index,
    *,
    neighbours: int,
    alive: Tensor | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> MergedKeys:
    """Merge keys greedily: each, in a random order, into the nearest remaining neighbour with the same token.

    A key that others were merged into stays, so every key was a neighbour of the one it was merged into.
    """
    order = np.random.default_rng(seed).permutation(store.key_count)
    everything = torch.arange(store.key_count)
    tokens = store.values(store.entries_of(everything)).numpy()
    there = np.ones(store.key_count, dtype=bool) if alive is None else alive.cpu().numpy()
    into = np.where(there, np.arange(store.key_count), -1)
    found = store.counts(everything)
    counts = np.ones(store.key_count) if found is None else found.double().numpy()
    counts[~there] = 0
    grown = np.zeros(store.key_count, dtype=bool)
    with progress("merging keys", total=store.key_count, unit="keys") as advance:
        for begin in range(0, len(order), _KEYS_PER_SEARCH):
            block = order[begin : begin + _KEYS_PER_SEARCH]
            queries = block[there[block]]
            if len(queries):
                near = _neighbours(store, index, queries, neighbours)
                # Only neighbours with the same token matter, and they are few.
                near[(tokens[near] != tokens[queries][:, None]) | (near < 0)] = -1
                _merge_block(queries, near, into, counts, grown)
            advance(len(block))
    return MergedKeys(torch.from_numpy(into), torch.from_numpy(counts.astype(np.float32)))


def _neighbours(store: Datastore, index: Index, queries: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the (n, count) nearest other keys of these keys; -1 where there are fewer."""
    ids = torch.from_numpy(queries)
    found = index.search(store.take(ids), count + 1).ids.cpu()
    # The key itself is among them unless as many others are equally near; then drop the last one.
    own = found == ids[:, None]
    own[:, -1] |= ~own.any(1)
    return found[~own].reshape(len(queries), count).numpy()


def _merge_block(
    queries: NDArray[np.int64],
    near: NDArray[np.int64],
    into: NDArray[np.int64],
    counts: NDArray[np.float64],
    grown: NDArray[np.bool_],
) -> None:
    """Merge one block of keys in their order, updating `into`, `counts` and `grown` in place."""
    for place in np.flatnonzero((near >= 0).any(1)).tolist():
        key = int(queries[place])
        if grown[key]:
            continue
        for other in near[place].tolist():
            if other >= 0 and into[other] == other:
                into[key] = other
                counts[other] += counts[key]
                counts[key] = 0
                grown[other] = True
                break


def store_log_p(
    store: Datastore, lm: CausalLM, *, batch_tokens: int | None = None, progress: Progress = silent
) -> Tensor:
    """Return the (N,) log-probabilities that a language model gives the stored tokens."""
    if lm.identity["tokenizer"] != store.model["tokenizer"]:
        raise ModelMismatch(
            f"{store.path} has tokens of {store.model['name']}, but {lm.name} has another tokenizer. "
            f"Use {store.model['name']}."
        )
    if lm.vocab_size != store.model["vocab_size"]:
        raise ModelMismatch(
            f"{store.path} has tokens of {store.model['name']}, whose vocabulary has {store.model['vocab_size']:,}, "
            f"but that of {lm.name} has {lm.vocab_size:,}. Use {store.model['name']}."
        )
    window = lm.window(store.window["context"], store.window["stride"])
    batch_tokens = batch_tokens or (1024 if lm.device.type == "cpu" else 16_384)
    log_p = torch.full((store.entry_count,), -math.inf)
    with progress("reading the stored text", total=store.entry_count, unit="tokens") as advance:
        for first, tokens in _stored_text(store, lm, max(_MIN_TOKENS_PER_READ, 4 * batch_tokens)):
            for reading in lm.read(tokens, window, batch_tokens=batch_tokens):
                assert reading.logits is not None
                log_p[reading.rows + first] = _log_p(reading.logits, reading.targets).cpu()
                advance(len(reading.rows))
    return log_p


def _stored_text(store: Datastore, lm: CausalLM, group: int) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield (first row, tokens of each document) of some whole documents at a time."""
    documents = [(document.entries, document.source_text) for document in store.documents()]
    first, tokens, row = 0, list[list[int]](), 0
    for size, source_text in documents:
        tokens.append(lm.stored_document(store.values(torch.arange(row, row + size)).tolist(), source_text))
        row += size
        if row - first >= group:
            yield first, tokens
            first, tokens = row, []
    if row > first:
        yield first, tokens


def _log_p(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the (N,) log-probabilities of the targets, computed on a few rows of the (N, V) logits at a time."""
    parts = [
        rows.gather(1, wanted[:, None])[:, 0].float() - rows.float().logsumexp(1)
        for rows, wanted in zip(logits.split(128), targets.split(128), strict=True)
    ]
    return torch.cat(parts)
