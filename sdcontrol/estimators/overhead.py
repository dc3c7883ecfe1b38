"""What steps cost beside their forwards and drafting, with and without drafts.

Where a device is kept busy the host's work costs nothing, as long as nobody drafts: then steps are
launched before the last one's tokens are known. Drafts make the host wait for those, and the device
for the host. Knows seconds and counts only.
"""

from collections import deque
from statistics import median
from typing import NamedTuple

__all__ = ["LearntOverhead", "Overheads"]

_STEPS = 9  # whose median is a typical one
_FEWEST = 3  # of either kind, before they are told apart
_NOTICED = 0.05  # of a forward: a smaller difference is not told from noise
_HALF_LIFE = 128  # steps without drafts, after which half of a difference is believed
_BASE_REQUESTS = (
    8  # whose work a step's own is worth: what is learnt at one batch says something of others
)


class Overheads(NamedTuple):
    """Seconds of a step beside forward and drafting."""

    plain: float  # where nobody drafts
    drafting: float


class LearntOverhead:
    """Medians of the last steps; a difference of the kinds only where it is seen clearly, and not for ever."""

    def __init__(self) -> None:
        self.typical: float | None = None  # of either kind; None: nothing was measured
        self.by_kind: Overheads | None = None  # None: not told apart
        self._last: deque[float] = deque(maxlen=_STEPS)
        self._plain: deque[float] = deque(maxlen=_STEPS)  # per request
        self._drafting: deque[float] = deque(maxlen=_STEPS)
        self._age = 0

    def update(
        self, seconds: float, forward_seconds: float, num_requests: int, *, drafts: bool
    ) -> None:
        """Learn from a step of these seconds."""
        self._last.append(seconds)
        self.typical = median(self._last)
        work = _BASE_REQUESTS + num_requests
        (self._drafting if drafts else self._plain).append(seconds / work)
        self._age = 0 if drafts else self._age + 1
        self.by_kind = None
        if min(len(self._plain), len(self._drafting)) < _FEWEST:
            return
        plain = median(self._plain) * work
        more = (median(self._drafting) * work - plain) * 0.5 ** (self._age / _HALF_LIFE)
        if more > _NOTICED * forward_seconds:
            self.by_kind = Overheads(plain, plain + more)
