"""Prices of a forward, from coefficients and tables: loops, compiled.

Knows nothing of how those were learnt; the formula is described in `forward`.
"""

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.estimators.staircase import interpolated

__all__ = [
    "KNEES",
    "PRICING",
    "PRIOR_ALONE",
    "Pricing",
    "featured",
    "padded",
    "priced",
    "read_off",
    "tabled",
]

PRICING = "UniTuple(float64[::1], 4), UniTuple(float64, 2), float64[::1]"
Pricing = tuple[
    tuple[FloatArray, FloatArray, FloatArray, FloatArray], tuple[float, float], FloatArray
]

KNEES: FloatArray = np.exp2(np.arange(4.0, 11.0))
"""Tokens beyond each of which one more may cost more, `[knees]`: where arithmetic comes to outweigh memory."""
_STRAIGHT = 8  # features before those of the knees

PRIOR_ALONE: FloatArray = np.array([1.0] + [0.0] * (_STRAIGHT - 1 + len(KNEES)))
"""Coefficients with which a forward takes what the prior says. Do not write."""


@compiled("float64[::1](float64[::1], float64[::1])", is_inlined=True)
def padded(tokens: FloatArray, edges: FloatArray) -> FloatArray:
    """The sizes that `tokens` are padded to."""
    padded = tokens.copy()
    places = np.searchsorted(edges, tokens)
    for i in range(len(tokens)):
        if places[i] < len(edges):
            padded[i] = edges[places[i]]
    return padded


@compiled("float64[::1](UniTuple(float64[::1], 3), float64, int64, float64)", is_inlined=True)
def read_off(
    tables: tuple[FloatArray, FloatArray, FloatArray],
    first_tokens: float,
    most_more: int,
    beside: float,
) -> FloatArray:
    """Seconds at every count from `first_tokens` on, and `beside`; of grid, seconds and edges."""
    grid, seconds, edges = tables
    tokens = np.arange(first_tokens, first_tokens + most_more + 0.5)
    return interpolated(padded(tokens, edges), grid, seconds) + beside


@compiled("float64[::1](UniTuple(float64[::1], 4), float64, UniTuple(float64, 4))", is_inlined=True)
def featured(
    tables: tuple[FloatArray, FloatArray, FloatArray, FloatArray],
    share: float,
    load: tuple[float, float, float, float],  # tokens, KV tokens, requests, the longest draft
) -> FloatArray:
    """Prior, 1, T, V, B, T V / B, L V, -[T = 1], T beyond each knee; `tables`: the grid, the prior at two KV
    counts, edges.
    """
    grid, low, high, edges = tables
    num_tokens, kv_tokens, num_requests, longest = load
    tokens = padded(np.full(1, num_tokens), edges)
    prior = interpolated(tokens, grid, low + share * (high - low))[0]
    features = np.zeros(_STRAIGHT + len(KNEES))
    features[0], features[1], features[2] = prior, 1.0, tokens[0]
    features[3], features[4] = kv_tokens, num_requests
    features[5] = tokens[0] * kv_tokens / max(num_requests, 1.0)
    features[6] = longest * kv_tokens
    features[7] = -1.0 if tokens[0] <= 1.0 else 0.0
    for k in range(len(KNEES)):
        features[_STRAIGHT + k] = max(tokens[0] - KNEES[k], 0.0)
    return features


@compiled(f"float64[::1]({PRICING}, UniTuple(float64, 2))", is_inlined=True)
def priced(
    tables: tuple[FloatArray, FloatArray, FloatArray, FloatArray],
    weights: tuple[float, float],
    coefficients: FloatArray,
    load: tuple[float, float],  # KV tokens, requests
) -> FloatArray:
    """Seconds on the token grid; positive and non-decreasing. All arrays are `[grid]`.

    `tables` are the grid, the prior at two KV counts and the stairs; `weights` that of the second
    prior and that of the stairs.
    """
    grid, low_prior, high_prior, correction = tables
    (share, scale), (kv_tokens, num_requests) = weights, load
    c = coefficients
    fixed = c[1] + c[3] * kv_tokens + c[4] * num_requests
    per_token = c[2] + c[5] * kv_tokens / max(num_requests, 1.0)
    seconds, knee = np.empty(len(grid)), 0
    for i in range(len(grid)):
        while knee < len(KNEES) and grid[i] > KNEES[knee]:
            per_token += c[_STRAIGHT + knee]
            fixed -= c[_STRAIGHT + knee] * KNEES[knee]
            knee += 1
        prior = low_prior[i] + share * (high_prior[i] - low_prior[i])
        seconds[i] = fixed + per_token * grid[i] + c[0] * prior + scale * correction[i]
        if grid[i] <= 1.0:
            seconds[i] -= c[7]
    least = 0.01 * abs(seconds[len(grid) // 2]) + 1e-9
    for i in range(len(grid)):
        least = max(least, seconds[i])
        seconds[i] = least
    return seconds


@compiled(
    f"UniTuple(float64[::1], 2)({PRICING}, UniTuple(float64, 2), "
    "Tuple((float64[::1], float64, int64, float64)))",
    is_inlined=True,
)
def tabled(
    tables: tuple[FloatArray, FloatArray, FloatArray, FloatArray],
    weights: tuple[float, float],
    coefficients: FloatArray,
    load: tuple[float, float],
    asked: tuple[FloatArray, float, int, float],  # edges, and the rest of what `read_off` takes
) -> tuple[FloatArray, FloatArray]:
    """What `read_off` and `priced` give, in one call."""
    seconds = priced(tables, weights, coefficients, load)
    edges, first_tokens, most_more, beside = asked
    return read_off((tables[0], seconds, edges), first_tokens, most_more, beside), seconds
