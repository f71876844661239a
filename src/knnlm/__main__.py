"""Makes `python -m knnlm` the same as `knnlm`."""

from knnlm.cli import main

main()
