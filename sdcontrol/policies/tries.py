"""How a plan says, in the words of its reason, that it tries something, and how that is read again.

    "...; probes draft_model for at most 0.0012 s"
    "...; tries other lengths for at most 0.0003 s"

So what a try may cost is known to whoever has the observation alone. Knows nothing of why it is made.
"""

from typing import NamedTuple

from sdcontrol.core import Plan

__all__ = ["DRAFTING", "LENGTHS", "PRICE", "PROBES", "RECHECKS", "Try", "try_of"]

PROBES, RECHECKS, LENGTHS = "; probes ", "; rechecks ", "; tries other lengths"
PRICE, DRAFTING = " for at most ", " s beside "


class Try(NamedTuple):
    """What a plan tries: an arm that is off, or other lengths than the best ones."""

    mark: str
    arm: str  # empty for lengths
    seconds: float  # that it was expected to cost
    drafting: float = 0.0  # seconds of drafting beside, where all requests try


def try_of(plan: Plan) -> Try | None:
    """What `plan` tries; None for most plans."""
    if "; " not in plan.reason:  # none of the marks
        return None
    for mark in (PROBES, RECHECKS, LENGTHS):
        _, found, words = plan.reason.rpartition(mark)
        arm, _, seconds = words.rpartition(PRICE)
        price, _, drafting = seconds.removesuffix(" s").partition(DRAFTING)
        try:
            if found:
                return Try(mark, arm, float(price), float((drafting or "0").partition(" ")[0]))
        except ValueError:  # another policy's words
            continue
    return None
