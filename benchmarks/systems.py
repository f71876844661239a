"""The systems that benchmarks of tasks and of generated text compare: a model, mixtures with a store, a student."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable
from pathlib import Path

import knnlm
from knnlm.corpus import Document
from knnlm.datastore.schema import DECODER_FOLDER
from knnlm.datastore.store import Datastore
from knnlm.lm.causal import CausalLM
from knnlm.memories.base import Source
from knnlm.memories.cache import CacheMemory
from knnlm.mixture.mixture import Mixture
from knnlm.training.decoder import DecoderConfig, train_decoder
from knnlm.training.initial_model import open_initial_model
from perplexity import first, split

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
    corpus: Path, folder: Path, lm: CausalLM, *, store_tokens: int | None, limit: int | None
) -> tuple[Datastore, dict[str, Mixture]]:
    """Build a store of train and tune each kind of mixture on valid; the keys are loaded once.

    "one λ" is the kNN-LM of the paper, "gate" has a cache and n-grams too, and "default" is what `tune` chooses.
    """
    store = knnlm.build(first(split(corpus, "train"), lm, store_tokens), folder, lm=lm)
    opened = Mixture.open(store, lm, memories=MEMORIES, use_tuned=False)
    assert opened.knn is not None
    valid = list(first(split(corpus, "valid"), lm, limit))
    one = Mixture(lm, copy.copy(opened.knn), labels=["knn"], store=opened.store, path=opened.path)
    gate, default = _with_own_settings(opened), _with_own_settings(opened)
    one.tune(valid, weights="fixed", online=False)
    gate.tune(valid, online=False)
    default.tune(valid)  # last: its result is the one that the store keeps
    return store, dict(zip(MIXTURES, (one, gate, default), strict=True))


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
    documents = first(split(corpus, "train"), lm, options.student_tokens)
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
