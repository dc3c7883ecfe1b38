"""How each request deviates from its drafters' averages: arrays by (request slot, arm).

Knows nothing of hints or averages. Requests get a slot when first observed, and are forgotten some
time after they leave, when room runs out. Slot 0 is a request never seen; arm 0 an arm never seen.
"""

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import BatchView, FloatArray

__all__ = [
    "ACCEPTED",
    "DEVIATION_VARIANCE",
    "GIVEN",
    "MEAN",
    "MOST_VARIANCE",
    "ODDS_RATIO",
    "TESTED",
    "TREND",
    "VARIANCE",
    "Deviations",
]

IntArray = NDArray[np.int64]

DEVIATION_VARIANCE = 1.0  # of requests around the average of an arm, in squared log-odds, at first
MOST_VARIANCE = 4.0  # the same, of an arm that some requests accept nearly always and others never
_KEEP_STEPS = 512  # an absent request may be forgotten after this many steps
_FIRST_SLOTS = 64

MEAN = 0  # log-odds beside the average
VARIANCE = 1  # no more than that of the arm, whatever stands here
TREND = 2  # running mean of standardised errors
ODDS_RATIO = 3  # exp(mean)
GIVEN = 4  # tokens lately given to the average
_BLANK = (0.0, MOST_VARIANCE, 0.0, 1.0, 0.0)

TESTED, ACCEPTED = 0, 1


class Deviations:
    """`state[slot, arm]` is MEAN, VARIANCE, ...; `counts[slot, arm]` TESTED and ACCEPTED, `[2, K]`.

    `variances[arm]` is how far requests were found to lie from the average of an arm.
    """

    def __init__(self, depth: int, num_arms: int) -> None:
        self._slot_of: dict[str, int] = {}
        self._free: list[int] = list(range(_FIRST_SLOTS - 1, 0, -1))
        self.last_seen: IntArray = np.zeros(_FIRST_SLOTS, dtype=np.int64)  # step, by slot
        self.variances: FloatArray = np.full(num_arms, DEVIATION_VARIANCE)
        self._allocate(_FIRST_SLOTS, num_arms, depth)

    def _allocate(self, slots: int, arms: int, depth: int) -> None:
        self.state: FloatArray = np.tile(np.array(_BLANK), (slots, arms, 1))
        self.counts: FloatArray = np.zeros((slots, arms, 2, depth))

    @property
    def num_slots(self) -> int:
        """Requests that there is room for, the unseen one included."""
        return len(self.last_seen)

    def slots(self, view: BatchView) -> IntArray:
        """The slot of each request of the view, `[requests]`; 0 for one never seen."""
        slot_of = self._slot_of
        return np.array([slot_of.get(request.id, 0) for request in view.requests], np.int64)

    def admit(self, view: BatchView) -> IntArray:
        """`slots`, after giving one to every new request of the view."""
        slots = self.slots(view)
        if not slots.all():
            ids = dict.fromkeys([request.id for request in view.requests])
            new = [request_id for request_id in ids if request_id not in self._slot_of]
            if len(new) > len(self._free):
                self._forget_absent(view.step)
            if len(new) > len(self._free):
                self._grow(max(2 * self.num_slots, self.num_slots + len(new)), self.state.shape[1])
            for request_id in new:
                self._slot_of[request_id] = self._free.pop()
            slots = self.slots(view)
        self.last_seen[slots] = view.step
        return slots

    def add_arms(self, num_arms: int) -> None:
        """Room for `num_arms` arms in all."""
        if num_arms > self.state.shape[1]:
            self._grow(self.num_slots, num_arms)
            new = np.full(num_arms - len(self.variances), DEVIATION_VARIANCE)
            self.variances = np.concatenate([self.variances, new])

    def forget_counts(self, arm: int) -> None:
        """Start the counts of one arm over, for every request."""
        self.counts[:, arm] = 0.0

    def _forget_absent(self, step: int) -> None:
        for request_id, slot in list(self._slot_of.items()):
            if self.last_seen[slot] < step - _KEEP_STEPS:
                self._free.append(self._slot_of.pop(request_id))
                self.state[slot], self.counts[slot] = _BLANK, 0.0

    def _grow(self, slots: int, arms: int) -> None:
        state, counts = self.state, self.counts
        used_slots, used_arms = state.shape[:2]
        self._allocate(slots, arms, counts.shape[3])
        self.state[:used_slots, :used_arms] = state
        self.counts[:used_slots, :used_arms] = counts
        self._free.extend(range(slots - 1, used_slots - 1, -1))
        self.last_seen = np.concatenate([self.last_seen, np.zeros(slots - used_slots, np.int64)])
