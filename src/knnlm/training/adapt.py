"""Adaptation of a language model to a text: train a decoder, build a store with its keys, tune all memories together.

OUT/                a store whose keys are the decoder's hidden states
OUT/decoder/        the decoder, an ordinary model that can also be used alone
OUT/adapted.json    the perplexity of each memory on the held-out text
OUT.first/          by option, a store of the language model's own keys, which can be used during the training

The language model itself is not changed. A run that was stopped resumes when it is called again.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from knnlm.corpus import Document
from knnlm.datastore.catalog import LANGUAGE_MODEL, Catalog
from knnlm.datastore.integrity import verify_checksum, with_checksum
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.schema import ADAPTED_FILE, CATALOG_FILE, DECODER_FOLDER
from knnlm.datastore.store import Datastore, check_folder, text_hash
from knnlm.errors import CorpusError, DatastoreCorrupt, DatastoreError, ParameterError
from knnlm.evaluation.evaluate import first_documents
from knnlm.evaluation.sweep import KS
from knnlm.evaluation.tune import (
    fit_decoder,
    fit_weights,
    save_result,
    scratch,
    tabulate,
    token_frequencies,
    tune_trace,
)
from knnlm.ingest.build import build
from knnlm.io import atomic_write
from knnlm.lm.causal import CausalLM
from knnlm.memories.decoder import set_lambda
from knnlm.mixture.loader import check_model, is_decoder, language_model
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions
from knnlm.progress import Progress, silent
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.initial_model import open_initial_model
from knnlm.training.trainer import select_held_out

MEMORIES = f"knn,decoder={DECODER_FOLDER},cache,ngram"

_HELD_OUT_DIVISOR = 10  # one token in ten is held out if no held-out text is given
_MAX_EXCESS = 1.5  # times the wanted number of tokens may be held out, since documents stay whole
_MAX_HELD_OUT_TOKENS = 60_000
_MIN_TOKENS_TO_SPLIT = 640  # of a single document: fewer would leave too little to tune on
_MAX_WORD = 100  # characters


@dataclass(frozen=True)
class Adaptation:
    """Perplexities on the held-out text.

    All are fitted on it; that of the gate is by cross-validation, with networks that were not trained on the document.
    """

    model: str
    tokens: int  # trained on
    held_out_tokens: int
    held_out_documents: int
    leaked_documents: int  # held-out documents that were trained on too: their figures are too good
    base: float
    fine_tuned: float  # the decoder alone
    knn: float  # the model and the store, one λ
    decoder: float  # the model and the decoder, one λ
    everything: float  # the model, the decoder, the store, the cache and n-grams, gated
    decoder_lambda: float
    seconds: float


@dataclass(frozen=True)
class _Splits:
    """Documents to train on, with their tokens, and held-out documents."""

    training: list[Document]
    tokens: list[list[int]]
    held_out: list[Document]
    held_out_tokens: int


def adapt(
    documents: Iterable[Document],
    out: str | Path,
    *,
    lm: CausalLM,
    held_out: Iterable[Document] | None = None,
    initial_model: str | None = None,
    layers: int | None = None,
    config: DecoderConfig | None = None,
    limit: int = _MAX_HELD_OUT_TOKENS,
    device: str | None = None,
    store_first: bool = False,
    checkpoint_every: float = 120.0,
    progress: Progress = silent,
) -> Adaptation:
    """Train a decoder on documents, build its store, tune all memories on held-out text, and measure each of them.

    `held_out` is the text to tune on; None holds out a tenth of the text, in whole documents. The decoder is trained
    from `initial_model`, by default the model itself, of which `layers` keeps some, on `device`, by default that of the
    model. The seed of `config` also chooses the held-out documents. At most `limit` tokens are held out and tuned on.
    With `select` of `config`, by default, its learning rate and epochs are chosen on them, and on a CPU adapters are
    trained by default. With `store_first`, a store of the model's own keys is built before the training; it can be used
    meanwhile, and stays.
    """
    begin, folder, config = time.perf_counter(), Path(out), config or DecoderConfig(select=True, lora=None)
    lm.require_text("adapt")
    if limit < 1:
        raise ParameterError(f"limit must be at least 1 token, not {limit}.")
    _check_folder(folder)
    splits = _split(documents, lm, config.seed, limit) if held_out is None else _given(documents, held_out, lm)
    if store_first:
        _build_or_open(splits.training, first_store(folder), lm, progress).close()
    initial = open_initial_model(initial_model or lm.name, like=lm, layers=layers, seed=config.seed)
    run: dict[str, Any] = {"checkpoint_every": checkpoint_every, "progress": progress}
    if config.select:
        held = first_documents(splits.held_out, lm, limit)
        run["held_out_text"] = lm.encode_all([document.text for document in held])
    train_decoder(splits.tokens, initial, folder / DECODER_FOLDER, config, device=device or str(lm.device), **run)
    del initial
    store = _build_store(splits.training, folder, lm, progress)
    hashes = {"store": store.fingerprint, "model": lm.identity["weights"], "text": _documents_hash(splits.held_out)}
    tuned_on = {**hashes, "limit": limit}
    finished = load_adaptation(folder, tuned_on)
    if finished is not None:
        return finished
    result = replace(_tune(store, lm, splits, limit, progress), seconds=time.perf_counter() - begin)
    _save_adaptation(folder, result, tuned_on)
    return result


def first_store(out: Path) -> Path:
    """Return the folder of the store that is built before the training."""
    return out.with_name(f"{out.name}.first")


def _save_adaptation(folder: Path, result: Adaptation, tuned_on: dict[str, Any]) -> None:
    with atomic_write(folder / ADAPTED_FILE) as partial:
        content = with_checksum({**asdict(result), "tuned_on": tuned_on})
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def load_adaptation(folder: Path, tuned_on: dict[str, Any] | None = None) -> Adaptation | None:
    """Return the result of an adaptation; None if there is none, or if it was tuned on something else."""
    file = folder / ADAPTED_FILE
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        result = Adaptation(**{field.name: content[field.name] for field in fields(Adaptation)})
        same = tuned_on is None or content["tuned_on"] == tuned_on
        figures = [value for name, value in asdict(result).items() if name != "model"]
        if not all(isinstance(value, (int, float)) for value in figures):
            raise ValueError("a figure is not a number")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DatastoreCorrupt(f"{file} cannot be read ({error}). Remove it and run: knnlm adapt") from None
    verify_checksum(file, content, "Remove it and run: knnlm adapt")
    return result if same else None


def _check_folder(folder: Path) -> None:
    """Raise if the folder holds anything but an adaptation, before anything is trained."""
    check_folder(folder)
    if (folder / CATALOG_FILE).exists() and not is_decoder(folder / DECODER_FOLDER):
        raise DatastoreError(f"{folder} is a store already, and was not made by adapt. Choose another --out.")


def _documents_hash(documents: Sequence[Document]) -> str:
    hashes = "".join(text_hash(document.text) for document in documents)
    return hashlib.sha256(hashes.encode()).hexdigest()[:16]


def _given(documents: Iterable[Document], held_out: Iterable[Document], lm: CausalLM) -> _Splits:
    training, testing = list(documents), list(held_out)
    tokens, testing_tokens = (lm.encode_all([document.text for document in part]) for part in (training, testing))
    if not any(tokens):
        raise CorpusError("There is no text to learn: no document has a token.")
    if not any(testing_tokens):
        raise CorpusError("There is no text to tune on: no held-out document has a token.")
    return _Splits(training, tokens, testing, sum(map(len, testing_tokens)))


def _split(documents: Iterable[Document], lm: CausalLM, seed: int, limit: int) -> _Splits:
    """Hold out random documents with their copies: about a tenth of the text, at most the limit.

    A document that is most of the text is better trained on: if none is short enough, the shortest is held out. Of a
    single document, a part is.
    """
    everything = list(documents)
    tokens = lm.encode_all([document.text for document in everything])
    copies: dict[str, list[int]] = {}
    for number, document in enumerate(everything):
        if tokens[number]:
            copies.setdefault(text_hash(document.text), []).append(number)
    if not copies:
        raise CorpusError("There is no text to learn: no document has a token.")
    groups = list(copies.values())
    if len(groups) < 2:
        return _split_document([everything[number] for number in groups[0]], lm, seed, limit)
    sizes = [sum(len(tokens[number]) for number in group) for group in groups]
    order = np.random.default_rng(seed).permutation(len(groups)).tolist()
    wanted = min(sum(sizes) / _HELD_OUT_DIVISOR, limit)
    chosen = select_held_out((sizes[place] for place in order), wanted, max_total=_MAX_EXCESS * wanted)
    places = [order[number] for number in chosen] or [int(np.argmin(sizes))]
    held = {number for place in places for number in groups[place]}
    training = [number for number in range(len(everything)) if number not in held]
    return _Splits(
        [everything[number] for number in training],
        [tokens[number] for number in training],
        [everything[number] for number in sorted(held)],
        sum(sizes[place] for place in places),
    )


def _split_document(copies: Sequence[Document], lm: CausalLM, seed: int, limit: int) -> _Splits:
    """Hold out a part of the only document, a tenth of it and at most the limit; what surrounds it is trained on."""
    text = copies[0].text
    size = len(lm.encode(text))
    if size < _MIN_TOKENS_TO_SPLIT:
        raise ParameterError("One document alone cannot be split: give text to tune on with --valid.")
    length = int(len(text) * min(1 / _HELD_OUT_DIVISOR, limit / size))
    # Not the beginning, which is unlike the rest of most documents.
    wanted = int(np.random.default_rng(seed).integers(length, len(text) - length + 1))
    begin = _next_space(text, wanted)
    end = _next_space(text, begin + length)
    parts = [text[:begin], text[end:]]
    training = [
        replace(document, id=f"{document.id}#{number}", text=part)
        for document in copies
        for number, part in enumerate(parts, 1)
    ]
    held_out = [replace(copies[0], id=f"{copies[0].id}#held-out", text=text[begin:end])]
    return _given([document for document in training if document.text], held_out, lm)


def _next_space(text: str, place: int) -> int:
    """Return the place of the next white space, so that words stay whole; without one nearby, the place itself."""
    found = re.compile(r"\s").search(text, place, place + _MAX_WORD)
    return found.start() if found else min(place, len(text))


def _build_store(documents: Sequence[Document], folder: Path, lm: CausalLM, progress: Progress) -> Datastore:
    """Build the store with the decoder's keys, or open it if it is complete, and record its language model."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # of the training: what follows decides by the free memory
    reader = CausalLM.open(str(folder / DECODER_FOLDER), device=str(lm.device), dtype=lm.dtype)
    # Both models read the same windows, and one of them may have a shorter context.
    window = min(reader.window(), lm.window(), key=lambda shape: shape.context)
    store = _build_or_open(documents, folder, reader, progress, window=window, language_model=lm.name)
    if language_model(store) != lm.name:
        with writer_lock(folder):
            catalog = Catalog.open(folder / CATALOG_FILE, write=True)
            try:
                catalog.put(**{LANGUAGE_MODEL: lm.name})
            finally:
                catalog.close()
    return store


def _build_or_open(
    documents: Sequence[Document], folder: Path, reader: CausalLM, progress: Progress, **options: Any
) -> Datastore:
    """Build a store, or open it if it is complete; raise if it has other text or another reader."""
    if not _is_complete(folder):
        return build(documents, folder, lm=reader, progress=progress, **options)
    store = Datastore.open(folder)
    if [document.sha256 for document in store.documents()] != [text_hash(document.text) for document in documents]:
        raise DatastoreError(f"{folder} was built from other text. Choose another --out, or remove it.")
    check_model(store, reader)
    return store


def _is_complete(folder: Path) -> bool:
    if not (folder / CATALOG_FILE).exists():
        return False
    catalog = Catalog.open(folder / CATALOG_FILE)
    try:
        return bool(catalog.get("state") == "complete")
    finally:
        catalog.close()


def _tune(store: Datastore, lm: CausalLM, splits: _Splits, limit: int, progress: Progress) -> Adaptation:
    """Tune all memories together, save the result, and measure each memory alone."""
    mixture = Mixture.open(store, lm, memories=MEMORIES, use_tuned=False, options=MixtureOptions(dtype=lm.dtype))
    device = str(lm.device)
    with writer_lock(store.path), scratch(store.path) as place:
        wanted = min(limit, splits.held_out_tokens)
        trace = mixture.record(splits.held_out, place / "trace", k=max(KS), limit=wanted, progress=progress)
        tuning = tune_trace(trace, store, specs=mixture.specs, device=device, progress=progress)
        save_result(store.path, tuning, trace)
        best_settings = [spec.settings[:1] for spec in tuning.specs]
        table = tabulate(trace, best_settings, with_features=False, device=device)
    knn = fit_weights(table.select("knn"), "fixed", frequencies=token_frequencies(store))
    decoder = table.select(f"decoder={DECODER_FOLDER}")
    lmbda, metadata = fit_decoder(decoder, lm.name, trace.metadata["sources"])
    set_lambda(store.path / DECODER_FOLDER, lmbda, metadata)
    log_p = decoder.memories[0].log_probs[:, 0].to(torch.float64)
    return Adaptation(
        model=lm.name,
        tokens=sum(map(len, splits.tokens)),
        held_out_tokens=len(trace),
        held_out_documents=tuning.documents,
        leaked_documents=tuning.leaked_documents,
        base=tuning.base_perplexity,
        fine_tuned=math.exp(-float(log_p.mean())),
        knn=knn.perplexity,
        decoder=metadata["perplexity"],
        everything=tuning.perplexity,
        decoder_lambda=lmbda,
        seconds=0.0,
    )
