"""Cloze and multiple-choice tasks with a store of the same corpus, with those of other corpora, and without.

    python benchmarks/tasks.py CORPUS... --store 20000 --limit 3000 --items 20        # minutes on two cores
    python benchmarks/tasks.py CORPUS... --train-student --device cuda                # whole corpora on a GPU

CORPUS is a folder with train, valid and test .jsonl (also .gz, .xz, .zst), a document a line. Each store is built from
train and tuned on valid of its own corpus. Tasks are made from the test text of every corpus (last word, a name among
four, and one that suits the corpus) and from general material (sums, copying, Python, words). All systems read the same
contexts. Figures are accuracies, or log-likelihoods where that is named, with standard errors; "in store" is the share
of the items that share 13 consecutive tokens with the store. Of choices that are sentences, the most probable one per
character is chosen, and, by mutual information, the one whose log-probability the context raises most: a sentence that
is probable without any context wins only the former.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from knnlm.evaluation.continuations import ContinuationScore, Pair, score_continuations
from knnlm.evaluation.overlap import find_overlap
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from perplexity import add_store_options, measure_stores, parser_for, split
from systems import MIXTURES, add_student_options, build_mixtures, model_alone, open_student
from task_items import GENERAL, Item, corpus_tasks

SYSTEMS = ("model", *MIXTURES, "student")
SENTENCES = ("next sentence", "text of a title")  # tasks whose choices are sentences of different lengths

TaskName = tuple[str, str]  # the corpus, or "general", and the task


@dataclass(frozen=True)
class Figure:
    """A mean over items and its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}"


def main() -> None:
    options = parse()
    lm = CausalLM.open(options.model, device=options.device, dtype=options.dtype)
    tasks = make_tasks(options)
    pairs = {
        name: [pair for item in items for pair in encode(lm, item, options.context)] for name, items in tasks.items()
    }
    alone = score(model_alone(lm), tasks, pairs)
    show(measure_stores(options, lambda corpus, folder: measure(corpus, folder, lm, tasks, pairs, alone, options)))


def parse() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.set_defaults(limit=20_000)
    parser.add_argument("--items", type=int, default=200, help="items of each task")
    parser.add_argument("--context", type=int, default=64, help="tokens of a context")
    parser.add_argument("--seed", type=int, default=0)
    add_store_options(parser)
    add_student_options(parser)
    return parser.parse_args()


def make_tasks(options: argparse.Namespace) -> dict[TaskName, list[Item]]:
    """Return the items of every task."""
    made: dict[TaskName, list[Item]] = {}
    for corpus in options.corpus:
        own = corpus_tasks(corpus.name, list(split(corpus, "test")), options.items, options.seed)
        made |= {(corpus.name, task): items for task, items in own.items()}
    made |= {("general", task): make(options.items, options.seed) for task, make in GENERAL.items()}
    return {name: items for name, items in made.items() if items}


def encode(lm: CausalLM, item: Item, context_tokens: int) -> list[Pair]:
    """Return the tokens of the end of an item's context, after the start token, with those of each choice."""
    context = [lm.start_token, *lm.encode(item.context)[-context_tokens:]]
    return [(context, lm.encode(choice)) for choice in item.choices]


def score(
    mixture: Mixture, tasks: Mapping[TaskName, Sequence[Item]], pairs: Mapping[TaskName, Sequence[Pair]]
) -> dict[TaskName, dict[str, Figure]]:
    """Return the accuracy of every task, and of cloze without choices the log-likelihood of the answers too."""
    flat = iter(score_continuations(mixture, [pair for own in pairs.values() for pair in own]))
    sentences = [name for name in tasks if name[1] in SENTENCES]
    # The same choices after the start token alone.
    without = [(context[:1], choice) for name in sentences for context, choice in pairs[name]]
    alone = iter(score_continuations(mixture, without))
    results = {}
    for name, items in tasks.items():
        scores = list(islice(flat, len(pairs[name])))
        prior = list(islice(alone, len(scores))) if name in sentences else None
        results[name] = grade(items, scores, prior)
    return results


def grade(
    items: Sequence[Item], scores: Sequence[ContinuationScore], alone: Sequence[ContinuationScore] | None = None
) -> dict[str, Figure]:
    """Return the figures of one task from the scores of the choices of its items, one item after the other.

    `alone` are the scores of the choices without a context, of a task whose choices are sentences.
    """
    values = np.array([score.log_prob for score in scores])
    if all(len(item.choices) == 1 for item in items):
        return {"accuracy": figure([score.is_greedy for score in scores]), "log-likelihood": figure(values.tolist())}
    if alone is None:
        return {"accuracy": figure(chosen(items, values))}
    characters = [len(choice) for item in items for choice in item.choices]
    gained = values - np.array([score.log_prob for score in alone])
    return {
        "accuracy": figure(chosen(items, values / characters)),
        "accuracy by mutual information": figure(chosen(items, gained)),
    }


def chosen(items: Sequence[Item], values: NDArray[np.float64]) -> list[bool]:
    """Return whether the choice of each item with the largest value is the right one."""
    begins = np.cumsum([0, *(len(item.choices) for item in items)])
    return [
        int(values[begin : begin + len(item.choices)].argmax()) == item.answer
        for begin, item in zip(begins, items, strict=False)
    ]


def figure(values: Sequence[float]) -> Figure:
    """Return the mean of some values and its standard error."""
    return Figure(float(np.mean(values)), float(np.std(values) / np.sqrt(len(values))))


def measure(
    corpus: Path,
    folder: Path,
    lm: CausalLM,
    tasks: Mapping[TaskName, Sequence[Item]],
    pairs: Mapping[TaskName, Sequence[Pair]],
    alone: dict[TaskName, dict[str, Figure]],
    options: argparse.Namespace,
) -> list[dict[str, object]]:
    """Build the store of one corpus, and return a row for every task and figure."""
    begin = time.perf_counter()
    store, mixtures = build_mixtures(corpus, folder / "store", lm, store_tokens=options.store, limit=options.limit)
    built = time.perf_counter()
    results = {"model": alone, **{name: score(mixture, tasks, pairs) for name, mixture in mixtures.items()}}
    scored = time.perf_counter()
    student = open_student(corpus, folder / "student", lm, options)
    if student is not None:
        results["student"] = score(model_alone(student), tasks, pairs)
    seconds = {"build": built - begin, "score": scored - built, "student": time.perf_counter() - scored}
    print(json.dumps({"store": corpus.name, "tokens": store.entry_count, "seconds": seconds}), flush=True)
    contained = {
        name: float(np.mean(find_overlap(store, [[[*lm.encode(item.context + item.right)]] for item in items]).items))
        for name, items in tasks.items()
    }
    store.close()
    return [
        {
            "store": corpus.name,
            "corpus": name[0],
            "task": name[1] + ("" if kind == "accuracy" else f", {kind}"),
            "items": len(items),
            "in_store": contained[name],
            **{system: [own[name][kind].mean, own[name][kind].error] for system, own in results.items()},
        }
        for name, items in tasks.items()
        for kind in alone[name]
    ]


def show(rows: Sequence[Mapping[str, object]]) -> None:
    """Print the table, and whether the default weights raise the memory tasks and lower none."""
    systems = [system for system in SYSTEMS if rows and system in rows[0]]
    print("| store | task | items | in store |", " | ".join(systems), "|")
    print("|---|---|---|---|" + "---|" * len(systems))
    for row in rows:
        figures = " | ".join(str(Figure(*row[system])) for system in systems)  # type: ignore[misc]
        print(f"| {row['store']} | {_task(row)} | {row['items']} | {row['in_store']:.2f} | {figures} |")
    related = [row for row in rows if row["store"] == row["corpus"]]
    raised = [row for row in related if _change(row) > 0]
    print(f"The default weights raise {len(raised)} of {len(related)} memory tasks with the related store.", end=" ")
    print("Not raised:", "; ".join(_task(row) for row in related if row not in raised) or "none")
    fallen = [row for row in rows if -_change(row) > row["model"][1]]  # type: ignore[index]
    print(f"The default weights lower {len(fallen)} of {len(rows)} figures by more than a standard error:", end=" ")
    print("; ".join(f"{_task(row)} with {row['store']} ({_change(row):+.3f})" for row in fallen) or "none")


def _task(row: Mapping[str, object]) -> str:
    return f"{row['corpus']}: {row['task']}"


def _change(row: Mapping[str, object]) -> float:
    return float(row["default"][0] - row["model"][0])  # type: ignore[index]


if __name__ == "__main__":
    main()
