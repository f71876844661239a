"""The command line: parse, call, print."""

from knnlm.cli.app import main

__all__ = ["main"]
