"""Conversing in a terminal: the answers are those of the model with its store, and the terminal stays in charge."""

from __future__ import annotations

import codecs
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from helpers.cli import knnlm
from helpers.models import tiny, tiny_tokenizer
from helpers.stores import documents
from knnlm.cli.app import run
from knnlm.cli.chat import SOURCES, Conversation, document_shares, memory_share
from knnlm.cli.output import without_control
from knnlm.corpus import Document
from knnlm.errors import ParameterError
from knnlm.generation.causal import KnnForCausalLM
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.memories.base import Origin
from knnlm.mixture.mixture import Mixture
from knnlm.server.engine.requests import Busy, GenerationRequest
from knnlm.server.engine.scheduler import Scheduler

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
SETTINGS = {"k": 8, "knn_temperature": 4.0, "lmbda": 0.5}
CHOSEN = ("--k", "8", "--knn-temperature", "4", "--lambda", "0.5")


def make_model(*, longest: int, template: str | None = TEMPLATE) -> CausalLM:
    """A tiny llama that never ends a text by itself."""
    model = tiny("llama")
    model.config.max_position_embeddings = longest
    model.generation_config.eos_token_id = None
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return CausalLM(model, tokenizer, name="tiny-llama")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A store whose model has a chat template and room for long answers; one document is hostile."""
    folder = tmp_path_factory.mktemp("chat")
    lm = make_model(longest=4096)
    lm.model.save_pretrained(folder / "model")
    lm.tokenizer.save_pretrained(folder / "model")
    texts = documents(12)
    texts[0] = Document(id="\x1b]0;taken\x07evil", source="evil", text=texts[0].text)
    lm = CausalLM.open(str(folder / "model"))
    build(texts, folder / "docs.store", lm=lm).close()
    return folder


@pytest.fixture
def talk(home):
    """Begin a conversation in this process."""
    begun = []

    def begin(*, longest: int = 4096, template: str | None = TEMPLATE, **settings) -> Conversation:
        lm = CausalLM.open(str(home / "model"))
        lm.model.config.max_position_embeddings = longest
        lm.tokenizer.chat_template = template
        engine = Scheduler(Mixture.open(home / "docs.store", lm, **SETTINGS), slots=1, queue=1)
        engine.start()
        begun.append(engine)
        return Conversation(engine, **{"sampling": {}, "max_tokens": 12, **settings})

    yield begin
    for engine in begun:
        engine.stop()


def generated(home, prompt: list[int], count: int) -> list[int]:
    """What transformers generates greedily with the store."""
    model = KnnForCausalLM.from_store(home / "docs.store", **SETTINGS)
    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return made[0, len(prompt) :].tolist()


def chat(home, *arguments: str, said: str) -> subprocess.CompletedProcess:
    """Run the command with lines piped in."""
    command = [sys.executable, "-m", "knnlm", "chat", str(home / "docs.store"), *CHOSEN, *arguments]
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=120)


def test_piped_lines_are_answered_by_the_mixture_given_the_conversation_so_far(home):
    done = chat(home, "--max-new-tokens", "10", "--system", "Be brief.", "--json", said="The memory\n\nof Anna\n")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["message"] for answer in answers] == ["The memory", "of Anna"]
    tokenizer = tiny_tokenizer()
    so_far = "system: Be brief.\n"
    for answer in answers:
        so_far += f"user: {answer['message']}\n"
        made = generated(home, tokenizer(so_far + "assistant:")["input_ids"], 10)
        assert answer["answer"] == tokenizer.decode(made, skip_special_tokens=True)
        assert answer["finish_reason"] == "length"
        so_far += f"assistant: {answer['answer']}\n"


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_only_what_the_user_wrote_is_evidence(talk, template):
    begun = talk(template=template, system="The memory")
    orders = []
    submit = begun.engine.submit
    begun.engine.submit = lambda order: orders.append(order) or submit(order)
    answers = ["".join(token.text for token in begun.send(said)) for said in ("of Anna", "is")]
    lm = begun.engine.mixture.lm
    for order, users, generated_before in zip(orders, ["of Anna", "of Annais"], ["", answers[0]], strict=True):
        pairs = list(zip(order.tokens, order.origins, strict=True))
        assert lm.decode([token for token, origin in pairs if origin == Origin.GIVEN]).replace(" ", "") in (
            users.replace(" ", "")
        )
        assert any(origin == Origin.GIVEN for origin in order.origins)
        kept = lm.decode([token for token, origin in pairs if origin == Origin.GENERATED])
        assert kept.replace(" ", "") in generated_before.replace(" ", "")


def test_model_without_a_chat_template_continues_the_text(home, talk):
    begun = talk(template=None)
    answer = "".join(token.text for token in begun.send("The memory of a model"))
    tokenizer, start = tiny_tokenizer(), begun.engine.mixture.lm.start_token
    made = generated(home, [start, *tokenizer("The memory of a model")["input_ids"]], 12)
    assert answer == tokenizer.decode(made, skip_special_tokens=True)
    list(begun.send("is"))
    assert [turn["content"] for turn in begun.messages[:3]] == ["The memory of a model", answer, "is"]


def test_invalid_input_is_a_one_line_error(home, capfd, monkeypatch):
    command = ["chat", home / "docs.store", *CHOSEN, "--max-new-tokens", "3"]

    def piped(given: bytes, errors: str) -> io.TextIOWrapper:
        """Standard input as with PYTHONIOENCODING=utf-8:ERRORS."""
        return io.TextIOWrapper(io.BytesIO(given), encoding="utf-8", errors=errors)

    monkeypatch.setattr("sys.stdin", piped(b"\xff\xfe\n", "strict"))
    code, _, err = knnlm(capfd, *command)
    assert code == 2
    assert "UTF-8" in err
    assert "Traceback" not in err
    monkeypatch.setattr("sys.stdin", piped(b"\xff\nWhen\n", "surrogateescape"))
    code, out, err = knnlm(capfd, *command)
    assert code == 0
    assert "not Unicode" in err
    assert "Traceback" not in err
    assert out.strip()


def test_rejected_message_is_not_part_of_the_conversation(talk):
    begun = talk()
    list(begun.send("The memory"))
    before = list(begun.messages)
    engine = begun.engine
    held = [engine.submit(GenerationRequest((1, 2), 100)) for _ in range(1)]
    while engine.active < 1:
        time.sleep(0.001)
    held.append(engine.submit(GenerationRequest((1, 2), 100)))
    with pytest.raises(Busy):
        next(begun.send("of Anna"))
    assert begun.messages == before
    for ticket in held:
        ticket.cancel()


def test_bidirectional_control_characters_are_escaped():
    assert without_control("a\u202eb\u2066c\x1b[2Jd\u200fe\n") == "a\ufffdb\ufffdc\ufffd[2Jd\ufffde\n"


def test_shares_of_why_add_up_to_the_gain_of_the_store(home, talk):
    begun = talk()
    tokens = list(begun.send("The memory of a model is"))
    model = KnnForCausalLM.from_store(home / "docs.store", **SETTINGS)
    prompt = tiny_tokenizer()("user: The memory of a model is\nassistant:")["input_ids"]
    ids = torch.tensor([prompt + [token.id for token in tokens]])
    with torch.no_grad():
        mixed = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        alone = model.base(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    chosen = ids[0, len(prompt) :, None]
    given = 1 - 0.5 * (alone - mixed).gather(1, chosen)[:, 0].exp().numpy()  # p = 0.5 p_LM + what the store gave
    np.testing.assert_allclose([memory_share(token) for token in tokens], given, atol=1e-4)
    shares = document_shares(tokens)
    # All of its neighbours are named (k is not above SOURCES), so the documents' parts are all that it gave.
    assert SETTINGS["k"] <= SOURCES
    assert sum(each["share"] for each in shares) == pytest.approx(given.mean(), abs=1e-4)
    assert [each["share"] for each in shares] == sorted((each["share"] for each in shares), reverse=True)
    for each in shares:
        named = [any(s["document"] == each["document"] and s["token"] == t.text for s in t.sources) for t in tokens]
        assert each["tokens"] == sum(named)


def test_why_names_documents_and_escapes_terminal_sequences(home, monkeypatch, capfd):
    said = "/why\nThe memory of a model\n/why\n/why all\n/why 2\n/why 99\n/nonsense\n/help\n/new\n/why\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    assert run(["chat", str(home / "docs.store"), *CHOSEN, "--max-new-tokens", "20"]) == 0
    out, err = capfd.readouterr()
    assert "There is no reply yet." in err
    assert "a number from 1 to 20" in err
    assert "Unknown command /nonsense." in err
    assert re.search(r"Memories gave \d+% of the probability of 20 tokens", out)
    assert re.search(r"\d+\.\d%\s+d\d+\s+\d+ tokens?", out)
    # Those that are named and the rest are what the store gave.
    told = out[out.index("Memories gave") : out.index("p_LM")]
    parts = [float(part) for part in re.findall(r"(\d+\.\d)%", told)]
    assert sum(parts) == pytest.approx(float(re.search(r"gave (\d+)%", told)[1]), abs=0.5 + 0.05 * len(parts))
    assert re.search(r"^ *20 .*%", out, re.M)
    assert "p_kNN" in out
    assert "«" in out
    assert err.count("There is no reply yet.") == 2  # /new forgets
    for stream in (out, err):
        assert "\x1b" not in stream
        assert "\x07" not in stream


def test_control_characters_are_escaped():
    assert without_control("a\x1b[31mb\x9bc\rd\x7f") == "a�[31mb�c�d�"
    assert without_control("lines\nand\ttabs, λ") == "lines\nand\ttabs, λ"


def test_long_conversation_is_truncated_at_its_beginning(talk):
    begun = talk(longest=128, system="Stay.", max_tokens=20)
    orders = []
    submit = begun.engine.submit
    begun.engine.submit = lambda order: orders.append(order) or submit(order)
    tokenizer, said = tiny_tokenizer(), []
    for number in range(6):
        said.append(f"user: {number} the memory of a model\n")
        # As much of the end as the model can read, from a question on: no more than needed is lost.
        texts = ["system: Stay.\n" + "".join(said[first:]) + "assistant:" for first in range(0, len(said), 2)]
        fitting = next(text for text in texts if len(tokenizer(text)["input_ids"]) + 20 <= 128)
        answer = list(begun.send(f"{number} the memory of a model"))
        assert len(answer) == 20
        assert tokenizer.decode(orders[-1].tokens) == fitting
        said.append("assistant: " + "".join(token.text for token in answer) + "\n")
    assert begun.dropped > 0


def test_too_long_message_is_refused_and_the_conversation_continues(home, talk):
    begun = talk(longest=128)
    with pytest.raises(ParameterError, match="context has 128"):
        list(begun.send("memory " * 100))
    assert begun.messages == []
    assert len(list(begun.send("memory"))) == 12


def test_closing_the_stream_ends_the_answer_and_keeps_the_received_text(talk):
    begun = talk(max_tokens=4000)
    answer = begun.send("The memory")
    received = [next(answer).text for _ in range(5)]
    answer.close()
    assert begun.messages[-1]["role"] == "assistant"
    assert begun.messages[-1]["content"].startswith("".join(received))
    assert begun.reply.reason == "stopped"
    begun.max_tokens = 3
    assert len(list(begun.send("of a model"))) == 3


class Typist:
    """A person at a terminal: a real pty, real keys."""

    def __init__(self, *command: str) -> None:
        self.pid, self.screen = pty.fork()
        if self.pid == 0:
            os.environ.update({"TERM": "dumb", "PYTHONUTF8": "1"})
            os.execv(sys.executable, [sys.executable, "-m", "knnlm", *command])
        self.seen = ""
        self.letters = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside of one

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """Read until a pattern is on the screen; give what is new up to there."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self.screen], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.seen!r}"
            try:
                self.seen += self.letters.decode(os.read(self.screen, 65536))
            except OSError as error:
                raise AssertionError(f"ended without {pattern!r}: {self.seen!r}") from error
        new, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return new

    def type(self, keys: str) -> None:
        os.write(self.screen, keys.encode())

    def end(self) -> int:
        """Wait for the program to end; give its exit code."""
        while True:
            try:
                if not os.read(self.screen, 65536):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_stops_the_answer_but_not_the_program_and_ctrl_d_ends_it(home):
    person = Typist("chat", str(home / "docs.store"), *CHOSEN, "--max-new-tokens", "4000")
    person.wait_for("Ctrl-D ends.")
    person.wait_for("› ")
    person.type("The memory of a model\n")
    person.wait_for(r"model\r\n.{8}")  # the answer has begun
    person.type("\x03")
    person.wait_for("stopped")
    person.wait_for("› ")
    person.type("/why\n")
    told = person.wait_for(r"of the probability of ([\d,]+) tokens")
    assert 1 <= int(re.search(r"of ([\d,]+) tokens", told)[1].replace(",", "")) < 4000
    person.wait_for("› ")
    person.type("half a line")
    person.wait_for("half a line")
    time.sleep(0.5)  # as a person would: Python lets a signal wait for the next key if it comes while one is echoed
    person.type("\x03")  # at the prompt it takes back what was typed
    person.wait_for("Ctrl-D ends the conversation.")
    person.wait_for("› ")
    person.type("\x04")
    assert person.end() == 0
