"""What one token is by itself: its text, and its bytes where it is only a part of a character.

Knows nothing about answers.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KEPT = 1 << 16  # tokens that are remembered


class Pieces:
    """Spells tokens one by one; for one thread only, since a tokenizer is."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.spell = lru_cache(maxsize=_KEPT)(self._spell)

    def _spell(self, token: int) -> tuple[str, bytes | None]:
        """Give a token's name and its bytes; as in OpenAI's API, a part of a character is named by its bytes."""
        text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        if "\ufffd" not in text:
            return text, text.encode(errors="replace")
        found = _bytes(self.tokenizer.convert_ids_to_tokens(token))
        if found is None or found == text.encode(errors="replace"):
            return text, found
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found), found


def _bytes(piece: Any) -> bytes | None:
    """Read the bytes from how a tokenizer writes a token; None where it does not say."""
    if not isinstance(piece, str):
        return None
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    signs = _byte_signs()
    return bytes(signs[sign] for sign in piece) if all(sign in signs for sign in piece) else None


@lru_cache(maxsize=1)
def _byte_signs() -> dict[str, int]:
    """Say which sign stands for which byte where tokens are made of bytes: those that can be seen for themselves."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
