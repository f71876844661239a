"""The `knnlm` command: collects the commands and turns errors into one line and an exit code."""

from __future__ import annotations

import io
import os
import sys

import typer

from knnlm import errors
from knnlm.cli import bench, build, chat, demo, documents, evaluate, generate, maintain, report, serve, train

app = typer.Typer(
    name="knnlm",
    help="Give any language model a memory. Begin with: knnlm demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

MODULES = (build, documents, evaluate, generate, maintain, train, report, bench, serve, chat, demo)

for module in MODULES:
    module.register(app)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Say which knnlm this is.")) -> None:
    """Give any language model a memory. Begin with: knnlm demo"""
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"knnlm {installed('knnlm')}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit: 0 done, 2 an error that is the caller's to mend, 130 interrupted."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets its number rather than a crash.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        result = app(arguments, standalone_mode=False, prog_name="knnlm")
        sys.stdout.flush()
        return _stopped() if result == 130 else int(result or 0)
    except errors.KnnlmError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _stopped()
    except BrokenPipeError:
        # The reader of our output has gone (`knnlm … | head`); say nothing, and keep Python from trying again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except typer.Exit as error:
        # Some versions of typer turn Ctrl-C into this themselves.
        return _stopped() if error.exit_code == 130 else error.exit_code
    except OSError as error:
        return _fail(f"{error.filename or 'the system'}: {error.strerror or error}.")
    except Exception as error:
        # Wrong options; the class lives in typer or in click, by typer's version.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "knnlm"
        message = " ".join(error.format_message().split())
        return _fail(f"{message.rstrip('.')}. See: {command} --help") if message else 2


def _stopped() -> int:
    print(  # noqa: T201
        "knnlm: stopped. Given again, the same command goes on: a build or an add goes on from its last segment, a "
        "training from its last checkpoint.",
        file=sys.stderr,
    )
    return 130


def _fail(message: str) -> int:
    print(f"knnlm: error: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201
    return 2
