"""Open what a mixture consists of: stores, indexes, models, decoders, and the weights that were tuned for them."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from knnlm.datastore.catalog import LANGUAGE_MODEL
from knnlm.datastore.indexes import open_index
from knnlm.datastore.schema import CATALOG_FILE
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, DatastoreError, KnnlmWarning, ModelError, ModelMismatch, ParameterError
from knnlm.index.base import Index
from knnlm.lm.adapters import AdapterSet, has_adapters
from knnlm.lm.causal import CausalLM
from knnlm.lm.fingerprint import identity_difference, token_fields
from knnlm.lm.loading import has_encoder, verify_checksums
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.lm.speech import SpeechLM, open_lm
from knnlm.memories.automaton import Automaton
from knnlm.memories.base import Memory, Source
from knnlm.memories.cache import WINDOW, CacheMemory
from knnlm.memories.decoder import CARD, DecoderCard, DecoderMemory, load_card
from knnlm.memories.knn import KnnMemory
from knnlm.memories.ngram import NgramMemory
from knnlm.memories.ngram_cache import NgramCacheMemory
from knnlm.memories.output import OUTPUT_FILE, OutputMemory
from knnlm.memories.subset import PairSubsetIndex
from knnlm.memories.voting import VoteParams
from knnlm.mixture.online import OnlineConfig
from knnlm.mixture.readers import Readers
from knnlm.mixture.saved import (
    load_end_odds,
    load_source_domain,
    load_support,
    load_tuning,
    load_weights,
    tuned_settings,
)
from knnlm.mixture.source_domain import SourceDomain
from knnlm.mixture.spec import DEFAULTS, MemorySpec, MixtureRequest, parse_memories, resolve
from knnlm.mixture.support import SupportModel
from knnlm.mixture.weights import Weights, equal_weights, first_components

_DECODER_LAMBDA = 0.5  # of a decoder until it is tuned


@dataclass(frozen=True)
class LoadedMixture:
    """Everything that a mixture consists of."""

    readers: Readers
    memories: list[Memory]
    labels: list[str]
    weights: Weights
    store: Datastore | None  # with the windows that texts are read in, and the saved tuning
    path: Path  # that all of it was opened from
    online: OnlineConfig | None = None
    support: SupportModel | None = None
    source_domain: SourceDomain | None = None
    end_odds: float = 1.0
    by_store: tuple[LoadedMixture, ...] = ()  # each store of pairs alone, as it was tuned


def load_mixture(
    path: Path | Datastore, lm: CausalLM | None, request: MixtureRequest, before: Sequence[Memory] = ()
) -> LoadedMixture:
    """Open a store or a decoder, the models it needs, and every memory.

    `before` are the memories that were opened with the same model before the store changed.
    """
    if not isinstance(path, Datastore) and is_decoder(path):
        return load_decoder(path, lm, request)
    store = path if isinstance(path, Datastore) else Datastore.open(path)
    specs, stored_weights = _choose(store, request)
    specs = _override(specs, request)
    options = request.options
    if lm is None:
        name = options.model or language_model(store)
        lm = open_reader(store, name=name, device=options.device, dtype=options.dtype)
    loader = _Loader(store, Readers(lm), request, before)
    if stored_weights is None and (by_store := _load_by_store(loader, specs, request)):
        memories = [memory for own in by_store for memory in own.memories]
        labels = [label for own in by_store for label in own.labels]
        shared = equal_weights(memories, DEFAULTS["lambda"])
        return LoadedMixture(loader.readers, memories, labels, shared, store, store.path, by_store=by_store)
    memories = [loader.open(spec) for spec in specs]
    weights = _weights(store, specs, memories, stored_weights, request, vocab_size=lm.vocab_size)
    tuned = {} if stored_weights is None else _tuned(stored_weights, _folder(store, request), memories, request)
    return LoadedMixture(loader.readers, memories, [spec.label for spec in specs], weights, store, store.path, **tuned)


def _tuned(stored: dict[str, Any], folder: Path, memories: Sequence[Memory], request: MixtureRequest) -> dict[str, Any]:
    """Return what was stored with weights."""
    online = stored.get("online") if request.options.online else None
    return {
        "online": None if online is None else OnlineConfig.from_dict(online),
        "support": load_support(stored, folder, memories),
        "source_domain": load_source_domain(stored, folder),
        "end_odds": load_end_odds(stored, folder),
    }


def _load_by_store(loader: _Loader, specs: Sequence[MemorySpec], request: MixtureRequest) -> tuple[LoadedMixture, ...]:
    """Return a mixture of each of several stores of pairs as it was tuned alone; none and a warning if one was not."""
    overrides = (request.k, request.knn_temperature, request.lmbda, request.saved, specs[0].weight)
    if not (request.use_tuned and overrides == (None,) * len(overrides)):
        return ()
    groups: dict[str | None, list[MemorySpec]] = {}
    for spec in specs:
        groups.setdefault(spec.path if spec.kind in ("knn", "ngram") else None, []).append(spec)
    if len(groups) < 2 or not isinstance(loader.lm, Seq2SeqLM) or loader.lm.reads_audio:
        return ()
    tuned: list[tuple[Datastore, list[MemorySpec], dict[str, Any]]] = []
    for path, own in groups.items():
        store, alone = loader.open_store(path), [replace(spec, path=None) if path else spec for spec in own]
        tuning, names = load_tuning(store, alone), ",".join(spec.label for spec in alone)
        metric = loader.options.metric
        if tuning is None or any(metric not in (None, spec.metric) for spec in tuning.specs if spec.kind == "knn"):
            warnings.warn(
                f"{store.path} is not tuned with {names} alone, so that all stores share λ in equal parts. To "
                f"translate each text with the best of the stores: knnlm tune {store.path} PAIRS --memories {names}",
                KnnlmWarning,
                stacklevel=2,
            )
            return ()
        known = {spec.label: spec for spec in tuning.specs}
        again = [replace(known[spec.label], path=given.path) for spec, given in zip(alone, own, strict=True)]
        tuned.append((store, again, tuning.weights))
    return tuple(_load_alone(loader, store, own, weights, request) for store, own, weights in tuned)


def _load_alone(
    loader: _Loader, store: Datastore, specs: Sequence[MemorySpec], stored: dict[str, Any], request: MixtureRequest
) -> LoadedMixture:
    """Return the memories of one store with the weights that were tuned for them alone."""
    memories = [loader.open(spec) for spec in specs]
    skip_fraction, vocab_size = request.options.skip_fraction, loader.lm.vocab_size
    weights = load_weights(stored, store.path, memories, vocab_size=vocab_size, skip_fraction=skip_fraction)
    _check_skipping(weights, skip_fraction)
    labels = [spec.label for spec in specs]
    tuned = _tuned(stored, store.path, memories, request)
    return LoadedMixture(loader.readers, memories, labels, weights, store, store.path, **tuned)


def _folder(store: Datastore, request: MixtureRequest) -> Path:
    """Return the folder that contains the networks of the stored weights."""
    return store.path if request.saved is None else request.saved.folder


def _weights(
    store: Datastore,
    specs: Sequence[MemorySpec],
    memories: Sequence[Memory],
    stored: dict[str, Any] | None,
    request: MixtureRequest,
    *,
    vocab_size: int,
) -> Weights:
    """Return the stored weights, those of the specs, or λ in equal shares."""
    skip_fraction = request.options.skip_fraction
    if stored is not None:
        folder = _folder(store, request)
        weights = load_weights(stored, folder, memories, vocab_size=vocab_size, skip_fraction=skip_fraction)
    elif specs[0].weight is not None:  # on the command line
        each = [spec.weight or 0.0 for spec in specs]
        weights = first_components(memories, 1 - sum(each), each)
    else:
        weights = equal_weights(memories, DEFAULTS["lambda"] if request.lmbda is None else request.lmbda)
    _check_skipping(weights, skip_fraction)
    return weights


def _check_skipping(weights: Weights, fraction: float | None) -> None:
    if fraction and getattr(weights, "skip", None) is None:
        raise ParameterError("Only a gate can skip searches. Tune the store with --weights gated first.")


def _choose(store: Datastore, request: MixtureRequest) -> tuple[list[MemorySpec], dict[str, Any] | None]:
    """Return the memories and the stored weights; None: share λ equally."""
    if request.saved is not None:
        return list(request.saved.specs), request.saved.weights
    overridden = (request.k, request.knn_temperature, request.lmbda) != (None, None, None)
    if request.memories is not None:
        named: list[MemorySpec] | None = resolve(parse_memories(request.memories), store.path)
    else:
        named = [MemorySpec("knn")] if overridden else None  # k, τ and λ are those of the paper's kNN-LM
    metric = request.options.metric
    tuning = load_tuning(store, named) if request.use_tuned else None
    # Distances of another metric are on another scale, so nothing that was tuned applies.
    if tuning is not None and any(metric not in (None, spec.metric) for spec in tuning.specs if spec.kind == "knn"):
        tuning = None
    if tuning is None:
        specs = named or [MemorySpec("knn")]
        if not request.use_tuned:
            return specs, None
        # Tuned among other memories, or not at all.
        return [tuned_settings(store, replace(spec, metric=metric)) for spec in specs], None
    if named is not None and any(spec.weight is not None for spec in named):
        weights = {spec.label: spec.weight for spec in named}
        return [replace(spec, weight=weights[spec.label], settings=spec.settings[:1]) for spec in tuning.specs], None
    if request.lmbda is not None or (overridden and tuning.weights["kind"] != "fixed"):
        return [replace(spec, settings=spec.settings[:1]) for spec in tuning.specs], None
    return tuning.specs, tuning.weights


def _override(specs: list[MemorySpec], request: MixtureRequest) -> list[MemorySpec]:
    """Set k and τ of the memory that they are meant for."""
    if request.k is None and request.knn_temperature is None:
        return specs
    voting = [number for number, spec in enumerate(specs) if spec.kind in ("knn", "cache")]
    own = [number for number in voting if (specs[number].kind, specs[number].path) == ("knn", None)]
    if not own and len(voting) != 1:
        raise ParameterError(
            "k and knn_temperature are those of the store itself, or of the only memory that has neighbours; "
            f"{', '.join(spec.label for spec in specs)} has {len(voting)}. Tune them instead."
        )
    number = own[0] if own else voting[0]
    main, *others = specs[number].settings or (VoteParams(DEFAULTS["k"], DEFAULTS["knn_temperature"]),)
    main = VoteParams(
        main.k if request.k is None else request.k,
        main.knn_temperature if request.knn_temperature is None else request.knn_temperature,
    )
    return [replace(spec, settings=(main, *others)) if n == number else spec for n, spec in enumerate(specs)]


class _Loader:
    """Opens one memory after another; a model that several of them need is opened once."""

    def __init__(
        self, store: Datastore, readers: Readers, request: MixtureRequest, before: Sequence[Memory] = ()
    ) -> None:
        self.store = store
        self.before = before
        self.readers = readers
        self.options = request.options
        self._stores: dict[str, Datastore] = {}  # other ones, by their paths
        self._reuse_sources(store)

    @property
    def lm(self) -> CausalLM:
        return self.readers.models[0]

    def open(self, spec: MemorySpec) -> Memory:
        """Open the memory that a spec names."""
        if spec.kind == "knn":
            return self._knn(spec)
        if spec.kind == "cache":
            return self._cache(spec)
        if spec.kind == "ngram":
            return NgramMemory.open(self.open_store(spec.path))
        if spec.kind == "ngram-cache":
            self._require_long_texts("n-gram cache")
            return NgramCacheMemory(vocab_size=self.lm.vocab_size, generated=self.options.cache_generated)
        if spec.kind == "decoder":
            return self._decoder(spec)
        assert spec.kind == "output", spec.kind
        return self._output(spec)

    def _knn(self, spec: MemorySpec) -> KnnMemory:
        store = self.open_store(spec.path)
        if store.window != self.store.window:
            raise ParameterError(
                f"{store.path} was read in windows of {store.window}, but {self.store.path} in windows of "
                f"{self.store.window}, and a text is read in one way. Build one of them again with the other's "
                "--context and --stride."
            )
        main, *others = spec.settings or [VoteParams(DEFAULTS["k"], DEFAULTS["knn_temperature"])]
        index, params = self._index(store, self.options.metric or spec.metric or "l2"), self.options.automaton
        return KnnMemory(
            store,
            index,
            k=main.k,
            knn_temperature=main.knn_temperature,
            others=others,
            source=self._source(store),
            automaton=None if params is None else Automaton(store, params, metric=index.metric),
        )

    def _index(self, store: Datastore, metric: str) -> Index | PairSubsetIndex:
        """Open the index of a store, or one over the pairs nearest to each source."""
        options = self.options
        searching: dict[str, Any] = {"metric": metric, "device": str(self.lm.device), "key_dtype": options.key_dtype}
        if options.subset is None:
            return (options.open_index or open_index)(store, rerank=options.rerank, **searching)
        if not store.has_pairs or not isinstance(self.lm, Seq2SeqLM):
            raise ParameterError(
                f"{store.path} is a store of texts, which have no sources: --subset is for stores of pairs."
            )
        if isinstance(self.lm, SpeechLM):
            raise ParameterError(f"The sources of {store.path} are sounds, but --subset compares the words of sources.")
        special = self.lm.tokenizer.all_special_ids
        encode = self.lm.encode_sources
        opened = (memory for memory in self.before if isinstance(memory, KnnMemory) and memory.store.path == store.path)
        indexes = (memory.index for memory in opened if isinstance(memory.index, PairSubsetIndex))
        searching |= {"special_tokens": special, "previous": next(indexes, None)}
        return PairSubsetIndex(store, options.subset, encode=encode, **searching)

    def _cache(self, spec: MemorySpec) -> CacheMemory:
        self._require_long_texts("cache")
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
            generated=self.options.cache_generated,
        )

    def _require_long_texts(self, what: str) -> None:
        """Raise ParameterError for a memory of the text so far, where texts are single targets."""
        if self.lm.has_encoder:
            raise ParameterError(
                f"The {what} looks for earlier positions of the same text, and the texts of {self.lm.name} are single "
                "targets such as sentences, too short for that. Leave it out: --memories knn,ngram"
            )

    def _decoder(self, spec: MemorySpec) -> DecoderMemory:
        assert spec.path is not None
        path = self._path(spec.path)
        # The reader of a store may be a memory itself, and is open then.
        known = [model.name for model in self.readers.models]
        if (name := str(Path(path).resolve())) in known:
            return DecoderMemory(known.index(name))
        _check_decoder_folder(path)
        return DecoderMemory(self.readers.add(open_beside(self.lm, path, dtype=self.options.dtype)))

    def _output(self, spec: MemorySpec) -> OutputMemory:
        path = self.store.path / "output" if spec.path is None else Path(self._path(spec.path))
        if not (path / OUTPUT_FILE).exists():
            raise DatastoreError(
                f"{path} does not exist: the store has no output matrix yet. Train one: knnlm distill "
                f"{self.store.path} --into output"
            )
        memory = OutputMemory.open(path, device=str(self.lm.device))
        number = self.readers.find(memory.card.model)
        if number is None:
            wrong = identity_difference(memory.card.model, self.lm.identity) or ("model", "?", "?")
            raise ModelMismatch(
                f"{path} was trained on states of {memory.card.model['name']} ({wrong[0]} {wrong[1]}), but the loaded "
                f"model is {self.lm.name} ({wrong[0]} {wrong[2]}). Train one for it: knnlm distill --into output"
            )
        if spec.identity not in (None, identity_of(memory)):
            raise DatastoreError(
                f"{path} is another matrix than the one that the weights were tuned with. Tune again: knnlm tune "
                f"{self.store.path} TEXT"
            )
        memory.source = Source(number, memory.card.model["key_layer"], memory.card.model["layer"])
        return memory

    def open_store(self, path: str | None) -> Datastore:
        """Return the store itself, or another one, which is opened once."""
        if path is None:
            return self.store
        if path not in self._stores:
            self._stores[path] = Datastore.open(self._path(path))
            self._reuse_sources(self._stores[path])
        return self._stores[path]

    def _reuse_sources(self, store: Datastore) -> None:
        """Let a store read only those sources that an earlier state of it has not read."""
        before = (own for memory in self.before if isinstance(own := getattr(memory, "store", None), Datastore))
        if (same := next((own for own in before if own.path == store.path), None)) is not None:
            store.catalog.reuse_sources(same.catalog)

    def _path(self, path: str) -> str:
        """Return a path inside the store if it exists there, else the path itself."""
        inside = self.store.path / path
        return str(inside) if inside.exists() else path

    def _source(self, store: Datastore) -> Source:
        """Return where a store's keys come from, and open their model if it is not open yet."""
        number = self.readers.find(store.model)
        if number is None:
            wrong = identity_difference(store.model, self.lm.identity)
            assert wrong is not None
            if wrong[0] in token_fields(store.model, self.lm.identity):
                raise _mismatch(store, self.lm, *wrong)
            try:
                layer = {"key_layer": store.model["key_layer"], "layer": store.model["layer"]}
                reader = open_adapters_beside(self.lm, reader_name(store), dtype=self.options.dtype, **layer)
                dtype = dtype_beside(self.lm, self.options.dtype)
                reader = reader or open_reader(store, device=str(self.lm.device), dtype=dtype)
            except ModelError as error:
                raise _mismatch(store, self.lm, *wrong, more=f" ({error})") from None
            check_model(store, reader)
            number = self.readers.add(reader)
        return Source(number, store.model["key_layer"], store.model["layer"])


def specs_of(memories: Sequence[Memory], labels: Sequence[str], lm: CausalLM) -> list[MemorySpec]:
    """Return the specs of memories; raise ParameterError for memories that could not be opened from them."""
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ParameterError(f"Two memories are called {twice}. Name them by what they are opened from: knn=FOLDER.")
    return [_spec_of(memory, label, lm) for memory, label in zip(memories, labels, strict=True)]


def _spec_of(memory: Memory, label: str, lm: CausalLM) -> MemorySpec:
    (spec,) = parse_memories(label)
    if spec.kind != memory.name:
        raise ParameterError(f"A memory of the kind {memory.name} is called {label}.")
    if isinstance(memory, KnnMemory):
        return replace(spec, settings=tuple(memory.settings), metric=memory.metric)
    if not isinstance(memory, CacheMemory):
        return replace(spec, identity=identity_of(memory))
    place = (lm.key_layer.place, lm.key_layer.layer)
    if memory.source.reader or (memory.source.place, memory.source.layer % lm.key_layer.layers) != place:
        raise ParameterError("A cache over other states than the language model's key layer cannot be saved.")
    window = None if memory.history_length == WINDOW else str(memory.history_length)
    return replace(spec, path=window, settings=tuple(memory.settings), metric=memory.metric)


def identity_of(memory: Memory) -> str | None:
    """Return a hash of a memory that can be replaced in its place; None for other kinds."""
    if not isinstance(memory, OutputMemory):
        return None
    return hashlib.sha256(json.dumps(asdict(memory.card), sort_keys=True, default=str).encode()).hexdigest()[:16]


def _check_decoder_folder(path: str) -> None:
    """Raise an error for a folder without a model, which would be looked up on the model hub otherwise."""
    folder = Path(path)
    if folder.with_name(f"{folder.name}.partial").is_dir() and not folder.exists():
        raise ParameterError(f"The training of {path} has not ended. Repeat the command that began it.")
    if folder.is_absolute() and not folder.exists():
        raise ParameterError(
            f"The decoder {path} does not exist. If it was moved, name the memories with --memories, and tune the "
            "store again."
        )
    if folder.is_dir() and not (folder / "config.json").is_file() and not has_adapters(folder):
        what = (
            f"a store: name it as knn={path}"
            if (folder / CATALOG_FILE).is_file()
            else "no model: it has neither config.json nor adapter_config.json"
        )
        raise ParameterError(f"The folder {path} contains {what}.")


def open_beside(lm: CausalLM, name: str, *, dtype: str) -> CausalLM:
    """Open a second model that reads the texts of a language model, and their sources in the same languages."""
    if (adapted := open_adapters_beside(lm, name, dtype=dtype)) is not None:
        return adapted
    if not has_encoder(name):
        return CausalLM.open(name, device=str(lm.device), dtype=dtype_beside(lm, dtype))
    if not lm.has_encoder:
        raise ParameterError(
            f"{name} is an encoder-decoder model, which reads a source beside each text, but {lm.name} is a "
            "decoder-only model. Use a decoder-only model with the same tokenizer."
        )
    try:
        return open_lm(name, device=str(lm.device), dtype=dtype_beside(lm, dtype), **lm.languages)
    except ParameterError as error:  # of the languages, which the user has not chosen for this model
        raise ModelMismatch(f"{name} cannot be mixed with {lm.name}: {error}") from None


def dtype_beside(lm: CausalLM, dtype: str) -> str:
    """Return the dtype of a second model: `auto` is that of the language model, whose tensors it may share."""
    return lm.dtype if dtype == "auto" else dtype


def open_adapters_beside(
    lm: CausalLM, name: str, *, dtype: str, key_layer: str | None = None, layer: int = -1
) -> CausalLM | None:
    """Open adapters of a language model as a second model with the same weights; None for another model or dtype."""
    if not has_adapters(name) or lm.has_encoder or dtype_beside(lm, dtype) != lm.dtype:
        return None
    verify_checksums(Path(name))
    adapters = AdapterSet.read(name)
    if not adapters.belongs_to(lm.identity, lm.name):
        return None
    model, full_name = adapters.beside(lm.model), str(Path(name).resolve())
    return CausalLM(model, lm.tokenizer, name=full_name, key_layer=key_layer, layer=layer)


def open_reader(store: Datastore, *, name: str | None = None, device: str = "auto", dtype: str = "auto") -> CausalLM:
    """Open the model that a store was built with, at its key layer, or another model by name."""
    # A model given by name need not be the store's reader, and may have fewer layers.
    layer = store.model["layer"] if name is None else -1
    return open_lm(
        reader_name(store) if name is None else name,
        key_layer=store.model["key_layer"],
        layer=layer,
        device=device,
        dtype=dtype,
        src_lang=store.model.get("src_lang"),
        tgt_lang=store.model.get("tgt_lang"),
    )


def language_model(store: Datastore) -> str | None:
    """Return the name of the language model that a store is for, if it is not the store's reader."""
    name = store.catalog.get(LANGUAGE_MODEL)
    if name is not None and (not isinstance(name, str) or not name):
        raise DatastoreCorrupt(f"{store.path}: the name of its language model is invalid. Name the model with --model.")
    return name


def reader_name(store: Datastore) -> str:
    """Return the name of a store's reader; a model inside the store's folder moves with it."""
    name = str(store.model["name"])
    inside = store.path / Path(name).name
    return str(inside) if (inside / "config.json").is_file() or has_adapters(inside) else name


def check_model(store: Datastore, lm: CausalLM, *, place: Source | None = None) -> None:
    """Raise ModelMismatch for a model whose keys are not those of the store."""
    built = store.model
    if place is not None and (place.place, place.layer) != (built["key_layer"], built["layer"]):
        own, given = f"{built['key_layer']} {built['layer']}", f"{place.place} {place.layer}"
        raise _mismatch(store, lm, "key layer", own, given)
    if (wrong := identity_difference(built, lm.identity)) is not None:
        raise _mismatch(store, lm, *wrong)


def _mismatch(store: Datastore, lm: CausalLM, what: str, found: Any, now: Any, *, more: str = "") -> ModelMismatch:
    what = what.replace("_", " ")
    return ModelMismatch(
        f"{store.path} was built with {store.model['name']} ({what} {found}), but the loaded model is {lm.name} "
        f"({what} {now}). Open it with --model {store.model['name']}, or rebuild it.{more}"
    )


def is_decoder(path: Path) -> bool:
    """Whether a folder contains a decoder."""
    return (path / CARD).is_file()


def load_decoder(folder: Path, lm: CausalLM | None, request: MixtureRequest) -> LoadedMixture:
    """Open a decoder and the language model that it is mixed with."""
    card, options = load_card(folder), request.options
    unused = request.memories, request.k, request.knn_temperature, options.metric, options.skip_fraction, options.subset
    given = any(value is not None for value in (*unused, options.automaton, options.open_index))
    if given or not options.rerank or options.key_dtype != "float16":
        raise ParameterError(
            f"{folder} is a decoder, which has no store: only --lambda and --model apply. To mix it with other "
            f"memories, name it beside them: knnlm eval STORE TEXT --memories knn,decoder={folder}"
        )
    if lm is None:
        languages = {name: card.initial_model.get(name) for name in ("src_lang", "tgt_lang")}
        opening: dict[str, Any] = {"device": options.device, "dtype": options.dtype, **languages}
        lm = open_lm(_language_model(folder, card, options.model), **opening)
    readers = Readers(lm)
    memory = DecoderMemory(readers.add(open_beside(lm, str(folder), dtype=lm.dtype)))
    tuned = card.lmbda if request.use_tuned else None
    lmbda = next(lmbda for lmbda in (request.lmbda, tuned, _DECODER_LAMBDA) if lmbda is not None)
    # The folder is known, so its last name is enough, also where it is copied; commas and colons separate specs.
    label = f"decoder={re.sub('[,:]', '_', folder.resolve().name)}"
    return LoadedMixture(readers, [memory], [label], equal_weights([memory], lmbda), None, folder)


def _language_model(folder: Path, card: DecoderCard, model: str | None) -> str:
    """Return the name of the model that is asked for, else of the one that λ was tuned with."""
    known = (card.lmbda_metadata or {}).get("model")
    if model is None and not isinstance(known, str):
        raise ParameterError(f"{folder} is a decoder: name the language model it is mixed with: --model.")
    if model is None and Path(str(known)).is_absolute() and not Path(str(known)).exists():
        raise ParameterError(f"{folder} was tuned with {known}, which does not exist any more. Name it with --model.")
    return model or str(known)
