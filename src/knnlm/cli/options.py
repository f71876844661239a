"""Options and groups of options that several commands share, and the decorator that registers a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from knnlm.errors import ParameterError

if TYPE_CHECKING:
    from knnlm.cluster.search import RemoteSearchOptions
    from knnlm.corpus import DocumentReader
    from knnlm.memories.automaton import AutomatonParams
    from knnlm.mixture.mixture import Mixture
    from knnlm.mixture.spec import IndexOpener, MixtureOptions

# Help panels, in the order in which `knnlm --help` lists them.
START = "Start here"
MAKE = "Make a store"
USE = "Use it"
TRAIN = "Train"
MAINTAIN = "Maintain"
SERVE = "Serve"
PANELS = (START, MAKE, USE, TRAIN, MAINTAIN, SERVE)

Store = Annotated[Path, typer.Argument(metavar="STORE", help="The folder of a store.", show_default=False)]

Text = Annotated[
    list[str],
    typer.Argument(
        metavar="TEXT",
        help="Files and folders (.txt .md .jsonl .parquet, also .gz .xz .zst; for an encoder-decoder model .jsonl "
        ".parquet .tsv), - for standard input, or hf:NAME[:SPLIT] for a dataset of the datasets package.",
        show_default=False,
    ),
]
SourceText = Annotated[
    str | None,
    typer.Option(
        "--source", help="For an encoder-decoder model: the source of which TEXT is the target.", show_default=False
    ),
]
TextField = Annotated[str, typer.Option(help="The field of .jsonl and .parquet records that contains the text.")]
Limit = Annotated[
    int | None, typer.Option(help="Read whole documents until this many tokens are reached.", show_default="all")
]

Out = Annotated[Path, typer.Option(metavar="FOLDER", help="The folder to create.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Wait = Annotated[float, typer.Option(min=0, help="Seconds to wait for the store's lock.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random numbers.")]

Model = Annotated[
    str, typer.Option(help="The language model: bundled, a local folder, a .gguf file, or a name on the model hub.")
]
StoreModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The language model, if it has moved, or another model with the same tokenizer.",
        show_default="the model of the store",
    ),
]
NoOnline = Annotated[
    bool,
    typer.Option(
        "--no-online",
        help="Without online weights, which return to the model where the memories predict worse. A gate that was "
        "trained with evidence of the text so far still uses it.",
    ),
]
Draft = Annotated[bool, typer.Option("--draft", help="Draft tokens and verify several at once: the same text.")]
NoDomainCheck = Annotated[
    bool,
    typer.Option(
        "--no-domain-check",
        help="Use the memories also after a prompt, or for a source, that is not in their domain.",
    ),
]
MEMORIES_HELP = (
    "Memories to mix, separated by commas: knn, cache, ngram, ngram-cache, output, knn=STORE, decoder=FOLDER, "
    "cache=POSITIONS"
)
KeyLayer = Annotated[
    str | None,
    typer.Option(
        help="The place that keys are read from: ffn_input, ffn_input_pre_norm, attention_input, "
        "attention_input_pre_norm, output, output_normed.",
        show_default="ffn_input, or the best place that the model has",
    ),
]
Layer = Annotated[int, typer.Option(help="The layer, counted from 0, or from the end with -1.")]
KeyFormat = Annotated[
    str,
    typer.Option(
        help="Format of the keys on disk: float16, float32, int8, pca256-int8 (256 components), codes48 (48 bytes)."
    ),
]
IndexSpec = Annotated[
    str,
    typer.Option(
        "--index",
        help="auto, exact, blocks such as Lists512,Blocks256, or a FAISS factory string such as IVF1024,PQ64.",
    ),
]
IndexMetric = Annotated[str, typer.Option("--metric", help="l2 (squared) or ip (inner product).")]
Metric = Annotated[
    str | None, typer.Option(help="l2 (squared) or ip (inner product).", show_default="as tuned, else l2")
]
NoRerank = Annotated[
    bool, typer.Option("--no-rerank", help="Use the distances of the index without measuring the stored keys.")
]
KeyDtype = Annotated[
    str,
    typer.Option(help="Keys in GPU memory: float16 (as stored) or int8 (half the memory, distances to rounded keys)."),
]
Subset = Annotated[
    int | None,
    typer.Option(
        help="For a store of pairs: search only so many pairs, those with the sources nearest to the given one.",
        show_default="all",
    ),
]
SearchMode = Annotated[
    str,
    typer.Option(
        "--search",
        help="full, or automaton: where enough neighbours of the last position continue with the token that follows, "
        "compare only the entries after them, without a search.",
    ),
]
MinPointers = Annotated[
    int | None,
    typer.Option(help="With --search automaton: with fewer such entries, a position is searched.", show_default="4"),
]
MaxPointers = Annotated[
    int | None, typer.Option(help="With --search automaton: the most entries to compare.", show_default="1024")
]
Clusters = Annotated[
    int | None,
    typer.Option(
        help="With --search automaton: also compare members of the entries' clusters, of so many.", show_default="none"
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Use Ray: a local one that is started, auto for the cluster of this machine, or HOST:PORT.",
        show_default="off; without an address local",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="The maximum number of new tokens.")]
TopP = Annotated[float, typer.Option(help="Sample from the most probable tokens that have this total probability.")]


@dataclass(frozen=True)
class MachineFlags:
    """Where the model runs, and in which precision."""

    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            help="Precision of the model: auto (float32 on a CPU, else bfloat16), float64, float32, bfloat16, float16."
        ),
    ] = "auto"


@dataclass(frozen=True)
class MixtureFlags:
    """The memories of a mixture and how they are weighted."""

    memories: Annotated[
        str | None,
        typer.Option(
            help=f"{MEMORIES_HELP}; a weight each as in knn:0.3,cache:0.1.",
            show_default="as tuned, else knn",
        ),
    ] = None
    k: Annotated[int | None, typer.Option("--k", help="Number of neighbours.", show_default="as tuned, else 1024")] = (
        None
    )
    knn_temperature: Annotated[
        float | None,
        typer.Option(
            help="τ: the temperature of the softmax over neighbours' distances.", show_default="as tuned, else 2"
        ),
    ] = None
    lmbda: Annotated[
        float | None,
        typer.Option(
            "--lambda", help="λ: the weight of all memories together, from 0 to 1.", show_default="as tuned, else 0.25"
        ),
    ] = None
    metric: Metric = None
    skip_fraction: Annotated[
        float | None, typer.Option(help="Fraction of the searches that the gate skips.", show_default="0")
    ] = None
    no_online: NoOnline = False
    no_rerank: NoRerank = False
    key_dtype: KeyDtype = "float16"
    subset: Subset = None
    search: SearchMode = "full"
    min_pointers: MinPointers = None
    max_pointers: MaxPointers = None
    clusters: Clusters = None

    def open(
        self,
        store: Path,
        model: str | None,
        machine: MachineFlags,
        *,
        domain_check: bool = True,
        open_index: IndexOpener | None = None,
    ) -> Mixture:
        """Open the mixture of a store with these options."""
        settings = self.settings(domain_check=domain_check)
        return open_mixture(store, model, machine, open_index=open_index, **settings)

    def settings(self, *, domain_check: bool) -> dict[str, Any]:
        """Return the arguments of `mixture_arguments`."""
        return {
            "domain_check": domain_check,
            "memories": self.memories,
            "k": self.k,
            "knn_temperature": self.knn_temperature,
            "lmbda": self.lmbda,
            "metric": self.metric,
            "skip_fraction": self.skip_fraction,
            "online": not self.no_online,
            "rerank": not self.no_rerank,
            "key_dtype": self.key_dtype,
            "subset": self.subset,
            "automaton": automaton_params(self.search, self.min_pointers, self.max_pointers, self.clusters),
        }


def automaton_params(
    search: str, min_pointers: int | None, max_pointers: int | None, clusters: int | None
) -> AutomatonParams | None:
    """Return the parameters of --search; None: every position is searched in full."""
    from knnlm.memories.automaton import AutomatonParams

    values = {"min_pointers": min_pointers, "max_pointers": max_pointers, "clusters": clusters}
    given = {name: value for name, value in values.items() if value is not None}
    if search not in ("full", "automaton"):
        raise ParameterError(f"There is no search {search!r}: use full or automaton.")
    if search == "full" and given:
        raise ParameterError(f"--{next(iter(given)).replace('_', '-')} is for --search automaton only.")
    return None if search == "full" else AutomatonParams(**given)


@dataclass(frozen=True)
class RaySearchFlags:
    """Where the shards of a store are searched."""

    ray: RayAddress = None
    shard_workers: Annotated[
        int | None,
        typer.Option(min=1, help="With --ray: processes that hold the shards.", show_default="one for each shard"),
    ] = None
    shard_replicas: Annotated[int, typer.Option(min=1, help="With --ray: copies of each of these processes.")] = 1
    shard_gpus: Annotated[
        float, typer.Option(min=0, help="With --ray: GPUs of each of these processes; 0 searches on CPUs.")
    ] = 0.0
    search_timeout: Annotated[
        float,
        typer.Option(
            min=0.1, help="With --ray: seconds of a call to the shards, with its retries; a search is up to four."
        ),
    ] = 30.0
    allow_missing_shards: Annotated[
        bool,
        typer.Option(
            "--allow-missing-shards",
            help="With --ray: search without shards that cannot be reached, with a warning, instead of an error.",
        ),
    ] = False

    @contextmanager
    def opener(self) -> Iterator[IndexOpener | None]:
        """Connect to Ray and yield the function that opens indexes there; None without --ray."""
        if self.ray is None:
            for name in self.changed:
                raise ParameterError(f"--{name.replace('_', '-')} is for --ray only.")
            yield None
            return
        from knnlm.cluster.search import remote_search

        with remote_search(self.ray, self.search_options()) as shards:
            yield shards.open_index

    @property
    def changed(self) -> list[str]:
        """The names of the options that were given, except --ray."""
        own = [field for field in fields(self) if field.name != "ray"]
        return [field.name for field in own if getattr(self, field.name) != field.default]

    def search_options(self) -> RemoteSearchOptions:
        """Return how shards are searched on Ray."""
        from knnlm.cluster.search import RemoteSearchOptions

        return RemoteSearchOptions(
            workers=self.shard_workers,
            replicas=self.shard_replicas,
            timeout=self.search_timeout,
            allow_missing=self.allow_missing_shards,
            gpus=self.shard_gpus,
        )


@dataclass(frozen=True)
class TextFlags:
    """Where the text of a document is and, for an encoder-decoder model, its source."""

    text_field: TextField = "text"
    source_field: Annotated[
        str | None,
        typer.Option(
            help="The field of records that contains the source of a pair.",
            show_default="source, with an encoder-decoder model",
        ),
    ] = None
    source: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="The sources of the lines of TEXT, one on each line.", show_default="TEXT has pairs"
        ),
    ] = None

    def names_pairs(self, text: Sequence[str]) -> bool:
        """Whether options or file names show that the documents are pairs."""
        return self.source_field is not None or self.source is not None or any(".tsv" in name for name in text)

    def read(self, text: Sequence[str], *, pairs: bool, model: str) -> DocumentReader:
        """Open text as documents; pairs are those of an encoder-decoder model."""
        from knnlm.corpus import read_documents

        if pairs:
            field = self.source_field or "source"
            return read_documents(*text, text_field=self.text_field, source_field=field, source=self.source)
        if self.source_field is not None or self.source is not None:
            raise ParameterError(
                f"{model} is a decoder-only model, which would not read the sources: leave out --source and "
                "--source-field, or use an encoder-decoder model such as Marian or T5."
            )
        return read_documents(*text, text_field=self.text_field)

    def reader_for(self, store: Path) -> Callable[[Sequence[str]], DocumentReader]:
        """Return a function that opens text as documents of a store's model."""
        model = stored_model(store)
        return partial(self.read, pairs=model.get("encoder_decoder") is True, model=str(model.get("name")))


def stored_model(store: Path) -> dict[str, Any]:
    """Return what a store records of its model, and the kind and name of a decoder; nothing of other folders."""
    from knnlm.datastore.catalog import Catalog
    from knnlm.datastore.schema import CATALOG_FILE
    from knnlm.lm.loading import has_encoder
    from knnlm.memories.decoder import CARD

    if (store / CARD).is_file():
        return {"encoder_decoder": has_encoder(str(store)), "name": str(store)}
    if not (store / CATALOG_FILE).is_file():
        return {}
    with closing(Catalog.open(store / CATALOG_FILE)) as catalog:
        model = catalog.get("model")
    return model if isinstance(model, dict) else {}


@dataclass(frozen=True)
class SelectionFlags:
    """Which documents of a store a command applies to."""

    document: Annotated[str | None, typer.Option(help="The id of a document.", show_default=False)] = None
    source: Annotated[
        str | None, typer.Option(help="A pattern of sources; * matches any text.", show_default=False)
    ] = None
    where: Annotated[
        list[str] | None,
        typer.Option(
            help="field=value, where the field is id, number, tokens, sha256, source or a field of the records; "
            "repeated conditions must all hold.",
            show_default=False,
        ),
    ] = None

    @property
    def conditions(self) -> dict[str, Any]:
        """The keyword arguments of the library's functions."""
        return {"document": self.document, "source": self.source, "where": tuple(self.where or ())}

    @property
    def given(self) -> bool:
        """Whether any condition was given."""
        return self.document is not None or self.source is not None or bool(self.where)


def open_mixture(store: Path, model: str | None, machine: MachineFlags, **settings: Any) -> Mixture:
    """Open a mixture with a spinner, and without the log messages of the libraries below."""
    from knnlm.cli.output import quiet, waiting
    from knnlm.mixture.mixture import Mixture

    quiet()
    with waiting(f"opening {store}"):
        options, others = mixture_arguments(model, machine, **settings)
        return Mixture.open(store, options=options, **others)


def mixture_arguments(
    model: str | None, machine: MachineFlags, **settings: Any
) -> tuple[MixtureOptions, dict[str, Any]]:
    """Return the options of a mixture, and the other arguments with which it is opened."""
    from knnlm.mixture.spec import MixtureOptions

    names = {field.name for field in fields(MixtureOptions)} & settings.keys()
    options = {name: settings.pop(name) for name in names}
    return MixtureOptions(model=model, device=machine.device, dtype=machine.dtype, **options), settings


def with_ray_address(arguments: Sequence[str]) -> list[str]:
    """Return arguments with the address `local` after an option --ray that has none."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    made: list[str] = []
    for number, argument in enumerate(arguments):
        made.append(argument)
        if argument == "--ray" and number < end:
            following = arguments[number + 1] if number + 1 < len(arguments) else "-"
            made += ["local"] if following.startswith("-") else []
    return made


def command(app: typer.Typer, panel: str, summary: str, *, name: str | None = None) -> Callable[[Any], Any]:
    """Register a function as a command; parameters that are groups of options become their options."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        app.command(name, short_help=summary, rich_help_panel=panel)(_flattened(function))
        return function

    return register


def _flattened(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with the fields of its option groups as parameters of their own."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint):
            groups[parameter.name] = hint
            parameters += _parameters_of(hint, parameter.default)
        else:
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(function)
    def called(**given: Any) -> None:
        for parameter, group in groups.items():
            given[parameter] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        function(**given)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _parameters_of(group: Any, defaults: Any) -> list[inspect.Parameter]:
    """Return the fields of a group as parameters, with the values of the instance `defaults` as their defaults."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(defaults, field.name),
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
