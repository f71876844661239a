"""Write docs/cli.md from what every command says with --help; with --check, say whether the page is current.

The width is fixed, so that the page does not depend on a terminal. The layout is typer's and changes with its versions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from knnlm.cli.app import app

PAGE = Path(__file__).parent / "cli.md"
ENVIRONMENT = {"COLUMNS": "80", "PYTHONUTF8": "1", "NO_COLOR": "1", "TERM": "dumb"}
# Commands that the test that runs the examples of this page cannot run.
LONG = {
    "demo": "takes-minutes",
    "chat": "reads-until-Ctrl-D",
    "import": "needs-files-of-another-program",
    "serve": "runs-until-Ctrl-C",
}

HEADER = """\
# The command line

Made by `python docs/generate_cli.py` from `knnlm COMMAND --help`; do not edit it. The examples run in this order.

Results go to standard output, progress and errors to standard error. With `--json` the result is one JSON object; a
number that is infinite or undefined is `null`. An error is one line that begins with `knnlm: error:`.

| exit code | meaning |
|---|---|
| 0 | done |
| 2 | an error that the caller can mend: wrong options, unreadable text, another model, a full disk |
| 130 | interrupted; what was finished is kept, and the same command goes on from there |
"""


def help_of(*command: str) -> str:
    """Give the help page of a command as a terminal of 80 columns shows it."""
    arguments = [sys.executable, "-m", "knnlm", *command, "--help"]
    environment = {**os.environ, **ENVIRONMENT}
    shown = subprocess.run(arguments, capture_output=True, encoding="utf-8", check=True, env=environment)  # noqa: S603
    return "\n".join(line.rstrip() for line in shown.stdout.splitlines()).strip()


def page() -> str:
    """Lay out the whole page."""
    parts = [HEADER, f"```text\n{help_of()}\n```\n"]
    for command in app.registered_commands:
        assert command.callback is not None
        assert command.callback.__doc__ is not None
        name = command.name or command.callback.__name__
        example = command.callback.__doc__.splitlines()[0]
        kind = f"sh skip={LONG[name]}" if name in LONG else "sh"
        parts.append(f"## knnlm {name}\n\n```{kind}\n{example}\n```\n\n```text\n{help_of(name)}\n```\n")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """Write the page, or compare it; the exit code says whether it was current."""
    made = page()
    if arguments == ["--check"]:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == made:
            return 0
        sys.stderr.write(
            f"{PAGE} is not what the commands say (with typer {version('typer')}). Run: python docs/generate_cli.py\n"
        )
        return 1
    if arguments:
        sys.stderr.write(f"Unknown arguments {' '.join(arguments)}: give none, or --check.\n")
        return 2
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
