"""What a step costs where nobody said anything of the model or the machine.

Knows nothing of measurements: only the shape of these prices means anything.
"""

import numpy as np

from sdcontrol.core import FloatArray

__all__ = ["UninformedCost", "catch_up_share_of", "share_of"]

_FREE_FAMILIES = frozenset({"ngram"})  # no forward: until measured, their rounds cost nothing
_DRAFT_SHARE = 0.2  # of a target's forward, that an unmeasured draft model's takes
_CATCH_UP_SHARE = 0.1  # of what a token of a prompt takes the target, which needs no head


class UninformedCost:
    """A cost that assumes no model and no machine: only its shape means anything.

    A forward takes 10 ms, as much again for 48 tokens and for 60000 KV tokens.
    """

    per_token_seconds = 1e-2 / 48.0
    per_kv_token_seconds = 1e-2 / 6e4
    constant_seconds = 1e-2

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """A constant, and a little per token and per KV token."""
        tokens, kv = np.asarray(num_tokens, dtype=float), np.asarray(kv_tokens, dtype=float)
        linear = self.per_token_seconds * tokens + self.per_kv_token_seconds * kv
        return np.asarray(self.constant_seconds + linear)

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """A share of a forward over one token per request; nothing for an n-gram look-up."""
        return share_of(family) * self.verify_seconds(num_requests, kv_tokens, 1)

    def overhead_seconds(self) -> float:
        """Nothing beside the forwards."""
        return 0.0


def share_of(family: str) -> float:
    """Of a target's forward over the same tokens: an unmeasured drafter's."""
    if family in _FREE_FAMILIES:
        return 0.0
    return 1.0 if family == "sparse_kv" else _DRAFT_SHARE


def catch_up_share_of(family: str) -> float:
    """Of what a token takes the target: one that an unmeasured drafter's cache lacks."""
    return 0.0 if family in _FREE_FAMILIES else _CATCH_UP_SHARE
