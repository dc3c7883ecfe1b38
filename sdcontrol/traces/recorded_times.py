"""Step times as recorded: what a recorded step took, for every simulated step that is the same.

The other steps take what lines fitted to the recording say. Steps are the same where all of their
work is; where several recorded ones are, they are given in their order, each once. Knows recorded
steps and seconds; nothing of models, machines or policies.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from sdcontrol.core import Timing
from sdcontrol.estimators.known_machine import KnownMachine
from sdcontrol.traces.fitted_times import FittedTimes, work_of
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.schema import RecordedStep
from sdcontrol.traces.step_times import StepWork

__all__ = ["RecordedTimes"]

_COUNTS = tuple(field.name for field in fields(StepWork) if field.name != "drafts")


@dataclass(frozen=True, slots=True)
class _Taken:
    """What one recorded step took, and how long the loop then did other things."""

    timing: Timing
    pause_seconds: float


class RecordedTimes:
    """The recorded machine without a model of it, as far as a simulation repeats the recording.

    For one simulation: recorded steps are used up. `RecordedTimes.of(trace)` takes all of it from the
    trace, without whose `token_edges` and `machine` a controller may plan otherwise than the recorded one.
    Raises `TraceError` where there is too little to fit the other steps to.
    """

    def __init__(
        self,
        steps: Iterable[RecordedStep],
        token_edges: Sequence[int] = (),
        machine: KnownMachine | None = None,
    ) -> None:
        recorded = list(steps)
        self._fitted = FittedTimes((step.observation for step in recorded), token_edges, machine)
        self.token_edges, self.machine = self._fitted.token_edges, machine
        self.cost = self._fitted.cost
        self._waiting: dict[object, deque[_Taken]] = {}
        for step, pause_seconds in zip(recorded, _pauses(recorded), strict=True):
            timing = step.observation.timing
            if math.isfinite(timing.total_seconds + pause_seconds):  # else nobody measured it
                facts = _facts(work_of(step.observation))
                taken = _Taken(timing, pause_seconds)
                self._waiting.setdefault(facts, deque()).append(taken)
        self.num_steps = len(recorded)
        self.num_repeated = 0  # recorded steps that were simulated
        self._last: tuple[StepWork, _Taken] | None = None

    @classmethod
    def of(cls, trace: Trace) -> "RecordedTimes":
        """All steps of `trace`, for a controller that knows what the recorded one knew."""
        return cls(trace.steps(), trace.token_edges, trace.machine)

    def timing(self, work: StepWork) -> Timing:
        """Seconds of the recorded step with this work, or else what such a step takes on average.

        The same answer where the same object is asked about again, for what is counted of a step.
        """
        if self._last is not None and work is self._last[0]:
            return self._last[1].timing
        waiting = self._waiting.get(_facts(work))
        if not waiting:
            return self._fitted.timing(work)
        self.num_repeated += 1
        self._last = work, waiting.popleft()
        return self._last[1].timing

    def pause_seconds(self, work: StepWork) -> float:
        """From the end of the step just asked about to the next; 0 where it was not recorded."""
        if self._last is None or work is not self._last[0]:
            return 0.0
        return self._last[1].pause_seconds


def _pauses(steps: list[RecordedStep]) -> list[float]:
    """Seconds between the end of each step and the beginning of the next; 0 after the last.

    Negative where the next one was begun earlier: observing a step is counted to the one after it.
    """
    ends = [step.start_seconds + step.observation.timing.total_seconds for step in steps]
    starts = [step.start_seconds for step in steps[1:]]
    return [start - end for end, start in zip(ends, starts, strict=False)] + [0.0]


def _facts(work: StepWork) -> tuple[object, ...]:
    """All of a step's work. Of what rounds read, an observation knows the sum alone."""
    drafts = tuple(
        (family, draft.requests_by_round, sum(draft.kv_tokens_by_round), draft.catch_up_tokens)
        for family, draft in sorted(work.drafts.items())
    )
    return drafts, *(getattr(work, name) for name in _COUNTS)
