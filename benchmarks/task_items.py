"""Items of multiple-choice and cloze tasks, made from test text and from general material.

Every function returns at most `count` items, the same ones for the same seed. The choices of an item contain the right
answer once. A choice begins with the space that separates it from the context.
"""

from __future__ import annotations

import ast
import io
import random
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from knnlm.corpus import Document

_T = TypeVar("_T")

CHOICES = 4

_MAX_CONTEXT = 1200  # characters before an answer; the benchmark cuts contexts to tokens
_MIN_WORDS = 5  # before an answer
_LAST_WORD = re.compile(r"(?<= )[A-Za-z]{4,}(?=[.!?](?:\s|$))")
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][\w-]{2,}(?: [A-Z][\w-]{2,}){0,2}")
_SENTENCE_END = re.compile(r'(?<=[.!?])(?<!\b[A-Z]\.)(?<!\b[MDJ][rs]\.)(?<!Mrs\.)(?<! v\.) (?=["“A-Z])')
_CLAUSE_END = re.compile(r"(?<=[.!?;:,]) ")
_SERVICE = re.compile(r"\bAmazon((?: [A-Z0-9][\w-]*)+)")
_OPERATION = re.compile(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b")
_NOT_SERVICES = (" Web Services", " Resource", " Machine Image")
_GUIDES = re.compile(r" (?:Developer|User|API|Administrator|Command|Service|Cloud|Reference|Guide|Simple|URI|URL).*$")


@dataclass(frozen=True)
class Item:
    """A context and the texts that may follow it; one choice only: the text that greedy generation must produce."""

    context: str
    choices: tuple[str, ...]
    answer: int = 0

    @property
    def right(self) -> str:
        """The right answer."""
        return self.choices[self.answer]


def last_words(documents: Sequence[Document], count: int, seed: int = 0) -> list[Item]:
    """Return passages whose last word, of at least four letters, is to be predicted."""
    found = [
        Item(context.rstrip(), (f" {match[0]}",))
        for document in documents
        for match in _LAST_WORD.finditer(document.text)
        if _is_long(context := document.text[max(0, match.start() - _MAX_CONTEXT) : match.start()])
    ]
    return _sample(found, count, seed)


def entities(documents: Sequence[Document], count: int, seed: int = 0) -> list[Item]:
    """Return names inside a sentence, each among three other names of the text with as many words and similar length.

    A word that is more often written in lower case is no name. A name is the answer of at most a tenth of the items,
    rounded up.
    """
    bodies = [_body(document.text) for document in documents]
    counts = Counter(word for text in bodies for word in re.findall(r"[\w-]+", text))
    places = [
        (text, match)
        for text in bodies
        for match in _NAME.finditer(text)
        if " " in match[0] or counts[match[0].lower()] <= counts[match[0]]
    ]
    by_kind: dict[int, Counter[str]] = defaultdict(Counter)
    for _, match in places:
        by_kind[match[0].count(" ")][match[0]] += 1
    generator, used, items = random.Random(seed), Counter[str](), []
    generator.shuffle(places)
    for text, match in places:
        name = match[0]
        context = text[max(0, match.start() - _MAX_CONTEXT) : match.start()]
        others = [other for other in by_kind[name.count(" ")] if other != name and abs(len(other) - len(name)) <= 3]
        if used[name] >= -(-count // 10) or len(others) < CHOICES - 1 or not _is_long(context):
            continue
        used[name] += 1
        items.append(_choose(context.rstrip(), name, generator.sample(sorted(others), CHOICES - 1), generator))
        if len(items) == count:
            break
    return items


def next_sentences(documents: Sequence[Document], count: int, seed: int = 0) -> list[Item]:
    """Return passages and the sentence that follows, among three of other passages with similar length.

    A document of one sentence is divided at the end of the clause nearest to its middle.
    """
    pairs = [pair for document in documents for pair in _divided(_body(document.text))]
    generator = random.Random(seed)
    generator.shuffle(pairs)
    return _among_similar(pairs[: 20 * count], count, generator)


def titles(documents: Sequence[Document], count: int, seed: int = 0) -> list[Item]:
    """Return titles and the beginning of their text, among the beginnings of three other documents."""
    pairs = []
    for document in documents:
        title, _, text = document.text.partition("\n")
        if title and text:
            pairs.append((f"{title}\n", text if len(text) <= 200 else text[:200].rpartition(" ")[0]))
    generator = random.Random(seed)
    generator.shuffle(pairs)
    return _among_similar(pairs, count, generator, separator="")


def services(documents: Sequence[Document], count: int, seed: int = 0) -> list[Item]:
    """Return descriptions up to the name of the service that they are about, among three other services of the text.

    The name is the first one in its paragraph. Paragraphs that name an operation before it are preferred. Names with
    the same first four letters, which may be the same service, are not offered together.
    """
    with_operation, without = [], []
    names: set[str] = set()
    for document in documents:
        for line in document.text.split("\n"):
            for number, match in enumerate(_SERVICE.finditer(line)):
                if match[1].startswith(_NOT_SERVICES) or not (name := _GUIDES.sub("", match[1])):
                    continue
                names.add(name)
                context = line[: match.start(1)]
                if number == 0 and _is_long(context):
                    (with_operation if _OPERATION.search(context) else without).append((context, name))
    generator = random.Random(seed)
    for each in (with_operation, without):
        generator.shuffle(each)
    used, items = Counter[str](), []
    for context, name in [*with_operation, *without]:
        others = sorted(other for other in names if other[:5] != name[:5])
        if used[name] < -(-count // 4) and len(others) >= CHOICES - 1 and len(items) < count:
            used[name] += 1
            items.append(_choose(context, name, generator.sample(others, CHOICES - 1), generator, separator=""))
    return items


def arithmetic(count: int, seed: int = 0) -> list[Item]:
    """Return sums of two numbers, by turns of two and of three digits, after two examples."""
    generator, items = random.Random(seed), []
    for number in range(count):
        low, high = ((10, 99), (100, 999))[number % 2]
        (a, b), *examples = ((generator.randint(low, high), generator.randint(low, high)) for _ in range(3))
        lines = [f"{x} + {y} = {x + y}" for x, y in examples]
        errors = [
            error for error in (-110, -100, -20, -11, -10, -2, -1, 1, 2, 9, 10, 11, 20, 100, 110) if a + b + error > 0
        ]
        wrong = [str(a + b + error) for error in generator.sample(errors, CHOICES - 1)]
        items.append(_choose("\n".join([*lines, f"{a} + {b} ="]), str(a + b), wrong, generator))
    return items


def copying(count: int, seed: int = 0) -> list[Item]:
    """Return lists of words that are repeated; the next word is to be chosen among words of the list."""
    words = sorted({word for _, members in _CATEGORIES.items() for word in members})
    generator, items = random.Random(seed), []
    for _ in range(count):
        listed = generator.sample(words, 8)
        cut = generator.randrange(1, 8)
        context = f"Words: {', '.join(listed)}\nThe same words again: {', '.join(listed[:cut])},"
        wrong = generator.sample([word for word in listed if word != listed[cut]], CHOICES - 1)
        items.append(_choose(context, listed[cut], wrong, generator))
    return items


def closing_brackets(count: int, seed: int = 0, folder: Path | None = None) -> list[Item]:
    """Return source of the standard library, or of another folder, up to a closing bracket; all three are the choices.

    Round, square and curly brackets are equally frequent, as far as there are enough of them.
    """
    library = folder or Path(ast.__file__).parent
    files = [*sorted(library.glob("*.py")), *sorted(library.glob("[a-z]*/[a-z]*.py"))]
    files = [file for file in files if file.parent.name not in ("test", "site-packages")]
    generator = random.Random(seed)
    generator.shuffle(files)
    found: dict[str, list[str]] = {")": [], "]": [], "}": []}
    wanted = -(-count // len(found))
    for file in files:
        own: dict[str, list[str]] = defaultdict(list)
        for context, bracket in _brackets(file.read_text(encoding="utf-8", errors="replace")):
            own[bracket].append(context)
        for bracket, contexts in own.items():
            found[bracket] += generator.sample(contexts, min(5, len(contexts)))
        if all(len(set(contexts)) >= wanted for contexts in found.values()):
            break
    choices = tuple(found)
    items = [
        Item(context, choices, choices.index(bracket))
        for bracket, contexts in found.items()
        for context in _sample(list(dict.fromkeys(contexts)), wanted, seed)
    ]
    return _sample(items, count, seed)


def words(count: int, seed: int = 0) -> list[Item]:
    """Return simple tasks with words, by turns: categories, opposites, plurals, and what comes next in a sequence."""
    generator = random.Random(seed)
    makers = (_category, _opposite, _plural, _sequence)
    items: list[Item] = []
    seen: set[tuple[str, str]] = set()
    turn = 0
    while len(items) < count and turn < 50 * count:
        item = makers[turn % len(makers)](generator)
        turn += 1
        if (item.context, item.right) not in seen:
            seen.add((item.context, item.right))
            items.append(item)
    return items


GENERAL: dict[str, Callable[[int, int], list[Item]]] = {
    "arithmetic": arithmetic,
    "copying": copying,
    "Python brackets": closing_brackets,
    "words": words,
}


def corpus_tasks(name: str, documents: Sequence[Document], count: int, seed: int = 0) -> dict[str, list[Item]]:
    """Return the tasks of a corpus: two kinds of cloze, and one that suits the corpus of this name."""
    own = {"acl": ("text of a title", titles), "aws": ("service", services)}
    label, make = own.get(name, ("next sentence", next_sentences))
    return {
        "last word": last_words(documents, count, seed),
        "entity": entities(documents, count, seed),
        label: make(documents, count, seed),
    }


def _choose(context: str, right: str, wrong: Sequence[str], generator: random.Random, *, separator: str = " ") -> Item:
    choices = [right, *wrong]
    generator.shuffle(choices)
    return Item(context, tuple(f"{separator}{choice}" for choice in choices), choices.index(right))


def _sample(found: Sequence[_T], count: int, seed: int) -> list[_T]:
    return random.Random(seed).sample(list(found), min(count, len(found)))


def _is_long(context: str) -> bool:
    return len(context.split()) >= _MIN_WORDS


def _body(text: str) -> str:
    """Return a text without its first line if that is a title."""
    first, _, rest = text.partition("\n")
    return rest.lstrip("\n") if rest and not first.rstrip().endswith((".", "!", "?")) else text


def _divided(text: str) -> Iterator[tuple[str, str]]:
    """Yield (what comes before, sentence) for the sentences of a text; of one sentence, for its two halves."""
    ends = list(_SENTENCE_END.finditer(text))
    if not ends:
        clauses = list(_CLAUSE_END.finditer(text))
        ends = sorted(clauses, key=lambda match: abs(match.start() - len(text) / 2))[:1]
    stops = [match.start() for match in ends[1:]] + [len(text)]
    for match, stop in zip(ends, stops, strict=False):
        context = text[max(0, match.start() - _MAX_CONTEXT) : match.start()]
        sentence = text[match.end() : stop].partition("\n")[0]
        if len(sentence.split()) >= 3 and len(context.split()) >= 3 and len(sentence) <= 240:
            yield context, sentence


def _among_similar(
    pairs: Sequence[tuple[str, str]], count: int, generator: random.Random, *, separator: str = " "
) -> list[Item]:
    """Return items with the right text of each pair and those of three others, of half to twice its length."""
    items = []
    for number, (context, right) in enumerate(pairs):
        others = sorted(
            {text for other, (_, text) in enumerate(pairs) if other != number and text != right}
            & {text for _, text in pairs if len(right) / 2 <= len(text) <= 2 * len(right)}
        )
        if len(others) >= CHOICES - 1:
            wrong = generator.sample(others, CHOICES - 1)
            items.append(_choose(context, right, wrong, generator, separator=separator))
        if len(items) == count:
            break
    return items


def _brackets(source: str) -> Iterator[tuple[str, str]]:
    """Yield (source before, bracket) for closing brackets after a name or number, at the end of a line or a word."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return
    for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        place = starts[token.start[0] - 1] + token.start[1]
        apart = after.start != token.end or after.type in (tokenize.NEWLINE, tokenize.NL)
        joined = before.end == token.start and before.type in (tokenize.NAME, tokenize.NUMBER)
        if token.type == tokenize.OP and token.string in (")", "]", "}") and apart and joined:
            context = source[max(0, place - 400) : place]
            yield context[context.find("\n") + 1 :] if place > 400 else context, token.string


def _category(generator: random.Random) -> Item:
    category = generator.choice(sorted(_CATEGORIES))
    word = generator.choice(_CATEGORIES[category])
    wrong = generator.sample(sorted(set(_CATEGORIES) - {category}), CHOICES - 1)
    return _choose(f"A hammer is a kind of tool. A {word} is a kind of", category, wrong, generator)


def _opposite(generator: random.Random) -> Item:
    pair = generator.choice(_OPPOSITES)
    word, right = pair if generator.random() < 0.5 else pair[::-1]
    wrong = generator.sample([other for each in _OPPOSITES for other in each if other not in pair], CHOICES - 1)
    return _choose(f"The opposite of wet is dry. The opposite of {word} is", right, wrong, generator)


def _plural(generator: random.Random) -> Item:
    word, right = generator.choice(_PLURALS)
    wrong = generator.sample([other for _, other in _PLURALS if other != right], CHOICES - 1)
    return _choose(f"One dog, two dogs. One {word}, two", right, wrong, generator)


def _sequence(generator: random.Random) -> Item:
    sequence = generator.choice(_SEQUENCES)
    length = generator.randint(2, 3)
    first = generator.randrange(len(sequence) - length)  # at least three others remain
    shown, right = sequence[first : first + length], sequence[first + length]
    others = [word for word in sequence if word not in (*shown, right)]
    return _choose(f"{', '.join(shown)},", right, generator.sample(others, CHOICES - 1), generator)


_CATEGORIES = {
    "bird": ("robin", "sparrow", "pigeon", "falcon", "parrot", "raven", "swan", "penguin", "gull", "finch"),
    "fish": ("salmon", "trout", "tuna", "carp", "herring", "cod", "shark", "perch", "sardine", "pike"),
    "fruit": ("banana", "pear", "cherry", "plum", "grape", "mango", "lemon", "peach", "melon", "fig"),
    "tree": ("pine", "birch", "willow", "maple", "cedar", "beech", "spruce", "poplar", "larch", "fir"),
    "metal": ("copper", "silver", "zinc", "nickel", "lead", "tin", "titanium", "chromium", "mercury", "platinum"),
    "vehicle": ("truck", "bus", "tram", "bicycle", "lorry", "van", "motorcycle", "scooter", "taxi", "tractor"),
    "insect": ("beetle", "wasp", "moth", "cricket", "mosquito", "butterfly", "bee", "fly", "flea", "termite"),
    "garment": ("shirt", "jacket", "sweater", "skirt", "coat", "scarf", "blouse", "vest", "sock", "glove"),
}
_OPPOSITES = (
    *(("hot", "cold"), ("big", "small"), ("fast", "slow"), ("high", "low"), ("old", "new"), ("open", "closed")),
    *(("early", "late"), ("full", "empty"), ("hard", "soft"), ("heavy", "light"), ("left", "right"), ("long", "short")),
    *(
        ("loud", "quiet"),
        ("rich", "poor"),
        ("safe", "dangerous"),
        ("strong", "weak"),
        ("true", "false"),
        ("up", "down"),
    ),
    *(("thick", "thin"), ("win", "lose"), ("begin", "end"), ("buy", "sell"), ("day", "night"), ("first", "last")),
    *(
        ("give", "take"),
        ("happy", "sad"),
        ("inside", "outside"),
        ("love", "hate"),
        ("north", "south"),
        ("wide", "narrow"),
    ),
)
_PLURALS = (
    *(
        ("child", "children"),
        ("man", "men"),
        ("woman", "women"),
        ("foot", "feet"),
        ("tooth", "teeth"),
        ("mouse", "mice"),
    ),
    *(
        ("goose", "geese"),
        ("leaf", "leaves"),
        ("knife", "knives"),
        ("wolf", "wolves"),
        ("box", "boxes"),
        ("city", "cities"),
    ),
    *(
        ("baby", "babies"),
        ("church", "churches"),
        ("hero", "heroes"),
        ("life", "lives"),
        ("ox", "oxen"),
        ("person", "people"),
    ),
    *(("potato", "potatoes"), ("shelf", "shelves"), ("story", "stories"), ("wife", "wives"), ("berry", "berries")),
    *(("bus", "buses"), ("dish", "dishes"), ("fox", "foxes"), ("half", "halves"), ("key", "keys"), ("lady", "ladies")),
    *(("match", "matches"), ("table", "tables"), ("watch", "watches"), ("book", "books"), ("car", "cars")),
)
_SEQUENCES = (
    ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November"),
    ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"),
    tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"),
    tuple(str(10 * number) for number in range(1, 20)),
    tuple(str(2**number) for number in range(1, 14)),
)
