"""Studies of k, τ and λ, by arithmetic on the traces."""

from __future__ import annotations

from collections.abc import Sequence

from knnlm.evaluation.sweep import Sweep
from knnlm.report.context import ReportContext
from knnlm.report.study import Line, Outcome, Plot, Study, Table, lowest, percent_lower


def study_k(context: ReportContext) -> Study:
    """For each k, choose τ and λ on the tuning text and evaluate them on the held-out text."""
    swept, measured = context.sweep, _on_test(context)
    tried = [
        _outcome(swept, measured, k, *divmod(int(swept.perplexity[k].argmin()), len(swept.lambdas)))
        for k in range(len(swept.ks))
    ]
    best = lowest([one.valid for one in tried])
    chosen = tried[best]
    return Study(
        name="k",
        title="Number of neighbours k",
        paper="kNN-LM, Figure 4",
        finding=(
            f"With k = {chosen.k}, chosen on the tuning text, perplexity is {chosen.test:.2f}, "
            f"{percent_lower(chosen.test, context.base)} than the model's {context.base:.2f}; a single neighbour gives "
            f"{tried[0].test:.2f}."
        ),
        command=_command(context, chosen),
        tables=[_table(tried, best)],
        plots=[
            _plot("Perplexity by the number of neighbours", "k", [one.k for one in tried], tried, best, context.base)
        ],
    )


def study_temperature(context: ReportContext) -> Study:
    """For each τ, choose λ on the tuning text and evaluate it on the held-out text, with the chosen k."""
    swept, measured = context.sweep, _on_test(context)
    k = swept.ks.index(context.chosen[0].k)
    tried = [
        _outcome(swept, measured, k, number, int(swept.perplexity[k, number].argmin()))
        for number in range(len(swept.knn_temperatures))
    ]
    best = lowest([one.valid for one in tried])
    x = [one.knn_temperature for one in tried]
    return Study(
        name="knn_temperature",
        title="Temperature τ of the neighbours",
        paper="Why do Nearest Neighbor Language Models Work?, on temperature",
        finding=(
            f"The best τ is {x[best]:.3g}, with perplexity {tried[best].test:.2f}; the lowest tried gives "
            f"{tried[0].test:.2f}, the highest {tried[-1].test:.2f}."
        ),
        command=_command(context, tried[best]),
        tables=[_table(tried, best, "τ")],
        plots=[_plot("Perplexity by temperature", "τ", x, tried, best, context.base)],
    )


def study_lambda(context: ReportContext) -> Study:
    """Evaluate every λ on both texts, with the chosen k and τ."""
    setting, lmbda = context.chosen
    swept, measured = context.sweep, _on_test(context)
    at = (swept.ks.index(setting.k), swept.knn_temperatures.index(setting.knn_temperature))
    tried = [_outcome(swept, measured, *at, number) for number in range(len(swept.lambdas))]
    chosen, own = swept.lambdas.index(lmbda), lowest([one.test for one in tried])
    shown = sorted({*range(0, len(tried), 10), chosen})
    x = list(swept.lambdas)
    return Study(
        name="lambda",
        title="Weight λ of the store",
        paper="kNN-LM, Figure 5",
        finding=(
            f"λ = {lmbda:.2f} was chosen on the tuning text and gives {tried[chosen].test:.2f}; the best for the "
            f"held-out text itself would be λ = {x[own]:.2f} with {tried[own].test:.2f}."
        ),
        command=_command(context, tried[chosen]),
        tables=[_table([tried[number] for number in shown], shown.index(chosen), "λ")],
        plots=[_plot("Perplexity by λ", "λ", x, tried, chosen, context.base, log_x=False)],
        numbers={"lambda": x, "valid": [one.valid for one in tried], "test": [one.test for one in tried]},
    )


def _on_test(context: ReportContext) -> Sweep:
    """Evaluate the settings of the tuning text on the held-out text."""
    tried = context.sweep
    return context.test.trace.sweep(
        memory=context.knn,
        ks=tried.ks,
        knn_temperatures=tried.knn_temperatures,
        lambdas=tried.lambdas,
    )


def _outcome(valid: Sweep, test: Sweep, k: int, knn_temperature: int, lmbda: int) -> Outcome:
    """Return the result of one setting, by its positions in the grid, on both texts."""
    at = (k, knn_temperature, lmbda)
    settings = valid.ks[k], valid.knn_temperatures[knn_temperature], valid.lambdas[lmbda]
    return Outcome(*settings, float(valid.perplexity[at]), float(test.perplexity[at]))


def _command(context: ReportContext, chosen: Outcome) -> str:
    return context.eval_command("--memories", "knn", "--metric", "l2", *chosen.options())


def _table(tried: Sequence[Outcome], best: int, first: str = "k") -> Table:
    """Return a table of the tried settings, without the columns of constant ones, which the caption names."""
    table = Table.of_outcomes({"k": ",d"}, [[one.k] for one in tried], tried)
    skipped = table.columns.index(first)
    same = [f"k = {tried[0].k:,}", f"τ = {tried[0].knn_temperature:.3g}"][:skipped]
    return Table(
        table.columns[skipped:],
        table.formats[skipped:],
        [row[skipped:] for row in table.rows],
        caption=f"With {' and '.join(same)}." if same else "τ and λ are chosen for each k.",
        best=best,
    )


def _plot(
    title: str,
    label: str,
    x: Sequence[float],
    tried: Sequence[Outcome],
    best: int,
    base: float,
    *,
    log_x: bool = True,
) -> Plot:
    return Plot(
        "lines",
        title,
        label,
        "perplexity",
        Line.of_outcomes(x, tried),
        log_x=log_x,
        levels={"model alone": base},
        mark=[float(x[best]), tried[best].test],
    )
