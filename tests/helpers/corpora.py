"""Corpus folders for tests of the benchmarks."""

from __future__ import annotations

import json
import random
from pathlib import Path

NAMES = ("Anna", "Bert", "Carl", "Dora", "Emil", "Frida", "Gustav", "Hanna")
SERVICES = ("GameLift", "DynamoDB", "Kinesis", "Redshift", "Aurora")
THINGS = ("books", "rooms", "letters", "tables", "lamps", "doors", "chairs", "windows")


def report(number: int, generator: random.Random) -> str:
    """Return a text with a title, names, services and sentences; two texts differ in words and numbers."""
    name, other = generator.sample(NAMES, 2)
    things, lost = generator.sample(THINGS, 2)
    return (
        f"Report {number} about {things}\n"
        f"In the morning of day {number} the librarian and {name} counted {number + 100} {things}. "
        f"Then she told the old {other} that the {lost} of shelf {number} were lost."
        f"\nUse CreateTable{number} or DeleteTable to begin a stream in Amazon {generator.choice(SERVICES)} Guide."
    )


def corpus_folder(folder: Path, seed: int = 0, *, documents: int = 12) -> Path:
    """Write a corpus with train, valid and test .jsonl, and return its folder."""
    folder.mkdir(parents=True)
    generator = random.Random(seed)
    for number, split in enumerate(("train", "valid", "test")):
        texts = [report(1000 * seed + 100 * number + each, generator) for each in range(documents)]
        lines = [json.dumps({"id": f"{split}{each}", "text": text}) for each, text in enumerate(texts)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder
