"""Hazards corrected by a logistic regression on top of them: loops, compiled.

Knows nothing of where weights come from. What a regression is told of each draft position: the hazards,
where in the draft, the request and its hint, and the step's load.
"""

import numpy as np
from numpy.typing import NDArray

from sdcontrol.columns import NO_MATCH
from sdcontrol.compiled import compiled
from sdcontrol.core import BatchView, FloatArray

__all__ = [
    "CORRECTION",
    "NOTHING",
    "NUM_FEATURES",
    "ODDS",
    "Correction",
    "beside_of",
    "correct",
    "tell",
]

IntArray = NDArray[np.int64]

ODDS = 1  # which feature is the hazard's log odds
NUM_FEATURES = 14
_LEAST = 0.01  # hazard, and of its complement

Correction = tuple[FloatArray, FloatArray]
"""By arm, `[arms, 3, features]`: weights, and the bounds beyond which they say nothing (NaN: an arm
without weights); and `beside_of` the view."""
CORRECTION = "Tuple((float64[:,:,::1], float64[::1]))"

NOTHING: Correction = np.zeros((0, 3, NUM_FEATURES)), np.zeros(0)
"""Leaves everything as it is. Do not write."""


def beside_of(view: BatchView) -> FloatArray:
    """What columns leave out: tokens generated and temperature by request; prompt tokens of the step."""
    requests = view.requests
    values: list[float] = [request.generated_tokens for request in requests]
    values += [request.temperature for request in requests]
    values.append(view.prefill_tokens)
    return np.array(values, np.float64)


@compiled("float64[:,::1](int64[::1], float64[::1])")
def _facts(context: IntArray, beside: FloatArray) -> FloatArray:
    """What does not depend on the position, `[requests, 6]`."""
    requests = len(context)
    facts = np.empty((requests, 6))
    for r in range(requests):
        facts[r, 0] = np.log1p(float(context[r])) / 10.0
        facts[r, 1] = np.log1p(beside[r]) / 10.0
        facts[r, 2] = np.log1p(float(requests)) / 5.0
        facts[r, 3] = np.log1p(float(context.sum())) / 10.0
        facts[r, 4] = np.log1p(beside[2 * requests]) / 10.0
        facts[r, 5] = beside[requests + r]
    return facts


@compiled("void(float64[::1], float64[::1], int64, float64[::1], Tuple((int64, float64)))")
def _fill(
    told: FloatArray,
    hazards: FloatArray,
    position: int,
    facts: FloatArray,
    hint: tuple[int, float],  # match, or `NO_MATCH`; confidence, or NaN
) -> None:
    """Set what is told of one position, `[features]`, of a request's `hazards`, `[K]`."""
    hazard, (match, confidence) = hazards[position], hint
    told[0] = 1.0
    told[1] = np.log(hazard / (1.0 - hazard))
    told[2] = 1.0 if position == 0 else 0.0
    told[3] = position / 8.0
    told[4] = np.log(hazards[0] / (1.0 - hazards[0]))
    told[5] = -hazard * np.log(hazard) - (1.0 - hazard) * np.log(1.0 - hazard)
    told[6:12] = facts
    told[12] = np.log1p(float(match)) / 3.0 if match != NO_MATCH else 0.0
    told[13] = confidence - 0.5 if confidence == confidence else 0.0


@compiled(
    "float64[:,:,::1](float64[:,::1], Tuple((int64[::1], int64[::1], float64[::1])), float64[::1])"
)
def tell(
    hazards: FloatArray, said: tuple[IntArray, IntArray, FloatArray], beside: FloatArray
) -> FloatArray:
    """What is told of every position, `[requests, K, features]`; of context, match and confidence."""
    context, match, confidence = said
    facts = _facts(context, beside)
    table = np.empty((*hazards.shape, NUM_FEATURES))
    for r in range(hazards.shape[0]):
        for j in range(hazards.shape[1]):
            _fill(table[r, j], hazards[r], j, facts[r], (match[r], confidence[r]))
    return table


@compiled("void(float64[::1], float64[::1])")
def _hazards(survival: FloatArray, hazards: FloatArray) -> None:
    """Set P(position j is accepted | those before it are), inside (0, 1)."""
    before = 1.0
    for j in range(len(survival)):
        hazards[j] = min(max(survival[j] / max(before, 1e-9), _LEAST), 1.0 - _LEAST)
        before = survival[j]


@compiled(
    "void(float64[:,:,::1], Tuple((int64[::1], int64[:,::1], float64[:,::1])), " + CORRECTION + ")",
    is_inlined=True,
)
def correct(
    survival: FloatArray, said: tuple[IntArray, IntArray, FloatArray], correction: Correction
) -> None:
    """Correct `[arms, requests, K]` in place, position after position; what may not be used stays 0."""
    (context, match, confidence), (learned, beside) = said, correction
    if len(learned) == 0:
        return
    facts, depth = _facts(context, beside), survival.shape[2]
    hazards, told = np.empty(depth), np.empty(NUM_FEATURES)
    for a in range(len(learned)):
        weights, low, high = learned[a, 0], learned[a, 1], learned[a, 2]
        for r in range(len(context)):
            if weights[0] != weights[0]:
                continue
            rows, reached_here = survival[a, r], 1.0
            _hazards(rows, hazards)
            for j in range(depth):
                if rows[j] <= 0.0:
                    break
                _fill(told, hazards, j, facts[r], (match[a, r], confidence[a, r]))
                odds, is_known = 0.0, True
                for f in range(NUM_FEATURES):
                    odds += told[f] * weights[f]
                    is_known = is_known and low[f] <= told[f] <= high[f]
                hazard = 1.0 / (1.0 + np.exp(-odds)) if is_known else hazards[j]
                reached_here *= min(max(hazard, _LEAST), 1.0 - _LEAST)
                rows[j] = reached_here
