"""Between the engine and its planner: whatever a planner does, a step is decoded.

A plan that cannot be made or carried out costs one step without drafts. Knows plans and faults;
nothing of drafters or models.
"""

import time
from collections import Counter

from sdcontrol.core import BatchView, Confidence, Observation, Plan, Planner
from sdcontrol.interrupts import raise_interrupt
from sdcontrol.logs import EventLog

__all__ = ["PlannerGuard"]

log = EventLog(__name__)


class PlannerGuard:
    """A planner that never fails; without one, nobody drafts."""

    def __init__(self, planner: Planner | None) -> None:
        self._planner = planner
        self._faults: list[str] = []
        self._failures: Counter[str] = Counter()  # by verb
        self.observe_seconds = 0.0  # that observing took since they were taken

    @property
    def never_drafts(self) -> bool:
        """Whether there is no planner, or one that says so: drafters need not be told anything."""
        return self._planner is None or not getattr(self._planner, "drafts", True)

    @property
    def learns(self) -> bool:
        """Whether there is any use in telling it how free drafters would have done."""
        return self._planner is not None and getattr(self._planner, "learns", True)

    @property
    def allows_late_observations(self) -> bool:
        """Whether it may be asked for a plan before it is told what came of the one before.

        A planner that says nothing is told first: it may take plans and observations for pairs.
        """
        return self._planner is None or getattr(self._planner, "allows_late_observations", False)

    @property
    def plans_ahead(self) -> bool:
        """Whether it may be asked before the last step's tokens are known, and again once they are."""
        may_be_told_late = self.allows_late_observations
        return may_be_told_late and (
            self.never_drafts or getattr(self._planner, "plans_ahead", False)
        )

    @property
    def refines(self) -> bool:
        """Whether it may shorten drafts once they, or a round of them, have been made."""
        return self._planner is not None and getattr(self._planner, "refines", True)

    @property
    def refines_hinted(self) -> bool:
        """Whether it may shorten drafts of which a hint had said all before it planned them."""
        return self.refines and getattr(self._planner, "refines_hinted", True)

    def tell(self, name: str, *told: object) -> None:
        """Tell it something of the engine by its method `name`, where it has one."""
        tell = getattr(self._planner, name, None)
        try:
            if tell is not None:
                tell(*told)
        except Exception as error:
            self._fault(name, error)

    def refines_rounds_of(self, plan: Plan) -> bool:
        """Whether drafters are to wait for it after every round of `plan`, and not draft in full."""
        if not (self.refines and getattr(self._planner, "refines_between_rounds", True)):
            return False
        try:
            return bool(getattr(self._planner, "heeds", _always)(plan))
        except Exception as error:
            self._fault("heed", error)
            return True

    def plan(self, view: BatchView) -> Plan:
        """The planner's plan, checked, or no drafts."""
        if self._planner is None or not view.requests:
            return Plan.off(view)
        try:
            plan = self._planner.plan(view)
            plan.check(view)
        except Exception as error:
            self._fault("plan", error)
            plan = Plan.off(view, "planner failed")
        self._collect_faults()
        return plan

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        """The planner's shorter plan, or the plan as it was."""
        assert self._planner is not None
        try:
            refined = self._planner.refine(view, plan, confidence)
            refined.check(view)
        except Exception as error:
            self._fault("refine", error)
            refined = plan
        self._collect_faults()
        return refined

    def observe(self, observation: Observation) -> None:
        """Tell the planner. A fault here stands among those of the next step."""
        if self._planner is None:
            return
        started = time.perf_counter()
        try:
            self._planner.observe(observation)
        except Exception as error:
            self._fault("observe", error)
        self.observe_seconds += time.perf_counter() - started

    def take_observe_seconds(self) -> float:
        """What observing took since the last call."""
        seconds, self.observe_seconds = self.observe_seconds, 0.0
        return seconds

    def take_faults(self) -> tuple[str, ...]:
        """Faults since the last call, a controller's own guards included."""
        self._collect_faults()
        faults, self._faults = tuple(self._faults), []
        return faults

    def _collect_faults(self) -> None:
        """Those of a decision as soon as it is made: a late observation may not take them."""
        self._faults.extend(getattr(self._planner, "take_faults", tuple)())

    def _fault(self, verb: str, error: Exception) -> None:
        """Note it; log the 1st, 2nd, 4th, 8th ... of a verb: a planner may fail in every step."""
        raise_interrupt(error)
        self._failures[verb] += 1
        times = self._failures[verb]
        if times.bit_count() == 1:
            log.warning("planner_failed", verb=verb, error=repr(error), times=times)
        self._faults.append(f"planner failed to {verb}: {error!r}")


def _always(plan: Plan) -> bool:
    return True
