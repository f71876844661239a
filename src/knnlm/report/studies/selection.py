"""The study of a decoder's training: what was tried on held-out text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from knnlm.memories.decoder import CARD, DecoderCard, load_card
from knnlm.report.context import ReportContext
from knnlm.report.study import Cell, Line, Plot, Study, StudyUnavailable, Table, lowest, percent_lower

_MAX_LOSS = 50.0  # nats per token


def study_training(context: ReportContext) -> Study:
    """List the perplexities of held-out text during the training of a decoder, with every rate that was tried."""
    folder = _trained(context)
    card = load_card(folder)
    if not card.held_out:
        raise StudyUnavailable(f"no text was held out of the training of {folder}")
    base, name = _perplexity(card.held_out[0]), card.initial_model["spec"]
    trials = _trials(card)
    rows: list[list[Cell]] = [[trial.rate, trial.epochs, trial.perplexity] for trial in trials]
    best = lowest([trial.loss for trial in trials])
    chosen = trials[best]
    finding = (
        f"Of {len(rows)} evaluation{'s' * (len(rows) > 1)} on {card.held_out_tokens:,} held-out tokens, that after "
        f"{chosen.epochs:g} epochs at rate {chosen.rate:g} is best: {chosen.perplexity:.2f}, "
        f"{percent_lower(chosen.perplexity, base)} than before training."
    )
    return Study(
        name="training",
        title="The training of the decoder",
        paper="Memory Decoder (Cao et al. 2025)",
        finding=finding,
        command=context.report_command("training"),
        tables=[
            Table.build({"rate": ".2g", "epochs": "g", "perplexity": ".3f"}, rows, caption=f"{folder}", best=best),
            *_interpolation_tables(card.selection),
        ],
        plots=[Plot.curves("Perplexity of held-out text", "epochs", _lines(trials), before_training=base)],
        notes=[f"The decoder began as {name}; the text was held out of its training, and is not that of this report."],
        numbers={"before": base, "selection": card.selection},
    )


def _trained(context: ReportContext) -> Path:
    """Return the folder of the first decoder that was trained here."""
    for label in context.labels:
        kind, _, path = label.partition("=")
        for folder in (context.store.path / path, Path(path)):
            if kind == "decoder" and (folder / CARD).is_file():
                return folder
    raise StudyUnavailable("there is no decoder that adapt or distill trained")


class _Trial(NamedTuple):
    """An evaluation on held-out text after some training."""

    rate: float
    epochs: float
    loss: float  # what is compared: with a teacher, not that of the text alone
    perplexity: float


def _trials(card: DecoderCard) -> list[_Trial]:
    """Return every evaluation after some training; a rate that diverged has none."""
    after = card.held_out[1:]
    if card.selection is None:
        tried = [(float(card.settings["learning_rate"]), float(line["epoch"])) for line in after]
    else:
        trials = [trial for trial in card.selection["trials"][1:] if math.isfinite(trial["loss"])]
        tried = [(float(trial["learning_rate"]), float(trial["epochs"])) for trial in trials]
    return [_Trial(*place, float(line["loss"]), _perplexity(line)) for place, line in zip(tried, after, strict=True)]


def _interpolation_tables(selection: dict[str, Any] | None) -> list[Table]:
    """Return the perplexities between the initial and the trained weights, if they were compared."""
    if selection is None:
        return []
    rows: list[list[Cell]] = [[share, loss] for share, loss in selection["interpolations"]]
    caption = "Weights between the initial ones (0) and the trained ones (1)."
    best = lowest([loss for _, loss in selection["interpolations"]])
    return [Table.build({"share": ".2f", "loss": ".4f"}, rows, caption=caption, best=best)]


def _lines(trials: list[_Trial]) -> list[Line]:
    """Return a curve for each rate."""
    lines = []
    for rate in sorted({trial.rate for trial in trials}):
        own = [trial for trial in trials if trial.rate == rate]
        lines.append(Line(f"rate {rate:g}", [trial.epochs for trial in own], [trial.perplexity for trial in own]))
    return lines


def _perplexity(evaluation: dict[str, Any]) -> float:
    """Return the perplexity of the text by an evaluation; infinite after a training that failed."""
    loss = float(evaluation["ce"])
    return math.exp(loss) if loss < _MAX_LOSS else math.inf
