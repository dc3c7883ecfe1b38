"""What measured forwards teach: a loop over steps, compiled.

Knows nothing of observations, nor of who asks for prices; the formula is described in `forward`.
"""

import math

import numpy as np
from numpy.typing import NDArray

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.estimators.pricing import featured
from sdcontrol.estimators.regression import FILTER, SCALE, Filter, absorb, predicted
from sdcontrol.estimators.staircase import STAIRS, Stairs, climb

__all__ = ["SEEN_SHAPE", "learn_steps"]

Prior = tuple[tuple[FloatArray, FloatArray, FloatArray, FloatArray], tuple[float, float]]
"""What `featured` takes; the KV tokens that the second and third table are for."""

_MOST_RESIDUAL = 0.5  # of the expected time, that one measurement may correct a stair by
_MOST_NEWS = 3.0  # the same, at a load that is new
_FAMILIAR_STEPS = 2  # measurements of a load before a surprise there is an outlier
SEEN_SHAPE = 80, 64  # tokens in quarters of an octave, KV tokens in halves


@compiled("boolean(int64[:,::1], float64, float64)", is_inlined=True)
def _is_familiar(seen: NDArray[np.int64], num_tokens: float, kv_tokens: float) -> bool:
    """Whether about this load was measured more than once before; counts it."""
    row = min(round(4.0 * math.log2(max(num_tokens, 1.0))), seen.shape[0] - 1)
    column = min(round(2.0 * math.log2(max(kv_tokens, 1.0))), seen.shape[1] - 1)
    seen[row, column] += 1
    return bool(seen[row, column] > _FAMILIAR_STEPS)


@compiled(
    f"int64({FILTER}, {STAIRS}, int64[:,::1], "
    "Tuple((UniTuple(float64[::1], 4), UniTuple(float64, 2))), float64[:,::1])"
)
def learn_steps(
    kept: Filter,
    stairs: Stairs,
    seen: NDArray[np.int64],  # how often each load was, `SEEN_SHAPE`
    prior: Prior,
    steps: FloatArray,  # [steps, 5]: tokens, KV tokens, requests, longest draft, seconds
) -> int:
    """Learn steps in order; how many completed a change of speed."""
    grid, _, _, _, correction = stairs
    changes, (tables, (low, high)) = 0, prior
    for s in range(len(steps)):
        num_tokens, kv_tokens, requests, longest, seconds = steps[s]
        share = (kv_tokens - low) / (high - low)
        features = featured(tables, share, (num_tokens, kv_tokens, requests, longest))
        stair = min(np.searchsorted(grid, features[2]), len(grid) - 1)
        fitted = predicted(kept, features)
        expected = max(fitted + kept[4][SCALE] * correction[stair], 0.01 * fitted)
        is_familiar = _is_familiar(seen, num_tokens, kv_tokens)
        if absorb(kept, features, (seconds, expected, 1.0), is_familiar):
            changes += 1
            for kept_of_stairs in stairs[2:]:
                kept_of_stairs[:] = 0.0
            continue
        fitted = predicted(kept, features)
        limit = fitted * (_MOST_RESIDUAL if is_familiar else _MOST_NEWS)
        climb(stairs, stair, min(max(seconds - fitted, -limit), limit) / kept[4][SCALE])
    return changes
