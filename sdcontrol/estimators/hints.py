"""What a hint says before drafting, as a bucket: nothing, a match length, or a confidence.

Knows nothing of outcomes: the acceptance of each bucket is learnt elsewhere, from the prior here.
"""

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray

__all__ = ["NUM_BUCKETS", "bucket_of", "bucket_of_match", "buckets_of", "prior_rates"]

IntArray = NDArray[np.int64]

# bucket 0: nothing is known; then one bucket per match length; then one per confidence
_MATCH_UP_TO = (1, 2, 3, 5, 8, 13, 23)
# What chains over recorded edits, maths and agent turns came to at their first token (docs/log.md).
_MATCH_PRIORS = (0.35, 0.53, 0.6, 0.69, 0.78, 0.84, 0.9, 0.94)
_CONFIDENCE_BUCKETS = 8
_FIRST_CONFIDENCE = 1 + len(_MATCH_PRIORS)
NUM_BUCKETS = _FIRST_CONFIDENCE + _CONFIDENCE_BUCKETS
_LONG_MATCH = _MATCH_UP_TO[-1] + 1
_MATCH_TABLE = [1 + bisect_left(_MATCH_UP_TO, length) for length in range(_LONG_MATCH + 1)]
_MATCH_BUCKETS = np.array(_MATCH_TABLE, dtype=np.int64)


def bucket_of_match(match_tokens: int | None) -> int | None:
    """The bucket of a match; None where a hint does not speak of matches."""
    if match_tokens is None or match_tokens < 0:
        return None
    return _MATCH_TABLE[min(match_tokens, _LONG_MATCH)]


@compiled("int64(int64, float64)", is_inlined=True)
def bucket_of(match_tokens: int, confidence: float) -> int:
    """The bucket of one hint of `Columns`; a match goes before a confidence."""
    if match_tokens >= 0:
        return int(_MATCH_BUCKETS[min(match_tokens, _LONG_MATCH)])
    if 0.0 <= confidence <= 1.0:  # False for NaN
        return _FIRST_CONFIDENCE + min(
            int(confidence * _CONFIDENCE_BUCKETS), _CONFIDENCE_BUCKETS - 1
        )
    return 0


@compiled("int64[:, ::1](int64[:, ::1], float64[:, ::1])", is_inlined=True)
def buckets_of(match_tokens: IntArray, confidence: FloatArray) -> IntArray:
    """The bucket of every hint, `[arms, requests]`."""
    buckets = np.zeros(match_tokens.shape, np.int64)
    for a in range(match_tokens.shape[0]):
        for r in range(match_tokens.shape[1]):
            buckets[a, r] = bucket_of(match_tokens[a, r], confidence[a, r])
    return buckets


def prior_rates(acceptance: float, depth: int) -> FloatArray:
    """P(token j is accepted | the ones before it are) before anything was observed.

    `[NUM_BUCKETS, depth]`. Every accepted token lengthens a match by one: after j of them a match of
    m tokens is as good as one of m + j.
    """
    rates = np.empty((NUM_BUCKETS, depth))
    rates[0] = acceptance
    for bucket, least in enumerate((1, *(longest + 1 for longest in _MATCH_UP_TO[:-1])), start=1):
        lengths = np.minimum(least + np.arange(depth), _LONG_MATCH)
        rates[bucket] = np.array(_MATCH_PRIORS)[_MATCH_BUCKETS[lengths] - 1]
    rates[_FIRST_CONFIDENCE - 1] = _MATCH_PRIORS[-1]
    rates[_FIRST_CONFIDENCE:] = ((np.arange(_CONFIDENCE_BUCKETS) + 0.5) / _CONFIDENCE_BUCKETS)[
        :, None
    ]
    return rates
