"""Where the time of a step went.

On a device the target's forward is timed where it is done, by marks in the device's queue that are
read after the step's one copy. Drafting is timed by the host's clock on a device too: each round
ends with a copy, so that both clocks agree. Knows nothing of what is done in a phase.
"""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from sdcontrol.core import Timing

__all__ = ["DeviceMarks", "StepClock", "marks_of"]


class DeviceMarks(Protocol):
    """Marks in a device's queue."""

    def add(self) -> None:
        """Set a mark behind all that the device was asked to do so far."""
        ...

    def seconds(self) -> float:
        """Between the last two marks; waits until the device has reached them."""
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
        start, end = self._events[-2:]
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def marks_of(device: torch.device) -> DeviceMarks | None:
    """Marks of one step, where `device` has a queue of its own; None on a CPU."""
    return CudaMarks(device) if device.type == "cuda" else None


class StepClock:
    """Laps of one step, added up by phase; with `marks`, `verify` is the device's."""

    def __init__(
        self, marks: DeviceMarks | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._marks = marks
        self._now = now
        self._last = now()
        self._seconds = {"overhead": 0.0, "controller": 0.0, "draft": 0.0, "verify": 0.0}

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to `phase`."""
        now = self._now()
        self._seconds[phase] += now - self._last
        self._last = now
        if self._marks is not None and phase in {"draft", "verify"}:
            self._marks.add()

    def timing(self, draft_seconds: Mapping[str, float], observe_seconds: float) -> Timing:
        """The step's times; what belongs to no family and not to the forward is overhead."""
        verify = self._seconds["verify"]
        drafted = sum(draft_seconds.values())
        beside = max(self._seconds["draft"] - drafted, 0.0)
        if self._marks is not None:
            host, verify = verify, self._marks.seconds()
            beside += max(host - verify, 0.0)
        return Timing(
            draft_seconds=draft_seconds,
            verify_seconds=verify,
            controller_seconds=self._seconds["controller"] + observe_seconds,
            overhead_seconds=self._seconds["overhead"] + beside,
        )
