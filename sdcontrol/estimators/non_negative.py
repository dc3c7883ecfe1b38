"""The least-squares solution that has no negative coefficient: loops, compiled.

Knows nothing of time, features or what is learnt.
"""

import math

import numpy as np
from numpy.typing import NDArray

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray

__all__ = ["non_negative_solution"]

_MOST_SWAPS = 3  # in a row that leave as many misplaced, before one at a time
_MOST_ROUNDS = 100  # a bound that rounding alone could reach
_ROUNDING = 1e-9  # of a sum's terms, that it may be off by
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


@compiled(
    "boolean[::1](boolean[::1], float64[:, ::1], float64[::1], float64[::1])", is_inlined=True
)
def _misplaced(
    active: NDArray[np.bool_], precision: FloatArray, target: FloatArray, solution: FloatArray
) -> NDArray[np.bool_]:
    """Active coefficients that are negative, and others that the sum of squares pulls above 0."""
    misplaced = solution < 0.0
    for i in range(len(target)):
        if not active[i]:
            pull, noise = target[i], abs(target[i])
            for j in range(len(target)):
                term = precision[i, j] * solution[j]
                pull, noise = pull - term, noise + abs(term)
            misplaced[i] = pull > _ROUNDING * noise
    return misplaced


@compiled("float64[::1](float64[:, ::1], float64[::1], float64[::1])")
def non_negative_solution(
    precision: FloatArray, target: FloatArray, last: FloatArray
) -> FloatArray:
    """argmin of x' P x / 2 - t' x over x >= 0, by block principal pivoting (Portugal, Judice and Vicente 1994).

    Starts from the active set of `last`. All that are misplaced change sides; where that does not make them
    fewer, the last one alone does (Murty's rule, which ends).
    """
    active, fewest, swaps = last > 0.0, len(target) + 1, _MOST_SWAPS
    solution = _solved_on(active, precision, target)
    for _ in range(_MOST_ROUNDS):
        misplaced = _misplaced(active, precision, target, solution)
        num_misplaced = misplaced.sum()
        if num_misplaced == 0:
            break
        swaps = _MOST_SWAPS if num_misplaced < fewest else swaps - 1
        fewest = min(fewest, num_misplaced)
        for i in range(len(target) - 1, -1, -1):
            if misplaced[i]:
                active[i] = not active[i]
                if swaps <= 0:
                    break
        solution = _solved_on(active, precision, target)
    return np.maximum(solution, 0.0)
