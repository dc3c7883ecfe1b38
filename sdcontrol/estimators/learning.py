"""What outcomes teach: the deviation of the request, its own counts, and the arm's average.

Knows nothing of where outcomes come from; arrays in, changed in place. The model is described in
`acceptance`.
"""

import math

import numpy as np
from numpy.typing import NDArray

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.estimators.averages import shrink
from sdcontrol.estimators.deviations import (
    ACCEPTED,
    GIVEN,
    MEAN,
    MOST_VARIANCE,
    ODDS_RATIO,
    TESTED,
    TREND,
    VARIANCE,
)

__all__ = ["learn"]

IntArray = NDArray[np.int64]

_FAIR_SHARE_STEPS = 24.0  # drafts after which a request counts half in the arm average
_SHARE_RETURNS = 0.005  # of what a request gave, per draft
_ODD_DEVIATION = 2.0  # log-odds at which a request counts half again
_WALK_VARIANCE = 0.002  # of the deviation's walk, per update
_MOST_DEVIATION = 5.0
_HINTED_TRUST = 0.25  # of an outcome that was hinted at: the hint has said most of it
_OWN_MEMORY_TOKENS = 80.0
_VARIANCE_RATE = 0.03  # of what is believed of a population, per outcome
_LEAST_VARIANCE = 0.1
_TREND_RATE = 0.2
_DRIFT_SCALE = (2.0 - _TREND_RATE) / _TREND_RATE  # makes trend^2 chi-squared(1) without drift


@compiled("float64(float64[::1], float64[::1], float64[:, ::1], float64, float64)")
def _track(
    state: FloatArray, odds: FloatArray, outcome: FloatArray, trust: float, most: float
) -> float:
    """One step of a deviation's Kalman filter; how strongly it drifts.

    `state` is that of a (request, arm), `odds` the arm's, `[K]`, and `outcome` is `[2, K]`, which
    counts `trust` times. Its variance is `most` at first.
    """
    error, information = 0.0, 1e-9
    for j in range(outcome.shape[1]):
        tested = outcome[TESTED, j]
        if tested > 0.0:
            own_odds = odds[j] * state[ODDS_RATIO]
            rate = own_odds / (1.0 + own_odds)
            error += trust * (outcome[ACCEPTED, j] - tested * rate)
            information += trust * tested * rate * (1.0 - rate)
    surprise = error / math.sqrt(information * (1.0 + information * min(state[VARIANCE], most)))
    trend = state[TREND] + _TREND_RATE * (surprise - state[TREND])
    drift = max(_DRIFT_SCALE * trend**2 - 1.5, 0.0)
    variance = min(state[VARIANCE] + _WALK_VARIANCE * (1.0 + 10.0 * drift), most)
    variance /= 1.0 + information * variance
    mean = (1.0 - _WALK_VARIANCE) * state[MEAN] + variance * error
    mean = min(max(mean, -_MOST_DEVIATION), _MOST_DEVIATION)
    state[MEAN], state[VARIANCE], state[TREND] = mean, variance, trend
    state[ODDS_RATIO] = math.exp(mean)
    return float(drift)


@compiled("float64(float64, float64[::1])")
def _spread(variance: float, state: FloatArray) -> float:
    """The variance of requests around the average, after one of them: a step of EM, online."""
    seen = state[MEAN] ** 2 + state[VARIANCE]
    variance += _VARIANCE_RATE * (seen - variance)
    return min(max(variance, _LEAST_VARIANCE), MOST_VARIANCE)


@compiled("void(float64[:, ::1], float64[:, ::1], float64, float64)")
def _count_own(counts: FloatArray, outcome: FloatArray, weight: float, drift: float) -> None:
    """Add to the counts of a (request, arm), `[2, K]`; the more it drifts, the shorter they last."""
    memory = _OWN_MEMORY_TOKENS / (1.0 + 2.0 * drift)
    for j in range(outcome.shape[1]):
        tested = counts[TESTED, j] + weight * outcome[TESTED, j]
        accepted = counts[ACCEPTED, j] + weight * outcome[ACCEPTED, j]
        fade = min(1.0, memory / max(tested, 1.0))
        counts[TESTED, j], counts[ACCEPTED, j] = tested * fade, accepted * fade


@compiled("float64(float64[::1])")
def _weight(state: FloatArray) -> float:
    """Of an outcome in the arm's average: less the more its request gave, and the odder it is."""
    before = state[GIVEN] * (1.0 - _SHARE_RETURNS)
    state[GIVEN] = before + 1.0
    oddness = 1.0 + (state[MEAN] / _ODD_DEVIATION) ** 2
    return 1.0 / float(oddness * (1.0 + before / _FAIR_SHARE_STEPS))


@compiled(
    "void(Tuple((int64[:, ::1], float64[:, :, :, ::1])),"
    " Tuple((int64[::1], float64[:, :, ::1], float64[:, :, :, ::1], float64[::1])),"
    " Tuple((int64[::1], int64[:, ::1])), UniTuple(float64[:, :, ::1], 4))"
)
def learn(
    evidence: tuple[IntArray, FloatArray],
    requests: tuple[IntArray, FloatArray, FloatArray, FloatArray],
    hints: tuple[IntArray, IntArray],
    averages: tuple[FloatArray, FloatArray, FloatArray, FloatArray],
) -> None:
    """Learn every outcome of `Evidence`; averages change only when all are learnt.

    `requests` are slots, `[requests]`, and `Deviations.state`, `.counts` and `.variances`. `hints`
    are the row of each arm, negative where nothing is hinted, in the buckets that follow,
    `[rows, requests]`.
    """
    arms, outcomes = evidence
    slots, state, counts, variances = requests
    column_of, buckets = hints
    tested, accepted, prior, odds = averages
    is_stale = np.zeros(tested.shape[:2], np.bool_)
    for part in range(arms.shape[0]):
        for r in range(arms.shape[1]):
            arm, outcome = arms[part, r], outcomes[part, r]
            if arm < 0:
                continue
            bucket = buckets[column_of[arm], r] if column_of[arm] >= 0 else 0
            cell = state[slots[r], arm]
            is_hinted = bucket != 0
            trust = _HINTED_TRUST if is_hinted else 1.0
            drift = _track(cell, odds[arm, bucket], outcome, trust, variances[arm])
            variances[arm] = _spread(variances[arm], cell)
            plain = 0.0 if is_hinted else 1.0  # hints mix different situations
            _count_own(counts[slots[r], arm], outcome, plain, drift)
            weight = _weight(cell)
            for j in range(outcome.shape[1]):
                tested[arm, bucket, j] += weight * outcome[TESTED, j]
                accepted[arm, bucket, j] += weight * outcome[ACCEPTED, j]
            is_stale[arm, bucket] = True
    for a in range(len(is_stale)):
        for b in range(tested.shape[1]):
            if is_stale[a, b]:
                shrink(tested[a, b], accepted[a, b], prior[a, b], odds[a, b])
