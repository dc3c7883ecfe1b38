"""Stretches of a run in which much the same was chosen under much the same load.

Knows observations only. A run is cut into short windows; neighbours that are alike are joined.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from sdcontrol.core import Observation

__all__ = ["Regime", "RegimeFinder"]

_WINDOWS = 50  # that a run is cut into
_LEAST_STEPS = 8  # of a window
_SAME_LENGTH = 1.0  # draft tokens per request
_SAME_RATIO = 1.5  # of batch sizes, and of step times


@dataclass(frozen=True, slots=True)
class Regime:
    """Steps `first` to `last` of a trace, counted from 0; the rest are means over steps."""

    first: int
    last: int
    arm: str  # the most common choice; "off" for none
    draft_tokens: float  # per request
    batch_size: float
    step_seconds: float

    @property
    def num_steps(self) -> int:
        """How long it lasted."""
        return self.last - self.first + 1

    def is_like(self, other: "Regime") -> bool:
        """Whether the two may be called one."""
        return (
            self.arm == other.arm
            and abs(self.draft_tokens - other.draft_tokens) <= _SAME_LENGTH
            and _are_close(self.batch_size, other.batch_size)
            and _are_close(self.step_seconds, other.step_seconds)
        )

    def joined(self, other: "Regime") -> "Regime":
        """This one and the next as one."""
        share = self.num_steps / (self.num_steps + other.num_steps)

        def mean(one: float, two: float) -> float:
            return share * one + (1.0 - share) * two

        return Regime(
            first=self.first,
            last=other.last,
            arm=self.arm,
            draft_tokens=mean(self.draft_tokens, other.draft_tokens),
            batch_size=mean(self.batch_size, other.batch_size),
            step_seconds=mean(self.step_seconds, other.step_seconds),
        )

    def __str__(self) -> str:
        return (
            f"steps {self.first} to {self.last}: mostly {self.arm}, {self.draft_tokens:.1f} draft "
            f"tokens per request, batch {self.batch_size:.1f}, {1e3 * self.step_seconds:.2f} ms"
        )


@dataclass(slots=True)
class _Window:
    """Sums over steps that are not a regime yet."""

    first: int
    steps: int = 0
    requests: int = 0
    draft_tokens: int = 0
    seconds: float = 0.0
    arms: Counter[str] = field(default_factory=Counter)

    def add(self, observation: Observation) -> None:
        choices, seconds = observation.plan.choices, observation.timing.total_seconds
        self.steps += 1
        self.requests += len(choices)
        self.draft_tokens += sum([choice.num_draft_tokens for choice in choices])
        self.seconds += seconds if math.isfinite(seconds) else 0.0
        self.arms.update([choice.drafter or "off" for choice in choices])

    def regime(self, last: int) -> Regime:
        return Regime(
            first=self.first,
            last=last,
            arm=self.arms.most_common(1)[0][0],
            draft_tokens=self.draft_tokens / self.requests,
            batch_size=self.requests / self.steps,
            step_seconds=self.seconds / self.steps,
        )


class RegimeFinder:
    """Told every step in order, finds the regimes. `num_steps` sets how long a window is."""

    def __init__(self, num_steps: int) -> None:
        self._window_steps = max(_LEAST_STEPS, num_steps // _WINDOWS)
        self._regimes: list[Regime] = []
        self._window: _Window | None = None

    def add(self, place: int, observation: Observation) -> None:
        """The step at `place` of the trace; those without requests count for nothing."""
        if not observation.view.requests:
            return
        self._window = self._window or _Window(place)
        self._window.add(observation)
        if self._window.steps == self._window_steps:
            self._close(self._window.regime(place))

    def found(self) -> tuple[Regime, ...]:
        """The regimes of the whole windows so far."""
        return tuple(self._regimes)

    def _close(self, regime: Regime) -> None:
        self._window = None
        if self._regimes and self._regimes[-1].is_like(regime):
            self._regimes[-1] = self._regimes[-1].joined(regime)
        else:
            self._regimes.append(regime)


def _are_close(one: float, other: float) -> bool:
    return max(one, other) <= _SAME_RATIO * min(one, other)
