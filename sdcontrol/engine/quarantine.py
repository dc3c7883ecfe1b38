"""Families of drafters that raised or returned nonsense, and are offered no more.

Knows names and reasons; nothing of drafters.
"""

from sdcontrol.interrupts import raise_interrupt
from sdcontrol.logs import EventLog

__all__ = ["Quarantine"]

log = EventLog(__name__)


class Quarantine:
    """Who is in it, and what no step has told of yet."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}  # by family
        self._untold: dict[str, str] = {}

    def put(self, family: str, error: Exception) -> None:
        """Offer `family` no more. Raises what was no error but an interrupt."""
        raise_interrupt(error)
        self._untold[family] = reason = f"{type(error).__name__}: {error}"
        self.reasons[family] = reason
        log.warning("drafter_quarantined", family=family, reason=reason)

    def take_faults(self) -> tuple[str, ...]:
        """The quarantines since the last call."""
        untold, self._untold = self._untold, {}
        return tuple([f"drafter {who} quarantined: {why}" for who, why in untold.items()])

    def forgive(self) -> None:
        """Lift what no step has told of: the step that was to do so failed too, and may be to blame."""
        for family in self._untold:
            self.reasons.pop(family, None)
            log.info("drafter_forgiven", family=family)
        self._untold = {}
