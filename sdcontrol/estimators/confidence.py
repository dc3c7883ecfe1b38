"""What a drafter's own confidence is worth: from confidence to probability of acceptance.

Knows nothing of requests or plans. A drafter's confidence in a token is given that the tokens before
it are accepted, so calibration is fitted on tokens whose predecessors were accepted.

The confidences of a batch are ragged: request r has `values[starts[r] : starts[r + 1]]`.
"""

from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from sdcontrol.compiled import compiled
from sdcontrol.core import Confidence, FloatArray

__all__ = ["GIVEN", "ConfidenceCalibration", "Given", "calibrated", "condition", "flattened"]

IntArray = NDArray[np.int64]

_BINS = 16
_CENTRES: FloatArray = (np.arange(_BINS) + 0.5) / _BINS
_PRIOR_TOKENS = 4.0  # tokens in each bin that the uncalibrated confidence is worth
_MEMORY_TOKENS = 2000.0  # tokens after which a bin forgets
_KNOWN_TOKENS = 8.0  # verified tokens of an arm, at which its confidence is half trusted
_TELLING_VARIANCE = 0.0025  # of calibrated confidences, at which they are half trusted

Given = tuple[IntArray, tuple[FloatArray, IntArray], tuple[FloatArray, FloatArray]]
"""The arm that each request drafts with, by row, or a negative number, `[requests]`; its tokens'
confidences, see `flattened`; curves and trust of all arms."""
GIVEN = (
    "Tuple((int64[::1], Tuple((float64[::1], int64[::1])), Tuple((float64[:,::1], float64[::1]))))"
)


class ConfidenceCalibration:
    """Non-decreasing maps from confidence to acceptance, one per drafter arm, learnt online.

    Bins of equal width, each shrunk to its own centre, made non-decreasing by pooling adjacent
    violators, read with linear interpolation. All arrays are `[arms, bins]`, but for `trust`, `[arms]`:
    how far an arm's confidence says anything. It is 0 until tokens were verified, whatever their confidence
    was: a model that is seldom sure, and right all the same, would never be verified else. And it stays
    near 0 where all tokens are as probable, whatever their confidence: what is known of the request
    says more then.
    """

    def __init__(self, num_arms: int = 0) -> None:
        shape = 0, _BINS
        self.tested: FloatArray = np.zeros(shape)
        self.accepted: FloatArray = np.zeros(shape)
        self.curve: FloatArray = np.zeros(shape)
        self.trust: FloatArray = np.zeros(0)
        self._seen: FloatArray = np.zeros(0)  # tokens
        self.add_arms(num_arms)

    def add_arms(self, num_arms: int) -> None:
        """Room for `num_arms` arms in all."""
        blank = np.full((max(num_arms - len(self.curve), 0), _BINS), _PRIOR_TOKENS)
        tables = self.tested, self.accepted, self.curve, self.trust, self._seen
        nothing = np.zeros(len(blank))
        rows = blank, blank * _CENTRES, blank * 0.0 + _CENTRES, nothing, nothing
        grown = [np.concatenate(pair) for pair in zip(tables, rows, strict=True)]
        # No call stands between these, and only after one are signals looked for.
        self.tested, self.accepted, self.curve, self.trust, self._seen = grown

    def update(
        self,
        outcomes: tuple[IntArray, IntArray, IntArray],
        confidence: tuple[FloatArray, IntArray],
        is_tree: NDArray[np.bool_],
    ) -> None:
        """Learn from the tokens that verification reached; one whose confidence is nonsense is not.

        `outcomes` are arm, proposed and accepted tokens, `[requests]`. A negative arm is left out,
        and so are those that draft trees, by `is_tree`, `[arms]`.
        """
        bins = self.tested, self.accepted, self.curve
        _calibrate(outcomes, confidence, bins, (self._seen, self.trust), is_tree)


def flattened(confidence: Confidence) -> tuple[FloatArray, IntArray]:
    """Values, and where each request's start, `[requests + 1]`."""
    starts = np.array([*accumulate(map(len, confidence), initial=0)], np.int64)
    return np.array([*chain.from_iterable(confidence)], np.float64), starts


@compiled("float64(float64, float64[::1])")
def calibrated(confidence: float, curve: FloatArray) -> float:
    """Probability that a token is accepted if its predecessors are; confidence in [0, 1]."""
    position = min(max(confidence * _BINS - 0.5, 0.0), _BINS - 1.0)
    below = min(int(position), _BINS - 2)
    return float(curve[below] + (position - below) * (curve[below + 1] - curve[below]))


@compiled("void(float64[::1], float64[::1], float64[::1])")
def _pool(tested: FloatArray, accepted: FloatArray, curve: FloatArray) -> None:
    """Set `curve` to the non-decreasing one nearest to the rates by weighted squares, `[bins]`."""
    mean, weight, length = np.empty(_BINS), np.empty(_BINS), np.empty(_BINS, np.int64)
    blocks = 0
    for b in range(_BINS):
        fade = min(1.0, _MEMORY_TOKENS / tested[b])
        tested[b] *= fade
        accepted[b] *= fade
        mean[blocks], weight[blocks], length[blocks] = accepted[b] / tested[b], tested[b], 1
        while blocks > 0 and mean[blocks - 1] > mean[blocks]:
            both = weight[blocks - 1] + weight[blocks]
            total = mean[blocks - 1] * weight[blocks - 1] + mean[blocks] * weight[blocks]
            blocks -= 1
            mean[blocks], weight[blocks] = total / both, both
            length[blocks] += length[blocks + 1]
        blocks += 1
    end = 0
    for block in range(blocks):
        curve[end : end + length[block]] = mean[block]
        end += length[block]


@compiled("float64(float64[::1], float64[::1])")
def _told(tested: FloatArray, curve: FloatArray) -> float:
    """How far confidences tell tokens apart, in [0, 1]."""
    tokens = total = square = 0.0
    for b in range(_BINS):
        weight = max(tested[b] - _PRIOR_TOKENS, 0.0)
        tokens += weight
        total += weight * curve[b]
        square += weight * curve[b] ** 2
    if tokens == 0.0:
        return 0.0
    variance = max(square / tokens - (total / tokens) ** 2, 0.0)
    return variance / (variance + _TELLING_VARIANCE)


@compiled(
    "void(UniTuple(int64[::1], 3), Tuple((float64[::1], int64[::1])),"
    " UniTuple(float64[:, ::1], 3), UniTuple(float64[::1], 2), boolean[::1])"
)
def _calibrate(
    outcomes: tuple[IntArray, IntArray, IntArray],
    confidence: tuple[FloatArray, IntArray],
    bins: tuple[FloatArray, FloatArray, FloatArray],
    known: tuple[FloatArray, FloatArray],  # tokens seen, trust
    is_tree: NDArray[np.bool_],
) -> None:
    arms, proposed, num_accepted = outcomes
    values, starts = confidence
    tested, accepted, curve = bins
    seen, trust = known
    touched = np.zeros(len(curve), np.bool_)
    for r in range(min(len(arms), len(starts) - 1)):
        arm = arms[r]
        reached = min(num_accepted[r] + 1, proposed[r], starts[r + 1] - starts[r])
        for j in range(reached if arm >= 0 and not is_tree[arm] else 0):
            value = values[starts[r] + j]
            if 0.0 <= value <= 1.0:  # False for NaN
                index = min(int(value * _BINS), _BINS - 1)
                tested[arm, index] += 1.0
                if j < num_accepted[r]:
                    accepted[arm, index] += 1.0
                seen[arm] += 1.0
                touched[arm] = True
    for arm in range(len(curve)):
        if touched[arm]:
            _pool(tested[arm], accepted[arm], curve[arm])
            told = _told(tested[arm], curve[arm])
            trust[arm] = told * seen[arm] / (seen[arm] + _KNOWN_TOKENS)


@compiled(f"void(float64[:,:,::1], {GIVEN}, int64[::1], boolean[::1], float64[:,::1])")
def condition(
    survival: FloatArray,  # [arms, requests, K]
    given: Given,
    index: IntArray,  # [arms], among all arms
    is_tree: NDArray[np.bool_],
    coming: FloatArray,  # [arms, requests], the share of drafts that come, which survival is of
) -> None:
    """Take confidences into account, in place: known tokens take theirs, calibrated, as far as it is trusted.

    Others keep their hazards, and so do trees. A confidence that is not a finite number says nothing; one that is
    there says that the draft has come.
    """
    used, (values, starts), (curves, trusts) = given
    for r in range(min(len(used), survival.shape[1], len(starts) - 1)):
        a, length = used[r], starts[r + 1] - starts[r]
        if a < 0 or length == 0:
            continue
        for j in range(survival.shape[2]):
            survival[a, r, j] /= coming[a, r]
        if is_tree[index[a]]:
            continue
        curve, trust, running, before = curves[index[a]], trusts[index[a]], 1.0, 1.0
        for j in range(survival.shape[2]):
            hazard = survival[a, r, j] / before if before > 0.0 else survival[a, r, j]
            before = survival[a, r, j]
            value = values[starts[r] + j] if j < length else np.nan
            if np.isfinite(value):
                said = calibrated(min(max(value, 0.0), 1.0), curve)
                hazard += trust * (said - hazard)
            running *= hazard
            survival[a, r, j] = running
