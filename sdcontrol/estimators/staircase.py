"""A running correction of step time per number of tokens: what a straight line cannot say.

Knows nothing of where its residuals come from. Neighbouring token counts share evidence through a
narrow kernel; where nothing was measured there is no correction.
"""

import numpy as np

from sdcontrol.core import FloatArray

__all__ = ["Staircase", "token_grid"]

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


class Staircase:
    """Corrections on a grid of token counts, `[grid]`."""

    def __init__(self, grid: FloatArray) -> None:
        self._grid = grid
        octaves = np.log2(grid)
        distance = (octaves[:, None] - octaves[None, :]) / _KERNEL_OCTAVES
        self._kernel: FloatArray = np.exp(-0.5 * distance**2)
        self._weight: FloatArray = np.zeros(len(grid))  # smoothed measurements
        self._total: FloatArray = np.zeros(len(grid))  # smoothed residuals
        self.correction: FloatArray = np.zeros(len(grid))

    def update(self, num_tokens: float, residual: float) -> None:
        """Learn one residual."""
        index = min(int(np.searchsorted(self._grid, num_tokens)), len(self._grid) - 1)
        row = self._kernel[index]
        fade = _FADE - row / _MEMORY_STEPS
        self._weight = self._weight * fade + row
        self._total = self._total * fade + row * residual
        self.correction = self._total / (self._weight + _SHRINK_STEPS)

    def forget(self) -> None:
        """Start over."""
        self._weight[:] = 0.0
        self._total[:] = 0.0
        self.correction = np.zeros(len(self._grid))
