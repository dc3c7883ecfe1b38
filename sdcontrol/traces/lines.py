"""Straight lines of step times: non-negative, fitted on relative errors, held to a simple model.

Knows features and seconds; nothing of what they are features of.

A line has a coefficient per feature, all at least 0, so that more work never takes less time. Few
steps do not tell many coefficients apart. So a line of one to three is fitted first, the simple model, and
every coefficient is held to its part in that one as firmly as `_HOLD` steps would hold it: a prior
(ridge regression towards a mean), which long recordings outweigh.
"""

from collections.abc import Sequence

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.errors import TraceError

__all__ = ["Line"]

_HOLD = 0.1  # steps
_OUTLIER = 4.0  # times the predicted: an interruption, counted as the fit, not as the machine
_ROUNDS_OF_FIT = 3


class Line:
    """A non-negative combination of features, by weighted least squares on relative errors.

    `simple` gives the simple model's coefficients, each as the features that share it. Raises
    `TraceError` where no time can be meant.
    """

    def __init__(
        self,
        features: Sequence[Sequence[float]],
        seconds: Sequence[float],
        *,
        simple: Sequence[Sequence[int]] = ((0,),),
    ) -> None:
        x, y = np.asarray(features, dtype=float), np.asarray(seconds, dtype=float)
        usable = np.isfinite(y) & (y >= 0.0)
        if not usable.any():
            raise TraceError(f"none of {len(y)} step times is a time; record again")
        x, y = x[usable], y[usable]
        shared = np.zeros((x.shape[1], len(simple)))
        for number, places in enumerate(simple):
            shared[list(places), number] = 1.0
        prior = shared @ _fit(x @ shared, y)
        fitted = _fit(x, y, prior)
        total = float((x @ fitted).sum())  # interruptions shape nothing, but they are time spent
        self.coefficients: list[float] = (fitted * (y.sum() / total if total else 1.0)).tolist()

    def seconds(self, features: Sequence[float]) -> float:
        """What steps with these features take on average."""
        return sum([c * f for c, f in zip(self.coefficients, features, strict=True)])


def _fit(x: FloatArray, y: FloatArray, prior: FloatArray | None = None) -> FloatArray:
    """Coefficients `[features]`, weighted by what the fit before predicts, interruptions cut off."""
    scale = np.where(x.max(axis=0) > 0.0, x.max(axis=0), 1.0)
    predicted: FloatArray = np.full(len(y), max(float(np.median(y)), 1e-9))
    floor = 1e-3 * max(float(np.mean(y)), 1e-9)
    coefficients = np.zeros(x.shape[1])
    for _ in range(_ROUNDS_OF_FIT):
        weights = 1.0 / predicted
        rows = x / scale * weights[:, None]
        targets = np.minimum(y, _OUTLIER * predicted) * weights
        if prior is not None:
            firm = _HOLD**0.5 / max(float(np.mean(y)), 1e-9)
            rows = np.vstack([rows, firm * np.eye(len(scale))])
            targets = np.append(targets, firm * prior * scale)
        coefficients = _non_negative(rows, targets)
        predicted = np.maximum(x / scale @ coefficients, floor)
    return np.asarray(coefficients / scale)


def _non_negative(x: FloatArray, y: FloatArray) -> FloatArray:
    """Least squares with coefficients of at least 0 (Lawson and Hanson 1974, active sets)."""
    gram, moment = x.T @ x, x.T @ y
    solution = np.zeros(x.shape[1])
    active = np.zeros(x.shape[1], dtype=bool)
    tolerance = 1e-10 * max(float(np.abs(moment).max(initial=0.0)), 1e-300)
    for _ in range(4 * x.shape[1]):
        gradient = np.where(active, -np.inf, moment - gram @ solution)
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        active[best] = True
        while True:
            free = np.flatnonzero(active)
            trial = np.zeros(x.shape[1])
            trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], moment[free], rcond=None)[0]
            low = free[trial[free] <= 0.0]
            if not len(low):
                break
            steps = solution[low] / np.maximum(solution[low] - trial[low], 1e-300)
            solution += float(steps.min()) * (trial - solution)
            active &= solution > 1e-15 * max(float(solution.max(initial=0.0)), 1e-300)
            if not active.any():
                break
        solution = np.where(active, trial, 0.0)
    return solution
