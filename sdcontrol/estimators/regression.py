"""Time as a non-negative combination of features, learnt online from noisy stopwatches.

Knows nothing of what the features mean. Recursive weighted least squares in information form, in which
all coefficients drift together as well, since a machine that others use is slower for a while:

    L <- L - s (L c)(L c)',   h <- h - s (c' h) L c,   s = q^2 / (1 + q^2 c' L c)
    L <- f L + (1 - f) L0 + w x x',   h <- f h + (1 - f) L0 m0 + w x y,   c = argmin over c >= 0

so that what steps of one moment differ by is told from what moments differ by, and directions that are not
excited leak back to the prior instead of blowing up. Errors are relative (w = 1 / time^2). A lone outlier
counts for little; several in a row on the same side are a change of speed and rescale everything.
"""

import math

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.estimators.loads import LONGEST_SECONDS, SHORTEST_SECONDS
from sdcontrol.estimators.non_negative import non_negative_solution

__all__ = ["FILTER", "SCALE", "Filter", "OnlineRegression", "absorb", "predicted"]

_FORGET = 0.995  # of the past, per measurement
_TOGETHER = 0.05  # of all coefficients, that they drift by from one measurement to the next
_RELATIVE_NOISE = 0.1  # of one measurement
_OUTLIER = 0.35  # log-ratio beyond which a measurement is not noise
_CHANGE_STEPS = 4  # outliers in a row on one side that make a change of speed
_WARM_UP_STEPS = 5  # measurements whose median sets the first scale
_MOST_LOG_RATIO = 30.0

# Places in a filter's memory.
SCALE = 0  # seconds that a relative coefficient of 1 stands for
_MEASURED = 1  # measurements
_HAS_SCALE = 2  # whether it was given
_RECENT = 3  # outliers in a row, with their sign
_SIDE = 4  # their log-ratios
_FIRST = _SIDE + _CHANGE_STEPS  # what the first measurements made of the scale
_MEMORY = _FIRST + _WARM_UP_STEPS

Filter = tuple[
    FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray
]
"""Changed in place: precision `[features, features]`, target, relative coefficients and those in seconds per
unit of each raw feature `[features]`, memory. Fixed: units `[features]`, the prior's precision and target."""
FILTER = (
    "Tuple((float64[:,::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1],"
    "float64[:,::1], float64[::1]))"
)


class OnlineRegression:
    """`seconds = scale * sum(relative_i * feature_i / unit_i)`, with all coefficients at least 0.

    `units` are the features at a point of reference, where what is positive of `prior`, the first guess of the
    relative coefficients, sums to 1; where that is negative, a coefficient is 0 until measurements outweigh it.
    `spread` is its standard deviation. All are `[features]`. `common`, too, is what one standard deviation
    moves, but all coefficients together. The scale, the seconds at the point of reference, is settled by the
    first measurements unless it is given.
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
        memory = np.zeros(_MEMORY)
        memory[SCALE] = 1.0 if scale is None else scale
        memory[_HAS_SCALE] = scale is not None
        relative = np.maximum(np.asarray(prior, np.float64), 0.0)
        self.coefficients: FloatArray = memory.item(SCALE) * relative / self.units
        """Seconds per unit of each raw feature, `[features]`. Do not write to it."""
        precision: FloatArray = np.asarray(np.linalg.inv(covariance), np.float64)
        target: FloatArray = precision @ prior
        self.filter: Filter = (
            precision,
            target,
            relative,
            self.coefficients,
            memory,
            self.units,
            precision.copy(),
            target.copy(),
        )
        """What `absorb` changes."""
        self._memory = memory

    @property
    def scale(self) -> float:
        """Seconds at the point of reference, by the prior."""
        return self._memory.item(SCALE)

    @property
    def num_measured(self) -> int:
        """Measurements that were learnt."""
        return int(self._memory[_MEASURED])

    def predict(self, features: FloatArray) -> float:
        """Seconds for these raw features, `[features]`."""
        return float(predicted(self.filter, features))

    def update(
        self,
        features: FloatArray,
        seconds: float,
        *,
        is_familiar: bool = True,
        trust: float = 1.0,
    ) -> bool:
        """Learn one measurement; whether it completed a change of speed. Nonsense is left out.

        Only where the load `is_familiar` can a surprise be an outlier or a change of speed; elsewhere it is
        news, to be trusted as far as `trust` says.
        """
        expected = self.predict(features)
        return bool(absorb(self.filter, features, (seconds, expected, trust), is_familiar))

    def rescale(self, factor: float) -> None:
        """Take everything for that many times as long as before."""
        _rescale(self.filter, factor)


@compiled(f"void({FILTER}, float64)")
def _rescale(kept: Filter, factor: float) -> None:
    _, _, relative, coefficients, memory, units, _, _ = kept
    memory[SCALE] *= factor
    coefficients[:] = memory[SCALE] * relative / units


@compiled(f"float64({FILTER}, float64[::1])", is_inlined=True)
def predicted(kept: Filter, features: FloatArray) -> float:
    """Seconds for raw features, `[features]`."""
    total = 0.0
    for i in range(len(features)):
        total += kept[3][i] * features[i]
    return total


@compiled("boolean(float64[::1], float64)", is_inlined=True)
def _is_new_speed(memory: FloatArray, ratio: float) -> bool:
    """Rescale after outliers in a row on one side; whether that was so."""
    if abs(ratio) <= _OUTLIER:
        memory[_RECENT] = 0.0
        return False
    side = 1.0 if ratio > 0.0 else -1.0
    before = abs(memory[_RECENT]) if memory[_RECENT] * side > 0.0 else 0.0
    memory[_SIDE + int(before)] = min(max(ratio, -_MOST_LOG_RATIO), _MOST_LOG_RATIO)
    memory[_RECENT] = side * (before + 1.0)
    if before + 1.0 < _CHANGE_STEPS:
        return False
    factor = math.exp(np.median(memory[_SIDE : _SIDE + _CHANGE_STEPS]))
    memory[SCALE] *= factor
    memory[_RECENT] = 0.0
    return True


@compiled("float64(float64[::1])")
def _first_scale(seconds: FloatArray) -> float:
    """Their median; of two in the middle that lie far apart the lower one, since only pauses are that long."""
    middle = np.median(seconds)
    low = np.sort(seconds)[(len(seconds) - 1) // 2]
    return float(low if middle > low * math.exp(_OUTLIER) else middle)


@compiled("void(float64[:,::1], float64[::1], float64[::1])", is_inlined=True)
def _let_drift(precision: FloatArray, target: FloatArray, relative: FloatArray) -> None:
    """All coefficients together become uncertain by a share of themselves; the mean stays."""
    size, along, towards = len(relative), np.zeros(len(relative)), 0.0
    for i in range(size):
        for j in range(size):
            along[i] += precision[i, j] * relative[j]
        towards += relative[i] * target[i]
    known = 0.0
    for i in range(size):
        known += relative[i] * along[i]
    share = _TOGETHER**2 / (1.0 + _TOGETHER**2 * known)
    for i in range(size):
        target[i] -= share * towards * along[i]
        for j in range(size):
            precision[i, j] -= share * along[i] * along[j]


@compiled(
    "void(UniTuple(float64[::1], 2), Tuple((float64[:,::1], float64[::1], float64[:,::1], float64[::1])), UniTuple(float64, 2))",
    is_inlined=True,
)
def _add(
    load: tuple[FloatArray, FloatArray],  # features in their units, relative coefficients
    sums: tuple[
        FloatArray, FloatArray, FloatArray, FloatArray
    ],  # precision and target; the prior's
    measured: tuple[float, float],  # seconds in units of the scale, weight
) -> None:
    """One step of least squares, in place: the normal equations, and the coefficients."""
    (normal, relative), (precision, target, prior_precision, prior_target) = load, sums
    seconds, weight = measured
    _let_drift(precision, target, relative)
    for i in range(len(normal)):
        for j in range(len(normal)):
            leak = _FORGET * precision[i, j] + (1.0 - _FORGET) * prior_precision[i, j]
            precision[i, j] = leak + weight * normal[i] * normal[j]
        leak = _FORGET * target[i] + (1.0 - _FORGET) * prior_target[i]
        target[i] = leak + weight * seconds * normal[i]
    relative[:] = non_negative_solution(precision, target, relative)


@compiled(f"void({FILTER})")
def _forget(kept: Filter) -> None:
    """Believe the prior, in units of the scale."""
    precision, target, relative, _, _, _, prior_precision, prior_target = kept
    precision[:], target[:] = prior_precision, prior_target
    relative[:] = non_negative_solution(precision, target, relative)


@compiled(f"void({FILTER}, float64[::1], float64)")
def _settle(kept: Filter, normal: FloatArray, seconds: float) -> None:
    """Let one of the first measurements, of features in their units, say what the scale is.

    Where that changes much, what was learnt before was told in other units: of a process that paused
    in its first step, say.
    """
    relative, memory = kept[2], kept[4]
    nth, scale = int(memory[_MEASURED]) - 1, memory[SCALE]
    if (relative * normal).sum() <= 0.0:
        _forget(kept)
    memory[_FIRST + nth] = seconds / max((relative * normal).sum(), 1e-12)
    memory[SCALE] = _first_scale(memory[_FIRST : _FIRST + nth + 1])
    if nth > 0 and abs(math.log(memory[SCALE] / scale)) > _OUTLIER:
        _forget(kept)


@compiled(f"boolean({FILTER}, float64[::1], UniTuple(float64, 3), boolean)", is_inlined=True)
def absorb(
    kept: Filter,
    features: FloatArray,
    measured: tuple[float, float, float],  # seconds, those expected, how far to trust it
    is_familiar: bool,
) -> bool:
    """Learn one measurement of `features` in place; see `OnlineRegression.update`."""
    precision, target, relative, coefficients, memory, units, prior_precision, prior_target = kept
    seconds, expected, trust = measured
    if not (SHORTEST_SECONDS < seconds < LONGEST_SECONDS and expected >= 0.0):
        return False
    normal = features / units
    is_familiar &= expected > 0.0  # of a load of which nothing was expected, all is news
    ratio = math.log(seconds / expected) if is_familiar else 0.0
    is_settled = memory[_MEASURED] >= _WARM_UP_STEPS or memory[_HAS_SCALE] > 0.0
    memory[_MEASURED] += 1.0
    if not is_settled:
        _settle(kept, normal, seconds)
    elif is_familiar and _is_new_speed(memory, ratio):
        memory[_MEASURED] = max(memory[_MEASURED], _WARM_UP_STEPS + 1.0)
        coefficients[:] = memory[SCALE] * relative / units
        return True
    before, relative_seconds = (relative * normal).sum(), seconds / memory[SCALE]
    if is_familiar and abs(ratio) > _OUTLIER:
        trust *= (_OUTLIER / ratio) ** 4
    weight = trust / (_RELATIVE_NOISE * max(before, relative_seconds)) ** 2
    sums = precision, target, prior_precision, prior_target
    _add((normal, relative), sums, (relative_seconds, weight))
    coefficients[:] = memory[SCALE] * relative / units
    return False
