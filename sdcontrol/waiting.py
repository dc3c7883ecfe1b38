"""What a controller may put off where steps are so short that its own time would weigh.

Two things. Learning: from several steps at once it takes less than several times as long as from one,
since what a forward pushed out of the caches is fetched once, and costs are learnt from the last
alone. And planning: a lone request whose hints say what they said a few steps ago gets the plan that
it had then. Knows nothing of what is learnt or how a plan is made. A fold over observations, like
all that decides: how long the controller took is what they say, never measured again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sdcontrol.core import BatchView, Hint, Observation, Plan, RequestView
from sdcontrol.estimators.hints import bucket_of_match

__all__ = ["Waiting"]

_FIRST_STEPS = 64  # of a controller, each of which is news
_MOST_WAITING = 8  # observations, the last one included
_MOST_YOUNG = 0.5  # of the requests, for observations to wait
_YOUNG_TOKENS = 8  # generated; before that a request's every step is news
_PLAN_STEPS = 8  # that a plan may stand for
_MOST_PLANS = 64
_SHARE = 0.01  # of a step, that the controller may take without anything being put off
_RATE = 0.1

_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan, and when it was made."""

    step: int
    plan: Plan


class Waiting:
    """The controller's share of the time, running, and the plans of a lone request."""

    def __init__(self, most_draft_tokens: int) -> None:
        self._most_draft_tokens = most_draft_tokens
        self._share = 0.0
        self._steps = 0
        self._plans: dict[_Key, _Made] = {}
        self._keyed: tuple[BatchView, _Key | None] | None = None  # see `_key`

    @property
    def _is_due(self) -> bool:
        return self._share > _SHARE and self._steps >= _FIRST_STEPS

    def observe(self, observation: Observation) -> None:
        """Take note of a step."""
        timing = observation.timing
        share = timing.controller_seconds / max(timing.total_seconds, 1e-9)
        if 0.0 <= share <= 1.0:  # False for NaN
            self._share += _RATE * (share - self._share)
        self._steps += 1
        key = self._key(observation.view) if self._is_due else None
        if key is None or observation.faults:
            self._plans.clear()
            return
        made = self._plans.get(key)
        if made is None or made.plan.reason != observation.plan.reason:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = _Made(observation.view.step, observation.plan)

    def may_wait(self, observation: Observation, num_waiting: int) -> bool:
        """Whether `num_waiting` observations, of which this is the last, may wait for the next."""
        if not self._is_due or num_waiting >= _MOST_WAITING or observation.faults:
            return False
        requests = observation.view.requests
        young = [request for request in requests if request.generated_tokens < _YOUNG_TOKENS]
        return len(young) <= _MOST_YOUNG * len(requests)

    def repeated(self, view: BatchView) -> Plan | None:
        """The plan made when hints last said what they say now; None: make one."""
        key = self._key(view) if self._is_due else None
        made = self._plans.get(key) if key is not None else None
        if made is None or view.step - made.step > _PLAN_STEPS:
            return None
        length, request = made.plan.choices[0].num_draft_tokens, view.requests[0]
        is_possible = length < request.remaining_tokens and length <= view.free_kv_tokens
        return made.plan if is_possible else None

    def _key(self, view: BatchView) -> _Key | None:
        """What the plan of a lone request depends on, but for what changes slowly; None for others."""
        if self._keyed is None or self._keyed[0] is not view:
            is_lone = len(view.requests) == 1 and not view.prefill_tokens
            self._keyed = view, self._said(view.requests[0]) if is_lone else None
        return self._keyed[1]

    def _said(self, request: RequestView) -> _Key | None:
        if request.generated_tokens < _YOUNG_TOKENS:
            return None
        hints, arms = request.hints, request.drafters
        return (request.id, arms, *[self._of_hint(hints, arm) for arm in arms if arm in hints])

    def _of_hint(self, hints: Mapping[str, Hint], arm: str) -> _Key:
        """What of a hint a plan depends on, catch-up aside."""
        hint, most = hints[arm], self._most_draft_tokens
        limit = most if hint.max_draft_tokens is None else min(hint.max_draft_tokens, most)
        return limit, bucket_of_match(hint.match_tokens), hint.confidence
