"""Whether a forward is bound by memory or by arithmetic, by what more tokens would cost.

Knows nothing of models and machines: where twice the tokens take as long as they do, tokens are
nearly free and drafts pay; where they take twice as long, every token has its full price.
"""

from typing import Literal

__all__ = ["Bound", "Regime"]

Bound = Literal["memory-bound", "compute-bound"]

_RATE = 0.1  # of the running growth, per forward
_MEMORY_BELOW, _COMPUTE_ABOVE = 0.3, 0.7  # between them the regime stays what it was
_SETTLING_STEPS = 20  # forwards after which prices are more than a first guess


class Regime:
    """The regime of the forwards of late, settled by the first 20, which change nothing."""

    def __init__(self) -> None:
        self._growth = 0.5
        self._num_judged = 0
        self.bound: Bound = "memory-bound"

    def judge(self, seconds: float, doubled_seconds: float) -> bool:
        """Take note of the price of a forward, and of that with twice its tokens.

        Returns whether the regime changed.
        """
        growth = min(max(doubled_seconds / seconds - 1.0, 0.0), 1.0)
        self._growth += _RATE * (growth - self._growth)
        self._num_judged += 1
        before = self.bound
        if self._growth < _MEMORY_BELOW:
            self.bound = "memory-bound"
        elif self._growth > _COMPUTE_ABOVE:
            self.bound = "compute-bound"
        return self.bound != before and self._num_judged > _SETTLING_STEPS

    @property
    def reason(self) -> str:
        """Why, in words."""
        work = "reading weights and KV" if self.bound == "memory-bound" else "arithmetic"
        return f"twice the tokens would take {1.0 + self._growth:.2f} times as long: {work} binds"
