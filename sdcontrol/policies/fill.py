"""Who drafts how much, once the rounds open to each family are decided.

Each request's best value with n tokens has a concave envelope; its slopes, sorted over all
requests, give the best value of the batch for every total of draft tokens at once. Verification may
then cost what it likes: its price is subtracted at every total. Knows nothing of how caps are found.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.policies.arrays import NARROW, column, counting, greatest, running, total
from sdcontrol.policies.pricing import Prices
from sdcontrol.policies.problem import IntArray

__all__ = ["Filled", "fill"]


@dataclass(frozen=True, slots=True)
class Filled:
    """The best lengths under the best of the caps tried."""

    caps: int  # index of the best caps
    length: IntArray  # [requests]
    token: float  # worth of the last draft token; 0 without draft tokens
    value: float  # of all draft tokens, less drafting and all verification


def fill(prices: Prices, caps: IntArray | None) -> Filled:
    """The best lengths under the best of `caps`, `[candidates, families]`; None: no caps."""
    verify = prices.problem.verify
    slope = _slopes(prices, caps)  # [K, candidates, requests]
    falling = -slope.swapaxes(0, 1).reshape(slope.shape[1], -1)
    falling.sort(axis=1)
    loss = np.zeros((len(falling), len(verify)))
    np.add.accumulate(falling[:, : len(verify) - 1], axis=1, out=loss[:, 1:])
    loss += prices.rate * verify
    if caps is not None:
        loss += (prices.paid(caps) @ prices.base)[:, None]
    best = int(loss.argmin())
    winner, tokens = divmod(best, len(verify))
    value = -float(loss.flat[best])
    if not tokens:
        return Filled(winner, np.zeros(slope.shape[2], dtype=np.int64), 0.0, value)
    last = -float(falling[winner, tokens - 1])
    return Filled(winner, _take(slope[:, winner], last, tokens), last, value)


def _slopes(prices: Prices, caps: IntArray | None) -> FloatArray:
    """`[K, candidates, requests]`: slopes of every request's envelope under each of the caps."""
    families, lengths, batch = prices.by_family.shape
    if caps is None:
        value = greatest(prices.by_family, axis=0)
    else:
        capped = np.minimum(caps.T[:, None], column(lengths))  # [families, lengths, candidates]
        value = greatest(prices.by_family[column(families)[:, :, None], capped], axis=0)
    return _envelope_slopes(value.reshape(lengths, -1)).reshape(lengths - 1, -1, batch)


def _envelope_slopes(value: FloatArray) -> FloatArray:
    """Slopes `[K, rows]` of the least concave majorant of `value[n, row]` over n.

    slope[n] = min over m <= n of max over k >= m of (value[k] - value[m - 1]) / (k - m + 1)
    """
    start, end, inverse, first = _chords(len(value))
    if value.shape[1] < NARROW:
        chord = (value.take(end, axis=0) - value.take(start, axis=0)) * inverse
        return running(np.minimum, np.maximum.reduceat(chord, first, axis=0))
    slope: FloatArray = value[1:] - value[:-1]
    bent = np.flatnonzero(np.logical_or.reduce(slope[1:] > slope[:-1], axis=0))
    if len(bent):
        rows = value[:, bent]
        chord = (rows.take(end, axis=0) - rows.take(start, axis=0)) * inverse
        ahead = np.empty((len(first), len(bent)))
        for m, (low, high) in enumerate(zip(first, [*first[1:], len(start)], strict=True)):
            greatest(chord[low:high], axis=0, out=ahead[m])
        slope[:, bent] = running(np.minimum, ahead)
    return slope


@cache
def _chords(lengths: int) -> tuple[IntArray, IntArray, FloatArray, list[int]]:
    """All pairs start < end of lengths, sorted; 1 / distance `[pairs, 1]`; where starts begin."""
    start, end = np.triu_indices(lengths, 1)
    first: list[int] = np.searchsorted(start, np.arange(lengths - 1)).tolist()
    return start, end, 1.0 / (end - start)[:, None], first


def _take(slope: FloatArray, last: float, tokens: int) -> IntArray:
    """Lengths `[requests]` that take the `tokens` largest slopes, the least of which is `last`.

    Among equal slopes the first requests win, so that the answer does not depend on a sort.
    """
    length: IntArray = total(slope >= last, axis=0)
    while (surplus := int(total(length)) - tokens) > 0:
        ending = slope[np.maximum(length - 1, 0), counting(len(length))]
        equal = np.flatnonzero((ending == last) & (length > 0))
        length[equal[-surplus:]] -= 1
    return length
