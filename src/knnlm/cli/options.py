"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Memory = Annotated[Path, typer.Argument(help="The folder of a memory.", show_default=False)]

Text = Annotated[
    list[str],
    typer.Argument(
        help="Files and folders (.txt .md .jsonl .parquet, also .gz .xz .zst), - for standard input, "
        "hf:NAME[:SPLIT] for a datasets name.",
        show_default=False,
    ),
]

TextField = Annotated[str, typer.Option(help="The field of .jsonl and .parquet that holds the text.")]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]

Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]

Dtype = Annotated[
    str,
    typer.Option(help="Precision of the model: auto (float32 on a CPU, else bfloat16), float32, bfloat16, float16."),
]

Reader = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The language model: the one the memory was built with, where it is now, or another one with the same "
        "tokenizer.",
        show_default="the one the memory was built with",
    ),
]

Memories = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help="What is mixed: knn, cache, ngram, output, knn=FOLDER, decoder=FOLDER, cache=POSITIONS, with commas; a "
        "weight each as in knn:0.3,cache:0.1.",
        show_default="as tuned, else knn",
    ),
]

Skip = Annotated[
    float | None,
    typer.Option(help="Fraction of the searches that a gate leaves out.", show_default="0"),
]

K = Annotated[int | None, typer.Option("--k", help="How many neighbours vote.", show_default="as tuned, else 1024")]

KnnTemperature = Annotated[
    float | None,
    typer.Option(help="τ of the vote: higher listens to farther neighbours.", show_default="as tuned, else 2"),
]

Lambda = Annotated[
    float | None,
    typer.Option("--lambda", help="λ, the weight of the memory, from 0 to 1.", show_default="as tuned, else 0.25"),
]

Metric = Annotated[
    str | None, typer.Option(help="l2 (squared) or ip (inner product).", show_default="as tuned, else l2")
]

NoRerank = Annotated[
    bool, typer.Option("--no-rerank", help="Vote with the index's own distances instead of the stored keys'.")
]

DeviceKeys = Annotated[
    str,
    typer.Option(
        help="What a GPU holds keys in: float16 (as stored), or int8 (half the memory, distances to rounded keys)."
    ),
]

Keys = Annotated[
    str,
    typer.Option(
        help="How keys are stored: float16, float32, int8, pca256-int8 (so many components), codes48 (so many bytes)."
    ),
]

Limit = Annotated[
    int | None, typer.Option(help="Read whole documents until this many tokens are reached.", show_default="all")
]

Wait = Annotated[float, typer.Option(min=0, help="Seconds to wait for others who use the memory.")]
