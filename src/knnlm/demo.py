"""Build, tune, evaluate and explain in a few minutes, on text that every Python installation has.

The text is Python's language reference as in `pydoc`. Whole topics are held out, and since topics quote each other,
every paragraph that also occurs in a held-out topic is left out of the store.
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

STORE_CHARACTERS = 100_000  # about 24,000 tokens
HELD_OUT_CHARACTERS = 22_000  # about 5,500 tokens, of each of the two held-out parts
_MIN_TOPIC_CHARACTERS = 200


@dataclass(frozen=True)
class TopicSplit:
    """Documents for the store, for tuning and for testing."""

    store: list[Document]
    valid: list[Document]
    test: list[Document]


def split_topics(store: int = STORE_CHARACTERS, held_out: int = HELD_OUT_CHARACTERS) -> TopicSplit:
    """Split whole topics into three parts by a hash of their names, up to so many characters each."""
    from pydoc_data.topics import topics

    names = sorted(topics, key=lambda name: zlib.crc32(name.encode()))
    parts: dict[str, list[Document]] = {"test": [], "valid": [], "store": []}
    used_before: set[str] = set()
    for part, room in (("test", held_out), ("valid", held_out), ("store", store)):
        used: list[str] = []
        while names and room > 0:
            name = names.pop()
            unused = [paragraph for paragraph in topics[name].split("\n\n") if _normalise(paragraph) not in used_before]
            text = "\n\n".join(unused)[: max(room, 2000)]
            if len(text) < _MIN_TOPIC_CHARACTERS:
                continue
            room -= len(text)
            parts[part].append(Document(id=name, source=f"pydoc:{name}", text=text))
            used += unused
        # A paragraph occurs in one part only, also where just its beginning was used; it may repeat inside a part.
        used_before.update(map(_normalise, used))
    return TopicSplit(**parts)


@dataclass(frozen=True)
class DemoResult:
    """Results of the demo."""

    mixture: Mixture
    evaluation: Evaluation
    explanations: list[TokenExplanation]
    prompt: str


def run_demo(path: Path, lm: CausalLM, *, parts: TopicSplit, progress: Progress = silent) -> DemoResult:
    """Build a store, tune and evaluate a mixture, and explain the tokens that gain most from the store."""
    build(parts.store, path, lm=lm, progress=progress).close()
    mixture = Mixture.open(path, lm, memories="knn,cache,ngram")
    mixture.tune(parts.valid, sources=[document.source for document in parts.valid], progress=progress)
    evaluation = mixture.evaluate(parts.test, progress=progress)
    prose = sorted((paragraph for document in parts.test for paragraph in _prose(document.text)), key=len)
    explanations = informative_tokens(mixture, "\n\n".join(prose[-4:]))
    return DemoResult(mixture, evaluation, explanations, _first_words(prose[-1]))


def informative_tokens(mixture: Mixture, text: str, count: int = 3) -> list[TokenExplanation]:
    """Return the words whose probability the memories raise by the largest factor."""
    words: dict[str, TokenExplanation] = {}
    for token in sorted(mixture.explain(text), key=lambda token: token.p / token.p_lm, reverse=True):
        # The store must find the word probable: a rise between two tiny probabilities shows little.
        supported = (token.p_knn or 0) > 0.1 and any(neighbour.agrees for neighbour in token.neighbours)
        if supported and token.token.strip().isalpha() and len(token.token) > 3:
            words.setdefault(token.token, token)
    return list(words.values())[:count]


def _prose(text: str) -> list[str]:
    """Return the paragraphs that are sentences, not grammar or code."""
    return [
        paragraph
        for paragraph in text.split("\n\n")
        if 200 < len(paragraph) < 1500
        and sum(char.isalpha() or char.isspace() for char in paragraph) > 0.93 * len(paragraph)
    ]


def _first_words(paragraph: str, words: int = 14) -> str:
    return " ".join(paragraph.split()[:words])


def _normalise(paragraph: str) -> str:
    return " ".join(paragraph.split())
