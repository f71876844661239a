"""Processes that change a store and die. A zygote imports everything once and forks one process for each attempt.

`python crashing.py` reads one JSON object a line: {"do": …, "path": …} starts an attempt and answers with its process
id; {"wait": pid} answers with how it ended. With "left", the process kills itself at its left-th write point; with
"fail", that write point fails instead.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
ENDLESS = 1 << 60


class Zygote:
    """The other side: starts attempts and waits for them."""

    def __init__(self) -> None:
        arguments = [sys.executable, "-m", "helpers.crash"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, text=True, cwd=HERE)

    def start(self, do: str, path: Path, **options: Any) -> int:
        """Start an attempt and return its process id."""
        return int(self._ask({"do": do, "path": str(path), **options}))

    def wait(self, pid: int) -> int:
        """Wait for an attempt: 0 done, 1 an error, -9 killed."""
        return int(self._ask({"wait": pid}))

    def run(self, do: str, path: Path, **options: Any) -> int:
        """Start an attempt and wait for it."""
        return self.wait(self.start(do, path, **options))

    def count(self, do: str, path: Path, **options: Any) -> int:
        """Do it to the end, and say how many write points that has."""
        told = path.with_name("count")
        assert self.run(do, path, told=str(told), **options) == 0, complaint(path)
        return int(told.read_text())

    def close(self) -> None:
        """Send the zygote home."""
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, order: dict[str, Any]) -> str:
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


def complaint(path: Path) -> str:
    """What the last attempt that failed has said."""
    file = path.with_name("complaint")
    return file.read_text() if file.exists() else ""


class Points:
    """Every write point of a process, in their order: what it does at the last one that is left is up to `fail`."""

    def __init__(self, left: int, fail: str | None) -> None:
        self.left, self.passed, self._fail = left, 0, fail

    def __call__(self, original: Callable[..., Any], *, half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.passed += 1
            self.left -= 1
            if self.left == 0:
                if self._fail is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                if self._fail == "short" and half is not None:
                    half(*args)
                number = {"full": errno.ENOSPC, "short": errno.ENOSPC, "broken": errno.EIO}[self._fail]
                raise OSError(number, os.strerror(number))
            return original(*args, **kwargs)

        return wrapper


def install(points: Points) -> None:
    """Put the points around all that writes: files, folders, names, and the catalog."""
    from knnlm.datastore.segments import ArrayWriter

    class File:
        """A file whose writes count; on a short write, half of it is there."""

        def __init__(self, file: Any) -> None:
            self._file = file
            self.write = points(file.write, half=self._half)

        def _half(self, data: Any) -> None:
            self._file.write(bytes(data)[: len(bytes(data)) // 2])
            self._file.flush()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    for owner, name in ((Path, "mkdir"), (Path, "rename"), (Path, "replace"), (os, "fsync"), (os, "unlink")):
        setattr(owner, name, points(getattr(owner, name)))
    os.rmdir = points(os.rmdir)
    make = ArrayWriter.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._file = File(self._file)

    ArrayWriter.__init__ = made

    class Connection(sqlite3.Connection):
        """Counts statements that write; a disk that fails speaks through SQLite."""

        def execute(self, query: str, *values: Any) -> sqlite3.Cursor:
            if not query.startswith("CREATE TEMP") and query.split()[0] in (
                "BEGIN",
                "INSERT",
                "DELETE",
                "UPDATE",
                "COMMIT",
                "CREATE",
                "ALTER",
                "VACUUM",
                "PRAGMA",
            ):
                touch()
            return super().execute(query, *values)

        def executemany(self, *args: Any) -> sqlite3.Cursor:
            touch()
            return super().executemany(*args)

    def passing() -> None:
        """Nothing."""

    counted = points(passing)

    def touch() -> None:
        try:
            counted()
        except OSError as error:
            raise sqlite3.OperationalError(f"disk I/O error ({error.strerror})") from None

    connect = sqlite3.connect
    sqlite3.connect = lambda *args, **kwargs: connect(*args, **{"factory": Connection, **kwargs})


def act(order: dict[str, Any]) -> None:
    """Do what was ordered, in a process of one's own."""
    path = Path(order["path"])
    points = Points(order.get("left", ENDLESS), order.get("fail"))
    install(points)
    ACTIONS[order["do"]](path, order)
    if "told" in order:
        Path(order["told"]).write_text(str(points.passed))


def build_store(path: Path, order: dict[str, Any]) -> None:
    from knnlm.ingest.build import build

    build(
        documents(order.get("count", 5)), path, lm=LM, segment_entries=ROWS, key_format=order.get("keys", "float16")
    ).close()


def add_documents(path: Path, order: dict[str, Any]) -> None:
    from knnlm.ingest.build import add

    add([documents(20)[number] for number in order.get("add", (6, 7, 8))], path, lm=LM)


def remove_document(path: Path, order: dict[str, Any]) -> None:
    from knnlm.datastore.remove import remove

    if "source" in order:
        remove(path, source=order["source"])
    else:
        remove(path, document=order.get("remove", "d3"))


def make_index(path: Path, order: dict[str, Any]) -> None:
    from knnlm.datastore.indexes import build_index
    from knnlm.datastore.store import Datastore

    store = Datastore.open(path)
    build_index(store, order.get("spec", "IVF2,Flat"))
    store.close()


def compact_store(path: Path, order: dict[str, Any]) -> None:
    from knnlm.datastore.compact import compact

    compact(path)


def merge_store(path: Path, order: dict[str, Any]) -> None:
    from knnlm.maintenance.merge import merge

    merge([path], order["out"])


def _serve() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                _be(order)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _be(order: dict[str, Any]) -> None:
    code = 1
    try:
        act(order)
        code = 0
    except BaseException:
        Path(order["path"]).with_name("complaint").write_text(traceback.format_exc())
    finally:
        os._exit(code)


ROWS = 160
ACTIONS: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "build": build_store,
    "add": add_documents,
    "first": add_documents,
    "remove": remove_document,
    "index": make_index,
    "compact": compact_store,
    "merge": merge_store,
}

if __name__ == "__main__":
    import torch

    from helpers import concurrency as sharing
    from helpers.models import tiny, tiny_tokenizer
    from helpers.stores import documents
    from knnlm.lm.causal import CausalLM

    torch.set_num_threads(1)
    LM = CausalLM(tiny("llama"), tiny_tokenizer(), name="tiny-llama")
    LM.encode("warm up")
    ACTIONS |= {
        "hold": sharing.hold,
        "read": sharing.read,
        "write": lambda path, order: sharing.write(path, order, LM),
    }
    _serve()
