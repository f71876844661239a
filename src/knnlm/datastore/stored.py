"""What the catalog of a memory says about its keys. Knows nothing about the keys themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knnlm.datastore.codec import FILE as CODEC
from knnlm.datastore.codec import Codec, Plain, load_codec
from knnlm.datastore.keymap import FILE as MAP
from knnlm.datastore.keymap import KeyMap
from knnlm.datastore.ledger import Ledger
from knnlm.errors import DatastoreCorrupt

_WIDEST = 1 << 24  # that a hidden state may be


def stored_offset(catalog: Ledger) -> Tensor | None:
    """Give what was taken from every key before it was stored, None where nothing was."""
    offset = catalog.get("offset")
    if offset is None:
        return None
    width = reader_width(catalog)
    try:
        found = torch.tensor(offset, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        found = torch.zeros(0)
    if found.shape != (width,) or not found.isfinite().all():
        raise DatastoreCorrupt(
            f"{catalog.path}: the offset of the keys is not {width} finite numbers. Build the memory again."
        )
    return found


def stored_map(catalog: Ledger, width: int) -> KeyMap | None:
    """Give the linear map that keys of this width went through before they were stored, None where there is none."""
    found = catalog.get("map")
    if found is None:
        return None
    facts = found if isinstance(found, dict) else {}
    sha256, about = facts.get("sha256"), facts.get("facts")
    if not isinstance(sha256, str) or not isinstance(about, dict):
        raise DatastoreCorrupt(f"{catalog.path} does not say which map the keys went through. Make the memory again.")
    made = KeyMap.load(catalog.path.with_name(MAP), sha256=sha256, facts=about)
    if len(made.centre) != width:
        raise DatastoreCorrupt(
            f"{catalog.path.with_name(MAP)} maps keys of width {len(made.centre)}, but those of the model have "
            f"{width}. Make the memory again."
        )
    return made


def stored_codec(catalog: Ledger, width: int) -> Codec:
    """Give what keys of this width are stored as."""
    found = catalog.get("codec")
    if found is None:
        # Keys that wait for a codec, which is chosen by them, do so as float16.
        return Plain("float16" if catalog.get("keys") is not None else fact(catalog, "key_dtype", str), width)
    codec = load_codec(catalog.path.with_name(CODEC), found, width=width)
    if codec.dtype != (said := fact(catalog, "key_dtype", str)):
        raise DatastoreCorrupt(
            f"{catalog.path} says that keys are stored as {said[:20]!r}, but the codec beside it stores "
            f"{codec.dtype}. Make the memory again."
        )
    return codec


def reader_width(catalog: Ledger) -> int:
    """Give the width of the reader's hidden states."""
    width = fact(catalog, "model", dict).get("width")
    if not isinstance(width, int) or not 1 <= width <= _WIDEST:
        raise DatastoreCorrupt(f"{catalog.path} does not say the width of the model. Build the memory again.")
    return width


def fact(catalog: Ledger, key: str, kind: type) -> Any:
    """Read a fact that every memory has."""
    value = catalog.get(key)
    if not isinstance(value, kind):
        raise DatastoreCorrupt(f"{catalog.path} does not say the memory's {key}. Build the memory again.")
    return value
