"""A running correction of step time per number of tokens: what a straight line cannot say.

Knows nothing of where its residuals come from. Neighbouring token counts share evidence through a
narrow kernel; where nothing was measured there is no correction.
"""

from bisect import bisect_left

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray

__all__ = ["Staircase", "interpolated", "token_grid"]

_SHRINK_STEPS = 2.0  # measurements that "no correction" is worth
_MEMORY_STEPS = 50.0  # measurements after which a stair forgets
_FADE = 0.997  # of every stair's evidence, per measurement anywhere: none is believed for ever
_KERNEL_OCTAVES = 0.12
_LAST_EXACT = 64


def token_grid(most: int = 32768) -> FloatArray:
    """Every count to 64, then steps of 6 %, `[grid]`."""
    counts = [float(count) for count in range(1, _LAST_EXACT + 1)]
    while counts[-1] < most:
        counts.append(float(round(counts[-1] * 1.06)))
    return np.array(counts)


@compiled("float64[::1](float64[::1], float64[::1], float64[::1])")
def interpolated(tokens: FloatArray, grid: FloatArray, values: FloatArray) -> FloatArray:
    """Non-decreasing `values` on `grid` at `tokens`, `[tokens]`; quickest where those are sorted.

    Below the grid its first value, beyond it on along its last segment.
    """
    result = np.empty(len(tokens))
    last, low = len(grid) - 2, 0
    for i in range(len(tokens)):
        at = max(tokens[i], grid[0])
        while low < last and grid[low + 1] <= at:
            low += 1
        while low > 0 and grid[low] > at:
            low -= 1
        slope = (values[low + 1] - values[low]) / (grid[low + 1] - grid[low])
        result[i] = values[low] + slope * (at - grid[low])
        if at <= grid[low + 1]:  # never above the next value, by rounding
            result[i] = min(result[i], values[low + 1])
    return result


class Staircase:
    """Corrections on a grid of token counts, `[grid]`."""

    def __init__(self, grid: FloatArray) -> None:
        self._stairs: list[float] = grid.tolist()
        octaves = np.log2(grid)
        distance = (octaves[:, None] - octaves[None, :]) / _KERNEL_OCTAVES
        self._kernel: FloatArray = np.exp(-0.5 * distance**2)
        self._weight: FloatArray = np.zeros(len(grid))  # smoothed measurements
        self._total: FloatArray = np.zeros(len(grid))  # smoothed residuals
        self.correction: FloatArray = np.zeros(len(grid))

    def update(self, num_tokens: float, residual: float) -> None:
        """Learn one residual."""
        index = min(bisect_left(self._stairs, num_tokens), len(self._stairs) - 1)
        _climb(self._kernel[index], residual, self._weight, self._total, self.correction)

    def forget(self) -> None:
        """Start over."""
        self._weight[:] = self._total[:] = self.correction[:] = 0.0


@compiled("void(float64[::1], float64, float64[::1], float64[::1], float64[::1])")
def _climb(
    kernel: FloatArray,
    residual: float,
    weight: FloatArray,
    total: FloatArray,
    correction: FloatArray,
) -> None:
    """Learn a residual where `kernel` says; changes the last three, all `[grid]`, in place."""
    for i in range(len(kernel)):
        fade = _FADE - kernel[i] / _MEMORY_STEPS
        weight[i] = weight[i] * fade + kernel[i]
        total[i] = total[i] * fade + kernel[i] * residual
        correction[i] = total[i] / (weight[i] + _SHRINK_STEPS)
