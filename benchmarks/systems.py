"""The systems that benchmarks of tasks and of generated text compare: a model, mixtures with a store, a student."""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import knnlm
from knnlm.corpus import Document
from knnlm.datastore.schema import DECODER_FOLDER
from knnlm.datastore.store import Datastore
from knnlm.evaluation.evaluate import first_documents
from knnlm.evaluation.samples import sample_documents
from knnlm.evaluation.sweep import KS
from knnlm.evaluation.trace import Trace
from knnlm.evaluation.tune import (
    MAX_SAMPLES,
    choose_online,
    choose_settings,
    fit_weights,
    sweep_all,
    tabulate,
    token_frequencies,
)
from knnlm.lm.causal import CausalLM
from knnlm.memories.base import Source
from knnlm.memories.cache import CacheMemory
from knnlm.memories.voting import VoteParams
from knnlm.mixture.mixture import Mixture
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.initial_model import open_initial_model
from perplexity import split

MEMORIES = "knn,cache,ngram"
MIXTURES = ("one λ", "gate", "default")  # of one store


def add_student_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the fine-tuned student of each corpus."""
    parser.add_argument("--student", type=Path, help="folder with a fine-tuned model, or a result of adapt, per corpus")
    parser.add_argument("--train-student", action="store_true", help="fine-tune a student of each corpus on train")
    parser.add_argument("--student-tokens", type=int, default=500_000, help="tokens of train to fine-tune on")
    parser.add_argument("--student-epochs", type=int, default=2)


def model_alone(lm: CausalLM) -> Mixture:
    """Return a mixture that is the language model: its only memory has no weight and is not searched."""
    source = Source(0, lm.key_layer.place, lm.key_layer.layer)
    return Mixture(lm, CacheMemory(vocab_size=lm.vocab_size, source=source), lmbda=0.0)


def build_mixtures(
    corpus: Path,
    folder: Path,
    lm: CausalLM,
    *,
    store_tokens: int | None,
    limit: int | None,
    names: Sequence[str] = MIXTURES,
) -> tuple[Datastore, dict[str, Mixture]]:
    """Build a store of train and tune each kind of mixture on valid; keys are loaded and valid is read once.

    "one λ" is the kNN-LM of the paper, "gate" has a cache and n-grams too, and "default" is what `tune` chooses.
    """
    store = knnlm.build(first_documents(split(corpus, "train"), lm, store_tokens), folder, lm=lm)
    opened = Mixture.open(store, lm, memories=MEMORIES, use_tuned=False)
    with tempfile.TemporaryDirectory() as traces:
        valid = opened.record(first_documents(split(corpus, "valid"), lm, limit), Path(traces) / "valid", k=max(KS))
        written = None
        if "default" in names:
            count = min(len(valid), MAX_SAMPLES)
            samples = sampled_text(lm, MAX_SAMPLES if limit is None else min(limit, MAX_SAMPLES))
            if samples:
                written = opened.record(first_documents(iter(samples), lm, count), Path(traces) / "written", k=max(KS))
        return store, fit_mixtures(opened, valid, written, names)


@lru_cache(maxsize=1)
def sampled_text(lm: CausalLM, tokens: int) -> list[Document]:
    """Return documents that the model writes; the same ones serve every store."""
    return sample_documents(lm, tokens)


def fit_mixtures(opened: Mixture, valid: Trace, written: Trace | None, names: Sequence[str]) -> dict[str, Mixture]:
    """Fit each kind of mixture to one trace of valid; "default" also to that of a text that the model wrote."""
    store, device = opened.store, str(opened.lm.device)
    assert store is not None
    sweeps = sweep_all(valid, device=device)
    settings = choose_settings(valid, sweeps, several=True)
    table, frequencies = tabulate(valid, settings, device=device), token_frequencies(store)
    mixtures = {}
    for name in names:
        if name == "one λ":
            assert sweeps[0] is not None
            k, temperature, lmbda, _ = sweeps[0].best
            knn = copy.copy(opened.memories[0])
            knn.settings = (VoteParams(k, temperature),)  # type: ignore[attr-defined]
            mixtures[name] = Mixture(opened.lm, knn, lmbda=lmbda, labels=["knn"], store=store, path=opened.path)
            continue
        samples = None if name == "gate" or written is None else tabulate(written, settings, device=device)
        mixture = _with_own_settings(opened)
        for memory, own in zip(mixture.memories, settings, strict=True):
            if own:
                memory.settings = own  # type: ignore[attr-defined]
        mixture.weights = fit_weights(table, "gated", frequencies=frequencies, samples=samples, device=device).weights
        mixture.online = choose_online(table, mixture.weights, samples)[0] if name == "default" else None
        mixtures[name] = mixture
    return mixtures


def _with_own_settings(mixture: Mixture) -> Mixture:
    """Return a mixture with the same store and index, whose settings are its own."""
    return Mixture(
        mixture.lm,
        [copy.copy(memory) for memory in mixture.memories],
        readers=mixture.readers,
        labels=mixture.labels,
        store=mixture.store,
        path=mixture.path,
    )


def open_student(corpus: Path, folder: Path, lm: CausalLM, options: argparse.Namespace) -> CausalLM | None:
    """Open the student of a corpus, or train one into a folder; None without either option."""
    if options.student is not None:
        given = options.student / corpus.name
        inside = given / DECODER_FOLDER
        return CausalLM.open(str(inside if inside.is_dir() else given), device=str(lm.device), dtype=lm.dtype)
    if not options.train_student:
        return None
    documents = first_documents(split(corpus, "train"), lm, options.student_tokens)
    return train_student(documents, folder, lm, tokens=options.student_tokens, epochs=options.student_epochs)


def train_student(
    documents: Iterable[Document], folder: Path, lm: CausalLM, *, tokens: int | None, epochs: int
) -> CausalLM:
    """Fine-tune a copy of the model on at most this many tokens, and open it."""
    texts = []
    for text in lm.encode_all([document.text for document in documents]):
        left = None if tokens is None else tokens - sum(map(len, texts))  # the last document may be long
        if left is None or left > 0:
            texts.append(text[:left])
    initial = open_initial_model(lm.name, like=lm)
    train_decoder(texts, initial, folder, DecoderConfig(epochs=epochs), device=str(lm.device))
    return CausalLM.open(str(folder), device=str(lm.device), dtype=lm.dtype)
