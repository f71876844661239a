"""Answers to instructions and continuations of test text, by a model with and without a store.

    python benchmarks/generation.py CORPUS... --store 20000 --limit 3000 --prompts 4 --instructions 4 --new-tokens 32
    python benchmarks/generation.py CORPUS... --train-student --device cuda --batch 200       # whole corpora on a GPU

CORPUS is a folder with train, valid and test .jsonl (also .gz, .xz, .zst), a document a line. Each store is built from
train and tuned on valid.

Instructions (instructions.jsonl) are answered greedily through the chat template; the stores have nothing to do with
them, so the answers should be those of the model. Continuations, greedy and sampled, begin with tokens of test text and
use the store of the same corpus. "copy" is the longest run of tokens of a text that a document of the store contains;
"area" is the area under the divergence curve against the real continuations (1: the same distribution); see
text_measures.py. All texts are written to a file, and each row is printed as a line of JSON as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from constraints import check
from knnlm.corpus import Document
from knnlm.datastore.suffix_array import SuffixArray, open_suffix_array
from knnlm.evaluation.continuations import score_continuations
from knnlm.generation.causal import KnnForCausalLM
from knnlm.generation.chat import encode_chat
from knnlm.lm.causal import CausalLM, dynamic_shape_attention
from knnlm.mixture.mixture import Mixture
from perplexity import parser_for, split
from systems import MIXTURES, add_student_options, build_mixtures, model_alone, open_student
from text_measures import LOOP, Floats, distinct_ratio, divergence_score, longest_copies

INSTRUCTIONS = Path(__file__).with_name("instructions.jsonl")
DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 0},
}
Tokens = list[int]


def main() -> None:
    options = parse()
    lm = CausalLM.open(options.model, device=options.device, dtype=options.dtype)
    instructions = [json.loads(line) for line in INSTRUCTIONS.read_text(encoding="utf-8").splitlines()]
    instructions = instructions[:: max(1, len(instructions) // max(1, options.instructions))][: options.instructions]
    rows: dict[str, list[dict[str, Any]]] = {"answers": [], "continuations": []}
    expected = answer(lm, instructions, options) if "instructions" in options.families else []
    with options.texts.open("w", encoding="utf-8") as texts:
        for corpus in options.corpus:
            with tempfile.TemporaryDirectory() as folder:
                for kind, row in measure_corpus(corpus, Path(folder), lm, (instructions, expected), texts, options):
                    print(json.dumps(row, ensure_ascii=False), flush=True)  # a run that is cut keeps these
                    texts.flush()
                    if kind in rows:
                        rows[kind].append(row)
                    if options.json:
                        options.json.write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    show("Answers to instructions with a store that has nothing to do with them", rows["answers"])
    show("Continuations with the store of the corpus", rows["continuations"])


def measure_corpus(
    corpus: Path,
    folder: Path,
    lm: CausalLM,
    questions: tuple[Sequence[Mapping[str, Any]], Sequence[Tokens]],
    texts: Any,
    options: argparse.Namespace,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Build a store, and yield the rows of each table and the seconds of each part as soon as they are known.

    `questions` are the instructions and the model's own answers.
    """
    begin = time.perf_counter()

    def seconds(part: str) -> tuple[str, dict[str, Any]]:
        nonlocal begin
        spent, begin = time.perf_counter() - begin, time.perf_counter()
        return "seconds", {"corpus": corpus.name, "part": part, "seconds": round(spent, 1)}

    names = [name for name in MIXTURES if name in options.systems]
    store, mixtures = build_mixtures(
        corpus, folder / "store", lm, store_tokens=options.store, limit=options.limit, names=names
    )
    yield seconds("build")
    if "instructions" in options.families:
        for row in compare_answers(corpus.name, lm, mixtures, *questions, texts, options):
            yield "answers", row
        yield seconds("instructions")
    if "related" in options.families:
        student = open_student(corpus, folder / "student", lm, options)
        yield seconds("student")
        for row in measure(corpus, lm, mixtures, open_suffix_array(store), student, texts, options):
            yield "continuations", row
        yield seconds("continuations")
    store.close()


def parse() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.set_defaults(limit=20_000)
    parser.add_argument(
        "--families",
        nargs="+",
        choices=["instructions", "related"],
        default=["instructions", "related"],
        help="instructions, which the stores have nothing to do with, and continuations with the related store",
    )
    parser.add_argument("--systems", nargs="+", choices=["model", *MIXTURES], default=["model", *MIXTURES])
    parser.add_argument("--decodings", nargs="+", choices=list(DECODINGS), default=list(DECODINGS))
    parser.add_argument("--instructions", type=int, default=100, help="number of instructions, at most 100")
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=200, help="continuations of each corpus")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens of a continuation")
    parser.add_argument("--batch", type=int, default=100, help="texts that are generated together")
    parser.add_argument(
        "--batch-tokens", type=int, default=16_384, help="tokens that are read together for mean states"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", type=Path, default=Path("generated.jsonl"), help="file for all generated texts")
    parser.add_argument("--json", type=Path, help="also write the rows into this file")
    add_student_options(parser)
    return parser.parse_args()


def generate(
    system: CausalLM | Mixture,
    prompts: Sequence[Tokens],
    *,
    readable: Sequence[Sequence[bool]] | None = None,
    new_tokens: int,
    batch: int,
    seed: int = 0,
    **settings: Any,
) -> list[Tokens]:
    """Return the tokens that follow each prompt, up to the end token, in batches with padding on the left."""
    lm = system.lm if isinstance(system, Mixture) else system
    model: Any = KnnForCausalLM(system) if isinstance(system, Mixture) else lm.model
    pad = lm.model.config.pad_token_id
    settings |= {"pad_token_id": lm.start_token if pad is None else pad, "max_new_tokens": new_tokens}
    torch.manual_seed(seed)
    generated = []
    for begin in range(0, len(prompts), batch):
        own = prompts[begin : begin + batch]
        width = max(map(len, own))
        ids = torch.tensor([[settings["pad_token_id"]] * (width - len(each)) + list(each) for each in own])
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in own])
        marks: dict[str, Any] = {}
        if readable is not None and isinstance(system, Mixture):
            rows = readable[begin : begin + batch]
            marks["readable_mask"] = torch.tensor([[False] * (width - len(row)) + list(row) for row in rows])
        inputs = {name: tensor.to(lm.device) for name, tensor in {"attention_mask": mask, **marks}.items()}
        with dynamic_shape_attention(lm.device):  # that of mixtures: another kernel rounds, and then writes, otherwise
            output = model.generate(ids.to(lm.device), **inputs, **settings)
        generated += [_until_end(row, model) for row in output[:, width:].tolist()]
    return generated


def _until_end(tokens: Tokens, model: Any) -> Tokens:
    """Return the tokens before the first end token."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return tokens[: next((number for number, token in enumerate(tokens) if token in ends), len(tokens))]


def answer(
    system: CausalLM | Mixture, instructions: Sequence[Mapping[str, Any]], options: argparse.Namespace
) -> list[Tokens]:
    """Return greedy answers to instructions; of the prompt, a mixture reads only the instruction itself."""
    lm = system.lm if isinstance(system, Mixture) else system
    chats = [encode_chat(lm, [{"role": "user", "content": each["prompt"]}]) for each in instructions]
    return generate(
        system,
        [chat.tokens for chat in chats],
        readable=[chat.readable for chat in chats],
        new_tokens=options.answer_tokens,
        batch=options.batch,
        **DECODINGS["greedy"],
    )


def compare_answers(
    store: str,
    lm: CausalLM,
    mixtures: Mapping[str, Mixture],
    instructions: Sequence[Mapping[str, Any]],
    expected: Sequence[Tokens],
    texts: Any,
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Answer instructions with every mixture of a store, and yield a row for the model and for each of them."""
    for name, answers in [("model", expected), *((name, None) for name in mixtures)]:
        found = answer(mixtures[name], instructions, options) if answers is None else answers
        shown = [str(lm.tokenizer.decode(tokens, skip_special_tokens=True)).strip() for tokens in found]
        met = [
            result
            for each, text in zip(instructions, shown, strict=True)
            for result in check(text, each["constraints"])
        ]
        for each, text in zip(instructions, shown, strict=True):
            line = {"store": store, "system": name, "prompt": each["prompt"], "text": text}
            texts.write(json.dumps(line, ensure_ascii=False) + "\n")
        yield {
            "store": store,
            "system": name,
            "answers": len(found),
            "identical": float(np.mean([own == other for own, other in zip(found, expected, strict=True)])),
            "constraints": len(met),
            "met": float(np.mean(met)) if met else math.nan,
            "loops": float(np.mean([distinct_ratio(tokens) < LOOP for tokens in found])),
        }


def passages(documents: Sequence[Document], lm: CausalLM, length: int, count: int) -> list[Tokens]:
    """Return at most `count` passages of `length` tokens, spread evenly over the text.

    A passage begins with a document, or where the previous passage of a long document ends; short documents are joined
    by line breaks.
    """
    pieces = list(_pieces(documents, lm, length))
    step = max(1.0, len(pieces) / max(1, count))
    return [pieces[int(number * step)] for number in range(min(count, len(pieces)))]


def _pieces(documents: Sequence[Document], lm: CausalLM, length: int) -> Iterator[Tokens]:
    line_break, joined = lm.encode("\n"), Tokens()
    for tokens in lm.encode_all([document.text for document in documents]):
        joined += tokens
        yield from (joined[begin : begin + length] for begin in range(0, len(joined) - length + 1, length))
        joined = [*joined, *line_break] if len(joined) < length else []


def measure(
    corpus: Path,
    lm: CausalLM,
    mixtures: Mapping[str, Mixture],
    array: SuffixArray,
    student: CausalLM | None,
    texts: Any,
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Continue passages of the test text with every system, and yield a row for each and for the real text."""
    cut = options.prompt_tokens
    real = passages(list(split(corpus, "test")), lm, cut + options.new_tokens, options.prompts)
    prompts = [[lm.start_token, *passage[:cut]] for passage in real]
    measures = Measures(lm, prompts, [passage[cut:] for passage in real], array, student, options.batch_tokens)
    runs = [("real", "text"), *((decoding, name) for decoding in options.decodings for name in options.systems)]
    for decoding, name in runs:
        begin = time.perf_counter()
        if decoding == "real":
            found = measures.real
        else:
            found = generate(
                mixtures.get(name, lm),
                prompts,
                new_tokens=options.new_tokens,
                min_new_tokens=options.new_tokens,
                batch=options.batch,
                seed=options.seed,
                **DECODINGS[decoding],
            )
        seconds = time.perf_counter() - begin
        for prompt, tokens in zip(prompts, found, strict=True):
            line = {"corpus": corpus.name, "decoding": decoding, "system": name, "prompt": lm.decode(prompt[1:])}
            texts.write(json.dumps({**line, "text": lm.decode(tokens)}, ensure_ascii=False) + "\n")
        row = {"corpus": corpus.name, "decoding": decoding, "system": name, "texts": len(found), "seconds": seconds}
        yield row | measures.of(found)


@dataclass(frozen=True)
class Measures:
    """The figures of texts that continue the same prompts."""

    lm: CausalLM
    prompts: Sequence[Tokens]
    real: Sequence[Tokens]  # the real continuations
    array: SuffixArray  # of the store
    student: CausalLM | None
    batch_tokens: int

    @cached_property
    def real_states(self) -> Floats:
        """The (N, D) mean states of the real continuations."""
        return mean_states(self.lm, self.prompts, self.real, batch_tokens=self.batch_tokens)

    def of(self, found: Sequence[Tokens]) -> dict[str, Any]:
        """Return the figures of generated texts."""
        ratios = [distinct_ratio(tokens) for tokens in found]
        copies = longest_copies(self.array, found)
        states = self.real_states
        if found is not self.real:
            states = mean_states(self.lm, self.prompts, found, batch_tokens=self.batch_tokens)
        figures = {
            "distinct 4-grams": float(np.mean(ratios)),
            "loops": float(np.mean([ratio < LOOP for ratio in ratios])),
            "copy, mean": float(np.mean(copies)),
            "copy, max": max(copies),
            "area": divergence_score(self.real_states, states),
        }
        if self.student is not None:
            figures["perplexity, student"] = perplexity(self.student, self.prompts, found)
        return figures


def mean_states(
    lm: CausalLM, prompts: Sequence[Tokens], found: Sequence[Tokens], *, batch_tokens: int = 2048
) -> Floats:
    """Return the (N, D) means of the key layer's states at the positions that predict the tokens of each text."""
    documents = [[*prompt[1:], *tokens] for prompt, tokens in zip(prompts, found, strict=True)]  # read adds the start
    lengths = np.array([len(document) for document in documents])
    owners = torch.from_numpy(np.repeat(np.arange(len(documents)), lengths)).to(lm.device)
    starts = np.array([len(prompt) - 1 for prompt in prompts])
    own = torch.from_numpy(np.concatenate([np.arange(n) >= start for n, start in zip(lengths, starts, strict=True)]))
    own = own.to(lm.device)
    sums = torch.zeros(len(documents), lm.width, dtype=torch.float64, device=lm.device)
    for batch in lm.read(documents, lm.window(), logits=False, batch_tokens=batch_tokens):
        rows = batch.rows.to(lm.device)
        kept = own[rows]
        sums.index_add_(0, owners[rows[kept]], batch.keys[kept].double())
    return sums.cpu().numpy() / np.maximum(lengths - starts, 1)[:, None]


def perplexity(student: CausalLM, prompts: Sequence[Tokens], found: Sequence[Tokens]) -> float:
    """Return the perplexity of texts after their prompts under a student."""
    scores = score_continuations(model_alone(student), list(zip(prompts, found, strict=True)))
    return math.exp(-sum(score.log_prob for score in scores) / max(1, sum(map(len, found))))


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of rows with the same columns."""
    print(f"\n{title}:\n")
    names = list(rows[0]) if rows else []
    print("|", " | ".join(names), "|")
    print("|" + "---|" * len(names))
    for row in rows:
        cells = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()]
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
