"""What a planner decided about steps that it was not told of yet.

Where steps overlap, or are launched ahead of their tokens, a step is planned before the one before it is
observed; a recording says how much had been observed. Knows plans, observations and seconds; nothing of
planners or files.
"""

import math
from dataclasses import dataclass, field

from sdcontrol.core import BatchView, Confidence, Observation, Plan
from sdcontrol.traces.schema import RecordedStep, Refinement

__all__ = ["Decisions"]


@dataclass(slots=True)
class _Decision:
    """About one step."""

    plan: Plan | None = None  # None: it was not asked for
    plan_faults: tuple[str, ...] = ()
    seen_steps: int = 0  # observed before
    seconds: float = 0.0  # when it was made
    tokens: tuple[int, ...] = ()  # of the plan
    refinements: list[Refinement] = field(default_factory=list)


class Decisions:
    """By step, until that is observed. A step that is planned twice has the later plan."""

    def __init__(self) -> None:
        self._open: dict[int, _Decision] = {}
        self._num_observed = 0
        self._start_seconds = self._end_seconds = 0.0  # of the last step

    def planned(self, view: BatchView, plan: Plan, faults: tuple[str, ...], seconds: float) -> None:
        """`plan` was the answer, at `seconds`; `faults` arose in it."""
        decision = _Decision(plan, faults, self._num_observed, seconds, _tokens(plan))
        self._open[view.step] = decision

    def refined(self, view: BatchView, plan: Plan, confidence: Confidence, shorter: Plan) -> None:
        """`plan` was shortened."""
        unplanned = _Decision(seen_steps=self._num_observed)
        decision = self._open.setdefault(view.step, unplanned)
        given = decision.tokens if plan is decision.plan else _tokens(plan)
        kept = given if shorter is plan else _tokens(shorter)
        decision.refinements.append(Refinement(confidence, given, kept))

    def close(
        self, observation: Observation, seconds: float, observe_seconds: float
    ) -> RecordedStep:
        """The step that is observed now, at `seconds`; observing the one before took `observe_seconds`."""
        step, place = observation.view.step, self._num_observed
        decision = self._open.pop(step, None) or _Decision(seen_steps=place)
        self._open = {number: kept for number, kept in self._open.items() if number > step}
        overlaps = decision.seen_steps < place or bool(self._open)
        total = observation.timing.total_seconds
        total = total if math.isfinite(total) else 0.0  # of who measures nothing
        start = seconds - total
        if overlaps:
            start = min(start, max(decision.seconds, self._end_seconds))
        else:  # an engine counts observing the last step to this one, before which requests may come
            start += observe_seconds
        # Clocks are read one after another; steps stay in order.
        start = max(start, self._start_seconds)
        self._num_observed = place + 1
        self._start_seconds, self._end_seconds = start, start + total
        if not _fits(decision, observation):
            decision = _Decision(seen_steps=place)
        return RecordedStep(
            observation=observation,
            start_seconds=start,
            planned=decision.plan,
            plan_faults=decision.plan_faults,
            refinements=tuple(decision.refinements),
            seen_steps=None if decision.seen_steps == place else decision.seen_steps,
        )


def _fits(decision: _Decision, observation: Observation) -> bool:
    """Whether it is of as many requests; else some ended since, or the planner was wrong: nobody planned for these."""
    plan, calls = decision.plan, decision.refinements
    answers = [] if plan is None else [plan.choices]
    tokens = [row for call in calls for row in (call.given_tokens, call.kept_tokens)]
    num_requests = len(observation.view.requests)
    return all(len(row) == num_requests for row in (*answers, *tokens))


def _tokens(plan: Plan) -> tuple[int, ...]:
    return tuple([choice.num_draft_tokens for choice in plan.choices])
