"""What a step made the machine do: tokens, KV and drafting rounds, read off an observation.

Knows nothing of seconds, except which of them no clock can have meant.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from sdcontrol.core import FloatArray, Observation, family_of
from sdcontrol.estimators.price import catch_up_tokens, sparse_budget

__all__ = ["DraftLoad", "VerifyLoad", "draft_loads", "is_plausible", "verify_load"]

_SHORTEST_SECONDS, _LONGEST_SECONDS = 1e-9, 1e5


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


def is_plausible(seconds: float) -> bool:
    """Whether a phase of a step can have taken so long; False for NaN."""
    return _SHORTEST_SECONDS < seconds < _LONGEST_SECONDS


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
    view, plan = observation.view, observation.plan
    rows: dict[str, list[int]] = defaultdict(list)
    for row, (choice, drafted) in enumerate(zip(plan.choices, observation.drafted, strict=True)):
        if choice.drafter is not None and drafted > 0:
            rows[choice.drafter].append(row)
    if not rows:
        return {}
    arms: dict[str, list[tuple[FloatArray, FloatArray]]] = defaultdict(list)
    for arm, members in rows.items():
        depths = np.array([observation.drafted[row] for row in members], dtype=float)
        kv_tokens = np.array([view.requests[row].context_tokens for row in members], dtype=float)
        budget = sparse_budget(arm)
        read = kv_tokens if budget is None else np.minimum(kv_tokens, budget)
        arms[family_of(arm)].append((depths, read))
    lagging = catch_up_tokens(view, plan)
    return {family: _rounds(parts, lagging.get(family, 0)) for family, parts in arms.items()}


def _rounds(parts: list[tuple[FloatArray, FloatArray]], catch_up: int) -> DraftLoad:
    depths = np.concatenate([part[0] for part in parts])
    kv_tokens = np.concatenate([part[1] for part in parts])
    still_drafting = depths >= np.arange(1, int(depths.max()) + 1)[:, None]
    return DraftLoad(still_drafting.sum(axis=1).astype(float), still_drafting @ kv_tokens, catch_up)
