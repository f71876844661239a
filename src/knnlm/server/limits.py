"""How much a server lets itself be asked for. Knows nothing about requests; checks numbers."""

from __future__ import annotations

from dataclasses import dataclass

from knnlm.errors import ParameterError


@dataclass(frozen=True)
class Limits:
    """What holds for every request."""

    body_bytes: int = 2 << 20
    prompt_tokens: int = 8192
    output_tokens: int = 4096
    sources: int = 65_536  # that are named in one answer
    slots: int = 64  # texts that are written at once
    queue: int = 256  # requests that wait for a slot
    seconds: float = 300.0  # for a request, waiting included
    trace_bytes: int = 256 << 20  # that are remembered for scoring again

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ParameterError(f"the limit of {name.replace('_', ' ')} must be above 0, not {value}.")

    def check_sources(self, wanted: int) -> None:
        """Refuse an answer that would name too many sources."""
        if wanted > self.sources:
            raise ParameterError(
                f"The answer would name {wanted:,} sources, but this server names {self.sources:,} at most. "
                "Ask for fewer sources, or for fewer tokens."
            )

    def room(self, prompt: int, wanted: int | None, longest: int | None, *, usual: int) -> int:
        """Say how many tokens may follow a prompt of this length; ParameterError where it is too long."""
        if prompt > self.prompt_tokens:
            raise ParameterError(
                f"The prompt has {prompt:,} tokens, but this server takes {self.prompt_tokens:,} at most. Shorten it."
            )
        free = self.output_tokens if longest is None else min(self.output_tokens, longest - prompt)
        if wanted is None:
            wanted = min(usual, max(free, 0))
        if prompt + wanted > (longest or prompt + wanted):
            raise ParameterError(
                f"The prompt has {prompt:,} tokens and {wanted:,} more are wanted, but the model can read only "
                f"{longest:,}. Shorten the prompt, or ask for fewer tokens."
            )
        if wanted > self.output_tokens:
            raise ParameterError(
                f"{wanted:,} tokens are wanted, but this server writes {self.output_tokens:,} at most."
            )
        return wanted
