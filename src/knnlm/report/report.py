"""Run the studies, keep what each said, and write the page. Knows nothing about what studies do.

A study that is finished is kept in OUT/work/<study>.json with the key of its inputs; with the same inputs it is not
made again, so a report that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from knnlm.corpus import Document
from knnlm.datastore.locks import writer_lock
from knnlm.errors import DatastoreError, KnnlmError, ParameterError
from knnlm.io import atomic_write, translate_os_errors
from knnlm.lm.causal import CausalLM
from knnlm.progress import Advance, Progress, silent
from knnlm.report import plots
from knnlm.report.context import ReportContext, StudyTexts, perplexity
from knnlm.report.html import count, write_html
from knnlm.report.studies.breakdown import study_examples, study_where
from knnlm.report.studies.compression import study_pruning, study_quantised
from knnlm.report.studies.layers import study_layer
from knnlm.report.studies.memories import study_baselines, study_memories, study_oracle, study_skip
from knnlm.report.studies.output import study_output
from knnlm.report.studies.store import study_metric, study_size
from knnlm.report.studies.votes import study_k, study_lambda, study_temperature
from knnlm.report.study import Study, finite
from knnlm.report.texts import count_shared, gather

_QUICK_TOKENS = 4000  # of each text, where it is to be quick and nothing else is said

# In the order of the page.
STUDIES: dict[str, Callable[[ReportContext], Study]] = {
    "memories": study_memories,
    "lambda": study_lambda,
    "k": study_k,
    "temperature": study_temperature,
    "size": study_size,
    "layer": study_layer,
    "metric": study_metric,
    "quantised": study_quantised,
    "pruning": study_pruning,
    "baselines": study_baselines,
    "output": study_output,
    "oracle": study_oracle,
    "skip": study_skip,
    "where": study_where,
    "examples": study_examples,
}


@dataclass(frozen=True)
class Report:
    """What was found, and where the page is."""

    page: Path
    facts: dict[str, Any]  # the memory, the texts, the model's perplexity
    studies: list[Study]
    left_out: dict[str, str]  # studies that could not be made, and why

    def as_dict(self) -> dict[str, Any]:
        """Give every number, for JSON."""
        studies = {study.name: study.as_dict() for study in self.studies}
        found = finite({"page": str(self.page), **self.facts, "studies": studies, "left_out": self.left_out})
        assert isinstance(found, dict)
        return found


def report(
    memory: str | Path,
    documents: Iterable[Document],
    out: str | Path,
    *,
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
    """Study a memory on a text, choosing on `valid` or on half of the text, and write OUT/index.html.

    `lm` is the memory's model, if it is open already; `second_lm` is the folder of another one to mix in. `limit` is
    for each of the two texts.
    """
    plots.require()
    wanted = check_studies(studies)
    if limit is not None and limit < 1:
        raise ParameterError(f"limit must be at least 1 token, not {limit}.")
    limit = _QUICK_TOKENS if limit is None and quick else limit
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise DatastoreError(f"{folder} is a file. Choose another --out.")
    order = StudyTexts(
        Path(memory),
        folder,
        gather(documents, valid, limit=limit),
        memories=memories,
        second_lm=second_lm,
        limit=limit,
        quick=quick,
        model=model,
        device=device,
        dtype=dtype,
    )
    desk = ReportContext(order, lm, progress=progress)
    if not desk.store.key_count:
        raise DatastoreError(f"{desk.store.path} holds no keys: there is nothing to study.")
    with writer_lock(desk.work, create=True):
        facts = _facts(desk)  # first: without these there is no page, whatever a study says
        found = Report(folder / "index.html", facts, *_run(desk, wanted))
        _write(found, folder, progress)
    return found


def check_studies(studies: Sequence[str] | None) -> list[str]:
    """Put the studies that are wanted in order, and refuse those that there are not."""
    if not studies or list(studies) == ["all"]:
        return list(STUDIES)
    for name in studies:
        if name not in STUDIES:
            raise ParameterError(f"There is no study {name!r}. The studies are {', '.join(STUDIES)}, or all.")
    return [name for name in STUDIES if name in studies]


def _named(name: str, progress: Progress) -> Progress:
    """Say on every bar which study it is for."""

    def named(what: str, *, total: int | None = None, unit: str = "tokens") -> AbstractContextManager[Advance]:
        return progress(f"{name}: {what}", total=total, unit=unit)

    return named


def _run(desk: ReportContext, wanted: Sequence[str]) -> tuple[list[Study], dict[str, str]]:
    """Make each study that was not made before."""
    made: list[Study] = []
    left_out: dict[str, str] = {}
    progress = desk.progress
    for name in wanted:
        file = desk.work / f"{name}.json"
        key = f"{desk.key}{'-quick' if desk.quick else ''}"
        study = _kept(file, key)
        if study is None:
            begin = time.perf_counter()
            desk.progress = _named(name, progress)
            try:
                study = STUDIES[name](desk)
            except KnnlmError as error:  # one that cannot be made takes nothing from the others
                left_out[name] = str(error)
                continue
            # As it will be read again, so that a page does not depend on who made its studies.
            study = Study.from_dict(replace(study, seconds=time.perf_counter() - begin).as_dict())
            _write_json(file, {"key": key, "study": study.as_dict()})
        made.append(study)
    return made, left_out


def _kept(file: Path, key: str) -> Study | None:
    """Read a study that was made of the same inputs; None where there is none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Study.from_dict(found["study"]) if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _facts(desk: ReportContext) -> dict[str, Any]:
    """Say what was studied."""
    store, valid, test = desk.store, desk.valid.trace, desk.test.trace
    setting, lmbda = desk.chosen
    remembered, shared = _remembered(desk), count_shared(desk.valid.documents, desk.test.documents)
    return {
        "memory": str(desk.order.memory),
        "model": store.model["name"],
        "stored_tokens": store.rows,
        "stored_keys": store.key_count,
        "stored_documents": store.catalog.document_count(),
        "memories": desk.labels,
        "chosen_on": desk.order.texts.how,
        "valid_tokens": len(valid),
        "valid_documents": valid.metadata["documents"],
        "test_tokens": len(test),
        "test_documents": test.metadata["documents"],
        "leaked_documents": remembered,
        "shared_documents": shared,
        "warnings": _warnings(remembered, shared, test.metadata["documents"]),
        "base_perplexity": desk.base,
        "valid_base_perplexity": perplexity(valid.lm_log_probs),
        "k": setting.k,
        "knn_temperature": setting.knn_temperature,
        "lambda": lmbda,
        "at_edge": desk.sweep.at_edge(),
        "quick": desk.quick,
    }


def _remembered(desk: ReportContext) -> int:
    """Count the documents that are in the memory, as they were given: half of one is another text than all of it."""
    texts, halves = desk.order.texts, (desk.valid, desk.test)
    if not texts.whole:
        return sum(int(half.trace.metadata["leaked_documents"]) for half in halves)
    read = max(len(half.documents) for half in halves)
    together = list(zip(texts.whole, texts.valid, texts.test, strict=True))[:read]
    return sum(any(desk.store.holds(document.text) for document in same) for same in together)


def _warnings(remembered: int, shared: int, documents: int) -> list[str]:
    """Say why figures are better than they would be on other text."""
    found = []
    if remembered:
        found.append(
            f"{count(remembered)} of the texts {_are(remembered)} in the memory itself: these figures are too good."
        )
    if shared:
        found.append(
            f"{shared:,} of the {count(documents)} reported on {_are(shared)} in the tuning text too: settings were "
            "chosen on what is reported on, and these figures are too good."
        )
    return found


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _write(found: Report, folder: Path, progress: Progress) -> None:
    """Draw the plots and write the page and the numbers."""
    drawings: dict[str, list[bytes]] = {}
    with progress("drawing", total=sum(len(study.plots) for study in found.studies), unit="plots") as advance:
        for study in found.studies:
            drawings[study.name] = []
            for number, plot in enumerate(study.plots):
                name = study.name if len(study.plots) == 1 else f"{study.name}-{number + 1}"
                drawings[study.name].append(plots.draw(plot))
                with translate_os_errors(folder / f"{name}.png"):
                    (folder / f"{name}.png").write_bytes(drawings[study.name][-1])
                advance(1)
    _write_json(folder / "report.json", found.as_dict())
    write_html(found.page, facts=found.facts, studies=found.studies, left_out=found.left_out, drawings=drawings)


def _write_json(file: Path, value: Any) -> None:
    """Write a file that appears complete or not at all."""
    with atomic_write(file) as partial:
        partial.write_text(json.dumps(finite(value), indent=1, ensure_ascii=False), encoding="utf-8")
