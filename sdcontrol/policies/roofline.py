"""The heuristic: speculate with the compute that a memory-bound step leaves idle.

Knows the cost and nothing else: no acceptance is learnt, nothing is tuned, the first step is as
sensible as the last. Beyond the ridge there is no idle compute and nobody drafts.
"""

import math
from typing import Literal

import numpy as np
from pydantic import Field

from sdcontrol.core import BatchView, Belief, FloatArray, Plan, RequestView, family_of
from sdcontrol.errors import PlanError
from sdcontrol.estimators.price import round_kv_tokens
from sdcontrol.policies.asking import verify_seconds
from sdcontrol.policies.base import Policy, PolicyConfig

__all__ = ["Roofline", "RooflineConfig"]


class RooflineConfig(PolicyConfig):
    """`slowdown`: by how much drafts may lengthen verification before it counts as noticeable.

    `assumed_acceptance` decides whether a drafter that takes time can pay for its own rounds.
    """

    kind: Literal["roofline"] = "roofline"
    slowdown: float = Field(default=0.1, gt=0.0)
    max_tokens: int = Field(default=8, ge=1)
    assumed_acceptance: float = Field(default=0.7, gt=0.0, lt=1.0)

    def build(self) -> "Roofline":
        """The policy."""
        return Roofline(self.slowdown, self.max_tokens, self.assumed_acceptance)


class Roofline(Policy):
    """Shares the headroom to the ridge equally among the requests.

    Headroom is the number of tokens by which verification can grow while it takes at most
    `1 + slowdown` times as long as plain decoding. Each request drafts with the arm and length of
    most expected tokens per second if every draft token were accepted with `assumed_acceptance`
    (with the drafter's own confidence, where its hint has one).
    """

    def __init__(self, slowdown: float, max_tokens: int, assumed_acceptance: float) -> None:
        self.slowdown = slowdown
        self.max_tokens = max_tokens
        self.assumed_acceptance = assumed_acceptance

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """The headroom, shared."""
        batch = len(view.requests)
        if not batch:
            return Plan.off(view, "roofline: no requests")
        share = self._headroom(view, belief) // batch
        if not share:
            return Plan.off(view, "roofline: compute-bound, no headroom")
        arms = {arm: None for request in view.requests for arm in request.drafters}
        rounds = {arm: self._round_seconds(view, belief, arm) for arm in arms}
        decode = self._verify_seconds(view, belief, np.zeros(1))[0]
        plan = Plan.off(view)
        free = view.free_kv_tokens
        choices = list(plan.choices)
        for r, request in enumerate(view.requests):
            arm, tokens = self._best(request, share, rounds, float(decode))
            one = BatchView(view.step, (request,), free)
            choices[r] = Plan.uniform(one, arm, tokens).choices[0] if arm else choices[r]
            free -= choices[r].num_draft_tokens
        return Plan(tuple(choices), f"roofline: headroom of {share} tokens per request")

    def _headroom(self, view: BatchView, belief: Belief) -> int:
        """Draft tokens of the whole step that lengthen it by at most `slowdown`."""
        most = len(view.requests) * self.max_tokens
        seconds = self._verify_seconds(view, belief, np.arange(most + 1.0))
        return int(np.flatnonzero(seconds <= seconds[0] * (1.0 + self.slowdown))[-1])

    def _verify_seconds(
        self, view: BatchView, belief: Belief, draft_tokens: FloatArray
    ) -> FloatArray:
        batch = len(view.requests)
        kv_tokens = float(sum(request.context_tokens for request in view.requests))
        tokens = draft_tokens + (batch + view.prefill_tokens)
        seconds = verify_seconds(belief.cost, tokens, kv_tokens, batch)
        seconds += belief.cost.overhead_seconds()
        if not (np.isfinite(seconds).all() and seconds.min() > 0.0):
            raise PlanError(
                f"steps of {seconds.min()} to {seconds.max()} s by {type(belief.cost).__name__}; "
                "a cost must answer finite numbers only, above 0 for a step"
            )
        return seconds

    def _round_seconds(self, view: BatchView, belief: Belief, arm: str) -> float:
        able = [request for request in view.requests if arm in request.drafters]
        kv_tokens = float(sum(round_kv_tokens(request, arm) for request in able))
        seconds = float(belief.cost.draft_seconds(family_of(arm), float(len(able)), kv_tokens))
        if not 0.0 <= seconds < math.inf:
            raise PlanError(
                f"a round of {arm!r} takes {seconds} s by {type(belief.cost).__name__}; a cost must "
                "answer finite numbers only, at least 0 for a round"
            )
        return seconds

    def _best(
        self, request: RequestView, share: int, rounds: dict[str, float], decode: float
    ) -> tuple[str | None, int]:
        """The arm and length of most expected tokens per second under assumed acceptance."""
        best: tuple[float, str | None, int] = (1.0 / decode, None, 0)
        for arm in request.drafters:
            hint = request.hints.get(arm)
            known = None if hint is None else hint.confidence
            if known is None or math.isnan(known):
                known = self.assumed_acceptance
            rate = min(max(known, 0.0), 0.99)
            bound = (
                share if hint is None or hint.max_draft_tokens is None else hint.max_draft_tokens
            )
            for n in range(1, min(share, bound, request.remaining_tokens - 1) + 1):
                expected = (1.0 - rate ** (n + 1)) / (1.0 - rate)
                best = max(
                    best, (expected / (decode + n * rounds[arm]), arm, n), key=lambda b: b[0]
                )
        return best[1], best[2]
