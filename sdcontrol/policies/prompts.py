"""What a second is worth beside a prompt that is computed in the same step.

A prompt takes the same time whatever is drafted, so a second saved is a second of decoding: it is worth
what the best plan of the same requests brings without the prompt. The step's own ratio would find almost
any draft worth its time; running tokens over all seconds, the prompt's own included, would price time
too low. That holds while there are steps without a prompt to be saved. Where hardly any is left, prompts
set the pace: requests that end sooner leave the next ones waiting for their prompts, and a token that comes
sooner saves its share of what decoding adds to a step, which is little beside short contexts, and nearly
all of the step beside long ones, whose keys and values are read.
"""

from sdcontrol.compiled import compiled
from sdcontrol.core import BatchView, Cost, FloatArray, Observation
from sdcontrol.policies.maximise import search
from sdcontrol.policies.problem import TABLES, Problem, Tables
from sdcontrol.policies.reading import without_prefill

__all__ = ["Prompts", "rate_beside"]

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

    def hurry(self, view: BatchView, cost: Cost) -> tuple[float, float]:
        """How many times as much a second may be worth since prompts set the pace, at least 1, and the seconds of a
        step without requests, which is asked for if it is more.
        """
        urgency = _FEW / max(self._share_without, _NONE)
        if not view.others_wait or urgency <= 1.0:
            return 1.0, 0.0
        return urgency, float(cost.verify_seconds(1.0, 0.0, 1)) + cost.overhead_seconds()

    def rate(self, view: BatchView, problem: Problem, cost: Cost) -> float | None:
        """The price of a second, in tokens; None where there is no prompt, or something is not finite."""
        if not view.prefill_tokens:
            return None
        alone = without_prefill(problem, view, cost).verify
        rate = float(rate_beside(problem.tables, alone, self.hurry(view, cost)))
        return rate if rate >= 0.0 else None


@compiled(f"float64({TABLES}, float64[::1], UniTuple(float64, 2))")
def rate_beside(tables: Tables, alone: FloatArray, hurry: tuple[float, float]) -> float:
    """The price of a second beside a prompt, in tokens; negative where something is not finite.

    `alone` is verification without the prompt, and for `hurry` see `Prompts`.
    """
    gain, limit, family, _, rounds, reading, catch_up, drafted = tables
    urgency, empty = hurry
    _, _, tokens, seconds = search(
        (gain, limit, family, alone, rounds, reading, catch_up, drafted), 0.0, False
    )
    if seconds < 0.0 or urgency <= 1.0:
        return tokens / seconds if seconds > 0.0 else -1.0
    # Only what requests add to a step counts: a prompt pays for the rest.
    more = alone - min(empty, alone[0] * (1.0 - _NONE))
    rate = tokens / seconds
    _, _, tokens, seconds = search(
        (gain, limit, family, more, rounds, reading, catch_up, drafted), 0.0, False
    )
    return min(urgency * rate, tokens / seconds) if seconds > 0.0 else -1.0
