"""Open what a mixture is made of: stores, indexes, models, and the weights that were tuned for them.

Open a decoder that stands for a memory: a model and nothing else, mixed with any model that has its tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from knnlm.datastore.catalog import LANGUAGE_MODEL
from knnlm.datastore.indexes import open_index
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, DatastoreError, ModelError, ModelMismatch, ParameterError
from knnlm.lm.causal import CausalLM
from knnlm.lm.fingerprint import LANGUAGE, difference
from knnlm.memories.base import Memory, Source
from knnlm.memories.cache import WINDOW, CacheMemory
from knnlm.memories.decoder import CARD, DecoderCard, DecoderMemory, load_card
from knnlm.memories.knn import KnnMemory
from knnlm.memories.ngram import NgramMemory
from knnlm.memories.output import OUTPUT_FILE, OutputMemory
from knnlm.memories.voting import VoteParams
from knnlm.mixture.options import DEFAULTS, LoadedMixture, MixtureOptions
from knnlm.mixture.readers import Readers
from knnlm.mixture.saved import load_tuning, load_weights, tuned_settings
from knnlm.mixture.spec import MemorySpec, parse_memories, resolve
from knnlm.mixture.weights import equal_weights, first_components


def load_mixture(
    memory: Path | Datastore,
    lm: CausalLM | None,
    wanted: MixtureOptions,
    *,
    model: str | None,
    device: str,
    dtype: str,
) -> LoadedMixture:
    """Open a memory, the models it needs, and everything that is mixed."""
    wanted.check()
    if not isinstance(memory, Datastore) and is_decoder(memory):
        return load_decoder_mixture(memory, lm, wanted, model=model, device=device, dtype=dtype)
    store = memory if isinstance(memory, Datastore) else Datastore.open(memory)
    specs, weights_facts = _choose(store, wanted)
    specs = _override(specs, wanted)
    if lm is None:
        lm = open_reader(store, name=model or language_model(store), device=device, dtype=dtype)
    kitchen = _Loader(store, Readers(lm), wanted, dtype)
    memories = [kitchen.open(spec) for spec in specs]
    if weights_facts is not None:
        folder = wanted.written.folder if wanted.written is not None else store.path
        weights = load_weights(weights_facts, folder, memories, vocab_size=lm.vocab_size, skip=wanted.skip)
    elif specs[0].weight is not None:  # on the command line
        given = [spec.weight or 0.0 for spec in specs]
        weights = first_components(memories, 1 - sum(given), given)
    else:
        weights = equal_weights(memories, DEFAULTS["lambda"] if wanted.lmbda is None else wanted.lmbda)
    if wanted.skip and getattr(weights, "skip", None) is None:
        raise ParameterError("Only a gate can skip searches. Tune the memory with --weights gated first.")
    return LoadedMixture(kitchen.readers, memories, [spec.label for spec in specs], weights, store, store.path)


def _choose(store: Datastore, wanted: MixtureOptions) -> tuple[list[MemorySpec], dict[str, Any] | None]:
    """Say which memories are mixed, and by which weights; None: share λ equally."""
    if wanted.written is not None:
        return list(wanted.written.specs), wanted.written.weights
    overridden = (wanted.k, wanted.knn_temperature, wanted.lmbda) != (None, None, None)
    if wanted.memories is not None:
        asked: list[MemorySpec] | None = resolve(parse_memories(wanted.memories), store.path)
    else:
        asked = [MemorySpec("knn")] if overridden else None  # k, τ and λ are those of the paper's kNN-LM
    choice = None if wanted.fresh else load_tuning(store, asked)
    # Distances of another metric are on another scale, so nothing of the choice is of use.
    if choice is not None and any(
        wanted.metric not in (None, spec.metric) for spec in choice.specs if spec.kind == "knn"
    ):
        choice = None
    if choice is None:
        specs = asked or [MemorySpec("knn")]
        if wanted.fresh:
            return specs, None
        # Tuned among others, or not at all.
        return [tuned_settings(store, replace(spec, metric=wanted.metric)) for spec in specs], None
    if asked is not None and any(spec.weight is not None for spec in asked):
        weights = {spec.label: spec.weight for spec in asked}
        return [replace(spec, weight=weights[spec.label], settings=spec.settings[:1]) for spec in choice.specs], None
    if wanted.lmbda is not None or (overridden and choice.weights["kind"] != "fixed"):
        return [replace(spec, settings=spec.settings[:1]) for spec in choice.specs], None
    return choice.specs, choice.weights


def _override(specs: list[MemorySpec], wanted: MixtureOptions) -> list[MemorySpec]:
    """Let k and τ be what is asked for, where it is clear whose."""
    if wanted.k is None and wanted.knn_temperature is None:
        return specs
    polls = [number for number, spec in enumerate(specs) if spec.kind in ("knn", "cache")]
    own = [number for number in polls if (specs[number].kind, specs[number].path) == ("knn", None)]
    if not own and len(polls) != 1:
        raise ParameterError(
            "k and knn_temperature are those of the memory's own store, or of the only memory that has neighbours; "
            f"{', '.join(spec.label for spec in specs)} has {len(polls)}. Tune them instead."
        )
    number = own[0] if own else polls[0]
    main, *others = specs[number].settings or (VoteParams(DEFAULTS["k"], DEFAULTS["knn_temperature"]),)
    main = VoteParams(
        main.k if wanted.k is None else wanted.k,
        main.knn_temperature if wanted.knn_temperature is None else wanted.knn_temperature,
    )
    return [replace(spec, settings=(main, *others)) if n == number else spec for n, spec in enumerate(specs)]


class _Loader:
    """Opens one memory after another; models that several need are opened once."""

    def __init__(self, store: Datastore, readers: Readers, wanted: MixtureOptions, dtype: str) -> None:
        self.store = store
        self.readers = readers
        self.wanted = wanted
        self.dtype = dtype

    @property
    def lm(self) -> CausalLM:
        return self.readers.models[0]

    def open(self, spec: MemorySpec) -> Memory:
        """Open the memory that a line of a recipe names."""
        if spec.kind == "knn":
            return self._knn(spec)
        if spec.kind == "cache":
            return self._cache(spec)
        if spec.kind == "ngram":
            return NgramMemory.open(self._store(spec))
        return self._lm(spec) if spec.kind == "lm" else self._output(spec)

    def _knn(self, spec: MemorySpec) -> KnnMemory:
        store = self._store(spec)
        if store.window != self.store.window:
            raise ParameterError(
                f"{store.path} was read in windows of {store.window}, but {self.store.path} in windows of "
                f"{self.store.window}, and a text is read in one way. Build one of them again with the other's "
                "--context and --stride."
            )
        main, *others = spec.settings or [VoteParams(DEFAULTS["k"], DEFAULTS["knn_temperature"])]
        metric = self.wanted.metric or spec.metric or "l2"
        index = open_index(
            store,
            metric=metric,
            rerank=self.wanted.rerank,
            device=str(self.lm.device),
            keys=self.wanted.device_keys,
        )
        return KnnMemory(
            store, index, k=main.k, knn_temperature=main.knn_temperature, others=others, source=self._source(store)
        )

    def _cache(self, spec: MemorySpec) -> CacheMemory:
        main, *others = spec.settings or [VoteParams(DEFAULTS["k"], DEFAULTS["knn_temperature"])]
        place = self.lm.key_layer
        return CacheMemory(
            window=WINDOW if spec.path is None else int(spec.path),
            vocab_size=self.lm.vocab_size,
            k=main.k,
            knn_temperature=main.knn_temperature,
            metric=spec.metric or "l2",
            others=others,
            source=Source(0, place.place, place.layer),
        )

    def _lm(self, spec: MemorySpec) -> DecoderMemory:
        assert spec.path is not None
        path = self._path(spec.path)
        # The reader of a store may be a memory itself; it is open then.
        known = [model.name for model in self.readers.models]
        if (name := str(Path(path).resolve())) in known:
            return DecoderMemory(known.index(name))
        return DecoderMemory(self.readers.add(CausalLM.open(path, device=str(self.lm.device), dtype=self.dtype)))

    def _output(self, spec: MemorySpec) -> OutputMemory:
        path = self.store.path / "output" if spec.path is None else Path(self._path(spec.path))
        if not (path / OUTPUT_FILE).exists():
            raise DatastoreError(
                f"{path} is not there: the memory has no output matrix yet. Train one: knnlm distill "
                f"{self.store.path} --into output"
            )
        memory = OutputMemory.open(path, device=str(self.lm.device))
        number = self.readers.find(memory.card.model)
        if number is None:
            wrong = difference(memory.card.model, self.lm.identity) or ("model", "?", "?")
            raise ModelMismatch(
                f"{path} was trained on states of {memory.card.model['name']} ({wrong[0]} {wrong[1]}), but the loaded "
                f"model is {self.lm.name} ({wrong[0]} {wrong[2]}). Train one for it: knnlm distill --into output"
            )
        if spec.identity not in (None, identity_of(memory)):
            raise DatastoreError(
                f"{path} is another matrix than the one the weights were tuned with. Tune again: knnlm tune "
                f"{self.store.path} TEXT"
            )
        memory.source = Source(number, memory.card.model["key_layer"], memory.card.model["layer"])
        return memory

    def _store(self, spec: MemorySpec) -> Datastore:
        return self.store if spec.path is None else Datastore.open(self._path(spec.path))

    def _path(self, path: str) -> str:
        """Find a path within the memory, or as it is."""
        inside = self.store.path / path
        return str(inside) if inside.exists() else path

    def _source(self, store: Datastore) -> Source:
        """Say where a store's keys come from, and open the model that gives them if it is not open yet."""
        number = self.readers.find(store.model)
        if number is None:
            wrong = difference(store.model, self.lm.identity)
            assert wrong is not None
            if wrong[0] in LANGUAGE:
                raise _mismatch(store, self.lm, *wrong)
            try:
                reader = open_reader(store, device=str(self.lm.device), dtype=self.dtype)
            except ModelError as error:
                raise _mismatch(store, self.lm, *wrong, more=f" ({error})") from None
            check_model(store, reader)
            number = self.readers.add(reader)
        return Source(number, store.model["key_layer"], store.model["layer"])


def specs_of(memories: Sequence[Memory], labels: Sequence[str], lm: CausalLM) -> list[MemorySpec]:
    """Write down which memories these are; refuse those that could not be opened again from it."""
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ParameterError(f"Two memories are called {twice}. Name them by what they are opened from: knn=FOLDER.")
    return [_write(memory, label, lm) for memory, label in zip(memories, labels, strict=True)]


def _write(memory: Memory, label: str, lm: CausalLM) -> MemorySpec:
    (spec,) = parse_memories(label)
    if spec.kind != memory.name:
        raise ParameterError(f"A memory of the kind {memory.name} is called {label}.")
    if isinstance(memory, KnnMemory):
        return replace(spec, settings=tuple(memory.settings), metric=memory.metric)
    if not isinstance(memory, CacheMemory):
        return replace(spec, identity=identity_of(memory))
    place = (lm.key_layer.place, lm.key_layer.layer)
    if memory.source.reader or (memory.source.place, memory.source.layer % lm.key_layer.layers) != place:
        raise ParameterError("A cache over other states than the language model's key layer cannot be written down.")
    window = None if memory.history_length == WINDOW else str(memory.history_length)
    return replace(spec, path=window, settings=tuple(memory.settings), metric=memory.metric)


def identity_of(memory: Memory) -> str | None:
    """Say which one a memory is, of a kind that can be made anew in the same place."""
    if not isinstance(memory, OutputMemory):
        return None
    return hashlib.sha256(json.dumps(asdict(memory.card), sort_keys=True, default=str).encode()).hexdigest()[:16]


def open_reader(store: Datastore, *, name: str | None = None, device: str = "auto", dtype: str = "auto") -> CausalLM:
    """Open the model that a store was built with, at the place its keys come from, or another one by its name."""
    # One that is named may have fewer layers than the store's reader, and need not be that reader.
    layer = store.model["layer"] if name is None else -1
    return CausalLM.open(
        reader_name(store) if name is None else name,
        key_layer=store.model["key_layer"],
        layer=layer,
        device=device,
        dtype=dtype,
    )


def language_model(store: Datastore) -> str | None:
    """Name the model that a memory is for, where that is not the one that reads it."""
    name = store.catalog.get(LANGUAGE_MODEL)
    if name is not None and (not isinstance(name, str) or not name):
        raise DatastoreCorrupt(f"{store.path} does not say properly which model it is for. Say it with --model.")
    return name


def reader_name(store: Datastore) -> str:
    """Name the model that reads a store; one that lies in the memory's own folder moves with it."""
    name = str(store.model["name"])
    inside = store.path / Path(name).name
    return str(inside) if (inside / "config.json").is_file() else name


def check_model(store: Datastore, lm: CausalLM, *, place: Source | None = None) -> None:
    """Refuse a model whose keys mean nothing to the store."""
    found = store.model
    if place is not None and (place.place, place.layer) != (found["key_layer"], found["layer"]):
        own, given = f"{found['key_layer']} {found['layer']}", f"{place.place} {place.layer}"
        raise _mismatch(store, lm, "key layer", own, given)
    if (wrong := difference(found, lm.identity)) is not None:
        raise _mismatch(store, lm, *wrong)


def _mismatch(store: Datastore, lm: CausalLM, what: str, found: Any, now: Any, *, more: str = "") -> ModelMismatch:
    what = what.replace("_", " ")
    return ModelMismatch(
        f"{store.path} was built with {store.model['name']} ({what} {found}), but the loaded model is {lm.name} "
        f"({what} {now}). Open it with --model {store.model['name']}, or rebuild it.{more}"
    )


_SHARE = 0.5  # what a decoder weighs until it is tuned


def is_decoder(path: Path) -> bool:
    """Say whether a folder holds a decoder."""
    return (path / CARD).is_file()


def load_decoder_mixture(
    folder: Path, lm: CausalLM | None, wanted: MixtureOptions, *, model: str | None, device: str, dtype: str
) -> LoadedMixture:
    """Open a decoder and the model that it helps."""
    card = load_card(folder)
    asked = wanted.memories, wanted.k, wanted.knn_temperature, wanted.metric, wanted.skip
    if any(value is not None for value in asked) or not wanted.rerank or wanted.device_keys != "float16":
        raise ParameterError(
            f"{folder} is a decoder, which has no store: only --lambda and --model mean something. To mix it with "
            f"other memories, name it beside them: knnlm eval MEMORY TEXT --memory knn,lm={folder}"
        )
    if lm is None:
        lm = CausalLM.open(_helped(folder, card, model), device=device, dtype=dtype)
    readers = Readers(lm)
    memory = DecoderMemory(readers.add(CausalLM.open(str(folder), device=str(lm.device), dtype=lm.dtype)))
    tuned = None if wanted.fresh else card.lmbda
    lmbda = next(lmbda for lmbda in (wanted.lmbda, tuned, _SHARE) if lmbda is not None)
    # Its folder is known, so the last name is enough, also where a memory is copied; signs of a recipe are no names.
    label = f"lm={re.sub('[,:]', '_', folder.resolve().name)}"
    return LoadedMixture(readers, [memory], [label], equal_weights([memory], lmbda), None, folder)


def _helped(folder: Path, card: DecoderCard, model: str | None) -> str:
    """Name the model to help: the one that is asked for, else the one that λ was tuned with."""
    known = (card.lmbda_facts or {}).get("model")
    if model is None and not isinstance(known, str):
        raise ParameterError(f"{folder} is a decoder: say which model it is to help with --model.")
    if model is None and Path(str(known)).is_absolute() and not Path(str(known)).exists():
        raise ParameterError(f"{folder} was tuned with {known}, which is not there any more: say with --model where.")
    return model or str(known)
