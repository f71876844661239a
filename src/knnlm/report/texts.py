"""The two texts of a report: one to choose settings on, one to report on. Knows nothing about models or memories."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from knnlm.corpus import Document
from knnlm.errors import CorpusError
from knnlm.io import translate_os_errors

_CHARACTERS = 16  # of a token at most, on average: how much text is kept where only some tokens are wanted


@dataclass(frozen=True)
class Splits:
    """Documents to choose on and documents to report on."""

    valid: list[Document]
    test: list[Document]
    how: str  # where the first came from, in words
    whole: list[Document] = field(default_factory=list)  # as they were given, where all were cut in two

    def key(self) -> str:
        """Tell these texts from any others, and the same text under another name, too: names are shown."""
        facts = [[[one.id, one.source, _hash(one)] for one in half] for half in (self.valid, self.test)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def gather(documents: Iterable[Document], valid: Iterable[Document] | None, *, limit: int | None) -> Splits:
    """Take both texts as they are given, or split the one there is in two halves."""
    room = None if limit is None else limit * _CHARACTERS
    if valid is not None:
        given = Splits(_take(valid, room), _take(documents, room), "the text given with --valid")
        if count_shared(given.valid, given.test) == len(given.test):
            raise CorpusError(
                "Every document to report on is also in --valid, so settings would be chosen on what they are "
                "reported on. Give other text with --valid, or none: then the text is split in two."
            )
        return given
    whole = _take(documents, None if room is None else 2 * room)
    if len(set(map(_hash, whole))) == 1:
        which = "the only document" if len(whole) == 1 else "each document, for all are the same"
        first, second = (list(half) for half in zip(*map(_cut, whole), strict=True))
        return Splits(first, second, f"the first half of {which}; the second is reported on", whole)
    halves = _deal(whole)
    return Splits(*halves, "half of the documents, dealt by a hash of their text; the other half is reported on")


def count_shared(valid: Iterable[Document], test: Iterable[Document]) -> int:
    """Count the documents to report on whose text is also among those to choose on."""
    known = set(map(_hash, valid))
    return sum(_hash(document) in known for document in test)


def _hash(document: Document) -> str:
    return hashlib.sha256(document.text.encode()).hexdigest()


def write_texts(folder: Path, name: str, documents: Iterable[Document]) -> Path:
    """Write documents where `knnlm eval` and `knnlm tune` can read them."""
    file = folder / f"{name}.jsonl"
    lines = (json.dumps({"id": one.id, "source": one.source, "text": one.text}) for one in documents)
    with translate_os_errors(file):
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _take(documents: Iterable[Document], room: int | None) -> list[Document]:
    """Read documents until there is enough; those without text are left out."""
    found: list[Document] = []
    size = 0
    for document in documents:
        if document.text:
            found.append(document)
            size += len(document.text)
        if room is not None and size >= room:
            break
    if not found:
        raise CorpusError("There is no text to report on: no document has any.")
    return found


def _deal(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Deal documents, in the order of their hashes, always to the smaller half; in each they keep their order.

    Those with the same text go to the same half: nothing is reported on that was chosen on.
    """
    same: dict[str, list[int]] = {}
    for number, document in enumerate(documents):
        same.setdefault(_hash(document), []).append(number)
    halves: tuple[list[int], list[int]] = ([], [])
    sizes = [0, 0]
    for _, numbers in sorted(same.items()):
        half = 0 if sizes[0] <= sizes[1] else 1
        halves[half].extend(numbers)
        sizes[half] += sum(len(documents[number].text) for number in numbers)
    first, second = ([documents[number] for number in sorted(half)] for half in halves)
    return first, second


def _cut(document: Document) -> tuple[Document, Document]:
    """Cut a document at the blank, or the line's end, that is nearest to its middle."""
    text, middle = document.text, len(document.text) // 2
    blanks = [place for place, char in enumerate(text) if char.isspace() and 0 < place < len(text) - 1]
    place = min(blanks, key=lambda place: abs(place - middle), default=middle)
    if not place:
        raise CorpusError("The text is too short to be split in two. Give --valid, or more text.")
    parts = (text[:place], text[place:])
    first, second = (replace(document, id=f"{document.id}#{number}", text=part) for number, part in enumerate(parts))
    return first, second
