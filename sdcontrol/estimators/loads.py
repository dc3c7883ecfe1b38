"""What a step made the machine do: tokens, KV and drafting rounds, read off an observation.

Knows nothing of seconds, except which of them no clock can have meant.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sdcontrol.columns import NO_LIMIT, columns_of
from sdcontrol.compiled import compiled
from sdcontrol.core import Observation, family_of
from sdcontrol.estimators.price import sparse_budget

__all__ = ["DraftLoad", "VerifyLoad", "draft_loads", "is_plausible", "verify_load"]

IntArray = NDArray[np.int64]

_SHORTEST_SECONDS, _LONGEST_SECONDS = 1e-9, 1e5


@dataclass(frozen=True, slots=True)
class VerifyLoad:
    """One forward of the target."""

    num_tokens: int
    kv_tokens: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class DraftLoad:
    """The drafting rounds of one family in one step, summed, and its catch-up."""

    num_rounds: int
    draft_tokens: int  # one per round and request that drafts in it
    kv_tokens: int  # read, by all rounds together
    catch_up_tokens: int


_NOBODY = -1  # arm of a request that did not draft


def is_plausible(seconds: float) -> bool:
    """Whether a phase of a step can have taken so long; False for NaN."""
    return _SHORTEST_SECONDS < seconds < _LONGEST_SECONDS


def verify_load(observation: Observation) -> VerifyLoad:
    """What the verification of this step computed and read."""
    view = observation.view
    return VerifyLoad(
        len(view.requests) + sum(observation.proposed) + view.prefill_tokens,
        int(columns_of(view).context_tokens.sum()),
        len(view.requests),
    )


def draft_loads(observation: Observation) -> dict[str, DraftLoad]:
    """What the drafting of this step computed and read, by family."""
    if not any(observation.drafted):
        return {}
    columns = columns_of(observation.view)
    index, most_read = _layout(columns.arms)
    arms = [index.get(choice.drafter, _NOBODY) for choice in observation.plan.choices]
    table = _summed(
        np.array(arms, np.int64),
        np.array(observation.drafted, np.int64),
        columns.context_tokens,
        columns.catch_up_tokens,
        most_read,
    )
    loads: dict[str, DraftLoad] = {}
    for arm, sums in zip(columns.arms, table.tolist(), strict=True):
        family, load = family_of(arm), DraftLoad(*sums)
        loads[family] = load if family not in loads else _together(loads[family], load)
    return {family: load for family, load in loads.items() if load.num_rounds}


def _together(one: DraftLoad, other: DraftLoad) -> DraftLoad:
    """The load of two arms of a family, which share their rounds."""
    return DraftLoad(
        max(one.num_rounds, other.num_rounds),
        one.draft_tokens + other.draft_tokens,
        one.kv_tokens + other.kv_tokens,
        one.catch_up_tokens + other.catch_up_tokens,
    )


@cache
def _layout(arms: tuple[str, ...]) -> tuple[dict[str | None, int], IntArray]:
    """Index of each arm, and the most KV tokens that a request reads in one of its rounds."""
    most_read = [sparse_budget(arm) or NO_LIMIT for arm in arms]
    return {arm: index for index, arm in enumerate(arms)}, np.array(most_read, np.int64)


@compiled("int64[:, ::1](int64[::1], int64[::1], int64[::1], int64[:, ::1], int64[::1])")
def _summed(
    arms: IntArray,  # [requests], by index; negative without a drafter
    drafted: IntArray,
    context_tokens: IntArray,
    lagging: IntArray,  # [arms, requests], tokens that drafter caches lack
    most_read: IntArray,  # [arms]
) -> IntArray:
    """By arm, `[arms, 4]`: rounds, draft tokens, KV tokens read, tokens caught up."""
    loads = np.zeros((len(most_read), 4), np.int64)
    for r in range(min(len(arms), len(drafted), len(context_tokens))):
        arm, load = arms[r], loads[arms[r]]
        if arm >= 0:
            load[3] += lagging[arm, r]
        if arm >= 0 and drafted[r] > 0:
            load[0] = max(load[0], drafted[r])
            load[1] += drafted[r]
            load[2] += drafted[r] * min(context_tokens[r], most_read[arm])
    return loads
