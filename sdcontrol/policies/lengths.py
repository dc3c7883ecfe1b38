"""When to ask for other lengths than the best ones, so that it is seen what tokens cost.

Where every request gets as many draft tokens in every step, the price of a further token cannot be told
from that of a step: a price that is wrong keeps the plan where it is, and the plan keeps the price. So,
while tokens per request vary little, some steps have the best plan at another price of time: cheaper,
more tokens; dearer, fewer. What that loses, by what is believed, is bounded, and is paid by whoever asks.
"""

import math

import numpy as np

from sdcontrol.core import Observation, Plan
from sdcontrol.policies.maximise import maximise
from sdcontrol.policies.problem import Answer, Problem
from sdcontrol.policies.reading import to_choices
from sdcontrol.policies.tries import LENGTHS, PRICE

__all__ = ["Lengths", "only"]

_STEPS = 16  # from one look at other lengths to the next
_PRICES = (0.7, 1.4)  # of time, in the place of 1
_MOST_LOSS = 0.1  # of a step
_MEMORY = 1.0 / 32.0  # of how far tokens per request vary, per step
_VARIED = 0.25  # octaves of their standard deviation that tell prices well enough


class Lengths:
    """How tokens per request vary, and other plans now and then. A fold over observations."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._mean = self._variance = 0.0  # of log2 of the tokens that a request had verified

    def update(self, observation: Observation) -> None:
        """Take note of a step."""
        if observation.proposed:
            octaves = math.log2(1.0 + sum(observation.proposed) / len(observation.proposed))
            self._num_steps += 1
            rate, off = max(_MEMORY, 1.0 / self._num_steps), octaves - self._mean
            self._mean += rate * off
            self._variance = (1.0 - rate) * (self._variance + rate * off * off)

    def is_due(self, step: int) -> bool:
        """Whether this step is one to look at other lengths, and there is something to be seen."""
        return step % _STEPS == 0 and self._variance <= _VARIED**2

    def others(
        self, step: int, plan: Plan, problem: Problem, answer: Answer, most_seconds: float
    ) -> Plan | None:
        """The best plan at another price of time, if it loses at most `most_seconds` beside `answer`.

        None where it does not, or there is nothing to be seen.
        """
        if not self.is_due(step):
            return None
        # Both prices as often, also when looks are rarer by powers of two.
        price = _PRICES[(step // _STEPS).bit_count() % 2]
        other = maximise(problem, price * answer.rate)
        lost = other.seconds - other.gain / answer.rate
        most = min(most_seconds, _MOST_LOSS * answer.seconds)
        if other.length.sum() == answer.length.sum() or not 0.0 <= lost <= most:
            return None
        choices = to_choices(problem.arms, problem.lengths, other)
        return Plan(choices, f"{plan.reason}{LENGTHS}{PRICE}{lost:.3g} s")


def only(problem: Problem, arms: set[int]) -> Problem:
    """The problem in which other arms may not be used."""
    may = np.isin(np.arange(len(problem.arms)), list(arms))
    return problem._replace(limit=np.where(may[:, None], problem.limit, 0))
