"""Evidence of the text so far: how well each memory has predicted its tokens, as features of a gate.

The gain of memory m at a token y is g = log(½ + ½ · p_m(y) / p_LM(y)), at most 3 nats; 0 where the memory abstains. The
state of a memory is two moving averages of its gains, e ← d · e + (1 - d) · g for each decay d, and their sum. A state
depends only on tokens that came before, and not on the weights.

The gain of the whole mixture at a token is log p(y) / p_LM(y), at most 2 nats. A text is in the domain of the memories
if the gains of its tokens sum to at least 2 nats, or ¼ nat for each token of a text with fewer than 8: a text without
tokens is, so that memories are used where nothing is known about a text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DECAYS = (0.8, 0.97)  # of the moving averages: of about the last 5 and 33 tokens
EVIDENCE = ("mean gain of 5 tokens", "mean gain of 33 tokens", "gain of the text")  # features of each memory

_MAX_GAIN = 3.0  # nats, of a memory at a token
_MAX_MIXTURE_GAIN = 2.0  # nats, so that no single token decides
_MIN_MIXTURE_GAIN = -100.0  # nats, so that sums are finite
_DOMAIN_GAIN = 2.0  # nats that a text in the domain gains
_DOMAIN_GAIN_PER_TOKEN = 0.25  # of a short text
_NEGLIGIBLE = 1e-20  # share of a state that is taken for 0
_KEEP = np.array([*DECAYS, 1.0])  # the share of each value that stays
_ADD = np.array([*(1 - decay for decay in DECAYS), 1.0])  # the factor of a new gain


def gains(log_probs: Tensor, abstains: Tensor, first_components: Sequence[int]) -> Tensor:
    """Return the (N, m) gains of memories at tokens, in float64.

    `log_probs` are the (N, M) log-probabilities of the tokens by each component, the language model first; a memory is
    represented by its first component.
    """
    own = log_probs[:, first_components].double()
    change = own.nan_to_num(nan=-torch.inf, neginf=-torch.inf) - log_probs[:, :1].double()
    change = change.masked_fill(change.isnan(), 0.0)  # both give the token the probability 0
    gained = torch.logaddexp(change, torch.zeros_like(change)) - math.log(2)
    return gained.clamp(max=_MAX_GAIN).masked_fill(abstains[:, first_components], 0.0)


def mixture_gains(mixed: Tensor, lm: Tensor) -> Tensor:
    """Return the (N,) gains of a mixture at tokens, from their log-probabilities by it and by the language model."""
    change = (mixed - lm).double()
    return change.masked_fill(change.isnan(), 0.0).clamp(_MIN_MIXTURE_GAIN, _MAX_MIXTURE_GAIN)  # NaN: both are 0


def first_rows(begins: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the row of the first token of each text, from the marks of first tokens; the first row is one."""
    return np.concatenate([[0], np.flatnonzero(begins[1:]) + 1])


def sums_before(
    values: NDArray[np.float64], begins: NDArray[np.bool_], starts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the (N, n) sums of values before each of N tokens, in the order of the texts.

    `begins` marks the first tokens of texts, whose (N, n) sums are in `starts`.
    """
    if not len(values):
        return values
    # Columns are contiguous here, which is several times as fast as short rows.
    before = np.zeros(values.shape[::-1])
    np.cumsum(values.T[:, :-1], axis=1, out=before[:, 1:])
    first = first_rows(begins)
    offsets = starts[first].T - before[:, first]
    before += np.repeat(offsets, np.diff(first, append=len(values)), axis=1)
    return before.T


def in_domain(gain: Tensor, tokens: Tensor) -> Tensor:
    """Whether texts with these (N,) gains and numbers of tokens are in the domain of the memories."""
    return gain >= (_DOMAIN_GAIN_PER_TOKEN * tokens).clamp(max=_DOMAIN_GAIN)


def update_evidence(states: Tensor, gained: Tensor) -> Tensor:
    """Return the (N, 3·m) states after tokens, from those before and the (N, m) gains of the memories."""
    keep, add = (torch.from_numpy(each).to(states) for each in (_KEEP, _ADD))
    after: Tensor = states.unflatten(1, (-1, len(_KEEP))) * keep + gained[..., None].to(states) * add
    return after.flatten(1)


def text_evidence(
    log_probs: Tensor,
    abstains: Tensor,
    first_components: Sequence[int],
    begins: NDArray[np.bool_],
    *,
    starts: NDArray[np.float64] | None = None,
    evident: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """Return the (N, 3·m) states before each of N tokens, in the order of the texts; see `gains`, `evidence_before`.

    Without `starts`, all texts begin here.
    """
    gained = gains(log_probs, abstains, first_components).cpu().numpy()
    if starts is None:
        starts = np.zeros((len(gained), len(EVIDENCE) * gained.shape[1]))
    return evidence_before(gained, begins, starts, evident)


def evidence_before(
    gained: NDArray[np.float64],
    begins: NDArray[np.bool_],
    starts: NDArray[np.float64],
    evident: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """Return the (N, 3·m) states before each of N tokens, in the order of the texts, from their (N, m) gains.

    `begins` marks the first tokens of texts, whose (N, 3·m) states are in `starts`. Tokens that are not `evident`
    change nothing.
    """
    rows, memories = gained.shape
    first = starts.reshape(rows, memories, len(_KEEP))
    before = np.empty_like(first)
    if evident is not None:
        gained = np.where(evident[:, None], gained, 0.0)
    before[..., -1] = sums_before(gained, begins, first[..., -1])
    for column, decay in enumerate(DECAYS):
        keep = np.full((rows, 1), decay)
        added = (1 - decay) * gained
        if evident is not None:
            keep[~evident] = 1.0
        # The state before token t + 1 is keep_t · state_t + added_t, or that of a beginning.
        keep, added = np.roll(keep, 1, 0), np.roll(added, 1, 0)
        keep[begins], added[begins] = 0.0, first[begins, :, column]
        before[..., column] = _scan(keep, added)
    return before.reshape(rows, -1)


def _scan(keep: NDArray[np.float64], added: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return s_t = keep_t · s_{t-1} + added_t for all rows, from (N, 1) and (N, m), in at most log₂ N steps."""
    shift = 1
    while shift < len(added) and keep.max() > _NEGLIGIBLE:
        added[shift:] += keep[shift:] * added[:-shift].copy()
        keep[shift:] *= keep[:-shift].copy()
        keep[:shift] = 0.0
        shift *= 2
    return added


def evidence_features(states: Tensor) -> Tensor:
    """Return the (N, 3·m) features of a gate from states: sums grow with the text, so their logarithm is taken."""
    by_memory = states.unflatten(1, (-1, len(_KEEP)))
    total = by_memory[..., -1:]
    return torch.cat([by_memory[..., :-1], total.sign() * total.abs().log1p()], -1).flatten(1).float()
