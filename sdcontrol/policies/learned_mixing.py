"""Between an online price and a learned one: loops over arrays, compiled.

The learned one may part from the online one by a factor of 4 at most; how much it weighs is given. Knows nothing of
machines, models or views.
"""

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.estimators.pricing import PRICING, PRIOR_ALONE, Pricing, priced
from sdcontrol.policies.learned_cost import ramps_of

__all__ = ["as_they_are", "mean", "means", "mixed_lines", "on_grid"]

_MOST_RATIO = 4.0  # of the online price, and its inverse
_USUAL_CATCH_UP = 64.0  # tokens, at which the prices of a catch-up are averaged


def as_they_are(grid: FloatArray, seconds: FloatArray) -> Pricing:
    """What is priced as `seconds` on the grid."""
    return (grid, seconds, seconds, np.zeros(len(grid))), (0.0, 0.0), PRIOR_ALONE


@compiled("float64(float64, float64, float64)")
def mean(online: float, learned: float, weight: float) -> float:
    """The geometric mean of `online` and the bounded `learned`, which has this `weight` of 1."""
    if not online > 0.0:
        return online
    bounded = min(max(learned, online / _MOST_RATIO), online * _MOST_RATIO)
    return float(online * (bounded / online) ** weight)


@compiled("float64[::1](float64[::1], float64[::1], UniTuple(float64, 2))")
def means(online: FloatArray, learned: FloatArray, today: tuple[float, float]) -> FloatArray:
    """Of `online` and `ratio * learned`; `today` is the ratio, and the weight."""
    (ratio, weight), means = today, np.empty(len(online))
    for i in range(len(online)):
        means[i] = mean(online[i], ratio * learned[i], weight)
    return means


@compiled(
    f"float64[::1]({PRICING}, Tuple((float64, int64)), "
    "Tuple((float64[::1], float64[::1], UniTuple(float64, 2))))"
)
def on_grid(
    tables: tuple[FloatArray, FloatArray, FloatArray, FloatArray],
    weights: tuple[float, float],
    coefficients: FloatArray,
    load: tuple[float, int],  # KV tokens, requests
    learned: tuple[FloatArray, FloatArray, tuple[float, float]],  # knots, coefficients, today
) -> FloatArray:
    """Seconds of a forward on the token grid, `[grid]`."""
    (kv_tokens, requests), (knots, c, today), grid = load, learned, tables[0]
    online = priced(tables, weights, coefficients, (kv_tokens, float(requests)))
    seconds = ramps_of(grid, knots, c[4:])
    fixed = c[0] + c[1] * kv_tokens + c[2] * requests
    per_token = c[3] * kv_tokens / max(requests, 1)
    for i in range(len(grid)):
        seconds[i] += fixed + per_token * grid[i]
    return means(online, seconds, today)


@compiled("void(float64[::1], float64[::1], float64[::1], float64)")
def _mix_line(line: FloatArray, learned: FloatArray, load: FloatArray, weight: float) -> None:
    """Turn a line into one between both, which is their geometric mean at `load`."""
    online = other = 0.0
    for i in range(len(line)):
        online += line[i] * load[i]
        other += learned[i] * load[i]
    both = mean(online, other, weight)
    if not (both > 0.0 and other > 0.0):
        return
    for i in range(len(line)):
        line[i] = both * ((1.0 - weight) * line[i] / online + weight * learned[i] / other)


@compiled("float64[:,::1](float64[:,::1], float64[:,::1], Tuple((float64, int64)), float64)")
def mixed_lines(
    online: FloatArray, learned: FloatArray, load: tuple[float, int], weight: float
) -> FloatArray:
    """Between both, `[families, 5]`; those of families that were not learnt stay."""
    kv_tokens, requests = load
    lines = online.copy()
    of_round = np.array([1.0, float(requests), kv_tokens])
    of_catch_up = np.array([1.0, _USUAL_CATCH_UP])
    for f in range(len(lines)):
        if learned[f, 0] == learned[f, 0]:
            _mix_line(lines[f, :3], learned[f, :3], of_round, weight)
            _mix_line(lines[f, 3:], learned[f, 3:], of_catch_up, weight)
    return lines
