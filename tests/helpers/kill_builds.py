"""Builds that end by SIGKILL, each in a fork of one process. A script, and the function that runs it.

python kill_builds.py FOLDER PIPELINED WRITES...
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1]
SEGMENT_ENTRIES = 150


def kill_builds(folder: Path, writes: Sequence[int], *, pipelined: bool = False) -> None:
    """Build `documents(12)` in FOLDER/killedN, for each N of `writes`; the process is killed at its Nth write."""
    command = [sys.executable, __file__, str(folder), str(int(pipelined)), *map(str, writes)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)


def main() -> None:
    sys.path.insert(0, str(TESTS))
    from helpers.kill import Dying
    from helpers.models import tiny, tiny_tokenizer
    from helpers.stores import documents
    from knnlm import CausalLM, build, io
    from knnlm.datastore import catalog, segments
    from knnlm.ingest import pipeline

    folder, pipelined, *writes = sys.argv[1:]
    if pipelined == "1":
        pipeline.PIPELINED_DEVICES, pipeline._COPY_BYTES = {"cpu"}, 1000
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="tiny-llama")
    for count in map(int, writes):
        if os.fork() == 0:
            dying = Dying(count)
            segments.ArrayWriter.write = dying(segments.ArrayWriter.write)
            io.sync_folder = dying(io.sync_folder)
            catalog.Catalog.add_segment = dying(catalog.Catalog.add_segment)
            if pipelined == "0":
                catalog.Catalog._put = dying(catalog.Catalog._put)
            build(documents(12), f"{folder}/killed{count}", lm=lm, segment_entries=SEGMENT_ENTRIES)
            os._exit(3)
        assert os.wait()[1] == signal.SIGKILL


if __name__ == "__main__":
    main()
