"""A plan as sections of text: tables for the command line and for pages, and a list of assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from knnlm.lm.loading import BUNDLED
from knnlm.plan.cost import BATCH, MIN_COMPILED_TOKENS, Cost, K
from knnlm.plan.layout import NETWORK_SECONDS, RAM_SHARE, Layout, Plan
from knnlm.plan.tail import QUANTILES
from knnlm.progress import duration


@dataclass(frozen=True)
class Section:
    """A table with a title; without a header its rows are names and values, or lines."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def plan_sections(plan: Plan) -> list[Section]:
    """Return all of a plan, in the order in which it is read."""
    sections = [_input(plan), _formats(plan), _layouts(plan), _recommendation(plan)]
    return [*sections, *([_tail(plan)] if plan.tail else []), _assumptions(plan)]


def as_markdown(sections: Sequence[Section], *, level: int = 2) -> str:
    """Return sections as Markdown."""
    parts = []
    for section in sections:
        width = len(section.rows[0]) if section.rows else 1
        parts.append(f"{'#' * level} {section.title}\n")
        if width == 1:
            parts.append("\n".join(f"- {row[0]}" for row in section.rows) + "\n")
            continue
        header = section.header or ("",) * width
        lines = [f"| {' | '.join(header)} |", f"|{'---|' * width}"]
        parts.append("\n".join([*lines, *(f"| {' | '.join(row)} |" for row in section.rows)]) + "\n")
    return "\n".join(parts)


def as_record(plan: Plan) -> dict[str, Any]:
    """Return a plan as one JSON object; times in seconds, sizes in bytes."""
    return {
        "tokens": plan.text.tokens,
        "model": {**asdict(plan.model), "window": asdict(plan.model.window)},
        "hardware": asdict(plan.hardware),
        "queries_per_second": plan.queries_per_second,
        "formats": [
            {
                **{name: value for name, value in vars(row).items() if name not in ("build", "index_time")},
                "build_seconds": row.build.seconds,
                "build_parts": dict(row.build.parts),
                "index_seconds": row.index_time.seconds,
                "index_parts": dict(row.index_time.parts),
            }
            for row in plan.formats
        ],
        "layouts": [_layout_record(layout) for layout in plan.layouts],
        "recommended": None if plan.recommended is None else _layout_record(plan.recommended),
        "bottlenecks": dict(_bottlenecks(plan)),
        "tail": [{"shards": row.shards, **_named(row.quantiles)} for row in plan.tail],
        "constants": {"origin": plan.origin, "machine": dict(plan.constants.machine)},
        "assumptions": [row[0] for row in _assumptions(plan).rows],
    }


def _layout_record(layout: Layout) -> dict[str, Any]:
    found = {name: value for name, value in vars(layout).items() if name != "one_query"}
    return {**found, "fits": layout.fits, "shard_seconds": layout.one_query.seconds}


def _named(quantiles: Sequence[float]) -> dict[str, float]:
    return {f"p{round(100 * name)}": value for name, value in zip(QUANTILES, quantiles, strict=True)}


def _input(plan: Plan) -> Section:
    model = plan.model
    return Section(
        "Input",
        (),
        [
            ("text", f"{quantity(plan.text.tokens)} tokens in {quantity(plan.text.documents)} documents"),
            ("model", f"{model.name}: {quantity(model.parameters)} parameters, keys of width {model.width:,}"),
            ("hardware", str(plan.hardware)),
            ("queries", f"{plan.queries_per_second:,.4g} per second, k = {K:,}"),
            ("constants", f"{plan.constants.name} (from {plan.origin})"),
        ],
    )


def _formats(plan: Plan) -> Section:
    header = ("key format", "bytes per key", "store", "index of a node", "all indexes", "build", "index", "memory")
    return Section(
        "Key formats",
        header,
        [
            (
                row.storage,
                f"{row.key_bytes:,}",
                size(row.store_bytes),
                row.index,
                size(row.index_bytes),
                duration(row.build.seconds),
                duration(row.index_time.seconds),
                f"{size(row.build_memory)}, {size(row.index_memory)}",
            )
            for row in plan.formats
        ],
    )


def _layouts(plan: Plan) -> Section:
    header = ("keys", "search", "shards × replicas", "keys each", "memory each", "one query, p99", "queries/s", "fits")
    return Section(
        "Layouts",
        header,
        [
            (
                layout.storage,
                layout.search,
                f"{layout.shards:,} × {layout.replicas:,}",
                quantity(layout.keys_per_shard),
                size(layout.shard_memory),
                f"{duration(layout.latency)}, {duration(layout.latency_p99)}",
                f"{layout.queries_per_second:,.0f}",
                "yes" if layout.fits else f"no: {layout.limit}, needs {layout.nodes_needed:,} nodes",
            )
            for layout in plan.layouts
        ],
    )


def _recommendation(plan: Plan) -> Section:
    layout = plan.recommended
    if layout is None:
        least = min(plan.layouts, key=lambda each: each.nodes_needed)
        text = f"none fits; the smallest needs {least.nodes_needed:,} such nodes ({least.storage}, {least.search})"
        return Section("Recommended", (), [("layout", text), *_bottlenecks(plan)])
    rows = [
        ("key format", f"--key-format {layout.storage}"),
        ("search", layout.search + (" (--key-dtype int8)" if "int8 keys" in layout.search else "")),
        ("shards", f"{layout.shards:,} of {quantity(layout.keys_per_shard)} keys"),
        ("replicas", f"{layout.replicas:,}"),
        ("one query", f"{duration(layout.latency)}; 99 % within {duration(layout.latency_p99)}"),
        ("throughput", f"{layout.queries_per_second:,.0f} queries per second"),
        *_bottlenecks(plan),
        ("build", _build_command(plan, layout)),
        ("serve", _serve_command(plan, layout)),
    ]
    return Section("Recommended", (), rows)


def _build_command(plan: Plan, layout: Layout) -> str:
    model = "" if plan.model.name == BUNDLED else f" --model {plan.model.name}"
    command = f"knnlm build TEXT --out STORE{model} --key-format {layout.storage}"
    if _is_on_one_machine(plan, layout):
        return f"{command} && knnlm index STORE" if _has_index(layout) else command
    return f"{command} --ray ADDRESS --shards {layout.shards}{' --index auto' if _has_index(layout) else ''}"


def _has_index(layout: Layout) -> bool:
    return not layout.on_gpus and not layout.search.endswith("exact")


def _serve_command(plan: Plan, layout: Layout) -> str:
    dtype = " --key-dtype int8" if "int8 keys" in layout.search else ""
    if _is_on_one_machine(plan, layout):
        return f"knnlm serve STORE{' --device cuda' if layout.on_gpus else ''}{dtype}"
    gpus = " --shard-gpus 1" if layout.on_gpus else ""
    replicas = f" --shard-replicas {layout.replicas}" if layout.replicas > 1 else ""
    return f"knnlm serve STORE --ray ADDRESS{gpus}{dtype}{replicas}"


def _is_on_one_machine(plan: Plan, layout: Layout) -> bool:
    """Whether no Ray is needed."""
    return plan.hardware.nodes == 1 and layout.shards == layout.replicas == 1


def _bottlenecks(plan: Plan) -> list[tuple[str, str]]:
    """Return what limits building, and searching the recommended layout."""
    layout = plan.recommended
    storage = "float16" if layout is None else layout.storage
    row = next(row for row in plan.formats if row.storage == storage)
    found = [("bottleneck of the build", f"{_share(row.build)}; {duration(row.build.seconds)} in all")]
    if layout is not None:
        found.append(("bottleneck of a query", _share(layout.one_query)))
    else:
        limits = sorted({each.limit for each in plan.layouts})
        found.append(("bottleneck of a query", f"the hardware: {', '.join(limits)}"))
    return found


def _share(cost: Cost) -> str:
    part = cost.parts[cost.bottleneck] / max(cost.seconds, 1e-300)
    return f"{cost.bottleneck} ({part:.0%})"


def _tail(plan: Plan) -> Section:
    assert plan.recommended is not None
    header = ("shards", *(f"p{round(100 * quantile)}" for quantile in QUANTILES))
    longest = max(max(row.quantiles) for row in plan.tail)  # a quantile of it may be longer than was measured
    rows = [
        (f"{row.shards:,}", *(f"{'≥ ' * (each >= longest)}{duration(each)}" for each in row.quantiles))
        for row in plan.tail
    ]
    return Section("Slowest of many shards of this size", header, rows)


def _assumptions(plan: Plan) -> Section:
    cpu = plan.constants.cpu
    own = plan.model.name in plan.constants.models
    lines = [
        f"Documents have {plan.text.document_tokens:,.0f} tokens on average, with exponentially distributed lengths; "
        f"windows of {plan.model.window.context:,} tokens overlap by half, so the model reads "
        f"{plan.text.read_tokens(plan.model.window) / plan.text.tokens:.2f} times as many tokens.",
        "The forward pass was measured with this model."
        if own
        else "The forward pass was not measured with this model: its time is in proportion to its operations. All "
        "parameters but embeddings count, also those of experts that a token does not use.",
        f"Times of a CPU were measured on {cpu.threads:g} thread{'' if cpu.threads == 1 else 's'} and are divided by "
        "the cores of a node; a single query uses no more than those threads.",
        "Nodes and GPUs build with no loss: each reads its share of the text. A node has one disk, which its GPUs "
        "share, with room for what is listed.",
        f"Files that a search reads stay in {RAM_SHARE:.0%} of a node's memory as far as they fit; the rest is read "
        "from the disk each time.",
        f"Throughput is that of batches of {BATCH:,} queries; every shard answers every query.",
        "Key formats are ordered by precision; their effect on perplexity is not estimated.",
        f"A request to another shard and its answer take {1e3 * NETWORK_SECONDS:g} ms.",
        f"The latency of a shard varies as that of {len(plan.constants.latencies):,} single queries on the measured "
        "machine, independently of the other shards, and is never longer than the longest of them.",
    ]
    if plan.hardware.gpus:
        lines.append(
            f"GPUs are as fast as the measured one; models are compiled from {quantity(MIN_COMPILED_TOKENS)} tokens "
            "in full windows on; keys may take 80 % of a GPU's memory."
            if plan.constants.gpu is not None
            else "No GPU was measured, so the plan uses none. Measure on a machine with one: knnlm plan --measure."
        )
    return Section("Assumptions", (), [(line,) for line in lines])


def size(count: float) -> str:
    """Return a number of bytes in words."""
    for unit, bytes_ in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= 0.9995 * bytes_:
            return f"{count / bytes_:.3g} {unit}"
    return f"{count:.0f} B"


def quantity(count: float) -> str:
    """Return a large number in words."""
    for unit, value in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * value:
            return f"{count / value:.3g}{unit}"
    return f"{count:.3g}"
