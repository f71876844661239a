"""The `knnlm` command: its commands by panel, and errors as one line and an exit code."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import typer
import typer.core

from knnlm import errors
from knnlm.cli import chat, maintain, make, plan, serve, start, train, use
from knnlm.cli.options import PANELS, with_ray_address


class _Panels(typer.core.TyperGroup):
    """Lists the commands in panels, without boxes, so that help pages can be copied as text."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        limit = formatter.width - 6 - max(map(len, commands))
        for panel in PANELS:
            rows = [
                (name, one.get_short_help_str(limit))
                for name, one in commands.items()
                if one is not None and getattr(one, "rich_help_panel", None) == panel
            ]
            if rows:
                with formatter.section(panel):
                    formatter.write_dl(rows)


app = typer.Typer(
    name="knnlm",
    cls=_Panels,
    help="A memory for any language model. Start with: knnlm demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for module in (start, plan, make, use, train, maintain, serve, chat):
    module.register(app)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    """A memory for any language model. Start with: knnlm demo"""
    if version:
        import knnlm

        typer.echo(f"knnlm {knnlm.__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit: 0 success, 1 problems found by verify, 2 an error of the caller, 130 interrupted."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets an escape sequence instead of a crash.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        result = app(with_ray_address(arguments), standalone_mode=False, prog_name="knnlm")
        sys.stdout.flush()
        return _interrupted() if result == 130 else int(result or 0)
    except errors.KnnlmError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except BrokenPipeError:
        # The reader of the output has gone (`knnlm … | head`); keep Python from flushing to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except typer.Exit as error:
        # Some versions of typer turn Ctrl-C into this exception.
        return _interrupted() if error.exit_code == 130 else error.exit_code
    except OSError as error:
        return _fail(f"{error.filename or 'operating system'}: {error.strerror or error}.")
    except Exception as error:
        # Wrong options; the class is typer's or click's, by the version of typer.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "knnlm"
        message = " ".join(error.format_message().split())
        return _fail(f"{message.rstrip('.')}. See: {path} --help") if message else 2


def _interrupted() -> int:
    print(  # noqa: T201
        "knnlm: interrupted. Run the same command again: builds and additions resume at the last complete segment, "
        "training at the last checkpoint; other commands start over.",
        file=sys.stderr,
    )
    return 130


def _fail(message: str) -> int:
    print(f"knnlm: error: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201
    return 2
