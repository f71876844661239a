"""The command that plans a store before it is built: plan."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from knnlm.cli.options import START, Json, Model, command
from knnlm.cli.output import bar, console, err, open_model, print_json, quiet
from knnlm.errors import ParameterError

if TYPE_CHECKING:
    from knnlm.plan.layout import Hardware
    from knnlm.plan.text import Section

_GB = 1e9


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    command(app, START, "Estimate size, time and hardware of a store.")(plan)


@dataclass(frozen=True)
class HardwareFlags:
    """The nodes that a plan is for."""

    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1
    cores: Annotated[
        int | None, typer.Option(min=1, help="Cores of each node.", show_default="those of this machine")
    ] = None
    ram: Annotated[
        float | None, typer.Option(help="Memory of each node in GB.", show_default="that of this machine")
    ] = None
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of each node.", show_default="those of this machine")
    ] = None
    gpu_memory: Annotated[float, typer.Option(help="Memory of each GPU in GB.")] = 80.0
    disk_gbps: Annotated[
        float | None, typer.Option(help="Speed of each node's disk in GB per second.", show_default="as measured")
    ] = None

    def hardware(self) -> Hardware:
        """Return the hardware; what is not given is that of this machine."""
        from knnlm.plan.layout import Hardware

        gpus = self.gpus
        if gpus is None:
            import torch

            gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return Hardware(
            nodes=self.nodes,
            cores=self.cores or os.cpu_count() or 1,
            ram=_own_memory() if self.ram is None else self.ram * _GB,
            gpus=gpus,
            gpu_memory=self.gpu_memory * _GB,
            disk_bytes_per_second=None if self.disk_gbps is None else self.disk_gbps * _GB,
        )


def _own_memory() -> float:
    """Return the memory of this machine in bytes."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError, AttributeError):
        return 16 * _GB


def plan(
    tokens: Annotated[
        float | None, typer.Option(help="Tokens of the text, such as 3e9.", show_default=False, min=1)
    ] = None,
    model: Model = "bundled",
    document_tokens: Annotated[float, typer.Option(min=1, help="Tokens of a document, on average.")] = 1000.0,
    hardware: HardwareFlags = HardwareFlags(),
    queries_per_second: Annotated[float, typer.Option(help="Searches per second that are needed.")] = 10.0,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a PNG image for 1M to 1T tokens.", show_default=False),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine first and keep its constants: two minutes.")
    ] = False,
    constants: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The file of constants to use or, with --measure, to write.",
            show_default="those of this machine if measured, else knnlm's",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="With --measure: cpu or cuda.", show_default="cpu")] = None,
    json: Json = False,
) -> None:
    """knnlm plan --tokens 3e9 --nodes 4 --ram 512 --cores 64

    Estimate what a store takes before it is built: bytes, time and memory of every key format, search time of every
    layout on the given hardware, the layout to use, and what limits it. All assumptions are listed.
    """
    from knnlm.plan.constants import load_constants, user_constants
    from knnlm.plan.layout import make_plan
    from knnlm.plan.model import describe_model
    from knnlm.plan.sizes import TextShape
    from knnlm.plan.text import as_record, plan_sections

    if tokens is None and not measure:
        raise ParameterError("How large is the text? Add --tokens, such as --tokens 3e9, or --measure.")
    if device is not None and not measure:
        raise ParameterError("--device is for --measure only. Hardware is described by --gpus, --cores and others.")
    if plot is not None and plot.suffix.lower() != ".png":
        raise ParameterError(f"--plot writes a PNG image: give a name that ends in .png, not {plot.name}.")
    if measure:
        _measure(model, device or "cpu", constants or user_constants())
    if tokens is None:
        return
    quiet()
    found, origin = load_constants(constants)
    made = make_plan(
        TextShape(tokens, document_tokens),
        describe_model(model),
        hardware.hardware(),
        found,
        queries_per_second=queries_per_second,
        origin=origin,
    )
    if plot is not None:
        from knnlm.plan.plot import plot_plan

        plot_plan(made, plot)
        err.print(f"{plot}: a plot over 1M to 1T tokens", markup=False)
    if json:
        print_json(as_record(made))
    else:
        _show(plan_sections(made))


def _measure(model: str, device: str, path: Path) -> None:
    """Measure this machine and write its constants."""
    from knnlm.plan.measure import measure

    lm = open_model(model, device=device)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="knnlm-plan-") as folder:
        found = measure(lm, Path(folder), progress=bar)
    found.save(path)
    err.print(f"Measured {found.name} in {time.perf_counter() - begin:.0f} s: {path}", markup=False)


def _show(sections: list[Section]) -> None:
    """Print sections as tables."""
    for number, section in enumerate(sections):
        console.print(("\n" if number else "") + section.title, style="bold", markup=False)
        if section.rows and len(section.rows[0]) == 1:
            for (line,) in section.rows:
                console.print(f"- {line}", markup=False)
            continue
        table = Table(show_header=bool(section.header), box=None, pad_edge=False)
        for name in section.header or section.rows[0]:
            table.add_column(name, overflow="fold")
        for row in section.rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
