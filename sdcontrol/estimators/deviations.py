"""What is kept of each request, by (slot, arm): see `levels` for what it means.

Knows nothing of hints or averages. Requests get a slot when first observed, and are forgotten some
time after they leave, when room runs out. Slot 0 is a request never seen; arm 0 an arm never seen.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sdcontrol.columns import ids_of
from sdcontrol.core import BatchView, FloatArray
from sdcontrol.estimators.levels import (
    FIELDS,
    FIRST_ONE_KIND,
    FIRST_PRIOR,
    FIRST_VARIANCE,
    FIRST_WEIGHTS,
    GIVEN,
    LEVELS,
    VARIANCE,
    Population,
    Requests,
)

__all__ = ["Deviations"]

IntArray = NDArray[np.int64]

_KEEP_STEPS = 512  # an absent request may be forgotten after this many steps
_FIRST_SLOTS = 64
_SPARE = 8  # the share of the slots that is to be free once absent ones are forgotten, which looks at all


class Deviations:
    """By (slot, arm) `likelihood`, `logs`, `state` and `counts` of `Requests`; by arm `weights`, `priors`,
    `variances` and `one_kind` of `Population`.
    """

    def __init__(self, depth: int, num_arms: int) -> None:
        self._slot_of: dict[str, int] = {}
        self._free: list[int] = list(range(_FIRST_SLOTS - 1, 0, -1))
        self.last_seen: IntArray = np.zeros(_FIRST_SLOTS, dtype=np.int64)  # see `_now`, by slot
        self._step = self._now = 0  # of the last `admit`; steps that passed, by that or by calls
        self.weights: FloatArray = np.zeros((0, len(FIRST_WEIGHTS)))
        self.priors: FloatArray = np.zeros((0, len(LEVELS)))
        self.variances: FloatArray = np.zeros(0)
        self.one_kind: FloatArray = np.zeros(0)
        self._add_populations(num_arms)
        self.likelihood, self.logs, self.state, self.counts = _blank(_FIRST_SLOTS, num_arms, depth)

    def _add_populations(self, num_arms: int) -> None:
        more = max(num_arms - len(self.variances), 0)
        blank = (
            np.tile(FIRST_WEIGHTS, (more, 1)),
            np.tile(FIRST_PRIOR, (more, 1)),
            np.full(more, FIRST_VARIANCE),
            np.full(more, FIRST_ONE_KIND),
        )
        grown = [np.concatenate(pair) for pair in zip(self.population, blank, strict=True)]
        # No call stands between these, and only after one are signals looked for.
        self.weights, self.priors, self.variances, self.one_kind = grown

    @property
    def num_slots(self) -> int:
        """Requests that there is room for, the unseen one included."""
        return len(self.last_seen)

    def seated(self, slots: IntArray) -> Requests:
        """The requests at `slots`."""
        return slots, self.likelihood, self.logs, self.state, self.counts

    @property
    def population(self) -> Population:
        """What is believed of the requests of each arm."""
        return self.weights, self.priors, self.variances, self.one_kind

    def variance(self, view: BatchView, arm: int) -> FloatArray:
        """Of each request's deviation, `[requests]`."""
        known = self.state[self.slots(view), arm]
        variance: FloatArray = np.where(
            known[:, GIVEN] > 0.0, known[:, VARIANCE], self.variances[arm]
        )
        return variance

    def slots(self, view: BatchView) -> IntArray:
        """The slot of each request of the view, `[requests]`; 0 for one never seen."""
        slot_of = self._slot_of
        return np.array([slot_of.get(name, 0) for name in ids_of(view)], np.int64)

    def admit(self, ids: Sequence[str], step: int) -> IntArray:
        """The slot of each request by name, `[ids]`, after giving one to every new one.

        Where `step` does not grow, as where a loop counts anew, one step passes.
        """
        self._now += max(step - self._step, 1)
        self._step = step
        slot_of = self._slot_of
        new = [name for name in dict.fromkeys(ids) if name not in slot_of]
        if len(new) > len(self._free):
            self._forget_absent()
            new = [name for name in dict.fromkeys(ids) if name not in slot_of]
            if len(new) + self.num_slots // _SPARE > len(self._free):
                self._grow(max(2 * self.num_slots, self.num_slots + len(new)), self.state.shape[1])
        for name in new:
            slot_of[name] = self._free.pop()
        slots = np.array([slot_of[name] for name in ids], np.int64)
        self.last_seen[slots] = self._now
        return slots

    def add_arms(self, num_arms: int) -> None:
        """Room for `num_arms` arms in all."""
        if num_arms > self.state.shape[1]:
            self._grow(self.num_slots, num_arms)
        self._add_populations(num_arms)

    def forget_counts(self, arm: int) -> None:
        """Start the counts of one arm over, for every request."""
        self.counts[:, arm] = 0.0

    def _forget_absent(self) -> None:
        for request_id, slot in list(self._slot_of.items()):
            if self.last_seen[slot] < self._now - _KEEP_STEPS:
                self.likelihood[slot] = 1.0
                self.logs[slot] = self.state[slot] = self.counts[slot] = 0.0
                self._free.append(self._slot_of.pop(request_id))

    def _grow(self, slots: int, arms: int) -> None:
        before = self.likelihood, self.logs, self.state, self.counts
        used = self.state.shape[:2]
        after = _blank(slots, arms, self.counts.shape[3])
        for new, old in zip(after, before, strict=True):
            new[: used[0], : used[1]] = old
        free = [*self._free, *range(slots - 1, used[0] - 1, -1)]
        seen = np.concatenate([self.last_seen, np.zeros(slots - used[0], np.int64)])
        # No call stands between these, and only after one are signals looked for.
        self.likelihood, self.logs, self.state, self.counts = after
        self._free, self.last_seen = free, seen


def _blank(
    slots: int, arms: int, depth: int
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Likelihood, logs, state and counts of requests never seen."""
    return (
        np.ones((slots, arms, len(LEVELS))),
        np.zeros((slots, arms, len(LEVELS))),
        np.zeros((slots, arms, FIELDS)),
        np.zeros((slots, arms, 2, depth)),
    )
