"""Commands that use a memory: generate, explain."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from knnlm.cli.evaluate import open_mixture
from knnlm.cli.options import (
    Device,
    DeviceKeys,
    Dtype,
    Json,
    K,
    KnnTemperature,
    Lambda,
    Memories,
    Memory,
    Metric,
    NoRerank,
    Reader,
    Skip,
)
from knnlm.cli.output import console, print_json, safe, visible
from knnlm.errors import ParameterError

if TYPE_CHECKING:
    from knnlm.evaluation.explain import TokenExplanation
    from knnlm.mixture.mixture import Mixture


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(short_help="Continue a prompt.")(generate)
    app.command(short_help="Say which documents spoke for each token of a text.")(explain)


def generate(
    memory: Memory,
    prompt: Annotated[str, typer.Argument(help="The text to continue.", show_default=False)],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write at most.")] = 60,
    do_sample: Annotated[bool, typer.Option("--do-sample", help="Sample instead of taking the most probable.")] = False,
    temperature: Annotated[float, typer.Option(help="Of sampling; --knn-temperature is the vote's.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample from the most probable tokens with this much mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many tokens; 0 is all.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes repeats less probable.")] = 1.0,
    beams: Annotated[int, typer.Option(min=1, help="Number of beams.")] = 1,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Make sampling repeatable.", show_default=False)
    ] = None,
    no_memory: Annotated[bool, typer.Option("--no-memory", help="The model alone.")] = False,
    memories: Memories = None,
    k: K = None,
    knn_temperature: KnnTemperature = None,
    lmbda: Lambda = None,
    metric: Metric = None,
    skip: Skip = None,
    no_rerank: NoRerank = False,
    device_keys: DeviceKeys = "float16",
    model: Reader = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """knnlm generate memory "The with statement" --max-new-tokens 20

    Continue a prompt with the memory, or without it for comparison.
    """
    if not 0 < repetition_penalty < float("inf"):
        raise ParameterError(f"repetition penalty must be above 0, not {repetition_penalty}.")
    settings: dict[str, Any] = {"num_beams": beams, "do_sample": do_sample, "repetition_penalty": repetition_penalty}
    if do_sample:
        if not temperature > 0:
            raise ParameterError(f"sampling temperature must be above 0, not {temperature}.")
        if not 0 < top_p <= 1:
            raise ParameterError(f"top-p must be above 0 and at most 1, not {top_p}.")
        settings |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    mixture = open_mixture(
        memory,
        memories=memories,
        model=model,
        k=k,
        knn_temperature=knn_temperature,
        lmbda=lmbda,
        metric=metric,
        skip_fraction=skip,
        rerank=not no_rerank,
        key_dtype=device_keys,
        device=device,
        dtype=dtype,
    )
    begin = time.perf_counter()
    text, tokens = continue_text(
        mixture,
        prompt,
        memory=not no_memory,
        max_new_tokens=max_new_tokens,
        seed=seed,
        stream=not json and beams == 1,
        **settings,
    )
    seconds = time.perf_counter() - begin
    if json:
        facts = {"prompt": prompt, "text": text, "tokens": tokens, "memory": not no_memory, "seconds": seconds}
        print_json(facts)
    elif beams > 1:
        console.print(prompt + text, markup=False)


def continue_text(
    mixture: Mixture, prompt: str, *, memory: bool, seed: int | None, stream: bool, **settings: Any
) -> tuple[str, int]:
    """Generate, and return the new text and how many tokens it has."""
    from transformers import TextStreamer

    from knnlm.generation.causal import generate_tokens

    tokenizer = mixture.lm.tokenizer
    streamer = TextStreamer(tokenizer, skip_special_tokens=True) if stream else None
    tokens = generate_tokens(mixture, prompt, seed=seed, use_memory=memory, streamer=streamer, **settings)
    return str(tokenizer.decode(tokens, skip_special_tokens=True)), len(tokens)


def explain(
    memory: Memory,
    text: Annotated[
        str, typer.Argument(help="The text itself, a file that holds it, or - for standard input.", show_default=False)
    ],
    top: Annotated[int, typer.Option(min=0, help="How many neighbours to show for each token.")] = 3,
    memories: Memories = None,
    k: K = None,
    knn_temperature: KnnTemperature = None,
    lmbda: Lambda = None,
    metric: Metric = None,
    skip: Skip = None,
    no_rerank: NoRerank = False,
    device_keys: DeviceKeys = "float16",
    model: Reader = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """knnlm explain memory "The with statement is used to wrap"

    For each token: its probability by the model, by the memory and by both, and the neighbours that spoke: with what
    weight, for which token, and from which document.
    """
    from dataclasses import asdict

    from knnlm.evaluation.explain import explain

    mixture = open_mixture(
        memory,
        memories=memories,
        model=model,
        k=k,
        knn_temperature=knn_temperature,
        lmbda=lmbda,
        metric=metric,
        skip_fraction=skip,
        rerank=not no_rerank,
        key_dtype=device_keys,
        device=device,
        dtype=dtype,
    )
    text = _text(text)
    explained = explain(mixture, text, top=top)
    if json:
        print_json({"text": text, "tokens": [asdict(token) for token in explained]})
        return
    for token in explained:
        console.print(explanation_table(token))


def _text(given: str) -> str:
    """Read a text from where it is: the argument itself, unless that names a file."""
    from knnlm.corpus import read_documents

    if given != "-":
        try:
            if not Path(given).is_file():
                return given
        except (OSError, ValueError):  # too long for a name, or with a null
            return given
    return "\n\n".join(document.text for document in read_documents(given))


def _short(memory: str) -> str:
    """Name a memory as the formula does; of a path, the last folder tells enough."""
    kind, _, path = memory.partition("=")
    name = "kNN" if kind == "knn" else kind
    return f"{name}={Path(path).name}" if path else name


def explanation_table(token: TokenExplanation) -> Table:
    """Lay out one token and its neighbours."""
    said = "   ".join(f"p_{_short(share.memory)} {share.p:.3g} × {share.weight:.2f}" for share in token.shares)
    title = f"[bold]{safe(token.token)}[/bold]   p_LM {token.p_lm:.3g}   {safe(said)}   p {token.p:.3g}"
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 1, 0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", style="dim")
    for voice in token.neighbours:
        context = Text(f"…{visible(voice.before)[-60:]}")
        # Marked by signs too: colours are lost in a pipe.
        context.append(f"«{visible(voice.token)}»", style="bold green" if voice.agrees else "bold red")
        context.append(f"{visible(voice.after)[:30]}…", style="dim")
        table.add_row(f"{voice.weight:.3f}", context, Text(voice.source))
    return table
