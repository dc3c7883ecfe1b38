"""How a plan says, in the words of its reason, that it tries something, and how that is read again.

    "...; probes draft_model for at most 0.0012 s"
    "...; tries other lengths for at most 0.0003 s"

So what a try may cost is known to whoever has the observation alone. Knows nothing of why it is made.
"""

from dataclasses import dataclass
from typing import NamedTuple

from sdcontrol.core import Choice, Observation, Plan
from sdcontrol.policies.problem import Problem

__all__ = [
    "FOLLOWS_UP",
    "LENGTHS",
    "PRICE",
    "PROBES",
    "RECHECKS",
    "Probe",
    "Try",
    "as_it_came",
    "try_of",
    "with_probe",
]

PROBES, RECHECKS, LENGTHS = "; probes ", "; rechecks ", "; tries other lengths"
FOLLOWS_UP = "; follows up with "
PRICE, _DRAFTING = " for at most ", " s beside "
_IF_EMPTY = 0.25  # of the price of a try, where the drafter had nothing


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
    for mark in (PROBES, FOLLOWS_UP, RECHECKS, LENGTHS):
        _, found, words = plan.reason.rpartition(mark)
        arm, _, seconds = words.rpartition(PRICE)
        price, _, drafting = seconds.removesuffix(" s").partition(_DRAFTING)
        try:
            if found:
                return Try(mark, arm, float(price), float((drafting or "0").partition(" ")[0]))
        except ValueError:  # another policy's words
            continue
    return None


def as_it_came(tried: Try, observation: Observation) -> Try:
    """With a part of its price where nothing came of it: then nothing was verified."""
    rows = zip(observation.plan.choices, observation.drafted, strict=True)
    if tried.mark == LENGTHS or any(n and choice.drafter == tried.arm for choice, n in rows):
        return tried
    return tried._replace(seconds=_IF_EMPTY * tried.seconds)


@dataclass(frozen=True, slots=True)
class Probe:
    """A try of an arm, by one request or by all."""

    request: int
    length: int
    seconds: float  # what it costs: drafting, verification, and the tokens of the plan given up
    whole: float  # the same with all of a catch-up
    drafting: float = 0.0  # seconds of it, where all try
    by_all: bool = False


def with_probe(plan: Plan, mark: str, problem: Problem, a: int, probe: Probe) -> Plan:
    """`plan`, trying arm `a` so. Where all try, whoever may not goes on as far as KV slots allow."""
    arm, r, choices = problem.arms[a], probe.request, list(plan.choices)
    words = f"{plan.reason}{mark}{arm}{PRICE}{probe.seconds:.3g}"
    if not probe.by_all:
        choices[r] = Choice.of(arm, probe.length)
        return Plan(tuple(choices), f"{words} s")
    tokens = [min(probe.length, most) for most in problem.limit[a].tolist()]
    left = len(problem.verify) - 1 - sum(tokens)  # KV slots for those who may not try
    for r, n in enumerate(tokens):
        if n > 0:
            choices[r] = Choice.of(arm, n)
        elif choices[r].num_draft_tokens > left:
            choices[r] = Choice.off()
        else:
            left -= choices[r].num_draft_tokens
    return Plan(tuple(choices), f"{words}{_DRAFTING}{probe.drafting:.3g} s of drafting with all")
