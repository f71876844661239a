"""Speed of the server's engine with drafts, beside the same without them.

    python benchmarks/served_drafts.py CORPUS --store 8000 --limit 1500 --prompts 8 --slots 1,4  # minutes on two cores
    python benchmarks/served_drafts.py CORPUS --limit 20000 --prompts 64 --slots 1,4,16,64 --device cuda

Corpora, stores and prompts are those of drafts.py. Prompts are continued in groups of as many as there are slots, by an
engine without drafts and by one with them, in turns. `same` counts the texts that are equal.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from drafts import MODES, options_for, prompts, tuned_mixture
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.server.engine.requests import GenerationRequest, TokensEvent
from knnlm.server.engine.scheduler import Scheduler


def main() -> None:
    parser = options_for(__doc__)
    parser.add_argument("--slots", default="1,4", help="numbers of texts at once, with commas")
    options = parser.parse_args()
    lm = CausalLM.open(options.model, device=options.device, dtype=options.dtype)
    rows: list[dict[str, Any]] = []
    for corpus in options.corpus:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(corpus, tuned_mixture(corpus, Path(folder), lm, options), options)
    print("| corpus | texts at once | mode | tok/s | with drafts | ratio | accepted | same |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")


def measure(corpus: Path, mixture: Mixture, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of texts at once and each mode."""
    texts = [tuple(ids[0].tolist()) for ids in prompts(corpus, mixture.lm, options)]
    engines = {draft: Scheduler(mixture, draft=draft) for draft in (False, True)}
    rows = []
    for engine in engines.values():
        engine.start()
        engine.ready.wait()
    try:
        for slots in map(int, options.slots.split(",")):
            for mode, settings in MODES.items():
                for engine in engines.values():  # a warm-up
                    write(engine, texts[:slots], slots, options.new_tokens, settings)
                drafts = engines[True].drafts
                assert drafts is not None
                before = drafts.drafted, drafts.accepted
                (plain, expected), (drafted, found) = (
                    write(engine, texts, slots, options.new_tokens, settings) for engine in engines.values()
                )
                drafted_tokens, accepted = drafts.drafted - before[0], drafts.accepted - before[1]
                row = {"corpus": corpus.name, "slots": slots, "mode": mode}
                row |= {"plain": round(plain, 1), "drafts": round(drafted, 1), "ratio": round(drafted / plain, 2)}
                row |= {"accepted": f"{accepted} of {drafted_tokens}"}
                same = sum(one == other for one, other in zip(expected, found, strict=True))
                rows.append(row | {"same": f"{same} of {len(texts)}"})
                print(json.dumps(rows[-1]), flush=True)
    finally:
        for engine in engines.values():
            engine.stop()
    return rows


def write(
    engine: Scheduler, texts: list[tuple[int, ...]], slots: int, count: int, settings: dict[str, Any]
) -> tuple[float, list[list[int]]]:
    """Return the tokens a second, and the tokens of each text."""
    temperature = settings.get("temperature", 0.0) if settings["do_sample"] else 0.0
    written, left, begin = [], iter(texts), time.perf_counter()
    while group := list(islice(left, slots)):
        requests = [GenerationRequest(text, count, temperature=temperature, seed=0, ignore_eos=True) for text in group]
        for handle in engine.submit_all(requests):
            events = [event for event in handle.events() if isinstance(event, TokensEvent)]
            written.append([token.id for event in events for token in event.tokens])
    return sum(map(len, written)) / (time.perf_counter() - begin), written


if __name__ == "__main__":
    main()
