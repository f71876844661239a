"""Open a decoder that stands for a memory: a model and nothing else, mixed with any model that has its tokenizer."""

from __future__ import annotations

import re
from pathlib import Path

from knnlm.errors import ParameterError
from knnlm.lm import CausalLM
from knnlm.memory import LMMemory
from knnlm.memory.decoder import CARD, DecoderCard, load_card
from knnlm.mixture.ingredients import Ingredients, Opened
from knnlm.mixture.readers import Readers
from knnlm.mixture.weights import share_equally

_SHARE = 0.5  # what a decoder weighs until it is tuned


def is_decoder(path: Path) -> bool:
    """Say whether a folder holds a decoder."""
    return (path / CARD).is_file()


def gather_decoder(
    folder: Path, lm: CausalLM | None, wanted: Ingredients, *, model: str | None, device: str, dtype: str
) -> Opened:
    """Open a decoder and the model that it helps."""
    card = load_card(folder)
    asked = wanted.memories, wanted.k, wanted.temperature, wanted.metric, wanted.skip
    if any(value is not None for value in asked) or not wanted.rerank or wanted.device_keys != "float16":
        raise ParameterError(
            f"{folder} is a decoder, which has no store: only --lambda and --model mean something. To mix it with "
            f"other memories, name it beside them: knnlm eval MEMORY TEXT --memory knn,lm={folder}"
        )
    if lm is None:
        lm = CausalLM.open(_helped(folder, card, model), device=device, dtype=dtype)
    readers = Readers(lm)
    memory = LMMemory(readers.add(CausalLM.open(str(folder), device=str(lm.device), dtype=lm.dtype)))
    tuned = None if wanted.fresh else card.weight
    weight = next(weight for weight in (wanted.weight, tuned, _SHARE) if weight is not None)
    # Its folder is known, so the last name is enough, also where a memory is copied; signs of a recipe are no names.
    label = f"lm={re.sub('[,:]', '_', folder.resolve().name)}"
    return Opened(readers, [memory], [label], share_equally([memory], weight), None, folder)


def _helped(folder: Path, card: DecoderCard, model: str | None) -> str:
    """Name the model to help: the one that is asked for, else the one that λ was tuned with."""
    known = (card.weight_facts or {}).get("model")
    if model is None and not isinstance(known, str):
        raise ParameterError(f"{folder} is a decoder: say which model it is to help with --model.")
    if model is None and Path(str(known)).is_absolute() and not Path(str(known)).exists():
        raise ParameterError(f"{folder} was tuned with {known}, which is not there any more: say with --model where.")
    return model or str(known)
