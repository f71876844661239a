"""Run commands in this process."""

from __future__ import annotations

from knnlm.cli.app import run


def knnlm(capfd, *arguments) -> tuple[int, str, str]:
    """Run a command in this process."""
    code = run([str(argument) for argument in arguments])
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def failure(capfd, *arguments) -> str:
    """Run a command that must fail with code 2 and one line; return the line."""
    code, out, err = knnlm(capfd, *arguments)
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2, (out, err)
    assert out == ""
    assert len(lines) == 1, err
    assert lines[0].startswith("knnlm: error: ")
    return lines[0]
