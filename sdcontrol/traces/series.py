"""A run over time in at most so many points, however long it is.

Points are merged in pairs when there are too many. Knows sums over steps; nothing of what they mean.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Point", "Series"]

_MOST_POINTS = 512


@dataclass(slots=True)
class Point:
    """Consecutive steps: between two of them time may have passed without work."""

    start_seconds: float
    busy_seconds: float = 0.0
    output_tokens: int = 0
    request_seconds: float = 0.0  # requests decoding, times the seconds that they did
    draft_tokens: Counter[str] = field(default_factory=Counter)  # by arm
    steps: int = 0

    def merge(self, later: "Point") -> None:
        """Take in the steps after these."""
        self.busy_seconds += later.busy_seconds
        self.output_tokens += later.output_tokens
        self.request_seconds += later.request_seconds
        self.draft_tokens.update(later.draft_tokens)
        self.steps += later.steps

    def to_json(self) -> dict[str, object]:
        """Throughput, mean batch and draft tokens by arm."""
        busy = self.busy_seconds or 1.0
        return {
            "start_seconds": self.start_seconds,
            "busy_seconds": self.busy_seconds,
            "steps": self.steps,
            "output_tokens": self.output_tokens,
            "tokens_per_busy_second": self.output_tokens / busy,
            "mean_batch_size": self.request_seconds / busy,
            "draft_tokens": dict(self.draft_tokens),
        }


class Series:
    """Points of equally many steps; each time there are too many, of twice as many."""

    def __init__(self, most_points: int = _MOST_POINTS) -> None:
        self._most_points = most_points
        self._points: list[Point] = []
        self._steps_each = 1

    def add(
        self,
        start_seconds: float,
        seconds: float,
        output_tokens: int,
        num_requests: int,
        draft_tokens: Mapping[str, int],
    ) -> None:
        """Add one step."""
        if not self._points or self._points[-1].steps >= self._steps_each:
            if len(self._points) >= self._most_points:
                self._halve()
            self._points.append(Point(start_seconds))
        point = self._points[-1]
        point.busy_seconds += seconds
        point.output_tokens += output_tokens
        point.request_seconds += num_requests * seconds
        if draft_tokens:
            point.draft_tokens.update(draft_tokens)
        point.steps += 1

    def points(self) -> tuple[Point, ...]:
        """What there is, in order of time."""
        return tuple(self._points)

    def _halve(self) -> None:
        pairs = zip(self._points[::2], self._points[1::2], strict=False)
        for earlier, later in pairs:
            earlier.merge(later)
        self._points = self._points[::2]
        self._steps_each *= 2
