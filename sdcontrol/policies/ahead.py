"""Are steps without drafts priced as if they were launched ahead, or as steps whose tokens are waited for?

An engine that goes ahead hides the host's work in steps without drafts, as long as one follows another. Between
steps with drafts none is hidden, though all would be without the drafts. So there are two ways to decide: by the
price of a hidden step, which drafts where that beats never drafting, or by that of a step that waits, which drafts
wherever the next tokens are known anyway. Neither is right everywhere, and a mix of both may be worse than either:
the way is followed of which more tokens per second are expected in the long run. What the one that is followed
expects is seen in each plan, and so is what the other one would: the best drafts are the same. A plan's reason says
what was expected, so that this is a fold over observations.
"""

import math
import re
from typing import Protocol

from sdcontrol.core import BatchView, Cost, Observation
from sdcontrol.estimators.overhead import Overheads
from sdcontrol.estimators.price import overheads_of, waited_of
from sdcontrol.kept_choices import is_kept
from sdcontrol.policies.at_once import Answered

__all__ = ["Ahead", "Ask", "Ways"]

_RATE = 1.0 / 32.0  # of the running tokens per second, per step
_FEW = 16  # requests, of which a second search takes little
_STEPS_OF_MANY = 4  # of more: from one second search to the next
_WAIT = " if all wait, "
_WORDS = re.compile(rf", (\S+){_WAIT}(\S+) in turns(, off)?")

Ways = tuple[Overheads, Overheads]
"""Seconds of a step beside forward and drafting: where plain steps are hidden, and where they wait."""


class Ask(Protocol):
    """Answers the step by other overheads; None where it cannot at once."""

    def __call__(self, *, beside: Overheads) -> Answered | None:
        """See `at_once.answer_at_once`."""
        ...


class Ahead:
    """Which way is followed: the hidden one, until the other is expected to bring more."""

    def __init__(self) -> None:
        self._rates: tuple[float, float] | None = None  # tokens per second: hidden, waiting
        self._steps = 0  # of which those were told
        self._is_hidden = True  # the next plain step, by the way that hides them

    def ways(self, cost: Cost) -> Ways | None:
        """None where it makes no difference: most costs, and all where nothing is launched ahead."""
        waited = waited_of(cost)
        if not waited:  # as on any CPU: nothing more is looked at
            return None
        hidden = overheads_of(cost)
        waits = hidden._replace(plain=min(waited, hidden.drafting))
        return (hidden, waits) if waits.plain > hidden.plain else None

    @property
    def waits(self) -> bool:
        """Whether the way that waits is followed."""
        return self._rates is not None and self._rates[1] > self._rates[0]

    def words(self, view: BatchView, answered: Answered, ways: Ways, ask: Ask) -> str:
        """What either way is expected to bring after this step, `answered` by the one that is followed; empty beside a
        prompt. `ask` answers by another.
        """
        if view.prefill_tokens:
            return ""
        answer, batch = answered.answer, float(len(view.requests))
        more = ways[1].plain - ways[0].plain
        plain = answered.prices[0] - more * self.waits  # seconds of a hidden step
        is_off = not answer.length.any() or (self.waits and answer.rate * plain <= batch)
        seconds = plain + more * (not self._is_hidden) if is_off else answer.seconds
        in_turns, if_all_wait = self._rates or (0.0, 0.0)
        weight = max(_RATE, 1.0 / (self._steps + 1.0))
        in_turns = _after(in_turns, batch if is_off else answer.gain, seconds, weight / plain)
        # Drafts that beat a hidden step are the best beside one that waits, too.
        is_same = self.waits or not is_off
        waiting, steps = (answered, 1) if is_same else self._asked(view, ways, ask)
        if waiting is not None:
            expected = waiting.answer.gain, waiting.answer.seconds
            if_all_wait = _after(if_all_wait, *expected, min(steps * weight, 1.0) / plain)
        return f", {if_all_wait:.6g}{_WAIT}{in_turns:.6g} in turns{', off' * is_off}"

    def _asked(self, view: BatchView, ways: Ways, ask: Ask) -> tuple[Answered | None, int]:
        """The answer of the way that waits, and for how many steps it stands; None where it is not asked for."""
        steps = 1 if len(view.requests) <= _FEW else _STEPS_OF_MANY
        is_due = self._rates is None or view.step % steps == 0
        return (ask(beside=ways[1]) if is_due else None), steps

    def update(self, observation: Observation) -> None:
        """Take note of what the plan expected; of one that was put together from earlier ones nothing."""
        plan = observation.plan
        is_told = _WAIT in plan.reason and not is_kept(plan)  # a search takes longer than a look
        found = _WORDS.search(plan.reason) if is_told else None
        if found is None:
            self._is_hidden = plan.is_off
            return
        self._rates = float(found[2]), float(found[1])
        self._steps += 1
        self._is_hidden = found[3] is not None


def _after(rate: float, tokens: float, seconds: float, weight: float) -> float:
    """A running rate after another step, of so much weight a second."""
    if not 0.0 < rate < math.inf:
        return tokens / seconds
    return rate + weight * (tokens - rate * seconds)
