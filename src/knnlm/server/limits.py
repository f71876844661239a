"""The limits of a server."""

from __future__ import annotations

from dataclasses import dataclass

from knnlm.errors import ParameterError


@dataclass(frozen=True)
class Limits:
    """Limits that hold for every request."""

    body_bytes: int = 2 << 20
    prompt_tokens: int = 8192
    output_tokens: int = 4096
    sources: int = 65_536  # in one response
    slots: int = 64  # sequences that are generated at once
    queue: int = 256  # requests that wait for a slot
    seconds: float = 300.0  # for a request, including the time in the queue
    trace_bytes: int = 256 << 20  # of traces kept for rescoring

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ParameterError(f"The limit {name} must be above 0, not {value}.")
