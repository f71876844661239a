"""The command line: parse, call, print. Knows nothing about how anything is done."""

from knnlm.cli.app import main

__all__ = ["main"]
