"""One length for the batch by goodput, from one global acceptance rate: SmartSpec (Liu et al. 2024).

Knows no request apart from another: one rate and one length serve them all. Acceptance is geometric, and
step time a straight line in the length, at the present load. That system fits its line to a profile of
the machine that it makes before the first step; here the belief's cost is the profile.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from sdcontrol.core import BatchView, Belief, Observation, Plan, RequestView, family_of
from sdcontrol.estimators.price import round_kv_tokens
from sdcontrol.outcomes import DEPTH
from sdcontrol.policies.asking import verify_seconds
from sdcontrol.policies.rivals.one_drafter import OneDrafter, OneDrafterConfig

__all__ = ["SmartSpec", "SmartSpecConfig"]

_INITIAL_ACCEPTANCE = 0.7
_MEMORY = 0.85
_INTERVAL_STEPS = 20
_OFF_BONUS = 1.1  # plain decoding is favoured by this factor
_DECIDED = "smartspec: "  # and the length: so that whoever has the observation alone knows it


class SmartSpecConfig(OneDrafterConfig):
    """`max_tokens` bounds the search."""

    kind: Literal["smartspec"] = "smartspec"
    max_tokens: int = Field(default=DEPTH, ge=1)

    def build(self) -> "SmartSpec":
        """The policy."""
        return SmartSpec(self.drafter, self.max_tokens)


class SmartSpec(OneDrafter):
    """k = argmax of batch * L(k) / step(k), L(k) = (1 - a^(k + 1)) / (1 - a), every 20 steps.

    `a` starts at 0.7, and each step with drafts moves it by 0.15 to the share that was accepted so far,
    of all drafts whose predecessors were. The search ends at the first descent. Requests that cannot
    draft when the length is decided count as one token each.
    """

    def __init__(self, drafter: str | None, max_tokens: int) -> None:
        super().__init__(drafter)
        self.max_tokens = max_tokens
        self._acceptance = _INITIAL_ACCEPTANCE
        self._num_tested = self._num_accepted = 0  # drafts so far
        self._tokens: int | None = None  # of the last decision; None: it is time for the next one
        self._steps = 0  # since that decision

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """The length decided last, or every 20 steps a new one."""
        tokens = self._tokens
        if tokens is None:
            able = self._able(view)
            if not able:
                return Plan.off(view, "smartspec, undecided: nobody can draft")
            tokens = self._decide(view, able, belief)
        return self.uniform(view, tokens, f"{_DECIDED}{tokens}")

    def update(self, observation: Observation) -> None:
        """Move the acceptance rate; keep what was decided for 20 steps."""
        drafts = zip(observation.proposed, observation.accepted, strict=True)
        if tested := sum(min(proposed, accepted + 1) for proposed, accepted in drafts):
            self._num_tested += tested
            self._num_accepted += sum(observation.accepted)
            share = self._num_accepted / self._num_tested
            self._acceptance = _MEMORY * self._acceptance + (1 - _MEMORY) * share
        if self._tokens is None:
            self._tokens, self._steps = _decided(observation.plan), 0
        self._steps += 1
        if self._steps >= _INTERVAL_STEPS:
            self._tokens = None

    def _able(self, view: BatchView) -> list[RequestView]:
        """Who could draft a token now."""
        drafter = self.drafter_for(view)
        choices = () if drafter is None else Plan.uniform(view, drafter, 1).choices
        return [r for r, choice in zip(view.requests, choices, strict=False) if choice.drafter]

    def _decide(self, view: BatchView, able: list[RequestView], belief: Belief) -> int:
        constant, slope = self._line(view, able, belief)
        best, chosen = 0.0, 0
        for tokens in range(self.max_tokens + 1):
            expected = len(view.requests) + len(able) * (_length(self._acceptance, tokens) - 1.0)
            goodput = expected / max(constant + slope * tokens, 1e-9)
            goodput *= _OFF_BONUS if tokens == 0 else 1.0
            if goodput <= best:
                break
            best, chosen = goodput, tokens
        return chosen

    def _line(
        self, view: BatchView, able: list[RequestView], belief: Belief
    ) -> tuple[float, float]:
        """Constant and slope of the step time that the belief's cost gives lengths 0..max_tokens."""
        drafter = self.drafter_for(view)
        assert drafter is not None, "somebody can draft"
        cost, lengths = belief.cost, np.arange(self.max_tokens + 1.0)
        tokens = len(view.requests) + view.prefill_tokens + len(able) * lengths
        kv_tokens = float(sum(request.context_tokens for request in view.requests))
        reads = float(sum(round_kv_tokens(request, drafter) for request in able))
        round_seconds = cost.draft_seconds(family_of(drafter), float(len(able)), reads)
        seconds = verify_seconds(cost, tokens, kv_tokens, len(view.requests))
        seconds += cost.overhead_seconds() + lengths * float(round_seconds)
        slope, constant = np.polyfit(lengths, seconds, 1)
        return float(constant), float(slope)


def _decided(plan: Plan) -> int | None:
    """The length that `plan` says was decided; None where it is not one of ours."""
    _, said, tokens = plan.reason.partition(_DECIDED)
    return int(tokens) if said and tokens.isdecimal() else None


def _length(acceptance: float, tokens: int) -> float:
    if acceptance >= 1.0:
        return tokens + 1.0
    return float((1.0 - acceptance ** (tokens + 1)) / (1.0 - acceptance))
