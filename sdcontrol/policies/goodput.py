"""Maximise expected tokens per second over drafter and length, for all requests jointly.

Knows no engine and no estimator: survival and cost come with the belief. How the best plan is
found is in `maximise`; this file says what is asked for, and when.
"""

from functools import partial
from typing import Literal

from pydantic import Field

from sdcontrol.columns import columns_of
from sdcontrol.core import BatchView, Belief, Choice, Confidence, Observation, Plan
from sdcontrol.estimators.overhead import Overheads
from sdcontrol.policies.ahead import Ahead, Ways
from sdcontrol.policies.at_once import Answered, answer_at_once, refine_at_once
from sdcontrol.policies.base import Policy, PolicyConfig
from sdcontrol.policies.first_uses import FirstUses, waits
from sdcontrol.policies.maximise import maximise
from sdcontrol.policies.probing import Probing
from sdcontrol.policies.problem import Answer, Problem
from sdcontrol.policies.prompts import Prompts
from sdcontrol.policies.reading import least_seconds, read, read_drafted, to_choices
from sdcontrol.policies.stretches import Stretches
from sdcontrol.policies.taking_up import TakingUp
from sdcontrol.policies.tries import LENGTHS, try_of
from sdcontrol.policies.weighing import SAME, Pace, tokens_of, weigh_all
from sdcontrol.policies.worth import Worth

__all__ = ["Goodput", "GoodputConfig"]

_MEMORY_BOUND, _COMPUTE_BOUND = 0.25, 0.75  # a further token's price in average tokens


class GoodputConfig(PolicyConfig):
    """No setting needs tuning; `probe_share=0` never tries an arm that is off, or lengths that are not the best.

    `waits_for_slowest=False` maximises the tokens of each step alone, whichever request they are of: a batch that
    is decoded to its end then waits longer for its slowest request, and one that others follow drafts
    more in the easy parts of a text than it gains by.
    """

    kind: Literal["goodput"] = "goodput"
    probe_share: float = Field(default=0.01, ge=0.0, le=0.1)
    probe_tokens: int = Field(default=3, ge=1)
    catch_up_horizon_tokens: int = Field(default=64, ge=1)
    waits_for_slowest: bool = True

    def build(self) -> "Goodput":
        """The policy."""
        return Goodput(
            self.probe_share,
            self.probe_tokens,
            self.catch_up_horizon_tokens,
            waits_for_slowest=self.waits_for_slowest,
        )


class Goodput(Policy):
    """Maximises gain / step; beside a prefill chunk, gain - (the price of a second, see `prompts`) * step.

    `probe_share` of the time may go into trying arms that are off, at most `probe_tokens` at a
    time, and other lengths, where all steps are alike. A catch-up is spread over the tokens that catch-ups served
    lately (`stretches`), at most `catch_up_horizon_tokens`, and a request's first over up to 8 times as many. Where
    `waits_for_slowest` a token counts by what it saves of the batch's time (`weighing`). What pays once all use it
    is taken up by all (`taking_up`).
    """

    refines_by_confidence = True

    def __init__(
        self,
        probe_share: float = 0.01,
        probe_tokens: int = 3,
        catch_up_horizon_tokens: int = 64,
        *,
        waits_for_slowest: bool = True,
    ) -> None:
        self.worth = Worth() if waits_for_slowest else None
        self.prompts = Prompts()
        self.stretches = Stretches(catch_up_horizon_tokens)
        self.probing = Probing(probe_share, probe_tokens, self.stretches)
        self.taking_up = TakingUp(self.stretches)
        self.first_uses = FirstUses()
        self.ahead = Ahead()

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """The plan of most expected tokens per second, and now and then a probe."""
        if not view.requests:
            return Plan.off(view)
        pace, ways = self._pace(view), self.ahead.ways(belief.cost)
        may_probe, takes_up = self.probing.looks(view), self.taking_up.looks(view, pace.numbers[3])
        beside = None if ways is None else ways[self.ahead.waits]
        answered = None
        if not (may_probe or takes_up):
            answered = self._at_once(view, belief, pace, beside)
        if answered is not None:
            return self._said(view, belief, pace, answered, ways)
        problem = read(view, belief, self.stretches.horizon, beside)
        if problem is None:
            return Plan.off(view, "goodput: nothing to draft with")
        if takes_up:
            problem = self.taking_up.priced(view, problem)
        weighed = _weighed(problem, view, belief, pace)
        answer = self._best(weighed, view, belief)
        verify = problem.verify
        prices = verify.item(0), verify.item(-1), len(verify) - 1
        told = answer if weighed is problem else answer._replace(gain=tokens_of(problem, answer))
        answered = Answered(problem.arms, problem.lengths, told, prices)
        plan = self._said(view, belief, pace, answered, ways)
        if self.taking_up.arm:
            return Plan(plan.choices, f"{plan.reason}; {self.taking_up.arm} is taken up by all")
        return self.probing.probe(view, plan, weighed, answer) if may_probe else plan

    def _at_once(
        self, view: BatchView, belief: Belief, pace: Pace, beside: Overheads | None
    ) -> Answered | None:
        horizon, prompts = self.stretches.horizon, self.prompts
        return answer_at_once(view, belief, horizon, pace, prompts=prompts, beside=beside)

    def _said(
        self,
        view: BatchView,
        belief: Belief,
        pace: Pace,
        answered: Answered,
        ways: Ways | None,
    ) -> Plan:
        """The plan of an answer, in words too, with few enough who begin to catch up."""
        words = ""
        if ways is not None:
            ask = partial(self._at_once, view, belief, pace)
            words = self.ahead.words(view, answered, ways, ask)
        return self.first_uses.limited(view, _plan(answered, words), belief.cost)

    def may_repeat(self, plan: Plan) -> bool:
        """Whether `plan` may stand for another step; one that tries something, or lets somebody wait, may not."""
        return try_of(plan) is None and not waits(plan)

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence, belief: Belief) -> Plan:
        """`plan` without the tokens that no longer pay, now that their confidences are known.

        `belief.survival` is conditioned on `confidence`. Rounds already drafted are spent; tokens
        still cost their verification, and rounds to come their drafting.
        """
        drafted = [len(tokens) for tokens in confidence]
        if plan.is_off or not any(drafted) or LENGTHS in plan.reason:
            return plan
        pace = self._pace(view)
        length = refine_at_once(view, plan, drafted, belief, pace, prompts=self.prompts)
        if length is None:
            problem = read_drafted(view, plan, drafted, belief)
            if problem is None:
                return plan
            weighed = _weighed(problem, view, belief, pace)
            length = self._best(weighed, view, belief).length.tolist()
        planned = [choice.num_draft_tokens for choice in plan.choices]
        if length == planned:
            return plan
        rows = zip(plan.choices, planned, length, strict=True)
        choices = [
            choice if choice.drafter is None or n == before else Choice.of(choice.drafter, n)
            for choice, before, n in rows
        ]
        return Plan(tuple(choices), plan.reason)

    def update(self, observation: Observation) -> None:
        """Keep what probes may cost, how long stretches are, and who ends when."""
        self.probing.update(observation)
        self.stretches.update(observation)
        self.first_uses.update(observation)
        self.prompts.update(observation)
        self.ahead.update(observation)
        if self.worth is not None:
            self.worth.update(observation)

    def _best(self, problem: Problem, view: BatchView, belief: Belief) -> Answer:
        return maximise(problem, self.prompts.rate(view, problem, belief.cost))

    def _pace(self, view: BatchView) -> Pace:
        return SAME if self.worth is None else self.worth.pace(view)


def _weighed(problem: Problem, view: BatchView, belief: Belief, pace: Pace) -> Problem:
    if pace is SAME:
        return problem
    least = least_seconds(problem, view, belief.cost)
    return weigh_all(problem, least, columns_of(view).remaining_tokens, pace)


def _plan(answered: Answered, words: str = "") -> Plan:
    """The plan, and in words what bounds the step, and the tokens per second to expect."""
    arms, lengths, answer, (first, last, drafts) = answered
    batch = len(answer.length)
    bound = _bound(first, last, drafts, batch)
    reason = f"goodput: {bound}, {answer.rate:.4g} tokens/s expected, {batch / first:.4g} without drafts{words}"
    return Plan(to_choices(arms, lengths, answer), reason)


def _bound(first: float, last: float, drafts: int, batch: int) -> str:
    """What a further token costs beside the average one of a plain step, `first` seconds long."""
    if not drafts:
        return "no room for drafts"
    price = (last - first) / drafts * batch / first
    if price < _MEMORY_BOUND:
        return "memory-bound"
    return "compute-bound" if price > _COMPUTE_BOUND else "near the ridge"
