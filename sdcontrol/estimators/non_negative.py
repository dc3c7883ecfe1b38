"""The least-squares solution that has no negative coefficient: loops, compiled.

Knows nothing of time, features or what is learnt.
"""

import math

import numpy as np
from numpy.typing import NDArray

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray

__all__ = ["non_negative_solution"]

_MOST_SWAPS = 4  # of active sets, before starting over from the full one
_LEAST_PIVOT = 1e-12  # of the diagonal: what rounding leaves of a direction that another repeats


@compiled("float64[:, ::1](boolean[::1], float64[:, ::1])")
def _root(active: NDArray[np.bool_], precision: FloatArray) -> FloatArray:
    """The Cholesky factor of `precision`, with 1 in the place of what is not active."""
    root = np.zeros(precision.shape)
    for i in range(len(root)):
        for j in range(i + 1):
            rest = precision[i, j] if active[i] and active[j] else 1.0 * (i == j)
            least = _LEAST_PIVOT * rest
            for k in range(j):
                rest -= root[i, k] * root[j, k]
            root[i, j] = math.sqrt(max(rest, least)) if i == j else rest / root[j, j]
    return root


@compiled("float64[::1](boolean[::1], float64[:, ::1], float64[::1])", is_inlined=True)
def _solved_on(active: NDArray[np.bool_], precision: FloatArray, target: FloatArray) -> FloatArray:
    """The unconstrained argmin with all but the active coefficients held at 0."""
    root = _root(active, precision)
    solution = np.zeros(len(target))
    for i in range(len(target)):
        rest = target[i] if active[i] else 0.0
        for k in range(i):
            rest -= root[i, k] * solution[k]
        solution[i] = rest / root[i, i]
    for i in range(len(target) - 1, -1, -1):
        rest = solution[i]
        for k in range(i + 1, len(target)):
            rest -= root[k, i] * solution[k]
        solution[i] = rest / root[i, i]
    return solution


@compiled("float64[::1](float64[:, ::1], float64[::1], float64[::1])")
def non_negative_solution(
    precision: FloatArray, target: FloatArray, last: FloatArray
) -> FloatArray:
    """argmin of x' P x / 2 - t' x over x >= 0, by active sets, starting from that of `last`."""
    active = last > 0.0
    for _ in range(_MOST_SWAPS):
        solution = _solved_on(active, precision, target)
        is_settled = True
        for i in range(len(target)):
            pull = 0.0
            for j in range(len(target)):
                pull += precision[i, j] * solution[j]
            leaves = solution[i] < 0.0
            enters = not active[i] and pull < target[i] * (1.0 - 1e-9)
            if leaves or enters:
                active[i], is_settled = enters, False
        if is_settled:
            return solution
    active[:] = True
    solution = _solved_on(active, precision, target)
    while (solution < 0.0).any():
        active &= solution > 0.0
        solution = _solved_on(active, precision, target)
    return solution
