"""Go on with a training from what was last saved of it. Knows nothing about what is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from knnlm.distill.settings import check_same
from knnlm.errors import DatastoreCorrupt
from knnlm.memory.output import load_tensors

_Course = TypeVar("_Course")


def restore(
    path: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], course: Callable[..., _Course]
) -> _Course | None:
    """Put what was saved into these tensors and give how far it was, None where nothing was saved."""
    if not path.exists():
        return None
    saved, facts = load_tensors(path)
    check_same(path, facts.get("settings"), settings)
    try:
        found = course(**facts["course"])
        for name, tensor in tensors.items():
            if saved[name].shape != tensor.shape:
                raise ValueError(f"{name} is {tuple(saved[name].shape)} instead of {tuple(tensor.shape)}")
            tensor.copy_(saved[name])
    except (KeyError, TypeError, ValueError) as error:
        raise DatastoreCorrupt(f"{path} is no checkpoint of this training ({error}). Remove it.") from None
    return found
