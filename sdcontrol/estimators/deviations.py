"""How each request deviates from its drafters' averages: arrays by (request slot, arm).

Knows nothing of hints or averages. Requests get a slot when first observed, and are forgotten some
time after they leave, when room runs out. Slot 0 is a request never seen; arm 0 an arm never seen.
"""

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import BatchView, FloatArray

__all__ = ["DEVIATION_VARIANCE", "Deviations"]

IntArray = NDArray[np.intp]

DEVIATION_VARIANCE = 1.0  # of requests around the average of an arm, in squared log-odds
_KEEP_STEPS = 512  # an absent request may be forgotten after this many steps
_FIRST_SLOTS = 64
_BLANK = (0.0, DEVIATION_VARIANCE, 0.0, 1.0, 0.0)


class Deviations:
    """State of every (request, arm); all arrays are `[slots, arms]` or `[slots, arms, K]`."""

    def __init__(self, depth: int, num_arms: int) -> None:
        self._slot_of: dict[str, int] = {}
        self._free: list[int] = list(range(_FIRST_SLOTS - 1, 0, -1))
        self._last_seen: IntArray = np.zeros(_FIRST_SLOTS, dtype=np.intp)
        self._allocate(_FIRST_SLOTS, num_arms, depth)

    def _allocate(self, slots: int, arms: int, depth: int) -> None:
        self.mean: FloatArray = np.zeros((slots, arms))  # log-odds beside the average
        self.variance: FloatArray = np.full((slots, arms), DEVIATION_VARIANCE)
        self.trend: FloatArray = np.zeros((slots, arms))  # running mean of standardised errors
        self.odds_ratio: FloatArray = np.ones((slots, arms))  # exp(mean)
        self.given: FloatArray = np.zeros((slots, arms))  # tokens lately given to the average
        self.tested: FloatArray = np.zeros((slots, arms, depth))
        self.accepted: FloatArray = np.zeros((slots, arms, depth))

    @property
    def num_slots(self) -> int:
        """Requests that there is room for, the unseen one included."""
        return len(self._last_seen)

    def slots(self, view: BatchView) -> IntArray:
        """The slot of each request of the view, `[requests]`; 0 for one never seen."""
        slot_of = self._slot_of
        return np.array([slot_of.get(request.id, 0) for request in view.requests], dtype=np.intp)

    def admit(self, view: BatchView) -> IntArray:
        """`slots`, after giving one to every new request of the view."""
        slots = self.slots(view)
        if slots.all():
            self._last_seen[slots] = view.step
            return slots
        new = [request.id for request in view.requests if request.id not in self._slot_of]
        if len(new) > len(self._free):
            self._forget_absent(view.step)
        if len(new) > len(self._free):
            self._grow(max(2 * self.num_slots, self.num_slots + len(new)), self.mean.shape[1])
        for request_id in new:
            self._slot_of[request_id] = self._free.pop()
        slots = self.slots(view)
        self._last_seen[slots] = view.step
        return slots

    def add_arms(self, num_arms: int) -> None:
        """Room for `num_arms` arms in all."""
        if num_arms > self.mean.shape[1]:
            self._grow(self.num_slots, num_arms)

    def forget_counts(self, arm: int) -> None:
        """Start the counts of one arm over, for every request."""
        self.tested[:, arm] = self.accepted[:, arm] = 0.0

    def _forget_absent(self, step: int) -> None:
        for request_id, slot in list(self._slot_of.items()):
            if self._last_seen[slot] < step - _KEEP_STEPS:
                self._free.append(self._slot_of.pop(request_id))
                for array, blank in zip(self._flat_arrays(), _BLANK, strict=True):
                    array[slot] = blank
                self.tested[slot] = self.accepted[slot] = 0.0

    def _flat_arrays(self) -> tuple[FloatArray, ...]:
        return self.mean, self.variance, self.trend, self.odds_ratio, self.given

    def _grow(self, slots: int, arms: int) -> None:
        old, old_tested, old_accepted = self._flat_arrays(), self.tested, self.accepted
        used_slots, used_arms = old[0].shape
        self._allocate(slots, arms, old_tested.shape[2])
        for array, before in zip(self._flat_arrays(), old, strict=True):
            array[:used_slots, :used_arms] = before
        self.tested[:used_slots, :used_arms] = old_tested
        self.accepted[:used_slots, :used_arms] = old_accepted
        self._free.extend(range(slots - 1, used_slots - 1, -1))
        self._last_seen = np.concatenate([self._last_seen, np.zeros(slots - used_slots, np.intp)])
