"""The two texts of a report: settings are chosen on the tuning text and reported on the held-out text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from knnlm.corpus import Document
from knnlm.errors import CorpusError
from knnlm.io import translate_os_errors

_MAX_CHARACTERS_PER_TOKEN = 16  # on average: how much text is read where the number of tokens is limited


@dataclass(frozen=True)
class TextSplit:
    """The documents of the tuning text and of the held-out text."""

    valid: list[Document]
    test: list[Document]
    description: str  # of where the tuning text comes from
    whole: list[Document] = field(default_factory=list)  # before the split, where every document was split in two

    def key(self) -> str:
        """Return a hash of the texts and of their names, which the report shows."""
        contents = [
            [[document.id, document.source, _hash(document)] for document in half] for half in (self.valid, self.test)
        ]
        return hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]


def split_texts(documents: Iterable[Document], valid: Iterable[Document] | None, *, limit: int | None) -> TextSplit:
    """Return both texts as given, or the halves of the only one."""
    room = None if limit is None else limit * _MAX_CHARACTERS_PER_TOKEN
    if valid is not None:
        split = TextSplit(_take(valid, room), _take(documents, room), "the text given with --valid")
        if count_shared(split.valid, split.test) == len(split.test):
            raise CorpusError(
                "Every held-out document is also in --valid, so settings would be chosen on the text they are "
                "reported on. Give another --valid, or none: then the text is split in two."
            )
        return split
    whole = _take(documents, None if room is None else 2 * room)
    if len(set(map(_hash, whole))) == 1:
        which = "the only document" if len(whole) == 1 else "each document, because all are the same"
        first, second = (list(half) for half in zip(*map(_split_document, whole), strict=True))
        return TextSplit(first, second, f"the first half of {which}; the second is held out", whole)
    halves = _split_documents(whole)
    return TextSplit(*halves, "half of the documents, chosen by a hash of their text; the other half is held out")


def count_shared(valid: Iterable[Document], test: Iterable[Document]) -> int:
    """Return the number of held-out documents whose text is also in the tuning text."""
    hashes = set(map(_hash, valid))
    return sum(_hash(document) in hashes for document in test)


def _hash(document: Document) -> str:
    return hashlib.sha256(document.text.encode()).hexdigest()


def write_texts(folder: Path, name: str, documents: Iterable[Document]) -> Path:
    """Write documents as a file that `knnlm eval` and `knnlm tune` read."""
    file = folder / f"{name}.jsonl"
    lines = (
        json.dumps({"id": document.id, "source": document.source, "text": document.text}) for document in documents
    )
    with translate_os_errors(file):
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _take(documents: Iterable[Document], room: int | None) -> list[Document]:
    """Read documents up to about so many characters; those without text are left out."""
    taken: list[Document] = []
    size = 0
    for document in documents:
        if document.text:
            taken.append(document)
            size += len(document.text)
        if room is not None and size >= room:
            break
    if not taken:
        raise CorpusError("There is no text to report on: every document is empty.")
    return taken


def _split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Assign documents, in the order of their hashes, to the smaller half; each half keeps the original order.

    Documents with the same text go to the same half.
    """
    by_hash: dict[str, list[int]] = {}
    for number, document in enumerate(documents):
        by_hash.setdefault(_hash(document), []).append(number)
    halves: tuple[list[int], list[int]] = ([], [])
    sizes = [0, 0]
    for _, numbers in sorted(by_hash.items()):
        half = 0 if sizes[0] <= sizes[1] else 1
        halves[half].extend(numbers)
        sizes[half] += sum(len(documents[number].text) for number in numbers)
    first, second = ([documents[number] for number in sorted(half)] for half in halves)
    return first, second


def _split_document(document: Document) -> tuple[Document, Document]:
    """Split a document at the whitespace nearest to its middle."""
    text, middle = document.text, len(document.text) // 2
    blanks = [place for place, char in enumerate(text) if char.isspace() and 0 < place < len(text) - 1]
    place = min(blanks, key=lambda place: abs(place - middle), default=middle)
    if not place:
        raise CorpusError("The text is too short to be split in two. Give --valid, or a longer text.")
    halves = (text[:place], text[place:])
    first, second = (replace(document, id=f"{document.id}#{number}", text=half) for number, half in enumerate(halves))
    return first, second
