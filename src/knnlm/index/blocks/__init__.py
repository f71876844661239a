"""An int8 block index for CPUs. This module only parses its spec, and does not load torch."""

import re

_SPEC = re.compile(r"Lists([1-9]\d{0,7}),Blocks([1-9]\d{0,5})")


def parse_spec(spec: str) -> tuple[int, int] | None:
    """Return the number of lists and the block size of a spec such as `Lists2048,Blocks256`; None for other specs."""
    match = _SPEC.fullmatch(spec)
    return None if match is None else (int(match[1]), int(match[2]))


def is_blocks(spec: str) -> bool:
    """Whether a spec names a block index."""
    return parse_spec(spec) is not None
