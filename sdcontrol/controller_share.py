"""The controller's share of the time, running, from what observations say it took.

Knows nothing of what is done about it. A fold over observations: nothing is measured again.
"""

from sdcontrol.core import Observation

__all__ = ["ControllerShare"]

_WEIGHS, _NEGLIGIBLE, _HEAVY = 0.015, 0.005, 0.02  # of a step
_RATE = 0.1


class ControllerShare:
    """Of the steps that decoded; one without requests has nothing but overhead."""

    def __init__(self) -> None:
        self._share = 0.0
        self.weighs = False
        """Whether it is so large that work is better put off; from then on until it all but vanishes."""
        self.is_heavy = False
        """Whether it is more than may be added to: less is urgent then."""

    def update(self, observation: Observation) -> None:
        """Take note of a step."""
        timing = observation.timing
        share = timing.controller_seconds / max(timing.total_seconds, 1e-9)
        if observation.view.requests and 0.0 <= share <= 1.0:  # False for NaN
            self._share += _RATE * (share - self._share)
            self.is_heavy = self._share > _HEAVY
            self.weighs = self._share > (_NEGLIGIBLE if self.weighs else _WEIGHS)
