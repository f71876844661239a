"""The study of gains and losses: which share of the tokens a mixture improves, by how much, and for which tokens.

Tokens are grouped by their frequency in the store, by a class that follows from their text alone, and by their position
in the document.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnlm.evaluation.tune import choose_online, score_table
from knnlm.report.context import ReportContext
from knnlm.report.studies.breakdown import group_by_bounds, log_probs_of_test
from knnlm.report.study import Cell, Line, Plot, Study, Table

_FREQUENCIES = (1, 10, 100, 1000)
_POSITIONS = (16, 128, 1024)
_APOSTROPHES = "'’"

# English articles, pronouns, prepositions, conjunctions, auxiliary verbs and the commonest adverbs.
_FUNCTION_WORDS = """
    a an the this that these those i you he she it we they me him her us them my your his its our their which who
    whom whose what of in to for on with at by from as into through over under between about after before during
    without and or but nor if because although while when where than then is are was were be been being am do does
    did have has had will would shall should can could may might must not no so there here also only such each any
    all some both more most other
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())

CLASSES = (
    "function word",
    "word in lower case",
    "capitalised word",
    "continuation of a word",
    "number",
    "punctuation or symbol",
    "white space",
    "part of a character",
)


def token_class(text: str, before: str = "") -> str:
    """Return the class of a token by its text and by the two characters before it.

    The characters before it decide whether the token begins a word or continues one. A word of a script without
    capitals counts as lower case.
    """
    if not text:
        return "part of a character"
    if text.isspace():
        return "white space"
    word = text.strip()
    first = next((char for char in word if _kind(char) in "LN"), None)
    if first is None:
        return "punctuation or symbol"
    if _kind(first) == "N":
        return "number"
    if _in_word(before) and (_kind(text[0]) == "L" or text[0] in _APOSTROPHES):
        return "continuation of a word"
    if word.lower() in FUNCTION_WORDS:
        return "function word"
    return "capitalised word" if first.isupper() or first.istitle() else "word in lower case"


def _kind(char: str) -> str:
    """Return L for letters and their marks, N for digits, and another letter for the rest."""
    kind = unicodedata.category(char)[0]
    return "L" if kind == "M" else kind


def _in_word(before: str) -> bool:
    """Whether a text ends with a letter or a digit, or with an apostrophe after one."""
    before = before[:-1] if before[-1:] and before[-1] in _APOSTROPHES else before
    return bool(before) and _kind(before[-1]) in "LN"


def classify(texts: Sequence[str]) -> list[str]:
    """Return the class of each token of a document, given the text of each."""
    classes, before = [], ""
    for text in texts:
        classes.append(token_class(text, before))
        before = (before + text)[-2:]
    return classes


@dataclass(frozen=True)
class Changes:
    """Changes of the log-probabilities of some tokens from the model alone to a mixture."""

    tokens: int
    improved: int  # tokens with a higher log-probability
    worse: int
    gain: float  # sum over the improved tokens, in nats
    loss: float  # sum over the worse tokens, at least 0

    @classmethod
    def of(cls, change: NDArray[np.float64]) -> Changes:
        """Sum (N,) changes without rounding errors of the order."""
        higher, lower = change[change > 0], change[change < 0]
        return cls(len(change), len(higher), len(lower), math.fsum(higher), math.fsum(-lower))

    @property
    def net(self) -> float:
        """Gains less losses: the change of the total log-probability, in nats."""
        return self.gain - self.loss

    def cells(self) -> list[Cell]:
        """Return the cells of `_COLUMNS`."""
        return [
            self.tokens,
            self.improved / self.tokens,
            self.gain / self.improved if self.improved else None,
            self.worse / self.tokens,
            self.loss / self.worse if self.worse else None,
            self.net / self.tokens,
            self.net,
            math.exp(-self.net / self.tokens),
        ]


_COLUMNS = {
    "tokens": ",d",
    "improved": ".1%",
    "mean gain": ".3f",
    "worse": ".1%",
    "mean loss": ".3f",
    "net a token": "+.4f",
    "net in all": "+.1f",
    "perplexity ratio": ".4f",
}
_CAPTION = (
    "Improved, worse: tokens whose log-probability is higher or lower than by the model alone. The mean gain and the "
    "mean loss are over these tokens, in nats. Net: gains less losses, over all tokens. Perplexity ratio: the "
    "mixture's perplexity divided by the model's."
)


def study_gains(context: ReportContext) -> Study:
    """Count improved and worse tokens, and sum gains and losses, by mixture and by groups of tokens."""
    mixtures = _changes_by_mixture(context)
    rows: list[list[Cell]] = [[name, *Changes.of(change).cells()] for name, change in mixtures.items()]
    tables = [Table.build({"mixture": "", **_COLUMNS}, rows, caption=_CAPTION)]
    name, change = list(mixtures.items())[-1]
    numbers = {}
    by_class: list[tuple[str, Changes]] = []
    for key, title, labels, group in _groupings(context):
        found = [
            (label, Changes.of(change[own])) for place, label in enumerate(labels) if (own := group == place).any()
        ]
        rows = [[label, *changes.cells()] for label, changes in found]
        tables.append(Table.build({title: "", **_COLUMNS}, rows, caption=f"Mixture: {name}."))
        numbers[key] = {label: asdict(changes) for label, changes in found}
        by_class = found if key == "class" else by_class
    total = Changes.of(change)
    return Study(
        name="gains",
        title="Tokens improved, gains and losses",
        paper="kNN-LM Does Not Improve Open-ended Text Generation (Wang et al. 2023), on single tokens",
        finding=_finding(name, total, by_class),
        command=context.report_command("gains"),
        tables=tables,
        plots=[_plot(by_class)],
        notes=["Classes follow from the text of a token and the two characters before it, without a tagger."],
        numbers={"mixture": name, **asdict(total), **numbers},
    )


def _finding(name: str, total: Changes, by_class: Sequence[tuple[str, Changes]]) -> str:
    """Return one sentence about all tokens and one about the classes."""
    gain, loss = total.gain / max(1, total.improved), total.loss / max(1, total.worse)
    net = {label: changes.net / changes.tokens for label, changes in by_class}
    most, least = max(net, key=net.__getitem__), min(net, key=net.__getitem__)
    return (
        f"With {name}, {total.improved / total.tokens:.0%} of the tokens become more probable, by {gain:.2f} nats on "
        f"average, and {total.worse / total.tokens:.0%} less probable, by {loss:.2f}: {total.net / total.tokens:+.3f} "
        f"nats a token. The net gain is largest for the class “{most}”, {net[most]:+.2f}, and smallest for “{least}”, "
        f"{net[least]:+.2f}."
    )


def _plot(by_class: Sequence[tuple[str, Changes]]) -> Plot:
    """Plot gains and losses of each class, both over all tokens of the class."""
    names = [label for label, _ in by_class]
    gains = Line("gain", [*names], [changes.gain / changes.tokens for _, changes in by_class])
    losses = Line("loss", [*names], [-changes.loss / changes.tokens for _, changes in by_class])
    return Plot("bars", "Gain and loss by class of token", "", "nats a token of the class", [gains, losses])


def _changes_by_mixture(context: ReportContext) -> dict[str, NDArray[np.float64]]:
    """Return the (N,) changes of the held-out text's log-probabilities; last, by the weights that `knnlm tune` fits."""
    model, _, mixed = log_probs_of_test(context)
    changes = {f"knn, λ = {context.chosen[1]:.2f}": _difference(mixed, model)}
    weights = context.fit(tuple(range(len(context.labels))), "gated").weights
    online, _ = choose_online(context.table(context.valid, "gated"), weights)
    for name, config in (("all memories, gated", None), ("all memories, gated, online weights", online)):
        scores = score_table(context.table(context.test, "gated"), weights, config)
        changes[name] = _difference(scores.mixture, scores.components[:, 0])
    return changes


def _difference(mixed: Tensor, model: Tensor) -> NDArray[np.float64]:
    change: NDArray[np.float64] = (mixed.double() - model.double()).numpy()
    return np.where(np.isnan(change), 0.0, change)  # NaN: both are impossible


def _groupings(context: ReportContext) -> Iterator[tuple[str, str, list[str], NDArray[np.int64]]]:
    """Yield (key, title, names of the groups, the group of each token)."""
    trace = context.test.trace
    often = context.frequencies.numpy()[np.asarray(trace.targets)]
    yield "frequency", "frequency in the store", *group_by_bounds(often, _FREQUENCIES)
    classes = [name for texts in _token_texts(context) for name in classify(texts)]
    yield "class", "class of the token", list(CLASSES), np.array([CLASSES.index(name) for name in classes])
    yield "position", "position in the document", *group_by_bounds(np.asarray(trace.positions), _POSITIONS)


def _token_texts(context: ReportContext) -> Iterator[list[str]]:
    """Yield the text of each token, by document."""
    targets, positions = np.asarray(context.test.trace.targets), np.asarray(context.test.trace.positions)
    for tokens in np.split(targets, np.flatnonzero(positions == 0)[1:]):
        yield context.lm.token_texts(tokens.tolist())
