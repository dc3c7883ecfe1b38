"""How many of the steps teach what steps cost: all while that is news, then every fourth.

Knows nothing of costs: errors of prediction and kinds of step in. A single odd step changes nothing
of which are left out, so what is learnt is not biased; a row of them makes every step news again.
"""

import math

__all__ = ["Pace"]

_SETTLED_STEPS = 96  # of one kind, before steps are left out
_EVERY = 4  # step of a settled kind that is learnt
_PER_OCTAVE = 2.0  # kinds of as many tokens
_RATE = 0.2
_MOST_ERROR = 0.3  # that one step counts for
_CALM_ERROR = 0.1  # running log-ratio of measured to predicted beyond which all is news


class Pace:
    """Decides step by step; a kind of step is the families that drafted in it, and about how many tokens it had."""

    def __init__(self) -> None:
        self._error = 0.0
        self._steps: dict[tuple[tuple[str, ...], int], int] = {}

    def judge(self, log_ratio: float) -> None:
        """Take note of how far a step was from its prediction; when they part, start over."""
        error = min(max(log_ratio, -_MOST_ERROR), _MOST_ERROR)
        self._error += _RATE * (error - self._error)
        if abs(self._error) > _CALM_ERROR:
            self._steps.clear()

    def skips(self, families: tuple[str, ...], num_tokens: int) -> bool:
        """Whether the step at hand is left out; counts it."""
        kind = families, round(_PER_OCTAVE * math.log2(max(num_tokens, 1)))
        steps = self._steps[kind] = self._steps.get(kind, 0) + 1
        return steps > _SETTLED_STEPS and steps % _EVERY != 0
