"""When to ask for other lengths than the best ones, so that it is seen what tokens cost.

Where every request gets as many draft tokens in every step, the price of a further token cannot be told
from that of a step: a price that is wrong keeps the plan where it is, and the plan keeps the price. So,
while tokens per request vary little, some steps have the best plan at another price of time: cheaper,
more tokens; dearer, fewer. What that loses, by what is believed, is bounded, and is paid by whoever asks.
And a lone token has kernels of its own: what a forward over it takes no other says.
"""

import math

import numpy as np

from sdcontrol.core import Choice, Observation, Plan
from sdcontrol.policies.maximise import maximise
from sdcontrol.policies.problem import Answer, Problem
from sdcontrol.policies.reading import to_choices
from sdcontrol.policies.tries import LENGTHS, PRICE

__all__ = ["Lengths", "only"]

_STEPS = 16  # from one look at other lengths to the next
_PRICES = (0.7, 1.4)  # of time, in the place of 1
_MOST_LOSS = 0.1  # of a step
_MEMORY = 1.0 / 32.0  # of how far tokens per request vary, per step
_ALONE = (0,)  # tokens of a request that decodes alone, without drafts
_MOST_LOSS_ALONE = 0.5  # of such a step
_KNOWN_ALONE = 2  # such steps, after which it is known what they take
_VARIED = 0.25  # octaves of their standard deviation that tell prices well enough


class Lengths:
    """How tokens per request vary, and other plans now and then. A fold over observations."""

    def __init__(self) -> None:
        self._num_steps = self._num_alone = 0
        self._mean = self._variance = 0.0  # of log2 of the tokens that a request had verified

    def update(self, observation: Observation) -> None:
        """Take note of a step."""
        if observation.proposed == _ALONE and not observation.view.prefill_tokens:
            self._num_alone += 1
        if observation.proposed:
            octaves = math.log2(1.0 + sum(observation.proposed) / len(observation.proposed))
            self._num_steps += 1
            rate, off = max(_MEMORY, 1.0 / self._num_steps), octaves - self._mean
            self._mean += rate * off
            self._variance = (1.0 - rate) * (self._variance + rate * off * off)

    def without(
        self, plan: Plan, problem: Problem, answer: Answer, most_seconds: float
    ) -> Plan | None:
        """No drafts for once, for a request that decodes alone, where that was not seen twice.

        A forward over one token may take far less than the others say. None where this loses more than half of
        the step, as believed, or `most_seconds`.
        """
        if self._num_alone >= _KNOWN_ALONE or problem.batch > 1 or not answer.length.any():
            return None
        lost = problem.verify.item(0) - 1.0 / answer.rate
        if not 0.0 <= lost <= min(most_seconds, _MOST_LOSS_ALONE * problem.verify.item(0)):
            return None
        return Plan((Choice.off(),), f"{plan.reason}{LENGTHS}{PRICE}{lost:.3g} s")

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
    """The problem in which other arms may not be used, and would bring nothing."""
    may = np.isin(np.arange(len(problem.arms)), list(arms))
    limit = np.where(may[:, None], problem.limit, 0)
    return problem._replace(limit=limit, gain=np.where(may[:, None, None], problem.gain, 0.0))
