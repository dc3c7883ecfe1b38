"""What a step made the machine do: tokens, KV and drafting rounds, read off an observation.

Knows nothing of seconds, except which of them no clock can have meant.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from sdcontrol.columns import NO_LIMIT, kv_tokens_of
from sdcontrol.core import FloatArray, Observation, family_of
from sdcontrol.estimators.price import sparse_budget

__all__ = [
    "LONGEST_SECONDS",
    "SHORTEST_SECONDS",
    "DraftLoad",
    "VerifyLoad",
    "draft_loads",
    "is_plausible",
    "latest_drafting",
    "measured_loads",
    "verify_load",
]

SHORTEST_SECONDS, LONGEST_SECONDS = 1e-9, 1e5  # of a phase of a step


class VerifyLoad(NamedTuple):
    """One forward of the target."""

    num_tokens: int
    kv_tokens: int
    num_requests: int
    longest_draft: int = 0  # tokens


@dataclass(frozen=True, slots=True)
class DraftLoad:
    """The drafting rounds of one family in one step, summed, and its catch-up."""

    num_rounds: int
    draft_tokens: int  # one per round and request that drafts in it
    kv_tokens: int  # read, by all rounds together
    catch_up_tokens: int


def is_plausible(seconds: float) -> bool:
    """Whether a phase of a step can have taken so long; False for NaN."""
    return SHORTEST_SECONDS < seconds < LONGEST_SECONDS


def verify_load(observation: Observation) -> VerifyLoad:
    """What the verification of this step computed and read."""
    view, proposed = observation.view, observation.proposed
    batch = len(view.requests)
    tokens = batch + sum(proposed) + view.prefill_tokens
    return VerifyLoad(tokens, kv_tokens_of(view), batch, max(proposed, default=0))


def measured_loads(observations: Sequence[Observation]) -> FloatArray:
    """Of the forwards that were timed: tokens, KV tokens, requests, longest draft, seconds, `[steps, 5]`."""
    rows: list[float] = []
    for one in observations:
        seconds = one.timing.verify_seconds
        if one.view.requests and is_plausible(seconds):
            rows += verify_load(one)
            rows.append(seconds)
    return np.array(rows, np.float64).reshape(-1, 5)


def draft_loads(observation: Observation) -> dict[str, DraftLoad]:
    """What the drafting of this step computed and read, by family."""
    if not any(observation.drafted):
        return {}
    sums: dict[str, list[int]] = {}
    rows = zip(
        observation.view.requests, observation.plan.choices, observation.drafted, strict=True
    )
    for request, choice, drafted in rows:  # hundreds: no calls but where they are needed
        arm = choice.drafter
        if arm is None:
            continue
        family, most_read = _read_by(arm)
        load = sums.get(family)
        if load is None:
            load = sums[family] = [0, 0, 0, 0]
        hint = request.hints.get(arm)
        if hint is not None and hint.catch_up_tokens > 0:
            load[3] += hint.catch_up_tokens
        if drafted > 0:
            if drafted > load[0]:  # two arms of a family share their rounds
                load[0] = drafted
            load[1] += drafted
            context = request.context_tokens
            load[2] += drafted * (context if context < most_read else most_read)
    return {family: DraftLoad(*load) for family, load in sums.items() if load[0]}


def latest_drafting(
    observations: Sequence[Observation],
    known: tuple[Observation, dict[str, DraftLoad]] | None = None,
) -> dict[str, tuple[DraftLoad, float]]:
    """By family, the drafting of the last step that used it, and the seconds that it took: 0 if none are named.

    `known` is a step, and its `draft_loads`.
    """
    latest: dict[str, tuple[DraftLoad, float]] = {}
    for one in reversed(observations):
        if not is_plausible(one.timing.verify_seconds) or _families_of(one) <= latest.keys():
            continue
        loads = known[1] if known is not None and known[0] is one else draft_loads(one)
        for family, load in loads.items():
            latest.setdefault(family, (load, one.timing.draft_seconds.get(family, 0.0)))
    return latest


def _families_of(observation: Observation) -> set[str]:
    """Those of the arms that the plan names."""
    arms = {choice.drafter for choice in observation.plan.choices}  # of many requests, few
    return {_read_by(arm)[0] for arm in arms if arm is not None}


@cache
def _read_by(arm: str) -> tuple[str, int]:
    """The family of an arm, and the most KV tokens that a request reads in one of its rounds."""
    return family_of(arm), sparse_budget(arm) or NO_LIMIT
