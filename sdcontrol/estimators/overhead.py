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
_HALF_LIFE = 128  # steps of one kind, after which half of what was learnt of the other is believed
_BASE_REQUESTS = (
    8  # whose work a step's own is worth: what is learnt at one batch says something of others
)


class Overheads(NamedTuple):
    """Seconds of a step beside forward and drafting."""

    plain: float  # where nobody drafts
    drafting: float


class LearntOverhead:
    """The median of the last steps; where plain steps are hidden, of both kinds apart.

    A difference counts only where it is seen clearly, and not for ever. Plain steps cost nothing until
    that was measured where they were launched ahead: where drafts and plain steps take turns none is
    hidden, and yet all would be without the drafts.
    """

    def __init__(self) -> None:
        self.is_hidden = False
        self.typical: float | None = None  # of either kind; None: nothing was measured
        self.by_kind: Overheads | None = None  # None: not told apart
        self.waited = 0.0  # of a plain step between others with drafts, where they are told apart
        self.share = 0.0  # of a forward, that a step with drafts takes more beside it
        self._last: deque[float] = deque(maxlen=_STEPS)
        self._plain: deque[float] = deque(maxlen=_STEPS)  # per request
        self._drafting: deque[float] = deque(maxlen=_STEPS)
        self._waited: deque[float] = deque(maxlen=_STEPS)  # plain, and not launched ahead
        self._has_drafted = False  # in the last step
        self._age = 0  # steps since the last one of the other kind

    def update(
        self,
        seconds: float,
        forward_seconds: float,
        num_requests: int,
        *,
        drafts: bool,
        is_ahead: bool = False,
    ) -> None:
        """Learn from a step of these seconds."""
        self._last.append(seconds)
        self.typical = median(self._last)
        if not self.is_hidden:
            return
        work = _BASE_REQUESTS + num_requests
        kind = self._drafting if drafts else self._plain if is_ahead else self._waited
        kind.append(seconds / work)
        self._age = self._age + 1 if drafts == self._has_drafted else 0
        self._has_drafted = drafts
        plain, drafting = self._believed()
        is_seen = (drafting - plain) * work > _NOTICED * forward_seconds
        self.by_kind = Overheads(plain * work, drafting * work) if is_seen else None
        is_known = len(self._waited) >= _FEWEST
        self.waited = work * (median(self._waited) if is_known else drafting)
        self.share = (drafting - plain) * work / forward_seconds if is_seen else 0.0

    def _believed(self) -> Overheads:
        """Per request. Of the kind that was not seen for long less is believed."""
        if len(self._drafting) < _FEWEST:
            return Overheads(0.0, 0.0)
        believed = 0.5 ** (self._age / _HALF_LIFE)
        plain = median(self._plain) if len(self._plain) >= _FEWEST else 0.0
        drafting = median(self._drafting)
        if self._has_drafted:
            return Overheads(plain * believed, drafting)
        return Overheads(plain, plain + (drafting - plain) * believed)
