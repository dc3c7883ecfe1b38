"""What a hint says before drafting, as a bucket: nothing, a match length, or a confidence.

Knows nothing of outcomes: the acceptance of each bucket is learnt elsewhere, from the prior here.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import BatchView, FloatArray, Hint

__all__ = ["NO_LIMIT", "NUM_BUCKETS", "bucket_of", "prior_rates", "read_hints"]

IntArray = NDArray[np.intp]

NO_LIMIT = 1 << 30  # draft tokens, where a hint sets no limit

# bucket 0: nothing is known; then one bucket per match length; then one per confidence
_MATCH_UP_TO = (1, 2, 3, 5, 8, 13, 23)
_MATCH_PRIORS = (0.3, 0.4, 0.5, 0.6, 0.68, 0.74, 0.8, 0.85)
_CONFIDENCE_BUCKETS = 8
NUM_BUCKETS = 1 + len(_MATCH_PRIORS) + _CONFIDENCE_BUCKETS
_LONG_MATCH = _MATCH_UP_TO[-1] + 1
_MATCH_BUCKETS = np.array(
    [1 + bisect_left(_MATCH_UP_TO, length) for length in range(_LONG_MATCH + 1)], dtype=np.intp
)


def read_hints(view: BatchView, arms: Sequence[str]) -> tuple[IntArray, IntArray]:
    """Bucket and most draft tokens of every hint, both `[arms, requests]`."""
    shape = len(arms), len(view.requests)
    buckets, limits = np.zeros(shape, dtype=np.intp), np.full(shape, NO_LIMIT)
    menus = [request.hints for request in view.requests]
    hinted = set().union(*menus)
    for index, arm in enumerate(arms):
        if arm in hinted:
            _read_arm([menu.get(arm) for menu in menus], buckets[index], limits[index])
    return buckets, limits


def _read_arm(hints: Sequence[Hint | None], buckets: IntArray, limits: IntArray) -> None:
    """Fill in the buckets and limits of one arm, both `[requests]`."""
    rows = [row for row, hint in enumerate(hints) if hint is not None]
    found = [hint for hint in hints if hint is not None]
    most = (hint.max_draft_tokens for hint in found)
    limits[rows] = [NO_LIMIT if limit is None else limit for limit in most]
    lengths = [hint.match_tokens for hint in found]
    if None in lengths:
        buckets[rows] = [bucket_of(hint) for hint in found]
    else:
        known = np.array(lengths, dtype=np.intp)
        buckets[rows] = _MATCH_BUCKETS[np.minimum(np.maximum(known, 0), _LONG_MATCH)]


def bucket_of(hint: Hint) -> int:
    """The bucket of one hint; a match length goes before a confidence."""
    length = hint.match_tokens
    if length is not None:
        return 1 + bisect_left(_MATCH_UP_TO, length)
    if hint.confidence is not None and 0.0 <= hint.confidence <= 1.0:
        step = min(int(hint.confidence * _CONFIDENCE_BUCKETS), _CONFIDENCE_BUCKETS - 1)
        return 1 + len(_MATCH_PRIORS) + step
    return 0


def prior_rates(acceptance: float) -> FloatArray:
    """Acceptance per token before anything was observed, `[NUM_BUCKETS]`."""
    centres = (np.arange(_CONFIDENCE_BUCKETS) + 0.5) / _CONFIDENCE_BUCKETS
    return np.concatenate([[acceptance], _MATCH_PRIORS, centres])
