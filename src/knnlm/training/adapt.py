"""Make a model know a text in every way at once: a student trained on it, a store that the student reads, a gate.

OUT/                a memory whose keys come from the student
OUT/student/        the student, an ordinary model and a decoder by itself
OUT/adapted.json    what each part is worth on the text that was held out

The model that is helped stays as it is. A run that was stopped goes on when it is called again.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from knnlm.corpus import Document
from knnlm.datastore.catalog import LANGUAGE_MODEL, Catalog
from knnlm.datastore.integrity import check_sum, summed
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.paths import ADAPTED_FILE, CATALOG_FILE, STUDENT_FOLDER
from knnlm.datastore.store import Datastore, check_folder, text_hash
from knnlm.errors import CorpusError, DatastoreCorrupt, DatastoreError, ParameterError
from knnlm.evaluation.fit import TraceTable, fit_weights, tabulate
from knnlm.evaluation.sweep import KS
from knnlm.evaluation.trace import Trace, record
from knnlm.evaluation.tune import Tuning, fit_decoder, save_result, scratch, token_frequencies, tune_trace
from knnlm.ingest.build import build
from knnlm.io import atomic_write
from knnlm.lm.causal import CausalLM
from knnlm.memories.decoder import set_lambda
from knnlm.mixture.loader import check_model, is_decoder, language_model
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions
from knnlm.progress import Progress, silent
from knnlm.training.decoder import train_decoder
from knnlm.training.student import open_student

_SHARE = 10  # one token in so many is held out where no text is given for it

_ROOM = 1.5  # times as much as is wanted may be held out, since documents stay whole

_TOKENS = 60_000  # of held-out text that are used at most

MEMORIES = f"knn,decoder={STUDENT_FOLDER},cache,ngram"


@dataclass(frozen=True)
class Adaptation:
    """What came of it: perplexities on the held-out text, fitted there; those of the gate by networks that did not
    see the document."""

    model: str
    tokens: int  # that were learnt
    held_out_tokens: int
    held_out_documents: int
    leaked_documents: int  # of these, documents that were learnt too: on them, figures are too good
    base: float
    fine_tuned: float  # the student alone
    knn: float  # the model and the student's store, one λ
    decoder: float  # the model and the student, one λ
    everything: float  # the model, the student, its store, the text so far and n-grams, gated
    decoder_lambda: float
    seconds: float


@dataclass(frozen=True)
class _Splits:
    """Documents that are learnt, with their tokens, and those that tell what that is worth."""

    learnt: list[Document]
    tokens: list[list[int]]
    kept: list[Document]
    kept_tokens: int


def adapt(
    documents: Iterable[Document],
    out: str | Path,
    *,
    lm: CausalLM,
    held_out: Iterable[Document] | None = None,
    student: str | None = None,
    layers: int | None = None,
    limit: int = _TOKENS,
    seed: int = 0,
    device: str | None = None,
    progress: Progress = silent,
    **training: Any,
) -> Adaptation:
    """Train a student on documents, build its store, tune everything on held-out ones, and say what each is worth.

    `held_out` is text to tune on; None takes a tenth of the text, in whole documents. `student` is a model to begin
    with, by default the model itself, of which `layers` keeps some blocks; it is trained on `device`, by default where
    the model is; `training` is for `train_decoder`. At most `limit` tokens are held out and tuned on.
    """
    begin = time.perf_counter()
    folder = Path(out)
    if limit < 1:
        raise ParameterError(f"limit must be at least 1 token, not {limit}.")
    _check_place(folder)
    texts = _given(documents, held_out, lm) if held_out is not None else _divide(documents, lm, seed, limit)
    own = open_student(student or lm.name, like=lm, layers=layers, seed=seed)
    settings = {"beta": 0.0, "seed": seed, "device": device or str(lm.device), **training}
    train_decoder(texts.tokens, own, folder / STUDENT_FOLDER, progress=progress, **settings)
    del own
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what comes next looks at how much is free
    reader = CausalLM.open(str(folder / STUDENT_FOLDER), device=str(lm.device), dtype=lm.dtype)
    store = _store(texts.learnt, folder, reader, lm, progress)
    del reader
    tuned_on = {
        "store": store.fingerprint,
        "model": lm.identity["weights"],
        "text": _hash(texts.kept),
        "limit": limit,
    }
    known = load_adaptation(folder, tuned_on)
    if known is not None:
        return known
    found = _tune(store, lm, texts, limit, progress)
    result = replace(found, seconds=time.perf_counter() - begin)
    with atomic_write(folder / ADAPTED_FILE) as partial:
        written = summed({**asdict(result), "tuned_on": tuned_on})
        partial.write_text(json.dumps(written, indent=2, ensure_ascii=False), encoding="utf-8")
    return result


def load_adaptation(folder: Path, tuned_on: dict[str, Any] | None = None) -> Adaptation | None:
    """Read what came of an adaptation; None where there is none, or where it was tuned on something else."""
    file = folder / ADAPTED_FILE
    if not file.is_file():
        return None
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        found = Adaptation(**{field.name: facts[field.name] for field in fields(Adaptation)})
        same = tuned_on is None or facts["tuned_on"] == tuned_on
        figures = [value for name, value in asdict(found).items() if name != "model"]
        if not all(isinstance(value, (int, float)) for value in figures):
            raise ValueError("figures that are no numbers")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DatastoreCorrupt(f"{file} cannot be read ({error}). Remove it and run: knnlm adapt") from None
    check_sum(file, facts, "Remove it and run: knnlm adapt")
    return found if same else None


def _check_place(folder: Path) -> None:
    """Refuse a place that holds something else, before anything is trained."""
    check_folder(folder)
    if (folder / CATALOG_FILE).exists() and not is_decoder(folder / STUDENT_FOLDER):
        raise DatastoreError(f"{folder} is a memory already, and not one that a student reads. Choose another --out.")


def _hash(documents: Sequence[Document]) -> str:
    whole = "".join(text_hash(document.text) for document in documents)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _given(documents: Iterable[Document], held_out: Iterable[Document], lm: CausalLM) -> _Splits:
    """Take what is to be learnt and what is to be tuned on as they are given."""
    learnt, kept = list(documents), list(held_out)
    tokens, others = (lm.encode_all([document.text for document in some]) for some in (learnt, kept))
    if not any(tokens):
        raise CorpusError("There is no text to learn: no document has a token.")
    if not any(others):
        raise CorpusError("There is no text to tune on: no held-out document has a token.")
    return _Splits(learnt, tokens, kept, sum(map(len, others)))


def _divide(documents: Iterable[Document], lm: CausalLM, seed: int, limit: int) -> _Splits:
    """Hold some documents out, drawn by the seed, copies of a text together: about a tenth, and no more than is of use.

    One that is most of the text is better learnt, so where none is short enough, it is the shortest.
    """
    everything = list(documents)
    tokens = lm.encode_all([document.text for document in everything])
    copies: dict[str, list[int]] = {}
    for number, document in enumerate(everything):
        if tokens[number]:
            copies.setdefault(text_hash(document.text), []).append(number)
    if not copies:
        raise CorpusError("There is no text to learn: no document has a token.")
    if len(copies) < 2:
        raise ParameterError("One document alone cannot be divided: give text to tune on with --valid.")
    groups = list(copies.values())
    sizes = [sum(len(tokens[number]) for number in group) for group in groups]
    wanted, found = min(sum(sizes) / _SHARE, limit), 0
    chosen: list[int] = []
    for place in np.random.default_rng(seed).permutation(len(groups)).tolist():
        if found < wanted and found + sizes[place] <= _ROOM * wanted:
            chosen, found = [*chosen, *groups[place]], found + sizes[place]
    if not chosen:
        shortest = int(np.argmin(sizes))
        chosen, found = groups[shortest], sizes[shortest]
    held = set(chosen)
    learnt = [number for number in range(len(everything)) if number not in held]
    return _Splits(
        [everything[number] for number in learnt],
        [tokens[number] for number in learnt],
        [everything[number] for number in sorted(held)],
        found,
    )


def _store(
    documents: Sequence[Document], folder: Path, reader: CausalLM, lm: CausalLM, progress: Progress
) -> Datastore:
    """Build the student's store, or open it where that was done, and note which model it is for."""
    if _complete(folder):
        store = Datastore.open(folder)
        stored = [document.sha256 for document in store.documents()]
        if stored != [text_hash(document.text) for document in documents]:
            raise DatastoreError(f"{folder} was made of other text. Choose another --out, or remove it.")
        check_model(store, reader)
    else:
        # Both are to read the same windows, and one of them may not read as far.
        window = min(reader.window(), lm.window(), key=lambda shape: shape.context)
        options: dict[str, Any] = {"window": window, "language_model": lm.name}
        store = build(documents, folder, lm=reader, progress=progress, **options)
    if language_model(store) != lm.name:
        with writer_lock(folder):
            catalog = Catalog.open(folder / CATALOG_FILE, write=True)
            try:
                catalog.put(**{LANGUAGE_MODEL: lm.name})
            finally:
                catalog.close()
    return store


def _complete(folder: Path) -> bool:
    if not (folder / CATALOG_FILE).exists():
        return False
    catalog = Catalog.open(folder / CATALOG_FILE)
    try:
        return bool(catalog.get("state") == "complete")
    finally:
        catalog.close()


def _tune(store: Datastore, lm: CausalLM, texts: _Splits, limit: int, progress: Progress) -> Adaptation:
    """Tune all memories together, keep the choice, and see what each is worth by itself."""
    mixture = Mixture.open(store, lm, memories=MEMORIES, use_tuned=False, options=MixtureOptions(dtype=lm.dtype))
    device = str(lm.device)
    with writer_lock(store.path), scratch(store.path) as place:
        wanted = min(limit, texts.kept_tokens)
        trace = record(mixture, texts.kept, place / "trace", k=max(KS), limit=wanted, progress=progress)
        tuning = tune_trace(trace, store, specs=mixture.specs, device=device, progress=progress)
        save_result(store.path, tuning, trace)
        seen = _look(trace, tuning, device)
    knn = fit_weights(seen.select("knn"), "fixed", frequencies=token_frequencies(store))
    student = seen.select(f"decoder={STUDENT_FOLDER}")
    lmbda, facts = fit_decoder(student, lm.name, trace.metadata["sources"])
    set_lambda(store.path / STUDENT_FOLDER, lmbda, facts)
    alone = student.memories[0].log_probs[:, 0].to(torch.float64)
    return Adaptation(
        model=lm.name,
        tokens=sum(map(len, texts.tokens)),
        held_out_tokens=len(trace),
        held_out_documents=tuning.documents,
        leaked_documents=tuning.leaked_documents,
        base=tuning.base_perplexity,
        fine_tuned=math.exp(-float(alone.mean())),
        knn=knn.perplexity,
        decoder=facts["perplexity"],
        everything=tuning.perplexity,
        decoder_lambda=lmbda,
        seconds=0.0,
    )


def _look(trace: Trace, tuning: Tuning, device: str) -> TraceTable:
    """See what each memory gave to each token, at its best way of voting."""
    return tabulate(trace, [spec.settings[:1] for spec in tuning.specs], with_features=False, device=device)
