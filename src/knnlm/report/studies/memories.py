"""Studies of what is mixed: each memory alone, all together, the best choice at each token, searches left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from knnlm.evaluation.fit import evaluate_table
from knnlm.evaluation.sweep import LAMBDAS
from knnlm.mixture.weights import GatedWeights
from knnlm.report.context import Read, ReportContext, perplexity
from knnlm.report.crossval import describe_folds
from knnlm.report.study import CannotStudy, Cell, Line, Plot, Study, Table, lowest, percent_lower

_TRUSTED = ("model", "one λ", "gated", "better of two", "best of all")

_FRACTIONS = tuple(round(0.1 * step, 1) for step in range(11))


def name_memories(labels: Sequence[str]) -> list[str]:
    """Name memories without the folders they lie in, as far as that tells them apart."""
    possible = []
    for label in labels:
        kind, _, path = label.partition("=")
        folders = [folder for folder in path.split("/") if folder]
        possible.append([*(f"{kind}={'/'.join(folders[-count:])}" for count in range(1, len(folders) + 1)), label])
    found = []
    for number, own in enumerate(possible):
        taken = {name for other, names in enumerate(possible) if other != number for name in names}
        found.append(next((name for name in own if name not in taken), own[-1]))
    return found


def study_memories(desk: ReportContext) -> Study:
    """Add one memory after the other, then weigh all of them in every way."""
    everything = tuple(range(len(desk.labels)))
    first = desk.knn
    others = [number for number in everything if number != first]
    wanted: list[tuple[tuple[int, ...], str]] = [((first,), "fixed")]
    wanted += [((number,), "fixed") for number in others]
    wanted += [((first, number), "fixed") for number in others]
    if len(others) > 1:
        wanted.append((everything, "fixed"))
    wanted += [(everything, kind) for kind in ("fitted", "buckets", "gated")]
    rows = _measure_all(desk, wanted)
    figures = [float(str(row[5])) for row in rows]
    best = lowest([float(str(row[4])) for row in rows])
    options = ("--memories", ",".join(desk.labels), "--weights", "gated")
    held_back = describe_folds(desk.seen(desk.valid, "fixed").documents)
    names = [f"{row[0]} ({row[1]})" if row[1] else str(row[0]) for row in rows]
    return Study(
        name="memories",
        title="Each memory alone, and all together",
        paper="kNN-LM, Table 1",
        finding=(
            f"The store alone makes perplexity {percent_lower(figures[1], desk.base)} than the model's "
            f"{desk.base:.2f}; the best on the tuning text out of fold, {names[best]}, makes it {figures[best]:.2f}, "
            f"{percent_lower(figures[best], desk.base)}."
        ),
        command=desk.tuning(*options) + "\n" + desk.evaluation("--memories", ",".join(desk.labels)),
        tables=[
            Table.of(
                {"mixed in": "", "weights": "", "λ": ".2f", "tuning": ".3f", "out of fold": ".3f", "held-out": ".3f"},
                rows,
                caption="λ: what all memories weigh together, on average. Tuning: what knnlm tune says, of weights "
                f"fitted to that very text (but for gates). Out of fold: the tuning text {held_back}; the best is the "
                "lowest of these. k and τ are chosen on all of it.",
                best=best,
            )
        ],
        plots=[Plot.bars("Perplexity by what is mixed", names, figures)],
    )


def _measure_all(desk: ReportContext, wanted: Sequence[tuple[tuple[int, ...], str]]) -> list[list[Cell]]:
    """Give a row for the model, then one for each of the mixtures."""
    alone, labels = perplexity(desk.valid.trace.lm_log_probs), name_memories(desk.labels)
    rows: list[list[Cell]] = [["the model alone", "", 0.0, alone, alone, desk.base]]
    for memories, kind in wanted:
        valid, test, weight = desk.measure(memories, kind)
        name = " + ".join(labels[number] for number in memories)
        rows.append([name, kind, weight, valid, desk.judge(memories, kind), test])
    return rows


def study_baselines(desk: ReportContext) -> Study:
    """Mix each memory alone with the model, by every λ."""
    tried = {}
    for number, label in enumerate(name_memories(desk.labels)):
        valid, test = (_by_lambda(*_pair(desk, read, number)) for read in (desk.valid, desk.test))
        tried[label] = (number, lowest(valid.tolist()), valid.tolist(), test.tolist())
    rows: list[list[Cell]] = [
        [name, LAMBDAS[best], valid[best], test[best]] for name, (_, best, valid, test) in tried.items()
    ]
    figures = {name: test[best] for name, (_, best, _, test) in tried.items()}
    knn = figures.pop("knn")
    notes = (
        [] if any(label.startswith("decoder=") for label in desk.labels) else ["No second model: give one with --lm."]
    )
    if "output" not in desk.labels:
        notes.append("No output matrix: train one with knnlm distill.")
    if not figures:
        raise CannotStudy("there is no memory besides the store to compare it with")
    name = min(figures, key=lambda name: tried[name][2][tried[name][1]])  # on the tuning text
    number, best, _, _ = tried[name]
    lines = [Line(name, list(LAMBDAS), test) for name, (_, _, _, test) in tried.items()]
    return Study(
        name="baselines",
        title="N-grams and other memories beside the store",
        paper="kNN-LM, Figures 7 and 8",
        finding=(
            f"Each alone with the model, the store gives {knn:.2f} and the best of the others, {name}, "
            f"{figures[name]:.2f}; the model gives {desk.base:.2f}."
        ),
        command=_alone(desk, number, LAMBDAS[best]),
        tables=[
            Table.of(
                {"memory": "", "λ": ".2f", "tuning": ".3f", "held-out": ".3f"},
                rows,
                best=lowest([float(str(row[2])) for row in rows]),
            )
        ],
        plots=[Plot.curves("Perplexity of the held-out text by λ", "λ", lines, model_alone=desk.base)],
        notes=notes,
        numbers={"lambda": list(LAMBDAS), **{name: {"valid": one[2], "test": one[3]} for name, one in tried.items()}},
    )


def _alone(desk: ReportContext, number: int, lmbda: float) -> str:
    """Write the commands that measure one memory alone with the model; k and τ of a cache are only ever tuned."""
    label, found = desk.labels[number], desk.sweeps[number]
    if found is not None:
        return desk.tuning("--memories", label) + "\n" + desk.evaluation("--memories", label)
    return desk.evaluation("--memories", label, "--lambda", lmbda)


def _pair(desk: ReportContext, read: Read, number: int) -> tuple[Tensor, Tensor]:
    """Give the (N,) log-probabilities by the model and by one memory's first part, at its best setting."""
    seen = desk.seen(read, "fixed")
    model, memory = seen.lm_log_probs.double(), seen.memories[number].log_probs[:, 0].double()
    return model, torch.where(memory.isnan(), model, memory)


def _by_lambda(model: Tensor, memory: Tensor) -> Tensor:
    """Give the perplexity of the mixture for each λ."""
    weights = torch.tensor(LAMBDAS, dtype=torch.float64)
    found = [float(torch.logaddexp(model + (1 - w).log(), memory + w.log()).mean()) for w in weights]
    return (-torch.tensor(found, dtype=torch.float64)).exp()


def study_oracle(desk: ReportContext) -> Study:
    """Let somebody who knows the token choose between the parts: what no weights can beat."""
    setting, lmbda = desk.chosen
    model, store = desk.store_logs(desk.test)
    vote = torch.where(store.isnan(), model, store)
    mixed = torch.logaddexp(model + np.log1p(-lmbda), vote + np.log(lmbda)) if lmbda > 0 else model
    everything = tuple(range(len(desk.labels)))
    parts = desk.seen(desk.test, "gated").log_probs.double().nan_to_num(nan=-torch.inf).amax(1)
    rows: list[list[Cell]] = [
        ["the model alone", perplexity(model)],
        [f"one λ = {lmbda:.2f} everywhere", perplexity(mixed)],
        ["all memories, gated", desk.measure(everything, "gated")[1]],
        ["the better of model and store at each token", perplexity(torch.fmax(model, store))],
        ["the best of all parts at each token", perplexity(parts)],
    ]
    figures = [float(str(row[1])) for row in rows]
    better = float((vote > model).double().mean())
    options = ("--k", setting.k, "--knn-temperature", setting.knn_temperature, "--lambda", lmbda)
    return Study(
        name="oracle",
        title="If one knew whom to trust",
        paper="Why do Nearest Neighbor Language Models Work?, on interpolation",
        finding=(
            f"The store is the better of the two at {better:.0%} of the tokens; always choosing the better would give "
            f"{figures[3]:.2f} where one λ gives {figures[1]:.2f}."
        ),
        command=desk.evaluation("--memories", "knn", "--metric", "l2", *options),
        tables=[Table.of({"who is trusted": "", "held-out": ".3f"}, rows)],
        plots=[Plot.bars("Perplexity by who is trusted", [*_TRUSTED], figures)],
        notes=["knnlm eval calls the fourth row “best of all”, since there all means model and store."],
        numbers={"store_better": better},
    )


def study_skip(desk: ReportContext) -> Study:
    """Leave out more and more searches, where the gate expects least of them."""
    everything = tuple(range(len(desk.labels)))
    weights = desk.fit(everything, "gated").weights
    if not isinstance(weights, GatedWeights) or weights.skip is None:
        raise CannotStudy("the gate has not learnt where to search")
    seen = desk.seen(desk.test, "gated")
    before = seen.features(weights.frequencies, without=seen.expensive, leave_out=True)
    rows: list[list[Cell]] = []
    for fraction in _FRACTIONS:
        skipped = 1 - float(weights.skip.search_mask(before, fraction).double().mean())
        rows.append([fraction, skipped, evaluate_table(seen, replace(weights, fraction=fraction)).perplexity])
    figures = [float(str(row[2])) for row in rows]
    shares = [float(str(row[1])) for row in rows]
    half = min(range(len(rows)), key=lambda number: abs(shares[number] - 0.5))
    finding = f"With no search left out perplexity is {figures[0]:.2f}, with all of them left out {figures[-1]:.2f}"
    if 0.1 < shares[half] < 0.9:
        finding += f"; with {shares[half]:.0%} of them left out it is {figures[half]:.2f}."
    else:
        finding += "; the gate does not tell here which of them matter."
    options = ("--memories", ",".join(desk.labels), "--weights", "gated")
    return Study(
        name="skip",
        title="Searches left out",
        paper="Efficient Nearest Neighbor Language Models (He et al. 2021), adaptive retrieval",
        finding=finding,
        command=desk.tuning(*options)
        + "\n"
        + desk.evaluation("--memories", ",".join(desk.labels), "--skip-fraction", 0.5),
        tables=[Table.of({"--skip-fraction": ".1f", "searches skipped": ".1%", "held-out": ".3f"}, rows)],
        plots=[
            Plot.curves(
                "Perplexity by how many searches are left out",
                "searches left out",
                [Line("held-out text", shares, [*figures])],
                model_alone=desk.base,
            )
        ],
    )
