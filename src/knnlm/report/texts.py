"""The two texts of a report: one to choose settings on, one to report on. Knows nothing about models or memories."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from knnlm.corpus import Document
from knnlm.datastore.segment import writing
from knnlm.errors import CorpusError

_CHARACTERS = 16  # of a token at most, on average: how much text is kept where only some tokens are wanted


@dataclass(frozen=True)
class Texts:
    """Documents to choose on and documents to report on."""

    valid: list[Document]
    test: list[Document]
    how: str  # where the first came from, in words

    def key(self) -> str:
        """Tell these texts from any others."""
        digest = hashlib.sha256()
        for document in (*self.valid, None, *self.test):
            digest.update(b"\0" if document is None else hashlib.sha256(document.text.encode()).digest())
        return digest.hexdigest()[:16]


def gather(documents: Iterable[Document], valid: Iterable[Document] | None, *, limit: int | None) -> Texts:
    """Take both texts as they are given, or split the one there is in two halves."""
    room = None if limit is None else limit * _CHARACTERS
    if valid is not None:
        return Texts(_take(valid, room), _take(documents, room), "the text given with --valid")
    whole = _take(documents, None if room is None else 2 * room)
    if len(whole) == 1:
        first, second = _cut(whole[0])
        return Texts([first], [second], "the first half of the only document; the second is reported on")
    halves = _deal(whole)
    return Texts(*halves, "half of the documents, dealt by a hash of their text; the other half is reported on")


def write_texts(folder: Path, name: str, documents: Iterable[Document]) -> Path:
    """Write documents where `knnlm eval` and `knnlm tune` can read them."""
    file = folder / f"{name}.jsonl"
    lines = (json.dumps({"id": one.id, "source": one.source, "text": one.text}) for one in documents)
    with writing(file):
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
    """Deal documents, in the order of their hashes, always to the smaller half; in each they keep their order."""
    hashes = [hashlib.sha256(document.text.encode()).hexdigest() for document in documents]
    halves: tuple[list[int], list[int]] = ([], [])
    sizes = [0, 0]
    for number in sorted(range(len(documents)), key=lambda number: (hashes[number], number)):
        half = 0 if sizes[0] <= sizes[1] else 1
        halves[half].append(number)
        sizes[half] += len(documents[number].text)
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
