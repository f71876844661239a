"""Commands that make a store: build, add, index, compress, prune, merge, shards, import."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnlm.cli.options import (
    MAKE,
    IndexMetric,
    IndexSpec,
    Json,
    KeyFormat,
    KeyLayer,
    Layer,
    Limit,
    MachineFlags,
    Model,
    Out,
    RayAddress,
    Seed,
    Store,
    StoreModel,
    Text,
    TextFlags,
    Wait,
    command,
    open_mixture,
)
from knnlm.cli.output import bar, count, events, open_model, quiet, show, waiting
from knnlm.errors import ModelError, ParameterError

if TYPE_CHECKING:
    from knnlm.corpus import DocumentReader
    from knnlm.datastore.store import Datastore
    from knnlm.lm.causal import CausalLM


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    command(app, MAKE, "Read text once with a model and write a store.")(build)
    command(app, MAKE, "Add documents to a store.")(add)
    command(app, MAKE, "Build a search index.")(index)
    command(app, MAKE, "Copy a store with keys in fewer bytes.")(compress)
    command(app, MAKE, "Copy a store with fewer keys or dimensions.")(prune)
    command(app, MAKE, "Merge several stores into one.")(merge)
    command(app, MAKE, "Make one sharded store of several stores.")(shards)
    command(app, MAKE, "Import the arrays of knn-transformers or fairseq.", name="import")(import_arrays)


@dataclass(frozen=True)
class LanguageFlags:
    """The languages of a model of many, such as NLLB or mBART."""

    src_lang: Annotated[
        str | None,
        typer.Option(help="The language of the sources, as the model's tokenizer writes it.", show_default=False),
    ] = None
    tgt_lang: Annotated[
        str | None,
        typer.Option(help="The language of the targets, as the model's tokenizer writes it.", show_default=False),
    ] = None


@dataclass(frozen=True)
class ShardFlags:
    """Which part of a text is built."""

    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Build part I of N of the text.", show_default="all of it")
    ] = None
    like: Annotated[
        Path | None,
        typer.Option(metavar="STORE", help="With --shard: use the offset and codec of this store.", show_default=False),
    ] = None

    def check(self, text: list[str]) -> None:
        """Raise for options that do not fit together, before the model is opened."""
        from knnlm.ingest.shards import parse_shard

        if self.shard is None:
            if self.like is not None:
                raise ParameterError("--like is for --shard only.")
            return
        parse_shard(self.shard)
        if "-" in text:
            raise ParameterError("--shard reads the text several times: name files instead of standard input.")

    def following(self, out: Path) -> str:
        """Return the command that follows the build."""
        return f"knnlm tune {out} TEXT" if self.shard is None else "knnlm shards join SHARD... --out STORE"

    @property
    def opened(self) -> dict[str, Any]:
        """The keyword arguments of the library's function."""
        from knnlm.datastore.store import Datastore

        return {"shard": self.shard, "like": None if self.like is None else Datastore.open(self.like)}


@dataclass(frozen=True)
class RayFlags:
    """Workers on Ray that build the shards of a text."""

    ray: RayAddress = None
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="With --ray: number of workers.", show_default="one for each GPU, else each machine"),
    ] = None
    cores: Annotated[
        int | None,
        typer.Option(min=1, help="With --ray: cores of each worker.", show_default="its share of the cluster"),
    ] = None
    shards: Annotated[
        int | None, typer.Option(min=1, help="With --ray: number of shards.", show_default="one for each worker")
    ] = None
    index: Annotated[
        str | None,
        typer.Option(help="With --ray: build an index of each shard too, such as auto.", show_default="none"),
    ] = None
    push: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="With --ray: upload the shards, such as to s3://bucket/parts.", show_default="none"
        ),
    ] = None
    work_folder: Annotated[
        Path | None,
        typer.Option(
            help="With --ray: a folder on the disk of each machine, in which shards are built and then copied.",
            show_default="none",
        ),
    ] = None

    def check(self, text: list[str], shard: ShardFlags) -> None:
        """Raise for options that do not fit together, before anything is opened."""
        if self.ray is None:
            given = next((name for name, value in asdict(self).items() if value is not None), None)
            if given is not None:
                raise ParameterError(f"--{given.replace('_', '-')} is for --ray only.")
            return
        if shard.shard is not None or shard.like is not None:
            raise ParameterError("--shard builds one part without Ray, and --ray builds all: leave out one of them.")
        if "-" in text:
            raise ParameterError("--ray reads the text on every worker: name files instead of standard input.")

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of the library's function."""
        return {"address": self.ray, **{name: value for name, value in asdict(self).items() if name != "ray"}}


def build(
    text: Text,
    out: Out,
    model: Model = "bundled",
    key_layer: KeyLayer = None,
    layer: Layer = -1,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a window.", show_default="1024, or the model's maximum")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between the starts of two windows.", show_default="half the context")
    ] = None,
    key_format: KeyFormat = "float16",
    compile: Annotated[  # noqa: A002
        bool | None, typer.Option("--compile/--no-compile", show_default="on a GPU, for much text")
    ] = None,
    fields: TextFlags = TextFlags(),
    languages: LanguageFlags = LanguageFlags(),
    shard: ShardFlags = ShardFlags(),
    ray: RayFlags = RayFlags(),
    machine: MachineFlags = MachineFlags(),
    json: Json = False,
) -> None:
    """knnlm build docs/ --out docs.store

    Read every document once with the model and store, for each token, the context vector and the token that followed.
    A build that was interrupted resumes when the same command is run again, at the last complete segment (16,384 tokens
    on a CPU, a million on a GPU). An encoder-decoder model reads pairs of a source and a target.
    """
    import knnlm

    begin = time.perf_counter()
    shard.check(text)
    ray.check(text, shard)
    documents = _open_text(text, fields, model)
    opening = {"key_layer": key_layer, "layer": layer, **asdict(languages), **asdict(machine)}
    options: dict[str, Any] = {"key_format": key_format, "compile": compile, "progress": events if json else bar}
    read = partial(_open_text, text, fields, model)
    if ray.ray is not None:
        options |= {"context": context, "stride": stride, "model": model, "model_options": opening}
        store = knnlm.build_on_ray(read, out, **options, **ray.settings)
    else:
        lm = open_model(model, **opening)
        options |= {"window": lm.window(context, stride), "lm": lm}
        store = (
            knnlm.build(documents, out, **options)
            if shard.shard is None
            else knnlm.build_shard(read, out, **options, **shard.opened)
        )
    _show_built(store, out, time.perf_counter() - begin, following=shard.following(out), json=json)


def _open_text(text: list[str], fields: TextFlags, model: str) -> DocumentReader:
    """Open text as documents of a model, and read the first: before the model, which may take half a minute."""
    from knnlm.lm.loading import has_encoder

    unknown: ModelError | None = None
    try:
        pairs = has_encoder(model)
    except ModelError as error:  # unreadable text is reported first
        unknown, pairs = error, fields.names_pairs(text)
    documents = fields.read(text, pairs=pairs, model=model)
    documents.check_first()
    if unknown is not None:
        raise unknown
    return documents


def _show_built(store: Datastore, out: Path, seconds: float, *, following: str, json: bool) -> None:
    tokens, documents = store.entry_count, store.catalog.document_count()
    result = {"store": str(out), "documents": documents, "tokens": tokens, "bytes": store.bytes, "seconds": seconds}
    text = (
        f"{out}: {tokens:,} tokens of {count(documents, 'document')} in {seconds:.0f} s, {store.bytes / 1e6:,.1f} MB. "
        f"Next: {following}"
    )
    result |= {"shards": len(store.shards)} if store.shards else {}
    show(result | {"tokens_per_second": tokens / seconds}, text, json=json)


def add(
    store: Store,
    text: Text,
    model: StoreModel = None,
    wait: Wait = 0.0,
    fields: TextFlags = TextFlags(),
    machine: MachineFlags = MachineFlags(),
    json: Json = False,
) -> None:
    """knnlm add docs.store held-out.txt

    Read documents as the store was built and add them in one transaction; the next query finds them. A document whose
    text is in the store already is skipped. An addition that was interrupted resumes when the same command is run
    again.
    """
    import knnlm

    begin = time.perf_counter()
    documents = fields.reader_for(store)(text)
    documents.check_first()
    with closing(knnlm.Datastore.open(store)) as opened:
        lm = _open_reader(opened, model, machine)
        added = opened.add(documents, lm=lm, wait=wait, progress=bar)
    seconds = time.perf_counter() - begin
    skipped = f" {count(added.skipped, 'document')} skipped: in the store already." if added.skipped else ""
    resumed = f" {count(added.resumed, 'document')} had been read before the interruption." if added.resumed else ""
    what = f"{count(added.documents, 'document')} added, {added.tokens:,} tokens, in {seconds:.1f} s."
    result = {"store": str(store), **asdict(added), "seconds": seconds}
    show(result, f"{store}: {what}{skipped}{resumed}", json=json)


def _open_reader(store: Datastore, model: str | None, machine: MachineFlags) -> CausalLM:
    """Open the model whose hidden states are the store's keys, at their place and layer."""
    from knnlm.mixture.loader import reader_name

    place, layer = store.model["key_layer"], int(store.model["layer"])
    languages = {name: store.model.get(name) for name in ("src_lang", "tgt_lang")}
    return open_model(model or reader_name(store), key_layer=place, layer=layer, **languages, **asdict(machine))


def index(
    store: Store, spec: IndexSpec = "auto", metric: IndexMetric = "l2", wait: Wait = 0.0, json: Json = False
) -> None:
    """knnlm index docs.store

    Build a search index. Up to 20,000 tokens, auto searches exactly and builds none; above, it builds blocks of similar
    keys in int8, of which each query searches a few.
    """
    import knnlm

    begin = time.perf_counter()
    opened = knnlm.Datastore.open(store)
    built = opened.build_index(spec, metric=metric, wait=wait, progress=bar)
    seconds = time.perf_counter() - begin
    show(
        {"store": str(store), "index": built, "tokens": opened.entry_count, "seconds": seconds},
        f"{store}: {built} over {opened.entry_count:,} keys, {seconds:.1f} s",
        json=json,
    )


def compress(
    store: Store,
    out: Out,
    key_format: KeyFormat = "codes",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sample of keys that the codec is fitted to.")] = 0,
    json: Json = False,
) -> None:
    """knnlm compress docs.store --out small.store --key-format int8

    Copy a store with its keys in another format, fitted to a sample of all keys. Tuned settings are not copied, because
    distances change slightly. A copy that was interrupted resumes when the same command is run again.
    """
    import knnlm

    begin = time.perf_counter()
    opened = knnlm.Datastore.open(store)
    copy = opened.compress(out, key_format=key_format, seed=seed, progress=bar)
    tokens, seconds = max(1, opened.entry_count), time.perf_counter() - begin
    before, after = opened.bytes / tokens, copy.bytes / tokens
    result = {"store": str(store), "out": str(out), "key_format": copy.storage, "tokens": opened.entry_count}
    result |= {"bytes_before": opened.bytes, "bytes_after": copy.bytes, "bytes_per_token_before": before}
    show(
        result | {"bytes_per_token_after": after, "seconds": seconds},
        f"{out}: {before:,.0f} → {after:,.0f} bytes per token, {copy.bytes / 1e6:,.1f} MB, in {seconds:.1f} s. "
        f"Next: knnlm index {out}, knnlm tune {out} TEXT",
        json=json,
    )


def prune(
    store: Store,
    out: Out,
    width: Annotated[int | None, typer.Option(min=1, help="Principal components to keep.", show_default="all")] = None,
    merge: Annotated[
        int | None,
        typer.Option(min=1, help="Merge each key into one of this many neighbours with its token.", show_default="off"),
    ] = None,
    drop_known: Annotated[
        float | None,
        typer.Option(help="Drop keys whose token the model predicts at this probability.", show_default="off"),
    ] = None,
    held_out: Annotated[
        list[str] | None, typer.Option("--text", help="Held-out text to measure on.", show_default=False)
    ] = None,
    limit: Limit = None,
    seed: Seed = 0,
    model: StoreModel = None,
    machine: MachineFlags = MachineFlags(),
    json: Json = False,
) -> None:
    """knnlm prune docs.store --out pruned.store --merge 8 --text held-out.txt

    Copy a store with fewer keys. Its text stays complete, so neighbours are shown in their context. --drop-known reads
    the stored text once more with the model. With --text, both stores are measured, each at its best k, τ and λ.
    """
    begin = time.perf_counter()
    options = {"width": width, "merge": merge, "drop_known": drop_known, "seed": seed}
    result = _prune(store, out, model, machine, options)
    result |= {"store": str(store), "out": str(out), "seconds": time.perf_counter() - begin}
    if held_out:
        for name, folder in (("perplexity_before", store), ("perplexity_after", out)):
            result[name] = _best_perplexity(folder, held_out, limit, model, machine)
    show(result, _pruned_rows(result), json=json)


def _prune(store: Path, out: Path, model: str | None, machine: MachineFlags, options: dict[str, Any]) -> dict[str, Any]:
    from knnlm.datastore.rewrite import check_out
    from knnlm.datastore.store import Datastore
    from knnlm.lm.loading import choose_device
    from knnlm.training.prune import prune

    if options["width"] is None and options["merge"] is None and options["drop_known"] is None:
        raise ParameterError("Nothing to prune. Give --width, --merge, --drop-known, or several of them.")
    device = str(choose_device(machine.device))
    opened = Datastore.open(store)
    check_out(opened, out)
    log_p = None if options["drop_known"] is None else token_log_p(opened, model, device, machine.dtype)
    return prune(opened, out, log_p=log_p, device=device, progress=bar, **options)


def _pruned_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("keys", f"{result['keys_before']:,} → {result['keys_after']:,}"),
        ("  dropped", f"{result['dropped']:,} that the model predicts"),
        ("  merged", f"{result['merged']:,} into others"),
    ]
    if result["explained_variance"] is not None:
        rows.append(("variance kept", f"{result['explained_variance']:.1%}"))
    rows.append(("bytes", f"{result['bytes_before']:,} → {result['bytes_after']:,}"))
    if "perplexity_before" in result:
        figures = f"{result['perplexity_before']:.3f} → {result['perplexity_after']:.3f}"
        rows.append(("perplexity", f"{figures}, each at the best k, τ and λ for that text"))
    return [*rows, ("next", f"knnlm tune {result['out']} TEXT")]


def _best_perplexity(
    store: Path, text: list[str], limit: int | None, model: str | None, machine: MachineFlags
) -> float:
    """Return the lowest perplexity of one λ over the store's neighbours on a text."""
    from knnlm.evaluation.sweep import KS

    mixture = open_mixture(store, model, machine, memories="knn", use_tuned=False)
    with tempfile.TemporaryDirectory(prefix="knnlm-prune-") as folder:
        place = Path(folder) / "trace"
        trace = mixture.record(TextFlags().reader_for(store)(text), place, k=max(KS), limit=limit, progress=bar)
        return float(trace.sweep(device=str(mixture.lm.device)).best[3])


def token_log_p(store: Datastore, model: str | None, device: str, dtype: str) -> Any:
    """Read the stored text again with the language model; return the log-probability of each token."""
    from knnlm.mixture.loader import check_model, language_model
    from knnlm.training.prune import store_log_p

    lm = open_language_model(store, model, device, dtype)
    if model is None and language_model(store) is None:  # a model given by name may differ from the reader
        check_model(store, lm)
    return store_log_p(store, lm, progress=bar)


def open_language_model(store: Datastore, model: str | None, device: str, dtype: str) -> CausalLM:
    """Open the language model of a store: the one that is given, else the store's own."""
    from knnlm.mixture.loader import language_model, open_reader

    name = model or language_model(store)
    quiet()
    with waiting(f"opening {name or store.model['name']}"):
        return open_reader(store, name=name, device=device, dtype=dtype)


def merge(
    stores: Annotated[list[Path], typer.Argument(metavar="STORE", help="The folders of stores.", show_default=False)],
    out: Out,
    spec: Annotated[
        str | None,
        typer.Option("--index", help="Build an index too: auto, exact, or a FAISS string.", show_default="none"),
    ] = None,
    metric: IndexMetric = "l2",
    wait: Wait = 0.0,
    json: Json = False,
) -> None:
    """knnlm merge docs.store --out merged.store

    Write one store with the documents of several that were built with the same model; a text that is in several is
    stored once. A merge that was interrupted resumes when the same command is run again.
    """
    import knnlm

    merged = knnlm.merge(stores, out, index=spec, metric=metric, wait=wait, progress=bar)
    show(
        asdict(merged),
        f"{out}: {merged.tokens:,} tokens of {count(merged.documents, 'document')}, {merged.duplicates:,} duplicates "
        f"left out, {merged.seconds:.1f} s. Next: knnlm tune {out} TEXT",
        json=json,
    )


def shards(
    action: Annotated[str, typer.Argument(metavar="join|push", help="The action.", show_default=False)],
    stores: Annotated[
        list[str], typer.Argument(metavar="SHARD", help="Folders of shards; for join, also URLs.", show_default=False)
    ],
    out: Annotated[
        str, typer.Option(metavar="FOLDER", help="The folder to create; for push, a URL.", show_default=False)
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the manifest of a sharded store, or shards at the URL.")
    ] = False,
    wait: Wait = 0.0,
    json: Json = False,
) -> None:
    """knnlm shards join docs.store --out joined.store

    join makes one store of several without copying them: a small file that lists them in order. Shards that were built
    with build --shard are joined in the order of their parts. Commands open the new store like an ordinary one. push
    uploads shards to a URL such as s3://bucket/parts, where join finds them: s3://bucket/parts/part-1.store.
    """
    if action == "push":
        _push(stores, out, replace=replace, json=json)
    elif action == "join":
        _join(stores, out, replace=replace, wait=wait, json=json)
    else:
        raise ParameterError(f"Unknown action {action!r}: knnlm shards join SHARD... --out STORE, or push --out URL.")


def _join(stores: list[str], out: str, *, replace: bool, wait: float, json: bool) -> None:
    import knnlm
    from knnlm.datastore.manifest import is_url

    if is_url(out):
        raise ParameterError(f"{out}: a sharded store is a folder on this machine; only its shards can be at URLs.")
    joined = knnlm.join_shards(stores, out, replace_manifest=replace, wait=wait, progress=bar)
    text = (
        f"{out}: {joined.tokens:,} tokens of {count(joined.documents, 'document')} in "
        f"{count(len(joined.shards), 'shard')}. Next: knnlm tune {out} TEXT"
    )
    show(asdict(joined), text, json=json)


def _push(stores: list[str], out: str, *, replace: bool, json: bool) -> None:
    import knnlm

    names = [Path(store).resolve().name for store in stores]
    if len(set(names)) < len(names):
        raise ParameterError("Two of the shards have the same name. Push them to different URLs.")
    pushed = [
        knnlm.push_shard(store, f"{out.rstrip('/')}/{name}", replace=replace, progress=bar)
        for store, name in zip(stores, names, strict=True)
    ]
    lines = [
        f"{one.url}: {count(one.files, 'file')} of {one.bytes / 1e6:,.1f} MB uploaded, {one.unchanged:,} unchanged"
        for one in pushed
    ]
    show({"pushed": [asdict(one) for one in pushed]}, "\n".join(lines), json=json)


def import_arrays(
    keys: Annotated[Path, typer.Argument(help="The raw array of keys.", show_default=False)],
    values: Annotated[Path, typer.Argument(help="The raw array of tokens.", show_default=False)],
    out: Out,
    model: Model = "bundled",
    format: Annotated[str, typer.Option(help="knn-transformers or fairseq.")] = "knn-transformers",  # noqa: A002
    entries: Annotated[int | None, typer.Option(help="Entries to import.", show_default="all")] = None,
    key_dtype: Annotated[str | None, typer.Option(help="float16 or float32.", show_default="by file size")] = None,
    value_dtype: Annotated[str | None, typer.Option(help="int64, int32 or int16.", show_default="by file size")] = None,
    key_layer: KeyLayer = None,
    layer: Layer = -1,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Compare a sample with the model's keys.")] = True,
    machine: MachineFlags = MachineFlags(),
    json: Json = False,
) -> None:
    """knnlm import dstore_keys.npy dstore_vals.npy --out imported.store

    Write a store from the raw arrays of knn-transformers or fairseq's knnlm, as one document. A sample is computed
    again with the model, to check that the keys are its own.
    """
    import knnlm

    lm = open_model(model, key_layer=key_layer, layer=layer, **asdict(machine))
    options: dict[str, Any] = {"entries": entries, "key_dtype": key_dtype, "value_dtype": value_dtype}
    done = knnlm.import_arrays(keys, values, out=out, lm=lm, format=format, check=check, progress=bar, **options)
    sample = "not checked" if done.agreement is None else f"{done.agreement:.0%} of a sample equal to the model's"
    text = f"{out}: {done.tokens:,} tokens, keys {done.key_dtype}, {sample}, {done.seconds:.1f} s."
    show(asdict(done), f"{text} Next: knnlm tune {out} TEXT", json=json)
