"""Whether what was observed may wait to be learnt, where steps are so short that learning weighs.

Learning from four steps at once takes less than four times as long as from one: what a forward
pushed out of the caches is fetched once, and costs are learnt from the last alone. Knows nothing of what is learnt. A fold over observations, like all that
decides: how long the controller took is what they say, never measured again.
"""

from sdcontrol.core import Observation

__all__ = ["Waiting"]

_MOST_WAITING = 4  # observations, the last one included
_SHARE = 0.02  # of a step, that the controller may take without making anything wait
_RATE = 0.1
_YOUNG_TOKENS = 64  # generated; before that every step is news


class Waiting:
    """The controller's share of the time, running."""

    def __init__(self) -> None:
        self._share = 0.0

    def may_wait(self, observation: Observation, num_waiting: int) -> bool:
        """Whether `num_waiting` observations, of which this is the last, may wait for the next."""
        timing = observation.timing
        share = timing.controller_seconds / max(timing.total_seconds, 1e-9)
        if 0.0 <= share <= 1.0:  # False for NaN
            self._share += _RATE * (share - self._share)
        if self._share <= _SHARE or num_waiting >= _MOST_WAITING or observation.faults:
            return False
        requests = observation.view.requests
        return all(request.generated_tokens >= _YOUNG_TOKENS for request in requests)
