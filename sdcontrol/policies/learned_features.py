"""What an acceptance model is told of each draft position: the belief, the request and the batch.

Knows nothing of outcomes or weights. Read from columns; the loop over positions is compiled.
"""

from typing import NamedTuple

import numpy as np

from sdcontrol.columns import NO_MATCH, columns_of
from sdcontrol.compiled import compiled
from sdcontrol.core import BatchView, FloatArray

__all__ = ["NUM_FEATURES", "ODDS", "Facts", "facts_of", "features", "fill", "hazards_of"]

ODDS = 1  # which feature is the online estimate
NUM_FEATURES = 14


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
    facts = facts_of(view)
    hints = facts.hints_of(arm)
    table = np.empty((*hazards.shape, NUM_FEATURES))
    for request in range(len(hazards)):
        for position in range(hazards.shape[1]):
            told = table[request, position]
            fill(told, hazards[request], position, facts.requests[request], hints[request])
    return table


class Facts(NamedTuple):
    """What does not depend on the position."""

    arms: tuple[str, ...]
    requests: FloatArray  # [requests, 6]
    hints: FloatArray  # [arms, requests, 2], of match and confidence; 0 where nothing is known

    def hints_of(self, arm: str) -> FloatArray:
        """`[requests, 2]`."""
        if arm in self.arms:
            return np.asarray(self.hints[self.arms.index(arm)])
        return np.zeros((len(self.requests), 2))


def facts_of(view: BatchView) -> Facts:
    """Of every request and arm."""
    columns, requests = columns_of(view), view.requests
    facts = np.zeros((len(requests), 6))
    facts[:, 0] = columns.context_tokens
    facts[:, 1] = [request.generated_tokens for request in requests]
    facts[:, 2] = len(requests)
    facts[:, 3] = columns.context_tokens.sum()
    facts[:, 4] = view.prefill_tokens
    facts = np.log1p(facts) / (10.0, 10.0, 5.0, 10.0, 10.0, 1.0)
    facts[:, 5] = [request.temperature for request in requests]
    match, confidence = columns.match_tokens, columns.confidence
    hints = np.empty((*match.shape, 2))
    hints[..., 0] = np.log1p(np.where(match == NO_MATCH, 0, match)) / 3.0
    hints[..., 1] = np.where(np.isnan(confidence), 0.0, confidence - 0.5)
    return Facts(columns.arms, facts, hints)


@compiled("void(float64[::1], float64[::1], int64, float64[::1], float64[::1])")
def fill(
    told: FloatArray, hazards: FloatArray, position: int, facts: FloatArray, hints: FloatArray
) -> None:
    """The features of one position, `[features]`, of a request's `hazards`, `[K]`."""
    hazard = hazards[position]
    told[0] = 1.0
    told[1] = np.log(hazard / (1.0 - hazard))
    told[2] = 1.0 if position == 0 else 0.0
    told[3] = position / 8.0
    told[4] = np.log(hazards[0] / (1.0 - hazards[0]))
    told[5] = -hazard * np.log(hazard) - (1.0 - hazard) * np.log(1.0 - hazard)
    told[6:12] = facts
    told[12:] = hints
