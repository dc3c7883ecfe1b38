"""The best lengths under caps on the rounds of each family, over every total of tokens.

Loops over arrays, compiled. Knows nothing of rounds' prices, nor of where caps come from.
"""

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.policies.problem import IntArray

__all__ = ["NEVER", "fill"]

NEVER = -1e30  # tokens, for what is not allowed
_BUCKETS = 512


@compiled(
    "Tuple((int64, float64[::1], int64[::1], int64[::1], int64[::1]))"
    "(float64[:,:,::1], int64[::1], int64)"
)
def _envelopes(
    worth: FloatArray, caps: IntArray, room: int
) -> tuple[int, FloatArray, IntArray, IntArray, IntArray]:
    """The falling slopes of every request's concave envelope.

    Their number; slope, request, length before and length after of each.
    """
    families, requests, lengths = worth.shape
    size = requests * (lengths - 1)
    slopes, who = np.empty(size), np.empty(size, dtype=np.int64)
    start, end = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
    value, hull = np.zeros(lengths), np.zeros(lengths, dtype=np.int64)
    count = 0
    for r in range(requests):
        top, value[1:] = 0, NEVER
        for f in range(families):
            for n in range(1, caps[f] + 1):
                value[n] = max(value[n], worth[f, r, n])
        for n in range(1, min(lengths, room + 1)):
            if value[n] <= value[hull[top]]:
                continue
            while top > 0:
                last, before = hull[top], hull[top - 1]
                rise = (value[last] - value[before]) * (n - last)
                if rise > (value[n] - value[last]) * (last - before):
                    break
                top -= 1
            top += 1
            hull[top] = n
        for i in range(1, top + 1):
            start[count], end[count], who[count] = hull[i - 1], hull[i], r
            slopes[count] = (value[hull[i]] - value[hull[i - 1]]) / (hull[i] - hull[i - 1])
            count += 1
    return count, slopes, who, start, end


@compiled("int64[::1](float64[::1], int64)")
def _steepest_first(slopes: FloatArray, count: int) -> IntArray:
    """An order of the first `count` slopes, to a part of the steepest; stable."""
    buckets = min(4 * count, _BUCKETS)
    steepest = 0.0
    for i in range(count):
        steepest = max(steepest, slopes[i])
    first = np.zeros(buckets + 2, dtype=np.int64)
    bucket, order = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    for i in range(count):
        bucket[i] = int((1.0 - slopes[i] / steepest) * buckets)
        first[bucket[i] + 1] += 1
    for b in range(1, buckets + 2):
        first[b] += first[b - 1]
    for i in range(count):
        order[first[bucket[i]]] = i
        first[bucket[i]] += 1
    return order


@compiled("UniTuple(float64, 2)(float64[:,:,::1], float64[::1], int64[::1], int64[::1])")
def fill(
    worth: FloatArray, verify: FloatArray, caps: IntArray, length: IntArray
) -> tuple[float, float]:
    """Set the best lengths under `caps`, over every total of tokens.

    What they are worth, bases of rounds left out; and the price of a token there.
    """
    requests = len(length)
    count, slopes, who, start, end = _envelopes(worth, caps, len(verify) - 1)
    order = _steepest_first(slopes, count)
    length[:] = 0
    tokens, value, best, taken, most = 0, 0.0, 0.0, 0, 0
    for i in range(count):
        s = order[i]
        width = end[s] - start[s]
        if start[s] != length[who[s]] or tokens + width >= len(verify):
            continue
        tokens += width
        value += slopes[s] * width
        length[who[s]] = end[s]
        if value - (verify[tokens] - verify[0]) > best:
            best, taken, most = value - (verify[tokens] - verify[0]), i + 1, tokens
    for i in range(count - 1, taken - 1, -1):
        s = order[i]
        if length[who[s]] == end[s]:
            length[who[s]] = start[s]
    low = slopes[order[taken]] if taken < count else 0.0
    high = slopes[order[taken - 1]] if taken > 0 else np.inf
    left, right = max(most - requests, 0), min(most + requests, len(verify) - 1)
    price = (verify[right] - verify[left]) / (right - left)
    return best, min(max(price, low), high)
