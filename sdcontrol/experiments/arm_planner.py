"""What plans for an arm, block after block, and what it knows when a block begins.

Knows controllers and what an arm says of them; nothing of engines, simulations or times.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from sdcontrol.controller import Controller
from sdcontrol.core import Observation, Planner
from sdcontrol.experiments.config import Beginning
from sdcontrol.last_steps import LastSteps, told_before

__all__ = ["ArmPlanner"]

_Kind = TypeVar("_Kind", bound=Planner)


class ArmPlanner(Generic[_Kind]):
    """One controller that learns on from block to block, or a new one in every block.

    `make` makes a controller, `wrap` what a run needs around it; both are called at once, so that what is
    wrong with a policy is said before anything runs. A run is `begin`, `tell` once an engine has said what it
    is, `note` after every step, and `end`. Of a block that runs twice, the second run is told what the first was,
    and its own steps are those that later blocks are told.
    """

    def __init__(
        self, begins: Beginning, make: Callable[[], Controller], wrap: Callable[[Controller], _Kind]
    ) -> None:
        self._begins, self._make, self._wrap = begins, make, wrap
        self._seen = LastSteps()  # of this run
        self._before: list[Observation] = []  # of blocks before this one
        self._after: list[Observation] = []  # of this one too, once a run of it has ended
        self._block: int | None = None
        self._controller = make()
        self.planner = wrap(self._controller)
        self.num_steps = 0  # that it has planned in earlier blocks

    def begin(self, block: int) -> _Kind:
        """The planner of the next run, which is of this block."""
        is_first = self._block is None
        if block != self._block:
            self._before, self._block = self._after, block
        self._seen.clear()
        if self._begins != "kept" and not is_first:
            self._controller, self.num_steps = self._make(), 0
            self.planner = self._wrap(self._controller)
        return self.planner

    def tell(self) -> None:
        """What earlier blocks taught, to one that begins warm: what an engine tells a controller goes before."""
        if self._begins == "warm":
            self._controller.warm_start(told_before(self._before))

    def note(self, observation: Observation) -> None:
        """What came of a step, for those that begin warm."""
        if self._begins == "warm":
            self._seen.note(observation)

    def end(self, num_steps: int) -> None:
        """The run has ended; its planner has planned so many steps by now."""
        self._after = self._seen.after(self._before, f"block-{self._block}")
        self.num_steps = num_steps
