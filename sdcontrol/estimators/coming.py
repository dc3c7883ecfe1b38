"""How often anything comes of a draft that is asked for, where no hint says so before: loops, compiled.

A look-up of one's own that finds nothing, a model that stops before its first token. That is a fact of its own:
it says nothing of the tokens that do come, and what does not come costs no verification. Counted per
(request, arm), and shrunk to the arm's share. Of drafters that always draft, or hint at what they have,
all comes, exactly. Knows nothing of tokens and their acceptance; arrays in, changed in place.
"""

import numpy as np
from numpy.typing import NDArray

from sdcontrol.columns import ARM, ASKED, DRAFTED
from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.estimators.evidence import OBSERVED, Observed
from sdcontrol.estimators.levels import DRAFTS, FILLED, REQUESTS, Requests

__all__ = ["FIRST_DRAFTS", "note_all", "share_of"]

IntArray = NDArray[np.int64]

FIRST_DRAFTS = 4.0  # of an arm, of which something is assumed to have come
_MEMORY_DRAFTS = 200.0  # of an arm
_ARM_DRAFTS = 6.0  # that the arm's share is worth beside a request's own drafts
_OWN_MEMORY_DRAFTS = 40.0
_LEAST_SHARE = 0.005
_FAIR_DRAFTS = 4.0  # of a request, after which one counts half in the arm's share


@compiled("float64(float64[::1], float64[::1])", is_inlined=True)
def share_of(state: FloatArray, arm: FloatArray) -> float:
    """Of the drafts that a request asks for, those of which something comes; `arm` are its arm's drafts, all and filled."""
    overall = arm[1] / arm[0]
    share = (state[FILLED] + _ARM_DRAFTS * overall) / (state[DRAFTS] + _ARM_DRAFTS)
    return max(float(share), _LEAST_SHARE)


@compiled("void(float64[::1], float64[::1], float64)", is_inlined=True)
def _note(state: FloatArray, arm: FloatArray, filled: float) -> None:
    """Count one draft."""
    weight = 1.0 / (1.0 + state[DRAFTS] / _FAIR_DRAFTS)
    fade = min(1.0, _MEMORY_DRAFTS / (arm[0] + weight))
    arm[0] = (arm[0] + weight) * fade
    arm[1] = (arm[1] + weight * filled) * fade
    fade = min(1.0, _OWN_MEMORY_DRAFTS / (state[DRAFTS] + 1.0))
    state[DRAFTS] = (state[DRAFTS] + 1.0) * fade
    state[FILLED] = (state[FILLED] + filled) * fade


@compiled(f"void({OBSERVED}, int64[:, ::1], {REQUESTS}, float64[:, ::1])", is_inlined=True)
def note_all(observed: Observed, limits: IntArray, requests: Requests, coming: FloatArray) -> None:
    """Count every draft that was asked for, within the `limits` that were hinted at, `[arms, requests]`."""
    (table, _, index), (slots, _, _, state, _) = observed, requests
    for r in range(table.shape[1]):
        used = table[ARM, r]
        if used < 0:
            continue
        most = min(table[ASKED, r], limits[used, r]) if used < len(limits) else 0
        if max(table[DRAFTED, r], most) > 0:
            arm = index[used]
            _note(state[slots[r], arm], coming[arm], 1.0 if table[DRAFTED, r] > 0 else 0.0)
