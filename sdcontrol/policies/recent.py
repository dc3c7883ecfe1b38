"""Where the last plan lay, as the start of the search for the next one.

Knows nothing of how plans are found. What is kept comes from the observed plan alone, its reason
included, so that a replay starts every search where the live run did.
"""

import numpy as np

from sdcontrol.core import BatchView, Plan, family_of
from sdcontrol.policies.maximise import Start
from sdcontrol.policies.problem import Problem

__all__ = ["Recent", "expecting"]

_AFRESH_STEPS = 8  # between searches that start from nothing
_MOST_CHANGE = 0.125  # of the requests, beyond which a batch is another one
_BEFORE, _AFTER = "goodput: ", " tokens/s expected, "


def expecting(rate: float, plain_rate: float) -> str:
    """The reason of a plan: tokens per second that it is expected to bring, and without drafts."""
    return f"{_BEFORE}{rate:.4g}{_AFTER}{plain_rate:.4g} without drafts"


class Recent:
    """The expected rate of the last plan, and the most tokens that each family drafted in it."""

    def __init__(self) -> None:
        self._rate: float | None = None
        self._requests = 0
        self._caps: dict[str, int] = {}

    def update(self, plan: Plan) -> None:
        """Keep where `plan` lay; a plan of another policy is no start."""
        self._rate = _expected(plan.reason)
        self._requests = len(plan.choices)
        self._caps = {}
        for choice in dict.fromkeys(plan.choices):
            if choice.drafter is not None:
                family = family_of(choice.drafter)
                self._caps[family] = max(self._caps.get(family, 0), choice.num_draft_tokens)

    def start(self, view: BatchView, problem: Problem) -> Start | None:
        """Where to start; None where the batch is another one, and now and then."""
        changed = abs(len(view.requests) - self._requests) > _MOST_CHANGE * self._requests
        if self._rate is None or changed or view.step % _AFRESH_STEPS == 0:
            return None
        families = [family_of(problem.arms[members.start]) for members in problem.members]
        return Start(self._rate, np.array([self._caps.get(family, 0) for family in families]))


def _expected(reason: str) -> float | None:
    """The rate in the reason of a plan; None where it has none that could start a search."""
    before, found, _ = reason.partition(_AFTER)
    try:
        rate = float(before.removeprefix(_BEFORE)) if found else 0.0
    except ValueError:
        return None
    return rate if 0.0 < rate < float("inf") else None
