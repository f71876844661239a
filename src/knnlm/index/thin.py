"""Choose an index that adds little to keys which are themselves codes. Knows nothing about how keys are stored.

It only makes a shortlist, which is measured again on what is stored. So it compares 20 bytes a key, half a byte for
every two of 80 principal components, and with the 8 of a key's number and the lists' centres it takes 30 bytes a key.
"""

from __future__ import annotations

from knnlm.index.ladder import inverted_lists_for

_COMPONENTS, _PIECES = 80, 40
_EXACT = 200_000  # keys up to which comparing with all of them is cheap


def thin_spec(rows: int, width: int) -> str:
    """Give the FAISS factory string of a thin index for so many keys, or `exact`."""
    if rows <= _EXACT:
        return "exact"
    lists = inverted_lists_for(rows)
    if width < _COMPONENTS:
        return f"IVF{lists},SQ8"
    # Turned at random after the projection, so that every piece varies as much as the others.
    return f"PCAR{_COMPONENTS},IVF{lists},PQ{_PIECES}x4fsr"
