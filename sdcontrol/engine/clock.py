"""Where the time of a step went."""

import time
from collections.abc import Callable, Mapping

from sdcontrol.core import Timing

__all__ = ["StepClock"]


class StepClock:
    """Laps of one step, added up by phase."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last = now()
        self._seconds = {"overhead": 0.0, "controller": 0.0, "draft": 0.0, "verify": 0.0}

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to `phase`."""
        now = self._now()
        self._seconds[phase] += now - self._last
        self._last = now

    def timing(self, draft_seconds: Mapping[str, float], observe_seconds: float) -> Timing:
        """The step's times; drafting time that belongs to no family counts as overhead."""
        drafted = sum(draft_seconds.values())
        return Timing(
            draft_seconds=draft_seconds,
            verify_seconds=self._seconds["verify"],
            controller_seconds=self._seconds["controller"] + observe_seconds,
            overhead_seconds=self._seconds["overhead"] + max(self._seconds["draft"] - drafted, 0.0),
        )
