"""The controller's share of the time, running, from what observations say it took.

Knows nothing of what is done about it. A fold over observations: nothing is measured again.
"""

from sdcontrol.core import Observation

__all__ = ["ControllerShare"]

_WEIGHS, _NEGLIGIBLE, _HEAVY = 0.02, 0.0125, 0.02  # of a step
_RATE = 0.1
_FIRST_STEPS = 32  # in which much is fetched for the first time

# What a step counts for at most: what is fetched once, or waited, says little of the next ones.
_MOST = 0.05


class ControllerShare:
    """Of the steps that decoded; one without requests has nothing but overhead."""

    def __init__(self) -> None:
        self._share, self._steps = 0.0, 0
        self.weighs = False
        """Whether it is so large that work is better put off. What is put off makes it smaller: after the
        first steps it weighs until it would not even if nothing were put off."""
        self.is_heavy = False
        """Whether it is more than may be added to: less is urgent then."""

    def update(self, observation: Observation) -> None:
        """Take note of a step."""
        timing = observation.timing
        share = timing.controller_seconds / max(timing.total_seconds, 1e-9)
        if not (observation.view.requests and 0.0 <= share <= 1.0):  # True for NaN
            return
        self._share += _RATE * (min(share, _MOST) - self._share)
        self._steps += 1
        stays = self.weighs and self._steps > _FIRST_STEPS
        self.is_heavy = self._share > _HEAVY
        self.weighs = self._share > (_NEGLIGIBLE if stays else _WEIGHS)
