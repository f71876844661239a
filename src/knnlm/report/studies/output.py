"""The study of a trained output matrix with one to three rows per token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from knnlm.evaluation.sweep import LAMBDAS
from knnlm.memories.base import Context
from knnlm.memories.output import OutputCard, OutputMemory
from knnlm.report.context import ReportContext, TracedText, perplexity
from knnlm.report.study import Cell, Line, Plot, Study, StudyUnavailable, Table, lowest
from knnlm.training.output_matrix import OutputConfig, train_output

_ROWS = (1, 2, 3)  # per token
_MAX_QUICK_KEYS = 20_000
_BATCH_POSITIONS = 256  # each has a score for every row of the matrix


def study_output(context: ReportContext) -> Study:
    """Train a matrix with r rows per token, choose its λ on the tuning text, and evaluate it on the held-out text."""
    store = context.store
    if context.quick and store.key_count > _MAX_QUICK_KEYS:
        raise StudyUnavailable(
            f"with --quick, a matrix is trained on at most {_MAX_QUICK_KEYS:,} keys, and the store has "
            f"{store.key_count:,}"
        )
    rows, curves = _train_all(context)
    figures = [float(str(row[5])) for row in rows]
    best = lowest([float(str(row[4])) for row in rows])
    knn = context.measure((context.knn,), "fixed")[1]
    out = _folder(context, _ROWS[best])
    return Study(
        name="output",
        title="An output matrix instead of the store",
        paper="Why do Nearest Neighbor Language Models Work?, W_ds by r",
        finding=(
            f"With {_ROWS[best]} row{'s' * (_ROWS[best] > 1)} per token the matrix gives {figures[best]:.2f} with the "
            f"model; the store, which has {store.key_count * store.width:,} numbers, gives {knn:.2f}."
        ),
        command=context.command(
            "distill", context.options.store, "--into", "output", "--rows", _ROWS[best], "--out", out
        )
        + "\n"
        + context.eval_command("--memories", f"output={out}:{rows[best][3]}"),
        tables=[
            Table.build(
                {"r": "d", "rows": ",d", "numbers": ",d", "λ": ".2f", "tuning": ".3f", "held-out": ".3f"},
                rows,
                best=best,
            )
        ],
        plots=[Plot.curves("Perplexity of the held-out text by λ", "λ", curves, model_alone=context.base, store=knn)],
    )


def _folder(context: ReportContext, rows: int) -> Path:
    return context.work / f"output-r{rows}-{context.store.fingerprint}"


def _train_all(context: ReportContext) -> tuple[list[list[Cell]], list[Line]]:
    """Train every matrix, and return the rows of the table and the perplexity of the held-out text by λ."""
    store = context.store
    rows: list[list[Cell]] = []
    curves: list[Line] = []
    for r in _ROWS:
        folder = _folder(context, r)
        card = train_output(store, folder, OutputConfig(rows=r), device=context.device, progress=context.progress)
        valid, test = (_by_lambda(read, read_matrix(context, folder, read)) for read in (context.valid, context.test))
        best = lowest(valid)
        rows.append([r, card.rows, _parameters(store.model["width"], card), LAMBDAS[best], valid[best], test[best]])
        curves.append(Line(f"r = {r}", list(LAMBDAS), [*test]))
    return rows, curves


def read_matrix(context: ReportContext, folder: Path, read: TracedText) -> Tensor:
    """Return the (N,) log-probabilities of a text by a trained matrix."""
    memory = OutputMemory.open(folder, device=context.device)
    assert memory.source is not None
    blocks = []
    for begin in range(0, len(read.keys), _BATCH_POSITIONS):
        rows = slice(begin, begin + _BATCH_POSITIONS)
        keys = torch.from_numpy(np.array(read.keys[rows])).to(context.device)
        targets = torch.from_numpy(np.array(read.trace.targets[rows])).long().to(context.device)
        blocks.append(memory.predict(Context({memory.source: keys})).components[0].log_prob(targets).cpu())
    return torch.cat(blocks).double()


def _by_lambda(read: TracedText, matrix: Tensor) -> list[float]:
    model = torch.from_numpy(np.array(read.trace.lm_log_probs)).double()
    weights = torch.tensor(LAMBDAS, dtype=torch.float64)
    return [perplexity(torch.logaddexp(model + (1 - w).log(), matrix + w.log())) for w in weights]


def _parameters(width: int, card: OutputCard) -> int:
    """Return the number of weights and biases."""
    return card.rows * (width + 1)
