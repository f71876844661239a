"""The whole way in a few minutes, on text that is on every Python machine. Knows nothing about screens.

The text is Python's own language reference as `pydoc` carries it. Whole topics are held out, and since topics quote
each other, every paragraph that also stands in a held-out topic is left out of the memory.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

from knnlm.corpus import Document
from knnlm.evaluation.evaluate import Evaluation
from knnlm.evaluation.explain import TokenExplanation
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.progress import Progress, silent

STORE, HELD_OUT = 100_000, 22_000  # characters: some 24,000 and 5,500 tokens


@dataclass(frozen=True)
class Split:
    """Documents to remember, to choose settings on, and to report on."""

    store: list[Document]
    valid: list[Document]
    test: list[Document]


def split_topics(store: int = STORE, held_out: int = HELD_OUT) -> Split:
    """Deal whole topics into three parts by a hash of their names, up to so many characters."""
    from pydoc_data.topics import topics

    names = sorted(topics, key=lambda name: zlib.crc32(name.encode()))
    parts: dict[str, list[Document]] = {"test": [], "valid": [], "store": []}
    seen: set[str] = set()
    for part, room in (("test", held_out), ("valid", held_out), ("store", store)):
        used: list[str] = []
        while names and room > 0:
            name = names.pop()
            fresh = [paragraph for paragraph in topics[name].split("\n\n") if _normal(paragraph) not in seen]
            text = "\n\n".join(fresh)[: max(room, 2000)]
            if len(text) < 200:
                continue
            room -= len(text)
            parts[part].append(Document(id=name, source=f"pydoc:{name}", text=text))
            used += fresh
        # A paragraph of one part is in no later part, also where only its beginning was used; repeats inside may stay.
        seen.update(map(_normal, used))
    return Split(**parts)


@dataclass(frozen=True)
class DemoResult:
    """What the demo shows."""

    mixture: Mixture
    evaluation: Evaluation
    telling: list[TokenExplanation]
    prompt: str


def demonstrate(path: Path, lm: CausalLM, *, parts: Split, progress: Progress = silent) -> DemoResult:
    """Build, tune, evaluate, and pick the tokens for which the memory spoke most tellingly."""
    build(parts.store, path, lm=lm, progress=progress).close()
    sources = [document.source for document in parts.valid]
    fresh = Mixture.open(path, lm, memories="knn,cache,ngram")
    fresh.tune(parts.valid, sources=sources, progress=progress)
    mixture = Mixture.open(path, lm)
    evaluation = mixture.evaluate(parts.test, progress=progress)
    prose = sorted((paragraph for document in parts.test for paragraph in _prose(document.text)), key=len)
    return DemoResult(mixture, evaluation, informative_tokens(mixture, "\n\n".join(prose[-4:])), _opening(prose[-1]))


def informative_tokens(mixture: Mixture, text: str, count: int = 3) -> list[TokenExplanation]:
    """Choose the words that the memory made more probable, by how many times."""
    words: dict[str, TokenExplanation] = {}
    for token in sorted(mixture.explain(text), key=lambda token: token.p / token.p_lm, reverse=True):
        # A word that the loudest neighbours spoke for; a rise from nothing to next to nothing tells little.
        heard = (token.p_knn or 0) > 0.1 and any(voice.agrees for voice in token.neighbours)
        if heard and token.token.strip().isalpha() and len(token.token) > 3:
            words.setdefault(token.token, token)
    return list(words.values())[:count]


def _prose(text: str) -> list[str]:
    """Give the paragraphs that are sentences rather than grammar or code."""
    return [
        paragraph
        for paragraph in text.split("\n\n")
        if 200 < len(paragraph) < 1500
        and sum(char.isalpha() or char.isspace() for char in paragraph) > 0.93 * len(paragraph)
    ]


def _opening(paragraph: str, words: int = 14) -> str:
    return " ".join(paragraph.split()[:words])


def _normal(paragraph: str) -> str:
    return " ".join(paragraph.split())
