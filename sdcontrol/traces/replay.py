"""Exact replay: would a controller made as recorded, told what was observed, plan the same again?

The state of a controller is a fold over observations, so it must; where it does not, the controller
was changed, or depends on something that is not in its observations. A step that was planned before
the one before it was observed is planned so again. Knows nothing of engines.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

from sdcontrol import policies
from sdcontrol.controller import Controller
from sdcontrol.core import Choice, Observation, Plan
from sdcontrol.errors import ConfigError, TraceError
from sdcontrol.interrupts import raise_interrupt
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.schema import RecordedStep

__all__ = ["Difference", "ReplayReport", "controller_of", "replay_exactly", "with_kept_files"]

_MOST_SHOWN = 20  # differences that a report keeps


@dataclass(frozen=True, slots=True)
class Difference:
    """One decision that came out otherwise. Words, since they are for people."""

    place: int  # of the step in the trace, from 0
    step: int  # as its view numbers it
    verb: str  # "plan" or "refine"
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.verb}: recorded {self.recorded}; replayed {self.replayed}"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What came of an exact replay. Plans are compared by their choices, not by their reasons."""

    num_steps: int
    num_plans: int
    num_refinements: int
    num_differences: int
    differences: tuple[Difference, ...]  # the first of them
    cut: str  # why the trace ends early; empty where it does not

    @property
    def is_exact(self) -> bool:
        """Whether every decision came out as recorded."""
        return self.num_differences == 0

    def __str__(self) -> str:
        decisions = f"{self.num_plans} plans and {self.num_refinements} refinements"
        cut = f" (the trace is cut: {self.cut})" if self.cut else ""
        if self.is_exact:
            return f"all {decisions} of {self.num_steps} steps as recorded{cut}"
        shown = "\n".join(f"  {difference}" for difference in self.differences)
        return f"{self.num_differences} of {decisions} differ{cut}; the first:\n{shown}"


def replay_exactly(trace: Trace | Path | str, controller: Controller | None = None) -> ReplayReport:
    """Feed the recorded observations to `controller`; by default to one made as recorded.

    A controller of your own must be fresh and have no clock. Raises `TraceError` where the trace
    cannot be read, or does not say how its controller was made.
    """
    trace = trace if isinstance(trace, Trace) else Trace(trace)
    controller = controller_of(trace) if controller is None else controller
    counts, num_differences, shown = Counter[str](), 0, list[Difference]()
    for difference in _differences(controller, trace.steps(), counts):
        num_differences += 1
        if len(shown) < _MOST_SHOWN:
            shown.append(difference)
    return ReplayReport(
        num_steps=counts["steps"],
        num_plans=counts["plans"],
        num_refinements=counts["refinements"],
        num_differences=num_differences,
        differences=tuple(shown),
        cut=trace.cut,
    )


def controller_of(trace: Trace) -> Controller:
    """A fresh controller as the recorded one was, without a clock.

    Raises `TraceError` where the trace does not say how to make it.
    """
    facts, policy = trace.header.controller, trace.header.policy
    remedy = "give replay_exactly a controller made as the recorded one was"
    if facts is None:
        raise TraceError(f"{trace.path} was recorded around another planner; {remedy}")
    if facts.steps_before:
        raise TraceError(
            f"{trace.path}: the controller had observed {facts.steps_before} steps before the "
            "recording began; record with a fresh one"
        )
    if facts.has_own_estimates:
        raise TraceError(f"{trace.path}: the controller had estimates of its own; {remedy}")
    if policy is None:
        raise TraceError(f"{trace.path}: the policy was given as an object; {remedy}")
    try:
        config = policies.parse(with_kept_files(trace, policy))
        controller = Controller(
            config,
            seed=facts.seed,
            plan_budget_seconds=facts.plan_budget_seconds,
            max_draft_tokens=facts.max_draft_tokens,
            token_edges=facts.token_edges,
            clock=None,
        )
    except ConfigError as error:
        raise TraceError(f"{trace.path}: policy {policy}: {error}; {remedy}") from error
    if facts.machine is not None:
        controller.price_by(facts.machine)
    if facts.may_go_ahead:
        controller.goes_ahead()
    return controller


def with_kept_files(trace: Trace, policy: Mapping[str, object]) -> dict[str, object]:
    """A policy's settings, such as `trace.header.policy`, with the paths of files kept with the trace."""
    files = trace.header.files
    return {
        name: str(trace.path / value) if isinstance(value, str) and value in files else value
        for name, value in policy.items()
    }


def _differences(
    controller: Controller, steps: Iterable[RecordedStep], counts: Counter[str]
) -> Iterator[Difference]:
    """Decide and learn again, in the order of the recording; `counts` says how much of it there was."""
    waiting: deque[_Placed] = deque()
    for place, step in enumerate(steps):
        counts.update(steps=1, plans=step.planned is not None, refinements=len(step.refinements))
        yield from _learn(
            controller, waiting, place if step.seen_steps is None else step.seen_steps
        )
        yield from _decide(controller, place, step)
        waiting.append((place, step.observation))
    yield from _learn(controller, waiting, counts["steps"])


_Placed = tuple[int, Observation]
"""The place of a step in the trace, and what came of it."""


def _learn(controller: Controller, waiting: deque[_Placed], num_steps: int) -> Iterator[Difference]:
    """Learn what came of the first steps, as far as that waits."""
    while waiting and waiting[0][0] < num_steps:
        place, observation = waiting.popleft()
        try:
            controller.observe(observation)
        except Exception as error:
            raise_interrupt(error)
            number, raised = observation.view.step, f"raised {error!r}"
            yield Difference(place, number, "observe", "an observation", raised)


def _decide(controller: Controller, place: int, step: RecordedStep) -> Iterator[Difference]:
    """Make the decisions of one step again."""
    number = step.observation.view.step
    for verb, recorded, decide in _decisions(controller, step):
        try:
            plan = decide()
        except Exception as error:  # of whatever planner is tried
            raise_interrupt(error)
            yield Difference(place, number, verb, _words(recorded), f"raised {error!r}")
            continue
        if plan.choices != recorded.choices:
            yield Difference(place, number, verb, _words(recorded), _words(plan))


def _decisions(
    controller: Controller, step: RecordedStep
) -> Iterator[tuple[str, Plan, Callable[[], Plan]]]:
    """Each decision of a step: its verb, what was recorded, and how to make it again."""
    view = step.observation.view
    planned = step.planned
    if planned is None:
        planned = step.observation.plan
    else:
        yield "plan", planned, partial(controller.plan, view, faults=step.plan_faults)
    for call in step.refinements:
        given, kept = (_shortened(planned, n) for n in (call.given_tokens, call.kept_tokens))
        yield "refine", kept, partial(controller.refine, view, given, call.confidence)


def _shortened(plan: Plan, tokens: Sequence[int]) -> Plan:
    """`plan` with these numbers of draft tokens."""
    if all(choice.num_draft_tokens == n for choice, n in zip(plan.choices, tokens, strict=True)):
        return plan
    pairs = zip(plan.choices, tokens, strict=True)
    return Plan(tuple([Choice.of(c.drafter, n) if c.drafter else c for c, n in pairs]), plan.reason)


def _words(plan: Plan) -> str:
    """The choices, those of neighbours that are alike counted together."""
    runs = [(choice, len(list(same))) for choice, same in groupby(plan.choices)]
    said = [
        (f"{count} x " if count > 1 else "")
        + (f"{choice.drafter}:{choice.num_draft_tokens}" if choice.drafter else "off")
        for choice, count in runs
    ]
    return f"[{', '.join(said)}]" + (f" ({plan.reason})" if plan.reason else "")
