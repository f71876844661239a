"""Commands that use a store: tune, eval, generate, explain, lm-eval, report."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from knnlm.cli.options import (
    MEMORIES_HELP,
    USE,
    Clusters,
    Draft,
    Json,
    KeyDtype,
    Limit,
    MachineFlags,
    MaxNewTokens,
    MaxPointers,
    Metric,
    MinPointers,
    MixtureFlags,
    NoDomainCheck,
    NoOnline,
    NoRerank,
    RaySearchFlags,
    SearchMode,
    SourceText,
    Store,
    StoreModel,
    Subset,
    Text,
    TextField,
    TextFlags,
    TopP,
    automaton_params,
    command,
    open_mixture,
    stored_model,
)
from knnlm.cli.output import (
    bar,
    console,
    count,
    err,
    leak_warning,
    neighbour_table,
    print_json,
    print_table,
    quiet,
    safe,
    show,
    visible,
)
from knnlm.errors import KnnlmWarning, ParameterError

if TYPE_CHECKING:
    from knnlm.corpus import Document
    from knnlm.evaluation.evaluate import Evaluation
    from knnlm.evaluation.explain import TokenExplanation
    from knnlm.evaluation.odds import ChosenOdds
    from knnlm.evaluation.quality import TranslationQuality
    from knnlm.evaluation.support import SupportFigures
    from knnlm.evaluation.tune import Tuning
    from knnlm.mixture.mixture import Mixture
    from knnlm.mixture.online import OnlineConfig
    from knnlm.mixture.source_domain import SourceDomain

DEFAULT_MEMORIES = "knn,cache,ngram"
# A word that is a mistyped path rather than a text: ./letter, /tmp/letter, letter.txt; not and/or, Wort.Das, a@b.com.
_FILE_NAME = re.compile(r"(\.{1,2}/|~/|/[\w.-]+/)[\w./-]*|[\w./-]*\w\.[a-z][a-z0-9]{1,4}", re.ASCII)
PAIR_MEMORIES = "knn,ngram"  # a single sentence is too short for a cache

HeldOutText = Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Held-out text.", show_default=False)]
TraceFolder = Annotated[
    Path | None, typer.Option(help="Tune on a trace of eval --save-trace instead.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    command(app, USE, "Choose settings and weights on held-out text.")(tune)
    command(app, USE, "Measure perplexity without and with the memories.", name="eval")(evaluate)
    command(app, USE, "Continue a prompt.")(generate)
    command(app, USE, "Translate with an encoder-decoder model.")(translate)
    command(app, USE, "Show the documents behind each token of a text.")(explain)
    command(app, USE, "Run tasks of lm-evaluation-harness.", name="lm-eval")(lm_eval)
    command(app, USE, "Run the papers' studies and write an HTML page.")(report)


@dataclass(frozen=True)
class GridFlags:
    """What `tune` chooses from."""

    memories: Annotated[
        str | None,
        typer.Option(
            help=f"{MEMORIES_HELP}.",
            show_default=f"{DEFAULT_MEMORIES}, and the decoder of adapt; with --trace, those of the trace",
        ),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            help="fixed (the same everywhere), fitted (the same, over several k and τ), buckets (by the nearest "
            "distance), gated (by a small network, per token).",
            show_default="gated; for a decoder, fixed",
        ),
    ] = None
    k: Annotated[str | None, typer.Option("--k", help="Values to try: 1,8,64.", show_default="1 … 1024")] = None
    knn_temperature: Annotated[
        str | None, typer.Option(help="Values of τ to try.", show_default="20, by the distances")
    ] = None
    lambdas: Annotated[
        str | None, typer.Option("--lambda", help="Values of λ to try.", show_default="0, 0.01 … 0.99")
    ] = None
    no_online: NoOnline = False
    samples: Annotated[
        int | None,
        typer.Option(
            help="Tokens that the model writes: a gate with online weights is trained also on them, and learns where "
            "not to use the memories. 0: none.",
            min=0,
            show_default="as many as TEXT has, at most 60,000",
        ),
    ] = None
    other: Annotated[
        list[str] | None,
        typer.Option(
            help="Text of another domain, as TEXT: a gate with online weights is trained also on it, and learns where "
            "not to use the memories. Can be repeated.",
            show_default=False,
        ),
    ] = None
    quality: Annotated[
        int,
        typer.Option(
            help="For pairs: also translate this many sentences of TEXT with several weights of the memories and "
            "several odds of the end of a translation, and take those with the best BLEU.",
            min=0,
            show_default="0: the weights that predict the targets best",
        ),
    ] = 0

    @property
    def values(self) -> dict[str, Any]:
        """The values to try, as keyword arguments of the library."""
        from knnlm.evaluation.sweep import LAMBDAS

        return {
            "ks": _numbers("k", self.k, int),
            "knn_temperatures": _numbers("knn-temperature", self.knn_temperature, float),
            "lambdas": _numbers("lambda", self.lambdas, float) or LAMBDAS,
        }

    def check(self) -> None:
        """Raise ParameterError where λ values are given for weights that have none."""
        from knnlm.evaluation.tune import check_weights

        check_weights(self.weights or "gated")
        if self.lambdas is not None and (self.weights != "fixed" or "," in (self.memories or "")):
            raise ParameterError("--lambda applies to one memory with fixed weights: --memories knn --weights fixed.")


def tune(
    store: Store,
    text: HeldOutText = None,
    grid: GridFlags = GridFlags(),
    trace: TraceFolder = None,
    metric: Metric = None,
    limit: Limit = None,
    no_rerank: NoRerank = False,
    key_dtype: KeyDtype = "float16",
    subset: Subset = None,
    search: SearchMode = "full",
    min_pointers: MinPointers = None,
    max_pointers: MaxPointers = None,
    clusters: Clusters = None,
    fields: TextFlags = TextFlags(),
    model: StoreModel = None,
    machine: MachineFlags = MachineFlags(),
    json: Json = False,
) -> None:
    """knnlm tune docs.store held-out.txt

    Read the text once, then choose k and τ of each memory and the weights. The choice is saved in the store, and every
    other command uses it. Tune on text that is neither in the store nor in your test set. The kNN-LM of the paper is
    --memories knn --weights fixed. A decoder has only λ, which is saved in its folder.
    """
    from knnlm.mixture.loader import is_decoder

    automaton = automaton_params(search, min_pointers, max_pointers, clusters)
    searching: dict[str, Any] = {"metric": metric, "rerank": not no_rerank, "key_dtype": key_dtype, "subset": subset}
    searching["automaton"] = automaton
    if is_decoder(store):
        _refuse_for_decoder(store, grid, trace, searching)
        _tune_decoder(store, text, fields, limit, model, machine, json=json)
        return
    grid.check()
    if (trace is None) == (not text):
        raise ParameterError("Give either TEXT or --trace to tune on.")
    given = (metric, subset, automaton, limit, model, grid.samples, grid.other, grid.quality or None)
    if trace is not None and any(value is not None for value in given):
        raise ParameterError(
            "--metric, --subset, --search, --limit and --model are those of the trace; --samples, --other and "
            "--quality need the model. Leave them out."
        )
    if trace:
        chosen_on, result = _tune_trace(store, trace, grid)
    else:
        chosen_on = text or []
        if grid.other and fields.source is not None:
            raise ParameterError(
                "--source has the sources of TEXT alone. With --other, give all pairs as .tsv or .jsonl."
            )
        read = fields.reader_for(store)
        documents = read(chosen_on)
        other = read(grid.other) if grid.other else ()
        mixture = open_mixture(store, model, machine, memories=_memories(store, grid), use_tuned=False, **searching)
        options = {"weights": grid.weights or "gated", "online": not grid.no_online, "limit": limit, **grid.values}
        options |= {"samples": grid.samples, "other": other, "quality": grid.quality}
        result = mixture.tune(documents, sources=chosen_on, progress=bar, **options)
    _show_tuning(store, chosen_on, result, json=json)


def _documents(text: Sequence[str], text_field: str) -> Iterable[Document]:
    from knnlm.corpus import read_documents

    return read_documents(*text, text_field=text_field)


def _memories(store: Path, grid: GridFlags) -> str:
    from knnlm.datastore.schema import DECODER_FOLDER
    from knnlm.mixture.loader import is_decoder

    if grid.memories is not None:
        return grid.memories
    if stored_model(store).get("encoder_decoder"):
        return PAIR_MEMORIES
    return f"{DEFAULT_MEMORIES},decoder={DECODER_FOLDER}" if is_decoder(store / DECODER_FOLDER) else DEFAULT_MEMORIES


def _tune_trace(store: Path, path: Path, grid: GridFlags) -> tuple[list[str], Tuning]:
    from knnlm.datastore.store import Datastore
    from knnlm.evaluation.sweep import Grid
    from knnlm.evaluation.trace import Trace
    from knnlm.evaluation.tune import check_trace, save_trace_tuning, tune_trace
    from knnlm.mixture.spec import parse_memories, resolve

    trace = Trace.open(path)
    check_trace(store, trace)
    if grid.memories is not None:
        trace = trace.select(*(spec.label for spec in resolve(parse_memories(grid.memories), store)))
    values = Grid.of(**grid.values)
    options: dict[str, Any] = {"weights": grid.weights or "gated", "online": not grid.no_online, "grid": values}
    result = tune_trace(trace, Datastore.open(store), progress=bar, **options)
    save_trace_tuning(store, result, trace)
    return trace.metadata["sources"], result


def _refuse_for_decoder(folder: Path, grid: GridFlags, trace: Path | None, searching: dict[str, Any]) -> None:
    plain = {"metric": None, "rerank": True, "key_dtype": "float16", "subset": None, "automaton": None}
    if trace is not None or searching != plain or replace(grid, weights=None) != GridFlags():
        raise ParameterError(
            f"{folder} is a decoder without a store: only λ is chosen. Give TEXT, --model and --limit."
        )
    if grid.weights not in (None, "fixed"):
        raise ParameterError(f"{folder} is a decoder: its weights are fixed, not {grid.weights}.")


def _tune_decoder(
    folder: Path,
    text: list[str] | None,
    fields: TextFlags,
    limit: int | None,
    model: str | None,
    machine: MachineFlags,
    *,
    json: bool,
) -> None:
    from knnlm.evaluation.tune import tune_decoder

    if not text:
        raise ParameterError("Give TEXT to tune the decoder on.")
    mixture = open_mixture(folder, model, machine)
    card = tune_decoder(mixture, fields.reader_for(folder)(text), sources=text, limit=limit, progress=bar)
    result = {"decoder": str(folder), "lambda": card.lmbda, **(card.lmbda_metadata or {})}
    figures = f"{result['base_perplexity']:.3f} → {result['perplexity']:.3f}"
    show(result, f"{folder}: λ = {card.lmbda:.2f} with {result['model']}, perplexity {figures}", json=json)


def _show_tuning(store: Path, chosen_on: list[str], result: Tuning, *, json: bool) -> None:
    best = result.sweep.best if result.sweep is not None else (None, None)
    tried = sum(int(sweep.perplexity.size) for sweep in result.sweeps if sweep is not None)
    at_edge = result.sweep.at_edge() if result.sweep is not None else []
    if json:
        figures: dict[str, Any] = {
            "k": best[0],
            "knn_temperature": best[1],
            "lambda": result.lmbda,
            "settings_tried": tried,
        }
        figures |= {"base_perplexity": result.base_perplexity, "perplexity": result.perplexity, "at_edge": at_edge}
        texts = {"chosen_on": chosen_on, "tokens": result.tokens, "documents": result.documents}
        mixed: dict[str, Any] = {"memories": [spec.as_dict() for spec in result.specs]}
        mixed |= {"weights": result.weights.kind, "online": result.online.as_dict() if result.online else None}
        mixed["support"] = result.support_figures.as_dict() if result.support_figures else None
        mixed["source_domain"] = dict(result.source_domain.metadata) if result.source_domain else None
        mixed["odds"] = result.odds.as_dict() if result.odds else None
        texts |= {"leaked_documents": result.leaked_documents, "sweep_seconds": result.seconds}
        print_json({"store": str(store), **texts, **mixed, **figures})
        return
    rows = [("chosen on", f"{result.tokens:,} tokens of {', '.join(chosen_on)}")]
    for spec in result.specs:
        votes = f"k {spec.settings[0].k}, τ {spec.settings[0].knn_temperature:g}" if spec.settings else ""
        others = f", and {len(spec.settings) - 1} other pairs of k and τ" if len(spec.settings) > 1 else ""
        rows.append((spec.label, f"{votes}{others}"))
    kind = result.weights.kind if result.lmbda is None else f"{result.weights.kind}, λ {result.lmbda:.3g}"
    as_fitted = "" if result.odds is None else ", before the odds are multiplied"
    figures_shown = f"{result.base_perplexity:.3f} → {result.perplexity:.3f}{as_fitted}"
    rows += [
        ("weights", kind),
        *online_rows(result.online),
        ("perplexity", f"{figures_shown} on that text; measure on another with knnlm eval"),
        *support_rows(result.support_figures),
        *_source_rows(result.source_domain),
        *_odds_rows(result.odds),
        ("time", f"{tried:,} settings and the weights in {result.seconds:.1f} s"),
    ]
    if at_edge:
        rows.append(("note", f"the best value is the last one tried of: {', '.join(at_edge)}"))
    print_table([*rows, *leak_warning(result.leaked_documents, result.documents, "the choice does not generalise")])


def _source_rows(domain: SourceDomain | None) -> list[tuple[str, str]]:
    """Return a row about the sources that are translated with the memories."""
    if domain is None:
        return []
    own, other = (f"{100 * domain.metadata[name]:.1f} %" for name in ("own", "other"))
    return [("sources", f"{own} of the domain's and {other} of the others are translated with the memories")]


def _odds_rows(odds: ChosenOdds | None) -> list[tuple[str, str]]:
    """Return a row for each pair of factors that was tried."""
    rows = []
    for own in odds.figures if odds else ():
        neighbours = "" if own.max_k is None else f"k ≤ {own.max_k}, "
        end = "" if own.end_odds == 1 else f", end × {own.end_odds:g}"
        name = f"{neighbours}odds × {own.factor:g}{end}" if own.factor else "model alone"
        other = "" if own.other_bleu is None else f"; other text: BLEU {own.other_bleu:.2f}"
        chosen = ", chosen" if odds and own is odds.best else ""
        rows.append((name, f"BLEU {own.bleu:.2f}, chrF {own.chrf:.2f}{other}{chosen}"))
    return rows


def evaluate(
    store: Store,
    text: Text,
    each: Annotated[bool, typer.Option("--each", help="Evaluate each TEXT by itself; show a row for each.")] = False,
    support: Annotated[
        bool, typer.Option("--support", help="Also measure the support of tokens, in a second pass.")
    ] = False,
    quality: Annotated[
        bool, typer.Option("--quality", help="Also translate the sources of pairs, and measure BLEU and chrF.")
    ] = False,
    mixture: MixtureFlags = MixtureFlags(),
    limit: Limit = None,
    save_trace: Annotated[
        Path | None, typer.Option(help="Also record a trace, for tune --trace.", show_default=False)
    ] = None,
    fields: TextFlags = TextFlags(),
    model: StoreModel = None,
    machine: MachineFlags = MachineFlags(),
    remote: RaySearchFlags = RaySearchFlags(),
    json: Json = False,
) -> None:
    """knnlm eval docs.store held-out.txt

    Score every token of the text, or of the targets of pairs given their sources, with the model alone and with its
    memories. With --each, --limit applies to each TEXT
    and --json prints a list.
    """
    for name, given in (("--support", support), ("--quality", quality)):
        if each and given:
            raise ParameterError(f"{name} measures all texts together; leave out --each.")
    if each and save_trace is not None:
        raise ParameterError("--save-trace records one text; leave out --each.")
    if "-" in text and (support or quality):
        raise ParameterError("--support and --quality read the text twice: give a file instead of standard input.")
    # Inputs are opened before the model, so that a missing file is found at once.
    read = fields.reader_for(store)
    readers = [read(names) for names in ([[name] for name in text] if each else [text])]
    with remote.opener() as open_index:
        opened = mixture.open(store, model, machine, open_index=open_index)
        if each:
            _show_each(text, [opened.evaluate(reader, limit=limit, progress=bar) for reader in readers], json=json)
            return
        figures = opened.measure_support(read(text), limit=limit, progress=bar) if support else None
        written = opened.measure_quality(read(text), limit=limit, progress=bar) if quality else None
        if save_trace is None:
            result = opened.evaluate(readers[0], limit=limit, progress=bar)
        else:
            result = _record(opened, readers[0], save_trace, sources=text, limit=limit)
    if json:
        more = {"support": figures.as_dict()} if figures else {}
        print_json(result.as_dict() | more | ({"quality": written.as_dict()} if written else {}))
    else:
        print_table([*_evaluation_rows(result), *support_rows(figures), *quality_rows(written)])


def quality_rows(written: TranslationQuality | None) -> list[tuple[str, str]]:
    """Return the rows of a table that describe the quality of translations; none without it."""
    if written is None:
        return []
    return [
        ("BLEU", f"{written.base_bleu:.2f} → {written.bleu:.2f}   ({written.bleu_signature})"),
        ("chrF", f"{written.base_chrf:.2f} → {written.chrf:.2f}   ({written.chrf_signature})"),
        ("  time", f"{written.seconds / max(written.base_seconds, 1e-9):.2f} times that of the model alone"),
    ]


def support_rows(figures: SupportFigures | None) -> list[tuple[str, str]]:
    """Return the rows of a table that describe the support of tokens; none without it."""
    if figures is None:
        return []
    others = f"largest probability {figures.auroc_probability:.3f}"
    if figures.auroc_entropy is not None:
        others += f", entropy {figures.auroc_entropy:.3f}"
    shares = f"mean {figures.support:.3f} of the top tokens, of which {figures.right:.3f} are right"
    return [
        ("support", f"{shares}; ECE {figures.ece:.4f}"),
        ("  AUROC", f"{figures.auroc:.3f} for right and wrong tokens ({others})"),
    ]


def _show_each(names: Sequence[str], results: Sequence[Evaluation], *, json: bool) -> None:
    """Print one row, or one JSON object, for each text."""
    if json:
        print_json([{"text": name, **result.as_dict()} for name, result in zip(names, results, strict=True)])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("text", "tokens", "model", "mixture", "ratio", "improved", "gain", "loss"):
        numeric = column != "text"
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for name, result in zip(names, results, strict=True):
        perplexities = (f"{result.base_perplexity:.3f}", f"{result.perplexity:.3f}", f"{result.ratio:.4f}")
        changes = (f"{result.improved:.1%}", f"{result.gain_nats:.3f}", f"{result.loss_nats:.3f}")
        table.add_row(safe(name), f"{result.tokens:,}", *perplexities, *changes)
    console.print(table)
    console.print("model, mixture: perplexity; gain, loss: nats a token, over all tokens", style="dim")
    for name, result in zip(names, results, strict=True):
        for _, warning in leak_warning(result.leaked_documents, result.documents, "their figures are too good"):
            console.print(f"WARNING  {visible(name)}: {warning}", markup=False)


def _record(mixture: Mixture, documents: Iterable[Document], path: Path, **reading: Any) -> Evaluation:
    """Record a trace, and evaluate it."""
    from knnlm.evaluation.tune import evaluate_trace

    begin = time.perf_counter()
    trace = mixture.record(documents, path, progress=bar, **reading)
    settings = [getattr(memory, "settings", ()) for memory in mixture.memories]
    return replace(
        evaluate_trace(trace, settings, mixture.weights, mixture.online), seconds=time.perf_counter() - begin
    )


def online_rows(online: OnlineConfig | None) -> list[tuple[str, str]]:
    """Return the row of a table that describes online weights; none without them."""
    if online is None:
        return []
    return [("  online", f"prior of the model alone {online.prior:g}, switch rate {online.switch_rate:g}")]


def _evaluation_rows(result: Evaluation) -> list[tuple[str, str]]:
    figures = result.as_dict()
    before, after = figures["base_perplexity"], figures["perplexity"]
    changes = f"gain {result.gain_nats:.3f} and loss {result.loss_nats:.3f} nats a token, over all tokens"
    rows = [
        ("text", f"{figures['tokens']:,} tokens, {figures['words']:,} words of {count(result.documents, 'document')}"),
        ("perplexity", f"{before:.3f} → {after:.3f}  ({result.change})"),
        ("  improved", f"{result.improved:.1%} of the tokens; {changes}"),
        ("  oracle", f"{figures['oracle_perplexity']:.3f}, the best of model and memories at each token"),
        ("  per word", f"{figures['base_word_perplexity']:.2f} → {figures['word_perplexity']:.2f}"),
        ("bits per byte", f"{figures['base_bits_per_byte']:.4f} → {figures['bits_per_byte']:.4f}"),
        ("weights", f"{result.weights}, λ {result.lmbda:.3g}"),
        *online_rows(result.online),
    ]
    if result.searched is not None:
        rows.append(("searched", f"{result.searched:.1%} of the tokens"))
    for memory in result.memories:
        votes = f"k {memory['k']}, τ {memory['knn_temperature']:g}, {memory['metric']}, " if "k" in memory else ""
        rows.append((f"  {memory['name']}", f"{votes}weight {memory['weight']:.3g}"))
    rows.append(("time", f"{figures['seconds']:.1f} s, {figures['tokens_per_second']:,.0f} tokens/s"))
    return rows + leak_warning(result.leaked_documents, result.documents, "their figures are too good")


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are chosen."""

    do_sample: Annotated[bool, typer.Option("--do-sample", help="Sample instead of taking the best token.")] = False
    temperature: Annotated[float, typer.Option(help="The sampling temperature.")] = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many tokens; 0 is all.")] = 0
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes repetitions less probable.")] = 1.0
    beams: Annotated[int | None, typer.Option(min=1, help="Number of beams.")] = 1

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of transformers' `generate`."""
        if not 0 < self.repetition_penalty < float("inf"):
            raise ParameterError(f"repetition penalty must be above 0, not {self.repetition_penalty}.")
        chosen: dict[str, Any] = {"num_beams": self.beams, "do_sample": self.do_sample}
        chosen["repetition_penalty"] = self.repetition_penalty
        if self.do_sample:
            if not self.temperature > 0:
                raise ParameterError(f"temperature must be above 0, not {self.temperature}.")
            check_top_p(self.top_p)
            chosen |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return chosen


@dataclass(frozen=True)
class TranslationFlags(SamplingFlags):
    """How tokens of translations are chosen; the number of beams is by default the model's own."""

    beams: Annotated[
        int | None, typer.Option(min=1, help="Number of beams.", show_default="as the model's configuration says")
    ] = None

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of transformers' `generate`."""
        return {name: value for name, value in super().settings.items() if value is not None}


def check_top_p(top_p: float) -> None:
    """Raise ParameterError unless top-p is a probability above 0."""
    if not 0 < top_p <= 1:
        raise ParameterError(f"top-p must be above 0 and at most 1, not {top_p}.")


def generate(
    store: Store,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.", show_default=False)],
    max_new_tokens: MaxNewTokens = 60,
    sampling: SamplingFlags = SamplingFlags(),
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.", show_default=False)
    ] = None,
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Use the model alone.")] = False,
    draft: Draft = False,
    no_domain_check: NoDomainCheck = False,
    mixture: MixtureFlags = MixtureFlags(),
    model: StoreModel = None,
    machine: MachineFlags = MachineFlags(),
    remote: RaySearchFlags = RaySearchFlags(),
    json: Json = False,
) -> None:
    """knnlm generate docs.store "The with statement" --max-new-tokens 20

    Continue a prompt with the memories, or without them for comparison.
    """
    settings = sampling.settings | {"max_new_tokens": max_new_tokens}
    with remote.opener() as open_index:
        opened = mixture.open(store, model, machine, domain_check=not no_domain_check, open_index=open_index)
        begin = time.perf_counter()
        stream = not json and sampling.beams == 1
        written = continue_text(opened, prompt, memory=not no_memory, seed=seed, stream=stream, draft=draft, **settings)
    result = {"prompt": prompt, "text": written.text, "tokens": written.tokens, "memory": not no_memory}
    if not stream:
        drafts = {} if written.drafts is None else {"drafts": written.drafts}
        show(result | {"seconds": time.perf_counter() - begin} | drafts, prompt + written.text, json=json)
    if written.drafts is not None and not json:
        show_drafts(written.drafts)


def show_drafts(drafts: Mapping[str, Any]) -> None:
    """Print how many tokens were drafted, and the documents that most of them are from."""
    parts = [f"{drafts['accepted']} of {count(drafts['drafted'], 'drafted token')} accepted"]
    longest = sorted(drafts["copied"], key=lambda each: -each["tokens"])[:3]
    parts += [f"{count(each['tokens'], 'token')} from {safe(each['source'])}" for each in longest]
    err.print("; ".join(parts), style="dim", markup=False)


@dataclass(frozen=True)
class WrittenText:
    """A continuation of a prompt."""

    text: str
    tokens: int
    drafts: Mapping[str, Any] | None = None  # counts and copied parts; None: without drafts


def continue_text(
    mixture: Mixture,
    prompt: str,
    *,
    memory: bool,
    seed: int | None,
    stream: bool,
    draft: bool = False,
    **settings: Any,
) -> WrittenText:
    """Return the continuation of a prompt."""
    from transformers import TextStreamer

    from knnlm.generation.causal import generate_tokens
    from knnlm.generation.speculation import describe_drafts, make_drafter

    tokenizer = mixture.lm.tokenizer
    begun = False

    def write(own: Mixture, _: Any) -> WrittenText:
        nonlocal begun
        if begun and stream:
            console.print()
            warnings.warn("The store has changed, so the text is written again.", KnnlmWarning, stacklevel=2)
        begun = True
        streamer = TextStreamer(tokenizer, skip_special_tokens=True) if stream else None
        drafter = make_drafter(own, progress=bar) if draft and memory else None
        how: dict[str, Any] = {"use_memory": memory, "streamer": streamer, "draft": drafter if drafter else draft}
        tokens = generate_tokens(own, prompt, seed=seed, **how, **settings)
        text = str(tokenizer.decode(tokens, skip_special_tokens=True))
        return WrittenText(text, len(tokens), describe_drafts(drafter, own.store, tokens) if drafter else None)

    return mixture.answer(write)


def translate(
    store: Store,
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT",
            help="The text, a file with a text on each line, or - for standard input.",
            show_default=False,
        ),
    ],
    max_new_tokens: MaxNewTokens = 256,
    sampling: TranslationFlags = TranslationFlags(),
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.", show_default=False)
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts that are translated together.")] = 32,
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Use the model alone.")] = False,
    no_domain_check: NoDomainCheck = False,
    mixture: MixtureFlags = MixtureFlags(),
    model: StoreModel = None,
    machine: MachineFlags = MachineFlags(),
    json: Json = False,
) -> None:
    """knnlm translate pairs.store "Guten Tag"

    Translate a text, or each line of a file, with an encoder-decoder model and the memories of a store of pairs; print
    one translation on each line. Empty lines stay empty.
    """
    settings = sampling.settings | {"max_new_tokens": max_new_tokens, "seed": seed, "batch_size": batch_size}
    opened = mixture.open(store, model, machine, domain_check=not no_domain_check)
    lines = [text] if opened.lm.reads_audio else _lines(text)
    begin, sources = time.perf_counter(), [line for line in lines if line.strip()]
    translations = opened.translate_each(sources, use_memory=not no_memory, progress=bar, **settings)
    found = iter(translations)
    rows = [(line, next(found) if line.strip() else None) for line in lines]
    if json:
        named = [
            (line, own.text, [str(each.path) for each in own.stores]) if own else (line, "", []) for line, own in rows
        ]
        listed = [{"source": source, "text": written, "stores": stores} for source, written, stores in named]
        print_json({"translations": listed, "memory": not no_memory, "seconds": time.perf_counter() - begin})
        return
    for _, own in rows:
        console.print(visible(own.text if own else ""), markup=False, highlight=False, soft_wrap=True)
    if not no_memory and (outside := sum(not own.memory for own in translations)):
        check = (
            f"{outside} of {len(translations)} texts are outside the store's domain: the model alone translated them."
        )
        err.print(f"note: {check} --no-domain-check uses the store.", markup=False, soft_wrap=True)


def _lines(text: str) -> list[str]:
    """Return the lines of a file or of standard input, or a text itself; raise where a text looks like a file."""
    from knnlm.corpus import read_lines

    if _is_input(text):
        return read_lines(text)
    if _FILE_NAME.fullmatch(text):
        raise ParameterError(f"There is no file {text}. If it is a text, use - and write it to standard input.")
    return [text]


def explain(
    store: Store,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="The text, a file, or - for standard input.", show_default=False)
    ],
    source: SourceText = None,
    top: Annotated[int, typer.Option(min=0, help="Number of neighbours to show for each token.")] = 3,
    mixture: MixtureFlags = MixtureFlags(),
    model: StoreModel = None,
    machine: MachineFlags = MachineFlags(),
    json: Json = False,
) -> None:
    """knnlm explain docs.store "The with statement is used to wrap"

    Show, for each token, its probability by the model, by each memory and by the mixture, and the nearest neighbours
    with their weights, tokens and documents.
    """

    opened = mixture.open(store, model, machine)
    if source is None and opened.lm.has_encoder:
        raise ParameterError(f"{opened.lm.name} translates: give the source of the text too, with --source TEXT.")
    text = _text(text)
    source = source if source is None or opened.lm.reads_audio else _text(source)
    explained = opened.explain(text, source=source, top=top)
    if json:
        given = {"text": text} if source is None else {"source": source, "text": text}
        print_json({**given, "tokens": [asdict(token) for token in explained]})
        return
    for token in explained:
        console.print(explanation_table(token))


def _text(argument: str) -> str:
    """Return the text of an argument: the argument itself, unless it names a file."""
    from knnlm.corpus import read_documents

    if not _is_input(argument):
        return argument
    return "\n\n".join(document.text for document in read_documents(argument))


def _is_input(argument: str) -> bool:
    """Whether an argument is a file or standard input, and not a text."""
    try:
        return argument == "-" or Path(argument).is_file()
    except (OSError, ValueError):  # too long for a file name, or with a null character
        return False


def explanation_table(token: TokenExplanation) -> Table:
    """Build the table of one token and its neighbours."""
    shares = "   ".join(f"p_{_short(share.memory)} {share.p:.3g} × {share.weight:.2f}" for share in token.shares)
    title = f"[bold]{safe(token.token)}[/bold]   p_LM {token.p_lm:.3g}   {safe(shares)}   p {token.p:.3g}"
    if token.support is not None:
        title += f"   support {token.support:.2f}"
    rows = [
        (one.weight, one.before, one.token, one.after, one.agrees, _origin(one.source, one.source_text))
        for one in token.neighbours
    ]
    return neighbour_table(title, rows)


def _origin(source: str, source_text: str | None) -> str:
    """Return where a neighbour comes from; of a pair, with the beginning of its source text."""
    return source if source_text is None else f"{source}: {source_text[:80]}"


def _short(memory: str) -> str:
    """Return a memory's name as in the formula; of a path, only the last folder."""
    kind, _, path = memory.partition("=")
    name = "kNN" if kind == "knn" else kind
    return f"{name}={Path(path).name}" if path else name


@dataclass(frozen=True)
class TaskFlags:
    """Where tasks of the harness come from, and how they are run."""

    include_path: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="A folder with the YAML files of more tasks.", show_default=False),
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Items of each task.", show_default="all")] = None
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each item.", show_default="as the task says")
    ] = None
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Write prompts with the tokenizer's chat template.")
    ] = False


@dataclass(frozen=True)
class HarnessFlags:
    """How the harness reads and generates text."""

    add_bos_token: Annotated[
        bool, typer.Option("--add-bos-token", help="Begin every context with the start token, as generate does.")
    ] = False
    batch_size: Annotated[int, typer.Option(min=1, help="Texts that are generated together.")] = 8
    no_overlap: Annotated[bool, typer.Option("--no-overlap", help="Do not search the store for test items.")] = False


def lm_eval(
    store: Store,
    tasks: Annotated[str, typer.Option(help="Names of tasks, separated by commas, or YAML files.", show_default=False)],
    chosen: TaskFlags = TaskFlags(),
    harness: HarnessFlags = HarnessFlags(),
    mixture: MixtureFlags = MixtureFlags(),
    model: StoreModel = None,
    machine: MachineFlags = MachineFlags(),
    json: Json = False,
) -> None:
    """knnlm lm-eval docs.store --tasks my_task --include-path tasks/

    Run tasks of lm-evaluation-harness with the memories; --lambda 0 is the model alone. The results name the store, its
    weights, and the documents that share 13 consecutive tokens with a test item. Needs pip install 'knnlm[lm-eval]'.
    """
    from knnlm.integrations.lm_eval import KnnLM, evaluate_tasks

    wrapped = KnnLM(
        mixture.open(store, model, machine),
        add_bos_token=harness.add_bos_token or None,
        batch_size=harness.batch_size,
        overlap=not harness.no_overlap,
        progress=bar,
    )
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    results = evaluate_tasks(wrapped, names, **asdict(chosen))
    if json:
        print_json({name: results[name] for name in ("results", "versions", "n-shot", "n-samples", "config")})
    else:
        print_table(_task_rows(results))


def _task_rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return each metric of each task, then the store and the test items in it."""
    rows = []
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            metric, _, kind = name.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr,{kind}")
                shown = f"{value:.4f} ± {error:.4f}" if isinstance(error, float) else f"{value:.4f}"
                rows.append((f"{task} {metric}", f"{shown}  ({kind})" if kind not in ("", "none") else shown))
    used = results["config"]["knnlm"]
    weights = used["weights"] if used["lambda"] is None else f"{used['weights']}, λ {used['lambda']:.3g}"
    rows += [("store", f"{used['store']} ({used['fingerprint']})"), ("weights", weights)]
    overlap = used["overlap"]
    if overlap and overlap["items_in_store"]:
        shared = f"{overlap['items_in_store']:,} of {count(overlap['items'], 'item')} share {overlap['ngram']} tokens"
        rows.append(("WARNING", f"{shared} with {count(overlap['documents'], 'document')} of the store"))
    return rows


@dataclass(frozen=True)
class ReportFlags:
    """What a report studies."""

    memories: Annotated[
        str | None,
        typer.Option(
            help="Memories to mix, as for tune, with knn.", show_default="knn,cache,ngram, and output if trained"
        ),
    ] = None
    lm: Annotated[str | None, typer.Option(help="A second language model to mix in.", show_default="none")] = None
    studies: Annotated[str, typer.Option(help="Studies, separated by commas; a wrong name lists all.")] = "all"
    quick: Annotated[bool, typer.Option("--quick", help="Small samples: minutes instead of an hour.")] = False


def report(
    store: Store,
    text: Text,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder of the page.")] = Path("report"),
    valid: Annotated[
        list[str] | None, typer.Option(help="Text to choose settings on; repeatable.", show_default="half of TEXT")
    ] = None,
    chosen: ReportFlags = ReportFlags(),
    limit: Limit = None,
    text_field: TextField = "text",
    model: StoreModel = None,
    machine: MachineFlags = MachineFlags(),
    json: Json = False,
) -> None:
    """knnlm report docs.store held-out.txt --out report --quick

    Write FOLDER/index.html with tables and plots: the effect of k, λ, τ, the store's size, the key layer and the
    metric; the contribution of each memory; where memories help and hurt. Settings are chosen on one text and reported
    on another. A report that was interrupted resumes when the same command is run again.
    """
    from knnlm.report.report import check_studies, report

    options: dict[str, Any] = {"memories": chosen.memories, "second_lm": chosen.lm, "quick": chosen.quick}
    options["studies"] = check_studies([name.strip() for name in chosen.studies.split(",")])
    quiet()
    held_out = _documents(valid, text_field) if valid else None
    options |= {"valid": held_out, "limit": limit, "model": model, **asdict(machine)}
    result = report(store, _documents(text, text_field), out=out, progress=bar, **options)
    rows = [(study.name, study.finding) for study in result.studies]
    rows += [(name, f"skipped: {reason}") for name, reason in result.skipped.items()]
    if result.metadata["at_edge"]:
        rows.append(("note", f"the best value is the last one tried of: {', '.join(result.metadata['at_edge'])}"))
    rows += [("WARNING", warning) for warning in result.metadata["warnings"]]
    show(result.as_dict(), [*rows, ("page", str(result.page))], json=json)


def _numbers(name: str, text: str | None, kind: type) -> list[Any] | None:
    """Parse a list such as 1,8,64."""
    if text is None:
        return None
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ParameterError(f"--{name} takes numbers separated by commas, not {text!r}.") from None
