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
_MATCH_BUCKET = tuple(1 + bisect_left(_MATCH_UP_TO, length) for length in range(_LONG_MATCH + 1))


def read_hints(view: BatchView, arms: Sequence[str]) -> tuple[IntArray, IntArray]:
    """Bucket and most draft tokens of every hint, both `[arms, requests]`."""
    shape = len(arms), len(view.requests)
    buckets, limits = np.zeros(shape, dtype=np.intp), np.full(shape, NO_LIMIT)
    menus = [(row, request.hints) for row, request in enumerate(view.requests) if request.hints]
    for index, arm in enumerate(arms):
        found = [(row, hints[arm]) for row, hints in menus if arm in hints]
        if found:
            rows = [row for row, _ in found]
            buckets[index, rows] = [bucket_of(hint) for _, hint in found]
            most = [hint.max_draft_tokens for _, hint in found]
            limits[index, rows] = [NO_LIMIT if limit is None else limit for limit in most]
    return buckets, limits


def bucket_of(hint: Hint) -> int:
    """The bucket of one hint; a match length goes before a confidence."""
    length = hint.match_tokens
    if length is not None:
        return _MATCH_BUCKET[length if 0 <= length <= _LONG_MATCH else _LONG_MATCH]
    if hint.confidence is not None and 0.0 <= hint.confidence <= 1.0:
        step = min(int(hint.confidence * _CONFIDENCE_BUCKETS), _CONFIDENCE_BUCKETS - 1)
        return 1 + len(_MATCH_PRIORS) + step
    return 0


def prior_rates(acceptance: float) -> FloatArray:
    """Acceptance per token before anything was observed, `[NUM_BUCKETS]`."""
    centres = (np.arange(_CONFIDENCE_BUCKETS) + 0.5) / _CONFIDENCE_BUCKETS
    return np.concatenate([[acceptance], _MATCH_PRIORS, centres])
