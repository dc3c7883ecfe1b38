"""Where the time of a step went.

On a device the target's forward is timed where it is done, by marks in the device's queue that are
read after the step's one copy. Drafting is timed by the host's clock on a device too: each round
ends with a copy, so that both clocks agree. Knows nothing of what is done in a phase.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Self

import torch

from sdcontrol.core import Timing

__all__ = ["DeviceMarks", "StepClock", "marks_of", "unmeasured"]

_PHASES = ("overhead", "controller", "draft", "verify", "wait", "meanwhile", "learning", "commit")


class DeviceMarks(Protocol):
    """Marks in a device's queue."""

    def add(self) -> None:
        """Set a mark behind all that the device was asked to do so far."""
        ...

    def seconds(self) -> float:
        """Between the first and the second mark, the third and the fourth, and so on, in all.

        Waits until the device has reached them.
        """
        ...

    def seconds_after(self, other: Self) -> float:
        """Between the last mark of `other` and the first of these, both reached."""
        ...

    def seconds_idle(self) -> float:
        """Between the second and the third mark, the fourth and the fifth, and so on, all reached."""
        ...


class CudaMarks:
    """Events of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def add(self) -> None:
        """See `DeviceMarks`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def seconds(self) -> float:
        """See `DeviceMarks`."""
        self._events[-1].synchronize()
        return self._elapsed(self._events)

    def seconds_idle(self) -> float:
        """See `DeviceMarks`."""
        return self._elapsed(self._events[1:-1])

    def seconds_after(self, other: Self) -> float:
        """See `DeviceMarks`."""
        return self._elapsed([other._events[-1], self._events[0]])

    def _elapsed(self, events: Sequence[torch.cuda.Event]) -> float:
        pairs = zip(events[::2], events[1::2], strict=True)
        return float(sum(start.elapsed_time(end) for start, end in pairs)) / 1e3


def marks_of(device: torch.device) -> DeviceMarks | None:
    """Marks of one step, where `device` has a queue of its own; None on a CPU."""
    return CudaMarks(device) if device.type == "cuda" else None


class StepClock:
    """Laps of one step, added up by phase; with `marks`, `verify` is the device's.

    What is done between the forward's launch and its verdicts (`meanwhile`, `learning` from the
    step before) then costs nothing, as long as it takes no longer than the forward. Of a step that
    was launched while the device was at the one `before`, nothing but what the device waited does; of one
    behind which the next was launched, that holds between forward and verdicts.
    """

    def __init__(
        self,
        marks: DeviceMarks | None = None,
        now: Callable[[], float] = time.perf_counter,
        *,
        before: "StepClock | None" = None,
    ) -> None:
        self._marks = marks
        self._before = before
        self._is_followed = False
        self._away_seconds = 0.0  # the caller's, between forward and verdicts
        self._now = now
        self._last = now()
        self._seconds = dict.fromkeys(_PHASES, 0.0)

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to `phase`."""
        now = self._now()
        self._seconds[phase] += now - self._last
        self._last = now
        if self._marks is not None and phase in {"draft", "verify"}:
            self._marks.add()

    def resume(self) -> None:
        """Verdicts are asked for: the time since the last lap was somebody else's."""
        now = self._now()
        self._away_seconds, self._last = now - self._last, now
        if self._marks is not None:
            self._marks.add()

    def catch_up(self) -> None:
        """The step before has landed: what its verdicts were waited for was its own time."""
        if self._before is None:
            return
        now, before = self._now(), self._before
        committed = 0.0 if self._marks is None else before._seconds["commit"]
        self._seconds["meanwhile"] += committed + now - before._last
        self._last, before._before = now, None  # or each would keep all that were before it

    def follow(self) -> None:
        """The next step has been launched since the last lap, which was its own time."""
        self._last = self._now()
        self._is_followed = True

    def timing(self, draft_seconds: Mapping[str, float], observe_seconds: float) -> Timing:
        """The step's times; what belongs to no family and not to the forward is overhead.

        `observe_seconds` is what observing took before the step.
        """
        seconds = self._seconds
        verify = seconds["verify"] + seconds["wait"]
        controller = seconds["controller"] + observe_seconds
        overhead = seconds["overhead"]
        overhead += max(seconds["draft"] - sum(draft_seconds.values()), 0.0)
        if self._marks is None:
            controller += seconds["learning"]
            overhead += seconds["meanwhile"] + seconds["commit"]
        else:
            host, verify = verify, self._marks.seconds()
            share = self._share_waited_for(overhead + controller)
            overhead, controller = share * overhead, share * controller
            overhead += self._waited_meanwhile(host - verify)
            if not self._is_followed:
                overhead += seconds["commit"]
        return Timing(
            draft_seconds=draft_seconds,
            verify_seconds=verify,
            controller_seconds=controller,
            overhead_seconds=overhead,
        )

    def _share_waited_for(self, launching: float) -> float:
        """Of the seconds that the host took to launch the step, those in which the device idled."""
        if self._marks is None or self._before is None or self._before._marks is None:
            return 1.0
        idle = self._marks.seconds_after(self._before._marks)
        return min(max(idle, 0.0) / launching, 1.0) if launching else 0.0

    def _waited_meanwhile(self, waited: float) -> float:
        """Seconds between forward and verdicts in which the device idled; the host `waited` so much longer for it."""
        own = self._seconds["meanwhile"] + self._seconds["learning"]
        if self._marks is not None and (self._before is not None or self._is_followed):
            return min(max(self._marks.seconds_idle() - self._away_seconds, 0.0), own)
        return max(waited + own, 0.0)


def unmeasured(timing: Timing) -> Timing:
    """Of a step that also captured a graph or compiled: how long its phases take, it does not tell."""
    controller = timing.controller_seconds
    return Timing(controller_seconds=controller, overhead_seconds=timing.total_seconds - controller)
