"""Fitted step times as a `Cost`, for who is to plan with the prices that a simulation goes by.

A `Cost` knows less of a step than the lines do. So drafts count as spread evenly over the requests, prompt
tokens as draft tokens, and what drafting takes once a step as spread over as many rounds as steps had on
average. Knows coefficients in the order of `fitted_times`; nothing of traces.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.estimators.price import even_draft
from sdcontrol.traces.step_times import LinearDrafter

__all__ = ["FittedCost", "FittedRound"]


@dataclass(frozen=True, slots=True)
class FittedRound:
    """Seconds of a drafting round, and per token to catch up with."""

    line: LinearDrafter
    per_catch_up_token_seconds: float


_UNKNOWN = FittedRound(LinearDrafter(1e3), 0.0)  # pays for nobody


@dataclass(frozen=True, slots=True)
class FittedCost:
    """What steps of a recording take. A family that was never recorded is too dear for any plan: no price of
    it is known, and a simulation by such times refuses its drafts.
    """

    verify: Sequence[float]  # coefficients
    beside_seconds: float  # of a step
    beside_request_seconds: float  # of each of its requests
    rounds: Mapping[str, FittedRound]  # by family
    token_edges: tuple[int, ...] = ()  # sorted

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """One target forward, and what its requests take beside it. All arguments broadcast."""
        tokens = self._padded(np.maximum(num_tokens, num_requests))
        kv_drafts = even_draft(num_tokens, num_requests) * kv_tokens
        features = (
            1.0,
            np.minimum(tokens, 8.0),
            np.minimum(tokens, 32.0),
            np.maximum(tokens - 64.0, 0.0),
            num_requests,
            tokens - num_requests,
            kv_tokens,
            kv_drafts,  # of all, and of the longest
            kv_drafts,
        )
        seconds: FloatArray = np.asarray(self.beside_request_seconds * num_requests)
        for coefficient, feature in zip(self.verify, features, strict=False):
            seconds = seconds + coefficient * feature
        return seconds

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """One drafting round; 0 where nobody drafts in it."""
        return self.rounds.get(family, _UNKNOWN).line.round_seconds(num_requests, kv_tokens)

    def catch_up_seconds(self, family: str, num_tokens: float) -> float:
        """What the tokens that a drafter's cache lacks take."""
        return self.rounds.get(family, _UNKNOWN).per_catch_up_token_seconds * num_tokens

    def overhead_seconds(self) -> float:
        """What a step takes beside its forwards, however many its requests."""
        return self.beside_seconds

    def _padded(self, num_tokens: FloatArray) -> FloatArray:
        """The next edge; as many where there is none."""
        if not self.token_edges:
            return num_tokens
        edges = np.array([*self.token_edges, np.inf])
        padded = edges[np.searchsorted(edges, num_tokens)]
        return np.where(np.isinf(padded), num_tokens, padded)
