"""What a gate looks at: cheap numbers about each part of a mixture. Knows nothing about networks.

The same numbers come from answers, when a text is read, and from a trace, when a gate is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knnlm.memory import Answer, Context, Spoken
from knnlm.memory.lm import SIGNALS as LM_SIGNALS

_NEVER = -15.0  # log-probabilities below are all alike
_OF_MEMORY = ("for the model's choice", "the model for its choice", "same choice", "abstains")
PLACE = ("position", "frequency of the last token")


@dataclass(frozen=True)
class Evidence:
    """What is known about one memory's answer, without the token that came."""

    signals: Tensor  # (N, F)
    of_choice: Tensor  # (N,) log p that it gives to the model's choice
    choice: Tensor  # (N,) its own choice; -1 = none
    model_of_choice: Tensor  # (N,) log p that the model gives to that


@dataclass(frozen=True)
class Place:
    """Where positions are."""

    positions: Tensor  # (N,) how many tokens were read before
    tokens: Tensor  # (N,) the last token that was read


def evidence(answer: Answer, lm: Spoken) -> Evidence:
    """Look at an answer beside what the language model says."""
    choice = answer.top()
    said = lm.parts[0].of(choice.clamp(min=0))
    return Evidence(
        signals=answer.signals(),
        of_choice=answer.parts[0].of(lm.top()),
        choice=choice,
        model_of_choice=said.masked_fill(choice < 0, -torch.inf),
    )


def place(context: Context) -> Place:
    """Say where the positions of a context are."""
    positions = [torch.arange(run.start, len(run.tokens)) for run in context.runs]
    tokens = [run.tokens[run.start :] for run in context.runs]
    nowhere = torch.zeros(0, dtype=torch.long)
    return Place(torch.cat([nowhere, *positions]), torch.cat([nowhere.to(tokens[0]) if tokens else nowhere, *tokens]))


def feature_names(memories: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Name the columns of `features`, by the kind of each memory and the names of its signals."""
    names = [*PLACE, *(f"model {name}" for name in LM_SIGNALS)]
    for number, (kind, signals) in enumerate(memories):
        names += [f"{number} {kind} {name}" for name in (*signals, *_OF_MEMORY)]
    return names


def features(where: Place, frequencies: Tensor, model: tuple[Tensor, Tensor], found: Sequence[Evidence]) -> Tensor:
    """Put together (N, F) features; `model` is the language model's signals and choice."""
    signals, choice = model
    device = signals.device
    position = where.positions.to(device).float().log1p()
    frequency = frequencies.to(device)[where.tokens.to(device).long()].log1p()
    columns = [torch.stack([position, frequency], 1), signals.float()]
    for one in found:
        beside = [
            one.of_choice.clamp(min=_NEVER).nan_to_num(nan=_NEVER),
            one.model_of_choice.clamp(min=_NEVER),
            (one.choice == choice).float(),
            (one.choice < 0).float(),
        ]
        columns += [one.signals.float(), torch.stack(beside, 1).float()]
    return torch.cat(columns, 1)
