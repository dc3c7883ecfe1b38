"""Everyone drafts in full; a budget of verification goes to the likeliest drafts: vLLM's rule.

Step time depends on the numbers of tokens and of requests alone, at one context length, drafting
included, which is never saved. Survival comes from one global logistic on the drafter's log-odds, with
an intercept per position; until that has seen enough, all drafts are verified.
"""

import math
from typing import Literal

import numpy as np
from pydantic import Field

from sdcontrol.core import (
    BatchView,
    Belief,
    Choice,
    Confidence,
    FloatArray,
    Observation,
    Plan,
    family_of,
)
from sdcontrol.estimators.price import sparse_budget
from sdcontrol.policies.asking import verify_seconds
from sdcontrol.policies.rivals.one_drafter import OneDrafter, OneDrafterConfig

__all__ = ["BudgetArgmax", "BudgetArgmaxConfig"]

_MEMORY_TOKENS = 2000.0
_MOST_LOG_ODDS = 8.0
_FULL_STEPS = 50  # whose drafts are all verified: what is left out teaches nothing


class BudgetArgmaxConfig(OneDrafterConfig):
    """`num_draft_tokens` for everyone; the cost table's `context_tokens` and `num_requests`."""

    kind: Literal["budget_argmax"] = "budget_argmax"
    num_draft_tokens: int = Field(default=5, ge=1)
    context_tokens: int = Field(default=1024, ge=1)
    num_requests: int = Field(default=16, ge=1)

    def build(self) -> "BudgetArgmax":
        """The policy."""
        return BudgetArgmax(
            self.drafter, self.num_draft_tokens, self.context_tokens, self.num_requests
        )


class BudgetArgmax(OneDrafter):
    """Drafts `num_draft_tokens` for all, then submits the (request, position) slots that pay.

    Slots are sorted by survival; the budget is the argmax of expected tokens over the step time of
    that many tokens, read at `num_requests` requests of `context_tokens` each, drafting included. The
    logistic is fitted online, by one Newton step per observation with a forgetting information matrix;
    the drafts of its first 50 are submitted in full.
    """

    refines_between_rounds = False

    def __init__(
        self, drafter: str | None, num_draft_tokens: int, context_tokens: int, num_requests: int
    ) -> None:
        super().__init__(drafter)
        self.num_draft_tokens = num_draft_tokens
        self.context_tokens = context_tokens
        self.num_requests = num_requests
        prior = np.ones(num_draft_tokens + 1)
        self._weights: FloatArray = np.zeros(num_draft_tokens + 1)  # slope, then intercepts
        self._weights[0] = 1.0  # confidence taken at its word until outcomes are seen
        self._information: FloatArray = np.diag(4.0 * prior)
        self._num_steps = 0  # learnt from

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """Everyone drafts in full."""
        return self.uniform(view, self.num_draft_tokens, "budget_argmax")

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence, belief: Belief) -> Plan:
        """The slots within the budget. A request that was not drafted in full yet is left alone."""
        if self._num_steps < _FULL_STEPS:
            return plan
        lengths = [choice.num_draft_tokens for choice in plan.choices]
        if any(0 < len(known) < n for known, n in zip(confidence, lengths, strict=True)):
            return plan
        slots = sorted(
            (-survival, r)
            for r, n in enumerate(lengths)
            for survival in self._survival(confidence[r], n)
        )
        expected = len(view.requests) + np.cumsum([0.0, *(-negative for negative, _ in slots)])
        seconds = self._drafting_seconds(plan, belief) + self._seconds(view, len(slots), belief)
        kept = int(np.argmax(expected / seconds))
        submitted = [0] * len(lengths)
        for _, r in slots[:kept]:
            submitted[r] += 1
        choices = tuple(
            Choice.off() if choice.drafter is None else Choice.of(choice.drafter, n)
            for choice, n in zip(plan.choices, submitted, strict=True)
        )
        return Plan(choices, plan.reason)

    def update(self, observation: Observation) -> None:
        """One Newton step on the drafts whose predecessors were accepted."""
        features, outcomes = self._tested(observation)
        if not len(outcomes):
            return
        self._num_steps += 1
        rate = 1.0 / (1.0 + np.exp(-(features @ self._weights)))
        fade = 1.0 - len(outcomes) / (_MEMORY_TOKENS + len(outcomes))
        curvature = (features * (rate * (1.0 - rate))[:, None]).T @ features
        floor = 0.5 * np.eye(len(self._weights))
        self._information = fade * self._information + (1.0 - fade) * floor + curvature
        step = np.linalg.solve(self._information, features.T @ (outcomes - rate))
        self._weights = np.clip(self._weights + np.clip(step, -0.5, 0.5), -20.0, 20.0)

    def _survival(self, confidence: tuple[float, ...], num_tokens: int) -> list[float]:
        """P(the first j + 1 drafts are accepted), for each j below `num_tokens`."""
        survival, alive = [], 1.0
        for j in range(num_tokens):
            known = confidence[j] if j < len(confidence) else None
            score = float(self._features(j, known) @ self._weights)
            alive /= 1.0 + math.exp(-min(max(score, -30.0), 30.0))
            survival.append(alive)
        return survival

    def _features(self, position: int, confidence: float | None) -> FloatArray:
        row = np.zeros(len(self._weights))
        row[0] = _log_odds(confidence)
        row[1 + min(position, self.num_draft_tokens - 1)] = 1.0
        return row

    def _tested(self, observation: Observation) -> tuple[FloatArray, FloatArray]:
        """Features and outcomes of every draft that was reached by verification."""
        features, outcomes = [], []
        rows = zip(observation.proposed, observation.accepted, strict=True)
        for r, (proposed, accepted) in enumerate(rows):
            known = observation.confidence[r] if observation.confidence is not None else ()
            for j in range(min(proposed, accepted + 1)):
                features.append(self._features(j, known[j] if j < len(known) else None))
                outcomes.append(float(j < accepted))
        return np.array(features).reshape(len(outcomes), len(self._weights)), np.array(outcomes)

    def _drafting_seconds(self, plan: Plan, belief: Belief) -> float:
        """What the drafts of `plan` took, by the table of one context length."""
        lengths = [choice.num_draft_tokens for choice in plan.choices if choice.drafter]
        drafter = next((choice.drafter for choice in plan.choices if choice.drafter), None)
        if drafter is None:
            return 0.0
        reads = min(self.context_tokens, sparse_budget(drafter) or self.context_tokens)
        num_drafting = float(len(lengths))
        one = belief.cost.draft_seconds(family_of(drafter), num_drafting, reads * num_drafting)
        return max(lengths) * float(one)

    def _seconds(self, view: BatchView, slots: int, belief: Belief) -> FloatArray:
        """Step time of the view's tokens and 0..slots more, from the table of one context length."""
        tokens = len(view.requests) + view.prefill_tokens + np.arange(slots + 1.0)
        kv_tokens = float(self.context_tokens * self.num_requests)
        verify = verify_seconds(belief.cost, tokens, kv_tokens, self.num_requests)
        return np.asarray(verify + belief.cost.overhead_seconds())


def _log_odds(confidence: float | None) -> float:
    if confidence is None or not math.isfinite(confidence):
        return 0.0
    inside = min(max(confidence, 1e-6), 1.0 - 1e-6)
    return min(max(math.log(inside / (1.0 - inside)), -_MOST_LOG_ODDS), _MOST_LOG_ODDS)
