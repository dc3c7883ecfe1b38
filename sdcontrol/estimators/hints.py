"""What a hint says before drafting, as a bucket: nothing, a match length, or a confidence.

Knows nothing of outcomes: the acceptance of each bucket is learnt elsewhere, from the prior here.
"""

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import FloatArray, Hint

__all__ = ["NUM_BUCKETS", "prior_rates", "read_hints"]

# bucket 0: nothing is known; then one bucket per match length; then one per confidence
_MATCH_UP_TO = (1, 2, 3, 5, 8, 13, 23)
_MATCH_PRIORS = (0.3, 0.4, 0.5, 0.6, 0.68, 0.74, 0.8, 0.85)
_CONFIDENCE_BUCKETS = 8
NUM_BUCKETS = 1 + len(_MATCH_PRIORS) + _CONFIDENCE_BUCKETS
_NO_LIMIT = 1 << 30


def read_hints(hints: Iterable[Hint | None]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Bucket and most draft tokens per request, both `[requests]`."""
    buckets, limits = [], []
    for hint in hints:
        buckets.append(0 if hint is None else bucket_of(hint))
        limit = None if hint is None else hint.max_draft_tokens
        limits.append(_NO_LIMIT if limit is None else limit)
    return np.array(buckets, dtype=np.intp), np.array(limits, dtype=np.intp)


def bucket_of(hint: Hint) -> int:
    """The bucket of one hint; a match length goes before a confidence."""
    if hint.match_tokens is not None:
        return 1 + bisect_left(_MATCH_UP_TO, hint.match_tokens)
    if hint.confidence is not None and 0.0 <= hint.confidence <= 1.0:
        step = min(int(hint.confidence * _CONFIDENCE_BUCKETS), _CONFIDENCE_BUCKETS - 1)
        return 1 + len(_MATCH_PRIORS) + step
    return 0


def prior_rates(acceptance: float) -> FloatArray:
    """Acceptance per token before anything was observed, `[NUM_BUCKETS]`."""
    centres = (np.arange(_CONFIDENCE_BUCKETS) + 0.5) / _CONFIDENCE_BUCKETS
    return np.concatenate([[acceptance], _MATCH_PRIORS, centres])
