"""What a step made the machine do: tokens, KV and drafting rounds, read off an observation.

Knows nothing of seconds.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from sdcontrol.core import FloatArray, Observation, family_of
from sdcontrol.estimators.price import catch_up_tokens, round_kv_tokens

__all__ = ["DraftLoad", "VerifyLoad", "draft_loads", "verify_load"]


@dataclass(frozen=True, slots=True)
class VerifyLoad:
    """One forward of the target."""

    num_tokens: int
    kv_tokens: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class DraftLoad:
    """The drafting rounds of one family in one step, all `[rounds]`, and its catch-up."""

    num_requests: FloatArray
    kv_tokens: FloatArray
    catch_up_tokens: int


def verify_load(observation: Observation) -> VerifyLoad:
    """What the verification of this step computed and read."""
    view = observation.view
    return VerifyLoad(
        len(view.requests) + sum(observation.proposed) + view.prefill_tokens,
        sum(request.context_tokens for request in view.requests),
        len(view.requests),
    )


def draft_loads(observation: Observation) -> dict[str, DraftLoad]:
    """What the drafting of this step computed and read, by family."""
    rows: dict[str, list[tuple[int, int]]] = defaultdict(list)
    view, plan = observation.view, observation.plan
    for request, choice, drafted in zip(
        view.requests, plan.choices, observation.drafted, strict=True
    ):
        if choice.drafter is not None and drafted > 0:
            kv_tokens = round_kv_tokens(request, choice.drafter)
            rows[family_of(choice.drafter)].append((drafted, kv_tokens))
    lagging = catch_up_tokens(view, plan) if rows else {}
    return {family: _rounds(pairs, lagging.get(family, 0)) for family, pairs in rows.items()}


def _rounds(pairs: list[tuple[int, int]], catch_up: int) -> DraftLoad:
    depths, kv_tokens = np.array(pairs, dtype=float).T
    still_drafting = depths[None, :] >= np.arange(1, int(depths.max()) + 1)[:, None]
    return DraftLoad(still_drafting.sum(axis=1).astype(float), still_drafting @ kv_tokens, catch_up)
