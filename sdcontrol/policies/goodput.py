"""Maximise expected tokens per second over drafter and length, for all requests jointly.

Knows no engine and no estimator: survival and cost come with the belief. How the best plan is
found is in `maximise`; this file says what is asked for, and when.
"""

import math
from typing import Literal

from pydantic import Field

from sdcontrol.core import BatchView, Belief, Choice, Confidence, Observation, Plan
from sdcontrol.policies.alone import best_alone
from sdcontrol.policies.base import Policy, PolicyConfig
from sdcontrol.policies.maximise import maximise
from sdcontrol.policies.probing import Probing
from sdcontrol.policies.problem import Answer, Problem
from sdcontrol.policies.reading import read, read_drafted, to_plan
from sdcontrol.policies.recent import Recent, expecting

__all__ = ["Goodput", "GoodputConfig"]

_MEMORY = 0.95  # of the running tokens per second, per step


class GoodputConfig(PolicyConfig):
    """No setting needs tuning; `probe_share=0` never tries an arm that is off."""

    kind: Literal["goodput"] = "goodput"
    probe_share: float = Field(default=0.01, ge=0.0, le=0.1)
    probe_tokens: int = Field(default=3, ge=1)
    catch_up_horizon_tokens: int = Field(default=64, ge=1)

    def build(self) -> "Goodput":
        """The policy."""
        return Goodput(self.probe_share, self.probe_tokens, self.catch_up_horizon_tokens)


class Goodput(Policy):
    """Maximises gain / step; beside a prefill chunk, gain - (running tokens per second) * step.

    `probe_share` of the time may go into trying arms that are off, `probe_tokens` at a time. A
    catch-up is spread over at most `catch_up_horizon_tokens`.
    """

    def __init__(
        self,
        probe_share: float = 0.01,
        probe_tokens: int = 3,
        catch_up_horizon_tokens: int = 64,
    ) -> None:
        self.catch_up_horizon_tokens = catch_up_horizon_tokens
        self.probing = Probing(probe_share, probe_tokens)
        self._recent = Recent()
        self._tokens = 0.0
        self._seconds = 0.0

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """The plan of most expected tokens per second, and now and then a probe."""
        if not view.requests or not any(rows.shape[1] for rows in belief.survival.values()):
            return Plan.off(view, "goodput: nothing to draft with")
        if len(view.requests) == 1:
            return self._plan_alone(view, belief)
        problem = read(view, belief, self.catch_up_horizon_tokens)
        answer = maximise(problem, self._rate(view, belief), self._recent.start(view, problem))
        plan = to_plan(problem, view, answer.arm, answer.length, _reason(answer, problem))
        if not self.probing.share:
            return plan
        return self.probing.probe(view, plan, problem, answer.rate)

    def _plan_alone(self, view: BatchView, belief: Belief) -> Plan:
        """Of a single request, for which every choice can be tried."""
        horizon = self.catch_up_horizon_tokens
        best = best_alone(view, belief, horizon, self._rate(view, belief))
        plan = Plan((best.choice,), expecting(best.rate, best.plain_rate))
        if not self.probing.is_due(view, plan, belief):
            return plan
        return self.probing.probe(view, plan, read(view, belief, horizon), best.rate)

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence, belief: Belief) -> Plan:
        """`plan` without the tokens that no longer pay, now that their confidences are known.

        `belief.survival` is conditioned on `confidence`. Rounds already drafted are spent; tokens
        still cost their verification, and rounds to come their drafting.
        """
        drafted = [len(tokens) for tokens in confidence]
        if plan.is_off or not any(drafted):
            return plan
        problem = read_drafted(view, plan, drafted, belief)
        length = maximise(problem, self._rate(view, belief)).length
        choices = tuple(
            choice
            if choice.drafter is None
            else Choice.of(choice.drafter, min(n, choice.num_draft_tokens))
            for choice, n in zip(plan.choices, length.tolist(), strict=True)
        )
        return plan if choices == plan.choices else Plan(choices, plan.reason)

    def update(self, observation: Observation) -> None:
        """Keep the running tokens per second, and what probes may cost."""
        self.probing.update(observation)
        self._recent.update(observation.plan)
        seconds = observation.timing.total_seconds
        if math.isfinite(seconds) and seconds > 0.0:
            self._tokens = _MEMORY * self._tokens + sum(observation.emitted)
            self._seconds = _MEMORY * self._seconds + seconds

    def _rate(self, view: BatchView, belief: Belief) -> float | None:
        """The given price of a second beside a prefill chunk; None elsewhere: find the best."""
        if not view.prefill_tokens:
            return None
        if self._seconds > 0.0:
            return self._tokens / self._seconds
        batch = len(view.requests)
        kv_tokens = float(sum(request.context_tokens for request in view.requests))
        decode = float(belief.cost.verify_seconds(float(batch), kv_tokens, batch))
        return batch / (decode + belief.cost.overhead_seconds())


def _reason(answer: Answer, problem: Problem) -> str:
    plain = problem.batch / float(problem.verify[0])
    return expecting(answer.rate, plain)
