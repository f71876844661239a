"""Studies of memories: each alone, all together, the best component at each token, and skipped searches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from knnlm.evaluation.sweep import LAMBDAS
from knnlm.evaluation.tune import evaluate_table
from knnlm.mixture.weights import GatedWeights
from knnlm.report.context import ReportContext, TracedText, describe_folds, perplexity
from knnlm.report.study import Cell, Line, Plot, Study, StudyUnavailable, Table, lowest, percent_lower

_ORACLE_NAMES = ("model", "one λ", "gated", "better of two", "best of all")
_FRACTIONS = tuple(round(0.1 * step, 1) for step in range(11))


def name_memories(labels: Sequence[str]) -> list[str]:
    """Return short names of memories, with as few folders as tell them apart."""
    possible = []
    for label in labels:
        kind, _, path = label.partition("=")
        folders = [folder for folder in path.split("/") if folder]
        possible.append([*(f"{kind}={'/'.join(folders[-count:])}" for count in range(1, len(folders) + 1)), label])
    names = []
    for number, own in enumerate(possible):
        taken = {name for other, names in enumerate(possible) if other != number for name in names}
        names.append(next((name for name in own if name not in taken), own[-1]))
    return names


def study_memories(context: ReportContext) -> Study:
    """Mix each memory alone, with knn, and all together with every kind of weights."""
    everything = tuple(range(len(context.labels)))
    first = context.knn
    others = [number for number in everything if number != first]
    wanted: list[tuple[tuple[int, ...], str]] = [((first,), "fixed")]
    wanted += [((number,), "fixed") for number in others]
    wanted += [((first, number), "fixed") for number in others]
    if len(others) > 1:
        wanted.append((everything, "fixed"))
    wanted += [(everything, kind) for kind in ("fitted", "buckets", "gated")]
    rows = _measure_all(context, wanted)
    figures = [float(str(row[5])) for row in rows]
    best = lowest([float(str(row[4])) for row in rows])
    options = ("--memories", ",".join(context.labels), "--weights", "gated")
    held_back = describe_folds(context.table(context.valid, "fixed").documents)
    names = [f"{row[0]} ({row[1]})" if row[1] else str(row[0]) for row in rows]
    return Study(
        name="memories",
        title="Each memory alone, and all together",
        paper="kNN-LM, Table 1",
        finding=(
            f"The store alone makes perplexity {percent_lower(figures[1], context.base)} than the model's "
            f"{context.base:.2f}; the best on the tuning text out of fold, {names[best]}, makes it "
            f"{figures[best]:.2f}, {percent_lower(figures[best], context.base)}."
        ),
        command=context.tune_command(*options) + "\n" + context.eval_command("--memories", ",".join(context.labels)),
        tables=[
            Table.build(
                {"memories": "", "weights": "", "λ": ".2f", "tuning": ".3f", "out of fold": ".3f", "held-out": ".3f"},
                rows,
                caption="λ: the mean weight of all memories together. Tuning: the perplexity that knnlm tune reports, "
                f"by weights fitted to the same text (except gates). Out of fold: the tuning text {held_back}; the "
                "best row has the lowest. k and τ are chosen on all of it.",
                best=best,
            )
        ],
        plots=[Plot.bars("Perplexity by memories", names, figures)],
    )


def _measure_all(context: ReportContext, wanted: Sequence[tuple[tuple[int, ...], str]]) -> list[list[Cell]]:
    """Return a row for the model and one for each mixture."""
    alone, labels = perplexity(context.valid.trace.lm_log_probs), name_memories(context.labels)
    rows: list[list[Cell]] = [["the model alone", "", 0.0, alone, alone, context.base]]
    for memories, kind in wanted:
        valid, test, weight = context.measure(memories, kind)
        name = " + ".join(labels[number] for number in memories)
        rows.append([name, kind, weight, valid, context.out_of_fold(memories, kind), test])
    return rows


def study_baselines(context: ReportContext) -> Study:
    """Mix each memory alone with the model, for every λ."""
    tried = {}
    for number, label in enumerate(name_memories(context.labels)):
        valid, test = (_by_lambda(*_pair(context, read, number)) for read in (context.valid, context.test))
        tried[label] = (number, lowest(valid.tolist()), valid.tolist(), test.tolist())
    rows: list[list[Cell]] = [
        [name, LAMBDAS[best], valid[best], test[best]] for name, (_, best, valid, test) in tried.items()
    ]
    figures = {name: test[best] for name, (_, best, _, test) in tried.items()}
    knn = figures.pop("knn")
    if not figures:
        raise StudyUnavailable("there is no memory besides knn")
    name = min(figures, key=lambda name: tried[name][2][tried[name][1]])  # on the tuning text
    number, best, _, _ = tried[name]
    lines = [Line(name, list(LAMBDAS), test) for name, (_, _, _, test) in tried.items()]
    return Study(
        name="baselines",
        title="N-grams and other memories instead of the store",
        paper="kNN-LM, Figures 7 and 8",
        finding=(
            f"Each alone with the model, the store gives {knn:.2f} and the best of the others, {name}, "
            f"{figures[name]:.2f}; the model gives {context.base:.2f}."
        ),
        command=_alone(context, number, LAMBDAS[best]),
        tables=[
            Table.build(
                {"memory": "", "λ": ".2f", "tuning": ".3f", "held-out": ".3f"},
                rows,
                best=lowest([float(str(row[2])) for row in rows]),
            )
        ],
        plots=[Plot.curves("Perplexity of the held-out text by λ", "λ", lines, model_alone=context.base)],
        notes=_missing_memories(context.labels),
        numbers={"lambda": list(LAMBDAS), **{name: {"valid": one[2], "test": one[3]} for name, one in tried.items()}},
    )


def _missing_memories(labels: Sequence[str]) -> list[str]:
    """Return how to add the memories that the report has none of."""
    notes = []
    if not any(label.startswith("decoder=") for label in labels):
        notes.append("No second model. Add one with --lm.")
    if "output" not in labels:
        notes.append("No output matrix. Train one with knnlm distill.")
    return notes


def _alone(context: ReportContext, number: int, lmbda: float) -> str:
    """Return the commands that evaluate one memory alone; k and τ of a cache can only be tuned."""
    label, swept = context.labels[number], context.sweeps[number]
    if swept is not None:
        return context.tune_command("--memories", label) + "\n" + context.eval_command("--memories", label)
    return context.eval_command("--memories", label, "--lambda", lmbda)


def _pair(context: ReportContext, read: TracedText, number: int) -> tuple[Tensor, Tensor]:
    """Return (N,) log-probabilities by the model and by the first component of a memory, at its best setting."""
    table = context.table(read, "fixed")
    model, memory = table.lm_log_probs.double(), table.memories[number].log_probs[:, 0].double()
    return model, torch.where(memory.isnan(), model, memory)


def _by_lambda(model: Tensor, memory: Tensor) -> Tensor:
    """Return the perplexity of the mixture for each λ."""
    weights = torch.tensor(LAMBDAS, dtype=torch.float64)
    means = [float(torch.logaddexp(model + (1 - w).log(), memory + w.log()).mean()) for w in weights]
    return (-torch.tensor(means, dtype=torch.float64)).exp()


def study_oracle(context: ReportContext) -> Study:
    """Choose the best component at each token, which no weights can beat."""
    setting, lmbda = context.chosen
    model, store = context.store_log_probs(context.test)
    vote = torch.where(store.isnan(), model, store)
    mixed = torch.logaddexp(model + np.log1p(-lmbda), vote + np.log(lmbda)) if lmbda > 0 else model
    everything = tuple(range(len(context.labels)))
    parts = context.table(context.test, "gated").log_probs.double().nan_to_num(nan=-torch.inf).amax(1)
    rows: list[list[Cell]] = [
        ["the model alone", perplexity(model)],
        [f"one λ = {lmbda:.2f} everywhere", perplexity(mixed)],
        ["all memories, gated", context.measure(everything, "gated")[1]],
        ["the better of model and store at each token", perplexity(torch.fmax(model, store))],
        ["the best of all components at each token", perplexity(parts)],
    ]
    figures = [float(str(row[1])) for row in rows]
    better = float((vote > model).double().mean())
    options = ("--k", setting.k, "--knn-temperature", setting.knn_temperature, "--lambda", lmbda)
    return Study(
        name="oracle",
        title="Oracle weights",
        paper="Why do Nearest Neighbor Language Models Work?, on interpolation",
        finding=(
            f"The store is the better of the two at {better:.0%} of the tokens; always choosing the better would give "
            f"{figures[3]:.2f} where one λ gives {figures[1]:.2f}."
        ),
        command=context.eval_command("--memories", "knn", "--metric", "l2", *options),
        tables=[Table.build({"weights": "", "held-out": ".3f"}, rows)],
        plots=[Plot.bars("Perplexity by weights", [*_ORACLE_NAMES], figures)],
        notes=[
            "knnlm eval calls the fourth row “best of all”, because its only components are the model and the store."
        ],
        numbers={"store_better": better},
    )


def study_skip(context: ReportContext) -> Study:
    """Skip more and more searches, first where the gate expects the smallest gain."""
    everything = tuple(range(len(context.labels)))
    weights = context.fit(everything, "gated").weights
    if not isinstance(weights, GatedWeights) or weights.skip is None:
        raise StudyUnavailable("the gate has no network that predicts where to search")
    table = context.table(context.test, "gated")
    before = table.features(weights.frequencies, without=table.expensive, leave_out=True)
    rows: list[list[Cell]] = []
    for fraction in _FRACTIONS:
        skipped = 1 - float(weights.skip.search_mask(before, fraction).double().mean())
        rows.append([fraction, skipped, evaluate_table(table, replace(weights, fraction=fraction)).perplexity])
    figures = [float(str(row[2])) for row in rows]
    shares = [float(str(row[1])) for row in rows]
    half = min(range(len(rows)), key=lambda number: abs(shares[number] - 0.5))
    finding = f"With no search skipped perplexity is {figures[0]:.2f}, with all skipped {figures[-1]:.2f}"
    if 0.1 < shares[half] < 0.9:
        finding += f"; with {shares[half]:.0%} skipped it is {figures[half]:.2f}."
    else:
        finding += "; the gate does not separate searches here."
    options = ("--memories", ",".join(context.labels), "--weights", "gated")
    return Study(
        name="skip",
        title="Skipped searches",
        paper="Efficient Nearest Neighbor Language Models (He et al. 2021), adaptive retrieval",
        finding=finding,
        command=context.tune_command(*options)
        + "\n"
        + context.eval_command("--memories", ",".join(context.labels), "--skip-fraction", 0.5),
        tables=[Table.build({"--skip-fraction": ".1f", "searches skipped": ".1%", "held-out": ".3f"}, rows)],
        plots=[
            Plot.curves(
                "Perplexity by the share of skipped searches",
                "searches skipped",
                [Line("held-out text", shares, [*figures])],
                model_alone=context.base,
            )
        ],
    )
