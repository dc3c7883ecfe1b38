"""One length for the batch by goodput, from one global acceptance rate: SmartSpec (Liu et al. 2024).

Knows no request apart from another: one rate and one length serve them all. Acceptance is geometric,
step time is linear in tokens, KV tokens and drafting rounds, profiled before the first step as that
system does: while one length is kept, measured steps cannot tell tokens from rounds.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from sdcontrol.core import BatchView, Belief, FloatArray, Observation, Plan, family_of
from sdcontrol.estimators.price import round_kv_tokens
from sdcontrol.outcomes import DEPTH
from sdcontrol.policies.rivals.one_drafter import OneDrafter, OneDrafterConfig

__all__ = ["SmartSpec", "SmartSpecConfig"]

_INITIAL_ACCEPTANCE = 0.7
_MEMORY = 0.85
_INTERVAL_STEPS = 20
_OFF_BONUS = 1.1  # plain decoding is favoured by this factor
_FITTED_STEPS = 8  # before that many are seen, the step time is fitted to the belief's cost

_Sums = tuple[FloatArray, FloatArray]  # normal matrix and moment of the least squares


class SmartSpecConfig(OneDrafterConfig):
    """`max_tokens` bounds the search."""

    kind: Literal["smartspec"] = "smartspec"
    max_tokens: int = Field(default=DEPTH, ge=1)

    def build(self) -> "SmartSpec":
        """The policy."""
        return SmartSpec(self.drafter, self.max_tokens)


class SmartSpec(OneDrafter):
    """k = argmax of batch * L(k) / step(k), L(k) = (1 - a^(k + 1)) / (1 - a), every 20 steps.

    `a` starts at 0.7 and moves by 0.15 of each step's accepted share. The search ends at the first
    descent. The profile is the belief's cost at the first plan: it is kept, and measured steps add to it.
    """

    def __init__(self, drafter: str | None, max_tokens: int) -> None:
        super().__init__(drafter)
        self.max_tokens = max_tokens
        self._acceptance = _INITIAL_ACCEPTANCE
        self._tokens: int | None = None
        self._steps = 0
        self._profile: _Sums | None = None  # of the lengths at the first plan that could draft
        self._normal: FloatArray = np.zeros((4, 4))  # of the least squares of measured step time
        self._moment: FloatArray = np.zeros(4)

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """The length decided last; before the first decision, one from the belief's cost."""
        tokens = self._tokens
        if tokens is None:
            profile = self._profiled(view, belief)
            self._profile = self._profile or profile
            fit = np.ones(4) if profile is None else _solve(*profile)
            tokens = self._decide(view, fit, _INITIAL_ACCEPTANCE)
        return self.uniform(view, tokens, f"smartspec: {tokens}")

    def update(self, observation: Observation) -> None:
        """Move the acceptance rate and the fit; decide anew at every 20th step."""
        proposed = sum(observation.proposed)
        if proposed:
            share = sum(observation.accepted) / proposed
            self._acceptance = _MEMORY * self._acceptance + (1 - _MEMORY) * share
        view, seconds = observation.view, observation.timing.total_seconds
        if view.requests and np.isfinite(seconds) and seconds > 0.0:
            rounds = max(observation.drafted, default=0)
            features = _features(view, sum(observation.proposed), rounds)
            self._normal = self._normal + np.outer(features, features)
            self._moment = self._moment + features * seconds
            self._steps += 1
        if self._steps >= _FITTED_STEPS and self._steps % _INTERVAL_STEPS == 0 and view.requests:
            normal, moment = self._profile or (np.zeros((4, 4)), np.zeros(4))
            fit = _solve(self._normal + normal, self._moment + moment)
            self._tokens = self._decide(view, fit, self._acceptance)

    def _decide(self, view: BatchView, fit: FloatArray, acceptance: float) -> int:
        best, chosen = 0.0, 0
        batch = len(view.requests)
        for tokens in range(min(self.max_tokens, 64) + 1):
            seconds = float(fit @ _features(view, tokens * batch, tokens))
            goodput = batch * _length(acceptance, tokens) / max(seconds, 1e-9)
            goodput *= _OFF_BONUS if tokens == 0 else 1.0
            if goodput < best:
                break
            best, chosen = goodput, tokens
        return chosen

    def _profiled(self, view: BatchView, belief: Belief) -> _Sums | None:
        """Of the step times that the belief's cost gives lengths 0..max_tokens; None if none can draft."""
        drafter = self.drafter_for(view)
        if not view.requests or drafter is None:
            return None
        batch = len(view.requests)
        normal, moment = np.zeros((4, 4)), np.zeros(4)
        kv_tokens = float(sum(request.context_tokens for request in view.requests))
        reads = float(sum(round_kv_tokens(request, drafter) for request in view.requests))
        draft = float(belief.cost.draft_seconds(family_of(drafter), float(batch), reads))
        for tokens in range(self.max_tokens + 1):
            total = float(batch * (1 + tokens))
            seconds = float(belief.cost.verify_seconds(total, kv_tokens, batch))
            seconds += belief.cost.overhead_seconds() + tokens * draft
            features = _features(view, tokens * batch, tokens)
            normal += np.outer(features, features)
            moment += features * seconds
        return normal, moment


def _features(view: BatchView, draft_tokens: int, rounds: int) -> FloatArray:
    kv_tokens = sum(request.context_tokens for request in view.requests)
    tokens = len(view.requests) + view.prefill_tokens + draft_tokens
    return np.array([1.0, tokens * 1e-2, kv_tokens * 1e-5, float(rounds)])


def _solve(normal: FloatArray, moment: FloatArray) -> FloatArray:
    """Least squares with a little ridge: features that never varied get a small weight."""
    ridge = 1e-6 * max(float(np.trace(normal)), 1e-12)
    return np.asarray(np.linalg.solve(normal + ridge * np.eye(len(moment)), moment))


def _length(acceptance: float, tokens: int) -> float:
    if acceptance >= 1.0:
        return tokens + 1.0
    return float((1.0 - acceptance ** (tokens + 1)) / (1.0 - acceptance))
