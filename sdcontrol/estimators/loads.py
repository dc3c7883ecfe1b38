"""What a step made the machine do: tokens, KV and drafting rounds, read off an observation.

Knows nothing of seconds, except which of them no clock can have meant.
"""

from dataclasses import dataclass

from sdcontrol.core import Observation, family_of
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
        sum(request.context_tokens for request in view.requests),
        len(view.requests),
    )


def draft_loads(observation: Observation) -> dict[str, DraftLoad]:
    """What the drafting of this step computed and read, by family."""
    requests, choices = observation.view.requests, observation.plan.choices
    rounds: dict[str, list[int]] = {}  # by arm: most rounds, draft tokens, KV tokens
    for request, choice, drafted in zip(requests, choices, observation.drafted, strict=True):
        arm = choice.drafter
        if arm is not None and drafted > 0:
            if arm not in rounds:
                rounds[arm] = [0, 0, 0, sparse_budget(arm) or 0]
            load = rounds[arm]
            budget = load[3]
            context = request.context_tokens
            load[0] = max(load[0], drafted)
            load[1] += drafted
            load[2] += drafted * (min(context, budget) if budget else context)
    return _by_family(rounds, catch_up_tokens(observation.view, observation.plan))


def _by_family(rounds: dict[str, list[int]], lagging: dict[str, int]) -> dict[str, DraftLoad]:
    loads: dict[str, DraftLoad] = {}
    for arm, (most, tokens, kv_tokens, _) in rounds.items():
        family = family_of(arm)
        before = loads.get(family)
        if before is not None:
            most = max(most, before.num_rounds)
            tokens += before.draft_tokens
            kv_tokens += before.kv_tokens
        loads[family] = DraftLoad(most, tokens, kv_tokens, lagging.get(family, 0))
    return loads
