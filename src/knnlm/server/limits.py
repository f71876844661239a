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

    def check_sources(self, wanted: int) -> None:
        """Raise if a response could contain too many sources."""
        if wanted > self.sources:
            raise ParameterError(
                f"The response could contain {wanted:,} sources, but this server returns {self.sources:,} at most. "
                "Request fewer sources or fewer tokens."
            )

    def max_new_tokens(self, prompt: int, wanted: int | None, max_length: int | None, *, default: int) -> int:
        """Return how many tokens may follow a prompt of this length; raise if it is too long."""
        if prompt > self.prompt_tokens:
            raise ParameterError(
                f"The prompt has {prompt:,} tokens, but this server takes {self.prompt_tokens:,} at most. Shorten it."
            )
        free = self.output_tokens if max_length is None else min(self.output_tokens, max_length - prompt)
        if wanted is None:
            wanted = min(default, max(free, 0))
        if prompt + wanted > (max_length or prompt + wanted):
            raise ParameterError(
                f"The prompt has {prompt:,} tokens and {wanted:,} more are requested, but the model can read only "
                f"{max_length:,}. Shorten the prompt, or request fewer tokens."
            )
        if wanted > self.output_tokens:
            raise ParameterError(
                f"{wanted:,} tokens are requested, but this server generates {self.output_tokens:,} at most."
            )
        return wanted
