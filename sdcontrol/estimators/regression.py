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

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.estimators.loads import is_plausible

__all__ = ["OnlineRegression"]

_FORGET = 0.985  # of the past, per step
_RELATIVE_NOISE = 0.1  # of one measurement
_OUTLIER = 0.35  # log-ratio beyond which a measurement is not noise
_CHANGE_STEPS = 4  # outliers in a row on one side that make a change of speed
_WARM_UP_STEPS = 5  # measurements whose median sets the first scale
_MOST_LOG_RATIO = 30.0
_MOST_SWAPS = 4  # of active sets, before starting over from the full one
_LEAST_PIVOT = 1e-12  # of the diagonal: what rounding leaves of a direction that another repeats


class OnlineRegression:
    """`seconds = scale * sum(relative_i * feature_i / unit_i)`, with all coefficients at least 0.

    `units` are the features at a point of reference, where `prior`, the first guess of the relative
    coefficients, sums to 1; `spread` is its standard deviation. All are `[features]`. `common`, too,
    is what one standard deviation moves, but all coefficients together. The scale, the seconds at the
    point of reference, is settled by the first measurements unless it is given.
    """

    def __init__(
        self,
        units: FloatArray,
        prior: FloatArray,
        spread: FloatArray,
        scale: float | None = None,
        *,
        common: FloatArray | None = None,
    ) -> None:
        self.units: FloatArray = np.where(units > 0.0, units, 1.0)
        together = 0.0 if common is None else np.outer(common, common)
        covariance: FloatArray = np.asarray(np.diag(spread**2) + together, np.float64)
        self._precision: FloatArray = np.asarray(np.linalg.inv(covariance), np.float64)
        self._target: FloatArray = self._precision @ prior
        self._prior = self._precision.copy(), self._target.copy()
        self._relative: FloatArray = prior.copy()
        self._recent: deque[float] = deque(maxlen=_CHANGE_STEPS)
        self._first: list[float] = []
        self._has_scale = scale is not None
        self.scale = 1.0 if scale is None else scale
        self.num_measured = 0
        self.coefficients: FloatArray = self.scale * self._relative / self.units
        """Seconds per unit of each raw feature, `[features]`. Do not write to it."""

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
        trust: float = 1.0,
    ) -> bool:
        """Learn one measurement; whether it completed a change of speed. Nonsense is left out.

        `expected` is the best prediction there was, by default `predict(features)`. Only where the
        load `is_familiar` can a surprise be an outlier or a change of speed; elsewhere it is news,
        to be trusted as far as `trust` says.
        """
        expected = self.predict(features) if expected is None else expected
        if not (is_plausible(seconds) and expected > 0.0):
            return False
        ratio = math.log(seconds) - math.log(expected)
        self.num_measured += 1
        changed = False
        if self.num_measured <= _WARM_UP_STEPS and not self._has_scale:
            self._settle_scale(features, seconds)
        else:
            changed = is_familiar and self._is_new_speed(ratio)
        distrusted = is_familiar and not changed and abs(ratio) > _OUTLIER
        _absorb(
            (self._precision, self._target, self._relative, self.coefficients),
            self._prior,
            (features, self.units),
            (seconds, self.scale, (_OUTLIER / ratio) ** 4 if distrusted else trust),
        )
        return changed

    def rescale(self, factor: float) -> None:
        """Take everything for that many times as long as before."""
        self.scale *= factor
        self.coefficients = self.scale * self._relative / self.units

    def _settle_scale(self, features: FloatArray, seconds: float) -> None:
        """The median of the first few, each against the prior's shape."""
        self._first.append(seconds / max(float(self._relative @ (features / self.units)), 1e-12))
        self.scale = median(self._first)

    def _is_new_speed(self, ratio: float) -> bool:
        """Rescale after outliers in a row on one side; whether that was so."""
        self._recent.append(min(max(ratio, -_MOST_LOG_RATIO), _MOST_LOG_RATIO))
        least, most = min(self._recent), max(self._recent)
        is_one_sided = least > _OUTLIER or most < -_OUTLIER
        if len(self._recent) < _CHANGE_STEPS or not is_one_sided:
            return False
        self.scale *= math.exp(median(self._recent))
        self._recent.clear()
        self.num_measured = _WARM_UP_STEPS + 1
        return True


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


@compiled("float64[::1](boolean[::1], float64[:, ::1], float64[::1])")
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
def _non_negative_solution(
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


@compiled(
    "void(Tuple((float64[:, ::1], float64[::1], float64[::1], float64[::1])),"
    " Tuple((float64[:, ::1], float64[::1])), UniTuple(float64[::1], 2), UniTuple(float64, 3))"
)
def _absorb(
    state: tuple[FloatArray, FloatArray, FloatArray, FloatArray],
    prior: tuple[FloatArray, FloatArray],  # precision, target
    load: tuple[FloatArray, FloatArray],  # features, units
    measured: tuple[float, float, float],  # seconds, the scale, how far to trust it
) -> None:
    """One step of least squares, in units of the scale.

    Changes `state` in place: precision, target, solution, solution in seconds per raw feature.
    """
    precision, target, relative, coefficients = state
    prior_precision, prior_target = prior
    features, units = load
    seconds, scale, trust = measured
    normal, relative_seconds, predicted = features / units, seconds / scale, 0.0
    for i in range(len(normal)):
        predicted += relative[i] * normal[i]
    weight = trust / (_RELATIVE_NOISE * max(predicted, relative_seconds)) ** 2
    for i in range(len(normal)):
        for j in range(len(normal)):
            leak = _FORGET * precision[i, j] + (1.0 - _FORGET) * prior_precision[i, j]
            precision[i, j] = leak + weight * normal[i] * normal[j]
        leak = _FORGET * target[i] + (1.0 - _FORGET) * prior_target[i]
        target[i] = leak + weight * relative_seconds * normal[i]
    relative[:] = _non_negative_solution(precision, target, relative)
    coefficients[:] = scale * relative / units
