"""A running correction of step time per number of tokens: what a straight line cannot say.

Knows nothing of where its residuals come from. Neighbouring token counts share evidence through a
narrow kernel; where nothing was measured there is no correction.
"""

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray

__all__ = ["STAIRS", "Stairs", "climb", "interpolated", "new_stairs", "token_grid"]

Stairs = tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]
"""Token counts `[grid]`; how near they are to one another `[grid, grid]`; changed in place, `[grid]`: smoothed
measurements, smoothed residuals, and the correction that they make."""
STAIRS = "Tuple((float64[::1], float64[:,::1], float64[::1], float64[::1], float64[::1]))"

_SHRINK_STEPS = 4.0  # measurements that "no correction" is worth
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


@compiled("float64[::1](float64[::1], float64[::1], float64[::1])", is_inlined=True)
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


def new_stairs(grid: FloatArray) -> Stairs:
    """Corrections of nothing, on a grid of token counts."""
    octaves = np.log2(grid)
    distance = (octaves[:, None] - octaves[None, :]) / _KERNEL_OCTAVES
    kernel: FloatArray = np.exp(-0.5 * distance**2)
    return grid, kernel, np.zeros(len(grid)), np.zeros(len(grid)), np.zeros(len(grid))


@compiled(f"void({STAIRS}, int64, float64)", is_inlined=True)
def climb(stairs: Stairs, stair: int, residual: float) -> None:
    """Learn a residual at a stair and, as far as they are near, at its neighbours."""
    _, kernels, weight, total, correction = stairs
    kernel = kernels[stair]
    for i in range(len(kernel)):
        fade = _FADE - kernel[i] / _MEMORY_STEPS
        weight[i] = weight[i] * fade + kernel[i]
        total[i] = total[i] * fade + kernel[i] * residual
        correction[i] = total[i] / (weight[i] + _SHRINK_STEPS)
