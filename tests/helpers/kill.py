"""A process that kills itself in the middle of its work. Imported by the scripts that tests start."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


class Dying:
    """Counts calls of the functions it is put around; the last one that is left is never made."""

    def __init__(self, left: int = 0) -> None:
        self.left = left

    def __call__(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return wrapper
