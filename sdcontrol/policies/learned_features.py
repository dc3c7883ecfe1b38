"""What an acceptance model is told of each draft position: the belief, the request and the batch.

Knows nothing of outcomes or weights. Read from columns, a handful of array operations per arm.
"""

import numpy as np

from sdcontrol.columns import NO_MATCH, columns_of
from sdcontrol.core import BatchView, FloatArray

__all__ = ["features", "hazards_of"]


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
    facts = _facts(view, arm)
    table = np.empty((*hazards.shape, 6 + facts.shape[1]))
    position = np.arange(hazards.shape[1])
    odds = np.log(hazards / (1.0 - hazards))
    table[..., 0] = 1.0
    table[..., 1] = odds
    table[..., 2] = position == 0
    table[..., 3] = position / 8.0
    table[..., 4] = odds[:, :1]
    table[..., 5] = -hazards * np.log(hazards) - (1.0 - hazards) * np.log(1.0 - hazards)
    table[..., 6:] = facts[:, None]
    return table


def _facts(view: BatchView, arm: str) -> FloatArray:
    """Of every request, `[requests, facts]`."""
    columns, requests = columns_of(view), view.requests
    facts = np.zeros((len(requests), 8))
    facts[:, 0] = np.log1p(columns.context_tokens) / 10.0
    facts[:, 1] = np.log1p([request.generated_tokens for request in requests]) / 10.0
    facts[:, 2] = [request.temperature for request in requests]
    facts[:, 3] = np.log1p(len(requests)) / 5.0
    facts[:, 4] = np.log1p(columns.context_tokens.sum()) / 10.0
    facts[:, 5] = np.log1p(view.prefill_tokens) / 10.0
    if arm in columns.arms:
        row = columns.arms.index(arm)
        match, confidence = columns.match_tokens[row], columns.confidence[row]
        facts[:, 6] = np.where(match == NO_MATCH, 0.0, np.log1p(np.maximum(match, 0)) / 3.0)
        facts[:, 7] = np.where(np.isnan(confidence), 0.0, confidence - 0.5)
    return facts
