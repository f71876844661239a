"""A language model and its memory, mixed. Knows nothing about evaluation or generation, which only see this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from knnlm.datastore import Datastore, open_index
from knnlm.errors import ModelMismatch
from knnlm.index.base import check_metric
from knnlm.lm import CausalLM, WindowShape
from knnlm.lm.fingerprint import config_difference, same_weights
from knnlm.memory import Context, KnnMemory, Logits, Prediction, check_vote
from knnlm.mixture.fixed import Mixed, check_lambda, mix

# What a memory is used with until it is tuned.
DEFAULTS: dict[str, Any] = {"k": 1024, "temperature": 2.0, "lambda": 0.25}


class Mixture:
    """p = (1-λ)·p_LM + λ·p_kNN."""

    def __init__(self, lm: CausalLM, memory: KnnMemory, *, weight: float = DEFAULTS["lambda"]) -> None:
        check_lambda(weight)
        check_model(memory.store, lm)
        self.lm = lm
        self.memory = memory
        self.weight = weight

    @classmethod
    def open(
        cls,
        path: str | Path,
        lm: CausalLM | None = None,
        *,
        k: int | None = None,
        temperature: float | None = None,
        weight: float | None = None,
        metric: str | None = None,
        rerank: bool = True,
        device: str = "auto",
        dtype: str = "auto",
    ) -> Mixture:
        """Open a memory with the model it was built with, and with the settings it was tuned to.

        What is given here is used instead of what was tuned; where neither is there, the defaults are.
        """
        check_settings(k=k, temperature=temperature, weight=weight, metric=metric)
        store = Datastore.open(path)
        chosen = dict(DEFAULTS)
        tuned = store.catalog.get("choice") or {"metric": "l2"}
        if metric in (None, tuned["metric"]):  # distances of another metric are on another scale
            chosen |= tuned
        lm = lm or open_reader(store, device=device, dtype=dtype)
        metric = metric or chosen.get("metric", "l2")
        memory = KnnMemory(
            store,
            open_index(store, metric=metric, rerank=rerank, device=str(lm.device)),
            k=k if k is not None else chosen["k"],
            temperature=temperature if temperature is not None else chosen["temperature"],
        )
        return cls(lm, memory, weight=weight if weight is not None else chosen["lambda"])

    @property
    def window(self) -> WindowShape:
        """The window that the store was read with; evaluation uses the same."""
        return WindowShape(**self.memory.store.window)

    def predict(self, logits: Tensor, keys: Tensor) -> Mixed:
        """Mix what the model says, (N, V) logits, with what the memory says of (N, D) keys."""
        return self.mix(logits, self.memory.predict(Context(keys)))

    def mix(self, logits: Tensor, votes: Prediction) -> Mixed:
        """Mix what the model says with votes that are there already."""
        return mix([Logits(logits), votes], [1 - self.weight, self.weight])


def check_settings(*, k: int | None, temperature: float | None, weight: float | None, metric: str | None) -> None:
    """Refuse wrong settings before anything large is opened; None is what was tuned."""
    check_vote(DEFAULTS["k"] if k is None else k, DEFAULTS["temperature"] if temperature is None else temperature)
    check_lambda(DEFAULTS["lambda"] if weight is None else weight)
    check_metric(metric or "l2")


def open_reader(store: Datastore, *, name: str | None = None, device: str = "auto", dtype: str = "auto") -> CausalLM:
    """Open the model that a store was built with, at the place its keys come from."""
    return CausalLM.open(
        name or store.model["name"],
        key_layer=store.model["key_layer"],
        layer=store.model["layer"],
        device=device,
        dtype=dtype,
    )


def check_model(store: Datastore, lm: CausalLM) -> None:
    """Refuse a model whose keys mean nothing to the store."""
    found, given = store.model, lm.identity
    for what in ("tokenizer", "width", "vocab_size", "start_token", "key_layer", "layer"):
        if found.get(what) != given[what]:
            _refuse(store, given, what, found.get(what), given[what])
    if (field := config_difference(found["config"], given["config"])) is not None:
        _refuse(store, given, f"config's {field}", found["config"][field], given["config"][field])
    if not same_weights(found["weights"], given["weights"]):
        _refuse(store, given, "weights", found["weights"].get("float32"), given["weights"]["float32"])


def _refuse(store: Datastore, given: dict[str, Any], what: str, found: Any, now: Any) -> None:
    raise ModelMismatch(
        f"{store.path} was built with {store.model['name']} ({what.replace('_', ' ')} {found}), but the loaded "
        f"model is {given['name']} ({what.replace('_', ' ')} {now}). Open it with --model "
        f"{store.model['name']}, or rebuild it."
    )
