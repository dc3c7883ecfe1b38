"""What an acceptance model is told of each draft position: the belief, the request and the batch.

Knows nothing of outcomes or weights. The numbers are made where corrections are computed.
"""

import numpy as np

from sdcontrol.columns import NO_MATCH, columns_of
from sdcontrol.core import BatchView, FloatArray
from sdcontrol.estimators.correction import NUM_FEATURES, ODDS, beside_of, tell

__all__ = ["NUM_FEATURES", "ODDS", "features", "hazards_of"]


def hazards_of(survival: FloatArray) -> FloatArray:
    """P(position j is accepted | those before it are), `[requests, K]`, inside (0, 1)."""
    before = np.hstack([np.ones((len(survival), 1)), survival[:, :-1]])
    return np.clip(survival / np.maximum(before, 1e-9), 0.01, 0.99)


def features(view: BatchView, arm: str, hazards: FloatArray) -> FloatArray:
    """`[requests, K, features]`.

    The request's recent hazards, which the belief carries: here, at the first position, and the
    entropy of the outcome; where in the draft; the request; its hint; and the step's intensity:
    requests, KV tokens and prompt tokens that it computes with.
    """
    columns, requests = columns_of(view), len(view.requests)
    match, confidence = np.full(requests, NO_MATCH), np.full(requests, np.nan)
    if arm in columns.arms:
        row = columns.arms.index(arm)
        match, confidence = columns.match_tokens[row], columns.confidence[row]
    said = columns.context_tokens, match, confidence
    table: FloatArray = tell(np.ascontiguousarray(hazards, np.float64), said, beside_of(view))
    return table
