"""The last steps of runs, for a controller that is to begin with what they taught.

Knows observations; nothing of files, nor of whoever observes.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from sdcontrol.core import Observation

__all__ = ["MOST_ROWS", "MOST_STEPS", "LastSteps", "last_of", "renamed", "told_before"]

MOST_STEPS = 1000  # that are kept: averages have forgotten what was before
MOST_ROWS = 8192  # requests of all of them together


class LastSteps:
    """The last 1000 steps of a run, or those that 8192 requests took part in."""

    def __init__(self) -> None:
        self._steps: deque[Observation] = deque()
        self._num_rows = 0  # requests of all of them together

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Observation]:
        return iter(self._steps)

    def note(self, observation: Observation) -> None:
        """Keep what came of a step."""
        self._steps.append(observation)
        self._num_rows += len(observation.view.requests)
        while len(self._steps) > 1 and (
            len(self._steps) > MOST_STEPS or self._num_rows > MOST_ROWS
        ):
            self._num_rows -= len(self._steps.popleft().view.requests)

    def after(self, earlier: Sequence[Observation], run: str) -> list[Observation]:
        """The last steps of `earlier` runs and of this one, whose requests are renamed: see `renamed`."""
        return last_of([*earlier, *renamed(self._steps, run)])

    def clear(self) -> None:
        """Forget them all."""
        self._steps.clear()
        self._num_rows = 0


def last_of(steps: Sequence[Observation]) -> list[Observation]:
    """As many as are kept."""
    rows, first = 0, len(steps)
    while first > max(len(steps) - MOST_STEPS, 0):
        rows += len(steps[first - 1].view.requests)
        if rows > MOST_ROWS and first < len(steps):
            break
        first -= 1
    return list(steps[first:])


def renamed(steps: Iterable[Observation], run: str) -> list[Observation]:
    """Their requests numbered under the name of their run, so that those of other runs are others.

    Without faults, whose words may name requests, and of which nothing is learnt.
    """
    numbers: dict[str, str] = {}
    found: list[Observation] = []
    for one in steps:
        for request in one.view.requests:
            numbers.setdefault(request.id, f"{run}-{len(numbers)}")
        requests = tuple([replace(r, id=numbers[r.id]) for r in one.view.requests])
        found.append(replace(one, view=replace(one.view, requests=requests), faults=()))
    return found


def told_before(steps: Sequence[Observation]) -> list[Observation]:
    """The same, oldest first, as the steps from -n to -1 of a run that begins with step 0."""
    return [
        replace(one, view=replace(one.view, step=number))
        for number, one in enumerate(steps, start=-len(steps))
    ]
