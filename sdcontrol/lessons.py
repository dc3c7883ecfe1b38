"""What observations teach a controller's estimators, part by part.

Knows nothing of when a part is due (`waiting` does), nor of how anything is learnt. Our own estimators
are taught by halves, outcomes of several steps at once; any other by its `update`, in the first half.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sdcontrol.core import Cost, Observation
from sdcontrol.estimators.acceptance import AcceptanceEstimator, Lesson
from sdcontrol.estimators.cost import OnlineCost
from sdcontrol.estimators.merging import typical
from sdcontrol.waiting import Part

if TYPE_CHECKING:
    from sdcontrol.controller import Acceptance

__all__ = ["Lessons"]


class Lessons:
    """Steps that wait to be learnt from: by `acceptance` all of them, by `cost` a typical one."""

    def __init__(self, acceptance: "Acceptance", cost: Cost) -> None:
        self._acceptance, self._cost = acceptance, cost
        # A variant of ours is taught by its own methods.
        self._ours = acceptance if type(acceptance) is AcceptanceEstimator else None
        self._our_cost = cost if type(cost) is OnlineCost else None
        self._update_cost: Callable[[Observation], None] | None = getattr(cost, "update", None)
        self._unread: list[Observation] = []
        self._untimed: deque[Observation] = deque(maxlen=16)
        self._tried: Observation | None = None  # the last in which something was tried, untimed
        self._lesson: Lesson | None = None  # that was read, and not learnt
        self._parts: dict[Part, Callable[[], None]] = {
            "read outcomes": self._read_outcomes,
            "learn outcomes": self._learn_outcomes,
            "judge costs": self._judge_costs,
            "learn costs": self._learn_costs,
        }

    @property
    def cost_error(self) -> float:
        """Log-ratio by which the last prediction of a step's time was off; 0 before there is one."""
        last = getattr(self._cost, "last_prediction", None)
        return abs(last.log_error) if last is not None else 0.0

    def take(self, observation: Observation, parts: Sequence[Part], *, is_try: bool) -> None:
        """Keep a step, then learn `parts` of all that were kept, in order; costs of a try before others."""
        self._tried = observation if is_try else self._tried
        self._unread.append(observation)
        self._untimed.append(observation)
        for part in parts:
            self._parts[part]()

    def _read_outcomes(self) -> None:
        unread, self._unread = self._unread, []
        if self._ours is not None:
            self._lesson = self._ours.read(unread)
            return
        for one in unread:
            self._acceptance.update(one)

    def _learn_outcomes(self) -> None:
        if self._ours is not None and self._lesson is not None:
            self._ours.learn(self._lesson)
            self._lesson = None

    def _judge_costs(self) -> None:
        one, self._tried = self._tried or typical(self._untimed), None
        self._untimed.clear()
        if self._our_cost is not None:
            self._our_cost.judge(one)
        elif self._update_cost is not None:
            self._update_cost(one)

    def _learn_costs(self) -> None:
        if self._our_cost is not None:
            self._our_cost.learn()
