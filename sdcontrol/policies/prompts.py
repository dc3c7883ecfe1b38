"""What a second is worth beside a prompt that is computed in the same step.

A prompt takes the same time whatever is drafted, so a second saved is a second of decoding: it is worth
what the best plan of the same requests brings without the prompt. The step's own ratio would find almost
any draft worth its time; running tokens over all seconds, the prompt's own included, would price time
too low. That holds while there are steps without a prompt to be saved. Where hardly any is left, prompts
set the pace: requests that end sooner leave the next ones waiting for their prompts, and a token that comes
sooner saves its share of what decoding adds to a step, which is little beside short contexts, and nearly
all of the step beside long ones, whose keys and values are read.
"""

from sdcontrol.core import BatchView, Cost, Observation
from sdcontrol.policies.maximise import maximise
from sdcontrol.policies.problem import Problem
from sdcontrol.policies.reading import without_prefill

__all__ = ["Prompts"]

_MEMORY = 1.0 / 32.0  # of the share of steps without a prompt, per step
_FEW, _NONE = 0.25, 0.01  # of that share


class Prompts:
    """The share of steps without a prompt. A fold over observations."""

    def __init__(self) -> None:
        self._share_without = 1.0

    def update(self, observation: Observation) -> None:
        """Take note of a step."""
        if observation.view.requests:
            is_without = not observation.view.prefill_tokens
            self._share_without += _MEMORY * (is_without - self._share_without)

    def rate(self, view: BatchView, problem: Problem, cost: Cost) -> float | None:
        """The price of a second, in tokens; None where there is no prompt: find the best."""
        if not view.prefill_tokens:
            return None
        alone = without_prefill(problem, view, cost)
        rate = maximise(alone).rate
        urgency = _FEW / max(self._share_without, _NONE)
        if not view.others_wait or urgency <= 1.0:
            return rate
        return min(urgency * rate, maximise(_beyond_an_empty_step(alone, cost)).rate)


def _beyond_an_empty_step(problem: Problem, cost: Cost) -> Problem:
    """Only what requests add to a step counts: a prompt pays for the rest."""
    empty = float(cost.verify_seconds(1.0, 0.0, 1)) + cost.overhead_seconds()
    least = _NONE * problem.verify[0]
    return problem._replace(verify=problem.verify - min(empty, problem.verify[0] - least))
