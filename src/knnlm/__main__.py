"""Makes `python -m knnlm` the same as `knnlm`."""

from __future__ import annotations

from knnlm.cli.app import main

main()
