"""Time as a non-negative combination of features, learnt online from noisy stopwatches.

Knows nothing of what the features mean. Recursive weighted least squares in information form:

    L <- f L + (1 - f) L0 + w x x',   h <- f h + (1 - f) L0 m0 + w x y,   coefficients = L^-1 h >= 0

so that directions that are not excited leak back to the prior instead of blowing up. Errors are
relative (w = 1 / time^2). A lone outlier counts for little; several in a row on the same side are a
change of speed and rescale everything.
"""

import math
from collections import deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import FloatArray
from sdcontrol.estimators.loads import is_plausible

__all__ = ["OnlineRegression"]

_FORGET = 0.985  # of the past, per step
_RELATIVE_NOISE = 0.1  # of one measurement
_OUTLIER = 0.35  # log-ratio beyond which a measurement is not noise
_CHANGE_STEPS = 4  # outliers in a row on one side that make a change of speed
_WARM_UP_STEPS = 5  # measurements whose median sets the first scale
_MOST_LOG_RATIO = 30.0
_SETTLED_STEPS = 40  # measurements before the coefficients are solved for less often
_SOLVE_EVERY = 4
_FADES = _FORGET ** np.arange(_SOLVE_EVERY - 1, -1, -1)  # of measurements that wait for a solution
_MOST_SWAPS = 4  # of active sets, before starting over from the full one


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
        self._waiting: list[tuple[FloatArray, float, float]] = []
        self.scale = 1.0
        self.num_measured = 0
        self._coefficients: FloatArray | None = None

    @property
    def coefficients(self) -> FloatArray:
        """Seconds per unit of each raw feature, `[features]`. Do not write to it."""
        if self._coefficients is None:
            self._coefficients = self.scale * self._relative / self.units
        return self._coefficients

    def predict(self, features: FloatArray) -> float:
        """Seconds for these raw features, `[features]`."""
        return float(self.coefficients @ features)

    def update(
        self,
        features: FloatArray,
        seconds: float,
        *,
        expected: float | None = None,
        is_familiar: bool = True,
    ) -> bool:
        """Learn one measurement; whether it completed a change of speed. Nonsense is left out.

        `expected` is the best prediction there was, by default `predict(features)`. Only where the
        load `is_familiar` can a surprise be an outlier or a change of speed; elsewhere it is news.
        """
        normal = features / self.units
        expected = self.predict(features) if expected is None else expected
        if not (is_plausible(seconds) and expected > 0.0):
            return False
        ratio = math.log(seconds) - math.log(expected)
        self.num_measured += 1
        if self.num_measured <= _WARM_UP_STEPS:
            self._settle_scale(normal, seconds)
            changed = False
        else:
            changed = is_familiar and self._is_new_speed(ratio)
        distrusted = is_familiar and not changed and abs(ratio) > _OUTLIER
        self._absorb(normal, seconds / self.scale, (_OUTLIER / ratio) ** 4 if distrusted else 1.0)
        return changed

    def _settle_scale(self, normal: FloatArray, seconds: float) -> None:
        """The median of the first few, each against the prior's shape."""
        self._first.append(seconds / max(float(self._relative @ normal), 1e-12))
        self.scale, self._coefficients = median(self._first), None

    def _is_new_speed(self, ratio: float) -> bool:
        """Rescale after outliers in a row on one side; whether that was so."""
        self._recent.append(min(max(ratio, -_MOST_LOG_RATIO), _MOST_LOG_RATIO))
        above = all(recent > _OUTLIER for recent in self._recent)
        below = all(recent < -_OUTLIER for recent in self._recent)
        if len(self._recent) < _CHANGE_STEPS or not (above or below):
            return False
        self.scale, self._coefficients = self.scale * math.exp(median(self._recent)), None
        self._recent.clear()
        self.num_measured = _WARM_UP_STEPS + 1
        return True

    def _absorb(self, normal: FloatArray, target: float, trust: float) -> None:
        """One step of least squares, in units of the scale; done with the next solution."""
        predicted = float(self._relative @ normal)
        weight = trust / (_RELATIVE_NOISE * max(predicted, target)) ** 2
        self._waiting.append((normal, target, weight))
        if self.num_measured <= _SETTLED_STEPS or self.num_measured % _SOLVE_EVERY == 0:
            self._solve()

    def _solve(self) -> None:
        """Absorb all that waits, each forgetting what was before it, and solve."""
        rows = np.array([normal for normal, _, _ in self._waiting])  # [steps, features]
        targets = np.array([target for _, target, _ in self._waiting])
        weights = np.array([weight for _, _, weight in self._waiting])
        steps = len(rows)
        weights *= _FADES[_SOLVE_EVERY - steps :]
        kept = _FORGET**steps
        weighted = weights[:, None] * rows
        self._precision = kept * self._precision + (1.0 - kept) * self._prior_precision
        self._precision += weighted.T @ rows
        self._target = kept * self._target + (1.0 - kept) * self._prior_target
        self._target += targets @ weighted
        self._waiting.clear()
        self._relative = _non_negative_solution(self._precision, self._target, self._relative)
        self._coefficients = None


def _non_negative_solution(
    precision: FloatArray, target: FloatArray, last: FloatArray
) -> FloatArray:
    """argmin of x' P x / 2 - t' x over x >= 0, by active sets, starting from that of `last`."""
    active = last > 0.0
    for _ in range(_MOST_SWAPS):
        solution = _solved_on(active, precision, target)
        leaves = solution < 0.0
        wants_in = (precision @ solution < target * (1.0 - 1e-9)) & ~active
        if not (leaves.any() or wants_in.any()):
            return solution
        active = (active & ~leaves) | wants_in
    active = np.ones(len(target), dtype=bool)
    solution = _solved_on(active, precision, target)
    while (solution < 0.0).any():
        active &= solution > 0.0
        solution = _solved_on(active, precision, target)
    return solution


def _solved_on(active: NDArray[np.bool_], precision: FloatArray, target: FloatArray) -> FloatArray:
    """The unconstrained argmin with all but the active coefficients held at 0."""
    if active.all():
        return np.linalg.solve(precision, target).astype(np.float64, copy=False)
    kept = np.flatnonzero(active)
    solution = np.zeros_like(target)
    solution[kept] = np.linalg.solve(precision[kept[:, None], kept], target[kept])
    return solution
