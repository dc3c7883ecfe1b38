"""What rounds take and bring, told from what catching up took: a try that had to catch up is followed up.

Most of the time of a drafter's first use may be its catch-up, so that nobody can say what its rounds took of
it. In the next steps whoever caught up has next to nothing to catch up with, and a try costs rounds alone: once,
and then until a quarter as much was spent on them, since a token or two say little.
Knows nothing of prices. A fold over observations.
"""

import numpy as np

from sdcontrol.columns import columns_of
from sdcontrol.core import BatchView, Hint, Observation, family_of
from sdcontrol.policies.problem import Problem
from sdcontrol.policies.tries import FOLLOWS_UP, LENGTHS, Try, try_of

__all__ = ["FollowUps", "of_caught_up"]

_MOST_LAG = 32  # tokens, of whoever caught up lately
_PATIENCE = 8  # steps for which another try stays due
_MOST_TRIES = 8
_SHARE = 0.25  # of what the first one took, that others may take
_UP_TO_DATE = Hint()


class FollowUps:
    """`arm` is the one that is to be tried again, empty for none."""

    def __init__(self) -> None:
        self.arm = ""
        self._steps = 0  # that it has been due
        self._tries = 0  # that are left
        self._seconds = 0.0  # that may be spent on them

    def update(self, observation: Observation) -> None:
        """Take note of a step."""
        tried = try_of(observation.plan)
        self._steps += 1
        if tried is not None and tried.mark != LENGTHS:
            self._note(observation, tried)
        elif self._steps >= _PATIENCE:
            self.arm = ""

    def _note(self, observation: Observation, tried: Try) -> None:
        seconds = observation.timing.draft_seconds.get(family_of(tried.arm), 0.0)
        goes_on = tried.mark != FOLLOWS_UP and _has_caught_up(observation, tried.arm)
        if goes_on:
            self._tries, self._seconds = _MOST_TRIES, _SHARE * seconds
        else:
            self._tries, self._seconds = self._tries - 1, self._seconds - seconds
            goes_on = self._tries > 0 and self._seconds > 0.0
        self._steps, self.arm = 0, tried.arm if goes_on else ""


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
