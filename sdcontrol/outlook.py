"""Whether drafts are to be expected in the next step, from the plans so far.

Knows plans only. A fold over observations: a replay knows as much.
"""

from sdcontrol.core import Plan
from sdcontrol.policies.tries import try_of

__all__ = ["Outlook"]

_UNLIKELY = 0.05  # however little is gained
_MARGIN = 0.5
_RATE = 0.125


class Outlook:
    """How often drafts were planned right after a step without: what is missed by not waiting."""

    def __init__(self) -> None:
        self._share = 0.0  # nothing is missed, until something was
        self._was_off = False

    def is_quiet(self, gained: float) -> bool:
        """Whether the last step had no drafts, and the next is too unlikely to for tokens to be waited for.

        Drafts that are planned a step late cost a plain step at most, of whose time `gained` is
        gained by not waiting.
        """
        return self._was_off and self._share < max(_MARGIN * gained, _UNLIKELY)

    def note(self, plan: Plan) -> None:
        """Take note of a step's plan. A try is not missed where it is made a step later."""
        is_off = plan.is_off
        if self._was_off and (is_off or try_of(plan) is None):
            self._share += _RATE * ((not is_off) - self._share)
        self._was_off = is_off
