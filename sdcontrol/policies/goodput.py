"""Maximise expected tokens per second. First version: greedy by price, refined shortly."""

from typing import Literal

import numpy as np

from sdcontrol.core import BatchView, Belief, Choice, Confidence, FloatArray, Plan, family_of
from sdcontrol.policies.base import Policy, PolicyConfig

__all__ = ["Goodput", "GoodputConfig"]


class GoodputConfig(PolicyConfig):
    """No settings yet."""

    kind: Literal["goodput"] = "goodput"

    def build(self) -> "Goodput":
        """The policy."""
        return Goodput()


class Goodput(Policy):
    """Maximises gain / step over drafter and length per request."""

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """The plan of most expected tokens per second."""
        if not view.requests or not belief.survival:
            return Plan.off(view, "goodput: nothing to draft")
        requests = view.requests
        batch = len(requests)
        context = np.array([r.context_tokens for r in requests], dtype=float)
        arms = list(belief.survival)
        depth = max(rows.shape[1] for rows in belief.survival.values())
        total = np.arange(batch, batch * (depth + 1) + 1, dtype=float) + view.prefill_tokens
        verify = np.asarray(belief.cost.verify_seconds(total, float(context.sum()), batch))
        cumulative = [self._cumulative(view, arm, belief.survival[arm], depth) for arm in arms]
        price = [
            float(belief.cost.draft_seconds(family_of(arm), float(batch), float(context.sum())))
            for arm in arms
        ]
        overhead = float(belief.cost.overhead_seconds())
        rate = batch / (float(verify[0]) + overhead)
        best: tuple[FloatArray, FloatArray] | None = None
        for _ in range(3):
            net = np.stack([g - rate * p / batch * np.arange(depth + 1) for g, p in zip(cumulative, price, strict=True)])
            arm_of = net.argmax(axis=0)
            worth = net.max(axis=0)
            marginal = np.minimum.accumulate(np.diff(worth, axis=1), axis=1)
            order = np.argsort(-marginal, axis=None, kind="stable")[: view.free_kv_tokens]
            order = order[marginal.ravel()[order] > -1e8]
            value = batch + np.concatenate([[0.0], np.cumsum(marginal.ravel()[order])])
            count = int(np.argmax(value - rate * (verify[: len(value)] + overhead)))
            taken = np.bincount(order[:count] // depth, minlength=batch)
            gain = batch + sum(
                cumulative[arm_of[r, n]][r, n] for r, n in enumerate(taken) if n
            )
            step = float(verify[count]) + overhead
            for a, p in enumerate(price):
                lengths = [n for r, n in enumerate(taken) if n and arm_of[r, n] == a]
                step += p * (sum(lengths) / batch)
            best = (arm_of, taken)
            if gain / step <= rate * (1 + 1e-9):
                break
            rate = gain / step
        assert best is not None
        arm_of, taken = best
        return Plan(
            tuple(Choice.of(arms[arm_of[r, n]], int(n)) for r, n in enumerate(taken)), "goodput"
        )

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence, belief: Belief) -> Plan:
        """Unchanged in this version."""
        return plan

    def _cumulative(
        self, view: BatchView, arm: str, survival: FloatArray, depth: int
    ) -> FloatArray:
        rows = np.full((len(view.requests), depth + 1), -1e9)
        rows[:, 0] = 0.0
        rows[:, 1 : survival.shape[1] + 1] = np.cumsum(survival, axis=1)
        for r, request in enumerate(view.requests):
            limit = min(request.remaining_tokens - 1, survival.shape[1])
            hint = request.hints.get(arm)
            if hint is not None and hint.max_draft_tokens is not None:
                limit = min(limit, hint.max_draft_tokens)
            if arm not in request.drafters:
                limit = 0
            rows[r, max(limit, 0) + 1 :] = -1e9
        return rows
