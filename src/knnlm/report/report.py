"""Run the studies and write the page.

A finished study is saved in OUT/work/<study>.json with a hash of its inputs and is not run again for the same inputs,
so an interrupted report resumes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from knnlm.corpus import Document
from knnlm.datastore.locks import writer_lock
from knnlm.errors import DatastoreError, KnnlmError, MissingExtra, ParameterError
from knnlm.io import atomic_write, translate_os_errors
from knnlm.lm.causal import CausalLM
from knnlm.progress import Advance, Progress, silent
from knnlm.report.context import ReportContext, ReportOptions, count_shared, perplexity, split_texts
from knnlm.report.html import count_documents, write_html
from knnlm.report.plots import draw
from knnlm.report.studies.breakdown import study_examples, study_where
from knnlm.report.studies.compression import study_pruning, study_quantised
from knnlm.report.studies.gains import study_gains
from knnlm.report.studies.layers import study_layer
from knnlm.report.studies.memories import study_baselines, study_memories, study_oracle, study_skip
from knnlm.report.studies.output import study_output
from knnlm.report.studies.selection import study_training
from knnlm.report.studies.store import study_metric, study_size
from knnlm.report.studies.votes import study_k, study_lambda, study_temperature
from knnlm.report.study import Study, finite

_QUICK_TOKENS = 4000  # of each text, with `quick` and no limit

# In the order of the page.
STUDIES: dict[str, Callable[[ReportContext], Study]] = {
    "memories": study_memories,
    "lambda": study_lambda,
    "k": study_k,
    "knn_temperature": study_temperature,
    "size": study_size,
    "layer": study_layer,
    "metric": study_metric,
    "quantised": study_quantised,
    "pruning": study_pruning,
    "baselines": study_baselines,
    "output": study_output,
    "training": study_training,
    "oracle": study_oracle,
    "skip": study_skip,
    "where": study_where,
    "gains": study_gains,
    "examples": study_examples,
}


@dataclass(frozen=True)
class Report:
    """The results of all studies, and the path of the page."""

    page: Path
    metadata: dict[str, Any]  # the store, the texts, the perplexity of the model
    studies: list[Study]
    skipped: dict[str, str]  # studies that were not possible, and why

    def as_dict(self) -> dict[str, Any]:
        """Return every number, for JSON."""
        studies = {study.name: study.as_dict() for study in self.studies}
        values = finite({"page": str(self.page), **self.metadata, "studies": studies, "skipped": self.skipped})
        assert isinstance(values, dict)
        return values


def report(
    store: str | Path,
    documents: Iterable[Document],
    *,
    out: str | Path,
    valid: Iterable[Document] | None = None,
    lm: CausalLM | None = None,
    memories: str | None = None,
    second_lm: str | None = None,
    studies: Sequence[str] | None = None,
    limit: int | None = None,
    quick: bool = False,
    model: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress = silent,
) -> Report:
    """Study a store on a text, choosing settings on `valid` or on half of the text, and write OUT/index.html.

    `lm` is the store's model, if it is already loaded; `second_lm` is the folder of another model to mix in. `limit`
    applies to each of the two texts.
    """
    folder = Path(out)
    _check(folder, limit)
    selected = check_studies(studies)
    limit = _QUICK_TOKENS if limit is None and quick else limit
    texts = split_texts(documents, valid, limit=limit)
    options = ReportOptions(Path(store), folder, texts, memories, second_lm, limit, quick, model, device, dtype)
    context = ReportContext(options, lm, progress=progress)
    if not context.store.key_count:
        raise DatastoreError(f"{context.store.path}: the store has no keys. Build it from text first.")
    with writer_lock(context.work, create=True):
        metadata = _metadata(context)  # first: without it there is no page
        result = Report(folder / "index.html", metadata, *_run(context, selected))
        _write(result, folder, progress)
    return result


def _check(folder: Path, limit: int | None) -> None:
    """Raise if a package is missing, the limit is too low or the folder is a file."""
    for package in ("jinja2", "matplotlib"):
        if find_spec(package) is None:
            raise MissingExtra("A report", package, "report")
    if limit is not None and limit < 1:
        raise ParameterError(f"limit must be at least 1 token, not {limit}.")
    if folder.exists() and not folder.is_dir():
        raise DatastoreError(f"{folder}: not a folder. Choose another --out.")


def check_studies(studies: Sequence[str] | None) -> list[str]:
    """Return the names of studies in the order of the page; raise for an unknown one."""
    if not studies or list(studies) == ["all"]:
        return list(STUDIES)
    for name in studies:
        if name not in STUDIES:
            raise ParameterError(f"There is no study {name!r}. The studies are {', '.join(STUDIES)}, or all.")
    return [name for name in STUDIES if name in studies]


def _prefixed(name: str, progress: Progress) -> Progress:
    """Return a progress callback that puts the name of a study before each description."""

    def prefixed(what: str, *, total: int | None = None, unit: str = "tokens") -> AbstractContextManager[Advance]:
        return progress(f"{name}: {what}", total=total, unit=unit)

    return prefixed


def _run(context: ReportContext, names: Sequence[str]) -> tuple[list[Study], dict[str, str]]:
    """Run each study that is not saved, and return the studies and the reasons of those skipped."""
    studies: list[Study] = []
    skipped: dict[str, str] = {}
    progress = context.progress
    for name in names:
        file = context.work / f"{name}.json"
        key = f"{context.key}{'-quick' if context.quick else ''}"
        study = _load_study(file, key)
        if study is None:
            begin = time.perf_counter()
            context.progress = _prefixed(name, progress)
            try:
                study = STUDIES[name](context)
            except KnnlmError as error:  # the other studies go on
                skipped[name] = str(error)
                continue
            # Round-trip through JSON, so that the page is the same whether its studies are new or loaded.
            study = Study.from_dict(replace(study, seconds=time.perf_counter() - begin).as_dict())
            _write_json(file, {"key": key, "study": study.as_dict()})
        studies.append(study)
    return studies, skipped


def _load_study(file: Path, key: str) -> Study | None:
    """Return a saved study of the same inputs; None where there is no readable one."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        return Study.from_dict(saved["study"]) if saved["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _metadata(context: ReportContext) -> dict[str, Any]:
    """Return the inputs and the chosen settings."""
    store, valid, test = context.store, context.valid.trace, context.test.trace
    setting, lmbda = context.chosen
    leaked, shared = _count_leaked(context), count_shared(context.valid.documents, context.test.documents)
    return {
        "store": str(context.options.store),
        "model": store.model["name"],
        "stored_tokens": store.entry_count,
        "stored_keys": store.key_count,
        "stored_documents": store.catalog.document_count(),
        "memories": context.labels,
        "split": context.options.texts.description,
        "valid_tokens": len(valid),
        "valid_documents": valid.metadata["documents"],
        "test_tokens": len(test),
        "test_documents": test.metadata["documents"],
        "leaked_documents": leaked,
        "shared_documents": shared,
        "warnings": _warnings(leaked, shared, test.metadata["documents"]),
        "base_perplexity": context.base,
        "valid_base_perplexity": perplexity(valid.lm_log_probs),
        "k": setting.k,
        "knn_temperature": setting.knn_temperature,
        "lambda": lmbda,
        "at_edge": context.sweep.at_edge(),
        "quick": context.quick,
    }


def _count_leaked(context: ReportContext) -> int:
    """Return the number of documents that are in the store, before any was split in two."""
    texts, halves = context.options.texts, (context.valid, context.test)
    if not texts.whole:
        return sum(int(half.trace.metadata["leaked_documents"]) for half in halves)
    read = max(len(half.documents) for half in halves)
    versions = list(zip(texts.whole, texts.valid, texts.test, strict=True))[:read]
    return sum(any(context.store.holds(document.text) for document in documents) for documents in versions)


def _warnings(leaked: int, shared: int, documents: int) -> list[str]:
    """Return the reasons why results are better than on other text."""
    warnings = []
    if leaked:
        warnings.append(
            f"{count_documents(leaked)} of the texts {_are(leaked)} in the store itself: these results are too good."
        )
    if shared:
        warnings.append(
            f"{shared:,} of the {count_documents(documents)} held out {_are(shared)} in the tuning text too: settings "
            "were chosen on held-out text, and these results are too good."
        )
    return warnings


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _write(result: Report, folder: Path, progress: Progress) -> None:
    """Write the plots, the page and the numbers."""
    drawings: dict[str, list[bytes]] = {}
    with progress("drawing", total=sum(len(study.plots) for study in result.studies), unit="plots") as advance:
        for study in result.studies:
            drawings[study.name] = []
            for number, plot in enumerate(study.plots):
                name = study.name if len(study.plots) == 1 else f"{study.name}-{number + 1}"
                drawings[study.name].append(draw(plot))
                with translate_os_errors(folder / f"{name}.png"):
                    (folder / f"{name}.png").write_bytes(drawings[study.name][-1])
                advance(1)
    _write_json(folder / "report.json", result.as_dict())
    write_html(result.page, metadata=result.metadata, studies=result.studies, skipped=result.skipped, drawings=drawings)


def _write_json(file: Path, value: Any) -> None:
    """Write a JSON file that appears complete or not at all."""
    with atomic_write(file) as partial:
        partial.write_text(json.dumps(finite(value), indent=1, ensure_ascii=False), encoding="utf-8")
