"""The command that converses in a terminal: answers as they come, and who spoke for them.

Carries out each answer with the server's engine, in this process; knows nothing about HTTP.
"""

from __future__ import annotations

import json as json_format
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from knnlm.cli.evaluate import open_mixture
from knnlm.cli.options import Device, Dtype, Json, K, KnnTemperature, Lambda, Memories, Memory, Metric, Reader
from knnlm.cli.output import console, count, err, visible
from knnlm.errors import KnnlmError, ParameterError

if TYPE_CHECKING:
    from knnlm.server.engine.requests import GenerationRequest, ScoredToken
    from knnlm.server.engine.scheduler import Scheduler


SOURCES = 8  # named for each token

# What moves the cursor, and what turns the direction of writing around.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")

_HELP = """\
/why         which documents spoke for the last answer, and how loudly
/why all     the same for each of its tokens
/why N       everything about token N
/new         begin a new conversation
/help        this
Ctrl-C stops an answer, Ctrl-D ends. Underlined words came from the memory, more than by half."""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(short_help="Converse with a memory in the terminal.")(chat)


def chat(
    memory: Memory,
    system: Annotated[str, typer.Option(help="What the model is told before the conversation.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens an answer has at most.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0, help="Of sampling, 0: the most probable token; --knn-temperature is the vote's.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the most probable tokens with this much mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Make sampling repeatable.", show_default=False)] = None,
    memories: Memories = None,
    k: K = None,
    knn_temperature: KnnTemperature = None,
    lmbda: Lambda = None,
    metric: Metric = None,
    model: Reader = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """knnlm chat memory

    Converse with a memory: /why says which documents spoke, /help says what else there is. Lines can also be piped in;
    with --json, each answer is one JSON object on a line of its own.
    """
    from knnlm.server.engine.history import TraceCache
    from knnlm.server.engine.scheduler import Scheduler

    if not 0 < top_p <= 1:
        raise ParameterError(f"top-p must be above 0 and at most 1, not {top_p}.")
    chosen = {"memories": memories, "k": k, "knn_temperature": knn_temperature, "lmbda": lmbda, "metric": metric}
    mixture = open_mixture(memory, model=model, device=device, dtype=dtype, **chosen)
    engine = Scheduler(mixture, slots=1, queue=16, recall=TraceCache(most_bytes=1 << 20))
    drawing = {"temperature": temperature, "top_p": top_p, "seed": seed}
    talk = Conversation(engine, system=system, max_tokens=max_new_tokens, drawing=drawing)
    engine.start()
    try:
        Terminal(talk, json=json).run()
    finally:
        engine.stop()


@dataclass
class Reply:
    """What was said last: its tokens, and why it ended."""

    tokens: list[ScoredToken] = field(default_factory=list)
    reason: str = "stopped"  # by the person, unless it ended by itself

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(token.text for token in self.tokens)


class Conversation:
    """A conversation: what was said, in the words of the model's chat template where it has one."""

    def __init__(self, engine: Scheduler, *, system: str = "", max_tokens: int = 256, drawing: dict[str, Any]) -> None:
        self.engine = engine
        self.system = system
        self.max_tokens = max_tokens
        self.drawing = drawing
        self.turns: list[dict[str, str]] = []
        self.answer: Reply | None = None
        self.forgotten = 0  # turns that the model could not read any more
        self._lm = engine.mixture.lm.with_own_tokenizer()  # the engine's thread uses the other

    @property
    def has_template(self) -> bool:
        """Whether the model was trained to converse."""
        return bool(getattr(self._lm.tokenizer, "chat_template", None))

    def begin(self) -> None:
        """Forget all that was said."""
        self.turns, self.answer, self.forgotten = [], None, 0

    def say(self, message: str) -> Iterator[ScoredToken]:
        """Give the tokens of an answer as they come; whoever stops listening ends it, and what was said stays."""
        from knnlm.server.engine.requests import ErrorEvent, FinishEvent, TokensEvent

        self.turns.append({"role": "user", "content": message})
        try:
            ticket = self.engine.submit(self._order())
        except KnnlmError:
            self.turns.pop()  # nobody answers it
            raise
        self.answer = answer = Reply()
        try:
            for event in ticket.wait():
                if isinstance(event, ErrorEvent):
                    raise KnnlmError(event.message)
                if isinstance(event, TokensEvent):
                    answer.tokens += event.tokens
                    yield from event.tokens
                if isinstance(event, FinishEvent):
                    answer.reason = event.reason
        finally:
            ticket.cancel()
            self.turns.append({"role": "assistant", "content": answer.text})

    def _order(self) -> GenerationRequest:
        """Write down the conversation; where it is too long for the model, its beginning is left out."""
        from knnlm.server.engine.requests import GenerationRequest

        longest = self.engine.mixture.max_length
        while True:
            tokens = self._tokens()
            if longest is None or len(tokens) + self.max_tokens <= longest:
                break
            if len(self.turns) == 1:
                raise ParameterError(
                    f"The message comes to {len(tokens):,} tokens and {self.max_tokens:,} more are wanted, but the "
                    f"model can read only {longest:,}. Shorten it, or begin with a lower --max-new-tokens."
                )
            del self.turns[:2]  # a question and its answer
            self.forgotten += 1
        return GenerationRequest(
            tuple(tokens), self.max_tokens, sources=SOURCES, hidden=not self.has_template, **self.drawing
        )

    def _tokens(self) -> list[int]:
        told = [{"role": "system", "content": self.system}] if self.system else []
        if not self.has_template:
            text = "\n".join(turn["content"] for turn in told + self.turns)
            return [self._lm.start_token, *self._lm.encode(text)]
        try:
            tokenizer = self._lm.tokenizer
            text = str(tokenizer.apply_chat_template(told + self.turns, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template may refuse roles, and says so in its own ways
            raise ParameterError(f"The chat template of the model refuses the conversation: {error}") from None
        return self._lm.encode(text)


class Terminal:
    """Reads lines, writes answers. Works in a terminal and in a pipe."""

    def __init__(self, talk: Conversation, *, json: bool = False) -> None:
        self.talk = talk
        self.json = json
        self.typed = sys.stdin.isatty()

    def run(self) -> None:
        """Converse until there is nothing more to read."""
        if self.typed:
            self._greet()
        while True:
            try:
                line = self._read()
            except KeyboardInterrupt:
                _note("Ctrl-D ends the conversation.")
                continue
            if line is None:
                return
            try:
                self._take(line.strip())
            except KeyboardInterrupt:
                _note("stopped")
            except KnnlmError as error:
                _note(f"knnlm: error: {error}")

    def _greet(self) -> None:
        lm = self.talk.engine.mixture.lm
        if not self.talk.has_template:
            _note(f"{lm.name} was not trained to converse: it goes on from what you write.")
        _note("/help says what can be asked, Ctrl-D ends.")

    def _read(self) -> str | None:
        """Read a line, None at the end."""
        if self.typed:
            with suppress(ImportError):
                import readline  # noqa: F401  (with it, input knows the lines before)
        try:
            return input("› ") if self.typed else sys.stdin.readline() or None
        except UnicodeDecodeError as error:
            if not self.typed:
                raise ParameterError(f"What was piped in is no UTF-8 ({error.reason}). Give it as UTF-8.") from None
            _note("That was no UTF-8.")
            return ""
        except EOFError:
            console.print()
            return None

    def _take(self, line: str) -> None:
        """Do what a line asks for."""
        if not line:
            return
        if not line.startswith("/"):
            self._answer(line)
            return
        command, *words = line.split()
        if command == "/why":
            self._why(words)
        elif command == "/new":
            self.talk.begin()
            _note("A new conversation.")
        elif command == "/help":
            console.print(_HELP, markup=False)
        else:
            _note(f"There is no {clean(command)}. /help says what there is.")

    def _answer(self, line: str) -> None:
        before = self.talk.forgotten
        saying = self.talk.say(line)
        try:
            for token in saying:
                if self.talk.forgotten > before:
                    _note("The beginning of the conversation is too long ago for the model, and left out.")
                    before = self.talk.forgotten
                if not self.json:
                    style = "underline" if share(token) >= 0.5 else ""
                    console.print(Text(clean(token.text), style=style), end="")
        finally:
            saying.close()  # type: ignore[attr-defined]
            if not self.json and self.talk.answer is not None:
                console.print()
        if self.json and self.talk.answer is not None:
            facts = answer_facts(line, self.talk.answer)
            sys.stdout.write(json_format.dumps(facts, ensure_ascii=False) + "\n")
            sys.stdout.flush()

    def _why(self, words: list[str]) -> None:
        """Explain the last answer, all of it or one token."""
        answer = self.talk.answer
        if answer is None or not answer.tokens:
            _note("Nothing was answered yet.")
        elif not words:
            _tell(answer.tokens)
        elif words == ["all"]:
            console.print(tokens_table(answer.tokens))
        elif len(words) == 1 and words[0].isdecimal() and 1 <= int(words[0]) <= len(answer.tokens):
            console.print(token_table(answer.tokens[int(words[0]) - 1]))
        else:
            _note(f"Say /why, /why all, or /why with a number from 1 to {len(answer.tokens)}.")


def _note(text: str) -> None:
    """Say what is no answer, where it does not get into a pipe."""
    err.print(text, markup=False, style="dim")


def clean(text: str) -> str:
    """Show control characters as signs: a document must not be able to command the terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def share(token: ScoredToken) -> float:
    """Say how much of a token's probability the memories gave."""
    return token.weight * token.p_knn / token.p if token.p_knn is not None and token.p > 0 else 0.0


def voices(tokens: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    """Say which documents spoke for an answer, the loudest first.

    A document's part is the mean, over the tokens, of the share of the probability that its passages gave; only those
    that are named count, and only where they voted for the token that came.
    """
    found: dict[str, dict[str, Any]] = {}
    for token in tokens:
        heard = set()
        for source in token.sources:
            if source["token"] == token.text and token.p > 0:
                own = found.setdefault(source["document"], {"document": source["document"], "part": 0.0, "tokens": 0})
                own["part"] += _weight_of(token, source["memory"]) * source["weight"] / token.p / len(tokens)
                heard.add(source["document"])
        for document in heard:
            found[document]["tokens"] += 1
    return sorted(found.values(), key=lambda each: -each["part"])


def _weight_of(token: ScoredToken, memory: str) -> float:
    """Say what a memory weighed, of several or alone."""
    return next((float(each["weight"]) for each in token.shares if each["memory"] == memory), token.weight)


def answer_facts(message: str, answer: Reply) -> dict[str, Any]:
    """Tell of an answer in JSON."""
    tokens = [
        {"text": token.text, "p_lm": token.p_lm, "p_knn": token.p_knn, "p": token.p, "weight": token.weight}
        for token in answer.tokens
    ]
    facts = {"message": message, "answer": answer.text, "finish_reason": answer.reason, "tokens": tokens}
    return {**facts, "documents": voices(answer.tokens)}


def _tell(tokens: Sequence[ScoredToken]) -> None:
    """Say who spoke for an answer."""
    given = sum(share(token) for token in tokens) / len(tokens)
    loud = sum(share(token) >= 0.5 for token in tokens)
    console.print(
        f"The memory gave {given:.0%} of the probability of {count(len(tokens), 'token')}; it spoke louder than "
        f"the model for {loud}.",
        markup=False,
    )
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", no_wrap=True)
    named = voices(tokens)[:8]
    for each in named:
        table.add_row(f"{each['part']:.1%}", Text(clean(each["document"])), count(each["tokens"], "token"))
    if (rest := given - sum(each["part"] for each in named)) >= 0.0005:
        table.add_row(f"{rest:.1%}", Text("passages that are not named, and memories that name none", style="dim"), "")
    if table.row_count:
        console.print(table)


def tokens_table(tokens: Sequence[ScoredToken]) -> Table:
    """Lay out an answer, a token a line."""
    table = Table(box=None, padding=(0, 1, 0, 1), header_style="bold")
    for name in ("N", "token", "p_LM", "p_kNN", "p", "memory", "loudest for it"):
        table.add_column(name, justify="left" if name in ("token", "loudest for it") else "right", no_wrap=True)
    for number, token in enumerate(tokens, 1):
        loudest = next((each["document"] for each in token.sources if each["token"] == token.text), "")
        p_knn = "" if token.p_knn is None else f"{token.p_knn:.3g}"
        figures = (f"{token.p_lm:.3g}", p_knn, f"{token.p:.3g}", f"{share(token):.0%}")
        table.add_row(str(number), Text(shown(token.text)), *figures, Text(clean(loudest)))
    return table


def token_table(token: ScoredToken) -> Table:
    """Lay out one token and its sources."""
    p_knn = "–" if token.p_knn is None else f"{token.p_knn:.3g} × {token.weight:.2f}"
    title = Text(f"{shown(token.text)}   p_LM {token.p_lm:.3g}   p_kNN {p_knn}   p {token.p:.3g}")
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 1, 0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", style="dim")
    for source in token.sources:
        context = Text(f"…{shown(source['before'])[-60:]}")
        # Marked by signs too: colours are lost in a pipe.
        agrees = source["token"] == token.text
        context.append(f"«{shown(source['token'])}»", style="bold green" if agrees else "bold red")
        context.append(f"{shown(source['after'])[:30]}…", style="dim")
        table.add_row(f"{source['weight']:.3f}", context, Text(clean(source["document"])))
    return table


def shown(text: str) -> str:
    """Show text of unknown content on one line."""
    return clean(visible(text))
