"""Damping of memories that repeat what was generated.

A memory that has copied a passage into a text will copy it again, and each copy makes the next one more probable. Let r
be the length of the longest suffix of the generated tokens that occurred among them before, followed by the token that
the memory now finds most probable; r is 0 where there is none, and counted up to 16. From r = 4 on, the memory's weight
is multiplied by 0.5^(r - 3), and the rest goes to the language model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from knnlm.mixture.weights import MixturePrediction, component_slices_of

MIN_REPEAT = 4  # tokens; a shorter repetition is not damped
MAX_REPEAT = 16  # tokens; a longer repetition is damped like this one
NO_TOKEN = -1  # padding of generated tokens
_FACTOR = 0.5  # for each token from MIN_REPEAT on


def damp(mixed: MixturePrediction, generated: Tensor, rows: Tensor | None = None) -> MixturePrediction:
    """Return a prediction with the weights of repeating memories damped.

    `generated` are the (n, G) tokens that were generated before some positions, the (n,) `rows` of the prediction, or
    before all of them; padded with NO_TOKEN on the left.
    """
    if generated.shape[1] <= MIN_REPEAT or not mixed.outputs:  # too few for a repetition
        return mixed
    tops = torch.stack([output.top() for output in mixed.outputs], 1)  # (N, memories)
    before = mixed.weights if rows is None else mixed.weights[rows]
    excess = (repeat_lengths(generated, tops if rows is None else tops[rows]) - (MIN_REPEAT - 1)).clamp(min=0)
    weights = before.clone()
    for own, number in zip(component_slices_of(len(each.components) for each in mixed.outputs), excess.T, strict=True):
        weights[:, own] *= (_FACTOR**number)[:, None]
    weights[:, 0] += (before[:, 1:] - weights[:, 1:]).sum(1)
    return replace(mixed, weights=weights if rows is None else mixed.weights.index_copy(0, rows, weights))


def repeat_lengths(generated: Tensor, tops: Tensor) -> Tensor:
    """Return r of every memory, (N, memories), from the (N, G) generated tokens and the memories' most probable ones.

    Nothing here waits for the device.
    """
    padded = torch.nn.functional.pad(generated, (MAX_REPEAT, 0), value=NO_TOKEN)
    before = padded.unfold(1, MAX_REPEAT, 1)  # (N, G + 1, MAX_REPEAT): the tokens before each place, and the last ones
    last = before[:, -1:]
    equal = (before[:, :-1] == last) & (last != NO_TOKEN)
    lengths = equal.flip(2).cumprod(2, dtype=torch.uint8).sum(2)  # (N, G): of the suffix that ends before each place
    return (lengths[:, :, None] * (generated[:, :, None] == tops[:, None])).amax(1)
