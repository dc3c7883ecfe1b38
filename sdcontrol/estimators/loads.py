"""What a step made the machine do: tokens, KV and drafting rounds, read off an observation.

Knows nothing of seconds, except which of them no clock can have meant.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sdcontrol.columns import ARM, DRAFTED, NO_LIMIT, columns_of, outcomes_of
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


def is_plausible(seconds: float) -> bool:
    """Whether a phase of a step can have taken so long; False for NaN."""
    return _SHORTEST_SECONDS < seconds < _LONGEST_SECONDS


def verify_load(observation: Observation) -> VerifyLoad:
    """What the verification of this step computed and read."""
    view = observation.view
    return VerifyLoad(
        len(view.requests) + sum(observation.proposed) + view.prefill_tokens,
        columns_of(view).kv_tokens,
        len(view.requests),
    )


def draft_loads(observation: Observation) -> dict[str, DraftLoad]:
    """What the drafting of this step computed and read, by family."""
    if not any(observation.drafted):
        return {}
    columns = columns_of(observation.view)
    families, most_read = _layout(columns.arms)
    table = _summed(
        outcomes_of(observation).table, columns.context_tokens, columns.catch_up_tokens, most_read
    )
    loads: dict[str, DraftLoad] = {}
    for family, sums in zip(families, table.tolist(), strict=True):
        if sums[0]:
            load = DraftLoad(*sums)
            loads[family] = load if family not in loads else _together(loads[family], load)
    return loads


def _together(one: DraftLoad, other: DraftLoad) -> DraftLoad:
    """The load of two arms of a family, which share their rounds."""
    return DraftLoad(
        max(one.num_rounds, other.num_rounds),
        one.draft_tokens + other.draft_tokens,
        one.kv_tokens + other.kv_tokens,
        one.catch_up_tokens + other.catch_up_tokens,
    )


@cache
def _layout(arms: tuple[str, ...]) -> tuple[tuple[str, ...], IntArray]:
    """Family of each arm, and the most KV tokens that a request reads in one of its rounds."""
    most_read = [sparse_budget(arm) or NO_LIMIT for arm in arms]
    return tuple(map(family_of, arms)), np.array(most_read, np.int64)


@compiled("int64[:, ::1](int64[:, ::1], int64[::1], int64[:, ::1], int64[::1])")
def _summed(
    outcomes: IntArray,  # `Outcomes.table`
    context_tokens: IntArray,
    lagging: IntArray,  # [arms, requests], tokens that drafter caches lack
    most_read: IntArray,  # [arms]
) -> IntArray:
    """By arm, `[arms, 4]`: rounds, draft tokens, KV tokens read, tokens caught up."""
    loads = np.zeros((len(most_read), 4), np.int64)
    for r in range(len(context_tokens)):
        arm, drafted = outcomes[ARM, r], outcomes[DRAFTED, r]
        if 0 <= arm < len(loads):
            load = loads[arm]
            load[3] += lagging[arm, r]
            if drafted > 0:
                load[0] = max(load[0], drafted)
                load[1] += drafted
                load[2] += drafted * min(context_tokens[r], most_read[arm])
    return loads
