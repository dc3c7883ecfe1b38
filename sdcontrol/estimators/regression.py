"""Time as a non-negative combination of features, learnt online from noisy stopwatches.

Knows nothing of what the features mean. Recursive weighted least squares in information form:

    L <- f L + (1 - f) L0 + w x x',   h <- f h + (1 - f) L0 m0 + w x y,   coefficients = L^-1 h >= 0

so that directions that are not excited leak back to the prior instead of blowing up. Errors are
relative (w = 1 / prediction^2). A lone outlier counts for little; several in a row on the same side
are a change of speed and rescale everything.
"""

import math
from collections import deque
from statistics import median

import numpy as np

from sdcontrol.core import FloatArray

__all__ = ["OnlineRegression"]

_FORGET = 0.985  # of the past, per step
_RELATIVE_NOISE = 0.1  # of one measurement
_OUTLIER = 0.35  # log-ratio beyond which a measurement is not noise
_CHANGE_STEPS = 4  # outliers in a row on one side that make a change of speed
_WARM_UP_STEPS = 5  # measurements whose median sets the first scale
_MOST_LOG_RATIO = 30.0


class OnlineRegression:
    """`seconds = scale * sum(relative_i * feature_i / unit_i)`, with all coefficients at least 0.

    `units` are the features at a point of reference, where `prior`, the first guess of the relative
    coefficients, sums to 1; `spread` is its standard deviation. All are `[features]`. The scale, the
    seconds at the point of reference, is settled by the first measurements.
    """

    def __init__(self, units: FloatArray, prior: FloatArray, spread: FloatArray) -> None:
        self.units: FloatArray = np.where(units > 0.0, units, 1.0)
        self._prior_precision: FloatArray = np.diag(1.0 / spread**2)
        self._prior_target: FloatArray = self._prior_precision @ prior
        self._precision: FloatArray = self._prior_precision.copy()
        self._target: FloatArray = self._prior_target.copy()
        self._relative: FloatArray = prior.copy()
        self._recent: deque[float] = deque(maxlen=_CHANGE_STEPS)
        self._first: list[float] = []
        self.scale = 1.0
        self.num_measured = 0

    @property
    def coefficients(self) -> FloatArray:
        """Seconds per unit of each raw feature, `[features]`."""
        return self.scale * self._relative / self.units

    def predict(self, features: FloatArray) -> float:
        """Seconds for these raw features, `[features]`."""
        return float(self.coefficients @ features)

    def update(self, features: FloatArray, seconds: float) -> bool:
        """Learn one measurement; whether it completed a change of speed. Nonsense is left out."""
        normal = features / self.units
        relative = float(self._relative @ normal)
        if not (math.isfinite(seconds) and seconds > 0.0 and relative > 0.0):
            return False
        ratio = math.log(seconds) - math.log(self.scale) - math.log(relative)
        ratio = min(max(ratio, -_MOST_LOG_RATIO), _MOST_LOG_RATIO)
        self.num_measured += 1
        is_warming_up = self.num_measured <= _WARM_UP_STEPS
        changed = self._rescale(ratio)
        self._absorb(normal, seconds / self.scale, relative)
        return changed and not is_warming_up

    def _rescale(self, ratio: float) -> bool:
        """Set the scale while warming up, or after outliers in a row on one side."""
        if self.num_measured <= _WARM_UP_STEPS:
            self._first.append(ratio + math.log(self.scale))
            self.scale = math.exp(median(self._first))
            return True
        self._recent.append(ratio)
        same_side = all(r > _OUTLIER for r in self._recent) or all(
            r < -_OUTLIER for r in self._recent
        )
        if len(self._recent) < _CHANGE_STEPS or not same_side:
            return False
        self.scale *= math.exp(median(self._recent))
        self._recent.clear()
        return True

    def _absorb(self, features: FloatArray, target: float, predicted: float) -> None:
        """One step of least squares, in units of the scale."""
        deviation = abs(math.log(target / predicted))
        weight = min(1.0, (_OUTLIER / deviation) ** 4 if deviation > _OUTLIER else 1.0)
        weight /= (_RELATIVE_NOISE * max(predicted, target)) ** 2
        leak = 1.0 - _FORGET
        self._precision = _FORGET * self._precision + leak * self._prior_precision
        self._precision += np.outer(weight * features, features)
        self._target = _FORGET * self._target + leak * self._prior_target
        self._target += (weight * target) * features
        self._relative = _non_negative_solution(self._precision, self._target)


def _non_negative_solution(precision: FloatArray, target: FloatArray) -> FloatArray:
    """argmin of the quadratic with all coefficients at least 0 (drop the negative, solve again)."""
    solution: FloatArray = np.linalg.solve(precision, target).astype(np.float64, copy=False)
    active = solution > 0.0
    while not active.all():
        solution = np.zeros_like(target)
        if not active.any():
            break
        kept = np.flatnonzero(active)
        solution[kept] = np.linalg.solve(precision[np.ix_(kept, kept)], target[kept])
        if (solution[kept] > 0.0).all():
            break
        active &= solution > 0.0
    return solution
