"""The study of a learned output matrix with more and more rows a word. Trains on the store; the model does not run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from knnlm.evaluation.sweep import LAMBDAS
from knnlm.memories.base import Context
from knnlm.memories.output import OutputCard, OutputMemory
from knnlm.report.context import Read, ReportContext, perplexity
from knnlm.report.study import CannotStudy, Cell, Line, Plot, Study, Table, lowest
from knnlm.training.output_matrix import OutputConfig, train_output

_ROWS = (1, 2, 3)

_KEYS = 20_000  # of the largest store that is learnt from when it is to be quick

_POSITIONS = 256  # read at a time: each has a score for every row of the matrix


def study_output(desk: ReportContext) -> Study:
    """Train a matrix with r rows a word, choose its λ on one text, and measure it on the other."""
    store = desk.store
    if desk.quick and store.key_count > _KEYS:
        raise CannotStudy(
            f"with --quick, a matrix is learnt from up to {_KEYS:,} keys only, and the store has {store.key_count:,}"
        )
    rows: list[list[Cell]] = []
    curves: list[Line] = []
    for r in _ROWS:
        folder = desk.work / f"output-r{r}-{store.fingerprint}"
        card = train_output(store, folder, OutputConfig(rows=r), device=desk.device, progress=desk.progress)
        valid, test = (_by_lambda(read, read_matrix(desk, folder, read)) for read in (desk.valid, desk.test))
        best = lowest(valid)
        rows.append([r, card.rows, _parameters(store.model["width"], card), LAMBDAS[best], valid[best], test[best]])
        curves.append(Line(f"r = {r}", list(LAMBDAS), [*test]))
    figures = [float(str(row[5])) for row in rows]
    best = lowest([float(str(row[4])) for row in rows])
    knn = desk.measure((desk.knn,), "fixed")[1]
    out = desk.work / f"output-r{_ROWS[best]}-{store.fingerprint}"
    return Study(
        name="output",
        title="A learned output matrix instead of the store",
        paper="Why do Nearest Neighbor Language Models Work?, W_ds by r",
        finding=(
            f"With {_ROWS[best]} row{'s' * (_ROWS[best] > 1)} a word the matrix gives {figures[best]:.2f} beside the "
            f"model; the store, which has {store.key_count * store.width:,} numbers, gives {knn:.2f}."
        ),
        command=desk.command("distill", desk.order.memory, "--into", "output", "--rows", _ROWS[best], "--out", out)
        + "\n"
        + desk.evaluation("--memories", f"output={out}:{rows[best][3]}"),
        tables=[
            Table.of(
                {"r": "d", "rows": ",d", "numbers": ",d", "λ": ".2f", "tuning": ".3f", "held-out": ".3f"},
                rows,
                best=best,
            )
        ],
        plots=[Plot.curves("Perplexity of the held-out text by λ", "λ", curves, model_alone=desk.base, store=knn)],
    )


def read_matrix(desk: ReportContext, folder: Path, read: Read) -> Tensor:
    """Give the (N,) log-probabilities that a trained matrix gives the tokens of a text."""
    memory = OutputMemory.open(folder, device=desk.device)
    assert memory.source is not None
    found = []
    for begin in range(0, len(read.keys), _POSITIONS):
        rows = slice(begin, begin + _POSITIONS)
        keys = torch.from_numpy(np.array(read.keys[rows])).to(desk.device)
        targets = torch.from_numpy(np.array(read.trace.targets[rows])).long().to(desk.device)
        found.append(memory.predict(Context({memory.source: keys})).components[0].log_prob(targets).cpu())
    return torch.cat(found).double()


def _by_lambda(read: Read, matrix: Tensor) -> list[float]:
    model = torch.from_numpy(np.array(read.trace.lm_log_probs)).double()
    weights = torch.tensor(LAMBDAS, dtype=torch.float64)
    return [perplexity(torch.logaddexp(model + (1 - w).log(), matrix + w.log())) for w in weights]


def _parameters(width: int, card: OutputCard) -> int:
    """Count the numbers of a matrix: its rows and its biases."""
    return card.rows * (width + 1)
