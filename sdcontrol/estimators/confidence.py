"""What a drafter's own confidence is worth: from confidence to probability of acceptance.

Knows nothing of requests, positions or plans. A drafter's confidence in a token is given that the
tokens before it are accepted, so calibration is fitted on tokens whose predecessors were accepted.
"""

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import FloatArray

__all__ = ["ConfidenceCalibration"]

_BINS = 16
_PRIOR_TOKENS = 4.0  # tokens in each bin that the uncalibrated confidence is worth
_MOST_WAITING = 8  # steps that are counted together, unless the curve is asked for
_MEMORY_TOKENS = 2000.0  # tokens after which a bin forgets


class ConfidenceCalibration:
    """A non-decreasing map from confidence to acceptance for one drafter arm, learnt online.

    Bins of equal width, each shrunk to its own centre, made non-decreasing by pooling adjacent
    violators, read with linear interpolation.
    """

    def __init__(self) -> None:
        self._centres: FloatArray = (np.arange(_BINS) + 0.5) / _BINS
        self._tested: FloatArray = np.full(_BINS, _PRIOR_TOKENS)
        self._accepted: FloatArray = _PRIOR_TOKENS * self._centres
        self._curve: FloatArray | None = self._centres.copy()
        self._waiting: list[tuple[FloatArray, NDArray[np.bool_]]] = []

    def update(self, confidence: FloatArray, was_accepted: NDArray[np.bool_]) -> None:
        """Learn from tokens whose predecessors were accepted: both `[tokens]`, confidence finite."""
        self._waiting.append((confidence, was_accepted))
        if len(self._waiting) >= _MOST_WAITING:
            self._absorb()

    def _absorb(self) -> None:
        """Count what waits."""
        confidence = np.concatenate([values for values, _ in self._waiting])
        was_accepted = np.concatenate([outcomes for _, outcomes in self._waiting])
        self._waiting.clear()
        index = np.minimum((confidence * _BINS).astype(np.intp), _BINS - 1)
        self._tested += np.bincount(index, minlength=_BINS)
        self._accepted += np.bincount(index, weights=was_accepted, minlength=_BINS)
        fade = np.minimum(1.0, _MEMORY_TOKENS / self._tested)
        self._tested *= fade
        self._accepted *= fade
        self._curve = None

    def acceptance(self, confidence: FloatArray) -> FloatArray:
        """Probability that a token is accepted if its predecessors are; same shape, NaN for NaN."""
        if self._waiting:
            self._absorb()
        if self._curve is None:
            self._curve = _non_decreasing(self._accepted / self._tested, self._tested)
        return np.interp(confidence, self._centres, self._curve)


def _non_decreasing(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The non-decreasing sequence nearest to `values` by weighted squares (pool violators)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            previous, more, longer = blocks.pop()
            mean = (mean * total + previous * more) / (total + more)
            total, length = total + more, length + longer
        blocks.append((mean, total, length))
    return np.repeat([block[0] for block in blocks], [block[2] for block in blocks])
