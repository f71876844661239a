"""Store the keys of a finished memory in fewer bytes, as a copy. Knows nothing about what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from knnlm.datastore.codec import Plain
from knnlm.datastore.coding import fit_codec, parse_storage
from knnlm.datastore.components import sample_keys
from knnlm.datastore.derive import check_out, derive
from knnlm.datastore.store import Datastore
from knnlm.errors import ParameterError
from knnlm.progress import Progress, silent

_SAMPLE = 1 << 27  # bytes of keys, in float32, that a codec is fitted to
_BLOCK = 4096  # keys at a time


def compress(
    store: Datastore, out: str | Path, *, keys: str = "codes", seed: int = 0, progress: Progress = silent
) -> Datastore:
    """Write a copy of a memory whose keys are stored as int8, pca256-int8, codes64 and so on, and open it.

    The codec is fitted to keys from all over the memory, where that of a build knows only the first ones.
    """
    storage = parse_storage(keys, width=store.width)
    check_out(store, out)
    if not store.key_count:
        raise ParameterError(f"{store.path} has no keys to compress.")
    facts: dict[str, Any] = {"keys": str(storage), "seed": seed}
    if not storage.fitted:
        return derive(store, out, codec=Plain(storage.dtype, store.width), facts=facts, progress=progress)
    ids = sample_keys(store, max(1, _SAMPLE // (4 * store.width)), seed=seed)
    sample = torch.empty(len(ids), store.width)
    with progress("choosing a codec", total=len(ids), unit="keys") as advance:
        for begin in range(0, len(ids), _BLOCK):
            sample[begin : begin + _BLOCK] = store.take(ids[begin : begin + _BLOCK])
            advance(len(ids[begin : begin + _BLOCK]))
    key_map, codec = fit_codec(storage, sample)
    del sample
    return derive(store, out, key_map=key_map, codec=codec, facts=facts, progress=progress)
