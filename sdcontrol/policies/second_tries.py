"""What rounds take, told from what catching up took: a try that had to catch up is made twice.

Most of the time of a drafter's first use may be its catch-up, so that nobody can say what its rounds took of
it. In the next step whoever caught up has next to nothing to catch up with, and a try costs rounds alone.
Knows nothing of prices. A fold over observations.
"""

import numpy as np

from sdcontrol.columns import columns_of
from sdcontrol.core import BatchView, Hint, Observation
from sdcontrol.policies.problem import Problem
from sdcontrol.policies.tries import LENGTHS, try_of

__all__ = ["SecondTries", "of_caught_up"]

_MOST_LAG = 32  # tokens, of whoever caught up lately
_PATIENCE = 8  # steps for which a second try stays due
_UP_TO_DATE = Hint()


class SecondTries:
    """`arm` is the one that is to be tried again, empty for none."""

    def __init__(self) -> None:
        self.arm = ""
        self._steps = 0  # that it has been due

    def update(self, observation: Observation) -> None:
        """Take note of a step."""
        tried = try_of(observation.plan)
        self._steps += 1
        if tried is not None and tried.mark != LENGTHS:
            self.arm, self._steps = tried.arm if _has_caught_up(observation, tried.arm) else "", 0
        elif self._steps >= _PATIENCE:
            self.arm = ""


def _has_caught_up(observation: Observation, arm: str) -> bool:
    """Whether more tokens were caught up with than drafted."""
    more = 0
    for request, choice in zip(observation.view.requests, observation.plan.choices, strict=True):
        if choice.drafter == arm:
            lag = request.hints.get(arm, _UP_TO_DATE).catch_up_tokens
            more += lag - choice.num_draft_tokens
    return more > 0


def of_caught_up(view: BatchView, problem: Problem, a: int) -> Problem:
    """The same for those alone whose cache of arm `a` lags by little."""
    columns = columns_of(view)
    lags = columns.catch_up_tokens[columns.arms.index(problem.arms[a])]
    limit = problem.limit.copy()
    limit[a] = np.where(lags <= _MOST_LAG, limit[a], 0)
    return problem._replace(limit=limit)
